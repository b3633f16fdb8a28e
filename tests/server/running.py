"""A real server on loopback, in a thread of this process with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from perfcast_server.app import Server
from perfcast_server.settings import Settings


class Running:
    """A server and the loop that it runs in."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.loop = loop
        self.address = server.address

    def do(self, coroutine: Any) -> Any:
        """Run ``coroutine`` in the server's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def metric(self, name: str, **labels: str) -> float:
        return self.server.metrics.registry.get_sample_value(name, labels) or 0.0


@contextmanager
def running(**settings: Any) -> Iterator[Running]:
    """A started server with ``settings`` over port 0 and no metrics port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def make() -> Server:
        return Server(Settings(**{"port": 0, "metrics_port": -1, "drain_grace_s": 5.0, **settings}))

    def do(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    server = do(make())
    try:
        do(server.start())
        yield Running(server, loop)
    finally:
        do(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
