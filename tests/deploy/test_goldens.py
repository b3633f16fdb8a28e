"""Profile `reference` against the golden vectors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.parity.check import run

GOLDENS = Path(os.environ.get("PERFCAST_GOLDENS", Path(__file__).parents[3] / "shared" / "goldens"))


def test_every_golden_deployment() -> None:
    if not GOLDENS.is_dir():
        pytest.skip(f"no golden vectors at {GOLDENS} (PERFCAST_GOLDENS)")
    groups = run([GOLDENS / "deploy.jsonl.gz"], {}, 5)
    assert {name: (g.cases, g.within) for name, g in groups.items()} == {
        "deploy/render": (154, 154),
        "deploy/input": (5, 5),
    }
