"""The architectures: family of each, and the figures that only it states (spec/05 sections 2.2, 2.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perfcast_engine.models.config_reader import Reader, runs


def _dsa(x: dict[str, Any], body: Reader, top: Reader, layers: int) -> None:
    x["index_topk_freq"] = body.integer("index_topk_freq", default=1)
    x["index_topk_pattern"] = body.text("index_topk_pattern")
    if body.get("index_skip_topk_offset") is not None:
        x["index_skip_topk_offset"] = body.integer("index_skip_topk_offset")


def _dsv4(x: dict[str, Any], body: Reader, top: Reader, layers: int) -> None:
    ratios = body.items("compress_ratios")
    if len(ratios) < layers:
        raise body.refuse("compress_ratios", f"has {len(ratios)} entries for {layers} layers", "pattern_len")
    if any(ratio not in (0, 4, 128) for ratio in ratios[:layers]):
        raise body.refuse("compress_ratios", "entries must be 0, 4 or 128", "pattern_value")
    x["compress_runs"] = runs(ratios[:layers])


def _kimi_k3(x: dict[str, Any], body: Reader, top: Reader, layers: int) -> None:
    linear = body.object("linear_attn_config")
    x["kda_num_heads"] = linear.integer("num_heads", least=1)
    x["kda_head_dim"] = linear.integer("head_dim", least=1)
    x["kda_conv_kernel"] = linear.integer("short_conv_kernel_size", default=4)
    ids = linear.items("kda_layers")
    if not ids or any(not isinstance(i, int) or not 1 <= i <= layers for i in ids):
        raise linear.refuse("kda_layers", f"must list layer numbers from 1 to {layers}", "pattern_value")
    x["layer_runs"] = runs(["L" if i in set(ids) else "F" for i in range(1, layers + 1)])


def _mimo_v2(x: dict[str, Any], body: Reader, top: Reader, layers: int) -> None:
    kinds = body.layer_list("hybrid_layer_pattern", layers, {1: "G", 0: "S"})
    flags = {1: "m", 0: "d"}
    if isinstance(body.get("moe_layer_freq"), int):
        ffn = [flags[bool(body.get("moe_layer_freq"))]] * layers
    else:
        ffn = body.layer_list("moe_layer_freq", layers, flags)
    x["layer_runs"] = runs([a + b for a, b in zip(kinds, ffn, strict=True)])


def _llama4(x: dict[str, Any], body: Reader, top: Reader, layers: int) -> None:
    step = body.integer("interleave_moe_layer_step", default=1, least=1)
    x["global_every"] = body.integer("no_rope_layer_interval", default=4)
    x["layer_runs"] = runs([("G" if i % 2 else "S") + ("d" if (i + 1) % step else "m") for i in range(layers)])


def _step3(x: dict[str, Any], body: Reader, top: Reader, layers: int) -> None:
    draft = body.integer("num_nextn_predict_layers", default=0)
    kinds = body.layer_list("layer_types", layers, {"full_attention": "G", "sliding_attention": "S"}, draft)
    listed = body.get("moe_layers_enum")
    if listed is not None:
        members = listed.split(",") if isinstance(listed, str) else body.items("moe_layers_enum")
        try:
            moe = {int(member) for member in members if str(member).strip()}
        except (TypeError, ValueError):
            raise body.refuse("moe_layers_enum", "must list layer numbers", "pattern_value") from None
    else:
        moe = set(range(body.integer("first_k_dense_replace", default=0), layers))
    x["layer_runs"] = runs([kind + ("m" if i in moe else "d") for i, kind in enumerate(kinds)])
    other = body.object("attention_other_setting")
    x["swa_num_heads"] = other.integer("num_attention_heads", default=0)
    x["swa_head_dim"] = other.integer("head_dim", default=0)
    x["sliding_window_size"] = body.integer("sliding_window", "sliding_window_size", default=0, falsy=False)
    x["use_qk_norm"] = True
    x["use_head_wise_attn_gate"] = body.flag("use_head_wise_attn_gate")
    x["share_expert_dim"] = top.integer("share_expert_dim", default=0)


def _gemma4(x: dict[str, Any], body: Reader, top: Reader, layers: int) -> None:
    kinds = body.layer_list("layer_types", layers, {"sliding_attention": "S", "full_attention": "F"})
    x["layer_runs"] = runs(kinds)
    x["swa_head_dim"] = body.integer("head_dim", least=1)
    x["global_num_kv_heads"] = body.integer("num_global_key_value_heads", default=x["swa_num_kv_heads"])
    x["global_head_dim"] = body.integer("global_head_dim", default=x["swa_head_dim"])
    x["attention_k_eq_v"] = body.flag("attention_k_eq_v")


def _qwen35(x: dict[str, Any], body: Reader, top: Reader, layers: int) -> None:
    x["layer_runs"] = runs(body.layer_list("layer_types", layers, {"linear_attention": "L", "full_attention": "F"}))
    dtype = (body if "mamba_ssm_dtype" in body.data else top).get("mamba_ssm_dtype")
    x["ssm_dtype"] = dtype if dtype in ("float32", "bfloat16", "float16") else "float32"


def _nemotron_h(x: dict[str, Any], body: Reader, top: Reader, layers: int) -> None:
    pattern = body.text("hybrid_override_pattern")
    if not pattern:
        letters = {"mamba": "M", "moe": "E", "attention": "*", "mlp": "-", "dense": "-", "ffn": "-"}
        pattern = "".join(body.layer_list("layers_block_type", layers, letters))
    if not pattern or set(pattern) - set("ME*-"):
        raise body.refuse("hybrid_override_pattern", "must be letters of M, E, * and -", "pattern_value")
    x["hybrid_override_pattern"] = pattern
    x["ssm_dtype"] = body.text("mamba_ssm_cache_dtype")


def _nemotron_nas(x: dict[str, Any], body: Reader, top: Reader, layers: int) -> None:
    blocks: list[dict[str, Any]] = []
    for i, entry in enumerate(body.items("block_configs")):
        if not isinstance(entry, Mapping):
            raise body.refuse(f"block_configs[{i}]", "must be an object")
        block = Reader(entry, f"{body.path}.block_configs[{i}]")
        attention, ffn = block.object("attention"), block.object("ffn")
        run: dict[str, Any] = {}
        if attention.flag("no_op"):
            run["no_attn"] = True
        else:
            run["group"] = attention.integer("n_heads_in_group", least=1)
        if ffn.flag("no_op"):
            run["no_ffn"] = True
        else:
            run["mult"] = ffn.number("ffn_mult", 3.5)
        if blocks and {k: v for k, v in blocks[-1].items() if k != "n"} == run:
            blocks[-1]["n"] += 1
        else:
            blocks.append({"n": 1} | run)
    x["blocks"] = blocks


def _vision(x: dict[str, Any], body: Reader, top: Reader, layers: int) -> None:
    vision = top.object("vision_config")
    names = "depth hidden_size num_heads intermediate_size patch_size temporal_patch_size spatial_merge_size"
    for name in (*names.split(), "out_hidden_size"):
        x[name] = vision.integer(name, least=1)
    width = x["hidden_size"] * x["spatial_merge_size"] ** 2
    x["projector_dims"] = [[width, width], [width, x["out_hidden_size"]]]
    x["projector_n_instances"] = 1 + len(vision.items("deepstack_visual_indexes"))
    x["partial_rotary_factor"] = 0.5


Integers = dict[str, tuple[str, int | None]]


def _integers(required: str = "", optional: str = "", **renamed: str) -> Integers:
    """our field -> (their field, default); ``renamed`` ones default to 0."""
    same: Integers = {name: (name, None) for name in required.split()}
    return same | {name: (name, 0) for name in optional.split()} | {k: (v, 0) for k, v in renamed.items()}


@dataclass(frozen=True)
class Architecture:
    """How one architecture's figures are read. ``wrapped``: the language model stands in text_config."""

    family: str
    wrapped: bool = False
    qk_norm: bool = False
    integers: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    extras: Callable[[dict[str, Any], Reader, Reader, int], None] | None = None


