"""A headless Chromium, driven over the pipe of its DevTools protocol; needs nothing but the browser."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
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


class Page:
    """One page of a running browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._to, self._from = to_browser, os.fdopen(from_browser, "rb", buffering=0)
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
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, told["error"]
                return told["result"]

    def _next(self) -> Any:
        while b"\0" not in self._left:
            data = self._from.read(1 << 16)
            assert data, "the browser has ended"
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
    pipes = [os.pipe(), os.pipe()]
    ours, theirs = (pipes[0][1], pipes[1][0]), [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (pipes[0][0], pipes[1][1])]
    for fd in (pipes[0][0], pipes[1][1]):
        os.close(fd)

    def as_3_and_4() -> None:
        for fd, number in zip(theirs, (3, 4), strict=True):
            os.dup2(fd, number)

    browser = subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
        preexec_fn=as_3_and_4,
        pass_fds=(3, 4),
        stderr=subprocess.DEVNULL,
    )
    for fd in theirs:
        os.close(fd)
    try:
        yield Page(*ours)
    finally:
        os.close(ours[0])
        browser.terminate()
        browser.wait(10)
