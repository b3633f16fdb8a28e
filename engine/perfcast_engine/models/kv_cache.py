"""Bytes of KV cache of one sequence on one GPU, and the longest sequence that fits (spec/05 section 10)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfcast_engine.answer import F64
from perfcast_engine.data import table
from perfcast_engine.formula import Names, compiled, let, value
from perfcast_engine.models.deployment import Deployment
from perfcast_engine.models.layers import layers
from perfcast_engine.models.names import deployment_names
from perfcast_engine.profiles import KV_ON_EVERY_STAGE


@dataclass(frozen=True, slots=True)
class Piece:
    """``each`` bytes for each entry; one entry a ``ratio`` tokens, of the last ``window`` tokens where there is one."""

    each: float
    window: int = 0
    ratio: int = 1


@dataclass(frozen=True, slots=True)
class KvCurve:
    """Bytes over length: pieces that grow with it and a constant. ``elements``: elements per token, as reported."""

    elements: float
    pieces: tuple[Piece, ...]
    constant: float = 0.0

    def bytes(self, tokens: Any) -> F64:
        """Bytes of sequences of ``tokens`` tokens, any shape."""
        length = np.asarray(tokens, np.float64)
        total = np.full(length.shape, self.constant)
        for piece in self.pieces:
            held = np.minimum(length, piece.window) if piece.window else length
            total = total + piece.each * np.floor(held / piece.ratio)
        return total

    def tokens(self, budget: float, longest: int) -> int:
        """The longest sequence within ``budget`` bytes; ``longest`` where the cache stops growing before it is full."""
        if budget <= 0 or self.bytes(1) <= 0:
            return 0
        if all(piece.window == 0 and piece.ratio == 1 for piece in self.pieces):
            slope = sum(piece.each for piece in self.pieces)
            rest = budget - self.constant
            return max(0, int(rest // slope)) if slope > 0 else longest * (rest >= 0)
        high = 1
        while self.bytes(high) <= budget:
            if self.bytes(2 * high) == self.bytes(high):
                return longest if longest > 0 else 2 * high
            high *= 2
        low = high // 2
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes(middle) <= budget else (low, middle)
        return low


def kv_curve(d: Deployment, per_stage: bool = True) -> KvCurve:
    """The KV cache of one sequence on one GPU; of all pipeline stages together unless ``per_stage``."""
    families, names = table("models/kv"), deployment_names(d)
    names["uniform"] = 2.0 * d.kv_heads * d.spec.head_dim
    family = families["same_as"].get(d.spec.family, d.spec.family)
    rows = families["families"].get(family) or families["families"][""]
    row = next(row for row in rows if value(compiled(row.get("when", True)), names))
    stages = 1 if not per_stage or d.profile[KV_ON_EVERY_STAGE] else d.parallel.pp
    return _curve(row, names, stages)


def _curve(row: Mapping[str, Any], names: Names, stages: int) -> KvCurve:
    """The curve of one row of kv.yaml, shared by ``stages`` pipeline stages."""

    def figure(fields: Mapping[str, Any], name: str) -> float:
        return float(value(compiled(fields.get(name, 0)), names))

    let(row.get("let", {}), names)
    elements, pieces, mode_bytes = 0.0, [], names["kv_bytes"]
    for layer in layers(row["layers"], names) if "layers" in row else ():
        each = layer["count"] * layer["kv_heads"] * (layer["qk"] + layer["v"])
        elements += each
        pieces.append(Piece(each * mode_bytes / stages, layer["window"]))
    for piece in row.get("pieces", ()):
        each = figure(piece, "elements")
        elements += each
        held = each * mode_bytes + figure(piece, "bytes")
        pieces.append(Piece(held / stages, int(figure(piece, "window")), int(piece.get("ratio", 1))))
    reported = figure(row, "reported") if "reported" in row else elements
    return KvCurve(reported / stages, tuple(pieces), figure(row, "constant") / stages)
