"""Latencies survive coding bit by bit, whatever they are."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from perfcast_systems.values import FORMS, Reals, put_together, take_apart


def returned(values: Reals) -> Reals:
    exact = take_apart(values)
    return put_together(exact.forms, exact.form, exact.whole, exact.rest)


def same_bits(left: Reals, right: Reals) -> bool:
    return np.array_equal(left.view(np.int64), right.view(np.int64))


@given(st.lists(st.floats(allow_nan=False, width=64), max_size=50))
def test_any_floats_come_back(values: list[float]):
    given_values = np.array(values, np.float64)
    assert same_bits(returned(given_values), given_values)


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, len(FORMS) - 1)), min_size=1, max_size=50))
def test_values_of_every_form_come_back(rows: list[tuple[int, int]]):
    values = np.array([FORMS[form].value(np.array([float(whole)]))[0] for whole, form in rows])
    assert same_bits(returned(values), values)


def test_timer_readings_and_rounded_figures_need_no_raw_values():
    ticks = np.arange(1, 4000, dtype=np.float64) * 32
    readings = (ticks / 1e6).astype(np.float32).astype(np.float64) / 5 / 5
    exact = take_apart(np.concatenate([readings, np.round(ticks / 7e3, 4)]))
    assert len(exact.rest) == 0 and len(exact.forms) == 2


def test_negative_zero_is_not_zero():
    values = np.array([0.0, -0.0, -1.5])
    assert same_bits(returned(values), values)
