"""Requests that are legal, almost legal, and nothing of the kind, for every RPC there is."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from perfcast.v1 import calibration_pb2, catalog_pb2, deploy_pb2, planner_pb2, prediction_pb2, search_pb2, serving_pb2
from perfcast_client import (
    Aggregated,
    DecodeStep,
    DecodeTrajectory,
    Disaggregated,
    EngineConfig,
    Mixed,
    Pool,
    Prefill,
    SearchTask,
    Static,
    Workload,
    calibration,
    calls,
    planner,
)
from perfcast_client.planner_types import RankLoad, RankPass, TickGroup, WorkerLoad
from perfcast_client.search import Space

from tests.server.test_fuzz import LEGAL, fill

MODULES = (
    *(catalog_pb2, prediction_pb2, serving_pb2, search_pb2, planner_pb2, calibration_pb2, deploy_pb2, health_pb2),
)
INTEGERS = (0, 1, 2, 3, 7, 64, 4096, 65_537, -1, 2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**62, 2**63 - 1, -(2**63))
REALS = (0.0, -0.0, 1.0, 0.3, 1.5, -1.0, 1e-9, 1e6, 1e300, -1e300, 5e-324, math.nan, math.inf, -math.inf)
TEXTS = ("", "x", "../../etc/passwd", "\x00", "é" * 90, "x" * 3000, "nan", "-1", "LLAMA", "𝔘" * 20, "{}", "a/b", "\n")
LARGEST_REPEAT = 2000


@dataclass(frozen=True)
class Rpc:
    """One method: its path, its messages, whether there are many requests or answers, and legal requests to it."""

    path: str
    request: type[Message]
    response: type[Message]
    takes_many: bool
    tells_many: bool
    legal: tuple[Message, ...]


def _legal() -> Mapping[str, Sequence[Message]]:
    """Requests that are answered, by the path of their RPC."""
    dense = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
    experts = EngineConfig(model="Qwen/Qwen3-30B-A3B", system="h100_sxm", backend="vllm", tp=2, moe_ep=2)
    latent = EngineConfig(
        model="deepseek-ai/DeepSeek-V3", system="b200_sxm", backend="sglang", tp=8, moe_ep=8, database_mode="hybrid"
    )
    load = Workload(isl=1000, osl=100)
    ranks = [RankLoad(decode_requests=4, decode_kv_tokens=9000)]
    passes = [[RankPass(1, 500, 0, 4, 4000, 0.02)]]
    points = np.arange(1, 9)
    space = Space(num_gpu=(1, 2), tp=(1, 2), pp=(1,), attn_dp=(1,), moe_tp=(1,), moe_ep=(1,), cp=(1,))
    task = SearchTask(engine=EngineConfig(model=dense.model, system="h200_sxm", backend="trtllm"), workload=load,
                      total_gpus=2, space=space, modes=("aggregated",))  # fmt: skip
    asked: list[calls.Call[Any]] = [
        calls.server_info(),
        calls.systems(),
        calls.models("qwen", ""),
        calls.versions("h200_sxm", "trtllm"),
        calls.support("h200_sxm", "trtllm", "", (dense.model, experts.model)),
        calls.deploy_targets(),
        calls.search(task),
        calls.recommend(task, 1.0, None, 4),
        calls.validate_files({"a.yaml": b"kind: x\n", "manifest.json": b"{}"}),
        planner.evaluate_tick([TickGroup(engine=dense, workers=(WorkerLoad("a", tuple(ranks)),))]),
    ]
    for config in (dense, experts, latent):
        pool = Pool(engine=config, batch=4)
        asked += [
            calls.resolve(config),
            calls.check_support(config),
            calls.coverage(config, False),
            *(calls.predict(config, step, True) for step in (Prefill(1, 999), DecodeStep(8, 999, 99))),
            *(calls.predict(config, step, False) for step in (Mixed(512, 8, 512, 64), DecodeTrajectory(8, 999, 99))),
            calls.predict_many(config, DecodeStep(points, 512 + points, 64), True, True, True),
            calls.predict_many(config, Prefill(points, 512 + points, points), False, False, False),
            calls.predict_many(config, Mixed(points, points, 512 + points, 64), False, True, False),
            calls.surface(config, 512, ""),
            calls.estimate(Aggregated(engine=config, batch=8), load, None, 0.0, True, True),
            calls.estimate(Static(engine=config, batch=8), load, None, 0.0, False, True),
            calls.estimate(Disaggregated(prefill=pool, decode=pool), load, None, 0.0, False, True),
            calls.estimate_memory(config, load, None, 8192, 0.9, 0.1, 64),
            planner.estimate_passes(config, passes),
            planner.queue_drain(config, ranks),
            planner.decode_itl(config, ranks),
            planner.capacity(config, isl=1000, osl=100, ttft_s=1.0, itl_s=0.05),
            planner.bootstrap(config, max_context_tokens=2048, prefill_granularity=4, decode_granularity=2),
            planner.fit_latency_law(config),
            calibration.tune(config, "a", passes, client_id="x", sequence=1),
            calibration.diagnose(config, "a"),
            calibration.export_state(config, "a"),
            calibration.import_state(config, "b", b""),
            calls.generate(
                Aggregated(engine=config, batch=8), load, "dynamo", "as_predicted", None, 0.0, 1, None, None
            ),
        ]
    found: dict[str, list[Message]] = {}
    for call in asked:
        found.setdefault(call.path, []).append(call.request)
    found[calls.STREAM_STEPS] = [calls.step_message(1, Prefill(1, 128), config) for config in (dense, latent)]
    found["/grpc.health.v1.Health/Check"] = [health_pb2.HealthCheckRequest(service="perfcast.v1.Prediction")]
    return found


def _rpc(method: MethodDescriptor, legal: Mapping[str, Sequence[Message]]) -> Rpc:
    path = f"/{method.containing_service.full_name}/{method.name}"
    request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    many = method.client_streaming, method.server_streaming
    return Rpc(path, request, response, *many, tuple(legal.get(path, ())) or (request(),))


def rpcs() -> list[Rpc]:
    """Every method of every service but the watch of the health, which never ends, its list, which is not served, and
    Admin, which is off."""
    legal = _legal()
    services = [service for module in MODULES for service in module.DESCRIPTOR.services_by_name.values()]
    every = [_rpc(method, legal) for service in services for method in service.methods]
    return [rpc for rpc in every if rpc.path.rpartition("/")[2] not in ("Watch", "List")]


def made(rpc: Rpc, dice: random.Random) -> bytes:
    """One request of any kind."""
    chance = dice.random()
    if chance < 0.05:
        message = rpc.request()
        fill(message, dice, dice.choice((0.0, 0.02, 0.1, 0.5)))
    else:
        message = dice.choice(rpc.legal)
        if chance > 0.15:
            message = type(message).FromString(message.SerializeToString())
            for _ in range(dice.choice((1, 1, 2, 3, 8))):
                change(message, dice)
    data = message.SerializeToString()
    return spoiled(data, dice) if dice.random() < 0.2 else data


def change(message: Message, dice: random.Random) -> None:
    """Change one field, somewhere in the message."""
    if not message.DESCRIPTOR.fields:
        return
    given = [described for described, _ in message.ListFields()]
    field: Any = dice.choice(given if given and dice.random() < 0.6 else message.DESCRIPTOR.fields)
    if field.name == "config" and dice.random() < 0.8:  # an engine for every request would make it a test of loading
        return
    name: str = field.name
    value: Any = getattr(message, name)
    if field.type == field.TYPE_MESSAGE and not field.message_type.GetOptions().map_entry:
        if dice.random() < 0.1:
            message.ClearField(name)
        elif not field.is_repeated:
            value.SetInParent()
            change(value, dice)
        elif len(value) and dice.random() < 0.7:
            change(dice.choice(value), dice)
        else:
            value.add()
    elif dice.random() < 0.1 or field.type == field.TYPE_MESSAGE:
        message.ClearField(name)
    elif not field.is_repeated:
        setattr(message, name, drawn(field, dice))
    elif len(value) and dice.random() < 0.5:
        value[dice.randrange(len(value))] = drawn(field, dice)
    else:
        value.extend(drawn(field, dice) for _ in range(dice.choice((1, 1, 3, LARGEST_REPEAT))))


def drawn(field: Any, dice: random.Random) -> Any:
    """A value of the field's type, odd at times."""
    odd = dice.random() < 0.35
    match field.type:
        case field.TYPE_STRING:
            return dice.choice(TEXTS if odd else LEGAL.get(field.name, ("", "a", "h200_sxm", "trtllm", "aggregated")))
        case field.TYPE_BYTES:
            return dice.randbytes(dice.choice((0, 1, 33, 4000)))
        case field.TYPE_BOOL:
            return odd
        case field.TYPE_DOUBLE | field.TYPE_FLOAT:
            return dice.choice(REALS) if odd else dice.uniform(0, 2)
        case field.TYPE_ENUM:
            return dice.choice((0, 1, 2, 3, 4, 99, -1))
    value = dice.choice(INTEGERS) if odd else dice.choice((1, 2, 4, 8, 100, 1000))
    if field.type in (field.TYPE_INT32, field.TYPE_SINT32, field.TYPE_SFIXED32):
        return max(-(2**31), min(value, 2**31 - 1))
    if field.type in (field.TYPE_UINT32, field.TYPE_FIXED32):
        return max(0, min(value, 2**32 - 1))
    return abs(value) if field.type in (field.TYPE_UINT64, field.TYPE_FIXED64) else value


