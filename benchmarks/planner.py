"""Planner questions over loopback: capacity searches, ticks of 100 workers, learning.

    python -m benchmarks.planner [--rounds N] [--reference-python PY] [--json]

Medians over rounds; every question is asked once only, so that no kept answer counts. Times in the server are from
the metrics of its handler, means of BLOCK calls each. The reference is timed twice: the passes of a search alone,
without the work of a planner, and the whole search by a scalar transcription of what its planner does
(reference_planner.py). Where a prompt takes 3000 tokens, a prefill search is two passes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perfcast_client import Client, EngineConfig, calibration, planner
from perfcast_client.planner_types import RankLoad, RankPass, Scenario, TickGroup, WorkerLoad
from perfcast_engine import EngineConfig as OwnConfig
from perfcast_engine import ParallelConfig, Predictor
from perfcast_planning.planner import capacity as own
from perfcast_planning.planner.engine_work import EngineLimits, EngineRole
from perfcast_planning.planner.pass_model import PassModel

from benchmarks.processes import Meter, Peer, server

DENSE = {"model": "Qwen/Qwen3-32B", "system": "h200_sxm", "backend": "vllm", "version": "0.24.0"}
MOE = {"model": "Qwen/Qwen3-235B-A22B", "system": "h200_sxm", "backend": "trtllm", "version": "1.3.0rc20"}
TARGETS = {"prefill": {"ttft_s": 0.5}, "decode": {"itl_s": 0.05}, "aggregated": {"ttft_s": 0.5, "itl_s": 0.05}}
OSL, BLOCK = 150, 25
Row = tuple[str, float, str]  # what, ms, and what else there is to say


def taken_s(ask: Callable[[], Any]) -> float:
    began = time.perf_counter()
    ask()
    return time.perf_counter() - began


def median_ms(ask: Callable[[int], Any], rounds: int) -> float:
    ask(-1)
    return statistics.median(taken_s(lambda number=number: ask(number)) for number in range(rounds)) * 1000


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


def reference_question(role: str, isl: int) -> list[dict[str, Any]]:
    """A search as the transcription takes it: role, limits, request."""
    kind = EngineRole[role.upper()]
    request = {"isl": isl, "osl": OSL, "targets": TARGETS[role], "objective": "THROUGHPUT", "accepted": 1.0,
               "fresh_tokens": isl, "context_tokens": isl + OSL // 2,
               "legacy_rank_split": True, "legacy_single_request": True}  # fmt: skip
    return [{"prefills": kind.prefills, "decodes": kind.decodes}, asdict(EngineLimits()), request]


def searches(client: Client, meter: Meter, peer: Peer | None, rounds: int) -> Iterator[Row]:
    """Capacity searches: ours as the caller and as the server sees them, and the reference's."""
    engine = client.resolve(EngineConfig(**DENSE, tp=4))
    for role, targets in TARGETS.items():

        def ask(number: int, role: str = role, targets: dict[str, float] = targets) -> Any:
            return client.ask(planner.capacity(engine, role=role, isl=3000 + number, osl=OSL, **targets))

        ask(-1)
        trips, means = [], []
        for first in range(0, rounds, BLOCK):
            before = meter.handling("Capacity")
            time.sleep(0.01)  # until the server is done with that
            trips += [taken_s(lambda number=number: ask(number)) for number in range(first, min(first + BLOCK, rounds))]
            calls, spent, _ = (new - old for new, old in zip(meter.handling("Capacity"), before, strict=True))
            means.append(spent / calls)
        wire, served = (statistics.median(times) * 1000 for times in (trips, means))
        yield f"capacity, {role}", wire, "round trip"
        yield f"capacity, {role}", served, f"in the server, {in_process(role, rounds):.2f} ms CPU in the engine"
        if peer is None:
            continue
        told = [peer.ask(reference_question(role, 3000 + number)) for number in range(-1, rounds)][1:]
        for name, what in (("passes_s", "its passes alone"), ("search_s", "the whole search")):
            theirs = statistics.median(each[name] for each in told) * 1000
            note = f"reference, {what}: {theirs / served:.1f} x in our server, {theirs / wire:.1f} x our round trip"
            yield f"capacity, {role}", theirs, note


def measure(rounds: int, reference: str | None) -> list[Row]:
    peer, meter = None, Meter()
    if reference is not None:
        peer = Peer(reference, str(Path(__file__).with_name("reference_planner.py")))
        names = {"model": "model_name", "system": "system_name", "version": "backend_version"}
        peer.ask(
            {names.get(name, name): value for name, value in DENSE.items()}
            | {"tp_size": 4, "pp_size": 1, "schema_version": 1}
        )
    with tempfile.TemporaryDirectory() as folder:
        command = ("perfcast_cli", "serve", "--port", "0", "--metrics-port", meter.port, "--state-dir", folder)
        with server(*command) as address, Client(address) as client:
            rows = list(searches(client, meter, peer, rounds))
            dense = client.resolve(EngineConfig(**DENSE, tp=4))
            moe = client.resolve(EngineConfig(**MOE, attn_dp=8, moe_ep=8))
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
