"""Both clients against a real server, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import grpc
import numpy as np
import pytest
from perfcast.v1 import catalog_pb2
from perfcast_client import AsyncClient, Client, DecodeStep, EngineConfig, Mixed, Prefill, bearer, calls, errors

from tests.client.stand_in import standing_in
from tests.server.running import PATIENCE_S, Running

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)


@pytest.fixture(scope="module")
def client(served: Running) -> Iterator[Client]:
    with Client(served.address) as client:
        yield client


def answering(method: str, answer: Callable[[bytes, grpc.ServicerContext], bytes]) -> AbstractContextManager[str]:
    """A server of one method."""
    return standing_in({method: grpc.unary_unary_rpc_method_handler(answer)})


def test_the_catalog(client: Client) -> None:
    systems = {system.name: system for system in client.systems()}
    assert len(systems) == 14
    h200 = systems["h200_sxm"]
    assert (h200.gpus_per_node, h200.sm_version) == (8, 90)
    assert h200.memory_bandwidth_bytes_per_s == 4.8e12
    assert {v.backend for v in h200.versions} == {"trtllm", "sglang", "vllm"}
    current = [v.version for v in client.versions("h200_sxm", "trtllm") if v.slot == "current"]
    assert current == ["1.3.0rc20"]
    models = client.models("QWEN3-32B-fp8-static")
    assert [(m.model, m.layers, m.quant["gemm"]) for m in models] == [
        ("Qwen/Qwen3-32B-FP8-Static-PerTensor", 64, "fp8_static")
    ]
    assert {m.family for m in client.models(family="LLAMA")} == {"LLAMA"}


def test_support_is_an_answer_also_when_it_is_no(client: Client) -> None:
    yes = client.check_support(CONFIG)
    assert yes.supported and yes.engine is not None
    assert [phase.phase for phase in yes.phases] == ["prefill", "decode", "mixed"]
    no = client.check_support(dataclasses.replace(CONFIG, system="h900"))
    assert not no.supported and no.engine is None
    assert isinstance(no.error, errors.NotFound) and no.error.reason == "UNKNOWN_SYSTEM"


def test_results_are_frozen_and_go_to_json(client: Client) -> None:
    told = client.predict(CONFIG, Prefill(1, 128), operators=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        told.latency_ms = 0.0  # type: ignore[misc]
    many = client.predict_many(CONFIG, Prefill(np.array([1, 2]), 128), provenance=True)
    for result in (told, many, client.resolve(CONFIG), client.check_support(CONFIG), *client.systems()):
        assert json.loads(json.dumps(result.to_dict()))
    assert many.to_dict()["latency_ms"] == many.latency_ms.tolist()


def test_a_configuration_survives_its_message_and_its_dict() -> None:
    config = EngineConfig(
        model="m", system="s", backend="b", version="1", config_json="{}", tp=2, moe_ep=4, gemm_quant="fp8",
        database_mode="hybrid", transfer_policy="off", profile="reference", resolution="search", role="decode", nextn=2,
        attention_backend="fa3", enable_eplb=True, expert_slots=288, encoder_dp=False, moe_comm_context="deepep",
    )  # fmt: skip
    assert EngineConfig.from_message(config.to_message()) == config
    assert EngineConfig.from_dict(config.to_dict()) == config
    with pytest.raises(errors.InvalidRequest, match="missing"):
        EngineConfig.from_dict({"model": "m"})


async def test_the_asyncio_client_says_the_same(served: Running, client: Client) -> None:
    async with AsyncClient(served.address) as own:
        engine = await own.resolve(CONFIG)
        assert engine == client.resolve(CONFIG)
        assert await own.predict(engine, Mixed(512, 8, 512, 64)) == client.predict(engine, Mixed(512, 8, 512, 64))
        steps = DecodeStep(np.arange(1, 9), 512, 64)
        many = await own.predict_many(engine, steps)
        assert many.latency_ms.tolist() == client.predict_many(engine, steps).latency_ms.tolist()
        assert await own.systems() == client.systems()
        assert await own.models("qwen3") == client.models("qwen3")
        assert await own.versions("h200_sxm") == client.versions("h200_sxm")
        assert (await own.check_support(CONFIG)).supported
        with pytest.raises(errors.NotFound) as caught:
            await own.predict(dataclasses.replace(CONFIG, model="nope"), Prefill(1, 1))
        assert caught.value.reason == "UNKNOWN_MODEL"
        async with own.stream(engine) as stream:
            assert await stream.predict_ms(Prefill(1, 128)) == client.predict(engine, Prefill(1, 128)).latency_ms
            with pytest.raises(errors.InvalidRequest):
                await stream.predict_ms(Prefill(1, 128, prefix=500))
            assert await stream.predict_ms(Prefill(2, 128)) == client.predict(engine, Prefill(2, 128)).latency_ms
    with pytest.raises(errors.ClientMisuse, match="closed"):
        await own.systems()


def test_a_closed_client_and_one_from_before_a_fork_say_so(served: Running) -> None:
    client = Client(served.address)
    client.close()
    with pytest.raises(errors.ClientMisuse, match="closed"):
        client.systems()
    other = Client(served.address)
    other._pid = os.getpid() + 1
    with pytest.raises(errors.ClientMisuse, match="fork"):
        other.systems()


def test_unavailable_is_retried_and_nothing_else() -> None:
    tries: list[grpc.StatusCode] = []
    codes = iter([grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, None, grpc.StatusCode.INTERNAL])

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        code = next(codes)
        tries.append(code)
        if code is not None:
            context.abort(code, "as told")
        return catalog_pb2.GetServerInfoResponse(version="9", api_revision=99).SerializeToString()

    with answering("perfcast.v1.Catalog/GetServerInfo", answer) as address:
        with Client(address) as client:
            assert client.server_info().version == "9"
        assert len(tries) == 3
        with Client(address) as client, pytest.raises(errors.ServerFault, match="as told"):
            client.server_info()
        assert len(tries) == 4


def test_a_server_of_an_older_revision_or_another_kind_is_named() -> None:
    def old(request: bytes, context: grpc.ServicerContext) -> bytes:
        return catalog_pb2.GetServerInfoResponse(version="0.0.1").SerializeToString()

    for method, words in (
        ("perfcast.v1.Catalog/GetServerInfo", r"0\.0\.1.*revision 0"),
        ("other/Do", "does not speak"),
    ):
        with (
            answering(method, old) as address,
            Client(address) as client,
            pytest.raises(errors.IncompatibleServer, match=words),
        ):
            client.systems()


def test_nobody_listening_is_unavailable_within_the_deadline() -> None:
    with Client("127.0.0.1:1", deadline_s=0.5) as client, pytest.raises((errors.Unavailable, errors.DeadlineExceeded)):
        client.systems()


def test_every_call_asks_for_metadata_anew() -> None:
    seen: list[Any] = []

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        seen.append(dict(context.invocation_metadata()).get("authorization"))
        return catalog_pb2.GetServerInfoResponse(version="9", api_revision=99).SerializeToString()

    tokens = iter(["one", "two"])
    with (
        answering("perfcast.v1.Catalog/GetServerInfo", answer) as address,
        Client(address, metadata=bearer(lambda: next(tokens))) as client,
    ):
        client._make(calls.server_info(), None)
        client.server_info()
    assert seen == ["Bearer one", "Bearer two"]


def test_a_miss_is_per_point_where_misses_are_allowed(client: Client) -> None:
    bare = dataclasses.replace(CONFIG, system="a100_sxm", gemm_quant="fp8", database_mode="silicon")
    try:
        told = client.predict_many(bare, Prefill(np.array([1, 2]), 128), allow_misses=True)
    except errors.PerfcastError as error:
        assert error.reason
    else:
        assert np.isnan(told.latency_ms).sum() == len(told.misses)


def test_a_stream_says_so_where_its_caller_would_wait_for_itself(client: Client) -> None:
    with client.stream(CONFIG) as stream:
        ms = stream.predict_ms(Prefill(1, 128))
        ahead = stream.predict_all_ms([Prefill(1, 128)] * 3)
        assert next(ahead) == ms
        with pytest.raises(errors.ClientMisuse):
            stream.predict_ms(Prefill(1, 256))
        assert list(ahead) == [ms] * 2
        assert stream.predict_ms(Prefill(1, 128)) == ms


async def test_tasks_that_share_an_asyncio_stream_take_turns(served: Running) -> None:
    async with AsyncClient(served.address, deadline_s=PATIENCE_S) as client, client.stream(CONFIG) as stream:
        alone = [await stream.predict_ms(Prefill(1, 128 * n)) for n in range(1, 9)]
        assert await asyncio.gather(*(stream.predict_ms(Prefill(1, 128 * n)) for n in range(1, 9))) == alone
