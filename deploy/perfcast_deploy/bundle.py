"""Generate, write, read back and check deployments."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from perfcast_engine.errors import DataCorrupt, EngineError, InvalidField, Reason

from perfcast_deploy import bench, commands, dynamo, fpm, llmd
from perfcast_deploy.catalog import data_file, system_facts, transport_facts, version_key
from perfcast_deploy.deployment import OWN_ENV, Deployment, Facts, decode
from perfcast_deploy.plan import plan_of
from perfcast_deploy.policy import Change, apply
from perfcast_deploy.readback import READERS
from perfcast_deploy.validate import read_json, require_valid, well_formed

MANIFEST = "perfcast.json"
Predict = Callable[[Deployment], Mapping[str, Any]]


class DirectoryExists(EngineError):
    """Files are only ever written into a new directory."""

    reason = Reason.STATE_CONFLICT


@dataclass(frozen=True)
class Bundle:
    """Files by path, the deployment they say, and what was changed from the prediction on the way.

    ``predicted``: figures of the deployment as changed, where something was changed and they are known.
    """

    files: Mapping[str, bytes]
    target: str
    policy: str
    deployment: Deployment
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    predicted: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """A directory name that follows from the content: model, target, hash."""
        model = re.sub(r"[^a-z0-9]+", "-", self.deployment.model.lower()).strip("-")[:40]
        return f"{model}-{self.target}-{hashlib.sha256(self.files[MANIFEST]).hexdigest()[:12]}"


def generate(
    deployment: Deployment,
    target: str,
    policy: str = "as_predicted",
    *,
    facts: Facts | None = None,
    predict: Predict | None = None,
) -> Bundle:
    """Files that deploy ``deployment`` on ``target``; nothing is written.

    ``facts`` of the model and the memory are checked before and after the policy. ``predict`` gives the metrics of the
    deployment as changed by the policy. Raises typed errors that name the field and what would work.
    """
    facts = facts or Facts()
    facts.check(deployment)
    deployed, changes = apply(deployment, target, policy, facts.max_context_tokens)
    replace(facts, kv_capacity_tokens={}).check(deployed)  # what a policy adds may preempt, and is noted below
    texts = _write_target(deployed, target)
    require_valid(texts)
    notes = _notes(deployed, target, facts)
    predicted = None
    try:
        predicted = dict(predict(deployed)) if predict and changes else None
    except EngineError as error:
        notes.append(f"not predicted as deployed: {error.message}")
    manifest = {
        "schema": 1,
        "target": target,
        "policy": policy,
        "assumed": _assumed(deployed),
        "changes": [asdict(change) for change in changes],
        "predicted_as_deployed": predicted,
        "notes": notes,
        "files": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(texts.items())},
    }
    manifest["digest"] = _digest(manifest)
    files = {name: text.encode() for name, text in sorted(texts.items())}
    files[MANIFEST] = (json.dumps(manifest, indent=1, allow_nan=False) + "\n").encode()
    bundle = Bundle(files, target, policy, deployed, changes, tuple(notes), predicted)
    again = parse(files)
    if again != deployed:
        raise DataCorrupt(f"the files read back to another deployment: {_difference(deployed, again)}", target=target)
    return bundle


def _digest(manifest: Mapping[str, Any]) -> str:
    """Hash of the manifest without its own digest."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _difference(wanted: Deployment, got: Deployment) -> str:
    pairs = ((item.name, getattr(wanted, item.name), getattr(got, item.name)) for item in fields(wanted))
    return "; ".join(f"{name}: {old!r} became {new!r}" for name, old, new in pairs if old != new)


def _write_target(d: Deployment, target: str) -> dict[str, str]:
    plan = plan_of(d, dynamo=target in ("dynamo", "fpm"))
    if target == "engine":
        return commands.files(d, plan) | {"bench.sh": bench.script(d, commands.service_url(d, plan))}
    if target == "fpm":
        return fpm.files(plan)
    if target == "dynamo":
        url = f"http://{plan.name}-frontend:{plan.port}"
        return dynamo.files(plan) | {"k8s_bench.yaml": bench.job(d, plan, url)}
    llmd.refuse(plan, target)
    written = llmd.helm(plan) if target == "llm-d-helm" else llmd.kustomize(plan)
    return written | {"k8s_bench.yaml": bench.job(d, plan, d.cluster.gateway or llmd.GATEWAYS[d.mode])}


def _assumed(d: Deployment) -> dict[str, Any]:
    """What no engine flag can say."""
    return {
        "system": d.system,
        "version": d.version,
        "is_moe": d.is_moe,
        "workload": asdict(d.workload),
        "quant": dict(d.quant),
        "predicted": asdict(d.predicted),
        "cluster": {"gpus_per_node": d.cluster.gpus_per_node, "transport": d.cluster.transport},
    }


