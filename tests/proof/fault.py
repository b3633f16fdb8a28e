"""What must not fail a call: killed and stopped processes, reloads.

python -m tests.proof.fault [--rounds N] [SCENARIO ...]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

from tests.proof.crowd import Crowd, Told
from tests.server.running import Process, eventually, process

CALLS = 300  # that end between two blows
DEADLINE_S = 60.0
PATIENT = ("--max-wait-s", "20")  # half of the capacity is gone for a while: that is another suite's topic


def hit(served: Process, crowd: Crowd, rounds: int, number: int) -> None:
    """Send the signal to one worker after another, each time when the one before is up again."""
    for turn in range(rounds):
        crowd.until_asked(CALLS)
        worker = turn % 2
        pid = served.worker_pids()[worker]
        os.kill(pid, number)
        eventually(partial(replaced_worker, served, worker, pid))


def replaced_worker(served: Process, worker: int, pid: int) -> bool:
    return served.worker_pids()[worker] != pid


def killed(rounds: int) -> Told:
    """kill -9 of a worker."""
    with process(*PATIENT, "--workers", "2") as served, Crowd(served.address, DEADLINE_S) as crowd:
        hit(served, crowd, rounds, signal.SIGKILL)
        crowd.until_asked(CALLS)
    return crowd.told


def drained(rounds: int) -> Told:
    """SIGTERM of a worker, which its supervisor starts again."""
    with process(*PATIENT, "--workers", "2") as served, Crowd(served.address, DEADLINE_S) as crowd:
        hit(served, crowd, rounds, signal.SIGTERM)
        crowd.until_asked(CALLS)
    return crowd.told


def killed_and_drained() -> Told:
    """One of each, for the short run."""
    with process(*PATIENT, "--workers", "2") as served, Crowd(served.address, DEADLINE_S) as crowd:
        hit(served, crowd, 1, signal.SIGKILL)
        hit(served, crowd, 1, signal.SIGTERM)
        crowd.until_asked(CALLS)
    return crowd.told


def replaced(rounds: int) -> Told:
    """SIGTERM of one of two replicas, and its start at the same address."""
    with process(*PATIENT) as first, process(*PATIENT) as second:
        ports = [served.address.rpartition(":")[2] for served in (first, second)]
        replicas = [first, second]
        with Crowd("ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports), DEADLINE_S) as crowd:
            for turn in range(rounds):
                crowd.until_asked(CALLS)
                which = turn % 2
                assert replicas[which].end() == 0
                replicas[which] = Process(*PATIENT, "--port", ports[which])
                assert replicas[which].address
            crowd.until_asked(CALLS)
        for served in replicas:
            served.end()
    return crowd.told


def restarted(rounds: int) -> Told:
    """SIGTERM of the only process, and its start at the same address: calls wait for it within their deadline."""
    served = Process(*PATIENT)
    port = served.address.rpartition(":")[2]
    with Crowd(served.address, DEADLINE_S) as crowd:
        for _ in range(rounds):
            crowd.until_asked(CALLS)
            assert served.end() == 0
            served = Process(*PATIENT, "--port", port)
            assert served.address
        crowd.until_asked(CALLS)
    served.end()
    return crowd.told


def reloaded(rounds: int) -> Told:
    """SIGHUP: all workers take up their data anew."""
    with process(*PATIENT, "--workers", "2") as served, Crowd(served.address, DEADLINE_S) as crowd:
        for done in range(rounds):
            crowd.until_asked(CALLS)
            served.popen.send_signal(signal.SIGHUP)
            eventually(partial(has_reloaded, served, done + 1))
        crowd.until_asked(CALLS)
    return crowd.told


def has_reloaded(served: Process, times: int) -> bool:
    return len(served.logged("data reloaded")) >= times


ALL = (killed, drained, replaced, restarted, reloaded)
SCENARIOS: Mapping[str, Callable[[int], Told]] = {scenario.__name__: scenario for scenario in ALL}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.fault", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    options = parser.parse_args()
    bad = 0
    for name in options.scenarios or SCENARIOS:
        began = time.monotonic()
        told = SCENARIOS[name](options.rounds)
        bad += len(told.failed)
        took = time.monotonic() - began
        print(f"{name}: {told.total} calls in {took:.0f} s, {len(told.failed)} failed, longest {told.longest_s:.2f} s")
        print("   ", ", ".join(f"{kind} {number}" for kind, number in sorted(told.calls.items())))
        for line in told.failed[:40]:
            print("   ", line)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
