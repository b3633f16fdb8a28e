"""Deployment files of one case for every target and engine that can run it; the folders beside this file hold them.

python examples/deployments/generate.py        # from the root of a checkout, after a change; the test compares
"""

from __future__ import annotations

import shutil
from pathlib import Path

from perfcast_deploy.bundle import Bundle, write
from perfcast_deploy.choice import Choice
from perfcast_deploy.deployment import Cluster
from perfcast_deploy.describe import TARGETS
from perfcast_engine.config import EngineConfig
from perfcast_engine.errors import UnsupportedCombination
from perfcast_engine.predictor import Predictor
from perfcast_planning.search.search import search
from perfcast_planning.search.task import DISAGGREGATED, SearchTask
from perfcast_planning.search.workshop import TableWorkshop
from perfcast_planning.serving.workload import Targets, Workload

HERE = Path(__file__).parent
TPOT_MS = {"trtllm": 10.0, "vllm": 20.0, "sglang": 10.0}  # no vLLM deployment reaches 10 ms in the tables shipped


def chosen(predictor: Predictor, backend: str) -> Choice:
    """The best disaggregated deployment that a search finds, in the default profile."""
    task = SearchTask(
        engine=EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend=backend),
        load=Workload(isl=4000, osl=500, prefix=500),
        targets=Targets(ttft_ms=300.0, tpot_ms=TPOT_MS[backend]),
        total_gpus=32,
        modes=(DISAGGREGATED,),
    )
    (found,) = search(task, TableWorkshop(predictor)).experiments
    assert found.eligible
    return Choice.of_row(found, task, found.pick.rows.row(0))


def examples() -> tuple[dict[str, Bundle], dict[str, str]]:
    """(bundle by folder, reason by refused folder)."""
    made: dict[str, Bundle] = {}
    refused: dict[str, str] = {}
    predictor = Predictor()
    for backend in TPOT_MS:
        choice, cluster = chosen(predictor, backend), Cluster(name="qwen3-32b", namespace="serving")
        for target in TARGETS:
            try:
                made[f"{backend}/{target}"] = choice.bundle(target, cluster=cluster)
            except UnsupportedCombination as error:
                refused[f"{backend}/{target}"] = error.message
    return made, refused


def table(made: dict[str, Bundle]) -> str:
    """The table of the README: what each engine runs, and what was predicted for it."""
    lines = [
        "| engine | prefill | decode | predicted TTFT, TPOT, output | targets |",
        "|---|---|---|---|---|",
    ]
    for backend in TPOT_MS:
        d = made[f"{backend}/engine"].deployment  # the other targets may run another version
        roles = (f"{r.workers} × TP{r.tp}, batch {r.max_batch}" for r in d.roles)
        told = d.predicted
        figures = f"{told.ttft_ms:.0f} ms, {told.tpot_ms:.1f} ms, {told.output_tokens_per_s:,.0f} tokens/s"
        targets = ", ".join(f"`{folder.partition('/')[2]}`" for folder in made if folder.startswith(backend))
        lines.append(f"| {backend} {d.version} | {' | '.join(roles)} | {figures} | {targets} |")
    return "\n".join(lines)


def main() -> None:
    made, refused = examples()
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition("| engine |")
    readme.write_text(before + table(made) + "\n\n" + rest.partition("\n\n")[2])
    for folder, bundle in made.items():
        shutil.rmtree(HERE / folder, ignore_errors=True)
        write(bundle.files, HERE / folder)
    for folder, reason in refused.items():
        print(f"{folder}: {reason}")


if __name__ == "__main__":
    main()
