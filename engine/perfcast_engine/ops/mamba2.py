"""Mamba2 kernels (spec/04 section 7.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from perfcast_engine.ops.base import require
from perfcast_engine.ops.state_space import Number, Route, StateKernel
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key, Table

CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")


@dataclass(frozen=True, kw_only=True)
class Mamba2(StateKernel):
    """One kernel of a Mamba2 layer. Sizes are those of the model, not divided by tensor parallelism."""

    phase: Literal["context", "generation"]
    d_model: int
    d_state: int
    d_conv: int
    nheads: int
    head_dim: int
    n_groups: int
    chunk_size: int

    table: ClassVar[str] = "mamba2"

    def __post_init__(self) -> None:
        require(self, d_model=0, d_state=0, d_conv=0, nheads=0, head_dim=0, n_groups=0, chunk_size=0)

    def route(self, db: Database) -> Route | None:
        return Route(self.kernel, self.kernel if self.phase == "context" else None)

    def key(self, table: Table, kernel: str) -> tuple[Key, ...] | None:
        """Exactly this shape, else the first of the same ``d_model``."""
        dims = (self.d_state, self.d_conv, self.nheads, self.head_dim, self.n_groups, self.chunk_size)
        near = (kernel, self.phase, self.d_model)
        if table.rows(*near, *dims) is not None:
            return (*near, *dims)
        rows = table.rows(*near)
        return None if rows is None else (*near, *(int(c[rows.start]) for c in table.columns[len(near) : -2]))

    def moved_bytes(self, kernel: str, batch: Number, s: Number, tokens: Number) -> Number:
        inner, grouped = self.nheads * self.head_dim, 2 * self.n_groups * self.d_state
        if kernel in CONVOLUTIONS:
            return 2 * tokens * (inner + grouped) * (self.d_conv + 2)
        return 2 * tokens * (2 * inner + grouped + self.nheads)
