"""What every search must hold to, over the measured tables; a few draws by default, many under ``-m slow``."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from perfcast_engine.config import EngineConfig
from perfcast_engine.predictor import Predictor
from perfcast_planning.search.pick import cluster_throughput
from perfcast_planning.search.search import search
from perfcast_planning.search.task import SearchTask
from perfcast_planning.search.workshop import TableWorkshop
from perfcast_planning.serving.aggregated import aggregated
from perfcast_planning.serving.estimate import Pool, estimate_aggregated, estimate_disaggregated
from perfcast_planning.serving.worker import worker_of
from perfcast_planning.serving.workload import EngineLimits, KvTransfer, Targets, Workload

PREDICTOR = Predictor()
DENSE = ("Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-8B")
MOE = ("Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V3")

workloads = st.builds(
    lambda isl, osl, cached: Workload(isl, osl, int(isl * cached)),
    st.integers(128, 16000),
    st.integers(1, 2000),
    st.sampled_from([0.0, 0.0, 0.25, 0.9]),
)
tasks = st.builds(
    lambda model, backend, system, load, ttft, tpot, gpus, link: SearchTask(
        engine=EngineConfig(model=model, system=system, backend=backend),
        load=load,
        targets=Targets(ttft, tpot),
        total_gpus=gpus,
        kv_transfer=link,
    ),
    st.sampled_from(DENSE + MOE),
    st.sampled_from(["trtllm", "sglang", "vllm"]),
    st.sampled_from(["h200_sxm", "b200_sxm"]),
    workloads,
    st.floats(50, 10000),
    st.floats(2, 150),
    st.integers(2, 40),
    st.sampled_from([KvTransfer(), KvTransfer(np.inf), KvTransfer(25e9, 1e-4), KvTransfer(400e9, 0.0, 4)]),
)


def check(task):
    result = search(task, TableWorkshop(PREDICTOR))
    no_violation(task, result)
    fronts(task, result)
    confirmed(task, result)
    more = search(replace(task, total_gpus=task.total_gpus + 3), TableWorkshop(PREDICTOR))
    assert total(more, 3 + task.total_gpus) >= total(result, task.total_gpus) * (1 - 1e-12)
    relaxed = Targets(task.targets.ttft_ms * 1.5, task.targets.tpot_ms * 1.5)
    loose = search(replace(task, targets=relaxed), TableWorkshop(PREDICTOR))
    assert total(loose, 1) >= total(result, 1) * (1 - 1e-12)


def total(result, gpus):
    """Tokens per second of the whole budget."""
    return result.best.pick.score * gpus if result.best else 0.0


def no_violation(task, result):
    for experiment in result.experiments:
        rows = experiment.pick.rows
        if len(rows):
            assert (rows["ttft_ms"] <= task.targets.ttft_ms).all()
            assert (rows["tpot_ms"] <= task.targets.tpot_ms).all()
            assert experiment.eligible
        elif len(experiment.rows):
            assert experiment.missed
            assert all(v.value > v.limit for v in experiment.missed)
        for column in experiment.rows.columns.values():
            assert np.isfinite(column).all()


def fronts(task, result):
    for experiment in result.experiments:
        rows = experiment.rows
        if not len(rows):
            continue
        score, speed, kept = cluster_throughput(rows, task.total_gpus), rows["tokens_per_s_per_user"], experiment.front
        assert (np.diff(speed[kept]) > 0).all()
        assert (np.diff(score[kept]) < 0).all()
        after = np.searchsorted(speed[kept], speed)  # the front's first point that is at least as fast
        assert (after < len(kept)).all()
        assert (score <= score[kept][after] + 1e-12).all()


def confirmed(task, result):
    """Every recommended row, estimated by itself, gives the same numbers."""
    for experiment in result.experiments:
        for row in map(experiment.pick.rows.row, range(len(experiment.pick.rows))):
            if experiment.mode == "agg":
                engine = experiment.engines[row["engine"]]
                alone = worker_of(PREDICTOR.engine(engine.engine.config))
                found = estimate_aggregated(alone, task.load, row["batch"], row["ctx_tokens"], EngineLimits())
            else:
                pools = [
                    Pool(
                        worker=worker_of(PREDICTOR.engine(experiment.engines[row[f"{role}_engine"]].engine.config)),
                        batch=int(row[f"{role}_batch"]),
                        workers=int(row[f"{role}_workers"]),
                    )
                    for role in ("prefill", "decode")
                ]
                found = estimate_disaggregated(*pools, task.load, kv_transfer=task.kv_transfer)
            found.require_fit()
            for name in ("ttft_ms", "tpot_ms", "tokens_per_s", "tokens_per_s_per_gpu", "gpus", "concurrency"):
                assert found.rows[name][0] == pytest.approx(row[name], rel=1e-9), name


@settings(deadline=None, max_examples=2, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(tasks)
def test_a_few_searches(task):
    check(task)


@pytest.mark.slow
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(tasks)
def test_many_searches(task):
    check(task)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["trtllm", "sglang", "vllm"])
@pytest.mark.parametrize("model", DENSE)
@pytest.mark.parametrize("load", [Workload(4000, 500, 500), Workload(1024, 1024), Workload(8192, 64)])
def test_tpot_rises_strictly_with_every_batch(backend, model, load):
    engine = worker_of(PREDICTOR.engine(EngineConfig(model=model, system="h200_sxm", backend=backend)))
    tpot = aggregated(engine, load, np.arange(1, 513), load.isl).rows["tpot_ms"]
    assert (np.diff(tpot) > 0).all()
