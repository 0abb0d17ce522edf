"""A headless Chromium driven over the WebDriver protocol with the standard library alone."""

import base64
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
CHROMEDRIVER = shutil.which("chromedriver")
AVAILABLE = bool(CHROMIUM and CHROMEDRIVER)

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One browser session; a context manager.

    Args:
        width, height: of the viewport, CSS pixels.
        dark: whether the system prefers dark.
    """

    def __init__(self, width=1280, height=900, dark=False):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        self._driver = subprocess.Popen(
            [CHROMEDRIVER, f"--port={self._port}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "NO_PROXY": "127.0.0.1"},
        )  # fmt: skip
        self._session = ""
        flags = [*_FLAGS, f"--window-size={width},{height}", f"--user-data-dir={self._profile}"]
        if dark:
            flags.append("--force-dark-mode")
        options = {"binary": CHROMIUM, "args": flags,
                   "perfLoggingPrefs": {"enableNetwork": True, "enablePage": False}}  # fmt: skip
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        deadline = time.monotonic() + 30
        while True:
            try:
                answer = self._call(
                    "POST", "/session", {"capabilities": {"alwaysMatch": capabilities}}
                )
                break
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > deadline or self._driver.poll() is not None:
                    raise
                time.sleep(0.1)
        self._session = f"/session/{answer['sessionId']}"
        self.cdp("Emulation.setDeviceMetricsOverride",
                 width=width, height=height, deviceScaleFactor=1, mobile=width < 500)  # fmt: skip
        self.cdp("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self._call("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait(10)
            shutil.rmtree(self._profile, ignore_errors=True)

    def _call(self, method, path, body=None):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=120) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()[:2000]) from None

    def cdp(self, command, **parameters):
        """Call the DevTools protocol."""
        return self._call(
            "POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters}
        )

    def open(self, path, fragment="", timeout=60):
        """Open a file and wait until all is drawn; returns the seconds until it answered."""
        start = time.monotonic()
        self._call(
            "POST", f"{self._session}/url", {"url": Path(path).resolve().as_uri() + fragment}
        )
        for mark in ("ready", "drawn"):
            while self.run(f"return document.documentElement.dataset.{mark}") != "true":
                assert time.monotonic() - start < timeout, self.messages()
                time.sleep(0.02)
        return self.run("return performance.getEntriesByName('ready')[0].startTime") / 1000

    def run(self, script, *arguments):
        """Run JavaScript and return its value."""
        return self._call(
            "POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)}
        )

    def click(self, selector):
        """Click an element as a user would, scrolling to it first."""
        found = self._call(
            "POST", f"{self._session}/element", {"using": "css selector", "value": selector}
        )
        self._call("POST", f"{self._session}/element/{found[_ELEMENT]}/click", {})

    def mouse(self, x, y, press=False):
        """Move the mouse to viewport coordinates, and click there if asked."""
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}
        actions = [{**move, "x": round(x) - 2}, move]
        if press:
            actions += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}}
        self._call(
            "POST", f"{self._session}/actions", {"actions": [{**pointer, "actions": actions}]}
        )

    def key(self, value):
        """Press one key."""
        actions = [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        self._call("POST", f"{self._session}/actions",
                   {"actions": [{"type": "key", "id": "keys", "actions": actions}]})  # fmt: skip

    def messages(self):
        """Console warnings and errors, and uncaught exceptions, since the last call."""
        log = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self):
        """Addresses that were asked for since the last call."""
        log = self._call("POST", f"{self._session}/se/log", {"type": "performance"})
        events = [json.loads(entry["message"])["message"] for entry in log]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
            and not event["params"]["request"]["url"].startswith("chrome://")
        ]

    def screenshot(self, path, full=True):
        """Write a PNG of the viewport or the whole page."""
        shot = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def pdf(self):
        """Return the page as printed, PDF bytes."""
        return base64.b64decode(self.cdp("Page.printToPDF", printBackground=True)["data"])
