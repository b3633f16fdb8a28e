"""A short part of each proof suite. The whole of each has a command of its own: see README.md beside this file."""

from __future__ import annotations

from tests.proof import fault


def test_no_call_fails_while_a_worker_is_killed_and_another_stopped() -> None:
    assert not fault.killed_and_drained().failed
