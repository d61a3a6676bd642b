"""Node provider of Ray's autoscaler on ECS: each worker node is a task.

Ray's monitor, beside the head, decides how many nodes of which kind are wanted and calls this
provider (autoscaler v2, ``type: external``). The provider keeps no state that matters: tasks carry
the job and Ray's tags, so a restarted head finds the tasks that its predecessor started.
"""

import json
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NotRequired, TypedDict

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from contract import exits, faults
from contract.job import JOB_GROUP
from contract.job_outcome import Ending, ending
from contract.nodes import CONTAINER, HEAD, WORKER, pool_of

if TYPE_CHECKING:
    from mypy_boto3_ecs import ECSClient
    from mypy_boto3_ecs.type_defs import (
        KeyValuePairTypeDef,
        RunTaskRequestTypeDef,
        TagTypeDef,
        TaskTypeDef,
    )
    from mypy_boto3_lambda import LambdaClient

RUN_TASK_MOST: Final = 10  # tasks that ECS starts in a call
DESCRIBE_MOST: Final = 100
#: botocore repeats what was throttled, timed out or answered with a server's error, after waits
#: that double, and sends the same body again: RunTask with its client token starts nothing twice.
#: It does not repeat what can never succeed: wrong parameters, missing credentials.
#: All attempts, each without an answer, take less than Ray waits (``times.NODE_ASKED_S``): it would
#: ask once more, with another token.
_RETRIES: Final = Config(
    connect_timeout=10, read_timeout=20, retries={"mode": "standard", "total_max_attempts": 6}
)
#: After a worker on which Ray did not start; twice as long after each further one.
_PAUSE_S: Final = 10.0
_LONGEST_PAUSE_S: Final = 300.0
_OF_LATE_S: Final = 1800.0
#: A task may be missing in ECS's list for so long after it was started.
_SETTLES_S: Final = 60.0
#: Tags of a node that the head starts itself.
_FIRST: Final = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER, TAG_RAY_USER_NODE_TYPE: WORKER}


class ProviderConfig(TypedDict):
    """``provider`` of the autoscaler's configuration, as far as it is ours."""

    cluster: str
    """ECS cluster, name or ARN."""
    job: str
    """ID of the job: ``startedBy`` of its tasks, at most 36 characters."""
    tags: dict[str, str]
    """More tags of its tasks."""
    head: str
    """ARN of the head's own task."""
    task_definition: str
    capacity_provider: str
    """Empty: the cluster's default."""
    keeper: str
    """Function that ends hosts; empty: they are left to its sweep."""
    subnets: list[str]
    security_groups: list[str]
    environment: dict[str, str]
    """More variables of a worker, such as the head's address."""
    failed_starts: NotRequired[str]
    """File for how often Ray did not start in worker tasks, within half an hour."""
    first: NotRequired[str]
    """File with the tasks that the head has started itself (``start_first``)."""


