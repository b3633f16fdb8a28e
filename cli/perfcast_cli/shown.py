"""What a search or an estimate found, for people at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
from perfcast_client.deployments import Deployment, Estimate, Experiment, SearchResult

from perfcast_cli.output import table
from perfcast_cli.rows import label

STATUS = {
    "no_memory": "the weights fit no mapping: give more GPUs or a quantised model",
    "no_kv": "the KV cache fits no mapping: give more GPUs or a shorter request",
    "no_data": "nothing of what fits is measured",
    "failed": "no mapping can be built",
    "unmet": "nothing meets the targets",
}
COLUMNS: tuple[tuple[str, Callable[[Deployment], str]], ...] = (
    ("tokens/s/gpu", lambda d: f"{cluster(d):.3f}"),
    ("tokens/s/user", lambda d: f"{d.tokens_per_s_per_user:.2f}"),
    ("req/s", lambda d: f"{d.requests_per_s * replicas(d):.2f}"),
    ("TTFT ms", lambda d: f"{d.ttft_ms:.2f}"),
    ("TPOT ms", lambda d: f"{d.tpot_ms:.3f}"),
    ("latency ms", lambda d: f"{d.request_latency_ms:.0f}"),
    ("in flight", lambda d: f"{d.concurrency_total * replicas(d)}"),
    ("GPUs", lambda d: f"{gpus(d)} = {replicas(d)} x {d.gpus_total}"),
)
NAMES = tuple(name for name, _ in COLUMNS)


def cluster(deployment: Deployment) -> float:
    ranking = deployment.ranking
    return ranking.tokens_per_s_per_gpu_cluster if ranking is not None else deployment.tokens_per_s_per_gpu


def replicas(deployment: Deployment) -> int:
    return deployment.ranking.replicas_total if deployment.ranking is not None else 1


def gpus(deployment: Deployment) -> int:
    """Of all replicas."""
    return deployment.gpus_total * replicas(deployment)


def search_result(result: SearchResult, plot: bool = True, load: str = "") -> None:
    """The best of every experiment, then the picks of each, then the fronts."""
    first = next((e.engines[0] for e in result.experiments if e.engines), None)
    what = f"{first.config.model} on {first.stamp.system}" if first else "nothing can be deployed"
    click.echo(f"{what}{_budget(result, load)}: isl {result.isl}, osl {result.osl}, prefix {result.prefix}")
    click.echo(f"targets: {targets(result)}; profile {result.profile}\n")
    _best(result)
    for experiment in result.experiments:
        if len(experiment.picks) > 1:
            _picks(experiment)
    if plot:
        fronts(result)
    click.echo(verdict(result))


def targets(result: SearchResult) -> str:
    limits = (("TTFT", result.ttft_ms), ("TPOT", result.tpot_ms), ("request latency", result.request_latency_ms))
    return ", ".join(f"{name} <= {limit:g} ms" for name, limit in limits if limit)


def _budget(result: SearchResult, load: str) -> str:
    if load:
        return f" for {load}"
    return f", {result.total_gpus} GPUs" if result.total_gpus else ""


def _best(result: SearchResult) -> None:
    rows = []
    for e in result.experiments:
        shown = e.best if e.eligible else e.closest or e.best
        if shown is None:
            rows.append((e.name, *[None] * len(COLUMNS), STATUS.get(e.status, e.status)))
            continue
        name = e.name if e.eligible else f"{e.name} *"
        rows.append((name, *(show(shown) for _, show in COLUMNS), label(e, shown)))
    table("best of each", ("experiment", *NAMES, "deployment"), rows, NAMES, wide=True)
    for e in result.experiments:
        if not e.eligible and (e.closest or e.best):
            click.echo(f"* {e.name}: nothing meets the targets; this is closest: {missed(e)}")


def missed(experiment: Experiment) -> str:
    """By how much the closest candidate misses which targets."""
    told = [
        f"{v.target.removesuffix('_ms')} {v.value_ms:.2f} ms misses {v.limit_ms:g} ms by {v.excess_percent:.1f} %"
        for v in experiment.violations
    ]
    return ", ".join(told) or STATUS.get(experiment.status, experiment.status)


def _picks(experiment: Experiment) -> None:
    served = any(pick.ranking and (pick.ranking.load_served_percent or 100) < 100 for pick in experiment.picks)
    more = ("served %",) if served else ()
    click.echo()
    table(
        f"{experiment.name}, {experiment.rows_total} rows of {experiment.mappings_total} mappings"
        + ("" if experiment.eligible else "; none meets the targets"),
        ("rank", *NAMES, *more, "deployment"),
        (
            (rank, *(show(pick) for _, show in COLUMNS), *_served(pick, served), label(experiment, pick))
            for rank, pick in enumerate(experiment.picks, 1)
        ),
        ("rank", *NAMES, *more),
        wide=True,
    )


def _served(pick: Deployment, shown: bool) -> Sequence[str]:
    return (f"{pick.ranking.load_served_percent:g}",) if shown and pick.ranking is not None else ()


def fronts(result: SearchResult) -> None:
    from rich.console import Console

    from perfcast_cli.plot import Series, scatter

    series = []
    for e in result.experiments:
        best = e.best if e.eligible else None
        points = [(d.tokens_per_s_per_user, cluster(d)) for d in e.front]
        series.append(Series(e.name, points, [(best.tokens_per_s_per_user, cluster(best))] if best else []))
    console = Console()
    console.print()
    width = max(40, min(100, console.width - 12))
    console.print(scatter(series, "tokens/s/user", "tokens/s/gpu of the cluster", width=width))


def verdict(result: SearchResult) -> str:
    """The best in one line, or what is closest."""
    best = result.experiment(result.best) if result.eligible else None
    if best is None or best.best is None:
        near = result.experiment(result.closest) if result.closest else None
        if near is None or near.closest is None:
            return "nothing can be deployed"
        return f"nothing meets the targets; closest: {near.name}, {label(near, near.closest)}: {missed(near)}"
    others = [e for e in result.experiments if e.eligible and e.best and e.mode != best.mode]
    served = best.best.ranking.load_served_percent if best.best.ranking is not None else None
    if served is not None:
        needed = min((gpus(e.best) for e in others if e.best), default=0)
        more = f"; the best {others[0].mode} one needs {needed}" if needed else ""
        return (
            f"best: {best.name}, {label(best, best.best)}: {gpus(best.best)} GPUs carry {served:g} % of the load{more}"
        )
    rival = max((cluster(e.best) for e in others if e.best), default=0.0)
    more = f", {cluster(best.best) / rival:.2f} x the best {others[0].mode} one" if rival else ""
    return f"best: {best.name}, {label(best, best.best)}: {cluster(best.best):.3f} tokens/s/gpu{more}"


def estimate(found: Estimate) -> None:
    """The metrics of one deployment, what its GPUs hold, and the steps behind."""
    deployment, first = found.deployment, found.engines[0]
    stamps = " + ".join(dict.fromkeys(f"{e.stamp.system}, {e.stamp.backend} {e.stamp.version}" for e in found.engines))
    click.echo(f"{first.config.model} on {stamps}: {deployment.mode}, profile {found.profile}\n")
    metrics = [
        ("TTFT", f"{deployment.ttft_ms:.3f}", "ms"),
        ("TPOT", f"{deployment.tpot_ms:.3f}", "ms"),
        ("request latency", f"{deployment.request_latency_ms:.3f}", "ms"),
        ("throughput", f"{deployment.tokens_per_s:.3f}", "tokens/s"),
        ("per GPU", f"{deployment.tokens_per_s_per_gpu:.3f}", "tokens/s/gpu"),
        ("per user", f"{deployment.tokens_per_s_per_user:.3f}", "tokens/s/user"),
        ("requests", f"{deployment.requests_per_s:.3f}", "/s"),
        ("in flight", f"{deployment.concurrency_total}", "requests"),
        ("GPUs", f"{deployment.gpus_total}", ""),
    ]
    if deployment.power_w is not None:
        metrics.append(("power", f"{deployment.power_w:.1f}", "W"))
    table("", ("metric", "value", "unit"), metrics, numeric=("value",))
    click.echo()
    _memory(found)
    click.echo()
    steps = [
        (s.name, f"{s.latency_ms:.3f}", f"{s.provenance.silicon_share:.0%}", s.provenance.tier) for s in found.steps
    ]
    table("steps", ("step", "latency ms", "measured", "tier"), steps, numeric=("latency ms", "measured"))
    for step in found.steps:
        if step.operators:
            click.echo()
            operators = [
                (o.name, f"{o.latency_ms:.4f}", f"{o.latency_ms / (step.latency_ms or 1):.1%}", o.source)
                for o in step.operators
            ]
            table(f"{step.name}: operators", ("operator", "ms", "share", "source"), operators, numeric=("ms", "share"))
    for warning in found.warnings:
        click.echo(f"warning: {warning}", err=True)


def _memory(found: Estimate) -> None:
    parts = ("weights", "activations", "kv_cache", "nccl", "others", "total", "capacity", "kv_budget")
    names = [w.role if w.role != "both" else "engine" for w in found.deployment.workers]
    if found.deployment.afd is not None:
        names = ["prefill", "attention", "ffn"]
    rows: list[Sequence[Any]] = [
        (part.replace("_", " "), *(f"{getattr(memory, f'{part}_bytes') / 2**30:.2f}" for memory in found.memory))
        for part in parts
    ]
    table("memory of one GPU", ("GiB", *names), rows, numeric=names)
