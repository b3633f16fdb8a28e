"""Spans of calls, as a collector on loopback receives them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from perfcast_client import Client, EngineConfig, Prefill, errors
from perfcast_server import app
from perfcast_server.settings import SettingsError

from tests.server.running import running

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.resources: list[dict[str, Any]] = []
        self.spans: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:
        for group in request.resource_spans:
            self.resources.append(values(group.resource.attributes))
            self.spans += [span for scope in group.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def values(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    yield collector
    server.stop(0)


def test_a_span_of_every_call_reaches_the_collector(collector: Collector) -> None:
    parent = [("traceparent", f"00-{TRACE}-{PARENT}-01")]
    with running(tracing=True) as served, Client(served.address, metadata=lambda: parent) as client:
        answer = client.predict(CONFIG, Prefill(1, 128))
        assert client.predict(CONFIG, Prefill(1, 128)) == answer
        client.predict_many(CONFIG, Prefill([1, 2, 3], 128))
        with client.stream(CONFIG) as stream:
            assert len(list(stream.predict_all_ms([Prefill(1, 1), Prefill(1, 2)]))) == 2
        with pytest.raises(errors.InvalidRequest):
            client.predict(CONFIG, Prefill(0, 128))
    spans = {}
    for span in collector.spans:
        spans.setdefault(span.name.partition("/")[2], []).append(span)
    assert {resource["service.name"] for resource in collector.resources} == {"perfcast"}
    assert {(span.trace_id.hex(), span.parent_span_id.hex()) for span in collector.spans} == {(TRACE, PARENT)}
    told = values(spans["PredictStep"][0].attributes)
    assert told == {
        "rpc.system": "grpc",
        "rpc.service": "perfcast.v1.Prediction",
        "rpc.method": "PredictStep",
        "rpc.grpc.status_code": 0,
        "perfcast.engine": answer.engine.handle,
        "perfcast.mode": "silicon",
        "perfcast.data_version": answer.engine.data_version,
        "perfcast.points": 1,
    }
    assert values(spans["PredictStep"][1].attributes) == told  # from the cache
    assert values(spans["PredictSteps"][0].attributes)["perfcast.points"] == 3
    assert values(spans["StreamSteps"][0].attributes)["perfcast.points"] == 2
    refused = spans["PredictStep"][2]
    assert values(refused.attributes)["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "batch_per_rank" in refused.status.message
    assert len(spans["PredictStep"]) == 3


def test_calls_go_on_where_nobody_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with running(tracing=True) as served, Client(served.address) as client:
        assert client.predict(CONFIG, Prefill(1, 128)).latency_ms > 0


def test_a_trace_that_is_not_sampled_has_no_spans(collector: Collector) -> None:
    parent = [("traceparent", f"00-{TRACE}-{PARENT}-00")]
    with running(tracing=True) as served, Client(served.address, metadata=lambda: parent) as client:
        assert client.predict(CONFIG, Prefill(1, 128)).latency_ms > 0
    assert not collector.spans


def test_without_the_extra_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "perfcast_server.tracing", raising=False)
    with pytest.raises(SettingsError, match=r"pip install 'perfcast\[tracing\]'"):
        app._tracing()
