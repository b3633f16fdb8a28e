"""What the measured modules of compressed attention spend on top-k beyond a real model's share (spec/04 section 4.3).

Modules were measured with random index scores, on which the top-k kernel is slower than on those of a real model. The
kernel alone was measured on both: ``flat`` as in the modules, ``top_last`` as in practice.
"""

from __future__ import annotations

import numpy as np
from perfcast_surface.blend import Held

from perfcast_engine.interp.clamped import held, reversed_axes
from perfcast_engine.interp.grid import Grid
from perfcast_engine.tables.database import Database

TOPK = "dsv4_csa_topk_calib"


def topk_excess(db: Database, heads: int, variant: str) -> Held | None:
    """ms over (batch, new tokens, prefix), held at the ends of what was measured; None where nothing was measured for
    ``heads``. ``variant``: v1 in prefill, v2 in decode."""
    return db.kept(("top-k excess", heads, variant), lambda: _excess(db, heads, variant))


def _excess(db: Database, heads: int, variant: str) -> Held | None:
    table = db.find(TOPK)
    if table is None:
        return None
    flat, last = (table.grid(heads, f"{variant}_{mode}") for mode in ("flat", "top_last"))
    if flat is None or last is None:
        return None
    spans = [int(max(a.max(), b.max())) + 1 for a, b in zip(flat.coords, last.coords, strict=True)]
    codes = [np.ravel_multi_index(grid.coords, spans) for grid in (flat, last)]
    _, here, there = np.intersect1d(codes[0], codes[1], assume_unique=True, return_indices=True)
    if not len(here):
        return None
    excess = np.maximum(0.0, flat.ms[here] - last.ms[there])
    return held(reversed_axes(Grid.of([c[here] for c in flat.coords], excess)))
