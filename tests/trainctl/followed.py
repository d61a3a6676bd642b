"""Follow a job in the model of AWS, for ``docs/images/job.svg``.

The command is the real one; the lines of the job's log are those of a run on this machine.
"""

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import boto3

from tests.clock import FakeClock
from tests.trainctl.account import Account
from tests.trainctl.test_logs import SUCCEEDED
from trainctl.__main__ import main

RECIPE = ("ddp", "--run", "digits", "--preset", "digits", "--epochs", "3")


def log() -> list[str]:
    """Lines of a run with two workers, which has its files where a job's would be."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "training.launch", *RECIPE, "--local", "--workers", "2"]
        said = subprocess.check_output(
            [*command, "--storage", folder],
            stderr=subprocess.STDOUT,
            # A job's log has no colors.
            env={key: value for key, value in os.environ.items() if key != "FORCE_COLOR"},
            text=True,
        )
        return said.replace(folder, "s3://bucket/runs").splitlines()


class Played(Account):
    """An account in which a job that is submitted runs to its end."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        machines = {"head_instance_type": "m5.large", "worker_instance_type": "m5.large"}
        self.shape |= {"preset": "cpu", **machines}
        self.clock, self._lines = FakeClock(), lines

    def on_start_execution(self, *, name: str, **given: Any) -> Any:
        found = super().on_start_execution(name=name, **given)
        job = self.executions[name]

        def at(second: int) -> Any:
            return job["startDate"] + timedelta(seconds=second)

        def ends() -> None:
            for task in self.tasks.values():
                task |= {"lastStatus": "STOPPED", "stoppedAt": at(262)}
            job.update(SUCCEEDED, stopDate=at(265))

        lines: list[str | tuple[float, str]] = []
        self.logs = {"job/ray/head": lines, "worker/ray/w0": [], "worker/ray/w1": []}
        self.clock.at(60, lambda: self.add_head(name, "head", pullStartedAt=at(60)))
        worker = {"job": name, "group": f"job:{name}", "pullStartedAt": at(150)}
        for task in ("w0", "w1"):
            self.clock.at(150, lambda task=task: self.add_worker(task, "RUNNING", **worker))
        for second, line in enumerate(self._lines, 180):
            self.clock.at(second, lines.append, (second, line))
        self.clock.at(265, ends)
        return found


if __name__ == "__main__":
    account: Any = Played(log())
    session = SimpleNamespace(
        region_name="us-east-1", client=lambda *_, **__: account, get_credentials=lambda: "keys"
    )
    vars(boto3)["Session"] = lambda **_: session
    vars(time).update(sleep=account.clock.sleep, monotonic=account.clock.monotonic)
    sys.exit(main(["submit", *RECIPE, "--nodes", "2", "--max-hours", "1", "--follow", "--yes"]))
