"""Servers and other interpreters as child processes that do not outlive the benchmark."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def environment() -> dict[str, str]:
    """This process's, with its import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@contextmanager
def server(*command: str) -> Iterator[str]:
    """Run a Python module that prints "ready on ADDRESS"; gives the address."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        match = re.search(r"ready on (\S+)", process.stdout.readline())
        if match is None:
            raise SystemExit(f"{command[0]} did not start")
        yield match.group(1)
    finally:
        process.terminate()
        process.wait(10)


class Meter:
    """The metrics of a server at a port that was free."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = str(free.getsockname()[1])
        self._page = f"http://127.0.0.1:{self.port}/metrics"

    def handling(self, method: str) -> tuple[float, float, float]:
        """Calls of a method so far, their seconds, and CPU seconds of the process."""
        with urllib.request.urlopen(self._page, timeout=60) as page:
            text = page.read().decode()

        def value(name: str, label: str = "") -> float:
            found = re.search(rf"^{name}{label} (\S+)$", text, re.MULTILINE)
            return float(found.group(1)) if found else 0.0

        label = rf'{{[^}}]*grpc_method="{method}"[^}}]*}}'
        name = "grpc_server_handling_seconds"
        return value(f"{name}_count", label), value(f"{name}_sum", label), value("process_cpu_seconds_total")


class Peer:
    """Another interpreter that answers lines of JSON with lines of JSON."""

    def __init__(self, python: str, script: str, arguments: Sequence[str] = ()) -> None:
        bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [python, script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=bare,
        )

    def ask(self, question: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the reference interpreter ended; is the reference engine installed there?")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
