"""The database an operator queries: one system, backend and version in one mode, with its measured tables."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar, cast

from perfcast_engine.answer import Tier
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.table import Table

T = TypeVar("T")
KEPT = 2048  # derived structures of one database
_ABSENT = object()


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


@dataclass(slots=True)
class Database:
    """One (system, backend, version, mode). ``policy`` lists the tiers the empirical model may borrow from."""

    system: SystemSpec
    backend: str
    version: str
    source: Source
    mode: Mode = Mode.SILICON
    policy: frozenset[Tier] = AGGRESSIVE
    _kept: dict[Hashable, object] = field(default_factory=dict, repr=False)

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

    def kept(self, key: Hashable, build: Callable[[], T]) -> T:
        """``build()`` once per key; for structures derived from tables (site indexes, util grids). The oldest are
        forgotten, so that no stream of ever new shapes fills the memory."""
        found = self._kept.get(key, _ABSENT)
        if found is not _ABSENT:
            return cast(T, found)
        built = build()
        if len(self._kept) >= KEPT:
            for old in list(self._kept)[: KEPT // 4]:
                self._kept.pop(old, None)
        self._kept[key] = built
        return built

    def in_mode(self, mode: Mode) -> Database:
        """This database answered in another mode; itself if it is in that one."""
        if self.mode is mode:
            return self
        return self.kept(
            ("mode", mode),
            lambda: Database(self.system, self.backend, self.version, self.source, mode, self.policy),
        )
