"""Vocabulary of operator lists: layers, the phase being listed, and the parts that every family uses (spec/05 5, 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from perfcast_engine.models.deployment import Deployment
from perfcast_engine.models.layers import Layer
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.ops.base import Op, Role
from perfcast_engine.ops.collective import P2P, AllReduce, Nccl
from perfcast_engine.ops.gemm import Gemm
from perfcast_engine.ops.memory_bound import Elementwise, Embedding
from perfcast_engine.profiles import MOE_PREFILL_SKIPS_HEAD, WIDE_SKIPS_HEAD

OpT = TypeVar("OpT", bound=Op)


@dataclass(frozen=True, slots=True)
class Family:
    """One row of ``families.ROWS``: its lists as text, and what its parts do differently.

    ``lists``: segments "layers: part part ...", joined by semicolons. ``cp``: what context-parallel ranks share in
    prefill, all token-wise operators ("tokens") or what says so itself ("own"); None where the family cannot.
    ``draft_in_layers``: speculative decoding is priced as a share of the layers; ``decode_factor``: on decode layers.
    Experts: ``alpha`` of the power law of their loads; ``cp_in_decode``: decode dispatch is told of context-parallel
    ranks; ``tells_decode``: dispatch is told that a pass is decode ("cp": beside context-parallel ranks only);
    ``dispatch_mode``: what it is told the experts run in, None for their mode. Shared expert: ``shared_over``: ranks
    that it is split over; ``keeps_shared``: whether a bfloat16 one stays so, always or unless a gemm mode is asked for.
    """

    lists: str
    cp: Literal["tokens", "own"] | None = None
    draft_in_layers: bool = True
    decode_factor: float = 1.0
    alpha: str = "1.01"
    cp_in_decode: bool = False
    tells_decode: bool | Literal["cp"] = False
    dispatch_mode: str | None = None
    shared_over: Literal["tp", "moe_tp"] = "tp"
    keeps_shared: Literal["never", "unless asked", "always"] = "never"


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of one deployment while its operators are listed.

    ``repeat``: instances of everything, above one with speculative decoding; ``split``: context-parallel ranks that
    share the tokens of token-wise operators; ``tag`` starts every name.
    """

    d: Deployment
    row: Family
    tag: str
    context: bool
    repeat: float = 1.0
    split: int = 1

    @property
    def name(self) -> str:
        return "context" if self.context else "generation"

    @property
    def spec(self) -> ModelSpec:
        return self.d.spec

    @property
    def tp(self) -> int:
        return self.d.tp

    @property
    def comm(self) -> str | None:
        """The large-EP all-to-all of this phase."""
        return self.d.comm.context if self.context else self.d.comm.generation

    def scale(self, at: Layer) -> float:
        slower = at.repeated and not self.context
        return at.count * self.repeat * (self.row.decode_factor if slower else 1.0)

    def op(self, kind: type[OpT], at: Layer, name: str, /, **fields: Any) -> OpT:
        """An operator named after the phase, once for each of the layers."""
        return kind(name=f"{self.tag}{name}", scale=self.scale(at), **fields)

    def gemm(
        self,
        at: Layer,
        name: str,
        n: int,
        k: int,
        quant: str | None = None,
        *,
        low: bool = False,
        token_div: int = 1,
        split: int | None = None,
        below_grid_sol: bool = False,
        role: Role = Role.OTHER,
    ) -> Gemm:
        """``low``: its input arrives quantised. ``quant`` defaults to the run's gemm mode."""
        return self.op(
            Gemm,
            at,
            f"{at.prefix}{name}",
            role=role,
            n=n,
            k=k,
            quant=quant or self.d.modes.gemm,
            low_precision_input=low,
            token_div=token_div,
            seq_split=self.split if split is None else split,
            below_grid_sol=below_grid_sol,
        )

    def mem(
        self, at: Layer, name: str, read: int, written: int, *, token_div: int = 1, split: int | None = None
    ) -> Elementwise:
        """``read`` and ``written`` elements of two bytes for each token."""
        split = self.split if split is None else split
        size = 2.0 * (read + written)
        return self.op(
            Elementwise, at, f"{at.prefix}{name}", bytes_per_token=size, token_div=token_div, seq_split=split
        )

    def norm(self, at: Layer, name: str, token_div: int = 1) -> Elementwise:
        h = self.spec.hidden
        return self.mem(at, name, 2 * h, 2 * h, token_div=token_div)

    def allreduce(self, at: Layer, name: str) -> AllReduce:
        hidden = self.spec.hidden
        return self.op(AllReduce, at, f"{at.prefix}{name}", hidden=hidden, gpus=self.tp, seq_split=self.split)

    def collective(self, at: Layer, name: str, operation: str, elements: float, gpus: int, quant: str = "half") -> Nccl:
        elements = float(elements)
        return self.op(Nccl, at, name, operation=operation, elements_per_token=elements, gpus=gpus, quant=quant)


