"""The ``perfcast`` command; each subcommand is imported when it is called, so that ``serve`` starts at once."""

from __future__ import annotations

import errno
import importlib
import sys
from typing import Any

try:
    import click
except ModuleNotFoundError:
    sys.exit("the perfcast command needs more than the client: pip install 'perfcast[server]'")

COMMANDS = {
    "serve": ("perfcast_cli.serve", "Serve predictions over gRPC."),
    "predict": ("perfcast_cli.predict", "Predict the latency of a prefill, decode or mixed step."),
    "estimate": ("perfcast_cli.estimate", "Estimate what one deployment delivers."),
    "search": ("perfcast_cli.search", "Find the best deployments under latency targets."),
    "recommend": ("perfcast_cli.search", "Find the fewest GPUs that carry a load."),
    "capacity": ("perfcast_cli.capacity", "Find the request rate that one engine sustains."),
    "export": ("perfcast_cli.export", "Write profiles and step tables that other tools read."),
    "exp": ("perfcast_cli.experiments", "Run the searches of an experiments file."),
    "support": ("perfcast_cli.support", "Say what measured data cover: an engine, or all models."),
    "models": ("perfcast_cli.listing", "List the models known by name."),
    "systems": ("perfcast_cli.listing", "List GPU systems and the backends measured on them."),
    "health": ("perfcast_cli.health", "Ask a server whether it is serving."),
    "reload": ("perfcast_cli.reload", "Let a server take up new data."),
    "data": ("perfcast_cli.data", "Build, list and verify packs of measured tables."),
    "generate": ("perfcast_cli.generate", "Write the files that deploy a chosen configuration."),
    "explain": ("perfcast_cli.explain", "Say what a command line or a manifest deploys."),
    "verify": ("perfcast_cli.verify", "Put a benchmark's result beside the prediction."),
    "targets": ("perfcast_cli.generate", "List deployment targets and engine flags."),
}


class Lazy(click.Group):
    """Knows its commands by name and the module that each one lives in."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except OSError as error:  # a file that was given, or the place that is written to
            if error.errno == errno.EPIPE:
                raise
            place = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(f"{place}{error.strerror or error}") from None

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(COMMANDS[name][0]), name)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="perfcast")
def main() -> None:
    """How long a forward pass of an LLM takes, and which deployment is best, without a GPU."""
