"""One of several processes that serve behind one port: ``python -m perfcast_server.worker FD``, for a supervisor."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from typing import Any

from perfcast_server import eventloop, logs
from perfcast_server.app import Server, spare_collections
from perfcast_server.control import Answers, Gone, Peer, Refused
from perfcast_server.data import CHECK_S, Data, DataRefused, Reloaded
from perfcast_server.settings import NotReady, Settings, SettingsError
from perfcast_server.tidy import settle
from perfcast_server.totals import Snapshot, snapshot


class Worker:
    """A server that its supervisor starts, asks and stops; it drains when the supervisor has ended."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._peer: Peer | None = None
        self._stop = asyncio.Event()

    async def work(self, end: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        for number in (signal.SIGINT, signal.SIGHUP):  # at a terminal the whole group gets them
            loop.add_signal_handler(number, lambda: None)
        answers: Answers = {
            "drain": self._drain,
            "metrics": self._metrics,
            "prepare": self._prepare,
            "commit": self._commit,
            "discard": self._discard,
        }
        self._peer = peer = await Peer.over(end, answers)
        settings = Settings(**_values(await peer.ask("settings")))
        logs.configure(settings.log_level, settings.log_format)
        settle()
        self._server = Server(settings, shared_port=True, reload=self._reload)
        try:
            await self._server.start()
            spare_collections()
            await peer.ask("ready")
            stopped = loop.create_task(self._stop.wait())
            await asyncio.wait({stopped, peer.gone}, return_when=asyncio.FIRST_COMPLETED)
        except (SettingsError, NotReady) as error:
            await peer.ask("failed", why=str(error))
            return 1
        finally:
            await self._server.stop()
        return 0

    async def _drain(self) -> None:
        self._stop.set()

    async def _reload(self) -> Reloaded:
        """Of all workers: the supervisor sees to it."""
        assert self._peer is not None
        try:
            told = await self._peer.ask("reload", timeout_s=2 * CHECK_S)
        except (Gone, Refused, TimeoutError) as error:
            raise DataRefused(str(error)) from None
        return Reloaded(Data(**told["data"]), told["changed"], told["workers"])

    async def _prepare(self, version: str) -> None:
        await self._serving().prepare(version)

    async def _commit(self) -> bool:
        return await self._serving().commit()

    async def _discard(self) -> None:
        await self._serving().discard()

    def _serving(self) -> Server:
        if self._server is None:
            raise DataRefused("this worker is starting")
        return self._server

    async def _metrics(self) -> Snapshot:
        return snapshot(self._server.metrics.registry) if self._server is not None else []


def _values(told: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}


if __name__ == "__main__":
    sys.exit(eventloop.run(Worker().work(socket.socket(fileno=int(sys.argv[1])))))
