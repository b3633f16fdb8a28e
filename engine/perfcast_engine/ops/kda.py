"""Kimi delta attention kernels (spec/04 section 7.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, cast

import numpy as np

from perfcast_engine.ops.base import require
from perfcast_engine.ops.state_space import Number, Route, StateKernel
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key, Table

CONVOLUTION = "causal_conv1d_update"
# phase -> the kernel that fuses convolution and recurrence, and the recurrence it replaces
FUSED = {
    "verify": ("fused_kda_decode_mtp_dspark", "fused_sigmoid_gating_delta_rule_update"),
    "generation": ("kda_fused_decode", "fused_recurrent_kda_packed_decode"),
}
# kernel -> the parts whose traffic it has
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "causal_conv1d_fn_qkv3": ("convolution",),
        CONVOLUTION: ("convolution",),
        "chunk_kda": ("scan",),
        "chunk_kda_with_fused_gate": ("scan",),
        "flashkda_fwd": ("scan",),
        "fused_recurrent_kda_packed_decode": ("decode",),
        "fused_kda_decode": ("decode",),
        "fused_sigmoid_gating_delta_rule_update": ("verify",),
        "fused_recurrent_kda": ("verify",),
        "fused_kda_decode_mtp_dspark": ("convolution", "verify"),
        "kda_fused_decode": ("convolution", "decode"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Kda(StateKernel):
    """One kernel of a Kimi delta attention layer. Heads are per GPU; draft_tokens: verified per request in one pass
    of phase "verify" (accepted and drafted)."""

    phase: Literal["context", "generation", "verify"]
    d_model: int
    d_conv: int
    num_k_heads: int
    head_k_dim: int
    num_v_heads: int
    head_v_dim: int
    draft_tokens: int = 0

    table: ClassVar[str] = "kda"

    def __post_init__(self) -> None:
        require(self, d_model=0, d_conv=0, num_k_heads=0, head_k_dim=0, num_v_heads=0, head_v_dim=0, draft_tokens=0)

    def route(self, db: Database) -> Route | None:
        fused, recurrence = FUSED.get(self.phase, ("", ""))
        if self.kernel not in (CONVOLUTION, recurrence) or not self._is_fused(db, fused):
            return Route(self.kernel, self.kernel)
        return None if self.kernel == CONVOLUTION else Route(fused, fused)

    def _is_fused(self, db: Database, fused: str) -> bool:
        """Whether only the fused kernel was measured: at all in verification, in this shape in decode."""
        table = db.find(self.table)
        if not fused or table is None:
            return False
        dims = () if self.phase == "verify" else self._dims
        rows = [table.rows(kernel, self.phase, *dims) for kernel in (self.kernel, fused)]
        return rows[0] is None and rows[1] is not None

    @property
    def _dims(self) -> tuple[int, ...]:
        return self.d_model, self.num_k_heads, self.head_k_dim, self.num_v_heads, self.head_v_dim, self.d_conv

    def extent(self, batch: Number, s: Number) -> tuple[Number, Number]:
        if self.phase != "verify":
            return super().extent(batch, s)
        draft = float(self.draft_tokens)
        requests = np.maximum(1.0, np.round(batch / draft)) if draft > 0 else batch
        return cast(Number, requests), s * 0.0 + draft

    @property
    def requests_of(self) -> int:
        return self.draft_tokens if self.phase == "verify" else 0

    def key(self, table: Table, kernel: str) -> tuple[Key, ...] | None:
        """Exactly this shape, else the nearest number of value heads of the same ``d_model``."""
        near = (kernel, self.phase)
        if table.rows(*near, *self._dims) is not None:
            return (*near, *self._dims)
        rows = table.rows(*near, self.d_model)
        if rows is None:
            return None
        heads = table.columns[table.key.index("num_v_heads")][rows]
        nearest = rows.start + int(np.argmin(np.abs(heads - self.num_v_heads)))
        return (*near, *(int(c[nearest]) for c in table.columns[len(near) : -2]))

    def moved_bytes(self, kernel: str, batch: Number, s: Number, tokens: Number) -> Number:
        parts = PARTS.get(kernel)
        if parts is None:
            return 4 * tokens * self.d_model
        moved = self._part_bytes(parts[0], batch, s, tokens)
        for part in parts[1:]:
            moved = moved + self._part_bytes(part, batch, s, tokens)
        return moved

    def _part_bytes(self, part: str, batch: Number, s: Number, tokens: Number) -> Number:
        values = self.num_v_heads * self.head_v_dim
        state = 4 * values * self.head_k_dim
        if part == "convolution":
            return 6 * tokens * values * (self.d_conv + 2)
        through = 10 * tokens * values
        if part == "verify":
            return through + state * (batch + tokens)
        moved = through + 2 * state * batch
        return moved + 2 * state * batch * (s // 64) if part == "scan" else moved
