"""Packs: all measured tables of one (system, backend, version) in one file.

    magic 8 bytes | header length u32 | SHA-256 of the header 32 bytes | header (zstd JSON) | blobs

The header names the identity (system, backend, version, slot), the provenance of every source file, and per table its
key, names, rows and two blobs: ``body`` (keys, latencies, power) and ``source`` (per row, which file it came from).
Every blob has a SHA-256 and is decoded on first use. A blob may be coded against the same table of a ``base`` pack: as
a reference when it is the same, else compressed with the base's blob as dictionary.

Latencies are float64, bit by bit those of the source. Everything is little endian.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import zstandard
from numpy.typing import NDArray

from perfcast_systems.coding import Damaged, Stored, take_body
from perfcast_systems.values import Reals

MAGIC = b"PFCPACK2"
SUFFIX = ".pack"
PREFIX = struct.Struct("<8sI32s")
_MAX_HEADER = 1 << 24
_HEADER_KEYS = frozenset({"identity", "origin", "base", "sources", "files", "problems", "tables"})
SHADOWED = 0x80  # bit of a row source: another lane was met earlier at the same coordinates
MASK = np.uint8(0x7F)


class PackError(Exception):
    """A pack is truncated, damaged, or not what it should be. ``pack`` and ``table`` say where."""

    def __init__(self, message: str, pack: str, table: str = "") -> None:
        super().__init__(f"{pack}{f' [{table}]' if table else ''}: {message}")
        self.pack = pack
        self.table = table


@dataclass(frozen=True, slots=True)
class Identity:
    """What a pack holds. ``slot`` is current, next, previous, or empty for a version outside the slots."""

    system: str
    backend: str
    version: str
    slot: str

    @property
    def path(self) -> str:
        """File name relative to a folder of packs."""
        return f"{self.system}/{self.backend}-{self.version}{SUFFIX}"


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class PackTable:
    """One decoded table. columns: N rows in narrow unsigned types, sorted lexicographically in ``key`` order; ms
    (N,) float64; power W (N,) or None; source (N,) index into ``sources``; shadowed (N,) tells rows at whose
    coordinates another lane was met earlier (attention tables; all False elsewhere); first is, per source, the row
    with the key that the source begins with (-1 without rows)."""

    name: str
    key: tuple[str, ...]
    columns: tuple[Stored, ...]
    vocab: Mapping[str, tuple[str, ...]]
    ms: Reals
    power: Reals | None
    source: NDArray[np.uint8]
    shadowed: NDArray[np.bool_]
    sources: tuple[Mapping[str, Any], ...]
    first: tuple[int, ...]
    base: PackTable | None  # whose columns and latencies these are

    @property
    def own(self) -> NDArray[np.bool_]:
        """Rows of the version's own files."""
        own = np.array([bool(source["own"]) for source in self.sources], np.bool_)
        return own[self.source] if len(own) else np.zeros(len(self.ms), np.bool_)


