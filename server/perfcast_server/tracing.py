"""A span for every call, in the trace that its caller names by W3C traceparent; needs ``perfcast[tracing]``.

Where spans go and which are sampled is said by the OTEL_* variables of OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from perfcast.v1 import common_pb2

Handler = Callable[[Any, Any], Awaitable[Any]]
MODES = common_pb2.DatabaseMode


class Tracing:
    """Wraps handlers of calls. One per server."""

    def __init__(self) -> None:
        self._provider = TracerProvider(resource=Resource.create().merge(Resource({SERVICE_NAME: "perfcast"})))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("perfcast.server")
        self._propagator = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Send what is left; takes its time."""
        self._provider.shutdown()

    def around(self, service: str, method: str, handler: Handler) -> Handler:
        """``handler`` of a unary call (which returns its answer) or of a stream (which writes its answers)."""
        kind = GetMessageClass(Default().FindServiceByName(service).FindMethodByName(method).output_type)

        async def handle(request: Any, context: Any) -> Any:
            with self._span(service, method, context) as span:
                if not span.is_recording():
                    return await handler(request, context)
                told = _Told(span, kind, context)
                answer = await handler(request, told)
                if answer is not None:
                    told.see(answer)
                return answer

        return handle

    @contextmanager
    def _span(self, service: str, method: str, context: Any) -> Iterator[Span]:
        carrier = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        with self._tracer.start_as_current_span(
            f"{service}/{method}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": method},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            code = grpc.StatusCode.OK
            try:
                yield span
            except BaseException as error:
                code = _code(context) if isinstance(error, grpc.aio.AbortError) else grpc.StatusCode.CANCELLED
                span.set_status(Status(StatusCode.ERROR, context.details() or code.name))
                raise
            finally:
                span.set_attribute("rpc.grpc.status_code", code.value[0])


class _Told:
    """A call's context that also tells the span what is answered."""

    def __init__(self, span: Span, kind: type[Message], context: Any) -> None:
        self._span = span
        self._kind = kind
        self._context = context
        self._points = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, data: bytes) -> None:
        self.see(data)
        await self._context.write(data)

    def see(self, data: bytes) -> None:
        """Engine, mode and points of one answer."""
        answer: Any = self._kind.FromString(data)
        fields = answer.DESCRIPTOR.fields_by_name
        if "latency_ms" in fields:
            self._points += len(answer.latency_ms) if fields["latency_ms"].is_repeated else 1
            self._span.set_attribute("perfcast.points", self._points)
        stamp = getattr(answer, "engine", None)
        if isinstance(stamp, common_pb2.EngineStamp) and stamp.handle:
            self._span.set_attribute("perfcast.engine", stamp.handle)
            self._span.set_attribute("perfcast.mode", MODES.Name(stamp.database_mode).rpartition("_")[2].lower())
            self._span.set_attribute("perfcast.data_version", stamp.data_version)


def _code(context: Any) -> grpc.StatusCode:
    code = context.code()
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN
