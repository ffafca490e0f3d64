"""A real headless Chromium, driven by the Chrome DevTools protocol.

    with Browser(tmp_path) as browser:
        browser.open("http://127.0.0.1:8420/")
        browser.wait("document.querySelectorAll('svg a').length > 3")
        browser.picture(tmp_path / "page.png")

Every dialog, every error of a script and every request to another host is noted in ``browser.trouble``.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WAIT_S = 60

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--disable-dev-shm-usage",
    "--mute-audio",
    "--force-color-profile=srgb",
]


def need() -> None:
    """Skip the test where a browser cannot be driven, with the reason."""
    pytest.importorskip("websockets", reason="websockets is not installed: pip install -e '.[test]'")
    if PROGRAM is None:
        pytest.skip("Chromium is not on this machine: apt-get install chromium")


class Browser:
    """One browser with one page. Closing it ends its process."""

    def __init__(self, folder: Path) -> None:
        from websockets.sync.client import connect

        assert PROGRAM is not None
        self.trouble: list[str] = []
        self._number = 0
        self._opened = contextlib.ExitStack()
        self._profile = folder / "chromium"
        self._process = subprocess.Popen(
            [PROGRAM, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": str(folder)},
        )
        try:
            port, path = self._endpoint()
            made = connect(f"ws://127.0.0.1:{port}{path}", max_size=None, open_timeout=WAIT_S, proxy=None)
            self._socket = self._opened.enter_context(made)
            target = self._send("Target.createTarget", {"url": "about:blank"}, None)["targetId"]
            given = self._send("Target.attachToTarget", {"targetId": target, "flatten": True}, None)
            self._session: str | None = given["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.command(f"{domain}.enable")
            self.size(1400, 900)
        except BaseException:
            self.close()
            raise

    def _endpoint(self) -> tuple[str, str]:
        file = self._profile / "DevToolsActivePort"
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise AssertionError(f"Chromium ended with {self._process.returncode}")
            with contextlib.suppress(OSError, ValueError):
                port, path = file.read_text().split()
                return port, path
            time.sleep(0.05)
        raise AssertionError("Chromium did not open its port")

    def _send(self, method: str, parameters: dict[str, Any], session: str | None) -> Any:
        self._number += 1
        mine = self._number
        message = {"id": mine, "method": method, "params": parameters}
        self._socket.send(json.dumps(message | ({"sessionId": session} if session else {})))
        while True:
            answer = json.loads(self._socket.recv(timeout=WAIT_S))
            if answer.get("id") == mine:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        method, about = event.get("method"), event.get("params", {})
        if method == "Page.javascriptDialogOpening":
            self.trouble.append(f"dialog: {about['message']}")
            self._number += 1  # its answer is read by a later command
            accept = {"id": self._number, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            self._socket.send(json.dumps(accept | {"sessionId": event["sessionId"]}))
        elif method == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.trouble.append(f"script: {details.get('exception', {}).get('description') or details['text']}")
        elif method == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.trouble.append(f"log: {about['entry']['text']} {about['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            url = about["request"]["url"]
            if not url.startswith(("http://127.0.0.1:", "about:", "chrome:")):
                self.trouble.append(f"request: {url}")

    def command(self, method: str, **parameters: Any) -> Any:
        """A command of the protocol, for the page."""
        return self._send(method, parameters, self._session)

    def open(self, url: str) -> None:
        self.command("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, expression: str) -> Any:
        """The value of an expression; of a promise, its result."""
        given = self.command("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in given:
            raise AssertionError(f"{expression}: {given['exceptionDetails']}")
        return given["result"].get("value")

    def wait(self, expression: str, limit_s: float = WAIT_S) -> Any:
        """Wait until an expression is true, and return its value."""
        until = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(AssertionError):  # the page is being replaced
                value = self.run(expression)
                if value:
                    return value
            if time.monotonic() > until:
                raise AssertionError(f"never true: {expression}\n{self.text()}\n{self.trouble}")
            time.sleep(0.1)

    def text(self) -> str:
        """The text that the page shows."""
        return str(self.run("document.body.innerText"))

    def key(self, key: str, code: int) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def size(self, width: int, height: int, phone: bool = False) -> None:
        scale = 2 if phone else 1
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )

    def theme(self, name: str, motion: str = "no-preference") -> None:
        features = [
            {"name": "prefers-color-scheme", "value": name},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.command("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path, whole: bool = False) -> Path:
        shot = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._send("Browser.close", {}, None)
        with contextlib.suppress(Exception):
            self._opened.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
