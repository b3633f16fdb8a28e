"""ModelSpec: what a checkpoint's published configuration says, in our words (spec/05 sections 2, 3.2-3.6, 14)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass, replace
from typing import Any

from perfcast_engine.data import table
from perfcast_engine.errors import DataCorrupt


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Routed experts of width ``inter``; all zero for a dense model."""

    topk: int = 0
    experts: int = 0
    inter: int = 0


@dataclass(frozen=True, slots=True)
class BlockRun:
    """``n`` equal consecutive blocks of a Nemotron-NAS model: query heads per KV head, FFN width multiplier."""

    n: int
    group: int = 0
    mult: float = 0.0
    no_attn: bool = False
    no_ffn: bool = False


def _figure_type() -> Any:
    """A frozen dataclass of the figures that only some architectures state."""
    defaults = {name: () if value == [] else value for name, value in table("models/figures").items()}
    fields = [(name, type(value), value) for name, value in defaults.items()]
    own = {"__module__": __name__, "__doc__": "Figures that only some architectures state (models/figures.yaml)."}
    return make_dataclass("Extra", fields, namespace=own, frozen=True, slots=True, kw_only=True)


Extra = _figure_type()
NONE_STATED = Extra()


@dataclass(frozen=True, slots=True)
class QuantFacts:
    """Modes that the checkpoint implies (None: it is silent) and parts it leaves in bfloat16 (spec/05 3.2-3.6)."""

    gemm: str | None = None
    moe: str | None = None
    kv: str | None = None
    fmha: str | None = None
    keep_attn: frozenset[str] = frozenset()  # of q, kv, o, indexer; or all
    keep_attn_named: frozenset[str] | None = None  # the same without patterns that name a norm only; None: no change
    keep_shared: bool = False
    keep_mlp: bool = False
    split: tuple[tuple[str, str], ...] = ()  # (projection, dense_ffn or shared, its gemm mode)
    block_n: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model. ``listed``: whether the reference offers it by name; ``ctx``: longest context in tokens."""

    id: str
    family: str
    arch: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inter: int
    vocab: int
    ctx: int
    moe: MoeShape = MoeShape()
    mtp_layers: int = 0
    qk_norm: bool = False
    listed: bool = True
    quant: QuantFacts = QuantFacts()
    x: Any = NONE_STATED  # of Extra

    @property
    def indexer_full_fraction(self) -> float:
        """Share of the layers that compute their own top-k index (spec/05 2.4)."""
        freq: int = self.x.index_topk_freq
        pattern: str = self.x.index_topk_pattern
        offset: int | None = self.x.index_skip_topk_offset
        if not pattern and freq <= 1:
            return 1.0
        if pattern:
            skipped = pattern[: self.layers].count("S")
        else:
            shift = 1 if offset is None else offset - 1
            skipped = sum(max(layer - shift, 0) % freq != 0 for layer in range(self.layers))
        return (self.layers - skipped) / self.layers

    def count(self, letter: str) -> int:
        """Layers whose kind contains ``letter``."""
        return sum(n for kind, n in self.x.layer_runs if letter in kind)

    def with_layers(self, layers: int | None) -> ModelSpec:
        return self if layers is None else replace(self, layers=layers)


def _extra(x: Mapping[str, Any]) -> Any:
    values = {name: value for name, value in x.items() if name != "indexer_full_fraction"}
    for name in ("layer_runs", "compress_runs", "projector_dims"):
        if name in values:
            values[name] = tuple(tuple(pair) for pair in values[name])
    values["blocks"] = tuple(BlockRun(**run) for run in values.get("blocks", ()))
    return Extra(**values)


def from_record(record: Mapping[str, Any]) -> ModelSpec:
    """The spec of one record in the registry's form (spec/05 section 14). Raises DataCorrupt."""
    try:
        kept = record.get("keep_bf16", {}).items()
        keep: Any = {f"keep_{part}": frozenset(it) if isinstance(it, list) else it for part, it in kept}
        quant = QuantFacts(
            **record.get("quant", {}),
            **keep,
            split=tuple(sorted(record.get("split", {}).items())),
            block_n=record.get("quant_block_n"),
        )
        own = ("quant", "keep_bf16", "split", "quant_block_n", "moe", "x", "not_listed")
        return ModelSpec(
            **{name: value for name, value in record.items() if name not in own},
            moe=MoeShape(**{name: n for name, n in record.get("moe", {}).items() if name in MoeShape.__slots__}),
            listed=not record.get("not_listed", False),
            quant=quant,
            x=_extra(record.get("x", {})),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise DataCorrupt(f"model record {record.get('id', '?')!r}: {error}") from error