def spoiled(data: bytes, dice: random.Random) -> bytes:
    """The same as another would send it who does not know the contract."""
    at = dice.randrange(len(data) + 1)
    match dice.randrange(10):
        case 0:
            return dice.randbytes(dice.choice((0, 1, 7, 64, 1000)))
        case 1:
            return data[:at]
        case 2:
            return data[:at] + dice.randbytes(dice.randrange(1, 9)) + data[at:]
        case 3:
            return data + data
        case 4:  # messages in messages in messages
            depth = dice.choice((50, 99, 101, 1000, 20_000))
            return data + nested(dice.randrange(1, 30), depth)
        case 5:  # groups, which nobody uses any more
            return data + b"\x0b" * dice.choice((1, 99, 101, 10_000))
        case 6:  # a length that is not there
            return data + bytes([dice.randrange(1, 16) << 3 | 2]) + b"\xff\xff\xff\xff" + bytes([dice.randrange(128)])
        case 7:  # fields of another contract
            return data + b"\xa2\x9c\x01" + bytes([5]) + dice.randbytes(5)
        case 8:  # one large field
            size = dice.choice((10_000, 300_000))
            return data + bytes([dice.randrange(1, 16) << 3 | 2]) + varint(size) + bytes(size)
    changed = bytearray(data or b"\x00")
    for _ in range(dice.randrange(1, 5)):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def nested(field: int, depth: int) -> bytes:
    """A message that holds itself in that field, so many times."""
    parts: list[bytes] = []
    size = 0
    for _ in range(depth):
        head = varint(field << 3 | 2) + varint(size)
        parts.append(head)
        size += len(head)
    return b"".join(reversed(parts))


def varint(value: int) -> bytes:
    told = bytearray()
    while value > 127:
        told.append(value & 127 | 128)
        value >>= 7
    told.append(value)
    return bytes(told)