def _notes(d: Deployment, target: str, facts: Facts) -> list[str]:
    notes = [f"{d.gpus} GPUs: " + ", ".join(f"{r.workers} x {r.name} of {r.gpus}" for r in d.roles)]
    newest = data_file("flags.yaml")[d.backend]["newest"]
    if version_key(d.version) > version_key(newest):
        notes.append(f"{d.backend} {d.version} is newer than the flag table, which was checked up to {newest}")
    if d.predicted.profile:
        notes.append(f"predicted with profile {d.predicted.profile}")
    if target == "llm-d-kustomize":
        notes.append("build from the root of a checkout of llm-d, whose guides hold the base")
    if target.startswith("llm-d"):
        gateway = d.cluster.gateway or llmd.GATEWAYS[d.mode]
        notes.append(f"the benchmark job goes to {gateway}; set cluster.gateway if your gateway has another address")
    for role in d.roles:
        held = facts.held(d, role)
        if held is not None and role.max_batch > held:
            notes.append(f"{role.name}: the KV cache holds {held} sequences of {d.length(role)} tokens")
    return notes


def parse(files: Mapping[str, bytes]) -> Deployment:
    """The deployment that files say. Engine settings come from the files; the manifest adds what no flag can say."""
    manifest = manifest_of(files)
    with well_formed(MANIFEST):
        return _read_back(manifest, files)


def _read_back(manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> Deployment:
    texts = {name: _decoded(name, files[name]) for name in manifest["files"] if name in files}
    target = manifest["target"]
    if target not in READERS:
        raise DataCorrupt(f"{MANIFEST} names the unknown target {target!r}", file=MANIFEST)
    found, assumed = READERS[target](texts), dict(manifest["assumed"])
    cluster = assumed.pop("cluster") | {name: value for name, value in found.cluster.items() if value}
    facts = system_facts(assumed["system"])["env"] | transport_facts(cluster["transport"])["env"]
    own = {name: value for name, value in found.env.items() if facts.get(name) != value and name not in OWN_ENV}
    top = {name: value for name, value in found.top.items() if value is not None}
    trusted = any(params.get("trust_remote_code") for params in found.roles.values())
    roles = [{"name": name, **fields} for name, fields in found.role_fields(assumed["is_moe"]).items()]
    data = assumed | top | {"backend": found.backend, "roles": roles, "nextn": found.nextn}
    return decode(Deployment, data | {"cluster": cluster | {"env": own}, "trust_remote_code": trusted}, "deployment")


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataCorrupt(f"{name} is no text", file=name) from error


def manifest_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    """perfcast.json of a bundle, checked for its parts."""
    if MANIFEST not in files:
        raise DataCorrupt(f"{MANIFEST} is missing; this is no directory of perfcast generate", file=MANIFEST)
    manifest = read_json(MANIFEST, _decoded(MANIFEST, files[MANIFEST]))
    if not isinstance(manifest, dict) or not {"target", "assumed", "files"} <= set(manifest):
        raise DataCorrupt(f"{MANIFEST} lacks target, assumed or files", file=MANIFEST)
    return manifest


def validate(files: Mapping[str, bytes]) -> Deployment:
    """Check a bundle: hashes, schemas, legal flags, GPU arithmetic. Returns what it deploys."""
    manifest = manifest_of(files)
    if manifest.get("digest") != _digest(manifest):
        raise DataCorrupt(f"{MANIFEST} was changed after it was generated", file=MANIFEST)
    with well_formed(MANIFEST):
        for name, digest in manifest["files"].items():
            if name not in files:
                raise DataCorrupt(f"{name} is missing", file=name)
            if hashlib.sha256(files[name]).hexdigest() != digest:
                raise DataCorrupt(f"{name} was changed after it was generated", file=name)
        require_valid({name: _decoded(name, files[name]) for name in manifest["files"]})
        deployment = _read_back(manifest, files)
        plan_of(deployment, dynamo=manifest["target"] in ("dynamo", "fpm"))
    return deployment


def read(directory: Path) -> dict[str, bytes]:
    """All files of a written bundle."""
    if not directory.is_dir():
        raise InvalidField("directory", f"{directory} is no directory", "missing")
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


def write(files: Mapping[str, bytes], directory: Path) -> Path:
    """Write all files into a new directory, or none. Raises DirectoryExists, InvalidField for a path out of it."""
    for name in files:
        if not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise InvalidField("files", f"{name!r:.80} lies outside of its directory", "path")
    if directory.exists():
        raise DirectoryExists(f"{directory} exists; files are written into a new directory", path=str(directory))
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        for name, data in files.items():
            path = staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o755 if name.endswith(".sh") else 0o644)
        staging.chmod(0o755)
        os.rename(staging, directory)
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return directory