class Pack:
    """An open pack. Opening reads and checks the header only; tables are read, checked and decoded when asked for.

    A pack may be coded against another one, its ``base``: ``find_base`` opens that by its path relative to the folder
    of packs (by default in the same folder). Thread-safe.
    """

    def __init__(self, path: Path, find_base: Callable[[str], Pack] | None = None) -> None:
        self.path = path
        self.name = f"{path.parent.name}/{path.name}"
        self._lock = threading.Lock()
        self._tables: WeakValueDictionary[str, PackTable] = WeakValueDictionary()
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise PackError(f"cannot be read: {error.strerror}", self.name) from error
        self.digest, self.header, self._start = _read_header(self._file.fileno(), self.name)
        self.identity = Identity(**self.header["identity"])
        if self.identity.path != self.name:  # before its base is looked for, which might be itself
            raise PackError(f"holds {self.identity.path}", self.name)
        wanted = self.header["base"]
        find_base = find_base or (lambda name: Pack(path.parents[1] / name))
        self.base = None if wanted is None else find_base(wanted["path"])
        if self.base is not None and self.base.digest != wanted["digest"]:
            raise PackError(f"is coded against another build of {wanted['path']}", self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """Tables it holds, tables without rows included."""
        return tuple(self.header["tables"])

    def sources(self, stem: str) -> list[Mapping[str, Any]]:
        """Provenance of the files of one stem (``gemm``), in order of precedence."""
        return [self.header["sources"][index] for index in self.header["files"].get(stem, [])]

    def table(self, name: str) -> PackTable | None:
        """The decoded table, the same for all who hold it; None if the pack has none of that name. PackError when it is
        damaged."""
        entry = self.header["tables"].get(name)
        if entry is None:
            return None
        with self._lock:
            table = self._tables.get(name)
            if table is None:
                table = self._tables[name] = self._decode(name, entry)
            return table

    def verify(self) -> None:
        """Read and check every blob; PackError names the first table that fails."""
        for name, entry in self.header["tables"].items():
            self._decode(name, entry)

    def raw(self, name: str, part: str) -> bytes:
        """The uncompressed bytes of one blob (``body`` or ``source``) of a table."""
        blob = self.header["tables"][name][part]
        if blob["how"] == "same":
            return self._base_raw(name, part)
        data = os.pread(self._file.fileno(), blob["size"], self._start + blob["at"])
        if len(data) != blob["size"]:
            raise PackError("the file ends early", self.name, name)
        if hashlib.sha256(data).hexdigest() != blob["sha256"]:
            raise PackError("checksum mismatch", self.name, name)
        base = dictionary(self._base_raw(name, part)) if blob["how"] == "patch" else None
        try:
            raw = zstandard.ZstdDecompressor(dict_data=base).decompress(data, max_output_size=blob["raw"])
        except zstandard.ZstdError as error:
            raise PackError(f"cannot be decompressed: {error}", self.name, name) from error
        if len(raw) != blob["raw"]:
            raise PackError("unexpected length", self.name, name)
        return raw

    def _base_raw(self, name: str, part: str) -> bytes:
        assert self.base is not None
        return self.base.raw(name, part)

    def _decode(self, name: str, entry: Mapping[str, Any]) -> PackTable:
        base = None
        if entry["body"]["how"] == "same" and self.base is not None:
            base = self.base.table(name)
        columns, ms, power = self._body(name, entry) if base is None else (base.columns, base.ms, base.power)
        code = np.frombuffer(self.raw(name, "source"), np.uint8)
        sources = tuple(self.header["sources"][index] for index in entry["sources"])
        if len(code) != len(ms) or (len(code) and int((code & MASK).max()) >= len(sources)):
            raise PackError("row sources are inconsistent", self.name, name)
        return PackTable(
            name=name,
            key=tuple(entry["key"]),
            columns=columns,
            vocab={column: tuple(names) for column, names in entry["vocab"].items()},
            ms=ms,
            power=power,
            source=code & MASK,
            shadowed=code >= SHADOWED,
            sources=sources,
            first=tuple(entry["first"]),
            base=base,
        )

    def _body(self, name: str, entry: Mapping[str, Any]) -> tuple[tuple[Stored, ...], Reals, Reals | None]:
        try:
            return take_body(self.raw(name, "body"), len(entry["key"]), entry["rows"])
        except Damaged as error:
            raise PackError(str(error), self.name, name) from error


def _read_header(file: int, name: str) -> tuple[str, dict[str, Any], int]:
    """(digest, header, where the blobs start), checked."""
    prefix = os.pread(file, PREFIX.size, 0)
    if len(prefix) < PREFIX.size or not prefix.startswith(MAGIC[:-1]):
        raise PackError("is not a pack", name)
    magic, size, digest = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise PackError(f"has format {magic[-1:]!r}; this program reads {MAGIC[-1:]!r}", name)
    data = os.pread(file, min(size, _MAX_HEADER), PREFIX.size)
    if len(data) != size:
        raise PackError("the header ends early", name)
    if hashlib.sha256(data).digest() != digest:
        raise PackError("checksum mismatch of the header", name)
    try:
        header = json.loads(zstandard.decompress(data, max_output_size=_MAX_HEADER))
        Identity(**header["identity"])
        missing = _HEADER_KEYS - set(header)
    except (zstandard.ZstdError, ValueError, TypeError, KeyError) as error:
        raise PackError(f"the header is malformed: {error}", name) from error
    if missing:
        raise PackError(f"the header lacks {', '.join(sorted(missing))}", name)
    return digest.hex(), header, PREFIX.size + size


def dictionary(raw: bytes) -> zstandard.ZstdCompressionDict:
    """The bytes of a base's blob, for coding another one against them."""
    return zstandard.ZstdCompressionDict(raw, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
