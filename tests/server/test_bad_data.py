"""Damaged data spoil what they hold and nothing else: a typed error there, answers everywhere else."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from perfcast_client import Client, EngineConfig, Prefill, errors
from perfcast_systems import ROOT

from tests.server.running import Running, running

CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)
STEP = Prefill(1, 1024)
PACK = next(iter(sorted((ROOT / "packs" / "h200_sxm").glob("trtllm-*.pack"))), None)  # the current version's

pytestmark = pytest.mark.skipif(PACK is None, reason="this checkout has no packs of measured tables")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A data root of the user's with a copy of one pack."""
    assert PACK is not None
    (tmp_path / "h200_sxm").mkdir()
    return Path(shutil.copy(PACK, tmp_path / "h200_sxm" / PACK.name))


@pytest.fixture
def tmp_root(own: Path) -> Path:
    return own.parents[1]


def serves_the_rest(client: Client) -> None:
    for other in (replace(CONFIG, backend="vllm"), replace(CONFIG, system="h100_sxm")):
        assert client.predict(other, STEP).latency_ms > 0


def damaged(pack: Path, how: str) -> None:
    data = bytearray(pack.read_bytes())
    match how:
        case "empty":
            data = bytearray()
        case "header cut":
            data = data[:30]
        case "half":
            data = data[: len(data) // 2]
        case "another file":
            data = bytearray(b"PAR1" + bytes(5000))
        case "header flipped":
            data[100] ^= 1
        case "all tables flipped":
            for at in range(len(data) // 3, len(data), 997):
                data[at] ^= 0x40
    pack.write_bytes(data)


@pytest.mark.parametrize("how", ["empty", "header cut", "half", "another file", "header flipped", "all tables flipped"])
def test_a_damaged_pack_is_told_and_the_rest_is_served(own: Path, tmp_root: Path, how: str) -> None:
    damaged(own, how)
    with running(data=(str(tmp_root),)) as served, Client(served.address) as client:
        with pytest.raises(errors.ServerFault) as caught:
            client.predict(CONFIG, STEP)
        assert (caught.value.reason, caught.value.code) == ("DATA_CORRUPT", "DATA_LOSS")
        assert str(tmp_root) not in caught.value.message + str(caught.value.details)
        serves_the_rest(client)
        assert not client.check_support(CONFIG).supported
        assert {"h200_sxm", "h100_sxm"} <= {system.name for system in client.systems()}


def test_a_pack_under_another_s_name_is_told(own: Path, tmp_root: Path) -> None:
    (tmp_root / "l40s").mkdir()
    own.rename(tmp_root / "l40s" / own.name)
    with running(data=(str(tmp_root),)) as served, Client(served.address) as client:
        with pytest.raises(errors.ServerFault):
            client.predict(replace(CONFIG, system="l40s"), STEP)
        serves_the_rest(client)


def test_a_pack_of_the_user_s_is_preferred(tmp_root: Path) -> None:
    with running(data=(str(tmp_root),)) as served, Client(served.address) as client:
        assert client.predict(CONFIG, STEP).latency_ms > 0
        serves_the_rest(client)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "- a\n- b\n",
        "name: x\n",
        "mem_bw: fast\n",
        "mem_bw: -1\n",
        "a: &a [*a, *a]\n",
        "\x00\x01",
        "a: " + "[" * 3000,
    ],
)
def test_a_malformed_system_description_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus" / "h200_sxm.yaml").write_text(text)
    (tmp_path / "gpus" / "brand_new.yaml").write_text(text)
    with running(data=(str(tmp_path),)) as served, Client(served.address) as client:
        for system in ("h200_sxm", "brand_new"):
            with pytest.raises(errors.ServerFault) as caught:
                client.predict(replace(CONFIG, system=system, database_mode="sol"), STEP)
            assert caught.value.reason == "DATA_CORRUPT"
            assert str(tmp_path) not in caught.value.message
        assert client.predict(replace(CONFIG, system="h100_sxm"), STEP).latency_ms > 0
        assert "h200_sxm" not in {system.name for system in client.systems()}


def test_a_system_without_measurements_answers_in_speed_of_light_only(served: Running) -> None:
    with Client(served.address) as client:
        bare = replace(CONFIG, system="h100_pcie", version="1.3.0rc20")
        with pytest.raises(errors.PerfDataMissing) as caught:
            client.predict(bare, STEP)
        assert caught.value.details["mode_that_works"] == "SOL"
        assert client.predict(replace(bare, database_mode="sol"), STEP).provenance.sol_share > 0.5


def test_a_missing_measurement_names_operator_and_mode(served: Running) -> None:
    with Client(served.address) as client:
        odd = replace(CONFIG, gemm_quant="int4_wo", system="b200_sxm")
        with pytest.raises(errors.PerfDataMissing) as caught:
            client.predict(odd, STEP)
        assert caught.value.reason == "PERF_DATA_MISSING"
        assert caught.value.details
