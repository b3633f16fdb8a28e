"""Means over lengths, tabulated (spec/02 section 5.4)."""

import numpy as np
import pytest
from perfcast_surface import averaged as module
from perfcast_surface.averaged import Averaged
from perfcast_surface.plane import Plane

BATCH = np.repeat([1, 4], 3)
LENGTH = np.array([1, 1000, 4000, 1, 1000, 2000])  # the larger batch was measured less far
MS = np.array([1.0, 2.0, 10.0, 5.0, 8.0, 9.0])


def spread(s):
    return np.stack([np.maximum(s - 10, 1), s, s + 10])


def means():
    return Averaged(Plane.of((BATCH, LENGTH), MS), spread)


def by_hand(batch, s):
    lines = [np.interp(spread(np.array(float(s))), LENGTH[b == BATCH], MS[b == BATCH]).mean() for b in (1, 4)]
    return lines[0] + (lines[1] - lines[0]) * (batch - 1) / 3


@pytest.mark.parametrize(("batch", "s"), [(1, 5), (2, 1000), (4, 1985), (3, 1024), (2, 1)])
def test_linear_in_the_batch_between_means(batch, s):
    got = means().at(np.array([batch]), np.array([s]))
    assert got == pytest.approx(by_hand(batch, s))
    assert means().one()(batch, s) == got[0]


@pytest.mark.parametrize(
    ("batch", "s"), [(4, 1995), (2, 3000), (1, 3995), (1, 9999), (0, 100), (5, 100), (1, 10**12), (10**12, 1)]
)
def test_nothing_to_say_where_a_sample_was_not_measured(batch, s):
    assert np.isnan(means().at(np.array([batch]), np.array([s])))
    assert np.isnan(means().one()(batch, s))


def test_what_is_tabulated_already_changes_no_answer():
    table, fresh = means(), means()
    for s in (5, 1500, 3500, 5, 2500):
        asked = np.array([1]), np.array([s])
        assert table.at(*asked) == means().at(*asked)
    batch, s = np.ones(4000, np.int64), np.arange(1, 4001)
    np.testing.assert_array_equal(table.at(batch, s), fresh.at(batch, s))


def test_lengths_that_are_too_long_to_tabulate_are_left_out(monkeypatch):
    monkeypatch.setattr(module, "LIMIT", 1000)
    table = means()
    np.testing.assert_array_equal(np.isnan(table.at(np.array([1]), np.array([5, 998, 1000, 2000]))), [0, 0, 1, 1])
    assert np.isnan(table.one()(1, 1000))
