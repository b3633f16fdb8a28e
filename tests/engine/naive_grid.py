"""The resolution chain of measured grids written down point by point, as spec/02 section 3 states it."""

from __future__ import annotations

import math
from collections.abc import Callable

OUT = "out of range"


def nested(rows):
    """Nested dicts from (*keys, ms) rows."""
    tree: dict = {}
    for *keys, last, ms in rows:
        node = tree
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = float(ms)
    return tree


def resolve(rows, query, sol: Callable[..., float], sqrt_axis: int | None) -> float:
    """ms at one query point, NaN for a miss."""
    value = _interior(nested(rows), 0, query, sol, sqrt_axis)
    return _hold(rows, query, sol) if value is OUT else value


def _interior(node, d, query, sol, sqrt_axis):
    if d == len(query):
        return node
    c, keys = query[d], sorted(node)
    if c in node:
        return _interior(node[c], d + 1, query, sol, sqrt_axis)
    if not keys[0] <= c <= keys[-1]:
        return OUT
    lo, hi = max(k for k in keys if k < c), min(k for k in keys if k > c)
    below, above = (_interior(node[k], d + 1, query, sol, sqrt_axis) for k in (lo, hi))
    if below is OUT and above is OUT:
        return OUT
    if below is OUT or above is OUT:
        key, value = (hi, above) if below is OUT else (lo, below)
        here, there = sol(*query), sol(*query[:d], key, *query[d + 1 :])
        return value * (here / there) if here > 0 and there > 0 else value
    w = (c - lo) / (hi - lo)
    if d == sqrt_axis:
        return (math.sqrt(below) + (math.sqrt(above) - math.sqrt(below)) * w) ** 2
    return below + (above - below) * w


def _hold(rows, query, sol):
    if sol(*query) <= 0:
        return math.nan
    if len(query) == 1:
        key, ms = rows[0] if query[0] < rows[0][0] else rows[-1]
        return sol(*query) / (sol(key) / ms) if ms > 0 and sol(key) > 0 else math.nan
    leaves = []
    for *keys, ms in rows:
        if ms > 0 and sol(*keys) > 0:
            steps = (math.log2(max(k, 1e-12)) - math.log2(max(c, 1e-12)) for k, c in zip(keys, query, strict=True))
            leaves.append((math.sqrt(sum(step**2 for step in steps)), sol(*keys) / ms))
    leaves.sort(key=lambda leaf: leaf[0])
    if not leaves:
        return math.nan
    reach = leaves[4][0] if len(leaves) > 4 else math.inf
    weights = [
        1 / (d * d + 1e-12) if reach == math.inf else (max(reach - d, 0) / (reach * d + 1e-12)) ** 2
        for d, _ in leaves[:4]
    ]
    if sum(weights) <= 0:
        weights = [1.0] * len(weights)
    util = sum(w * u for w, (_, u) in zip(weights, leaves, strict=False)) / sum(weights)
    return sol(*query) / util
