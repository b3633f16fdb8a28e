"""Step times that rise strictly: bridged dips, exact records, holes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfcast_planning.serving.rising import batches_to, rising

GRID = np.array([1.0, 2.0, 4.0, 8.0])


def test_records_are_kept_and_dips_bridged():
    times = np.array([[10.0, 20.0, 15.0, 50.0]])
    assert rising(GRID, times, GRID).tolist() == [10, 20, 30, 50]
    assert rising(GRID, times, np.array([3.0, 6.0])).tolist() == [25, 40]


def test_beyond_the_last_record_the_mean_slope_goes_on():
    assert rising(GRID, np.array([[10.0, 30.0, 20.0, 25.0]]), GRID).tolist() == [10, 30, 70, 150]


def test_holes_stay_holes():
    times = np.array([[10.0, np.nan, 30.0, np.nan]])
    found = rising(GRID, times, np.array([1.0, 2.0, 3.0, 6.0]))
    assert np.isnan(found).tolist() == [False, True, False, True]
    assert np.isnan(rising(GRID, np.full((1, 4), np.nan), GRID)).all()


def test_rows_are_read_each_in_its_own():
    times = np.array([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]])
    assert rising(GRID, times, np.array([2.0, 2.0, 8.0]), np.array([1, 0, 1])).tolist() == [20, 2, 40]


@given(
    st.lists(st.integers(1, 9999).map(float), min_size=60, max_size=60),
    st.lists(st.integers(1, 512), min_size=2, max_size=20),
)
def test_more_requests_never_take_less(times, batches):
    grid = batches_to(512)
    curve = np.resize(np.array(times), len(grid))[None]
    at = np.unique(np.array(batches, float))
    found = rising(grid, curve, at)
    if np.isfinite(found).all() and (np.diff(curve[0]) > 0).any():
        assert (np.diff(found) > 0).all() or len(np.unique(curve)) == 1 or curve[0].argmax() == 0
    alone = [rising(grid, curve, at[i : i + 1])[0] for i in range(len(at))]
    assert alone == found.tolist()


def test_the_grid_reaches_any_batch():
    assert batches_to(7)[-1] == 512
    assert batches_to(513).tolist()[-2:] == [512, 576]
    assert batches_to(5000)[-1] >= 5000
    with pytest.raises(IndexError):
        rising(GRID, np.ones((1, 4)), np.array([9.0]))
