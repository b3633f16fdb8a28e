"""Every model of the registry on every system and backend: prefill and decode beside the reference engine's.

    python -m benchmarks.registry --reference-python PY [--mode SILICON|HYBRID] [--system NAME ...]

Each model runs under the smallest mapping that holds it and under the other two ways of spreading experts over as many
GPUs. Prints how many answers are equal (1e-6), refused by both, or different, and exits 1 if any differs. Models whose
configuration the reference has to download are counted apart.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from perfcast_engine import EngineConfig, Predictor
from perfcast_engine.errors import EngineError
from perfcast_engine.models.families import is_moe
from perfcast_engine.tables.database import Mode
from perfcast_planning.support import mappings, support

from benchmarks.processes import Peer

PREFILL = ((1, 1024, 0), (8, 4096, 0), (2, 8192, 4096))  # batch, isl, prefix
DECODE = ((1, 1024, 2), (64, 8192, 256))  # requests, isl, osl
Answer = float | list[str]


def engines(predictor: Predictor, mode: str, systems: list[str]) -> Iterator[EngineConfig]:
    for system in systems or predictor.catalog.systems():
        per_node = predictor.catalog.system(system).gpus_per_node
        for found in support(predictor, systems=[system]):
            gpus = 1 if found.parallel is None else found.parallel.gpus
            for parallel in mappings(gpus, per_node, is_moe(predictor.registry.get(found.model))):
                yield EngineConfig(
                    model=found.model,
                    system=system,
                    backend=found.backend,
                    version=found.version,
                    parallel=parallel,
                    database_mode=Mode(mode),
                    profile="reference",
                )


def ours(predictor: Predictor, config: EngineConfig) -> dict[str, list[Answer]]:
    try:
        steps = predictor.engine(config).steps
    except EngineError as error:
        refused = [type(error).__name__, error.message]
        return {"prefill": [refused] * len(PREFILL), "decode": [refused] * len(DECODE)}
    told = {"prefill": steps.prefill(*np.array(PREFILL).T), "decode": steps.decode_step(*np.array(DECODE).T)}
    return {
        phase: [
            [type(errors[i]).__name__, errors[i].message] if i in errors else float(ms)
            for i, ms in enumerate(result.ms)
        ]
        for phase, result in told.items()
        for errors in [result.errors()]
    }


def verdict(own: Answer, other: Answer) -> str:
    if isinstance(own, float) and isinstance(other, float):
        return "equal" if abs(own - other) <= 1e-6 * abs(other) else "DIFFERENT"
    if isinstance(other, list) and "Download" in other[0]:
        return "unknown to the reference"
    if isinstance(own, list) and isinstance(other, list):
        return "refused by both"
    return "ANSWERED BY ONE"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference-python", required=True)
    parser.add_argument("--mode", default="SILICON", choices=("SILICON", "HYBRID"))
    parser.add_argument("--system", action="append", default=[])
    asked = parser.parse_args()
    predictor, counts = Predictor(), Counter[str]()
    reference = Peer(asked.reference_python, str(Path(__file__).with_name("reference_engines.py")))
    try:
        for config in engines(predictor, asked.mode, asked.system):
            own, other = ours(predictor, config), reference.ask(question(config))
            for phase in own:
                for one, two in zip(own[phase], other[phase], strict=True):
                    told = verdict(one, two)
                    counts[told] += 1
                    if told.isupper():
                        print(told, config.model, config.system, config.backend, config.parallel, phase, one, two)
    finally:
        reference.close()
    print(", ".join(f"{count} {told}" for told, count in sorted(counts.items())))
    sys.exit(any(told.isupper() for told in counts))


def question(config: EngineConfig) -> dict[str, Any]:
    p = config.parallel
    named = {name: getattr(config, name) for name in ("model", "system", "backend", "version")}
    widths = [p.tp, p.pp, p.attn_dp, p.moe_tp, p.moe_ep]
    return {**named, "mode": config.database_mode, "parallel": widths, "prefill": PREFILL, "decode": DECODE}


if __name__ == "__main__":
    main()
