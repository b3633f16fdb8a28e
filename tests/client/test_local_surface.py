"""Local surfaces against real servers: the server's digits, fresh, from files, under threads and without a server."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from perfcast.v1 import prediction_pb2
from perfcast_client import (
    AsyncClient,
    Client,
    DecodeStep,
    DecodeTrajectory,
    EngineConfig,
    LocalSurface,
    Mixed,
    Prefill,
    errors,
)
from perfcast_client.snapshot import Received
from perfcast_client.steps import Step
from perfcast_engine.predictor import Predictor
from perfcast_systems import ROOT

from tests.server.running import Running, eventually, running

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
CONFIGS = {
    "dense": CONFIG,
    "drafts": replace(CONFIG, nextn=2),
    "reference": replace(CONFIG, profile="reference"),
    "hybrid": replace(CONFIG, database_mode="hybrid"),
    "sparse": EngineConfig(model="zai-org/GLM-5-FP8", system="h200_sxm", backend="vllm", tp=8, moe_ep=8),
}
RNG = np.random.default_rng(4)


def steps(n: int) -> list[Any]:
    """One step of each kind with ``n`` points."""

    def some(low: int, high: int) -> Any:
        return RNG.integers(low, high, n)

    return [
        Prefill(some(1, 9), some(100, 5000), some(0, 100)),
        DecodeStep(some(1, 200), some(1, 3000), some(2, 2000)),
        DecodeTrajectory(some(1, 60), some(1, 2000), some(1, 400)),
        Mixed(some(1, 9000), some(0, 200), some(300, 4000), some(2, 900), some(0, 300)),
    ]


def point(step: Any, i: int) -> Any:
    return replace(step, **{name: int(getattr(step, name)[i]) for name in step.wire if name != "imbalance"})


@pytest.fixture(scope="module")
def client(served: Running) -> Iterator[Client]:
    with Client(served.address) as client:
        yield client


@pytest.mark.parametrize("name", CONFIGS)
def test_it_gives_the_digits_of_the_server(client: Client, name: str) -> None:
    config = CONFIGS[name]
    with client.surface(config, refresh_s=0) as surface:
        for step in steps(400):
            told = client.predict_many(config, step).latency_ms
            np.testing.assert_allclose(surface.predict_ms(step), told, rtol=1e-12)
            for i in range(0, 400, 50):
                assert surface.predict_ms(point(step, i)) == pytest.approx(told[i], rel=1e-12)


def test_each_kind_has_a_call_for_numbers_and_arrays(client: Client) -> None:
    surface = client.surface(CONFIG, ask=False, refresh_s=0)
    for call, arguments, step in (
        (surface.prefill, (2, 3000, 64), Prefill(2, 3000, 64)),
        (surface.decode_step, (8, 3000, 64), DecodeStep(8, 3000, 64)),
        (surface.decode, (8, 300, 640), DecodeTrajectory(8, 300, 640)),
        (surface.mixed, (2048, 8, 3000, 64), Mixed(2048, 8, 3000, 64)),
    ):
        one = call(*arguments)
        assert type(one) is float
        assert one == client.predict(CONFIG, step).latency_ms
        many = call(np.array([arguments[0]] * 3), *arguments[1:])
        assert many.shape == (3,) and set(many.tolist()) == {one}
        assert call(np.int64(arguments[0]), *map(float, arguments[1:])) == one
        assert call(np.zeros(0, int), *arguments[1:]).shape == (0,)


def test_beyond_it_the_server_is_asked(client: Client) -> None:
    surface = client.surface(CONFIG, refresh_s=0)
    far = Prefill(np.array([1, 64, 2]), np.array([100, 20_000, 200]))
    assert np.isnan(surface._now.ms(far)).tolist() == [False, True, False]
    np.testing.assert_allclose(surface.predict_ms(far), client.predict_many(CONFIG, far).latency_ms, rtol=1e-12)
    uneven = Prefill(np.array([1, 64]), np.array([100, 200]), imbalance=np.array([1.0, 1.5]))
    np.testing.assert_allclose(surface.predict_ms(uneven), client.predict_many(CONFIG, uneven).latency_ms, rtol=1e-12)
    uneven = Prefill(1, 3000, imbalance=2.0)
    assert surface.predict_ms(uneven) == client.predict(CONFIG, uneven).latency_ms
    with pytest.raises(errors.InvalidRequest, match="isl_tokens"):
        surface.prefill(1, 0)
    for osl in (0, np.array([0, 9])):
        with pytest.raises(errors.InvalidRequest, match="osl_tokens"):
            surface.mixed(2048, 32, 4096, osl)


def test_beyond_it_without_a_server_is_an_error_of_its_own(client: Client) -> None:
    surface = client.surface(CONFIG, ask=False, refresh_s=0)
    with pytest.raises(errors.OutOfSurface, match="point 1 ") as caught:
        surface.prefill(np.array([1, 64]), np.array([100, 20_000]))
    assert caught.value.details["point"] == "1"
    with pytest.raises(errors.OutOfSurface):
        surface.prefill(64, 20_000)


ILLEGAL = [
    Prefill(0, 100),
    Prefill(1, 0),
    Prefill(1, 100, -1),
    Prefill(1, 100, 100),
    Prefill(1, 100, imbalance=float("nan")),
    Prefill(np.array([64, 4, -2]), np.array([20_000, 100, 100])),
    Prefill(np.array([1, 2]), 100, np.array([0, 100])),
    DecodeStep(0, 100, 10),
    DecodeStep(4, 100, np.array([10, 0])),
    DecodeTrajectory(4, 0, 10),
    DecodeTrajectory(4, 100, 10, stride=-1),
    Mixed(-1, 4, 100, 10),
    Mixed(64, 4, 100, 0),
    Mixed(64, 4, 100, 10, 100),
]


@pytest.mark.parametrize("step", ILLEGAL, ids=repr)
def test_what_is_no_step_at_all_is_refused_by_name_with_and_without_a_server(client: Client, step: Step) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        client.surface(CONFIG, ask=False, refresh_s=0).predict_ms(step)
    with pytest.raises(errors.InvalidRequest) as told:
        client.predict_many(CONFIG, step)
    assert caught.value.details["field"] == told.value.details["field"].partition("[")[0]


def test_no_points_have_no_answers(client: Client) -> None:
    surface = client.surface(CONFIG, ask=False, refresh_s=0)
    for answer in (surface.prefill([], 100), surface.mixed(64, [], 100, [], []), surface.decode([], 8, 9)):
        assert isinstance(answer, np.ndarray) and answer.dtype == np.float64 and answer.shape == (0,)
    with pytest.raises(errors.InvalidRequest, match="different lengths"):
        surface.prefill([], [100, 200])


@pytest.mark.parametrize(
    "arguments", [("four", 100), (1.5, 100), (True, 100), (2**40, 100), ([[1]], 100), ([1, 2], [1, 2, 3]), (None, 1)]
)
def test_what_is_no_count_is_refused(client: Client, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(errors.InvalidRequest):
        client.surface(CONFIG, ask=False, refresh_s=0).prefill(*arguments)


async def test_the_asyncio_one_is_the_same(served: Running, client: Client, tmp_path: Path) -> None:
    async with AsyncClient(served.address) as own, await own.surface(CONFIG) as surface:
        for step in steps(50):
            told = client.predict_many(CONFIG, step).latency_ms
            np.testing.assert_allclose(await surface.predict_ms(step), told, rtol=1e-12)
        assert await surface.prefill(1, 4096) == client.predict(CONFIG, Prefill(1, 4096)).latency_ms
        assert await surface.decode_step(8, 4096, 10) == client.predict(CONFIG, DecodeStep(8, 4096, 10)).latency_ms
        assert await surface.mixed(9, 4, 4096, 10) == client.predict(CONFIG, Mixed(9, 4, 4096, 10)).latency_ms
        assert await surface.decode(9, 4, 40) == client.predict(CONFIG, DecodeTrajectory(9, 4, 40)).latency_ms
        assert await surface.prefill(64, 20_000) == client.predict(CONFIG, Prefill(64, 20_000)).latency_ms
        assert not await surface.refresh()
        surface.save(tmp_path / "surface.npz")
    assert LocalSurface.load(tmp_path / "surface.npz").surface_hash == surface.surface_hash


def test_a_file_holds_all_of_it(client: Client, tmp_path: Path) -> None:
    surface = client.surface(CONFIG, refresh_s=0)
    surface.save(tmp_path / "surface.npz")
    loaded = LocalSurface.load(tmp_path / "surface.npz")
    assert (loaded.stamp, loaded.surface_hash, loaded.domain) == (surface.stamp, surface.surface_hash, surface.domain)
    assert loaded.mixed(2048, 8, 3000, 64) == surface.mixed(2048, 8, 3000, 64)
    with pytest.raises(errors.OutOfSurface):
        loaded.prefill(64, 20_000)
    with pytest.raises(errors.ClientMisuse):
        loaded.refresh()
    joined = LocalSurface.load(tmp_path / "surface.npz", client, refresh_s=0)
    assert joined.prefill(64, 20_000) == surface.prefill(64, 20_000)
    assert not joined.refresh()


def npz(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    with np.load(path) as file:
        members = dict(file)
    change(members)
    np.savez(path, **members)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "cut in the middle": lambda path: path.write_bytes(path.read_bytes()[:10_000]),
    "another file": lambda path: path.write_text("GIF89a"),
    "changed figure": lambda path: npz(path, lambda m: m["context.tokens"].__setitem__(100, 1.0)),
    "without an array": lambda path: npz(path, lambda m: m.pop("plane0.values")),
    "without a header": lambda path: npz(path, lambda m: m.pop("header")),
    "header of text": lambda path: npz(path, lambda m: m.update(header=np.array("{}"))),
    "header not JSON": lambda path: npz(path, lambda m: m.update(header=np.frombuffer(b"{" * 9999, np.uint8))),
    "header of another kind": lambda path: npz(path, lambda m: m.update(header=np.frombuffer(b"[1]", np.uint8))),
    "pickled array": lambda path: npz(path, lambda m: m.update(header=np.array([{}], object))),
    "array of integers": lambda path: npz(path, lambda m: m.update({"context.tokens": np.arange(9)})),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_told(client: Client, tmp_path: Path, how: str) -> None:
    path = tmp_path / "surface.npz"
    client.surface(CONFIG, refresh_s=0).save(path)
    DAMAGES[how](path)
    with pytest.raises(errors.DamagedSurface):
        LocalSurface.load(path)


def test_no_flipped_byte_gives_another_number(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "surface.npz"
    surface = client.surface(CONFIG, max_pass_tokens=256, refresh_s=0)
    surface.save(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 150)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        try:
            assert LocalSurface.load(path).prefill(1, 200) == surface.prefill(1, 200)
        except errors.DamagedSurface:
            continue


def test_a_file_that_claims_too_much_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LocalSurface.load(tmp_path / "nothing.npz")
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name in "abcde":
            file.writestr(name, bytes(60 << 20))
    with pytest.raises(errors.DamagedSurface, match="too much"):
        LocalSurface.load(tmp_path / "bomb.npz")


@pytest.mark.parametrize("how", ["no header", "missing chunk", "changed chunk", "unasked unchanged", "nothing"])
def test_a_damaged_answer_is_told(client: Client, how: str) -> None:
    request = prediction_pb2.GetSurfaceRequest(config=CONFIG.to_message(), max_pass_tokens=64)
    path, response = "/perfcast.v1.Prediction/GetSurface", prediction_pb2.GetSurfaceResponse.FromString
    told = list(client._channel.unary_stream(path, type(request).SerializeToString, response)(request))
    match how:
        case "no header":
            told = told[1:]
        case "missing chunk":
            told = told[:1]
        case "changed chunk":
            told[1].chunk.data = bytes([1]) + told[1].chunk.data[1:]
        case "unasked unchanged":
            told[0].header.surface_hash = "0"
        case "nothing":
            told = []
    with pytest.raises(errors.DamagedSurface):
        Received.of(told)


@pytest.fixture
def slower(tmp_path: Path) -> Predictor:
    """The same measurements on a system with half the memory bandwidth."""
    about = yaml.safe_load((ROOT / "gpus" / "h200_sxm.yaml").read_text())
    about["gpu"]["mem_bw_bytes_per_s"] /= 2
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus" / "h200_sxm.yaml").write_text(yaml.safe_dump(about))
    return Predictor(roots=(tmp_path,))


def adopt(served: Running, predictor: Predictor) -> None:
    async def work() -> None:
        served.server.engines.adopt(predictor)
        served.server._rpc.forget()

    served.do(work())


def test_new_data_are_taken_over_in_the_background(slower: Predictor, tmp_path: Path) -> None:
    kept = tmp_path / "kept.npz"
    with running() as served, Client(served.address) as client:
        surface = client.surface(CONFIG, refresh_s=0.05, file=kept)
        before, first = surface.prefill(1, 1000), surface.stamp
        eventually(lambda: surface.age_s < 0.04)
        assert surface.stamp == first
        adopt(served, slower)
        eventually(lambda: surface.stamp != first)
        assert surface.prefill(1, 1000) == client.predict(CONFIG, Prefill(1, 1000)).latency_ms > before
        eventually(lambda: LocalSurface.load(kept).stamp == surface.stamp)
        surface.close()


async def test_new_data_are_taken_over_by_the_asyncio_one(slower: Predictor) -> None:
    with running() as served:
        async with AsyncClient(served.address) as client, await client.surface(CONFIG, refresh_s=0) as surface:
            first = surface.stamp
            adopt(served, slower)
            assert await surface.refresh()
            assert surface.stamp != first


def test_one_array_is_never_of_two_data_versions(slower: Predictor) -> None:
    with running() as served, Client(served.address) as client:
        surface = client.surface(CONFIG, refresh_s=0)
        adopt(served, slower)
        step = Prefill(np.array([1, 64]), np.array([1000, 20_000]))  # one inside, one to be asked for
        np.testing.assert_allclose(surface.predict_ms(step), client.predict_many(CONFIG, step).latency_ms, rtol=1e-12)


def test_the_last_good_surface_stands_in(tmp_path: Path) -> None:
    kept = tmp_path / "kept.npz"
    with running() as served:
        client = Client(served.address)
        surface = client.surface(CONFIG, refresh_s=0.05, file=kept)
        known = surface.prefill(1, 1000)
    client._deadline_s = 0.5
    eventually(lambda: isinstance(surface.last_error, errors.PerfcastError))
    assert surface.prefill(1, 1000) == known
    with pytest.raises((errors.Unavailable, errors.DeadlineExceeded)):
        surface.prefill(64, 20_000)
    with pytest.raises((errors.Unavailable, errors.DeadlineExceeded)):
        surface.refresh()
    again = client.surface(CONFIG, refresh_s=0, file=kept)
    assert again.prefill(1, 1000) == known
    assert isinstance(again.last_error, errors.PerfcastError)
    for other in ({"file": None}, {"file": tmp_path / "none.npz"}):
        with pytest.raises((errors.Unavailable, errors.DeadlineExceeded)):
            client.surface(CONFIG, refresh_s=0, **other)
    with pytest.raises((errors.Unavailable, errors.DeadlineExceeded)):  # the surface of another engine is no fallback
        client.surface(replace(CONFIG, tp=2), refresh_s=0, file=kept)
    client.close()


def test_threads_share_one_while_it_is_replaced(slower: Predictor) -> None:
    with running() as served, Client(served.address) as client:
        surface = client.surface(CONFIG, refresh_s=0)
        asked = [(batch, length) for batch in range(1, 9) for length in range(100, 9000, 321)]
        old = {where: surface.decode_step(*where, 100) for where in asked}
        found: list[tuple[tuple[int, int], float]] = []

        def work() -> None:
            for _ in range(5):
                found.extend((where, surface.decode_step(*where, 100)) for where in asked)
                columns = list(map(np.array, zip(*asked, strict=True)))
                found.extend(zip(asked, surface.decode_step(*columns, 100).tolist(), strict=True))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        adopt(served, slower)
        surface.refresh()
        for thread in threads:
            thread.join()
        new = {where: surface.decode_step(*where, 100) for where in asked}
        assert len(found) == 8 * 5 * 2 * len(asked)
        for where, ms in found:
            assert min(abs(ms / known[where] - 1) for known in (old, new)) < 1e-13


def test_an_abandoned_surface_stops_asking(client: Client) -> None:
    def asking() -> int:
        return sum(thread.name == "perfcast-surface" for thread in threading.enumerate())

    before = asking()
    surface = client.surface(CONFIG, refresh_s=0.01)
    assert asking() == before + 1
    del surface
    eventually(lambda: asking() == before)
