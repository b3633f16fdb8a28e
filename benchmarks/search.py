"""Whole searches and single estimates in process, beside the reference engine in the same rounds.

    python -m benchmarks.search [--rounds N] [--reference-python PY] [--json]

Every round runs every arm once, ours and the reference's in turn, tables warm on both sides. CPU seconds are reported
(the two run one after another, so wall ratios say the same on an idle machine); ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perfcast_engine.config import EngineConfig, ParallelConfig
from perfcast_engine.predictor import Predictor
from perfcast_planning.search.search import search
from perfcast_planning.search.shared import Shared
from perfcast_planning.search.task import SearchTask
from perfcast_planning.search.workshop import TableWorkshop
from perfcast_planning.serving.aggregated import aggregated
from perfcast_planning.serving.worker import worker_of
from perfcast_planning.serving.workload import Targets, Workload

from benchmarks.processes import Peer

SYSTEM, BACKEND, VERSION = "h200_sxm", "trtllm", "1.3.0rc20"
LOAD = Workload(4000, 500, 500)
CASES = {  # model, GPUs, (TTFT, TPOT)
    "dense": ("Qwen/Qwen3-32B-FP8", 32, (300.0, 10.0)),
    "moe": ("Qwen/Qwen3-235B-A22B-FP8", 8, (2000.0, 30.0)),  # 19 mappings
}
MODES = ("agg", "disagg")


@dataclass(frozen=True)
class Arm:
    """One thing timed on both sides; ``ours`` returns the figure that both must agree on."""

    name: str
    ours: Callable[[], float]
    theirs: tuple[str, dict[str, Any]]


def searches(predictor: Predictor) -> list[Arm]:
    arms = []
    for name, (model, gpus, limits) in CASES.items():
        config = EngineConfig(model=model, system=SYSTEM, backend=BACKEND, version=VERSION, profile="reference")
        for mode in MODES:
            task = SearchTask(engine=config, load=LOAD, targets=Targets(*limits), total_gpus=gpus, modes=(mode,))
            sides = ("",) if mode == "agg" else ("prefill_", "decode_")
            fields = {"isl": LOAD.isl, "osl": LOAD.osl, "prefix": LOAD.prefix, "ttft": limits[0], "tpot": limits[1]}
            for side in sides:
                fields |= {f"{side}model_path": model, f"{side}system_name": SYSTEM}
                fields |= {f"{side}backend_name": BACKEND, f"{side}backend_version": VERSION}
            fields |= {"serving_mode": mode, "total_gpus": gpus, "database_mode": "SILICON"}
            arms.append(Arm(f"{name} {mode}", searched(predictor, task), ("search", fields)))
    return arms


def searched(predictor: Predictor, task: SearchTask) -> Callable[[], float]:
    def run() -> float:
        (found,) = search(task, TableWorkshop(predictor)).experiments
        return float(found.rows["tokens_per_s_per_gpu"].max())

    return run


def estimate(predictor: Predictor) -> Arm:
    model = CASES["dense"][0]
    config = EngineConfig(
        model=model, system=SYSTEM, backend=BACKEND, version=VERSION, profile="reference", parallel=ParallelConfig(tp=4)
    )
    fields = {"model_path": model, "system_name": SYSTEM, "backend_name": BACKEND, "backend_version": VERSION}
    fields |= {"isl": LOAD.isl, "osl": LOAD.osl, "prefix": LOAD.prefix, "batch_size": 16, "tp_size": 4}

    def run() -> float:
        worker = worker_of(predictor.engine(replace(config), phase_of=Shared().phase))
        return float(aggregated(worker, LOAD, 16, LOAD.isl).rows["ttft_ms"][0])

    return Arm("estimate", run, ("estimate", fields))


def cpu_seconds(run: Callable[[], float]) -> tuple[float, float]:
    began = time.process_time()
    figure = run()
    return time.process_time() - began, figure


def resident_mib(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reference-python", metavar="PY", help="an interpreter that has the reference engine")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    predictor = Predictor()
    arms = [*searches(predictor), estimate(predictor)]
    script = str(Path(__file__).with_name("reference_search.py"))
    peer = Peer(options.reference_python, script) if options.reference_python else None
    ours: dict[str, list[float]] = {arm.name: [] for arm in arms}
    theirs: dict[str, list[float]] = {arm.name: [] for arm in arms}
    idle, grown = resident_mib("VmRSS"), 0.0
    for round_ in range(-1, options.rounds):  # the first warms the tables
        for arm in arms:
            seconds, figure = cpu_seconds(arm.ours)
            grown = max(grown, resident_mib("VmRSS") - idle)
            if peer is not None:
                _, cpu, reference = peer.ask(arm.theirs)
                assert abs(figure / reference - 1) < 1e-6, f"{arm.name}: {figure} is not the reference's {reference}"
            if round_ >= 0:
                ours[arm.name].append(seconds)
                if peer is not None:
                    theirs[arm.name].append(cpu)
    grown = max(grown, resident_mib("VmHWM") - idle)
    report = {"memory above idle, MiB": round(grown)}
    pairs = {name: (ours[name], theirs[name]) for name in ours}
    for name in CASES:
        both = [[side[f"{name} {mode}"] for mode in MODES] for side in (ours, theirs)]
        own, other = ([sum(times) for times in zip(*modes, strict=True)] for modes in both)
        pairs[f"{name} agg + disagg"] = own, other
    for name, (own, other) in pairs.items():
        report[name] = {"cpu_s": round(statistics.median(own), 4)}
        if other:
            report[name] |= {
                "reference_cpu_s": round(statistics.median(other), 3),
                "ratio": round(statistics.median(b / a for a, b in zip(own, other, strict=True)), 1),
            }
    if peer is not None:
        peer.close()
    if options.json:
        print(json.dumps(report))
        return
    for name, figures in report.items():
        print(f"{name:<24}{figures}")


if __name__ == "__main__":
    main()
