"""``perfcast serve``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from perfcast_server.settings import NotReady, Settings, SettingsError, load

PROCESS_BEGAN = time.perf_counter()
EXAMPLE = "predict --server {address} --model Qwen/Qwen3-32B-FP8 --system h200_sxm --backend trtllm --tp 4"


def _flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """One flag for every setting."""
    for item in reversed(fields(Settings)):
        name = "--" + item.name.replace("_", "-")
        default = item.default
        text = f"{item.metadata['help']} [{','.join(default) if isinstance(default, tuple) else default}]"
        if isinstance(default, bool):
            option = click.option(f"{name}/--no-{name[2:]}", item.name, default=None, help=text)
        elif isinstance(default, tuple):
            option = click.option(name, item.name, default=None, metavar="PATH[,PATH]", help=text)
        else:
            option = click.option(name, item.name, default=None, type=type(default), help=text)
        command = option(command)
    return command


@click.command()
@click.option("--config", "file", type=click.Path(dir_okay=False), help="TOML or YAML file of these settings")
@_flags
def serve(file: str | None, **flags: Any) -> None:
    """Serve predictions over gRPC until SIGTERM or Ctrl-C.

    Every setting may also stand in the environment as PERFCAST_<NAME>, or in the --config file. A flag wins over the
    environment, and that over the file.
    """
    if flags["data"] is not None:
        flags["data"] = tuple(part for part in flags["data"].split(",") if part)
    try:
        from perfcast_server import eventloop

        settings = load(flags, file=file)
        # A supervisor serves nothing itself and needs none of what its workers import.
        if settings.workers > 1:
            from perfcast_server.supervisor import run
        else:
            from perfcast_server.app import run  # type: ignore[assignment]
        eventloop.run(run(settings, _say_ready))
    except (SettingsError, NotReady) as error:
        raise click.ClickException(str(error)) from None


def _say_ready(server: Any) -> None:
    seconds = time.perf_counter() - PROCESS_BEGAN
    click.echo(f"perfcast is ready on {server.address} after {seconds:.2f} s. Try in another terminal:")
    program = sys.argv[0] if Path(sys.argv[0]).name == "perfcast" else "perfcast"
    access = " --tls-ca FILE_OF_ITS_CA" if server.settings.tls_cert else ""
    access += " --token-file FILE_OF_YOUR_TOKEN" if server.settings.token_file else ""
    click.echo(f"  {program} {EXAMPLE.format(address=server.address)}{access}")
    sys.stdout.flush()
