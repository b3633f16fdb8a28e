"""Step tables of request-level simulators, from direct predictions (spec/07 section 9). All CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from perfcast_client import calls
from perfcast_client.adapters.asking import Adapter, C
from perfcast_client.exports import files, grids
from perfcast_client.exports.files import Export
from perfcast_client.record import EngineLike
from perfcast_client.results import F64, Engine, Predictions
from perfcast_client.steps import DecodeStep, Mixed, Prefill, Step
from perfcast_client.turns import Steps


def _export(client: C, path: str | Path, steps: Callable[[Path], Steps[Export]]) -> Any:
    adapter = Adapter(client)
    return adapter._run(steps(Path(path)))


def export_splitwise(
    client: C,
    engine: EngineLike,
    path: str | Path,
    *,
    max_prompt_tokens: int = 8192,
    max_batch: int = 64,
    token_size: int = 128,
    resolution: int = 20,
) -> Any:
    """Splitwise-sim's performance model: ms of a prompt pass and of a token, over prompt size and batch."""

    grids.require_least(
        max_prompt_tokens=(max_prompt_tokens, 17), max_batch=(max_batch, 1), token_size=(token_size, 1),
        resolution=(resolution, 2),
    )  # fmt: skip

    def asked(target: Path) -> Steps[Export]:
        resolved: Engine = yield calls.resolve(engine)
        prompts, batches = grids.counts(16, max_prompt_tokens, resolution), grids.counts(1, max_batch, resolution)
        size, batch = (axis.ravel() for axis in np.meshgrid(prompts, batches, indexing="ij"))
        told: Predictions = yield calls.predict_many(resolved, Prefill(batch, size), False, False, False)
        decoded: Predictions = yield calls.predict_many(
            resolved, DecodeStep(batch, size, token_size), False, False, False
        )
        at_size, at_batch = grids.across(prompts, batches)
        times = {"prompt_time": told.latency_ms, "token_time": decoded.latency_ms}
        checks: dict[str, Step] = {
            "prompt_time": Prefill(at_batch, at_size),
            "token_time": DecodeStep(at_batch, at_size, token_size),
        }
        off = {}
        for name, step in checks.items():
            direct: Predictions = yield calls.predict_many(resolved, step, False, False, False)
            cells = times[name].reshape(len(prompts), len(batches))
            read = grids.bilinear(prompts, batches, cells, at_size, at_batch)
            off[name] = grids.worst(read, direct.latency_ms)
        grids.require_sound([prompts, batches], list(times.values()))
        config = resolved.config
        rows = [
            (config.model, config.system, config.tp, int(p), int(b), token_size, round(prompt, 6), round(token, 6))
            for p, b, prompt, token in zip(size, batch, *(column.tolist() for column in times.values()), strict=True)
        ]
        columns = ("model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size")
        written = files.write_csv(target, (*columns, *times), rows)
        ranges = {"prompt_size": _range(prompts), "batch_size": _range(batches), "points": len(rows)}
        return Export((written,), told.engine, ranges, off, told.provenance.silicon_share)

    return _export(client, path, asked)


def export_blis(
    client: C,
    engine: EngineLike,
    path: str | Path,
    *,
    max_prefill_tokens: int = 8192,
    max_batch: int = 256,
    context_tokens: int = 2048,
    resolution: int = 16,
) -> Any:
    """BLIS step times: whole µs of an iteration, over its prefill tokens and its decoding requests at one context.
    Never below 1, not even for an empty batch."""

    grids.require_least(
        max_prefill_tokens=(max_prefill_tokens, 1), max_batch=(max_batch, 1), context_tokens=(context_tokens, 2),
        resolution=(resolution, 2),
    )  # fmt: skip

    def asked(target: Path) -> Steps[Export]:
        tokens = np.concatenate([[0.0], grids.counts(1, max_prefill_tokens, resolution - 1)])
        decodes = np.concatenate([[0.0], grids.counts(1, max_batch, resolution - 1)])
        prefill, batch = (axis.ravel() for axis in np.meshgrid(tokens, decodes, indexing="ij"))
        told, ms = yield from _iterations(engine, prefill, batch, context_tokens)
        at_tokens, at_batch = (axis[1:] for axis in grids.across(tokens, decodes))  # but for the empty one
        _, direct = yield from _iterations(engine, at_tokens, at_batch, context_tokens)
        cells = ms.reshape(len(tokens), len(decodes))
        off = {"step_time": grids.worst(grids.bilinear(tokens, decodes, cells, at_tokens, at_batch), direct)}
        grids.require_sound([tokens, decodes], [ms[1:]])
        micros = np.maximum(np.round(ms * 1000), 1).astype(np.int64)
        rows = [(int(t), int(b), context_tokens, int(us)) for t, b, us in zip(prefill, batch, micros, strict=True)]
        columns = ("prefill_tokens", "decode_requests", "context_tokens", "step_time_us")
        written = files.write_csv(target, columns, rows)
        ranges = {"prefill_tokens": _range(tokens), "decode_requests": _range(decodes), "points": len(rows)}
        return Export((written,), told.engine, ranges, off, told.provenance.silicon_share)

    return _export(client, path, asked)


