"""``perfcast capacity``."""

from __future__ import annotations

from typing import Any

import click
from perfcast_client import planner
from perfcast_client.config import EngineConfig
from perfcast_client.planner_types import Limits

from perfcast_cli.local import connected
from perfcast_cli.options import engine_fields, engine_options
from perfcast_cli.output import as_json, sourced, table

ROLES = ("prefill", "decode", "aggregated")


@click.command()
@engine_options(without=("role",))
@click.option("--role", type=click.Choice((*ROLES, "all")), default="all", show_default=True, help="what it serves")
@click.option("--isl", default=3000, show_default=True, help="prompt tokens, cached prefix included")
@click.option("--osl", default=150, show_default=True, help="output tokens")
@click.option("--ttft-ms", type=float, help="target, where the role has a TTFT")
@click.option("--itl-ms", type=float, help="target, where the role has an ITL")
@click.option("--kv-hit-rate", default=0.0, help="share of prompt tokens found in the KV cache")
@click.option("--accept-length", default=1.0, help="tokens per decode iteration")
@click.option("--max-num-batched-tokens", default=8192, show_default=True, help="tokens of one iteration, per rank")
@click.option("--max-num-seqs", default=512, show_default=True, help="requests of the whole engine")
@click.option("--max-kv-tokens", default=2_000_000, show_default=True, help="KV cache of the whole engine")
@click.option("--objective", type=click.Choice(tuple(planner.OBJECTIVES)), default="throughput", show_default=True)
@click.option("--state", default="", help="calibration state of the server to correct by")
@sourced
def capacity(
    role: str,
    isl: int,
    osl: int,
    ttft_ms: float | None,
    itl_ms: float | None,
    kv_hit_rate: float,
    accept_length: float,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_kv_tokens: int,
    objective: str,
    state: str,
    server: str | None,
    data: str | None,
    json_: bool,
    **engine: Any,
) -> None:
    """Find the request rate that one engine sustains under latency targets, in each role that it may have."""
    asked = connected(server, data)
    resolved = asked.resolve(EngineConfig(**engine_fields(engine)))
    told = {}
    for name in ROLES if role == "all" else (role,):
        call = planner.capacity(
            resolved,
            role=name,
            isl=isl,
            osl=osl,
            ttft_s=ttft_ms / 1000 if ttft_ms is not None and name != "decode" else None,
            itl_s=itl_ms / 1000 if itl_ms is not None and name != "prefill" else None,
            kv_hit_rate=kv_hit_rate,
            accept_length=accept_length,
            objective=objective,
            limits=Limits(max_num_batched_tokens, max_num_seqs, max_kv_tokens),
            state=state,
        )
        told[name] = asked.ask(call)
    if json_:
        return as_json({name: found.to_dict() if found is not None else None for name, found in told.items()})
    rows: list[tuple[object, ...]] = []
    for name, found in told.items():
        if found is None:
            rows.append((name, None, None, None, None, "nothing fits"))
            continue
        times = [None if value is None else f"{value * 1000:.2f}" for value in (found.ttft_s, found.itl_s)]
        missed = ", ".join(target.removesuffix("_s") for target in found.violated_targets)
        rows.append((name, found.batch_total, f"{found.rps:.3f}", *times, missed or "yes"))
    title = f"one engine of {resolved.config.model} on {resolved.gpus_total} x {resolved.stamp.system}"
    columns = ("role", "batch", "requests/s", "TTFT ms", "ITL ms", "meets targets, or misses")
    return table(title, columns, rows, numeric=("batch", "requests/s", "TTFT ms", "ITL ms"))
