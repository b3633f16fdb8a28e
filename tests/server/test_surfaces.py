"""GetSurface over loopback: whole, in pieces, kept, bounded."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from perfcast.v1 import prediction_pb2
from perfcast_client import Client, EngineConfig, errors
from perfcast_client.snapshot import Received
from perfcast_engine.compiled import compile_surface
from perfcast_engine.config import EngineConfig as OwnConfig
from perfcast_engine.config import ParallelConfig
from perfcast_engine.predictor import Predictor
from perfcast_surface.parts import content_hash, take_apart

from tests.server.running import Running, running

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
CHUNK = 1 << 20


@pytest.fixture(scope="module")
def client(served: Running) -> Iterator[Client]:
    with Client(served.address) as client:
        yield client


def messages(client: Client, **fields: object) -> list[prediction_pb2.GetSurfaceResponse]:
    request = prediction_pb2.GetSurfaceRequest(config=CONFIG.to_message(), **fields)
    stub = client._channel.unary_stream(
        "/perfcast.v1.Prediction/GetSurface",
        prediction_pb2.GetSurfaceRequest.SerializeToString,
        prediction_pb2.GetSurfaceResponse.FromString,
    )
    return list(stub(request, timeout=60))


def test_the_surface_that_arrives_is_the_one_that_the_engine_compiles(client: Client) -> None:
    config = OwnConfig(model=CONFIG.model, system="h200_sxm", backend="trtllm", parallel=ParallelConfig(tp=4))
    engine = Predictor().engine(config)
    own = compile_surface(engine.steps)
    received = client.get_surface(CONFIG)
    assert received.surface_hash == content_hash(*take_apart(own))
    assert received.stamp.handle == engine.handle
    assert received.steps is not None and received.steps.domain == own.domain
    batch = np.arange(1, 200)
    np.testing.assert_array_equal(received.steps.decode_step(batch, 900, 100), own.decode_step(batch, 900, 100))


def test_large_surfaces_come_in_pieces(client: Client) -> None:
    header, *chunks = messages(client, max_pass_tokens=200_000)
    assert header.header.domain.max_pass_tokens == 1 << 18
    assert len(chunks) > 2
    assert max(chunk.ByteSize() for chunk in chunks) <= CHUNK
    received = Received.of([header, *chunks])
    assert received.steps is not None and received.steps.domain.pass_tokens == 1 << 18


def test_a_surface_that_still_holds_is_not_sent_again(client: Client) -> None:
    known = client.get_surface(CONFIG)
    (header,) = messages(client, known_surface_hash=known.surface_hash)
    assert header.header.unchanged
    assert header.header.engine.data_version == known.stamp.data_version
    assert client.get_surface(CONFIG, known_hash=known.surface_hash).steps is None
    assert len(messages(client, known_surface_hash="another")) > 1


def test_engines_without_a_surface_are_told(client: Client) -> None:
    with pytest.raises(errors.InvalidRequest, match="PredictSteps") as caught:
        client.get_surface(replace(CONFIG, database_mode="empirical"))
    assert caught.value.reason == "UNSUPPORTED"
    with pytest.raises(errors.InvalidRequest, match="max_pass_tokens"):
        client.get_surface(CONFIG, max_pass_tokens=-1)
    with pytest.raises(errors.UnknownHandle):
        client.get_surface("nobody")


def test_callers_at_once_share_one_compilation() -> None:
    with running() as served, Client(served.address) as client:
        client.resolve(CONFIG)
        with ThreadPoolExecutor(16) as pool:
            hashes = {found.surface_hash for found in pool.map(lambda _: client.get_surface(CONFIG), range(32))}
        assert len(hashes) == 1
        assert served.metric("surface_compile_seconds_count") == 1
        assert served.metric("surface_cache_bytes") > 100_000


def test_kept_surfaces_are_bounded() -> None:
    with running(max_surface_bytes=1_000_000) as served, Client(served.address) as client:
        for size in (1 << 10, 1 << 13, 1 << 15, 1 << 17):
            assert client.get_surface(CONFIG, size).steps is not None
            assert client.get_surface(replace(CONFIG, tp=2), size).steps is not None
        assert served.metric("surface_cache_bytes") <= 1_000_000
        assert served.metric("grpc_server_in_work") == 0


def test_a_server_at_its_limit_refuses_surfaces_too() -> None:
    with running(max_concurrent_requests=1) as served, Client(served.address) as client:
        client.get_surface(CONFIG)
        served.server._rpc._in_work = 1
        with pytest.raises(errors.LimitExceeded):
            client.get_surface(CONFIG)
