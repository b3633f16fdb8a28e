"""What engines can be answered from, and every model of the registry on every system and backend."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from perfcast_engine import EngineConfig, ParallelConfig, Predictor
from perfcast_engine.answer import Tier
from perfcast_engine.coverage import Cell, OperatorCoverage, Standing, cell, coverage, smallest, support
from perfcast_engine.errors import EngineError, OutOfMemory, PerfDataMissing, Reason, SystemFlopsMissing
from perfcast_engine.step_result import StepResult
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


@pytest.mark.parametrize(
    ("model", "system", "gpus"),
    [("Qwen/Qwen3-0.6B", "l40s", 1), ("deepseek-ai/DeepSeek-V3", "h200_sxm", 8), ("Qwen/Qwen3-32B", "l40s", 2)],
)
def test_the_smallest_mapping_just_holds_the_model(model: str, system: str, gpus: int) -> None:
    engines = smallest(predictor(), asked(model, system, "trtllm"))
    assert {engine.parallel.gpus for engine in engines} == {gpus}
    assert all(engine.memory.largest_batch(4096, 512) > 0 for engine in engines)


def test_a_model_beyond_every_mapping_does_not_fit() -> None:
    with pytest.raises(OutOfMemory, match="does not fit 64 GPUs of b60"):
        smallest(predictor(), asked("moonshotai/Kimi-K3", "b60", "vllm"))


@pytest.mark.parametrize(
    ("model", "system", "backend", "verdict", "reason"),
    [
        ("Qwen/Qwen3-32B-FP8", "h200_sxm", "trtllm", "PASS", None),
        ("MiniMaxAI/MiniMax-M3", "h200_sxm", "trtllm", "HYBRID", Reason.PERF_DATA_MISSING),
        ("Qwen/Qwen3-32B-FP8", "a100_sxm", "vllm", "FAIL", Reason.SYSTEM_FLOPS_MISSING),
        ("Qwen/Qwen3-32B-FP8", "a30", "vllm", "FAIL", Reason.UNKNOWN_VERSION),
        ("no/such-model", "h200_sxm", "vllm", "FAIL", Reason.UNKNOWN_MODEL),
    ],
)
def test_a_cell_says_whether_and_why_not(
    model: str, system: str, backend: str, verdict: str, reason: Reason | None
) -> None:
    found = cell(predictor(), asked(model, system, backend))
    assert found.verdict == verdict and (found.error and found.error.reason) == reason


def test_a_cell_names_what_was_not_measured_and_the_mapping_that_it_tried() -> None:
    found = cell(predictor(), asked("MiniMaxAI/MiniMax-M3", "h200_sxm", "trtllm"))
    assert found.operators == ("prefill/context_attention", "decode/generation_attention")
    assert found.parallel is not None and found.parallel.gpus == 8 and found.version == "1.3.0rc20"


def test_the_matrix_goes_over_what_is_named() -> None:
    models = ["Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"]
    cells = list(support(predictor(), models, ["h100_sxm", "b60"], ["vllm"]))
    assert [(c.model, c.system) for c in cells] == [(m, s) for s in ("h100_sxm", "b60") for m in models]


# family, or a part of the model's name -> (operators that a mended fault changes in prefill, in decode), by how
# their names end; each is one switch of the profiles
LAYERS = "norm qkv_gemm attention proj_gemm router_gemm dispatch moe act gate_up_gemm down_gemm"
MENDED = {
    "MOE": ("logits_gemm", ""),  # the vocabulary projection that prefill of MoE families leaves out
    "QWEN3VL_MOE": ("logits_gemm", ""),
    "HYBRIDMOE": (LAYERS, LAYERS),  # which layers slide
    "GLM-5": ("attention", "attention"),  # norms in an exclusion list
    "Kimi-K2": ("mla_block", "mla_block"),  # kernels asked for 128 heads
}


def may_differ(model: str, family: str, phase: str) -> tuple[str, ...]:
    rows = [value for key, value in MENDED.items() if key == family or key in model]
    return tuple(" ".join(row[phase == "decode"] for row in rows).split())


def changed(one: StepResult, other: StepResult) -> set[str]:
    """Operators of which the two steps do not say exactly the same."""
    assert one.operators is not None and other.operators is not None
    names = one.operators.keys() & other.operators.keys()
    differ = {n for n in names if not np.array_equal(one.operators[n].ms, other.operators[n].ms, equal_nan=True)}
    return differ | (one.operators.keys() ^ other.operators.keys())


@pytest.mark.slow
@pytest.mark.parametrize("system", predictor().catalog.systems())
def test_every_model_is_answered_or_refused_and_profiles_differ_where_they_say(system: str) -> None:
    seen: set[str] = set()
    for found in support(predictor(), systems=[system]):
        assert isinstance(found, Cell) and (found.verdict == "PASS") == (found.error is None)
        assert found.error is None or found.error.message
        seen.add(found.verdict)
        if found.parallel is None:
            continue
        config = asked(found.model, system, found.backend)
        config = replace(config, parallel=found.parallel, database_mode=found.works_in or Mode.SILICON)
        engine, reference = (predictor().engine(replace(config, profile=name)) for name in ("corrected", "reference"))
        for phase in ("prefill", "decode"):
            told = []
            for each in (engine, reference):
                steps = each.steps
                ask = steps.prefill if phase == "prefill" else steps.decode_step
                load = ([1, 4], 2048, 0) if phase == "prefill" else ([1, 64], 4096, 256)
                summed, listed = ask(*load), ask(*load, operators=True)
                missing = set(summed.errors())
                assert all(isinstance(error, EngineError) for error in summed.errors().values())
                assert np.array_equal(np.isnan(summed.ms), [i in missing for i in range(2)])
                assert not missing or found.verdict == "FAIL"
                assert np.allclose(summed.ms, listed.ms, rtol=1e-12, equal_nan=True)
                assert (summed.ms[~np.isnan(summed.ms)] > 0).all()
                told.append(listed)
            allowed = may_differ(found.model, engine.model.family, phase)
            assert all(name.endswith(allowed) for name in changed(*told)), (found.model, phase, changed(*told))
    assert not predictor().catalog.backends(system) or "PASS" in seen
