"""Expert layers of one rank: roofline, fused kernel, and what it may borrow unmeasured (spec/03 section 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from perfcast_engine.answer import F64, Answer, Mask, Points, Tier, choose
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.interp.util import LogSpace
from perfcast_engine.ops.base import Op, Split
from perfcast_engine.ops.measured import Basis, Slice, by_mode, estimated
from perfcast_engine.quant import MOE, QuantMode
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Key

ANY_DISTRIBUTION = "uniform"  # stands in for a distribution that a quantisation was not measured under


@dataclass(frozen=True, kw_only=True)
class Experts(Op):
    """Expert FFNs of one rank. ``inter``: one expert's unsharded width; ``distribution``: how tokens load them."""

    hidden: int
    inter: int
    topk: int
    experts: int
    moe_ep: int
    moe_tp: int = 1
    quant: str
    distribution: str
    gated: bool = True

    quants = MOE
    keyed_by: ClassVar[tuple[str, ...]] = ("topk", "experts", "hidden", "inter", "moe_tp", "moe_ep")

    def weight_bytes(self) -> float:
        """Resident experts of one rank, floored after each split as the reference does."""
        matrices = 3 if self.gated else 2
        whole = self.hidden * self.inter * self.experts * MOE[self.quant].bytes * matrices
        return self.scale * (whole // max(self.moe_ep, 1) // max(self.moe_tp, 1))

    @property
    def replicas(self) -> int:
        """Experts and copies of them that are spread over the ranks."""
        return self.experts

    def rate(self, system: SystemSpec) -> float:
        """FLOP/s of the roofline; SystemFlopsMissing where ``system`` states none."""
        return system.rate(MOE[self.quant])

    def roofline(self, system: SystemSpec, tokens: F64) -> Split:
        """Time to compute ``tokens`` and to move what they touch."""
        matrices = 3 if self.gated else 2
        ep, tp = max(self.moe_ep, 1), max(self.moe_tp, 1)
        pairs = tokens * self.topk
        local = np.floor(pairs / ep)
        ops = np.floor(np.floor(pairs * (self.hidden * self.inter * matrices * 2) / ep) / tp)
        weights = self.hidden * self.inter * matrices // tp * np.minimum(self.replicas // ep, local)
        moved = local * (self.hidden * 2) + np.floor(local * (self.inter * matrices) / tp) + weights
        return Split.of(ops / self.rate(system) * 1000, system.memory_sol_ms(moved * MOE[self.quant].bytes))


def token_curve(db: Database, curve: Slice, tokens: F64, what: str) -> Answer:
    """The measured latency at each token count. A curve of one point says nothing about fewer tokens."""
    answer = curve.measured(db, (tokens,), what)
    measured = curve.surface(db).grid.floats[0]
    below = tokens < measured[0]
    if len(measured) == 1 and below.any():
        answer.ms[below] = answer.energy[below] = np.nan
        answer.misses.append((below, PerfDataMissing(f"{what}: measured at {measured[0]:g} tokens only", op=what)))
    return answer


STANDARD, LOW_LATENCY = "moe", "moe_low_latency"
LOW_LATENCY_QUANTS, LOW_LATENCY_TOKENS = frozenset({"nvfp4"}), 128
MOST_TOKENS = 2**32 - 1
RETIRED = frozenset({("sglang", "deepep_moe")})  # (framework, moe_backend) without a fused path
EPLB_TOKENS = {"sglang": 0.8}  # share of the prefill tokens that balanced experts see, by framework
FEATURES = ("topk", "experts", "hidden", "inter")  # that tell how similar two layers are


@dataclass(frozen=True, kw_only=True)
class Moe(Experts):
    """All experts of a rank in one kernel."""

    attn_dp: int = 1
    is_context: bool = True
    moe_backend: str | None = None
    eplb: bool = False

    beside_shape = Experts.beside_shape | {"attn_dp", "is_context", "moe_backend", "eplb"}

    def sol(self, db: Database, at: Points) -> Split:
        return self.roofline(db.system, self._pooled(at).x)

    def price(self, db: Database, at: Points) -> Answer:
        self.rate(db.system)
        if (db.backend, self.moe_backend) in RETIRED and db.mode is not Mode.SOL:
            raise PerfDataMissing(f"{self.name}: {db.backend} retired the fused {self.moe_backend} path", op=self.name)
        return by_mode(db, self._pooled(at), self.measured, self._estimated, self._sol_ms)

    def _sol_ms(self, db: Database, at: Points) -> F64:
        return self.roofline(db.system, at.x).time

    def _pooled(self, at: Points) -> Points:
        """Every attention-DP rank's tokens meet in the shared expert pool."""
        return at.with_(x=np.minimum(at.x * max(self.attn_dp, 1), MOST_TOKENS))

    def measured(self, db: Database, at: Points) -> Answer:
        """The measured latency at ``at.x`` tokens in the expert pool."""
        self.rate(db.system)
        if self.eplb and self.is_context and db.backend in EPLB_TOKENS:
            at = at.with_(x=np.trunc(at.x * EPLB_TOKENS[db.backend]))
        return self._by_table(db, at, lambda table, at: token_curve(db, self.curve(db, table), at.x, self.name))

    def _estimated(self, db: Database, at: Points) -> Answer:
        def ask(table: str, at: Points) -> Answer:
            basis = db.kept(("expert basis", table, self.shape), lambda: self._basis(db, table))
            return estimated(basis, (at.x,), self._sol_ms(db, at), self.name)

        if db.find(STANDARD) is None and db.find(LOW_LATENCY) is None:
            # The reference fails on the data where it would have read several quantisations, on the basis elsewhere.
            reads_several = self._suits_low_latency(at) | bool(db.policy & {Tier.XQUANT, Tier.XPROFILE})
            return choose(reads_several, lambda at: self.measured(db, at), lambda at: ask(STANDARD, at), at)
        return self._by_table(db, at, ask)

    def _by_table(self, db: Database, at: Points, ask: Callable[[str, Points], Answer]) -> Answer:
        """``ask`` the low-latency table for the points it serves where it holds the layer, else the standard one."""
        low = self._suits_low_latency(at)
        if low.any() and self.curve(db, LOW_LATENCY).find(db) is None:
            low = np.zeros(len(at), np.bool_)
        return choose(low, lambda at: ask(LOW_LATENCY, at), lambda at: ask(STANDARD, at), at)

    def _suits_low_latency(self, at: Points) -> Mask:
        suits: Mask = at.x <= (LOW_LATENCY_TOKENS if self.gated and self.quant in LOW_LATENCY_QUANTS else -1)
        return suits

    def head(self, db: Database, table: str) -> tuple[Key, Key]:
        """The key above the shape: where its distribution was not measured, that of the one that stands in."""
        found = db.find(table)
        named = found is not None and found.rows(self.quant, self.distribution) is not None
        return self.quant, self.distribution if named else ANY_DISTRIBUTION

    def curve(self, db: Database, table: str, judge: Experts | None = None) -> Slice:
        """Its latency over tokens in ``table``, with the roofline of ``judge`` (its own by default)."""
        judge, system = judge or self, db.system
        key = db.kept(("expert key", table, self.shape), lambda: (*self.head(db, table), *self.named_key))
        return Slice(table, key, lambda tokens: judge.roofline(system, tokens).time, also=judge.shape)

    def _basis(self, db: Database, table: str) -> Basis:
        """Own samples, else of another shape, else of a quantisation of equal profile, else of the closest profile;
        as far as the database's policy allows to borrow (spec/03 section 3.4)."""
        found, own = db.find(table), self.curve(db, table).basis(db)
        if found is None or own.util is not None:
            return own
        mine = MOE[self.quant]
        others = [MOE[str(name)] for name in found.children() if name in MOE and name != self.quant]
        unlike = [mode for mode in others if mode.profile != mine.profile]
        unlike.sort(key=lambda mode: abs(mode.bytes - mine.bytes) + abs(mode.compute - mine.compute))
        rungs = [(Tier.XSHAPE, [mine]), (Tier.XQUANT, [mode for mode in others if mode.profile == mine.profile])]
        for tier, modes in (*rungs, *((Tier.XPROFILE, [mode]) for mode in unlike)):
            near = self._nearest(db, table, modes) if tier in db.policy else None
            if near is not None:
                judge = near if tier is Tier.XPROFILE else replace(near, quant=self.quant)
                basis = near.curve(db, table, judge).basis(db)
                if basis.util is not None:
                    return basis._replace(tier=tier, k=mine.efficiency / MOE[judge.quant].efficiency)
        return Basis(None)

    def _nearest(self, db: Database, table: str, modes: Iterable[QuantMode]) -> Moe | None:
        """The layer most similar by normalised logarithms of ``FEATURES``, of those measured in ``modes`` at the same
        split over ranks; the first of equals by quantisation and shape. None where there is none."""
        found, quants_of, shapes = db.table(table), list[str](), list[np.ndarray]()
        for mode in modes:
            rows = found.rows(*replace(self, quant=mode.name).head(db, table))
            if rows is not None:
                measured = np.stack([column[rows] for column in found.columns[2:8]], axis=1)
                same = np.unique(measured[(measured[:, 4:] == (self.moe_tp, self.moe_ep)).all(axis=1)], axis=0)
                quants_of += [mode.name] * len(same)
                shapes += list(same)
        if not shapes:
            return None
        features = np.array(shapes, np.float64)[:, : len(FEATURES)]
        asked = tuple(np.array([float(getattr(self, name))]) for name in FEATURES)
        best = int(LogSpace.of(tuple(features.T)).nearest(asked, 1, clip=False)[0][0, 0])
        topk, experts, hidden, inter = map(int, shapes[best][: len(FEATURES)])
        return replace(self, quant=quants_of[best], topk=topk, experts=experts, hidden=hidden, inter=inter)
