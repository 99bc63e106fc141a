"""A headless Chromium, driven over the DevTools protocol through a pipe: no driver, no port, no library.

    with Browser(chromium) as browser, browser.open(page.as_uri()) as tab:
        tab.evaluate("document.title")

With `--remote-debugging-pipe` the browser reads commands on descriptor 3 and writes answers and events to
descriptor 4, JSON each, ended by a zero byte. An answer that does not come in time is a `BrowserError`.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ANSWER_S = 100
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--disable-smooth-scrolling",
    "--mute-audio",
)
# Popen cannot say which number a descriptor gets in the child; this puts them at 3 and 4 and becomes the browser.
BECOME = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
# A page tells a double click from two clicks by its clock, and on a busy machine a gesture takes as long as it likes.
# Pages therefore see a clock that the hand on the mouse sets: see `Tab.click` and `Tab.double_click`.
CLOCK = """
(() => {
    const RealDate = Date;
    let ahead = 0;
    let held = null;
    const now = () => held ?? RealDate.now() + ahead;
    globalThis.Date = class extends RealDate {
        constructor(...args) { super(...(args.length ? args : [now()])); }
        static now() { return now(); }
    };
    globalThis.clock = {
        skip: () => { ahead += 10_000; },
        hold: () => { held = now(); },
        release: () => { held = null; },
    };
})();
"""
KEYS = {"+": 187, "-": 189, "0": 48, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}


class BrowserError(Exception):
    """The browser did not do as it was told."""


def find_chromium() -> str | None:
    """The path of a Chromium, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One process; it is gone when the block is left, whatever happens."""

    def __init__(self, executable: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="fullshard-browser-")
        for_browser, self._commands = _pipe()
        self._answers, from_browser = _pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", BECOME, str(for_browser), str(from_browser)),
                *(executable, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"),
            ],
            pass_fds=(for_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(for_browser)
        os.close(from_browser)
        self._received: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._num_sent = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.send("Browser.close", timeout_s=5)
            self._process.wait(5)
        except (BrowserError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        self._reader.join()
        os.close(self._answers)
        shutil.rmtree(self._profile, ignore_errors=True)

    def send(
        self, method: str, session: str | None = None, timeout_s: float = ANSWER_S, **params: Any
    ) -> dict[str, Any]:
        """Give a command and return its answer; events that come meanwhile are kept."""
        self._num_sent += 1
        number = self._num_sent
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                answer = self._received.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise BrowserError(f"no answer to {method} within {timeout_s} s") from None
            if answer is None:
                raise BrowserError(f"the browser was gone before it answered {method}")
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    @contextmanager
    def open(
        self,
        address: str,
        *,
        width: int = 1280,
        height: int = 900,
        phone: bool = False,
        scheme: str = "light",
    ) -> Iterator[Tab]:
        """A tab of this size, whose user prefers this colour scheme, when the page has loaded."""
        # A context of its own has its own storage: no tab sees what another has remembered.
        context = self.send("Target.createBrowserContext")["browserContextId"]
        blank = self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.send("Target.attachToTarget", targetId=blank["targetId"], flatten=True)
        tab = Tab(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.send(f"{domain}.enable")
        tab.resize(width, height, phone=phone)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        tab.send("Emulation.setEmulatedMedia", features=features)
        tab.send("Page.addScriptToEvaluateOnNewDocument", source=CLOCK)
        tab.send("Page.navigate", url=address)
        tab.wait_until("document.readyState === 'complete'")
        try:
            yield tab
        finally:
            self.send("Target.disposeBrowserContext", browserContextId=context)

    def _read(self) -> None:
        rest = b""
        while part := os.read(self._answers, 1 << 16):
            *messages, rest = (rest + part).split(b"\0")
            for message in messages:
                self._received.put(json.loads(message))
        self._received.put(None)


class Tab:
    """One page, and a hand on its mouse and keyboard."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **params)

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=phone)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            said = details.get("exception", {}).get("description", details["text"])
            raise BrowserError(f"{expression}: {said}")
        return answer["result"].get("value")

    def wait_until(self, expression: str, timeout_s: float = ANSWER_S) -> None:
        """Until a JavaScript expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self._is_true(expression):
            if time.monotonic() > deadline:
                raise BrowserError(f"not true within {timeout_s} s: {expression}")
            time.sleep(0.05)

    def _is_true(self, expression: str) -> bool:
        """Not of a page that is just being left, which cannot answer."""
        try:
            return bool(self.evaluate(expression))
        except BrowserError as error:
            if "Inspected target navigated" in str(error):
                return False
            raise

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        """Click once, long after whatever was clicked before."""
        self.evaluate("clock.skip()")
        self._press_button(x, y, nth=1)

    def double_click(self, x: float, y: float) -> None:
        """Click twice at the same time by the page's clock."""
        self.evaluate("clock.skip(), clock.hold()")
        self._press_button(x, y, nth=1)
        self._press_button(x, y, nth=2)
        self.evaluate("clock.release()")

    def _press_button(self, x: float, y: float, *, nth: int) -> None:
        self.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=nth)
        self.mouse("mouseReleased", x, y, button="left", clickCount=nth)

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Drag, long after whatever was clicked before."""
        self.evaluate("clock.skip()")
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
        for part in (0.25, 0.5, 0.75, 1.0):
            self.mouse("mouseMoved", x + part * (to_x - x), y + part * (to_y - y), buttons=1)
        self.mouse("mouseReleased", to_x, to_y, button="left", clickCount=1)

    def wheel(self, x: float, y: float, down: float) -> None:
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=down)

    def press(self, key: str) -> None:
        code = {"key": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **code)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Of what is visible, or of the whole page."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def events(self, *methods: str) -> list[dict[str, Any]]:
        """The parameters of all events of these kinds, so far."""
        self.evaluate("0")  # whatever has happened in the page has been told before this answer
        return [
            event["params"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] in methods
        ]

    def complaints(self) -> list[str]:
        """Exceptions, console errors and warnings, and what the browser has logged."""
        thrown = [
            event["exceptionDetails"].get("exception", {}).get("description", "exception")
            for event in self.events("Runtime.exceptionThrown")
        ]
        written = [
            " ".join(str(arg.get("value", arg.get("description"))) for arg in event["args"])
            for event in self.events("Runtime.consoleAPICalled")
            if event["type"] in ("error", "warning", "assert")
        ]
        logged = [event["entry"]["text"] for event in self.events("Log.entryAdded")]
        return thrown + written + logged

    def requests(self) -> list[str]:
        """Addresses of all that was asked for."""
        return [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are none of the numbers that the browser uses."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
