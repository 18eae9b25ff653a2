"""A real browser for tests of the page: headless Chromium, spoken to through two pipes in its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

START = """
import os, sys
there, back = (os.dup(int(number)) for number in sys.argv[1:3])
there, back = (os.dup(there), os.dup(back)) if min(there, back) < 5 else (there, back)
os.dup2(there, 3), os.dup2(back, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""The browser listens at descriptor 3 and answers at 4, whatever numbers the pipes have here."""


def find() -> str | None:
    """The browser's program, or None where there is none."""
    return os.environ.get("BURNISH_BROWSER") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a headless browser. Every answer is waited for, at most `deadline` seconds."""

    def __init__(self, program: str, deadline: float = 60.0) -> None:
        self.deadline = deadline
        self.problems: list[str] = []
        """What the page wrote to the console as an error or a warning, and what it failed to load."""
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        there, self._to = os.pipe()
        self._from, back = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        options += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
        options += ["--disable-dev-shm-usage", f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", START, str(there), str(back), program, *options],
            pass_fds=(there, back),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(back)
        self._number, self._buffer, self._session, self._origin = 0, b"", "", "file:"
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._heed(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, place: Path | str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file or an address, and wait until it is loaded. A page that asks for anything of another origin is a problem."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.problems.clear()
        url = place if isinstance(place, str) else place.resolve().as_uri()
        self._origin = "file:" if isinstance(place, Path) else "/".join(url.split("/")[:3]) + "/"
        # By way of an empty page, because an address that differs in its fragment alone would not be loaded again.
        for each in ("about:blank", url):
            self.call("Page.navigate", url=each)
            while self._heed(self._receive()) != "Page.loadEventFired":
                pass

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']['exception'].get('description')}")
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + self.deadline
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {condition}")
            time.sleep(0.02)

    def key(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _heed(self, event: dict[str, Any]) -> str | None:
        """Remember what an event says is wrong; its name."""
        name, parameters = event.get("method"), event.get("params", {})
        if name == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif name == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])
        elif name == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(str(parameters["args"]))
        elif name == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(
            (self._origin, "blob:", "data:image/png;", "data:image/svg+xml,", "about:blank")
        ):
            self.problems.append(f"asked for {parameters['request']['url']}")
        return name

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + self.deadline
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing for {self.deadline:g} s")
            found = os.read(self._from, 1 << 20)
            if not found:
                raise RuntimeError("the browser ended")
            self._buffer += found
        message, _, self._buffer = self._buffer.partition(b"\0")
        result: dict[str, Any] = json.loads(message)
        return result

    def close(self) -> None:
        os.close(self._to)  # the browser ends when nobody can command it
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        os.close(self._from)
        self._folder.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
