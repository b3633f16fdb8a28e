"""What is asked of the reference generator: a search row, the task around it, and the user's overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from perfcast_engine.errors import InvalidField, Reason, UnknownName, UnsupportedCombination

from perfcast_deploy.catalog import catalog

TARGETS = ("dynamo-j2", "dynamo-python", "llm-d-helm", "llm-d-kustomize", "fpm")
ROLES = ("agg", "prefill", "decode")


def load(source: Mapping[str, Any] | Path | None) -> dict[str, Any]:
    """The dictionary front door: sections from a mapping or a YAML file; the two required keys must be there."""
    if isinstance(source, Path):
        if not source.is_file():
            raise UnknownName("configuration file", str(source), (), Reason.INVALID_FIELD)
        source = yaml.safe_load(source.read_text())
    if not isinstance(source, Mapping) or not source:
        raise InvalidField("configuration", "must be a mapping of sections such as ServiceConfig", "type")
    service = source.get("ServiceConfig") or {}
    for key in ("model_path", "served_model_name"):
        if not service.get(key):
            raise InvalidField(f"ServiceConfig.{key}", "is required", "missing")
    return dict(source)


@dataclass(frozen=True)
class Request:
    """The fields of a golden render case, read and checked."""

    case: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._refuse()

    def __getitem__(self, name: str) -> Any:
        return self.case[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.case.get(name, default)

    @cached_property
    def overrides(self) -> Mapping[str, Any]:
        return self.case.get("overrides") or {}

    def section(self, name: str) -> Mapping[str, Any]:
        """The overrides of a section, ``K8s`` of ``K8sConfig``."""
        return self.overrides.get(f"{name}Config") or {}

    def worker_overrides(self, role: str) -> Mapping[str, Any]:
        return (self.overrides.get("Workers") or {}).get(role) or {}

    @cached_property
    def backend(self) -> str:
        return str(self["backend"])

    @cached_property
    def roles(self) -> Mapping[str, Mapping[str, Any]]:
        return {role: self["roles"][role] for role in ROLES if role in self["roles"]}

    @cached_property
    def rule(self) -> str:
        return str(self.overrides.get("rule", self.get("rule", "production")))

    @cached_property
    def release(self) -> str:
        """The Dynamo release; the default is the newest."""
        given = self.overrides.get("generator_dynamo_version")
        return next(iter(catalog()["releases"])) if given is None else str(given).strip()

    @cached_property
    def version(self) -> str:
        """The engine version whose flags are written: the explicit one, else that of the release."""
        version = str(self.get("template_version") or catalog()["releases"][self.release][self.backend])
        return version[1:] if version[:1] == "v" and version[1:2].isdigit() else version

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Workers per role: whole replicas that fit the GPUs, explicit counts first."""
        size = {role: row["tp"] * row["pp"] * row["dp"] for role, row in self.roles.items()}
        counts = {role: max(row.get("workers") or 1, 1) for role, row in self.roles.items()}
        total = self.get("total_gpus")
        if total and "agg" in counts:
            counts["agg"] = total // size["agg"]
        elif total:
            replicas = total // sum(counts[role] * size[role] for role in counts)
            counts = {role: replicas * count for role, count in counts.items()}
        return {role: self.section("Worker").get(f"{role}_workers", count) for role, count in counts.items()}

    @cached_property
    def concurrency(self) -> int:
        """The reference's estimate: workers of the last role times batch, without dp and pp."""
        role = list(self.roles)[-1]
        batch = self.worker_overrides(role).get("max_batch_size", self.roles[role].get("bs")) or 0
        return int(self.section("Bench").get("estimated_concurrency") or self.counts[role] * batch)

    def _refuse(self) -> None:
        columns, system = self.get("extra_columns", {}), self["system"]
        if self.get("enable_epd") or any(name.startswith("(e)") and count for name, count in columns.items()):
            raise UnsupportedCombination("enable_epd", "rows with an encode pool have no deployment; search without it")
        if self.get("prefill_system", system) != self.get("decode_system", system):
            raise UnsupportedCombination("decode_system", "prefill and decode must run on one system")
        if self["backend"] == "sglang" and self.get("attention_backend") == "fla":
            raise UnsupportedCombination("attention_backend", "fla is no SGLang attention backend; use default")
        if self.rule not in ("production", "benchmark"):
            raise InvalidField("rule", f"{self.rule!r} is neither production nor benchmark", "unknown")
        if self["backend"] == "sglang" and self.section("Dyn").get("kvbm_config"):
            raise UnsupportedCombination("DynConfig.kvbm_config", "the block manager works with vllm and trtllm")
        known = {"backend": catalog()["backends"], "target": TARGETS}
        for name, names in known.items():
            if self[name] not in names:
                raise UnknownName(name, self[name], names, Reason.INVALID_FIELD)
        if not self.release:
            raise InvalidField("generator_dynamo_version", "is blank; leave it out for the default", "empty")
        if self.release not in catalog()["releases"]:
            raise UnknownName("release", self.release, catalog()["releases"], Reason.UNKNOWN_VERSION)
