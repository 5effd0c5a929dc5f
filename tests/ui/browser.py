"""A real browser for tests: Chromium without a window, driven over chromedriver's WebDriver interface (W3C)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or CHROMEDRIVER is None,
    reason="needs chromium and chromedriver, which `make test` installs where it may",
)
PATIENCE_MS = 60_000
ENTER, SHIFT, ESCAPE = "\ue007", "\ue008", "\ue00c"
_STARTED = re.compile(r"started successfully on port (\d+)")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_FLAGS = (
    "--headless",
    "--no-sandbox",  # tests may run as root, in a container
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-breakpad",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1000,800",
)


class Browser:
    """One browser window, all of whose files lie below `folder`. Close it."""

    def __init__(self, folder: Path) -> None:
        self._driver = subprocess.Popen(
            [str(CHROMEDRIVER), "--port=0", f"--log-path={folder / 'chromedriver.log'}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "HOME": str(folder), "TMPDIR": str(folder)},
        )
        self._session = ""
        self._http = httpx.Client(trust_env=False, timeout=2 * PATIENCE_MS / 1000)
        try:
            self._http.base_url = httpx.URL(f"http://127.0.0.1:{self._port()}")
            profile = f"--user-data-dir={folder / 'profile'}"
            options = {"binary": CHROMIUM, "args": [*_FLAGS, profile]}
            always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": always}})
            self._session = f"/session/{made['sessionId']}"
            self._call("POST", "/timeouts", {"script": PATIENCE_MS})
        except BaseException:
            self.close()
            raise

    def _port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := _STARTED.search(line):
                return int(found[1])
        raise AssertionError(f"chromedriver did not start: {self._driver.wait()}")

    def _call(self, method: str, path: str, body: object = None) -> Any:
        content = None if body is None else json.dumps(body)
        value = self._http.request(method, self._session + path, content=content).json()["value"]
        if isinstance(value, dict) and "error" in value and "stacktrace" in value:
            raise AssertionError(f"{path}: {value['error']}: {value['message']}")
        return value

    def open(self, url: str) -> None:
        """Load a page, and wait until it is there."""
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """What a function's body returns in the page, given `arguments`; a promise is waited for."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, expression: str, *arguments: object) -> Any:
        """The first value of an expression in the page that counts as true; it is looked at in each frame."""
        script = f"""const see = () => ({expression});
            return new Promise((resolve, reject) => {{
                const until = performance.now() + {PATIENCE_MS // 2};
                const look = () => {{
                    const seen = see();
                    if (seen) resolve(seen);
                    else if (performance.now() > until) reject(new Error(document.body.innerText));
                    else requestAnimationFrame(look);
                }};
                look();
            }});"""
        return self.run(script, *arguments)

    def _element(self, css: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": css})
        return f"/element/{found[_ELEMENT]}"

    def click(self, css: str) -> None:
        """As with a mouse: it must be there to be seen."""
        self._call("POST", f"{self._element(css)}/click", {})

    def type(self, css: str, text: str) -> None:
        """On the keyboard, in place of what is there."""
        element = self._element(css)
        self._call("POST", f"{element}/clear", {})
        self._call("POST", f"{element}/value", {"text": text})

    def press(self, css: str, keys: str) -> None:
        """On the keyboard, behind what is there."""
        self._call("POST", f"{self._element(css)}/value", {"text": keys})

    def text(self, css: str) -> str:
        """What is to be read in the last such element."""
        return str(self.run("return [...document.querySelectorAll(arguments[0])].at(-1).innerText", css))

    def console(self) -> list[dict[str, Any]]:
        """What was written to the console since the last look, by scripts and by the browser."""
        entries: list[dict[str, Any]] = self._call("POST", "/se/log", {"type": "browser"})
        return entries

    def screenshot(self) -> str:
        """A PNG, in base64."""
        return str(self._call("GET", "/screenshot"))

    def devtools(self, command: str, **params: object) -> Any:
        """A command of Chrome's DevTools protocol, for what WebDriver has none for."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def close(self) -> None:
        """End the browser and what drives it."""
        if self._session:
            self._call("DELETE", "")
        self._http.close()
        self._driver.terminate()
        self._driver.wait()
        if self._driver.stdout is not None:
            self._driver.stdout.close()
