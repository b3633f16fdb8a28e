"""What the server itself spends on columns of steps, how soon it first answers for an engine, and how soon it is ready.

    python -m benchmarks.many_steps [--rounds N] [--starts N] [--json]

Times of PredictSteps are the server's own, from its metrics; lengths are random, and half of each prompt may be cached.
First answers are calls that name a configuration that this server has not seen, in packs that it has opened.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
from perfcast_client import Client, DecodeStep, EngineConfig, Mixed, Prefill
from perfcast_client.errors import PerfcastError

from benchmarks.processes import Meter, server

POINTS = 10_000
ENGINES = (
    EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4),
    EngineConfig(model="deepseek-ai/DeepSeek-V3", system="h200_sxm", backend="sglang", tp=8, moe_ep=8),
    EngineConfig(model="deepseek-ai/DeepSeek-V3.2", system="b200_sxm", backend="trtllm", tp=8, moe_ep=8),
    EngineConfig(model="deepseek-ai/DeepSeek-V4-Pro", system="b200_sxm", backend="sglang", tp=8, moe_ep=8),
    EngineConfig(model="MiniMaxAI/MiniMax-M3", system="b200_sxm", backend="vllm", tp=8, moe_ep=8),
)
BACKENDS = ("trtllm", "vllm", "sglang")
OPENING = [EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend=backend, tp=4) for backend in BACKENDS]
FIRST = [
    EngineConfig(model=model, system="h200_sxm", backend=backend, tp=tp)
    for model in ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B")
    for backend in BACKENDS
    for tp in (1, 2, 4, 8)
]
MOST_MS, LEAST_POINTS_PER_S, MOST_FIRST_MS, MOST_READY_S = 20.0, 2e6, 30.0, 1.5


def steps(kind: str, rng: np.random.Generator) -> Any:
    lengths = rng.integers(1, 16_000, POINTS)
    if kind == "prefill":
        return Prefill(rng.integers(1, 17, POINTS), lengths, rng.integers(0, 1 + lengths // 2))
    if kind == "decode":
        return DecodeStep(rng.integers(1, 257, POINTS), lengths, rng.integers(1, 2000, POINTS))
    tokens, requests = rng.integers(64, 8192, POINTS), rng.integers(1, 257, POINTS)
    return Mixed(tokens, requests, lengths, rng.integers(1, 2000, POINTS), 0)


def measured(client: Client, meter: Meter, config: EngineConfig, asked: list[Any]) -> dict[str, Any]:
    """Time in the handler of one call, and points per CPU second of the whole server process."""
    engine = client.resolve(config)
    for each in asked[:3]:
        client.predict_many(engine, each, allow_misses=True)
    before = meter.handling("PredictSteps")
    for each in asked:
        client.predict_many(engine, each, allow_misses=True)
    calls, seconds, cpu_s = (new - old for new, old in zip(meter.handling("PredictSteps"), before, strict=True))
    return {"ms": seconds / calls * 1e3, "points_per_cpu_s": POINTS * calls / cpu_s}


def columns(client: Client, meter: Meter, rounds: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    for config in ENGINES:
        for kind in ("prefill", "decode", "mixed"):
            asked = [steps(kind, rng) for _ in range(rounds)]
            yield {"what": f"{config.model} {kind}", **measured(client, meter, config, asked)}
    asked = [DecodeStep(rng.integers(1, 65, POINTS), rng.integers(1, 8000, POINTS), 128) for _ in range(200)]
    yield {"what": "sustained, measured decodes", **measured(client, meter, ENGINES[0], asked)}


def first_answers(client: Client) -> list[float]:
    seconds = []
    for config in FIRST:
        began = time.perf_counter()
        try:
            client.predict(config, Prefill(4, 1024))
        except PerfcastError:
            continue
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_steps", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="calls of each kind to each engine")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    firsts, ready = [], []
    for _ in range(options.starts):
        began = time.perf_counter()
        with server("perfcast_cli", "serve", "--port", "0", "--metrics-port", "-1") as address:
            ready.append(time.perf_counter() - began)
            with Client(address) as client:
                for config in OPENING:
                    client.predict(config, Prefill(1, 128))
                firsts += first_answers(client)
    with ExitStack() as stack:
        meter = Meter()
        address = stack.enter_context(server("perfcast_cli", "serve", "--port", "0", "--metrics-port", meter.port))
        client = stack.enter_context(Client(address))
        rows = list(columns(client, meter, options.rounds))
    firsts.sort()
    p50, p95 = (firsts[int(len(firsts) * share)] * 1e3 for share in (0.5, 0.95))
    told = {"steps": rows, "first_answer_ms": {"p50": p50, "p95": p95}, "ready_s": statistics.median(ready)}
    if options.json:
        print(json.dumps(told, indent=2))
        return
    print(f"{f'PredictSteps, {POINTS:,} points':<44}{'server ms':>10}{'points / CPU s':>16}")
    for row in rows:
        print(f"{row['what']:<44}{row['ms']:>10.1f}{row['points_per_cpu_s']:>16,.0f}")
    print(f"at most {MOST_MS:g} ms; sustained at least {LEAST_POINTS_PER_S:,.0f} points/s")
    print(f"first answer for an engine: p50 {p50:.1f} ms, p95 {p95:.1f} ms; at most {MOST_FIRST_MS:g} ms")
    print(f"ready after {told['ready_s']:.2f} s from the command; at most {MOST_READY_S:g} s")


if __name__ == "__main__":
    main()
