"""Several worker processes behind one port."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import grpc
import pytest
from perfcast_client import Client, EngineConfig, Prefill, SearchTask, Workload, calls
from perfcast_engine import Predictor
from perfcast_server.search_process import ID
from perfcast_server.settings import Settings, child_environment
from perfcast_server.totals import Totals

from tests.server.running import PATIENCE_S, SEARCH_PATIENCE_S, Process, eventually, process

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
STEP = {"grpc_type": "unary", "grpc_service": "perfcast.v1.Prediction", "grpc_method": "PredictStep"}


@pytest.fixture(scope="module")
def pair() -> Iterator[Process]:
    with process("--workers", "2") as served:
        yield served


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ask(served: Process, connections: int) -> None:
    """One call over each of so many connections; the kernel deals them out among the workers."""
    for number in range(connections):
        with Client(served.address) as client:
            assert client.predict(CONFIG, Prefill(1, 128 + number)).latency_ms > 0


def test_both_workers_answer_and_the_metrics_are_their_sum(pair: Process) -> None:
    before = pair.metric("grpc_server_handled_total", **STEP, grpc_code="OK")
    ask(pair, 24)
    metrics = pair.metrics()
    assert metrics["grpc_server_handled_total", frozenset({**STEP, "grpc_code": "OK"}.items())] == before + 24
    assert metrics["grpc_server_handling_seconds_count", frozenset(STEP.items())] == before + 24
    assert metrics["engine_cache_entries", frozenset()] == 2  # the one engine, in each
    assert metrics["server_workers", frozenset()] == 2
    assert len(set(pair.worker_pids().values())) == 2


def test_a_killed_worker_is_replaced_and_what_it_counted_stays(pair: Process) -> None:
    ask(pair, 8)
    counted = pair.metric("grpc_server_started_total", **STEP)
    old = pair.worker_pids()
    os.kill(old[0], signal.SIGKILL)
    eventually(lambda: pair.worker_pids()[0] != old[0])
    assert pair.worker_pids()[1] == old[1]
    assert pair.metric("grpc_server_started_total", **STEP) == counted
    assert pair.metric("server_worker_restarts_total") == 1
    ask(pair, 8)
    assert pair.metric("grpc_server_started_total", **STEP) == counted + 8


def test_a_port_in_use_is_refused(pair: Process) -> None:
    port = pair.address.rpartition(":")[2]
    with process("--workers", "2", "--port", port) as second:
        assert second.popen.wait(60) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in second.output


def test_sigterm_drains_all_workers() -> None:
    with process("--workers", "2") as served:
        ask(served, 1)
        pids = list(served.worker_pids().values())
        assert served.end() == 0
        assert not any(map(alive, pids))
        assert len(served.logged("draining")) == 2
        with socket.socket() as probe:
            host, port = served.address.split(":")
            assert probe.connect_ex((host, int(port))) != 0


def test_workers_end_with_their_supervisor() -> None:
    with process("--workers", "2") as served:
        ask(served, 1)
        pids = list(served.worker_pids().values())
        served.end(signal.SIGKILL)
        eventually(lambda: not any(map(alive, pids)))


def descendants(pid: int) -> list[int]:
    own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*own, *(below for child in own for below in descendants(child))]


def asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_searches_end_with_their_server_whatever_it_had_not_heard_of_them() -> None:
    """The answer lies unread in the connection of a killed server, which its process finds reset, not closed."""
    task = SearchTask(engine=replace(CONFIG, tp=1), workload=Workload(isl=4000, osl=500), total_gpus=32)
    asked = calls.search(task)
    with process() as served, grpc.insecure_channel(served.address) as channel:
        heard = channel.unary_stream(asked.path)(asked.request.SerializeToString(), timeout=SEARCH_PATIENCE_S)
        assert next(heard)  # progress
        served.popen.send_signal(signal.SIGSTOP)
        below = descendants(served.popen.pid)
        assert len(below) == 2
        eventually(lambda: all(map(asleep, below)), SEARCH_PATIENCE_S)
        served.end(signal.SIGKILL)
        eventually(lambda: not any(map(alive, below)))


def test_a_search_whose_caller_left_before_it_began_ends_without_a_word() -> None:
    control, theirs = socket.socketpair()
    version = Predictor().catalog.digest()
    with control:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "perfcast_server.search_process", json.dumps(asdict(Settings())), version],
                stdin=theirs.fileno(),
                stderr=subprocess.PIPE,
                env=child_environment(),
            )
        for is_left in (True, False):
            own, end = socket.socketpair()
            with own, end:
                if is_left:
                    own.close()
                socket.send_fds(control, [b"F"], [end.fileno()])
                end.close()
                if not is_left:
                    own.settimeout(PATIENCE_S)
                    assert own.recv(1) == ID
    assert process.communicate(timeout=PATIENCE_S) == (None, b"")


def test_workers_that_cannot_start_end_the_start() -> None:
    with process("--workers", "2", "--data", "/nowhere") as served:
        assert served.popen.wait(60) == 1
    assert "is not a folder" in served.output
    assert "Traceback" not in served.output


def test_a_unix_socket_cannot_be_shared(tmp_path) -> None:
    with process("--workers", "2", "--unix-socket", str(tmp_path / "s")) as served:
        assert served.popen.wait(60) == 1
    assert "workers: several can share a TCP port, not a Unix socket" in served.output


def test_totals_keep_what_ended_processes_counted_but_not_what_they_held() -> None:
    def told(counted: float, held: float, began: float) -> list:
        return [
            ["calls", "counter", "Calls", [["calls_total", {"code": "OK"}, counted]]],
            ["held", "gauge", "Held", [["held", {}, held]]],
            ["process_start_time_seconds", "gauge", "Begin", [["process_start_time_seconds", {}, began]]],
        ]

    totals = Totals()
    totals.update(0, told(5, 1, 100))
    totals.update(1, told(7, 2, 50))
    totals.update(0, told(6, 4, 100))
    assert [sample.value for family in totals.families() for sample in family.samples] == [13, 6, 50]
    totals.end(1)
    totals.update(1, told(1, 0, 200))
    values = {sample.name: sample.value for family in totals.families() for sample in family.samples}
    assert values == {"calls_total": 14, "held": 4, "process_start_time_seconds": 100}
