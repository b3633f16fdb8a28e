"""The examples, as their users run them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from perfcast_client import Client, EngineConfig

from tests.server.running import Running

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ten_lines(served: Running) -> None:
    rates = [float(rate) for rate in re.findall(r"([\d.]+) requests/s", run("ten_lines.py", served.address))]
    assert len(rates) == 3 and rates == sorted(rates)
    lines = (EXAMPLES / "ten_lines.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 10


def test_a_mock_engine_replays_100_000_steps_without_asking_a_server(served: Running) -> None:
    mock_engine = loaded("mock_engine")
    config = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
    with Client(served.address) as client, client.surface(config, ask=False) as surface:
        done = mock_engine.replay(surface, 100_000, 8.0)
        again = mock_engine.replay(surface, 1000, 8.0)
    assert (again.step_ms == done.step_ms[:1000]).all()
    assert len(done.step_ms) == 100_000 and done.step_ms.min() > 1
    assert done.simulated_s >= done.step_ms.sum() / 1000
    assert done.finished == pytest.approx(8.0 * done.simulated_s, rel=0.05)  # it keeps up with the arrivals
    assert 0 <= len(done.ttft_s) - done.finished <= mock_engine.MAX_RUNNING
    itl_s = (done.step_ms * done.decoding).sum() / done.decoding.sum() / 1000
    tokens_per_s = done.decoding.sum() / done.simulated_s
    assert tokens_per_s == pytest.approx(8.0 * mock_engine.MEAN_OUTPUT, rel=0.05)
    assert done.ttft_s.min() > 0 and 0.005 < itl_s < 0.05
    told = run("mock_engine.py", served.address, "--steps", "2000")
    assert re.match(r"2000 steps, \d+ s of the engine, replayed in .* s\n\d+ requests, ", told) and "TTFT" in told


def test_the_autoscaler_follows_the_load_and_holds_its_targets(served: Running) -> None:
    autoscaling = loaded("autoscaling")
    with Client(served.address) as client:
        history = autoscaling.autoscale(client, 20.0)
    pools = {round(minute * 2): engines for minute, _, engines, *_ in history}
    assert pools[0] == 1 and pools[20] >= 5 > pools[39]
    met = [ttft <= autoscaling.TTFT_S and itl <= autoscaling.ITL_S for *_, ttft, itl in history]
    assert sum(met) > 0.85 * len(met)
    assert len(re.findall(r"\d+ engines", run("autoscaling.py", served.address, "--minutes", "2"))) == 4
