"""The database an operator queries: one system, backend and version in one mode, with its measured tables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar, cast
from weakref import WeakValueDictionary

from perfcast_engine.answer import Tier
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.footprint import footprint
from perfcast_engine.tables.table import Table

T = TypeVar("T")
KEPT = 2048  # derived structures of one database


class Mode(StrEnum):
    """How a latency is found (spec/02 section 2)."""

    SILICON = "SILICON"
    HYBRID = "HYBRID"
    EMPIRICAL = "EMPIRICAL"
    SOL = "SOL"

    @property
    def shared(self) -> bool:
        """Whether rows of older versions and other backends are visible beside the version's own."""
        return self in (Mode.SILICON, Mode.HYBRID)


AGGRESSIVE = frozenset({Tier.XSHAPE, Tier.XQUANT, Tier.XPROFILE, Tier.XOP})
TRANSFER_PRESETS: dict[str, frozenset[Tier]] = {
    "off": frozenset(),
    "conservative": frozenset({Tier.XSHAPE}),
    "balanced": frozenset({Tier.XSHAPE, Tier.XQUANT}),
    "aggressive": AGGRESSIVE,
}


# The table of a name, with the rows that other versions lend or (False) its own alone; None when it has none.
Source = Callable[[str, bool], Table | None]


class Derived:
    """A structure derived from tables."""

    __slots__ = ("__weakref__", "_weighed", "value")

    def __init__(self, value: object) -> None:
        self.value, self._weighed = value, 0

    @property
    def nbytes(self) -> int:
        """Bytes: now of what counts its own, when last weighed of anything else."""
        return getattr(self.value, "nbytes", self._weighed)

    def weigh(self, seen: set[int]) -> None:
        """Count the bytes that are not ``seen`` yet."""
        self._weighed = footprint(self.value, seen, (Database, Table, SystemSpec))


@dataclass(slots=True, weakref_slot=True, eq=False)
class Database:
    """One (system, backend, version, mode). ``policy`` lists the tiers the empirical model may borrow from."""

    system: SystemSpec
    backend: str
    version: str
    source: Source
    mode: Mode = Mode.SILICON
    policy: frozenset[Tier] = AGGRESSIVE
    _kept: dict[Hashable, Derived] = field(default_factory=dict, repr=False)
    _home: Database | None = field(default=None, repr=False)
    _alive: WeakValueDictionary[Hashable, Derived] = field(init=False, default_factory=WeakValueDictionary, repr=False)
    _modes: dict[Mode, Database] = field(init=False, default_factory=dict, repr=False)

    def find(self, name: str) -> Table | None:
        """The table as this mode sees it, or None."""
        return self.kept(("table", name), lambda: self.source(name, self.mode.shared))

    def table(self, name: str) -> Table:
        """As ``find``; PerfDataMissing when there is no such table."""
        table = self.find(name)
        if table is None:
            raise PerfDataMissing(
                f"no {name} table for {self.backend} {self.version} on {self.system.name}",
                table=name,
                system=self.system.name,
                backend=self.backend,
                version=self.version,
                mode_that_works=Mode.SOL.value,
            )
        return table

    def kept(self, key: Hashable, build: Callable[[], T], for_all: bool = False) -> T:
        """``build()`` once per key; for structures derived from tables (site indexes, util grids). The oldest are
        forgotten, so that no stream of ever new shapes fills the memory. ``for_all``: whatever engine is next, it needs
        this, too."""
        found = self._kept.get(key)
        return cast(T, (self._keep(key, build, for_all) if found is None else found).value)

    def _keep(self, key: Hashable, build: Callable[[], object], for_all: bool) -> Derived:
        alive = (self._home or self)._alive
        found = alive.get(key)
        if found is None:
            found = alive[key] = Derived(build())
        for db in (self, self._home) if for_all and self._home is not None else (self,):
            if len(db._kept) >= KEPT:
                for old in list(db._kept)[: KEPT // 4]:
                    db._kept.pop(old, None)
            db._kept[key] = found
        return found

    def own(self) -> Database:
        """The same for one engine: what it derives is shared with others' while any of them is there, and goes with
        the last."""
        return Database(self.system, self.backend, self.version, self.source, self.mode, self.policy, _home=self)

    def in_mode(self, mode: Mode) -> Database:
        """This database answered in another mode; itself if it is in that one."""
        if self.mode is mode:
            return self
        if mode not in self._modes:
            if self._home is not None:
                other = self._home.in_mode(mode).own()
            else:
                other = Database(self.system, self.backend, self.version, self.source, mode, self.policy)
            self._modes.setdefault(mode, other)
        return self._modes[mode]

    def derived(self) -> Iterator[Derived]:
        """All that is kept here, in other modes too."""
        yield from list(self._kept.values())
        for other in list(self._modes.values()):
            yield from other.derived()

    def weigh(self) -> None:
        """Count the bytes of what is kept; takes about a microsecond for each object in it."""
        seen: set[int] = set()
        for each in self.derived():
            each.weigh(seen)
