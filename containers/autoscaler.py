"""Ray's autoscaler on ECS: each worker node is a task that Ray starts and stops.

Ray's monitor, beside the head, decides how many nodes of which kind are wanted and calls this
provider (autoscaler v2, ``type: external``). The provider keeps no state of its own that matters:
tasks carry the job and Ray's tags, so a head that comes back finds what the one before has started.
"""

import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from contract import job as jobs
from contract.nodes import CONTAINER, HEAD

RUN_TASK_MOST: Final = 10  # tasks that ECS starts in a call
DESCRIBE_MOST: Final = 100
_ATTEMPTS: Final = 6
_FIRST_WAIT_S: Final = 0.5
#: A task may be missing in ECS's list for so long after it was started.
_SETTLES_S: Final = 60.0

# Errors after which the same call may succeed, whether or not it was carried out.
_TRANSIENT: Final = frozenset(
    {
        "InternalFailure",
        "RequestLimitExceeded",
        "ServerException",
        "ServiceUnavailable",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What ``provider`` of the autoscaler's configuration says."""

    cluster: str
    """ECS cluster, name or ARN."""
    job: str
    """Of the tasks: their ``startedBy``, at most 36 characters."""
    head: str
    """ARN of the head's own task."""
    task_definition: str
    capacity_provider: str
    """Empty: the cluster's default."""
    subnets: tuple[str, ...]
    security_groups: tuple[str, ...]
    environment: Mapping[str, str]
    """More variables of a worker, such as the head's address."""

    @classmethod
    def from_provider(cls, values: Mapping[str, Any]) -> "Settings":
        return cls(
            cluster=values["cluster"],
            job=values["job"],
            head=values["head"],
            task_definition=values["task_definition"],
            capacity_provider=values.get("capacity_provider", ""),
            subnets=tuple(values["subnets"]),
            security_groups=tuple(values["security_groups"]),
            environment=dict(values.get("environment", {})),
        )


class EcsNodeProvider(NodeProvider):
    """Nodes of one job as ECS tasks; a node's id is its task's ARN."""

    def __init__(
        self,
        provider_config: dict[str, Any],
        cluster_name: str,
        *,
        ecs: Any = None,
        autoscaling: Any = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``ecs`` and ``autoscaling`` are clients of boto3; a test gives others."""
        super().__init__(provider_config, cluster_name)
        self._settings = Settings.from_provider(provider_config)
        self._ecs = ecs if ecs is not None else _client("ecs")
        self._autoscaling = autoscaling if autoscaling is not None else _client("autoscaling")
        self._sleep, self._clock = sleep, clock
        # Ray launches from several threads at once.
        self._lock = threading.Lock()
        self._tasks: dict[str, dict[str, Any]] = {}
        self._started: dict[str, tuple[float, dict[str, str]]] = {}

    # --- what is there ------------------------------------------------------------------------
    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        """Ids of the nodes with these tags, the head among them; asks ECS."""
        listed = self._listed()
        now = self._clock()
        with self._lock:
            self._started = {
                arn: (at, tags)
                for arn, (at, tags) in self._started.items()
                if now - at < _SETTLES_S
            }
            recent = dict(self._started)
        tasks = {task["taskArn"]: task for task in self._described({*listed, *recent})}
        for arn, (_, tags) in recent.items():
            # Started a moment ago, and ECS does not know it everywhere yet.
            tasks.setdefault(arn, {"taskArn": arn, "lastStatus": "PROVISIONING", "tags": _to(tags)})
        ended = [arn for arn, task in tasks.items() if _has_ended(task)]
        with self._lock:
            for arn in ended:
                self._started.pop(arn, None)
            self._tasks = {arn: task for arn, task in tasks.items() if arn not in ended}
        nodes = [self._settings.head, *(arn for arn in self._tasks if arn != self._settings.head)]
        return [node for node in nodes if tag_filters.items() <= self.node_tags(node).items()]

    def is_running(self, node_id: str) -> bool:
        if node_id == self._settings.head:
            return True
        return bool(self._tasks.get(node_id, {}).get("lastStatus") == "RUNNING")

    def is_terminated(self, node_id: str) -> bool:
        return node_id != self._settings.head and node_id not in self._tasks

    def node_tags(self, node_id: str) -> dict[str, str]:
        if node_id == self._settings.head:
            return {
                TAG_RAY_NODE_KIND: NODE_KIND_HEAD,
                TAG_RAY_USER_NODE_TYPE: HEAD,
                TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
            }
        return {tag["key"]: tag["value"] for tag in self._tasks.get(node_id, {}).get("tags", [])}

    def internal_ip(self, node_id: str) -> str:
        """The task's address in its subnet; empty while it has none."""
        for attachment in self._tasks.get(node_id, {}).get("attachments", []):
            for detail in attachment.get("details", []):
                if detail["name"] == "privateIPv4Address":
                    return str(detail["value"])
        return ""

    def external_ip(self, node_id: str) -> str:
        return self.internal_ip(node_id)

    def _listed(self) -> list[str]:
        arns: list[str] = []
        arguments: dict[str, Any] = {
            "cluster": self._settings.cluster,
            "startedBy": self._settings.job,
            "desiredStatus": "RUNNING",
        }
        while True:
            page = self._call(self._ecs.list_tasks, **arguments)
            arns += page["taskArns"]
            if not page.get("nextToken"):
                return arns
            arguments["nextToken"] = page["nextToken"]

    def _described(self, arns: Iterable[str]) -> list[dict[str, Any]]:
        tasks: list[dict[str, Any]] = []
        for part in _batches(sorted(arns), DESCRIBE_MOST):
            page = self._call(
                self._ecs.describe_tasks,
                cluster=self._settings.cluster,
                tasks=part,
                include=["TAGS"],
            )
            tasks += page["tasks"]
        return tasks

    # --- more ---------------------------------------------------------------------------------
    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        """Start ``count`` tasks.

        Raises:
            NodeLaunchException: ECS did not place all of them; those that it did are kept.
        """
        del node_config
        left = count
        while left:
            wanted = min(left, RUN_TASK_MOST)
            self._run(tags, wanted)
            left -= wanted

    def _run(self, tags: Mapping[str, str], count: int) -> None:
        settings = self._settings
        arguments: dict[str, Any] = {
            "cluster": settings.cluster,
            "taskDefinition": settings.task_definition,
            "count": count,
            "startedBy": settings.job,
            "group": f"{jobs.JOB_GROUP}{settings.job}",
            # Given again with each attempt: ECS then answers with what the first one has started.
            "clientToken": uuid.uuid4().hex,
            "networkConfiguration": {
                "awsvpcConfiguration": {
                    "subnets": [*settings.subnets],
                    "securityGroups": [*settings.security_groups],
                    "assignPublicIp": "DISABLED",
                }
            },
            "overrides": {
                "containerOverrides": [
                    {
                        "name": CONTAINER,
                        "environment": [
                            {"name": name, "value": value}
                            for name, value in {
                                **settings.environment,
                                "RAY_NODE_TYPE_NAME": tags[TAG_RAY_USER_NODE_TYPE],
                            }.items()
                        ],
                    }
                ]
            },
            "tags": _to(tags),
            "enableECSManagedTags": True,
        }
        if settings.capacity_provider:
            arguments["capacityProviderStrategy"] = [
                {"capacityProvider": settings.capacity_provider, "weight": 1}
            ]
        try:
            answer = self._call(self._ecs.run_task, **arguments)
        except (ClientError, BotoCoreError) as error:
            raise NodeLaunchException(_code(error)[:20], str(error), sys.exc_info()) from error
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

    # --- fewer --------------------------------------------------------------------------------
    def terminate_node(self, node_id: str) -> None:
        """Stop a node's task and give its host back at once.

        Managed scaling would let the host idle for a quarter of an hour first; it stays as the
        safety net for what goes wrong here.
        """
        if node_id == self._settings.head:
            return
        instance = self._host_of(node_id)
        if instance:
            self._drain(instance)  # or another job's task comes to a host that is about to end
        try:
            self._call(
                self._ecs.stop_task,
                cluster=self._settings.cluster,
                task=node_id,
                reason="Ray's autoscaler: not needed any more",
            )
        except ClientError as error:
            if _code(error) != "InvalidParameterException":  # it is gone already
                raise
        with self._lock:
            self._tasks.pop(node_id, None)
            self._started.pop(node_id, None)
        if instance:
            self._end_host(instance)

    def terminate_nodes(self, node_ids: list[str]) -> None:
        for node_id in node_ids:
            self.terminate_node(node_id)

    def _host_of(self, node_id: str) -> dict[str, Any] | None:
        """The container instance under a task; None while it has none, or where ECS cannot say."""
        try:
            tasks = self._described([node_id])
            arns = [arn for task in tasks if (arn := task.get("containerInstanceArn"))]
            if not arns:
                return None
            page = self._call(
                self._ecs.describe_container_instances,
                cluster=self._settings.cluster,
                containerInstances=arns,
            )
        except (ClientError, BotoCoreError) as error:
            _say(f"the host of {node_id} is left to managed scaling: {error}")
            return None
        found: list[dict[str, Any]] = page["containerInstances"]
        return found[0] if found else None

    def _drain(self, instance: Mapping[str, Any]) -> None:
        try:
            self._call(
                self._ecs.update_container_instances_state,
                cluster=self._settings.cluster,
                containerInstances=[instance["containerInstanceArn"]],
                status="DRAINING",
            )
        except (ClientError, BotoCoreError) as error:
            _say(f"the host {instance.get('ec2InstanceId')} does not drain: {error}")

    def _end_host(self, instance: Mapping[str, Any]) -> None:
        try:
            self._call(
                self._autoscaling.terminate_instance_in_auto_scaling_group,
                InstanceId=instance["ec2InstanceId"],
                ShouldDecrementDesiredCapacity=True,
            )
        except (ClientError, BotoCoreError) as error:
            _say(f"the host {instance['ec2InstanceId']} is left to managed scaling: {error}")

    # --- AWS ----------------------------------------------------------------------------------
    def _call(self, operation: Callable[..., Any], **arguments: Any) -> Any:
        """Call AWS; again after ever longer waits where it is busy or its answer is lost."""
        wait_s = _FIRST_WAIT_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return operation(**arguments)
            except (ClientError, BotoCoreError) as error:
                is_transient = isinstance(error, BotoCoreError) or _code(error) in _TRANSIENT
                if attempt == _ATTEMPTS or not is_transient:
                    raise
            self._sleep(wait_s)
            wait_s *= 2
        raise AssertionError("unreachable")


def _client(service: str) -> Any:
    import boto3

    return boto3.client(service)


def _has_ended(task: Mapping[str, Any]) -> bool:
    """Whether a task is over, or told to be: it counts no longer, and cannot be had back."""
    return task.get("lastStatus") == "STOPPED" or task.get("desiredStatus") == "STOPPED"


def _to(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in tags.items()]


def _batches(values: Sequence[str], size: int) -> Iterable[list[str]]:
    for first in range(0, len(values), size):
        yield [*values[first : first + size]]


def _code(error: Exception) -> str:
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", "unknown"))
    return type(error).__name__


def _say(message: str) -> None:
    print(f"autoscaler: {message}", file=sys.stderr, flush=True)
