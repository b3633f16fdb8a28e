"""The propose plugin as a planner calls it, and its registration with one."""

from __future__ import annotations

import asyncio
import math
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from perfcast_client import AsyncClient, Client, EngineConfig, planner
from perfcast_client.adapters import Pool, ProposePlugin, Registration, plugin_schema
from perfcast_client.adapters.msgpack import unpack
from perfcast_client.adapters.plugin_schema import messages as m

from tests.server.running import PATIENCE_S, eventually

ENGINE = EngineConfig(model="Qwen/Qwen3-32B", system="h200_sxm", backend="vllm", tp=4)
POOLS = {
    "prefill": Pool(engine=ENGINE, role="prefill", max_replicas=50),
    "decode": Pool(engine=ENGINE, role="decode", min_replicas=2),
}


def pack(value: Any) -> bytes:
    """msgpack of what records hold, in the widest forms."""
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if value is None:
        return b"\xc0"
    if isinstance(value, int):
        return b"\xd3" + struct.pack(">q", value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"\xd9" + struct.pack(">B", len(value.encode())) + value.encode()
    if isinstance(value, bytes):
        return b"\xc5" + struct.pack(">H", len(value)) + value
    if isinstance(value, dict):
        body = b"".join(pack(part) for item in value.items() for part in item)
        return b"\xde" + struct.pack(">H", len(value)) + body
    return b"\xdc" + struct.pack(">H", len(value)) + b"".join(map(pack, value))


def test_msgpack_is_read_in_all_forms_and_refused_when_malformed() -> None:
    value = {"a": [1, -5, 2**40, 1.5, None, True, False, "é", b"\x00"], "b": {"c": []}}
    assert unpack(pack(value)) == value
    compact = b"\x82\xa1a\x93\x01\xff\xcc\xc8\xa1b\x80"
    assert unpack(compact) == {"a": [1, -1, 200], "b": {}}
    for bad in (b"", b"\xc1", pack(value)[:-1], pack(1) + pack(2), b"\xd9\x09ab", b"\x91" * 40, b"\xa1\xff"):
        with pytest.raises(ValueError):
            unpack(bad)


def record(**parts: dict[str, int]) -> bytes:
    return pack({"version": 1, "worker_id": "w", "dp_rank": 0, **parts})


@contextmanager
def plugin(kind: str, target: str, **options: Any) -> Iterator[Any]:
    """A channel to a running plugin."""
    options = {"deadline_s": PATIENCE_S} | options
    if kind == "blocking":
        with Client(target) as client:
            server, port = ProposePlugin(client, POOLS, **options).server()
            server.start()
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield channel
            server.stop(None).wait()
        return
    started, stop, ports = threading.Event(), threading.Event(), []

    async def serve() -> None:
        async with AsyncClient(target) as client:
            server, port = ProposePlugin(client, POOLS, **options).server()
            await server.start()
            ports.append(port)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)
            await server.stop(None)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(PATIENCE_S)
        with grpc.insecure_channel(f"127.0.0.1:{ports[0]}") as channel:
            yield channel
    finally:
        stop.set()
        thread.join(PATIENCE_S)


def call(channel: Any, method: str, request: Any, response: Any) -> Any:
    service = plugin_schema.PROPOSE if method == "Propose" else plugin_schema.LIFECYCLE
    stub = channel.unary_unary(f"/{service}/{method}", lambda part: part.SerializeToString(), response.FromString)
    return stub(request, timeout=2 * PATIENCE_S)


