"""A trajectory of many samples is priced so many at a time, and ends between them where that is wanted."""

from __future__ import annotations

from contextvars import copy_context

import pytest
from perfcast_engine.step_result import StepResult
from perfcast_surface.bands import BAND, before_each

from tests.engine.test_quick import steps

STRIDE = 2
CASES = [("dense", "SILICON"), ("dense", "SOL"), ("mla", "SILICON"), ("moe", "HYBRID")]


class Enough(Exception):
    """Raised before a band."""


@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.parametrize("isl", [100, 2_000_000])
@pytest.mark.parametrize("imbalance", [1.0, 1.25])
def test_a_trajectory_is_the_sum_of_its_parts_and_can_be_left_between_them(
    name: str, mode: str, isl: int, imbalance: float
) -> None:
    model, bands, tokens = steps(name, "corrected", mode), 0, STRIDE * BAND
    parts = [model.decode(7, isl + n * tokens, tokens + 1, 1, STRIDE, imbalance) for n in range(3)]

    def count() -> None:
        nonlocal bands
        bands += 1
        if bands > most:
            raise Enough

    def whole(operators: bool) -> StepResult:
        before_each.set(count)
        return model.decode(7, isl, 3 * tokens + 1, 1, STRIDE, imbalance, operators=operators)

    for operators in (False, True):
        bands, most = 0, 100
        told = copy_context().run(whole, operators)
        ms = pytest.approx(sum(part.ms.item() for part in parts), rel=1e-12)
        assert (told.ms.item(), told.by_source.sum()) == (ms, ms)
        assert bands >= 3
        bands, most = 0, 2
        with pytest.raises(Enough):
            copy_context().run(whole, operators)
    assert sum(answer.ms.item() for answer in (told.operators or {}).values()) == ms
