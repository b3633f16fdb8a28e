"""Every kind of bad input has its typed error, and the server goes on serving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from perfcast.v1 import catalog_pb2, planner_pb2, prediction_pb2
from perfcast_client import Client, DecodeStep, DecodeTrajectory, EngineConfig, Mixed, PerfcastError, Prefill, errors

from tests.server.running import PATIENCE_S, Running, running

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
HUGE = 2**31 - 1
NOTHING = b"\x0a\x00" * (3 << 20)  # 3 million empty messages in the first field


def tick(**group: Any) -> Message:
    return planner_pb2.EvaluateTickRequest(groups=[planner_pb2.TickGroup(**group)])


def changed(**values: Any) -> EngineConfig:
    return EngineConfig(**{**CONFIG.to_dict(), **values})


@pytest.fixture(scope="module")
def client(served: Running):
    with Client(served.address) as client:
        yield client


@pytest.fixture(scope="module")
def raw(served: Running) -> Callable[..., Any]:
    """Calls a method with bytes and returns the error, its ErrorInfo and all details."""
    channel = grpc.insecure_channel(served.address)

    def call(method: str, data: bytes) -> tuple[grpc.RpcError, error_details_pb2.ErrorInfo, status_pb2.Status]:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/perfcast.v1.{method}")(data, timeout=60)
        trailers = dict(caught.value.trailing_metadata())
        status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        return caught.value, info, status

    yield call
    channel.close()


@pytest.mark.parametrize(
    ("config", "kind", "reason", "nearest"),
    [
        (changed(model="Qwen/Qwen3-32B-FP9"), errors.NotFound, "UNKNOWN_MODEL", "Qwen/Qwen3-32B-FP8"),
        (changed(system="h200_sx"), errors.NotFound, "UNKNOWN_SYSTEM", "h200_sxm"),
        (changed(backend="trtlm"), errors.NotFound, "UNKNOWN_BACKEND", "trtllm"),
        (changed(version="1.3.0rc2"), errors.NotFound, "UNKNOWN_VERSION", "1.3.0rc20"),
        (changed(version="previous"), errors.NotFound, "UNKNOWN_VERSION", None),
        ("0123456789abcdef", errors.UnknownHandle, "UNKNOWN_HANDLE", None),
        ("", errors.UnknownHandle, "UNKNOWN_HANDLE", None),
    ],
)
def test_unknown_names_come_with_the_nearest(client: Client, config, kind, reason, nearest) -> None:
    with pytest.raises(kind) as caught:
        client.predict(config, Prefill(1, 128))
    assert caught.value.reason == reason
    assert caught.value.code == "NOT_FOUND"
    assert nearest is None or nearest in caught.value.nearest


@pytest.mark.parametrize(
    ("step", "field"),
    [
        (Prefill(0, 128), "prefill.batch_per_rank"),
        (Prefill(-1, 128), "prefill.batch_per_rank"),
        (Prefill(1, 0), "prefill.isl_tokens"),
        (Prefill(1, 128, prefix=128), "prefill.prefix_tokens"),
        (Prefill(1, 128, imbalance=1e308), "prefill.attention_imbalance"),
        (Prefill(1, 128, imbalance=1e-300), "prefill.attention_imbalance"),
        (Prefill(1, 128, prefix=-1), "prefill.prefix_tokens"),
        (Prefill(1, 128, imbalance=-1.0), "prefill.attention_imbalance"),
        (Prefill(1, 128, imbalance=float("nan")), "prefill.attention_imbalance"),
        (Prefill(1, 128, imbalance=float("inf")), "prefill.attention_imbalance"),
        (DecodeStep(0, 128, 2), "decode_step.batch_per_rank"),
        (DecodeStep(1, -5, 2), "decode_step.isl_tokens"),
        (DecodeStep(1, 128, 0), "decode_step.osl_tokens"),
        (DecodeTrajectory(1, 128, 0), "decode_trajectory.osl_tokens"),
        (DecodeTrajectory(1, 128, 8, beam_width=-1), "decode_trajectory.beam_width"),
        (DecodeTrajectory(1, 128, 8, beam_width=HUGE), "decode_trajectory.beam_width"),
        (DecodeTrajectory(1, 128, 8, stride=-1), "decode_trajectory.stride"),
        (Mixed(-1, 1, 128, 2), "mixed.ctx_tokens_per_rank"),
        (Mixed(1, -1, 128, 2), "mixed.gen_requests_per_rank"),
        (Mixed(1, 1, 0, 2), "mixed.isl_tokens"),
        (Mixed(1, 1, 128, 2, prefix=128), "mixed.prefix_tokens"),
    ],
)
def test_illegal_numbers_name_their_field(client: Client, step, field) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        client.predict(CONFIG, step)
    assert caught.value.reason == "INVALID_FIELD"
    assert caught.value.details["field"] == field
    with pytest.raises(errors.InvalidRequest) as caught:
        client.predict_many(CONFIG, step)
    assert caught.value.details["field"].partition("[")[0] == field


@pytest.mark.parametrize("bad", [1.5, "7", None, True, 2**40, float("nan"), float("inf"), [1, 2], 1j])
def test_the_client_refuses_what_is_no_whole_number(client: Client, bad) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        client.predict(CONFIG, Prefill(bad, 128))
    assert caught.value.details["field"] == "batch"


@pytest.mark.parametrize(
    "bad", [[1.5], ["7"], [None], [True], [2**40], [2**70], [float("nan")], [[1, 2]], [[1], [2, 3]], [1j]]
)
def test_the_client_refuses_columns_of_anything_else(client: Client, bad) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        client.predict_many(CONFIG, Prefill(bad, 128))
    assert caught.value.details["field"] == "batch"


@pytest.mark.parametrize(
    "step",
    [
        Prefill(HUGE, HUGE),
        Prefill(1, HUGE, prefix=HUGE - 1),
        DecodeStep(HUGE, HUGE, HUGE),
        Mixed(HUGE, HUGE, HUGE, HUGE),
        Mixed(HUGE, 0, 1, 1),
        Mixed(0, 0, 128, 2),
        Prefill(1, 128, imbalance=1e300),
    ],
)
def test_huge_numbers_give_a_finite_answer_or_a_typed_error(client: Client, step) -> None:
    try:
        latency = client.predict(CONFIG, step).latency_ms
    except PerfcastError as error:
        assert error.reason not in ("", "INTERNAL")
    else:
        assert np.isfinite(latency) and latency >= 0


def test_an_endless_trajectory_is_refused_with_advice(client: Client) -> None:
    with pytest.raises(errors.LimitExceeded, match="larger stride") as caught:
        client.predict(CONFIG, DecodeTrajectory(1, 128, HUGE, stride=1))
    assert caught.value.details["limit"] == "max_points_per_request"
    assert caught.value.retry_after_s is None


@pytest.mark.parametrize(
    ("steps", "field"),
    [
        (Prefill([1, 2], [128, 256, 512]), "prefill.batch_per_rank"),
        (DecodeStep([1, 2, 3], [1, 2], 2), "decode_step.isl_tokens"),
        (Prefill([], 128), "prefill.batch_per_rank"),
        (Mixed([1, 2, 3], 1, 128, 2, prefix=[0, 1]), "mixed.prefix_tokens"),
    ],
)
def test_columns_of_unequal_length_are_refused(client: Client, steps, field) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        client.predict_many(CONFIG, steps)
    assert caught.value.details["field"] == field


def test_a_bad_point_is_named_by_its_index(client: Client) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        client.predict_many(CONFIG, Prefill([1, 2, 0, 4], 128))
    assert caught.value.details["field"] == "prefill.batch_per_rank[2]"


@pytest.mark.parametrize(
    "values",
    [
        {"tp": 0},
        {"tp": -4},
        {"tp": 3},
        {"tp": 2**31},
        {"tp": 2**62},
        {"pp": -1},
        {"gemm_quant": "fp7"},
        {"kv_cache_quant": "x" * 100_000},
        {"nextn": -1},
        {"nextn": 10**9},
        {"expert_slots": -1},
        {"moe_backend": "nonsense"},
        {"attention_backend": "\x00\n"},
        {"workload_distribution": "?"},
        {"system": ""},
        {"backend": ""},
        {"model": ""},
        {"system": "x" * 1_000_000},
        {"model": "/etc/passwd"},
        {"model": "é" * 256},
        {"model": "mine", "config_json": "{"},
        {"model": "mine", "config_json": "[]"},
        {"model": "mine", "config_json": "null"},
        {"model": "mine", "config_json": "{}"},
        {"model": "mine", "config_json": "[" * 100_000},
        {"model": "mine", "config_json": '{"architectures": ["Nope"]}'},
        {"model": "mine", "config_json": '{"a": 1e999999}'},
        {"model": "mine", "config_json": "x" * (1 << 20)},
    ],
)
def test_a_bad_configuration_is_refused_without_harm(client: Client, values) -> None:
    try:
        client.resolve(changed(**values))
    except PerfcastError as error:
        assert error.reason not in ("", "INTERNAL"), error
        assert "/etc/" not in error.message and "Traceback" not in error.message
    assert client.predict(CONFIG, Prefill(1, 128)).latency_ms > 0


def test_zero_and_negative_widths_and_unknown_words_are_invalid(client: Client) -> None:
    for values in ({"tp": -4}, {"gemm_quant": "fp7"}, {"nextn": -1}):
        with pytest.raises(errors.InvalidRequest):
            client.resolve(changed(**values))
    for values in ({"database_mode": "gold"}, {"profile": "best"}, {"tp": "four"}, {"tp": 1.5}, {"nextn": True}):
        with pytest.raises(errors.InvalidRequest):
            client.resolve(changed(**values))


def test_unknown_members_are_refused_not_ignored(raw) -> None:
    with pytest.raises(errors.InvalidRequest, match="tensor_parallel"):
        EngineConfig.from_dict({**CONFIG.to_dict(), "tensor_parallel": 4})
    request = prediction_pb2.PredictStepRequest(config=CONFIG.to_message())
    request.prefill.batch_per_rank, request.prefill.isl_tokens = 1, 128
    future_field = b"\xfa\x7f\x01\x00"  # field 2047, one byte
    error, info, _ = raw("Prediction/PredictStep", request.SerializeToString() + future_field)
    assert (error.code(), info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    request.config.database_mode = 99
    error, info, _ = raw("Prediction/PredictStep", request.SerializeToString())
    assert (error.code(), info.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "config.database_mode")


def test_malformed_bytes_are_invalid(raw) -> None:
    for data in (b"\xff" * 50, b"\x0a\xff\xff\xff\xff\x0f", b"\x08"):
        error, info, _ = raw("Prediction/PredictStep", data)
        assert (error.code(), info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")


def test_an_empty_request_says_what_is_missing(raw) -> None:
    error, info, status = raw("Prediction/PredictStep", b"")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    bad = error_details_pb2.BadRequest()
    assert status.details[1].Unpack(bad)
    assert bad.field_violations[0].field == info.metadata["field"] == "step"
    assert "prefill" in bad.field_violations[0].description
    error, info, _ = raw("Prediction/ResolveEngine", b"")
    assert info.metadata["field"] == "engine"
    error, info, _ = raw("Catalog/CheckSupport", b"")
    assert info.metadata["field"] == "config"


def test_not_found_carries_resource_info(raw) -> None:
    request = catalog_pb2.ListVersionsRequest(system="h300")
    error, info, status = raw("Catalog/ListVersions", request.SerializeToString())
    assert (error.code(), info.reason, info.domain) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_SYSTEM", "perfcast")
    resource = error_details_pb2.ResourceInfo()
    assert status.details[1].Unpack(resource)
    assert (resource.resource_type, resource.resource_name) == ("system", "h300")


def test_a_method_of_another_build_is_unimplemented(served: Running) -> None:
    with grpc.insecure_channel(served.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/perfcast.v1.Prediction/Divine")(b"", timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_more_points_than_the_limit_are_refused() -> None:
    with running(max_points_per_request=1000) as served, Client(served.address) as client:
        assert len(client.predict_many(CONFIG, DecodeStep(np.ones(1000, int), 128, 2))) == 1000
        with pytest.raises(errors.LimitExceeded) as caught:
            client.predict_many(CONFIG, DecodeStep(np.ones(1001, int), 128, 2))
        assert (caught.value.reason, caught.value.code) == ("LIMIT", "RESOURCE_EXHAUSTED")


def test_a_message_beyond_the_limit_is_refused_by_grpc() -> None:
    with running(max_message_bytes=100_000) as served, Client(served.address) as client:
        with pytest.raises(errors.LimitExceeded):
            client.predict_many(CONFIG, DecodeStep(np.ones(50_000, int), 128, 2))
        with pytest.raises(errors.LimitExceeded, match="fewer points"):
            client.predict_many(CONFIG, DecodeStep(np.ones(20_000, int), 128, 2))
        assert client.predict(CONFIG, Prefill(1, 128)).latency_ms > 0


@pytest.mark.parametrize(
    ("path", "asked", "limit"),
    [
        ("Planner/EvaluateTick", NOTHING, "message_bytes"),
        ("Calibration/ImportState", NOTHING, "message_bytes"),
        ("Search/Search", NOTHING, "message_bytes"),
        ("Planner/EvaluateTick", planner_pb2.EvaluateTickRequest(groups=[planner_pb2.TickGroup()] * 5000), "groups"),
        ("Planner/EvaluateTick", tick(workers=[planner_pb2.WorkerLoad()] * 70_000), "workers"),
        ("Planner/EvaluateTick", tick(scenarios=[planner_pb2.Scenario()] * 70_000), "scenarios"),
    ],
)
def test_requests_of_many_empty_messages_are_refused_before_they_are_looked_at(
    served: Running, path: str, asked: Message | bytes, limit: str
) -> None:
    data = asked if isinstance(asked, bytes) else asked.SerializeToString()
    with grpc.insecure_channel(served.address) as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(f"/perfcast.v1.{path}")(iter([data]), timeout=PATIENCE_S))
    told = errors.from_call(caught.value.code(), caught.value.details(), caught.value.trailing_metadata())
    assert (told.reason, told.details["limit"], told.retry_after_s) == ("LIMIT", limit, None)
