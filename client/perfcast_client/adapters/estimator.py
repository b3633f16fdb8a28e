"""The in-process estimator of planners and profilers, answered by a server (spec/07 section 8.2)."""

from __future__ import annotations

from typing import Any

from perfcast_client import calls, planner
from perfcast_client.adapters.asking import Adapter, C, as_value_error, asking
from perfcast_client.adapters.records import session_modes
from perfcast_client.config import EngineConfig
from perfcast_client.deployments import Estimate
from perfcast_client.errors import OutOfMemory, PerfcastError
from perfcast_client.serving import Static, Workload
from perfcast_client.turns import Steps

PHASES = {"full": "both", "prefill": "prefill", "decode": "decode"}
SIZES = {
    "tp_size": "tp",
    "pp_size": "pp",
    "attention_dp_size": "attn_dp",
    "moe_tp_size": "moe_tp",
    "moe_ep_size": "moe_ep",
    "cp_size": "cp",
    "nextn": "nextn",
}
PREFILL_OSL = 5


class PerfEstimator(Adapter[C]):
    """Latency and KV capacity of one model on one system, for any parallel mapping. Latencies are ms, batches per
    attention-DP rank. ValueError for what is malformed or unknown, PerfDataNotAvailable where nothing was measured."""

    def __init__(self, client: C, hf_id: str, system: str, backend: str, *, profile: str = "corrected") -> None:
        super().__init__(client)
        self.hf_id = hf_id
        self._common = {"model": hf_id, "system": system, "backend": backend, "profile": profile}

    def estimating(
        self, /, isl: int, osl: int, batch_size: int, mode: str = "full", **parallel: Any
    ) -> Steps[dict[str, Any]]:
        if mode not in PHASES:
            raise ValueError(f"mode must be one of {', '.join(PHASES)}, not {mode!r}")
        deployment = Static(engine=self._engine(parallel), batch=batch_size, phases=PHASES[mode])
        call = calls.estimate(deployment, Workload(isl=isl, osl=osl), None, 0.0, False, True)
        try:
            told = yield call
        except PerfcastError as error:
            raise as_value_error(error) from None
        return _row(told, self.hf_id, isl, osl, batch_size)

    estimate_perf = asking(estimating)

    @asking
    def estimate_prefill_perf(self, /, isl: int, **parallel: Any) -> Steps[dict[str, Any]]:
        """One prompt at a time on a prefill worker."""
        return (yield from self.estimating(isl, PREFILL_OSL, 1, "prefill", **parallel))

    def largest(self, /, isl: int, osl: int, **parallel: Any) -> Steps[int]:
        """The most requests per rank whose prompts and KV cache fit; 0 if not one does."""
        call = planner.bootstrap(self._engine(parallel), isl=isl, osl=osl, prefill_granularity=0, decode_granularity=0)
        try:
            told = yield call
        except OutOfMemory:
            return 0
        except PerfcastError as error:
            raise as_value_error(error) from None
        return int(told.largest_batch_per_rank)

    get_max_batch_size = asking(largest)

    @asking
    def get_max_kv_tokens(self, /, isl: int, osl: int, **parallel: Any) -> Steps[int]:
        """KV tokens per rank, by the requests that fit."""
        most = yield from self.largest(isl, osl, **parallel)
        return most * (isl + osl)

    def _engine(self, parallel: dict[str, Any]) -> EngineConfig:
        modes = {name.removesuffix("_quant_mode"): parallel[name] for name in parallel if name.endswith("_quant_mode")}
        modes = {"kv_cache" if name == "kvcache" else name: getattr(mode, "name", mode) for name, mode in modes.items()}
        unknown = [name for name in parallel if name not in SIZES and not name.endswith("_quant_mode")]
        if unknown or not set(modes) <= {"gemm", "moe", "kv_cache", "fmha", "comm"}:
            raise ValueError(f"unknown parallel options {', '.join(unknown) or ', '.join(modes)}")
        sizes = {own: parallel[name] for name, own in SIZES.items() if parallel.get(name) is not None}
        return EngineConfig(**self._common, **sizes, **session_modes(**modes))  # type: ignore[arg-type]


def _row(told: Estimate, hf_id: str, isl: int, osl: int, batch: int) -> dict[str, Any]:
    """One row with the columns that callers know."""
    d, engine = told.deployment, told.engines[0]
    config, modes = engine.config, engine.modes
    group = d.workers[0]
    return {
        "model": hf_id,
        "isl": isl,
        "osl": osl,
        "prefix": 0,
        "concurrency": d.concurrency_total,
        "request_rate": 0.0,
        "bs": batch,
        "global_bs": group.batch_total,
        "ttft": d.ttft_ms,
        "tpot": d.tpot_ms,
        "seq/s": d.requests_per_s,
        "seq/s/gpu": d.requests_per_s_per_gpu,
        "tokens/s": d.tokens_per_s,
        "tokens/s/gpu": d.tokens_per_s_per_gpu,
        "tokens/s/user": d.tokens_per_s_per_user,
        "request_latency": d.request_latency_ms,
        "encoder_latency": d.encode_ms,
        "encoder_memory": group.encoder_memory_gib_per_gpu,
        "context_latency": d.prefill_ms,
        "generation_latency": d.decode_ms,
        "num_total_gpus": d.gpus_total,
        "tp": config.tp,
        "pp": config.pp,
        "dp": config.attn_dp,
        "moe_tp": config.moe_tp,
        "moe_ep": config.moe_ep,
        "cp": config.cp,
        "parallel": engine.mapping,
        "gemm": modes.get("gemm"),
        "kvcache": modes.get("kv_cache"),
        "fmha": modes.get("fmha"),
        "moe": modes.get("moe"),
        "comm": modes.get("comm"),
        "memory": group.memory_gib_per_gpu,
        "backend": config.backend,
        "version": engine.stamp.version,
        "system": config.system,
        "power_w": d.power_w or 0.0,
    }
