"""The perfcast command, in process and against a server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner
from perfcast_cli.main import main
from perfcast_client import Client, DecodeStep, EngineConfig, Mixed, Prefill

from tests.server.running import Running

ENGINE = ["--model", "Qwen/Qwen3-32B-FP8", "--system", "h200_sxm", "--backend", "trtllm", "--tp", "4"]
CONFIG = EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", tp=4)


def run(*arguments: str, code: int = 0) -> str:
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == code, outcome.output
    return outcome.output


def test_predict_says_the_same_in_process_and_by_a_server(served: Running) -> None:
    asked = ["predict", *ENGINE, "--json", "--operators", "--batch", "4", "--isl", "1000", "--osl", "100"]
    own, told = json.loads(run(*asked)), json.loads(run(*asked, "--server", served.address))
    assert own == told
    with Client(served.address) as client:
        steps = told["steps"]
        assert steps["prefill"]["latency_ms"] == client.predict(CONFIG, Prefill(4, 1000)).latency_ms
        assert steps["decode"]["latency_ms"] == client.predict(CONFIG, DecodeStep(4, 1000, 100)).latency_ms
        assert steps["mixed"]["latency_ms"] == client.predict(CONFIG, Mixed(1000, 4, 1000, 100)).latency_ms
    assert set(told["steps"]) == {"prefill", "decode", "trajectory", "mixed"}


def test_predict_prints_a_table_for_people() -> None:
    text = run("predict", "prefill", *ENGINE, "--operators")
    assert "Qwen/Qwen3-32B-FP8 on h200_sxm, trtllm 1.3.0rc20, 4 GPUs" in text
    assert re.search(r"prefill +batch 8, isl 4096, prefix 0 +\d+\.\d{3}", text)


def test_an_inline_model_comes_from_a_file(tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "vocab_size": 32000,
                "max_position_embeddings": 4096,
            }
        )
    )
    asked = ["predict", "decode", "--model", "mine", "--config-json", str(file), "--json"]
    told = json.loads(run(*asked, "--system", "h200_sxm", "--backend", "vllm"))
    assert told["engine"]["model_family"] == "LLAMA"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "Qwen/Qwen3-32B-FP9"], ["UNKNOWN_MODEL", "Qwen/Qwen3-32B-FP8"]),
        (["--backend", "trtlm"], ["UNKNOWN_BACKEND", "trtllm"]),
        (["--batch", "0"], ["INVALID_FIELD", "batch"]),
        (["--tp", "-2"], ["INVALID_FIELD", "tp"]),
        (["--data", "/nowhere"], ["INVALID_FIELD", "not a folder"]),
        (["--config-json", sys.executable], [sys.executable, "no text in UTF-8"]),
        (["--server", "127.0.0.1:1", "--tls-ca", "/nowhere"], ["/nowhere: No such file"]),
        (["--server", "127.0.0.1:1", "--token-file", "/nowhere"], ["/nowhere: No such file"]),
        (["--server", "127.0.0.1:1"], ["UNAVAILABLE"]),
    ],
)
def test_an_error_is_one_line(arguments: list[str], words: list[str]) -> None:
    text = run("predict", *ENGINE, *arguments, code=1)
    assert text.count("\n") == 1 and text.startswith("Error: ")
    assert all(word in text for word in words)


def test_what_a_command_needs_is_said() -> None:
    assert "Missing option '--model'" in run("predict", code=2)


def test_data_that_are_not_there_are_told_in_one_line() -> None:
    for command in ("ls", "verify"):
        text = run("data", command, "--data", "/nowhere", code=1)
        assert text == "Error: data: /nowhere is not a folder [INVALID_FIELD]\n"


def test_names_to_copy_are_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert "Qwen/Qwen3-VL-235B-A22B-Instruct" in run("models") and "rtx_pro_6000_server" in run("data", "ls")


def test_models_and_systems_are_listed(served: Running) -> None:
    names = [model["model"] for model in json.loads(run("models", "--json"))]
    assert names == sorted(names) and "Qwen/Qwen3-32B-FP8" in names
    assert "Qwen/Qwen3-32B-FP8" in run("models", "qwen3-32b", "--server", served.address)
    systems = {system["name"] for system in json.loads(run("systems", "--json"))}
    assert len(systems) == 14
    assert "h200_sxm" in run("systems")


def test_support_tells_operators_and_matrix(served: Running) -> None:
    asked = ["support", "--model", "Qwen/Qwen3-30B-A3B", "--system", "a100_sxm", "--backend", "trtllm"]
    own, told = json.loads(run(*asked, "--json")), json.loads(run(*asked, "--json", "--server", served.address))
    assert own == told and own["works_in"] == "hybrid" and own["parallel"]["tp"] == 1
    text = run(*asked, "--tp", "2", "--moe-ep", "2")
    assert "tp2 moe_ep2" in text and "hidden_size was measured at 4096" in text
    matrix = ["support", "--matrix", "--model", "Qwen/Qwen3-8B,zai-org/GLM-5-FP8", "--system", "h200_sxm,l40s"]
    text = run(*matrix, "--backend", "vllm", "--why")
    assert text.startswith("3 PASS, 0 HYBRID, 1 FAIL") and "Qwen/Qwen3-8B     P P" in text and "dsa_context" in text
    cells = json.loads(run(*matrix, "--json"))
    assert len(cells) == 12 and {cell["verdict"] for cell in cells} == {"PASS", "FAIL"}
    assert "Missing option '--system'" in run("support", "--model", "Qwen/Qwen3-8B", code=2)
    assert "--tp does not go with --matrix" in run("support", "--matrix", "--tp", "2", code=2)


def test_packs_are_listed_and_verified() -> None:
    packs = json.loads(run("data", "ls", "--json"))
    assert {"h200_sxm", "b60"} <= {pack["system"] for pack in packs}
    assert all(pack["problem"] == "" and pack["rows"] > 0 for pack in packs)
    assert "h200_sxm" in run("data", "ls")


def test_serve_starts_answers_and_stops_on_sigterm(tmp_path) -> None:
    settings = tmp_path / "perfcast.toml"
    settings.write_text('log_format = "json"\nport = 0\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "perfcast_cli", "serve", "--config", str(settings), "--metrics-port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.match(r"perfcast is ready on (127\.0\.0\.1:\d+) after \d+\.\d\d s", line)
        assert match, line
        with Client(match.group(1)) as client:
            assert client.predict(CONFIG, Prefill(1, 128)).latency_ms > 0
        assert match.group(1) in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, logs = process.communicate(timeout=60)
        assert process.returncode == 0
        messages = [json.loads(line)["message"] for line in logs.splitlines()]
        assert messages[-2:] == ["draining", "stopped"] and "ready" in messages
    finally:
        process.kill()


def test_serve_refuses_bad_settings_in_one_line(tmp_path) -> None:
    assert "Error: port: -5 is less than 0" in run("serve", "--port", "-5", code=1)
    bad = tmp_path / "bad.yaml"
    bad.write_text("port: [")
    assert run("serve", "--config", str(bad), code=1).count("\n") == 1
    bad.write_bytes(b"\xff\xfe\xfa")
    assert "is no text in UTF-8" in run("serve", "--config", str(bad), code=1)
    assert "Error: workers: 0 is less than 1" in run("serve", "--workers", "0", code=1)
    for flags in (["--token-file", "no.such"], ["--tls-cert", "no.such", "--tls-key", "no.such"]):
        assert "no.such: No such file" in run("serve", "--port", "0", "--metrics-port", "-1", *flags, code=1)
    nowhere = str(tmp_path / "nowhere" / "socket")
    text = run("serve", "--port", "0", "--metrics-port", "-1", "--unix-socket", nowhere, code=1)
    assert f"Error: cannot listen on unix:{nowhere}: it is in use, or its folder is missing" in text


def test_a_reload_that_the_server_does_not_offer_is_told(served: Running) -> None:
    text = run("reload", "--server", served.address, code=1)
    assert text == f"Error: the server at {served.address} was not started with --admin\n"


def test_a_port_in_use_is_told(served: Running) -> None:
    text = run("serve", "--port", served.address.rpartition(":")[2], "--metrics-port", "-1", code=1)
    assert f"Error: cannot listen on {served.address}: it is in use" in text


def test_every_command_has_help() -> None:
    for command in ("serve", "predict", "support", "models", "systems", "data"):
        assert "Usage" in run(command, "--help")


def test_capacity_is_told_by_role_as_the_planner_hears_it(served: Running) -> None:
    asked = ["capacity", *ENGINE, "--isl", "2000", "--osl", "100", "--ttft-ms", "500", "--itl-ms", "20", "--json"]
    own, told = json.loads(run(*asked)), json.loads(run(*asked, "--server", served.address))
    assert own == told and set(told) == {"prefill", "decode", "aggregated"}
    assert told["prefill"]["itl_s"] is None and told["aggregated"]["itl_s"] <= 0.02
    assert re.search(r"decode +\d+ +\d+\.\d{3} +\d+\.\d\d +yes", run(*asked[:-1]))
    assert "CALIBRATION_OFF" in run(*asked[:-1], "--state", "prod", "--server", served.address, code=1)


def test_exports_are_written_and_say_how_far_they_are_off(served: Running, tmp_path) -> None:
    file = tmp_path / "m.npz"
    text = run("export", "mocker", *ENGINE, "--out", str(file), "--set", "resolution=10", "--server", served.address)
    assert file.exists() and re.search(r"worst error of decode: \d+\.\d%", text)
    assert json.loads(run("export", "wva", *ENGINE, "--out", str(tmp_path / "w.yaml"), "--json"))["files"]
    text = run("export", "profiler", *ENGINE, "--out", str(tmp_path / "p"), "--set", "isl=2000")
    assert "raw_data.npz" in text
    for setting, words in (("nope=1", "known are"), ("resolution=x", "number"), ("resolution=1", "must lie in")):
        assert words in run("export", "mocker", *ENGINE, "--out", str(file), "--set", setting, code=1)
