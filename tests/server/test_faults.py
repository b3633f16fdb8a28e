"""What goes wrong around a server: full disks, clocks that jump, packs cut while in use, callers that stall."""

from __future__ import annotations

import re
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from perfcast.v1 import prediction_pb2
from perfcast_client import Client, EngineConfig, LocalSurface, Prefill, calibration, errors
from perfcast_client.planner_types import RankPass
from perfcast_server import prediction
from perfcast_server.app import services
from perfcast_systems import ROOT

from tests.server.running import PATIENCE_S, Running, eventually, process, running

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
ROOMS = ("engine", "server", "client", "surface")
PACK = next(iter(sorted((ROOT / "packs" / "h200_sxm").glob("trtllm-*.pack"))), None)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
HALF_A_HEADERS_FRAME = bytes([0, 0, 200, 1, 4, 0, 0, 0, 1]) + bytes(20)


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the limits of another process cannot be set here")
def test_a_full_disk_fails_what_must_be_kept_and_nothing_else(tmp_path: Path) -> None:
    def tune(client: Client, sequence: int) -> calibration.Tuned:
        records = [[RankPass(1, 500 + sequence, 0, 4, 4000, 0.02)]]
        return client.ask(calibration.tune(CONFIG, "s", records, client_id="t", sequence=sequence))

    with process("--state-dir", str(tmp_path)) as served, Client(served.address, deadline_s=PATIENCE_S) as client:
        assert tune(client, 1).state_version == 1
        pid, before = served.popen.pid, resource.prlimit(served.popen.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, before[1]))  # no file of the process may grow any more
        with pytest.raises(errors.Unavailable) as caught:
            tune(client, 2)
        assert caught.value.reason == "STATE_STORE"
        assert str(tmp_path) not in caught.value.message
        assert client.predict(CONFIG, Prefill(1, 128)).latency_ms > 0
        assert client.ask(calibration.diagnose(CONFIG, "s")).state_version == 1
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        assert [tune(client, sequence).state_version for sequence in (2, 2, 3)] == [2, 2, 3]


