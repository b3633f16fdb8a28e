"""``perfcast estimate | search | recommend | exp``, in process and against a server."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from perfcast_cli import experiments
from perfcast_cli.experiments import EXAMPLE
from perfcast_cli.local import Local
from perfcast_cli.main import main
from perfcast_cli.plot import Series, nice_top, scatter
from perfcast_client import Client, EngineConfig, SearchTask, Targets, Workload
from perfcast_client.deployments import SearchResult
from perfcast_client.errors import InvalidRequest, PerfcastError

from tests.server.running import Running

MODEL = ["--model", "Qwen/Qwen3-32B-FP8", "--system", "h200_sxm"]
LOAD = ["--isl", "4000", "--osl", "500", "--prefix", "500"]
HEADLINE = [*MODEL, *LOAD, "--gpus", "32", "--ttft", "300", "--tpot", "10"]
TASK = SearchTask(
    engine=EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm"),
    workload=Workload(isl=4000, osl=500, prefix=500),
    targets=Targets(ttft_ms=300, tpot_ms=10),
    total_gpus=32,
)


def run(*arguments: str, code: int = 0) -> str:
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == code, outcome.output
    return outcome.stdout if code == 0 else outcome.output


def test_search_prints_the_best_of_both_modes_on_every_backend() -> None:
    text = run("search", *HEADLINE, "--profile", "reference")
    for words in (
        r"agg_trtllm +426\.904 .* 32 = 8 x 4  1 x tp4 b16",
        r"disagg_trtllm +572\.657 .* 5 x tp4 b1 \+ 3 x tp4 b64",
        r"agg_sglang +411\.409 ",
        r"disagg_sglang +564\.300 ",
        r"agg_vllm \* +14\.230 ",
        r"\* agg_vllm: nothing meets the targets; this is closest: tpot 17\.29 ms misses 10 ms by 72\.9 %",
        r"\* disagg_vllm: nothing meets the targets; this is closest: tpot 19\.00 ms misses 10 ms by 90\.0 %",
        r"best: disagg_trtllm, 5 x tp4 b1 \+ 3 x tp4 b64: 572\.657 tokens/s/gpu, 1\.34 x the best aggregated one",
        r"tokens/s/gpu of the cluster",
        r"[⠁-⣿]",
    ):
        assert re.search(words, text), words


def test_a_search_is_the_same_in_process_and_by_a_server(served: Running) -> None:
    asked = ["search", *HEADLINE, "--backend", "trtllm", "--json"]
    assert json.loads(run(*asked)) == json.loads(run(*asked, "--server", served.address))


def test_what_meets_no_target_exits_with_1_and_says_what_is_closest() -> None:
    text = run("search", *MODEL, *LOAD, "--gpus", "8", "--ttft", "1", "--backend", "trtllm", "--no-plot", code=1)
    assert "nothing meets the targets; closest: " in text and "ttft" in text


def test_files_hold_every_column_and_the_numbers_in_full(tmp_path: Path) -> None:
    asked = ["search", *HEADLINE, "--backend", "trtllm", "--rows", "7", "--no-plot", "--out", str(tmp_path), "--json"]
    told = json.loads(run(*asked))
    assert json.loads((tmp_path / "result.json").read_text()) == told
    best = list(csv.DictReader((tmp_path / "best.csv").open()))
    picks = [pick for e in told["experiments"] for pick in e["picks"]]
    assert [float(row["ttft_ms"]) for row in best] == [pick["ttft_ms"] for pick in picks]
    disagg = next(row for row in best if row["mode"] == "disaggregated")
    for name in ("model", "backend", "version", "system", "isl", "gpus_total", "prefill_parallel", "decode_batch"):
        assert disagg[name], name
    assert disagg["prefill_kvcache_quant_mode"] == "fp8" and disagg["batch"] == ""
    fronts = list(csv.DictReader((tmp_path / "pareto.csv").open()))
    assert len(fronts) == sum(len(e["front"]) for e in told["experiments"])
    assert len(list(csv.DictReader((tmp_path / "rows.csv").open()))) == 14
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_recommend_finds_the_fewest_gpus() -> None:
    asked = ["--backend", "sglang", "--ttft", "1000", "--tpot", "20", "--profile", "reference", "--no-plot"]
    text = run("recommend", *MODEL, *LOAD, *asked, "--concurrency", "200")
    assert re.search(r"best: disagg_sglang, .*: 12 GPUs carry 100 % of the load; .* needs 14", text)
    assert "exactly one" in run("recommend", *MODEL, *LOAD, *asked, code=1)


def test_pools_are_not_left_out_of_an_estimate_of_one_engine() -> None:
    asked = ["--mode", "agg", "--prefill", "tp=4,batch=1"]
    assert "--prefill is for --mode disagg" in run("estimate", *MODEL, "--backend", "trtllm", *LOAD, *asked, code=2)


def test_a_search_for_what_fits_nowhere_says_what_would_help() -> None:
    model = ["--model", "meta-llama/Meta-Llama-3.1-405B", "--system", "l40s", "--gpus", "1"]
    text = run("search", *model, "--backend", "trtllm", *LOAD, code=1)
    assert text.startswith("nothing can be deployed, 1 GPUs: isl ")
    assert "give more GPUs or a quantised model" in text


def test_estimates_of_every_kind() -> None:
    pools = ["--prefill", "tp=4,batch=1,workers=5", "--decode", "tp=4,batch=64,workers=3"]
    told = json.loads(run("estimate", *MODEL, "--backend", "trtllm", *LOAD, *pools, "--profile", "reference", "--json"))
    assert round(told["deployment"]["tokens_per_s_per_gpu"], 3) == 572.657
    cut = ["--prefill", "tp=4,batch=1,workers=5", "--decode", "batch=64", "--afd"]
    cut.append("attention_nodes=2,ffn_nodes=1,attention_tp=4")
    text = run("estimate", *MODEL, "--backend", "trtllm", *LOAD, *cut)
    assert re.search(r"GPUs +44 ", text) and re.search(r"GiB +prefill +attention +ffn", text)
    for mode in ("agg", "static", "static_ctx", "static_gen"):
        asked = ["--mode", mode, "--tp", "4", "--batch", "16", "--operators"]
        text = run("estimate", *MODEL, "--backend", "trtllm", *LOAD, *asked)
        assert re.search(r"TTFT +\d+\.\d{3}  ms", text) and re.search(r"kv cache +\d+\.\d\d", text)
        assert "operators" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["estimate", *MODEL, "--backend", "trtllm", "--mode", "disagg"], "prefill"),
        (["estimate", *MODEL, "--backend", "trtllm", "--prefill", "tp=4", "--decode", "tp=4"], "prefill.batch"),
        (["estimate", *MODEL, "--backend", "trtllm", "--prefill", "tp=4,batch=1"], "decode: is missing"),
        (["estimate", *MODEL, "--backend", "trtllm", "--decode", "tp=4,batch=1"], "prefill: is missing"),
        (["estimate", *MODEL, "--backend", "trtllm", "--afd", "attention_nodes=1,ffn_nodes=1"], "prefill: is missing"),
        (["estimate", *MODEL, "--backend", "trtllm", "--prefill", "tq=4", "--decode", "tp=4"], "prefill: 'tq=4'"),
        (["estimate", *MODEL, "--backend", "trtllm", "--batch", "0"], "batch_per_rank"),
        (["search", *MODEL, "--space", "tp=one"], "space"),
        (["search", *MODEL, "--space", "tq=1"], "space.tq"),
        (["search", *MODEL, "--backend", "vlm"], "UNKNOWN_BACKEND"),
        (["search", *MODEL, "--images", "big"], "images"),
        (["search", *MODEL, "--deadline", "0.000001"], "deadline"),
        (["search", *MODEL, "--gpus", "0"], "total_gpus: 0 must be above 0"),
        (["search", *MODEL, "--ttft", "0"], "targets.ttft_ms"),
        (["search", *MODEL, "--kv-gb-per-s", "0"], "kv_gb_per_s"),
        (["recommend", *MODEL, "--concurrency", "8", "--max-gpus", "0"], "max_gpus"),
        (["exp", sys.executable], "no text in UTF-8"),
    ],
)
def test_an_error_is_one_line(arguments: list[str], words: str) -> None:
    text = run(*arguments, code=1)
    assert text.startswith("Error: ") and text.count("\n") == 1 and words in text


def test_a_place_that_cannot_be_written_is_told_after_the_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = run("search", *MODEL, "--backend", "trtllm", *LOAD, "--out", str(tmp_path / "file" / "out"), code=1)
    assert "best of each" in text and text.splitlines()[-1].endswith("out: Not a directory")


@pytest.mark.parametrize("printed", [[], ["--json"]])
def test_files_are_written_though_nobody_reads_what_is_printed(tmp_path: Path, printed: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    asked = ["search", *MODEL, *LOAD, "--backend", "trtllm", "--mode", "agg", "--out", str(tmp_path), *printed]
    with open(write, "wb") as closed:
        told = subprocess.run(
            [sys.executable, "-m", "perfcast_cli", *asked],
            stdout=closed,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "result.json").stat().st_size and (tmp_path / "report.html").stat().st_size
    assert b"wrote" in told.stderr and b"Broken pipe" not in told.stderr and b"Traceback" not in told.stderr


FILE = """
defaults:
  workload: {isl: 4000, osl: 500, prefix: 500}
  targets: {ttft_ms: 300, tpot_ms: 10}
  total_gpus: 32
