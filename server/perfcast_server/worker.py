"""One of several processes that serve behind one port: ``python -m perfcast_server.worker FD``, for a supervisor."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from typing import Any

from perfcast_server import logs
from perfcast_server.app import Server
from perfcast_server.control import Peer
from perfcast_server.settings import NotReady, Settings, SettingsError
from perfcast_server.totals import Snapshot, snapshot


class Worker:
    """A server that its supervisor starts, asks and stops; it drains when the supervisor has ended."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._stop = asyncio.Event()

    async def work(self, end: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # at a terminal the whole group gets it
        peer = await Peer.over(end, {"drain": self._drain, "metrics": self._metrics})
        settings = Settings(**_values(await peer.ask("settings")))
        logs.configure(settings.log_level, settings.log_format)
        self._server = Server(settings, shared_port=True)
        try:
            await self._server.start()
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

    async def _metrics(self) -> Snapshot:
        return snapshot(self._server.metrics.registry) if self._server is not None else []


def _values(told: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}


if __name__ == "__main__":
    sys.exit(asyncio.run(Worker().work(socket.socket(fileno=int(sys.argv[1])))))
