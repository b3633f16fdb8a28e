"""Operator lists, weights and KV cache: what trips a re-implementation (spec/05 section 16), each with its value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from perfcast_engine.config import FUSED, EngineConfig, MoeComm, ParallelConfig
from perfcast_engine.data import table
from perfcast_engine.errors import DataCorrupt, InvalidField, UnsupportedCombination
from perfcast_engine.models.build import ModelPlan, build
from perfcast_engine.models.deployment import Deployment
from perfcast_engine.models.families import row
from perfcast_engine.models.kv_cache import kv_curve
from perfcast_engine.models.parts import PartBook
from perfcast_engine.models.quantization import QuantModes
from perfcast_engine.models.registry import Registry
from perfcast_engine.models.rules import complete
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.ops.base import Op, Role
from perfcast_engine.ops.composite import Fallback, Overlap

REGISTRY = Registry.load()
REFERENCE, CORRECTED = "reference", "corrected"
BF16 = QuantModes("bfloat16", "bfloat16", "bfloat16", "bfloat16", "half")
FP8 = QuantModes("fp8_block", "fp8_block", "fp8", "bfloat16", "half")
DEEPEP = MoeComm("deepep_ht", "deepep_ll")


def deployment(
    model: str | ModelSpec, backend: str = "trtllm", modes: QuantModes = BF16, layers: int | None = None, **more: Any
) -> Deployment:
    """The model on one GPU, or on the widths among ``more``; in the reference profile."""
    widths = {name: more.pop(name) for name in ("tp", "pp", "attn_dp", "cp", "moe_tp", "moe_ep") if name in more}
    comm, nextn = more.pop("comm", FUSED), more.pop("nextn", 0)
    spec = (model if isinstance(model, ModelSpec) else REGISTRY.get(model)).with_layers(layers)
    config = EngineConfig(model=spec, system="b200_sxm", backend=backend, **({"profile": "reference"} | more))
    parallel = complete(spec, ParallelConfig(**({"moe_ep": 1} | widths)))
    return Deployment(config=config, spec=spec, parallel=parallel, modes=modes, gpus_per_node=8, nextn=nextn, comm=comm)


def plan(model: str | ModelSpec, *args: Any, **more: Any) -> ModelPlan:
    return build(deployment(model, *args, **more))


def named(ops: tuple[Op, ...], name: str) -> Any:
    """The operator of that name, looked for inside composite ones too."""
    for op in ops:
        if op.name == name:
            return op
        inner = (
            (op.a + op.b) if isinstance(op, Overlap) else (op.primary, *op.fallback) if isinstance(op, Fallback) else ()
        )
        found = named(inner, name)
        if found is not None:
            return found
    return None


def names(ops: tuple[Op, ...]) -> list[str]:
    return [op.name.split("_", 1)[1] for op in ops]


def test_a_dense_layer_is_listed_in_the_order_of_the_reference_and_its_all_reduces_last():
    ops = plan("Qwen/Qwen3-32B", tp=4, pp=2).context
    assert names(ops) == [
        *("embedding", "add_norm_1", "qkv_gemm", "attention", "proj_gemm", "add_norm_2"),
        *("gate_ffn1_gemm", "act_gate", "ffn2_gemm", "logits_gemm", "embedding_ar", "ar_1", "ar_2", "p2p"),
    ]
    qkv, attention, p2p = ops[2], ops[3], ops[-1]
    assert (qkv.n, qkv.k, qkv.scale) == (64 * 128 // 4 + 2 * 128 * 2, 5120, 64)
    assert (attention.heads, attention.kv_heads, attention.qk_norm, attention.role) == (16, 2, True, Role.ATTENTION)
    assert p2p.scale == 1


def test_token_wise_bytes_are_counts_of_two_byte_elements():
    ops = plan("Qwen/Qwen3-32B", tp=4).context
    assert named(ops, "context_add_norm_1").bytes_per_token == 8 * 5120
    assert named(ops, "context_act_gate").bytes_per_token == 2 * (2 * 25600 // 4 + 25600 // 4)


def test_speculative_decoding_is_priced_as_a_share_of_the_layers():
    ops = plan("Qwen/Qwen3-32B", nextn=3).generation
    assert named(ops, "generation_embedding").scale == pytest.approx(67 / 64)
    assert named(ops, "generation_ffn2_gemm").scale == pytest.approx(67)
    assert plan("Qwen/Qwen3-32B", nextn=3).context == plan("Qwen/Qwen3-32B").context


def test_kimi_k3_drafts_with_a_model_of_its_own():
    ops = plan("moonshotai/Kimi-K3", "sglang", nextn=2).generation
    assert named(ops, "generation_embedding").scale == 1
    assert named(ops, "draft_norm").scale == pytest.approx(10 * 2 / 3)
    assert named(ops, "draft_logits_gemm").scale == pytest.approx(1 / 3)
    assert named(ops, "generation_kda_verify").draft_tokens == 3


def test_moe_prefill_runs_the_lm_head_unless_the_reference_is_reproduced():
    listed = {name: plan("Qwen/Qwen3-30B-A3B", profile=name) for name in (REFERENCE, CORRECTED)}
    assert named(listed["reference"].context, "context_logits_gemm") is None
    head = named(listed["corrected"].context, "context_logits_gemm")
    assert (head.n, head.k, head.scale, head.role) == (151936, 2048, 1, Role.LOGITS)
    assert listed["corrected"].weight_bytes - listed["reference"].weight_bytes == 151936 * 2048 * 2
    assert listed["corrected"].generation == listed["reference"].generation


def test_sglang_large_ep_lists_the_lm_head_unless_the_reference_is_reproduced():
    def wide(profile):
        return plan("deepseek-ai/DeepSeek-V3", "sglang", FP8, attn_dp=8, moe_ep=8, comm=DEEPEP, profile=profile)

    for phase in ("context", "generation"):
        assert named(getattr(wide(REFERENCE), phase), f"{phase}_logits_gemm") is None
        assert named(getattr(wide(CORRECTED), phase), f"{phase}_logits_gemm").n == 129280


@pytest.mark.parametrize(("profile", "full", "sliding"), [(REFERENCE, 39, 9), (CORRECTED, 9, 39)])
def test_mimo_v2_flash_has_nine_global_layers(profile, full, sliding):
    d = deployment("XiaomiMiMo/MiMo-V2-Flash", "sglang", FP8, profile=profile)
    attention = [op for op in build(d).context if op.name == "context_attention"]
    assert sum(op.scale for op in attention if op.window == 0) == full
    assert sum(op.scale for op in attention if op.window == 128) == sliding
    if profile == CORRECTED:  # global: 4 heads of 192 + 128, sliding: 8 heads of 192 + 128 over 128 tokens
        assert kv_curve(d).bytes(1000) == 9 * 4 * 320 * 1000 + 39 * 8 * 320 * 128
    else:  # every layer as if it were global with values as wide as keys
        assert kv_curve(d).bytes(1000) == 48 * 4 * 2 * 192 * 1000


@pytest.mark.parametrize(("profile", "kinds"), [(REFERENCE, [24, 24]), (CORRECTED, [12, 12, 24])])
def test_llama_4_attends_globally_in_every_fourth_layer(profile, kinds):
    d = deployment("meta-llama/Llama-4-Maverick-17B-128E-Instruct", profile=profile)
    attention = [op for op in build(d).context if op.name == "context_attention"]
    assert [op.scale for op in attention] == kinds  # global with experts, sliding with experts, sliding dense
    assert sum(op.scale for op in attention if op.window == 0) == kinds[0]


@pytest.mark.parametrize(("profile", "kept"), [(REFERENCE, "bfloat16"), (CORRECTED, "fp8_block")])
def test_excluding_norms_does_not_exclude_projections(profile, kept):
    op = named(plan("zai-org/GLM-5-FP8", modes=FP8, profile=profile).context, "context_attention")
    assert op.projection_quants == (kept, kept, kept, "bfloat16")


@pytest.mark.parametrize(("profile", "heads"), [(REFERENCE, 128 // 4), (CORRECTED, 64 // 4)])
def test_kimi_k2_runs_its_own_heads(profile, heads):
    modes = QuantModes("nvfp4", "nvfp4", "fp8", "bfloat16", "half")
    ops = plan("nvidia/Kimi-K2.5-NVFP4", modes=modes, tp=4, moe_ep=4, profile=profile).context
    block = named(ops, "context_mla_block")
    assert named(block.fallback, "context_attention").heads == heads
    assert (block.primary.heads, block.primary.native_heads) == (16, 64)
    assert named(block.fallback, "context_q_b_proj_gemm").n == 64 * 192 // 4


@pytest.mark.parametrize(("profile", "per_token"), [(REFERENCE, 0), (CORRECTED, 49 * 8 * 2 * 128 * 2)])
def test_nemotron_nas_holds_the_kv_of_its_49_attention_blocks(profile, per_token):
    curve = kv_curve(deployment("nvidia/Llama-3_3-Nemotron-Super-49B-v1", profile=profile))
    assert curve.bytes(1) == per_token
    assert curve.tokens(10 * per_token, 131072) == (10 if per_token else 0)


def test_state_layers_hold_a_state_and_no_kv():
    model = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"  # 6 attention, 23 mamba layers of 52
    assert kv_curve(deployment(model)).bytes(100) == 52 * 2 * 2 * 128 * 2 * 100
    state = 64 * 64 * 128 * 4 + (64 * 64 + 2 * 8 * 128) * 3 * 2
    assert kv_curve(deployment(model, profile=CORRECTED)).bytes(100) == 6 * 2 * 2 * 128 * 2 * 100 + 23 * state


@pytest.mark.parametrize(("profile", "stages"), [(REFERENCE, 1), (CORRECTED, 4)])
def test_a_pipeline_stage_holds_the_kv_of_its_own_layers(profile, stages):
    curve = kv_curve(deployment("Qwen/Qwen3-32B", pp=4, profile=profile))
    assert curve.bytes(1000) == 64 * 2 * 8 * 128 * 2 * 1000 / stages


def test_windows_cap_the_cache_and_capacity_follows():
    curve = kv_curve(deployment("openai/gpt-oss-20b"))
    each = 2 * 8 * 64 * 2
    assert list(curve.bytes([100, 1000])) == [24 * each * 100, 12 * each * (128 + 1000)]
    assert curve.tokens(12 * each * (128 + 1000), 131072) == 1000
    assert curve.tokens(12 * each * (128 + 1000) - 1, 131072) == 999
    assert curve.tokens(0, 131072) == 0


def test_states_of_linear_attention_are_taken_off_the_budget_first():
    d = deployment("Qwen/Qwen3.5-27B")
    curve = kv_curve(d)
    assert curve.constant == 48 * (48 * 128 * 128 * 4 + (2 * 16 * 128 + 48 * 128) * 3 * 2)
    assert curve.tokens(curve.constant + 5 * 16 * 2 * 4 * 256 * 2, 1) == 5
    assert curve.tokens(curve.constant - 1, 1) == 0


def test_the_shared_expert_of_sparse_models_is_split_by_moe_tp_and_that_of_deepseek_by_tp():
    widths = {"tp": 4, "moe_ep": 4}
    sparse = named(plan("deepseek-ai/DeepSeek-V3.2", modes=FP8, **widths).context, "context_shared_gate_up_gemm")
    dense = named(plan("deepseek-ai/DeepSeek-V3", modes=FP8, **widths).context, "context_shared_gate_up_gemm")
    assert (sparse.n, dense.n) == (2 * 2048, 2 * 2048 // 4)


def test_an_explicit_gemm_mode_overrules_what_the_checkpoint_keeps_apart():
    modes = QuantModes("nvfp4", "nvfp4", "fp8", "fp8", "half")
    for explicit, kept in ((False, "bfloat16"), (True, "nvfp4")):
        ops = plan("nvidia/Gemma-4-26B-A4B-NVFP4", modes=replace(modes, gemm_explicit=explicit)).context
        assert named(ops, "context_swa_qkv_gemm").quant == kept
        assert named(ops, "context_swa_moe").quant == kept


def test_expert_weights_are_floored_after_each_split_and_overlaps_add_up():
    ops = plan("Qwen/Qwen3-30B-A3B", modes=replace(BF16, moe="nvfp4"), tp=8, attn_dp=3, moe_ep=8).context
    whole = 2048 * 768 * 128 * 0.5625 * 3
    assert named(ops, "context_moe").weight_bytes() == 48 * (whole // 8 // 3)
    decode = plan("MiniMaxAI/MiniMax-M3").generation
    overlap = named(decode, "generation_moe_overlap")
    assert overlap.weight_bytes() == sum(op.weight_bytes() for op in overlap.a + overlap.b)
    assert named(decode, "generation_attention").weight_bytes() == 0


def test_a_measured_module_without_weights_counts_its_parts():
    block = named(plan("deepseek-ai/DeepSeek-V3", modes=FP8).context, "context_mla_block")
    parts = 2112 * 7168 + 128 * 192 * 1536 + 128 * 256 * 512 + 7168 * 128 * 128
    assert block.weight_bytes() == 61 * parts


def test_the_communication_mode_is_only_the_payload_of_the_context_parallel_exchange():
    halves = plan("Qwen/Qwen3-32B", "sglang", cp=4).context
    bytes_ = plan("Qwen/Qwen3-32B", "sglang", modes=replace(BF16, comm="fp8"), cp=4).context
    assert named(halves, "context_cp_all_gather").elements_per_token == 2 * 8 * 128
    assert named(bytes_, "context_cp_all_gather").elements_per_token == 2 * 2 * 8 * 128
    assert named(bytes_, "context_ar_1").quant == "half"
    assert [op for op in bytes_ if "gather" not in op.name] == [op for op in halves if "gather" not in op.name]


def test_attention_inside_a_fallback_is_no_attention_of_a_mixed_step():
    ops = plan("deepseek-ai/DeepSeek-V3", "vllm", FP8).context
    assert not any(op.role is Role.ATTENTION for op in ops)
    assert named(ops, "context_attention").lanes == ("default",)


def test_vision_towers_are_a_list_of_their_own():
    whole = plan("Qwen/Qwen3-VL-4B-Instruct", tp=8)
    assert named(whole.encoder, "encoder_dp_all_gather").elements_per_token == 2560 * 4 * 8
    assert named(whole.encoder, "encoder_qkv_gemm").n == 3 * 1024
    assert named(plan("Qwen/Qwen3-VL-4B-Instruct", tp=8, encoder_dp=False).encoder, "encoder_qkv_gemm").n == 3 * 128
    assert plan("Qwen/Qwen3-VL-4B-Instruct", language_only=True).encoder == ()
    assert whole.weight_bytes == sum(op.weight_bytes() for op in whole.context)


def test_experts_without_a_shared_one_run_beside_nothing():
    spec = REGISTRY.get("Qwen/Qwen3.5-35B-A3B")
    alone = replace(spec, x=replace(spec.x, shared_expert_inter_size=0))
    for model, beside in ((spec, True), (alone, False)):
        ops = plan(model, "vllm").generation
        assert any(isinstance(op, Overlap) for op in ops) == beside
        assert (named(ops, "generation_gdn_shared_merge") is not None) == beside


@pytest.mark.parametrize("profile", [REFERENCE, CORRECTED])
@pytest.mark.parametrize("backend", ["trtllm", "sglang", "vllm"])
def test_every_model_of_the_registry_builds(backend, profile):
    for model in REGISTRY.models:
        listed = plan(model, backend, profile=profile)
        assert listed.context and listed.generation and listed.weight_bytes > 0, model
        assert (listed.kv.bytes([1, 1000]) >= 0).all(), model


def words(rows: Any) -> Iterator[str]:
    """The names of parts in rows of parts.yaml."""
    if isinstance(rows, str):
        yield from rows.split()
    elif isinstance(rows, list):
        for each in rows:
            yield from words(each)
    else:
        inner = ("part", "do", "else", "a", "b") + (("primary", "rows") if "fallback" in rows else ())
        for key in inner:
            yield from words(rows.get(key, []))


def test_rows_name_only_parts_that_exist():
    families, parts = table("models/families")["rows"], table("models/parts")["parts"]
    named_parts = [word for rows in parts.values() for word in words(rows)]
    for key in families:
        listed = row(key)
        assert all(selector in table("models/layers")["layers"] for selector, _ in listed.segments), key
        named_parts += [word for _, names in listed.segments for word in names.split()]
        named_parts += [word for rows in listed.parts.values() for word in words(rows)]
    for word in named_parts:
        known = word in parts or "norm" in word or word == "ar"
        assert known or word.startswith("ar_") or word.endswith(("_ar", "allreduce")), word
    assert set(parts) <= set(named_parts), "parts that no family has"


@pytest.mark.parametrize("context", [True, False])
def test_every_row_of_parts_is_one_of_its_kind(context):
    """Compiling refuses formulas that are none, kinds that are none and fields that no operator has."""
    for key in table("models/families")["rows"]:
        book = row(key).book(context)
        for name in (*table("models/parts")["parts"], *row(key).parts):
            assert book.part(name)
    with pytest.raises(DataCorrupt, match="gemm x has no nn"):
        PartBook({"wrong": {"gemm": "x", "nn": "h", "k": "h"}}, context).part("wrong")
    with pytest.raises(DataCorrupt, match="no kind of row"):
        PartBook({"wrong": {"gem": "x"}}, context).part("wrong")
    for formula in ("h +", "().__class__", "__import__('os')"):
        with pytest.raises(DataCorrupt, match="formula"):
            PartBook({"wrong": {"gemm": "x", "n": formula, "k": "h"}}, context).part("wrong")


@pytest.mark.parametrize(
    ("why", "model", "more"),
    [
        ("cp_unsupported", "Qwen/Qwen3-32B", {"cp": 2}),
        ("cp_unsupported", "Qwen/Qwen3.5-27B", {"cp": 2, "backend": "sglang"}),
        ("cp_mix", "Qwen/Qwen3-32B", {"cp": 2, "tp": 2, "backend": "sglang"}),
        ("heads_tp", "Qwen/Qwen3-32B", {"tp": 3}),
        ("mtp_unsupported", "nvidia/Llama-3_3-Nemotron-Super-49B-v1", {"nextn": 1}),
        ("ep_experts", "mistralai/Mixtral-8x7B-v0.1", {"tp": 16, "moe_ep": 16}),
        ("block_align", "Qwen/Qwen3-30B-A3B-FP8", {"tp": 4, "moe_ep": None, "moe_tp": 4, "modes": FP8}),
        ("dense_ep", "nvidia/Gemma-4-31B-IT-NVFP4", {"tp": 2, "moe_ep": 2}),
        ("linear_heads_tp", "Qwen/Qwen3.5-27B", {"tp": 24}),
        ("moe_backend", "Qwen/Qwen3.5-35B-A3B", {"moe_backend": "megamoe"}),
        ("retired_deepep", "Qwen/Qwen3.5-35B-A3B", {"moe_backend": "deepep_moe", "backend": "sglang"}),
        ("megamoe", "deepseek-ai/DeepSeek-V4-Flash", {"moe_backend": "megamoe"}),
        ("large_ep_unwired", "MiniMaxAI/MiniMax-M3", {"comm": DEEPEP, "backend": "vllm"}),
        ("wideep_adp", "deepseek-ai/DeepSeek-V3", {"comm": MoeComm("nvlink_one_sided"), "modes": FP8}),
        ("vit_tp", "Qwen/Qwen3-VL-4B-Instruct", {"tp": 32, "encoder_dp": False}),
        ("pattern_len", "google/gemma-4-26B-A4B", {"layers": 4}),
        ("moe_width", "Qwen/Qwen3-30B-A3B", {"tp": 4, "moe_ep": 2, "moe_tp": 1}),
        ("moe_width", "nvidia/Gemma-4-31B-IT-NVFP4", {"tp": 2, "moe_tp": 1}),
        ("moe_unset", "Qwen/Qwen3-30B-A3B", {"moe_ep": None}),
    ],
)
def test_impossible_deployments_name_a_stable_reason(why, model, more):
    with pytest.raises(InvalidField) as error:
        plan(model, more.pop("backend", "trtllm"), more.pop("modes", BF16), **more)
    assert error.value.details["why"] == why
    assert isinstance(error.value, UnsupportedCombination) == (error.value.reason == "UNSUPPORTED")


def test_large_ep_of_sglang_needs_a_width_that_divides_its_128_heads():
    odd = replace(REGISTRY.get("deepseek-ai/DeepSeek-V3"), heads=96)
    with pytest.raises(InvalidField, match="divides 128"):
        plan(odd, "sglang", FP8, tp=3, attn_dp=8, moe_ep=24, comm=DEEPEP)


def test_one_expert_width_follows_from_the_other():
    spec = REGISTRY.get("Qwen/Qwen3-30B-A3B")
    assert complete(spec, ParallelConfig(tp=4, attn_dp=2, moe_ep=4)).moe_tp == 2
    assert complete(REGISTRY.get("Qwen/Qwen3-32B"), ParallelConfig(tp=4)).moe_tp is None
