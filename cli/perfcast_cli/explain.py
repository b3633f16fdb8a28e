"""``perfcast explain``: what a command line or a manifest deploys, and what that would deliver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click
from perfcast_client.client import Questions
from perfcast_client.config import EngineConfig
from perfcast_client.deployments import Estimate
from perfcast_client.errors import NotFound, PerfcastError, refused
from perfcast_client.serving import Aggregated, Disaggregated, Limits, Pool, Workload
from perfcast_deploy.emit import yaml_text
from perfcast_deploy.explain import explain_command, explain_manifest
from perfcast_engine.errors import InvalidField

from perfcast_cli import options, shown
from perfcast_cli.local import connected
from perfcast_cli.output import as_json, sourced

FILE = click.Path(path_type=Path)
USUAL_BATCH = 256  # where neither the command nor the caller says
PREDICTED = ("config_json", "hf_quant_config_json", "database_mode", "profile", "version")  # of EngineConfig


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--moe/--dense", "is_moe", default=None, help="whether the model has experts, where it is not known by name"
)
@click.option("--engine-file", type=FILE, multiple=True, help="TRT-LLM engine file that the command names")
@click.option("--system", help="GPU system, for the estimate  [default: as the manifest says]")
@options.engine_options(without=[item.name for item in fields(EngineConfig) if item.name not in PREDICTED])
@options.load_options
@click.option(
    "--batch", type=int, help="requests in flight per attention-DP rank  [default: as many as the engine admits]"
)
@click.argument("what", nargs=-1, required=True, type=click.UNPROCESSED)
@sourced
def explain(
    is_moe: bool | None,
    engine_file: tuple[Path, ...],
    what: tuple[str, ...],
    server: str | None,
    data: str | None,
    json_: bool,
    **given: Any,
) -> None:
    """Say what is deployed and what it delivers: `explain -- vllm serve ...`, or `explain manifest.yaml`."""
    asked = connected(server, data)
    facts = _explained(what, engine_file, is_moe)
    if is_moe is None and facts["model"]:
        known = [model for model in asked.models(facts["model"]) if model.model == facts["model"]]
        is_moe = known[0].experts > 1 if known else None
        facts = _explained(what, engine_file, is_moe)
    estimate: Estimate | None = None
    notes: list[str] = []
    system = given["system"] or facts["system"]
    if system is None:
        notes.append("no estimate: give --system")
    else:
        try:
            estimate, notes = _estimated(asked, facts, system, given)
        except PerfcastError as error:
            notes.append(f"no estimate: {error.message}")
    if json_:
        return as_json({"facts": facts, "estimate": estimate and estimate.to_dict(), "notes": notes})
    click.echo(yaml_text(facts))
    if estimate is not None:
        shown.estimate(estimate)
    for note in notes:
        click.echo(f"note: {note}")
    return None


def _explained(what: tuple[str, ...], engine_file: tuple[Path, ...], is_moe: bool | None) -> dict[str, Any]:
    if len(what) > 1 or not _names_a_file(what[0]):
        engines = {path.name: path.read_text(errors="replace") for path in engine_file}
        return explain_command(what, engine_files=engines, is_moe=is_moe)
    if not Path(what[0]).is_file():
        raise InvalidField("manifest", f"{what[0]!r} is no file", "missing")
    return explain_manifest(Path(what[0]).read_text(errors="replace"), is_moe=is_moe)


def _names_a_file(word: str) -> bool:
    """Whether the only word is meant as a manifest, be there one or not; no engine starts by one word like that."""
    return not word.strip() or word.endswith((".yaml", ".yml")) or (len(word.split()) == 1 and "/" in word)


def _estimated(
    asked: Questions, facts: Mapping[str, Any], system: str, given: Mapping[str, Any]
) -> tuple[Estimate, list[str]]:
    """From the tables of the version that runs, else of the current one."""
    try:
        return _Deployed(facts, system, given).estimate(asked)
    except NotFound as error:
        if error.reason != "UNKNOWN_VERSION" or given["version"] or not facts["version"]:
            raise
    found, notes = _Deployed(dict(facts) | {"version": None}, system, given).estimate(asked)
    return found, [f"{facts['backend']} {facts['version']} was not measured; the current tables answer", *notes]


@dataclass(frozen=True)
class _Deployed:
    """Explained facts, the system that they run on, and what the caller says of the load."""

    facts: Mapping[str, Any]
    system: str
    given: Mapping[str, Any]

    def estimate(self, asked: Questions) -> tuple[Estimate, list[str]]:
        """What it delivers, and what had to be assumed."""
        load, notes = options.workload(self.given), []
        pools: dict[str, Any] = {}
        for name, role in self.facts["roles"].items():
            config = self._config(name, role)
            batch, said = self._batch(asked, config, role, load)
            notes += [f"{name}: {said}"] if said else []
            pools[name] = Pool(engine=config, batch=batch, workers=role["workers"])
        limits, accepted = self._limits(), self.given["nextn_accepted"]
        made: Aggregated | Disaggregated
        if "agg" in pools:
            pool = pools["agg"]
            made = Aggregated(engine=pool.engine, batch=pool.batch, ctx_tokens=self._chunk(pool, load))
            if pool.workers > 1:
                notes.append(f"the estimate is of one worker; {pool.workers} deliver {pool.workers} times that")
        else:
            made = Disaggregated(**pools, kv_transfer=options.kv_transfer(self.given))
        found = asked.estimate(made, load, limits=limits, nextn_accepted=accepted, allow_out_of_memory=True)
        return found, notes

    def _limits(self) -> Limits:
        """As the caller says, else the one memory fraction that is set."""
        given, fractions = options.limits(self.given), {r.get("kv_fraction") for r in self.facts["roles"].values()}
        if given.memory_fraction is not None or len(fractions) > 1:
            return given
        return replace(given, memory_fraction=fractions.pop())

    def _config(self, name: str, role: Mapping[str, Any]) -> EngineConfig:
        facts, engine = self.facts, options.engine_fields(self.given)
        if not facts["model"]:
            raise refused("model", None, "is not named by the command")
        engine |= {"model": facts["model"], "system": self.system, "backend": facts["backend"], "nextn": facts["nextn"]}
        engine |= {"version": engine.get("version") or facts["version"] or "current"}
        engine |= {
            "tp": role["tp"],
            "pp": role["pp"],
            "attn_dp": role["dp"],
            "kv_cache_quant": role.get("kv_dtype", ""),
        }
        if facts["is_moe"]:
            engine |= {"moe_tp": role["moe_tp"], "moe_ep": role["moe_ep"]}
        return EngineConfig(**engine, role="both" if name == "agg" else name)

    def _batch(
        self, asked: Questions, config: EngineConfig, role: Mapping[str, Any], load: Workload
    ) -> tuple[int, str]:
        batch = self.given["batch"] or role.get("max_batch")
        if batch is not None:
            return batch, ""
        fits = asked.estimate_memory(config, load, memory_fraction=role.get("kv_fraction")).largest_batch_per_rank or 1
        batch = min(USUAL_BATCH, fits)
        return batch, f"the batch is not set; {batch} in flight per rank were assumed"

    def _chunk(self, pool: Pool, load: Workload) -> int | None:
        """Prefill tokens of an iteration, as far as they are set."""
        role = self.facts["roles"]["agg"]
        left = (role.get("max_tokens") or 0) - pool.batch * (self.facts["nextn"] + 1)
        if left < 1 or not role.get("chunked_prefill"):
            return None
        return int(left if left < load.isl else left // load.isl * load.isl)
