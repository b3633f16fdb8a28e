"""Run golden files through the public engine API and say how many cases agree.

    python -m tests.parity.check FILE... [--where key=value]... [--json] [--show N]

Per group: cases, within 1e-6, worst relative error, wrong or missing errors, not yet supported. Exit 1 if any case
falls short. A handler module per kind of file (chosen by the prefix of the case id) turns a case into what we answer.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perfcast_engine.errors import EngineError, Reason

TOLERANCE = 1e-6
ABSOLUTE = 1e-12

HANDLERS = {
    "perfdata": "tests.parity.perfdata",
    "dense": "tests.parity.dense_ops",
    "moe_mla": "tests.parity.moe_mla_ops",
    "special_ops": "tests.parity.special_ops",
    "model_ops": "tests.parity.model_ops",
    "steps": "tests.parity.steps",
    "serving": "tests.parity.serving",
    "search": "tests.parity.search",
    "fpm": "tests.parity.fpm",
    "deploy": "tests.parity.deploy",
}

# The reference's exception class -> the reasons of ours that mean the same.
CONFIG = {
    Reason.INVALID_FIELD,
    Reason.UNSUPPORTED,
    Reason.UNKNOWN_MODEL,
    Reason.UNKNOWN_SYSTEM,
    Reason.UNKNOWN_BACKEND,
    Reason.UNKNOWN_VERSION,
}
REASONS: dict[str, set[Reason]] = {
    "PerfDataNotAvailableError": {Reason.PERF_DATA_MISSING, Reason.UNKNOWN_SYSTEM},
    "EmpiricalNotImplementedError": {Reason.EMPIRICAL_BASIS_MISSING},
    "MissingSystemFlopsError": {Reason.SYSTEM_FLOPS_MISSING},
    "SolNotImplementedError": {Reason.SOL_NOT_DEFINED},
    "ValueError": CONFIG | {Reason.OUT_OF_MEMORY},  # "no KV budget"
    "TypeError": CONFIG,
    "FileNotFoundError": CONFIG,
    "KeyError": CONFIG,
    "AssertionError": CONFIG,
    "NotImplementedError": CONFIG,
    "OpConversionError": CONFIG,
    "UnsupportedAttentionBackendError": CONFIG,
    "InsufficientMemoryError": {Reason.OUT_OF_MEMORY},
    "KVCacheCapacityError": {Reason.OUT_OF_MEMORY},
    "RuntimeError": {Reason.OUT_OF_MEMORY, Reason.PERF_DATA_MISSING},
    "not_found": {Reason.UNKNOWN_SYSTEM, Reason.UNKNOWN_VERSION, Reason.INVALID_FIELD, Reason.PERF_DATA_MISSING},
}


class NotSupported(Exception):
    """A handler raises this for a case that the product cannot answer yet."""


class Incomplete(Exception):
    """A handler raises this for a case that does not record what was asked; it is set aside and not counted."""


@dataclass
class Group:
    """The tally of one group of cases."""

    cases: int = 0
    within: int = 0
    worst: float = 0.0
    wrong_errors: int = 0
    unsupported: int = 0
    incomplete: int = 0


def relative_error(expected: float, actual: float) -> float:
    """|actual - expected| / |expected|; 0 for differences below the absolute floor, infinite for NaN."""
    if expected == actual or abs(expected - actual) <= ABSOLUTE:
        return 0.0
    if math.isnan(actual) or math.isnan(expected) or expected == 0:
        return math.inf
    return abs(actual - expected) / abs(expected)


def differences(expected: Any, actual: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every leaf of ``expected`` with its relative error in ``actual`` (infinite where it is another thing)."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            if not isinstance(actual, dict) or key not in actual:
                yield f"{path}.{key} missing", math.inf
            else:
                yield from differences(value, actual[key], f"{path}.{key}")
    elif isinstance(expected, list):
        if not isinstance(actual, list | tuple) or len(actual) != len(expected):
            yield f"{path}: {expected!r} != {actual!r}", math.inf
        else:
            for i, (left, right) in enumerate(zip(expected, actual, strict=True)):
                yield from differences(left, right, f"{path}[{i}]")
    elif isinstance(expected, bool) or not isinstance(expected, int | float):
        yield f"{path}: {expected!r} != {actual!r}", 0.0 if expected == actual else math.inf
    elif isinstance(actual, bool) or not isinstance(actual, int | float):
        yield f"{path}: {expected!r} != {actual!r}", math.inf
    else:
        yield f"{path}: {expected!r} != {actual!r}", relative_error(expected, actual)


def check_case(case: dict[str, Any], handler: Any, group: Group) -> str | None:
    """Tally one case; the reason in words when it falls short."""
    group.cases += 1
    expected = handler.expected(case) if hasattr(handler, "expected") else case["expect"]
    wanted = expected.get("error") if isinstance(expected, dict) else None
    try:
        actual = handler.evaluate(case)
    except Incomplete:
        group.cases -= 1
        group.incomplete += 1
        return None
    except NotSupported as error:
        group.unsupported += 1
        return f"not supported: {error}"
    except EngineError as error:
        if wanted is not None and error.reason in REASONS.get(wanted, set()):
            group.within += 1
            return None
        group.wrong_errors += 1
        return f"expected {wanted or 'an answer'}, got {error.reason}: {error}"
    except Exception as error:
        group.wrong_errors += 1
        return f"crashed: {type(error).__name__}: {error}"
    if wanted is not None and "error" not in (actual or {}):
        group.wrong_errors += 1
        return f"expected {wanted}, got an answer"
    compare = getattr(handler, "differences", differences)
    where, worst = max(compare(expected, actual), key=lambda pair: pair[1], default=("", 0.0))
    if math.isfinite(worst):
        group.worst = max(group.worst, worst)
    if worst <= TOLERANCE:
        group.within += 1
        return None
    return f"{where} (relative error {worst:.3g})"


def read_cases(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def handler_of(case: dict[str, Any]) -> Any:
    prefix = re.match(r"[a-z_]+", case["id"])
    name = HANDLERS.get(prefix.group() if prefix else "")
    if name is None:
        raise SystemExit(f"no handler for case id {case['id']!r}")
    return importlib.import_module(name)


def run(paths: list[Path], where: dict[str, str], show: int) -> dict[str, Group]:
    """Tally all cases of ``paths`` that match ``where``; prints the first ``show`` shortfalls to stderr."""
    groups: dict[str, Group] = {}
    for path in paths:
        for case in read_cases(path):
            if any(str(case.get(key)) != value for key, value in where.items()):
                continue
            label = f"{path.name.split('.')[0]}/{case.get('kind') or case.get('family') or case.get('entry') or '-'}"
            problem = check_case(case, handler_of(case), groups.setdefault(label, Group()))
            if problem and show > 0:
                show -= 1
                print(f"{case['id']} [{label}] {problem}", file=sys.stderr)
    return groups


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity.check")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", type=int, default=10, help="how many shortfalls to describe")
    options = parser.parse_args(arguments)
    groups = run(options.files, dict(pair.split("=", 1) for pair in options.where), options.show)
    total = Group()
    for group in groups.values():
        total.cases += group.cases
        total.within += group.within
        total.worst = max(total.worst, group.worst)
        total.wrong_errors += group.wrong_errors
        total.unsupported += group.unsupported
        total.incomplete += group.incomplete
    if options.json:
        print(json.dumps({"groups": {name: asdict(g) for name, g in groups.items()}, "total": asdict(total)}))
    else:
        row = "{:<42}{:>8}{:>8}{:>12}{:>8}{:>13}{:>12}"
        print(row.format("group", "cases", "within", "worst rel", "errors", "unsupported", "incomplete"))
        for name, g in [*groups.items(), ("total", total)]:
            print(row.format(name, g.cases, g.within, f"{g.worst:.2g}", g.wrong_errors, g.unsupported, g.incomplete))
    return 0 if total.cases and total.within == total.cases else 1


if __name__ == "__main__":
    # as an imported module, so that the handlers raise the very NotSupported that is caught here
    sys.exit(importlib.import_module("tests.parity.check").main())
