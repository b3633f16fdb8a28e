"""Random requests, at the level of bytes and of fields: every one is answered or refused with a reason."""

from __future__ import annotations

import math
import random
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from perfcast.v1 import catalog_pb2, deploy_pb2, prediction_pb2
from perfcast_client import EngineConfig

from tests.server.running import Running

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
METHODS: dict[str, tuple[type[Message], type[Message]]] = {
    "Prediction/ResolveEngine": (prediction_pb2.ResolveEngineRequest, prediction_pb2.ResolveEngineResponse),
    "Prediction/PredictStep": (prediction_pb2.PredictStepRequest, prediction_pb2.PredictStepResponse),
    "Prediction/PredictSteps": (prediction_pb2.PredictStepsRequest, prediction_pb2.PredictStepsResponse),
    "Catalog/ListSystems": (catalog_pb2.ListSystemsRequest, catalog_pb2.ListSystemsResponse),
    "Catalog/ListModels": (catalog_pb2.ListModelsRequest, catalog_pb2.ListModelsResponse),
    "Catalog/ListVersions": (catalog_pb2.ListVersionsRequest, catalog_pb2.ListVersionsResponse),
    "Catalog/CheckSupport": (catalog_pb2.CheckSupportRequest, catalog_pb2.CheckSupportResponse),
    "Deploy/Generate": (deploy_pb2.GenerateRequest, deploy_pb2.GenerateResponse),
    "Deploy/ListTargets": (deploy_pb2.ListTargetsRequest, deploy_pb2.ListTargetsResponse),
    "Deploy/Validate": (deploy_pb2.ValidateRequest, deploy_pb2.ValidateResponse),
    "Catalog/Coverage": (catalog_pb2.CoverageRequest, catalog_pb2.CoverageResponse),
}
USUAL = (1, 2, 3, 7, 8, 16, 128, 1000, 4096)
ODD = (0, 0, 65_536, 131_073, -1, -(2**31), 2**31 - 1)
LONG = (2**31, 2**62, -(2**63), 2**63 - 1)
REALS = (0.0, 1.0, 0.5, 1.5, -1.0, 1e300, -1e300, 5e-324, math.nan, math.inf, -math.inf)
LEGAL = {  # by the name of the field
    "model_id": ("Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-120b"),
    "system": ("h200_sxm", "h100_sxm", "b200_sxm", "b60", "l4", "a100_sxm"),
    "backend": ("trtllm", "sglang", "vllm"),
    "version": ("", "current", "next", "previous", "1.3.0rc20"),
    "gemm": ("", "fp8", "fp8_block", "nvfp4", "bfloat16", "int4_wo"),
    "moe": ("", "fp8", "fp8_block", "nvfp4", "bfloat16", "w4afp8"),
    "kv_cache": ("", "fp8", "bfloat16", "int8"),
    "fmha": ("", "fp8", "bfloat16", "fp8_block"),
    "comm": ("", "half", "fp8", "int8"),
    "moe_backend": ("", "megamoe", "deepep_moe"),
    "attention_backend": ("", "fa3", "flashinfer", "triton"),
    "workload_distribution": ("", "uniform", "balanced", "power_law", "power_law_1.2"),
    "target": ("engine", "dynamo", "llm-d-helm", "llm-d-kustomize", "fpm"),
    "transport": ("", "nvlink", "ib", "efa"),
    "namespace": ("", "serving"),
    "handle": ("0" * 32, "f" * 32),
    "config_json": ("{}", "[", '{"architectures": ["Qwen3ForCausalLM"]}'),
}
STRANGE = ("", "../../etc/passwd", "\x00", "é" * 90, "x" * 1000, "nan", "0", "-1", "LLAMA")


