"""One file that holds a surface: an npz of plain float64 arrays and a header in JSON, read without trust in it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from perfcast_surface.arrays import F64
from perfcast_surface.parts import SurfaceError, content_hash, put_together, take_apart
from perfcast_surface.surface import StepSurface

HEADER = "header"
LARGEST = 256 << 20  # bytes of all arrays
MOST_MEMBERS = 4096
NPY_HEADER = 10_000


def save(path: str | Path, surface: StepSurface, about: Mapping[str, Any]) -> None:
    """Write ``surface`` and what fits into JSON ``about`` it, whole or not at all."""
    header, arrays = take_apart(surface)
    text = json.dumps({"surface": header, "hash": content_hash(header, arrays), "about": about})
    target = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent or ".")
    try:
        with os.fdopen(handle, "wb") as out:
            members: dict[str, Any] = {key: np.ascontiguousarray(array, "<f8") for key, array in arrays.items()}
            members[HEADER] = np.frombuffer(text.encode(), np.uint8)
            np.savez_compressed(out, **members)
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def load(path: str | Path) -> tuple[StepSurface, dict[str, Any]]:
    """The surface in a file, and what was said about it. SurfaceError where it is none or damaged; OSError where it
    cannot be read."""
    try:
        with zipfile.ZipFile(path) as file:
            members = file.infolist()
            if len(members) > MOST_MEMBERS or sum(member.file_size for member in members) > LARGEST:
                raise SurfaceError("not a surface: the file claims to hold too much")
            arrays = {member.filename.removesuffix(".npy"): _array(file.read(member)) for member in members}
        text = json.loads(arrays.pop(HEADER).astype(np.uint8).tobytes())
        header, about, told = text["surface"], text["about"], text["hash"]
        if content_hash(header, arrays) != told:
            raise SurfaceError("the surface in the file is damaged: its contents do not match their hash")
        if not isinstance(about, dict):
            raise SurfaceError("not a surface: nothing is said about it")
        return put_together(header, arrays), about
    except (OSError, SurfaceError):
        raise
    except _MALFORMED as error:
        raise SurfaceError(f"not a surface: {type(error).__name__} {error}") from error


# what the standard library and numpy raise on files that are cut off or made up
_MALFORMED = (
    zipfile.BadZipFile, zlib.error, EOFError, LookupError, ValueError, TypeError, AttributeError, NotImplementedError,
    RuntimeError, RecursionError, OverflowError, MemoryError,
)  # fmt: skip


def _array(data: bytes) -> F64:
    """An array in npy format, of float64 or bytes, that has exactly as many elements as it says."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise SurfaceError(f"not a surface: npy version {version}")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=NPY_HEADER)
    if fortran or dtype not in (np.dtype("<f8"), np.dtype(np.uint8)):
        raise SurfaceError(f"not a surface: an array of {dtype}")
    array: F64 = np.frombuffer(data, dtype, offset=file.tell()).reshape(shape).astype(np.float64)
    return array
