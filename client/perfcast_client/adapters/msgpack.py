"""Reads msgpack, as far as records of telemetry need it."""

from __future__ import annotations

import struct
from typing import Any

FIXED = {0xC0: None, 0xC2: False, 0xC3: True}
NUMBERS = dict(enumerate((">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), start=0xCA))
TEXTS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
BYTES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
ARRAYS = {0xDC: ">H", 0xDD: ">I"}
MAPS = {0xDE: ">H", 0xDF: ">I"}
MAX_DEPTH = 16


def unpack(data: bytes) -> Any:
    """The one value that ``data`` holds; ValueError where it is malformed."""
    try:
        value, end = _value(data, 0, 0)
    except (IndexError, struct.error, UnicodeDecodeError, TypeError):
        raise ValueError("malformed msgpack") from None
    if end != len(data):
        raise ValueError("more than one msgpack value")
    return value


def _value(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    if depth > MAX_DEPTH:
        raise ValueError("msgpack nested too deeply")
    kind = data[at]
    at += 1
    if kind < 0x80:
        return kind, at
    if kind >= 0xE0:
        return kind - 0x100, at
    if kind in FIXED:
        return FIXED[kind], at
    if kind in NUMBERS:
        return _number(data, at, NUMBERS[kind])
    if kind < 0x90:
        return _map(data, at, kind & 0x0F, depth)
    if kind < 0xA0:
        return _array(data, at, kind & 0x0F, depth)
    if kind < 0xC0:
        return _text(data, at, kind & 0x1F)
    for table, read in ((TEXTS, _text), (BYTES, _bytes)):
        if kind in table:
            size, at = _number(data, at, table[kind])
            return read(data, at, size)
    for table, gather in ((ARRAYS, _array), (MAPS, _map)):
        if kind in table:
            size, at = _number(data, at, table[kind])
            return gather(data, at, size, depth)
    raise ValueError(f"msgpack of an unknown kind 0x{kind:02x}")


def _number(data: bytes, at: int, form: str) -> tuple[Any, int]:
    return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)


def _bytes(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if at + size > len(data):
        raise ValueError("truncated msgpack")
    return data[at : at + size], at + size


def _text(data: bytes, at: int, size: int) -> tuple[str, int]:
    raw, at = _bytes(data, at, size)
    return raw.decode(), at


def _array(data: bytes, at: int, size: int, depth: int) -> tuple[list[Any], int]:
    values = []
    for _ in range(size):
        value, at = _value(data, at, depth + 1)
        values.append(value)
    return values, at


def _map(data: bytes, at: int, size: int, depth: int) -> tuple[dict[Any, Any], int]:
    found = {}
    for _ in range(size):
        key, at = _value(data, at, depth + 1)
        found[key], at = _value(data, at, depth + 1)
    return found, at
