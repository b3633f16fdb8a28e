"""``perfcast generate | explain | verify | targets`` and ``perfcast search --deploy``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from perfcast_cli.main import main
from perfcast_client import Client, EngineConfig, calibration
from perfcast_deploy.bundle import parse, read

from tests.server.running import Running, running

MODEL = ["--model", "Qwen/Qwen3-32B-FP8", "--system", "h200_sxm"]
LOAD = ["--isl", "4000", "--osl", "500", "--prefix", "500"]
SEARCH = [*MODEL, *LOAD, "--gpus", "32", "--ttft", "300", "--tpot", "10", "--no-plot"]
VLLM = [*MODEL, "--backend", "vllm", *LOAD]


def run(*arguments: str, code: int = 0) -> str:
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == code, outcome.output
    return outcome.stdout if code == 0 else outcome.output


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search of both modes on two engines, with the files of its best."""
    folder = tmp_path_factory.mktemp("search") / "found"
    engines = ["--backend", "trtllm", "--backend", "sglang"]
    run("search", *SEARCH, *engines, "--out", str(folder), "--deploy", "dynamo", "--set", "cluster.namespace=serving")
    return folder


def test_a_search_writes_the_files_that_deploy_its_best(found: Path) -> None:
    d, told = parse(read(found / "dynamo")), json.loads((found / "result.json").read_text())
    best = next(e for e in told["experiments"] if e["name"] == told["best"])["picks"][0]
    assert (d.mode, d.gpus, d.cluster.namespace) == ("disagg", 32, "serving")
    assert d.predicted.ttft_ms == pytest.approx(best["ttft_ms"], rel=1e-5)
    assert d.predicted.output_tokens_per_s == pytest.approx(
        best["tokens_per_s"] * best["ranking"]["replicas_total"], rel=1e-5
    )


def test_every_pick_of_a_saved_search_can_be_deployed(found: Path, tmp_path: Path) -> None:
    result = json.loads((found / "result.json").read_text())
    picks = 0
    for experiment in result["experiments"]:
        for index, pick in enumerate(experiment["picks"]):
            asked = ["--search", str(found / "result.json"), "--experiment", experiment["name"], "--index", str(index)]
            saved = json.loads(run("generate", *asked, "--target", "engine", "--dry-run", "--json"))
            assert saved["summary"]["gpus_total"] == pick["ranking"]["gpus_used_total"]
            assert saved["summary"]["predicted"]["ttft_ms"] == pytest.approx(pick["ttft_ms"], rel=1e-5)
            picks += 1
    assert picks > 4
    asked = ["--search", str(found / "result.json"), "--experiment", "disagg_trtllm"]
    front = [*asked, "--part", "front", "--index", "1", "--target", "engine", "--dry-run"]
    assert "predicted: TTFT" in run("generate", *front)
    assert "is not below 0" in run("generate", *asked, "--part", "rows", "--target", "engine", code=1)


def test_a_search_that_finds_nothing_writes_no_deployment(tmp_path: Path) -> None:
    engine = ["--backend", "vllm", "--mode", "disagg"]
    run("search", *SEARCH, *engine, "--out", str(tmp_path / "f"), "--deploy", "engine", code=1)
    assert not (tmp_path / "f" / "engine").exists()
    saved = ["--search", str(tmp_path / "f" / "result.json"), "--target", "engine"]
    assert "unmet" in run("generate", *saved, "--experiment", "disagg_vllm", code=1)
    run("generate", *saved, "--part", "closest", "--out", str(tmp_path / "closest"))
    assert (tmp_path / "closest" / "run_0.sh").exists()
    assert "--out" in run("search", *SEARCH, "--deploy", "engine", code=2)


def test_from_flags_to_a_verified_result(tmp_path: Path) -> None:
    folder, result = tmp_path / "out", tmp_path / "result.json"
    text = run(
        "generate", *VLLM, "--tp", "4", "--batch", "16", "--gpus", "10", "--target", "dynamo", "--out", str(folder)
    )
    assert re.search(r"max_seq_len: predicted 4500 -> deployed 4756 \(room", text)
    assert "8 GPUs: 2 x agg of 4" in text and "predicted: TTFT" in text
    predicted = json.loads((folder / "perfcast.json").read_text())["assumed"]["predicted"]
    measured = {
        "mean_ttft_ms": predicted["ttft_ms"] / 2,
        "mean_tpot_ms": predicted["tpot_ms"],
        "output_throughput": 100.0,
        "max_concurrency": 32,
    }
    result.write_text(json.dumps(measured))
    text = run("verify", str(folder), str(result))
    assert "+100.0%" in text and "+0.0%" in text
    explained = json.loads(run("explain", str(folder / "k8s_deploy.yaml"), *LOAD, "--json"))
    assert explained["facts"]["system"] == "h200_sxm" and explained["facts"]["gpus"] == 8
    assert explained["estimate"]["deployment"]["ttft_ms"] == pytest.approx(predicted["ttft_ms"], rel=1e-5)


