"""The search space: which parallel mappings a role may take (spec/06 section 10)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from perfcast_engine.backends import Backend
from perfcast_engine.config import ParallelConfig
from perfcast_engine.errors import InvalidField, UnsupportedCombination
from perfcast_engine.models.families import family_row, is_moe
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.system import SystemSpec

Sizes = tuple[int, ...]
MAX_SIZE = 4096


def powers_of_two(least: int, most: int) -> Sizes:
    return tuple(1 << i for i in range(most.bit_length()) if least <= 1 << i <= most)


@dataclass(frozen=True, slots=True)
class Space:
    """Sizes that each parallel width may take, and the GPU counts of a worker; empty lists take the defaults."""

    num_gpu: Sizes = ()
    tp: Sizes = ()
    pp: Sizes = ()
    attn_dp: Sizes = ()
    moe_tp: Sizes = ()
    moe_ep: Sizes = ()
    cp: Sizes = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            for value in getattr(self, field.name):
                if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
                    raise InvalidField(f"space.{field.name}", f"holds {value!r:.40}, not a whole number from 1")

    def over(self, default: Space) -> Space:
        """These lists where given, ``default``'s elsewhere."""
        return Space(*(getattr(self, field.name) or getattr(default, field.name) for field in fields(self)))

    def union(self, other: Space) -> Space:
        return Space(*(tuple(sorted({*getattr(self, f.name), *getattr(other, f.name)})) for f in fields(self)))

    def within(self, total_gpus: int | None) -> Space:
        return self if total_gpus is None else replace(self, num_gpu=tuple(n for n in self.num_gpu if n <= total_gpus))


# Large EP: (backend, role) -> GPU counts, tp, attention dp and EP sizes that join the fused space where the all-to-all
# is measured. The reference spells them out per backend; a backend without an entry takes whatever EP is measured.
_TP = (1, 2, 4, 8)
LARGE_EP = {
    ("trtllm", "agg"): (powers_of_two(2, 64), _TP, powers_of_two(2, 64), powers_of_two(2, 64)),
    ("trtllm", "prefill"): (powers_of_two(4, 32), _TP, powers_of_two(4, 32), powers_of_two(4, 32)),
    ("trtllm", "decode"): (powers_of_two(4, 64), _TP, powers_of_two(4, 64), powers_of_two(4, 64)),
    ("sglang", "agg"): (powers_of_two(8, 64), _TP, powers_of_two(1, 64), powers_of_two(8, 64)),
    ("sglang", "prefill"): (powers_of_two(8, 32), _TP, powers_of_two(1, 32), powers_of_two(8, 32)),
    ("sglang", "decode"): (powers_of_two(8, 64), _TP, powers_of_two(1, 64), powers_of_two(8, 64)),
}
EP_SIZES = powers_of_two(2, 512)  # whose coverage is looked up
TWO_STAGE_FAMILIES = frozenset({"DEEPSEEKV32", "DEEPSEEKV4"})  # deployed over two nodes on Blackwell
TWO_STAGE = Space((16,), (8,), (2,), (1,), (1, 2, 4, 8), (1, 2, 4, 8))


def default_space(
    backend: Backend,
    system: SystemSpec,
    spec: ModelSpec,
    role: str,
    *,
    moe_backend: str | None = None,
    covered_ep: Sequence[int] = (),
    total_gpus: int | None = None,
) -> Space:
    """Sizes tried when nothing is said. ``role``: agg, prefill or decode; ``covered_ep``: EP sizes wider than a node
    that the measured all-to-all covers."""
    splits = backend.context_parallel and family_row(spec.family, backend.name, False).cp is not None
    cp = powers_of_two(1, 8) if splits and role != "decode" else (1,)
    rack = system.gpus_per_rack is not None
    if not is_moe(spec):
        sizes = powers_of_two(1, 16 if rack else 8)
        return Space(sizes, sizes, (1,), (1,), (1,), (1,), cp)
    if moe_backend == "megamoe":
        gpus = powers_of_two(4, 32) if rack else (8,)
        return Space(gpus, _TP, (1,), powers_of_two(1, 32 if rack else 8), (1,), gpus, cp)
    sizes = powers_of_two(1, 16)
    space = Space(sizes, sizes, (1,), sizes, (1,) if moe_backend == "deepep_moe" else sizes, sizes, cp)
    if covered_ep:
        covered = tuple(covered_ep)
        gpus, tp, dp, ep = LARGE_EP.get((backend.name, role)) or (covered, (1,), covered, covered)
        space = space.union(Space(gpus, tp, (1,), dp, (1,), ep, cp))
    if spec.family in TWO_STAGE_FAMILIES and (system.sm_version or 0) >= 100 and (total_gpus or 0) >= 16:
        space = space.union(TWO_STAGE)
    return space


def mappings(space: Space, backend: Backend, moe: bool, megamoe: bool = False) -> Iterator[ParallelConfig]:
    """The parallel mappings of a space, in the order of nested loops over tp, pp, dp, moe_tp, moe_ep, cp."""
    if any(cp > 1 for cp in space.cp) and not backend.context_parallel:
        raise UnsupportedCombination("space.cp", f"{backend.name} has no context parallelism; use 1")
    one = (1,)
    dps, moe_tps, moe_eps = (space.attn_dp, space.moe_tp, space.moe_ep) if moe else (one, one, one)
    for tp, pp, dp, moe_tp, moe_ep, cp in product(space.tp, space.pp, dps, moe_tps, moe_eps, space.cp):
        if tp * pp * dp * cp not in space.num_gpu or (moe and tp * dp * cp != moe_tp * moe_ep):
            continue
        found = ParallelConfig(tp=tp, pp=pp, attn_dp=dp, cp=cp, moe_tp=moe_tp, moe_ep=moe_ep)
        excluded = any(getattr(found, a) > 1 < getattr(found, b) for a, b in backend.excludes)
        if not excluded and not (megamoe and moe_tp > 1):
            yield found
