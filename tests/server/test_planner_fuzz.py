"""Random planner questions and calibration calls: answered, or refused with a reason; states stay sound."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from perfcast.v1 import calibration_pb2, planner_pb2
from perfcast_client import Client, EngineConfig, calibration

from tests.server.running import Running, running
from tests.server.test_fuzz import fill, finite

CALLS = {
    **{f"Planner/{name}": getattr(planner_pb2, f"{name}Request") for name in (
        "EstimatePasses", "QueueDrain", "DecodeItl", "Capacity", "EvaluateTick", "Bootstrap", "FitLatencyLaw"
    )},
    **{f"Calibration/{name}": getattr(calibration_pb2, f"{name}Request") for name in (
        "Tune", "Diagnose", "ExportState", "ImportState"
    )},
}  # fmt: skip
CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("states")
    with running(state_dir=str(folder), max_states=200) as server:
        yield server


def usual(message: Any, dice: random.Random, exported: bytes) -> None:
    """Make what random filling left senseless sensible, most of the time."""
    fields = message.DESCRIPTOR.fields_by_name
    for name, values in {"state_name": ("", "a", "b"), "client_id": ("x", "y")}.items():
        if name in fields and dice.random() < 0.9:
            setattr(message, name, dice.choice(values))
    if "sequence" in fields and dice.random() < 0.8:
        message.sequence = dice.randrange(1, 50)
    if "expected_version" in fields and dice.random() < 0.8:
        message.ClearField("expected_version")
    if "limits" in fields and dice.random() < 0.8:
        message.limits.Clear()
    if "options" in fields and dice.random() < 0.8:
        message.ClearField("options")
    if "ranks" in fields and dice.random() < 0.8:
        del message.ranks[:]
        message.ranks.add(decode_requests=dice.randrange(5) + 1, decode_kv_tokens=dice.randrange(90), dp_rank=0)
    if "iterations" in fields and dice.random() < 0.8:
        del message.iterations[:]
        for _ in range(dice.randrange(4)):
            ranks = message.iterations.add().ranks
            ranks.add(prefill_requests=1, prefill_tokens=dice.randrange(5000), wall_time_s=dice.choice((0, 0.1, 1e300)))
    if "state" in fields and dice.random() < 0.7:
        message.state.ParseFromString(exported)
        if dice.random() < 0.5:
            fill(message.state, dice, 0.3)


def check(channel: grpc.Channel, method: str, data: bytes) -> None:
    response = getattr(
        planner_pb2 if method.startswith("Planner") else calibration_pb2, f"{method.split('/')[1]}Response"
    )
    try:
        if method == "Planner/Bootstrap":
            answers = list(channel.unary_stream(f"/perfcast.v1.{method}")(data, timeout=60))
        else:
            answers = [channel.unary_unary(f"/perfcast.v1.{method}")(data, timeout=60)]
    except grpc.RpcError as error:
        told = dict(error.trailing_metadata()).get("grpc-status-details-bin")
        assert told is not None, f"{method} {data!r}: {error.code()} {error.details()}"
        info = error_details_pb2.ErrorInfo()
        assert status_pb2.Status.FromString(told).details[0].Unpack(info) and info.reason
        assert error.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS), (
            f"{method} {data!r}: {error.details()}"
        )
    else:
        for answer in answers:
            assert finite(response.FromString(answer)), f"{method} {data!r} has an answer that is not finite"


def assault(server: Running, seed: int, number: int) -> None:
    dice = random.Random(seed)
    with Client(server.address) as client, grpc.insecure_channel(server.address) as channel:
        handle = client.resolve(CONFIG).handle
        good = calibration.tune(CONFIG, "good", [], client_id=f"c{seed}", sequence=1)
        client.ask(good)
        exported = client.ask(calibration.export_state(CONFIG, "good"))
        for _ in range(number):
            method = dice.choice(list(CALLS))
            message = CALLS[method]()
            fill(message, dice, dice.choice((0.0, 0.02, 0.1, 0.5)))
            if "handle" in message.DESCRIPTOR.fields_by_name and dice.random() < 0.7:
                message.handle = handle
            usual(message, dice, exported)
            for group in getattr(message, "groups", ()):
                group.handle = handle
                usual(group, dice, exported)
                for worker in group.workers:
                    usual(worker, dice, exported)
            data = bytearray(message.SerializeToString())
            if dice.random() < 0.05:
                data.insert(dice.randrange(len(data) + 1), dice.randrange(256))
            check(channel, method, bytes(data))
        assert client.ask(calibration.diagnose(CONFIG, "good")).state_version >= 1
        for name in ("a", "b"):
            try:
                state = client.ask(calibration.export_state(CONFIG, name))
            except LookupError:
                continue
            assert client.ask(calibration.import_state(CONFIG, f"copy-{name}-{seed}", state)) >= 1


def test_random_planner_requests_are_answered_or_refused_with_a_reason(learning: Running) -> None:
    assault(learning, seed=1, number=500)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_random_planner_requests(learning: Running, seed: int) -> None:
    assault(learning, seed, number=4000)
