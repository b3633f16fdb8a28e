"""The resolution chain of measured grids (spec/02 section 3)."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfcast_engine.interp.grid import Grid
from perfcast_engine.interp.surface import Everywhere, Surface

from tests.engine import naive_grid


def surface(rows, sol=lambda *c: math.prod(c), sqrt_axis=None, power=None):
    coords = [np.array(column, np.int64) for column in zip(*(row[:-1] for row in rows), strict=True)]
    ms = np.array([float(row[-1]) for row in rows])
    return Surface(Grid(tuple(coords), ms, None if power is None else np.array(power, float)), sol, sqrt_axis)


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

    def test_what_is_asked_after_another_is_held_as_alone(self):
        rng = np.random.default_rng(4)
        rows = [(x, y, z, x * y * z * (1 + rng.random())) for x in (1, 4, 8) for y in (1, 2, 4, 8) for z in (1, 2, 4)]
        wide, alone = surface(rows), surface([(*at, ms * rng.random()) for *at, ms in rows if at[0] < 8 or at[2] < 4])
        after = Surface(alone.grid, alone.sol, beside=wide)
        near, far = rng.uniform(9, 300, (2, 3, 50)) * [[[0.005], [1], [0.005]], [[2], [1], [2]]]
        for asked in (near, far, np.hstack([near, far])):  # far ones lean on leaves that were not measured here
            for told in (asked, asked[:, ::-1], asked, asked):
                wide.at(*told)
                np.testing.assert_array_equal(after.at(*asked).ms, alone.at(*asked).ms)
            np.testing.assert_array_equal(after.at(*asked).ms, alone.at(*asked).ms)

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


def roofline(*coords):
    return math.prod(coords[1:], start=1.0) * coords[0] + sum(coords)


@st.composite
def ragged(draw):
    """Rows of a ragged grid, the axis to root, and points inside and outside of it."""
    axes = draw(st.integers(1, 4))
    keys = st.sets(st.integers(0, 40), min_size=1, max_size=4 if axes < 4 else 2)

    def below(depth):
        if depth == axes:
            return [(draw(st.floats(0.01, 100)),)]
        return [(key, *rest) for key in sorted(draw(keys)) for rest in below(depth + 1)]

    points = draw(st.lists(st.tuples(*[st.integers(0, 60)] * axes), min_size=1, max_size=8))
    return below(0), draw(st.sampled_from([None, *range(axes)])), points


def same(got, expected):
    """Equal but for rounding."""
    np.testing.assert_allclose(got, expected, rtol=1e-9)


@given(ragged())
def test_answers_are_those_of_the_chain_point_by_point(case):
    rows, sqrt_axis, points = case
    whole = surface(rows, roofline, sqrt_axis)
    expected = np.array([naive_grid.resolve(rows, point, roofline, sqrt_axis) for point in points])
    columns = [np.array(axis, float) for axis in zip(*points, strict=True)]
    same(whole.at(*columns).ms, expected)
    same([ask(whole, *point) for point in points], expected)
    blend = whole.sheets().blend
    if blend is not None:
        one, many = np.array([blend.one(*point) for point in points]), blend.at(*(c.astype(int) for c in columns))
        same(one[~np.isnan(one)], expected[~np.isnan(one)])
        same(many, one)
    for i, point in enumerate(points if len(columns) > 1 else ()):
        same(whole.at(float(point[0]), *(np.array([float(c)]) for c in point[1:])).ms, expected[i])
        if len(columns) == 3:
            same(Everywhere((), whole, float(point[0])).one(*point[1:]), expected[i])


@given(ragged())
def test_measured_leaves_come_back_verbatim(case):
    rows, sqrt_axis, _ = case
    whole = surface(rows, roofline, sqrt_axis)
    np.testing.assert_array_equal(whole.at(*whole.grid.floats).ms, whole.grid.ms)
