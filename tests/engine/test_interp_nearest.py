"""Nearest samples, by comparison and by pruning (spec/02 sections 3.1, 9.1)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfcast_engine.interp import nearest as module
from perfcast_engine.interp.nearest import Samples
from perfcast_engine.interp.util import LogSpace, UtilGrid


def by_hand(samples, query, count):
    distance = np.sqrt(((samples - query) ** 2).sum(axis=1))
    return np.argsort(distance, kind="stable")[:count]


def test_ties_go_to_the_earlier_sample():
    samples = np.array([[1.0, 0.0, -1.0, 0.0], [0.0, 1.0, 0.0, -1.0]])
    index, distance = Samples(samples).nearest(np.zeros((2, 1)), 3)
    assert index.tolist() == [[0], [1], [2]]
    assert distance.tolist() == [[1.0], [1.0], [1.0]]


def test_fewer_samples_than_asked():
    assert Samples(np.array([[0.0, 5.0]])).nearest(np.array([[4.0]]), 5)[0].tolist() == [[1], [0]]


@given(st.integers(1, 4), st.integers(1, 5), st.booleans(), st.sampled_from([0, 1000]), st.integers(0, 2**32 - 1))
def test_pruning_finds_what_comparison_finds(axes, count, coarse, narrow, seed):
    rng = np.random.default_rng(seed)
    samples = rng.integers(0, 5, (150, axes)) / 4.0  # a lattice, so that ties abound
    known, corner = Samples(samples.T), rng.integers(-2, 12, axes)
    with pytest.MonkeyPatch.context() as patch:
        limits = {"DIRECT_CELLS": 0, "TOGETHER": 16, "KEPT": 300, "CELLS": 999, "NARROW": narrow}
        for name, value in (limits | {"MANY": 10_000 if coarse else 0}).items():
            patch.setattr(module, name, value)
        for spread in (14, 3, 3):  # in a box of their own, which is kept
            queries = (corner + rng.integers(0, spread, (200, axes))) / 8.0
            index, _ = known.nearest(queries.T, count)
            expected = [by_hand(samples, query, count) for query in queries]
            np.testing.assert_array_equal(index.T, expected)


def test_pruning_finds_what_comparison_finds_among_uneven_samples():
    rng = np.random.default_rng(3)
    samples = np.log2(np.maximum(2 ** rng.integers(0, 15, (3, 2000)) * rng.choice([0, 1, 1, 1, 3], (3, 2000)), 1e-12))
    queries = np.log2(np.maximum(np.exp(rng.uniform(0, 16, (3, 600))).astype(int) - 1, 1e-12))
    index, distance = Samples(samples).nearest(queries, 5)
    away = np.sqrt(((samples[:, None] - queries[..., None]) ** 2).sum(axis=0))
    expected = away.argsort(axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(index.T, expected)
    np.testing.assert_array_equal(distance.T, np.take_along_axis(away, expected, axis=1))


class TestUtilGrid:
    GRID = UtilGrid.of((np.array([1.0, 10.0, 100.0]),), np.array([2.0, 4.0, 0.0]), np.array([1.0, 1.0, 1.0]))

    def ask(self, *x):
        return self.GRID.at((np.array(x, float),)).tolist()

    def test_a_sample_is_itself(self):
        assert self.ask(1, 10) == [0.5, 0.25]

    def test_two_nearest_by_inverse_distance_in_log_space(self):
        assert self.ask(10**0.25)[0] == pytest.approx((0.5 / 0.25 + 0.25 / 0.75) / (1 / 0.25 + 1 / 0.75))

    def test_outside_counts_as_the_edge_and_unusable_samples_do_not_exist(self):
        assert self.ask(0, 1000) == [0.5, 0.25]

    def test_no_usable_sample_is_no_grid(self):
        assert UtilGrid.of((np.array([1.0]),), np.array([0.0]), np.array([1.0])) is None

    def test_one_sample_answers_everywhere(self):
        one = UtilGrid.of((np.array([4.0]), np.array([4.0])), np.array([2.0]), np.array([1.0]))
        assert one.at((np.array([1.0, 9.0]), np.array([4.0, 2.0]))).tolist() == [0.5, 0.5]


def test_unclipped_space_tells_points_outside_apart():
    space = LogSpace.of((np.array([1.0, 100.0]), np.array([1.0, 1.0])))
    assert space.nearest((np.array([1e6]), np.array([1.0])), 1, clip=False)[1][0, 0] == pytest.approx(2.0)
    assert space.nearest((np.array([1e6]), np.array([1.0])), 1, clip=True)[1][0, 0] == 0.0


class Emptied(dict):
    """Kept boxes that another thread clears between two looks at them."""

    def get(self, *key):
        found = super().get(*key)
        self.clear()
        return found


def test_boxes_may_be_cleared_by_another_thread(monkeypatch):
    monkeypatch.setattr(module, "DIRECT_CELLS", 0)
    known = Samples(np.random.default_rng(1).uniform(0, 5, (2, 100)))
    queries = np.random.default_rng(2).uniform(0, 5, (2, 50))
    index, _ = known.nearest(queries, 3)
    again = Samples(known.at)
    object.__setattr__(again, "_boxes", Emptied(known._boxes))
    np.testing.assert_array_equal(again.nearest(queries, 3)[0], index)
