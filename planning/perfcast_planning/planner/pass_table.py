"""Measured whole forward passes: one cell (model and configuration) of a user's table (spec/04 sections 10.1, 10.2).

Columns come from ``perfcast_systems.passes``, which reads and checks the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from perfcast_engine.answer import F64
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.interp.sites import Curves

SPELLINGS = {("attention_backend", "flashinfer"): "auto"}  # what the engine chooses by itself
FLAT = 0.05  # median deviation between batches of equal totals
FLAT_SAMPLES = 3


@dataclass(frozen=True, eq=False)
class PassTable:
    """The measured passes of one cell; a phase without rows is None."""

    prefill: Curves | None
    decode: Curves | None

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[Any]], identity: Mapping[str, Any], repair: bool = True) -> PassTable:
        """The cell that ``identity`` (columns of the table) describes; PerfDataMissing unless there is exactly one.

        ``repair``: replace decode passes that were measured on a faked cache by the trend of real ones.
        """
        wanted = tuple(_spelled(name, identity[name]) for name in identity)
        cells = list(zip(*([_spelled(name, value) for value in columns[name]] for name in identity), strict=True))
        mine = np.array([cell == wanted for cell in cells], np.bool_)
        ids = {cell for cell, own in zip(columns["cell_id"], mine, strict=True) if own}
        if len(ids) != 1:
            raise PerfDataMissing(
                f"the table of whole passes has {len(ids)} cells of this configuration, not one",
                key=", ".join(wanted),
                nearest="; ".join(sorted({", ".join(cell) for cell in cells})[:3]),
            )
        phase = np.asarray(columns["workload_kind"])[mine]
        regime = columns.get("kv_seed_regime")
        numbers = ("batch_size", "total_prefill_tokens", "total_kv_read_tokens", "latency_ms")
        batch, tokens, kv, ms = (np.asarray(columns[name], np.float64)[mine] for name in numbers)
        prefill, decode = phase == "prefill", phase == "decode"
        if repair and regime is not None:
            ms[decode] = _repaired(batch[decode], kv[decode], ms[decode], np.asarray(regime, object)[mine][decode])
        return cls(
            Curves.of([batch[prefill], kv[prefill]], tokens[prefill], ms[prefill]) if prefill.any() else None,
            Curves.of([batch[decode]], kv[decode], ms[decode]) if decode.any() else None,
        )

    @cached_property
    def flat_over_batch(self) -> bool:
        """Whether a prefill pass costs the same however many requests share its totals."""
        curves = self.prefill
        if curves is None:
            return False
        batches = np.unique(curves.sites[:, 0])
        deviation: list[F64] = []
        for low, high in pairwise(batches):
            for site in np.flatnonzero(curves.sites[:, 0] == high).tolist():
                below = curves.find(low, curves.sites[site, 1])
                if below is None:
                    continue
                x, ms = curves.x[site], curves.ms[site]
                shared = (x >= curves.first[below]) & (x <= curves.last[below])
                expected = np.interp(x[shared], curves.x[below], curves.ms[below])
                deviation.append(np.abs(ms[shared] / expected - 1))
        every = np.concatenate(deviation) if deviation else np.zeros(0)
        return len(every) >= FLAT_SAMPLES and float(np.median(every)) <= FLAT


def _spelled(name: str, value: Any) -> str:
    return SPELLINGS.get((name, str(value)), str(value))


def _repaired(batch: F64, kv: F64, ms: F64, regime: Any) -> F64:
    """Latencies with each faked pass on the line through the two nearest real ones of less KV at its batch."""
    out = ms.copy()
    for fake in np.flatnonzero(regime == "fake_fallback"):
        real = np.flatnonzero((regime == "real_kv") & (batch == batch[fake]) & (kv < kv[fake]))
        if len(real) < 2:
            continue
        far, near = real[np.argsort(kv[real])[-2:]]
        line = ms[far] + (ms[near] - ms[far]) / (kv[near] - kv[far]) * (kv[fake] - kv[far])
        if line > 0:
            out[fake] = line
    return out
