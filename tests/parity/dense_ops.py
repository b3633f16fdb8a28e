"""Golden vectors of the dense operators (spec/02 section 12)."""

from __future__ import annotations

from typing import Any

from tests.parity.op_json import answered


def evaluate(case: dict[str, Any]) -> dict[str, Any]:
    return answered(case, case["run"])
