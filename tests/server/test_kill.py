"""A server that is killed at random points, and started again, learns every acknowledged Tune exactly once."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
from perfcast.v1 import calibration_pb2
from perfcast_client import Client, EngineConfig, calibration, errors
from perfcast_client.planner_types import RankPass
from perfcast_engine import EngineConfig as OwnConfig
from perfcast_engine import ParallelConfig, Predictor
from perfcast_planning.planner.pass_model import LearningOptions, PassModel
from perfcast_planning.planner.telemetry import Iterations, RankRecord

from tests.server.processes import start

ENGINE = {"model": "Qwen/Qwen3-32B", "system": "h200_sxm", "backend": "vllm"}


def record(sequence: int) -> RankPass:
    rng = random.Random(sequence)
    tokens, decodes = rng.choice([0, rng.randrange(1, 8000)]), rng.randrange(1, 400)
    return RankPass(int(tokens > 0), tokens, 0, decodes, decodes * rng.randrange(500, 4000), rng.uniform(0.01, 0.4))


class Teacher(threading.Thread):
    """Tunes one state with one record after another; repeats what was not acknowledged."""

    def __init__(self, socket: Path) -> None:
        super().__init__(daemon=True)
        self.socket = socket
        self.acknowledged = 0
        self.wrong: list[str] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        engine = EngineConfig(**ENGINE, tp=4)
        with Client(f"unix:{self.socket}", wait_for_ready=True) as client:
            while not (self.stopped.is_set() or self.wrong):
                sequence = self.acknowledged + 1
                call = calibration.tune(engine, "s", [[record(sequence)]], client_id="teacher", sequence=sequence)
                try:
                    told = client.ask(call, deadline_s=60)
                except (errors.Unavailable, errors.DeadlineExceeded):
                    continue
                except Exception as error:
                    self.wrong.append(repr(error))
                    return
                if told.state_version != sequence:
                    self.wrong.append(f"call {sequence} led to version {told.state_version}")
                self.acknowledged = sequence


@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_no_acknowledged_tune_is_lost_and_none_is_learned_twice(tmp_path: Path, kills: int) -> None:
    socket, rng = tmp_path / "s", random.Random(kills)
    teacher = Teacher(socket)
    teacher.start()
    flags = ("--host", "", "--unix-socket", str(socket), "--state-dir", str(tmp_path / "states"))
    for _ in range(kills):
        process, _ = start(*flags)
        seen, patience = teacher.acknowledged, time.monotonic() + 60
        while teacher.acknowledged < seen + 2 and not teacher.wrong and time.monotonic() < patience:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.wait()
        assert not teacher.wrong
        assert teacher.acknowledged >= seen + 2
    process, _ = start(*flags)
    try:
        teacher.stopped.set()
        teacher.join(70)
        assert not teacher.wrong and not teacher.is_alive()
        with Client(f"unix:{socket}") as client:
            exported = client.ask(calibration.export_state(EngineConfig(**ENGINE, tp=4), "s"))
    finally:
        process.kill()
        process.wait()
    state = calibration_pb2.CalibrationState.FromString(exported)
    assert state.version == teacher.acknowledged
    config = OwnConfig(**ENGINE, parallel=ParallelConfig(tp=4))
    alone = PassModel(LearningOptions(cold_start_factor=1.15), Predictor().engine(config).steps)
    for sequence in range(1, teacher.acknowledged + 1):
        rank = record(sequence)
        own = RankRecord(
            rank.prefill_requests, rank.prefill_tokens, 0, rank.decode_requests, rank.decode_kv_tokens, rank.wall_time_s
        )
        alone.tune(Iterations.of([[own]]))
    for samples, store in zip((state.prefill, state.decode, state.mixed), alone.stores.values(), strict=True):
        assert list(samples.values) == store.values
        assert list(samples.features) == [value for features in store.features for value in features]
