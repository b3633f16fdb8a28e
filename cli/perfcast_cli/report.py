"""Searches as files: CSV and JSON for machines, PNG and one self-contained HTML page for people."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from perfcast_client.deployments import Deployment, Experiment, SearchResult

from perfcast_cli import shown
from perfcast_cli.rows import Row, columns, flat, flattened, label

SEARCH = "search"  # a result without a name of its own
HEIGHT = "tokens_per_s_per_gpu_cluster"
AXES = {
    "tokens_per_s_per_user": "tokens/s/user",
    "ttft_ms": "time to first token, ms",
    "tpot_ms": "time per output token, ms",
    "request_latency_ms": "request latency, ms",
}
DETAILS = {
    HEIGHT: "tokens/s/gpu of the cluster",
    "tokens_per_s_per_user": "tokens/s/user",
    "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT, ms",
    "request_latency_ms": "request latency, ms",
    "requests_per_s": "requests/s of a replica",
    "concurrency_total": "requests in flight",
    "gpus_total": "GPUs of a replica",
    "replicas_total": "replicas",
    "meets_targets": "meets the targets",
}


def write(folder: Path, results: Mapping[str, SearchResult]) -> Iterator[Path]:
    """Files of all results into ``folder``, each of several in a folder of its own; one page for all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        own = folder if len(results) == 1 else folder / name
        own.mkdir(exist_ok=True)
        for part, stem in (("picks", "best"), ("front", "pareto"), ("rows", "rows")):
            rows = flattened(result, part)
            if rows:
                yield _put(own / f"{stem}.csv", csv_text(rows))
        yield _put(own / "result.json", json.dumps(result.to_dict(), indent=2) + "\n")
        if (image := _png(name, result)) is not None:
            (own / "pareto.png").write_bytes(image)
            yield own / "pareto.png"
    yield _put(folder / "report.html", html(results))


def _put(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def csv_text(rows: Sequence[Row]) -> str:
    """One line a row; numbers in full, what a row has not is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def html(results: Mapping[str, SearchResult]) -> str:
    """The page, its data and its code; it loads nothing."""
    page = files("perfcast_cli").joinpath("report.html").read_text(encoding="utf-8")
    data = json.dumps([_section(name, result) for name, result in results.items()]).replace("</", "<\\/")
    return page.replace("/*DATA*/", data)


def _section(name: str, result: SearchResult) -> dict[str, Any]:
    budget = f", {result.total_gpus} GPUs" if result.total_gpus else ""
    return {
        "title": _title(name, result),
        "lines": [
            f"isl {result.isl}, osl {result.osl}, prefix {result.prefix}{budget}; {shown.targets(result)}; "
            f"profile {result.profile}"
        ],
        "verdict": shown.verdict(result),
        "axes": list(AXES.items()),
        "height": HEIGHT,
        "height_title": DETAILS[HEIGHT],
        "limits": {
            "tokens_per_s_per_user": 1000 / result.tpot_ms if result.tpot_ms else None,
            **{name: getattr(result, name) or None for name in ("ttft_ms", "tpot_ms", "request_latency_ms")},
        },
        "series": [{"name": e.name, "points": _points(result, e)} for e in result.experiments],
        "tables": [_table(e) for e in result.experiments],
    }


def _title(name: str, result: SearchResult) -> str:
    first = next((e.engines[0] for e in result.experiments if e.engines), None)
    title = f"{first.config.model} on {first.stamp.system}" if first else "nothing can be deployed"
    return title if name == SEARCH else f"{name}: {title}"


def _points(result: SearchResult, experiment: Experiment) -> list[dict[str, Any]]:
    """Every deployment of the front, of the picks and of the rows, once."""
    kinds = {"front": experiment.front, "pick": experiment.picks, "row": experiment.rows}
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for kind, found in kinds.items():
        for deployment in found:
            words = label(experiment, deployment)
            point = seen.setdefault((words, deployment.tokens_per_s_per_user), _point(result, experiment, deployment))
            point[kind] = True
    return list(seen.values())


def _point(result: SearchResult, experiment: Experiment, deployment: Deployment) -> dict[str, Any]:
    row = flat(result, experiment, deployment)
    engines = [experiment.engines[group.engine] for group in deployment.workers]
    details = [(title, row[name]) for name, title in DETAILS.items()]
    for engine, group in zip(engines, deployment.workers, strict=True):
        role = "" if len(engines) == 1 else f"{group.role} "
        details += [(f"{role}mapping", engine.mapping), (f"{role}batch per rank", group.batch_per_rank)]
        details += [(f"{role}workers", group.workers_total), (f"{role}memory, GiB", group.memory_gib_per_gpu)]
    details.append(("version", f"{experiment.backend} {engines[0].stamp.version}"))
    return {
        **{name: row[name] for name in (HEIGHT, *AXES)},
        "misses": not row["meets_targets"],
        "label": label(experiment, deployment),
        "details": details,
    }


def _table(experiment: Experiment) -> dict[str, Any]:
    near = () if experiment.picks or experiment.closest is None else (experiment.closest,)
    names = ("rank", "deployment", *shown.NAMES)
    rows = [
        [rank, label(experiment, pick), *(_number(show(pick)) for _, show in shown.COLUMNS)]
        for rank, pick in enumerate((*experiment.picks, *near), 1)
    ]
    note = "" if experiment.eligible else f": {shown.missed(experiment)}"
    return {"title": experiment.name + note, "columns": names, "rows": rows}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _png(name: str, result: SearchResult) -> bytes | None:
    """The fronts as an image; None without matplotlib (the ``report`` extra)."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for experiment in result.experiments:
        speeds = [d.tokens_per_s_per_user for d in experiment.front]
        (line,) = axes.plot(speeds, [shown.cluster(d) for d in experiment.front], "o-", markersize=3, linewidth=1)
        line.set_label(experiment.name)
        if experiment.eligible and experiment.best is not None:
            best = experiment.best
            axes.plot(
                best.tokens_per_s_per_user, shown.cluster(best), "*", markersize=13, color=line.get_color()
            )  # fmt: skip
    axes.set(xlabel=AXES["tokens_per_s_per_user"], ylabel=DETAILS[HEIGHT], title=_title(name, result))
    axes.grid(alpha=0.3)
    axes.legend()
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
