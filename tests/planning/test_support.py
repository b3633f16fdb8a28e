"""Every model of the registry on every system and backend, under the smallest mapping that holds it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from perfcast_engine.errors import EngineError, OutOfMemory, Reason
from perfcast_engine.step_result import StepResult
from perfcast_engine.tables.database import Mode
from perfcast_planning.support import Cell, cell, smallest, support

from tests.engine.test_coverage import asked, predictor


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
