"""``perfcast data``: packs of measured tables."""

from __future__ import annotations

from pathlib import Path

import click
from perfcast_engine.errors import EngineError
from perfcast_engine.tables.catalog import Catalog, PackInfo

from perfcast_cli.output import as_json, table


@click.group()
def data() -> None:
    """Build, list and verify packs of measured tables."""


def _catalog(roots: str | None) -> Catalog:
    try:
        return Catalog([Path(root) for root in (roots or "").split(",") if root])
    except EngineError as error:
        raise click.ClickException(f"{error.message} [{error.reason}]") from None


def _guarded(command: click.decorators.FC) -> click.decorators.FC:
    for option in (
        click.option("--json", "json_", is_flag=True, help="print JSON"),
        click.option("--data", "roots", help="roots with packs of your own, before the embedded ones"),
    ):
        command = option(command)
    return command


@data.command("ls")
@_guarded
def ls(roots: str | None, json_: bool) -> None:
    """List the packs, with what each holds."""
    packs = _catalog(roots).ls()
    if json_:
        as_json([_record(pack) for pack in packs])
        return
    table(
        f"{len(packs)} packs, {sum(pack.bytes for pack in packs) / 2**20:.1f} MiB",
        ("system", "backend", "version", "slot", "tables", "rows", "bytes", "problem"),
        (
            (p.system, p.backend, p.version, p.slot, p.tables, f"{p.rows:,}", f"{p.bytes:,}", _why(p.problem))
            for p in packs
        ),
        numeric=("tables", "rows", "bytes"),
        wide=True,
    )


@data.command()
@_guarded
def verify(roots: str | None, json_: bool) -> None:
    """Read every table of every pack against its checksum; exit 1 if any is damaged."""
    catalog = _catalog(roots)
    problems = catalog.verify()
    if json_:
        as_json({"packs": len(catalog.ls()), "problems": [_why(problem) for problem in problems]})
    else:
        for problem in problems:
            click.echo(_why(problem))
        click.echo(f"{len(catalog.ls())} packs read, {len(problems)} problems")
    if problems:
        raise click.exceptions.Exit(1)


@data.command()
@click.option("--from", "source", required=True, type=click.Path(exists=True, file_okay=False), help="root of a tree")
@click.option("--out", required=True, type=click.Path(file_okay=False), help="folder for the packs")
@click.option("--only", multiple=True, help="a system, system/backend or system/backend/version; may be repeated")
def build(source: str, out: str, only: tuple[str, ...]) -> None:
    """Build packs from a tree in the layout of AIConfigurator, or from an installed aiconfigurator-core package."""
    from perfcast_systems.build.make import build_packs
    from perfcast_systems.build.tree import BuildError

    try:
        paths = build_packs(Path(source), Path(out), only or None, click.echo)
    except BuildError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{len(paths)} packs in {out}")


def _why(problem: EngineError | None) -> str:
    return "" if problem is None else problem.message


def _record(pack: PackInfo) -> dict[str, object]:
    return {
        "system": pack.system,
        "backend": pack.backend,
        "version": pack.version,
        "slot": pack.slot,
        "path": str(pack.path),
        "bytes": pack.bytes,
        "tables": pack.tables,
        "rows": pack.rows,
        "problem": _why(pack.problem),
    }
