"""Encode pools and attention-FFN disaggregation."""

from dataclasses import replace

import numpy as np
import pytest
from perfcast_engine.config import EngineConfig, ParallelConfig
from perfcast_engine.errors import InvalidField, UnsupportedCombination
from perfcast_engine.predictor import Predictor
from perfcast_planning.search.afd import topologies
from perfcast_planning.search.encode import best_cells, cells
from perfcast_planning.search.search import search
from perfcast_planning.search.task import SearchTask
from perfcast_planning.search.workshop import TableWorkshop
from perfcast_planning.serving.afd import Topology, afd, place_of, prefill_ms, step_ms
from perfcast_planning.serving.disaggregated import Matching
from perfcast_planning.serving.rows import Rows
from perfcast_planning.serving.worker import worker_of
from perfcast_planning.serving.workload import Images, Targets, Workload

from tests.planning.toy import Dense

LOAD = Workload(4000, 500)


@pytest.fixture(scope="module")
def predictor():
    return Predictor()


def engine(predictor, model, backend, **parallel):
    config = EngineConfig(
        model=model, system="h200_sxm", backend=backend, profile="reference", parallel=ParallelConfig(**parallel)
    )
    return worker_of(predictor.engine(config))


# --- AFD: figures of the reference engine for the same questions ---


@pytest.mark.parametrize(
    ("model", "backend", "attention", "ffn", "ep", "tpot", "memory"),
    [
        ("Qwen/Qwen3-32B-FP8", "trtllm", {"tp": 4}, {"tp": 8}, 1, 13.497, (15.1456298828125, 6.880859375)),
        (
            "deepseek-ai/DeepSeek-V3",
            "sglang",
            {"tp": 4, "moe_tp": 1, "moe_ep": 4},
            {"tp": 8, "moe_tp": 1, "moe_ep": 8},
            8,
            77.509,
            (19.624343585968017, 85.267626953125),
        ),
    ],
)
def test_afd_decode(predictor, model, backend, attention, ffn, ep, tpot, memory):
    topology = Topology(attention_nodes=2, ffn_nodes=1, attention_tp=4, ffn_ep=ep)
    workers = (engine(predictor, model, backend, **widths) for widths in (attention, ffn))
    rows, own, other = afd(*workers, topology, LOAD, 64)
    assert rows["tpot_ms"][0] == pytest.approx(tpot, abs=5e-4)
    assert rows["tokens_per_s_per_gpu"][0] == pytest.approx(256 / rows["tpot_ms"][0] * 1000 / 24)
    assert (own.gib[0], other.gib[0]) == pytest.approx(memory)


def test_afd_prefill(predictor):
    model = "Qwen/Qwen3-235B-A22B-FP8"
    attention = engine(predictor, model, "trtllm", tp=4, moe_tp=1, moe_ep=4)
    ffn = engine(predictor, model, "trtllm", tp=16, moe_tp=4, moe_ep=4)
    topology = Topology(attention_nodes=2, ffn_nodes=2, attention_tp=4, ffn_ep=4)
    assert prefill_ms(attention, ffn, topology, LOAD, 16)[0] == pytest.approx(1308.716, abs=5e-4)


def test_three_micro_batches_hide_a_short_transfer():
    base = {"attention_nodes": 1, "ffn_nodes": 1, "attention_tp": 1}
    a, f, hop = np.array([2.0]), np.array([3.0]), np.array([0.5])
    optimistic = step_ms(a, f, hop, Topology(**base, microbatches=3), 10, True)
    assert optimistic[0] == 2 + 3 + 1 + 3 * 29
    cautious = step_ms(a, f, hop, Topology(**base, microbatches=3, optimistic=False), 10, True)
    assert cautious[0] == 2 + 3 + 1 + 3.5 * 29
    two = step_ms(a, f, hop, Topology(**base, microbatches=2), 10, True)
    assert two[0] == 2 + 3 + 1 + 3.5 * 19


def test_operators_have_a_place_or_are_refused():
    places = {name: place_of(Dense(name=name, base=0, per_token=0)) for name in (
        "context_qkv_gemm", "context_up_gate_proj_gemm", "generation_moe", "generation_ar_1", "context_add_norm_2"
    )}  # fmt: skip
    assert list(places.values()) == ["attention", "ffn", "ffn", None, "attention"]
    for name in ("context_mamba_ssm", "context_unheard_of"):
        with pytest.raises(UnsupportedCombination):
            place_of(Dense(name=name, base=0, per_token=0))


