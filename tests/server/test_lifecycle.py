"""Health, reflection, drain, limits, caches, metrics and logs of a running server."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from perfcast.v1 import prediction_pb2
from perfcast_client import Client, DecodeStep, DecodeTrajectory, EngineConfig, Prefill, errors
from perfcast_server.app import NotReady, Server
from perfcast_server.lifecycle import State
from perfcast_server.logs import JsonFormatter
from perfcast_server.settings import Settings, SettingsError

from tests.server.running import PATIENCE_S, Running, eventually, running

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
Status = health_pb2.HealthCheckResponse
SLOW = DecodeTrajectory(8, 1000, 100_000, stride=1)  # too many points to be answered at once: it takes a thread


def health(channel: grpc.Channel, name: str) -> int | grpc.StatusCode:
    try:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=60).status
    except grpc.RpcError as error:
        return error.code()


def test_health_knows_the_process_each_service_and_each_engine(served: Running) -> None:
    with grpc.insecure_channel(served.address) as channel, Client(served.address) as client:
        for name in ("", "perfcast.v1.Catalog", "perfcast.v1.Prediction"):
            assert health(channel, name) == Status.SERVING
        assert health(channel, f"engine/{client.resolve(CONFIG).handle}") == Status.SERVING
        assert health(channel, "engine/0000") is grpc.StatusCode.NOT_FOUND
        assert health(channel, "perfcast.v1.Oracle") is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "path",
    [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ],
)
def test_malformed_requests_to_the_standard_services_are_refused_as_such(served: Running, path: str) -> None:
    with grpc.insecure_channel(served.address) as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(path)(iter([b"\x0a\xff"]), timeout=60))
    told = errors.from_call(caught.value.code(), caught.value.details(), caught.value.trailing_metadata())
    assert (told.code, told.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert "DecodeError" not in told.message


def test_a_watcher_hears_of_the_drain() -> None:
    with running() as served, grpc.insecure_channel(served.address) as channel:
        heard = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="perfcast.v1.Prediction"), timeout=20
        )
        assert next(heard).status == Status.SERVING
        served.do(served.server.stop())
        assert next(heard).status == Status.NOT_SERVING


def test_reflection_lists_and_describes_the_services(served: Running) -> None:
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="perfcast.v1.Prediction"),
    ]
    with grpc.insecure_channel(served.address) as channel:
        for version in ("v1", "v1alpha"):
            call = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                reflection_pb2.ServerReflectionRequest.SerializeToString,
                reflection_pb2.ServerReflectionResponse.FromString,
            )
            listed, described = call(iter(requests), timeout=60)
            names = {service.name for service in listed.list_services_response.service}
            assert {"perfcast.v1.Catalog", "perfcast.v1.Prediction", "grpc.health.v1.Health"} <= names
            assert len(described.file_descriptor_response.file_descriptor_proto) >= 2


def test_reflection_can_be_switched_off() -> None:
    with running(reflection=False) as served, grpc.insecure_channel(served.address) as channel:
        call = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([b""]), timeout=60))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_calls_before_the_tables_are_open_are_told_to_wait() -> None:
    async def scenario() -> None:
        server = Server(Settings(port=0, metrics_port=-1))
        server._listen()
        await server._grpc.start()
        try:
            async with grpc.aio.insecure_channel(server.address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                assert (await health.Check(health_pb2.HealthCheckRequest())).status == Status.SERVING
                ready = health_pb2.HealthCheckRequest(service="perfcast.v1.Prediction")
                assert (await health.Check(ready)).status == Status.NOT_SERVING
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary("/perfcast.v1.Catalog/ListSystems")(b"")
            error = errors.from_call(caught.value.code(), "", caught.value.trailing_metadata())
            assert (error.reason, error.code) == ("LOADING", "UNAVAILABLE")
            assert error.retry_after_s is not None
        finally:
            await server.stop()

    asyncio.run(scenario())


def test_a_drain_finishes_work_in_flight_and_ends_idle_streams() -> None:
    step = prediction_pb2.StreamStepsRequest(sequence=1, config=CONFIG.to_message())
    step.prefill.batch_per_rank, step.prefill.isl_tokens = 1, 128
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with running() as served, Client(served.address, deadline_s=PATIENCE_S) as client, ThreadPoolExecutor() as pool:
        client.predict(CONFIG, Prefill(1, 128))
        with grpc.insecure_channel(served.address) as channel:
            stream = channel.stream_stream("/perfcast.v1.Prediction/StreamSteps")(iter(requests.get, None))
            requests.put(step.SerializeToString())
            assert prediction_pb2.StreamStepsResponse.FromString(next(stream)).latency_ms > 0
            with served.held():
                busy = pool.submit(client.predict, CONFIG, SLOW)
                eventually(lambda: served.metric("grpc_server_in_work") == 1)
                stopping = pool.submit(served.do, served.server.stop())
                eventually(lambda: served.server.lifecycle.state is State.DRAINING)
            stopping.result()
            assert busy.result(PATIENCE_S).latency_ms > 0
            with pytest.raises(grpc.RpcError) as caught:
                next(stream)
            requests.put(None)
        told = errors.from_call(caught.value.code(), "", caught.value.trailing_metadata())
        assert (told.reason, told.code) == ("DRAINING", "UNAVAILABLE")
        with pytest.raises((errors.Unavailable, errors.DeadlineExceeded)):
            client.predict(CONFIG, Prefill(2, 128), deadline_s=0.5)


def test_concurrent_requests_beyond_the_limit_are_refused_at_once() -> None:
    with running(max_concurrent_requests=2) as served, Client(served.address) as client:
        client.resolve(CONFIG)
        with ThreadPoolExecutor() as pool:
            with served.held():
                busy = [
                    pool.submit(client.predict, CONFIG, DecodeTrajectory(n, 1000, 100_000, stride=1), deadline_s=60)
                    for n in (1, 2)
                ]
                eventually(lambda: served.metric("grpc_server_in_work") == 2)
                with pytest.raises(errors.LimitExceeded) as caught:
                    client.predict(CONFIG, DecodeTrajectory(3, 1000, 100_000, stride=1))
                assert client.predict(CONFIG, Prefill(1, 777)).latency_ms > 0  # what needs no waiting is never refused
            assert caught.value.details["limit"] == "max_concurrent_requests"
            assert caught.value.retry_after_s is not None
            assert all(call.result().latency_ms > 0 for call in busy)
        assert client.predict(CONFIG, Prefill(1, 128)).latency_ms > 0


def test_streams_beyond_the_limit_are_refused() -> None:
    with running(max_streams=1) as served, Client(served.address) as client, client.stream(CONFIG) as first:
        assert first.predict_ms(Prefill(1, 128)) > 0
        with client.stream(CONFIG) as second, pytest.raises(errors.LimitExceeded):
            second.predict_ms(Prefill(1, 128))


def test_equal_work_in_flight_is_done_once() -> None:
    with running() as served, Client(served.address) as client:
        client.resolve(CONFIG)
        before = served.metric("predict_points_total", kind="decode_trajectory")
        gate = threading.Barrier(8)

        def ask() -> float:
            gate.wait()
            return client.predict(CONFIG, SLOW, deadline_s=30).latency_ms

        with ThreadPoolExecutor(8) as pool:
            answers = {call.result() for call in [pool.submit(ask) for _ in range(8)]}
        assert len(answers) == 1
        assert served.metric("predict_points_total", kind="decode_trajectory") == before + 1


def test_an_answer_is_kept_and_given_again_from_bytes() -> None:
    with running() as served, Client(served.address) as client:
        first = client.predict(CONFIG, Prefill(3, 333))
        hits = served.metric("response_cache_hits_total")
        assert client.predict(CONFIG, Prefill(3, 333)) == first
        assert served.metric("response_cache_hits_total") == hits + 1
        assert served.metric("response_cache_bytes") > 0


def test_the_cache_of_answers_is_bounded() -> None:
    with running(response_cache_bytes=4000) as served, Client(served.address) as client:
        for n in range(1, 40):
            client.predict(CONFIG, Prefill(1, n))
        assert 0 < served.metric("response_cache_bytes") <= 4000


def test_engines_are_bounded_and_come_back_by_handle() -> None:
    with running(max_engines=2) as served, Client(served.address) as client:
        handles = [client.resolve(EngineConfig(**{**CONFIG.to_dict(), "tp": tp})).handle for tp in (1, 2, 4, 8)]
        assert len(set(handles)) == 4
        assert served.metric("engine_cache_entries") == 2
        assert client.predict(handles[0], Prefill(1, 128)).engine.handle == handles[0]


async def weighed(served: Running) -> None:
    await served.server.engines.weigh()
    served.server.engines.make_room()


def test_a_flood_of_engines_and_requests_stays_within_the_bound() -> None:
    most = 24 << 20
    with running(max_engine_bytes=most) as served, Client(served.address) as client:
        configs = [EngineConfig(**{**CONFIG.to_dict(), "tp": tp, "nextn": n}) for n in range(8) for tp in (1, 2, 4, 8)]
        for config in configs:
            handle = client.predict(config, Prefill(1, 128)).engine.handle
            client.predict_many(handle, DecodeStep(8, np.arange(1, 30_000, 100), 2))
            served.do(weighed(served))
            assert served.metric("engine_cache_bytes") <= most
        assert 1 < served.metric("engine_cache_entries") < len(configs)
        kept = served.metric("engine_cache_bytes")
        with client.stream(configs[0]) as stream:  # which is not kept for the stream's sake
            before = stream.predict_ms(Prefill(1, 128))
            for config in configs[1:]:
                client.predict(config, Prefill(1, 128))
            assert stream.predict_ms(Prefill(1, 128)) == before
        assert kept > most / 4


def test_engines_are_bounded_by_the_bytes_of_their_tables() -> None:
    with running(max_engine_bytes=1) as served, Client(served.address) as client:
        for tp in (1, 2, 4):
            client.predict(EngineConfig(**{**CONFIG.to_dict(), "tp": tp}), Prefill(1, 5000))
            assert served.metric("engine_cache_entries") == 1
        assert served.metric("engine_cache_bytes") > 0


def test_an_evicted_handle_of_a_resolved_engine_is_sent_inline_again() -> None:
    with running(max_handles=1, max_engines=1) as served, Client(served.address) as client:
        first = client.resolve(CONFIG)
        client.resolve(EngineConfig(**{**CONFIG.to_dict(), "tp": 8}))
        with pytest.raises(errors.UnknownHandle):
            client.predict(first.handle, Prefill(1, 128))
        assert client.predict(first, Prefill(1, 128)).engine.handle == first.handle


def test_metrics_are_served_under_the_names_of_the_ecosystem() -> None:
    with running(metrics_port=0) as served, Client(served.address) as client:
        client.predict(CONFIG, Prefill(1, 128))
        with pytest.raises(errors.InvalidRequest):
            client.predict(CONFIG, Prefill(0, 128))
        with urllib.request.urlopen(f"http://127.0.0.1:{served.server.metrics_port}/metrics") as page:
            text = page.read().decode()
        method = 'grpc_method="PredictStep",grpc_service="perfcast.v1.Prediction",grpc_type="unary"'
        assert f"grpc_server_started_total{{{method}}} 2.0" in text
        for code in ("OK", "InvalidArgument"):
            labels = 'grpc_method="PredictStep",grpc_service="perfcast.v1.Prediction",grpc_type="unary"'
            assert f'grpc_server_handled_total{{grpc_code="{code}",{labels}}} 1.0' in text
        for name in ("grpc_server_handling_seconds_bucket", "predict_points_total", "predict_point_seconds_bucket"):
            assert name in text
        for name in ("engine_cache_hits_total", "engine_cache_misses_total", "engine_load_seconds_bucket"):
            assert name in text


def test_an_unforeseen_error_is_internal_without_detail_but_logged(
    served: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("secret of /srv/secret/place.py")

    monkeypatch.setattr("perfcast_server.prediction.Prediction.quick", fails)
    with Client(served.address) as client, pytest.raises(errors.ServerFault) as caught:
        client.predict(CONFIG, Prefill(9, 999))
    assert caught.value.code == "INTERNAL"
    assert "secret" not in caught.value.message
    assert caught.value.details["incident"] in caplog.records[-1].__dict__["incident"]
    assert "ZeroDivisionError" in caplog.text


def test_a_deadline_in_the_past_is_exceeded_and_a_short_one_harms_nobody(served: Running) -> None:
    with Client(served.address) as client:
        client.resolve(CONFIG)
        with served.held(), pytest.raises(errors.DeadlineExceeded):
            client.predict(CONFIG, DecodeTrajectory(5, 1000, 100_000, stride=1), deadline_s=0.001)
        assert client.predict(CONFIG, Prefill(1, 128)).latency_ms > 0


def test_a_unix_socket_serves_too(tmp_path) -> None:
    path = tmp_path / "perfcast.sock"
    with running(host="", unix_socket=str(path)) as served, Client(f"unix:{path}") as client:
        assert served.address == f"unix:{path}"
        assert client.predict(CONFIG, Prefill(1, 128)).latency_ms > 0


def test_a_port_in_use_is_a_settings_error(served: Running) -> None:
    port = int(served.address.rpartition(":")[2])
    with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}"), running(port=port):
        pass


def test_a_server_whose_data_root_is_no_folder_does_not_start() -> None:
    with pytest.raises(SettingsError, match="is not a folder"), running(data=("/nowhere",)):
        pass


def test_states_are_announced() -> None:
    with running() as served:
        assert served.server.lifecycle.state is State.SERVING
    assert served.server.lifecycle.state is State.DRAINING
    assert issubclass(NotReady, RuntimeError)


def test_logs_are_json_objects_with_what_was_passed_as_extra() -> None:
    record = logging.makeLogRecord({"name": "n", "levelname": "INFO", "msg": "engine %s", "args": ("x",), "handle": 7})
    entry = json.loads(JsonFormatter().format(record))
    assert (entry["message"], entry["level"], entry["handle"]) == ("engine x", "info", 7)


def test_a_stream_without_an_engine_is_told_so_and_goes_on(served: Running) -> None:
    bare = prediction_pb2.StreamStepsRequest(sequence=7)
    bare.prefill.batch_per_rank, bare.prefill.isl_tokens = 1, 128
    full = prediction_pb2.StreamStepsRequest(sequence=8, config=CONFIG.to_message())
    full.prefill.CopyFrom(bare.prefill)
    with grpc.insecure_channel(served.address) as channel:
        call = channel.stream_stream(
            "/perfcast.v1.Prediction/StreamSteps",
            prediction_pb2.StreamStepsRequest.SerializeToString,
            prediction_pb2.StreamStepsResponse.FromString,
        )
        first, second, third = call(iter([bare, full, bare]), timeout=60)
    assert (first.sequence, first.error.metadata["field"]) == (7, "engine")
    assert second.latency_ms == third.latency_ms > 0
    assert second.HasField("engine") and not third.HasField("engine")
