"""A real browser, driven as a person uses it: Chromium, through its WebDriver.

Only what the tests need of the protocol (https://www.w3.org/TR/webdriver2/), with the plain HTTP
client that is here anyway.
"""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import requests

from trainctl.plugin import free_port, is_free

ENTER: Final = "\ue007"
SHIFT: Final = "\ue008"
CONTROL: Final = "\ue009"
_ELEMENT: Final = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's own name


class Browser:
    """One window of a browser."""

    def __init__(self, session: str) -> None:
        """``session``: address of the driver's session."""
        self._session = session

    def open(self, address: str) -> None:
        self._post("url", url=address)

    def click(self, selector: str) -> None:
        """Click what a CSS selector finds first, as soon as that is possible."""

        def clicks() -> bool:
            found = self._post("elements", using="css selector", value=selector)
            if not found:
                return False
            with contextlib.suppress(WebDriverError):  # something is still in front of it
                self._post(f"element/{found[0][_ELEMENT]}/click")
                return True
            return False

        self.wait(f"{selector} can be clicked", clicks)

    def type(self, keys: str) -> None:
        """Type where the cursor is; a modifier is held until the end."""
        element = self._get("element/active")[_ELEMENT]
        self._post(f"element/{element}/value", text=keys)

    def texts(self, selector: str) -> list[str]:
        """What is written in all that a CSS selector finds."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)"
        found: list[str] = self._post("execute/sync", script=script, args=[selector])
        return found

    def wait(self, what: str, condition: Callable[[], bool], *, timeout_s: float = 120) -> None:
        """Wait until a condition holds; fails with what is on the screen."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not so: {what}; shown: {self.texts('body')}"
            time.sleep(0.2)

    def _get(self, path: str) -> Any:
        return _value(requests.get(f"{self._session}/{path}", timeout=60))

    def _post(self, path: str, **values: object) -> Any:
        return _value(requests.post(f"{self._session}/{path}", json=values, timeout=60))


class WebDriverError(Exception):
    """The browser cannot do it now."""


def _value(answer: requests.Response) -> Any:
    value = answer.json()["value"]
    if answer.status_code != requests.codes.ok:
        raise WebDriverError(f"{value['error']}: {value['message']}")
    return value


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """A browser without a screen; skips the test where there is none.

    Args:
        folder: an empty one, for its profile.
    """
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("no browser: install chromium and chromium-driver")
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [driver, f"--port={port}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    session = ""
    try:
        deadline = time.monotonic() + 60
        while is_free(port):
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        options = {
            "binary": binary,
            "args": [
                *("--headless=new", "--disable-gpu", "--window-size=1400,1000"),
                *("--no-sandbox", "--disable-dev-shm-usage"),  # as root, in a container
                f"--user-data-dir={folder / 'profile'}",
            ],
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options}
        answer = requests.post(
            f"http://127.0.0.1:{port}/session",
            json={"capabilities": {"alwaysMatch": wanted}},
            timeout=120,
        )
        session = f"http://127.0.0.1:{port}/session/{_value(answer)['sessionId']}"
        yield Browser(session)
    finally:
        try:
            if session:
                requests.delete(session, timeout=30)
        finally:
            process.terminate()
            process.wait(timeout=30)
