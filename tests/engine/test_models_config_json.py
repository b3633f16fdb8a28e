"""Reading config.json: models of no registry, quantisation facts, hostile input (spec/05 sections 2 and 3)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from perfcast_engine.data import table
from perfcast_engine.errors import InvalidField, UnknownName
from perfcast_engine.models.config_json import from_directory, from_json, from_text
from perfcast_engine.models.registry import Registry

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 20,
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
QWEN_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "num_experts": 48,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 1024,
    "first_k_dense_replace": 2,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def test_a_llama_of_other_sizes():
    spec = from_json(LLAMA)
    assert (spec.family, spec.head_dim, spec.layers, spec.qk_norm) == ("LLAMA", 128, 20, False)
    assert spec.moe.experts == 0 and spec.quant.gemm is None


def test_a_model_that_states_no_kv_heads_has_as_many_as_query_heads():
    assert from_json(LLAMA | {"num_key_value_heads": None}).kv_heads == 12
    blocks = [{"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.5}}] * 20
    nas = {"architectures": ["DeciLMForCausalLM"], "num_key_value_heads": None, "block_configs": blocks}
    assert from_json(LLAMA | nas).kv_heads == 0


def test_a_qwen_moe_of_other_sizes_in_blockwise_fp8():
    spec = from_json(QWEN_MOE)
    assert (spec.family, spec.qk_norm) == ("MOE", True)
    assert (spec.moe.experts, spec.moe.topk) == (48, 4)
    assert (spec.quant.gemm, spec.quant.moe, spec.quant.kv, spec.quant.fmha) == ("fp8_block", "fp8_block", "fp8", "fp8")
    assert spec.quant.block_n == 128


def test_wrapped_language_models_are_read_from_their_text_config():
    text = LLAMA | {"layer_types": ["linear_attention"] * 19 + ["full_attention"], "mamba_ssm_dtype": "bfloat16"}
    text |= {f"linear_{name}": 2 for name in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")}
    text |= {
        "linear_conv_kernel_dim": 4,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    }
    spec = from_json({"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text})
    assert (spec.family, spec.count("L"), spec.count("F"), spec.x.ssm_dtype) == ("QWEN35", 19, 1, "bfloat16")
    assert spec.quant.gemm == "fp8"  # scaled on the fly; static scales would be fp8_static


def test_text_may_hold_bare_infinity_and_a_directory_names_its_model(tmp_path):
    text = json.dumps(LLAMA)[:-1] + ', "time_step_limit": [0.0, Infinity], "attention_bias": NaN}'
    assert from_text(text) == from_json(LLAMA)
    with pytest.raises(InvalidField, match=r"no config\.json"):
        from_directory(tmp_path)
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(text)
    quant = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(quant))
    spec = from_directory(folder)
    assert (spec.id, spec.quant.gemm, spec.quant.kv) == ("tiny-llama", "nvfp4", "fp8")


@pytest.mark.parametrize(
    ("quantization", "gemm", "moe", "kv"),
    [
        ({"quant_method": "mxfp4"}, "bfloat16", "w4a16_mxfp4", None),
        ({"quant_method": "fp8"}, "fp8_static", "fp8", "fp8"),
        ({"quant_algo": "FP8", "kv_cache_scheme": {"type": "float", "num_bits": 8}}, "fp8_static", "fp8", "fp8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}},
                "ignore": ["re:.*self_attn.*", "lm_head"],
            },
            None,
            "int4_wo",
            None,
        ),
        (
            {
                "quant_method": "mixed_precision",
                "quantized_layers": {
                    "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
                    "model.layers.0.mlp.experts.1.up_proj": "NVFP4",
                },
            },
            "fp8_static",
            "nvfp4",
            None,
        ),
    ],
)
def test_default_modes_follow_from_the_checkpoint(quantization, gemm, moe, kv):
    facts = from_json(LLAMA | {"quantization_config": quantization}).quant
    assert (facts.gemm, facts.moe, facts.kv) == (gemm, moe, kv)


def test_index_sharing_layers_of_sparse_models():
    registry = Registry.load()
    assert registry.get("zai-org/GLM-5.2").indexer_full_fraction == pytest.approx(21 / 78)
    assert registry.get("zai-org/GLM-5.2").with_layers(12).indexer_full_fraction == pytest.approx(5 / 12)
    assert registry.get("zai-org/GLM-5").indexer_full_fraction == 1


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -4}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 1536.0}, "hidden_size"),
        ({"hidden_size": "1536"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": [1]}, "hidden_size"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"quantization_config": "fp8"}, "quantization_config"),
        ({"quantization_config": {"quant_method": "magic"}}, "quantization_config"),
        ({"quantization_config": {"quant_method": 7}}, "quant_method"),
        ({"quantization_config": {"quant_method": "fp8", "ignore": [{}]}}, "ignore"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0]}}, "weight_block_size"),
        ({"architectures": {"a": 1}}, "architectures"),
        ({"extra": nested(50)}, "config.json"),
    ],
)
def test_bad_values_are_refused_by_the_name_of_their_field(change, field):
    with pytest.raises(InvalidField) as error:
        from_json(QWEN_MOE | change)
    assert field in error.value.details["field"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "7", '{"a":' * 100_000, "\x00", '{"architectures": ["X"], "a": 1e999}']
)
def test_bad_text_is_refused(text):
    with pytest.raises((InvalidField, UnknownName)):
        from_text(text)


def test_unknown_architectures_and_models_name_the_nearest():
    with pytest.raises(UnknownName, match="LlamaForCausalLM"):
        from_json(LLAMA | {"architectures": ["LlamaForCausalML"]})
    with pytest.raises(UnknownName, match="Qwen/Qwen3-32B"):
        Registry.load().get("Qwen/Qwen3-32")
    with pytest.raises(UnknownName, match=r"89 are known by name, any other is asked for by its config\.json"):
        Registry.load().get("-")
    with pytest.raises(InvalidField, match=r"architectures: is missing"):
        from_json(LLAMA | {"architectures": []})


def test_patterns_must_cover_the_layers():
    gemma = LLAMA | {"architectures": ["Gemma4ForConditionalGeneration"], "head_dim": 64}
    with pytest.raises(InvalidField, match="one entry for each of 20 layers"):
        from_json(gemma | {"layer_types": ["full_attention"]})
    with pytest.raises(InvalidField, match="entries must be of"):
        from_json(gemma | {"layer_types": ["odd"] * 20})


def test_lists_of_layers_are_no_longer_than_there_are_layers():
    """What they take to read and to price grows with them, and a config.json may come from anywhere."""
    nas = LLAMA | {"architectures": ["DeciLMForCausalLM"]}
    blocks = [{"attention": {"n_heads_in_group": 1}, "ffn": {"ffn_mult": 1 + i}} for i in range(300)]
    assert len(from_json(nas | {"block_configs": blocks[:20]}).x.blocks) == 20
    with pytest.raises(InvalidField, match="has 21 entries for 20 layers"):
        from_json(nas | {"block_configs": blocks[:21]})
    with pytest.raises(InvalidField, match="more than 256 runs"):
        from_json(nas | {"num_hidden_layers": 300, "block_configs": blocks})
    ranks = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 64)
    experts = {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 64}
    kimi = LLAMA | {"architectures": ["KimiK3ForConditionalGeneration"]} | ranks | experts

    def layers(ids):
        linear = {"num_heads": 4, "head_dim": 64, "kda_layers": ids}
        return from_json({"architectures": kimi["architectures"], "text_config": kimi | {"linear_attn_config": linear}})

    assert layers([1, 2, 3, 5]).x.layer_runs[:2] == (("L", 3), ("F", 1))
    for ids in ([], [1] * 21, [True], [21], [0]):
        with pytest.raises(InvalidField, match="must list layer numbers from 1 to 20"):
            layers(ids)


@pytest.mark.parametrize("arch", sorted(table("models/architectures")))
def test_no_architecture_crashes_on_the_bare_minimum_or_on_nonsense(arch):
    """Every reader either answers or names what it misses, whatever stands in the fields that it reads."""
    for value in (None, -1, 0, 1, 2**31, 10**5000, "x", [], [1], [[]], [1e400], {}, {"x": [None]}, 1.5, True):
        config = LLAMA | {"architectures": [arch]}
        for name in FIELDS.split():
            config.setdefault(name, value)
        try:
            from_json(config | {"text_config": config, "vision_config": dict.fromkeys(FIELDS.split(), value)})
        except InvalidField as error:
            assert error.details["field"]


FIELDS = (
    "head_dim num_experts num_experts_per_tok moe_intermediate_size n_shared_experts moe_layer_freq layer_types"
    " first_k_dense_replace num_nextn_predict_layers q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim"
    " v_head_dim index_head_dim index_n_heads index_topk index_topk_freq index_topk_pattern index_skip_topk_offset"
    " o_lora_rank o_groups sliding_window compress_ratios hc_mult hc_sinkhorn_iters linear_attn_config block_configs"
    " hybrid_layer_pattern hybrid_override_pattern layers_block_type interleave_moe_layer_step moe_layers_enum"
    " attention_other_setting attention_k_eq_v quantization_config kv_cache_scheme mamba_ssm_dtype depth num_heads"
    " patch_size out_hidden_size deepstack_visual_indexes global_head_dim num_global_key_value_heads"
)
