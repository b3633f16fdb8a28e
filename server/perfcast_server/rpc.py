"""What every call passes through: cache, admission, single flight, errors and metrics; bytes in, bytes out."""

from __future__ import annotations

import asyncio
import logging
import secrets
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from perfcast_server.cache import Answers, Key
from perfcast_server.callers import Caller, Gate
from perfcast_server.errors import Refusal, ServiceError, decoded, invalid, refusal
from perfcast_server.lifecycle import Lifecycle, draining
from perfcast_server.metrics import Meter, Metrics
from perfcast_server.settings import Settings

log = logging.getLogger("perfcast.rpc")

MAX_QUICK_BYTES = 1 << 16  # larger requests are not even parsed where there is no room for them
USUAL_BYTES = 4 << 20  # of a request; one of nothing but empty messages takes a hundred times as many, parsed


@dataclass(frozen=True, slots=True)
class Unary:
    """One RPC: its name, the type of its request, and what answers it.

    ``at_once`` may answer a request without waiting for anything; None where it would have to. ``pure``: whether equal
    requests have equal answers; those of others are neither kept nor shared. ``admin``: for admins only.
    ``writes``: whether it changes anything; what does not is asked again when the data change under it. ``is_large``:
    whether requests may have as many bytes as any message, not only the usual number.
    """

    name: str
    request: type[Message]
    answer: Callable[[Any], Awaitable[Message | bytes]]
    at_once: Callable[[Any], Message | bytes | None] = lambda request: None
    pure: Callable[[Any], bool] = lambda request: True
    admin: bool = False
    writes: bool = False
    is_large: bool = False


@dataclass(frozen=True, slots=True)
class ServerStream:
    """One RPC with many answers: ``answers`` turns the request into them. A caller that leaves ends it.

    ``keeps_last``: the last answer is all that an equal request needs.
    """

    name: str
    request: type[Message]
    answers: Callable[[Any], AsyncGenerator[Message | bytes]]
    keeps_last: bool = False


class Conversation(Protocol):
    """One stream of requests, each of which has an answer. ``at_once`` as for a unary RPC."""

    def at_once(self, request: Any) -> bytes | None: ...
    async def answer(self, request: Any) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Stream:
    """A bidirectional RPC: ``begin`` begins a conversation."""

    name: str
    request: type[Message]
    begin: Callable[[], Conversation]


Method = Unary | ServerStream | Stream
Handler = Callable[[Any, Any], Awaitable[Any]]
Work = Callable[[Any, Any, Meter], Awaitable[bytes | None]]  # of a request and its context
Traced = Callable[[str, str, Handler], Handler]  # wraps the handler of a service's method


def parsed(kind: type[Message], data: bytes) -> Any:
    """The message, refused if malformed or if it says something that this build does not know."""
    message = decoded(kind, data)
    message.DiscardUnknownFields()
    if message.ByteSize() != len(data) and message.ByteSize() != kind.FromString(data).ByteSize():
        raise invalid("request", f"holds fields that this server's {kind.DESCRIPTOR.full_name} does not know")
    return message


def _require_usual(size: int) -> None:
    if size > USUAL_BYTES:
        raise ServiceError(
            "LIMIT", f"the request has {size} bytes, more than {USUAL_BYTES}", limit="message_bytes", retry="no"
        )


