"""Memory of one GPU: the five components, whether they fit, and how much KV cache is left (spec/06 section 4).

Bytes everywhere; counts of requests and tokens are per attention-DP rank. Arrays broadcast to (N,) points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from perfcast_engine.answer import F64, Mask
from perfcast_engine.backends import GIB, KV_TOLERANCE, WORKSPACE_FAMILIES, Backend, backend_named
from perfcast_engine.config import ParallelConfig
from perfcast_engine.errors import InvalidField, OutOfMemory, UnsupportedCombination
from perfcast_engine.models.kv_cache import KvCurve
from perfcast_engine.models.resolve import Engine
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.system import SystemSpec

WIDTHS = (1, 2, 4, 8)  # tensor-parallel widths with figures; wider ones use the last
WORKSPACE_BLOCK, WORKSPACE_BYTES = 128, 4  # one float32 scale for each block of a routed activation
OF_FREE, OF_TOTAL = "of_free", "of_total"
MOST_SEQUENCES = 2**32
TRIED = 64  # batches at once, when the largest that fits is looked for


class Footprint(NamedTuple):
    """Resident bytes of one GPU at N points, each field float64 (N,)."""

    weights: F64
    activations: F64
    kv: F64
    nccl: F64
    others: F64

    @property
    def total(self) -> F64:
        return self.weights + self.activations + self.kv + self.nccl + self.others

    @property
    def fixed(self) -> F64:
        """All but the KV cache."""
        return self.total - self.kv

    @property
    def gib(self) -> F64:
        return self.total / GIB

    def take(self, which: Any) -> Footprint:
        return Footprint(*(part[which] for part in self))

    def larger(self, other: Footprint, where: Mask) -> Footprint:
        """This footprint, but ``other`` at the points of ``where`` at which that takes more."""
        swap = where & (other.total > self.total)
        return Footprint(*(np.where(swap, theirs, own) for own, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """KV cache that one GPU holds: bytes, and tokens of one sequence in them; ``breakdown``: whole bytes of everything
    else; ``within_tolerance``: bytes and tokens left after the tolerance, where one was given."""

    capacity_bytes: int
    kv_bytes: int
    kv_tokens: int
    bytes_per_token: int
    breakdown: dict[str, int]
    within_tolerance: tuple[int, int] | None

    def blocks(self, block_size: int) -> int:
        if block_size < 1:
            raise InvalidField("block_size", "must be at least 1")
        tokens = self.within_tolerance[1] if self.within_tolerance else self.kv_tokens
        return tokens // block_size


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """What one GPU of an engine holds. ``weight_bytes``: of all pipeline stages; ``kv``: the cache of one sequence."""

    system: SystemSpec
    backend: Backend
    version: str
    spec: ModelSpec
    parallel: ParallelConfig
    nextn: int
    weight_bytes: float
    kv: KvCurve

    @property
    def capacity(self) -> float:
        if self.system.mem_capacity is None:
            raise UnsupportedCombination("system", f"{self.system.name} states no memory capacity")
        return self.system.mem_capacity

    @property
    def width(self) -> int:
        tp = self.parallel.tp
        if tp < WIDTHS[-1] and tp not in WIDTHS:
            raise UnsupportedCombination("tp", f"no activation figures for a width of {tp}; use 1, 2, 4, 8 or more")
        return min(tp, WIDTHS[-1])

    def footprint(
        self,
        batch: Any,
        isl: Any,
        osl: Any,
        num_tokens: Any = 0,
        prefix: Any = 0,
        *,
        beam: Any = 1,
        max_seq_len: Any = None,
        drafted: Any = None,
        mtp: bool = True,
        encoder: tuple[Any, Any] = (0.0, 0.0),
    ) -> Footprint:
        """Bytes held with ``batch`` sequences of isl + beam * osl tokens (or ``max_seq_len``), ``num_tokens`` in flight
        (0: the uncached prompts). ``drafted``: how many of those carry draft tokens (None: all); ``encoder``: weights
        and activations of a vision encoder in the same process."""
        batch, isl, osl, tokens, prefix, beam = (
            np.atleast_1d(np.asarray(v, np.float64)) for v in (batch, isl, osl, num_tokens, prefix, beam)
        )
        full = np.ones_like(batch + isl + osl + tokens + prefix + beam)
        tokens = np.where(tokens == 0, (isl - prefix) * batch, tokens) * full
        length = isl + beam * osl if max_seq_len is None else np.atleast_1d(np.asarray(max_seq_len, np.float64))
        return Footprint(
            full * (self.weight_bytes / self.parallel.pp + encoder[0]),
            self._activations(tokens, drafted, mtp) + encoder[1],
            full * batch * self.kv.bytes(length),
            full * self.system.nccl_mem.get(self.width, 0.0),
            full * (self.system.other_mem * (1 + self.backend.other_overhead)),
        )

    def _activations(self, tokens: F64, drafted: Any, mtp: bool) -> F64:
        spec, moe, backend, heads = self.spec, self.spec.moe, self.backend, self.spec.heads * self.spec.head_dim
        coefficients = backend.activation.get(spec.family, backend.activation[""])
        held = 2 * tokens * heads * coefficients[WIDTHS.index(self.width)]
        if spec.family in WORKSPACE_FAMILIES and moe.experts:
            by_hidden = "" in backend.workspace_by_hidden or spec.family in backend.workspace_by_hidden
            row = spec.hidden if by_hidden else heads
            routed = tokens * row * self.parallel.attn_dp * moe.experts * moe.topk / (self.parallel.moe_ep or 1)
            held = held + routed / WORKSPACE_BLOCK * WORKSPACE_BYTES
        held = np.maximum(held, backend.activation_floor)
        if mtp and self.nextn > 0:
            held = held * self._draft_factor(tokens, drafted)
        return held * (1 + backend.activation_overhead)

    def _draft_factor(self, tokens: F64, drafted: Any) -> F64 | float:
        if drafted is None:
            return self.nextn + 1
        some = np.clip(np.asarray(drafted, np.float64), 0, tokens)
        safe = np.maximum(tokens, 1)
        return np.where(tokens > 0, (tokens - some + some * (self.nextn + 1)) / safe, self.nextn + 1)

    def kv_fraction(self, given: float | None = None, fixed: bool = False) -> float:
        """The share of memory that the KV cache may fill: as ``given``, else the framework's own default
        (``fixed``: even where the framework derives one)."""
        if given is not None:
            _check_share("free_gpu_memory_fraction", given)
            return given
        parallel = self.parallel
        if self.backend.kv_derived is not None and not fixed:
            return self.backend.kv_derived(self.capacity, parallel.tp, parallel.pp, parallel.attn_dp)
        return next(value for prefix, value in self.backend.kv_fraction.items() if self.version.startswith(prefix))

    def kv_budget(
        self, fixed: F64, fraction: float, reserved: float | None = None, tolerance: float = KV_TOLERANCE
    ) -> F64:
        """Bytes that the KV cache may take beside ``fixed`` bytes of everything else."""
        share = fraction * (1 - (self.backend.kv_reserved if reserved is None else reserved)) * (1 - tolerance)
        return (self.capacity - fixed) * share if self.backend.kv_of_free else self.capacity * share - fixed

    def verdict(self, footprint: Footprint, fraction: float) -> tuple[Mask, Mask]:
        """(out of memory, KV cache over its budget) at each point; the second is False where the first holds."""
        out = footprint.total >= self.capacity
        return out, ~out & (footprint.kv > self.kv_budget(footprint.fixed, fraction))

    def largest_batch(self, isl: int, osl: int, fraction: float | None = None, limit: int = 4096) -> int:
        """The most concurrent sequences of isl + osl tokens per rank that fit, up to ``limit``; 0 if none does."""
        share = self.kv_fraction(fraction)

        def fits(batch: F64) -> Mask:
            out, over = self.verdict(self.footprint(batch, isl, osl, num_tokens=batch), share)
            return ~(out | over)

        return _largest(fits, limit)

    def most_resident(self, isl: int, osl: int) -> int:
        """The most sequences per rank whose prompts, run at once, and KV cache fit the memory; 0 if none does."""
        return _largest(lambda batch: self.footprint(batch, isl, osl).total < self.capacity, MOST_SEQUENCES)

    def kv_capacity(
        self, max_num_tokens: int, fraction: float, kind: str | None = None, tolerance: float | None = None
    ) -> KvCapacity:
        """The KV cache that an engine finds at start-up, sized for ``max_num_tokens`` in flight (spec/06 4.3).

        ``kind``: of_free or of_total, which must be the framework's own. Raises OutOfMemory when nothing is left.
        """
        own = OF_FREE if self.backend.kv_of_free else OF_TOTAL
        if kind is not None and kind != own:
            told = f"{self.backend.name} takes {own}, not {kind!r}"
            raise InvalidField("memory_fraction_kind", told, why="fraction_kind")
        _check_share("memory_fraction", fraction)
        if tolerance is not None and not 0 <= tolerance < 1:
            raise InvalidField("tolerance_fraction", f"must lie in [0, 1), not {tolerance!r}", why="range")
        footprint = self.footprint(1, 1, 1, max_num_tokens, mtp=False)
        held = {name: float(getattr(footprint, name)[0]) for name in ("weights", "activations", "others", "nccl")}
        fixed = sum(held.values())
        budget = float(self.kv_budget(np.array([fixed]), fraction, reserved=0.0, tolerance=0.0)[0])
        if budget <= 0:
            taken, whole = int(fixed), int(self.capacity)
            told = f"no KV budget: weights, activations and overheads take {taken} of {whole} bytes"
            raise OutOfMemory(told, fixed_bytes=str(taken), capacity_bytes=str(whole))
        per_token = math.floor(float(self.kv.bytes(1)))
        if per_token <= 0:
            raise UnsupportedCombination("model", f"no KV cache figures for the {self.spec.family} family")
        left = None if tolerance is None else math.floor(math.floor(budget) * (1 - tolerance))
        return KvCapacity(
            int(self.capacity),
            math.floor(budget),
            self.kv.tokens(budget, self.spec.ctx),
            per_token,
            {name: int(size) for name, size in held.items()},
            None if left is None else (left, self.kv.tokens(left, self.spec.ctx)),
        )


def _check_share(field: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InvalidField(field, f"must lie in [0, 1], not {value!r}", why="range")


def _largest(fits: Callable[[F64], Mask], limit: int) -> int:
    """The largest whole number up to ``limit`` that ``fits``, as all smaller ones do; 0 if none does."""
    low, high = 0.0, limit + 1.0
    while high - low > 1:
        tried = np.unique(np.linspace(low, high, TRIED + 2).round())
        tried = tried[(tried > low) & (tried < high)]
        held = int(np.count_nonzero(fits(tried)))
        low, high = tried[held - 1] if held else low, tried[held] if held < len(tried) else high
    return int(low)


def memory_of(engine: Engine) -> MemoryModel:
    """What one GPU of a resolved engine holds."""
    plan, db = engine.plan, engine.db
    return MemoryModel(
        system=db.system,
        backend=backend_named(db.backend),
        version=db.version,
        spec=engine.spec,
        parallel=engine.parallel,
        nextn=engine.nextn,
        weight_bytes=plan.weight_bytes,
        kv=plan.kv,
    )
