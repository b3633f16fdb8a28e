"""``perfcast health``: for container probes."""

from __future__ import annotations

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from perfcast_cli.access import access, secured


@click.command()
@click.option("--server", default="127.0.0.1:50051", envvar="PERFCAST_SERVER", show_default=True, metavar="ADDRESS")
@click.option("--service", default="perfcast.v1.Prediction", show_default=True, help="empty for the live process")
@click.option("--timeout", default=2.0, show_default=True, help="seconds")
@secured
def health(server: str, service: str, timeout: float) -> None:
    """Exit 0 if the server says SERVING, else 1."""
    tls = access()["tls"]
    options = tls.options() if tls else []
    with grpc.secure_channel(server, tls.credentials(), options) if tls else grpc.insecure_channel(server) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout).status
        except grpc.RpcError as error:
            raise click.ClickException(f"{server}: {error.code().name}") from None
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
    click.echo(name)
    if name != "SERVING":
        raise click.exceptions.Exit(1)