class Rpc:
    """Turns answers into gRPC handlers. One per server: it holds the caches and the count of work admitted."""

    def __init__(
        self,
        settings: Settings,
        lifecycle: Lifecycle,
        metrics: Metrics,
        gate: Gate | None = None,
        traced: Traced | None = None,
    ) -> None:
        self._settings = settings
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._gate = gate
        self._traced = traced or (lambda service, method, handler: handler)
        self._in_work = 0
        self._bytes_in_work = 0
        self._streams = 0
        self._idle: set[asyncio.Task[Any]] = set()
        self._ended: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._answers = Answers(settings.response_cache_bytes)
        metrics.in_work.set_function(lambda: self._in_work)
        metrics.response_bytes.set_function(lambda: self._answers.kept.held)

    def forget(self) -> None:
        """Drop all kept answers, and those to come of work that has begun; for when the data behind them change."""
        self._answers = Answers(self._settings.response_cache_bytes)

    def handlers(self, service: str, methods: Iterable[Method]) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            service, {method.name: self._handler(service, method) for method in methods}
        )

    def _handler(self, service: str, method: Method) -> grpc.RpcMethodHandler:
        if isinstance(method, Unary):
            kind, work, made = "unary", self._unary(service, method), grpc.unary_unary_rpc_method_handler
        elif isinstance(method, ServerStream):
            kind, work = "server_stream", self._server_stream(service, method)
            made = grpc.unary_stream_rpc_method_handler
        else:
            kind, work, made = "bidi_stream", self._stream(method), grpc.stream_stream_rpc_method_handler
        meter = Meter(self._metrics, kind, service, method.name)

        async def handle(request: Any, context: Any) -> bytes | None:
            began = meter.start()
            try:
                answer = await work(request, context, meter)
                meter.finish(began)
                return answer
            except (asyncio.CancelledError, grpc.aio.InternalError):  # which is how a caller leaves that is answered
                meter.finish(began, grpc.StatusCode.CANCELLED)
                raise asyncio.CancelledError from None
            except Exception as error:
                told = self._told(error, meter)
                meter.finish(began, told.code)
                try:
                    await context.abort(told.code, told.message, told.trailers())
                except grpc.aio.InternalError:
                    raise asyncio.CancelledError from None
                raise AssertionError("abort returned") from None

        return made(self._traced(service, method.name, handle))

    def _unary(self, service: str, method: Unary) -> Work:
        path = f"{service}/{method.name}"

        async def work(request: bytes, context: Any, meter: Meter) -> bytes:
            caller = None if self._gate is None else self._let_in(context, method.admin)
            answers, key = self._answers, (path, request)
            answer = answers.kept.get(key)
            if answer is not None:
                self._metrics.response_hits.inc()
                return answer
            self._admit(context)
            if not method.is_large:
                _require_usual(len(request))
            self._metrics.response_misses.inc()
            if len(request) > MAX_QUICK_BYTES:
                self._require_room(len(request))
            message = parsed(method.request, request)
            at_once = method.at_once(message)
            if at_once is None:
                return await self._worked_out(method, key, message, caller)
            answer = self._bytes(at_once)
            return answers.keep(key, answer) if method.pure(message) else answer

        return work

    def _let_in(self, context: Any, admin: bool = False) -> Caller | None:
        """Who calls, where that matters; refused if not known, not allowed to, or over the quota."""
        if self._gate is None:
            return None
        caller = self._gate.caller(context)
        self._gate.quotas.take(caller)
        if admin and not caller.admin:
            raise ServiceError("FORBIDDEN", "this call is for admins only")
        return caller

    def _owed_s(self, caller: Caller) -> float:
        """Messages of a stream are not refused but read no faster than the caller's quota."""
        return 0.0 if self._gate is None else self._gate.quotas.owed_s(caller)

    def _of(self, caller: Caller | None) -> AbstractContextManager[None]:
        return nullcontext() if self._gate is None or caller is None else self._gate.quotas.work(caller)

    def _require_room(self, size: int) -> None:
        most, held = self._settings.max_concurrent_requests, self._settings.max_request_bytes_in_work
        if self._in_work >= most:
            raise ServiceError("LIMIT", f"{most} requests are in work already", limit="max_concurrent_requests")
        if self._in_work and self._bytes_in_work + size > held:
            raise ServiceError("LIMIT", f"requests in work hold {held} bytes", limit="max_request_bytes_in_work")

    @contextmanager
    def _working(self, caller: Caller | None, size: int) -> Iterator[None]:
        """Count one call of so many bytes that cannot be answered at once."""
        self._require_room(size)
        with self._of(caller):
            self._in_work += 1
            self._bytes_in_work += size
            try:
                yield
            finally:
                self._in_work -= 1
                self._bytes_in_work -= size

    @contextmanager
    def _streaming(self, caller: Caller | None) -> Iterator[None]:
        if self._streams >= self._settings.max_streams:
            raise ServiceError("LIMIT", f"{self._streams} streams are open already", limit="max_streams")
        with self._of(caller):
            self._streams += 1
            try:
                yield
            finally:
                self._streams -= 1

    def _admit(self, context: Any) -> None:
        self._lifecycle.require_loaded()  # while draining, gRPC itself turns new calls away
        remaining = context.time_remaining()
        if remaining is not None and remaining <= 0:
            raise ServiceError("DEADLINE", "the deadline passed before the work began")

    async def _worked_out(self, method: Unary, key: Key, request: Any, caller: Caller | None) -> bytes:
        with self._working(caller, len(key[1])):
            if method.pure(request):
                return await self._answers.flights.do(key, lambda: self._answered(method, key, request))
            return (await self._answer(method, request))[0]

    async def _answered(self, method: Unary, key: Key, request: Any) -> bytes:
        answer, answers = await self._answer(method, request)
        return answers.keep(key, answer)

    async def _answer(self, method: Unary, request: Any) -> tuple[bytes, Answers]:
        """An answer from one version of the data, and where answers from that are remembered."""
        while True:
            answers = self._answers
            answer = self._bytes(await method.answer(request))
            if method.writes or answers is self._answers:
                return answer, answers

    def _bytes(self, answer: Message | bytes) -> bytes:
        data = answer if isinstance(answer, bytes) else answer.SerializeToString()
        if len(data) > self._settings.max_message_bytes:
            raise ServiceError(
                "LIMIT",
                f"the answer has {len(data)} bytes, more than {self._settings.max_message_bytes}; ask fewer points",
                limit="max_message_bytes",
                retry="no",
            )
        return data

    def _server_stream(self, service: str, method: ServerStream) -> Work:
        path = f"{service}/{method.name}"

        async def work(data: bytes, context: Any, meter: Meter) -> None:
            key, answers = (path, data), self._answers
            last: bytes | None = answers.kept.get(key) if method.keeps_last else None
            caller = self._let_in(context)
            if last is not None:
                self._metrics.response_hits.inc()
                await context.write(last)
                meter.sent.inc()
                return
            self._admit(context)
            _require_usual(len(data))
            with self._working(caller, len(data)):
                async with aclosing(method.answers(parsed(method.request, data))) as told:
                    async for answer in told:
                        last = self._bytes(answer)
                        await context.write(last)
                        meter.sent.inc()
            if method.keeps_last and last is not None:
                answers.keep(key, last)

        return work

    def _stream(self, method: Stream) -> Work:
        async def converse(context: Any, meter: Meter, task: asyncio.Task[Any], caller: Caller | None) -> None:
            conversation = method.begin()
            while True:
                self._lifecycle.require_serving()
                self._idle.add(task)
                try:
                    data = await context.read()
                    if caller is not None and (owed_s := self._owed_s(caller)) > 0:
                        await asyncio.sleep(owed_s)
                finally:
                    self._idle.discard(task)
                if data is grpc.aio.EOF:
                    return
                meter.received.inc()
                request = parsed(method.request, data)
                await context.write(conversation.at_once(request) or await conversation.answer(request))
                meter.sent.inc()

        async def work(_: Any, context: Any, meter: Meter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._lifecycle.require_serving()
            caller = self._let_in(context)
            try:
                with self._streaming(caller):
                    await converse(context, meter, task, caller)
            except asyncio.CancelledError:
                if task not in self._ended:
                    raise
                task.uncancel()
                raise draining() from None

        return work

    def guarded(self, answers: Callable[[Any, Any], AsyncIterator[Any]]) -> Callable[[Any, Any], AsyncIterator[Any]]:
        """``answers`` of a stream that is not one of ours, for callers that are let in."""

        async def handle(requests: Any, context: Any) -> AsyncIterator[Any]:
            try:
                caller = self._let_in(context)
                with self._streaming(caller):
                    async for answer in answers(requests, context):
                        yield answer
            except ServiceError as error:
                told = refusal(error)
                await context.abort(told.code, told.message, told.trailers())

        return handle

    def end_idle_streams(self) -> None:
        """End the streams that wait for their caller, so that a drain waits for work only."""
        for task in self._idle:
            self._ended.add(task)
            task.cancel()

    def _told(self, error: Exception, meter: Meter) -> Refusal:
        """What the caller hears of it; the log hears more, and of what was not foreseen everything."""
        incident = secrets.token_hex(4)
        told = refusal(error, incident)
        if told.code is grpc.StatusCode.INTERNAL:
            log.error("unforeseen error", exc_info=error, extra={"method": meter.name, "incident": incident})
        else:
            log.debug("refused", extra={"method": meter.name, "reason": told.reason, "text": told.message})
        if "op" in told.metadata:
            self._metrics.data_misses.labels(told.metadata["op"]).inc()
        self._metrics.refusals.labels(told.reason).inc()
        return told
