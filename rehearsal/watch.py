"""A job on the local AWS, watched while it runs: its nodes and what they print."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contract import outputs as stack_outputs
from contract import runs
from contract.files import MANIFEST
from contract.job import JOB_GROUP
from contract.nodes import HEAD, WORKER, labelled_node
from rehearsal.cycle import Rehearsal
from rehearsal.inventory import account_at

if TYPE_CHECKING:
    from mypy_boto3_ecs.type_defs import AttachmentTypeDef


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of a job's log."""

    at: float
    """Unix time."""
    text: str
    """Without the label of its node."""
    task: str = ""
    """Id of the task that has printed it."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Node:
    """A node of the job that runs."""

    began: float
    """Unix time."""
    kind: str
    """``HEAD`` or ``WORKER``."""
    task: str
    """Id of its task."""
    container: str
    """Id of its container."""
    address: str
    """On the network; empty while it has none."""


class Watch:
    """A job on the local AWS: its tasks, what they print, and its end.

    By calls of AWS and not by the command line, whose start takes as much of a processor as the
    program that is watched.
    """

    def __init__(self, rehearsal: Rehearsal, job: str) -> None:
        account = account_at(rehearsal.state()["endpoint"])
        outputs = rehearsal.outputs(stack_outputs.TRAINING_STACK)
        self.job = job
        self._ecs, self._logs = account.client("ecs"), account.client("logs")
        self._states, self._s3 = account.client("stepfunctions"), account.client("s3")
        self._bucket = rehearsal.bucket()
        self._execution = f"{outputs[stack_outputs.JOBS]}:{job}".replace(
            ":stateMachine:", ":execution:"
        )
        self._cluster, self._group = (
            outputs[stack_outputs.CLUSTER],
            outputs[stack_outputs.LOG_GROUP],
        )
        self._tokens: dict[str, str] = {}  # task -> where its log goes on
        self._lines: list[Line] = []
        self._nodes: list[Node] = []

    def has_ended(self) -> bool:
        """Look at all there is; return whether the job has ended."""
        try:
            found = self._states.describe_execution(executionArn=self._execution)
        except self._states.exceptions.ExecutionDoesNotExist:
            return False  # not yet: it has just been started
        arns = self._ecs.list_tasks(cluster=self._cluster)["taskArns"]
        described = self._ecs.describe_tasks(cluster=self._cluster, tasks=arns) if arns else {}
        self._nodes = []
        for task in described.get("tasks", ()):
            if self.job not in (task.get("startedBy"), task["group"].removeprefix(JOB_GROUP)):
                continue
            self._tokens.setdefault(task["taskArn"].rpartition("/")[2], "")
            if task["lastStatus"] == "RUNNING":
                kind = WORKER if task.get("startedBy") == self.job else HEAD
                self._nodes.append(
                    Node(
                        began=task["startedAt"].timestamp(),
                        kind=kind,
                        task=task["taskArn"].rpartition("/")[2],
                        container=task["containers"][0]["runtimeId"],
                        address=_address(task.get("attachments", ())),
                    )
                )
        self._read()
        return bool(found["status"] != "RUNNING")

    def _read(self) -> None:
        pages = self._logs.get_paginator("describe_log_streams").paginate(logGroupName=self._group)
        for name in (each["logStreamName"] for page in pages for each in page["logStreams"]):
            task = name.rpartition("/")[2]
            if task not in self._tokens:
                continue
            while True:
                token = self._tokens[task]
                more = {"nextToken": token} if token else {}
                found = self._logs.get_log_events(
                    logGroupName=self._group, logStreamName=name, startFromHead=True, **more
                )
                for event in found["events"]:
                    text = event["message"].rstrip()
                    if labelled_node(text) is not None:
                        text = text.partition("] ")[2]
                    self._lines.append(Line(at=event["timestamp"] / 1000, text=text, task=task))
                self._tokens[task] = found["nextForwardToken"]
                if self._tokens[task] == token:
                    break

    def lines(self) -> list[Line]:
        """What all tasks have printed, in order."""
        return sorted(self._lines, key=lambda line: line.at)

    def is_saved(self, run: str, name: str) -> bool:
        """Whether the bucket has a copy of a file that the run's program has written.

        Args:
            name: the end of its path on a node, or of its key where Ray has saved it.
        """
        listed = self._s3.list_objects_v2(Bucket=self._bucket, Prefix=runs.run_prefix(run))
        for key in (each["Key"] for each in listed.get("Contents", ())):
            if key.endswith(name):
                return True
            if key.startswith(runs.output_prefix(run)) and key.endswith(f"/{MANIFEST}"):
                found = self._s3.get_object(Bucket=self._bucket, Key=key)["Body"].read().decode()
                if f'{name}"' in found:
                    return True
        return False

    def nodes(self, kind: str, number: int) -> list[Node]:
        """Of the job's nodes of a kind that run now, so many that were started last."""
        return sorted(each for each in self._nodes if each.kind == kind)[-number:]

    def containers(self, kind: str, number: int) -> list[str]:
        """Ids of the containers of ``nodes``."""
        return [each.container for each in self.nodes(kind, number)]


def _address(attachments: "Sequence[AttachmentTypeDef]") -> str:
    """Of a task, on its network; empty while it has none."""
    details = (detail for each in attachments for detail in each.get("details", ()))
    found = (each["value"] for each in details if each.get("name") == "privateIPv4Address")
    return next(found, "")
