"""What a pass model learns: the same from the same, whatever the order of ranks; copies and restored stores; guards."""

from __future__ import annotations

import random

import numpy as np
import pytest
from perfcast_engine.errors import InvalidField, PerfDataMissing
from perfcast_planning.planner import pass_model
from perfcast_planning.planner.capacity import CapacityRequest, capacity
from perfcast_planning.planner.engine_work import EngineLimits, EngineRole
from perfcast_planning.planner.observed import Priced, RankWork
from perfcast_planning.planner.pass_model import LearningOptions, PassModel
from perfcast_planning.planner.samples import Samples
from perfcast_planning.planner.telemetry import Iterations, Kind, RankRecord


class Straight:
    """Steps whose time is a straight line in the counts; passes of exactly ``missing`` decodes have no data."""

    missing = -1

    def observed(self, work: RankWork) -> Priced:
        busy = (work.prefill_tokens > 0) | (work.decode_requests > 0)
        ms = busy * (5 + 0.03 * work.prefill_tokens + 0.2 * work.decode_requests + 1e-5 * work.decode_kv_tokens)
        gone = work.decode_requests == self.missing
        error = PerfDataMissing("no data", op="generation_attention")
        return Priced(np.where(gone, np.nan, ms), dict.fromkeys(np.flatnonzero(gone).tolist(), error))


@pytest.fixture(autouse=True)
def straight(monkeypatch):
    monkeypatch.setattr(pass_model, "observed", Straight.observed)


def corrected(**options) -> PassModel:
    return PassModel(LearningOptions(**options), Straight())  # type: ignore[arg-type]


def random_iterations(seed: int, count: int, ranks: int = 3) -> list[list[RankRecord]]:
    rng = random.Random(seed)
    iterations = []
    for _ in range(count):
        iteration = []
        for rank in range(ranks):
            tokens, decodes = rng.choice([0, 0, 512, 4000]), rng.choice([0, 4, 40, 200])
            record = RankRecord(
                prefill_requests=int(tokens > 0), prefill_tokens=tokens, decode_requests=decodes,
                decode_kv_tokens=decodes * rng.choice([100, 1000]), wall_time_s=rng.uniform(0.004, 0.2),
                dp_rank=rank,
            )  # fmt: skip
            iteration.append(record)
        iterations.append(iteration)
    return iterations


def state_of(model: PassModel) -> list[tuple]:
    return [store.told() for store in model.stores.values()]


QUERIES = Iterations.of([[record] for iteration in random_iterations(99, 50) for record in iteration])


@pytest.mark.parametrize("build", [corrected, lambda: PassModel(LearningOptions())])
def test_the_same_records_leave_the_same_state_in_any_order_of_ranks_and_however_they_are_sent(build):
    iterations = random_iterations(1, 400)
    rng = random.Random(2)
    one, other = build(), build()
    one.tune(Iterations.of(iterations))
    for iteration in iterations:
        other.tune(Iterations.of([rng.sample(iteration, len(iteration))]))
    assert state_of(one) == state_of(other)
    np.testing.assert_array_equal(one.estimate(QUERIES), other.estimate(QUERIES))


def test_equally_heavy_ranks_count_by_their_number_and_not_by_their_place():
    prefill = RankRecord(prefill_requests=1, prefill_tokens=1100, wall_time_s=0.1, dp_rank=0)
    decode = RankRecord(decode_requests=100, decode_kv_tokens=1000, wall_time_s=0.1, dp_rank=1)
    for ranks in ([prefill, decode], [decode, prefill]):
        model = corrected()
        model.tune(Iterations.of([ranks]))
        assert [len(model.stores[kind]) for kind in Kind] == [0, 1, 0]


def test_a_copy_learns_on_its_own_and_a_restored_store_goes_on_the_same():
    for build in (corrected, lambda: PassModel(LearningOptions())):
        first = build()
        first.tune(Iterations.of(random_iterations(3, 200)))
        before = state_of(first.copy())
        second, third = first.copy(), build()
        for kind, store in first.stores.items():
            third.restore(kind, store.told())
        more = Iterations.of(random_iterations(4, 100))
        second.tune(more)
        third.tune(more)
        assert state_of(first) == before
        assert state_of(second) == state_of(third) != before
        np.testing.assert_array_equal(second.estimate(QUERIES), third.estimate(QUERIES))


def test_an_iteration_without_data_raises_after_the_earlier_ones_were_learned():
    good = RankRecord(decode_requests=4, decode_kv_tokens=400, wall_time_s=0.01)
    model = corrected()
    model.steps.missing = 13  # type: ignore[union-attr]
    with pytest.raises(PerfDataMissing):
        model.tune(Iterations.of([[good], [good._replace(decode_requests=13)], [good]]))
    assert len(model.stores[Kind.DECODE]) == 1


@pytest.mark.parametrize(
    ("features", "values", "lower", "upper"),
    [
        ([(1.0, 2.0)], [], None, None),
        ([(1.0, 2.0)], [3.0], None, None),
        ([(-1.0, 2.0)], [1.0], None, None),
        ([(1.0, 2.0)], [float("nan")], None, None),
        ([(1.0, 2.0)], [1.0], (1.0, 2.0), (1.0, 2.0)),
        ([(1.0, 2.0)] * 65, [1.0] * 65, None, None),
    ],
)
def test_a_store_takes_over_only_what_it_could_hold(features, values, lower, upper):
    with pytest.raises(InvalidField):
        corrected().restore(Kind.DECODE, Samples(features, values, lower, upper))


def test_a_regression_takes_over_bounds_that_hold_its_samples():
    model = PassModel()
    with pytest.raises(InvalidField):
        model.restore(Kind.PREFILL, Samples([(5.0,)], [1.0]))
    with pytest.raises(InvalidField):
        model.restore(Kind.PREFILL, Samples([(5.0,)], [1.0], (6.0,), (7.0,)))
    model.restore(Kind.PREFILL, Samples([(5.0,)], [1.0], (1.0,), (7.0,)))


@pytest.mark.parametrize("wrong", [0.3, 3.0])
@pytest.mark.parametrize("role", list(EngineRole))
def test_the_first_samples_move_no_capacity_by_more_than_the_cold_start_factor(role, wrong):
    limits, request = EngineLimits(), CapacityRequest(isl=1000, osl=100, itl_s=0.05 if role.decodes else None)
    model = corrected(cold_start_factor=1.15)
    before = capacity(model, role, limits, request)
    assert before is not None
    rng = random.Random(5)
    moved = set()
    for sample in range(1, 30):
        tokens, decodes = 1 + rng.randrange(8000) * role.prefills, rng.randrange(14, 400) * role.decodes
        counts = RankWork(*(np.array([float(c)]) for c in (1, tokens * role.prefills, 0, decodes, decodes * 1050)))
        native = Straight().observed(counts).ms[0]
        record = RankRecord(
            int(role.prefills), tokens * role.prefills, 0, decodes, decodes * 1050, native * wrong / 1000
        )
        model.tune(Iterations.of([[record]]))
        after = capacity(model, role, limits, request)
        assert after is not None
        if sample < model.options.cold_start_observations:
            assert before.rps / 1.15 <= after.rps <= before.rps * 1.15
            moved.add(after.held_back or after.rps != before.rps)
    assert moved == {False, True}
    assert not after.held_back


def test_a_model_that_keeps_few_observations_is_warm_with_as_many():
    model = corrected(cold_start_factor=1.15, max_observations=6)
    for sample in range(1, 9):
        model.tune(Iterations.of([[RankRecord(1, 100 * sample, wall_time_s=1.0)]]))
        assert model.is_cold is (sample < 6)
