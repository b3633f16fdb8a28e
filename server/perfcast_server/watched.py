"""Files that may change while the server runs: read again when they do, kept as they were when they are bad."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from perfcast_server.settings import SettingsError

log = logging.getLogger("perfcast.files")


class Watched:
    """``value`` is what ``read`` made of the paths; ``read`` raises SettingsError, OSError or ValueError.

    Raises SettingsError when they cannot be read at first.
    """

    def __init__(self, paths: Sequence[str], what: str, read: Callable[..., Any]) -> None:
        self._paths = tuple(paths)
        self.changes = 0
        self._what = what
        self._read = read
        self._seen = self._stamp()
        try:
            self.value = read(*paths)
        except OSError as error:
            raise SettingsError(f"cannot read {what}: {error.filename or ', '.join(paths)}: {error.strerror}") from None

    def refresh(self) -> bool:
        """Whether there is a new value."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self.value = self._read(*self._paths)
        except (SettingsError, OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            log.error("changed files are not taken", extra={"files": self._what, "why": why})
            return False
        self.changes += 1
        log.info("changed files are taken", extra={"files": self._what})
        return True

    def _stamp(self) -> tuple[object, ...]:
        def one(path: str) -> object:
            try:
                status = os.stat(path)
            except OSError:
                return None
            return status.st_mtime_ns, status.st_ino, status.st_size

        return tuple(map(one, self._paths))