experiments:
  both:
    engine: {model: Qwen/Qwen3-32B-FP8, system: h200_sxm, profile: reference}
    backends: [trtllm, sglang]
  one:
    engine: {model: Qwen/Qwen3-32B-FP8, system: h200_sxm, backend: trtllm}
    modes: [aggregated]
    space: {tp: [4]}
  fewest:
    engine: {model: Qwen/Qwen3-32B-FP8, system: h200_sxm, backend: sglang, profile: reference, database_mode: hybrid}
    targets: {ttft_ms: 1000, tpot_ms: 20}
    total_gpus: null
    load: {concurrency: 200}
  nowhere:
    engine: {model: Qwen/Qwen3-32B-FP8, system: h201_sxm, backend: trtllm}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "exps.yaml"
    path.write_text(FILE)
    return path


def test_experiments_run_side_by_side_and_fail_alone(file: Path, tmp_path: Path) -> None:
    told = json.loads(run("exp", str(file), "--json", "--jobs", "2", "--out", str(tmp_path / "out")))
    assert list(told) == ["both", "one", "fewest", "nowhere"]
    assert told["both"]["best"] == "disagg_trtllm"
    assert [e["name"] for e in told["one"]["experiments"]] == ["agg_trtllm"]
    assert told["one"]["experiments"][0]["mappings_total"] == 1
    assert told["fewest"]["experiments"][1]["picks"][0]["ranking"]["gpus_used_total"] == 12
    assert told["nowhere"]["error"]["reason"] == "UNKNOWN_SYSTEM"
    for name in ("both", "one", "fewest"):
        assert (tmp_path / "out" / name / "best.csv").exists()
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(f'"title": "{name}: Qwen' in page for name in ("both", "one", "fewest"))