def test_calibration_learns_a_result_once(tmp_path: Path) -> None:
    folder, result, kept = tmp_path / "out", tmp_path / "result.json", tmp_path / "kept.json"
    pools = ["--prefill", "tp=4,batch=1", "--decode", "tp=4,batch=16"]
    run("generate", *VLLM, *pools, "--target", "engine", "--out", str(folder))
    result.write_text(json.dumps({"mean_ttft_ms": 200.0, "mean_tpot_ms": 30.0, "output_throughput": 500.0}))
    config = EngineConfig(model=MODEL[1], system="h200_sxm", backend="vllm", version="0.24.0", tp=4, role="decode")
    with running(state_dir=str(tmp_path / "states")) as server, Client(server.address) as client:
        asked = ["verify", str(folder), str(result), "--server", server.address, "--state", "bench"]
        assert "learned 1 iteration(s) and is at version 1" in run(*asked, "--calibration", str(kept))
        assert "is at version 1" in run(*asked)
        assert client.ask(calibration.diagnose(config, "bench")).retained_observations == 1
    (rank,) = json.loads(kept.read_text())["ranks"]
    assert (rank["decode_requests"], rank["wall_time_s"]) == (16, 0.03)
    assert "--server" in run("verify", str(folder), str(result), "--state", "bench", code=2)


def test_without_a_search(tmp_path: Path) -> None:
    naive = json.loads(run("generate", *VLLM, "--naive", "--gpus", "8", "--target", "engine", "--dry-run", "--json"))
    (role,) = naive["summary"]["roles"]
    assert (role["gpus_per_worker"], role["workers_total"], role["max_batch_per_rank"]) == (1, 8, 128)
    wide = ["--model", "deepseek-ai/DeepSeek-V3", "--system", "h200_sxm", "--backend", "sglang", "--naive"]
    told = json.loads(run("generate", *wide, "--target", "dynamo", "--dry-run", "--json"))
    assert told["summary"]["roles"][0]["gpus_per_worker"] == 8
    assert "do not hold" in run("generate", *wide, "--gpus", "4", "--target", "dynamo", code=1)


def test_settings_and_printing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["served_name=chat", "port=9000", "kv_router=true", "engine_version=0.20.1"]
    settings += ["cluster.namespace=serving", "cluster.env.HF_HUB_OFFLINE=1", "cluster.gpus_per_node=4"]
    asked = ["generate", *VLLM, "--tp", "4", "--batch", "16", *(word for s in settings for word in ("--set", s))]
    text = run(*asked, "--target", "dynamo", "--print")
    assert "# ==> k8s_deploy.yaml" in text and "namespace: serving" in text and "HF_HUB_OFFLINE" in text
    told = json.loads(run(*asked, "--target", "engine", "--set", "cluster.hosts=a", "--print", "--json"))
    assert "NODE_HOST=a" in told["files"]["run_0.sh"] and told["folder"] is None
    assert list(tmp_path.iterdir()) == []
    headroom = run(*asked, "--target", "dynamo", "--policy", "headroom", "--dry-run")
    assert "filled to the deployed limits: TTFT" in headroom and "max_batch: predicted 16 -> deployed 512" in headroom


