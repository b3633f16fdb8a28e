"""The quantise steps whose time an fp8_static product saves (spec/02 sections 5.2, 9.4)."""

from __future__ import annotations

from functools import partial

import numpy as np

from perfcast_engine.answer import F64, Answer, Points, Source, Tier
from perfcast_engine.interp.surface import Surface
from perfcast_engine.interp.util import LogSpace
from perfcast_engine.ops.base import by_mode, estimated, find_slice, measured, no_basis, slice_of
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database

AXES = ("m", "k")
MEASURED_AS = ("fp8",)


def compute_scale(db: Database, at: Points, k: int, what: str) -> Answer:
    """Finding the scale of at.x tokens of k elements. A difference of measurements: flat outside them, may be 0."""
    sol = partial(_sol, db.system, 2)

    def silicon(part: Points) -> Answer:
        surface = slice_of(db, "computescale", MEASURED_AS, sol)
        return measured(surface, _clipped(surface, part.x, k), what, AXES)

    def empirical(part: Points) -> Answer:
        surface = find_slice(db, "computescale", MEASURED_AS, sol)
        if surface is None:
            return Answer.none(len(part), no_basis(what))
        space = db.kept("computescale space", lambda: LogSpace.of(surface.grid.floats))
        query = part.x, float(k)
        near = space.nearest(query, 1, clip=False)[0][0]
        ms, here = surface.grid.ms[near], sol(*query)
        util = surface.leaf_sol[near] / np.where(ms > 0, ms, 1.0)
        estimate = np.where(ms > 0, np.where(here > 0, here, np.nan) / util, 0.0)
        return Answer.of(estimate, Source.EMPIRICAL, Tier.EMPIRICAL, miss=no_basis(what))

    return by_mode(db, at, silicon=silicon, empirical=empirical, sol=lambda part: sol(part.x, k))


def scale_matrix(db: Database, at: Points, k: int, what: str) -> Answer:
    """Scaling at.x tokens of k elements; outside the measurements in proportion to its roofline."""
    sol = partial(_sol, db.system, 3)

    def silicon(part: Points) -> Answer:
        surface = slice_of(db, "scale_matrix", MEASURED_AS, sol)
        inside = _clipped(surface, part.x, k)
        here, there = sol(part.x, k), sol(*inside)
        usable = (here > 0) & (there > 0)
        ratio = np.where(usable, here, 1.0) / np.where(usable, there, 1.0)
        return measured(surface, inside, what, AXES).scaled(ratio)

    def empirical(part: Points) -> Answer:
        surface = find_slice(db, "scale_matrix", MEASURED_AS, sol)
        query = part.x, float(k)
        return estimated(None if surface is None else surface.util, query, sol(*query), what)

    return by_mode(db, at, silicon=silicon, empirical=empirical, sol=lambda part: sol(part.x, k))


def _sol(system: SystemSpec, passes: int, m: F64, k: F64 | float) -> F64:
    """``passes`` bytes read or written an element."""
    return system.memory_sol_ms(passes * m * k)


def _clipped(surface: Surface, m: F64, k: int) -> tuple[F64, F64]:
    """The nearest point of the box of the measurements."""
    keys_m, keys_k = surface.grid.floats
    inside_k = min(max(float(k), keys_k.min()), keys_k.max())
    return np.clip(m, keys_m[0], keys_m[-1]), np.full(len(m), inside_k)
