"""How long a call goes on trying when the server that it knows is away: being replaced, restarted or reloaded."""

from __future__ import annotations

import time
from collections.abc import Callable

from perfcast_client.errors import DeadlineExceeded, PerfcastError, Unavailable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
PASSING = ("", "LOADING", "DRAINING")  # reasons why a server is unavailable that pass by themselves; "" is no server


class Patience:
    """The time that one call has, over all its tries. ``now`` never jumps."""

    def __init__(self, deadline_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._until = now() + deadline_s
        self._pause_s = FIRST_PAUSE_S
        self._away: PerfcastError | None = None

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - self._now())

    def pause_s(self, failed: PerfcastError) -> float:
        """How long to wait before the next try. Raises ``failed`` where none would help or there is no time for it, and
        what kept the server away where time ran out over that."""
        pause_s = self._pause_s
        if isinstance(failed, DeadlineExceeded) and self._away is not None:
            raise self._away
        if not isinstance(failed, Unavailable) or failed.reason not in PASSING or pause_s >= self.left_s:
            raise failed
        self._away, self._pause_s = failed, min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s