def test_by_a_server(served: Running, tmp_path: Path) -> None:
    asked = ["generate", *VLLM, "--tp", "4", "--batch", "16", "--target", "engine", "--dry-run", "--json"]
    assert json.loads(run(*asked)) == json.loads(run(*asked, "--server", served.address))


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        ([*VLLM, "--batch", "16"], "unknown target", 1),
        ([*VLLM, "--batch", "16", "--target", "helm"], "unknown target", 1),
        ([*VLLM, "--target", "engine"], "not alone", 1),
        ([*VLLM, "--batch", "16", "--naive", "--target", "engine"], "not alone", 1),
        ([*VLLM, "--decode", "tp=4,batch=1", "--target", "engine"], "prefill", 1),
        ([*VLLM, "--batch", "16", "--target", "engine", "--policy", "hope"], "hope", 1),
        ([*VLLM, "--batch", "16", "--target", "engine", "--set", "colour=blue"], "served_name", 1),
        ([*VLLM, "--batch", "16", "--target", "engine", "--set", "port=much"], "set.port", 1),
        ([*VLLM, "--batch", "16", "--target", "engine", "--set", "cluster.env=1"], "cluster.env", 1),
        ([*VLLM, "--tp", "4", "--batch", "16", "--gpus", "3", "--target", "engine"], "no replica of 4", 1),
        (["--system", "h200_sxm", "--backend", "vllm", "--batch", "1", "--target", "engine"], "model", 1),
        (["--search", "/nonexistent.json", "--target", "engine"], "cannot be read", 1),
        (["--unheard-of"], "unheard-of", 2),
    ],
)
def test_refusals_write_nothing(
    arguments: list[str], words: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = run("generate", *arguments, code=code)
    assert words in told and "Traceback" not in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("twist", [{}, [], {"experiments": 1}, {"experiments": [{"name": 1}]}, "text", None])
def test_a_saved_search_that_is_none_is_refused(tmp_path: Path, twist: Any) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(twist))
    assert "Traceback" not in run("generate", "--search", str(path), "--target", "engine", code=1)


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    asked = ["generate", *VLLM, "--tp", "4", "--batch", "16", "--target", "engine", "--out", str(tmp_path)]
    assert "exists" in run(*asked, code=1) and list(tmp_path.iterdir()) == []


def test_explaining_a_command_estimates_it() -> None:
    command = ["vllm", "serve", "Qwen/Qwen3-235B-A22B-FP8", "-tp", "4", "-dp", "2", "--enable-expert-parallel"]
    told = json.loads(run("explain", "--system", "h200_sxm", *LOAD, "--batch", "32", "--json", "--", *command))
    assert told["facts"]["is_moe"] is True and told["facts"]["roles"]["agg"]["moe_ep"] == 8
    deployment, (engine,) = told["estimate"]["deployment"], told["estimate"]["engines"]
    assert deployment["concurrency_total"] == 64 and engine["mapping"] == "tp4pp1dp2etp1ep8"
    unset = json.loads(run("explain", "--system", "h200_sxm", "--json", "--", *command))
    assert any("256 in flight per rank were assumed" in note for note in unset["notes"])
    text = run("explain", "--", *command)
    assert "no estimate: give --system" in text and "tp: 4" in text
    assert "no estimate" in run("explain", "--system", "mars", "--", *command)


def test_explaining_an_unmeasured_version_says_so(tmp_path: Path) -> None:
    version = ["--set", "engine_version=0.16.0", "--out", str(tmp_path / "out")]
    run("generate", *VLLM, "--tp", "4", "--batch", "16", "--target", "dynamo", *version)
    told = json.loads(run("explain", str(tmp_path / "out" / "k8s_deploy.yaml"), *LOAD, "--json"))
    assert told["facts"]["version"] == "0.16.0"
    assert told["notes"] == ["vllm 0.16.0 was not measured; the current tables answer"]
    assert told["estimate"]["deployment"]["gpus_total"] == 4


@pytest.mark.parametrize(
    "arguments",
    [["--", "vllm", "serve", "m", "--unheard-of", "1"], ["/nonexistent.yaml"], ["--", "nginx"]],
)
def test_what_cannot_be_explained(arguments: list[str]) -> None:
    assert "Traceback" not in run("explain", *arguments, code=1)


@pytest.mark.parametrize("path", ["", " ", "deploy/nowhere", "/nonexistent.yaml", "/"])
def test_a_manifest_that_is_not_there_is_named(path: str) -> None:
    assert f"manifest: {path!r} is no file [INVALID_FIELD]" in run("explain", path, code=1)


def test_a_broken_manifest_is_an_error_of_who_gave_it(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("a: [")
    assert re.search(r"is no YAML: .* \[INVALID_FIELD\]", run("explain", str(tmp_path / "broken.yaml"), code=1))


def test_targets_are_listed() -> None:
    assert "DynamoGraphDeployment" in run("targets")
    assert "max-num-seqs" in run("targets", "vllm") and "1.3.0" in run("targets", "releases", "--json")
    assert "nosuch" in run("targets", "nosuch", code=1)
