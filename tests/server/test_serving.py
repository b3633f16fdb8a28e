"""Estimates over loopback, held against the engine in this process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from perfcast_client import (
    Aggregated,
    Client,
    Disaggregated,
    EngineConfig,
    KvTransfer,
    Limits,
    Matching,
    Pool,
    Static,
    Workload,
)
from perfcast_client.errors import InvalidRequest, LimitExceeded, NotFound, OutOfMemory
from perfcast_engine.config import EngineConfig as OwnConfig
from perfcast_engine.config import ParallelConfig
from perfcast_engine.predictor import Predictor
from perfcast_planning.serving import estimate as own
from perfcast_planning.serving.static import Phases
from perfcast_planning.serving.worker import worker_of
from perfcast_planning.serving.workload import KvTransfer as OwnTransfer
from perfcast_planning.serving.workload import Workload as OwnWorkload

from tests.server.running import Running

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
LOAD, OWN_LOAD = Workload(isl=4000, osl=500, prefix=500), OwnWorkload(4000, 500, 500)
METRICS = ("ttft_ms", "tpot_ms", "request_latency_ms", "requests_per_s", "tokens_per_s", "tokens_per_s_per_gpu")


@pytest.fixture(scope="module")
def client(served: Running):
    with Client(served.address) as client:
        yield client


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor()


def worker(predictor: Predictor, role: str = "both", tp: int = 4, profile: str = "corrected"):
    parallel = ParallelConfig(tp=tp)
    config = OwnConfig(
        model=CONFIG.model, system="h200_sxm", backend="trtllm", parallel=parallel, role=role, profile=profile
    )
    return worker_of(predictor.engine(config))


def same(value: Any) -> Any:
    """As near as a surface is to the operators that it was made of."""
    return pytest.approx(value, rel=1e-12)


def test_an_aggregated_estimate_is_the_engine_s(client: Client, predictor: Predictor) -> None:
    told = client.estimate(Aggregated(engine=CONFIG, batch=16), LOAD, operators=True)
    row = own.estimate_aggregated(worker(predictor), OWN_LOAD, 16).rows.row(0)
    deployment = told.deployment
    assert {name: getattr(deployment, name) for name in METRICS} == same({name: row[name] for name in METRICS})
    assert deployment.mode == "aggregated" and deployment.gpus_total == 4 and deployment.concurrency_total == 16
    assert deployment.iterations.mixed_steps == row["mixed_steps"]
    assert deployment.iterations.ctx_tokens == 4000
    assert [step.name for step in told.steps] == ["mixed", "decode"]
    for step in told.steps:
        assert sum(operator.latency_ms for operator in step.operators) == pytest.approx(step.latency_ms)
    short = client.estimate(Aggregated(engine=CONFIG, batch=16), LOAD).steps
    assert [step.latency_ms for step in short] == same([step.latency_ms for step in told.steps])
    assert [step.latency_ms for step in short] == same(
        [deployment.iterations.mixed_step_ms, deployment.iterations.decode_step_ms]
    )
    (memory,) = told.memory
    assert memory.total_bytes / 2**30 == pytest.approx(deployment.workers[0].memory_gib_per_gpu)
    assert told.profile == "corrected" and told.warnings == ()


@pytest.mark.parametrize("phases", ["both", "prefill", "decode"])
def test_a_static_estimate_is_the_engine_s(client: Client, predictor: Predictor, phases: str) -> None:
    told = client.estimate(Static(engine=CONFIG, batch=8, phases=phases, latency_correction=1.1), LOAD).deployment
    kind = {"both": Phases.BOTH, "prefill": Phases.PREFILL, "decode": Phases.DECODE}[phases]
    row = own.estimate_static(worker(predictor), OWN_LOAD, 8, kind, correction=1.1).rows.row(0)
    assert {name: getattr(told, name) for name in METRICS} == same({name: row[name] for name in METRICS})
    assert (told.prefill_ms, told.decode_ms) == same((row["prefill_ms"], row["decode_ms"]))


def test_a_disaggregated_estimate_is_the_engine_s(client: Client, predictor: Predictor) -> None:
    asked = Disaggregated(
        prefill=Pool(engine=CONFIG, batch=1, workers=5),
        decode=Pool(engine=dataclasses.replace(CONFIG, tp=8), batch=64, workers=2),
        kv_transfer=KvTransfer(bandwidth_bytes_per_s=1e10, latency_s=0.001, concurrent=2),
    )
    told = client.estimate(asked, LOAD)
    pools = (
        own.Pool(worker=worker(predictor, "prefill"), batch=1, workers=5),
        own.Pool(worker=worker(predictor, "decode", tp=8), batch=64, workers=2),
    )
    row = own.estimate_disaggregated(*pools, OWN_LOAD, None, OwnTransfer(1e10, 0.001, 2)).rows.row(0)
    assert {name: getattr(told.deployment, name) for name in METRICS} == same({name: row[name] for name in METRICS})
    prefill, decode = told.deployment.workers
    assert (prefill.role, prefill.workers_total, prefill.gpus_per_worker) == ("prefill", 5, 4)
    assert (decode.role, decode.workers_total, decode.gpus_per_worker) == ("decode", 2, 8)
    assert told.engines[decode.engine].config.role == "decode"
    assert told.deployment.gpus_total == 36


def test_profile_reference_waits_in_front_of_prefill_as_the_reference_s_estimates_do(client: Client) -> None:
    config = dataclasses.replace(CONFIG, profile="reference")
    asked = Disaggregated(
        prefill=Pool(engine=config, batch=1, workers=5), decode=Pool(engine=config, batch=64, workers=3)
    )
    found = client.estimate(asked, LOAD)
    assert (round(found.deployment.ttft_ms, 3), found.deployment.tpot_ms) == (194.378, 9.659)
    assert round(found.deployment.tokens_per_s_per_gpu, 3) == 572.657
    assert found.profile == "reference"
    alone = dataclasses.replace(asked, matching=Matching(ttft_factor=1.0))
    assert client.estimate(alone, LOAD).deployment.ttft_ms == pytest.approx(107.988)


def test_a_handle_stands_for_its_configuration(client: Client) -> None:
    engine = client.resolve(CONFIG)
    by_handle = client.estimate(Aggregated(engine=engine.handle, batch=4), LOAD)
    assert by_handle == client.estimate(Aggregated(engine=CONFIG, batch=4), LOAD)
    assert by_handle == client.estimate(Aggregated(engine=engine, batch=4), LOAD)


def test_what_does_not_fit_is_an_error_unless_asked_for(client: Client) -> None:
    asked = Aggregated(engine=dataclasses.replace(CONFIG, tp=1), batch=2000)
    with pytest.raises(OutOfMemory) as caught:
        client.estimate(asked, LOAD)
    assert float(caught.value.details["needed_bytes"]) > float(caught.value.details["limit_bytes"])
    told = client.estimate(asked, LOAD, allow_out_of_memory=True)
    assert told.memory[0].out_of_memory and "GPU memory" in told.warnings[0]


def test_a_kv_cache_over_its_budget_is_a_warning(client: Client) -> None:
    told = client.estimate(Aggregated(engine=CONFIG, batch=256), LOAD, limits=Limits(memory_fraction=0.1))
    assert told.memory[0].kv_over_budget and not told.memory[0].out_of_memory
    assert "over its budget" in told.warnings[0]


def test_memory_is_the_engine_s(client: Client, predictor: Predictor) -> None:
    told = client.estimate_memory(CONFIG, LOAD, block_size=32, tolerance=0.05)
    memory = worker(predictor).memory
    capacity = memory.kv_capacity(8192, memory.kv_fraction(), tolerance=0.05)
    assert told.kv_cache_tokens == capacity.kv_tokens
    assert (told.usable_kv_cache_bytes, told.usable_kv_cache_tokens) == capacity.within_tolerance
    assert told.kv_cache_blocks == capacity.blocks(32)
    assert told.at_start.total_bytes == sum(capacity.breakdown.values()) + capacity.kv_bytes
    most = told.largest_batch_per_rank
    assert not told.at_batch.kv_over_budget
    assert client.estimate_memory(CONFIG, LOAD, batch=most + 1).at_batch.kv_over_budget
    assert client.estimate_memory(CONFIG).largest_batch_per_rank is None


@pytest.mark.parametrize(
    ("asked", "load", "field"),
    [
        (Aggregated(engine=CONFIG, batch=0), LOAD, "aggregated.batch_per_rank"),
        (Aggregated(engine=CONFIG, batch=2**40), LOAD, "aggregated.batch_per_rank"),
        (Aggregated(engine=CONFIG, batch=1, ctx_tokens=-1), LOAD, "aggregated.ctx_tokens_per_rank"),
        (Aggregated(engine=CONFIG, batch=1), Workload(isl=0, osl=1), "workload.isl_tokens"),
        (Aggregated(engine=CONFIG, batch=1), Workload(isl=10, osl=1, prefix=10), "workload.prefix_tokens"),
        (Static(engine=CONFIG, batch=1, latency_correction=float("nan")), LOAD, "static.latency_correction"),
        (Static(engine=CONFIG, batch=1, phases="most"), LOAD, "static.phases"),
        (Static(engine=CONFIG, batch=1, stride=-1), LOAD, "static.stride"),
        (
            Disaggregated(prefill=Pool(engine=CONFIG, batch=1), decode=Pool(engine=CONFIG, batch=1, workers=-2)),
            LOAD,
            "disaggregated.decode.workers_total",
        ),
        (
            Disaggregated(
                prefill=Pool(engine=CONFIG, batch=1),
                decode=Pool(engine=CONFIG, batch=1),
                kv_transfer=KvTransfer(bandwidth_bytes_per_s=-1.0),
            ),
            LOAD,
            "kv_transfer.bandwidth_bytes_per_s",
        ),
        *(
            (
                Disaggregated(
                    prefill=Pool(engine=CONFIG, batch=1), decode=Pool(engine=CONFIG, batch=1), kv_transfer=link
                ),
                LOAD,
                f"kv_transfer.{field}",
            )
            for link, field in (
                (KvTransfer(bandwidth_bytes_per_s=1e-308), "bandwidth_bytes_per_s"),
                (KvTransfer(bandwidth_bytes_per_s=1e9, latency_s=1e308), "latency_s"),
            )
        ),
    ],
)
def test_malformed_estimates_are_refused_by_field(client: Client, asked, load, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.estimate(asked, load)
    assert caught.value.details["field"] == field


def test_limits_and_unknown_names_are_typed(client: Client) -> None:
    with pytest.raises(LimitExceeded, match="output tokens"):
        client.estimate(Static(engine=CONFIG, batch=1, stride=1), Workload(isl=1, osl=2**31 - 1))
    with pytest.raises(NotFound):
        client.estimate(Aggregated(engine=dataclasses.replace(CONFIG, system="h201"), batch=1), LOAD)
    with pytest.raises(InvalidRequest, match="memory_fraction"):
        client.estimate(Aggregated(engine=CONFIG, batch=1), LOAD, limits=Limits(memory_fraction=1.5))
    with pytest.raises(InvalidRequest, match="nextn_accepted"):
        client.estimate(Aggregated(engine=CONFIG, batch=1), LOAD, nextn_accepted=1.0)
