"""Measured beside predicted: results of the common benchmark clients against a generated bundle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfcast_engine.errors import InvalidField

from perfcast_deploy.bundle import read, validate
from perfcast_deploy.deployment import Deployment
from perfcast_deploy.validate import read_json

METRICS = ("ttft_ms", "tpot_ms", "output_tokens_per_s")
TOLERANCE = 0.05  # of a nominal length or concurrency, before the comparison is called off the predicted point


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

    def calibration(self) -> dict[str, Any]:
        """One observation for Calibration: the deployed point with what was measured there."""
        load = self.deployment.workload
        point = {"isl": load.isl, "osl": load.osl, "prefix": load.prefix, "concurrency": self.deployment.concurrency}
        measured = {f"measured_{row.metric}": row.measured for row in self.compared}
        predicted = {f"predicted_{row.metric}": row.predicted for row in self.compared if row.predicted is not None}
        return {
            "model": self.deployment.model,
            "system": self.deployment.system,
            "backend": self.deployment.backend,
        } | ({"version": self.deployment.version} | point | measured | predicted)


def verify(directory: Path, result: Path) -> Report:
    """Compare ``result`` with the bundle in ``directory``, whose own hashes are checked first.

    Raises DataCorrupt for a changed bundle or damaged JSON, InvalidField for a result that no client writes or that
    holds NaN, infinite or non-positive numbers.
    """
    deployment = validate(read(directory))
    metrics = [name for name in METRICS if name != "tpot_ms" or deployment.workload.osl > 1]
    client, measured, run = read_result(result, deployment.gpus, metrics)
    rows = []
    for metric in metrics:
        predicted: float | None = getattr(deployment.predicted, metric)
        if metric in measured:
            value = measured[metric]
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
    if not isinstance(data, Mapping):
        raise InvalidField("result", f"{path} holds no object", "type")
    for client, (marker, metrics, run) in CLIENTS.items():
        if marker(data):
            found = {
                name: _positive(name, value)
                for name, read in metrics.items()
                if name in wanted and (value := read(data, gpus)) is not None
            }
            facts = {name: _plain(name, value) for name, read in run.items() if (value := read(data, gpus)) is not None}
            if not found:
                raise InvalidField("result", f"{path} has none of {', '.join(METRICS)}", "missing")
            return client, found, facts
    raise InvalidField("result", f"{path} is of no known client: {', '.join(CLIENTS)}", "unknown")


def _plain(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidField(f"result.{name}", f"{value!r} is no finite number", "range")
    return float(value)


def _positive(name: str, value: Any) -> float:
    number = _plain(name, value)
    if number <= 0:
        raise InvalidField(f"result.{name}", f"{value!r} is not above zero", "range")
    return number


Read = Callable[[Mapping[str, Any], int], Any]


def _key(name: str, scale: float = 1.0) -> Read:
    def read(data: Mapping[str, Any], gpus: int) -> Any:
        value = data.get(name)
        return value * scale if isinstance(value, int | float) and not isinstance(value, bool) else value

    return read


def _per_request(name: str) -> Read:
    def read(data: Mapping[str, Any], gpus: int) -> Any:
        total, count = data.get(name), data.get("completed")
        return total / count if isinstance(total, int | float) and isinstance(count, int | float) and count else None

    return read


def _average(name: str) -> Read:
    def read(data: Mapping[str, Any], gpus: int) -> Any:
        entry = data.get("records", data).get(name)
        return entry.get("avg") if isinstance(entry, Mapping) else None

    return read


def _of_all_gpus(data: Mapping[str, Any], gpus: int) -> Any:
    rate = data.get("output_tput_per_gpu")
    return rate * gpus if isinstance(rate, int | float) else rate


_SERVING = {
    "ttft_ms": _key("mean_ttft_ms"),
    "tpot_ms": _key("mean_tpot_ms"),
    "output_tokens_per_s": _key("output_throughput"),
}
_RUN = {
    "concurrency": _key("max_concurrency"),
    "isl": _per_request("total_input_tokens"),
    "osl": _per_request("total_output_tokens"),
    "failed": _key("failed"),
}
CLIENTS: Mapping[str, tuple[Callable[[Mapping[str, Any]], bool], Mapping[str, Read], Mapping[str, Read]]] = {
    "sglang.bench_serving": (lambda data: "mean_ttft_ms" in data and "accept_length" in data, _SERVING, _RUN),
    "vllm bench serve": (lambda data: "mean_ttft_ms" in data, _SERVING, _RUN),
    "aiperf / genai-perf": (
        lambda data: (
            isinstance(data.get("records", data), Mapping) and "time_to_first_token" in data.get("records", data)
        ),
        {
            "ttft_ms": _average("time_to_first_token"),
            "tpot_ms": _average("inter_token_latency"),
            "output_tokens_per_s": _average("output_token_throughput"),
        },
        {"isl": _average("input_sequence_length"), "osl": _average("output_sequence_length")},
    ),
    "InferenceX": (  # latencies in seconds, throughput per GPU
        lambda data: "mean_ttft" in data or "output_tput_per_gpu" in data,
        {
            "ttft_ms": _key("mean_ttft", 1000.0),
            "tpot_ms": _key("mean_tpot", 1000.0),
            "output_tokens_per_s": _of_all_gpus,
        },
        {"concurrency": _key("conc"), "isl": _key("isl"), "osl": _key("osl")},
    ),
}
