"""The source tree: which parquet file lies where (spec/01 section 2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

BACKENDS = ("trtllm", "sglang", "vllm")
LIBRARIES = ("nccl", "oneccl")
SUFFIX = "_perf.parquet"
SIDE_FILES = frozenset({"reuse.yaml", "collection_meta.yaml", "SHARED_LAYER_REUSE.txt", "INCOMPLETE.txt"})


class BuildError(Exception):
    """The source tree, or one table of it, cannot be used; the message names the file."""


@dataclass(frozen=True, slots=True)
class Directory:
    """One ``<family>/<backend>/<version>`` directory. ``tables`` maps stems (``gemm``) to files."""

    family: str
    tables: Mapping[str, Path]
    has_data: bool
    reuse: tuple[tuple[str, str], ...]  # (table stem, donor version) as declared


class DataTree:
    """An index of one AIConfigurator-layout systems root. Reads directory listings and YAML, no parquet."""

    def __init__(self, root: Path) -> None:
        self.root = _systems_root(root)
        data = self.root / "data"
        if not data.is_dir():
            raise BuildError(
                f"{root} has no data directory; expected <root>/data/<system>/<family>/<backend>/<version>"
            )
        self._systems = {
            path.name: _directories(path) for path in sorted(data.iterdir()) if path.is_dir() and path.name[0] != "."
        }

    @property
    def origin(self) -> str:
        """Name and version of the package that the tree was installed with, else the name of its folder."""
        package = self.root.parent
        installed = sorted(package.parent.glob(f"{package.name}-*.dist-info"))
        return installed[0].name.removesuffix(".dist-info").replace("-", " ") if installed else self.root.name

    def systems(self) -> list[str]:
        return list(self._systems)

    def versions(self, system: str, backend: str) -> list[str]:
        return sorted({version for name, version in self._systems.get(system, {}) if name == backend})

    def has_data(self, system: str, backend: str, version: str) -> bool:
        return any(directory.has_data for directory in self.directories(system, backend, version))

    def directories(self, system: str, backend: str, version: str) -> list[Directory]:
        return self._systems.get(system, {}).get((backend, version), [])

    def find(self, system: str, backend: str, version: str, stem: str) -> Path | None:
        for directory in self.directories(system, backend, version):
            if stem in directory.tables:
                return directory.tables[stem]
        return None

    def in_comm(self, system: str, backend: str, stem: str) -> bool:
        """Whether any version of the backend keeps the table in the communication family."""
        return any(
            directory.family == "comm" and stem in directory.tables
            for (name, _), directories in self._systems.get(system, {}).items()
            if name == backend
            for directory in directories
        )

    def relative(self, system: str, path: Path) -> str:
        return path.relative_to(self.root / "data" / system).as_posix()

    def yaml(self, name: str) -> dict[str, Any] | None:
        """A YAML file of the root as a mapping; None where the root has none."""
        path = self.root / name
        if not path.is_file():
            return None
        return _mapping(path)


def _systems_root(root: Path) -> Path:
    """``root`` itself, or the systems tree inside an installed aiconfigurator-core package (or its site-packages)."""
    for inner in (".", "systems", "aiconfigurator_core/systems"):
        if (root / inner / "data").is_dir():
            return (root / inner).resolve()
    return root


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BuildError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise BuildError(f"{path}: expected a mapping")
    return content


def _directories(system: Path) -> dict[tuple[str, str], list[Directory]]:
    found: dict[tuple[str, str], list[Directory]] = {}
    for family in _folders(system):
        if family.name in BACKENDS or family.name in LIBRARIES:
            continue
        for backend in _folders(family):
            for version in _folders(backend):
                found.setdefault((backend.name, version.name), []).append(_directory(family.name, version))
    return found


def _folders(path: Path) -> Iterable[Path]:
    return [entry for entry in sorted(path.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]


def _directory(family: str, path: Path) -> Directory:
    files = [entry for entry in sorted(path.iterdir()) if entry.is_file() and not entry.name.startswith(".")]
    names = {entry.name for entry in files}
    vetoed = "INCOMPLETE.txt" in names and "collection_meta.yaml" not in names
    return Directory(
        family=family,
        tables={} if vetoed else {f.name.removesuffix(SUFFIX): f for f in files if f.name.endswith(SUFFIX)},
        has_data=bool(names - SIDE_FILES),
        reuse=_reuse(path / "reuse.yaml") if "reuse.yaml" in names else (),
    )


def _reuse(path: Path) -> tuple[tuple[str, str], ...]:
    entries = _mapping(path).get("reuse") or []
    needed = ("table", "from_version", "reason", "approved_by")
    declared = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict) or any(not isinstance(entry.get(k), str) or not entry[k] for k in needed):
            raise BuildError(f"{path}: each reuse entry needs the texts {', '.join(needed)}")
        declared.append((entry["table"].removesuffix("_perf"), entry["from_version"]))
    return tuple(declared)
