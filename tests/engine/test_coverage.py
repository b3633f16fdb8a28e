"""What engines can be answered from, and every model of the registry on every system and backend."""

from __future__ import annotations

from functools import cache

import pytest
from perfcast_engine import EngineConfig, ParallelConfig, Predictor
from perfcast_engine.answer import Tier
from perfcast_engine.coverage import OperatorCoverage, Standing, coverage
from perfcast_engine.errors import PerfDataMissing, SystemFlopsMissing
from perfcast_engine.tables.database import Mode

predictor = cache(Predictor)


def asked(model: str, system: str, backend: str, **parallel: int) -> EngineConfig:
    return EngineConfig(model=model, system=system, backend=backend, parallel=ParallelConfig(**parallel))


def operators(config: EngineConfig) -> tuple[Mode | None, dict[tuple[str, str], OperatorCoverage]]:
    found = coverage(predictor().engine(config))
    return found.works_in, {(item.phase, item.name): item for item in found.operators}


def test_a_measured_engine_names_the_table_and_key_of_every_operator() -> None:
    works, found = operators(asked("Qwen/Qwen3-32B-FP8", "h200_sxm", "trtllm", tp=4))
    assert works is Mode.SILICON and {item.error for item in found.values()} == {None}
    attention, gemm = found["prefill", "context_attention"], found["decode", "generation_qkv_gemm"]
    assert attention.standing is Standing.MEASURED and attention.table == "context_attention"
    assert attention.key.startswith("lane=torch_flow, attn_dtype=fp8, kv_cache_dtype=fp8, kvn=2, head_dim=128")
    assert gemm.table.startswith("gemm") and gemm.key == "n=2560, k=5120, quant=fp8_block"
    assert found["prefill", "context_add_norm_1"].standing is Standing.COMPUTED
    assert found["decode", "generation_ar_1"].key == "nccl_dtype=half, num_gpus=4, strategy=AUTO"
    assert all(sum(item.shares) == pytest.approx(1) and item.missing == 0 for item in found.values())


def test_a_table_read_behind_a_kept_structure_is_named_again() -> None:
    _, found = operators(asked("Qwen/Qwen3-32B-FP8", "h200_sxm", "trtllm", tp=4))
    gemms = {item.table for item in found.values() if item.kind == "Gemm"}
    assert gemms == {found["prefill", "context_qkv_gemm"].table}


def test_what_was_measured_at_other_shapes_is_estimated() -> None:
    works, found = operators(asked("Qwen/Qwen3-30B-A3B", "a100_sxm", "trtllm", moe_ep=1))
    moe = found["decode", "generation_moe"]
    assert works is Mode.HYBRID and moe.standing is Standing.ESTIMATED and moe.tier is Tier.XSHAPE
    assert moe.missing == 1 and moe.table == "moe" and "hidden_size=2048" in moe.key and moe.nearest == "4096"
    assert isinstance(moe.error, PerfDataMissing)


def test_an_operator_without_any_table_has_its_roofline_only() -> None:
    works, found = operators(asked("deepseek-ai/DeepSeek-V3.2", "l40s", "vllm", tp=8, moe_ep=8))
    attention = found["prefill", "context_attention"]
    assert works is Mode.SOL and attention.standing is Standing.ROOFLINE
    assert attention.table == "dsa_context" and "architecture=DeepseekV32ForCausalLM" in attention.key


def test_a_rate_that_the_gpu_lacks_is_missing_in_every_mode() -> None:
    works, found = operators(asked("Qwen/Qwen3-32B-FP8", "a100_sxm", "vllm", tp=4))
    gemm = found["prefill", "context_qkv_gemm"]
    assert works is None and gemm.standing is Standing.MISSING and isinstance(gemm.error, SystemFlopsMissing)


def test_operators_that_run_side_by_side_are_told_apart() -> None:
    _, found = operators(asked("deepseek-ai/DeepSeek-V3", "b200_sxm", "trtllm", tp=8, moe_ep=8))
    assert found["decode", "generation_moe"].kind == "Moe"
    assert found["decode", "generation_shared_gate_up_gemm"].kind == "Gemm"
