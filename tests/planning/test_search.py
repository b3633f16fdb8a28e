"""Whole searches over analytic engines: properties that hold whatever the tables say."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perfcast_engine.config import EngineConfig
from perfcast_engine.errors import EngineError, InvalidField
from perfcast_engine.profiles import PROFILES
from perfcast_planning.search.grids import DECODE_BATCHES, chunk_sizes, target_pairs, up_to
from perfcast_planning.search.match import Replica
from perfcast_planning.search.pick import Load, cluster_throughput
from perfcast_planning.search.recommend import recommend
from perfcast_planning.search.search import search
from perfcast_planning.search.space import Space
from perfcast_planning.search.task import SearchTask, Status
from perfcast_planning.serving.aggregated import aggregated
from perfcast_planning.serving.disaggregated import Matching, paired, with_transfer
from perfcast_planning.serving.static import Phases, static
from perfcast_planning.serving.workload import EngineLimits, KvTransfer, Targets, Workload

from tests.planning.toy import ToyShop

BACKENDS = ("trtllm", "sglang", "vllm")


LOAD = Workload(2000, 200, 500)


def task(backend="trtllm", profile="corrected", load=LOAD, **fields):
    config = EngineConfig(model="toy", system="toy", backend=backend, profile=profile)
    return SearchTask(**{"engine": config, "load": load, "targets": Targets(500, 30), "total_gpus": 16} | fields)


workloads = st.builds(Workload, st.integers(200, 8000), st.integers(2, 600), st.just(100))
targets = st.builds(Targets, st.floats(20, 5000), st.floats(2, 200))
properties = settings(deadline=None, max_examples=15)


@properties
@given(st.sampled_from(BACKENDS), workloads, targets)
def test_no_pick_violates_and_nothing_eligible_says_what_is_closest(backend, load, limits):
    result = search(task(backend, load=load, targets=limits), ToyShop())
    for experiment in result.experiments:
        rows = experiment.pick.rows
        if len(rows):
            assert (rows["ttft_ms"] <= limits.ttft_ms).all()
            assert (rows["tpot_ms"] <= limits.tpot_ms).all()
        meets = (experiment.rows["ttft_ms"] <= limits.ttft_ms) & (experiment.rows["tpot_ms"] <= limits.tpot_ms)
        assert experiment.eligible == meets.any()
        if not meets.any():
            assert experiment.status is Status.UNMET
            assert experiment.missed
            assert all(v.value > v.limit for v in experiment.missed)


@properties
@given(st.sampled_from(BACKENDS), workloads, targets, st.integers(2, 12), st.integers(1, 12))
def test_more_gpus_never_serve_less(backend, load, limits, gpus, more):
    small, large = (
        search(task(backend, load=load, targets=limits, total_gpus=n), ToyShop()).best for n in (gpus, gpus + more)
    )
    if small is not None:
        assert large.pick.score * (gpus + more) >= small.pick.score * gpus * (1 - 1e-12)


@properties
@given(st.sampled_from(BACKENDS), workloads, targets, st.floats(1, 5), st.floats(1, 5))
def test_relaxed_targets_never_worsen(backend, load, limits, looser_ttft, looser_tpot):
    relaxed = Targets(limits.ttft_ms * looser_ttft, limits.tpot_ms * looser_tpot)
    tight, loose = (search(task(backend, load=load, targets=t), ToyShop()).best for t in (limits, relaxed))
    if tight is not None:
        assert loose.pick.score >= tight.pick.score * (1 - 1e-12)


@properties
@given(st.sampled_from(BACKENDS), workloads)
def test_every_row_estimated_alone_is_the_same(backend, load):
    asked = task(backend, load=load)
    for experiment in search(asked, ToyShop()).experiments:
        for row in map(experiment.pick.rows.row, range(len(experiment.pick.rows))):
            if experiment.mode == "agg":
                engine = experiment.engines[row["engine"]]
                alone = aggregated(engine, load, row["batch"], row["ctx_tokens"]).rows
            else:
                p, d = (experiment.engines[row[f"{role}_engine"]] for role in ("prefill", "decode"))
                first = static(p, load, row["prefill_batch"], Phases.PREFILL).rows
                first = with_transfer(first, p, load, KvTransfer(), Matching().ttft_factor)
                second = static(d, load, row["decode_batch"], Phases.DECODE).rows
                alone = paired(first, second, row["prefill_workers"], row["decode_workers"], load, Matching())
            for name in ("ttft_ms", "tpot_ms", "tokens_per_s", "tokens_per_s_per_gpu", "gpus", "concurrency"):
                assert alone[name][0] == pytest.approx(row[name], rel=1e-12), name


@pytest.mark.parametrize("profile", ["reference", "corrected"])
def test_rows_fronts_and_best(profile):
    result = search(task(profile=profile), ToyShop())
    assert [e.name for e in result.experiments] == ["agg_trtllm", "disagg_trtllm"]
    assert result.eligible
    assert result.profile == profile
    for experiment in result.experiments:
        assert (np.diff(experiment.rows["tokens_per_s_per_gpu"]) <= 0).all()
        front = experiment.rows.take(experiment.front)
        assert (np.diff(front["tokens_per_s_per_user"]) > 0).all()
        assert (np.diff(cluster_throughput(front, 16)) < 0).all()


def test_three_backends_at_once():
    result = search(task(backends=BACKENDS), ToyShop())
    assert len(result.experiments) == 6
    assert result.best.pick.score == max(e.pick.score for e in result.experiments)


def test_refused_mappings_are_named():
    found = search(task(modes=("agg",), space=Space(tp=(1, 3))), ToyShop()).experiments[0]
    assert [str(error) for _, error in found.refused] == []  # three GPUs are not in the default counts
    found = search(task(modes=("agg",), space=Space(num_gpu=(1, 3), tp=(1, 3))), ToyShop()).experiments[0]
    assert ["heads" in str(error) for _, error in found.refused] == [True]


def test_what_does_not_fit_or_has_no_data_is_an_answer():
    for options, status in (({"capacity": 10e9}, Status.NO_MEMORY), ({"known": 10}, Status.NO_DATA)):
        for profile in ("reference", "corrected"):
            narrow = task(profile=profile, modes=("agg",), space=Space(tp=(1,)))
            experiment = search(narrow, ToyShop(options)).experiments[0]
            assert experiment.status is status
            assert not len(experiment.pick.rows)


@pytest.mark.parametrize("mode", ["agg", "disagg"])
@pytest.mark.parametrize("profile", ["reference", "corrected"])
def test_unmet_targets_are_an_answer(mode, profile):
    result = search(task(profile=profile, modes=(mode,), targets=Targets(1.0, 30)), ToyShop())
    assert not result.eligible
    (violated,) = result.closest.missed
    assert violated.target == "ttft_ms"
    assert violated.excess > 0
    assert len(result.closest.closest) == 1


def test_progress_grows_to_the_whole_and_ends_the_search_by_raising():
    seen = []
    result = search(task(), ToyShop(), seen.append)
    for mode in ("agg", "disagg"):
        assert [p.done for p in seen if p.mode == mode and p.total == 4][-1] == 4
    last = [p for p in seen if p.mode == "agg"][-1]
    assert len(last.rows) == len(result.experiments[0].rows)
    assert sorted(last.rows["tokens_per_s"][last.front]) == sorted(
        result.experiments[0].rows["tokens_per_s"][result.experiments[0].front]
    )
    told = iter(range(2))
    with pytest.raises(StopIteration):
        search(task(), ToyShop(), lambda _: next(told))


def test_three_gpus_are_found_where_they_serve_best():
    for profile, sizes in (("reference", {1.0, 2.0, 4.0, 8.0, 16.0}), ("corrected", set(map(float, range(1, 17))))):
        experiment = search(task(profile=profile, modes=("disagg",)), ToyShop()).experiments[0]
        assert set(experiment.rows["gpus"]) <= sizes
        assert (3.0 in experiment.rows["gpus"]) == (profile == "corrected")


def test_transfer_over_a_link_costs_and_an_infinite_one_does_not():
    plain = search(task(modes=("disagg",)), ToyShop()).experiments[0]
    infinite = search(task(modes=("disagg",), kv_transfer=KvTransfer(np.inf, 0.5)), ToyShop()).experiments[0]
    for name, column in plain.rows.columns.items():
        assert np.array_equal(column, infinite.rows[name])
    slow = search(task(modes=("disagg",), kv_transfer=KvTransfer(5e9, 0.001, 2)), ToyShop()).experiments[0]
    sent = 1500 * 16384 * 16  # bytes of one request on one GPU of a prefill worker with tp 1
    waits = []
    for found in (plain, slow):
        tp = np.array([engine.parallel.tp for engine in found.engines])[found.rows["prefill_engine"]]
        waits.append(found.rows["ttft_ms"][tp == 1].min())
    assert waits[1] - waits[0] == pytest.approx(1 + 1000 * sent * 2 / 5e9)


def test_request_latency_replaces_the_targets():
    result = search(task(targets=Targets(None, request_latency_ms=4000)), ToyShop())
    for experiment in result.experiments:
        assert (experiment.pick.rows["request_latency_ms"] <= 4000).all()
    with pytest.raises(InvalidField, match="osl"):
        search(task(load=Workload(100, 1), targets=Targets(None, request_latency_ms=4000)), ToyShop())


@pytest.mark.parametrize(
    "fields",
    [
        {"top": 0},
        {"modes": ("both",)},
        {"limits": EngineLimits(accepted=1.0)},
        {"total_gpus": 0},
        {"decode_max_batch": 0},
    ],
)
def test_bad_tasks_are_refused(fields):
    with pytest.raises(InvalidField, match=next(iter(fields)).replace("limits", "nextn_accepted")):
        task(**fields)


def test_disaggregation_needs_two_gpus():
    with pytest.raises(InvalidField, match="total_gpus"):
        search(task(total_gpus=1, modes=("disagg",)), ToyShop())
    assert [e.mode for e in search(task(total_gpus=1), ToyShop()).experiments] == ["agg"]


def test_both_roles_run_one_model():
    other = dataclasses.replace(task().engine, model="other")
    with pytest.raises(InvalidField, match="same model"):
        task(decode_engine=other)


def test_grids():
    assert up_to(tuple(range(1, 5)), 3).tolist() == [1, 2, 3]
    assert chunk_sizes(4000, False).tolist() == [4000, 8000]
    assert chunk_sizes(512, False).tolist() == [*range(512, 8193, 512)]
    steps = [*range(512, 8193, 512), 13192, 18192, 20000, 23192, 28192, 33192, 38192, 40000]
    assert chunk_sizes(20000, True).tolist() == steps
    pairs = target_pairs(Targets(None, request_latency_ms=2000), 11, True)
    assert pairs[0] == (200.0, 180.0)
    assert (1900.0, 10.0) in pairs
    assert len(target_pairs(Targets(300, 10), 500, True)) == 75


def test_one_token_answers_can_be_searched():
    result = search(task(load=Workload(2000, 1)), ToyShop())
    assert all(e.eligible for e in result.experiments)
    assert all((e.pick.rows["tpot_ms"] == 0).all() for e in result.experiments)


@pytest.mark.parametrize("profile", ["reference", "corrected"])
def test_recommend_serves_the_load_on_the_fewest_gpus(profile):
    asked = task(profile=profile, total_gpus=None, match_load=Load(request_rate=40.0))
    result = recommend(asked, ToyShop())
    for experiment in result.experiments:
        rows = experiment.pick.rows
        assert (rows["requests_per_s"] * rows["replicas"] >= 40.0).all()
        assert (np.diff(rows["gpus_needed"]) >= 0).all()
    widest = max(e.rows["gpus"].max() for e in result.experiments)
    assert widest <= 8 or profile == "corrected"
    with pytest.raises(InvalidField, match="match_load"):
        recommend(task(), ToyShop())


@settings(deadline=None, max_examples=5)
@given(
    st.sampled_from(BACKENDS),
    st.builds(Load, request_rate=st.floats(0.5, 300)) | st.builds(Load, concurrency=st.floats(1, 3000)),
)
def test_no_pair_of_pools_carries_a_load_on_fewer_gpus_than_recommended(backend, load):
    """Beside every prefill and decode engine with every number of workers, one after another."""
    limits, matching, sizes = Targets(500, 30), Matching(), (1, 2, 4, 8)
    asked = task(backend, targets=limits, total_gpus=None, modes=("disagg",), match_load=load)
    (found,) = recommend(asked, ToyShop()).experiments
    engines = {engine.parallel.tp: engine for engine in found.engines}
    batches = up_to(DECODE_BATCHES, 512)
    fewest = math.inf
    for tp_p, tp_d in itertools.product(sizes, sizes):
        if backend == "sglang" and tp_p != tp_d:
            continue
        first = static(engines[tp_p], LOAD, 1, Phases.PREFILL).rows
        second = static(engines[tp_d], LOAD, batches, Phases.DECODE)
        model = engines[tp_d].memory
        out, over = model.verdict(second.memory, model.kv_fraction())
        good = (second.rows["tpot_ms"] <= limits.tpot_ms) & ~out & ~over
        if first["ttft_ms"][0] * matching.ttft_factor > limits.ttft_ms:
            continue
        for n_p, n_d in itertools.product(range(1, 33), range(1, 33)):
            gpus = n_p * tp_p + n_d * tp_d
            if gpus > 128:
                continue
            fed = first["requests_per_s"] * n_p * matching.prefill_degradation
            drained = second.rows["requests_per_s"] * n_d * matching.decode_degradation
            per_replica = np.minimum(fed, drained)
            asked_for = load.request_rate
            if asked_for is None:
                per_replica = np.where(fed >= drained, second.rows["concurrency"] * n_d, 0.0)
                asked_for = load.concurrency
            with np.errstate(divide="ignore"):
                needed = np.maximum(1, np.ceil(asked_for / per_replica[good])) * gpus
            fewest = min(fewest, needed.min(initial=math.inf))
    best = found.pick.rows["gpus_needed"][0] if len(found.pick.rows) else math.inf
    assert best <= fewest


def test_recommend_widens_workers_until_the_model_fits():
    asked = task(total_gpus=None, modes=("agg",), match_load=Load(concurrency=10.0), space=Space(tp=(1, 16)))
    (found,) = recommend(asked, ToyShop({"capacity": 12e9})).experiments
    assert set(found.rows["gpus"]) == {16}


# --- switches of the profiles that only a search shows ---


def test_scaled_pools_meet_the_tpot_asked_for():
    tight = {"targets": Targets(2000, 4.0), "autoscale": True, "modes": ("disagg",)}
    slowest = {p: search(task(profile=p, **tight), ToyShop()).experiments[0].rows["tpot_ms"].max() for p in PROFILES}
    assert slowest["corrected"] <= 4.0 < slowest["reference"]


def test_a_latency_equal_to_its_target_passes_in_both_modes():
    for profile, found in (("reference", False), ("corrected", True)):
        row = search(task(profile=profile, modes=("disagg",)), ToyShop()).experiments[0].pick.rows.row(0)
        exact = task(profile=profile, modes=("disagg",), targets=Targets(row["ttft_ms"], 30))
        ttfts = search(exact, ToyShop()).experiments[0].rows.columns.get("ttft_ms", np.zeros(1))
        assert (row["ttft_ms"] in ttfts) == found


def test_what_exceeds_memory_is_never_a_row():
    for profile in PROFILES:
        (found,) = search(task(profile=profile, modes=("agg",), load=Workload(8000, 2000)), ToyShop()).experiments
        assert found.rows["memory_gib"].max() * 2**30 < 80e9
        assert found.rows["batch"].max() < 512  # larger ones were asked for and do not fit


def test_a_lone_engine_s_rate_is_shared_by_its_context_parallel_ranks():
    wide = {"modes": ("disagg",), "backend": "sglang", "prefill_space": Space(num_gpu=(4,), tp=(1,), cp=(4,))}
    for profile, ranks in (("reference", 1), ("corrected", 4)):
        engine = search(task(profile=profile, **wide), ToyShop()).experiments[0].engines[0]
        row = static(engine, LOAD, 1, Phases.PREFILL).rows.row(0)
        assert row["requests_per_s"] / row["requests_per_s_per_gpu"] == pytest.approx(ranks)


def test_one_backend_that_cannot_answer_leaves_the_others_theirs():
    shop = ToyShop({"known": 0})
    with pytest.raises(EngineError, match="not measured"):
        search(task("vllm", modes=("agg",)), shop)
    found = search(task(backends=("trtllm", "vllm"), modes=("agg",)), shop).experiments
    assert [e.status for e in found] == [Status.NO_DATA, Status.FAILED]
    assert "not measured" in str(found[1].refused[0][1])


def test_a_pair_that_exceeds_its_replica_is_still_the_closest():
    small = {"modes": ("disagg",), "replica": Replica(gpu_counts=(3,)), "space": Space()}
    sides = {"prefill_space": Space(num_gpu=(4,), tp=(4,)), "decode_space": Space(num_gpu=(4,), tp=(4,))}
    for profile in PROFILES:
        (found,) = search(task(profile=profile, targets=Targets(5.0, 30), **small, **sides), ToyShop()).experiments
        assert found.status is Status.UNMET
        assert found.closest["gpus"][0] >= 8
        assert [v.target for v in found.missed] == ["ttft_ms"]
