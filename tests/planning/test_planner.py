"""Planner questions against a scalar transcription, and the edges of each."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from perfcast_engine.errors import InvalidField
from perfcast_planning.planner.capacity import CapacityRequest, Objective, OnInfeasible, capacity
from perfcast_planning.planner.engine_work import EngineLimits, EngineRole, RankLoads
from perfcast_planning.planner.observed import Priced
from perfcast_planning.planner.pass_model import LearningOptions, PassModel
from perfcast_planning.planner.queries import Outlook, Scenario, outlooks
from perfcast_planning.planner.telemetry import Iterations, RankRecord

from tests.planning import naive_planner


class SawTooth:
    """A synthetic, non-monotone pass-time function with the interface of a PassModel."""

    options, is_cold = LearningOptions(), False

    def rank_ms(self, prompts, tokens, decodes, kv):
        busy = (tokens > 0) | (decodes > 0)
        tooth = 1 + 0.3 * ((tokens // 256 + decodes // 7) % 3)
        return busy * tooth * (2.0 + 0.031 * tokens + 0.6 * prompts + 0.05 * decodes + 1.7e-5 * kv)

    def price(self, iterations: Iterations) -> Priced:
        ms, work = np.zeros(iterations.count), iterations.work
        parts = (work.prefill_requests, work.prefill_tokens, work.decode_requests, work.decode_kv_tokens)
        np.maximum.at(ms, iterations.owner, self.rank_ms(*parts))
        return Priced(ms, {})

    def tau(self, rows):
        return max(float(self.rank_ms(*map(np.float64, row))) for row in rows) / 1000


MODEL = SawTooth()


def random_request(rng: random.Random) -> CapacityRequest:
    def target(scale):
        return rng.choice([None, None, rng.random() * scale])

    return CapacityRequest(
        isl=rng.choice([0, 1, 37, 500, 3000, 20000, rng.randrange(1, 60000)]),
        osl=rng.choice([0, 1, 2, 150, 1000, rng.randrange(1, 5000)]),
        ttft_s=target(2.0),
        itl_s=target(0.2),
        e2e_s=target(60.0),
        accept_length=rng.choice([1.0, 0.3, 1.8, math.nan, 3.0]),
        kv_hit_rate=rng.choice([None, 0.0, 0.5, 0.97, -1.0, math.nan]),
        objective=rng.choice(list(Objective)),
        on_infeasible=OnInfeasible.MAX_RPS,
        legacy_rank_split=rng.random() < 0.3,
        legacy_single_request=rng.random() < 0.5,
    )


def random_limits(rng: random.Random) -> EngineLimits:
    return EngineLimits(
        rng.choice([1, 2, 64, 2048, 8192, 30000]),
        rng.choice([1, 16, 256, 512, 3000]),
        rng.choice([1, 5000, 200_000, 2_000_000]),
        rng.choice([1, 1, 2, 8]),
    )


def test_capacity_equals_its_scalar_transcription_on_2000_random_inputs():
    rng = random.Random(20261130)
    answered = 0
    for _ in range(2000):
        role, limits, request = rng.choice(list(EngineRole)), random_limits(rng), random_request(rng)
        wanted = naive_planner.capacity(MODEL.tau, role, limits, request)
        got = capacity(MODEL, role, limits, request)
        if wanted is None:
            assert got is None, (role, limits, request)
            continue
        answered += 1
        batch, values, eligible = wanted
        assert got is not None, (role, limits, request)
        if request.objective is Objective.LATENCY and not eligible:
            continue  # max_rps ranks the infeasible by rate under either objective
        assert (got.batch_total, got.eligible) == (batch, eligible), (role, limits, request)
        for name in ("ttft_s", "itl_s", "e2e_s", "rps"):
            assert getattr(got, name) == pytest.approx(values.get(name), rel=1e-12) if name in values else True
    assert answered > 800


def random_ranks(rng: random.Random, count: int) -> list[dict[str, int]]:
    ranks = []
    for _ in range(count):
        decodes = rng.randrange(40)
        ranks.append(
            {
                "queued_prefill_requests": rng.randrange(4),
                "queued_prefill_tokens": rng.choice([0, 0, rng.randrange(60000)]),
                "decode_requests": decodes,
                "decode_kv_tokens": decodes * rng.randrange(5000),
            }
        )
    return ranks


def loads_of(engines: list[list[dict[str, int]]]) -> RankLoads:
    names = engines[0][0]
    columns = {name: [[rank[name] for rank in ranks] for ranks in engines] for name in names}
    return RankLoads.of(len(engines), len(engines[0]), **columns)


def test_drain_equals_its_scalar_transcription_on_2000_random_engines():
    rng = random.Random(7)
    for _ in range(40):
        role, limits = rng.choice(list(EngineRole)), random_limits(rng)
        engines = [random_ranks(rng, limits.attention_dp) for _ in range(50)]
        (told,) = outlooks(MODEL, role, limits, loads_of(engines))
        assert (told.drain_s is None) == (role is EngineRole.DECODE)
        if told.drain_s is not None:
            wanted = [naive_planner.drain(MODEL.tau, role, limits, ranks) for ranks in engines]
            assert told.drain_s.tolist() == pytest.approx(wanted, rel=1e-12)


def outlook(role: EngineRole, limits: EngineLimits, scenario: Scenario = Scenario(), usual=(0, 0), **ranks) -> Outlook:  # noqa: B008
    (told,) = outlooks(MODEL, role, limits, RankLoads.of(1, limits.attention_dp, **ranks), [scenario], *usual)
    return told


def test_infeasible_targets_give_the_closest_candidate_and_name_what_it_violates():
    limits = EngineLimits()
    request = CapacityRequest(isl=3000, osl=150, itl_s=0.001)
    closest = capacity(MODEL, EngineRole.DECODE, limits, request)
    assert closest is not None
    assert (closest.batch_total, closest.eligible, closest.violated) == (1, False, ("itl_s",))
    highest = capacity(MODEL, EngineRole.DECODE, limits, replace(request, on_infeasible=OnInfeasible.MAX_RPS))
    assert highest is not None and highest.batch_total > 100 and not highest.eligible
    assert capacity(MODEL, EngineRole.DECODE, limits, replace(request, on_infeasible=OnInfeasible.NONE)) is None


def test_a_target_on_what_the_role_does_not_produce_makes_it_ineligible():
    answer = capacity(MODEL, EngineRole.PREFILL, EngineLimits(), CapacityRequest(isl=100, osl=10, itl_s=1.0))
    assert answer is not None and not answer.eligible and answer.violated == ("itl_s",)


def test_lone_decode_on_many_ranks_has_capacity_unless_kv_is_split_as_the_reference_does():
    limits = EngineLimits(attention_dp=8, max_num_seqs=1)
    request = CapacityRequest(isl=1000, osl=100)
    assert capacity(MODEL, EngineRole.DECODE, limits, request) is not None
    assert capacity(MODEL, EngineRole.DECODE, limits, replace(request, legacy_rank_split=True)) is None


def test_decode_itl_adds_the_usual_prefill_only_where_none_is_scheduled():
    decoding = {"decode_requests": 10, "decode_kv_tokens": 10_000}
    alone = outlook(EngineRole.DECODE, EngineLimits(), usual=(512.0, 0.5), **decoding)
    assert alone.itl_s == pytest.approx(MODEL.tau([(0, 0, 10, 10_000)]))
    beside = outlook(EngineRole.AGGREGATED, EngineLimits(), usual=(511.2, 0.5), **decoding)
    assert beside.itl_s == pytest.approx(MODEL.tau([(1, 512, 10, 10_000)]))
    scheduled = {"prefill_requests": 2, "prefill_tokens": 64, **decoding}
    own = outlook(EngineRole.AGGREGATED, EngineLimits(), usual=(512.0, 1.0), **scheduled)
    assert own.itl_s == pytest.approx(MODEL.tau([(2, 64, 10, 10_000)]))
    average = outlook(
        EngineRole.AGGREGATED, EngineLimits(), Scenario(itl_with_scheduled_prefill=False), (512.0, 1.0), **scheduled
    )
    assert average.itl_s == pytest.approx(MODEL.tau([(1, 512, 10, 10_000)]))


def test_scenarios_scale_discount_and_append_before_they_round_up():
    ranks = {
        "queued_prefill_requests": [[1, 0]],
        "queued_prefill_tokens": [[1001, 0]],
        "queued_decode_requests": [[2, 0]],
        "queued_decode_kv_tokens": [[300, 0]],
        "decode_requests": [[3, 5]],
        "decode_kv_tokens": [[900, 2500]],
    }
    limits = EngineLimits(attention_dp=2)
    scenario = Scenario(
        queue_scale=1.5, kv_hit_rate=0.5, next_prompt_tokens=100.0, drain_beside_queued_decodes=True,
        decode_scale=2.0, itl_with_queued_decodes=True, itl_with_queued_prompts=True, next_decode_kv_tokens=50.5,
    )  # fmt: skip
    told = outlook(EngineRole.AGGREGATED, limits, scenario, **ranks)
    # (1001 * 1.5 + 100) / 2 = 800.75 tokens of 2.5 requests beside (3 + 2) * 2 decodes; the other rank has the next one
    assert told.drain_s == pytest.approx(MODEL.tau([(3, 801, 10, 2400), (1, 50, 10, 5000)]))
    assert told.itl_s == pytest.approx(MODEL.tau([(0, 0, 13, 4453), (0, 0, 11, 5051)]))


def test_scenarios_of_many_engines_are_what_each_is_alone():
    rng = random.Random(3)
    limits = EngineLimits(2048, attention_dp=4)
    engines = [random_ranks(rng, 4) for _ in range(100)]
    scenarios = [Scenario(), Scenario(queue_scale=1.25, next_prompt_tokens=700), Scenario(next_decode_kv_tokens=900)]
    together = outlooks(MODEL, EngineRole.AGGREGATED, limits, loads_of(engines), scenarios, 300.0, 1.0)
    for index, ranks in enumerate(engines):
        alone = outlooks(MODEL, EngineRole.AGGREGATED, limits, loads_of([ranks]), scenarios, 300.0, 1.0)
        for one, all_ in zip(alone, together, strict=True):
            assert (one.drain_s[0], one.itl_s[0]) == (all_.drain_s[index], all_.itl_s[index])


def test_idle_engines_drain_at_once_and_an_unready_model_says_so():
    loads = RankLoads.of(3, 2)
    (told,) = outlooks(MODEL, EngineRole.PREFILL, EngineLimits(attention_dp=2), loads)
    assert told.drain_s.tolist() == [0, 0, 0] and told.itl_s is None
    (told,) = outlooks(PassModel(), EngineRole.AGGREGATED, EngineLimits(), RankLoads.of(1, 1, decode_requests=2))
    assert told.drain_s.tolist() == [0] and np.isnan(told.itl_s).all()
    assert capacity(PassModel(), EngineRole.DECODE, EngineLimits(), CapacityRequest(isl=10, osl=10)) is None


@pytest.mark.parametrize(
    "build",
    [
        lambda: EngineLimits(max_num_seqs=0),
        lambda: EngineLimits(max_kv_tokens=2**32),
        lambda: CapacityRequest(isl=-1, osl=1),
        lambda: CapacityRequest(isl=1.5, osl=1),
        lambda: CapacityRequest(isl=1, osl=1, ttft_s=math.nan),
        lambda: CapacityRequest(isl=1, osl=1, accept_length=2.0**32),
        lambda: Iterations.of([[RankRecord()], [RankRecord(decode_requests=-1)]]),
        lambda: Iterations.of([[RankRecord(1, 2**32)]]),
        lambda: Iterations.of([[RankRecord(0, 0, 5)]]),
        lambda: Iterations.of([[RankRecord(decode_kv_tokens=5)]]),
        lambda: RankLoads.of(1, 1, decode_requests=-1),
        lambda: RankLoads.of(1, 1, decode_kv_tokens=0.5),
        lambda: RankLoads.of(1, 1, decode_kv_tokens=math.nan),
        lambda: Scenario(queue_scale=-1.0),
        lambda: Scenario(next_prompt_tokens=math.inf),
    ],
)
def test_malformed_questions_name_their_field(build):
    with pytest.raises(InvalidField) as error:
        build()
    assert error.value.details["field"] in str(error.value)
