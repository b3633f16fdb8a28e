"""Planner questions over the wire: the engine's own answers, refusals by name, one bad worker among good ones."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from perfcast.v1 import planner_pb2
from perfcast_client import Client, DecodeTrajectory, EngineConfig, Prefill, errors, planner
from perfcast_client.calls import Call
from perfcast_client.planner_types import Limits, RankLoad, RankPass, Scenario, TickGroup, WorkerLoad
from perfcast_engine import Predictor
from perfcast_planning.planner import capacity as own_capacity
from perfcast_planning.planner.engine_work import EngineLimits, EngineRole
from perfcast_planning.planner.pass_model import PassModel
from perfcast_server import sweeps, wire

from tests.planning.test_planner_examples import EXAMPLES
from tests.server.running import Running

A = EngineConfig(model="Qwen/Qwen3-32B", system="h200_sxm", backend="vllm", version="0.24.0", tp=4, profile="reference")
B = EngineConfig(
    model="Qwen/Qwen3-235B-A22B", system="h200_sxm", backend="trtllm", version="1.3.0rc20", attn_dp=8, moe_ep=8,
    profile="reference",
)  # fmt: skip
ENGINES = {"A": A, "B": B}


@pytest.fixture(scope="module")
def client(served: Running) -> Iterator[Client]:
    with Client(served.address) as client:
        yield client


@pytest.mark.parametrize(("name", "role", "asked", "batch", "rps"), EXAMPLES)
def test_the_worked_examples_come_over_the_wire(client: Client, name, role, asked, batch, rps) -> None:
    asked = {key: "latency" if key == "objective" else value for key, value in asked.items()}
    call = planner.capacity(
        ENGINES[name], role=role.name.lower(), on_infeasible="max_rps", legacy_single_request=True, **asked
    )
    found = client.ask(call)
    assert found is not None and found.state_version == 0
    assert (found.batch_total, found.rps) == (batch, pytest.approx(rps, rel=1e-12))
    assert found.eligible == (not found.violated_targets)
    assert (found.ttft_s is None, found.itl_s is None) == (not role.prefills, not role.decodes)


def test_capacity_tells_its_candidates_and_what_no_candidate_meets(client: Client) -> None:
    found = client.ask(planner.capacity(A, isl=3000, osl=150, ttft_s=0.5, itl_s=0.005, candidates=True))
    assert found is not None and found.violated_targets == ("itl_s",) and not found.eligible
    columns = found.candidates
    assert set(columns) == {"batch_total", "rps", "ttft_s", "itl_s", "e2e_s"}
    worst = np.maximum(columns["ttft_s"] / 0.5, columns["itl_s"] / 0.005)
    assert found.batch_total == columns["batch_total"][worst.argmin()]
    assert client.ask(planner.capacity(A, isl=3000, osl=150, itl_s=0.005, on_infeasible="none")) is None
    assert client.ask(planner.capacity(A, isl=0, osl=150)) is None
    assert client.ask(planner.capacity(A, isl=3000, osl=0, role="prefill")) is not None


def test_limits_and_roles_are_those_of_the_engine_where_not_given(client: Client) -> None:
    found = client.ask(planner.capacity(dataclasses.replace(B, role="decode"), isl=1000, osl=100))
    engine = Predictor().engine(wire.engine_config(B.to_message(), 1 << 20))
    request = own_capacity.CapacityRequest(isl=1000, osl=100)
    model = PassModel(steps=engine.steps)
    own = own_capacity.capacity(model, EngineRole.DECODE, EngineLimits(attention_dp=8), request)
    assert found is not None and own is not None
    assert (found.batch_total, found.rps, found.ttft_s) == (own.batch_total, own.rps, None)
    small = client.ask(planner.capacity(B, role="decode", isl=1000, osl=100, limits=Limits(max_num_seqs=8)))
    assert small is not None and small.batch_total == 8


def test_drain_and_itl_are_sums_of_passes(client: Client) -> None:
    rank = RankLoad(2, 9000, decode_requests=40, decode_kv_tokens=120_000)
    passes = [
        [RankPass(2, 8192, 0, 40, 120_000)],
        [RankPass(2, 808, 0, 40, 120_000)],
        [RankPass(1, 300, 0, 40, 120_000)],
        [RankPass(0, 0, 0, 40, 120_000)],
    ]
    told = client.ask(planner.estimate_passes(A, passes))
    first, last, beside, alone = told.latency_ms / 1000
    assert told.engine is not None and told.engine.version == "0.24.0"
    assert client.ask(planner.queue_drain(A, [rank])).seconds == pytest.approx(first + last, rel=1e-12)
    assert client.ask(planner.decode_itl(A, [rank])).seconds == pytest.approx(alone, rel=1e-12)
    usual = planner.decode_itl(A, [rank], usual_prefill=(299.5, 0.25))
    assert client.ask(usual).seconds == pytest.approx(beside, rel=1e-12)
    assert client.ask(planner.queue_drain(A, [rank], role="decode")).seconds is None
    assert client.ask(planner.decode_itl(A, [rank], role="prefill")).seconds is None
    assert client.ask(planner.queue_drain(A, [RankLoad()])).seconds == 0.0


def test_ranks_come_in_any_order_and_must_all_be_there(client: Client) -> None:
    ranks = [RankLoad(1, 1000 * (number + 1), dp_rank=number) for number in range(8)]
    there = client.ask(planner.queue_drain(B, ranks)).seconds
    assert there == client.ask(planner.queue_drain(B, ranks[::-1])).seconds
    for bad in (ranks[:7], [*ranks[:7], ranks[0]], []):
        with pytest.raises(errors.InvalidRequest, match="ranks"):
            client.ask(planner.queue_drain(B, bad))
    with pytest.raises(errors.InvalidRequest, match=r"ranks\[0\].queued_prefill_tokens"):
        client.ask(planner.queue_drain(A, [RankLoad(1, -5)]))
    with pytest.raises(errors.InvalidRequest, match="without a request"):
        client.ask(planner.decode_itl(A, [RankLoad(decode_kv_tokens=5)]))
    with pytest.raises(errors.InvalidRequest, match="attention_dp"):
        client.ask(planner.queue_drain(A, [RankLoad()], limits=Limits(attention_dp=2)))


def test_one_tick_answers_every_worker_as_if_asked_alone(client: Client) -> None:
    workers = [
        WorkerLoad(
            f"w{number}",
            [
                RankLoad(1, 500 * number * (rank + 1), 0, 0, 0, 0, 0, 5 + rank, 9000 + number, dp_rank=rank)
                for rank in range(8)
            ],
            200.0,
            1.0,
        )
        for number in range(20)
    ]
    workers[7] = WorkerLoad("short", workers[7].ranks[:3])
    plain, more = Scenario(), Scenario(next_prompt_tokens=3000, next_decode_kv_tokens=3100, kv_hit_rate=0.5)
    groups = [
        TickGroup(engine=client.resolve(B), workers=workers, scenarios=[plain, more]),
        TickGroup(engine=A, workers=[WorkerLoad("a", [RankLoad(1, 100)])], role="prefill"),
        TickGroup(engine=dataclasses.replace(A, model="nope"), workers=[WorkerLoad("b", [RankLoad()])]),
    ]
    told, prefill, unknown = client.ask(planner.evaluate_tick(groups))
    assert isinstance(unknown.error, errors.NotFound) and unknown.workers == ()
    (only,) = prefill.workers[0].outlooks
    assert only.itl_s is None and only.drain_s == client.ask(planner.queue_drain(A, [RankLoad(1, 100)])).seconds
    for worker, answer in zip(workers, told.workers, strict=True):
        assert answer.worker_id == worker.worker_id
        if worker.worker_id == "short":
            assert isinstance(answer.error, errors.InvalidRequest) and answer.outlooks == ()
            continue
        assert answer.error is None
        now, later = answer.outlooks
        assert now.drain_s == client.ask(planner.queue_drain(B, worker.ranks)).seconds
        assert now.itl_s == client.ask(planner.decode_itl(B, worker.ranks, usual_prefill=(200.0, 1.0))).seconds
        assert later.itl_s is not None and now.itl_s is not None and later.itl_s > now.itl_s


def test_bootstrap_points_are_times_of_whole_rank_groups(client: Client) -> None:
    swept = client.ask(planner.bootstrap(B, prefill_granularity=4, decode_granularity=2))
    assert swept.attention_dp == 8 and swept.gpus_total == 8
    assert swept.largest_batch_per_rank and swept.max_kv_tokens_total == swept.largest_batch_per_rank * 3150 * 8
    assert {point.point_type for point in swept.points} == {"prefill", "decode"}
    for point in swept.points:
        assert [rank.dp_rank for rank in point.ranks] == list(range(8))
        (work,) = {dataclasses.replace(rank, dp_rank=0) for rank in point.ranks}
        if point.point_type == "prefill":
            alone = client.predict(B, Prefill(1, work.prefill_tokens)).latency_ms
        else:
            isl = work.decode_kv_tokens // work.decode_requests - 250
            alone = client.predict(B, DecodeTrajectory(work.decode_requests, isl, 500)).latency_ms / 499
        assert work.wall_time_s == pytest.approx(alone / 1000, rel=1e-12)
    limits = client.ask(planner.bootstrap(A, prefill_granularity=0, decode_granularity=0))
    assert limits.points == () and limits.largest_batch_per_rank


def test_many_bootstrap_points_come_in_several_messages(client: Client) -> None:
    call = planner.bootstrap(A, prefill_granularity=500, decode_granularity=1)
    messages: list[planner_pb2.BootstrapResponse] = []
    raw = Call(call.path, call.request, call.response, messages.extend, is_stream=True)
    client.ask(raw)
    assert len(messages) > 2 and messages[0].HasField("header")
    points = sum(len(message.points.points) for message in messages[1:])
    assert points == messages[0].header.prefill_points + messages[0].header.decode_points


def test_a_long_bootstrap_is_laid_out_message_by_message(served: Running, client: Client, monkeypatch) -> None:
    laid_out, sizes, before = [], [], []
    own_point = sweeps._point

    def counted(kind, ranks, work):
        laid_out.append(ranks)
        return own_point(kind, ranks, work)

    async def collect() -> None:
        async for message in sweeps.bootstrap(served.server.engines, call.request):
            before.append(sum(laid_out))
            sizes.append(sum(len(point.ranks) for point in message.points.points))

    call = planner.bootstrap(client.resolve(B), max_kv_tokens_per_rank=100_000, decode_granularity=30)
    monkeypatch.setattr(sweeps, "_point", counted)
    served.do(collect())
    assert before == list(itertools.accumulate(sizes)) and len(sizes) > 10 and max(sizes) <= 256


def test_a_latency_law_states_its_box(client: Client) -> None:
    law = client.ask(planner.fit_latency_law(A, max_batch_per_rank=64))
    assert law.box["max_batch_per_rank"] == 64 and law.box["isl_tokens"] == 3000
    assert 0 < law.alpha_ms < 50 and law.beta_ms_per_request > 0 and law.delta_ms_per_token > 0
    assert law.itl_fit.samples == 64 and 0.9 < law.itl_fit.r_squared <= 1
    with pytest.raises(errors.InvalidRequest, match="min_batch"):
        client.ask(planner.fit_latency_law(A, min_batch_per_rank=9, max_batch_per_rank=2))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (planner.estimate_passes(A, [[]]), r"iterations\[0\].ranks"),
        (planner.estimate_passes(A, [[RankPass(0, 5)]]), r"iterations\[0\].ranks.prefill_requests"),
        (planner.estimate_passes(A, [[RankPass(1, 5, dp_rank=1)] * 2]), "dp_rank"),
        (planner.estimate_passes(None, [[RankPass(1, 5)]]), "engine"),
        (planner.capacity(A, isl=-1, osl=5), "isl_tokens"),
        (planner.capacity(A, isl=1, osl=5, ttft_s=float("nan")), "ttft_target_s"),
        (planner.capacity(A, isl=1, osl=5, role="decode", accept_length=1e308), "accept_length_tokens"),
        (planner.capacity(A, isl=1, osl=5, limits=Limits(max_num_seqs=2**33)), "limits.max_num_seqs_total"),
        (planner.decode_itl(A, [RankLoad()], usual_prefill=(float("inf"), 1)), "usual_prefill"),
        (planner.bootstrap(A, max_context_tokens=600), "max_context_tokens"),
        (planner.bootstrap(A, prefill_granularity=-1), "prefill_granularity"),
        (
            planner.bootstrap(A, decode_granularity=1000, max_kv_tokens_per_rank=2**32, max_context_tokens=10**6),
            "decode_granularity: makes 1001000 points",
        ),
        (planner.bootstrap(A, prefill_granularity=2**40), "prefill_granularity"),
    ],
)
def test_bad_questions_name_their_field(client: Client, call: Call, words: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=words):
        client.ask(call)


def test_what_needs_a_state_says_that_calibration_is_off(client: Client) -> None:
    with pytest.raises(errors.CalibrationOff, match="--state-dir") as caught:
        client.ask(planner.capacity(A, isl=100, osl=10, state="prod"))
    assert caught.value.code == "FAILED_PRECONDITION" and caught.value.details["flag"] == "--state-dir"
