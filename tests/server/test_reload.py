"""New data taken up while calls go on: one version an answer, none dropped, bad ones refused."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from perfcast_cli.main import main
from perfcast_client import Client, DecodeStep, DecodeTrajectory, EngineConfig, Prefill, bearer, errors
from perfcast_client.results import EngineStamp
from perfcast_server.settings import Settings, SettingsError
from perfcast_systems import ROOT

from tests.server.running import SEARCH_PATIENCE_S, Process, Running, eventually, process, running

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
ROOFLINE = EngineConfig(**{**CONFIG.to_dict(), "database_mode": "sol"})
ADA, BOB = "ada-0123456789abcdef", "bob-0123456789abcdef"
PACK = next(iter(sorted((ROOT / "packs" / "h200_sxm").glob("trtllm-*.pack"))))
SHEET = (ROOT / "gpus" / "h200_sxm.yaml").read_text()
STEP = Prefill(1, 1024)


def faster(times: int) -> str:
    """The system with so many times its memory bandwidth."""
    lines = [
        f"{line.partition(':')[0]}: {float(line.partition(':')[2].partition('#')[0]) * times!r}"
        if line.strip().startswith("mem_bw_bytes_per_s:")
        else line
        for line in SHEET.splitlines()
    ]
    assert lines != SHEET.splitlines()
    return "\n".join(lines) + "\n"


class Place:
    """A data root with one system's figures in it, and a token file beside."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "data"
        (self.root / "gpus").mkdir(parents=True)
        (self.root / "h200_sxm").mkdir()
        self.sheet = self.root / "gpus" / "h200_sxm.yaml"
        self.pack = self.root / "h200_sxm" / PACK.name
        self.token_file = folder / "tokens"
        self.token_file.write_text(f"ada {ADA} admin\nbob {BOB}\n")
        self.put(SHEET)

    def put(self, text: str) -> None:
        replaced(self.sheet, text.encode())

    def flags(self) -> dict[str, Any]:
        return {"data": (str(self.root),), "admin": True, "token_file": str(self.token_file)}

    def arguments(self) -> list[str]:
        return ["--data", str(self.root), "--admin", "--token-file", str(self.token_file)]


