"""Never-seen steps in process and from a local surface, beside the reference engine's calls for the same points.

    python -m benchmarks.in_process --reference-python PY [--rounds N] [--calls N] [--model NAME] [--profile P] [--json]

Every round asks both sides for the same new points, in turn; a ratio is taken within a round, in CPU time, and the
median over rounds is reported. Points lie inside of the measurements, beyond them, or anywhere between 1 and twice
their ends on logarithmic scales.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from perfcast_client.local import LocalSurface
from perfcast_client.results import EngineStamp
from perfcast_client.snapshot import Snapshot
from perfcast_engine import EngineConfig, ParallelConfig, Predictor
from perfcast_engine.compiled import compile_surface

from benchmarks.processes import Peer

SYSTEM, BACKEND = "h200_sxm", "trtllm"
MODELS = {
    "Qwen/Qwen3-32B": ParallelConfig(tp=4),
    "Qwen/Qwen3-235B-A22B": ParallelConfig(tp=4, moe_ep=4),
    "deepseek-ai/DeepSeek-V3": ParallelConfig(tp=8, moe_ep=8),
}
OPTIONS = {"deepseek-ai/DeepSeek-V3": {"fmha_quant_mode": "bfloat16"}}  # which the engine resolves by itself
MANY = 10_000  # points of one array call
KINDS = {"prefill": "prefill", "decode": "decode_step", "mixed": "mixed"}
# (least, most) batch, length; prompts of a prefill, decoding requests
SPANS = {
    "inside": ((1, 8), (100, 1000), (1, 64), (300, 3000)),
    "beyond": ((1, 3), (33_000, 40_000), (1, 64), (140_000, 250_000)),
    "anywhere": ((1, 64), (16, 65_536), (1, 4096), (16, 262_144)),
}
PASS_TOKENS = 100_000  # of the longest prefill; longer passes are no step of any server
Columns = list[np.ndarray]


def points(kind: str, where: str, n: int, seed: int) -> Columns:
    rng, (prompts, prompt, requests, cache) = np.random.default_rng(seed), SPANS[where]

    def between(span: tuple[int, int]) -> np.ndarray:
        if where != "anywhere":
            return rng.integers(span[0], span[1] + 1, n)
        return np.exp(rng.uniform(*np.log(span), n)).astype(np.int64)

    osl = rng.integers(2, 1000, n)
    if kind == "prefill":
        batch = between(prompts)
        return [batch, np.maximum(np.minimum(between(prompt), PASS_TOKENS // batch), 1), np.zeros(n, np.int64)]
    if kind == "decode":
        return [between(requests), between(cache), osl]
    isl = rng.integers(1000, 4000, n) if where == "inside" else between(prompt) + 1000
    return [rng.integers(64, 4096, n), between(requests), isl, osl, np.zeros(n, np.int64)]


def cpu_seconds(call: Callable[..., Any], asked: Sequence[tuple[int, ...]]) -> float:
    """Of one call, on average."""
    began = time.process_time()
    for point in asked:
        call(*point)
    return (time.process_time() - began) / len(asked)


class Race:
    """One model on both sides."""

    def __init__(self, model: str, python: str, profile: str) -> None:
        parallel = MODELS[model]
        predictor = Predictor()
        config = EngineConfig(model=model, system=SYSTEM, backend=BACKEND, parallel=parallel, profile=profile)
        self.steps = predictor.engine(config).steps
        stamp = EngineStamp(model, SYSTEM, BACKEND, "", "SILICON", profile, "")
        self.surface = LocalSurface(None, Snapshot(compile_surface(self.steps), model, stamp, "", 0.0))
        self.peer = Peer(python, str(Path(__file__).with_name("reference_steps.py")))
        version = predictor.catalog.resolve_version(SYSTEM, BACKEND)
        sizes = {f"{name}_size": size for name, size in asdict(parallel).items() if name in ("tp", "moe_tp", "moe_ep")}
        options = {**sizes, **OPTIONS.get(model, {}), "backend_version": version}
        self.peer.ask({"model": model, "system": SYSTEM, "backend": BACKEND, "options": options})

    def round(self, kind: str, where: str, n: int, seed: int) -> dict[str, float]:
        """us of a call: the engine's, the surface's (inside only), the reference's."""
        columns = points(kind, where, n, seed)
        asked = list(zip(*(column.tolist() for column in columns), strict=True))
        found = {"engine": cpu_seconds(getattr(self.steps, f"{KINDS[kind]}_ms"), asked)}
        if where == "inside":
            found["surface"] = cpu_seconds(getattr(self.surface, KINDS[kind]), asked)
        found["reference"] = self.peer.ask((kind, asked))
        return {name: seconds * 1e6 for name, seconds in found.items()}

    def array(self, kind: str, seed: int, n: int) -> dict[str, float]:
        """us of a point in calls of MANY points, and of one reference call."""
        columns = points(kind, "inside", MANY, seed)
        found = {}
        for name, side in (("engine", self.steps), ("surface", self.surface)):
            call = getattr(side, KINDS[kind])
            found[name] = cpu_seconds(lambda _, call=call: call(*columns), [(i,) for i in range(20)]) / MANY
        found["reference"] = self.peer.ask((kind, list(zip(*(column[:n].tolist() for column in columns), strict=True))))
        return {name: seconds * 1e6 for name, seconds in found.items()}


def row(what: str, rounds: list[dict[str, float]]) -> list[dict[str, Any]]:
    reference = statistics.median(found["reference"] for found in rounds)
    return [
        {
            "what": what,
            "side": side,
            "us": statistics.median(found[side] for found in rounds),
            "reference_us": reference,
            "ratio": statistics.median(found[side] / found["reference"] for found in rounds),
        }
        for side in rounds[0]
        if side != "reference"
    ]


def measure(model: str, python: str, profile: str, rounds: int, calls: int) -> list[dict[str, Any]]:
    race, found = Race(model, python, profile), []
    for kind in KINDS:
        for where in SPANS:
            race.round(kind, where, 10 * calls, 0)  # token counts become known on both sides
            found += row(f"{kind}, {where}", [race.round(kind, where, calls, 1 + i) for i in range(rounds)])
        found += row(f"{kind}, one of {MANY:,} points", [race.array(kind, 100 + i, calls) for i in range(rounds)])
    race.peer.close()
    return [{"model": model, **entry} for entry in found]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.in_process", description=__doc__.splitlines()[0])
    parser.add_argument("--reference-python", metavar="PY", required=True, help="one that has the reference engine")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--profile", default="corrected", help="reference: no more work than the reference engine does")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=1000, help="points of one round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for model in options.model or MODELS:
        found = measure(model, options.reference_python, options.profile, options.rounds, options.calls)
        if options.json:
            print(json.dumps(found))
            continue
        print(f"{model:<40}{'us':>9}{'reference':>11}{'ratio':>9}  1 /")
        for entry in found:
            print(
                f"{entry['side']:<9}{entry['what']:<31}{entry['us']:>9.3f}{entry['reference_us']:>11.2f}"
                f"{entry['ratio']:>9.4f}{1 / entry['ratio']:>7.1f}"
            )


if __name__ == "__main__":
    main()
