"""Real servers on loopback: in a thread of this process with an event loop of its own, or in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from perfcast_server.app import Server
from perfcast_server.settings import Settings
from prometheus_client.parser import text_string_to_metric_families

PATIENCE_S = 60.0
SEARCH_PATIENCE_S = 300.0  # searches run below everything else on the machine


class Running:
    """A server and the loop that it runs in."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.loop = loop
        self.address = server.address

    def do(self, coroutine: Any) -> Any:
        """Run ``coroutine`` in the server's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def metric(self, name: str, **labels: str) -> float:
        return self.server.metrics.registry.get_sample_value(name, labels) or 0.0

    @contextmanager
    def held(self, lane: str = "steps") -> Iterator[None]:
        """Every thread of that lane is taken, so that work which is let in lasts until the end of the block."""
        pool = getattr(self.server.lanes, lane)._pool
        let_go = threading.Event()
        taken = threading.Semaphore(0)

        def hold() -> None:
            taken.release()
            let_go.wait(PATIENCE_S)

        threads = [pool.submit(hold) for _ in range(pool._max_workers)]
        try:
            for _ in threads:
                assert taken.acquire(timeout=PATIENCE_S)
            yield
        finally:
            let_go.set()


@contextmanager
def running(**settings: Any) -> Iterator[Running]:
    """A started server with ``settings`` over port 0 and no metrics port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def make() -> Server:
        return Server(Settings(**{"port": 0, "metrics_port": -1, "drain_grace_s": 5.0, **settings}))

    def do(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    server = do(make())
    try:
        do(server.start())
        yield Running(server, loop)
    finally:
        do(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


class Process:
    """``perfcast serve`` as a process, with the lines that it has printed."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.lines: list[str] = []
        command = [sys.executable, "-m", "perfcast_cli", "serve", "--port", "0", "--metrics-port", "0", *arguments]
        self.popen = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def address(self) -> str:
        """Waits until the server says that it is ready."""
        eventually(lambda: " is ready on " in self.output or self.popen.poll() is not None)
        found = re.search(r" is ready on (\S+)", self.output)
        assert found is not None, self.output
        return found.group(1)

    def logged(self, message: str, **fields: Any) -> list[dict[str, Any]]:
        """Log entries with that message and those fields."""
        entries = [json.loads(line) for line in list(self.lines) if line.startswith("{")]
        return [e for e in entries if e["message"] == message and fields.items() <= e.items()]

    def worker_pids(self) -> dict[int, int]:
        """Worker -> the process that is in its place now."""
        return {entry["worker"]: entry["worker_pid"] for entry in self.logged("worker is ready")}

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        ready = self.logged("ready", address=self.address)
        port = next(entry["metrics_port"] for entry in ready if entry["metrics_port"] is not None)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
            text = page.read().decode()
        families = text_string_to_metric_families(text)
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics().get((name, frozenset(labels.items())), 0.0)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send the signal and wait for the exit status."""
        self.popen.send_signal(number)
        code = self.popen.wait(PATIENCE_S)
        self._reader.join(5)
        return code

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(line.rstrip("\n"))


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[Process]:
    """``perfcast serve`` on ports of its own; ended at the end."""
    started = Process(*arguments, **environment)
    try:
        yield started
    finally:
        if started.popen.poll() is None:
            started.popen.terminate()
            try:
                started.popen.wait(20)
            except subprocess.TimeoutExpired:
                started.popen.kill()
                started.popen.wait(5)


def eventually(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait until ``condition`` holds."""
    until = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
