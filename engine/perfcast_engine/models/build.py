"""The builder: one deployment to its operator lists (spec/05 sections 6-9)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from perfcast_engine.models.deployment import Deployment
from perfcast_engine.models.encoder import encoder_ops
from perfcast_engine.models.families import family_row, segments
from perfcast_engine.models.kv_cache import KvCurve, kv_curve
from perfcast_engine.models.listing import Phase
from perfcast_engine.models.rules import check
from perfcast_engine.ops.base import Op


@dataclass(frozen=True)
class ModelPlan:
    """Operators of one GPU, all pipeline stages together, and the memory figures that follow from them.

    ``activation_width``: elements per token that activation memory is estimated from.
    """

    deployment: Deployment
    context: tuple[Op, ...]
    generation: tuple[Op, ...]
    encoder: tuple[Op, ...]

    @cached_property
    def weight_bytes(self) -> float:
        """Resident weights of one GPU over all pipeline stages, without the vision tower; divide by pp."""
        return sum(op.weight_bytes() for op in self.context)

    @cached_property
    def kv(self) -> KvCurve:
        return kv_curve(self.deployment)

    @property
    def activation_width(self) -> int:
        return self.deployment.spec.heads * self.deployment.spec.head_dim


def build(d: Deployment) -> ModelPlan:
    """The operator lists of ``d``. Raises InvalidField for the first rule of spec/05 section 4 that it breaks."""
    check(d)
    row = family_row(d.spec.family, d.backend, bool(d.comm))
    repeat = (d.nextn + d.spec.layers) / d.spec.layers if row.draft_in_layers and d.nextn else 1.0
    context = Phase(d, row, "context_", True, split=d.parallel.cp if row.cp == "tokens" else 1)
    generation = Phase(d, row, "generation_", False, repeat)
    return ModelPlan(d, tuple(_ops(context)), tuple(_ops(generation)), tuple(encoder_ops(d)))


def _ops(p: Phase) -> Iterator[Op]:
    for select, parts in segments(p.row):
        for layer in select(p.d):
            for part in parts:
                yield from part(p, layer)
