"""Golden cases of the forward-pass performance model: native with correction, regression, refusals."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from perfcast_client.adapters import fpm
from perfcast_client.adapters.forward_pass import UNAVAILABLE
from perfcast_client.adapters.records import engine_of
from perfcast_engine.errors import EngineError, InvalidField
from perfcast_planning.planner.pass_model import LearningOptions, PassModel
from perfcast_planning.planner.pass_table import PassTable
from perfcast_planning.planner.telemetry import Iterations, RankRecord
from perfcast_planning.planner.whole_pass import WholePass
from perfcast_server.wire import engine_config
from perfcast_systems.passes import IDENTITY

from tests.parity.check import differences as plain_differences
from tests.parity.check import relative_error
from tests.parity.op_json import database_of
from tests.parity.op_json import decode as decode_op
from tests.parity.steps import predictor

OPTIONS = frozenset(LearningOptions.__dataclass_fields__)


def expected(case: dict[str, Any]) -> dict[str, Any]:
    """The expectations of one case, gathered from where the file keeps them."""
    if "rounds" in case:
        return {
            "rounds": [{"after": r["after"], "queries": [q["expect"] for q in r["queries"]]} for r in case["rounds"]]
        }
    return case["expect"] if "expect" in case else {"queries": [query["expect"] for query in case["queries"]]}


def differences(wanted: Any, actual: Any) -> Any:
    """As usual, but any of the listed values will do where the reference itself was not deterministic."""
    if not isinstance(wanted, dict) or "rounds" not in wanted:
        yield from plain_differences(wanted, actual)
        return
    for i, (left, right) in enumerate(zip(wanted["rounds"], actual["rounds"], strict=True)):
        if not left["after"].get("nondeterministic"):  # such a state lists no values to compare with
            yield from plain_differences(left["after"], right["after"], f"rounds[{i}].after")
        for j, (query, answer) in enumerate(zip(left["queries"], right["queries"], strict=True)):
            if query.get("nondeterministic"):
                best = min(relative_error(value, answer["ms"]) for value in query["values"])
                yield f"rounds[{i}].queries[{j}]", best
            else:
                yield from plain_differences(query, answer, f"rounds[{i}].queries[{j}]")


def options_of(case: dict[str, Any]) -> LearningOptions:
    return LearningOptions(**{name: value for name, value in (case.get("options") or {}).items() if name in OPTIONS})


@dataclass(frozen=True)
class Told:
    """A pass model, and why it is but a regression."""

    model: PassModel
    warning: str | None = None

    def diagnostics(self) -> dict[str, Any]:
        shown = asdict(self.model.diagnostics())
        if self.warning and shown["readiness"] == "insufficient_data":
            shown["readiness"] = "unsupported_config"
        return shown | {"last_warning": self.warning}

    def state(self) -> dict[str, Any]:
        factors = self.model.correction_factors()
        summary = {"min": min(factors), "max": max(factors), "avg": sum(factors) / len(factors)} if factors else {}
        return self.diagnostics() | {"min": None, "max": None, "avg": None} | summary

    def estimate(self, metrics: Any) -> float | None:
        ms = float(self.model.estimate(iterations_of([metrics]))[0])
        return None if ms != ms else ms


def told_of(case: dict[str, Any]) -> Told:
    """The model of a case, its records read as the client's adapters read them."""
    if "config" not in case:
        return Told(PassModel(options_of(case)))
    try:
        message = engine_of(case["config"], profile="reference").to_message()
    except ValueError as error:
        raise InvalidField("config", str(error)) from None
    try:
        return Told(PassModel(options_of(case), predictor().engine(engine_config(message, 0)).steps))
    except EngineError as error:
        if case.get("call") != "best_available" or error.reason not in UNAVAILABLE:
            raise
        return Told(PassModel(options_of(case)), error.message)


def iterations_of(iterations: list[Any]) -> Iterations:
    try:
        read = [fpm.iteration(ranks) for ranks in iterations]
    except ValueError as error:
        raise InvalidField("metrics", str(error)) from None
    return Iterations.of([[RankRecord(**asdict(rank)) for rank in ranks] for ranks in read])


def evaluate(case: dict[str, Any]) -> dict[str, Any]:
    return {"native": learned, "regression": learned, "error": refused, "pass_table": pass_table}[case["kind"]](case)


def learned(case: dict[str, Any]) -> dict[str, Any]:
    told = told_of(case)
    rounds = []
    for step in case["rounds"]:
        told.model.tune(iterations_of(step["tune"]))
        queries = [{"ms": told.estimate(query["metrics"])} for query in step["queries"]]
        rounds.append({"after": told.state(), "queries": queries})
    return {"rounds": rounds}


def refused(case: dict[str, Any]) -> dict[str, Any]:
    told = told_of(case)
    if case["call"] == "estimate":
        return {"ms": told.estimate(case["metrics"])}
    if case["call"] == "tune":
        told.model.tune(iterations_of(case["iterations"]))
    shown = told.diagnostics()
    return {"diagnostics": shown | {"last_warning": "set" if shown["last_warning"] else None}}


def pass_table(case: dict[str, Any]) -> dict[str, Any]:
    identity = dict(zip(IDENTITY, ("model", *case["identity"]), strict=True))
    rows = dict(zip(case["row_columns"], zip(*case["rows"], strict=True), strict=True))
    n = len(case["rows"])
    columns = {name: [value] * n for name, value in {**identity, "cell_id": "0"}.items()} | {
        "workload_kind": rows["phase"],
        "batch_size": rows["batch"],
        "total_prefill_tokens": rows["total_prefill"],
        "total_kv_read_tokens": rows["total_kv"],
        "latency_ms": rows["latency_ms"],
        "kv_seed_regime": rows["kv_seed_regime"],
    }
    table = PassTable.of(columns, identity)
    ops = (tuple(map(decode_op, case[f"{phase}_roofline_ops"])) for phase in ("prefill", "decode"))
    passes = WholePass(table, *ops, database_of({**case, "mode": "SILICON"}))
    fields = ("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens", "num_decode_requests")
    queries = [[q["scheduled"].get(field, 0) for field in (*fields, "sum_decode_kv_tokens")] for q in case["queries"]]
    answer = passes.totals(*np.array(queries, np.float64).T)
    gone = answer.missing()
    return {
        "queries": [
            {"error": "PerfDataNotAvailableError"} if missing else {"ms": float(ms)}
            for ms, missing in zip(answer.ms, gone, strict=True)
        ]
    }
