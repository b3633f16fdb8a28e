"""Fronts and picks against plain loops over spec/06 section 11."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perfcast_engine.errors import InvalidField
from perfcast_engine.profiles import CORRECTED, REFERENCE
from perfcast_planning.search.pick import (
    SCORE,
    Load,
    Objective,
    closest,
    cluster_throughput,
    front,
    pick,
    pick_by_objective,
    pick_for_load,
)
from perfcast_planning.serving.rows import Rows
from perfcast_planning.serving.workload import Targets

TARGETS = Targets(ttft_ms=300, tpot_ms=10)
values = st.integers(1, 12)
points = st.lists(st.tuples(values, values, values, st.sampled_from([1, 2, 3, 4, 8])), min_size=1, max_size=30)


def table(drawn):
    tpot, score, ttft, gpus = (np.array(column, float) for column in zip(*drawn, strict=True))
    return Rows(
        {
            "ttft_ms": ttft * 50,
            "tpot_ms": tpot * 2,
            "request_latency_ms": ttft * 50 + tpot * 200,
            "tokens_per_s_per_user": 1000 / (tpot * 2),
            "tokens_per_s_per_gpu": score * 10,
            "requests_per_s": score * gpus / 10,
            "concurrency": score,
            "gpus": gpus,
        }
    )


@settings(deadline=None)
@given(points, st.booleans())
def test_the_front_is_the_front(drawn, whole):
    rows = table(drawn)
    targets = Targets(300, request_latency_ms=1500) if whole else TARGETS
    score = cluster_throughput(rows, 16)
    speed = -rows["request_latency_ms"] if whole else rows["tokens_per_s_per_user"]
    kept = front(rows, score, targets)
    assert (np.diff(rows["request_latency_ms" if whole else "tokens_per_s_per_user"][kept]) > 0).all()
    for i in range(len(rows)):
        beaten = (speed >= speed[i]) & (score >= score[i]) & ((speed > speed[i]) | (score > score[i]))
        twin = (speed[kept] == speed[i]) & (score[kept] == score[i])
        assert twin.any() == (not beaten.any())


def test_a_strict_front_leaves_out_what_is_too_slow():
    rows = table([(2, 9, 1, 1), (6, 12, 1, 1)])
    assert len(front(rows, rows["tokens_per_s_per_gpu"], TARGETS)) == 2
    assert front(rows, rows["tokens_per_s_per_gpu"], TARGETS, strict=True).tolist() == [0]


def test_idle_gpus_of_a_budget_count():
    rows = table([(1, 10, 1, 3), (1, 9, 1, 4), (1, 9, 1, 8)])
    assert cluster_throughput(rows, 4).tolist() == pytest.approx([75, 90, 0])
    assert cluster_throughput(rows, None).tolist() == pytest.approx([100, 90, 90])


@settings(deadline=None)
@given(points)
def test_no_pick_violates_a_target(drawn):
    rows = table(drawn)
    best = pick(rows, np.arange(len(rows)) % 3, TARGETS, 8, 5, CORRECTED)
    meets = (rows["ttft_ms"] <= 300) & (rows["tpot_ms"] <= 10)
    assert best.eligible == meets.any()
    assert len(best.rows) == len(set((np.arange(len(rows)) % 3)[meets]))
    if best.eligible:
        assert best.score == cluster_throughput(rows, 8)[meets].max()
        assert (np.diff(best.rows[SCORE]) <= 0).all()


def test_the_reference_picks_what_violates_and_says_so():
    rows = table([(9, 9, 1, 1), (7, 3, 1, 1)])
    best = pick(rows, np.array([0, 1]), TARGETS, 8, 5, REFERENCE)
    assert best.rows["tpot_ms"].tolist() == [14, 18]
    assert not best.eligible
    assert len(pick(rows, np.array([0, 1]), TARGETS, 8, 5, CORRECTED).rows) == 0
    slow_start = table([(1, 5, 12, 1)])
    assert not pick(slow_start, np.array([0]), TARGETS, 8, 5, REFERENCE).eligible


def test_the_closest_row_and_what_it_misses():
    rows = table([(6, 9, 12, 1), (6, 9, 6, 1), (20, 9, 1, 1)])
    index, missed = closest(rows, TARGETS)
    assert index == 1
    assert [(v.target, v.limit, v.value) for v in missed] == [("tpot_ms", 10, 12)]
    assert missed[0].excess == pytest.approx(0.2)


def test_a_load_is_matched_on_the_fewest_gpus():
    rows = table([(1, 4, 1, 4), (1, 6, 1, 8), (1, 2, 1, 1)])  # 1.6, 4.8 and 0.2 requests per second
    best = pick_for_load(rows, np.arange(3), TARGETS, Load(request_rate=4.0), 5, CORRECTED)
    assert best.rows["gpus_needed"].tolist() == [8, 12, 20]
    assert best.rows["replicas"].tolist() == [1, 3, 20]
    assert best.score == 1 / 8
    by_users = pick_for_load(rows, np.arange(3), TARGETS, Load(concurrency=12.0), 5, CORRECTED)
    assert by_users.rows["gpus_needed"].tolist() == [6, 12, 16]


def test_a_load_beyond_the_ceiling_is_served_in_part():
    rows = table([(1, 4, 1, 4), (1, 6, 1, 8)])
    best = pick_for_load(rows, np.arange(2), TARGETS, Load(request_rate=100.0, max_gpus=8), 5, CORRECTED)
    assert best.rows["gpus_needed"].tolist() == [8, 8]
    assert best.rows["load_served_pct"].tolist() == [4.8, 3.2]
    assert best.rows[SCORE].tolist() == [60, 40]
    assert best.score == 60
    small = Load(request_rate=1.0, max_gpus=4)
    assert not len(pick_for_load(table([(1, 6, 1, 8)]), np.array([0]), TARGETS, small, 5, CORRECTED).rows)


def test_loads_are_checked():
    with pytest.raises(InvalidField, match="exactly one"):
        Load()
    with pytest.raises(InvalidField, match="exactly one"):
        Load(request_rate=1.0, concurrency=1.0)


def test_objectives_ignore_the_targets():
    rows = table([(6, 9, 12, 1), (1, 2, 1, 1), (3, 5, 1, 1)])
    fast = pick_by_objective(rows, np.arange(3), Objective.LATENCY, None, 2)
    assert fast.rows["tpot_ms"].tolist() == [2, 6]
    assert pick_by_objective(rows, np.arange(3), Objective.THROUGHPUT, None, 1).rows["tpot_ms"].tolist() == [12]
