"""Writing packs (the format is told in ``perfcast_systems.pack``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from perfcast_systems.coding import put_body
from perfcast_systems.pack import MAGIC, PREFIX, Identity, Pack, dictionary
from perfcast_systems.values import Ints, Reals


class PackWriter:
    """Collects tables and writes one pack. The same tables in the same order give the same bytes."""

    def __init__(self, identity: Identity, base: Pack | None = None) -> None:
        self.identity = identity
        self.base = base
        self._tables: dict[str, dict[str, Any]] = {}
        self._blobs: list[bytes] = []
        self._at = 0

    def add(
        self,
        name: str,
        key: Sequence[str],
        columns: Sequence[Ints],
        vocab: Mapping[str, Sequence[str]],
        ms: Reals,
        power: Reals | None,
        source: NDArray[np.uint8],
        sources: Sequence[int],
        first: Sequence[int],
    ) -> None:
        """One table; ``source`` per row indexes ``sources``, which index the pack's list of sources."""
        self._tables[name] = {
            "key": list(key),
            "vocab": {column: list(names) for column, names in vocab.items()},
            "rows": len(ms),
            "first": list(first),
            "sources": list(sources),
            "body": self._blob(name, "body", put_body(columns, ms, power)),
            "source": self._blob(name, "source", source.astype(np.uint8).tobytes()),
        }

    def write(
        self,
        folder: Path,
        sources: Sequence[Mapping[str, Any]],
        files: Mapping[str, Sequence[int]],
        problems: Mapping[str, str],
        origin: str,
    ) -> Path:
        """Write ``folder``/``identity.path`` in one step (no half-written pack is ever visible). ``origin`` says where
        the measurements come from."""
        header = {
            "identity": {field: getattr(self.identity, field) for field in Identity.__dataclass_fields__},
            "origin": origin,
            "base": None if self.base is None else {"path": self.base.identity.path, "digest": self.base.digest},
            "sources": list(sources),
            "files": dict(files),
            "problems": dict(problems),
            "tables": self._tables,
        }
        packed = _compress(json.dumps(header, separators=(",", ":")).encode(), None)
        path = folder / self.identity.path
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as out:
            out.write(PREFIX.pack(MAGIC, len(packed), hashlib.sha256(packed).digest()) + packed)
            out.writelines(self._blobs)
        partial.replace(path)
        return path

    def _blob(self, name: str, part: str, raw: bytes) -> dict[str, Any]:
        data = _compress(raw, None)
        how = "zstd"
        if self.base is not None and name in self.base.names:
            before = self.base.raw(name, part)
            if before == raw:
                return {"how": "same"}
            patch = _compress(raw, before) if before and raw else data
            if len(patch) < len(data):
                data, how = patch, "patch"
        blob = {
            "how": how,
            "at": self._at,
            "size": len(data),
            "raw": len(raw),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        self._blobs.append(data)
        self._at += len(data)
        return blob


def _compress(raw: bytes, against: bytes | None) -> bytes:
    window = max(len(raw) + len(against or b""), 1024).bit_length()
    parameters = zstandard.ZstdCompressionParameters.from_level(
        19, source_size=len(raw), window_log=min(max(window, 10), 27), write_content_size=True
    )
    base = None if against is None else dictionary(against)
    return zstandard.ZstdCompressor(compression_params=parameters, dict_data=base).compress(raw)
