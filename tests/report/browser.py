"""A headless Chromium for tests, over its DevTools pipe: JSON on two file descriptors, each message ended by a zero."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_S = 60.0
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--no-sandbox",
    "--disable-dev-shm-usage", "--force-device-scale-factor=1",
)  # fmt: skip
COMMANDS_AT, MESSAGES_AT = 3, 4  # descriptors that Chromium reads from and writes to


def find_chromium() -> str | None:
    """Return the program of the first browser found, None when there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser, as a context manager; collects what the page logs and what it asks of the network."""

    def __init__(self, program: str):
        self.profile = tempfile.TemporaryDirectory()
        commands, self.sending = os.pipe()
        self.receiving, messages = os.pipe()
        arguments = [program, *FLAGS, f"--user-data-dir={self.profile.name}", "about:blank"]
        shell = ["bash", "-c", f'exec "$@" {COMMANDS_AT}<&{commands} {MESSAGES_AT}>&{messages}', "bash", *arguments]
        self.process = subprocess.Popen(
            shell, pass_fds=(commands, messages), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(commands)
        os.close(messages)
        self.numbers, self.buffer, self.session = itertools.count(1), b"", ""
        self.errors: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> "Browser":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.sending)
        os.close(self.receiving)
        self.profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come meanwhile are collected."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.sending, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while (answer := self._next(deadline)).get("id") != number:
            self._collect(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def show(self, page: Path, *, width: int, height: int = 1000, dark: bool = False) -> None:
        """Load a file at a size of the window, light or dark, and wait until its pictures are drawn."""
        self.errors.clear()
        self.requests.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + TIMEOUT_S
        while not self.run("document.readyState === 'complete' && typeof drawShown === 'function'"):
            assert time.monotonic() < deadline, f"{page} was not loaded in {TIMEOUT_S} s"
            time.sleep(0.05)
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def run(self, expression: str) -> Any:
        """Evaluate JavaScript on the page and return its value; promises are awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write the whole page as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def _collect(self, event: dict[str, Any]) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(part.get("value", part.get("description"))) for part in told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"][:200])

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.receiving], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser said nothing for {TIMEOUT_S} s"
            part = os.read(self.receiving, 1 << 20)
            assert part, f"the browser ended with {self.process.wait()}"
            self.buffer += part
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)
