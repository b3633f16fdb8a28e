"""``perfcast export``: files that other tools read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import click
from perfcast_client import exports
from perfcast_client.config import EngineConfig
from perfcast_client.errors import PerfcastError, refused

from perfcast_cli.local import connected
from perfcast_cli.options import engine_fields, engine_options
from perfcast_cli.output import as_json, sourced

KINDS: dict[str, Callable[..., Any]] = {
    "profiler": exports.export_profile,
    "mocker": exports.export_mocker,
    "wva": exports.export_wva,
    "llm-d-sim": exports.export_llmd_sim,
    "blis": exports.export_blis,
    "vidur": exports.export_vidur,
    "splitwise": exports.export_splitwise,
}
FREE = {"profiler": ("isl", "osl", "max_context_tokens", "prefill_granularity", "decode_granularity"),
        "wva": ("min_batch_per_rank", "max_batch_per_rank", "isl_tokens", "osl_tokens", "min_input_tokens",
                "max_input_tokens", "max_prompts_per_rank", "max_num_batched_tokens_per_rank")}  # fmt: skip


@click.command()
@click.argument("kind", type=click.Choice(tuple(KINDS)))
@click.option("--out", required=True, type=click.Path(), help="file to write; for profiler a folder")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="a setting of the kind, e.g. resolution=50"
)
@engine_options()
@sourced
def export(
    kind: str, out: str, settings: tuple[str, ...], server: str | None, data: str | None, json_: bool, **engine: Any
) -> None:
    """Write a planner's or mocker's profile, an autoscaler's coefficients, or a simulator's step table.

    Values are direct predictions; the worst error of what a reader interpolates between them is stated.
    """
    config = EngineConfig(**engine_fields(engine))
    try:
        told = KINDS[kind](connected(server, data), config, out, **_settings(kind, settings))
    except PerfcastError:
        raise
    except ValueError as error:  # a setting that the kind cannot have, or a table that must not be written
        raise click.ClickException(str(error)) from None
    if json_:
        return as_json(told.to_dict())
    for file in told.files:
        click.echo(file)
    for name, span in told.ranges.items():
        click.echo(f"{name}: {span}")
    for name, off in told.worst_relative_error.items():
        click.echo(f"worst error of {name}: {off:.1%}")
    return None


def _settings(kind: str, given: tuple[str, ...]) -> dict[str, Any]:
    """Settings by the types of their defaults."""
    signature = inspect.signature(KINDS[kind]).parameters.values()
    types = {item.name: type(item.default) for item in signature if isinstance(item.default, int | float)}
    types |= dict.fromkeys(FREE.get(kind, ()), int)
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        name = name.replace("-", "_")
        try:
            found[name] = types[name](value)
        except KeyError:
            raise refused("set", text, f"names no setting of {kind}; known are {', '.join(types)}") from None
        except ValueError:
            raise refused("set", text, "has no number") from None
    return found
