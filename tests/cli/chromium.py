"""A headless Chromium, driven over the pipe of its DevTools protocol; needs nothing but the browser."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--remote-debugging-pipe",
    "--disable-dev-shm-usage",
)
AS_3_AND_4 = """
import os, sys
for place, number in zip(sys.argv[1:3], (3, 4)):
    os.dup2(int(place), number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class BrowserEnded(Exception):
    """The browser closed its end of the pipe."""


class Page:
    """One page of a running browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.to_browser, self._from = to_browser, os.fdopen(from_browser, "rb", buffering=0)
        self._number, self._left = 0, b""
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, told["error"]
                return told["result"]

    def _next(self) -> Any:
        while b"\0" not in self._left:
            data = self._from.read(1 << 16)
            if not data:
                raise BrowserEnded
            self._left += data
        line, self._left = self._left.split(b"\0", 1)
        told = json.loads(line)
        if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(json.dumps(told["params"]))
        if told.get("method") == "Network.requestWillBeSent":
            self.requests.append(told["params"]["request"]["url"])
        return told

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def move_mouse(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


@contextmanager
def page(profile: Path) -> Iterator[Page]:
    """A page of a browser of its own, with its files under ``profile``."""
    browser, opened = _started(profile)
    try:
        yield opened
    finally:
        _end(browser, opened.to_browser)


def _started(profile: Path, tries: int = 3) -> tuple[subprocess.Popen[bytes], Page]:
    """A browser and its page; one that ends before it has answered anything is started again."""
    pipes = [os.pipe(), os.pipe()]
    ours, theirs = (pipes[0][1], pipes[1][0]), [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (pipes[0][0], pipes[1][1])]
    # the pipes are moved by a process of its own: code run between fork and exec meets gRPC's threads
    browser = subprocess.Popen(
        [sys.executable, "-c", AS_3_AND_4, *map(str, theirs), CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=theirs,
        stderr=subprocess.DEVNULL,
    )
    for fd in (pipes[0][0], pipes[1][1], *theirs):
        os.close(fd)
    try:
        return browser, Page(*ours)
    except (BrokenPipeError, BrowserEnded):
        _end(browser, ours[0])
        if tries == 1:
            raise
    return _started(profile, tries - 1)


def _end(browser: subprocess.Popen[bytes], to_browser: int) -> None:
    os.close(to_browser)
    browser.terminate()
    browser.wait(60)
