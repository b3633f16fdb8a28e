"""The examples, as their users run them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from perfcast_client import Client

from tests.server.running import Running

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
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


def test_the_autoscaler_follows_the_load_and_holds_its_targets(served: Running) -> None:
    autoscaling = loaded("autoscaling")
    with Client(served.address) as client:
        history = autoscaling.autoscale(client, 20.0)
    pools = {round(minute * 2): engines for minute, _, engines, *_ in history}
    assert pools[0] == 1 and pools[20] >= 5 > pools[39]
    met = [ttft <= autoscaling.TTFT_S and itl <= autoscaling.ITL_S for *_, ttft, itl in history]
    assert sum(met) > 0.85 * len(met)
    assert len(re.findall(r"\d+ engines", run("autoscaling.py", served.address, "--minutes", "2"))) == 4
