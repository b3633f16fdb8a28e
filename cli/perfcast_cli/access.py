"""How a command gets in at a server: TLS files and a token, as options that every such command has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import click
from perfcast_client.channel import Metadata, Tls, bearer_file

Command = Callable[..., Any]
TEXTS = {
    "tls_ca": "PEM roots that the server's certificate must come from; without it no TLS, 'system' for the system's",
    "tls_cert": "PEM certificate of this client, where the server asks for one",
    "tls_key": "PEM key of that certificate",
    "tls_server_name": "name that the server's certificate must have, where it is not the address",
    "token_file": "file that holds the bearer token",
}
METAVARS = {"tls_server_name": "NAME"}


class Access(TypedDict):
    tls: Tls | None
    metadata: Metadata | None


def secured(command: Command) -> Command:
    """The options; ``access`` has what was given."""
    for name, text in reversed(TEXTS.items()):
        command = click.option(
            "--" + name.replace("_", "-"),
            name,
            expose_value=False,
            callback=_keep,
            metavar=METAVARS.get(name, "FILE"),
            help=text,
        )(command)
    return command


def access() -> Access:
    """For the command that runs now."""
    given = {name: click.get_current_context().meta.get(f"perfcast.{name}") for name in TEXTS}
    ca, cert, key = given["tls_ca"], given["tls_cert"], given["tls_key"]
    if bool(cert) != bool(key) or (cert and not ca):
        raise click.UsageError("--tls-cert and --tls-key go together, and with --tls-ca")
    tls = Tls(None if ca == "system" else ca, cert, key, given["tls_server_name"]) if ca else None
    token_file = given["token_file"]
    return {"tls": tls, "metadata": bearer_file(token_file) if token_file else None}


def _keep(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    context.meta[f"perfcast.{option.name}"] = value
    return value
