"""Vocabulary of operator lists: layers, the phase being listed, and the parts that every family uses (spec/05 5, 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from perfcast_engine.models.deployment import Deployment
from perfcast_engine.models.layers import Layer, Layers
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.ops.base import Op, Role
from perfcast_engine.ops.collective import P2P, AllReduce, Nccl
from perfcast_engine.ops.gemm import Gemm
from perfcast_engine.ops.memory_bound import Elementwise, Embedding
from perfcast_engine.profiles import Switch

OpT = TypeVar("OpT", bound=Op)


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of one deployment while its operators are listed.

    ``repeat``: instances of everything, above one with speculative decoding; ``per_layer``: of what layers repeat, on
    top; ``split``: context-parallel ranks that share the tokens of token-wise operators; ``tag`` starts every name.
    """

    d: Deployment
    tag: str
    context: bool
    repeat: float = 1.0
    per_layer: float = 1.0
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
        return at.count * self.repeat * (self.per_layer if at.repeated else 1.0)

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


@dataclass(frozen=True, slots=True)
class Segment:
    """The parts, in order, of the layers that ``select`` finds in a model."""

    select: Layers
    parts: tuple[Part, ...]


def norm(name: str) -> Part:
    return lambda p, at: [p.norm(at, name)]


def allreduce(name: str) -> Part:
    return lambda p, at: [p.allreduce(at, name)]


def embedding(sharded: bool) -> Part:
    def part(p: Phase, at: Layer) -> Iterator[Op]:
        rows = p.spec.vocab // p.tp if sharded else p.spec.vocab
        yield Embedding(name=f"{p.tag}embedding", scale=p.scale(at), rows=rows, dim=p.spec.hidden, seq_split=p.split)

    return part


def logits(p: Phase, at: Layer) -> Iterator[Op]:
    yield p.gemm(at, "logits_gemm", p.spec.vocab // p.tp, p.spec.hidden, "bfloat16", role=Role.LOGITS)


def unless_forgotten(switch: Switch[bool], *parts: Part, in_decode: bool) -> Part:
    """Parts that the reference forgets to list, in prefill or (``in_decode``) in both phases."""

    def part(p: Phase, at: Layer) -> Iterator[Op]:
        if not p.d.profile[switch] or not (p.context or in_decode):
            for listed in parts:
                yield from listed(p, at)

    return part


def where(holds: Callable[[Layer], bool], *parts: Part) -> Part:
    """Parts of those layers for which ``holds`` is true."""
    return lambda p, at: [op for part in parts if holds(at) for op in part(p, at)]


def p2p(split: bool) -> Part:
    def part(p: Phase, at: Layer) -> Iterator[Op]:
        pp = p.d.parallel.pp
        stages = replace(at, count=(pp - 1) * at.count)
        yield p.op(P2P, stages, "p2p", hidden=p.spec.hidden, pp=pp, seq_split=p.split if split else 1)

    return part


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