def proposed(channel: Any, context: Any) -> dict[str, int] | None:
    told = call(channel, "Propose", m.ProposeStageRequest(context=context), m.ProposeStageResponse)
    if told.WhichOneof("result") == "accept":
        return None
    assert all(target.type == plugin_schema.SET for target in told.override.targets) and told.override.reason
    return {target.sub_component_type: target.replicas for target in told.override.targets}


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_replicas_follow_the_predicted_rate(remote: dict[str, str], kind: str, transport: str) -> None:
    with Client(remote[transport]) as client, plugin(kind, remote[transport]) as channel:
        wanted = {}
        for component, role in (("prefill", "prefill"), ("decode", "decode")):
            targets = {"ttft_s": 0.5} if role == "prefill" else {"itl_s": 0.05}
            found = client.ask(planner.capacity(ENGINE, role=role, isl=3000, osl=150, kv_hit_rate=0.25, **targets))
            assert found is not None
            wanted[component] = math.ceil(9000 / 60 / found.rps)
        traffic = m.TrafficMetrics(duration_s=60.0, num_req=6000.0, isl=2999.5, osl=149.2, kv_hit_rate=0.25)
        seen = m.ObservationData(traffic=traffic)
        told = m.PredictionData(predicted_num_req=9000.0)
        context = m.PipelineContext(observations=seen, predictions=told)
        assert proposed(channel, context) == wanted
        less = proposed(channel, m.PipelineContext(observations=seen))
        assert less is not None and less["prefill"] < wanted["prefill"]
        seen.traffic.num_req = 60.0
        assert proposed(channel, m.PipelineContext(observations=seen)) == {"prefill": 1, "decode": 2}
        seen.traffic.num_req = 1e7
        most = proposed(channel, m.PipelineContext(observations=seen))
        assert most is not None and most["prefill"] == 50


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_engines_that_would_all_miss_their_target_get_one_more(remote: dict[str, str], kind: str) -> None:
    busy = {"queued_requests": {"num_prefill_requests": 9, "sum_prefill_tokens": 90_000}}
    idle = {"queued_requests": {"num_prefill_requests": 0, "sum_prefill_tokens": 0}}
    slow = {"scheduled_requests": {"num_decode_requests": 800, "sum_decode_kv_tokens": 800 * 5000}}
    with plugin(kind, remote["tcp"]) as channel:
        workers = m.WorkerState(ready_prefill=2, ready_decode=3)
        fpm = m.FpmData(
            prefill_engines={"a/0": record(**busy), "b/0": record(**busy)}, decode_engines={"c/0": record(**slow)}
        )
        seen = m.ObservationData(fpm=fpm, workers=workers)
        assert proposed(channel, m.PipelineContext(observations=seen)) == {"prefill": 3, "decode": 4}
        seen.fpm.prefill_engines["b/0"] = record(**idle)
        assert proposed(channel, m.PipelineContext(observations=seen)) == {"decode": 4}
        seen.fpm.decode_engines["c/0"] = record(version=0, **slow)
        assert proposed(channel, m.PipelineContext(observations=seen)) == {"decode": 4}
        seen.fpm.decode_engines["c/0"] = b"\xc1"
        assert proposed(channel, m.PipelineContext(observations=seen)) is None


def test_a_plugin_without_data_or_server_has_no_opinion(remote: dict[str, str]) -> None:
    with plugin("blocking", remote["tcp"]) as channel:
        assert proposed(channel, m.PipelineContext()) is None
        seen = m.ObservationData(traffic=m.TrafficMetrics(duration_s=60, num_req=math.nan, isl=1, osl=1))
        assert proposed(channel, m.PipelineContext(observations=seen)) is None
        assert call(channel, "Bootstrap", m.BootstrapRequest(), m.BootstrapResponse).ok
        assert call(channel, "Reset", m.ResetRequest(), m.ResetResponse).ok
    with plugin("blocking", "127.0.0.1:1", deadline_s=0.3) as channel:
        seen = m.ObservationData(traffic=m.TrafficMetrics(duration_s=60, num_req=100, isl=100, osl=10))
        assert proposed(channel, m.PipelineContext(observations=seen)) is None
    with pytest.raises(ValueError, match="pools"):
        ProposePlugin(Client("127.0.0.1:1"), {"both": POOLS["decode"]})


class Registry:
    """A planner's registry that remembers what it was told."""

    def __init__(self, accepts: bool = True) -> None:
        self.accepts, self.forgets = accepts, False
        self.registered: list[Any] = []
        self.beats = self.left = 0

    def register(self, request: Any, context: Any) -> Any:
        self.registered.append(request)
        return m.RegisterResponse(accepted=self.accepts, reject_reason="" if self.accepts else "auth")

    def heartbeat(self, request: Any, context: Any) -> Any:
        self.beats += 1
        return m.HeartbeatResponse(ok=not self.forgets)

    def unregister(self, request: Any, context: Any) -> Any:
        self.left += 1
        return m.UnregisterResponse(ok=True)


@contextmanager
def registry(accepts: bool = True) -> Iterator[tuple[Registry, str]]:
    own = Registry(accepts)
    server = grpc.server(ThreadPoolExecutor(2))
    methods = {"Register": (own.register, m.RegisterRequest), "Heartbeat": (own.heartbeat, m.HeartbeatRequest),
               "Unregister": (own.unregister, m.UnregisterRequest)}  # fmt: skip
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(answer, kind.FromString, lambda part: part.SerializeToString())
        for name, (answer, kind) in methods.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(plugin_schema.REGISTRY, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield own, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_registration_keeps_itself_alive_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfcast_client.adapters.propose.HEARTBEAT_S", 0.02)
    with registry() as (own, address):
        registration = Registration(address, "grpc://plugin:5", auth_token="secret", priority=7)
        registration.start()
        (first,) = own.registered
        assert (first.plugin_type, first.protocol_version, first.priority) == ("propose", "1.0", 7)
        assert (first.endpoint, first.auth_token) == ("grpc://plugin:5", "secret")
        assert set(first.needs) > {"predictions", "observations.fpm"}
        own.forgets = True
        eventually(lambda: len(own.registered) > 1)  # registers anew where it was forgotten
        assert own.beats
        registration.close()
        assert own.left == 1
    with registry(accepts=False) as (_, address), pytest.raises(RuntimeError, match="auth"):
        Registration(address, "grpc://plugin:5").register()
