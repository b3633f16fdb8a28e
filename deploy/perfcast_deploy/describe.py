"""What can be generated: targets, and the flags of each engine version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perfcast_engine.errors import Reason, UnknownName

from perfcast_deploy.catalog import catalog, data_file
from perfcast_deploy.flags import table


@dataclass(frozen=True)
class Target:
    """What is written for a target, and the engines that it runs."""

    writes: str
    backends: tuple[str, ...] = ("vllm", "sglang", "trtllm")


TARGETS = {
    "engine": Target("plain engine commands with a run script per node"),
    "dynamo": Target("DynamoGraphDeployment on Kubernetes"),
    "llm-d-helm": Target("values of the llm-d model service chart", ("vllm", "sglang")),
    "llm-d-kustomize": Target("Kustomize overlays on the llm-d guides", ("vllm",)),
    "fpm": Target("collection of whole-pass timings with Dynamo's vLLM worker", ("vllm",)),
}


def engines() -> list[dict[str, Any]]:
    """Per engine: the versions whose flags are known, and its version in each release of Dynamo."""
    releases = catalog()["releases"]
    return [
        {
            "name": name,
            "first_version": rows["first"],
            "newest_version": rows["newest"],
            "version_by_release": {release: str(shipped[name]) for release, shipped in releases.items()},
        }
        for name, rows in data_file("flags.yaml").items()
    ]


def describe(section: str) -> list[dict[str, Any]]:
    """Rows of ``targets``, ``releases``, or the flags of a backend."""
    if section == "targets":
        return [{"target": name, "writes": t.writes, "engines": list(t.backends)} for name, t in TARGETS.items()]
    if section == "releases":
        return [{"release": name, **engines} for name, engines in catalog()["releases"].items()]
    backends = data_file("flags.yaml")
    if section not in backends:
        raise UnknownName("section", section, ("targets", "releases", *backends), Reason.INVALID_FIELD)
    rows = (row for row in table(section) if row.only != "reference")
    return [
        {"setting": row.param, "flag": row.flag or row.path, "since": row.since, "choices": list(row.choices)}
        for row in rows
    ]