def test_topologies_fit_their_budget():
    found = list(topologies(32, 8, 256))
    assert found
    assert all(t.gpus(8) <= 32 and t.attention_nodes <= 4 * t.ffn_nodes for t in found)
    assert not list(topologies(8, 8, 256))


def test_afd_search_finds_what_an_estimate_confirms(predictor):
    config = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm")
    task = SearchTask(engine=config, load=LOAD, targets=Targets(3000, 60), total_gpus=24, modes=("afd",))
    (found,) = search(task, TableWorkshop(predictor)).experiments
    best = found.pick.rows.row(0)
    topology = Topology(
        attention_nodes=int(best["afd_attention_nodes"]),
        ffn_nodes=int(best["afd_ffn_nodes"]),
        attention_tp=int(best["afd_attention_tp"]),
        microbatches=int(best["afd_microbatches"]),
        optimistic=bool(best["afd_optimistic"]),
    )
    widths = (topology.attention_tp, topology.ffn_nodes * 8)
    sides = [worker_of(predictor.engine(replace(config, parallel=ParallelConfig(tp=tp)))) for tp in widths]
    rows, _, _ = afd(*sides, topology, LOAD, best["decode_batch"])
    assert rows["tpot_ms"][0] == pytest.approx(best["tpot_ms"])
    assert best["gpus"] <= 24


# --- encode pools ---


def test_images_are_encoded_by_workers_of_their_own(predictor):
    config = EngineConfig(model="Qwen/Qwen3-VL-32B-Instruct", system="h200_sxm", backend="vllm", profile="reference")
    load = Workload(1000, 500, images=Images(1024, 1024, 2))
    task = SearchTask(engine=config, load=load, targets=Targets(3000, 60), total_gpus=16, encode_pool=True)
    found, apart = search(task, TableWorkshop(predictor)).experiments
    best = found.pick.rows.row(0)
    # The reference engine's best cluster throughput for the same question.
    assert found.pick.score == pytest.approx(838.53, abs=0.01)
    assert (best["ttft_ms"], best["encode_ms"], best["batch"]) == pytest.approx((443.413, 24.829, 112))
    assert apart.pick.score == pytest.approx(826.959, rel=1e-4)
    assert best["gpus"] == best["cell_engines"] * 2 + best["encode_workers"] * best["encode_gpus"]


def test_encode_workers_are_chosen_for_throughput_within_the_ttft_limit():
    base = {
        "requests_per_s": 10,
        "gpus": 4,
        "ttft_ms": 100,
        "request_latency_ms": 600,
        "tokens_per_s": 1000,
        "concurrency": 8,
    }
    rows = Rows({name: np.array([float(value)]) for name, value in base.items()})
    names = ("batch", "encode_ms", "requests_per_s", "gpus", "memory_gib", "engine")
    encoders = np.array([[1, 50, 20, 2, 1, 0], [8, 200, 40, 2, 1, 0]], float).T
    pool = Rows(dict(zip(names, encoders, strict=True)))

    def best(ttft=1000.0, budget=64.0):
        return best_cells(cells(rows, pool, Matching(encoder_degradation=1.0), 1.0, 1.0, budget), ttft)

    free = best().row(0)
    assert (free["cell_engines"], free["encode_workers"], free["encode_batch"]) == (4, 1, 8)
    assert (free["gpus"], free["requests_per_s"], free["tokens_per_s"], free["concurrency"]) == (18, 40, 4000, 32)
    assert free["request_latency_ms"] == 800
    assert best(ttft=200.0).row(0)["encode_batch"] == 1
    assert best(budget=10.0).row(0)["gpus"] <= 10
    assert len(best(budget=5.0)) == 0


def test_encode_pools_need_images():
    config = EngineConfig(model="Qwen/Qwen3-VL-32B-Instruct", system="h200_sxm", backend="vllm")
    with pytest.raises(InvalidField, match="encode_pool"):
        SearchTask(engine=config, load=LOAD, encode_pool=True)
