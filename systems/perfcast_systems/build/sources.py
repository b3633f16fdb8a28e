"""Which files a table of one (system, backend, version) is folded from, in order of precedence (spec/01 section 5)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfcast_systems.build.tree import LIBRARIES, SUFFIX, DataTree
from perfcast_systems.build.versions import newest_first, parsed

SHARED_TIERS = ("shared", "shared_fallback")
PRIMARY, DECLARED, FALLBACK, CROSS, LIBRARY = "primary", "declared_reuse", "fallback", "cross_backend", "library"


@dataclass(frozen=True, slots=True)
class Source:
    """One file. ``kernels`` None admits every row, else only rows of these kernel sources."""

    path: Path
    version: str
    channel: str
    kernels: frozenset[str] | None = None

    @property
    def low_fidelity(self) -> bool:
        return self.kernels is not None and "default" in self.kernels


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which kernels of which table one backend may take from another. rows: (stem, kernel, frameworks)."""

    rows: tuple[tuple[str, str, frozenset[str]], ...]

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any]) -> Sharing:
        """From ``groups: [{op_file, kernel_source, tier, frameworks}]``, as a source tree brings it."""
        return cls(
            tuple(
                (group["op_file"].removesuffix(SUFFIX), group["kernel_source"], frozenset(group["frameworks"]))
                for group in manifest.get("groups") or []
                if group.get("tier") in SHARED_TIERS and len(group["frameworks"]) > 1
            )
        )

    @classmethod
    def of_rules(cls, rules: Mapping[str, Mapping[str, list[str]]]) -> Sharing:
        """From our own ``sharing.yaml``."""
        return cls(
            tuple(
                (stem, kernel, frozenset(frameworks))
                for stem, kernels in rules.items()
                for kernel, frameworks in kernels.items()
            )
        )

    def allowed(self, stem: str, backend: str) -> dict[str, frozenset[str]]:
        """Other framework -> kernels of theirs that ``backend`` may read."""
        found: dict[str, set[str]] = {}
        for table, kernel, frameworks in self.rows:
            if table == stem and backend in frameworks:
                for framework in frameworks - {backend}:
                    found.setdefault(framework, set()).add(kernel)
        return {framework: frozenset(found[framework]) for framework in sorted(found)}


def resolve(tree: DataTree, sharing: Sharing, system: str, backend: str, version: str, stem: str) -> list[Source]:
    """Existing sources, first wins. The version's own file, if any, is the first one and of channel ``primary``."""
    if stem in LIBRARIES:
        return []
    comm = tree.in_comm(system, backend, stem)
    donors = [] if comm else list(_declared(tree, system, backend, version, stem))
    own = [(backend, version, PRIMARY, None)]
    declared = [(backend, donor, DECLARED, None) for donor in donors]
    filled = [
        (backend, older, FALLBACK, None) for older in _older(tree, system, backend, version) if older not in donors
    ]
    crossed = [] if comm else list(_crossed(tree, sharing, system, backend, stem))
    return [
        Source(path, donor, channel, kernels)
        for framework, donor, channel, kernels in (*own, *declared, *filled, *crossed)
        if (path := tree.find(system, framework, donor, stem)) is not None
    ]


def library(tree: DataTree, system: str, stem: str, version: str | None) -> list[Source]:
    """The one file of a collective library's curves, of the version that the system description names."""
    path = tree.find(system, stem, version, stem) if version else None
    return [] if path is None or version is None else [Source(path, version, LIBRARY)]


def _declared(tree: DataTree, system: str, backend: str, version: str, stem: str) -> Iterable[str]:
    entries = [entry for directory in tree.directories(system, backend, version) for entry in directory.reuse]
    return dict.fromkeys(donor for table, donor in entries if table == stem and donor != version)


def _older(tree: DataTree, system: str, backend: str, version: str) -> list[str]:
    own = parsed(version)
    if own is None:
        return []
    return [
        other
        for other in newest_first(tree.versions(system, backend))
        if (value := parsed(other)) is not None and value < own
    ]


def _crossed(
    tree: DataTree, sharing: Sharing, system: str, backend: str, stem: str
) -> Iterator[tuple[str, str, str, frozenset[str]]]:
    for framework, kernels in sharing.allowed(stem, backend).items():
        for version in newest_first(tree.versions(system, framework)):
            yield framework, version, CROSS, kernels
