"""Steps without arrays are the steps with arrays, and say so where they cannot be."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from perfcast_engine import EngineConfig, ParallelConfig, Predictor
from perfcast_engine.errors import InvalidField
from perfcast_engine.quick import QuickStep
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


KINDS = {"prefill": "prefill", "decode": "decode_step", "mixed": "mixed"}
FIELDS = {
    "prefill": ("batch", "isl", "prefix"),
    "decode": ("gen_requests", "isl", "osl"),
    "mixed": ("ctx_tokens", "gen_requests", "isl", "osl", "prefix"),
}


def quick(model: StepModel, kind: str, *point: int) -> QuickStep | None:
    return model.quick(KINDS[kind], dict(zip(FIELDS[kind], point, strict=False)))


@pytest.mark.parametrize("profile", ["reference", "corrected"])
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_point_and_many_at_a_time_give_what_operators_give(name: str, kind: str, profile: str) -> None:
    model = steps(name, profile)
    whole = getattr(model, KINDS[kind])
    asked = points(kind, 200)
    columns = list(map(np.array, zip(*asked, strict=True)))
    wanted = whole(*columns, operators=True)
    for _ in range(2):  # while the tables over counts are filled in, and from them
        many = whole(*columns)
        np.testing.assert_allclose(many.ms, wanted.ms, rtol=1e-12)
        np.testing.assert_allclose(many.by_source, wanted.by_source, rtol=1e-11, atol=1e-15)
        np.testing.assert_array_equal(many.tier, wanted.tier)
    found = [quick(model, kind, *point) for point in asked]
    answered = [i for i, step in enumerate(found) if step is not None]
    assert len(answered) > 50
    np.testing.assert_allclose([found[i].ms for i in answered], many.ms[answered], rtol=1e-13)
    np.testing.assert_allclose([found[i].by_source for i in answered], many.by_source[answered], rtol=1e-12)


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


@pytest.mark.parametrize("name", ["dense", "moe", "mla"])
@pytest.mark.parametrize("kind", KINDS)
def test_beyond_the_measurements_too(name: str, kind: str) -> None:
    model = steps(name, "corrected")
    rng = np.random.default_rng(20261201)
    batch, prompts = (np.exp(rng.uniform(0, np.log(most), 200)).astype(np.int64) for most in (5000, 300))
    length, prompt = (np.exp(rng.uniform(np.log(2000), np.log(most), 200)).astype(np.int64) for most in (3e5, 7e4))
    osl, tokens = np.full(200, 100), rng.integers(1, 9000, 200)
    columns = {
        "prefill": (np.maximum(np.minimum(prompts, 100_000 // prompt), 1), prompt, prompt // 9),
        "decode": (batch, length, osl),
        "mixed": (tokens, batch, prompt, osl, prompt // 7),
    }[kind]
    wanted = getattr(model, KINDS[kind])(*columns).ms
    np.testing.assert_allclose(getattr(model, KINDS[kind])(*columns).ms, wanted, rtol=1e-12)
    for i, point in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        step = quick(model, kind, *point)
        assert step is not None
        assert step.ms == pytest.approx(wanted[i], rel=1e-12)
        assert sum(step.by_source) == pytest.approx(step.ms, rel=1e-12)


def test_no_short_cut_without_measurements() -> None:
    assert quick(steps("dense", "corrected", "EMPIRICAL"), "prefill", 1, 1000) is None
    assert quick(steps("dense", "corrected"), "prefill", 1, 1000, 1000) is None
    assert quick(steps("dense", "corrected"), "mixed", 0, 0, 1000, 10) is None


def test_a_mixed_step_without_prompts_has_a_short_cut_too() -> None:
    model = steps("dense", "corrected")
    wanted = model.mixed(0, 4, 1000, 10).ms[0]
    step = quick(model, "mixed", 0, 4, 1000, 10)
    assert step is not None
    assert step.ms == pytest.approx(wanted, rel=1e-13)


def test_the_latency_alone_as_it_is_told_or_raised() -> None:
    model = steps("mla", "corrected")
    assert model.prefill_ms(2, 777, 7) == pytest.approx(model.prefill(2, 777, 7).ms[0], rel=1e-13)
    assert model.decode_step_ms(31, 2000, 9) == pytest.approx(model.decode_step(31, 2000, 9).ms[0], rel=1e-13)
    assert model.mixed_ms(900, 8, 2000, 9, 5) == pytest.approx(model.mixed(900, 8, 2000, 9, 5).ms[0], rel=1e-13)
    assert model.decode_step_ms(500_000, 100_000, 2) == model.decode_step(500_000, 100_000, 2).ms[0]
    with pytest.raises(InvalidField, match="prefix"):
        model.prefill_ms(1, 100, 100)


def test_a_point_that_an_operator_misses_takes_no_other_point_with_it():
    config = EngineConfig(
        model="nvidia/GLM-5.2-NVFP4",
        system="gb300",
        backend="vllm",
        parallel=ParallelConfig(tp=8, attn_dp=2, moe_ep=16),
        database_mode="HYBRID",
    )
    asked = predictor().engine(config).steps
    alone = asked.mixed(0, 344, 51, 5, 0)
    missed = asked.mixed(0, 6, 75231, 2326, 58022)
    both = asked.mixed(0, [344, 6], [51, 75231], [5, 2326], [0, 58022])
    assert np.isnan(missed.ms[0]) and "no measurement" in str(missed.misses[0][1])
    assert both.ms[0] == alone.ms[0] and np.isnan(both.ms[1])
    assert all(mask.tolist() == [False, True] for mask, _ in both.misses)
