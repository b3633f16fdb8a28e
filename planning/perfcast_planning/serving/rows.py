"""Columnar results: one array per quantity, one index per configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[Any]
DECIMALS = 3


@dataclass(frozen=True, slots=True)
class Rows:
    """N configurations as equally long columns."""

    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        assert len({len(column) for column in self.columns.values()}) <= 1, "columns differ in length"

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def row(self, index: int) -> dict[str, Any]:
        """One configuration as plain Python values."""
        return {name: column[index].item() for name, column in self.columns.items()}

    def take(self, which: Any) -> Rows:
        """The rows of a mask, an index array or a slice."""
        return Rows({name: column[which] for name, column in self.columns.items()})

    def with_(self, **columns: Column) -> Rows:
        return Rows({**self.columns, **columns})

    def prefixed(self, prefix: str, names: Iterable[str] | None = None) -> dict[str, Column]:
        return {prefix + name: self.columns[name] for name in (self.columns if names is None else names)}

    def rounded(self) -> Rows:
        """As the reference tabulates: three decimals, half to even."""
        return Rows(
            {n: np.round(c, DECIMALS) if c.dtype.kind == "f" else c for n, c in self.columns.items()}
        )  # fmt: skip

    def distinct(self) -> Rows:
        """Without repetitions of whole rows, the first of each kept."""
        if len(self) < 2:
            return self
        table = np.stack([np.asarray(column, np.float64) for column in self.columns.values()], axis=1)
        _, first = np.unique(table, axis=0, return_index=True)
        return self.take(np.sort(first))

    def order(self, *keys: str, start: Column | None = None) -> Column:
        """Row numbers sorted by the keys in turn, descending where a key begins with "-"; ties keep their order."""
        columns = [-self.columns[key[1:]] if key.startswith("-") else self.columns[key] for key in keys]
        return np.lexsort(columns[::-1])

    def sorted(self, *keys: str) -> Rows:
        return self.take(self.order(*keys))


def first_of_group(group: Column, *keys: Column) -> Column:
    """The row of each group that sorts first by ``keys``; groups ascending, of equal rows the first."""
    order = np.lexsort((*keys[::-1], group))
    return order[np.unique(group[order], return_index=True)[1]]


def descending(values: Column) -> Column:
    """Row numbers by falling value; equal values in the order in which the reference tabulates them, that of a reversed
    unstable sort."""
    backwards = np.arange(len(values))[::-1]
    return backwards[np.argsort(values[::-1], kind="quicksort")][::-1]


def concatenated(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts in turn; they have the same columns."""
    parts = [part for part in parts if len(part)] or list(parts[:1])
    if not parts:
        return Rows({})
    return Rows({name: np.concatenate([part[name] for part in parts]) for name in parts[0].columns})
