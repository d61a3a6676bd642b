"""A real chromium, driven over WebDriver's HTTP protocol: https://www.w3.org/TR/webdriver2/."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.request import Request, urlopen

import pytest

#: Without a sandbox, as root in a container has none; nothing that asks another machine.
_OPTIONS: Final = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"),
    *("disable-background-networking", "disable-component-update", "disable-dev-shm-usage"),
)


class Browser:
    """A session with one window."""

    def __init__(self, address: str) -> None:
        self._address = address

    def _ask(self, path: str, **body: object) -> Any:
        content = json.dumps(body).encode()
        asked = Request(f"{self._address}{path}", content, {"Content-Type": "application/json"})
        with urlopen(asked, timeout=60) as answer:
            return json.load(answer)["value"]

    def go(self, address: str) -> None:
        self._ask("/url", url=address)

    def run(self, script: str, *arguments: object) -> Any:
        """What a script in the page returns."""
        return self._ask("/execute/sync", script=script, args=[*arguments])

    def chrome(self, command: str, **params: object) -> Any:
        """Chromium's own protocol: https://chromedevtools.github.io/devtools-protocol/."""
        return self._ask("/goog/cdp/execute", cmd=command, params=params)

    def shows(self, width: int, height: int = 900, *, theme: str = "light") -> None:
        """Set the window's size in CSS pixels, and the theme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.chrome("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.chrome("Emulation.setEmulatedMedia", features=[feature])

    def picture(self) -> bytes:
        """What the window shows, as PNG."""
        return base64.b64decode(self.chrome("Page.captureScreenshot", format="png")["data"])

    def type(self, text: str) -> None:
        """Press the keys of a text."""
        keys = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self._ask("/actions", actions=[{"type": "key", "id": "keys", "actions": keys}])

    def until(self, found: Callable[[], object], *, seconds: float = 30) -> None:
        """Wait until something is there."""
        deadline = time.monotonic() + seconds
        while not found():
            assert time.monotonic() < deadline, self.run("return document.body.innerText")
            time.sleep(0.1)


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with an empty profile. Skips the test where there is none."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        # It fetches nothing by a proxy, and keeps its files in the profile.
        own = {key: text for key, text in os.environ.items() if "proxy" not in key.lower()}
        process = subprocess.Popen(
            [driver, "--port=0"],
            env={**own, "HOME": profile, "TMPDIR": profile},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        try:
            port = next(
                line.rstrip(".\n").rpartition(" ")[2]
                for line in process.stdout
                if "successfully" in line
            )
            address = f"http://127.0.0.1:{port}"
            arguments = [f"--{each}" for each in (*_OPTIONS, f"user-data-dir={profile}/data")]
            wanted = {"goog:chromeOptions": {"binary": chromium, "args": arguments}}
            wanted |= {"goog:loggingPrefs": {"browser": "ALL"}}
            root = Browser(address)
            session = root._ask("/session", capabilities={"alwaysMatch": wanted})["sessionId"]
            try:
                yield Browser(f"{address}/session/{session}")
            finally:
                with urlopen(Request(f"{address}/session/{session}", method="DELETE")):
                    pass
        finally:
            process.terminate()
            process.wait(10)
            process.stdout.close()
