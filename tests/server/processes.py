"""Servers in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

READY = re.compile(r"perfcast is ready on (\S+) after")


def start(*flags: str) -> tuple[subprocess.Popen[str], str]:
    """A server that is ready, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "perfcast_cli", "serve", "--port", "0", "--metrics-port", "-1", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    match = READY.match(process.stdout.readline())
    assert match, "the server did not get ready"
    return process, match.group(1)


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    process, address = start(*flags)
    try:
        yield address
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
