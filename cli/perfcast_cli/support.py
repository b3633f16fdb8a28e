"""``perfcast support``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from perfcast_client.client import Questions
from perfcast_client.config import PARALLEL, EngineConfig
from perfcast_client.coverage import Coverage, ModelSupport

from perfcast_cli.local import connected
from perfcast_cli.options import engine_fields, engine_options
from perfcast_cli.output import as_json, sourced, table

NAMED = ("model", "system", "backend")


@click.command()
@click.option("--model", help="a model known by name, or a name for --config-json; with --matrix several: a,b")
@click.option("--system", help="with --matrix several, or none for all")
@click.option("--backend", help="with --matrix several, or none for all")
@engine_options(without=NAMED)
@click.option("--matrix", is_flag=True, help="all models on all systems, or those that are named")
@click.option("--why", is_flag=True, help="with --matrix: why what is not PASS is not")
@sourced
def support(matrix: bool, why: bool, server: str | None, data: str | None, json_: bool, **engine: Any) -> None:
    """Say which operators of an engine are measured, estimated or missing.

    Without parallel sizes the smallest mapping that holds the model is taken. With --matrix: PASS where mode silicon
    answers prefill and decode under such a mapping, HYBRID where mode hybrid does, FAIL where neither does.
    """
    asked = connected(server, data)
    if matrix:
        for name, value in engine.items():
            if value is not None and name not in (*NAMED, "version"):
                raise click.UsageError(f"--{name.replace('_', '-')} does not go with --matrix.")
        models, systems, backends = (_names(engine[name]) for name in NAMED)
        cells = _cells(asked, models, systems, backends, engine["version"] or "")
        if json_:
            return as_json([cell.to_dict() for cell in cells])
        return _print_matrix(cells, why)
    for name in NAMED:
        if engine[name] is None:
            raise click.UsageError(f"Missing option '--{name}', or --matrix for all.")
    config = EngineConfig(**engine_fields(engine))
    covered = asked.coverage(config, choose_parallel=all(engine[name] is None for name in PARALLEL))
    if json_:
        return as_json(covered.to_dict())
    return _print_engine(engine["model"], covered)


def _names(option: str | None) -> list[str]:
    return [name for name in (option or "").split(",") if name]


def _cells(
    asked: Questions, models: Sequence[str], systems: Sequence[str], backends: Sequence[str], version: str
) -> list[ModelSupport]:
    """Of the named systems, or of all that have measured versions."""
    found: list[ModelSupport] = []
    for system in systems or [system.name for system in asked.systems() if system.versions]:
        measured = {item.backend for item in asked.versions(system)}
        for backend in [name for name in backends if systems or name in measured] if backends else sorted(measured):
            found += asked.support(system, backend, version, models)
    return found


def _print_matrix(cells: Sequence[ModelSupport], why: bool) -> None:
    places = list(dict.fromkeys((cell.system, cell.backend) for cell in cells))
    models = list(dict.fromkeys(cell.model for cell in cells))
    verdicts = {(cell.model, cell.system, cell.backend): cell.verdict for cell in cells}
    total = {word: sum(cell.verdict == word for cell in cells) for word in ("PASS", "HYBRID", "FAIL")}
    width = max((len(model) for model in models), default=0)
    click.echo(", ".join(f"{count} {word}" for word, count in total.items()))
    for i, (system, backend) in enumerate(places):
        click.echo(" " * width + " |" * i + f" .- {system} {backend}")
    for model in models:
        letters = " ".join(verdicts.get((model, *place), "-")[0] for place in places)
        click.echo(f"{model:{width}} {letters}")
    if why:
        rows = [
            (c.model, c.system, c.backend, _widths(c.parallel), c.verdict, ", ".join(c.unmeasured), c.error.message)
            for c in cells
            if c.error is not None
        ]
        click.echo()
        table("", ("model", "system", "backend", "mapping", "verdict", "not measured", "why"), rows)


def _print_engine(model: str, covered: Coverage) -> None:
    stamp = covered.engine
    works = f"works in mode {covered.works_in}" if covered.works_in else "no mode answers all"
    place = f"{stamp.system}, {stamp.backend} {stamp.version}, {_widths(covered.parallel)}"
    table(
        f"{model} on {place}: {works}",
        ("phase", "operator", "answer", "from", "key"),
        (
            (o.phase, o.name, f"{o.standing} ({o.tier})" if o.standing == "estimated" else o.standing, o.table, o.key)
            for o in covered.operators
        ),
    )
    for operator in covered.operators:
        if operator.error is not None:
            click.echo(f"{operator.phase} {operator.name}: {operator.error.message}")


def _widths(parallel: Any) -> str:
    return " ".join(f"{name}{width}" for name, width in parallel.items() if width > 1 or name == "tp")
