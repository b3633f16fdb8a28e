"""``perfcast search`` and ``perfcast recommend``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import click
from perfcast_client.client import Questions
from perfcast_client.config import EngineConfig
from perfcast_client.deployments import SearchProgress, SearchResult
from perfcast_client.search import SearchTask, Space, Targets

from perfcast_cli import options, shown
from perfcast_cli.local import connected
from perfcast_cli.output import as_json, sourced, to_reader

BACKENDS = ("trtllm", "sglang", "vllm")
PLAIN = (
    "nextn_accepted",
    "chunked_prefill",
    "encode_pool",
    "prefill_max_batch",
    "decode_max_batch",
    "strict_sla",
    "top",
    "max_rows",
)
MODES = {"agg": "aggregated", "disagg": "disaggregated", "afd": "afd"}

search_options = options.options(
    options.engine_options(without=(*options.SEARCHED, "backend")),
    click.option("--backend", "backends", multiple=True, help="may be repeated  [default: trtllm, sglang and vllm]"),
    click.option("--decode-system", help="where decode workers run, if not on --system"),
    options.load_options,
    click.option("--ttft", type=float, help="limit of the time to first token, ms  [default: 2000]"),
    click.option("--tpot", type=float, help="limit of the time per output token, ms  [default: 30]"),
    click.option("--request-latency", type=float, help="limit of a whole request, ms; instead of --tpot"),
    click.option("--mode", "modes", type=click.Choice([*MODES]), multiple=True, help="[default: agg and disagg]"),
    click.option("--space", multiple=True, metavar="tp=1,2,4", help="sizes to try: num_gpu, tp, pp, attn_dp, ..."),
    click.option("--prefill-space", multiple=True, metavar="tp=1,2", help="the same of prefill workers"),
    click.option("--decode-space", multiple=True, metavar="tp=4,8", help="the same of decode workers"),
    click.option("--chunked-prefill", is_flag=True, help="also try prefill chunks shorter than a prompt"),
    click.option("--prefill-max-batch", type=int, help="[default: 1]"),
    click.option("--decode-max-batch", type=int, help="[default: 512]"),
    click.option("--encode-pool", is_flag=True, help="encode images by workers of their own"),
    click.option("--strict-sla", is_flag=True, help="leave what misses the TPOT target out of the fronts too"),
    click.option("--top", default=5, show_default=True, help="deployments to show of each experiment"),
    click.option("--rows", "max_rows", default=0, help="also write this many rows of each experiment"),
    click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="write CSV, JSON, PNG and HTML there"),
    click.option("--deploy", metavar="TARGET", help="also write the files that deploy the best, into --out/TARGET"),
    options.file_options,
    click.option("--plot/--no-plot", default=True, help="draw the fronts"),
    click.option("--deadline", type=options.SECONDS, default=60.0, show_default=True, help="seconds"),
)


def task_of(given: dict[str, Any], **fields: Any) -> SearchTask:
    """The search that the options describe."""
    if given["deploy"] and given["out"] is None:
        raise click.UsageError("--deploy needs --out")
    engine = options.engine_fields(given)
    backends = given["backends"] or BACKENDS
    config = EngineConfig(**engine, backend=backends[0])
    decode = None
    if given["decode_system"] is not None:
        decode = EngineConfig(**engine | {"system": given["decode_system"]}, backend=backends[0])
    spaces: dict[str, Any] = {
        name: Space.from_dict(options.sizes(given[name], name), name) if given[name] else None
        for name in ("space", "prefill_space", "decode_space")
    }
    return SearchTask(
        engine=config,
        workload=options.workload(given),
        targets=Targets(ttft_ms=given["ttft"], tpot_ms=given["tpot"], request_latency_ms=given["request_latency"]),
        backends=tuple(backends),
        modes=tuple(MODES[mode] for mode in given["modes"]),
        decode_engine=decode,
        limits=options.limits(given),
        kv_transfer=options.kv_transfer(given),
        **spaces,
        **{name: given[name] for name in PLAIN},
        **fields,
    )


@click.command()
@click.option("--gpus", type=int, help="the budget")
@search_options
@click.option("--autoscale", is_flag=True, help="pools that an autoscaler sizes: the best engine of each role")
@click.option("--objective", type=click.Choice(["throughput", "latency"]), help="whatever the targets")
@sourced
def search(
    gpus: int | None, autoscale: bool, objective: str | None, server: str | None, data: str | None, **given: Any
) -> None:
    """Find the best deployments under latency targets: aggregated and disaggregated, on every backend."""
    task = task_of(given, total_gpus=gpus, autoscale=autoscale, objective=objective or "")
    asked = connected(server, data)
    with closing(asked.search(task, given["deadline"])) as events:
        result = watched(events)
    _finish(result, given, asked)


@click.command()
@click.option("--requests-per-s", type=float, help="the load: requests a second")
@click.option("--concurrency", type=float, help="or requests in flight")
@click.option("--max-gpus", type=int, help="the ceiling")
@search_options
@sourced
def recommend(
    requests_per_s: float | None,
    concurrency: float | None,
    max_gpus: int | None,
    server: str | None,
    data: str | None,
    **given: Any,
) -> None:
    """Find the fewest GPUs that carry a load under latency targets."""
    given["database_mode"] = given["database_mode"] or "hybrid"
    asked = connected(server, data)
    result = asked.recommend(
        task_of(given),
        requests_per_s=requests_per_s,
        concurrency=concurrency,
        max_gpus=max_gpus,
        deadline_s=given["deadline"],
    )
    _finish(result, given, asked, f"{requests_per_s:g} requests/s" if requests_per_s else f"{concurrency:g} in flight")


def watched(events: Generator[SearchProgress | SearchResult, None, None], title: str = "") -> SearchResult:
    """The result, with a bar on a terminal meanwhile."""
    if not sys.stderr.isatty():
        return _last(events, lambda progress: None)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        shown_task = bar.add_task(title or "searching", total=1.0)

        def tell(progress: SearchProgress) -> None:
            share = progress.mappings_done / max(1, progress.mappings_total)
            done = (progress.experiments_done + share) / max(1, progress.experiments_total)
            bar.update(shown_task, completed=done, description=f"{title} {progress.mode} {progress.backend}".strip())

        return _last(events, tell)


def _last(
    events: Generator[SearchProgress | SearchResult, None, None], tell: Callable[[SearchProgress], None]
) -> SearchResult:
    for event in events:
        if isinstance(event, SearchResult):
            return event
        tell(event)
    raise AssertionError("a search ends with its result")


def _finish(result: SearchResult, given: dict[str, Any], asked: Questions, load: str = "") -> None:
    """Print, write, and exit with 1 where nothing meets the targets."""
    to_reader(lambda: as_json(result.to_dict()) if given["json_"] else shown.search_result(result, given["plot"], load))
    if given["out"] is not None:
        from perfcast_cli import report

        for path in report.write(given["out"], {report.SEARCH: result}):
            click.echo(f"wrote {path}", err=True)
        found = result.experiment(result.best)
        if result.eligible and found is not None and found.best is not None:
            if given["deploy"]:
                from perfcast_deploy.bundle import write

                from perfcast_cli.generate import Chosen, show

                made = Chosen.of_search(result, found, found.best).files(asked, given["deploy"], given)
                show(made, write(made.files, given["out"] / given["deploy"]), err=True)
            else:
                words = f"--search {given['out'] / 'result.json'} --target dynamo --out deploy"
                click.echo(f"deploy the best: perfcast generate {words}", err=True)
    if not result.eligible:
        raise click.exceptions.Exit(1)
