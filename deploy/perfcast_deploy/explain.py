"""From what runs to what would be predicted: an engine's command line or a Dynamo manifest to engine facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfcast_deploy.flags import rows_of
from perfcast_deploy.readback import Found, read_dynamo
from perfcast_deploy.validate import well_formed

KNOWN = ("max_batch", "max_tokens", "max_seq_len", "kv_fraction", "kv_dtype", "chunked_prefill", "prefix_caching")


def explain_command(
    words: Sequence[str], *, engine_files: dict[str, str] | None = None, is_moe: bool | None = None
) -> dict[str, Any]:
    """Facts of one engine started by ``words``; unknown flags are refused by name."""
    found = Found()
    with well_formed("command"):
        found.add("agg", words, engine_files or {})
        return _facts(found, is_moe)


def explain_manifest(text: str, *, is_moe: bool | None = None) -> dict[str, Any]:
    """Facts of the workers of a DynamoGraphDeployment (with the ConfigMaps beside it)."""
    with well_formed("manifest"):
        return _facts(read_dynamo({"manifest.yaml": text}), is_moe)


def _facts(found: Found, is_moe: bool | None) -> dict[str, Any]:
    """``roles`` hold fields of ``Role``; ``unset`` names what is left to the engine's own default."""
    roles = found.role_fields(is_moe)
    version = found.top.get("version")
    if version:  # refuses versions that the table does not know
        rows_of(found.backend, version)
    for fields in roles.values():
        fields["gpus_per_worker"] = fields["tp"] * fields["pp"] * fields["dp"]
        fields["unset"] = [name for name in KNOWN if name not in fields]
    return {
        "backend": found.backend,
        "version": version,
        "system": found.top.get("system"),
        "model": found.top.get("model"),
        "served_name": found.top.get("served_name"),
        "mode": "agg" if "agg" in roles else "disagg",
        "nextn": found.nextn,
        "router": bool(found.top.get("router")),
        "gpus": sum(fields["gpus_per_worker"] * fields["workers"] for fields in roles.values()),
        "roles": roles,
        "is_moe": is_moe,
    }
