"""``perfcast generate`` and ``perfcast targets``: the files that deploy a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import click
from perfcast_client.client import Questions
from perfcast_client.config import EngineConfig
from perfcast_client.deploy import Cluster, DeployFiles, EngineSettings, Figures
from perfcast_client.deployments import Deployment, Experiment, SearchResult
from perfcast_client.errors import OutOfMemory, refused
from perfcast_client.record import read
from perfcast_client.serving import Aggregated, Disaggregated, Limits, Workload
from perfcast_deploy.bundle import write
from perfcast_deploy.describe import describe
from perfcast_engine.errors import InvalidField

from perfcast_cli import options
from perfcast_cli.estimate import deployment
from perfcast_cli.local import connected
from perfcast_cli.output import as_json, sourced

FILE = click.Path(path_type=Path)
MARGIN = 1.5  # GPU memory over weights, without a search
NAIVE_BATCH = 128
PARTS = ("picks", "front", "rows", "closest")


@dataclass(frozen=True)
class Chosen:
    """What is deployed: one replica, under which load it was predicted, and how many replicas."""

    deployment: Aggregated | Disaggregated
    workload: Workload
    limits: Limits | None = None
    nextn_accepted: float = 0.0
    replicas: int = 1

    @classmethod
    def of_search(cls, result: SearchResult, found: Experiment, row: Deployment) -> Chosen:
        replicas = row.ranking.replicas_total if row.ranking is not None else 1
        return cls(
            found.configuration(row, result), result.workload, result.limits, result.nextn_accepted, max(replicas, 1)
        )

    def files(self, asked: Questions, target: str, given: Mapping[str, Any]) -> DeployFiles:
        """``given``: policy and settings."""
        settings, cluster = _settings(given["settings"])
        return asked.generate(
            self.deployment,
            self.workload,
            target,
            policy=given["policy"],
            limits=self.limits,
            nextn_accepted=self.nextn_accepted,
            replicas=self.replicas,
            settings=settings,
            cluster=cluster,
        )


@click.command()
@click.option("--search", "searched", type=FILE, help="result.json of perfcast search --out")
@click.option("--experiment", help="of that search, e.g. disagg_vllm  [default: the best]")
@click.option("--part", type=click.Choice(PARTS), default=PARTS[0], show_default=True, help="which of its deployments")
@click.option("--index", default=0, help="which of these, from 0")
@click.option("--naive", is_flag=True, help="without a search: the fewest GPUs whose memory holds the model well")
@click.option("--model", help="a model known by name, or a name for --config-json")
@click.option("--system")
@click.option("--backend")
@options.engine_options(without=("model", "system", "backend", "resolution", "role"))
@click.option("--batch", type=int, help="requests per attention-DP rank")
@click.option("--ctx-tokens", type=int, help="prefill tokens of an iteration  [default: isl]")
@click.option("--prefill", metavar="K=V,...", help="prefill workers: tp=4,batch=1,workers=2 and other engine options")
@click.option("--decode", metavar="K=V,...", help="the same of decode workers")
@options.load_options
@click.option("--target", default="", help="what to write files for; see perfcast targets")
@click.option("--gpus", type=int, help="as many replicas as these hold  [default: one, or as the search says]")
@options.file_options
@click.option("--out", type=FILE, help="the new folder  [default: named by the content]")
@click.option("--dry-run", is_flag=True, help="check everything, write nothing")
@click.option("--print", "print_", is_flag=True, help="print the files instead of writing them")
@sourced
def generate(server: str | None, data: str | None, json_: bool, **given: Any) -> None:
    """Write the files that deploy a chosen configuration."""
    asked = connected(server, data)
    made = _chosen(asked, given).files(asked, given["target"], given)
    folder = None if given["dry_run"] or given["print_"] else write(made.files, given["out"] or Path(made.name))
    if given["print_"] and not json_:
        for name, content in made.files.items():
            click.echo(f"# ==> {name}\n{content.decode()}")
    elif json_:
        told = made.to_dict() | {"folder": str(folder) if folder else None}
        as_json(told if given["print_"] else told | {"files": list(made.files)})
    else:
        show(made, folder)


def show(made: DeployFiles, folder: Path | None, err: bool = False) -> None:
    lines = [f"{folder or 'checked'}: {', '.join(made.files)}"]
    lines += [f"  {c.field}: predicted {c.predicted} -> deployed {c.deployed} ({c.reason})" for c in made.changes]
    predicted, filled = made.summary.predicted, made.predicted_as_deployed
    if predicted is not None:
        lines.append(f"  predicted: {_figures(predicted)}")
    if filled is not None and filled != predicted:
        lines.append(f"  filled to the deployed limits: {_figures(filled)}")
    for line in (*lines, *(f"  {note}" for note in made.notes)):
        click.echo(line, err=err)


def _figures(told: Figures) -> str:
    tpot = "" if told.tpot_ms is None else f"TPOT {told.tpot_ms:.3f} ms, "
    rate = f"{told.output_tokens_per_s:.0f} tokens/s at {told.concurrency_total} in flight"
    return f"TTFT {told.ttft_ms:.2f} ms, {tpot}{rate}"


def _chosen(asked: Questions, given: Mapping[str, Any]) -> Chosen:
    flags = given["batch"] is not None or bool(given["prefill"] or given["decode"])
    if sum((bool(given["searched"]), given["naive"], flags)) != 1:
        raise refused("search", None, "is not alone: give one of --search, --naive, --batch, --prefill and --decode")
    if given["searched"]:
        chosen = _searched(given)
    else:
        made = _naive(asked, given) if given["naive"] else _from_flags(given)
        chosen = Chosen(made, options.workload(given), options.limits(given), given["nextn_accepted"])
    if given["gpus"] is None:
        return chosen
    size = _gpus(chosen.deployment)
    if given["gpus"] < size:
        raise InvalidField("gpus", f"{given['gpus']} hold no replica of {size}", "range")
    return replace(chosen, replicas=given["gpus"] // size)


def _searched(given: Mapping[str, Any]) -> Chosen:
    path: Path = given["searched"]
    try:
        result = SearchResult.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise refused("search", str(path), f"cannot be read: {error}") from None
    name = given["experiment"] or (result.closest if given["part"] == "closest" else result.best)
    found = result.experiment(name)
    if found is None:
        raise refused("experiment", name, f"is none of {', '.join(e.name for e in result.experiments)}")
    rows = tuple(filter(None, (found.closest,))) if given["part"] == "closest" else getattr(found, given["part"])
    if not 0 <= given["index"] < len(rows):
        raise refused("index", given["index"], f"is not below {len(rows)}; {name} is {found.status}")
    return Chosen.of_search(result, found, rows[given["index"]])


def _named(given: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("model", "system", "backend"):
        if not given.get(name):
            raise refused(name, None, f"is missing; give --{name}")
    return {name: given[name] for name in ("model", "system", "backend")}


def _from_flags(given: Mapping[str, Any]) -> Aggregated | Disaggregated:
    _named(given)
    made = deployment("agg" if given["batch"] is not None else "disagg", dict(given))
    assert isinstance(made, Aggregated | Disaggregated)
    return made


def _naive(asked: Questions, given: Mapping[str, Any]) -> Aggregated:
    """The fewest GPUs of a node that hold the weights with a margin; experts split by tensor too."""
    engine, load = options.engine_fields(given) | _named(given), options.workload(given)
    per_node = next((s.gpus_per_node for s in asked.systems() if s.name == given["system"]), 8)
    most = min(per_node, given["gpus"] or per_node)
    moe = any(m.experts > 1 for m in asked.models(engine["model"]) if m.model == engine["model"])
    tp = 1
    while tp <= most:
        config = EngineConfig(**engine | {"tp": tp} | ({"moe_tp": tp} if moe else {}))
        try:
            told = asked.estimate_memory(config, load, memory_fraction=given["memory_fraction"])
        except OutOfMemory:
            told = None
        if told is not None and told.largest_batch_per_rank:
            memory = told.at_start
            if memory.weights_bytes * MARGIN <= memory.capacity_bytes:
                return Aggregated(engine=config, batch=min(NAIVE_BATCH, told.largest_batch_per_rank))
        tp *= 2
    raise refused("gpus", most, f"of {given['system']} do not hold {given['model']} with a margin; search for it")


def _gpus(made: Aggregated | Disaggregated) -> int:
    def of(engine: Any) -> int:
        return int(engine.tp * engine.pp * engine.attn_dp * engine.cp)

    if isinstance(made, Aggregated):
        return of(made.engine)
    return sum(of(pool.engine) * pool.workers for pool in (made.prefill, made.decode))


def _settings(given: tuple[str, ...]) -> tuple[EngineSettings, Cluster]:
    """``served_name=chat``, ``cluster.namespace=serving``, ``cluster.env.NAME=value``, ``cluster.hosts=a,b``."""
    found: dict[Any, dict[str, Any]] = {EngineSettings: {}, Cluster: {}}
    for text in given:
        path, equals, value = text.partition("=")
        kind: Any = Cluster if path.startswith("cluster.") else EngineSettings
        name, _, key = path.removeprefix("cluster.").partition(".")
        hint = get_type_hints(kind).get(name)
        if not equals or hint is None or bool(key) != (get_origin(hint) is Mapping):
            known = [*get_type_hints(EngineSettings), *(f"cluster.{member}" for member in get_type_hints(Cluster))]
            raise refused("set", text, f"is not one of {', '.join(known)} with its value")
        if key:
            found[kind].setdefault(name, {})[key] = value
        elif get_origin(hint) is tuple:
            found[kind][name] = value.split(",")
        else:
            found[kind][name] = read(hint, value if hint is str else options.typed(value), f"set.{path}")
    return read(EngineSettings, found[EngineSettings], "set"), read(Cluster, found[Cluster], "set.cluster")


@click.command()
@click.argument("section", default="targets")
@click.option("--json", "json_", is_flag=True, help="print JSON")
def targets(section: str, json_: bool) -> None:
    """List what files can be generated for: targets, releases, or the flags of vllm, sglang, trtllm."""
    try:
        rows = describe(section)
    except LookupError as error:
        raise click.ClickException(str(error)) from None
    if json_:
        return as_json(rows)
    for row in rows:
        click.echo("  ".join(_shown(value) for value in row.values() if value not in ("", "0", [])))
    return None


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
