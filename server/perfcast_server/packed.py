"""Columns of numbers between messages and arrays, by their bytes: a number at a time costs many times as much."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from numpy.typing import NDArray

KINDS: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {FieldDescriptor.TYPE_SFIXED32: np.dtype("<i4"), FieldDescriptor.TYPE_DOUBLE: np.dtype("<f8")}
)
PACKED = 2  # wire type of a packed column


def columns(message: Message) -> dict[str, NDArray[Any]]:
    """The repeated fields of ``message`` that hold anything, by name; its other fields must be single numbers."""
    data, at = message.SerializeToString(), 0  # which packs what came unpacked
    found: dict[str, NDArray[Any]] = {}
    while at < len(data):
        key, at = _read(data, at)
        if key & 7 != PACKED:
            _, at = _read(data, at)
            continue
        field = message.DESCRIPTOR.fields_by_number[key >> 3]
        size, at = _read(data, at)
        kind = KINDS[field.type]
        found[field.name] = np.frombuffer(data, kind, size // kind.itemsize, at)
        at += size
    return found


def put(message: Message, name: str, values: NDArray[np.float64]) -> None:
    """Append ``values`` to the repeated double ``name`` of ``message``."""
    data = np.ascontiguousarray(values, "<f8").tobytes()
    key = message.DESCRIPTOR.fields_by_name[name].number << 3 | PACKED
    if data:
        message.MergeFromString(varint(key) + varint(len(data)) + data)


def _read(data: bytes, at: int) -> tuple[int, int]:
    """A variable-length number and where the next byte is."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def varint(value: int) -> bytes:
    """``value`` as a variable-length number."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
