"""A headless Chromium, driven by its DevTools protocol through a pair of pipes, without further packages."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from swiftllm.files import cache_dir

TIMEOUT_S = 60.0
REQUIRED = "APEX_REQUIRE_BROWSER"  # in the environment: a test that finds no browser fails instead of being skipped
ON_PATH = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
NOT_FOUND = "no Chromium on PATH or in the cache: scripts/install_chromium.sh fetches one"


def find_browser() -> str | None:
    """The browser of scripts/install_chromium.sh, or one on PATH."""
    ours = cache_dir() / "chromium" / "bin" / "chromium"
    return str(ours) if ours.is_file() else next((path for name in ON_PATH if (path := shutil.which(name))), None)


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """A browser for a test. Where there is none the test is skipped, or fails under ``APEX_REQUIRE_BROWSER=1``."""
    binary = find_browser()
    if binary is None:
        (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(NOT_FOUND)
    browser = Browser(binary, profile)
    try:
        yield browser
    finally:
        browser.close()


class Browser:
    """One page of a new browser. ``events`` holds everything that the page reported."""

    def __init__(self, binary: str, profile: Path) -> None:
        to_browser, self.write_end = os.pipe()
        self.read_end, from_browser = os.pipe()
        # The protocol uses descriptors 3 and 4; the shell redirects ours to these.
        shell = 'binary=$1; commands=$2; answers=$3; shift 3; eval "exec 3<&$commands 4>&$answers"; exec "$binary" "$@"'
        # No sandbox: containers forbid it, and the browser opens only our own file.
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "browser", binary, str(to_browser), str(from_browser), *flags],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.unread = b""
        self.events: list[dict[str, Any]] = []
        self.calls = 0
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one protocol command and return its answer; events in between are added to ``events``."""
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.calls:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self.unread:
            if not select.select([self.read_end], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing for {TIMEOUT_S:.0f} s")
            chunk = os.read(self.read_end, 1 << 16)
            if not chunk:
                raise RuntimeError("the browser ended")
            self.unread += chunk
        message, self.unread = self.unread.split(b"\0", 1)
        return json.loads(message)

    def open(self, url: str) -> None:
        """Load a page and wait until it is complete."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; raises if it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser: closing its pipe asks it to end, and after 10 s it is killed."""
        for descriptor in (self.write_end, self.read_end):
            os.close(descriptor)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
