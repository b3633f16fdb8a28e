"""What can be queried: systems, backends, versions and their packs, of the embedded data and of roots of the user."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from perfcast_systems import ROOT
from perfcast_systems.pack import SUFFIX, Pack, PackError, PackTable

from perfcast_engine.answer import Mask, Tier
from perfcast_engine.errors import DataCorrupt, EngineError, InvalidField, PerfDataMissing, Reason, UnknownName
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import AGGRESSIVE, Database, Derived, Mode
from perfcast_engine.tables.specs import read_spec
from perfcast_engine.tables.table import Table

BACKENDS = ("trtllm", "sglang", "vllm")
SLOTS = ("current", "next", "previous")
MAX_DATABASES = 32  # kept with all that was derived from their tables; engines hold on to theirs


class PackSource:
    """The tables of a pack as the engine reads them: all rows, or the version's own. Thread-safe; tables are kept."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self._lock = threading.Lock()
        self._packed: dict[str, PackTable | None] = {}
        self._tables: dict[str, tuple[Table | None, Table | None]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the tables read so far."""
        tables = [table for pair in list(self._tables.values()) for table in pair if table is not None]
        return sum({id(array): array.nbytes for table in tables for array in table.arrays}.values())

    def table(self, name: str, shared: bool) -> Table | None:
        with self._lock:
            if name not in self._tables:
                try:
                    packed = self.pack.table(name)
                except PackError as error:
                    raise _corrupt(error) from error
                self._packed[name] = packed  # shared with packs that are coded against this one
                every = None if packed is None else _table(packed, np.ones(len(packed.ms), np.bool_))
                own = every if packed is None or packed.own.all() else _table(packed, packed.own)
                self._tables[name] = every, own
            return self._tables[name][0 if shared else 1]


@dataclass(frozen=True, slots=True)
class PackInfo:
    """One pack of the catalog. ``problem`` tells why it cannot be used; its slot, rows and tables are empty then."""

    system: str
    backend: str
    version: str
    slot: str
    path: Path
    bytes: int
    tables: int = 0
    rows: int = 0
    problem: EngineError | None = None


@dataclass(slots=True)
class Catalog:
    """Systems and measured tables of the embedded data, added to or overridden by ``roots`` (the first one wins).

    A root is a folder with ``gpus/<system>.yaml`` and/or ``<system>/<backend>-<version>.pack`` (also below ``packs/``).
    A damaged file spoils only what it holds: asking for that raises DataCorrupt.
    Thread-safe.
    """

    roots: Sequence[Path] = ()
    _specs: dict[str, SystemSpec | DataCorrupt] = field(init=False, default_factory=dict, repr=False)
    _packs: dict[tuple[str, str, str], PackInfo] = field(init=False, default_factory=dict, repr=False)
    _open: dict[Path, Pack] = field(init=False, default_factory=dict, repr=False)
    _databases: dict[object, Database] = field(init=False, default_factory=dict, repr=False)
    _alive: WeakValueDictionary[object, Database] = field(init=False, default_factory=WeakValueDictionary, repr=False)
    _sources: WeakValueDictionary[Path, PackSource] = field(init=False, default_factory=WeakValueDictionary, repr=False)
    _lock: threading.RLock = field(init=False, default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        for root in (*map(Path, self.roots), ROOT):
            if not root.is_dir():
                raise InvalidField("data", f"{root} is not a folder", why="path")
            for path in sorted(root.glob("gpus/*.yaml")):
                if path.stem not in self._specs:
                    self._specs[path.stem] = _spec(path)
            for path in sorted((*root.glob(f"*/*{SUFFIX}"), *root.glob(f"packs/*/*{SUFFIX}"))):
                info = self._inspect(path)
                self._packs.setdefault((info.system, info.backend, info.version), info)

    def systems(self) -> list[str]:
        """Names of all systems, those with measured tables first."""
        measured = {system for system, _, _ in self._packs}
        return sorted(self._specs, key=lambda name: (name not in measured, name))

    def system(self, name: str) -> SystemSpec:
        """UnknownName for an unknown system; DataCorrupt when its description is bad."""
        spec = self._specs.get(name)
        if spec is None:
            raise UnknownName("system", name, self._specs, Reason.UNKNOWN_SYSTEM)
        if isinstance(spec, DataCorrupt):
            raise spec.with_traceback(None)  # which would grow with every raise
        return spec

    def backends(self, system: str) -> list[str]:
        """Backends that have measured tables on the system; none for a system that is only described."""
        self.system(system)
        found = {info.backend for info in self._packs.values() if info.system == system}
        return [name for name in BACKENDS if name in found]

    def slots(self, system: str, backend: str) -> dict[str, str]:
        """Slot name -> version, of ``current``, ``next`` and ``previous`` as far as they exist."""
        self.system(system)
        if backend not in BACKENDS:
            raise UnknownName("backend", backend, BACKENDS, Reason.UNKNOWN_BACKEND)
        found: dict[str, str] = {}
        for info in self._of(system, backend):
            found.setdefault(info.slot, info.version)
        return {slot: found[slot] for slot in SLOTS if slot in found}

    def resolve_version(self, system: str, backend: str, request: str = "current", allow_unlisted: bool = False) -> str:
        """The literal version of a slot name or literal. A literal must be a listed one, unless ``allow_unlisted`` or
        the system has no measured tables of the backend."""
        slots = self.slots(system, backend)
        broken = [info.problem for info in self._of(system, backend) if info.problem is not None]
        if not request:
            raise InvalidField("version", "is empty; give a version or current", why="empty")
        if request in slots:
            return slots[request]
        listed = [info.version for info in self._of(system, backend)]
        if request in listed or (request not in SLOTS and (allow_unlisted or not listed)):
            return request
        if broken and request in SLOTS:
            raise broken[0].with_traceback(None)
        hint = "" if listed else f": {system} has no measured tables of {backend}; name a release, in mode SOL"
        raise UnknownName("version", request, [*listed, *slots], Reason.UNKNOWN_VERSION, hint)

    def database(
        self,
        system: str,
        backend: str,
        version: str = "current",
        mode: Mode | str = Mode.SILICON,
        policy: frozenset[Tier] = AGGRESSIVE,
        allow_unlisted: bool = False,
    ) -> Database:
        """The database of one (system, backend, version) in one mode; the same object for the same arguments
        as long as it is among the MAX_DATABASES asked for last.

        Without a pack only SOL can be opened (PerfDataMissing otherwise), except for a version that
        ``allow_unlisted`` admits on a backend with other packs: its tables are all absent.
        """
        spec = self.system(system)
        literal = self.resolve_version(system, backend, version, allow_unlisted)
        chosen, path = _mode(mode), self._path(system, backend, literal)
        if path is None and chosen is not Mode.SOL and not self._of(system, backend):
            raise PerfDataMissing(
                f"no measured tables for {backend} on {system}",
                system=system,
                backend=backend,
                version=literal,
                mode_that_works=Mode.SOL.value,
            )
        if path is None:
            return Database(spec, backend, literal, lambda name, shared: None, chosen, policy)
        key = (system, backend, literal, chosen, policy)
        with self._lock:
            found = self._databases.pop(key, None) or self._alive.get(key)
            if found is None:
                source = self._source(path).table
                found = self._alive[key] = Database(spec, backend, literal, source, chosen, policy)
            self._databases[key] = found  # the one asked for last is the last to go
            while len(self._databases) > MAX_DATABASES:
                del self._databases[next(iter(self._databases))]
            return found

    def let_go(self) -> None:
        """Forget all that nobody else holds on to: databases without engines, and their tables."""
        with self._lock:
            self._databases.clear()

    def derived(self) -> Iterator[Derived]:
        """What is kept for engines to come."""
        with self._lock:
            databases = list(self._databases.values())
        for database in databases:
            yield from database.derived()

    @property
    def nbytes(self) -> int:
        """Bytes of the tables that are open."""
        return sum(source.nbytes for source in list(self._sources.values()))

    def pack(self, system: str, backend: str, version: str = "current") -> Pack:
        """The pack itself, for provenance; PerfDataMissing when there is none."""
        literal = self.resolve_version(system, backend, version)
        path = self._path(system, backend, literal)
        if path is None:
            raise PerfDataMissing(f"no measured tables for {backend} {literal} on {system}", system=system)
        return self._opened(path)

    def ls(self) -> list[PackInfo]:
        """All packs, by system, backend and version."""
        return [self._packs[key] for key in sorted(self._packs)]

    def digest(self) -> str:
        """Content hash of all systems and packs: equal data have equal digests."""
        found = [f"{name} {self._specs[name]!r}" for name in sorted(self._specs)]
        for info in self.ls():
            digest = "" if info.problem is not None else self._opened(info.path).digest
            found.append(f"{info.system} {info.backend} {info.version} {digest}")
        return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]

    def verify(self, known: Container[Path] = ()) -> list[EngineError]:
        """Read and check everything but the packs ``known`` to be good: the problems found, none when all is well."""
        problems: list[EngineError] = [spec for spec in self._specs.values() if isinstance(spec, DataCorrupt)]
        for info in self.ls():
            try:
                if info.problem is not None:
                    problems.append(info.problem)
                elif info.path not in known:
                    self._opened(info.path).verify()
            except PackError as error:
                problems.append(_corrupt(error))
        return problems

    def _path(self, system: str, backend: str, literal: str) -> Path | None:
        """The pack of a literal version; None where there is none, DataCorrupt where it cannot be used."""
        info = self._packs.get((system, backend, literal))
        if info is not None and info.problem is not None:
            raise info.problem.with_traceback(None)
        return None if info is None else info.path

    def _of(self, system: str, backend: str) -> list[PackInfo]:
        return [info for info in self._packs.values() if (info.system, info.backend) == (system, backend)]

    def _inspect(self, path: Path) -> PackInfo:
        system, (backend, _, version) = path.parent.name, path.stem.partition("-")
        size = path.stat().st_size if path.exists() else 0  # a dangling link
        try:
            pack = self._opened(path)
        except PackError as error:
            return PackInfo(system, backend, version, "", path, size, problem=_corrupt(error))
        tables: Mapping[str, Mapping[str, int]] = pack.header["tables"]
        rows = sum(table["rows"] for table in tables.values())
        return PackInfo(system, backend, version, pack.identity.slot, path, size, len(tables), rows)

    def _opened(self, path: Path) -> Pack:
        with self._lock:
            if path not in self._open:
                self._open[path] = Pack(path, lambda base: self._opened(path.parents[1] / base))
            return self._open[path]

    def _source(self, path: Path) -> PackSource:
        with self._lock:
            source = self._sources.get(path)
            if source is None:
                source = self._sources[path] = PackSource(self._opened(path))
            return source


def _mode(mode: Mode | str) -> Mode:
    try:
        return Mode(mode)
    except ValueError:
        known = ", ".join(entry.value for entry in Mode)
        raise InvalidField("database_mode", f"unknown mode {mode!r}; one of {known}", why="mode") from None


def _spec(path: Path) -> SystemSpec | DataCorrupt:
    try:
        return read_spec(path)
    except DataCorrupt as error:
        return error
    except InvalidField as error:  # nothing that whoever asks for the system could mend
        return DataCorrupt(f"system description {path.name}: {error.message}", file=str(path))


def _corrupt(error: PackError) -> DataCorrupt:
    return DataCorrupt(str(error), pack=error.pack, **({"table": error.table} if error.table else {}))


def _table(packed: PackTable, rows: Mask) -> Table | None:
    """The given rows; None where there are none."""

    def taken(column: NDArray[Any]) -> NDArray[Any]:
        return column if rows.all() else column[rows]

    if not rows.any():
        return None
    return Table(
        name=packed.name,
        key=packed.key,
        columns=[taken(column) for column in packed.columns],
        vocab=packed.vocab,
        ms=taken(packed.ms),
        power=None if packed.power is None else taken(packed.power),
    )
