"""Measured beside predicted: results of the common benchmark clients against a generated bundle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from perfcast_engine.errors import InvalidField, UnsupportedCombination

from perfcast_deploy.bundle import read, validate
from perfcast_deploy.deployment import Deployment
from perfcast_deploy.validate import read_json

METRICS = ("ttft_ms", "tpot_ms", "output_tokens_per_s")
TOLERANCE = 0.05  # of a nominal length or concurrency, before the comparison is called off the predicted point


@dataclass(frozen=True)
class Value:
    """Where a client writes a number: its path, and what turns it into ours."""

    path: str
    times: float | Literal["gpus"] = 1.0
    over: str = ""

    def read(self, data: Mapping[str, Any], gpus: int) -> Any:
        """The number; whatever else stands there as it is, None where there is nothing."""
        value = _at(data, self.path)
        if not _is_number(value):
            return value
        if self.over:
            count = _at(data, self.over)
            return value / count if _is_number(count) and count else None
        return value * (gpus if self.times == "gpus" else self.times)


@dataclass(frozen=True)
class Client:
    """A benchmark client: the keys one of which tells its results, its metrics, and facts of the run."""

    name: str
    told_by: tuple[str, ...]
    metrics: Mapping[str, Value]
    run: Mapping[str, Value]


_SERVING = dict(zip(METRICS, map(Value, ("mean_ttft_ms", "mean_tpot_ms", "output_throughput")), strict=True))
_RUN = {
    "concurrency": Value("max_concurrency"),
    "isl": Value("total_input_tokens", over="completed"),
    "osl": Value("total_output_tokens", over="completed"),
    "failed": Value("failed"),
}
_AVERAGES = ("time_to_first_token.avg", "inter_token_latency.avg", "output_token_throughput.avg")
CLIENTS = (
    Client("sglang.bench_serving", ("accept_length",), _SERVING, _RUN),
    Client("vllm bench serve", ("mean_ttft_ms",), _SERVING, _RUN),
    Client(
        "aiperf / genai-perf",
        ("time_to_first_token",),
        dict(zip(METRICS, map(Value, _AVERAGES), strict=True)),
        {"isl": Value("input_sequence_length.avg"), "osl": Value("output_sequence_length.avg")},
    ),
    Client(  # latencies in seconds, throughput per GPU
        "InferenceX",
        ("mean_ttft", "output_tput_per_gpu"),
        {
            "ttft_ms": Value("mean_ttft", 1000.0),
            "tpot_ms": Value("mean_tpot", 1000.0),
            "output_tokens_per_s": Value("output_tput_per_gpu", "gpus"),
        },
        {"concurrency": Value("conc"), "isl": Value("isl"), "osl": Value("osl")},
    ),
)


@dataclass(frozen=True)
class Compared:
    """One metric; ``error`` is (predicted - measured) / measured, so above 0 where the prediction is too high."""

    metric: str
    predicted: float | None
    measured: float
    error: float | None


@dataclass(frozen=True)
class Report:
    """What a benchmark of a deployment showed. ``remarks``: how the run differs from the predicted point."""

    client: str
    deployment: Deployment
    compared: tuple[Compared, ...]
    remarks: tuple[str, ...]

    def observation(self) -> dict[str, Any]:
        """One mean iteration of the engine that decodes, as Calibration learns it: ``engine`` in the words of
        EngineConfig, and for each of its ``ranks`` what it ran and how long that took.

        An aggregated iteration carries, beside its decodes, the share of prompts that keeps them going. Raises
        UnsupportedCombination for a run that was not at the predicted point.
        """
        d, tpot = self.deployment, next((row.measured for row in self.compared if row.metric == "tpot_ms"), None)
        if self.remarks or tpot is None:
            why = "; ".join(self.remarks) or "the result has no tpot_ms"
            raise UnsupportedCombination("result", f"was not measured where it was predicted: {why}")
        role, load = d.roles[-1], d.workload
        batch = max(1, round(d.concurrency / (role.workers * role.dp * role.pp)))
        work: dict[str, Any] = {"decode_requests": batch, "wall_time_s": tpot * (d.predicted.accepted + 1) / 1000}
        work["decode_kv_tokens"] = batch * (load.isl + load.osl // 2)
        if role.name == "agg":
            share = batch * (d.predicted.accepted + 1) / load.osl
            work["prefill_tokens"] = round(share * (load.isl - load.prefix))
            work["prefill_requests"] = math.ceil(share) if work["prefill_tokens"] else 0
            work["prefill_kv_tokens"] = round(share * load.prefix)
        sizes = {"tp": role.tp, "pp": role.pp, "attn_dp": role.dp}
        sizes |= {"moe_tp": role.moe_tp, "moe_ep": role.moe_ep} if d.is_moe else {}
        engine = {"model": d.model, "system": d.system, "backend": d.backend, "version": d.version, "nextn": d.nextn}
        engine |= {"profile": d.predicted.profile or "corrected", "role": "both" if role.name == "agg" else "decode"}
        ranks = [work | {"dp_rank": rank} for rank in range(role.dp)]
        return {"engine": engine | sizes | dict(d.predicted.basis), "ranks": ranks}


def verify(directory: Path, result: Path) -> Report:
    """Compare ``result`` with the bundle in ``directory``, whose own hashes are checked first.

    Raises DataCorrupt for a changed bundle or damaged JSON, InvalidField for a result that no client writes or that
    holds NaN, infinite or non-positive numbers.
    """
    deployment = validate(read(directory))
    metrics = [name for name in METRICS if name != "tpot_ms" or deployment.workload.osl > 1]
    client, measured, run = read_result(result, deployment.gpus, metrics)
    rows = []
    for metric, value in measured.items():
        predicted: float | None = getattr(deployment.predicted, metric)
        rows.append(Compared(metric, predicted, value, None if predicted is None else predicted / value - 1))
    wanted = {"concurrency": deployment.concurrency, "isl": deployment.workload.isl, "osl": deployment.workload.osl}
    remarks = [
        f"{name} was {run[name]:g}, predicted for {value}"
        for name, value in wanted.items()
        if name in run and abs(run[name] - value) > TOLERANCE * value
    ]
    remarks += [f"the result has no {metric}" for metric in metrics if metric not in measured]
    if run.get("failed"):
        remarks.append(f"{run['failed']:g} requests failed")
    return Report(client, deployment, tuple(rows), tuple(remarks))


def read_result(
    path: Path, gpus: int, wanted: Sequence[str] = METRICS
) -> tuple[str, dict[str, float], dict[str, float]]:
    """(client, metrics by our names, facts of the run) of a result file."""
    data = _result(path)
    client = next((client for client in CLIENTS if any(key in data for key in client.told_by)), None)
    if client is None:
        raise InvalidField("result", f"{path} is of no known client: {', '.join(c.name for c in CLIENTS)}", "unknown")
    found = {name: client.metrics[name].read(data, gpus) for name in wanted}
    facts = {name: value.read(data, gpus) for name, value in client.run.items()}
    told = {name: _number(name, value, positive=True) for name, value in found.items() if value is not None}
    if not told:
        raise InvalidField("result", f"{path} has none of {', '.join(METRICS)}", "missing")
    return client.name, told, {name: _number(name, value) for name, value in facts.items() if value is not None}


def _result(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise InvalidField("result", f"{path} is no file", "missing")
    try:
        text = path.read_text().strip()
    except UnicodeDecodeError as error:
        raise InvalidField("result", f"{path} is no text", "type") from error
    lines = text.splitlines()
    # SGLang appends a line a run; the last run counts
    data = read_json(path.name, lines[-1] if path.suffix == ".jsonl" and lines else text)
    if isinstance(data, list) and len(data) == 1:
        data = data[0]
    if isinstance(data, Mapping) and isinstance(data.get("records"), Mapping):
        data = data["records"]
    if not isinstance(data, Mapping):
        raise InvalidField("result", f"{path} holds no object", "type")
    return data


def _at(data: Any, path: str) -> Any:
    for key in path.split("."):
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(name: str, value: Any, positive: bool = False) -> float:
    if not _is_number(value) or not math.isfinite(value) or (positive and value <= 0):
        raise InvalidField(f"result.{name}", f"{value!r:.40} is no finite number{' above zero' * positive}", "range")
    return float(value)
