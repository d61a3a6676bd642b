"""A real chromium, driven over WebDriver's HTTP protocol: https://www.w3.org/TR/webdriver2/."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any, Final

import pytest

#: Without a sandbox, as root in a container has none; nothing that asks another machine.
_OPTIONS: Final = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"),
    *("disable-background-networking", "disable-component-update", "disable-dev-shm-usage"),
)


class Browser:
    """A session with one window."""

    def __init__(self, port: int, **wanted: object) -> None:
        self._port, self._session = port, ""
        found = self.ask("/session", capabilities={"alwaysMatch": wanted})
        self._session = f"/session/{found['sessionId']}"

    def ask(self, path: str, method: str = "POST", **body: object) -> Any:
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=60)) as driver:
            driver.request(method, f"{self._session}{path}", json.dumps(body))
            answer = driver.getresponse()
            found = json.load(answer)["value"]
        assert answer.status == 200, found
        return found

    def go(self, address: str) -> None:
        self.ask("/url", url=address)

    def run(self, script: str) -> Any:
        """What a script in the page returns."""
        return self.ask("/execute/sync", script=script, args=[])

    def chrome(self, command: str, **params: object) -> Any:
        """Chromium's own protocol: https://chromedevtools.github.io/devtools-protocol/."""
        return self.ask("/goog/cdp/execute", cmd=command, params=params)

    def shows(self, width: int, height: int = 900, *, theme: str = "light") -> None:
        """Set the window's size in CSS pixels, and the theme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.chrome("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.chrome("Emulation.setEmulatedMedia", features=[feature])

    def picture(self) -> bytes:
        """What the window shows, as PNG."""
        return base64.b64decode(self.ask("/screenshot", "GET"))

    def type(self, text: str) -> None:
        """Press the keys of a text."""
        keys = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self.ask("/actions", actions=[{"type": "key", "id": "keys", "actions": keys}])


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with an empty profile. Skips the test where there is none."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        command, own = [driver, "--port=0"], {**os.environ, "HOME": profile, "TMPDIR": profile}
        with subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            said = next(line for line in process.stdout if "successfully" in line)
            arguments = [f"--{each}" for each in (*_OPTIONS, f"user-data-dir={profile}/data")]
            wanted = {"goog:chromeOptions": {"binary": chromium, "args": arguments}}
            try:
                found = Browser(int(said.rpartition(" ")[2].rstrip(".\n")), **wanted)
                yield found
                found.ask("", "DELETE")
            finally:
                process.terminate()
