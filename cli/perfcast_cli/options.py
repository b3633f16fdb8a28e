"""Options that several commands share, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import click
from perfcast_client.config import PARALLEL, EngineConfig
from perfcast_client.errors import refused
from perfcast_client.record import read
from perfcast_client.serving import Images, KvTransfer, Limits, Workload

from perfcast_cli.output import text_of

Command = Callable[..., Any]
SECONDS = click.FloatRange(0, min_open=True)
FILES = ("config_json", "hf_quant_config_json")
HELP = {
    "model": "a model known by name (see perfcast models), or a name for --config-json",
    "config_json": "the config.json of a model of your own",
    "version": "backend version, or the slot current, previous or next",
    "database_mode": "silicon, hybrid, empirical or sol",
    "profile": "corrected, or reference for the reference engine's own numbers",
    "nextn": "draft depth of multi-token prediction",
}
SEARCHED = (*PARALLEL, "resolution", "role", "moe_comm_context", "moe_comm_generation")  # what a search decides


def options(*added: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def all_of_them(command: Command) -> Command:
        for option in reversed(added):
            command = option(command)
        return command

    return all_of_them


def engine_options(without: Collection[str] = ()) -> Callable[[Command], Command]:
    """One option for every field of EngineConfig but some."""
    hints = get_type_hints(EngineConfig)
    found = []
    for item in fields(EngineConfig):
        if item.name in without:
            continue
        name, text = "--" + item.name.replace("_", "-"), HELP.get(item.name)
        if item.name in FILES:
            kind: Any = click.Path(exists=True, dir_okay=False)
        elif hints[item.name] in (int, int | None):
            kind = int
        else:
            kind = str
        if hints[item.name] in (bool, bool | None):
            found.append(click.option(f"{name}/--no-{name[2:]}", item.name, default=None, help=text))
        else:
            required = item.default is MISSING
            found.append(click.option(name, item.name, type=kind, required=required, help=text))
    return options(*found)


def engine_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The engine options that were given, files read."""
    told = {item.name: given[item.name] for item in fields(EngineConfig) if given.get(item.name) is not None}
    return told | {name: text_of(Path(told[name])) for name in FILES if name in told}


load_options = options(
    click.option("--isl", default=4000, show_default=True, help="prompt tokens, cached prefix included"),
    click.option("--osl", default=1000, show_default=True, help="output tokens"),
    click.option("--prefix", default=0, show_default=True, help="cached tokens of each prompt"),
    click.option("--images", metavar="HEIGHTxWIDTH[xCOUNT]", help="images of each request"),
    click.option("--nextn-accepted", default=0.0, help="draft tokens accepted per decode step"),
    click.option("--memory-fraction", type=float, help="share of memory for the KV cache  [default: the backend's]"),
    click.option("--max-seq-len", type=int, help="tokens that a sequence may have  [default: isl + osl]"),
    click.option("--max-num-tokens", type=int, help="tokens of one iteration that memory is sized for"),
    click.option("--kv-gb-per-s", type=float, help="bandwidth of the KV cache's way from prefill to decode"),
    click.option("--kv-latency-ms", type=float, default=0.0, help="its latency"),
    click.option("--kv-concurrent", type=int, default=1, help="transfers that share it"),
)

file_options = options(
    click.option("--policy", default="as_predicted", show_default=True, help="or headroom: margins of production"),
    click.option("--set", "settings", multiple=True, metavar="K=V", help="served_name, port, cluster.namespace, ..."),
)


def workload(given: Mapping[str, Any]) -> Workload:
    images = None
    if given["images"]:
        try:
            height, width, *count = map(int, given["images"].lower().split("x"))
            images = Images(height=height, width=width, count=count[0] if count else 1)
        except (ValueError, IndexError):
            raise refused("images", given["images"], "is not of the form 720x1280 or 720x1280x2") from None
    return Workload(isl=given["isl"], osl=given["osl"], prefix=given["prefix"], images=images)


def limits(given: Mapping[str, Any]) -> Limits:
    return Limits(**{name: given[name] for name in ("memory_fraction", "max_seq_len", "max_num_tokens")})


def kv_transfer(given: Mapping[str, Any]) -> KvTransfer | None:
    if given["kv_gb_per_s"] is None:
        return None
    if not given["kv_gb_per_s"] > 0:
        raise refused("kv_gb_per_s", given["kv_gb_per_s"], "must be above 0; leave it out for no transfer")
    return KvTransfer(
        bandwidth_bytes_per_s=given["kv_gb_per_s"] * 1e9,
        latency_s=given["kv_latency_ms"] / 1e3,
        concurrent=given["kv_concurrent"],
    )


def pairs(text: str | None, kind: Any, path: str) -> dict[str, Any]:
    """``tp=4,batch=64`` by the types of ``kind``'s fields."""
    hints, found = get_type_hints(kind), {}
    for part in filter(None, (text or "").split(",")):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if not equals or name not in hints:
            raise refused(path, part, f"is not one of {', '.join(hints)} with its value")
        found[name] = read(hints[name], typed(value), f"{path}.{name}")
    return found


def sizes(given: tuple[str, ...], path: str) -> dict[str, list[int]]:
    """``tp=1,2,4`` of repeated options."""
    found = {}
    for text in given:
        name, _, values = text.partition("=")
        try:
            found[name.replace("-", "_")] = [int(value) for value in values.split(",")]
        except ValueError:
            raise refused(path, text, "is not of the form tp=1,2,4") from None
    return found


def typed(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
