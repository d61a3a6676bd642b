"""Jobs on a deployed local AWS without containers, whose heads a test ends as it likes.

An ``Order`` is what happens to one job: which requests for its head ECS refuses or does not answer,
how each of its heads ends, and whether it is aborted. A seed makes it.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Self

import boto3

from contract import outputs as stack_outputs
from contract import runs
from contract.job import JOB_GROUP, STOP_ERROR, STOPPED_BY_USER, JobSpec, execution_arn
from contract.nodes import Range

KILLED, ABORTED, ABORTED_LATE = "killed", "aborted", "aborted at its end"
#: By itself, on a host that a test has made one.
BAD_HOST = "bad host"
SUCCEEDS, FAILS = "exit 0", "exit 3"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One head: the faults of the requests for it, and how it ends."""

    faults: tuple[str, ...]
    end: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What happens to a job."""

    job: str
    attempts: tuple[Attempt, ...]

    @classmethod
    def from_seed(cls, seed: int, *, most: int) -> Self:
        """``most``: heads that a job may have."""
        chance = random.Random(seed)
        lost = chance.choice([0, 0, 1, 1, 2, most])
        ends = [KILLED] * lost
        if lost < most:
            ends.append(chance.choice([SUCCEEDS, FAILS, ABORTED, ABORTED_LATE]))
        kinds = ["throttled", "lost"]
        attempts = [
            Attempt(faults=tuple(chance.choices(kinds, k=chance.choice([0, 0, 1, 2]))), end=end)
            for end in ends
        ]
        return cls(job=f"order-{seed}", attempts=tuple(attempts))

    @property
    def statuses(self) -> set[str]:
        """What its record may say."""
        last = self.attempts[-1].end
        return {
            KILLED: {"host_lost"},
            BAD_HOST: {"host_lost"},
            ABORTED: {"stopped"},
            # Which of the two comes first, the end or the abort, is open.
            ABORTED_LATE: {"succeeded", "stopped"},
            SUCCEEDS: {"succeeded"},
            FAILS: {"failed"},
        }[last]


class Stage:
    """A deployment, and what a test does to its jobs."""

    #: Of its jobs.
    command: tuple[str, ...] = ("true",)
    nodes = Range(1, 1)
    patience_s = 60

    def __init__(
        self,
        folder: Path,
        core: dict[str, str],
        training: dict[str, str],
        client: Any = boto3.client,
    ) -> None:
        """``folder``: of the local AWS."""
        self._folder, self._lock = folder, Lock()
        self._bucket = core[stack_outputs.BUCKET]
        self._machine = training[stack_outputs.JOBS]
        self._cluster = training[stack_outputs.CLUSTER]
        self.head_provider = training[stack_outputs.HEAD_PROVIDER]
        self.worker_provider = training[stack_outputs.WORKER_PROVIDER]
        self._states, self._ecs = client("stepfunctions"), client("ecs")
        self._s3, self._lambda = client("s3"), client("lambda")
        self._groups = client("autoscaling")
        (self._keeper,) = [
            each["FunctionName"]
            for each in self._lambda.list_functions()["Functions"]
            if "Keeper" in each["FunctionName"]
        ]

    # --- what a test does -----------------------------------------------------------------------
    def start(self, job: str) -> None:
        spec = JobSpec(run=job, command=self.command, nodes=self.nodes, max_seconds=3600)
        self._states.start_execution(stateMachineArn=self._machine, name=job, input=spec.to_json())

    def have_hosts(self, number: int) -> None:
        """So many for heads."""
        self._write("capacity.json", {self.head_provider: number})

    def have_bad_hosts(self, number: int, *, of: str) -> None:
        """So many of the next new hosts of a capacity provider lack their GPU."""
        self._write("bad_hosts.json", {of: number})

    def have_unjoined_hosts(self, number: int, *, of: str) -> None:
        """So many of the next new hosts of a capacity provider never join their cluster."""
        self._write("unjoined_hosts.json", {of: number})

    def plan(self, job: str, faults: Sequence[str]) -> None:
        """Faults of the next requests for a job's head."""
        with self._lock:
            planned, group = self._read("faults.json"), f"{JOB_GROUP}{job}"
            self._write("faults.json", planned | {group: [*planned.get(group, []), *faults]})

    def exit(self, task: str, code: int) -> None:
        """End a task by itself."""
        with self._lock:
            self._write("ends.json", self._read("ends.json") | {task: code})

    def kill(self, task: str) -> None:
        """Take a task's host away."""
        (found,) = self._ecs.describe_tasks(cluster=self._cluster, tasks=[task])["tasks"]
        self.take_host(found["containerInstanceArn"])

    def take_host(self, host: str) -> None:
        """The same by its ARN; one that has gone already stays so."""
        found = self._ecs.describe_container_instances(
            cluster=self._cluster, containerInstances=[host]
        )["containerInstances"]
        for each in found:
            self._groups.terminate_instance_in_auto_scaling_group(
                InstanceId=each["ec2InstanceId"], ShouldDecrementDesiredCapacity=False
            )

    def abort(self, job: str) -> None:
        """As ``trainctl stop`` does; a job that has just ended stays as it is."""
        try:
            self._states.stop_execution(
                executionArn=execution_arn(self._machine, job),
                error=STOP_ERROR,
                cause=STOPPED_BY_USER,
            )
        except self._states.exceptions.ClientError as error:
            if "not running" not in str(error):
                raise

    def call_keeper(self, **event: str) -> Any:
        """What the function answers."""
        answer = self._lambda.invoke(FunctionName=self._keeper, Payload=json.dumps(event).encode())
        return json.loads(answer["Payload"].read())

    def _read(self, name: str) -> dict[str, Any]:
        file = self._folder / name
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def _write(self, name: str, content: dict[str, Any]) -> None:
        new = self._folder / f"{name}.new"
        new.write_text(json.dumps(content))
        new.replace(self._folder / name)

    # --- what it sees ---------------------------------------------------------------------------
    def heads(self, job: str) -> list[str]:
        """ARNs of the heads that the state machine knows of."""
        pages = self._states.get_paginator("get_execution_history").paginate(
            executionArn=execution_arn(self._machine, job)
        )
        told = [
            event.get("taskSubmittedEventDetails") for page in pages for event in page["events"]
        ]
        return [json.loads(each["output"])["Tasks"][0]["TaskArn"] for each in told if each]

    def status(self, job: str) -> str:
        """Of its execution; "" where it does not show yet."""
        try:
            found = self._states.describe_execution(executionArn=execution_arn(self._machine, job))
        except self._states.exceptions.ExecutionDoesNotExist:
            return ""
        return str(found["status"])

    def is_running(self, task: str) -> bool:
        (found,) = self._ecs.describe_tasks(cluster=self._cluster, tasks=[task])["tasks"]
        return bool(found["lastStatus"] == "RUNNING")

    def records(self, job: str) -> list[dict[str, Any]]:
        """All records of a job."""
        prefix = runs.job_record(job, "").rpartition("/")[0]
        found = self._s3.list_objects_v2(Bucket=self._bucket, Prefix=prefix).get("Contents", [])
        bodies = [self._s3.get_object(Bucket=self._bucket, Key=each["Key"]) for each in found]
        return [json.loads(each["Body"].read()) for each in bodies]

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

    def wait_until_it_runs(self, task: str) -> None:
        """A task that is only a record may end at any time."""

    # --- the two together -----------------------------------------------------------------------
    def eventually(self, what: str, condition: Callable[[], Any]) -> Any:
        """What it is, once it is true."""
        deadline = time.monotonic() + self.patience_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within {self.patience_s} s: {what}"
            time.sleep(0.1)
        return found

    def wait_for_heads(self, job: str, number: int) -> list[str]:
        """ARNs of the heads of a job, once there have been so many."""

        def look() -> list[str]:
            heads = self.heads(job)
            return heads if len(heads) >= number else []

        found: list[str] = self.eventually(f"head {number} of {job}", look)
        return found

    def play(self, order: Order) -> None:
        """Let it happen, and wait for the job's end and its record."""
        job = order.job
        self.plan(job, order.attempts[0].faults)
        self.start(job)
        for number, attempt in enumerate(order.attempts, start=1):
            heads = self.wait_for_heads(job, number)
            assert len(heads) == number
            after = order.attempts[number] if number < len(order.attempts) else None
            self.plan(job, after.faults if after else ())
            if attempt.end == BAD_HOST:
                continue
            self.wait_until_it_runs(heads[-1])
            if attempt.end == KILLED:
                self.kill(heads[-1])
            elif attempt.end == ABORTED:
                self.abort(job)
            else:
                self.exit(heads[-1], 3 if attempt.end == FAILS else 0)
            if attempt.end == ABORTED_LATE:
                time.sleep(random.Random(job).random())
                self.abort(job)
        self.eventually(f"{job} ends", lambda: self.status(job) not in ("", "RUNNING"))
        self.eventually(f"{job} has a record", lambda: self.records(job))

    def play_all(self, orders: Sequence[Order]) -> None:
        """All of them, several at a time, while the keeper sweeps as if minutes went by."""
        with ThreadPoolExecutor(8) as pool:
            played = [pool.submit(self.play, order) for order in orders]
            while not all(each.done() for each in played):
                self.call_keeper()
            for each in played:
                each.result()

    def clean_up(self) -> None:
        """As the sweeps of the next minutes do."""

        deadline = time.monotonic() + self.patience_s
        answers: list[Any] = []
        while (left := (self.alive(), self.hosts())) != ([], []):
            assert time.monotonic() < deadline, f"left: {left}; the keeper: {answers}"
            answers = [self.call_keeper(), self.call_keeper(Action="release")]
