"""Facts kept as data (data/catalog.yaml): releases, images, node labels, transports, model needs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version
from perfcast_engine.errors import Reason, UnknownName, UnsupportedCombination


@cache
def data_file(name: str) -> Mapping[str, Any]:
    """One YAML file of this package's data folder, read once and never changed."""
    text = resources.files("perfcast_deploy").joinpath("data", name).read_text()
    return MappingProxyType(yaml.safe_load(text))


def catalog() -> Mapping[str, Any]:
    """The facts of data/catalog.yaml."""
    return data_file("catalog.yaml")


def version_key(version: str) -> Version:
    """A sortable key of a release text (PEP 440)."""
    try:
        return Version(version)
    except InvalidVersion:
        raise UnknownName("version", version, (), Reason.UNKNOWN_VERSION) from None


def _entry(section: str, name: str, reason: Reason = Reason.INVALID_FIELD) -> Mapping[str, Any]:
    known: Mapping[str, Mapping[str, Any]] = catalog()[section]
    if name not in known:
        raise UnknownName(section.removesuffix("s"), name, known, reason)
    return known[name]


def backend_facts(backend: str) -> Mapping[str, Any]:
    """What is written for an engine: module, images, flag of the model."""
    return _entry("backends", backend)


def transport_facts(transport: str) -> Mapping[str, Any]:
    """Environment and pod needs of a KV transport between workers."""
    return _entry("transports", transport)


def system_facts(system: str, *, reference: bool = False) -> dict[str, Any]:
    """Node label, tolerations, environment and shared memory of one GPU system.

    ``reference`` gives the labels the reference writes, and nothing at all for systems it has no profile of.
    """
    entry = _entry("systems", system, Reason.UNKNOWN_SYSTEM)
    hardware = entry.get("hardware", "unknown")
    facts = dict(catalog()["hardware"][hardware])
    if hardware == "unknown" and not reference:
        facts["selector"] = {"nvidia.com/gpu.product": "{product}"}
    product = entry.get("reference", entry["product"]) if reference else entry["product"]
    facts["selector"] = {key: value.format(product=product) for key, value in facts["selector"].items()}
    return facts | {
        "gpus_per_node": entry["gpus_per_node"],
        "grace": hardware == "grace",
        "known": hardware != "unknown",
    }


def system_of(selector: Mapping[str, str]) -> str | None:
    """The system whose nodes a selector asks for."""
    known = ((name, system_facts(name)["selector"].items()) for name in catalog()["systems"])
    return next((name for name, wanted in known if wanted <= selector.items()), None)


def model_flags(backend: str, model: str, role: str, grace: bool) -> dict[str, Any]:
    """Flags that a checkpoint needs on an engine, by its path."""
    flags: dict[str, Any] = {}
    for entry in catalog()["models"]:
        if model.startswith(tuple(entry["match"])):
            keys = [backend] + ([f"{backend}_grace"] if grace else [])
            keys += [f"{backend}_grace_decode"] if grace and role != "prefill" else []
            for key in keys:
                flags |= entry.get(key, {})
    return flags


def release_of(backend: str, version: str) -> tuple[str, str]:
    """(Dynamo release, its engine version) nearest to an engine version: equal, else the next newer one."""
    by_age = sorted(catalog()["releases"].items(), key=lambda item: version_key(item[1][backend]))
    for _, engines in by_age:
        if version_key(engines[backend]) >= version_key(version):
            newest = [r for r, e in by_age if e[backend] == engines[backend]]
            return max(newest, key=version_key), engines[backend]
    release, engines = by_age[-1]
    raise UnsupportedCombination(
        "version",
        f"no Dynamo release ships {backend} {version}; the newest, {release}, has {engines[backend]}. "
        "Give cluster.image to deploy another build",
    )


def runtime_version(backend: str, image: str) -> str | None:
    """The engine version inside an image this package names itself; None for other images."""
    name, _, tag = image.rpartition(":")
    facts = backend_facts(backend)
    if name == facts["runtime"]:
        found = catalog()["releases"].get(tag, {}).get(backend)
        return str(found) if found else None
    plain, _, pattern = facts["image"].rpartition(":")
    if name == plain:
        return tag.removeprefix("v") if pattern.startswith("v") else tag
    return None
