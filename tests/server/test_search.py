"""Searches over loopback: the engine's own results, progress, cancellation, deadlines, overload, sharing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from perfcast_client import (
    Afd,
    Aggregated,
    AsyncClient,
    Client,
    DecodeStep,
    Disaggregated,
    EngineConfig,
    Images,
    Pool,
    Replica,
    SearchTask,
    Space,
    Targets,
    Workload,
    calls,
)
from perfcast_client.deployments import SearchProgress, SearchResult
from perfcast_client.errors import DeadlineExceeded, InvalidRequest, LimitExceeded, NotFound, ServerFault
from perfcast_engine.config import EngineConfig as OwnConfig
from perfcast_engine.predictor import Predictor
from perfcast_planning.search import search as best_deployments
from perfcast_planning.search import task as own
from perfcast_planning.search.workshop import TableWorkshop
from perfcast_planning.serving.workload import Targets as OwnTargets
from perfcast_planning.serving.workload import Workload as OwnWorkload

from tests.server.running import SEARCH_PATIENCE_S, Running, eventually, running

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm")
LOAD = Workload(isl=4000, osl=500, prefix=500)
TASK = SearchTask(engine=CONFIG, workload=LOAD, targets=Targets(ttft_ms=300, tpot_ms=10), total_gpus=32)
BACKENDS = ("trtllm", "sglang", "vllm")
NUMBERS = itertools.count()
# Seconds of work: every mapping of a large model, aggregated and disaggregated.
LONG = SearchTask(
    engine=EngineConfig(model="deepseek-ai/DeepSeek-V3", system="h200_sxm", backend="sglang"),
    workload=Workload(isl=5000, osl=1500),
    total_gpus=256,
    backends=("sglang", "trtllm"),
)


@pytest.fixture(scope="module")
def served():
    """A server of its own, so that what it has in work is known."""
    with running(search_workers=1, max_searches=2) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Running):
    with Client(served.address, deadline_s=SEARCH_PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def channel(served: Running):
    with grpc.insecure_channel(served.address) as channel:
        yield channel


def in_work(served: Running) -> float:
    return served.metric("searches_in_work")


@contextlib.contextmanager
def held(served: Running) -> Iterator[int]:
    """What is searched next stays in work, as its process is stopped; gives the number of that."""
    idle = served.server._searchers._idle
    eventually(lambda: in_work(served) == 0)
    if not idle:
        with Client(served.address) as client:
            client.search_result(dataclasses.replace(TASK, top=1000 + next(NUMBERS)))
        eventually(lambda: len(idle) == 1)
    pid = idle[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def started(channel: grpc.Channel, top: int, task: SearchTask = LONG):
    """The call of a search that is on its way."""
    call = calls.search(dataclasses.replace(task, top=top))
    return channel.unary_stream(call.path)(call.request.SerializeToString(), timeout=SEARCH_PATIENCE_S)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_the_headline_case_gives_the_reference_s_best_of_every_backend(client: Client) -> None:
    engine = dataclasses.replace(CONFIG, profile="reference")
    found = client.search_result(dataclasses.replace(TASK, engine=engine, backends=BACKENDS))
    best = {e.name: e.best.ranking.tokens_per_s_per_gpu_cluster for e in found.experiments if e.eligible}
    assert best["agg_trtllm"] == 426.904
    assert best["disagg_trtllm"] == 572.657
    assert best["agg_sglang"] == 411.409 and best["disagg_sglang"] == 564.3
    assert found.best == "disagg_trtllm" and found.eligible and found.profile == "reference"
    for name in ("agg_vllm", "disagg_vllm"):
        missed = found.experiment(name)
        assert missed.status == "unmet" and not missed.eligible
        assert [v.target for v in missed.violations] == ["tpot_ms"]
        assert not any(pick.ranking.meets_targets for pick in missed.picks)
        assert missed.violations[0].excess_ms == missed.closest.tpot_ms - 10


def test_results_are_the_engine_s(client: Client) -> None:
    task = own.SearchTask(
        engine=OwnConfig(model=CONFIG.model, system="h200_sxm", backend="trtllm"),
        load=OwnWorkload(4000, 500, 500),
        targets=OwnTargets(300, 10),
        total_gpus=32,
    )
    told = client.search_result(dataclasses.replace(TASK, max_rows=10))
    for mine, yours in zip(
        best_deployments.search(task, TableWorkshop(Predictor())).experiments, told.experiments, strict=True
    ):
        rows = mine.rows
        assert (mine.name, mine.eligible, len(rows)) == (yours.name, yours.eligible, yours.rows_total)
        for index, deployments in ((mine.front, yours.front), (slice(10), yours.rows)):
            for name in ("ttft_ms", "tpot_ms", "tokens_per_s", "tokens_per_s_per_user"):
                assert [getattr(d, name) for d in deployments] == pytest.approx(rows[name][index], rel=1e-12)
        picked = [pick.ranking.tokens_per_s_per_gpu_cluster for pick in yours.picks]
        assert picked == pytest.approx(mine.pick.rows["tokens_per_s_per_gpu_cluster"], rel=1e-12)
        labels = [mine.engines[e].label for e in mine.pick.rows["engine" if mine.mode == "agg" else "decode_engine"]]
        assert [yours.engines[pick.workers[-1].engine].mapping for pick in yours.picks] == labels


def test_every_pick_estimated_alone_gives_the_same_numbers(client: Client) -> None:
    for experiment in client.search_result(TASK).experiments:
        for pick in experiment.picks:
            configs = [experiment.engines[group.engine].config for group in pick.workers]
            if experiment.mode == "aggregated":
                (group,) = pick.workers
                tokens = pick.iterations.ctx_tokens
                asked = Aggregated(engine=configs[0], batch=group.batch_per_rank, ctx_tokens=tokens)
            else:
                pools = [
                    Pool(engine=config, batch=group.batch_per_rank, workers=group.workers_total)
                    for config, group in zip(configs, pick.workers, strict=True)
                ]
                asked = Disaggregated(prefill=pools[0], decode=pools[1])
            alone = client.estimate(asked, LOAD).deployment
            for name in ("ttft_ms", "tpot_ms", "tokens_per_s_per_gpu", "gpus_total", "concurrency_total"):
                assert getattr(alone, name) == pytest.approx(getattr(pick, name), rel=1e-12), name


def test_progress_comes_first_and_fronts_grow(client: Client) -> None:
    *progress, result = client.search(dataclasses.replace(TASK, backends=BACKENDS, top=3))
    assert isinstance(result, SearchResult) and all(isinstance(told, SearchProgress) for told in progress)
    assert {told.experiments_total for told in progress} == {6}
    assert [told.experiments_done for told in progress] == sorted(told.experiments_done for told in progress)
    fronts = {told.backend: told.front for told in progress if told.front}
    assert set(fronts) == set(BACKENDS)
    front = [d.ranking.tokens_per_s_per_gpu_cluster for d in result.experiments[0].front]
    assert [point.tokens_per_s_per_gpu_cluster for point in fronts["trtllm"]] == front


def test_nothing_that_meets_the_targets_is_an_answer(client: Client) -> None:
    found = client.search_result(dataclasses.replace(TASK, targets=Targets(ttft_ms=1, tpot_ms=10)))
    assert not found.eligible and found.best == ""
    closest = found.experiment(found.closest)
    assert closest.status == "unmet" and closest.picks == ()
    assert {v.target for v in closest.violations} >= {"ttft_ms"}
    assert all(v.excess_ms > 0 and v.excess_percent > 0 for v in closest.violations)
    assert not closest.closest.ranking.meets_targets


def test_a_kept_answer_needs_no_search(served: Running, client: Client) -> None:
    task = dataclasses.replace(TASK, top=7)
    first = client.search_result(task)
    hits = served.metric("response_cache_hits_total")
    (again,) = client.search(task)
    assert again == first and served.metric("response_cache_hits_total") == hits + 1


def test_equal_searches_under_way_are_one(served: Running) -> None:
    searched = served.metric("search_seconds_count")
    task = dataclasses.replace(LONG, top=3, backends=("trtllm",))
    with ThreadPoolExecutor(4) as pool, Client(served.address, deadline_s=SEARCH_PATIENCE_S) as client:
        found = list(pool.map(lambda _: client.search_result(task), range(4)))
    assert all(one.to_dict() == found[0].to_dict() for one in found)
    assert served.metric("search_seconds_count") == searched + 1


def test_the_fewest_gpus_for_a_load(client: Client) -> None:
    engine = dataclasses.replace(CONFIG, backend="sglang", profile="reference", database_mode="hybrid")
    task = SearchTask(engine=engine, workload=LOAD, targets=Targets(ttft_ms=1000, tpot_ms=20))
    found = client.recommend(task, concurrency=200)
    needed = {
        e.name: [(p.ranking.gpus_used_total, p.ranking.replicas_total) for p in e.picks] for e in found.experiments
    }
    assert needed["agg_sglang"][:3] == [(14, 7), (16, 4), (17, 17)]
    assert needed["disagg_sglang"] == [(12, 3), (16, 8), (16, 2)]
    assert all(pick.ranking.load_served_percent == 100 for e in found.experiments for pick in e.picks)
    capped = client.recommend(task, concurrency=2000, max_gpus=16).experiments[0].picks[0].ranking
    assert capped.gpus_used_total <= 16 and capped.load_served_percent < 100
    with pytest.raises(InvalidRequest, match="exactly one"):
        client.recommend(task)
    with pytest.raises(InvalidRequest, match="total_gpus"):
        client.recommend(dataclasses.replace(task, total_gpus=8), concurrency=1)


def test_a_caller_that_leaves_ends_the_work(served: Running, client: Client, channel: grpc.Channel) -> None:
    with held(served) as pid:
        call = started(channel, top=11)
        eventually(lambda: in_work(served) == 1)
        call.cancel()
        assert call.code() is grpc.StatusCode.CANCELLED
        eventually(lambda: in_work(served) == 0)
        eventually(lambda: not exists(pid))  # not even as a zombie
    assert client.search_result(dataclasses.replace(TASK, top=9)).eligible


def test_a_deadline_ends_the_call_and_the_work(served: Running, client: Client) -> None:
    with held(served) as pid:
        with pytest.raises(DeadlineExceeded):
            client.search_result(dataclasses.replace(LONG, top=21), deadline_s=0.3)
        eventually(lambda: in_work(served) == 0)
        eventually(lambda: not exists(pid))
    assert client.search_result(dataclasses.replace(TASK, top=10)).eligible


def test_searches_that_are_left_at_any_moment_leave_nothing_behind(served: Running, channel: grpc.Channel) -> None:
    with held(served):
        nursery = served.server._searchers._nursery._process
    for number in range(12):
        call = started(channel, top=100 + number)
        if number % 3:
            time.sleep(0.01 * number)
        call.cancel()
    channel.unary_unary("/perfcast.v1.Catalog/GetServerInfo")(
        b"", timeout=SEARCH_PATIENCE_S
    )  # all before it have arrived
    eventually(lambda: served.metric("grpc_server_in_work") == 0 and in_work(served) == 0)
    eventually(lambda: len(children(nursery.pid)) <= 1)
    assert len(list(started(channel, 12, TASK))) > 1 and nursery.returncode is None


def test_too_many_searches_are_refused_with_when_to_retry(
    served: Running, client: Client, channel: grpc.Channel
) -> None:
    with held(served):
        first = started(channel, top=31)
        eventually(lambda: in_work(served) == 1)
        second = started(channel, top=32)
        eventually(lambda: served.metric("grpc_server_in_work") == 2)
        with pytest.raises(LimitExceeded) as caught:
            client.search_result(dataclasses.replace(LONG, top=33))
        assert caught.value.retry_after_s > 0 and caught.value.details["limit"] == "max_searches"
        first.cancel()
        assert next(second)  # which has the place now
        second.cancel()
    eventually(lambda: in_work(served) == 0)


def test_steps_are_answered_beside_a_search(served: Running, client: Client, channel: grpc.Channel) -> None:
    engine = client.resolve(dataclasses.replace(CONFIG, tp=4))
    with held(served):
        call = started(channel, top=41)
        eventually(lambda: in_work(served) == 1)
        for batch in range(1, 50):
            assert client.predict(engine, DecodeStep(batch, 4096, 512)).latency_ms > 0
        assert in_work(served) == 1
        call.cancel()
    eventually(lambda: in_work(served) == 0)


def test_a_search_process_that_dies_is_an_error_once(served: Running, client: Client) -> None:
    with held(served) as pid, ThreadPoolExecutor(1) as pool:
        found = pool.submit(client.search_result, dataclasses.replace(LONG, top=51))
        eventually(lambda: in_work(served) == 1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ServerFault, match="has ended"):
            found.result(SEARCH_PATIENCE_S)
    assert client.search_result(dataclasses.replace(TASK, top=8)).eligible


def test_the_process_that_others_are_forked_from_is_replaced_when_it_dies(served: Running, client: Client) -> None:
    nursery = served.server._searchers._nursery
    with held(served) as pid:
        os.kill(nursery._process.pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: nursery._process.returncode is not None and not served.server._searchers._idle[0].alive)
    assert client.search_result(dataclasses.replace(TASK, top=13)).eligible


async def test_the_asyncio_client_searches_too(served: Running) -> None:
    async with AsyncClient(served.address, deadline_s=SEARCH_PATIENCE_S) as client:
        events = [event async for event in client.search(dataclasses.replace(TASK, top=2))]
        assert isinstance(events[-1], SearchResult) and len(events[-1].experiments[0].picks) == 2
        long = client.search(dataclasses.replace(LONG, top=61))
        assert isinstance(await anext(long), SearchProgress)
        await long.aclose()
        estimate = await client.estimate(Aggregated(engine=dataclasses.replace(CONFIG, tp=4), batch=8), LOAD)
        assert estimate.deployment.ttft_ms > 0
        assert (await client.estimate_memory(CONFIG)).kv_cache_tokens > 0
        recommended = await client.recommend(dataclasses.replace(TASK, total_gpus=None), requests_per_s=5.0)
        assert recommended.eligible
    eventually(lambda: in_work(served) == 0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"workload": Workload(isl=0, osl=1)}, "workload.isl_tokens"),
        ({"targets": Targets(ttft_ms=-1)}, "targets.ttft_ms"),
        ({"targets": Targets(tpot_ms=float("nan"))}, "targets.tpot_ms"),
        ({"targets": Targets(ttft_ms=1e-308)}, "targets.ttft_ms"),
        ({"targets": Targets(ttft_ms=float("inf"))}, "targets.ttft_ms"),
        ({"total_gpus": -4}, "total_gpus"),
        ({"modes": ("static",)}, "modes[0]"),
        ({"backends": ("vllm", "vllm")}, "backends"),
        ({"space": Space(tp=(0,))}, "space.tp"),
        ({"decode_space": Space(tp=(2, 2))}, "decode_space.tp"),
        ({"replica": Replica(max_prefill_workers=10**6)}, "replica.max_prefill_workers"),
        ({"engine": dataclasses.replace(CONFIG, tp=4)}, "engine.parallel"),
        ({"decode_engine": dataclasses.replace(CONFIG, profile="reference")}, "decode_engine.profile"),
        ({"nextn_accepted": 1.0}, "nextn_accepted"),
        ({"top": -1}, "top"),
    ],
)
def test_malformed_searches_are_refused_by_field(client: Client, changes, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.search_result(dataclasses.replace(TASK, **changes))
    assert caught.value.details["field"] == field


def test_unknown_names_and_limits_are_typed(client: Client) -> None:
    with pytest.raises(NotFound, match="vllm"):
        client.search_result(dataclasses.replace(TASK, backends=("vlm",)))
    with pytest.raises(NotFound, match="Qwen3-32B"):
        engine = dataclasses.replace(CONFIG, model="Qwen/Qwen3-32B-FP9")
        client.search_result(dataclasses.replace(TASK, engine=engine))
    with pytest.raises(LimitExceeded, match="rows"):
        client.search_result(dataclasses.replace(TASK, max_rows=10**6))
    with pytest.raises(LimitExceeded, match="output tokens"):
        client.search_result(dataclasses.replace(TASK, workload=Workload(isl=1, osl=2**31 - 1)))
    with pytest.raises(LimitExceeded, match="combinations"):
        wide = tuple(range(1, 65))
        client.search_result(dataclasses.replace(TASK, space=Space(tp=wide, pp=wide, attn_dp=wide, moe_tp=wide)))


def test_images_may_be_encoded_by_workers_of_their_own(client: Client) -> None:
    task = SearchTask(
        engine=EngineConfig(model="Qwen/Qwen3-VL-32B-Instruct", system="h200_sxm", backend="vllm"),
        workload=Workload(isl=1000, osl=200, images=Images(height=1024, width=1024, count=2)),
        targets=Targets(ttft_ms=3000, tpot_ms=40),
        total_gpus=16,
        encode_pool=True,
    )
    for experiment in client.search_result(task).experiments:
        best = experiment.best
        assert best.encode.workers_total >= 1 and best.encode_ms > 0
        gpus = sum(group.workers_total * group.gpus_per_worker for group in best.workers)
        assert best.gpus_total == gpus + best.encode.workers_total * best.encode.gpus_per_worker
    together = client.search_result(dataclasses.replace(task, encode_pool=False)).experiments[0].best
    assert together.encode is None and together.workers[0].encoder_memory_gib_per_gpu > 0


def test_attention_and_ffn_may_decode_apart(client: Client) -> None:
    engine = dataclasses.replace(CONFIG, model="Qwen/Qwen3-30B-A3B")
    task = SearchTask(engine=engine, workload=LOAD, targets=Targets(tpot_ms=50), total_gpus=24, modes=("afd",))
    (experiment,) = client.search_result(task).experiments
    best = experiment.best
    prefill, decode = best.workers
    assert decode.gpus_per_worker == 8 * (best.afd.attention_nodes + best.afd.ffn_nodes)
    assert (
        best.gpus_total
        == prefill.workers_total * prefill.gpus_per_worker + decode.workers_total * decode.gpus_per_worker
    )
    assert best.ranking.meets_targets and experiment.name == "afd_trtllm"
    first = Pool(
        engine=experiment.engines[prefill.engine].config, batch=prefill.batch_per_rank, workers=prefill.workers_total
    )
    cut = Afd(
        attention_nodes=best.afd.attention_nodes,
        ffn_nodes=best.afd.ffn_nodes,
        attention_tp=best.afd.attention_tp,
        ffn_ep=best.afd.ffn_ep,
        microbatches=best.afd.microbatches,
        optimistic=best.afd.is_optimistic,
    )
    second = Pool(engine=engine, batch=decode.batch_per_rank, workers=decode.workers_total)
    alone = client.estimate(Disaggregated(prefill=first, decode=second, afd=cut), LOAD)
    for name in ("ttft_ms", "tpot_ms", "tokens_per_s_per_gpu", "gpus_total", "concurrency_total", "afd"):
        assert getattr(alone.deployment, name) == getattr(best, name), name
    assert len(alone.memory) == len(alone.engines) == 3 and alone.deployment.mode == "afd"
    widths = {"attention_nodes": 1, "ffn_nodes": 1, "attention_tp": 4}
    for change, field in (({"ffn_nodes": 0}, "ffn_nodes"), ({"ffn_ep": 3}, "ffn_ep")):
        with pytest.raises(InvalidRequest) as caught:
            client.estimate(Disaggregated(prefill=first, decode=second, afd=Afd(**widths | change)), LOAD)
        assert caught.value.details["field"] == f"disaggregated.afd.{field}"
    with pytest.raises(InvalidRequest, match="afd has them"):
        wide = dataclasses.replace(second, engine=dataclasses.replace(engine, tp=4))
        client.estimate(Disaggregated(prefill=first, decode=wide, afd=Afd(**widths)), LOAD)
