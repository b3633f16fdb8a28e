"""``perfcast reload``."""

from __future__ import annotations

import click
from perfcast_client.client import Client
from perfcast_client.errors import PerfcastError, Unsupported

from perfcast_cli.access import access, secured
from perfcast_cli.output import as_json


@click.command()
@click.option("--server", default="127.0.0.1:50051", envvar="PERFCAST_SERVER", show_default=True, metavar="ADDRESS")
@secured
def reload(server: str) -> None:
    """Let a server (--admin) read its data anew, without dropping a call; damaged data are refused."""
    with Client(server, **access()) as client:
        try:
            as_json(client.reload_data().to_dict())
        except Unsupported:
            raise click.ClickException(f"the server at {server} was not started with --admin") from None
        except PerfcastError as error:
            raise click.ClickException(f"{error.message} [{error.reason or error.code}]") from None
