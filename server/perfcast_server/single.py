"""Answers about single steps as bytes, put together from parts of which all but the numbers are written once.

A step without operators is asked for often enough that building and serialising its message would take longer than
working it out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from perfcast.v1 import common_pb2, prediction_pb2

from perfcast_server import wire
from perfcast_server.packed import varint

WIRE_TYPES = {FieldDescriptor.TYPE_DOUBLE: 1, FieldDescriptor.TYPE_MESSAGE: 2}  # others here are variable-length
number = struct.Struct("<d").pack


def key(message: Any, field: str) -> bytes:
    """What precedes the value of ``field`` in a message."""
    described = message.DESCRIPTOR.fields_by_name[field]
    return varint(described.number << 3 | WIRE_TYPES.get(described.type, 0))


ENGINE, LATENCY, PROVENANCE = (
    key(prediction_pb2.PredictStepResponse, name) for name in ("engine", "latency_ms", "provenance")
)
SHARES = tuple(key(common_pb2.Provenance, name) for name in wire.SHARES)
TIER = key(common_pb2.Provenance, "tier")
SEQUENCE, RESULT, STAMP = (
    key(prediction_pb2.StreamStepsResponse, name) for name in ("sequence", "latency_ms", "engine")
)


def stamped(stamp: common_pb2.EngineStamp) -> bytes:
    """How every answer of an engine begins."""
    told = stamp.SerializeToString()
    return ENGINE + varint(len(told)) + told


def step(head: bytes, ms: float, by_source: Sequence[float], tier: int) -> bytes:
    """A PredictStepResponse after ``head``. by_source: ms per Source."""
    whole = sum(by_source) or 1.0
    shares = b"".join([share + number(part / whole) for share, part in zip(SHARES, by_source, strict=True) if part])
    told = shares + TIER + varint(wire.tier_number(tier))
    return b"".join((head, LATENCY, number(ms), PROVENANCE, varint(len(told)), told))


def streamed(sequence: int, ms: float, stamp: common_pb2.EngineStamp | None) -> bytes:
    """A StreamStepsResponse, with the ``stamp`` of an engine that is new to the stream."""
    parts = [SEQUENCE, varint(sequence), RESULT, number(ms)]
    if stamp is not None:
        told = stamp.SerializeToString()
        parts += [STAMP, varint(len(told)), told]
    return b"".join(parts)
