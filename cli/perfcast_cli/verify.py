"""``perfcast verify``: a benchmark's result beside what was predicted for the files that it ran on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from perfcast_client import calibration
from perfcast_client.config import EngineConfig
from perfcast_client.planner_types import RankPass
from perfcast_deploy.verify import Report
from perfcast_deploy.verify import verify as compared

from perfcast_cli.local import connected
from perfcast_cli.output import as_json, sourced, table

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("directory", type=FILE)
@click.argument("result", type=FILE)
@click.option("--calibration", "kept", type=FILE, help="write there what Calibration can learn from it")
@click.option("--state", help="let the Calibration of --server learn it, under this name")
@sourced
def verify(
    directory: Path,
    result: Path,
    kept: Path | None,
    state: str | None,
    server: str | None,
    data: str | None,
    json_: bool,
) -> None:
    """Put a benchmark's RESULT beside what was predicted for the files in DIRECTORY.

    RESULT: of vllm bench serve, sglang.bench_serving, aiperf, genai-perf or InferenceX.
    """
    if state and not server:
        raise click.UsageError("--state needs --server, one that runs with --state-dir")
    report = compared(directory, result)
    learned = None
    if kept:
        kept.write_text(json.dumps(report.observation(), indent=1) + "\n")
    if state:
        learned = _learn(report, state, result, server)
    if json_:
        rows = [asdict(row) for row in report.compared]
        return as_json({"client": report.client, "compared": rows, "remarks": report.remarks, "learned": learned})
    _print(report)
    if learned is not None:
        version, iterations = learned["state_version"], learned["kept_iterations"]
        click.echo(f"  state {state} learned {iterations} iteration(s) and is at version {version}")
    return None


def _learn(report: Report, state: str, result: Path, server: str | None) -> dict[str, Any]:
    """Tune ``state`` with the report's iteration; the same result is never learned twice."""
    told = report.observation()
    ranks = [RankPass(**rank) for rank in told["ranks"]]
    client_id = f"verify-{hashlib.sha256(result.read_bytes()).hexdigest()[:32]}"
    call = calibration.tune(EngineConfig.from_dict(told["engine"]), state, [ranks], client_id=client_id, sequence=1)
    return connected(server, None).ask(call).to_dict()


def _print(report: Report) -> None:
    rows = [
        (
            row.metric,
            "-" if row.predicted is None else f"{row.predicted:.3f}",
            f"{row.measured:.3f}",
            "-" if row.error is None else f"{row.error:+.1%}",
        )
        for row in report.compared
    ]
    columns = ("metric", "predicted", "measured", "error")
    table(f"{report.deployment.model} by {report.client}", columns, rows, numeric=columns[1:])
    for remark in report.remarks:
        click.echo(f"  {remark}")
