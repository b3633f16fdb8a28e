"""Predict measured serving points (aggregated rows) in one profile, for a scorer of accuracy.

    python -m benchmarks.silicon silicon.csv --reference reference_predictions.csv --profile corrected > predictions.csv

Writes id, ttft_ms, tpot_ms. ``--reference``: the file whose column ref_how says with which quantisation a row could
be answered; rows that the reference refused or answered by its empirical model are left out, as are ours.
"""

from __future__ import annotations

import argparse
import csv
import sys
from functools import cache
from pathlib import Path

from perfcast_engine import EngineConfig, MoeComm, ParallelConfig, Predictor, QuantOverrides
from perfcast_engine.errors import EngineError
from perfcast_planning.serving.estimate import estimate_aggregated
from perfcast_planning.serving.worker import Worker, worker_of
from perfcast_planning.serving.workload import Workload

Row = dict[str, str]
SIZES = {"tp": "c_tp", "attn_dp": "c_dp", "moe_tp": "c_moe_tp", "moe_ep": "c_moe_ep"}
# how the reference answered -> the expert mode to ask for, where not the labelled one
EXPERT_MODES = {"moeblk": {"fp8": "fp8_block"}, "w4a8": {"*": "w4a8_mxfp4_mxfp8"}}


def size(row: Row, column: str) -> int | None:
    return int(float(row[column])) or None if row[column] else None


def quantisation(row: Row, how: str) -> QuantOverrides:
    if how == "native":
        return QuantOverrides()
    labels = {"gemm": row["c_gemm_quant"], "moe": row["c_moe_quant"]}
    asked = {name: None if label in ("", "auto") else label for name, label in labels.items()}
    modes = EXPERT_MODES.get(how, {})
    asked["moe"] = modes.get("*") or modes.get(asked["moe"] or "", asked["moe"])
    return QuantOverrides(**asked)


def config(row: Row, how: str, profile: str, known: frozenset[str]) -> EngineConfig:
    return EngineConfig(
        model=row["model_path"] if row["model_path"] in known else row["c_model"],
        system=row["system"],
        backend=row["backend"],
        parallel=ParallelConfig(**{name: size(row, column) for name, column in SIZES.items()}),  # type: ignore[arg-type]
        quant=quantisation(row, how),
        profile=profile,
        moe_comm=MoeComm(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.silicon")
    parser.add_argument("measured", type=Path)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--profile", default="corrected")
    options = parser.parse_args()
    predictor = Predictor()
    known = frozenset(predictor.registry.models)

    @cache
    def worker(of: EngineConfig) -> Worker:
        return worker_of(predictor.engine(of))

    with options.reference.open() as file:
        answered = {row["id"]: row["ref_how"] for row in csv.DictReader(file)}
    out = csv.writer(sys.stdout)
    out.writerow(["id", "ttft_ms", "tpot_ms"])
    with options.measured.open() as file:
        for row in csv.DictReader(file):
            how = answered.get(row["id"], "")
            if row["mode"] != "agg" or not how or how.startswith("hybrid"):
                continue
            try:
                asked = config(row, how, options.profile, known)
                load = Workload(int(row["isl"]), int(row["osl"]))
                rows = estimate_aggregated(worker(asked), load, int(float(row["c_batch"]))).rows
            except (EngineError, ValueError) as error:
                print(f"{row['id']}: {error}", file=sys.stderr)
                continue
            out.writerow([row["id"], rows["ttft_ms"][0], rows["tpot_ms"][0]])


if __name__ == "__main__":
    main()
