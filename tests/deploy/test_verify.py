"""Measured beside predicted, and a bundle that vouches for itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from perfcast_deploy.bundle import MANIFEST, generate, read, validate, write
from perfcast_deploy.deployment import Predicted
from perfcast_deploy.verify import verify
from perfcast_engine.errors import DataCorrupt, EngineError, InvalidField, UnsupportedCombination

from tests.deploy.deployments import deployment, role

VLLM = {
    "mean_ttft_ms": 250.0,
    "mean_tpot_ms": 8.0,
    "output_throughput": 4000.0,
    "max_concurrency": 48,
    "failed": 0,
    "completed": 10,
    "total_input_tokens": 40000,
    "total_output_tokens": 5000,
}
AIPERF = {
    "time_to_first_token": {"unit": "ms", "avg": 250.0},
    "inter_token_latency": {"unit": "ms", "avg": 8.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 4000.0},
    "input_sequence_length": {"avg": 4000},
}
INFERENCEX = {"mean_ttft": 0.25, "mean_tpot": 0.008, "output_tput_per_gpu": 2000.0, "conc": 48, "isl": 4000, "osl": 500}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return write(generate(deployment("vllm"), "dynamo").files, tmp_path / "bundle")


def result(tmp_path: Path, content: Any, name: str = "result.json") -> Path:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("client", "content"),
    [
        ("vllm bench serve", VLLM),
        ("sglang.bench_serving", VLLM | {"accept_length": None}),
        ("aiperf / genai-perf", AIPERF),
        ("aiperf / genai-perf", {"records": AIPERF}),
        ("InferenceX", INFERENCEX),
        ("InferenceX", [INFERENCEX]),
    ],
)
def test_results_of_the_common_clients(place: Path, tmp_path: Path, client: str, content: Any) -> None:
    report = verify(place, result(tmp_path, content))
    assert report.client == client
    errors = {row.metric: row.error for row in report.compared}
    assert errors == pytest.approx({"ttft_ms": -0.2, "tpot_ms": 0.25, "output_tokens_per_s": 0.25})
    assert report.remarks == ()


def test_an_iteration_to_learn_from(place: Path, tmp_path: Path) -> None:
    told = verify(place, result(tmp_path, VLLM)).observation()
    assert told["engine"] == {
        "model": "Qwen/Qwen3-32B-FP8",
        "system": "h200_sxm",
        "backend": "vllm",
        "version": "0.24.0",
        "nextn": 0,
        "profile": "corrected",
        "role": "both",
        "tp": 2,
        "pp": 1,
        "attn_dp": 1,
    }
    (rank,) = told["ranks"]  # every request decodes, and a 500th of them starts in each iteration
    assert rank == {
        "decode_requests": 48,
        "decode_kv_tokens": 48 * 4250,
        "prefill_requests": 1,
        "prefill_tokens": 384,
        "prefill_kv_tokens": 0,
        "wall_time_s": 0.008,
        "dp_rank": 0,
    }


def test_decode_workers_teach_of_decodes_on_every_rank(tmp_path: Path) -> None:
    experts = {"tp": 1, "dp": 8, "moe_ep": 8, "chunked_prefill": True}
    predicted = Predicted(concurrency=768, tpot_ms=9.0, accepted=0.5, basis={"version": "0.20.1"})
    pair = (role("prefill", max_tokens=8000, **experts), role("decode", workers=2, **experts))
    d = deployment("vllm", *pair, is_moe=True, nextn=1, predicted=predicted)
    folder = write(generate(d, "dynamo").files, tmp_path / "pair")
    told = verify(folder, result(tmp_path, VLLM | {"max_concurrency": 768})).observation()
    assert (told["engine"]["role"], told["engine"]["moe_ep"], told["engine"]["version"]) == ("decode", 8, "0.20.1")
    assert [rank["dp_rank"] for rank in told["ranks"]] == list(range(8))
    assert told["ranks"][0]["decode_requests"] == 48 and "prefill_tokens" not in told["ranks"][0]
    assert told["ranks"][0]["wall_time_s"] == pytest.approx(0.012)  # a step yields a token and a half


def test_nothing_is_learned_off_the_predicted_point(place: Path, tmp_path: Path) -> None:
    report = verify(place, result(tmp_path, VLLM | {"max_concurrency": 8}))
    with pytest.raises(UnsupportedCombination, match="concurrency was 8"):
        report.observation()


def test_the_last_run_of_appended_lines_counts(place: Path, tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(VLLM | {"mean_ttft_ms": ttft}) for ttft in (100.0, 400.0))
    assert verify(place, result(tmp_path, lines, "r.jsonl")).compared[0].measured == 400.0


def test_a_run_off_the_predicted_point_is_called_so(place: Path, tmp_path: Path) -> None:
    report = verify(place, result(tmp_path, VLLM | {"max_concurrency": 8, "total_input_tokens": 1000, "failed": 3}))
    assert report.remarks == (
        "concurrency was 8, predicted for 48",
        "isl was 100, predicted for 4000",
        "3 requests failed",
    )


@pytest.mark.parametrize(
    "content",
    [
        *(VLLM | {"mean_ttft_ms": bad} for bad in (-1.0, 0, "fast", True, float("nan"))),
        *(
            {"unknown": 1},
            [],
            "{",
            "[1, 2]",
            '{"mean_ttft_ms": Infinity}',
            "",
            AIPERF | {"time_to_first_token": {"avg": -3}},
        ),
        VLLM | {"max_concurrency": float("inf")},
    ],
)
def test_results_that_are_none_are_refused(place: Path, tmp_path: Path, content: Any) -> None:
    with pytest.raises((InvalidField, DataCorrupt)):
        verify(place, result(tmp_path, content))


def test_a_changed_bundle_is_refused(place: Path, tmp_path: Path) -> None:
    measured = result(tmp_path, VLLM)
    deploy_file = place / "k8s_deploy.yaml"
    deploy_file.write_text(deploy_file.read_text().replace("'48'", "'96'"))
    with pytest.raises(DataCorrupt, match=r"k8s_deploy\.yaml was changed"):
        verify(place, measured)
    deploy_file.unlink()
    with pytest.raises(DataCorrupt, match="missing"):
        verify(place, measured)


def test_a_changed_prediction_is_refused(place: Path, tmp_path: Path) -> None:
    manifest = place / MANIFEST
    manifest.write_text(manifest.read_text().replace('"ttft_ms": 200.0', '"ttft_ms": 250.0'))
    with pytest.raises(DataCorrupt, match=r"perfcast\.json was changed"):
        verify(place, result(tmp_path, VLLM))


def test_what_is_not_there_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError):
        verify(tmp_path / "nowhere", result(tmp_path, VLLM))
    with pytest.raises(InvalidField):
        verify(place, tmp_path / "nowhere.json")


def test_other_files_in_the_directory_are_left_alone(place: Path) -> None:
    (place / "trace.bin").write_bytes(b"\xff\xfe")
    assert verify(place, result(place, VLLM)).compared


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"target": "dynamo"}', '{"schema": NaN}'])
def test_a_damaged_manifest_is_refused(place: Path, damage: str) -> None:
    (place / MANIFEST).write_text(damage)
    with pytest.raises((DataCorrupt, InvalidField)):
        validate(read(place))
