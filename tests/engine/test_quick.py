"""Steps without arrays are the steps with arrays, and say so where they cannot be."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from perfcast_engine import EngineConfig, ParallelConfig, Predictor
from perfcast_engine.step import StepModel

predictor = cache(Predictor)
ENGINES = {
    "dense": ("Qwen/Qwen3-32B-FP8", "trtllm", ParallelConfig(tp=4)),
    "moe": ("Qwen/Qwen3-235B-A22B", "vllm", ParallelConfig(tp=4, moe_ep=4)),
    "mla": ("deepseek-ai/DeepSeek-V3", "trtllm", ParallelConfig(tp=8, moe_ep=8)),
    "sparse": ("zai-org/GLM-5-FP8", "vllm", ParallelConfig(tp=8, moe_ep=8)),
    "shared index": ("zai-org/GLM-5.2-FP8", "sglang", ParallelConfig(tp=8, moe_ep=8)),
    "compressed": ("sgl-project/DeepSeek-V4-Flash-FP8", "sglang", ParallelConfig(tp=4, moe_ep=4)),
    "delta net": ("Qwen/Qwen3.5-35B-A3B", "vllm", ParallelConfig(tp=2, moe_ep=2)),
    "state space": ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "trtllm", ParallelConfig(tp=2, moe_ep=2)),
    "delta attention": ("moonshotai/Kimi-K3", "sglang", ParallelConfig(tp=8, moe_tp=8)),
    "context parallel": ("Qwen/Qwen3-32B", "sglang", ParallelConfig(cp=4)),
}


@cache
def steps(name: str, profile: str, mode: str = "SILICON") -> StepModel:
    model, backend, parallel = ENGINES[name]
    config = EngineConfig(
        model=model, system="h200_sxm", backend=backend, parallel=parallel, profile=profile, database_mode=mode
    )
    return predictor().engine(config).steps


def points(kind: str, n: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(20261130)
    columns = {
        "prefill": (rng.integers(1, 9, n), rng.integers(100, 9000, n), rng.integers(0, 100, n)),
        "decode": (rng.integers(1, 200, n), rng.integers(1, 3000, n), rng.integers(2, 2000, n)),
        "mixed": (
            rng.integers(1, 9000, n),
            rng.integers(0, 200, n),
            rng.integers(300, 4000, n),
            rng.integers(2, 900, n),
            rng.integers(0, 300, n),
        ),
    }[kind]
    return [tuple(map(int, row)) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("profile", ["reference", "corrected"])
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("kind", ["prefill", "decode", "mixed"])
def test_one_point_at_a_time_gives_what_arrays_give(name: str, kind: str, profile: str) -> None:
    model = steps(name, profile)
    quick = {"prefill": model.quick_prefill, "decode": model.quick_decode, "mixed": model.quick_mixed}[kind]
    whole = {"prefill": model.prefill, "decode": model.decode_step, "mixed": model.mixed}[kind]
    asked = points(kind, 200)
    found = [quick(*point) for point in asked]
    wanted = whole(*map(np.array, zip(*asked, strict=True)))
    answered = [i for i, step in enumerate(found) if step is not None]
    assert len(answered) > 50
    np.testing.assert_allclose([found[i].ms for i in answered], wanted.ms[answered], rtol=1e-13)
    np.testing.assert_allclose([found[i].by_source for i in answered], wanted.by_source[answered], rtol=1e-12)


def test_tables_over_token_counts_are_the_operators_summed() -> None:
    model = steps("moe", "reference")
    counts = np.array([1, 7, 1023, 1024, 5000, 131_072, 400_000])
    by_table = model.prefill(1, counts)
    by_operator = model.prefill(1, counts, operators=True)
    assert by_operator.operators is not None
    np.testing.assert_allclose(by_table.ms, by_operator.ms, rtol=1e-13)
    np.testing.assert_allclose(
        by_table.ms, np.sum([answer.ms for answer in by_operator.operators.values()], axis=0), rtol=1e-13
    )


def test_far_outside_of_the_measurements_too() -> None:
    model = steps("dense", "corrected")
    quick = model.quick_decode(500_000, 100_000, 2)
    assert quick is not None
    assert quick.ms == pytest.approx(model.decode_step(500_000, 100_000, 2).ms[0], rel=1e-13)


def test_no_short_cut_without_measurements() -> None:
    assert steps("dense", "corrected", "EMPIRICAL").quick_prefill(1, 1000) is None
    assert steps("dense", "corrected").quick_prefill(1, 1000, 1000) is None
    assert steps("dense", "corrected").quick_mixed(0, 0, 1000, 10) is None


def test_a_mixed_step_without_prompts_has_a_short_cut_too() -> None:
    model = steps("dense", "corrected")
    quick = model.quick_mixed(0, 4, 1000, 10)
    assert quick is not None
    assert quick.ms == pytest.approx(model.mixed(0, 4, 1000, 10).ms[0], rel=1e-13)
