"""Coverage and support over loopback, held against the engine in this process."""

from __future__ import annotations

import dataclasses
import json

import pytest
from perfcast_client import AsyncClient, Client, EngineConfig, errors
from perfcast_engine import EngineConfig as OwnConfig
from perfcast_engine import ParallelConfig, Predictor
from perfcast_engine.coverage import coverage

from tests.server.running import Running

CONFIG = EngineConfig(model="Qwen/Qwen3-30B-A3B", system="a100_sxm", backend="trtllm", moe_ep=1)
MODELS = ["Qwen/Qwen3-8B", "google/gemma-4-26B-A4B", "zai-org/GLM-5-FP8"]


@pytest.fixture(scope="module")
def client(served: Running):
    with Client(served.address) as client:
        yield client


def test_coverage_is_the_engine_s(client: Client) -> None:
    own = OwnConfig(model=CONFIG.model, system="a100_sxm", backend="trtllm", parallel=ParallelConfig(moe_ep=1))
    expected, told = coverage(Predictor().engine(own)), client.coverage(CONFIG)
    assert told.works_in == "hybrid" and told.engine == client.resolve(CONFIG).stamp
    assert told.parallel == {"tp": 1, "pp": 1, "attn_dp": 1, "cp": 1, "moe_tp": 1, "moe_ep": 1}
    for one, other in zip(told.operators, expected.operators, strict=True):
        assert (one.phase, one.name, one.kind, one.standing) == (other.phase, other.name, other.kind, other.standing)
        assert (one.table, one.key, one.nearest) == (other.table, other.key, other.nearest)
        assert tuple(one.shares.values()) == (*other.shares, other.missing)
    (missed,) = [o for o in told.operators if o.phase == "decode" and o.error is not None]
    assert (missed.name, missed.works_in, missed.tier) == ("generation_moe", "hybrid", "cross_shape")
    assert missed.error is not None and missed.error.reason == "PERF_DATA_MISSING"
    json.dumps(told.to_dict())


def test_coverage_goes_by_handle_and_mode_says_nothing_about_it(client: Client) -> None:
    hybrid = client.resolve(dataclasses.replace(CONFIG, database_mode="hybrid"))
    assert client.coverage(hybrid).operators[3].standing == client.coverage(CONFIG).operators[3].standing
    assert client.coverage(hybrid.handle).engine.handle == hybrid.handle


def test_a_mapping_can_be_chosen(client: Client) -> None:
    wide = EngineConfig(model="deepseek-ai/DeepSeek-V3", system="h200_sxm", backend="trtllm")
    chosen = client.coverage(wide, choose_parallel=True)
    assert chosen.parallel["tp"] == chosen.parallel["moe_ep"] == 8 and chosen.works_in == "silicon"
    alone = EngineConfig(model="Qwen/Qwen3-8B", system="a30", backend="vllm", version="0.24.0", database_mode="sol")
    assert client.coverage(alone, choose_parallel=True).works_in == "sol"
    with pytest.raises(errors.InvalidRequest, match="configuration"):
        client.coverage(client.resolve(CONFIG), choose_parallel=True)
    with pytest.raises(errors.OutOfMemory, match="does not fit 64 GPUs"):
        client.coverage(EngineConfig(model="moonshotai/Kimi-K3", system="b60", backend="vllm"), choose_parallel=True)


def test_support_lists_models_of_all_backends_or_one(client: Client) -> None:
    told = client.support("h200_sxm", models=MODELS)
    assert [(cell.model, cell.backend) for cell in told] == [
        (m, b) for b in ("trtllm", "sglang", "vllm") for m in MODELS
    ]
    assert [cell.verdict for cell in told if cell.backend == "trtllm"] == ["PASS", "HYBRID", "FAIL"]
    (gemma,) = client.support("h200_sxm", "trtllm", models=MODELS[1:2])
    assert gemma.version == "1.3.0rc20" and gemma.unmeasured == (
        "prefill/context_attention",
        "decode/generation_attention",
    )
    assert gemma.to_dict()["verdict"] == "HYBRID" and gemma.to_dict()["error"]["reason"] == "PERF_DATA_MISSING"


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (("h201",), errors.NotFound, "h200_sxm"),
        (("h200_sxm", "trtlm"), errors.NotFound, "trtllm"),
        (("h200_sxm", "trtllm", "1.3.0rc2"), errors.NotFound, "1.3.0rc20"),
        (("h200_sxm", "trtllm", "", ["Qwen/Qwen3-8b"]), errors.NotFound, "Qwen/Qwen3-8B"),
        (("h200_sxm", "trtllm", "", ["Qwen/Qwen3-8B"] * 1000), errors.InvalidRequest, "names more than"),
        (("",), errors.InvalidRequest, "system: is missing"),
        (("x" * 300,), errors.InvalidRequest, "longer than"),
    ],
)
def test_support_refuses_by_name(client: Client, arguments, kind, words: str) -> None:
    with pytest.raises(kind, match=words):
        client.support(*arguments)


async def test_the_asyncio_client_asks_the_same(served: Running, client: Client) -> None:
    async with AsyncClient(served.address) as own:
        assert (await own.coverage(CONFIG)).to_dict() == client.coverage(CONFIG).to_dict()
        told = await own.support("h200_sxm", "vllm", models=MODELS)
        assert [cell.works_in for cell in told] == [c.works_in for c in client.support("h200_sxm", "vllm", "", MODELS)]
