"""A job on the local AWS, watched while it runs: its nodes and what they print."""

from dataclasses import dataclass

from contract import outputs as stack_outputs
from contract.job import JOB_GROUP
from contract.nodes import HEAD, WORKER
from rehearsal.cycle import Rehearsal
from rehearsal.inventory import account_at


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of a job's log."""

    at: float
    """Unix time."""
    text: str
    """Without the label of its node."""


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
        self._states = account.client("stepfunctions")
        self._execution = f"{outputs[stack_outputs.JOBS]}:{job}".replace(
            ":stateMachine:", ":execution:"
        )
        self._cluster, self._group = (
            outputs[stack_outputs.CLUSTER],
            outputs[stack_outputs.LOG_GROUP],
        )
        self._tokens: dict[str, str] = {}  # task -> where its log goes on
        self._lines: list[Line] = []
        self._nodes: list[tuple[float, str, str]] = []  # began, kind, container

    def has_ended(self) -> bool:
        """Look at all there is; return whether the job has ended."""
        found = self._states.describe_execution(executionArn=self._execution)
        arns = self._ecs.list_tasks(cluster=self._cluster)["taskArns"]
        described = self._ecs.describe_tasks(cluster=self._cluster, tasks=arns) if arns else {}
        self._nodes = []
        for task in described.get("tasks", ()):
            if self.job not in (task.get("startedBy"), task["group"].removeprefix(JOB_GROUP)):
                continue
            self._tokens.setdefault(task["taskArn"].rpartition("/")[2], "")
            if task["lastStatus"] == "RUNNING":
                kind = WORKER if task.get("startedBy") == self.job else HEAD
                began = task["startedAt"].timestamp()
                self._nodes.append((began, kind, task["containers"][0]["runtimeId"]))
        self._read()
        return bool(found["status"] != "RUNNING")

    def _read(self) -> None:
        streams = self._logs.describe_log_streams(logGroupName=self._group)["logStreams"]
        for name in (each["logStreamName"] for each in streams):
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
                    label, mark, rest = event["message"].rstrip().partition("] ")
                    text = rest if mark and label.startswith("[node ") else event["message"]
                    self._lines.append(Line(at=event["timestamp"] / 1000, text=text.rstrip()))
                self._tokens[task] = found["nextForwardToken"]
                if self._tokens[task] == token:
                    break

    def lines(self) -> list[Line]:
        """What all tasks have printed, in order."""
        return sorted(self._lines, key=lambda line: line.at)

    def containers(self, kind: str, number: int) -> list[str]:
        """Of the job's nodes of a kind that run now, so many that were started last."""
        newest = sorted(each for each in self._nodes if each[1] == kind)
        return [container for _, _, container in newest[-number:]]
