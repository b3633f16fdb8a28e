"""Column codecs of a pack: sorted integer key columns and bit-exact float64 values, as bytes that compress well.

Keys are coded as a tree: per level only the values at which the prefix changes, and how many children each has. All
integers are stored in the narrowest unsigned width, as byte planes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcast_systems.values import FORMS, RAW, Ints, Reals, put_together, take_apart

Stored = NDArray[Any]

_WIDTHS = ("<u1", "<u2", "<u4", "<i8")
_RESIDENT = ("=u1", "=u2", "=u4", "=i8")


class Damaged(ValueError):
    """Bytes that do not decode to what their header promises."""


class Reader:
    """Takes arrays off a buffer in the order in which they were put; Damaged when it runs out."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def take(self, size: int) -> memoryview:
        if size < 0 or self._at + size > len(self._data):
            raise Damaged("table data end early")
        piece = self._data[self._at : self._at + size]
        self._at += size
        return piece

    def ints(self, n: int) -> Stored:
        """The next integer array of length n in its narrow resident type (int64 only where values need it)."""
        code = self.take(1)[0]
        if code >= len(_WIDTHS):
            raise Damaged("unknown integer width")
        width = 1 << code
        planes = np.frombuffer(self.take(n * width), np.uint8).reshape(width, n)
        stored: Stored = np.ascontiguousarray(planes.T).view(_WIDTHS[code]).reshape(n)
        return stored.astype(_RESIDENT[code], copy=False)

    def raw_reals(self, n: int) -> Reals:
        planes = np.frombuffer(self.take(n * 8), np.uint8).reshape(8, n)
        return np.ascontiguousarray(planes.T).view("<f8").reshape(n).astype(np.float64, copy=False)

    def reals(self, n: int) -> Reals:
        forms = tuple(self.take(self.take(1)[0]))
        form = self.ints(n)
        if (len(form) and not np.all((form < len(forms)) | (form == RAW))) or any(f >= len(FORMS) for f in forms):
            raise Damaged("unknown form of value")
        whole = self.ints(n)
        return put_together(forms, form, whole, self.raw_reals(int(np.count_nonzero(form == RAW))))

    def number(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def done(self) -> bool:
        return self._at == len(self._data)


def put_ints(values: Ints) -> bytes:
    high = int(values.max()) if len(values) else 0
    code = next(i for i, bits in enumerate((8, 16, 32, 63)) if high < 1 << bits)
    return bytes([code]) + _planes(values.astype(_WIDTHS[code]))


def put_reals(values: Reals) -> bytes:
    """Values bit by bit."""
    exact = take_apart(values)
    head = bytes([len(exact.forms), *exact.forms])
    return b"".join((head, put_ints(exact.form), put_ints(exact.whole), _planes(exact.rest.astype("<f8"))))


def put_number(value: int) -> bytes:
    return struct.pack("<Q", value)


def _planes(values: Stored) -> bytes:
    width = values.dtype.itemsize
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), width).T.tobytes()


def put_keys(columns: Sequence[Ints]) -> bytes:
    """Lexicographically sorted key columns, outermost first."""
    n = len(columns[0])
    fresh = np.zeros(n, np.bool_)
    fresh[:1] = True
    parents = np.zeros(1, np.int64)
    out = [put_number(n)]
    for column in columns:
        fresh = fresh.copy()
        fresh[1:] |= column[1:] != column[:-1]
        first = np.flatnonzero(fresh)
        children = np.diff(np.append(np.searchsorted(first, parents), len(first)))
        out += [put_ints(children), put_number(len(first)), put_ints(column[first])]
        parents = first
    return b"".join(out)


def take_keys(reader: Reader, axes: int) -> tuple[Stored, ...]:
    """What ``put_keys`` wrote: ``axes`` columns of equal length in narrow unsigned types."""
    n = reader.number()
    nodes = 1
    levels: list[tuple[Stored, Stored]] = []
    for _ in range(axes):
        children = reader.ints(nodes)
        total = int(children.sum(dtype=np.int64))
        nodes = reader.number()
        if nodes != total or nodes > n:
            raise Damaged("key tree is inconsistent")
        levels.append((children, reader.ints(nodes)))
    if nodes != n:
        raise Damaged("key tree is inconsistent")
    columns = [levels[-1][1]]
    leaves = levels[-1][0].astype(np.int64)
    for children, values in reversed(levels[:-1]):
        columns.append(np.repeat(values, leaves))
        ends = np.cumsum(leaves)
        last = np.cumsum(children, dtype=np.int64)
        at = np.concatenate([[0], ends])
        leaves = at[last] - at[last - children.astype(np.int64)]
    return tuple(reversed(columns))


def put_body(columns: Sequence[Ints], ms: Reals, power: Reals | None) -> bytes:
    """Keys and values of one table."""
    return b"".join(
        (put_keys(columns), put_reals(ms), bytes([power is not None]), b"" if power is None else put_reals(power))
    )


def take_body(data: bytes, axes: int, rows: int) -> tuple[tuple[Stored, ...], Reals, Reals | None]:
    """What ``put_body`` wrote; Damaged unless it is ``rows`` rows of ``axes`` key columns and nothing else."""
    reader = Reader(data)
    columns = take_keys(reader, axes)
    if len(columns[0]) != rows:
        raise Damaged("unexpected number of rows")
    ms = reader.reals(rows)
    power = reader.reals(rows) if reader.take(1)[0] else None
    if not reader.done():
        raise Damaged("table data go on too long")
    return columns, ms, power
