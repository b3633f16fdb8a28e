"""Tables for people, JSON for machines, errors in one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click
from perfcast_client.errors import PerfcastError
from perfcast_engine.errors import EngineError

from perfcast_cli.access import secured

Command = Callable[..., Any]


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    numeric: Sequence[str] = (),
    wide: bool = False,
) -> None:
    """Rows under columns. ``wide``: as wide as they are, whatever the terminal; so they are where there is none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        out.add_column(column, justify="right" if column in numeric else "left", no_wrap=column in numeric)
    for row in rows:
        out.add_row(*(Text("" if value is None else str(value)) for value in row))
    console = Console()
    natural = 0
    if wide or not console.is_terminal:
        natural = out.__rich_measure__(console, console.options.update(max_width=10_000)).maximum
    Console(width=max(console.width, natural)).print(out, crop=False)


def text_of(path: Path) -> str:
    """What a file holds that must be text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise click.ClickException(f"{path} is no text in UTF-8") from None


def as_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def to_reader(show: Callable[[], None]) -> None:
    """Print by ``show``. Where who reads it closed the pipe, that ends the printing and nothing else."""
    try:
        show()
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # an exit is what rich makes of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def sourced(command: Command) -> Command:
    """The options that say who answers and how it is printed, and errors without a trace."""

    @wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (PerfcastError, EngineError) as error:
            reason = error.reason or getattr(error, "code", "")
            raise click.ClickException(f"{error.message} [{reason}]" if reason else error.message) from None

    for option in (
        click.option("--json", "json_", is_flag=True, help="print JSON"),
        click.option("--data", help="roots with packs of your own, before the embedded ones; in this process only"),
        click.option("--server", metavar="ADDRESS", help="ask this server (host:port or unix:path), not this process"),
    ):
        guarded = option(guarded)
    return secured(guarded)
