"""ECS tasks of nodes, listed and described."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Self

from contract import nodes
from contract.job import keeps_as
from contract.job_outcome import Ending, ending, env_override, job_of, keeper_of, kept_until
from trainctl.aws.clients import Clients

if TYPE_CHECKING:
    from mypy_boto3_ecs.type_defs import ContainerTypeDef, TaskTypeDef

#: As many as one DescribeTasks takes.
DESCRIBE_MOST: Final = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One node of the standing cluster or of a job: an ECS task."""

    node: str
    """``head`` or ``worker``; ``job`` for the head of a job."""
    id: str
    status: str
    """``PROVISIONING`` (waits for a host), ``PENDING``, ``ACTIVATING`` (pulls), ``RUNNING`` …"""
    health: str
    """``HEALTHY``, ``UNHEALTHY`` or ``UNKNOWN``, as the container's own check reports."""
    address: str
    """IP address of its network interface; "" while it has none."""
    runtime_id: str
    """Id of the container on its host."""
    host: str
    """ARN of the host as ECS knows it; "" while there is none."""
    since: datetime | None
    started: datetime | None
    """Time since which its container runs; None before that."""
    pulled: datetime | None
    """Time at which its host began to pull the image; None before that: there may be no host."""
    stopped: datetime | None
    """Time at which it ended; None before that, and for tasks that ECS has forgotten."""
    stop_code: str
    stopped_reason: str
    exit_code: int | None
    pool: str = nodes.DEFAULT_POOL
    """Pool of its host, where it is a worker."""
    created: datetime | None = None
    """Time at which it was requested."""
    kept_until: float = 0
    """Unix time until which it only keeps its host; 0: it is a node of a job that runs."""

    @classmethod
    def from_ecs(cls, node: str, task: "TaskTypeDef") -> Self:
        containers = task.get("containers", [])
        container: ContainerTypeDef = containers[0] if containers else {}
        network = {
            detail.get("name"): detail["value"]
            for each in task.get("attachments", [])
            for detail in each.get("details", [])
        }
        return cls(
            node=node,
            id=task["taskArn"].rpartition("/")[2],
            status=task.get("lastStatus", ""),
            health=container.get("healthStatus") or task.get("healthStatus", "UNKNOWN"),
            address=network.get("privateIPv4Address", ""),
            runtime_id=container.get("runtimeId", ""),
            host=task.get("containerInstanceArn", ""),
            created=task.get("createdAt"),
            since=task.get("startedAt") or task.get("createdAt"),
            started=task.get("startedAt"),
            pulled=task.get("pullStartedAt") or task.get("startedAt"),
            stopped=task.get("stoppedAt"),
            stop_code=task.get("stopCode", ""),
            stopped_reason=container.get("reason") or task.get("stoppedReason", ""),
            exit_code=container.get("exitCode"),
            pool=nodes.pool_of(task.get("taskDefinitionArn", "")),
            kept_until=kept_until(task),
        )

    @property
    def ending(self) -> Ending:
        """Kind of its end, once it has ended."""
        return ending(
            stop_code=self.stop_code, reason=self.stopped_reason, exit_code=self.exit_code
        )

    @property
    def kind(self) -> str:
        """``head``, of a job too, or ``worker``."""
        return nodes.HEAD if self.node == nodes.JOB else self.node

    @property
    def is_head(self) -> bool:
        """True for the head of a job, too."""
        return self.node != nodes.WORKER

    @property
    def is_starting(self) -> bool:
        """True before it runs; not while it ends."""
        return self.status in ("PROVISIONING", "PENDING", "ACTIVATING")

    @property
    def has_stopped(self) -> bool:
        return self.status == "STOPPED"


def node_of(task: Mapping[str, Any]) -> str:
    """``worker`` or ``job``, of a task of a job, or of one that keeps its host."""
    kind = env_override(task, nodes.ENV_NODE) if keeper_of(task) else None
    is_worker = kind == nodes.WORKER or task.get("startedBy") == job_of(task)
    return nodes.WORKER if is_worker else nodes.JOB


def owner_of(task: Mapping[str, Any]) -> str:
    """The job whose node a task is, or whose host it keeps; "" for neither."""
    return job_of(task) or keeper_of(task)


class Tasks:
    """The tasks of one ECS cluster."""

    def __init__(self, clients: Clients, *, cluster: str) -> None:
        self._clients, self._cluster = clients, cluster

    def of_service(self, service: str, *, stopped: bool = False) -> list[str]:
        """ARNs of a service's tasks: those that should run, or those stopped within the hour."""
        wanted = "STOPPED" if stopped else "RUNNING"
        return self._listed(desiredStatus=wanted, serviceName=service)

    def started_by(self, job: str) -> list[Task]:
        """The worker tasks that a job has started, but those that stopped over an hour ago."""
        # startedBy must be the only filter, and finds those that should run.
        arns = self._listed(startedBy=job) + self._listed(desiredStatus="STOPPED")
        found = self._described([*dict.fromkeys(arns)]).values()
        return [Task.from_ecs(nodes.WORKER, task) for task in found if task.get("startedBy") == job]

    def _listed(self, **filters: Any) -> list[str]:
        """ARNs of the tasks of the cluster; without filters, of those that should run."""
        pages = self._clients.ecs.get_paginator("list_tasks").paginate(
            cluster=self._cluster, **filters
        )
        return [*pages.search("taskArns[]")]

    def described(self, node: str, arns: Sequence[str]) -> list[Task]:
        """Tasks in the order given; of those that ECS has forgotten, only the id."""
        found = self._described(arns)
        return [
            Task.from_ecs(node, found.get(arn, {"taskArn": arn, "lastStatus": "STOPPED"}))
            for arn in arns
        ]

    def of_jobs(self) -> list[tuple[str, Task]]:
        """The tasks of all jobs that should run, with their jobs; those that keep hosts too."""
        found = self._described(self._listed())
        return [
            (job, Task.from_ecs(node_of(task), task))
            for task in found.values()
            if (job := owner_of(task))
        ]

    def kept_for(self, user_id: str) -> list[Task]:
        """The tasks that keep hosts for a user."""
        found = self._described(self._listed(startedBy=keeps_as(user_id)))
        return [Task.from_ecs(node_of(task), task) for task in found.values()]

    def _described(self, arns: Sequence[str]) -> "dict[str, TaskTypeDef]":
        found: dict[str, TaskTypeDef] = {}
        for first in range(0, len(arns), DESCRIBE_MOST):
            page = self._clients.ecs.describe_tasks(
                cluster=self._cluster, tasks=[*arns[first : first + DESCRIBE_MOST]]
            )
            found |= {each["taskArn"]: each for each in page["tasks"]}
        return found

    def stop(self, task: Task, reason: str) -> Task:
        """Stop a task; return it as it is now: it may have ended before."""
        answer = self._clients.ecs.stop_task(cluster=self._cluster, task=task.id, reason=reason)
        return Task.from_ecs(task.node, answer["task"])