class EcsNodeProvider(NodeProvider):
    """Nodes of one job as ECS tasks; a node's id is its task's ARN. Ray's autoscaler v2 calls no
    other methods than these."""

    def __init__(
        self,
        provider_config: ProviderConfig,
        cluster_name: str,
        *,
        ecs: "ECSClient | None" = None,
        functions: "LambdaClient | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``ecs`` and ``functions`` are clients of boto3; a test gives others."""
        super().__init__(dict(provider_config), cluster_name)
        self._settings = provider_config
        self._ecs = ecs if ecs is not None else ecs_client()
        self._functions = functions if functions is not None else lambda_client()
        self._clock = clock
        # Ray launches from several threads at once.
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskTypeDef] = {}
        self._started: dict[str, tuple[float, dict[str, str]]] = {}
        self._shown: set[str] = set()
        self._ended: set[str] = set()
        self._failed: dict[str, float] = {}  # tasks in which Ray did not start, and when they ended
        self._not_before = 0.0  # by the clock: the next worker is started then
        self._has_first = False
        self._is_wanted = True
        """False once ECS has told the head's own task to stop."""

    # --- what is there ------------------------------------------------------------------------
    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        """Ids of the nodes with these tags, the head among them; asks ECS.

        A node that ended before Ray saw it is returned once: otherwise Ray would wait for it for
        minutes before it requests a replacement.
        """
        listed = self._listed()
        now = self._clock()
        with self._lock:
            self._started = {
                arn: (at, tags)
                for arn, (at, tags) in [*self._started.items(), *self._take_over(now)]
                if now - at < _SETTLES_S
            }
            recent = dict(self._started)
            known = {*recent, *self._tasks}
        head = self._settings["head"]
        tasks = {task["taskArn"]: task for task in self._described({*listed, *known, head})}
        self._is_wanted = not _has_ended(tasks.pop(head, {}))
        for arn, (_, tags) in recent.items():
            # Started a moment ago: ECS is not consistent yet.
            tasks.setdefault(arn, {"taskArn": arn, "lastStatus": "PROVISIONING", "tags": _to(tags)})
        ended = {arn for arn, task in tasks.items() if _has_ended(task)}
        bad = [tasks[arn] for arn in ended - self._ended if _bad_host(tasks[arn])]
        if bad:
            _say("a host is asked to end: its GPUs or EFA devices are not healthy")
            # Wait for the end: otherwise ECS would place the next node on the same host.
            self._release(bad, are_bad=True)
        self._count_failures({arn for arn in ended if _has_no_ray(tasks[arn])})
        with self._lock:
            for arn in ended:
                self._started.pop(arn, None)
            self._ended = ended & known - self._shown
            gone = ended - self._ended
            self._tasks = {arn: task for arn, task in tasks.items() if arn not in gone}
            self._shown = {*self._tasks}
        nodes = [head, *self._tasks]
        return [node for node in nodes if tag_filters.items() <= self.node_tags(node).items()]

    def is_running(self, node_id: str) -> bool:
        if node_id == self._settings["head"]:
            return True
        return bool(self._tasks.get(node_id, {}).get("lastStatus") == "RUNNING")

    def node_tags(self, node_id: str) -> dict[str, str]:
        if node_id == self._settings["head"]:
            return {
                TAG_RAY_NODE_KIND: NODE_KIND_HEAD,
                TAG_RAY_USER_NODE_TYPE: HEAD,
                TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
            }
        return {tag["key"]: tag["value"] for tag in self._tasks.get(node_id, {}).get("tags", [])}

    def _listed(self) -> list[str]:
        # Tasks that should run; startedBy must be the only filter.
        pages = self._ecs.get_paginator("list_tasks").paginate(
            cluster=self._settings["cluster"], startedBy=self._settings["job"]
        )
        return [arn for page in pages for arn in page["taskArns"]]

    def _described(self, arns: Iterable[str]) -> "list[TaskTypeDef]":
        tasks: list[TaskTypeDef] = []
        for part in _batches(sorted(arns), DESCRIBE_MOST):
            page = self._ecs.describe_tasks(
                cluster=self._settings["cluster"], tasks=part, include=["TAGS"]
            )
            tasks += page["tasks"]
        return tasks

    def _count_failures(self, found: set[str]) -> None:
        """Count when Ray did not start in worker tasks; the next one waits longer each time."""
        now = self._clock()
        late = {arn: at for arn, at in self._failed.items() if now - at < _OF_LATE_S}
        new = found - {*late}
        late |= dict.fromkeys(new, now)
        # Several at a time count once: a large job has more of them.
        number = len({*late.values()})
        if new:
            self._not_before = now + min(_PAUSE_S * 2 ** (number - 1), _LONGEST_PAUSE_S)
        if late != self._failed and (place := self._settings.get("failed_starts")):
            Path(place).write_text(str(number), encoding="utf-8")
        self._failed = late

    # --- more ---------------------------------------------------------------------------------
    def create_node(
        self, node_config: Mapping[str, object], tags: dict[str, str], count: int
    ) -> None:
        """Start ``count`` tasks.

        Raises:
            NodeLaunchException: ECS did not place all of them; those that it did are kept. Or ECS
                has told this head to stop, which behind a dead agent does not hear it: its
                successor starts the nodes. Or Ray did not start on the last node a moment ago.
        """
        del node_config
        if not self._is_wanted:
            raise NodeLaunchException("stopped", "ECS has told this head to stop", None)
        if (pause := self._not_before - self._clock()) > 0:
            raise NodeLaunchException("waits", f"Ray did not start: {pause:.0f} s", None)
        pool = pool_of(self._settings["task_definition"])
        self._ask_keeper(
            {"Action": "take", "Job": self._settings["job"], "Count": count, "Pool": pool}
        )
        left = count
        while left:
            wanted = min(left, RUN_TASK_MOST)
            self._run(tags, wanted)
            left -= wanted

    def workers(self) -> list[str]:
        """Ids of all worker nodes."""
        return self.non_terminated_nodes({TAG_RAY_NODE_KIND: NODE_KIND_WORKER})

    def start_first(self, count: int) -> None:
        """Start workers while Ray's autoscaler is not up: ``count``, with those that are there.

        Raises:
            NodeLaunchException: as ``create_node``.
        """
        missing = count - len(self.workers())
        try:
            if missing > 0:
                self.create_node({}, _FIRST, missing)
        finally:
            new = Path(self._settings["first"] + ".new")
            new.write_text("\n".join(self._started), encoding="utf-8")
            new.replace(self._settings["first"])

    def _take_over(self, now: float) -> Iterable[tuple[str, tuple[float, dict[str, str]]]]:
        """Nodes that the head has started itself, which ECS's lists may lack; once."""
        place = Path(self._settings.get("first", ""))
        if self._has_first or not place.is_file():
            return []
        self._has_first = True
        return [(arn, (now, _FIRST)) for arn in place.read_text(encoding="utf-8").split()]

    def _run(self, tags: Mapping[str, str], count: int) -> None:
        try:
            answer = self._ecs.run_task(**self._request(tags, count))
        except (ClientError, BotoCoreError) as error:
            code = faults.code_of(error) or type(error).__name__
            raise NodeLaunchException(code[:20], str(error), sys.exc_info()) from error
        now = self._clock()
        with self._lock:
            for task in answer["tasks"]:
                self._started[task["taskArn"]] = (now, dict(tags))
                self._tasks[task["taskArn"]] = task
        missing = count - len(answer["tasks"])
        if missing:
            failures = answer.get("failures", [])
            reason = failures[0].get("reason", "unknown") if failures else "unknown"
            detail = "; ".join(
                filter(
                    None, {f"{each.get('reason')} {each.get('detail', '')}" for each in failures}
                )
            )
            raise NodeLaunchException(
                str(reason)[:20], f"ECS placed {count - missing} of {count} tasks: {detail}", None
            )

    def _request(self, tags: Mapping[str, str], count: int) -> "RunTaskRequestTypeDef":
        settings = self._settings
        variables = {**settings["environment"], "RAY_NODE_TYPE_NAME": tags[TAG_RAY_USER_NODE_TYPE]}
        environment: list[KeyValuePairTypeDef] = [
            {"name": name, "value": value} for name, value in variables.items()
        ]
        request: RunTaskRequestTypeDef = {
            "cluster": settings["cluster"],
            "taskDefinition": settings["task_definition"],
            "count": count,
            "startedBy": settings["job"],
            "group": JOB_GROUP + settings["job"],
            # Repeated with each attempt: ECS then answers with what the first one has started.
            "clientToken": uuid.uuid4().hex,
            "networkConfiguration": {
                "awsvpcConfiguration": {
                    "subnets": settings["subnets"],
                    "securityGroups": settings["security_groups"],
                    "assignPublicIp": "DISABLED",
                }
            },
            "overrides": {"containerOverrides": [{"name": CONTAINER, "environment": environment}]},
            "tags": _to({**tags, **settings["tags"]}),
            "enableECSManagedTags": True,
            "propagateTags": "TASK_DEFINITION",  # costs are told apart by them
            "enableExecuteCommand": True,  # per call: the service's setting is not a task's
        }
        if settings["capacity_provider"]:
            request["capacityProviderStrategy"] = [
                {"capacityProvider": settings["capacity_provider"], "weight": 1}
            ]
        return request

    # --- fewer --------------------------------------------------------------------------------
    def terminate_nodes(self, node_ids: list[str]) -> None:
        """Stop nodes' tasks, and have their hosts terminated at once where no other task has come.

        The keeper's sweep would let the hosts idle for some minutes first; it stays as the safety
        net for what goes wrong here.
        """
        stopped: list[TaskTypeDef] = []
        try:
            for node_id in node_ids:
                if node_id != self._settings["head"]:
                    stopped += self._stop(node_id)
                    with self._lock:
                        self._tasks.pop(node_id, None)
                        self._started.pop(node_id, None)
        finally:
            self._release(stopped)

    def _stop(self, node_id: str) -> "list[TaskTypeDef]":
        """The task that is told to stop; none where it is gone already."""
        try:
            answer = self._ecs.stop_task(
                cluster=self._settings["cluster"],
                task=node_id,
                reason="Ray's autoscaler: not needed any more",
            )
        except ClientError as error:
            if faults.code_of(error) != "InvalidParameterException":
                raise
            return []
        return [answer["task"]]

    def _release(self, tasks: "Sequence[TaskTypeDef]", *, are_bad: bool = False) -> None:
        """Ask the keeper to end the hosts of tasks that have ended, or were told to: it alone ends
        hosts, and sees what else has come to them."""
        hosts = sorted({arn for task in tasks if (arn := task.get("containerInstanceArn"))})
        if hosts:
            order = {"Action": "release", "Hosts": hosts, "AreBad": are_bad}
            self._ask_keeper(order, waits=are_bad)

    def _ask_keeper(self, order: Mapping[str, object], *, waits: bool = False) -> None:
        """Have the keeper do something; what fails is left to its sweep."""
        if not self._settings["keeper"]:
            return
        try:
            self._functions.invoke(
                FunctionName=self._settings["keeper"],
                InvocationType="RequestResponse" if waits else "Event",
                Payload=json.dumps(order).encode(),
            )
        except (ClientError, BotoCoreError) as error:
            _say(f"{order}: left to the keeper's sweep: {error}")


