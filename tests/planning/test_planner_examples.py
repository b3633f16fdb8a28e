"""The worked capacity examples of spec/07 section 5.3, on the measured tables."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from perfcast_engine import EngineConfig, ParallelConfig, Predictor
from perfcast_engine.step import StepModel
from perfcast_planning.planner.capacity import CapacityRequest, Objective, OnInfeasible, capacity
from perfcast_planning.planner.engine_work import EngineLimits, EngineRole
from perfcast_planning.planner.observed import RankWork, observed
from perfcast_planning.planner.pass_model import PassModel

ENGINES = {
    "A": ("Qwen/Qwen3-32B", "vllm", "0.24.0", ParallelConfig(tp=4)),
    "B": ("Qwen/Qwen3-235B-A22B", "trtllm", "1.3.0rc20", ParallelConfig(tp=1, attn_dp=8, moe_ep=8)),
}
PREFILL, DECODE, AGGREGATED = EngineRole
EXAMPLES = [
    ("A", PREFILL, {"isl": 3000, "osl": 150, "ttft_s": 0.5}, 1, 10.564243701045154),
    ("A", PREFILL, {"isl": 3000, "osl": 150, "ttft_s": 0.5, "kv_hit_rate": 0.5}, 3, 21.20490045626628),
    ("A", PREFILL, {"isl": 20000, "osl": 150, "ttft_s": 0.5}, 1, 1.4781818174935892),
    ("A", DECODE, {"isl": 3000, "osl": 150, "itl_s": 0.05}, 512, 77.39584861487567),
    ("A", DECODE, {"isl": 3000, "osl": 150, "itl_s": 0.008}, 13, 11.318417947698011),
    ("A", DECODE, {"isl": 3000, "osl": 150, "itl_s": 0.005}, 512, 77.39584861487567),
    ("A", DECODE, {"isl": 3000, "osl": 150, "itl_s": 0.05, "accept_length": 1.8}, 512, 139.3125275067762),
    ("A", AGGREGATED, {"isl": 3000, "osl": 150, "ttft_s": 0.5, "itl_s": 0.05}, 65, 8.746942054524402),
    (
        "A",
        AGGREGATED,
        {"isl": 3000, "osl": 150, "ttft_s": 0.5, "itl_s": 0.05, "kv_hit_rate": 0.8},
        202,
        29.940574746392848,
    ),
    ("A", AGGREGATED, {"isl": 3000, "osl": 1000, "ttft_s": 0.5, "itl_s": 0.02}, 73, 3.6683227494355637),
    (
        "A",
        AGGREGATED,
        {"isl": 3000, "osl": 1000, "ttft_s": 0.5, "itl_s": 0.02, "objective": Objective.LATENCY},
        1,
        0.09658427005368507,
    ),
    ("B", PREFILL, {"isl": 4000, "osl": 150, "ttft_s": 1.0}, 2, 11.327884976859512),
    ("B", DECODE, {"isl": 4000, "osl": 500, "itl_s": 0.03}, 93, 6.253013054108613),
    ("B", AGGREGATED, {"isl": 4000, "osl": 500, "ttft_s": 1.0, "itl_s": 0.05}, 93, 3.7585449773945587),
]


@cache
def pass_model(name: str) -> PassModel:
    model, backend, version, parallel = ENGINES[name]
    config = EngineConfig(
        model=model, system="h200_sxm", backend=backend, version=version, parallel=parallel, profile="reference"
    )
    return PassModel(steps=Predictor().engine(config).steps)


@pytest.mark.parametrize(("name", "role", "asked", "batch", "rps"), EXAMPLES)
def test_worked_examples(name, role, asked, batch, rps):
    request = CapacityRequest(**asked, on_infeasible=OnInfeasible.MAX_RPS, legacy_single_request=True)
    found = capacity(pass_model(name), role, EngineLimits(attention_dp=ENGINES[name][3].attn_dp), request)
    assert found is not None
    assert (found.batch_total, found.rps) == (batch, pytest.approx(rps, rel=1e-12))


@pytest.mark.parametrize("name", ENGINES)
def test_ranks_take_what_the_operators_say_where_the_surface_answers(name, monkeypatch):
    rng = np.random.default_rng(5)
    requests, decodes = rng.integers(0, 2, (2, 400)) * rng.integers(1, 600, (2, 400))
    tokens, cached, kv = (count * rng.integers(0, 20000, 400) for count in (requests // 8, requests, decodes))
    work = RankWork(requests, tokens, cached, decodes, kv)
    steps = pass_model(name).steps
    found = observed(steps, work)
    monkeypatch.setattr(StepModel, "_quick", None)
    wanted = observed(replace(steps), work)
    np.testing.assert_allclose(found.ms, wanted.ms, rtol=1e-12)
    assert {i: str(error) for i, error in found.errors.items()} == {i: str(e) for i, e in wanted.errors.items()}
    assert (
        np.isnan(wanted.ms).sum() == len(wanted.errors) < 100
        and (wanted.ms == 0).sum() == ((tokens + decodes) == 0).sum()
    )
