"""The figures that only some architectures state, as models/architectures.yaml tells them (spec/05 2.2, 2.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from perfcast_engine.data import table
from perfcast_engine.errors import Reason, UnknownName
from perfcast_engine.models.config_reader import Reader, runs

Figures = dict[str, Any]


def architecture(name: str) -> Mapping[str, Any]:
    """The row of one architecture; UnknownName where it has no family."""
    known = table("models/architectures")
    if name not in known:
        raise UnknownName("architecture", name, known, Reason.UNKNOWN_MODEL)
    row: Mapping[str, Any] = known[name]
    return row


def figures(row: Mapping[str, Any], body: Reader, top: Reader, layers: int) -> Figures:
    """What ``row`` says that the language model ``body`` of the configuration ``top`` states beside the common figures.
    InvalidField for what is missing or no such figure."""
    x: Figures = dict(row.get("constants", {}))
    for column, read in COLUMNS.items():
        stated = row.get(column, {})
        for name, path in stated.items() if isinstance(stated, Mapping) else zip(stated, stated, strict=True):
            *objects, field = path.split(".")
            reader = body
            for each in objects:
                reader = reader.object(each)
            if column in NEEDED or reader.get(field) is not None:
                x[name] = read(reader, field)
    for field, letters in row.get("pattern", {}).items():
        x["layer_runs"] = runs(body.layer_list(field, layers, letters))
    if "reader" in row:
        READERS[row["reader"]](x, body, top, layers)
    return x


COLUMNS: Mapping[str, Callable[[Reader, str], Any]] = {
    "required": Reader.integer,
    "positive": partial(Reader.integer, least=1),
    "optional": Reader.integer,
    "flags": Reader.flag,
    "texts": Reader.text,
}
NEEDED = frozenset({"required", "positive"})
MOST_BLOCKS = 256  # runs of equal ones; each has operators of its own


def _compressed(x: Figures, body: Reader, top: Reader, layers: int) -> None:
    ratios = body.items("compress_ratios")
    if len(ratios) < layers:
        raise body.refuse("compress_ratios", f"has {len(ratios)} entries for {layers} layers", "pattern_len")
    if any(ratio not in (0, 4, 128) for ratio in ratios[:layers]):
        raise body.refuse("compress_ratios", "entries must be 0, 4 or 128", "pattern_value")
    x["compress_runs"] = runs(ratios[:layers])


def _listed_linear_layers(x: Figures, body: Reader, top: Reader, layers: int) -> None:
    linear = body.object("linear_attn_config")
    ids, numbers = linear.items("kda_layers"), range(1, layers + 1)
    if not 0 < len(ids) <= layers or any(type(i) is not int or i not in numbers for i in ids):
        raise linear.refuse("kda_layers", f"must list layer numbers from 1 to {layers}", "pattern_value")
    chosen = frozenset(ids)
    x["layer_runs"] = runs(["L" if i in chosen else "F" for i in numbers])


def _hybrid_pattern(x: Figures, body: Reader, top: Reader, layers: int) -> None:
    kinds = body.layer_list("hybrid_layer_pattern", layers, {1: "G", 0: "S"})
    flags = {1: "m", 0: "d"}
    if isinstance(body.get("moe_layer_freq"), int):
        ffn = [flags[bool(body.get("moe_layer_freq"))]] * layers
    else:
        ffn = body.layer_list("moe_layer_freq", layers, flags)
    x["layer_runs"] = runs([a + b for a, b in zip(kinds, ffn, strict=True)])


def _interleaved_experts(x: Figures, body: Reader, top: Reader, layers: int) -> None:
    step = body.integer("interleave_moe_layer_step", default=1, least=1)
    x["layer_runs"] = runs([("G" if i % 2 else "S") + ("d" if (i + 1) % step else "m") for i in range(layers)])


def _typed_layers(x: Figures, body: Reader, top: Reader, layers: int) -> None:
    draft = body.integer("num_nextn_predict_layers", default=0)
    kinds = body.layer_list("layer_types", layers, {"full_attention": "G", "sliding_attention": "S"}, draft)
    listed = body.get("moe_layers_enum")
    if listed is not None:
        members = listed.split(",") if isinstance(listed, str) else body.items("moe_layers_enum")
        try:
            moe = {int(member) for member in members if str(member).strip()}
        except (TypeError, ValueError, OverflowError):
            raise body.refuse("moe_layers_enum", "must list layer numbers", "pattern_value") from None
    else:
        moe = set(range(body.integer("first_k_dense_replace", default=0), layers))
    x["layer_runs"] = runs([kind + ("m" if i in moe else "d") for i, kind in enumerate(kinds)])
    x["sliding_window_size"] = body.integer("sliding_window", "sliding_window_size", default=0, falsy=False)
    x["share_expert_dim"] = top.integer("share_expert_dim", default=0)


def _state_type(x: Figures, body: Reader, top: Reader, layers: int) -> None:
    dtype = (body if "mamba_ssm_dtype" in body.data else top).get("mamba_ssm_dtype")
    x["ssm_dtype"] = dtype if dtype in ("float32", "bfloat16", "float16") else "float32"


def _blocks_in_letters(x: Figures, body: Reader, top: Reader, layers: int) -> None:
    pattern = body.text("hybrid_override_pattern")
    if not pattern:
        letters = {"mamba": "M", "moe": "E", "attention": "*", "mlp": "-", "dense": "-", "ffn": "-"}
        pattern = "".join(body.layer_list("layers_block_type", layers, letters))
    if not pattern or set(pattern) - set("ME*-"):
        raise body.refuse("hybrid_override_pattern", "must be letters of M, E, * and -", "pattern_value")
    x["hybrid_override_pattern"] = pattern


def _nas_blocks(x: Figures, body: Reader, top: Reader, layers: int) -> None:
    blocks: list[Figures] = []
    if len(entries := body.items("block_configs")) > layers:
        raise body.refuse("block_configs", f"has {len(entries)} entries for {layers} layers", "pattern_len")
    for i, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise body.refuse(f"block_configs[{i}]", "must be an object")
        block = Reader(entry, f"{body.path}.block_configs[{i}]")
        attention, ffn = block.object("attention"), block.object("ffn")
        if attention.flag("no_op"):
            run: Figures = {"no_attn": True}
        else:
            run = {"group": attention.integer("n_heads_in_group", least=1)}
        run |= {"no_ffn": True} if ffn.flag("no_op") else {"mult": ffn.number("ffn_mult", 3.5)}
        if blocks and blocks[-1] == run | {"n": blocks[-1]["n"]}:
            blocks[-1]["n"] += 1
        else:
            blocks.append({"n": 1} | run)
    if len(blocks) > MOST_BLOCKS:
        raise body.refuse("block_configs", f"has more than {MOST_BLOCKS} runs of blocks", "pattern_len")
    x["blocks"] = blocks


def _vision(x: Figures, body: Reader, top: Reader, layers: int) -> None:
    vision = top.object("vision_config")
    names = "depth hidden_size num_heads intermediate_size patch_size temporal_patch_size spatial_merge_size"
    for name in (*names.split(), "out_hidden_size"):
        x[name] = vision.integer(name, least=1)
    width = x["hidden_size"] * x["spatial_merge_size"] ** 2
    x["projector_dims"] = [[width, width], [width, x["out_hidden_size"]]]
    x["projector_n_instances"] = 1 + len(vision.items("deepstack_visual_indexes"))


READERS: Mapping[str, Callable[[Figures, Reader, Reader, int], None]] = {
    read.__name__[1:]: read
    for read in (
        *(_compressed, _listed_linear_layers, _hybrid_pattern, _interleaved_experts, _typed_layers, _state_type),
        *(_blocks_in_letters, _nas_blocks, _vision),
    )
}
