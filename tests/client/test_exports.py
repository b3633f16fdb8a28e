"""Exported files read back as their consumers read them, and held against direct predictions."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from perfcast_client import Client, DecodeStep, EngineConfig, Mixed, Prefill, exports, planner
from perfcast_client.exports import grids

from tests.client.conftest import Way

DENSE = EngineConfig(model="Qwen/Qwen3-32B", system="h200_sxm", backend="vllm", tp=4)
MOE = EngineConfig(model="Qwen/Qwen3-235B-A22B", system="h200_sxm", backend="trtllm", attn_dp=8, moe_ep=8)


@pytest.fixture(scope="module")
def client(remote: dict[str, str]) -> Iterator[Client]:
    with Client(remote["unix"]) as client:
        yield client


def rows(path: str) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("engine", [DENSE, MOE], ids=["dense", "moe"])
def test_the_profiler_directory_holds_the_sweep(way: Way, tmp_path: Path, engine: EngineConfig) -> None:
    sweep = {"prefill_granularity": 6, "decode_granularity": 3, "max_context_tokens": 8192}
    told = way.do(exports.export_profile(way.client, engine, tmp_path, **sweep))
    swept = way.do(way.client.ask(planner.bootstrap(engine, **sweep)))
    assert len(told.files) == 4 and all(Path(file).is_file() for file in told.files)
    prefill = np.load(tmp_path / "selected_prefill_interpolation" / "raw_data.npz")
    decode = np.load(tmp_path / "selected_decode_interpolation" / "raw_data.npz")
    assert prefill["prefill_isl"].dtype == decode["max_kv_tokens"].dtype == np.int64
    assert decode["max_kv_tokens"].tolist() == [swept.max_kv_tokens_total]
    points = {kind: [p for p in swept.points if p.point_type == kind] for kind in ("prefill", "decode")}
    columns = zip(*(prefill[name] for name in ("prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu")), strict=True)
    for (isl, ttft, rate), point in zip(columns, points["prefill"], strict=True):
        assert (isl, ttft) == (point.ranks[0].prefill_tokens, point.ranks[0].wall_time_s * 1000)
        assert rate == pytest.approx(isl / ttft * 1000 / swept.gpus_total * swept.attention_dp)
    names = ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu")
    columns = zip(*(decode[name] for name in names), strict=True)
    for (usage, context, itl, rate), point in zip(columns, points["decode"], strict=True):
        requests = sum(rank.decode_requests for rank in point.ranks)
        assert usage * swept.max_kv_tokens_total == pytest.approx(requests * context)
        assert itl == point.ranks[0].wall_time_s * 1000
        assert rate == pytest.approx(requests / itl * 1000 / swept.gpus_total)
    for phase, arrays in (("prefill", prefill), ("decode", decode)):
        lists = json.loads((tmp_path / f"{phase}_raw_data.json").read_text())
        for name, values in lists.items():
            assert name.startswith("meta_") or arrays[name].tolist() in (values, [values])
    assert 0 < told.worst_relative_error["prefill"] < 0.5
    alone = way.do(exports.export_profile(way.client, engine, tmp_path / "j", formats=("json",), **sweep))
    assert [Path(file).suffix for file in alone.files] == [".json", ".json"]


@pytest.mark.parametrize("engine", [DENSE, MOE], ids=["dense", "moe"])
def test_the_mockers_file_holds_direct_predictions(way: Way, tmp_path: Path, engine: EngineConfig) -> None:
    told = way.do(exports.export_mocker(way.client, engine, tmp_path / "m.npz", resolution=20, max_batch=128))
    table = np.load(told.files[0])
    isl, ttft = table["prefill_isl"], table["prefill_ttft_ms"]
    kv, context, itl = (table[f"decode_{name}"] for name in ("active_kv_tokens", "context_length", "itl"))
    assert itl.shape == (len(kv), len(context)) == (20, 20)
    assert all(array.dtype == np.float64 for array in (isl, ttft, kv, context, itl))
    assert all((np.diff(axis) > 0).all() for axis in (isl, kv, context))
    assert ttft.tolist() == way.do(way.client.predict_many(engine, Prefill(1, isl))).latency_ms.tolist()
    one = way.do(way.client.predict_many(engine, DecodeStep(1, context - 1, 1))).latency_ms
    most = way.do(way.client.predict_many(engine, DecodeStep(128, context - 1, 1))).latency_ms
    assert itl[0].tolist() == one.tolist(), "less than one request is one"
    assert itl[-1, 0] == most[0], "more than the largest batch is that"
    j = 10
    i = int(np.searchsorted(kv, 3 * context[j]))
    batch = kv[i] / context[j]
    assert 1 < batch < 128
    low, high = (
        way.do(way.client.predict(engine, DecodeStep(int(b), int(context[j]) - 1, 1))).latency_ms
        for b in (np.floor(batch), np.floor(batch) + 1)
    )
    assert itl[i, j] == pytest.approx(low + (high - low) * (batch - np.floor(batch)), rel=1e-12)
    fine = way.do(exports.export_mocker(way.client, engine, tmp_path / "f.npz", resolution=80, max_batch=128))
    assert fine.worst_relative_error["decode"] < told.worst_relative_error["decode"] < 1
    assert float(table["meta_worst_relative_error_decode"]) == told.worst_relative_error["decode"]
    assert str(table["meta_engine_handle"]) == told.engine.handle


@pytest.mark.parametrize("engine", [DENSE, MOE], ids=["dense", "moe"])
def test_no_reader_is_further_off_than_is_stated(client: Client, tmp_path: Path, engine: EngineConfig) -> None:
    told = exports.export_mocker(client, engine, tmp_path / "m.npz", resolution=40, max_pass_tokens=4096, max_batch=300)
    table = np.load(told.files[0])
    every = np.arange(1, 4097)
    direct = client.predict_many(engine, Prefill(1, every)).latency_ms
    read = np.interp(every, table["prefill_isl"], table["prefill_ttft_ms"])
    assert np.max(abs(read / direct - 1)) == pytest.approx(told.worst_relative_error["prefill"])
    kv, contexts = table["decode_active_kv_tokens"], table["decode_context_length"]
    batch, context = (axis.ravel() for axis in np.meshgrid(np.arange(1.0, 301), np.arange(2.0, 16385, 91)))
    batch, context = (axis[batch * context <= kv[-1]] for axis in (batch, context))
    direct = client.predict_many(engine, DecodeStep(batch, context - 1, 1)).latency_ms
    read = grids.bilinear(kv, contexts, table["decode_itl"], batch * context, context)
    assert np.max(abs(read / direct - 1)) < 1.1 * told.worst_relative_error["decode"]
    told = exports.export_profile(client, engine, tmp_path, formats=("json",), prefill_granularity=7)
    points = json.loads((tmp_path / "prefill_raw_data.json").read_text())
    every = np.arange(points["prefill_isl"][0], points["prefill_isl"][-1] + 1)
    direct = client.predict_many(engine, Prefill(1, every)).latency_ms
    read = np.interp(every, points["prefill_isl"], points["prefill_ttft"])
    assert np.max(abs(read / direct - 1)) == pytest.approx(told.worst_relative_error["prefill"])


def test_splitwise_reads_a_row_for_every_prompt_size_and_batch(client: Client, tmp_path: Path) -> None:
    told = exports.export_splitwise(client, DENSE, tmp_path / "s.csv", resolution=5)
    found = rows(told.files[0])
    assert len(found) == 25 and list(found[0])[:3] == ["model", "hardware", "tensor_parallel"]
    for row in found[::6]:
        batch, size = int(row["batch_size"]), int(row["prompt_size"])
        prompt = client.predict(DENSE, Prefill(batch, size)).latency_ms
        token = client.predict(DENSE, DecodeStep(batch, size, int(row["token_size"]))).latency_ms
        assert float(row["prompt_time"]) == pytest.approx(prompt, abs=1e-6)
        assert float(row["token_time"]) == pytest.approx(token, abs=1e-6)
    assert set(told.worst_relative_error) == {"prompt_time", "token_time"}


def test_blis_steps_are_whole_microseconds_and_never_none(client: Client, tmp_path: Path) -> None:
    told = exports.export_blis(client, DENSE, tmp_path / "b.csv", resolution=6, context_tokens=1024)
    found = rows(told.files[0])
    assert len(found) == 36 and found[0]["step_time_us"] == "1"
    for row in found[1::5]:
        tokens, decodes = int(row["prefill_tokens"]), int(row["decode_requests"])
        step = Mixed(tokens, decodes, 1023, 1)
        if not tokens or not decodes:
            step = Prefill(1, tokens) if tokens else DecodeStep(decodes, 1023, 1)
        assert int(row["step_time_us"]) == max(1, round(client.predict(DENSE, step).latency_ms * 1000))


def test_vidur_rows_are_operators_that_add_up(client: Client, tmp_path: Path) -> None:
    told = exports.export_vidur(client, DENSE, tmp_path / "v.csv", resolution=4)
    found = rows(told.files[0])
    assert {row["is_prefill"] for row in found} == {"0", "1"} and len(found) == 4 + 16
    for row in found:
        operators = [float(value) for name, value in list(row.items())[4:-1]]
        assert sum(operators) == pytest.approx(float(row["total_ms"]), abs=1e-4)
    assert set(told.worst_relative_error) == {"prefill", "decode"}


def test_autoscaler_coefficients_are_those_of_the_law(client: Client, tmp_path: Path) -> None:
    told = exports.export_wva(client, DENSE, tmp_path / "w.yaml", max_batch_per_rank=64)
    law = client.ask(planner.fit_latency_law(DENSE, max_batch_per_rank=64))
    (variant,) = yaml.safe_load(Path(told.files[0]).read_text())["accelerators"]
    decode, prefill = variant["perfParms"]["decodeParms"], variant["perfParms"]["prefillParms"]
    assert (variant["acc"], variant["accCount"], variant["maxBatchSize"]) == ("h200_sxm", 4, 64)
    assert float(decode["alpha"]) == pytest.approx(law.alpha_ms, rel=1e-5)
    assert float(decode["beta"]) == pytest.approx(law.beta_ms_per_request, rel=1e-5)
    assert float(prefill["delta"]) == pytest.approx(law.delta_ms_per_token, rel=1e-5)
    assert told.worst_relative_error["itl"] == law.itl_fit.worst_relative_error


def test_an_autoscaler_is_told_of_the_batch_of_all_ranks(client: Client, tmp_path: Path) -> None:
    told = exports.export_wva(client, MOE, tmp_path / "w.yaml", max_batch_per_rank=64)
    law = client.ask(planner.fit_latency_law(MOE, max_batch_per_rank=64))
    (variant,) = yaml.safe_load(Path(told.files[0]).read_text())["accelerators"]
    decode, prefill = variant["perfParms"]["decodeParms"], variant["perfParms"]["prefillParms"]
    assert (variant["accCount"], variant["maxBatchSize"]) == (8, 512)
    assert float(decode["alpha"]) + 512 * float(decode["beta"]) == pytest.approx(
        law.alpha_ms + 64 * law.beta_ms_per_request, rel=1e-5
    )
    assert 8 * float(prefill["delta"]) == pytest.approx(law.delta_ms_per_token, rel=1e-5)


def test_the_real_time_simulator_gets_durations(client: Client, tmp_path: Path) -> None:
    told = exports.export_llmd_sim(client, DENSE, tmp_path / "l.yaml", std_dev_share=0.1)
    found = yaml.safe_load(Path(told.files[0]).read_text())
    one = client.predict(DENSE, DecodeStep(1, 2047, 1)).latency_ms
    many = client.predict(DENSE, DecodeStep(256, 2047, 1)).latency_ms
    assert found["inter-token-latency"] == f"{one:.3f}ms"
    assert found["time-factor-under-load"] == pytest.approx(many / one, rel=1e-5) and found["max-num-seqs"] == 256
    assert re.fullmatch(r"\d+\.\d{3}us", found["prefill-time-per-token"])
    constant = exports.export_llmd_sim(client, DENSE, tmp_path / "c.yaml", constant_prompt_tokens=1000)
    assert "time-to-first-token" in yaml.safe_load(Path(constant.files[0]).read_text())
    with pytest.raises(ValueError, match="std_dev_share"):
        exports.export_llmd_sim(client, DENSE, tmp_path / "x.yaml", std_dev_share=0.5)


@pytest.mark.parametrize(
    ("export", "setting", "value"),
    [
        (exports.export_mocker, "max_context_tokens", 2),
        (exports.export_mocker, "max_kv_tokens", -1),
        (exports.export_llmd_sim, "max_num_seqs", 0),
        (exports.export_llmd_sim, "kv_transfer_ms", float("nan")),
        (exports.export_blis, "max_batch", 0),
        (exports.export_blis, "resolution", 1),
        (exports.export_vidur, "max_context_tokens", 2),
        (exports.export_splitwise, "max_prompt_tokens", 3),
    ],
)
def test_a_setting_that_makes_no_table_is_refused_by_name(
    client: Client, tmp_path: Path, export, setting, value
) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be at least"):
        export(client, DENSE, tmp_path / "f", **{setting: value})
    assert list(tmp_path.iterdir()) == []


def test_two_points_of_an_axis_are_its_ends(client: Client, tmp_path: Path) -> None:
    table = np.load(exports.export_mocker(client, DENSE, tmp_path / "m.npz", resolution=2, max_kv_tokens=5000).files[0])
    assert table["decode_active_kv_tokens"].tolist() == [0, 5000]
    assert table["decode_context_length"].tolist() == [2, 16384]


def test_the_real_time_simulators_load_is_held_against_every_batch(client: Client, tmp_path: Path) -> None:
    told = exports.export_llmd_sim(client, DENSE, tmp_path / "l.yaml", max_num_seqs=512)
    every = np.arange(1, 513)
    direct = client.predict_many(DENSE, DecodeStep(every, 2047, 1)).latency_ms
    stretched = direct[0] + (direct[-1] - direct[0]) * (every - 1) / 511
    assert np.max(abs(stretched / direct - 1)) == pytest.approx(told.worst_relative_error["itl_under_load"])


def test_nothing_is_written_of_values_that_are_not_sound(client: Client, tmp_path: Path) -> None:
    good = np.array([1.0, 2.0])
    for axes, values in (
        ([np.array([1.0, 1.0])], [good]),
        ([np.array([1.0, np.inf])], [good]),
        ([good], [np.array([1.0, np.nan])]),
        ([good], [np.array([0.0, 1.0])]),
        ([good], [np.zeros(0)]),
    ):
        with pytest.raises(ValueError, match="refused"):
            grids.require_sound(axes, values)
    grids.require_sound([good], [good])
    with pytest.raises(ValueError, match="resolution"):
        exports.export_mocker(client, DENSE, tmp_path / "m.npz", resolution=1)
    with pytest.raises(ValueError, match="formats"):
        exports.export_profile(client, DENSE, tmp_path, formats=("csv",))
    with pytest.raises(ValueError, match="both phases"):
        exports.export_profile(client, DENSE, tmp_path, decode_granularity=0)
    assert list(tmp_path.iterdir()) == []


def test_axes_are_whole_dense_at_the_small_end_and_as_long_as_asked() -> None:
    axis = grids.counts(1, 8192, 100)
    assert len(axis) == 100 and (axis == axis.round()).all() and (np.diff(axis) > 0).all()
    assert (axis[0], axis[-1]) == (1, 8192) and axis[:8].tolist() == list(range(1, 9))
    assert grids.counts(1, 5, 100).tolist() == [1, 2, 3, 4, 5]
    assert grids.counts(7, 7, 3).tolist() == [7]


def test_interpolation_is_exact_for_planes() -> None:
    r, c = np.array([0.0, 1, 10]), np.array([2.0, 3, 7])
    values = r[:, None] * 2 + c * 5 + r[:, None] * c
    at_r, at_c = np.array([0.5, 9.0, 10.0]), np.array([2.5, 6.0, 7.0])
    assert grids.bilinear(r, c, values, at_r, at_c) == pytest.approx(at_r * 2 + at_c * 5 + at_r * at_c)
    assert grids.worst(np.array([1.1]), np.array([1.0])) == pytest.approx(0.1)
