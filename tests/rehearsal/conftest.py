"""One deployment, and one pair of images, for all tests in containers.

It is brought up for the first of them and taken away after the last. The files use it in the order
of their names: ``test_first_hour`` has its first jobs, ``test_in_containers`` brings the standing
cluster up and down, ``test_jobs`` starts with no container running, ``test_second_post`` deploys it
anew with a head that trains, and ``test_taking_down`` comes last because it destroys the stacks.
"""

import functools
import http.server
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rehearsal import children
from rehearsal.children import Steps
from rehearsal.cycle import SETTINGS, Rehearsal
from rehearsal.engine import EngineError
from tests.conftest import ROOT

#: Whose calls those of the command line are, in the list of all calls.
LAPTOP = "laptop"
#: Spot: the job tests take a host away, which no other test minds.
DEPLOYED = {**SETTINGS, "spot": "true"}
#: Names of the tests that have passed in this process.
PASSED: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        PASSED.add(report.nodeid.rpartition("::")[2])


@pytest.fixture(scope="session")
def deployment() -> Iterator[Rehearsal]:
    """The stacks and the images, with nothing running; nothing is left afterwards.

    Skips, and says why, where there is no Docker Engine or something is up already.
    """
    try:
        found = Rehearsal.here()
    except EngineError as error:
        pytest.skip(f"no Docker Engine: {error}")
    if any(found.status()[what] for what in ("processes", "containers", "networks")):
        pytest.skip("a local deployment is up already: trainctl local down")
    try:
        found.up(Steps(5), settings=DEPLOYED)
        yield found
    finally:
        os.environ.pop(children.NAME, None)
        found.down(Steps(1))


def command(rehearsal: Rehearsal, *arguments: str) -> dict[str, Any]:
    """Arguments of ``subprocess`` for a command of trainctl."""
    return {
        "args": [sys.executable, "-m", "trainctl", *arguments],
        "cwd": ROOT,
        "env": {**rehearsal.shell(), "AWS_SESSION_TOKEN": LAPTOP},
        "stdin": subprocess.DEVNULL,
        "text": True,
    }


def trainctl(
    rehearsal: Rehearsal, *arguments: str, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """The command line, with its exit code and both streams."""
    return subprocess.run(
        **command(rehearsal, *arguments), capture_output=True, timeout=timeout_s, check=False
    )


def succeeded(
    rehearsal: Rehearsal, *arguments: str, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """The same of a command that must end with 0."""
    done = trainctl(rehearsal, *arguments, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    return done


def cluster_status(rehearsal: Rehearsal) -> dict[str, Any]:
    """What ``trainctl cluster status --json`` prints."""
    found: dict[str, Any] = json.loads(succeeded(rehearsal, "cluster", "status", "--json").stdout)
    return found


def show(rehearsal: Rehearsal, job: str) -> dict[str, Any]:
    """What ``trainctl show JOB --json`` prints."""
    found: dict[str, Any] = json.loads(succeeded(rehearsal, "show", job, "--json").stdout)
    return found


@pytest.fixture
def log_of_a_failure(request: pytest.FixtureRequest, deployment: Rehearsal) -> Iterator[None]:
    """Print what the newest job has said when a test fails, for it goes with the deployment, and
    stop it: the next tests would share the processors with it."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        for job in json.loads(trainctl(deployment, "ls", "--limit", "1", "--json").stdout):
            print(f"--- {job}\n{trainctl(deployment, 'logs', job['id']).stdout}")
            trainctl(deployment, "stop", job["id"], "--yes")


def gateway(rehearsal: Rehearsal) -> str:
    """Address of this machine that containers reach."""
    return str(urlsplit(rehearsal.state()["endpoint"]).hostname)


@contextmanager
def served(
    folder: Path, host: str = "127.0.0.1", *, tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Serve the files of a folder; yield the address."""
    handler = functools.partial(_QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer((host, 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http{'s' if tls else ''}://{host}:{server.server_port}"
        server.shutdown()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
