"""``perfcast generate``, ``explain``, ``verify`` and ``targets``: deployment files from the command line.

Exit status: 0 done, 2 refused with a typed reason (nothing is written), 1 anything unforeseen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

import click
import yaml
from perfcast_engine.errors import EngineError, InvalidField

from perfcast_deploy import bundle as bundles
from perfcast_deploy.catalog import system_facts
from perfcast_deploy.deployment import Deployment, Facts, decode
from perfcast_deploy.describe import TARGETS, describe
from perfcast_deploy.emit import merge, yaml_text
from perfcast_deploy.explain import explain_command, explain_manifest
from perfcast_deploy.policy import POLICIES, as_rows
from perfcast_deploy.rows import from_row, naive_row, read_row
from perfcast_deploy.validate import read_yaml
from perfcast_deploy.verify import verify as verify_result

FILE = click.Path(path_type=Path)


class Refused(click.ClickException):
    """A typed refusal: message, reason, details."""

    exit_code = 2

    def __init__(self, error: EngineError) -> None:
        super().__init__(f"{error.message} [{error.reason}]")


def _typed(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except EngineError as error:
            raise Refused(error) from None
        except OSError as error:
            raise click.ClickException(str(error)) from None

    return guarded


def _pairs(text: str | None, option: str) -> dict[str, Any]:
    """``tp=4,bs=64`` as a mapping; values are YAML scalars."""
    found: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise InvalidField(option, f"{part!r} is not of the form key=value", "type")
        try:
            found[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise InvalidField(option, f"{value!r} is no YAML value", "type") from None
    return found


def _assumed(given: tuple[str, ...], direct: Mapping[str, Any]) -> dict[str, Any]:
    """``--set a.b=c`` and the options of their own as one tree."""
    tree: dict[str, Any] = {key: value for key, value in direct.items() if value is not None}
    for pair in given:
        for path, value in _pairs(pair, "--set").items():
            for name in reversed(path.split(".")):
                value = {name: value}
            tree = merge(tree, value)
    return tree


def _mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InvalidField("file", f"{path} is no file", "missing")
    documents = read_yaml(path.name, path.read_text(errors="replace"))
    if len(documents) != 1:
        raise InvalidField("file", f"{path} holds {len(documents)} documents, not one", "type")
    return documents[0]


@click.command()
@click.option("--row", type=FILE, help="a row of a search: JSON, YAML or CSV")
@click.option("--index", default=0, help="which row of the file, from 0")
@click.option("--deployment", type=FILE, help="a whole deployment: JSON or YAML")
@click.option("--agg", metavar="K=V,...", help="without a search: tp=4,bs=64,workers=2 of aggregated workers")
@click.option("--prefill", metavar="K=V,...", help="the same of prefill workers")
@click.option("--decode", "decode_", metavar="K=V,...", help="the same of decode workers")
@click.option("--naive", metavar="K=V,...", help="without a prediction: weights_gib=64,gpu_memory_gib=141")
@click.option("--model")
@click.option("--system")
@click.option("--backend")
@click.option("--engine-version", "version")
@click.option("--isl", type=int)
@click.option("--osl", type=int)
@click.option("--prefix", type=int)
@click.option("--total-gpus", type=int)
@click.option("--set", "settings", multiple=True, metavar="K=V", help="kv_fraction, nextn, cluster.namespace ...")
@click.option("--facts", type=FILE, help="what is known of the model and the GPU memory: JSON or YAML")
@click.option("--target", required=True, help=", ".join(TARGETS))
@click.option("--policy", default="as_predicted", show_default=True, help=" or ".join(POLICIES))
@click.option("--out", type=FILE, help="the new directory; default: named by the content")
@click.option("--dry-run", is_flag=True, help="check everything, write nothing")
@click.option("--output", type=click.Choice(["-"]), help="print the files instead of writing them")
@click.option("--json", "json_", is_flag=True, help="print JSON")
@_typed
def generate(
    row: Path | None,
    index: int,
    deployment: Path | None,
    agg: str | None,
    prefill: str | None,
    decode_: str | None,
    naive: str | None,
    settings: tuple[str, ...],
    facts: Path | None,
    target: str,
    policy: str,
    out: Path | None,
    dry_run: bool,
    output: str | None,
    json_: bool,
    **direct: Any,
) -> None:
    """Write the files that deploy a chosen configuration."""
    known = decode(Facts, _mapping(facts), "facts") if facts else Facts()
    sources = [bool(row), bool(deployment), bool(agg or prefill or decode_), bool(naive)]
    if sum(sources) != 1:
        raise InvalidField(
            "row", "give one of --row, --deployment, --agg or --prefill with --decode, --naive", "missing"
        )
    if deployment:
        chosen = Deployment.from_dict(_mapping(deployment))
    else:
        assumed = _assumed(settings, direct)
        if row:
            values = read_row(row, index)
        elif naive:
            values = _naive(naive, assumed)
        else:
            values = _pairs(agg, "--agg") | _prefixed("(p)", prefill) | _prefixed("(d)", decode_)
        chosen = from_row(values, assumed, known)
    made = bundles.generate(chosen, target, policy, facts=known)
    where = None if dry_run or output else bundles.write(made, out or Path(made.name))
    if output and not json_:
        for name, data in made.files.items():
            click.echo(f"# ==> {name}\n{data.decode()}")
        return
    report: dict[str, Any] = {
        "directory": str(where) if where else None,
        "files": list(made.files),
        "changes": as_rows(made.changes),
    }
    report |= {"notes": list(made.notes), "deployment": made.deployment.to_dict()}
    if json_:
        contents = {"contents": {name: data.decode() for name, data in made.files.items()}} if output else {}
        click.echo(json.dumps(report | contents, indent=2))
        return
    click.echo(f"{where or 'checked'}: {', '.join(made.files)}")
    for change in made.changes:
        click.echo(f"  {change.field}: predicted {change.predicted} -> deployed {change.deployed} ({change.reason})")
    for note in made.notes:
        click.echo(f"  {note}")


def _prefixed(prefix: str, text: str | None) -> dict[str, Any]:
    return {f"{prefix}{key}": value for key, value in _pairs(text, "--prefill/--decode").items()}


def _naive(text: str, assumed: Mapping[str, Any]) -> dict[str, Any]:
    sizes = _pairs(text, "--naive")
    for name in ("weights_gib", "gpu_memory_gib"):
        value = sizes.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise InvalidField(f"naive.{name}", "must be a number above 0", "range")
    if not assumed.get("system") or not assumed.get("total_gpus"):
        raise InvalidField("total_gpus", "--naive needs --system and --total-gpus", "missing")
    per_node = system_facts(assumed["system"])["gpus_per_node"]
    weights, memory = (int(sizes[name] * 2**30) for name in ("weights_gib", "gpu_memory_gib"))
    return dict(naive_row(weights, memory, per_node, assumed["total_gpus"], bool(assumed.get("is_moe"))))


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--moe/--dense", "is_moe", default=None, help="whether the model has experts; decides their sizes")
@click.option("--engine-file", type=FILE, multiple=True, help="TRT-LLM engine file that the command names")
@click.option("--json", "json_", is_flag=True, help="print JSON")
@click.argument("what", nargs=-1, required=True, type=click.UNPROCESSED)
@_typed
def explain(is_moe: bool | None, engine_file: tuple[Path, ...], json_: bool, what: tuple[str, ...]) -> None:
    """What a deployment runs: `explain -- vllm serve ...`, or `explain manifest.yaml`."""
    if len(what) == 1 and what[0].endswith((".yaml", ".yml")):
        if not Path(what[0]).is_file():
            raise InvalidField("manifest", f"{what[0]} is no file", "missing")
        facts = explain_manifest(Path(what[0]).read_text(errors="replace"), is_moe=is_moe)
    else:
        engines = {path.name: path.read_text(errors="replace") for path in engine_file}
        facts = explain_command(what, engine_files=engines, is_moe=is_moe)
    click.echo(json.dumps(facts, indent=2) if json_ else yaml_text(facts), nl=json_)


@click.command()
@click.argument("directory", type=FILE)
@click.argument("result", type=FILE)
@click.option("--calibration", type=FILE, help="write the observation for calibration here")
@click.option("--json", "json_", is_flag=True, help="print JSON")
@_typed
def verify(directory: Path, result: Path, calibration: Path | None, json_: bool) -> None:
    """Put a benchmark's RESULT beside what was predicted for the files in DIRECTORY."""
    report = verify_result(directory, result)
    if calibration:
        calibration.write_text(json.dumps(report.calibration(), indent=1) + "\n")
    if json_:
        rows = [asdict(row) for row in report.compared]
        click.echo(json.dumps({"client": report.client, "compared": rows, "remarks": list(report.remarks)}, indent=2))
        return
    click.echo(f"{'metric':<22}{'predicted':>14}{'measured':>14}{'error':>10}")
    for row in report.compared:
        predicted = "-" if row.predicted is None else f"{row.predicted:.3f}"
        error = "-" if row.error is None else f"{row.error:+.1%}"
        click.echo(f"{row.metric:<22}{predicted:>14}{row.measured:>14.3f}{error:>10}")
    for remark in report.remarks:
        click.echo(f"  {remark}")


@click.command()
@click.argument("section", default="targets")
@_typed
def targets(section: str) -> None:
    """What can be generated: targets, releases, or the flags of vllm, sglang, trtllm."""
    for entry in describe(section):
        click.echo("  ".join(f"{value}" for value in entry.values() if value not in ("", "0", [])))


@click.group()
def deploy() -> None:
    """Files that deploy a chosen configuration."""


for _command in (generate, explain, verify, targets):
    deploy.add_command(_command)
