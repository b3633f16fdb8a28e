"""``perfcast exp``: several searches from a YAML file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from perfcast_client.client import Questions
from perfcast_client.deployments import SearchResult
from perfcast_client.errors import InvalidRequest, PerfcastError, refused
from perfcast_client.record import Record, read
from perfcast_client.search import SearchTask

from perfcast_cli import options, shown
from perfcast_cli.local import connected
from perfcast_cli.output import as_json, sourced, text_of, to_reader

MAX_EXPERIMENTS = 256
EXAMPLE = """\b
A file:
  defaults:                       # merged into every experiment
    workload: {isl: 4000, osl: 500, prefix: 500}
    targets: {ttft_ms: 300, tpot_ms: 10}
    total_gpus: 32
  experiments:
    h200:
      engine: {model: Qwen/Qwen3-32B-FP8, system: h200_sxm}
      backends: [trtllm, vllm]
    fewest:
      engine: {model: Qwen/Qwen3-32B-FP8, system: h100_sxm, backend: sglang, database_mode: hybrid}
      total_gpus: null
      load: {concurrency: 200}    # the fewest GPUs for a load
\b
Members are those of perfcast_client.SearchTask; an unknown or malformed one is refused by its path.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Record):
    """Traffic to carry: one of requests per second and requests in flight, on at most ``max_gpus``."""

    requests_per_s: float | None = None
    concurrency: float | None = None
    max_gpus: int | None = None


@dataclass(frozen=True, slots=True)
class Experiment:
    """One search, or with a ``load`` one recommendation."""

    task: SearchTask
    load: Load | None = None


def experiments(text: str) -> dict[str, Experiment]:
    """By name, what a YAML text describes. Raises InvalidRequest with the path of what is wrong."""
    import yaml

    try:
        page = yaml.safe_load(text)
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        text = f"file: is not well-formed YAML: {why}"
        raise InvalidRequest(text, reason="INVALID_FIELD", code="INVALID_ARGUMENT", details={"field": "file"}) from None
    if not isinstance(page, Mapping) or set(page) - {"defaults", "experiments"}:
        raise refused("file", sorted(page) if isinstance(page, Mapping) else page, "is not defaults and experiments")
    listed, defaults = page.get("experiments"), page.get("defaults") or {}
    if not isinstance(listed, Mapping) or not 0 < len(listed) <= MAX_EXPERIMENTS:
        raise refused("experiments", listed, f"is not a mapping of 1 to {MAX_EXPERIMENTS} experiments by name")
    if not isinstance(defaults, Mapping):
        raise refused("defaults", defaults, "is not a mapping")
    return {_name(name): _experiment(f"experiments.{name}", merged(defaults, own)) for name, own in listed.items()}


def _name(name: Any) -> str:
    """A name that can be that of a folder."""
    if not isinstance(name, str) or not name or not all(c.isalnum() or c in "-_." for c in name) or name[0] == ".":
        raise refused("experiments", name, "is no name of letters, digits, '-', '_' and '.'")
    return name


def _experiment(path: str, given: Any) -> Experiment:
    if not isinstance(given, Mapping):
        raise refused(path, given, "is not a mapping")
    given = dict(given)
    load = read(Load, given.pop("load"), f"{path}.load") if given.get("load") is not None else None
    given.pop("load", None)
    engine, backends = given.get("engine"), given.get("backends")
    if isinstance(engine, Mapping) and isinstance(backends, list) and backends and "backend" not in engine:
        given["engine"] = {**engine, "backend": backends[0]}
    return Experiment(SearchTask.from_dict(given, path), load)


def merged(base: Mapping[str, Any], over: Any) -> Any:
    """``over`` on top of ``base``, mappings member by member."""
    if not isinstance(over, Mapping):
        return over
    out = dict(base)
    for name, value in over.items():
        inner = out.get(name)
        out[name] = merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return out


def answer(experiment: Experiment, asked: Questions, deadline_s: float) -> SearchResult:
    """What ``asked`` finds. One that answers in its own process can be sent to another."""
    load = experiment.load
    if load is None:
        return asked.search_result(experiment.task, deadline_s)
    return asked.recommend(
        experiment.task,
        requests_per_s=load.requests_per_s,
        concurrency=load.concurrency,
        max_gpus=load.max_gpus,
        deadline_s=deadline_s,
    )


def run(
    asked: Mapping[str, Experiment], ask: Callable[[Experiment], SearchResult], executor: Executor
) -> Iterator[tuple[str, SearchResult | PerfcastError]]:
    """Each experiment's result, or why it has none, in the order of the file. ``executor``: any of concurrent.futures;
    one of other processes needs an ``ask`` that can be pickled."""
    futures = {name: executor.submit(ask, experiment) for name, experiment in asked.items()}
    for name, future in futures.items():
        try:
            yield name, future.result()
        except PerfcastError as error:
            yield name, error


@click.command(epilog=EXAMPLE)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--only", multiple=True, metavar="NAME", help="run this experiment; may be repeated")
@click.option("--jobs", default=1, show_default=True, help="experiments at once")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="write CSV, JSON, PNG and HTML there")
@click.option("--plot/--no-plot", default=False, help="draw the fronts")
@click.option("--deadline", type=options.SECONDS, default=600.0, show_default=True, help="seconds for each")
@sourced
def exp(
    file: Path,
    only: tuple[str, ...],
    jobs: int,
    out: Path | None,
    plot: bool,
    deadline: float,
    server: str | None,
    data: str | None,
    json_: bool,
) -> None:
    """Run the searches of an experiments FILE."""
    asked = experiments(text_of(file))
    for name in only:
        if name not in asked:
            raise refused("only", name, f"is no experiment of the file; there are {', '.join(asked)}")
    asked = {name: experiment for name, experiment in asked.items() if not only or name in only}
    ask = partial(answer, asked=connected(server, data), deadline_s=deadline)
    processes = jobs > 1 and server is None
    found: dict[str, SearchResult | PerfcastError] = {}
    with ProcessPoolExecutor(jobs) if processes else ThreadPoolExecutor(max(1, jobs)) as executor:
        for name, result in run(asked, ask, executor):
            found[name] = result
            if not json_:
                to_reader(partial(_show, name, result, plot))
    results = {name: result for name, result in found.items() if isinstance(result, SearchResult)}
    if json_:
        to_reader(lambda: as_json({name: _plain(result) for name, result in found.items()}))
    if out is not None and results:
        from perfcast_cli.report import write

        for path in write(out, results):
            click.echo(f"wrote {path}", err=True)
    if not any(result.eligible for result in results.values()):
        raise click.exceptions.Exit(1)


def _show(name: str, result: SearchResult | PerfcastError, plot: bool) -> None:
    click.echo(f"== {name}")
    if isinstance(result, PerfcastError):
        click.echo(f"Error: {result.message} [{result.reason}]")
    else:
        shown.search_result(result, plot)
    click.echo()


def _plain(result: SearchResult | PerfcastError) -> dict[str, Any]:
    if isinstance(result, SearchResult):
        return result.to_dict()
    return {"error": {"reason": result.reason, "message": result.message, "details": result.details}}
