"""Questions answered in this process: the requests and answers of a server, without the network."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Generator, Sequence
from functools import cached_property
from time import perf_counter
from typing import Any, TypeVar

from google.protobuf.message import Message
from perfcast.v1 import search_pb2
from perfcast_client.calls import Call
from perfcast_client.client import Client, Questions
from perfcast_client.errors import DeadlineExceeded, from_detail
from perfcast_engine.errors import EngineError
from perfcast_engine.predictor import Predictor
from perfcast_engine.search.task import Cancelled
from perfcast_server import searching
from perfcast_server.errors import ServiceError, refusal
from perfcast_server.settings import Settings

from perfcast_cli.access import access

T = TypeVar("T")


class Local(Questions):
    """Answers from ``roots`` and the embedded data."""

    def __init__(self, roots: Sequence[str] = ()) -> None:
        self._settings = Settings()
        self._roots = roots

    @cached_property
    def _predictor(self) -> Predictor:
        return Predictor(roots=self._roots)

    @cached_property
    def _methods(self) -> dict[str, Any]:
        """By path, what a server answers with; a search needs none of it."""
        from perfcast_server.app import services
        from perfcast_server.engines import Engines
        from perfcast_server.lanes import Lanes
        from perfcast_server.metrics import Metrics
        from perfcast_server.rpc import ServerStream, Unary
        from perfcast_server.searchers import Searchers
        from perfcast_server.states import States

        settings, metrics = self._settings, Metrics()
        searchers = Searchers(settings, metrics)
        engines = Engines(settings, metrics, Lanes(settings, metrics))
        engines.adopt(self._predictor)
        return {
            f"/{service}/{method.name}": method
            for service, methods in services(engines, searchers, settings, metrics, States("", 1)).items()
            for method in methods
            if isinstance(method, Unary | ServerStream)
        }

    def _run(self, call: Call[T], deadline_s: float | None) -> T:
        try:
            if isinstance(call.request, search_pb2.RecommendRequest):
                ended = _Deadline(deadline_s or call.deadline_s)
                return call.read(searching.recommend(call.request, self._predictor, self._settings, ended))
            return call.read(asyncio.run(self._answer(call)))
        except Exception as error:
            raise _told(error) from None

    async def _answer(self, call: Call[Any]) -> Any:
        from perfcast_server.rpc import Unary

        method, request = self._methods[call.path], call.inline or call.request
        if isinstance(method, Unary):
            answer = await method.answer(request)
            return call.response.FromString(answer) if isinstance(answer, bytes) else answer
        return [part async for part in method.answers(request)]

    def _stream(self, call: Call[T], deadline_s: float | None) -> Generator[T, None, None]:
        events: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        ended = _Deadline(deadline_s or call.deadline_s)
        threading.Thread(target=self._search, args=(call.request, events.put, ended), daemon=True).start()
        try:
            result = False
            while not result:
                event = events.get()
                if isinstance(event, BaseException):
                    raise _told(event) from None
                result = event.HasField("result")
                yield call.read(event)
        finally:
            ended.at = 0.0

    def _search(self, request: Any, put: Any, ended: _Deadline) -> None:
        try:
            result = searching.search(
                request,
                self._predictor,
                self._settings,
                lambda progress: put(search_pb2.SearchResponse(progress=progress)),
                ended,
            )
            put(search_pb2.SearchResponse(result=result))
        except BaseException as error:
            put(error)


class _Deadline:
    """Whether the time is up."""

    def __init__(self, seconds: float) -> None:
        self.at = perf_counter() + seconds

    def __call__(self) -> bool:
        return perf_counter() >= self.at


def _told(error: BaseException) -> BaseException:
    """As a client tells it."""
    if isinstance(error, EngineError | ServiceError):
        told = refusal(error).detail()
        return from_detail(told.reason, told.message, told.metadata)
    if isinstance(error, Cancelled):
        return DeadlineExceeded("no answer within the deadline", code="DEADLINE_EXCEEDED", reason="DEADLINE")
    return error


def connected(server: str | None, data: str | None) -> Questions:
    """The server at ``server`` if given, else this process."""
    if server is not None:
        return Client(server, **access())
    return Local([root for root in (data or "").split(",") if root])