def replaced(path: Path, data: bytes) -> None:
    """At once, as files that are in use must be."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    os.replace(fresh, path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def one(place: Place) -> Iterator[Running]:
    with running(**place.flags()) as served:
        yield served


@pytest.fixture
def alone(place: Place, one: Running) -> Iterator[Running]:
    """A server of one process, with the system as it is shipped; left like that."""
    yield one
    place.put(SHEET)
    place.pack.unlink(missing_ok=True)
    one.do(one.server.reload())


@pytest.fixture(scope="module")
def pair_place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def pair(pair_place: Place) -> Iterator[Process]:
    with process("--workers", "2", *pair_place.arguments()) as served:
        assert served.address
        yield served


def client(address: str, token: str = ADA) -> Client:
    return Client(address, metadata=bearer(lambda: token))


def test_new_data_answer_from_then_on_and_handles_stay_good(place: Place, alone: Running) -> None:
    with client(alone.address) as ada, ada.stream(ROOFLINE) as stream:
        old, engine = ada.predict(ROOFLINE, STEP), ada.resolve(ROOFLINE)
        measured = ada.predict(CONFIG, STEP)
        assert stream.predict_ms(STEP) == old.latency_ms
        unchanged = ada.reload_data()
        assert (unchanged.changed, unchanged.workers) == (False, 1)
        assert ada.predict(ROOFLINE, STEP) == old

        place.put(faster(2))
        told = ada.reload_data()
        assert told.changed and told.data_version != unchanged.data_version and told.packs == unchanged.packs > 0
        new = ada.predict(ROOFLINE, STEP)
        assert new.latency_ms < old.latency_ms
        assert new.engine.data_version != old.engine.data_version and new.engine.handle != old.engine.handle
        assert ada.predict(engine.handle, STEP) == new
        assert ada.predict(CONFIG, STEP).engine.data_version != measured.engine.data_version
        assert stream.predict_ms(STEP) == new.latency_ms
        misses = alone.metric("engine_cache_misses_total")
        assert ada.predict(CONFIG, DecodeStep(1, 128, 2)).latency_ms > 0
        assert alone.metric("engine_cache_misses_total") == misses  # what was ready stays ready

        place.put(SHEET)
        assert ada.reload_data().data_version == unchanged.data_version
        assert ada.predict(ROOFLINE, STEP) == old


@pytest.mark.parametrize("what", ["text", "figure", "pack"])
def test_bad_data_are_refused_and_the_old_ones_kept(place: Place, alone: Running, what: str) -> None:
    with client(alone.address) as ada:
        reloads = alone.metric("data_reloads_total")
        old = ada.predict(ROOFLINE, STEP)
        if what == "pack":
            data = bytearray(PACK.read_bytes())
            data[-100] ^= 1  # in a table: only whoever reads everything finds it
            replaced(place.pack, data)
        else:
            place.put("gpu: [\n" if what == "text" else SHEET.replace("mem_bw_bytes_per_s: ", "mem_bw_bytes_per_s: -"))
        with pytest.raises(errors.DataRefused) as caught:
            ada.reload_data()
        assert (caught.value.reason, caught.value.code) == ("DATA_REFUSED", "FAILED_PRECONDITION")
        assert str(place.root) not in caught.value.message
        assert ada.predict(ROOFLINE, STEP) == old
        assert ada.predict(ROOFLINE, Prefill(1, 777)).engine == old.engine
        assert alone.metric("data_reloads_total") == reloads


def test_only_admins_may_and_only_where_it_is_switched_on(place: Place, one: Running) -> None:
    with client(one.address, BOB) as bob, pytest.raises(errors.AccessDenied) as caught:
        bob.reload_data()
    assert (caught.value.reason, caught.value.code) == ("FORBIDDEN", "PERMISSION_DENIED")
    without = {**place.flags(), "admin": False}
    with running(**without) as served, client(served.address) as ada, pytest.raises(errors.Unsupported):
        ada.reload_data()
    with pytest.raises(SettingsError, match="needs a token file"):
        Settings(admin=True)


def test_a_reload_reaches_all_workers_and_no_answer_is_mixed(pair_place: Place, pair: Process, tmp_path: Path) -> None:
    """Over several connections, so that both workers answer, while the data change to and fro."""
    address, known = pair.address, dict[str, dict[int, float]]()
    for text in (SHEET, faster(2)):
        pair_place.put(text)
        with running(**pair_place.flags()) as single, client(single.address) as ada:
            answers = {n: ada.predict(ROOFLINE, Prefill(1, n)) for n in range(1, 40)}
            known[answers[1].engine.data_version] = {n: answer.latency_ms for n, answer in answers.items()}
    pair_place.put(SHEET)
    seen: list[tuple[EngineStamp, int, float]] = []
    failed: list[Exception] = []
    stop = threading.Event()

    def ask() -> None:
        with client(address, BOB) as bob:
            while not stop.is_set():
                for n in range(1, 40):
                    try:
                        answer = bob.predict(ROOFLINE, Prefill(1, n))
                    except errors.PerfcastError as error:
                        failed.append(error)
                    else:
                        seen.append((answer.engine, n, answer.latency_ms))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(6)]

    def ended() -> None:
        stop.set()
        for thread in threads:
            thread.join(60)

    for thread in threads:
        thread.start()
    token = tmp_path / "ada"
    token.write_text(ADA)
    for text in (faster(2), SHEET):
        pair_place.put(text)
        command = ["reload", "--server", address, "--token-file", str(token)]
        told = CliRunner().invoke(main, command)
        assert told.exit_code == 0, told.output
        assert (json.loads(told.output)["changed"], json.loads(told.output)["workers"]) == (True, 2)
    ended()
    assert not failed
    assert {stamp.data_version for stamp, _, _ in seen} == set(known)
    assert all(known[stamp.data_version][n] == ms for stamp, n, ms in seen)


def test_sighup_reloads_all_workers_and_bad_data_are_only_logged(pair_place: Place, pair: Process) -> None:
    with client(pair.address) as ada:
        old = ada.predict(ROOFLINE, STEP)
        pair_place.put("gpu: [\n")
        pair.popen.send_signal(signal.SIGHUP)
        eventually(lambda: bool(pair.logged("data refused")))
        assert ada.predict(ROOFLINE, STEP) == old
        taken = len(pair.logged("data taken"))
        pair_place.put(faster(3))
        pair.popen.send_signal(signal.SIGHUP)
        eventually(lambda: bool(pair.logged("data reloaded")))
        assert len(pair.logged("data taken")) == 2 + taken
    for _ in range(8):
        with client(pair.address) as ada:
            assert ada.predict(ROOFLINE, STEP).latency_ms < old.latency_ms


def test_a_worker_that_dies_in_a_reload_does_not_leave_the_others_with_old_data(
    pair_place: Place, pair: Process
) -> None:
    with client(pair.address) as ada:
        old = ada.predict(ROOFLINE, STEP)
    prepared, reloaded = (len(pair.logged(f"data {what}")) for what in ("prepared", "reloaded"))
    dying = pair.worker_pids()[1]
    os.kill(dying, signal.SIGSTOP)  # so that it does not get ready
    pair_place.put(faster(5))
    pair.popen.send_signal(signal.SIGHUP)
    eventually(lambda: len(pair.logged("data prepared")) > prepared)  # by the other, so that both were asked
    with contextlib.suppress(ProcessLookupError):
        os.kill(dying, signal.SIGKILL)
    eventually(lambda: len(pair.logged("data reloaded")) > reloaded)
    eventually(lambda: pair.worker_pids()[1] != dying)
    for _ in range(8):
        with client(pair.address) as ada:
            assert ada.predict(ROOFLINE, STEP).latency_ms < old.latency_ms


@pytest.mark.slow
def test_sighup_reloads_a_single_process(pair_place: Place) -> None:
    pair_place.put(SHEET)
    with process(*pair_place.arguments()) as served, client(served.address) as ada:
        old = ada.predict(ROOFLINE, STEP)
        pair_place.put(faster(2))
        served.popen.send_signal(signal.SIGHUP)
        eventually(lambda: bool(served.logged("data reloaded", changed=True)))
        assert ada.predict(ROOFLINE, STEP).latency_ms < old.latency_ms


def test_work_begun_on_the_old_data_is_not_remembered_for_the_new(place: Place, alone: Running) -> None:
    slow = DecodeTrajectory(8, 1000, 100_000, stride=1)
    with client(alone.address) as ada:
        ada.resolve(ROOFLINE)
        first: list[float] = []
        asking = threading.Thread(target=lambda: first.append(ada.predict(ROOFLINE, slow, deadline_s=60).latency_ms))
        place.put(faster(2))
        alone.do(alone.server.prepare(alone.do(alone.server._checked()).version))
        with alone.held():
            asking.start()
            eventually(lambda: alone.metric("grpc_server_in_work") == 1)
            assert alone.do(alone.server.commit())
        asking.join()
        assert first == [ada.predict(ROOFLINE, slow, deadline_s=60).latency_ms]


def test_a_search_is_made_in_the_new_data(place: Place, alone: Running) -> None:
    from perfcast_client import SearchTask, Workload

    task = SearchTask(engine=replace(ROOFLINE, tp=1), workload=Workload(isl=1000, osl=100), total_gpus=4)
    with client(alone.address) as ada:
        old = ada.search_result(task, SEARCH_PATIENCE_S)
        place.put(faster(2))
        ada.reload_data()
        new = ada.search_result(task, SEARCH_PATIENCE_S)
        versions = [{engine.stamp.data_version for engine in r.experiments[0].engines} for r in (old, new)]
        assert versions[0].isdisjoint(versions[1])


def test_a_search_is_made_in_the_data_that_are_in_use_or_not_at_all(place: Place, alone: Running) -> None:
    from perfcast_client import SearchTask, Workload

    def found(top: int) -> set[str]:
        task = SearchTask(engine=replace(ROOFLINE, tp=1), workload=Workload(isl=900, osl=90), total_gpus=4, top=top)
        told = ada.search_result(task, SEARCH_PATIENCE_S)
        return {engine.stamp.data_version for engine in told.experiments[0].engines}

    with client(alone.address) as ada:
        ada.reload_data()
        place.put(faster(2))
        for top in (1, 2):
            with pytest.raises(errors.DataRefused, match="reload, or put those back"):
                found(top)
        place.put(SHEET)
        version = {ada.predict(ROOFLINE, STEP).engine.data_version}
        assert found(3) == version
        place.put("gpu: [\n")
        with pytest.raises(errors.DataRefused):
            ada.reload_data()
        assert found(4) == version


def test_a_pack_replaced_by_another_file_of_its_name_is_read_from_the_old_one(place: Place, alone: Running) -> None:
    """Tables are read when they are asked for: those of the old data also after the file has been replaced."""
    shutil.copy(PACK, place.pack)
    alone.do(alone.server.reload())
    with client(alone.address) as ada:
        replaced(place.pack, b"nothing")
        other = EngineConfig(model="Qwen/Qwen3-30B-A3B", system="h200_sxm", backend="trtllm", tp=2, moe_ep=2)
        assert ada.predict(other, STEP).latency_ms > 0
        with pytest.raises(errors.DataRefused):
            ada.reload_data()
