"""The builder: one deployment to its operator lists (spec/05 sections 6-9)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from perfcast_engine.formula import Names, let
from perfcast_engine.models.deployment import Deployment
from perfcast_engine.models.families import Family, family_row, row
from perfcast_engine.models.kv_cache import KvCurve, kv_curve
from perfcast_engine.models.layers import layers
from perfcast_engine.models.names import deployment_names, distribution, phase_names
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
    names, spec = deployment_names(d), d.spec
    check(d, names)
    listed = family_row(spec.family, d.backend, bool(d.comm))
    split = d.parallel.cp if listed.cp == "tokens" else 1
    repeat = (d.nextn + spec.layers) / spec.layers if listed.draft_in_layers and d.nextn else 1.0
    context = _ops(d, listed, phase_names(d, names, "context_", True, split))
    generation = _ops(d, listed, phase_names(d, names, "generation_", False), repeat)
    sees = spec.x.depth and not d.config.language_only
    encoder = _ops(d, row("ENCODER"), phase_names(d, names, "encoder_", True)) if sees else ()
    return ModelPlan(d, tuple(context), tuple(generation), tuple(encoder))


def _ops(d: Deployment, row: Family, names: Names, repeat: float = 1.0) -> Iterator[Op]:
    """The operators of one phase; ``repeat``: instances of everything, above one with speculative decoding."""
    context = names["context"]
    names |= {"repeat": repeat, "slower": 1.0 if context else row.decode_factor}
    let(row.let, names)
    names["distribution"] = distribution(d, names["alpha"], context)
    names["kv_bytes_per_layer"] = lambda: float(kv_curve(d, per_stage=False).bytes(1)) / d.spec.layers
    for selector, parts in row.segments:
        for layer in layers(selector, names):
            yield from row.book(context).emit(parts, names, layer)
