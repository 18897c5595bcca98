"""A headless Chromium, driven through chromedriver's WebDriver protocol (JSON over HTTP)."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

NAMES = {
    "browser": ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
    "driver": ("chromedriver",),
}
ARGUMENTS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--hide-scrollbars",
    # No name resolves: a page that needs the internet fails.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
WAIT_S = 30.0


def missing() -> str:
    """Why no browser can be driven here; empty when one can."""
    absent = [what for what, names in NAMES.items() if _find(names) is None]
    return f"no {' and no '.join(absent)} (Debian: chromium, chromium-driver)" if absent else ""


def _find(names: tuple[str, ...]) -> str | None:
    return next((path for path in map(shutil.which, names) if path), None)


class Browser:
    """One window."""

    def __init__(self, port: int) -> None:
        self._port = port
        # A browser refuses its sandbox to root.
        arguments = [*ARGUMENTS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": _find(NAMES["browser"]), "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{answer['sessionId']}"

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=90)) as connection:
            connection.request(method, path, json.dumps(body or {}) if method == "POST" else None)
            value = json.loads(connection.getresponse().read())["value"]
        if isinstance(value, dict) and "error" in value:
            raise RuntimeError(f"{value['error']}: {value['message']}")
        return value

    def _say(self, command: str, **values: Any) -> Any:
        return self._ask("POST", f"{self._session}/{command}", values)

    def go(self, url: str) -> None:
        """Load a page, and wait until its script has drawn."""
        self._say("url", url=url)

    def run(self, script: str, *values: Any) -> Any:
        """Run a script's body and give what it returns."""
        return self._say("execute/sync", script=script, args=list(values))

    def wait(self, condition: str, *values: Any) -> Any:
        """Wait until a script's expression is true and give its value."""
        deadline = time.monotonic() + WAIT_S
        while not (found := self.run(f"return {condition}", *values)):
            assert time.monotonic() < deadline, f"{condition}: {self.text}"
            time.sleep(0.05)
        return found

    @property
    def text(self) -> str:
        """Text of the page, as it is laid out."""
        return str(self.run("return document.body.innerText"))

    def resize(self, width: int, *, is_dark: bool = False) -> None:
        """Width of the page in CSS pixels, and what the reader prefers."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        for command, parameters in (
            ("Emulation.setDeviceMetricsOverride", size),
            ("Emulation.setEmulatedMedia", {"features": [scheme]}),
        ):
            self._say("goog/cdp/execute", cmd=command, params=parameters)

    def complaints(self) -> list[str]:
        """Messages of the console since the last call."""
        return [entry["message"] for entry in self._say("se/log", type="browser")]

    def screenshot(self, path: Path) -> None:
        """The window as PNG, for people."""
        picture = self._ask("GET", f"{self._session}/screenshot")
        path.write_bytes(base64.b64decode(picture))

    def close(self) -> None:
        self._ask("DELETE", self._session)


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own, ended with its driver."""
    driver = subprocess.Popen(
        [str(_find(NAMES["driver"])), "--port=0"], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    try:
        found = None
        while found is None:
            line = driver.stdout.readline()
            assert line, "chromedriver ended"
            found = re.search(r"successfully on port (\d+)", line)
        with closing(Browser(int(found[1]))) as made:
            yield made
    finally:
        driver.terminate()
        driver.wait()
        driver.stdout.close()
