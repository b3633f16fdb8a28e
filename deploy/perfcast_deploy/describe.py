"""What can be generated: targets, and the flags of each engine version."""

from __future__ import annotations

from typing import Any

from perfcast_engine.errors import Reason, UnknownName

from perfcast_deploy.catalog import catalog, data_file
from perfcast_deploy.flags import table

TARGETS = {
    "engine": "plain engine commands with a run script per node",
    "dynamo": "DynamoGraphDeployment on Kubernetes",
    "llm-d-helm": "values of the llm-d model service chart",
    "llm-d-kustomize": "Kustomize overlays on the llm-d guides",
    "fpm": "collection of whole-pass timings with Dynamo's vLLM worker",
}


def describe(section: str) -> list[dict[str, Any]]:
    """Rows of ``targets``, ``releases``, or the flags of a backend."""
    if section == "targets":
        return [{"target": name, "writes": text} for name, text in TARGETS.items()]
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
