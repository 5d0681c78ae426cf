"""A page in headless Chromium, over the DevTools protocol on two pipes: what it logs, asks for and shows."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.waiting import LIMIT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-extensions --disable-background-networking"
)


class Browser:
    """A page, driven by messages of the DevTools protocol."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        # Chromium reads messages from descriptor 3 and writes to 4.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for pair in (os.pipe(), os.pipe()) for end in pair]
        command = f'exec "$0" "$@" 3<&{ends[0]} 4>&{ends[3]}'
        options = [*OPTIONS.split(), "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *options],
            pass_fds=(ends[0], ends[3]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ends[0])
        os.close(ends[3])
        self.writer, self.reader = ends[1], ends[2]
        self.buffer, self.last = b"", 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        sizes = {"width": 1366, "height": 768, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **sizes)

    def close(self) -> None:
        """Ends the browser."""
        with contextlib.suppress(OSError, AssertionError):
            self.session = None
            self.call("Browser.close")
        os.close(self.writer)
        os.close(self.reader)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self.last += 1
        message: dict[str, Any] = {"id": self.last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.reader], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            data = os.read(self.reader, 1 << 20)
            assert data, "Chromium ended"
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, link: str = "") -> None:
        """Opens a file, with `link` as the hash of its address, and waits until it is drawn."""
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        started = time.monotonic()
        self.call("Page.navigate", url=page.resolve().as_uri() + link)
        while self.evaluate("document.documentElement && document.documentElement.dataset.ready") != "1":
            assert time.monotonic() - started < LIMIT, f"the page is not drawn: {self.complaints()}"
            time.sleep(0.01)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """The text of each element."""
        return self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)")

    def count(self, selector: str) -> int:
        """How many elements there are."""
        return self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")

    def press(self, *keys: str) -> None:
        """Presses keys one after the other."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def click(self, selector: str, index: int = 0) -> None:
        """Clicks on an element, scrolled into view."""
        element = f"document.querySelectorAll({json.dumps(selector)})[{index}]"
        self.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
        middle = "({x, y, width, height}) => [x + width / 2, y + height / 2]"
        x, y = self.evaluate(f"({middle})({element}.getBoundingClientRect())")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, buttons=1)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hash(self) -> str:
        """That of the address."""
        return self.evaluate("location.hash")

    def complaints(self) -> list[str]:
        """Errors and warnings in the console, exceptions, and requests other than for the page itself."""
        self.evaluate("0")
        found = []
        for event in self.events:
            params = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    found.append(params["exceptionDetails"]["exception"].get("description", "exception"))
                case "Runtime.consoleAPICalled":
                    found.append(" ".join(str(one.get("value")) for one in params["args"]))
                case "Log.entryAdded":
                    found.append(params["entry"]["text"])
                case "Network.requestWillBeSent" if params["documentURL"] != params["request"]["url"]:
                    if not params["request"]["url"].startswith("data:"):
                        found.append(f"request: {params['request']['url']}")
        return found


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser, ended afterwards."""
    made = Browser(profile)
    try:
        yield made
    finally:
        made.close()
