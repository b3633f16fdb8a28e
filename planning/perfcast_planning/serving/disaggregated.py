"""Prefill and decode on engines of their own, their rates matched by worker counts (spec/06 section 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from perfcast_engine.answer import F64
from perfcast_engine.errors import InvalidField

from perfcast_planning.serving.rows import Rows
from perfcast_planning.serving.worker import Worker
from perfcast_planning.serving.workload import KvTransfer, Workload

WORKER_COLUMNS = ("batch", "requests_per_s", "gpus", "memory_gib")


@dataclass(frozen=True, slots=True)
class Matching:
    """How rates and latencies of separate pools combine: the reference's fitted factors (spec/06 section 9)."""

    prefill_degradation: float = 0.9
    decode_degradation: float = 0.92
    encoder_degradation: float = 0.9
    ttft_factor: float = 1.8  # waiting in front of a prefill worker

    def __post_init__(self) -> None:
        for name in ("prefill_degradation", "decode_degradation", "encoder_degradation", "ttft_factor"):
            if not 0 < getattr(self, name) < np.inf:
                raise InvalidField(f"matching.{name}", "must be positive and finite", why="range")


USUAL_MATCHING = Matching()


def sent_bytes(worker: Worker, load: Workload) -> float:
    """KV cache bytes of one request that each GPU of a prefill worker hands over: the prompt without its prefix."""
    lengths = np.array([worker.prompt_tokens(load), load.prefix], np.float64)
    whole, cached = worker.memory.kv.bytes(lengths)
    return float(whole - cached)


def with_transfer(prefill: Rows, worker: Worker, load: Workload, link: KvTransfer, factor: float) -> Rows:
    """Prefill rows whose TTFT waits by ``factor`` and hands its KV cache over ``link``."""
    sent = sent_bytes(worker, load)
    ttft = prefill["ttft_ms"] * factor
    rate = prefill["requests_per_s"]
    if not link.off:
        ttft = ttft + link.ms(sent)
        rate = np.minimum(rate, link.requests_per_s(sent) * worker.parallel.attn_dp)
    return prefill.with_(ttft_ms=ttft, requests_per_s=rate)


def paired(
    prefill: Rows, decode: Rows, prefill_workers: Any, decode_workers: Any, load: Workload, matching: Matching
) -> Rows:
    """Replicas of ``prefill_workers`` x prefill and ``decode_workers`` x decode rows, all (N,) and already aligned."""
    n_p, n_d = (np.atleast_1d(np.asarray(v, np.float64)) for v in (prefill_workers, decode_workers))
    rest = max(load.osl - 1, 0)
    per_s = matched_rate(prefill["requests_per_s"], decode["requests_per_s"], n_p, n_d, matching)
    gpus = prefill["gpus"] * n_p + decode["gpus"] * n_d
    ttft, tpot = prefill["ttft_ms"], decode["tpot_ms"]
    latency = ttft + tpot * rest
    energy = prefill["power_w"] * ttft + decode["power_w"] * tpot * rest
    return Rows(
        {
            "concurrency": decode["concurrency"] * n_d,
            "ttft_ms": ttft,
            "tpot_ms": tpot,
            "request_latency_ms": latency,
            "encode_ms": prefill["encode_ms"],
            "requests_per_s": per_s,
            "requests_per_s_per_gpu": per_s / gpus,
            "tokens_per_s": per_s * load.osl,
            "tokens_per_s_per_gpu": per_s * load.osl / gpus,
            "tokens_per_s_per_user": decode["tokens_per_s_per_user"],
            "gpus": gpus,
            "power_w": np.divide(energy, latency, out=np.zeros(len(latency)), where=latency > 0),
            "prefill_workers": n_p,
            "decode_workers": n_d,
            **prefill.prefixed("prefill_", WORKER_COLUMNS),
            **decode.prefixed("decode_", WORKER_COLUMNS),
            **{name: column for name, column in decode.columns.items() if name.startswith("afd_")},
            "decode_requests_per_s": np.where(np.isfinite(decode["requests_per_s"]), decode["requests_per_s"], 0.0),
        }
    )


def matched_rate(prefill: F64, decode: F64, prefill_workers: F64, decode_workers: F64, matching: Matching) -> F64:
    """Requests per second that both pools sustain."""
    return np.minimum(
        prefill * prefill_workers * matching.prefill_degradation,
        decode * decode_workers * matching.decode_degradation,
    )
