"""A headless Chromium, driven through chromedriver by the W3C WebDriver protocol, on loopback alone."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from support.waiting import wait_until

_ARGUMENTS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


class Browser:
    """One window.

    Args:
        driver: the address of chromedriver.
        width: of the window, in CSS pixels.
        profile: an empty directory.
    """

    def __init__(self, driver: str, width: int, profile: str) -> None:
        phone = {"mobileEmulation": {"deviceMetrics": {"width": width, "height": 844, "pixelRatio": 2}}}
        options: dict[str, Any] = {
            "args": [*_ARGUMENTS, f"--user-data-dir={profile}", f"--window-size={width},1400"],
            **(phone if width < 600 else {}),
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._driver = driver
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def errors(self) -> list[str]:
        """What the console has said since the last call: errors of scripts, and violations of the page's policy."""
        found = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [one["message"] for one in found if one["level"] == "SEVERE"]

    def dark(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": [scheme]}}
        self._ask("POST", f"{self._session}/goog/cdp/execute", command)

    def screenshot(self) -> bytes:
        """The whole page, PNG."""
        params = {"captureBeyondViewport": True, "format": "png"}
        command = {"cmd": "Page.captureScreenshot", "params": params}
        return base64.b64decode(self._ask("POST", f"{self._session}/goog/cdp/execute", command)["data"])

    def close(self) -> None:
        self._ask("DELETE", self._session)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._driver + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=150) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:1000]}") from error


@contextlib.contextmanager
def driver() -> Iterator[str]:
    """A chromedriver; its address."""
    path = shutil.which("chromedriver")
    assert path, "apt-get install chromium chromium-driver"
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen([path, "--port=0"], stdout=said, stderr=said) as process,
    ):
        try:

            def port() -> str:
                said.seek(0)
                words = said.read().split("started successfully on port ")
                return words[1].split(".")[0] if len(words) > 1 else ""

            wait_until(port)
            yield f"http://127.0.0.1:{port()}"
        finally:
            process.terminate()


@contextlib.contextmanager
def browsing(address: str, width: int) -> Iterator[Browser]:
    """A window of a fresh profile."""
    with tempfile.TemporaryDirectory(prefix="tierd-browser-", ignore_cleanup_errors=True) as profile:
        browser = Browser(address, width, profile)
        try:
            yield browser
        finally:
            browser.close()
