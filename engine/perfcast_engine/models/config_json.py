"""A published config.json (and hf_quant_config.json) to a record of figures (spec/05 section 2)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfcast_engine.errors import InvalidField
from perfcast_engine.models.architectures import architecture, figures
from perfcast_engine.models.config_reader import MAX_LAYERS, Reader, check_size
from perfcast_engine.models.quant_facts import quant_facts
from perfcast_engine.models.spec import ModelSpec, from_record

MAX_BYTES = 16 << 20  # of one file; quantisation lists of big MoE checkpoints take several MB


def from_json(config: Mapping[str, Any], hf_quant: Mapping[str, Any] | None = None, id: str = "inline") -> ModelSpec:
    """The spec of a decoded config.json and, where there is one, its hf_quant_config.json.

    Raises InvalidField naming the field, UnknownName for an architecture without a family.
    """
    return from_record(record(config, hf_quant, id))


def from_text(config: str, hf_quant: str | None = None, id: str = "inline") -> ModelSpec:
    """As ``from_json`` for undecoded text; bare Infinity and NaN read as null."""
    return from_json(
        decode(config, "config.json"), None if hf_quant is None else decode(hf_quant, "hf_quant_config.json"), id
    )


def from_directory(path: Path) -> ModelSpec:
    """The spec of a checkpoint directory; its name is the id."""
    texts = []
    for name in ("config.json", "hf_quant_config.json"):
        try:
            with (path / name).open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            raw = None
        except OSError as error:
            raise InvalidField("model", f"cannot read {path / name}: {error}", why="config_unreadable") from error
        texts.append(None if raw is None else raw.decode(errors="replace"))
    if texts[0] is None:
        raise InvalidField("model", f"{path} has no config.json", why="config_missing")
    return from_text(texts[0], texts[1], path.name)


def decode(text: str, what: str) -> dict[str, Any]:
    """The JSON object in ``text``; InvalidField names ``what`` when it is none or too large."""
    if len(text) > MAX_BYTES:
        raise InvalidField(what, f"is larger than {MAX_BYTES} bytes", why="config_size")
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise InvalidField(what, f"is not JSON: {error}", why="config_json") from error
    if not isinstance(value, dict):
        raise InvalidField(what, "must be a JSON object", why="config_json")
    return value


def record(config: Mapping[str, Any], hf_quant: Mapping[str, Any] | None, id: str) -> dict[str, Any]:
    """The registry's form of a configuration (spec/05 section 14)."""
    for value, what in ((config, "config.json"), (hf_quant or {}, "hf_quant_config.json")):
        if not isinstance(value, Mapping):
            raise InvalidField(what, "must be a JSON object", why="config_json")
        check_size(value, what)
    top = Reader(config, "config.json")
    names = top.strings("architectures")
    if not names:
        raise InvalidField("config.json.architectures", "is missing", why="config_field")
    arch = architecture(names[0])
    body = top.object("text_config") if arch.get("wrapped") and top.get("text_config") is not None else top
    common = _common(body, per_block=top.get("block_configs") is not None)
    out = {"id": id, "family": arch["family"], "arch": names[0], **common}
    x = figures(arch, body, top, out["layers"])
    if arch.get("qk_norm"):
        out["qk_norm"] = True
    mtp = body.integer("num_nextn_predict_layers", default=0)
    if mtp:
        out["mtp_layers"] = mtp
    out["moe"] = _moe(body)
    out |= quant_facts(top, body, Reader(hf_quant or {}, "hf_quant_config.json"), arch["family"])
    out["x"] = {name: value for name, value in x.items() if value not in (0, "", False, None, [])}
    return out


def _common(body: Reader, per_block: bool) -> dict[str, Any]:
    layers = (
        body.integer("num_hidden_layers", default=0)
        or len(body.items("layers_block_type"))
        or len(body.text("hybrid_override_pattern"))
    )
    if not 0 < layers <= MAX_LAYERS:
        raise body.refuse("num_hidden_layers", f"must be from 1 to {MAX_LAYERS}, not {layers}")
    hidden = body.integer("hidden_size", least=1)
    heads = body.integer("num_attention_heads", least=1)
    return {
        "layers": layers,
        "heads": heads,
        "kv_heads": body.integer("num_key_value_heads", default=0 if per_block else heads),
        "head_dim": body.integer("head_dim", "attention_head_dim", default=hidden // heads, falsy=False),
        "hidden": hidden,
        "inter": body.integer("intermediate_size", default=0),
        "vocab": body.integer("vocab_size", least=1),
        "ctx": body.integer("max_position_embeddings", least=1),
    }


def _moe(body: Reader) -> dict[str, int]:
    topk = body.integer("num_experts_per_tok", "top_k_experts", "moe_top_k", "num_experts_per_token", default=0)
    experts = body.integer(
        "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts", default=0, falsy=False
    )
    inter = body.integer("moe_intermediate_size", "intermediate_size", default=0, falsy=False)
    return {"topk": topk, "experts": experts, "inter": inter} if experts else {}