def test_nothing_but_the_age_of_a_saved_surface_is_told_by_a_clock_that_can_be_set() -> None:
    """Everything else is measured by clocks that never jump."""
    root = Path(__file__).parents[2]
    found = {
        path.name
        for room in ROOMS
        for path in (root / room).rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\(|datetime\.(now|today|utcnow)\(|CLOCK_REALTIME", path.read_text())
    }
    assert found == {"local.py", "snapshot.py"}


@pytest.mark.parametrize("jump_s", [-1e8, 1e8])
def test_a_surface_answers_and_has_an_age_whatever_the_clock_says(
    served: Running, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    truth = time.time
    with Client(served.address, deadline_s=PATIENCE_S) as client:
        surface: LocalSurface = client.surface(CONFIG, refresh_s=0)
        before = surface.predict_ms(Prefill(1, 4321))
        monkeypatch.setattr(time, "time", lambda: truth() + jump_s)
        assert surface.predict_ms(Prefill(1, 4321)) == before
        assert surface.age_s >= 0
        monkeypatch.undo()
        assert not surface.refresh()


@pytest.mark.skipif(PACK is None, reason="this checkout has no packs of measured tables")
@pytest.mark.parametrize("how", ["cut", "emptied", "flipped"])
def test_a_pack_that_is_damaged_where_it_lies_spoils_what_was_not_read_yet(tmp_path: Path, how: str) -> None:
    """Written over in place, as nobody should, while a server has it open."""
    assert PACK is not None
    (tmp_path / "h200_sxm").mkdir()
    own = Path(shutil.copy(PACK, tmp_path / "h200_sxm" / PACK.name))
    other = replace(CONFIG, model="Qwen/Qwen3-30B-A3B", tp=2, moe_ep=2)
    with running(data=(str(tmp_path),)) as served, Client(served.address, deadline_s=PATIENCE_S) as client:
        before = client.predict(CONFIG, Prefill(1, 1024))
        data = bytearray(own.read_bytes())
        for at in range(len(data) // 3, len(data), 997):
            data[at] ^= 0x40
        own.write_bytes({"cut": bytes(data[: len(data) // 2]), "emptied": b"", "flipped": bytes(data)}[how])
        with pytest.raises(errors.ServerFault) as caught:
            client.predict(other, Prefill(1, 1024))
        assert caught.value.reason == "DATA_CORRUPT"
        assert client.predict(CONFIG, Prefill(1, 1024)) == before
        assert client.predict(replace(CONFIG, backend="vllm"), Prefill(1, 1024)).latency_ms > 0


def connected(address: str, said: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    end = socket.create_connection((host, int(port)), PATIENCE_S)
    end.sendall(said)
    return end


def test_callers_that_say_nothing_or_half_of_it_hold_up_nobody(served: Running) -> None:
    with ExitStack() as stack:
        for said in (b"", PREFACE[:10], PREFACE, PREFACE + SETTINGS + HALF_A_HEADERS_FRAME, b"GET / HTTP/1.1\r\n\r\n"):
            for _ in range(10):
                stack.enter_context(connected(served.address, said))
        with Client(served.address, deadline_s=PATIENCE_S) as client:
            for number in range(100):
                assert client.predict(CONFIG, Prefill(1, 1000 + number)).latency_ms > 0


@pytest.mark.slow
def test_silent_connections_give_their_place_back() -> None:
    """After the ten seconds that a server waits for a connection to begin."""
    with running(max_connections=4) as served, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connected(served.address, b""))
        with Client(served.address, deadline_s=PATIENCE_S, wait_for_ready=True) as client:
            assert client.predict(CONFIG, Prefill(1, 1000)).latency_ms > 0


def test_a_caller_that_asks_and_does_not_listen_is_not_read_any_further() -> None:
    """Answers that nobody takes fill the connection, not the server's memory."""
    many, asked = 1_000_000, 0

    def requests() -> Iterator[bytes]:
        nonlocal asked
        first = prediction_pb2.StreamStepsRequest(config=CONFIG.to_message())
        first.prefill.batch_per_rank, first.prefill.isl_tokens = 1, 128
        data = first.SerializeToString()
        while asked < many:
            asked += 1
            yield data

    with running() as served, Client(served.address, deadline_s=PATIENCE_S) as client:
        handle = client.resolve(CONFIG).handle
        with grpc.insecure_channel(served.address) as channel:
            call = channel.stream_stream("/perfcast.v1.Prediction/StreamSteps")(requests())
            assert next(call)
            for number in range(200):
                assert client.predict(handle, Prefill(1, 1000 + number)).latency_ms > 0
            assert asked < many
            call.cancel()
        eventually(lambda: not served.server._rpc._streams)
        assert client.predict(handle, Prefill(1, 999)).latency_ms > 0


class Left:
    """The end of a call whose caller has left, of which gRPC tells only when something is sent."""

    def __init__(self, asked: bytes) -> None:
        self._asked = asked

    async def read(self) -> bytes:
        return self._asked

    async def write(self, data: bytes) -> None:
        raise grpc.aio.InternalError

    async def abort(self, *told: object) -> None:
        raise grpc.aio.InternalError


def test_a_caller_that_leaves_as_it_is_answered_is_no_fault_of_the_server(
    served: Running, caplog: pytest.LogCaptureFixture
) -> None:
    server, path = served.server, "/perfcast.v1.Prediction/StreamSteps"
    offered = services(server.engines, server._searchers, server.settings, server.metrics, server._states)
    handlers = server._rpc.handlers(prediction.SERVICE, offered[prediction.SERVICE])
    handler = handlers.service(SimpleNamespace(method=path)).stream_stream
    code = {"grpc_type": "bidi_stream", "grpc_service": "perfcast.v1.Prediction", "grpc_method": "StreamSteps"}
    before = served.metric("grpc_server_handled_total", **code, grpc_code="Cancelled")
    told = prediction_pb2.StreamStepsRequest().SerializeToString()
    with pytest.raises(CancelledError):
        served.do(handler(None, Left(told)))
    with pytest.raises(CancelledError):
        served.do(handler(None, Left(b"no message at all")))
    assert served.metric("grpc_server_handled_total", **code, grpc_code="Cancelled") == before + 1
    assert not [
        record for record in caplog.records if record.name.startswith("perfcast") and record.levelname == "ERROR"
    ]