def _iterations(engine: EngineLike, tokens: F64, decodes: F64, context: int) -> Steps[tuple[Predictions, F64]]:
    """ms of iterations with so many prefill tokens (of one prompt) beside so many decodes; 0 for an empty one."""
    ms = np.zeros(len(tokens))
    kinds: tuple[tuple[np.ndarray, Callable[[F64, F64], Any]], ...] = (
        ((tokens > 0) & (decodes == 0), lambda t, d: Prefill(1, t)),
        ((tokens == 0) & (decodes > 0), lambda t, d: DecodeStep(d, context - 1, 1)),
        ((tokens > 0) & (decodes > 0), lambda t, d: Mixed(t, d, context - 1, 1)),
    )
    told: Predictions | None = None
    for which, step in kinds:
        if which.any():
            told = yield calls.predict_many(engine, step(tokens[which], decodes[which]), False, False, False)
            ms[which] = told.latency_ms
    if told is None:
        raise ValueError("nothing to predict")
    return told, ms


def export_vidur(
    client: C,
    engine: EngineLike,
    path: str | Path,
    *,
    max_prefill_tokens: int = 8192,
    max_batch: int = 128,
    max_context_tokens: int = 8192,
    resolution: int = 12,
) -> Any:
    """Operator times as Vidur profiles them: one row a batch, one column an operator, in ms."""

    grids.require_least(
        max_prefill_tokens=(max_prefill_tokens, 2), max_batch=(max_batch, 1),
        max_context_tokens=(max_context_tokens, 3), resolution=(resolution, 2),
    )  # fmt: skip

    def asked(target: Path) -> Steps[Export]:
        tokens = grids.counts(1, max_prefill_tokens, resolution)
        batches, contexts = grids.counts(1, max_batch, resolution), grids.counts(2, max_context_tokens, resolution)
        batch, context = (axis.ravel() for axis in np.meshgrid(batches, contexts, indexing="ij"))
        prefill: Predictions = yield calls.predict_many(engine, Prefill(1, tokens), True, False, False)
        decode: Predictions = yield calls.predict_many(engine, DecodeStep(batch, context - 1, 1), True, False, False)
        grids.require_sound([tokens, batches, contexts], [prefill.latency_ms, decode.latency_ms])
        at = grids.wholes(tokens[0], tokens[-1])
        checked: Predictions = yield calls.predict_many(engine, Prefill(1, at), False, False, False)
        at_batch, at_context = grids.across(batches, contexts)
        direct: Predictions = yield calls.predict_many(
            engine, DecodeStep(at_batch, at_context - 1, 1), False, False, False
        )
        cells = decode.latency_ms.reshape(len(batches), len(contexts))
        off = {
            "prefill": grids.worst(grids.linear(tokens, prefill.latency_ms, at), checked.latency_ms),
            "decode": grids.worst(grids.bilinear(batches, contexts, cells, at_batch, at_context), direct.latency_ms),
        }
        names = list(dict.fromkeys([*prefill.operators, *decode.operators]))
        rows = [
            *_operator_rows(prefill, names, 1, np.ones(len(tokens)), tokens, np.zeros(len(tokens))),
            *_operator_rows(decode, names, 0, batch, batch, batch * context),
        ]
        columns = ("is_prefill", "batch_size", "num_tokens", "kv_cache_tokens", *names, "total_ms")
        written = files.write_csv(target, columns, rows)
        spans = {"num_tokens": tokens, "batch_size": batches, "context": contexts}
        ranges: dict[str, Any] = {name: _range(axis) for name, axis in spans.items()} | {"points": len(rows)}
        return Export((written,), prefill.engine, ranges, off, prefill.provenance.silicon_share)

    return _export(client, path, asked)


def _operator_rows(told: Predictions, names: list[str], is_prefill: int, *counts: F64) -> list[tuple[Any, ...]]:
    operators: Mapping[str, F64] = told.operators
    columns = [operators[name] if name in operators else np.zeros(len(told)) for name in names]
    whole = np.stack(counts, axis=1).astype(np.int64).tolist()
    times = np.stack([*columns, told.latency_ms], axis=1).round(6).tolist()
    return [(is_prefill, *count, *time) for count, time in zip(whole, times, strict=True)]


def _range(axis: F64) -> list[float]:
    return [float(axis.min()), float(axis.max())]
