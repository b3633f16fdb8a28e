"""What the sparse attention modules share: quantisation fields and the causal pair count (spec/04 sections 1, 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from perfcast_engine import quant
from perfcast_engine.answer import F64
from perfcast_engine.ops.base import Op, Reads, require


@dataclass(frozen=True, kw_only=True)
class SparseModule(Op):
    """A whole attention block of one layer, measured as one unit. heads: per GPU."""

    heads: int
    kv_quant: str
    fmha_quant: str
    gemm_quant: str

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def __post_init__(self) -> None:
        require(self, heads=1)
        quant.mode(quant.KV_CACHE, self.kv_quant, "kv_quant")
        quant.mode(quant.FMHA, self.fmha_quant, "fmha_quant")
        quant.mode(quant.GEMM, self.gemm_quant, "gemm_quant")


def causal_pairs(batch: F64, s: F64, prefix: F64, topk: int) -> F64:
    """Attended (query, key) pairs of ``s`` new tokens after ``prefix`` when each query sees at most ``topk`` keys."""
    total = s + prefix
    dense = (np.minimum(total, topk) * (np.minimum(total, topk) + 1) - prefix * (prefix + 1)) / 2
    return batch * np.where(prefix >= topk, s * topk, dense + np.maximum(total - topk, 0) * topk)
