"""``perfcast estimate``."""

from __future__ import annotations

from typing import Any

import click
from perfcast_client.config import EngineConfig
from perfcast_client.errors import refused
from perfcast_client.record import read
from perfcast_client.serving import Afd, Aggregated, Deployment, Disaggregated, Pool, Static

from perfcast_cli import options, shown
from perfcast_cli.local import connected
from perfcast_cli.output import as_json, sourced

MODES = ("agg", "disagg", "static", "static_ctx", "static_gen")
PHASES = {"static": "both", "static_ctx": "prefill", "static_gen": "decode"}
OF_POOL = ("batch", "workers", "latency_correction")


@click.command()
@click.option("--mode", type=click.Choice(MODES), help="[default: disagg with --prefill, --decode or --afd, else agg]")
@options.engine_options()
@click.option("--batch", default=128, show_default=True, help="requests per attention-DP rank")
@click.option("--ctx-tokens", type=int, help="prefill tokens of an iteration  [default: isl]")
@click.option("--stride", default=32, show_default=True, help="decode iterations per evaluated sample, static only")
@click.option("--prefill", metavar="K=V,...", help="prefill workers: tp=4,batch=1,workers=2 and other engine options")
@click.option("--decode", metavar="K=V,...", help="the same of decode workers")
@click.option(
    "--afd", metavar="K=V,...", help="cut decode in two: attention_nodes=1,ffn_nodes=1,attention_tp=4,ffn_ep=8"
)
@options.load_options
@click.option("--operators", is_flag=True, help="show the latency of each operator of each step")
@click.option("--allow-out-of-memory", is_flag=True, help="answer also where the memory does not suffice")
@sourced
def estimate(mode: str | None, server: str | None, data: str | None, json_: bool, **given: Any) -> None:
    """Estimate what one deployment delivers: TTFT, TPOT, throughput, memory."""
    pools = [f"--{name}" for name in ("prefill", "decode", "afd") if given[name]]
    mode = mode or ("disagg" if pools else "agg")
    if pools and mode != "disagg":
        raise click.UsageError(f"{pools[0]} is for --mode disagg")
    found = connected(server, data).estimate(
        deployment(mode, given),
        options.workload(given),
        limits=options.limits(given),
        nextn_accepted=given["nextn_accepted"],
        operators=given["operators"],
        allow_out_of_memory=given["allow_out_of_memory"],
    )
    if json_:
        as_json(found.to_dict())
    else:
        shown.estimate(found)


def deployment(mode: str, given: dict[str, Any]) -> Deployment:
    engine = options.engine_fields(given)
    if mode == "disagg":
        return Disaggregated(
            prefill=_pool("prefill", engine, given["prefill"]),
            decode=_pool("decode", engine, given["decode"]),
            kv_transfer=options.kv_transfer(given),
            afd=read(Afd, options.pairs(given["afd"], Afd, "afd"), "afd") if given.get("afd") else None,
        )
    config = EngineConfig(**engine)
    if mode == "agg":
        return Aggregated(engine=config, batch=given["batch"], ctx_tokens=given["ctx_tokens"])
    return Static(engine=config, batch=given["batch"], phases=PHASES[mode], stride=given["stride"])


def _pool(role: str, engine: dict[str, Any], text: str | None) -> Pool:
    if not text:
        raise refused(role, text, f"is missing; say --{role} tp=4,batch=1,workers=2")
    own = options.pairs(text, PoolOptions, role)
    pool = {name: own.pop(name) for name in OF_POOL if name in own}
    if "batch" not in pool:
        raise refused(f"{role}.batch", None, "is missing")
    return Pool(engine=read(EngineConfig, engine | own, role), **pool)


class PoolOptions(EngineConfig):
    """What ``--prefill`` and ``--decode`` may say."""

    batch: int
    workers: int
    latency_correction: float
