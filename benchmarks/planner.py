"""Planner questions over loopback: capacity searches, ticks of 100 workers, learning.

    python -m benchmarks.planner [--rounds N] [--reference-python PY] [--json]

A reference capacity search is the passes that its planner prices for the same question, one after another, without the
planner's own work on them. Medians over rounds; every question is asked once only, so that no kept answer counts.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perfcast_client import Client, EngineConfig, calibration, planner
from perfcast_client.planner_types import RankLoad, RankPass, Scenario, TickGroup, WorkerLoad
from perfcast_engine import EngineConfig as OwnConfig
from perfcast_engine import ParallelConfig, Predictor
from perfcast_planning.planner import capacity as own
from perfcast_planning.planner.engine_work import EngineLimits, EngineRole
from perfcast_planning.planner.pass_model import PassModel

from benchmarks.processes import Peer, server

DENSE = {"model": "Qwen/Qwen3-32B", "system": "h200_sxm", "backend": "vllm", "version": "0.24.0"}
MOE = {"model": "Qwen/Qwen3-235B-A22B", "system": "h200_sxm", "backend": "trtllm", "version": "1.3.0rc20"}
TARGETS = {"prefill": {"ttft_s": 0.5}, "decode": {"itl_s": 0.05}, "aggregated": {"ttft_s": 0.5, "itl_s": 0.05}}
OSL = 150


def median_ms(ask: Callable[[int], Any], rounds: int) -> float:
    ask(-1)
    seconds = []
    for number in range(rounds):
        began = time.perf_counter()
        ask(number)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1000


def in_process(role: str, rounds: int) -> float:
    """CPU ms of one search in the engine."""
    engine = Predictor().engine(OwnConfig(**DENSE, parallel=ParallelConfig(tp=4)))
    model, seconds = PassModel(steps=engine.steps), []
    for number in range(-1, rounds):
        request = own.CapacityRequest(isl=3000 + number, osl=OSL, **TARGETS[role])
        began = time.process_time()
        own.capacity(model, EngineRole[role.upper()], EngineLimits(), request)
        seconds.append(time.process_time() - began)
    return statistics.median(seconds[1:]) * 1000


def reference_passes(role: str, isl: int) -> list[dict[str, Any]]:
    """The passes of one search, as the reference's planner asks for them."""
    limits, c = EngineLimits(), isl + OSL // 2

    def one(tokens: int = 0, decodes: int = 0) -> dict[str, Any]:
        scheduled = {"num_prefill_requests": int(tokens > 0), "sum_prefill_tokens": tokens,
                     "num_decode_requests": decodes, "sum_decode_kv_tokens": decodes * c}  # fmt: skip
        return {"scheduled_requests": scheduled}

    if role == "prefill":
        return [one(b * isl) for b in range(1, limits.max_num_batched_tokens // isl + 1)]
    most = min(limits.max_num_seqs, limits.max_kv_tokens // c)
    batches = [1 + i * (most - 1) // 127 for i in range(128)]
    if role == "decode":
        return [one(0, b) for b in batches]
    passes = []
    for b in batches:
        share = math.ceil(b * isl / OSL)
        if share <= limits.max_num_batched_tokens - b:
            full, tail = divmod(share + isl, limits.max_num_batched_tokens)
            passes += [
                one(share, b),
                *[one(limits.max_num_batched_tokens, b)] * bool(full),
                *[one(tail, b)] * bool(tail),
            ]
    return passes


def measure(rounds: int, reference: str | None) -> list[tuple[str, float, str]]:
    peer = None
    if reference is not None:
        peer = Peer(reference, str(Path(__file__).with_name("reference_passes.py")))
        names = {"model": "model_name", "system": "system_name", "version": "backend_version"}
        peer.ask(
            {names.get(name, name): value for name, value in DENSE.items()}
            | {"tp_size": 4, "pp_size": 1, "schema_version": 1}
        )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        command = ("perfcast_cli", "serve", "--port", "0", "--metrics-port", "-1", "--state-dir", folder)
        with server(*command) as address, Client(address) as client:
            dense = client.resolve(EngineConfig(**DENSE, tp=4))
            moe = client.resolve(EngineConfig(**MOE, attn_dp=8, moe_ep=8))
            for role, targets in TARGETS.items():

                def ask(number: int, role: str = role, targets: dict[str, float] = targets) -> Any:
                    return client.ask(planner.capacity(dense, role=role, isl=3000 + number, osl=OSL, **targets))

                wire = median_ms(ask, rounds)
                note = f"{in_process(role, rounds):.2f} ms CPU in the engine"
                if peer is not None and role != "prefill":  # which is a pass or two
                    theirs = statistics.median(peer.ask(reference_passes(role, 3000 + n)) for n in range(rounds)) * 1000
                    note += f", reference {theirs:.1f} ms, {theirs / wire:.0f} x"
                rows.append((f"capacity, {role}", wire, note))
            scenarios = [Scenario(), Scenario(next_prompt_tokens=3000, next_decode_kv_tokens=3000)]
            for name, engine, ranks in (("1 rank", dense, 1), ("8 ranks", moe, 8)):

                def tick(number: int, engine: Any = engine, ranks: int = ranks) -> Any:
                    loads = [RankLoad(2, 9000 + number, 0, 0, 0, 0, 0, 40, 120_000, rank) for rank in range(ranks)]
                    workers = [WorkerLoad(f"w{n}", loads, 300.0, 1.0) for n in range(100)]
                    group = TickGroup(engine=engine, workers=workers, scenarios=scenarios)
                    return client.ask(planner.evaluate_tick([group]))

                rows.append((f"tick, 100 workers of {name}", median_ms(tick, rounds), "4 questions a worker"))
            passes = [RankPass(decode_requests=b, decode_kv_tokens=b * 3000, wall_time_s=0.02) for b in range(1, 65)]
            learned = [[one] for one in passes]

            def tune(number: int) -> Any:
                call = calibration.tune(dense, "s", learned, client_id="benchmark", sequence=number + 2)
                return client.ask(call)

            rows.append(("tune, 64 iterations", median_ms(tune, rounds), "durable before it is acknowledged"))
    if peer is not None:
        peer.close()
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=50)
    options.add_argument("--reference-python", help="interpreter that has the reference engine installed")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    rows = measure(given.rounds, given.reference_python)
    if given.json:
        print(json.dumps([{"name": name, "ms": ms, "note": note} for name, ms, note in rows], indent=2))
        return
    for name, ms, note in rows:
        print(f"{name:28} {ms:8.2f} ms   {note}")


if __name__ == "__main__":
    main()
