"""A server in another process, and every way to reach it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from inspect import isawaitable
from pathlib import Path
from typing import Any

import pytest
from perfcast_client import AsyncClient, Client

from tests.server.processes import serving
from tests.server.running import PATIENCE_S


class Way:
    """A client of one kind over one transport, as in ``name``; ``do`` makes both kinds look alike."""

    def __init__(self, name: str, addresses: dict[str, str]) -> None:
        self.name = name
        transport, kind = name.split("-")
        target = addresses[transport]
        self.is_async = kind == "asyncio"
        self._runner = asyncio.Runner()
        self.client: Any = (
            self._runner.run(self._made(target)) if self.is_async else Client(target, deadline_s=PATIENCE_S)
        )

    async def _made(self, target: str) -> AsyncClient:
        return AsyncClient(target, deadline_s=PATIENCE_S)

    def do(self, asked: Any) -> Any:
        async def awaited() -> Any:
            return await asked

        return self._runner.run(awaited()) if isawaitable(asked) else asked

    def close(self) -> None:
        self.do(self.client.close())
        self._runner.close()


@pytest.fixture(scope="session")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of a server in another process that keeps calibration states."""
    folder: Path = tmp_path_factory.mktemp("remote")
    socket = folder / "s"
    with serving("--unix-socket", str(socket), "--state-dir", str(folder / "states")) as address:
        yield {"tcp": address, "unix": f"unix:{socket}"}


@pytest.fixture(scope="session", params=["tcp-blocking", "tcp-asyncio", "unix-blocking", "unix-asyncio"])
def way(request: pytest.FixtureRequest, remote: dict[str, str]) -> Iterator[Way]:
    way = Way(request.param, remote)
    yield way
    way.close()
