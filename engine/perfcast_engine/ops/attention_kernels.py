"""Which measured kernel answers for an attention operator, and what calibrates one that was not measured.

Measurements lie in lanes, one a kernel (spec/02 section 5.6); estimates borrow from the nearest head size (9.5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from perfcast_engine.answer import Tier
from perfcast_engine.interp.grid import Sol
from perfcast_engine.interp.surface import Surface
from perfcast_engine.interp.util import UtilGrid
from perfcast_engine.ops.base import find_slice, no_slice
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key, Table

USUAL_HEAD_DIM = 128
HEAD_DIMS = (64, 128, 192, 256, 512)
# how well a backend's prefill kernel uses the GPU at these head sizes, relative to 128
HEAD_DIM_RATIOS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "trtllm": (0.58, 1.0, 1.10, 1.17, 1.20),
        "sglang": (0.60, 1.0, 1.18, 1.32, 1.38),
        "vllm": (0.60, 1.0, 1.27, 1.51, 1.60),
    }
)


def head_dim_ratio(backend: str, head_dim: int) -> float:
    """Utilisation at ``head_dim`` relative to 128; 1 for a backend that nobody measured."""
    ratios = HEAD_DIM_RATIOS.get(backend)
    return 1.0 if ratios is None else float(np.interp(math.log2(head_dim), np.log2(HEAD_DIMS), ratios))


class Basis(NamedTuple):
    """What an estimate is calibrated on: samples (None where there are none), their head size, how far borrowed."""

    util: UtilGrid | None
    head_dim: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Kernels:
    """The slices of ``table`` that may answer for one operator.

    ``group``: the key between lane and head size; ``roofline(head_dim, window)``: the roofline of a slice.
    """

    table: str
    lanes: tuple[str, ...]
    group: tuple[Key, ...]
    head_dim: int
    window: int
    roofline: Callable[[int, int], Sol]
    sqrt_axis: int | None = None
    clamp: bool = False

    def measured(self, db: Database) -> Surface:
        """The operator's own slice; PerfDataMissing where no lane holds it."""
        return db.kept(
            (self.table, self.lanes, self.group, self.head_dim, self.window),
            lambda: self._measured(db, db.table(self.table)),
        )

    def _measured(self, db: Database, table: Table) -> Surface:
        own = self._own(db, table, self.window)
        if own is None:
            raise no_slice(table, (table.children()[0], *self.group, self.head_dim, self.window))
        return own

    def _own(self, db: Database, table: Table, window: int) -> Surface | None:
        """From the first of ``lanes`` that holds the slice, else the table's first lane that does."""
        key = (*self.group, self.head_dim, window)
        for lane in (*self.lanes, *_other_lanes(table, self.lanes)):
            if table.rows(lane, *key) is not None:
                return self._slice(db, lane, self.head_dim, window)
        return None

    def _slice(self, db: Database, lane: str, head_dim: int, window: int) -> Surface | None:
        return find_slice(
            db,
            self.table,
            (lane, *self.group, head_dim, window),
            self.roofline(head_dim, window),
            sqrt_axis=self.sqrt_axis,
            clamp=self.clamp,
        )

    def basis(self, db: Database) -> Basis:
        """The samples that calibrate an estimate: own slice, else nearest head size; windowed first, then full."""
        key = (self.table, "basis", self.lanes, self.group, self.head_dim, self.window)
        return db.kept(key, lambda: self._basis(db))

    def _basis(self, db: Database) -> Basis:
        table = db.find(self.table)
        if table is not None:
            for window in dict.fromkeys((self.window, 0)):
                own = self._own(db, table, window)
                if own is not None and own.util is not None:
                    return Basis(own.util, self.head_dim, Tier.EMPIRICAL)
                borrowed = self._borrowed(db, table, window) if Tier.XSHAPE in db.policy else None
                if borrowed is not None:
                    return borrowed
        return Basis(None, self.head_dim, Tier.EMPIRICAL)

    def _borrowed(self, db: Database, table: Table, window: int) -> Basis | None:
        for lane in (*self.lanes, *sorted(_other_lanes(table, self.lanes))):
            sizes = [int(size) for size in table.children(lane, *self.group) if size != 0]
            if not sizes:
                continue
            near = min(sizes, key=lambda size: abs(math.log(size / self.head_dim)))
            near = USUAL_HEAD_DIM if USUAL_HEAD_DIM in sizes else near
            surface = self._slice(db, lane, near, window)
            if surface is not None and surface.util is not None:
                return Basis(surface.util, near, Tier.XSHAPE)
        return None


def _other_lanes(table: Table, lanes: tuple[str, ...]) -> list[str]:
    """The table's lanes beside ``lanes``, in order of first appearance."""
    return [str(lane) for lane in table.children() if lane not in lanes]
