"""From a source tree to packs: slots, sources, folded tables (spec/01 sections 4 to 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from perfcast_systems import ROOT
from perfcast_systems.build import sources as channels
from perfcast_systems.build.fold import Folded, fold, sites
from perfcast_systems.build.parts import Part
from perfcast_systems.build.rewrite import rewrite
from perfcast_systems.build.rows import Rows, read
from perfcast_systems.build.schema import TABLES
from perfcast_systems.build.sources import Sharing, Source
from perfcast_systems.build.tree import BACKENDS, LIBRARIES, BuildError, DataTree
from perfcast_systems.build.versions import newest_first, slots
from perfcast_systems.build.writer import PackWriter
from perfcast_systems.pack import Identity, Pack

UNREAD = ("dsv4_hca_attn_module", "glm5_dsa_attn_module", "wideep_context_mlp", "wideep_generation_mlp")
PRIMARY_ONLY = frozenset({"dsv4_megamoe_module"})
OWN = frozenset({channels.PRIMARY, channels.LIBRARY})


@dataclass(frozen=True, slots=True)
class Target:
    """What one pack is for."""

    system: str
    backend: str
    version: str
    slot: str


@dataclass(slots=True)
class Contents:
    """One pack before coding. ``sources`` and, per file stem, indices into it; ``tables`` index into it per row."""

    target: Target
    sources: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, list[int]] = field(default_factory=dict)
    tables: list[tuple[Folded, list[int]]] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


class Builder:
    """Folds tables of one tree. Keeps the rows of one system's files while it works on that system."""

    def __init__(self, tree: DataTree) -> None:
        self.tree = tree
        self.rules = tree.yaml("query_versions.yaml") or _ours("versions.yaml")
        manifest = tree.yaml("perf_data_reuse_manifest.yaml")
        try:
            self.sharing = Sharing.of_manifest(manifest) if manifest else Sharing.of_rules(_ours("sharing.yaml"))
            self.targets()
        except (AttributeError, KeyError, TypeError) as error:
            raise BuildError(
                f"{tree.root}: query_versions.yaml or perf_data_reuse_manifest.yaml is malformed: {error}"
            ) from error
        self._rows: dict[Path, Rows | BuildError] = {}
        self._system = ""

    def targets(self) -> list[Target]:
        """Every pack of the tree; ``current`` before the slots that are coded against it."""
        return [
            Target(system, backend, version, slot)
            for system in self.tree.systems()
            for backend in BACKENDS
            for slot, version in slots(self.tree, self.rules, system, backend).items()
        ]

    def named(self, names: Iterable[str]) -> list[Target]:
        """The packs that ``names`` (system, system/backend or system/backend/version) ask for, in the order above."""
        listed = self.targets()
        chosen = dict.fromkeys(names, False)
        found = []
        for target in listed:
            fits = [name for name in _labels(target) if name in chosen]
            chosen |= dict.fromkeys(fits, True)
            if fits:
                found.append(target)
        for name in [name for name, met in chosen.items() if not met]:
            parts = name.split("/")
            if len(parts) != 3 or not self.tree.directories(parts[0], parts[1], parts[2]):
                raise BuildError(f"{name}: not in {self.tree.root}")
            found.append(Target(parts[0], parts[1], parts[2], ""))
        return sorted(found, key=lambda target: (target.system, target.backend))

    def contents(self, target: Target) -> Contents:
        """All tables of one pack. A table whose rows cannot be used is left out and named in ``problems``."""
        if target.system != self._system:
            self._rows.clear()
            self._system = target.system
        out = Contents(target)
        parts: dict[str, list[tuple[int, Part]]] = {}
        for stem, source in self._stream(target):
            index = len(out.sources)
            try:
                rows = self._read(source.path).admitted(source.kernels)
                fed = [] if stem in UNREAD else rewrite(stem, rows, target.system)
            except BuildError as error:
                out.problems[stem] = str(error)
                continue
            out.sources.append(self._provenance(target.system, source, rows))
            out.files.setdefault(stem, []).append(index)
            for part in fed:
                parts.setdefault(part.table, []).append((index, part))
        for table, schema in TABLES.items():
            broken = [out.problems[stem] for stem in schema.files if stem in out.problems]
            rows_of = sites(parts.get("gemm", [])) if table == "gemm_sites" else parts.get(table, [])
            if rows_of and not broken:
                out.tables.append(_folded(table, rows_of))
        return out

    def _stream(self, target: Target) -> Iterator[tuple[str, Source]]:
        """(stem, source) in order of precedence within every table."""
        found = {stem: self._sources(target, stem) for stem in (*_stems(), *UNREAD)}
        unified = TABLES["moe_a2a"].files
        tiers = newest_first(list({source.version for stem in unified for source in found[stem]}))
        for version in tiers:
            for stem in unified:
                yield from ((stem, source) for source in found[stem] if source.version == version)
        for stem, files in found.items():
            if stem not in unified:
                yield from ((stem, source) for source in files)

    def _sources(self, target: Target, stem: str) -> list[Source]:
        if stem in LIBRARIES:
            return channels.library(self.tree, target.system, stem, self._library_version(target.system, stem))
        found = channels.resolve(self.tree, self.sharing, target.system, target.backend, target.version, stem)
        return [s for s in found if s.channel == channels.PRIMARY] if stem in PRIMARY_ONLY else found

    def _library_version(self, system: str, library: str) -> str | None:
        own = self.tree.yaml(f"{system}.yaml")
        if own is not None:
            version = (own.get("misc") or {}).get(f"{library}_version")
        elif (ROOT / "gpus" / f"{system}.yaml").is_file():
            version = (_ours(f"gpus/{system}.yaml").get("libraries") or {}).get(library)
        else:
            version = None
        return None if version is None else str(version)

    def _read(self, path: Path) -> Rows:
        if path not in self._rows:
            try:
                self._rows[path] = read(path, self.tree.relative(self._system, path))
            except BuildError as error:
                self._rows[path] = error
        rows = self._rows[path]
        if isinstance(rows, BuildError):
            raise rows
        return rows

    def _provenance(self, system: str, source: Source, rows: Rows) -> dict[str, Any]:
        kernel = rows.name("kernel_source", "default")
        return {
            "path": self.tree.relative(system, source.path),
            "version": source.version,
            "channel": source.channel,
            "kernels": None if source.kernels is None else sorted(source.kernels),
            "rows": rows.n,
            "kernel_sources": sorted({kernel.values[code] for code in set(kernel.codes.tolist())}),
            "own": source.channel in OWN,
            "low_fidelity": source.low_fidelity,
        }


