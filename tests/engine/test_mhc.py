"""Hyper-connections (spec/04 section 5)."""

import pytest
from perfcast_engine.answer import Points, Source, Tier
from perfcast_engine.errors import EmpiricalBasisMissing, InvalidField, PerfDataMissing
from perfcast_engine.ops.dsv4 import Mhc
from perfcast_engine.tables.database import Mode

from tests.engine.handmade import database, table
from tests.engine.pointwise import assert_pointwise

ROWS = [("pre", 4, 4096, 64, 0.2), ("pre", 4, 4096, 128, 0.4), ("post", 4, 4096, 64, 0.1), ("post", 4, 4096, 128, 0.3)]
MEASURED = table("mhc_module", "op_name hc_mult hidden_size num_tokens", ROWS)


def mhc(half="pre", **fields):
    return Mhc(**{"name": "mhc", "half": half, "hc_mult": 4, "hidden": 4096, "architecture": "x", **fields})


def ms(op, db, tokens):
    return float(op.evaluate(db, Points.of(1, 1, 0, tokens)).raise_first().ms[0])


def by_hand(tokens, pre, post):
    m, h, k = 4, 4096, 20
    d, mixes = m * h, (2 + m) * m
    ops = pre * 2 * (2 * tokens * d * mixes + 3 * tokens * d + tokens * (m * m + 2 * m) * k + 2 * tokens * m * h)
    ops += post * 2 * (2 * tokens * m * m * h + 2 * tokens * m * h)
    moved = 2 * (mixes * d + mixes + 3) * 2 + 2 * tokens * d * 2 * (3 if pre and post else 2)
    moved += pre * 8 * tokens * (2 * m + m * m)
    return max(ops / 1e14, moved / 1e12) * 1000


@pytest.mark.parametrize("half, parts", [("pre", (1, 0)), ("post", (0, 1)), ("both", (1, 1))])
def test_roofline(half, parts):
    assert ms(mhc(half), database(mode=Mode.SOL), 1000) == pytest.approx(by_hand(1000, *parts), rel=1e-14)


def test_measured_halves_add_up():
    db = database(MEASURED)
    assert ms(mhc("pre"), db, 96) == pytest.approx(0.3)
    assert ms(mhc("both", scale=2.0), db, 64) == pytest.approx(2 * 0.3)


def test_beyond_the_curve_each_half_keeps_its_own_utilisation():
    expected = 0.4 * by_hand(1000, 1, 0) / by_hand(128, 1, 0) + 0.3 * by_hand(1000, 0, 1) / by_hand(128, 0, 1)
    assert ms(mhc("both"), database(MEASURED), 1000) == pytest.approx(expected)


def test_context_parallel_ranks_share_the_tokens():
    assert ms(mhc(seq_split=4), database(MEASURED), 253) == 0.2


def test_estimate():
    answer = mhc("both").evaluate(database(MEASURED, mode=Mode.EMPIRICAL), Points.of(1, 1, 0, 64))
    assert answer.ms[0] == pytest.approx(0.3)
    assert (answer.source[0], answer.tier[0]) == (Source.EMPIRICAL, Tier.EMPIRICAL)


def test_errors():
    with pytest.raises(PerfDataMissing, match="hidden_size was measured at 4096"):
        mhc(hidden=1234).price(database(MEASURED), Points.of(1, 1))
    with pytest.raises(EmpiricalBasisMissing):
        ms(mhc(hidden=1234), database(MEASURED, mode=Mode.HYBRID), 1)
    with pytest.raises(InvalidField):
        mhc("middle")


@pytest.mark.parametrize("mode", list(Mode))
def test_arrays_are_answered_point_by_point(mode):
    assert_pointwise(mhc("both"), database(MEASURED, mode=mode), Points.of(1, 1, 0, [1, 64, 65, 100, 128, 5000]))


def test_weights():
    assert mhc(hidden=7168, scale=61.0).weight_bytes() == 167909820.0
