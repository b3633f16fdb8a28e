"""GetSurface: compiled surfaces of engines, kept and sent in pieces."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from perfcast.v1 import prediction_pb2
from perfcast_engine.compiled import DEFAULT_PASS_TOKENS, MAX_PASS_TOKENS, compile_surface
from perfcast_surface.parts import Arrays, Header, content_hash, take_apart
from perfcast_surface.surface import StepSurface

from perfcast_server.cache import Lru, SingleFlight
from perfcast_server.engines import Engines, Ready
from perfcast_server.errors import invalid
from perfcast_server.metrics import Metrics
from perfcast_server.rpc import ServerStream
from perfcast_server.settings import Settings

CHUNK_BYTES = 1_000_000
Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A surface as it is sent. header: without the engine's stamp, which may know more names than one."""

    header: prediction_pb2.SurfaceHeader
    chunks: tuple[prediction_pb2.GetSurfaceResponse, ...]

    @property
    def nbytes(self) -> int:
        return sum(len(chunk.chunk.data) for chunk in self.chunks) + 4096


class Surfaces:
    """Compiles the surface of an engine once at a time, off the event loop, and keeps it while there is room."""

    def __init__(self, engines: Engines, settings: Settings, metrics: Metrics) -> None:
        self._engines = engines
        self._seconds = metrics.surface_seconds
        self._kept: Lru[Key, Compiled] = Lru(settings.max_surface_bytes, size=lambda _, compiled: compiled.nbytes)
        self._flights: SingleFlight[Key, Compiled] = SingleFlight(finish=True)
        metrics.surface_bytes.set_function(lambda: self._kept.held)

    def method(self) -> ServerStream:
        return ServerStream("GetSurface", prediction_pb2.GetSurfaceRequest, self.get_surface)

    async def get_surface(
        self, request: prediction_pb2.GetSurfaceRequest
    ) -> AsyncGenerator[prediction_pb2.GetSurfaceResponse]:
        size = _pass_tokens(request.max_pass_tokens)
        ready = await self._engines.of(request)
        key = ready.stamp.handle, size
        compiled = self._kept.get(key) or await self._flights.do(key, lambda: self._compile(key, ready))
        known = compiled.header.surface_hash
        if request.known_surface_hash == known:
            header = prediction_pb2.SurfaceHeader(engine=ready.stamp, surface_hash=known, unchanged=True)
            yield prediction_pb2.GetSurfaceResponse(header=header)
            return
        header = prediction_pb2.SurfaceHeader(engine=ready.stamp)
        header.MergeFrom(compiled.header)
        yield prediction_pb2.GetSurfaceResponse(header=header)
        for chunk in compiled.chunks:
            yield chunk

    async def _compile(self, key: Key, ready: Ready) -> Compiled:
        def work() -> Compiled:
            return compiled(compile_surface(ready.engine.steps, key[1]))

        began = perf_counter()
        done = await self._engines.lanes.loads.run(work)
        self._seconds.observe(perf_counter() - began)
        self._kept.put(key, done)
        return done


def _pass_tokens(asked: int) -> int:
    """Rounded up to a power of two, so that few sizes are kept."""
    if asked < 0:
        raise invalid("max_pass_tokens", "must not be negative")
    return min(1 << (asked - 1).bit_length(), MAX_PASS_TOKENS) if asked else DEFAULT_PASS_TOKENS


def compiled(surface: StepSurface) -> Compiled:
    header, arrays = take_apart(surface)
    data = b"".join(np.ascontiguousarray(array, "<f8").tobytes() for array in arrays.values())
    pieces = (
        prediction_pb2.ArraysChunk(offset_bytes=start, data=data[start : start + CHUNK_BYTES])
        for start in range(0, len(data), CHUNK_BYTES)
    )
    chunks = tuple(prediction_pb2.GetSurfaceResponse(chunk=piece) for piece in pieces)
    return Compiled(_header_message(surface, header, arrays), chunks)


def _header_message(surface: StepSurface, header: Header, arrays: Arrays) -> prediction_pb2.SurfaceHeader:
    domain = surface.domain
    phases: dict[str, Any] = {
        name: prediction_pb2.SurfacePhase(terms=[prediction_pb2.SurfaceTerm(**term) for term in terms])
        for name, terms in header["phases"].items()
    }
    return prediction_pb2.SurfaceHeader(
        surface_hash=content_hash(header, arrays),
        domain=prediction_pb2.SurfaceDomain(
            max_pass_tokens=domain.pass_tokens,
            max_prefill_batch_per_rank=domain.prefill_batch,
            max_prompt_tokens=domain.prompt_tokens,
            max_decode_batch_per_rank=domain.decode_batch,
            max_kv_tokens=domain.kv_tokens,
        ),
        format=header["format"],
        rules=prediction_pb2.SurfaceRules(**header["rules"]),
        planes=[prediction_pb2.SurfacePlane(**plane) for plane in header["planes"]],
        arrays=[prediction_pb2.SurfaceArray(name=name, shape=array.shape) for name, array in arrays.items()],
        **phases,
    )
