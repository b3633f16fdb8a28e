"""Questions answered in this process: the requests and answers of a server, without the network."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from perfcast_client.calls import Call
from perfcast_client.client import Client, Questions
from perfcast_client.errors import from_detail
from perfcast_engine.errors import EngineError
from perfcast_engine.predictor import Predictor
from perfcast_server.app import services
from perfcast_server.engines import Engines
from perfcast_server.errors import ServiceError, refusal
from perfcast_server.metrics import Metrics
from perfcast_server.rpc import Unary
from perfcast_server.settings import Settings

T = TypeVar("T")


class Local(Questions):
    """Answers from ``roots`` and the embedded data."""

    def __init__(self, roots: Sequence[str] = ()) -> None:
        settings, metrics = Settings(), Metrics()
        engines = Engines(settings, metrics, ThreadPoolExecutor(1))
        engines.adopt(Predictor(roots=roots))
        self._methods = {
            f"/{service}/{method.name}": method
            for service, methods in services(engines, settings, metrics).items()
            for method in methods
            if isinstance(method, Unary)
        }

    def _run(self, call: Call[T], deadline_s: float | None) -> T:
        async def answer() -> T:
            return call.read(await self._methods[call.path].answer(call.inline or call.request))

        try:
            return asyncio.run(answer())
        except (EngineError, ServiceError) as error:
            told = refusal(error).detail()
            raise from_detail(told.reason, told.message, told.metadata) from None


def connected(server: str | None, data: str | None) -> Questions:
    """The server at ``server`` if given, else this process."""
    if server is not None:
        return Client(server)
    return Local([root for root in (data or "").split(",") if root])
