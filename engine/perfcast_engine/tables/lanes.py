"""In which order a model tries the kernels (lanes) of an attention table (spec/01 7.2, spec/05 section 11)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

import numpy as np

from perfcast_engine.data import table
from perfcast_engine.errors import UnsupportedCombination
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Table

DEFAULT = "default"
KNOWN: tuple[str, ...] = tuple(table("lanes")["known"])
# Key columns that tell a slice, per table; the rest are its coordinates.
SLICE = ("attn_dtype", "kv_cache_dtype", "kvn", "head_dim", "window_size")

Density = dict[str, tuple[int, int]]  # lane -> (slices, rows)


def lane_order(db: Database, asked: str, override: str | None = None) -> tuple[str, ...]:
    """Lanes of table ``asked`` (context_attention or generation_attention) in the order in which a query tries them.

    UnsupportedCombination when ``override`` names no kernel of the backend, or one without rows in the table.
    """
    every, own = densities(db, asked)
    pinned = list(_override(db.backend, asked, override, every))
    framework = _framework_default(db.backend, db.version, db.system.sm_version)
    if not pinned and framework is None:
        return (DEFAULT,)
    if framework is not None and framework != DEFAULT:
        pinned.append(framework)
    return tuple(dict.fromkeys([*pinned, *(lane for lane in _ranked(own) if lane in own), *_ranked(every)]))


def densities(db: Database, asked: str) -> tuple[Density, Density]:
    """(slices, rows) of each lane of the table: with the rows that other versions lend, and of the own rows alone."""
    return _density(db.source(asked, True)), _density(db.source(asked, False))


def _density(measured: Table | None) -> Density:
    if measured is None:
        return {}
    depth = [name for name in measured.key if name in SLICE]
    found = {}
    for lane in measured.children():
        rows = measured.rows(lane)
        assert rows is not None
        slices = np.stack([measured.columns[measured.key.index(name)][rows] for name in depth])
        changes = (np.diff(slices, axis=1) != 0).any(axis=0)
        found[str(lane)] = (1 + int(changes.sum()), rows.stop - rows.start)
    return found


def _ranked(density: Density) -> list[str]:
    """Known lanes, ``default``, other lanes; known and others by most slices, most rows, name."""

    def rank(lane: str) -> tuple[int, int, int, str]:
        slices, rows = density.get(lane, (0, 0))
        return 0 if lane in KNOWN else 1 if lane == DEFAULT else 2, -slices, -rows, lane

    return sorted({*KNOWN, DEFAULT, *density}, key=rank)


def _override(backend: str, asked: str, override: str | None, every: Density) -> Sequence[str]:
    if override is None or override == DEFAULT:
        return ()
    known: Mapping[str, Sequence[str]] = table("lanes")["overrides"].get(backend, {})
    if override not in known:
        raise UnsupportedCombination(
            "attention_backend",
            f"{backend} has no attention kernel {override!r}; one of {', '.join((DEFAULT, *known))}",
            why="attention_backend",
        )
    if not any(lane in every for lane in known[override]):
        raise UnsupportedCombination(
            "attention_backend", f"{override!r} was not measured for {asked}", why="attention_backend", table=asked
        )
    return known[override]


def _framework_default(backend: str, version: str, sm_version: int | None) -> str | None:
    """The lane a framework takes by itself: of the newest listed version not above ``version``; None if unlisted."""
    listed = {_dotted(floor): lanes for floor, lanes in table("lanes")["defaults"].get(backend, {}).items()}
    floor = max((floor for floor in listed if floor <= _dotted(version)), default=None)
    return None if floor is None else listed[floor].get(sm_version or -1)


def _dotted(version: str) -> tuple[int, ...]:
    numbers = takewhile(bool, (re.sub(r"\D.*", "", part) for part in version.split(".")))
    return tuple(map(int, numbers))
