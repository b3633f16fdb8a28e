"""What a checkpoint says about its quantisation: default modes, parts left in bfloat16 (spec/05 3.2-3.6)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from perfcast_engine.errors import InvalidField
from perfcast_engine.models.config_reader import Reader
from perfcast_engine.models.quantization import rows

EXCLUSIONS = ("modules_to_not_convert", "exclude_modules", "ignore")
ALGORITHMS = ("quant_algo", "quantization_algo", "quant_method")  # where a layer or a group of them states its own


def quant_facts(top: Reader, body: Reader, hf: Reader, family: str) -> dict[str, Any]:
    """The members quant, keep_bf16, split and quant_block_n of a registry record.

    ``top`` is the whole config, ``body`` its language model, ``hf`` the hf_quant_config.json ({} where there is none).
    """
    own, theirs = _quantization_config(top, body, hf), hf.object("quantization")
    block = own.items("weight_block_size")
    out: dict[str, Any] = {"quant": _modes(top, own, theirs, family)}
    if block:
        size = Reader({"weight_block_size[0]": block[0]}, own.path).integer("weight_block_size[0]", least=1)
        out["quant_block_n"] = size
    patterns = [pattern for name in EXCLUSIONS for pattern in own.strings(name)]
    patterns += [pattern for name in EXCLUSIONS[1:] for pattern in theirs.strings(name)]
    style = rows("keeps").get(family)
    keep = _latent_keeps(patterns) if style == "latent" else _dense_keeps(patterns) if style == "dense" else {}
    split = _split(_listed_layers(theirs, own), patterns) if style == "parts" else {}
    return out | ({"keep_bf16": keep} if keep else {}) | ({"split": split} if split else {})


def _quantization_config(top: Reader, body: Reader, hf: Reader) -> Reader:
    if top.get("quantization_config") is not None:
        return top.object("quantization_config")
    if hf.data:
        quantization = hf.object("quantization")
        algo = quantization.text("quant_algo") or quantization.text("quantization_algo")
        cache = quantization.text("kv_cache_quant_algo")
        return Reader({"quant_method": algo.lower(), "kv_cache_quant_method": cache.lower()}, f"{hf.path}.quantization")
    return body.object("quantization_config")


def _first(*values: str) -> str:
    return next((value for value in values if value), "").strip().lower()


def _modes(top: Reader, own: Reader, theirs: Reader, family: str) -> dict[str, str]:
    algo = top.text("quant_algo").strip().lower() or _algo(own, theirs)
    cache, dynamic = _cache_algo(top, own, theirs), _dynamic(top, own)
    if algo == "compressed-tensors":
        gemm, moe = _compressed(own)
    elif algo == "mixed_precision":
        gemm, moe = _mixed(own, theirs)
    elif algo in rows("whole_model"):
        gemm, moe = rows("whole_model")[algo]
    else:
        raise InvalidField(own.path, f"unknown quantisation {algo!r}", why="quant_algo")
    if cache not in ("", "fp8", "bfloat16"):
        raise InvalidField(own.path, f"unknown KV cache quantisation {cache!r}", why="kv_algo")
    if gemm == "fp8" and not dynamic and algo != "compressed-tensors":
        gemm = "fp8_static"
    sparse = family == "DEEPSEEKV4"
    if sparse and top.text("expert_dtype") == "fp4" and moe != "nvfp4":
        moe = "w4a8_mxfp4_mxfp8"
    in_fp8 = algo != "" and (algo in rows("fp8_attention") or cache == "fp8")
    fmha, kv = "fp8" if in_fp8 else "", "fp8" if in_fp8 or sparse else cache
    named = {"gemm": gemm, "moe": moe, "kv": kv, "fmha": fmha}
    return {name: value for name, value in named.items() if value}


def _algo(own: Reader, theirs: Reader) -> str:
    algo = _first(theirs.text("quant_algo"), *map(own.text, ("quant_algo", "quant_method", "quantization_method")))
    algo = rows("algo_aliases").get(algo, algo)
    return "fp8_block" if algo == "fp8" and own.items("weight_block_size") else algo


def _cache_algo(top: Reader, own: Reader, theirs: Reader) -> str:
    stated = top.text("kv_cache_quant_algo") or theirs.text("kv_cache_quant_algo")
    algo = _first(stated, *map(own.text, ("kv_cache_quant_algo", "kv_cache_quant_method", "kv_cache_dtype")))
    if algo:
        alias: str = rows("cache_aliases").get(algo, algo)
        return alias
    scheme = own.object("kv_cache_scheme")
    kind, bits = scheme.text("type").lower(), scheme.integer("num_bits", default=0)
    if "fp8" in kind or (kind == "float" and 0 < bits <= 8):
        return "fp8"
    return "bfloat16" if kind == "float" and bits >= 16 else ""


def _groups(own: Reader) -> Iterator[Reader]:
    groups = own.object("config_groups")
    for name in groups.data:
        yield groups.object(name)


def _dynamic(top: Reader, own: Reader) -> bool:
    """Whether activations are scaled on the fly; unknown counts as no."""
    if top.get("quant_dynamic") is not None:
        return top.flag("quant_dynamic")
    scheme = own.text("activation_scheme").lower()
    if scheme in ("dynamic", "static"):
        return scheme == "dynamic"
    parts = (group.object(part) for group in _groups(own) for part in ("input_activations", "weights"))
    return any(bool(part.get("dynamic")) for part in parts)


def _listed_layers(*sources: Reader) -> Iterator[tuple[str, str]]:
    """(lower-cased layer path, algorithm) of the layers listed one by one, later statements last."""
    for source in sources:
        layers = source.object("quantized_layers")
        for path, value in layers.data.items():
            entry = Reader(value if isinstance(value, Mapping) else {"quant_algo": value}, f"{layers.path}.{path}")
            yield path.lower(), _first(*map(entry.text, ALGORITHMS))


def _grouped_layers(own: Reader) -> Iterator[tuple[str, str]]:
    for group in _groups(own):
        weights = group.object("weights")
        algo = _first(*map(weights.text, ALGORITHMS))
        if not algo and weights.text("type").lower() == "float":
            eight = "mxfp8" if weights.get("group_size") == 32 else "fp8"
            algo = {8: eight, 4: "nvfp4"}.get(weights.integer("num_bits", default=0), "")
        for target in group.strings("targets"):
            yield target.lower(), algo


def _is_routed_expert(path: str) -> bool:
    if "shared_expert" in path:
        return False
    return ".experts." in path or path.endswith(".experts") or "routing_expert" in path


def _mixed(own: Reader, theirs: Reader) -> tuple[str | None, str | None]:
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for path, algo in chain(_listed_layers(theirs, own), _grouped_layers(own)):
        found[_is_routed_expert(path)].add(rows("per_layer").get(algo, algo))
    gemm, moe = (
        next((mode for algo, mode in rows(name).items() if algo in found[experts]), None)
        for name, experts in (("mixed_gemm", False), ("mixed_moe", True))
    )
    if own.text("quant_method").lower() == "fp8":
        gemm = "fp8_block" if own.items("weight_block_size") else "fp8"
    return gemm, moe


def _compressed(own: Reader) -> tuple[str | None, str | None]:
    base = None
    for group in _groups(own):
        weights = group.object("weights")
        base = rows("packed").get(weights.text("type").lower(), {}).get(weights.integer("num_bits", default=0))
        if base == "fp8" and (weights.text("strategy") == "block" or weights.get("block_structure")):
            base = "fp8_block"
        if base:
            break
    ignored = [pattern.lower() for pattern in own.strings("ignore")]
    gemm = None if any(mark in pattern for pattern in ignored for mark in rows("packed_attention")) else base
    moe = None if any("expert" in pattern and "shared_expert" not in pattern for pattern in ignored) else base
    for mode, what in ((gemm, "dense"), (moe, "expert")):
        if mode is not None and mode not in rows("packed_modes")[what]:
            raise InvalidField(own.path, f"{mode} is no mode of {what} weights", why="quant_algo")
    return gemm, moe


def _attention_groups(patterns: list[str]) -> set[str]:
    """The groups of attention projections that the exclusion patterns name; all where they name self_attn at large."""
    groups = rows("attention_groups")
    named = [{group for group, marks in groups.items() if any(mark in p for mark in marks)} for p in patterns]
    if any("self_attn" in pattern and not found for pattern, found in zip(patterns, named, strict=True)):
        return set(groups)
    return set().union(*named)


def _latent_keeps(patterns: list[str]) -> dict[str, Any]:
    attn, named = _attention_groups(patterns), _attention_groups([p for p in patterns if "norm" not in p])
    keep = {"attn": sorted(attn), "shared": any("shared_expert" in p for p in patterns)}
    return {name: kept for name, kept in keep.items() if kept} | (
        {"attn_named": sorted(named)} if named != attn else {}
    )


def _dense_keeps(patterns: list[str]) -> dict[str, Any]:
    marks = {"attn": ("self_attn", ["all"]), "mlp": (".mlp", True)}
    return {name: kept for name, (mark, kept) in marks.items() if any(mark in p.lower() for p in patterns)}


def _split(layers: Iterator[tuple[str, str]], patterns: list[str]) -> dict[str, str]:
    """Gemm modes of the projections, dense FFNs and shared experts that differ from the rest (spec/05 3.6)."""
    split: dict[str, str] = {}
    for path, algo in layers:
        mode = rows("split").get(algo)
        if mode and (".linear_attn." in path or ".self_attn." in path):
            split["projection"] = mode
        elif mode and "shared_expert" in path:
            split["shared"] = mode
        elif mode and ".mlp." in path and not _is_routed_expert(path):
            split["dense_ffn"] = mode
    excluded = {
        "projection": any("linear_attn" in p or "self_attn" in p for p in patterns),
        "shared": any("shared_expert" in p for p in patterns),
        "dense_ffn": any(".mlp" in p and "shared_expert" not in p for p in patterns),
    }
    return {name: "bfloat16" for name, left_out in excluded.items() if left_out} | split
