"""What the engines of one search share answers as each engine alone does."""

import numpy as np
import pytest
from perfcast_engine.answer import Points
from perfcast_planning.search.shared import PointTable, Shared

from tests.planning.toy import Attention, worker


@pytest.fixture
def pair():
    """Two engines that differ in one operator, sharing what they have in common, beside the same two alone."""
    shared = Shared()
    alone = [worker(tp=tp).step for tp in (2, 2, 4)]
    together = [type(s)(s.context, s.generation, s.db, s.nextn, s.profile, shared.phase) for s in alone]
    return alone, together


def test_steps_are_those_of_each_engine_alone(pair):
    for own, shared in zip(*pair, strict=True):
        for ask in (
            lambda step: step.mixed([2048, 512, 4096], [3, 9, 3], 2048, 100, 512),
            lambda step: step.prefill([1, 4, 2, 4], 2000, 100),
            lambda step: step.decode_step([7, 3, 7], 2048, 100),
            lambda step: step.decode([2, 5], 1000, 300),
        ):
            assert np.allclose(ask(own).ms, ask(shared).ms, rtol=1e-14)


def test_points_are_priced_once_and_misses_stay_with_their_points():
    asked = []

    class Watched(Attention):
        def price(self, db, at):
            asked.append(len(at))
            return super().price(db, at)

    table = PointTable(Watched(name="a", per_pair=1e-6, decode=True), worker().step.db)
    at = Points.of([1, 2, 1, 3], [10, 10, 10, 20])
    keys = (at.batch * 100 + at.s).astype(np.int64)
    first, again = table(keys, at), table(keys[1:3], at.take(np.array([False, True, True, False])))
    assert asked == [3]
    assert first.ms.tolist() == pytest.approx([1e-5, 2e-5, 1e-5, 6e-5])
    assert again.ms.tolist() == pytest.approx([2e-5, 1e-5])


def test_missing_counts_miss_in_every_engine():
    shared, known = Shared(), worker(known=1000).step
    step = type(known)(known.context, known.generation, known.db, 0, known.profile, shared.phase)
    for _ in range(2):
        result = step.prefill([1, 2], 800)
        assert np.isnan(result.ms).tolist() == [False, True]
        assert list(result.errors()) == [1]