def ecs_client() -> "ECSClient":
    """A client that repeats a call up to six times in all."""
    import boto3

    return boto3.client("ecs", config=_RETRIES)


def lambda_client() -> "LambdaClient":
    """The same, of Lambda."""
    import boto3

    return boto3.client("lambda", config=_RETRIES)


def _has_ended(task: "TaskTypeDef") -> bool:
    """True if a task has stopped or was told to: it no longer counts, and cannot be restarted."""
    return task.get("lastStatus") == "STOPPED" or task.get("desiredStatus") == "STOPPED"


def _bad_host(task: "TaskTypeDef") -> bool:
    """True if it ended because its host is not fit: it reports that, or ECS where it never ran."""
    return any(
        ending(
            stop_code=task.get("stopCode", ""),
            reason=each.get("reason") or task.get("stoppedReason", ""),
            exit_code=each.get("exitCode"),
        )
        is Ending.BAD_HOST
        for each in task.get("containers", [])
    )


def _has_no_ray(task: "TaskTypeDef") -> bool:
    """True if a worker left because Ray did not start on it."""
    return any(each.get("exitCode") == exits.RAY_FAILED for each in task.get("containers", []))


def _to(tags: Mapping[str, str]) -> "list[TagTypeDef]":
    return [{"key": key, "value": value} for key, value in tags.items()]


def _batches(values: Sequence[str], size: int) -> Iterable[list[str]]:
    for first in range(0, len(values), size):
        yield [*values[first : first + size]]


def _say(message: str) -> None:
    print(f"autoscaler: {message}", file=sys.stderr, flush=True)