def _stems() -> list[str]:
    return list(dict.fromkeys(stem for schema in TABLES.values() for stem in schema.files))


def _folded(table: str, parts: list[tuple[int, Part]]) -> tuple[Folded, list[int]]:
    """The table with row sources renumbered 0.. in order of precedence, and what the numbers stand for."""
    used = list(dict.fromkeys(index for index, _ in parts))
    return fold(table, [(used.index(index), part) for index, part in parts]), used


def _ours(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return content


def build_packs(
    root: Path,
    out: Path,
    only: Iterable[str] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Build the packs of a source tree into ``out`` and return their paths.

    root: an AIConfigurator-layout systems root, or an installed aiconfigurator-core package. only: keep systems,
    ``system/backend`` or ``system/backend/version`` of these names; a version so named is built even when it fills no
    slot. ``progress`` gets a line per pack.
    Raises BuildError when the tree is unusable or ``only`` names nothing in it; a table that cannot be read is left
    out of its pack and reported.
    """
    builder = Builder(DataTree(root))
    targets = builder.targets() if only is None else builder.named(only)
    if not targets:
        raise BuildError(f"{root}: no version to build")
    paths = []
    base: Pack | None = None
    for target in targets:
        if base is not None and (base.identity.system, base.identity.backend) != (target.system, target.backend):
            base = None
        contents = builder.contents(target)
        writer = PackWriter(Identity(target.system, target.backend, target.version, target.slot), base)
        for table, sources in contents.tables:
            writer.add(
                table.name,
                TABLES[table.name].key,
                table.columns,
                table.vocab,
                table.ms,
                table.power,
                table.source,
                sources,
                table.first,
            )
        path = writer.write(out, contents.sources, contents.files, contents.problems, builder.tree.origin)
        base = base or Pack(path)
        paths.append(path)
        rows = sum(table.n for table, _ in contents.tables)
        progress(
            f"{path.relative_to(out)}: {len(contents.tables)} tables, {rows:,} rows, {path.stat().st_size:,} bytes"
        )
        for stem, problem in contents.problems.items():
            progress(f"  left out {stem}: {problem}")
    return paths


def _labels(target: Target) -> tuple[str, str, str]:
    pair = f"{target.system}/{target.backend}"
    return target.system, pair, f"{pair}/{target.version}"
