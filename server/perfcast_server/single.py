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
A, B, C, D, E = (key(common_pb2.Provenance, name) for name in wire.SHARES)
TIER = key(common_pb2.Provenance, "tier")
# a key and the latency, a key and the length of the provenance, and in it a key and a share each, a key and the tier
STEP = struct.Struct("<cdcB" + "cd" * len(wire.SHARES) + "cB").pack
LENGTH = 9 * len(wire.SHARES) + 2
SEQUENCE, RESULT, STAMP = (
    key(prediction_pb2.StreamStepsResponse, name) for name in ("sequence", "latency_ms", "engine")
)


def stamped(stamp: common_pb2.EngineStamp) -> bytes:
    """How every answer of an engine begins."""
    told = stamp.SerializeToString()
    return ENGINE + varint(len(told)) + told


def step(head: bytes, ms: float, by_source: Sequence[float], tier: int) -> bytes:
    """A PredictStepResponse after ``head``. by_source: ms per Source."""
    a, b, c, d, e = by_source
    whole = a + b + c + d + e or 1.0
    return head + STEP(
        LATENCY, ms, PROVENANCE, LENGTH, A, a / whole, B, b / whole, C, c / whole, D, d / whole, E, e / whole, TIER,
        wire.tier_number(tier),
    )  # fmt: skip


def streamed(sequence: int, ms: float, stamp: common_pb2.EngineStamp | None = None) -> bytes:
    """A StreamStepsResponse, with the ``stamp`` of an engine that is new to the stream."""
    parts = [SEQUENCE, varint(sequence), RESULT, number(ms)]
    if stamp is not None:
        told = stamp.SerializeToString()
        parts += [STAMP, varint(len(told)), told]
    return b"".join(parts)
