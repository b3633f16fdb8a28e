"""``perfcast predict``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click
from perfcast_client.config import EngineConfig
from perfcast_client.results import Engine, Prediction
from perfcast_client.steps import DecodeStep, DecodeTrajectory, Mixed, Prefill, Step

from perfcast_cli.local import connected
from perfcast_cli.options import engine_fields, engine_options
from perfcast_cli.output import as_json, sourced, table

KINDS = ("prefill", "decode", "trajectory", "mixed")


@click.command()
@click.argument("kind", type=click.Choice((*KINDS, "all")), default="all")
@engine_options()
@click.option("--batch", default=8, show_default=True, help="requests per attention-DP rank")
@click.option("--isl", default=4096, show_default=True, help="prompt tokens, cached prefix included")
@click.option("--osl", default=512, show_default=True, help="output tokens")
@click.option("--prefix", default=0, show_default=True, help="cached tokens of each prompt")
@click.option("--ctx-tokens", type=int, help="prefill tokens of a mixed step  [default: isl]")
@click.option("--gen-requests", type=int, help="decoding requests of a mixed step  [default: batch]")
@click.option("--operators", is_flag=True, help="show the latency of each operator")
@sourced
def predict(
    kind: str,
    batch: int,
    isl: int,
    osl: int,
    prefix: int,
    ctx_tokens: int | None,
    gen_requests: int | None,
    operators: bool,
    server: str | None,
    data: str | None,
    json_: bool,
    **engine: Any,
) -> None:
    """Predict the latency of a prefill, a decode iteration, a whole decode trajectory, a mixed step, or of all four."""
    steps: dict[str, Step] = {
        "prefill": Prefill(batch, isl, prefix),
        "decode": DecodeStep(batch, isl, osl),
        "trajectory": DecodeTrajectory(batch, isl, osl),
        "mixed": Mixed(
            isl if ctx_tokens is None else ctx_tokens, batch if gen_requests is None else gen_requests, isl, osl, prefix
        ),
    }
    asked = connected(server, data)
    resolved = asked.resolve(EngineConfig(**engine_fields(engine)))
    names = KINDS if kind == "all" else (kind,)
    told = {name: asked.predict(resolved, steps[name], operators=operators) for name in names}
    if json_:
        return as_json({"engine": resolved.to_dict(), "steps": {name: told[name].to_dict() for name in names}})
    _print(resolved, {name: (steps[name], told[name]) for name in names})
    return None


def _print(engine: Engine, told: dict[str, tuple[Step, Prediction]]) -> None:
    stamp, config = engine.stamp, engine.config
    place = f"{stamp.system}, {stamp.backend} {stamp.version}, {engine.gpus_total} GPUs, {stamp.database_mode}"
    table(
        f"{config.model} on {place}",
        ("step", "load per rank", "latency ms", "measured", "tier"),
        (
            (name, _load(step), f"{p.latency_ms:.3f}", f"{p.provenance.silicon_share:.0%}", p.provenance.tier)
            for name, (step, p) in told.items()
        ),
        numeric=("latency ms", "measured"),
    )
    for name, (_, p) in told.items():
        if p.operators:
            rows = [
                (o.name, f"{o.latency_ms:.4f}", f"{o.latency_ms / (p.latency_ms or 1):.1%}", o.source)
                for o in p.operators
            ]
            click.echo()
            table(f"{name}: operators", ("operator", "ms", "share", "source"), rows, numeric=("ms", "share"))
    for note in engine.notes:
        click.echo(f"note: {note}")


def _load(step: Step) -> str:
    return ", ".join(f"{item.name} {getattr(step, item.name)}" for item in fields(step) if item.name in LOADS)


LOADS = ("batch", "ctx_tokens", "gen_requests", "isl", "osl", "prefix")
