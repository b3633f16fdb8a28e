"""The resolution chain of measured grids (spec/02 section 3)."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfcast_engine.interp.grid import Grid
from perfcast_engine.interp.surface import Surface


def surface(rows, sol=lambda *c: math.prod(c), sqrt_axis=None, power=None):
    coords = [np.array(column, np.int64) for column in zip(*(row[:-1] for row in rows), strict=True)]
    ms = np.array([float(row[-1]) for row in rows])
    return Surface(Grid.of(coords, ms, None if power is None else np.array(power, float)), sol, sqrt_axis)


def ask(surface, *point):
    return float(surface.at(*(np.array([float(c)]) for c in point)).ms[0])


CURVE = surface([(10, 2.0), (20, 4.0), (40, 5.0)], sol=lambda x: x)
PLANE = surface([(1, 1, 1.0), (1, 4, 4.0), (3, 1, 9.0), (3, 4, 16.0)])


class TestCurve:
    def test_measured_point_is_verbatim(self):
        assert ask(CURVE, 20) == 4.0

    def test_linear_between_points(self):
        assert ask(CURVE, 25) == 4.25

    def test_held_at_the_utilisation_of_the_end(self):
        assert ask(CURVE, 80) == 10.0
        assert ask(CURVE, 5) == 1.0

    def test_nothing_to_hold_without_a_positive_roofline(self):
        assert math.isnan(ask(CURVE, 0))

    def test_nothing_to_hold_on_a_zero_end(self):
        assert math.isnan(ask(surface([(10, 0.0), (20, 1.0)], sol=lambda x: x), 5))


class TestPlane:
    def test_blends_outer_axis_first(self):
        assert ask(PLANE, 2, 1) == 5.0
        assert ask(PLANE, 2, 2) == pytest.approx((2.0 + (9 + 7 / 3)) / 2)

    def test_square_roots_on_the_sqrt_axis(self):
        rooted = Surface(PLANE.grid, PLANE.sol, sqrt_axis=0)
        assert ask(rooted, 2, 1) == pytest.approx(4.0)
        assert ask(rooted, 1, 4) == 4.0

    def test_one_survivor_moves_along_the_roofline(self):
        # the upper row does not reach 4; the lower one answers, scaled from x=1 to x=2
        ragged = surface([(1, 1, 1.0), (1, 4, 4.0), (3, 1, 9.0), (3, 2, 10.0)])
        assert ask(ragged, 2, 4) == 4.0 * (2 * 4) / (1 * 4)

    def test_survivor_without_a_roofline_passes_through(self):
        ragged = surface([(1, 1, 1.0), (1, 4, 4.0), (3, 1, 9.0), (3, 2, 10.0)], sol=lambda x, y: x * 0.0)
        assert ask(ragged, 2, 4) == 4.0

    def test_exact_outer_key_does_not_look_at_its_neighbours(self):
        # y=3 lies outside of row 2 though rows 1 and 3 cover it: the hold answers, not their blend
        rows = [(1, 1, 1.0), (1, 4, 4.0), (2, 1, 2.0), (3, 1, 3.0), (3, 4, 12.0)]
        assert ask(surface(rows), 2, 3) == pytest.approx(6.0)

    def test_hold_keeps_a_uniform_utilisation(self):
        rows = [(x, y, x * y / 0.25) for x in (1, 2, 4) for y in (1, 2, 4)]
        assert ask(surface(rows), 100, 3) == pytest.approx(300 / 0.25)

    def test_hold_weights_four_leaves_tapered_by_the_fifth(self):
        ms = {1: 1.0, 2: 3.0, 4: 4.0, 8: 20.0, 16: 16.0, 32: 100.0}
        rows = [(1, y, value) for y, value in ms.items()]
        d = [math.log2(64 / y) for y in (32, 16, 8, 4)]
        reach = math.log2(64 / 2)
        w = [((reach - x) / (reach * x + 1e-12)) ** 2 for x in d]
        util = sum(wi * y / ms[y] for wi, y in zip(w, (32, 16, 8, 4), strict=True)) / sum(w)
        assert ask(surface(rows), 1, 64) == pytest.approx(64 / util, rel=1e-12)

    def test_hold_of_few_leaves_weights_by_distance(self):
        rows = [(1, 1, 1.0), (1, 2, 4.0)]
        w = [1 / math.log2(8) ** 2, 1 / math.log2(4) ** 2]
        assert ask(surface(rows), 1, 8) == pytest.approx(8 / ((w[0] * 1 + w[1] * 0.5) / sum(w)), rel=1e-9)

    def test_leaves_at_equal_distance_tie_by_order(self):
        # five leaves one octave from the query: no weight is left by the taper, so the first four count alike
        rows = [(8, 16, 16, 1.0), (16, 8, 16, 2.0), (16, 16, 8, 4.0), (16, 32, 16, 8.0), (32, 16, 16, 5.0)]
        util = np.mean([x * y * z / ms for x, y, z, ms in rows[:4]])
        assert ask(surface(rows), 16, 16, 16) == pytest.approx(16**3 / util, rel=1e-12)

    def test_leaves_without_latency_anchor_nothing(self):
        assert ask(surface([(1, 1, 0.0), (1, 2, 2.0)]), 4, 4) == 16.0
        assert math.isnan(ask(surface([(1, 1, 0.0), (1, 2, 0.0)]), 4, 4))


class TestPower:
    def test_linear_inside_and_carried_outside(self):
        curve = surface([(10, 2.0), (20, 4.0)], sol=lambda x: x, power=[100, 200])
        got = curve.at(np.array([10.0, 15.0, 40.0]))
        assert got.energy.tolist() == [200.0, 450.0, 1600.0]

    def test_absent_without_a_power_column(self):
        assert CURVE.at(np.array([10.0])).energy is None


@st.composite
def ragged(draw):
    keys = st.sets(st.integers(0, 40), min_size=1, max_size=4)
    rows = [
        (x, y, z, draw(st.floats(0.01, 100)))
        for x in sorted(draw(keys))
        for y in sorted(draw(keys))
        for z in sorted(draw(keys))
    ]
    points = draw(st.lists(st.tuples(*[st.integers(0, 60)] * 3), min_size=1, max_size=12))
    return surface(rows, sol=lambda x, y, z: x * y + z, sqrt_axis=draw(st.sampled_from([None, 0, 1, 2]))), points


@given(ragged())
def test_arrays_answer_as_their_points_do(case):
    surface, points = case
    together = surface.at(*(np.array(axis, float) for axis in zip(*points, strict=True))).ms
    np.testing.assert_array_equal(together, [ask(surface, *point) for point in points])


@given(ragged())
def test_resampling_changes_no_answer(case):
    """Asked with an array or one number for the outer axis, a surface answers as its unresampled chain does."""
    surface, points = case
    for x in {point[0] for point in points}:
        rest = [np.array(axis, float) for axis in zip(*(p[1:] for p in points if p[0] == x), strict=True)]
        column = np.full(len(rest[0]), float(x))
        chained = surface._chain((column, *rest)).ms
        np.testing.assert_allclose(surface.at(column, *rest).ms, chained, rtol=1e-12)
        np.testing.assert_allclose(surface.at(float(x), *rest).ms, chained, rtol=1e-12)
        one = np.array([surface.one(float(x), *map(float, point)) for point in zip(*rest, strict=True)])
        known = ~np.isnan(one)
        np.testing.assert_allclose(one[known], chained[known], rtol=1e-12)


@given(ragged())
def test_measured_leaves_come_back_verbatim(case):
    surface, _ = case
    np.testing.assert_array_equal(surface.at(*surface.grid.floats).ms, surface.grid.ms)