def test_experiments_run_on_any_executor_and_by_a_server(file: Path, served: Running) -> None:
    asked = experiments.experiments(file.read_text())
    found = []
    with Client(served.address) as client:
        for place in (Local(), client):
            with ThreadPoolExecutor(2) as executor:
                found.append(
                    dict(experiments.run(asked, partial(experiments.answer, asked=place, deadline_s=60), executor))
                )
    assert isinstance(found[0].pop("nowhere"), PerfcastError)
    assert all(isinstance(result, SearchResult) for result in found[0].values())
    assert [found[0][n].to_dict() == found[1][n].to_dict() for n in found[0]] == [True] * 3


def test_only_some_experiments_for_people(file: Path) -> None:
    text = run("exp", str(file), "--only", "one")
    assert text.startswith("== one\nQwen/Qwen3-32B-FP8 on h200_sxm, 32 GPUs")
    assert "two" in run("exp", str(file), "--only", "two", code=1)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("experiments: [", "file"),
        ("- 1", "file"),
        ("exps: {}", "file"),
        ("experiments: {}", "experiments"),
        ("experiments: {a/b: {}}", "experiments"),
        ("experiments: {a: 3}", "experiments.a"),
        ("experiments: {a: {}}", "experiments.a.engine"),
        ("experiments: {a: {engine: {model: m, system: s, backend: b}}}", "experiments.a.workload"),
        (
            "experiments: {a: {engine: {model: m, system: s, backend: b}, workload: {isl: 1.5, osl: 1}}}",
            "experiments.a.workload.isl",
        ),
        (
            "experiments: {a: {engine: {model: m, system: s, backend: b, tq: 1}, workload: {isl: 1, osl: 1}}}",
            "experiments.a.engine.tq",
        ),
        (
            "experiments: {a: {engine: {model: m, system: s, backend: b}, workload: {isl: 1, osl: 1}, space: {tp: x}}}",
            "experiments.a.space.tp[0]",
        ),
        (
            "experiments: {a: {engine: {model: m, system: s, backend: b}, workload: {isl: 1, osl: 1}, load: {max: 1}}}",
            "experiments.a.load.max",
        ),
        (
            "experiments: {a: {engine: {model: m, system: s, backend: b}, workload: {isl: 1, osl: 1}, strict_sla: 1}}",
            "experiments.a.strict_sla",
        ),
    ],
)
def test_a_malformed_file_is_refused_by_path(text: str, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        experiments.experiments(text)
    assert caught.value.details["field"] == path


def test_a_task_survives_a_dictionary() -> None:
    assert SearchTask.from_dict(TASK.to_dict()) == TASK


def test_a_plot_puts_points_where_they_belong() -> None:
    text = scatter([Series("a", [(0.0, 100.0), (10.0, 0.0)], [(10.0, 0.0)])], "x", "y", width=20, height=5).plain
    lines = text.splitlines()
    assert lines[0] == "y" and lines[1].startswith("100 ┤") and lines[5].startswith("  0 ┤")
    assert lines[5].endswith("A") and lines[1][5] != chr(0x2800)
    assert "A a" in text and scatter([], "x", "y").plain.startswith("nothing")
    assert [nice_top(v) for v in (0, 0.9, 1, 1.1, 212, 999)] == [1, 1, 1, 2, 250, 1000]


def test_the_example_of_the_help_is_a_legal_file() -> None:
    text = EXAMPLE.partition("A file:\n")[2].partition("\b")[0]
    assert set(experiments.experiments(text)) == {"h200", "fewest"}
    assert "load: {concurrency: 200}" in run("exp", "--help")


def test_every_command_has_help() -> None:
    for command in ("estimate", "search", "recommend", "exp"):
        assert "Usage" in run(command, "--help")
