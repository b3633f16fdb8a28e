"""``perfcast models`` and ``perfcast systems``."""

from __future__ import annotations

import click

from perfcast_cli.local import connected
from perfcast_cli.output import as_json, sourced, table


@click.command()
@click.argument("contains", default="")
@click.option("--family", default="", help="only this family, e.g. LLAMA")
@sourced
def models(contains: str, family: str, server: str | None, data: str | None, json_: bool) -> None:
    """List the models known by name, those that contain CONTAINS."""
    found = connected(server, data).models(contains, family)
    if json_:
        return as_json([model.to_dict() for model in found])
    return table(
        f"{len(found)} models",
        ("model", "family", "layers", "hidden", "experts", "context", "quantisation"),
        (
            (m.model, m.family, m.layers, m.hidden_size, m.experts or None, m.context_tokens, _words(m.quant))
            for m in found
        ),
        numeric=("layers", "hidden", "experts", "context"),
        wide=True,
    )


@click.command()
@sourced
def systems(server: str | None, data: str | None, json_: bool) -> None:
    """List GPU systems and the backend versions measured on them."""
    found = connected(server, data).systems()
    if json_:
        return as_json([system.to_dict() for system in found])
    rows = []
    for s in found:
        versions = ", ".join(f"{v.backend} {v.version} ({v.slot})" for v in s.versions)
        memory = None if s.memory_bytes is None else f"{s.memory_bytes / 2**30:.0f}"
        rows.append((s.name, memory, f"{s.memory_bandwidth_bytes_per_s / 1e12:.2f}", s.gpus_per_node, versions))
    columns = ("system", "GiB", "TB/s", "GPUs/node", "measured versions")
    return table(f"{len(found)} systems", columns, rows, numeric=("GiB", "TB/s", "GPUs/node"))


def _words(values: object) -> str:
    return " ".join(f"{key}={value}" for key, value in dict(values).items())  # type: ignore[call-overload]
