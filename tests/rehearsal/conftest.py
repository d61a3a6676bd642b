"""One deployment, and one pair of images, for all tests in containers.

It is brought up for the first of them and taken away after the last. The files use it in the order
of their names: ``test_first_hour`` has its first jobs, ``test_in_containers`` brings the standing
cluster up and down, ``test_jobs`` starts with no container running, and ``test_taking_down`` comes
last because it destroys the stacks.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rehearsal import processes
from rehearsal.cycle import SETTINGS, Rehearsal
from rehearsal.engine import EngineError
from rehearsal.processes import Steps
from tests.conftest import ROOT

#: Whose calls those of the command line are, in the list of all calls.
LAPTOP = "laptop"
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
        # Spot: the job tests take a host away, which no other test minds.
        found.up(Steps(5), standing=False, settings={**SETTINGS, "spot": "true"})
        yield found
    finally:
        os.environ.pop(processes.NAME, None)
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


def cluster_status(rehearsal: Rehearsal) -> dict[str, Any]:
    """What ``trainctl cluster status --json`` prints."""
    run = trainctl(rehearsal, "cluster", "status", "--json")
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def show(rehearsal: Rehearsal, job: str) -> dict[str, Any]:
    """What ``trainctl show JOB --json`` prints."""
    run = trainctl(rehearsal, "show", job, "--json")
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found
