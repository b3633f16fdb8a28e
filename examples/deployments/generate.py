"""Deployment files of one case for every target and engine that can run it; the folders beside this file hold them.

python examples/deployments/generate.py        # from the root of a checkout, after a change; the test compares
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from perfcast_deploy.bundle import Bundle, generate, write
from perfcast_deploy.describe import TARGETS
from perfcast_deploy.rows import from_row
from perfcast_engine.errors import UnsupportedCombination

HERE = Path(__file__).parent
CASE: dict[str, Any] = {
    "model": "Qwen/Qwen3-32B-FP8",
    "system": "h200_sxm",
    "isl": 4000,
    "osl": 500,
    "prefix": 500,
    "total_gpus": 32,
    "kv_dtype": "fp8",
    "profile": "reference",
    "quant": {"gemm": "fp8_block"},
    "cluster": {"name": "qwen3-32b", "namespace": "serving"},
}
# Best disaggregated configurations of searches in profile `reference` for ttft <= 300 ms and tpot <= 10 ms.
# fmt: off
ROWS: dict[str, dict[str, Any]] = {
    "trtllm": {
        "version": "1.3.0rc20",
        "(p)parallel": "tp4pp1dp1etp1ep1", "(p)bs": 1, "(p)workers": 5, "(p)memory": 12.262,
        "(d)parallel": "tp4pp1dp1etp1ep1", "(d)bs": 64, "(d)workers": 3, "(d)memory": 20.73,
        "ttft": 194.378, "tpot": 9.659, "tokens/s/gpu": 572.657,
    },
    "vllm": {
        "version": "0.24.0",
        "(p)parallel": "tp4pp1dp1etp1ep1", "(p)bs": 1, "(p)workers": 5, "(p)memory": 12.262,
        "(d)parallel": "tp2pp1dp1etp1ep1", "(d)bs": 160, "(d)workers": 6, "(d)memory": 63.828,
        "ttft": 198.254, "tpot": 46.447, "tokens/s/gpu": 595.384,
    },
    "sglang": {
        "version": "0.5.14",
        "(p)parallel": "tp4pp1dp1etp1ep1", "(p)bs": 1, "(p)workers": 1, "(p)memory": 13.094,
        "(d)parallel": "tp4pp1dp1etp1ep1", "(d)bs": 52, "(d)workers": 1, "(d)memory": 19.815,
        "ttft": 179.435, "tpot": 9.941, "tokens/s/gpu": 564.3,
    },
}
# fmt: on
KV_FRACTION = {"trtllm": 0.9, "vllm": 0.92, "sglang": 0.901}  # what the predictions assumed


def examples() -> tuple[dict[str, Bundle], dict[str, str]]:
    """(bundle by folder, reason by refused folder)."""
    made: dict[str, Bundle] = {}
    refused: dict[str, str] = {}
    for backend, row in ROWS.items():
        deployment = from_row(row, CASE | {"backend": backend, "kv_fraction": KV_FRACTION[backend]})
        for target in TARGETS:
            try:
                made[f"{backend}/{target}"] = generate(deployment, target)
            except UnsupportedCombination as error:
                refused[f"{backend}/{target}"] = error.message
    return made, refused


def main() -> None:
    made, refused = examples()
    for folder, bundle in made.items():
        shutil.rmtree(HERE / folder, ignore_errors=True)
        write(bundle, HERE / folder)
    for folder, reason in refused.items():
        print(f"{folder}: {reason}")


if __name__ == "__main__":
    main()
