"""Rows of one parquet file as numpy columns, names coded in order of first appearance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from perfcast_systems.build.tree import BuildError

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]
Index = NDArray[np.intp] | NDArray[np.bool_]

UNUSED = frozenset({"framework", "version", "device", "model_name", "power_limit"})


@dataclass(frozen=True, slots=True)
class Names:
    """A column of names: ``codes`` (N,) into ``values``, which are distinct."""

    codes: Ints
    values: tuple[str, ...]

    @classmethod
    def constant(cls, value: str, n: int) -> Names:
        return cls(np.zeros(n, np.int64), (value,))

    def take(self, which: Index) -> Names:
        return Names(self.codes[which], self.values)

    def renamed(self, new: Callable[[str], str]) -> Names:
        """Values replaced; values that become equal share one code."""
        fresh = [new(value) for value in self.values]
        distinct = tuple(dict.fromkeys(fresh))
        mapping = np.array([distinct.index(value) for value in fresh], np.int64)
        return Names(mapping[self.codes] if len(fresh) else self.codes, distinct)

    def where(self, test: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Which rows hold a value that passes ``test``."""
        passes = np.array([test(value) for value in self.values], np.bool_)
        return passes[self.codes] if len(passes) else np.zeros(0, np.bool_)


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of N rows in file order. ``origin`` names the file in messages."""

    origin: str
    n: int
    names: dict[str, Names] = field(default_factory=dict)
    numbers: dict[str, Ints] = field(default_factory=dict)
    reals: dict[str, Reals] = field(default_factory=dict)

    def take(self, which: Index) -> Rows:
        count = int(np.count_nonzero(which)) if which.dtype == np.bool_ else len(which)
        return Rows(
            self.origin,
            count,
            {k: v.take(which) for k, v in self.names.items()},
            {k: v[which] for k, v in self.numbers.items()},
            {k: v[which] for k, v in self.reals.items()},
        )

    def name(self, column: str, default: str | None = None) -> Names:
        if column in self.names:
            return self.names[column]
        if default is None:
            raise BuildError(f"{self.origin}: no text column {column}")
        return Names.constant(default, self.n)

    def number(self, column: str, default: int | None = None) -> Ints:
        if column in self.numbers:
            return self.numbers[column]
        if default is None:
            raise BuildError(f"{self.origin}: no integer column {column}")
        return np.full(self.n, default, np.int64)

    def real(self, column: str, default: float | None = None) -> Reals:
        if column in self.reals:
            return self.reals[column]
        if column in self.numbers:
            return self.numbers[column].astype(np.float64)
        if default is None:
            raise BuildError(f"{self.origin}: no column {column}")
        return np.full(self.n, default)

    def admitted(self, kernels: Iterable[str] | None) -> Rows:
        """Only rows of these kernel sources; all for None."""
        if kernels is None:
            return self
        allowed = frozenset(kernels)
        return self.take(self.name("kernel_source", "default").where(allowed.__contains__))


def read(path: Path, origin: str) -> Rows:
    """All useful columns of a parquet file; BuildError for damage, nulls or types that no table has."""
    try:
        # a plain handle: pyarrow memory-maps paths, and a truncated map would kill the process
        with path.open("rb") as handle:
            table = pq.read_table(handle)
    except (OSError, pa.ArrowException) as error:
        raise BuildError(f"{origin}: {error}") from error
    rows = Rows(origin, table.num_rows)
    for column in table.column_names:
        if column not in UNUSED:
            _add(rows, column, table[column].combine_chunks())
    return rows


def _add(rows: Rows, column: str, values: pa.Array) -> None:
    kind = values.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        filled = values.fill_null(0) if column == "sms" else values
        rows.numbers[column] = _numpy(rows, column, filled.cast(pa.int64())).astype(np.int64)
    elif pa.types.is_floating(kind):
        rows.reals[column] = _numpy(rows, column, values.cast(pa.float64())).astype(np.float64)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        coded = values.dictionary_encode()
        codes = _numpy(rows, column, coded.indices).astype(np.int64)
        rows.names[column] = Names(codes, tuple(coded.dictionary.to_pylist()))
    elif pa.types.is_dictionary(kind):
        _add(rows, column, values.dictionary_decode())
    elif not pa.types.is_null(kind):
        raise BuildError(f"{rows.origin}: column {column} has the unknown type {kind}")


def _numpy(rows: Rows, column: str, values: pa.Array) -> NDArray[np.generic]:
    if values.null_count:
        raise BuildError(f"{rows.origin}: column {column} has empty cells")
    array: NDArray[np.generic] = values.to_numpy(zero_copy_only=False)
    return array
