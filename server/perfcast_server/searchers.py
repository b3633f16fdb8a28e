"""The processes that search, as the server sees them: started when needed, bounded, stopped when unwanted."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict

from perfcast.v1 import common_pb2

from perfcast_server.errors import ServiceError
from perfcast_server.metrics import Metrics
from perfcast_server.search_process import CANCEL, ERROR, HEADER, PROGRESS
from perfcast_server.settings import Settings, child_environment

log = logging.getLogger("perfcast.search")

PATIENCE_S = 2.0  # for a cancelled search to stop by itself


class Searchers:
    """At most ``search_workers`` processes at work and ``max_searches`` searches asked for."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self.generation = 0
        self._asked = 0
        self._working = 0
        self._stopping: set[asyncio.Task[None]] = set()
        number = settings.search_workers or max(1, (os.cpu_count() or 1) // (2 * max(1, settings.workers)))
        self._processes = [_Process(settings) for _ in range(number)]
        self._free: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()
        for process in self._processes:
            self._free.put_nowait(process)
        metrics.searches.set_function(lambda: self._working)
        self._seconds = metrics.search_seconds

    async def ask(self, kind: bytes, request: bytes) -> AsyncGenerator[bytes]:
        """Progress, then the answer. Left early, the search is cancelled."""
        limit = self._settings.max_searches
        if self._asked >= limit:
            raise ServiceError("LIMIT", f"{limit} searches are in work or waiting already", limit="max_searches")
        self._asked += 1
        try:
            process = await self._free.get()
            await process.of(self.generation)
            with self._seconds.time():
                async with aclosing(self._answers(process, kind, request)) as answers:
                    async for data in _within(answers, self._settings.max_search_s):
                        yield data
        finally:
            self._asked -= 1

    async def _answers(self, process: _Process, kind: bytes, request: bytes) -> AsyncGenerator[bytes]:
        self._working += 1
        ended = False
        try:
            await process.send(kind, request)
            async for told, data in process.answers():
                ended = told != PROGRESS
                if told == ERROR:
                    raise _error(data)
                yield data
        finally:
            if ended:
                self._give_back(process)
            else:
                task = asyncio.get_running_loop().create_task(self._stop(process))
                self._stopping.add(task)
                task.add_done_callback(self._stopping.discard)

    def renew(self) -> None:
        """Search in data read anew from now on; what is in work goes on with the old."""
        self.generation += 1

    async def _stop(self, process: _Process) -> None:
        await process.cancel()
        self._give_back(process)

    def _give_back(self, process: _Process) -> None:
        self._working -= 1
        self._free.put_nowait(process)

    async def close(self) -> None:
        for process in self._processes:
            await process.close()


async def _within(answers: AsyncGenerator[bytes], limit_s: float) -> AsyncGenerator[bytes]:
    """``answers``, all of them within so many seconds; what whoever takes them does in between counts too."""
    until = asyncio.get_running_loop().time() + limit_s
    while True:
        try:
            async with asyncio.timeout_at(until):
                data = await anext(answers)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise ServiceError(
                "DEADLINE", f"the search took more than {limit_s:g} s; search a smaller space", limit="max_search_s"
            ) from None
        yield data


class _Process:
    """One child, started with the first request and again after it has ended."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._child: asyncio.subprocess.Process | None = None
        self._header: tuple[bytes, int] | None = None
        self._generation = 0

    async def of(self, generation: int) -> None:
        """Let the next request find data that are not older."""
        if self._generation != generation:
            self._generation = generation
            await self.close()

    async def send(self, kind: bytes, data: bytes = b"") -> None:
        if self._child is None or self._child.returncode is not None:
            self._child, self._header = await self._started(), None
        assert self._child.stdin is not None
        self._child.stdin.write(HEADER.pack(kind, len(data)) + data)

    async def answers(self) -> AsyncGenerator[tuple[bytes, bytes]]:
        """Frames up to the last one for a request. Raises ServiceError if the child ends before."""
        try:
            kind = PROGRESS
            while kind == PROGRESS:
                kind, data = await self._frame()
                yield kind, data
        except asyncio.IncompleteReadError:
            assert self._child is not None
            status, self._child = await self._child.wait(), None
            log.error("search process ended", extra={"status": status})
            raise ServiceError(
                "INTERNAL", "the process that searched has ended; the next search starts another"
            ) from None

    async def _frame(self) -> tuple[bytes, bytes]:
        """The next frame. What was read of it before a cancellation is not lost."""
        assert self._child is not None and self._child.stdout is not None
        if self._header is None:
            self._header = HEADER.unpack(await self._child.stdout.readexactly(HEADER.size))
        kind, size = self._header
        data = await self._child.stdout.readexactly(size)
        self._header = None
        return kind, data

    async def cancel(self) -> None:
        """Stop the request in work, or else the child."""
        if self._child is None:
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.send(CANCEL)
                async for _ in self.answers():
                    pass
        except (TimeoutError, ServiceError, OSError):
            await self.close()

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            child.kill()
            await child.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "perfcast_server.search_process",
            json.dumps(asdict(self._settings)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(),
        )


def _error(data: bytes) -> ServiceError:
    told = common_pb2.ErrorDetail.FromString(data)
    return ServiceError(told.reason, told.message, **told.metadata)
