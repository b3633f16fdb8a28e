"""Folding streams of rows into one sorted table per key (spec/01 section 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcast_systems.build.parts import Column, Part
from perfcast_systems.build.rows import Ints, Names, Reals
from perfcast_systems.build.schema import TABLES
from perfcast_systems.build.tree import BuildError

SHADOWED = 0x80  # bit of a source code: another lane was met earlier at the same coordinates
MAX_SOURCES = 0x7F
LAST_ROW_WINS = ("dsa_", "msa_", "glm5_", "dsv32_")
WIDE = frozenset({"message_size"})


@dataclass(frozen=True, slots=True)
class Folded:
    """One table: key columns (N,) sorted lexicographically, ms and W, and per row the index of its source.

    ``first`` is, per source, the row of the table with the key that the source begins with (-1 without rows).
    """

    name: str
    columns: tuple[Ints, ...]
    vocab: Mapping[str, tuple[str, ...]]
    ms: Reals
    power: Reals | None
    source: NDArray[np.uint8]
    first: tuple[int, ...]

    @property
    def n(self) -> int:
        return len(self.ms)


def fold(table: str, parts: Sequence[tuple[int, Part]]) -> Folded:
    """Merge ``(source index, rows)`` in order of precedence: the first row of a key wins, within and across sources.

    In the tables of LAST_ROW_WINS the last row of a source wins within it.
    """
    key = TABLES[table].key
    sources = 1 + max((source for source, _ in parts), default=-1)
    if sources > MAX_SOURCES:
        raise BuildError(f"{table}: more than {MAX_SOURCES} sources")
    columns, vocab = [], {}
    for i, name in enumerate(key):
        column = _joined([part.columns[i] for _, part in parts])
        if isinstance(column, Names):
            vocab[name] = column.values
            columns.append(column.codes)
        else:
            _check_range(table, name, column)
            columns.append(column)
    ms = np.concatenate([part.ms for _, part in parts]) if parts else np.zeros(0)
    if not np.isfinite(ms).all():
        raise BuildError(f"{table}: a latency is not finite")
    if not len(ms):
        empty = np.zeros(0, np.int64)
        return Folded(table, (empty,) * len(key), vocab, ms, None, np.zeros(0, np.uint8), (-1,) * sources)
    source = np.concatenate([np.full(part.n, source, np.uint8) for source, part in parts])
    rank = _rank(columns)
    began = [np.flatnonzero(source == index)[:1] for index in range(sources)]
    winner = _winners(rank, _backwards(parts) if table.startswith(LAST_ROW_WINS) else None)
    if key[0] == "lane":
        met_first = np.zeros(len(ms), np.bool_)
        met_first[_winners(_rank(columns[1:]), None)] = True
        source = source | np.where(met_first, 0, SHADOWED).astype(np.uint8)
    return Folded(
        table,
        tuple(column[winner] for column in columns),
        vocab,
        ms[winner],
        _power(parts, winner),
        source[winner],
        tuple(int(np.searchsorted(rank[winner], rank[row[0]])) if len(row) else -1 for row in began),
    )


def sites(gemm: Sequence[tuple[int, Part]]) -> list[tuple[int, Part]]:
    """Ranks of the (n, k) sites of each quantisation: the order in which a walk over m, then n, then k, each as first
    seen, meets them."""
    if not sum(part.n for _, part in gemm):
        return []
    dtype = _joined([part.columns[0] for _, part in gemm])
    assert isinstance(dtype, Names)
    numbers = [np.concatenate([_numbers(part.columns[i]) for _, part in gemm]) for i in (1, 2, 3)]
    source = np.concatenate([np.full(part.n, source, np.int64) for source, part in gemm])
    _, n, k = numbers
    seen = [_first_index(_rank([dtype.codes, *numbers[:depth]])) for depth in (1, 2, 3)]
    walk = np.lexsort((seen[2], seen[1], seen[0], dtype.codes))
    site = _rank([dtype.codes, n, k])
    met = walk[np.sort(np.unique(site[walk], return_index=True)[1])]
    start = np.searchsorted(dtype.codes[met], dtype.codes[met])
    nearest_source = np.full(int(site.max()) + 1, MAX_SOURCES)
    np.minimum.at(nearest_source, site, source)
    ranks = (np.arange(len(met)) - start).astype(np.float64)
    whose = nearest_source[site[met]]
    return [
        (
            int(s),
            Part(
                "gemm_sites",
                (Names(dtype.codes[met[whose == s]], dtype.values), n[met[whose == s]], k[met[whose == s]]),
                ranks[whose == s],
            ),
        )
        for s in np.unique(whose)
    ]


def _numbers(column: Column) -> Ints:
    assert not isinstance(column, Names)
    return column


def _joined(columns: Sequence[Column]) -> Column:
    """One column of all parts; names recoded in order of first appearance."""
    if not any(isinstance(column, Names) for column in columns):
        return np.concatenate([_numbers(column) for column in columns]) if columns else np.zeros(0, np.int64)
    union: dict[str, int] = {}
    coded = []
    for column in columns:
        assert isinstance(column, Names)
        mapping = np.array([union.setdefault(value, len(union)) for value in column.values], np.int64)
        coded.append(mapping[column.codes] if column.values else column.codes)
    codes = np.concatenate(coded)
    used, where = np.unique(codes, return_index=True)
    order = used[np.argsort(where)]
    recode = np.zeros(len(union), np.int64)
    recode[order] = np.arange(len(order))
    names = tuple(union)
    return Names(recode[codes] if len(codes) else codes, tuple(names[code] for code in order))


def _check_range(table: str, name: str, column: Ints) -> None:
    limit = np.iinfo(np.int64).max if name in WIDE else np.iinfo(np.uint32).max
    if len(column) and (column.min() < 0 or column.max() > limit):
        raise BuildError(f"{table}: {name} is out of range")


def _rank(columns: Sequence[Ints]) -> Ints:
    """Dense rank of each row in lexicographic order of the columns."""
    rank = np.zeros(len(columns[0]), np.int64)
    span = 1
    for column in columns:
        low, high = int(column.min()), int(column.max())
        if span * (high - low + 1) >= 2**62:
            rank = np.unique(rank, return_inverse=True)[1]
            span = int(rank.max()) + 1
        if span * (high - low + 1) >= 2**62:
            column = np.unique(column, return_inverse=True)[1]
            low, high = 0, int(column.max())
        rank = rank * (high - low + 1) + (column - low)
        span *= high - low + 1
    return np.unique(rank, return_inverse=True)[1].astype(np.int64)


def _winners(rank: Ints, order: Ints | None) -> Ints:
    """Per distinct rank, ascending, the first row (in ``order`` where given)."""
    if order is None:
        return np.unique(rank, return_index=True)[1].astype(np.int64)
    return order[np.unique(rank[order], return_index=True)[1]]


def _backwards(parts: Sequence[tuple[int, Part]]) -> Ints:
    """Row numbers with each part back to front."""
    pieces, start = [], 0
    for _, part in parts:
        pieces.append(np.arange(start + part.n - 1, start - 1, -1))
        start += part.n
    return np.concatenate(pieces).astype(np.int64)


def _first_index(rank: Ints) -> Ints:
    """Of each row, the number of the first row that has its rank."""
    _, index, inverse = np.unique(rank, return_index=True, return_inverse=True)
    return index[inverse].astype(np.int64)


def _power(parts: Sequence[tuple[int, Part]], winner: Ints) -> Reals | None:
    if all(part.power is None for _, part in parts):
        return None
    power = np.concatenate([np.zeros(part.n) if part.power is None else part.power for _, part in parts])[winner]
    return power if power.any() else None
