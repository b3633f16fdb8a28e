"""Golden vectors of the mixture-of-experts and latent attention operators (spec/03 section 17)."""

from __future__ import annotations

from typing import Any

from tests.parity.op_json import answered


def evaluate(case: dict[str, Any]) -> dict[str, Any]:
    return answered(case, case["query"])
