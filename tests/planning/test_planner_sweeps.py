"""Bootstrap sweeps and straight-line latency laws."""

from __future__ import annotations

import numpy as np
import pytest
from perfcast_engine.errors import InvalidField
from perfcast_planning.planner.bootstrap import DECODE_OSL, Sweep, sweep_engine
from perfcast_planning.planner.latency_law import LawBox, fit_latency_law, fit_line

from tests.planning.test_planner_examples import pass_model


def sweep(**values) -> Sweep:
    return Sweep(**{"isl": 3000, "osl": 150, "max_context_tokens": 16384, "prefill_granularity": 16,
                    "decode_granularity": 6} | values)  # fmt: skip


def test_prompt_lengths_step_evenly_from_100_to_what_the_context_leaves():
    lengths = sweep().prefill_lengths()
    assert lengths.tolist() == list(range(100, 16384 - 512, (16384 - 612) // 16))
    assert sweep(max_context_tokens=700, prefill_granularity=1000).prefill_lengths().tolist() == list(range(100, 188))
    assert len(sweep(prefill_granularity=0).prefill_lengths()) == 0
    with pytest.raises(InvalidField, match="612"):
        sweep(max_context_tokens=612)


def test_decode_concurrency_goes_from_one_to_what_the_kv_cache_holds():
    lengths, requests = sweep(max_context_tokens=2000, decode_granularity=3).decode_points(12_000)
    assert lengths.tolist() == [100, 100, 100, 600, 600, 600, 1100, 1100, 1100]
    assert requests.tolist() == [1, 10, 20, 1, 6, 10, 1, 4, 7]
    lengths, requests = sweep(max_context_tokens=700, decode_granularity=1).decode_points(12_000)
    assert (lengths.tolist(), requests.tolist()) == ([100], [20])
    lengths, requests = sweep(max_context_tokens=700, decode_granularity=2, max_concurrency=2).decode_points(12_000)
    assert requests.tolist() == [1, 2]
    assert len(sweep(decode_granularity=4).decode_points(500)[0]) == 0


def test_a_swept_engine_is_timed_by_the_steps_themselves():
    steps = pass_model("B").steps
    swept = sweep_engine(steps, None, sweep(attention_dp=8, max_kv_tokens_per_rank=50_000))  # type: ignore[arg-type]
    assert swept.max_kv_tokens == 400_000 and swept.largest_batch_per_rank is None
    assert swept.ttft_ms == pytest.approx(steps.prefill(1, swept.prefill_isl).ms, rel=1e-12)
    batch, isl = swept.decode_requests_per_rank, swept.decode_context - DECODE_OSL // 2
    assert swept.itl_ms == pytest.approx(steps.decode(batch, isl, DECODE_OSL).ms / (DECODE_OSL - 1), rel=1e-12)
    assert batch.min() == 1 and batch.max() <= 400_000 // 600 // 8


def test_a_sweep_of_more_passes_than_anybody_reads_names_the_granularity_that_asks_for_them():
    steps = pass_model("B").steps
    many = {"decode_granularity": 60, "max_kv_tokens_per_rank": 2**32}
    assert len(sweep_engine(steps, None, sweep(**many)).itl_ms) == 3600  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match="makes 3600 points, more than 2500") as caught:
        sweep_engine(steps, None, sweep(**many, attention_dp=100))  # type: ignore[arg-type]
    assert caught.value.details["field"] == "decode_granularity"


def test_a_line_through_samples_of_a_line_is_that_line():
    x = np.arange(1.0, 20)
    line = fit_line(x, 3 + 0.5 * x)
    assert (line.intercept_ms, line.slope_ms, line.r_squared) == (pytest.approx(3), pytest.approx(0.5), 1.0)
    assert line.worst_error_ms < 1e-12 and line.samples == 19
    assert fit_line(x, 10 - 0.1 * x).slope_ms == 0
    through = fit_line(x, x**2)
    assert through.intercept_ms == 0 and through.slope_ms == pytest.approx((x**3).sum() / (x**2).sum())
    assert fit_line(np.array([4.0]), np.array([8.0])).worst_error_ms == 0


def test_a_latency_law_tells_how_far_it_is_off_in_its_box():
    steps = pass_model("A").steps
    box = LawBox(max_batch=64)
    law = fit_latency_law(steps, box)
    batch = np.arange(1, 65)
    error = np.abs(law.itl.intercept_ms + law.itl.slope_ms * batch - steps.decode_step(batch, box.isl, box.osl).ms)
    assert law.itl.worst_error_ms == pytest.approx(error.max()) and law.itl.samples == 64
    assert 0.9 < law.itl.r_squared <= 1 and 0.9 < law.ttft.r_squared <= 1
    for bad in ({"min_batch": 0}, {"min_batch": 9, "max_batch": 8}, {"osl": 0}, {"max_input_tokens": 1}):
        with pytest.raises(InvalidField):
            LawBox(**bad)
