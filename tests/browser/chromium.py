"""A headless Chromium of its own profile, driven over the DevTools protocol: open a page, run script in it.

One process tree per run, in a session of its own; whatever is left of it when the tests end is killed.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from e2e.server import eventually
from e2e.sockets import Socket

NAMES = ("chromium", "chromium-browser", "google-chrome")
SCRIPT_S = 30.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # its sandbox does not work for root, and the only pages are our own
    "--remote-debugging-port=0",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
)


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class ScriptError(AssertionError):
    """The script in the page threw."""


class Browser:
    def __init__(self, program: str, profile: Path) -> None:
        self._profile = profile
        with open(profile.with_suffix(".log"), "wb") as log:
            self._popen = subprocess.Popen(
                [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._port = eventually(self._read_port, what="Chromium's port")

    def _read_port(self) -> int:
        if self._popen.poll() is not None:
            raise AssertionError(f"Chromium ended: {self._profile.with_suffix('.log').read_text()[-2_000:]}")
        try:
            return int((self._profile / "DevToolsActivePort").read_text().split()[0])
        except (FileNotFoundError, IndexError):
            return 0

    def open(self, url: str) -> Page:
        """A new tab, loaded."""
        target = self._ask("PUT", f"/json/new?{url}")
        page = Page(self, target["id"], Socket(self._port, urlsplit(target["webSocketDebuggerUrl"]).path))
        eventually(
            lambda: page.run("document.readyState === 'complete' && location.href") == url, what=f"{url} in the browser"
        )
        return page

    def shut(self, target: str) -> None:
        self._ask("GET", f"/json/close/{target}")

    def _ask(self, method: str, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SCRIPT_S)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read()
            assert response.status == 200, (response.status, body)
            return json.loads(body) if body.startswith(b"{") else None
        finally:
            connection.close()

    def close(self) -> None:
        self._popen.terminate()
        try:
            self._popen.wait(10)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._popen.pid, signal.SIGKILL)  # its own session: only what it started
        except ProcessLookupError:
            pass
        self._popen.wait()


class Page:
    """A tab. Script runs in it as if typed into its console; promises are waited for."""

    def __init__(self, browser: Browser, target: str, devtools: Socket) -> None:
        self._browser = browser
        self._target = target
        self._devtools = devtools
        self._numbers = itertools.count(1)

    def run(self, script: str, *, within_s: float = SCRIPT_S) -> Any:
        """The value of an expression, as JSON has it."""
        answer = self._command(
            "Runtime.evaluate", within_s, expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise ScriptError(json.dumps(answer["exceptionDetails"])[:2_000])
        return answer["result"].get("value")

    def call(self, function: str, *arguments: object, within_s: float = SCRIPT_S) -> Any:
        """The value of a function of the page for these arguments."""
        return self.run(f"({function})({', '.join(json.dumps(value) for value in arguments)})", within_s=within_s)

    def _command(self, method: str, within_s: float, **parameters: object) -> dict[str, Any]:
        number = next(self._numbers)
        self._devtools.send_text(json.dumps({"id": number, "method": method, "params": parameters}))
        deadline = time.monotonic() + within_s
        while True:
            message = json.loads(self._devtools.receive_text(max(deadline - time.monotonic(), 0)))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def close(self) -> None:
        self._devtools.close()
        self._browser.shut(self._target)
