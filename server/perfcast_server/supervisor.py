"""Several worker processes behind one port: started, watched, restarted, asked together, drained together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, start_http_server

from perfcast_server import logs
from perfcast_server.control import Answers, Gone, Peer, Refused
from perfcast_server.data import CHECK_S, Checker, DataRefused, OnSignal, Reloaded
from perfcast_server.settings import NotReady, Settings, SettingsError, address, child_environment, require_guarded
from perfcast_server.totals import Pulled, Totals

log = logging.getLogger("perfcast.supervisor")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 10.0  # before a worker is started again; doubled while it keeps ending
STEADY_S = 30.0  # up for as long, and the pause begins anew
PULL_S = 2.0  # what a worker counted for longer is not lost with it
HUNG_S = 30.0  # a worker that answers nothing for as long is killed


class Slot:
    """The place of one worker, filled again whenever it ends."""

    def __init__(
        self,
        number: int,
        settings: Settings,
        ended: Callable[[int], None],
        reload: Callable[[], Awaitable[Reloaded]],
    ) -> None:
        self.number = number
        self.restarts = 0
        self.peer: Peer | None = None
        self.up = False
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.process: asyncio.subprocess.Process | None = None
        self._settings = settings
        self._ended = ended
        self._reload_all = reload
        self._heard = time.monotonic()
        self._closing = False

    async def keep(self) -> None:
        """Keep a worker running until ``drain``."""
        pause = FIRST_PAUSE_S
        while not self._closing:
            began = time.monotonic()
            code = await self._run()
            self._ended(self.number)
            if not self.first.done():
                self.first.set_exception(NotReady(f"worker {self.number} ended with {code} before it was ready"))
            if self._closing or self.first.exception() is not None:
                return
            pause = FIRST_PAUSE_S if time.monotonic() - began > STEADY_S else min(2 * pause, LONGEST_PAUSE_S)
            log.warning("worker ended", extra={"worker": self.number, "code": code, "restart_in_s": pause})
            self.restarts += 1
            await asyncio.sleep(pause)

    async def ask(self, what: str, timeout_s: float = 30.0, **arguments: Any) -> Any:
        """Raises Gone where no worker is up, Refused, or TimeoutError."""
        if self.peer is None:
            raise Gone(f"worker {self.number} is not up")
        told = await self.peer.ask(what, timeout_s, **arguments)
        self._heard = time.monotonic()
        return told

    async def drain(self) -> None:
        """Let the worker finish what it has in work; it is not started again."""
        self._closing = True
        with contextlib.suppress(Gone, Refused, TimeoutError):
            await self.ask("drain")

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    def kill_if_hung(self) -> None:
        if self.up and time.monotonic() - self._heard > HUNG_S:
            log.error("worker hangs", extra={"worker": self.number})
            self.kill()

    async def _run(self) -> int:
        ours, theirs = socket.socketpair()
        fd = theirs.fileno()
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "perfcast_server.worker", str(fd)),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(fd,),
            env=child_environment(),
        )
        theirs.close()
        answers: Answers = {
            "settings": self._told_settings,
            "ready": self._is_ready,
            "failed": self._has_failed,
            "reload": self._reload,
        }
        self.peer = await Peer.over(ours, answers)
        try:
            return await self.process.wait()
        finally:
            self.peer.close()
            self.peer, self.up = None, False

    async def _told_settings(self) -> dict[str, Any]:
        return asdict(self._settings)

    async def _reload(self) -> dict[str, Any]:
        return asdict(await self._reload_all())

    async def _is_ready(self) -> None:
        self.up, self._heard = True, time.monotonic()
        log.info("worker is ready", extra={"worker": self.number, "worker_pid": self.process and self.process.pid})
        if not self.first.done():
            self.first.set_result(None)

    async def _has_failed(self, why: str) -> None:
        log.error("worker cannot start", extra={"worker": self.number, "why": why})
        if not self.first.done():
            self.first.set_exception(NotReady(why))


class Supervisor:
    """``await start()``, then ``await stop()``, in one event loop. It serves no call itself."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.address = ""
        self.metrics_port: int | None = None
        self.slots: list[Slot] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._totals = Totals()
        self._reloading = asyncio.Lock()
        self._checked = Checker(settings.data)
        self._port: socket.socket | None = None
        self._http: Any = None
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Hold the port, start every worker, wait until all are ready. Raises SettingsError or NotReady."""
        require_guarded(self.settings)
        self._port = hold(self.settings.host, self.settings.port)
        port = self._port.getsockname()[1]
        self.address = address(self.settings.host, port)
        if self.settings.metrics_port >= 0:
            self._serve_metrics()
        own = replace(self.settings, port=port, metrics_port=-1, workers=1)
        self.slots = [Slot(number, own, self._totals.end, self.reload) for number in range(self.settings.workers)]
        self._tasks = [asyncio.create_task(slot.keep()) for slot in self.slots]
        await asyncio.gather(*(slot.first for slot in self.slots))
        self._tasks.append(asyncio.create_task(self._watch()))
        log.info(
            "ready", extra={"address": self.address, "metrics_port": self.metrics_port, "workers": len(self.slots)}
        )

    async def reload(self) -> Reloaded:
        """Let all workers take up the data that are on disk now, or none of them. Raises DataRefused."""
        async with self._reloading:
            data = await self._checked()
            up = [slot for slot in self.slots if slot.up]
            told = await _asked(up, "prepare", CHECK_S, version=data.version)
            up = [slot for slot, failure in told if not isinstance(failure, Gone)]  # the others start with these data
            for _, failure in told:
                if isinstance(failure, BaseException) and not isinstance(failure, Gone):
                    await _asked(up, "discard")
                    raise DataRefused(str(failure)) from None
            told = await _asked(up, "commit")
            for slot, changed in told:
                if isinstance(changed, BaseException):
                    log.error("worker does not take the data", extra={"worker": slot.number, "why": str(changed)})
                    slot.kill()
            return Reloaded(data, any(changed is True for _, changed in told), len(up))

    async def stop(self) -> None:
        """Drain all workers at once; those that take too long are killed."""
        longest = self.settings.drain_delay_s + self.settings.drain_grace_s + 5
        await asyncio.gather(*(slot.drain() for slot in self.slots))
        keeping, watching = self._tasks[: len(self.slots)], self._tasks[len(self.slots) :]
        if keeping:
            await asyncio.wait(keeping, timeout=longest)
        for slot in self.slots:
            slot.kill()
        await asyncio.gather(*keeping, return_exceptions=True)
        for task in watching:
            task.cancel()
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
        if self._port is not None:
            self._port.close()
        log.info("stopped")

    async def _pull(self) -> None:
        """Hear from every worker what it has counted."""

        async def one(slot: Slot) -> None:
            with contextlib.suppress(Gone, Refused, TimeoutError):
                self._totals.update(slot.number, await slot.ask("metrics", 5.0))

        await asyncio.gather(*(one(slot) for slot in self.slots))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PULL_S)
            await self._pull()
            for slot in self.slots:
                slot.kill_if_hung()

    async def _families(self) -> Sequence[Metric]:
        await self._pull()
        return self._totals.families()

    def _serve_metrics(self) -> None:
        host, port = self.settings.metrics_host, self.settings.metrics_port
        registry = CollectorRegistry()
        Gauge("server_workers", "Worker processes that are ready", registry=registry).set_function(
            lambda: sum(slot.up for slot in self.slots)
        )
        registry.register(Pulled(self._restarts))
        registry.register(Pulled(lambda: asyncio.run_coroutine_threadsafe(self._families(), self._loop).result(10)))
        try:
            self._http, _ = start_http_server(port, host, registry)
        except OSError as error:
            raise SettingsError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from None
        self.metrics_port = self._http.server_port

    def _restarts(self) -> list[Metric]:
        counter = Counter("server_worker_restarts", "Workers started again after they ended", registry=None)
        counter.inc(sum(slot.restarts for slot in self.slots))
        return list(counter.collect())


async def _asked(slots: Sequence[Slot], what: str, timeout_s: float = 30.0, **arguments: Any) -> list[tuple[Slot, Any]]:
    """What each says, or what it fails with."""
    told = await asyncio.gather(*(slot.ask(what, timeout_s, **arguments) for slot in slots), return_exceptions=True)
    return list(zip(slots, told, strict=True))


def hold(host: str, port: int) -> socket.socket:
    """A socket that keeps the port for processes that share it: nobody else's, and never listening itself."""
    try:
        family, kind, number, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        held = socket.socket(family, kind, number)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(place)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # only now: whoever has the port already keeps it
    except OSError as error:
        raise SettingsError(f"cannot listen on {address(host, port)}: {error.strerror}") from None
    return held


async def run(settings: Settings, on_ready: Callable[[Supervisor], None] = lambda supervisor: None) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    logs.configure(settings.log_level, settings.log_format)
    supervisor = Supervisor(settings)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, OnSignal(supervisor.reload))
    starting = asyncio.ensure_future(supervisor.start())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            on_ready(supervisor)
            await stopping
        else:
            starting.cancel()
    finally:
        await supervisor.stop()
