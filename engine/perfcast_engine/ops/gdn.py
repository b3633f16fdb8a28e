"""Gated delta net kernels (spec/04 section 7.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from perfcast_engine.ops.base import require
from perfcast_engine.ops.state_space import Number, Route, StateKernel
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key, Table

CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
SCAN = "chunk_gated_delta_rule"
RECURRENCE = "fused_sigmoid_gating_delta_rule_update"
STATE_BYTES = {"bfloat16": 2, "float16": 2}
FULL_STATE = "float32"  # of the measured recurrent kernels

# (backend, version, kernel, phase) -> the implementations under whose names its rows stand
VARIANTS = {
    ("vllm", "0.24.0", SCAN, "context"): tuple(f"{SCAN}_{by}" for by in ("flashinfer", "triton", "cutedsl")),
}
# (backend, state, kernel, phase) -> rows measured with that state, and the sm versions they hold for
NARROW_STATE = {
    ("sglang", "bfloat16", RECURRENCE, "generation"): ("flashinfer_gated_delta_rule_decode", range(100, 110)),
}


@dataclass(frozen=True, kw_only=True)
class Gdn(StateKernel):
    """One kernel of a gated delta net layer. Heads are per GPU; ssm_dtype: of the recurrent state."""

    phase: Literal["context", "generation"]
    d_model: int
    d_conv: int
    num_k_heads: int
    head_k_dim: int
    num_v_heads: int
    head_v_dim: int
    ssm_dtype: str = FULL_STATE

    table: ClassVar[str] = "gdn"

    def __post_init__(self) -> None:
        require(self, d_model=0, d_conv=0, num_k_heads=0, head_k_dim=0, num_v_heads=0, head_v_dim=0)

    def route(self, db: Database) -> Route | None:
        return Route(self.kernel, self._rows_of(db))

    def _rows_of(self, db: Database) -> str | None:
        if self.kernel in (SCAN, RECURRENCE) and self.ssm_dtype != FULL_STATE:
            rows_of, sm = NARROW_STATE.get((db.backend, self.ssm_dtype, self.kernel, self.phase), (None, range(0)))
            return rows_of if db.system.sm_version in sm else None
        variants = VARIANTS.get((db.backend, db.version, self.kernel, self.phase), ())
        table = db.find(self.table)
        present = [name for name in variants if table is not None and self.key(table, name) is not None]
        if len(present) > 1:  # which of them serves is not known
            return None
        return present[0] if present else self.kernel

    def key(self, table: Table, kernel: str) -> tuple[Key, ...] | None:
        dims = (self.d_model, self.num_k_heads, self.head_k_dim, self.num_v_heads, self.head_v_dim, self.d_conv)
        key = (kernel, self.phase, *dims)
        return key if table.rows(*key) is not None else None

    def moved_bytes(self, kernel: str, batch: Number, s: Number, tokens: Number) -> Number:
        values = self.num_v_heads * self.head_v_dim
        channels = 2 * self.num_k_heads * self.head_k_dim + values
        state = values * self.head_k_dim
        if kernel in CONVOLUTIONS:
            return 2 * tokens * channels * (self.d_conv + 2)
        if kernel not in (SCAN, RECURRENCE):
            return 4 * tokens * self.d_model
        moved = 2 * tokens * (channels + values) + 2 * state * STATE_BYTES.get(self.ssm_dtype, 4) * batch
        return moved + 2 * (s // 64) * state * 2 * batch if kernel == SCAN else moved
