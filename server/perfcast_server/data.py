"""The data behind the answers, checked in a process of its own: ``python -m perfcast_server.data ROOT...``.

Reading every table takes seconds of work and hundreds of megabytes that no server should spend itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from perfcast_server.settings import child_environment

log = logging.getLogger("perfcast.data")

MAX_TOLD = 3
CHECK_S = 300.0
Stamp = tuple[str, int, int, int]  # of a file: path, bytes, when changed, which


class DataRefused(Exception):
    """New data are damaged, or changed while they were read; the old ones stay in use."""


@dataclass(frozen=True, slots=True)
class Data:
    """What is in use. version: content hash of all of it."""

    version: str
    packs: int


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload has done, in so many processes."""

    data: Data
    changed: bool
    workers: int = 1


class Checker:
    """Reads every byte of the data of ``roots`` as they are on disk, but for packs that were good when it last did."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = roots
        self._good: list[Stamp] = []

    async def __call__(self) -> Data:
        """Raises DataRefused."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "perfcast_server.data", *self._roots),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(),
        )
        try:
            async with asyncio.timeout(CHECK_S):
                told, _ = await child.communicate(json.dumps(self._good).encode())
        except TimeoutError:
            raise DataRefused(f"the data could not be checked within {CHECK_S:g} s") from None
        finally:
            if child.returncode is None:
                child.kill()
        if child.returncode != 0:
            raise DataRefused("the data could not be checked; the process that did has failed")
        found = json.loads(told)
        if problems := found.pop("problems"):
            more = f" and {len(problems) - MAX_TOLD} more" if len(problems) > MAX_TOLD else ""
            raise DataRefused("; ".join(problems[:MAX_TOLD]) + more)
        self._good = found.pop("good")
        return Data(**found)


class OnSignal:
    """Reloads when it is called, one after another; what goes wrong is logged, for nobody waits for it."""

    def __init__(self, reload: Callable[[], Awaitable[Reloaded]]) -> None:
        self._reload = reload
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self) -> None:
        task = asyncio.get_running_loop().create_task(self._logged())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _logged(self) -> None:
        try:
            done = await self._reload()
        except DataRefused as error:
            log.error("data refused", extra={"why": str(error)})
        else:
            log.info("data reloaded", extra={"version": done.data.version, "changed": done.changed})


def main(roots: Sequence[str]) -> None:
    from perfcast_engine.errors import EngineError
    from perfcast_engine.predictor import Predictor

    os.nice(10)
    try:
        catalog = Predictor(roots).catalog
    except EngineError as error:
        print(json.dumps({"problems": [error.message]}))
        return
    known = {tuple(stamp) for stamp in json.load(sys.stdin)}
    stamps = {info.path: _stamp(info.path) for info in catalog.ls()}
    problems = catalog.verify({path for path, stamp in stamps.items() if stamp in known})
    data = Data(catalog.digest(), len(stamps))
    told = {"problems": [problem.message for problem in problems], "good": list(stamps.values())}
    print(json.dumps({**asdict(data), **told}))


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns, status.st_ino


if __name__ == "__main__":
    main(sys.argv[1:])