_MLA = _integers(optional="v_head_dim kv_lora_rank qk_rope_head_dim")
_LORA = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
_DSA = Architecture("DEEPSEEKV32", integers=_integers(f"{_LORA} index_head_dim index_n_heads index_topk"), extras=_dsa)
_STEP = Architecture("STEP3P7", extras=_step3)
_WRAPPED_STEP = Architecture("STEP3P7", True, extras=_step3)
_QWEN35 = Architecture(
    "QWEN35",
    True,
    integers=_integers(
        "linear_num_key_heads linear_key_head_dim linear_num_value_heads linear_value_head_dim linear_conv_kernel_dim",
        shared_expert_inter_size="shared_expert_intermediate_size",
    ),
    extras=_qwen35,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture("LLAMA"),
    "Qwen2ForCausalLM": Architecture("LLAMA"),
    "Qwen3ForCausalLM": Architecture("LLAMA", qk_norm=True),
    "MiMoForCausalLM": Architecture("LLAMA"),
    "Qwen3VLForConditionalGeneration": Architecture("QWEN3VL", True, extras=_vision),
    "Qwen3VLMoeForConditionalGeneration": Architecture("QWEN3VL_MOE", True, extras=_vision),
    "MixtralForCausalLM": Architecture("MOE"),
    "GptOssForCausalLM": Architecture("MOE"),
    "Qwen2MoeForCausalLM": Architecture("MOE"),
    "Qwen3MoeForCausalLM": Architecture("MOE", qk_norm=True),
    "MiniMaxM2ForCausalLM": Architecture("MOE", qk_norm=True),
    "DeepSeekForCausalLM": Architecture("DEEPSEEK", integers=_MLA),
    "DeepseekV3ForCausalLM": Architecture("DEEPSEEK", integers=_MLA),
    "KimiK25ForConditionalGeneration": Architecture("KIMIK25", True, integers=_MLA),
    "DeepseekV32ForCausalLM": _DSA,
    "GlmMoeDsaForCausalLM": _DSA,
    "DeepseekV4ForCausalLM": Architecture(
        "DEEPSEEKV4",
        integers=_integers(
            "q_lora_rank o_lora_rank o_groups head_dim qk_rope_head_dim index_head_dim index_n_heads index_topk"
            " sliding_window hc_mult hc_sinkhorn_iters"
        ),
        extras=_dsv4,
    ),
    "KimiK3ForConditionalGeneration": Architecture(
        "KIMIK3",
        True,
        integers=_integers(
            _LORA,
            "routed_expert_hidden_size num_shared_experts first_k_dense_replace attn_res_block_size",
            dense_inter_size="intermediate_size",
        ),
        extras=_kimi_k3,
    ),
    "MiniMaxM3ForCausalLM": Architecture("MINIMAXM3"),
    "MiniMaxM3SparseForConditionalGeneration": Architecture("MINIMAXM3", True),
    "MiMoV2FlashForCausalLM": Architecture(
        "HYBRIDMOE",
        integers=_integers(
            optional="swa_head_dim swa_v_head_dim sliding_window_size",
            swa_num_kv_heads="swa_num_key_value_heads",
            global_v_head_dim="v_head_dim",
        ),
        extras=_mimo_v2,
    ),
    "Llama4ForConditionalGeneration": Architecture(
        "HYBRIDMOE",
        True,
        integers=_integers(sliding_window_size="attention_chunk_size", dense_inter_size="intermediate_size_mlp"),
        extras=_llama4,
    ),
    "Step3p7ForConditionalGeneration": _WRAPPED_STEP,
    "Step3p7FlashForCausalLM": _WRAPPED_STEP,
    "Step3p5ForCausalLM": _STEP,
    "Step3p5FlashForCausalLM": _STEP,
    "Gemma4ForConditionalGeneration": Architecture(
        "GEMMA4MIX",
        True,
        integers=_integers(swa_num_kv_heads="num_key_value_heads", sliding_window_size="sliding_window"),
        extras=_gemma4,
    ),
    "Qwen3_5ForConditionalGeneration": _QWEN35,
    "Qwen3_5MoeForConditionalGeneration": _QWEN35,
    "NemotronHForCausalLM": Architecture(
        "NEMOTRONH",
        integers=_integers(
            "mamba_num_heads mamba_head_dim ssm_state_size conv_kernel n_groups chunk_size",
            "moe_shared_expert_intermediate_size moe_latent_size",
        ),
        extras=_nemotron_h,
    ),
    "NemotronForCausalLM": Architecture("NEMOTRONNAS"),
    "DeciLMForCausalLM": Architecture("NEMOTRONNAS", extras=_nemotron_nas),
}
