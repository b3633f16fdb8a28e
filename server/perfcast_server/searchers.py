"""The processes that search, as the server sees them: forked when needed, bounded, killed when unwanted."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import asdict

from perfcast.v1 import common_pb2

from perfcast_server.errors import ServiceError
from perfcast_server.metrics import Metrics
from perfcast_server.search_process import ERROR, HEADER, PROGRESS
from perfcast_server.settings import Settings, child_environment

log = logging.getLogger("perfcast.search")

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # more would not survive a fork


class Searchers:
    """At most ``search_workers`` processes at work and ``max_searches`` searches asked for."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._nursery = Nursery(settings, "")
        self._asked = 0
        self._working: set[Child] = set()
        self._idle: list[Child] = []  # what worked last is used first
        self._closing: set[asyncio.Task[None]] = set()
        number = settings.search_workers or max(1, (os.cpu_count() or 1) // (2 * max(1, settings.workers)))
        self._room = asyncio.Semaphore(number)
        metrics.searches.set_function(lambda: len(self._working))
        self._seconds = metrics.search_seconds

    @property
    def generation(self) -> object:
        """What searches have in common that read the same data."""
        return self._nursery

    async def ask(self, kind: bytes, request: bytes) -> AsyncGenerator[bytes]:
        """Progress, then the answer. Left early, the search ends at once."""
        limit = self._settings.max_searches
        if self._asked >= limit:
            raise ServiceError("LIMIT", f"{limit} searches are in work or waiting already", limit="max_searches")
        self._asked += 1
        try:
            async with self._room:
                nursery = self._nursery
                child = self._idle_child() or await nursery.child()
                self._working.add(child)
                try:
                    with self._seconds.time():
                        async with aclosing(child.answers(kind, request)) as answers:
                            async for data in _within(answers, self._settings.max_search_s):
                                yield data
                finally:
                    self._working.discard(child)
                    if child.free and nursery is self._nursery:
                        self._idle.append(child)
                    else:
                        child.kill()
        finally:
            self._asked -= 1

    def _idle_child(self) -> Child | None:
        while self._idle:
            child = self._idle.pop()
            if child.alive:
                return child
            child.kill()
        return None

    def renew(self, version: str) -> None:
        """Search in data of that version from now on; what is in work goes on with the old."""
        self._let_go()
        self._nursery = Nursery(self._settings, version)

    def _let_go(self) -> None:
        while self._idle:
            self._idle.pop().kill()
        task = asyncio.get_running_loop().create_task(self._nursery.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for child in self._working:
            child.kill()
        self._let_go()
        await asyncio.gather(*self._closing)


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


class Nursery:
    """The process that searchers are forked from, warm from their first moment; started with the first one."""

    def __init__(self, settings: Settings, version: str) -> None:
        self._settings = settings
        self._version = version
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._control: socket.socket | None = None

    async def child(self) -> Child:
        """A new process. Raises ServiceError if there is none to be had."""
        own, theirs = socket.socketpair()
        with theirs:
            child = Child(*await asyncio.open_unix_connection(sock=own))
            try:
                await self._send(theirs)
            except OSError:  # it was killed
                self._let_go()
                await self._send(theirs)
        return await child.born()

    async def _send(self, end: socket.socket) -> None:
        async with self._starting:
            if self._control is None:
                control, theirs = socket.socketpair()
                with theirs:
                    self._process = await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-m",
                        "perfcast_server.search_process",
                        json.dumps(asdict(self._settings)),
                        self._version,
                        stdin=theirs.fileno(),
                        env=child_environment() | ONE_THREAD,
                    )
                control.setblocking(False)
                self._control = control
        socket.send_fds(self._control, [b"F"], [end.fileno()])

    async def close(self) -> None:
        """Fork no more, and wait until what was forked has ended."""
        self._let_go()
        if self._process is not None:
            await self._process.wait()

    def _let_go(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


class Child:
    """One process that searches, for one request after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.pid: int | None = None
        self.free = False

    async def born(self) -> Child:
        """Itself once it is there."""
        try:
            _, data = await self._frame()
        except BaseException:
            self.kill()
            raise
        self.pid, self.free = int(data), True
        return self

    @property
    def alive(self) -> bool:
        return not self._reader.at_eof()

    async def answers(self, kind: bytes, request: bytes) -> AsyncGenerator[bytes]:
        """What it tells of a request, up to the answer. Raises ServiceError if it refuses, or ends before."""
        self.free = False
        self._writer.write(HEADER.pack(kind, len(request)) + request)
        told = PROGRESS
        while told == PROGRESS:
            told, data = await self._frame()
            self.free = told != PROGRESS
            if told == ERROR:
                detail = common_pb2.ErrorDetail.FromString(data)
                self.free = detail.reason != "DATA_REFUSED"  # another child may see others
                raise ServiceError(detail.reason, detail.message, **detail.metadata)
            yield data

    async def _frame(self) -> tuple[bytes, bytes]:
        try:
            kind, size = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            return kind, await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            self.pid = None
            log.error("search process ended")
            raise ServiceError(
                "INTERNAL", "the process that searched has ended; the next search starts another"
            ) from None

    def kill(self) -> None:
        """End it wherever it is: it has nothing to lose. Its number may be another's once it has ended by itself."""
        pid, self.pid = self.pid, None
        if pid is not None and self.alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._writer.close()
