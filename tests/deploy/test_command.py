"""perfcast generate, explain, verify, targets: output and exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from perfcast_deploy.cli import deploy

COMMON = [
    "--model",
    "org/m",
    "--system",
    "h200_sxm",
    "--backend",
    "vllm",
    "--engine-version",
    "0.24.0",
    "--isl",
    "4000",
    "--osl",
    "500",
    "--target",
    "dynamo",
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(deploy, list(arguments))


def test_from_row_to_verified_result(tmp_path: Path) -> None:
    row = tmp_path / "row.json"
    row.write_text(json.dumps({"tp": 4, "bs": 20, "ttft": 284.06, "tpot": 10.052, "tokens/s/gpu": 471.213}))
    place, result = tmp_path / "out", tmp_path / "result.json"
    made = run(
        "generate", "--row", str(row), *COMMON, "--set", "cluster.namespace=serving,nextn=1", "--out", str(place)
    )
    assert made.exit_code == 0, made.output
    assert "max_seq_len: predicted 4500 -> deployed 4756" in made.output
    result.write_text(json.dumps({"mean_ttft_ms": 142.03, "mean_tpot_ms": 10.052, "output_throughput": 100}))
    verified = run("verify", str(place), str(result), "--calibration", str(tmp_path / "c.json"))
    assert verified.exit_code == 0 and "+100.0%" in verified.output
    assert json.loads((tmp_path / "c.json").read_text())["concurrency"] == 20
    explained = run("explain", "--json", str(place / "k8s_deploy.yaml"))
    assert json.loads(explained.output)["nextn"] == 1


def test_without_a_search(tmp_path: Path) -> None:
    made = run("generate", "--prefill", "tp=4,bs=1,workers=2", "--decode", "tp=4,bs=64", *COMMON, "--dry-run", "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.output)["deployment"]["roles"][0]["workers"] == 2
    naive = run(
        "generate", "--naive", "weights_gib=64,gpu_memory_gib=80", "--total-gpus", "8", *COMMON, "--output", "-"
    )
    assert naive.exit_code == 0 and "--tensor-parallel-size\n          - '2'" in naive.output
    whole = tmp_path / "d.json"
    whole.write_text(json.dumps(json.loads(made.output)["deployment"]))
    assert run("generate", "--deployment", str(whole), "--target", "engine", "--dry-run").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--agg", "tp=4", *COMMON],
        ["generate", "--agg", "tp4", *COMMON],
        ["generate", *COMMON],
        ["generate", "--row", "/nonexistent.json", *COMMON],
        ["generate", "--agg", "tp=4,bs=1", *COMMON[:-1], "helm"],
        ["generate", "--agg", "tp=4,bs=1", *COMMON, "--policy", "hope"],
        ["generate", "--agg", "tp=4,bs=1", *COMMON, "--set", "colour=blue"],
        ["generate", "--agg", "tp=4,bs=1", *COMMON, "--facts", "/nonexistent.yaml"],
        ["generate", "--naive", "weights_gib=x", *COMMON],
        ["explain", "--", "vllm", "serve", "m", "--unheard-of", "1"],
        ["explain", "/nonexistent.yaml"],
        ["verify", "/nonexistent", "/nonexistent.json"],
        ["targets", "nosuch"],
        ["generate", "--unheard-of"],
    ],
)
def test_refusals_exit_with_2_and_write_nothing(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = run(*arguments)
    assert refused.exit_code == 2, refused.output
    assert refused.output.strip() and "Traceback" not in refused.output
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_left_alone(tmp_path: Path) -> None:
    assert run("generate", "--agg", "tp=4,bs=1", *COMMON, "--out", str(tmp_path)).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_targets_are_listed() -> None:
    assert "DynamoGraphDeployment" in run("targets").output
    assert "max-num-seqs" in run("targets", "vllm").output
