"""Latency laws as files: the workload-variant autoscaler's coefficients, llm-d-inference-sim's profiles (spec/07 9)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from perfcast_client import calls, planner
from perfcast_client.adapters.asking import Adapter, C
from perfcast_client.exports import files, grids
from perfcast_client.exports.files import Export
from perfcast_client.planner_types import LatencyLaw
from perfcast_client.record import EngineLike
from perfcast_client.results import Engine, Predictions
from perfcast_client.steps import DecodeStep
from perfcast_client.turns import Steps


def export_wva(client: C, engine: EngineLike, path: str | Path, **box: int) -> Any:
    """alpha, beta, gamma and delta (ms) of a variant, over the batch of all its attention-DP ranks, as YAML; awaitable
    with an ``AsyncClient``. ``box``: fields of the contract's LawBox, which are per rank."""

    def asked(_: Any) -> Steps[Export]:
        resolved: Engine = yield calls.resolve(engine)
        law: LatencyLaw = yield planner.fit_latency_law(resolved, **box)
        ranks = resolved.config.attn_dp  # among which an engine's batch is spread
        values = [law.alpha_ms, law.beta_ms_per_request / ranks, law.gamma_ms, law.delta_ms_per_token / ranks]
        if not np.isfinite(values).all():
            raise ValueError("refused to write coefficients that are not finite")
        alpha, beta, gamma, delta = (f"{value:.6g}" for value in values)
        text = f"""\
# ms; ITL = alpha + beta * batch, TTFT = gamma + delta * input tokens * batch, of the whole engine's batch
# ITL:  R2 {law.itl_fit.r_squared:.4f}, worst error {law.itl_fit.worst_relative_error:.1%} of {law.itl_fit.samples}
# TTFT: R2 {law.ttft_fit.r_squared:.4f}, worst error {law.ttft_fit.worst_relative_error:.1%} of {law.ttft_fit.samples}
# box: {", ".join(f"{name} {value}" for name, value in law.box.items())}
# engine: {law.engine.handle}, data {law.engine.data_version}
accelerators:
- acc: {_quoted(resolved.config.system)}
  accCount: {resolved.gpus_total}
  perfParms:
    decodeParms:
      alpha: "{alpha}"
      beta: "{beta}"
    prefillParms:
      gamma: "{gamma}"
      delta: "{delta}"
  maxBatchSize: {law.box["max_batch_per_rank"] * ranks}
"""
        off = {"itl": law.itl_fit.worst_relative_error, "ttft": law.ttft_fit.worst_relative_error}
        # the share of measured latency is that of a decode step in the middle of the box
        middle = DecodeStep(max(1, law.box["max_batch_per_rank"] // 2), law.box["isl_tokens"], law.box["osl_tokens"])
        told = yield calls.predict(resolved, middle, False)
        written = files.write_text(Path(path), text)
        return Export((written,), law.engine, dict(law.box), off, told.provenance.silicon_share)

    adapter = Adapter(client)
    return adapter._run(asked(adapter))


def export_llmd_sim(
    client: C,
    engine: EngineLike,
    path: str | Path,
    *,
    max_context_tokens: int = 8192,
    context_tokens: int = 2048,
    max_num_seqs: int = 256,
    std_dev_share: float = 0.0,
    kv_transfer_ms: float = 0.0,
    constant_prompt_tokens: int = 0,
    seed: int = 0,
) -> Any:
    """A latency profile of llm-d-inference-sim, as YAML; awaitable with an ``AsyncClient``.

    TTFT follows a line over uncached prompt tokens, or is that of ``constant_prompt_tokens``. ITL is that of one
    request at ``context_tokens``, stretched under load up to ``max_num_seqs`` requests. std_dev_share: at most 0.3.
    """
    if not 0 <= std_dev_share <= 0.3:
        raise ValueError(f"std_dev_share must lie in [0, 0.3], not {std_dev_share}")
    grids.require_least(
        max_context_tokens=(max_context_tokens, 1), context_tokens=(context_tokens, 2),
        max_num_seqs=(max_num_seqs, 1), kv_transfer_ms=(kv_transfer_ms, 0),
        constant_prompt_tokens=(constant_prompt_tokens, 0),
    )  # fmt: skip

    def asked(_: Any) -> Steps[Export]:
        batch = grids.wholes(1, max_num_seqs, grids.EVERY_OF_TWO)
        told: Predictions = yield calls.predict_many(
            engine, DecodeStep(batch, context_tokens - 1, 1), False, False, False
        )
        itl = told.latency_ms
        grids.require_sound([batch], [itl])
        factor = max(float(itl[-1] / itl[0]), 1.0)
        law: LatencyLaw = yield planner.fit_latency_law(
            engine,
            min_input_tokens=1,
            max_input_tokens=max_context_tokens,
            max_prompts_per_rank=1,
            max_num_batched_tokens_per_rank=max_context_tokens,
        )
        stretched = itl[0] * (1 + (factor - 1) * (batch - 1) / max(max_num_seqs - 1, 1))
        off = {"itl_under_load": grids.worst(stretched, itl), "ttft": law.ttft_fit.worst_relative_error}
        lines = {"inter-token-latency": _duration(itl[0])}
        if constant_prompt_tokens:
            first = law.gamma_ms + law.delta_ms_per_token * constant_prompt_tokens
            lines["time-to-first-token"] = _duration(first)
        else:
            first = law.gamma_ms
            lines |= {"prefill-overhead": _duration(first), "prefill-time-per-token": _duration(law.delta_ms_per_token)}
        lines["kv-cache-transfer-latency"] = _duration(kv_transfer_ms)
        if std_dev_share:
            lines["inter-token-latency-std-dev"] = _duration(itl[0] * std_dev_share)
            lines["time-to-first-token-std-dev"] = _duration(first * std_dev_share)
        lines |= {"time-factor-under-load": f"{factor:.6g}", "max-num-seqs": str(max_num_seqs), "seed": str(seed)}
        about = f"# engine: {told.engine.handle}, data {told.engine.data_version}\n"
        about += "".join(f"# worst error of {name}: {value:.1%}\n" for name, value in off.items())
        text = about + "".join(f"{name}: {value}\n" for name, value in lines.items())
        ranges = {"prompt_tokens": [1, max_context_tokens], "batch": [1, max_num_seqs], "context": context_tokens}
        written = files.write_text(Path(path), text)
        return Export((written,), told.engine, ranges, off, told.provenance.silicon_share)

    adapter = Adapter(client)
    return adapter._run(asked(adapter))


def _duration(ms: float) -> str:
    """As Go writes durations."""
    return f"{ms:.3f}ms" if ms >= 1 else f"{ms * 1000:.3f}us"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