def fill(message: Any, dice: random.Random, oddness: float, depth: int = 0) -> None:
    """Set some fields of ``message``; the ``oddness`` of a request is the share of values that are not as usual."""
    chosen = {group.name: dice.choice(group.fields).name for group in message.DESCRIPTOR.oneofs}
    if "engine" in chosen and dice.random() >= oddness:
        chosen["engine"] = "config"
    for field in message.DESCRIPTOR.fields:
        odd = dice.random() < oddness
        group = field.containing_oneof
        if group is not None and chosen[group.name] != field.name:
            continue
        if field.containing_type.name == "EngineConfig" and not odd and dice.random() < 0.8:
            continue
        if field.type == field.TYPE_MESSAGE and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)["NAME"] = dice.choice(STRANGE)
        elif field.type == field.TYPE_MESSAGE and field.is_repeated:
            for _ in range(dice.choice((0, 1, 1, 3))):
                fill(getattr(message, field.name).add(), dice, oddness, depth + 1)
        elif field.type == field.TYPE_MESSAGE:
            value = getattr(message, field.name)
            if field.name == "config":
                value.CopyFrom(CONFIG.to_message())
            value.SetInParent()
            fill(value, dice, oddness, depth + 1)
        elif field.is_repeated:
            number = dice.choice((0, 1, 2, 5)) if odd else 3
            getattr(message, field.name).extend(draw(field, dice, odd) for _ in range(number))
        elif dice.random() < 0.9 or field.name.endswith("_tokens") or field.name.endswith("_per_rank"):
            setattr(message, field.name, draw(field, dice, odd))


def draw(field: Any, dice: random.Random, odd: bool) -> Any:
    match field.type:
        case field.TYPE_STRING:
            return dice.choice(STRANGE if odd else LEGAL.get(field.name, ("",)))
        case field.TYPE_BYTES:
            return dice.randbytes(32)
        case field.TYPE_UINT64:
            return dice.choice((0, 2**63, 2**64 - 1) if odd else USUAL)
        case field.TYPE_BOOL:
            return dice.random() < 0.5
        case field.TYPE_DOUBLE:
            return dice.choice(REALS) if odd else 1.0
        case field.TYPE_ENUM:
            return dice.choice((99, -1)) if odd else dice.choice((0, 1, 2))
        case _ if field.name == "prefix_tokens" and not odd:
            return 0
        case field.TYPE_SFIXED32:
            return dice.choice(ODD if odd else USUAL)
        case _ if field.containing_type.name == "ParallelConfig" and not odd:
            return dice.choice((0, 1, 1, 2, 4, 8))
        case _ if field.name in ("nextn", "expert_slots") and not odd:
            return dice.choice((0, 0, 0, 1, 3))
        case _:
            return dice.choice(ODD + LONG if odd else USUAL)


def finite(message: Any) -> bool:
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            if field.message_type.GetOptions().map_entry:
                continue
            if not all(finite(part) for part in (value if field.is_repeated else [value])):
                return False
        elif field.type == field.TYPE_DOUBLE and not all(map(math.isfinite, value if field.is_repeated else [value])):
            return False
    return True


def check(channel: grpc.Channel, method: str, data: bytes) -> None:
    try:
        answer = channel.unary_unary(f"/perfcast.v1.{method}")(data, timeout=60)
    except grpc.RpcError as error:
        told = dict(error.trailing_metadata()).get("grpc-status-details-bin")
        assert told is not None, f"{method} {data!r}: {error.code()} {error.details()}"
        info = error_details_pb2.ErrorInfo()
        assert status_pb2.Status.FromString(told).details[0].Unpack(info)
        unforeseen = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
        assert error.code() not in unforeseen, f"{method} {data!r}: {error.details()}"
        assert info.reason
    else:
        assert finite(METHODS[method][1].FromString(answer)), f"{method} {data!r} has an answer that is not finite"


def assault(channel: grpc.Channel, seed: int, number: int) -> None:
    dice = random.Random(seed)
    for _ in range(number):
        method = dice.choice((*METHODS, *["Prediction/PredictStep", "Prediction/PredictSteps"] * 4))
        message = METHODS[method][0]()
        fill(message, dice, dice.choice((0.0, 0.02, 0.1, 0.5)))
        data = bytearray(message.SerializeToString())
        if dice.random() < 0.1:
            for _ in range(dice.randrange(1, 4)):
                data.insert(dice.randrange(len(data) + 1), dice.randrange(256))
        check(channel, method, bytes(data))


def test_random_requests_are_answered_or_refused_with_a_reason(served: Running) -> None:
    with grpc.insecure_channel(served.address) as channel:
        assault(channel, seed=1, number=600)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_random_requests(served: Running, seed: int) -> None:
    with grpc.insecure_channel(served.address) as channel:
        assault(channel, seed, number=3_000)
