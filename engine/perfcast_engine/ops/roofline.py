"""Rooflines as rows of rooflines.yaml: formulas over the fields of an operator and the coordinates of its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from perfcast_engine import data
from perfcast_engine.answer import F64
from perfcast_engine.formula import compiled, scope, value
from perfcast_engine.ops.base import Split
from perfcast_engine.quant import QuantMode
from perfcast_engine.system import SystemSpec

LAWS: Mapping[str, Mapping[str, Any]] = data.table("rooflines")
Roofline = Callable[..., Split]  # one array (or number) per coordinate


def roofline(law: str, figures: Mapping[str, Any], modes: Mapping[str, QuantMode], system: SystemSpec) -> Roofline:
    """The row ``law`` for an operator of such ``figures``. SystemFlopsMissing where ``system`` states no rate of one of
    the ``modes`` that it computes in."""
    names = {f"{name}_bytes": mode.bytes for name, mode in modes.items()}
    names |= {f"{name}_rate": system.rate(modes[name]) for name in LAWS[law]["flops"]}
    functions = {"where": np.where, "floor": np.floor, "ceil": np.ceil, "split": Split.of}
    functions |= {"causal_pairs": causal_pairs, "sum_of_floors": sum_of_floors, "memory_ms": system.memory_sol_ms}
    judge: Roofline = value(compiled(_source(law)), scope(**functions, **names, **figures))
    return judge


def resident(kind: str, figures: Mapping[str, Any]) -> float:
    """Bytes of the weights of ``kind``."""
    weights: float = value(compiled(LAWS["weights"][kind]), scope(**figures))
    return weights


@cache
def _source(law: str) -> str:
    row = LAWS[law]
    steps = [f"({name} := {formula})" for part in ("points", "let") for name, formula in row.get(part, {}).items()]
    seconds = " + ".join(f"({flops}) / {mode}_rate" for mode, flops in row["flops"].items())
    steps.append(f"split(({seconds}) * 1000, memory_ms({row['bytes']}))")
    return f"lambda {row['over']}: ({', '.join(steps)},)[-1]"


def causal_pairs(batch: F64, s: F64, prefix: F64, topk: int) -> F64:
    """Attended (query, key) pairs of ``s`` new tokens after ``prefix`` when each query sees at most ``topk`` keys."""
    total = s + prefix
    ramp = np.minimum(total, topk)
    causal = (ramp * (ramp + 1) - prefix * (prefix + 1)) / 2 + (total - ramp) * topk
    return batch * np.where(prefix >= topk, s * topk, causal)


def sum_of_floors(n: F64, ratio: int) -> F64:
    """Sum of floor(t / ratio) for t from 0 to n; 0 for n < 0."""
    n = np.maximum(n, 0)
    k = np.floor(n / ratio)
    total: F64 = ratio * k * (k - 1) / 2 + k * (n - k * ratio + 1)
    return total
