"""Questions answered in this process: the requests and answers of a server, without the network."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from time import monotonic
from typing import Any, TypeVar

from perfcast.v1 import search_pb2
from perfcast_client.calls import Call
from perfcast_client.client import Client, Questions
from perfcast_client.errors import DeadlineExceeded, from_detail
from perfcast_engine.errors import EngineError
from perfcast_engine.predictor import Predictor
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
            request = call.request
            if isinstance(request, search_pb2.RecommendRequest):
                (answer,) = _in_time(
                    lambda put: put(searching.recommend(request, self._predictor, self._settings)),
                    deadline_s or call.deadline_s,
                )
                return call.read(answer)
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
        request: Any = call.request

        def search(put: Callable[[Any], None]) -> None:
            def tell(progress: search_pb2.SearchProgress) -> None:
                put(search_pb2.SearchResponse(progress=progress))

            result = searching.search(request, self._predictor, self._settings, tell)
            put(search_pb2.SearchResponse(result=result))

        try:
            for event in _in_time(search, deadline_s or call.deadline_s):
                yield call.read(event)
        except Exception as error:
            raise _told(error) from None


class _Unheard(Exception):
    """Nobody listens any more."""


def _in_time(work: Callable[[Callable[[Any], None]], None], seconds: float) -> Generator[Any, None, None]:
    """What ``work`` puts, in a thread of its own, which ends with the next word after its listener has left."""
    events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    until, left = monotonic() + seconds, threading.Event()

    def put(event: Any) -> None:
        if left.is_set():
            raise _Unheard
        events.put(("told", event))

    def run() -> None:
        try:
            work(put)
            events.put(("done", None))
        except BaseException as error:
            events.put(("failed", error))

    threading.Thread(target=run, daemon=True).start()
    try:
        while True:
            kind, event = events.get(timeout=max(0.0, until - monotonic()))
            if kind == "failed":
                raise event
            if kind == "done":
                return
            yield event
    except queue.Empty:
        raise DeadlineExceeded("no answer within the deadline", code="DEADLINE_EXCEEDED", reason="DEADLINE") from None
    finally:
        left.set()


def _told(error: BaseException) -> BaseException:
    """As a client tells it."""
    if isinstance(error, EngineError | ServiceError):
        told = refusal(error).detail()
        return from_detail(told.reason, told.message, told.metadata)
    return error


def connected(server: str | None, data: str | None) -> Questions:
    """The server at ``server`` if given, else this process."""
    if server is not None:
        return Client(server, **access())
    return Local([root for root in (data or "").split(",") if root])
