"""A job on the local AWS, watched while it runs: its nodes and what they print."""

from contract import outputs as stack_outputs
from contract import runs
from contract.files import ROUNDS
from contract.job import JOB_GROUP, execution_arn
from contract.nodes import HEAD, WORKER, labelled_node
from rehearsal.cycle import Rehearsal
from rehearsal.inventory import account_at
from tests.eventually import eventually


class Watch:
    """Looks by calls of AWS and not by the command line, whose start takes as much of a processor
    as the program that is watched."""

    def __init__(self, rehearsal: Rehearsal, job: str) -> None:
        account = account_at(rehearsal.state()["endpoint"])
        outputs = rehearsal.outputs(stack_outputs.TRAINING_STACK)
        self.job = job
        self._ecs, self._logs = account.client("ecs"), account.client("logs")
        self._states, self._s3 = account.client("stepfunctions"), account.client("s3")
        self._bucket = rehearsal.bucket()
        self._execution = execution_arn(outputs[stack_outputs.JOBS], job)
        self._cluster = outputs[stack_outputs.CLUSTER]
        self._group = outputs[stack_outputs.LOG_GROUP]
        self._tokens: dict[str, str] = {}  # task -> where its log continues
        self._lines: list[tuple[int, str]] = []  # with their times
        self._nodes: list[tuple[str, str]] = []  # kind and container, the oldest first
        self._has_ended = False

    def look(self) -> None:
        """Take note of the nodes that run now, and of what all of them have printed."""
        try:
            found = self._states.describe_execution(executionArn=self._execution)
        except self._states.exceptions.ExecutionDoesNotExist:
            return  # not yet: it has just been started
        arns = self._ecs.list_tasks(cluster=self._cluster)["taskArns"]
        described = self._ecs.describe_tasks(cluster=self._cluster, tasks=arns) if arns else {}
        self._nodes = []
        for task in sorted(described.get("tasks", ()), key=lambda each: each["createdAt"]):
            if self.job not in (task.get("startedBy"), task["group"].removeprefix(JOB_GROUP)):
                continue
            self._tokens.setdefault(task["taskArn"].rpartition("/")[2], "")
            if task["lastStatus"] == "RUNNING":
                kind = WORKER if task.get("startedBy") == self.job else HEAD
                self._nodes.append((kind, task["containers"][0]["runtimeId"]))
        self._read()
        self._has_ended = found["status"] != "RUNNING"

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
                    self._lines.append((event["timestamp"], text))
                self._tokens[task] = found["nextForwardToken"]
                if self._tokens[task] == token:
                    break

    def text(self) -> str:
        """What all tasks have printed by the last look, in order."""
        return "\n".join(text for _at, text in sorted(self._lines))

    def over(self) -> str:
        """Why nothing more comes of the job, as of the last look; "" while it runs."""
        return f"{self.job} has ended:\n{self.text()}" if self._has_ended else ""

    def printed(self, words: str) -> int:
        """How many lines of the log have ``words`` by now."""
        self.look()
        return sum(words in text for _at, text in self._lines)

    def wait_for(self, words: str, *, times: int = 1, timeout_s: float = 300) -> None:
        """Wait until ``words`` are in as many lines."""
        eventually(
            f"{times} times {words!r}",
            lambda: self.printed(words) >= times,
            timeout_s=timeout_s,
            every_s=0.5,
            over=self.over,
        )

    def containers(self, kind: str) -> list[str]:
        """Ids of the containers of the job's nodes of a kind that run now, the oldest first."""
        self.look()
        return [container for each, container in self._nodes if each == kind]

    def wait_for_node(self, kind: str) -> str:
        """Wait until a node of a kind runs; return the container of the newest."""
        found = eventually(
            f"a {kind} runs",
            lambda: self.containers(kind),
            timeout_s=180,
            every_s=0.5,
            over=self.over,
        )
        return found[-1]

    def is_saved(self, run: str, name: str) -> bool:
        """Whether the bucket has a copy of a file that the run's program has written.

        Args:
            name: the end of its path on a node, or of its key where Ray has saved it.
        """
        self.look()
        listed = self._s3.list_objects_v2(Bucket=self._bucket, Prefix=runs.run_prefix(run))
        for key in (each["Key"] for each in listed.get("Contents", ())):
            if key.endswith(name):
                return True
            if key.startswith(runs.output_prefix(run) + ROUNDS):
                saved = runs.output_prefix(run) + self._read_object(key)
                if f'{name}"' in self._read_object(saved):
                    return True
        return False

    def _read_object(self, key: str) -> str:
        try:
            answer = self._s3.get_object(Bucket=self._bucket, Key=key)
        except self._s3.exceptions.NoSuchKey:
            return ""  # removed since: there is a newer one
        return str(answer["Body"].read().decode())
