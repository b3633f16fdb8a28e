"""Profile files of planners and mockers, from direct predictions (spec/07 section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfcast_client import calls, planner
from perfcast_client.adapters.asking import Adapter, C
from perfcast_client.exports import files, grids
from perfcast_client.exports.files import Export
from perfcast_client.planner_types import Bootstrap
from perfcast_client.record import EngineLike
from perfcast_client.results import F64, Predictions
from perfcast_client.steps import DecodeStep, Prefill
from perfcast_client.turns import Steps

FORMATS = ("npz", "json")


def export_profile(
    client: C, engine: EngineLike, directory: str | Path, *, formats: tuple[str, ...] = FORMATS, **sweep: Any
) -> Any:
    """The profiler's directory with its raw data, NPZ and JSON; awaitable with an ``AsyncClient``.

    ``sweep``: fields of ``planner.bootstrap``. Raises ValueError rather than write a value that is not finite.
    """
    if not formats or not set(formats) <= set(FORMATS):
        raise ValueError(f"formats must be some of {', '.join(FORMATS)}, not {formats!r}")

    def asked(_: Any) -> Steps[Export]:
        swept: Bootstrap = yield planner.bootstrap(engine, **sweep)
        prefill, decode = profiler_columns(swept)
        grids.require_sound([prefill["prefill_isl"]], list(prefill.values()))
        grids.require_sound([], list(decode.values()))
        at = grids.wholes(prefill["prefill_isl"][0], prefill["prefill_isl"][-1])
        told: Predictions = yield calls.predict_many(engine, Prefill(1, at), False, False, False)
        off = grids.worst(grids.linear(prefill["prefill_isl"], prefill["prefill_ttft"], at), told.latency_ms)
        about = files.meta(swept.engine, told.provenance, {"prefill": off})
        written = _write_profiler(Path(directory), formats, prefill, decode, swept.max_kv_tokens_total, about)
        ranges = {
            "prefill_isl_tokens": _range(prefill["prefill_isl"]),
            "context_tokens": _range(decode["y_context_length"]),
            "kv_usage": _range(decode["x_kv_usage"]),
            "points": {"prefill": len(prefill["prefill_isl"]), "decode": len(decode["z_itl"])},
            "max_kv_tokens_total": swept.max_kv_tokens_total,
        }
        return Export(written, swept.engine, ranges, {"prefill": off}, told.provenance.silicon_share)

    adapter = Adapter(client)
    return adapter._run(asked(adapter))


def profiler_columns(swept: Bootstrap) -> tuple[dict[str, F64], dict[str, F64]]:
    """The columns of prefill and decode raw data: prefill of one rank, decode summed over ranks."""
    prefills = [point.ranks[0] for point in swept.points if point.point_type == "prefill"]
    decodes = [point.ranks for point in swept.points if point.point_type == "decode"]
    if not prefills or not decodes:
        raise ValueError("a profile needs both phases; give each a granularity above 0")
    isl = np.array([float(rank.prefill_tokens) for rank in prefills])
    ttft = np.array([rank.wall_time_s for rank in prefills]) * 1000
    requests = np.array([float(sum(rank.decode_requests for rank in ranks)) for ranks in decodes])
    kv = np.array([float(sum(rank.decode_kv_tokens for rank in ranks)) for ranks in decodes])
    itl = np.array([ranks[0].wall_time_s for ranks in decodes]) * 1000
    gpus = swept.gpus_total
    prefill = {
        "prefill_isl": isl,
        "prefill_ttft": ttft,
        "prefill_thpt_per_gpu": isl / ttft * 1000 / gpus * swept.attention_dp,
    }
    decode = {
        "x_kv_usage": kv / swept.max_kv_tokens_total,
        "y_context_length": kv / requests,
        "z_itl": itl,
        "z_thpt_per_gpu": requests / itl * 1000 / gpus,
    }
    return prefill, decode


def _write_profiler(
    directory: Path,
    formats: tuple[str, ...],
    prefill: Mapping[str, F64],
    decode: Mapping[str, F64],
    max_kv_tokens: int,
    about: Mapping[str, Any],
) -> tuple[str, ...]:
    whole = prefill["prefill_isl"].astype(np.int64)
    written = []
    if "npz" in formats:
        parts: dict[str, dict[str, Any]] = {
            "prefill": {**prefill, "prefill_isl": whole, **about},
            "decode": {**decode, "max_kv_tokens": np.array([max_kv_tokens]), **about},
        }
        for phase, arrays in parts.items():
            written.append(files.write_npz(directory / f"selected_{phase}_interpolation" / "raw_data.npz", arrays))
    if "json" in formats:
        lists: dict[str, dict[str, Any]] = {
            "prefill": {name: column.tolist() for name, column in {**prefill, "prefill_isl": whole}.items()},
            "decode": {name: column.tolist() for name, column in decode.items()} | {"max_kv_tokens": max_kv_tokens},
        }
        for phase, values in lists.items():
            written.append(files.write_json(directory / f"{phase}_raw_data.json", {**values, **about}))
    return tuple(written)


class Grid(NamedTuple):
    """Decode times over KV tokens (A,) and context lengths (B,), of batches between 1 and ``max_batch``."""

    kv: F64
    context: F64
    max_batch: int

    def batches(self, kv: F64, context: F64) -> tuple[F64, F64, F64]:
        """The two whole batches around kv / context, and the weight of the upper one."""
        batch = np.clip(kv / context, 1.0, float(self.max_batch))
        low = np.floor(batch)
        return low, np.minimum(low + 1, self.max_batch), batch - low


def export_mocker(
    client: C,
    engine: EngineLike,
    path: str | Path,
    *,
    resolution: int = 100,
    max_pass_tokens: int = 16384,
    max_context_tokens: int = 16384,
    max_batch: int = 512,
    max_kv_tokens: int = 0,
) -> Any:
    """The mocker's look-up file; awaitable with an ``AsyncClient``. KV tokens and batches are per attention-DP rank.

    max_kv_tokens: 0 is as many as the memory holds. Cells of less than one request hold the time of one, cells of more
    than ``max_batch`` that of so many. Raises ValueError rather than write a value that is not finite and positive.
    """
    if not 2 <= resolution <= 1000:
        raise ValueError(f"resolution must lie in [2, 1000], not {resolution}")
    grids.require_least(
        max_pass_tokens=(max_pass_tokens, 2),
        max_context_tokens=(max_context_tokens, 3),
        max_batch=(max_batch, 1),
        max_kv_tokens=(max_kv_tokens, 0),
    )

    def asked(_: Any) -> Steps[Export]:
        limit = max_kv_tokens
        if not limit:
            sizes = planner.bootstrap(engine, prefill_granularity=0, decode_granularity=0)
            swept: Bootstrap = yield sizes
            limit = swept.max_kv_tokens_total // swept.attention_dp
        isl = grids.counts(1, max_pass_tokens, resolution)
        checked = grids.wholes(isl[0], isl[-1])
        told: Predictions = yield calls.predict_many(
            engine, Prefill(1, np.concatenate([isl, checked])), False, False, False
        )
        ttft = told.latency_ms[: len(isl)]
        off = {"prefill": grids.worst(grids.linear(isl, ttft, checked), told.latency_ms[len(isl) :])}
        grid = Grid(
            np.concatenate([[0.0], grids.counts(1, limit, resolution - 1)]),
            grids.counts(2, max_context_tokens, resolution),
            max_batch,
        )
        kv, context = (axis.ravel() for axis in np.meshgrid(grid.kv, grid.context, indexing="ij"))
        itl = (yield from _decode_ms(engine, grid, kv, context)).reshape(len(grid.kv), len(grid.context))
        off["decode"] = yield from _decode_error(engine, grid, itl)
        grids.require_sound([isl, grid.kv, grid.context], [ttft, itl.ravel()])
        arrays = {
            "prefill_isl": isl,
            "prefill_ttft_ms": ttft,
            "decode_active_kv_tokens": grid.kv,
            "decode_context_length": grid.context,
            "decode_itl": itl,
            **files.meta(told.engine, told.provenance, off),
        }
        ranges = {
            "prefill_isl_tokens": _range(isl),
            "active_kv_tokens": _range(grid.kv),
            "context_tokens": _range(grid.context),
            "points": {"prefill": len(isl), "decode": itl.size},
            "max_batch_per_rank": max_batch,
        }
        written = (files.write_npz(Path(path), arrays),)
        return Export(written, told.engine, ranges, off, told.provenance.silicon_share)

    adapter = Adapter(client)
    return adapter._run(asked(adapter))


def _decode_ms(engine: EngineLike, grid: Grid, kv: F64, context: F64) -> Steps[F64]:
    *both, weight = grid.batches(kv, context)
    told: list[Predictions] = []
    for batch in both:
        told.append((yield calls.predict_many(engine, DecodeStep(batch, context - 1, 1), False, False, False)))
    return told[0].latency_ms * (1 - weight) + told[1].latency_ms * weight


def _decode_error(engine: EngineLike, grid: Grid, itl: F64) -> Steps[float]:
    """The worst bilinear error for whole batches whose KV tokens the table holds."""
    batch, context = grids.across(np.array([1.0, grid.max_batch]), grid.context)
    held = batch * context <= grid.kv[-1]
    if not held.any():
        return 0.0
    batch, context = batch[held], context[held]
    told: Predictions = yield calls.predict_many(engine, DecodeStep(batch, context - 1, 1), False, False, False)
    return grids.worst(grids.bilinear(grid.kv, grid.context, itl, batch * context, context), told.latency_ms)


def _range(axis: F64) -> list[float]:
    return [float(axis.min()), float(axis.max())]
