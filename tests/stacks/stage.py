"""A deployment on the local AWS, and what a test does to the jobs there."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3

from contract import outputs as stack_outputs
from contract.job import JOB_GROUP


class Stage:
    """A deployment, and what a test does to its jobs."""

    patience_s = 60

    def __init__(
        self,
        folder: Path,
        training: dict[str, str],
        client: Any = boto3.client,
    ) -> None:
        """``folder``: of the local AWS."""
        self._folder = folder
        self._cluster = training[stack_outputs.CLUSTER]
        self.worker_provider = training[stack_outputs.WORKER_PROVIDER]
        self._ecs = client("ecs")
        self._lambda = client("lambda")
        self._groups = client("autoscaling")
        (self._keeper,) = [
            each["FunctionName"]
            for each in self._lambda.list_functions()["Functions"]
            if each["FunctionName"].endswith("-keeper")
        ]

    # --- what a test does -----------------------------------------------------------------------
    def have_bad_hosts(self, number: int, *, of: str) -> None:
        """So many of the next new hosts of a capacity provider lack their GPU."""
        self._write("bad_hosts.json", {of: number})

    def end_task(self, task: str, code: int) -> None:
        """A task that is only a record ends by itself."""
        self._write("ends.json", {task: code})

    def take_host(self, host: str) -> None:
        """Take a host away, by its ARN; one that has gone already, or goes, stays so."""
        found = self._ecs.describe_container_instances(
            cluster=self._cluster, containerInstances=[host]
        )["containerInstances"]
        for each in found:
            with contextlib.suppress(self._groups.exceptions.ScalingActivityInProgressFault):
                self._groups.terminate_instance_in_auto_scaling_group(
                    InstanceId=each["ec2InstanceId"], ShouldDecrementDesiredCapacity=False
                )

    def call_keeper(self, **event: str) -> Any:
        """What the function answers."""
        answer = self._lambda.invoke(FunctionName=self._keeper, Payload=json.dumps(event).encode())
        return json.loads(answer["Payload"].read())

    def _write(self, name: str, content: dict[str, Any]) -> None:
        new = self._folder / f"{name}.new"
        new.write_text(json.dumps(content))
        new.replace(self._folder / name)

    # --- what it sees ---------------------------------------------------------------------------
    def tasks(self, job: str) -> list[Any]:
        """All tasks of a job, those that have ended too, the oldest first."""
        states = ("RUNNING", "STOPPED")
        arns = {
            arn
            for each in states
            for arn in self._ecs.list_tasks(cluster=self._cluster, desiredStatus=each)["taskArns"]
        }
        if not arns:
            return []
        found = self._ecs.describe_tasks(cluster=self._cluster, tasks=[*arns])["tasks"]
        mine = [each for each in found if each["group"] == f"{JOB_GROUP}{job}"]
        return sorted(mine, key=lambda each: each["createdAt"])

    def alive(self) -> list[str]:
        """Tasks that have not ended."""
        arns = self._ecs.list_tasks(cluster=self._cluster)["taskArns"]
        if not arns:
            return []
        found = self._ecs.describe_tasks(cluster=self._cluster, tasks=arns)["tasks"]
        return [each["taskArn"] for each in found if each["lastStatus"] != "STOPPED"]

    def hosts(self) -> list[str]:
        found = self._ecs.list_container_instances(cluster=self._cluster)
        return [*found["containerInstanceArns"]]

    # --- the two together -----------------------------------------------------------------------
    def eventually(self, what: str, condition: Callable[[], Any]) -> Any:
        """What it is, once it is true."""
        deadline = time.monotonic() + self.patience_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within {self.patience_s} s: {what}"
            time.sleep(0.1)
        return found

    def clean_up(self) -> None:
        """As the sweeps of the next minutes do."""

        deadline = time.monotonic() + self.patience_s
        answers: list[Any] = []
        while (left := (self.alive(), self.hosts())) != ([], []):
            assert time.monotonic() < deadline, f"left: {left}; the keeper: {answers}"
            answers = [self.call_keeper(), self.call_keeper(Action="release")]
