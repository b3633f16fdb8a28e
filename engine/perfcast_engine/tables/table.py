"""One measured table: columns sorted by key, sliced by the leading key columns into grids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcast_engine.answer import F64
from perfcast_engine.interp.grid import Grid

Key = str | int


@dataclass(slots=True)
class Table:
    """Rows of one table: key columns in any integer type, lexicographically sorted in key order, and a float64 latency.

    A column of names (quantisation, kernel, distribution ...) holds codes into ``vocab[column]``, a list in order of
    first appearance in the row stream, so that ascending codes ARE first-appearance order. Numbers are themselves.
    ``power`` (W) is None where no row has any.
    """

    name: str
    key: tuple[str, ...]
    columns: Sequence[NDArray[Any]]
    vocab: Mapping[str, Sequence[str]]
    ms: F64
    power: F64 | None = None

    def __len__(self) -> int:
        return len(self.ms)

    def code(self, column: str, value: Key) -> int | None:
        """The number that stands for ``value`` in ``column``; None for a name the table does not hold."""
        names = self.vocab.get(column)
        if names is None:
            return int(value)
        return names.index(value) if value in names else None

    def value(self, column: str, code: int) -> Key:
        names = self.vocab.get(column)
        return int(code) if names is None else names[int(code)]

    def rows(self, *prefix: Key) -> slice | None:
        """The contiguous rows whose leading key columns equal ``prefix``; None if there are none."""
        lo, hi = 0, len(self.ms)
        for column, values, value in zip(self.key, self.columns, prefix, strict=False):
            code = self.code(column, value)
            if code is None or not 0 <= code <= np.iinfo(values.dtype).max:
                return None
            part, code = values[lo:hi], values.dtype.type(code)
            lo, hi = lo + int(np.searchsorted(part, code)), lo + int(np.searchsorted(part, code, "right"))
            if lo == hi:
                return None
        return slice(lo, hi)

    def holds(self, **values: Key) -> bool:
        """Whether any row has these values in these key columns, whatever their place in the key."""
        found = np.ones(len(self.ms), np.bool_)
        for column, value in values.items():
            code = self.code(column, value)
            if code is None:
                return False
            found &= self.columns[self.key.index(column)] == code
        return bool(found.any())

    def children(self, *prefix: Key) -> list[Key]:
        """Distinct values of the key column after ``prefix``: names in first-appearance order, numbers ascending."""
        rows = self.rows(*prefix)
        if rows is None:
            return []
        column = self.key[len(prefix)]
        return [self.value(column, code) for code in np.unique(self.columns[len(prefix)][rows])]

    def grid(self, *prefix: Key) -> Grid | None:
        """The nested grid over the key columns that follow ``prefix``; None if no row has that prefix."""
        rows = self.rows(*prefix)
        if rows is None:
            return None
        return Grid(
            tuple(column[rows].astype(np.int64) for column in self.columns[len(prefix) :]),
            self.ms[rows],
            None if self.power is None else self.power[rows],
        )

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """All that it holds."""
        return [*self.columns, self.ms, *([] if self.power is None else [self.power])]