Part = Callable[[Phase, Layer], Iterable[Op]]


def norm(name: str) -> Part:
    return lambda p, at: [p.norm(at, name)]


def allreduce(name: str) -> Part:
    return lambda p, at: [p.allreduce(at, name)]


def embedding(p: Phase, at: Layer) -> Iterator[Op]:
    yield p.op(Embedding, at, "embedding", rows=p.spec.vocab, dim=p.spec.hidden, seq_split=p.split)


def sharded_embedding(p: Phase, at: Layer) -> Iterator[Op]:
    yield p.op(Embedding, at, "embedding", rows=p.spec.vocab // p.tp, dim=p.spec.hidden, seq_split=p.split)


def logits(p: Phase, at: Layer) -> Iterator[Op]:
    yield p.gemm(at, "logits_gemm", p.spec.vocab // p.tp, p.spec.hidden, "bfloat16", role=Role.LOGITS)


def decode_logits(p: Phase, at: Layer) -> Iterator[Op]:
    """The LM head, which the reference lists in decode only."""
    if not p.context or not p.d.profile[MOE_PREFILL_SKIPS_HEAD]:
        yield from logits(p, at)


def forgotten_logits(p: Phase, at: Layer) -> Iterator[Op]:
    """The LM head, which the reference does not list."""
    if not p.d.profile[WIDE_SKIPS_HEAD]:
        yield from logits(p, at)


def p2p(p: Phase, at: Layer) -> Iterator[Op]:
    yield _p2p(p, at, 1)


def split_p2p(p: Phase, at: Layer) -> Iterator[Op]:
    yield _p2p(p, at, p.split)


def _p2p(p: Phase, at: Layer, split: int) -> Op:
    pp = p.d.parallel.pp
    return p.op(P2P, replace(at, count=(pp - 1) * at.count), "p2p", hidden=p.spec.hidden, pp=pp, seq_split=split)


def split_mode(p: Phase, what: str) -> str:
    """The gemm mode of one part of the model: what the checkpoint keeps apart, unless the user chose a mode."""
    facts, modes = p.spec.quant, p.d.modes
    if modes.gemm_explicit:
        return modes.gemm
    kept = {"attn": bool(facts.keep_attn), "mlp": facts.keep_mlp}
    return "bfloat16" if kept.get(what, False) else dict(facts.split).get(what, modes.gemm)


def mlp(
    p: Phase,
    at: Layer,
    names: tuple[str, str, str],
    up: int,
    down: int,
    quant: str | None = None,
    *,
    low: bool = True,
    token_div: int = 1,
    split: int | None = None,
) -> Iterator[Op]:
    """An FFN that widens to ``up``, activates to ``down`` and comes back; ``names`` of the three operators."""
    h = p.spec.hidden
    yield p.gemm(at, names[0], up, h, quant, token_div=token_div, split=split)
    yield p.mem(at, names[1], up, down, token_div=token_div, split=split)
    yield p.gemm(at, names[2], h, down, quant, low=low, token_div=token_div, split=split)


PARTS = (embedding, sharded_embedding, logits, decode_logits, forgotten_logits, p2p, split_p2p)
