"""The standing cluster: two ECS services that keep a head and workers."""

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Self

from contract import nodes
from contract.job_outcome import DISCONNECTED_SINCE, refusal, seen_since
from trainctl.aws.clients import Clients
from trainctl.aws.errors import CliError
from trainctl.aws.tasks import DESCRIBE_MOST, Task, Tasks

if TYPE_CHECKING:
    from mypy_boto3_ec2.type_defs import InstanceTypeDef
    from mypy_boto3_ecs.type_defs import ContainerInstanceTypeDef, DeploymentTypeDef

NODES: Final = (nodes.HEAD, nodes.WORKER)
#: State of an instance that has not joined the cluster: it boots, or never will.
UNREGISTERED: Final = "UNREGISTERED"


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """One of the standing cluster's two services."""

    node: str
    wanted: int
    running: int
    rollout: str
    """``COMPLETED``, ``IN_PROGRESS`` or ``FAILED``."""
    rollout_reason: str
    events: tuple[tuple[datetime, str], ...]
    """Newest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """An instance of the deployment: billed whether or not a task of a job, or of the standing
    cluster, runs on it."""

    id: str
    instance_type: str
    state: str = UNREGISTERED
    """``ACTIVE``, ``DRAINING`` where no task may come any more, or ``UNREGISTERED``."""
    is_connected: bool = False
    """True if its agent is connected to ECS. If not, no task comes to it, and none on it can be
    stopped; agents reconnect several times an hour, within minutes."""
    disconnected_since: datetime | None = None
    """Time at which a sweep first found it disconnected; None while no sweep has."""
    num_tasks: int = 0
    since: datetime
    """Time at which it joined or, before that, was launched."""

    @classmethod
    def from_ecs(cls, found: "ContainerInstanceTypeDef") -> Self:
        attributes = {each["name"]: each.get("value", "") for each in found.get("attributes", [])}
        is_connected = found["agentConnected"]
        away = None if is_connected else seen_since(found, DISCONNECTED_SINCE)
        return cls(
            id=found["ec2InstanceId"],
            instance_type=attributes.get("ecs.instance-type", ""),
            state=found["status"],
            is_connected=is_connected,
            disconnected_since=datetime.fromtimestamp(away, tz=UTC) if away else None,
            num_tasks=found["runningTasksCount"] + found["pendingTasksCount"],
            since=found["registeredAt"],
        )

    @classmethod
    def from_ec2(cls, found: "InstanceTypeDef") -> Self:
        """One that ECS does not know."""
        return cls(
            id=found["InstanceId"],
            instance_type=found["InstanceType"],
            since=found["LaunchTime"],
        )


class StandingCluster:
    """The two services: their tasks, and how many they keep."""

    def __init__(
        self,
        clients: Clients,
        *,
        stack: str,
        cluster: str,
        services: Mapping[str, str],
        keeper: str,
    ) -> None:
        """``stack``: name of TrainingStack, with which CloudFormation's names of the groups begin;
        ``services``: names of the services by node; ``keeper``: of the function that releases
        hosts."""
        self._clients, self._cluster, self._services = clients, cluster, services
        self._stack, self._keeper = stack, keeper
        self._tasks = Tasks(clients, cluster=cluster)

    def services(self) -> dict[str, Service]:
        """Both services by node."""
        names = {name: node for node, name in self._services.items()}
        found = self._clients.ecs.describe_services(cluster=self._cluster, services=[*names])
        services = {}
        for each in found["services"]:
            node = names[each["serviceName"]]
            deployments = each.get("deployments", [])
            primary = (one for one in deployments if one.get("status") == "PRIMARY")
            none: DeploymentTypeDef = {}
            newest = next(primary, none)
            services[node] = Service(
                node=node,
                wanted=each["desiredCount"],
                running=each["runningCount"],
                rollout=newest.get("rolloutState", ""),
                rollout_reason=newest.get("rolloutStateReason", ""),
                events=tuple((one["createdAt"], one["message"]) for one in each.get("events", [])),
            )
        if missing := {*NODES} - {*services}:
            raise CliError(
                f"the cluster has no service for {' and '.join(sorted(missing))}: make deploy "
                "restores it"
            )
        return services

    def set_wanted(self, node: str, count: int) -> None:
        """Have a service keep ``count`` tasks."""
        self._clients.ecs.update_service(
            cluster=self._cluster, service=self._services[node], desiredCount=count
        )

    def refusal(self, node: str, pool: str, *, since: datetime) -> str:
        """AWS's sentence why no host comes for a kind of node; "" if there is none, or the user may
        not ask."""
        from botocore.exceptions import ClientError

        with suppress(ClientError):
            found = self._clients.autoscaling.describe_scaling_activities()["Activities"]
            own = nodes.pool_hosts(self._stack, nodes.pool_place(pool, "")) + "(_.*)?"
            if pool == nodes.DEFAULT_POOL:  # CloudFormation's names
                own = rf"{self._stack}-Cluster{node.title()}.*"
            listed = [each for each in found if re.fullmatch(own, each["AutoScalingGroupName"])]
            return refusal(listed, since=since.timestamp())
        return ""

    def hosts(self) -> list[Host]:
        """All instances of the deployment, those of jobs too, the oldest first."""
        ecs = self._clients.ecs
        pages = ecs.get_paginator("list_container_instances").paginate(cluster=self._cluster)
        arns = [*pages.search("containerInstanceArns[]")]
        found: list[Host] = []
        for first in range(0, len(arns), DESCRIBE_MOST):
            page = ecs.describe_container_instances(
                cluster=self._cluster, containerInstances=arns[first : first + DESCRIBE_MOST]
            )
            found += map(Host.from_ecs, page["containerInstances"])
        found += self._unregistered({host.id for host in found})
        return sorted(found, key=lambda host: host.since)

    def instances(self, arns: Collection[str]) -> list[str]:
        """Ids of the instances of hosts that are there."""
        found = self._clients.ecs.describe_container_instances(
            cluster=self._cluster, containerInstances=sorted(arns)[:100]
        )
        return [each["ec2InstanceId"] for each in found["containerInstances"]]

    def _unregistered(self, joined: set[str]) -> list[Host]:
        """Instances of the groups that are not among those that have joined."""
        pages = self._clients.ec2.get_paginator("describe_instances").paginate(
            Filters=[
                # CloudFormation's names of the groups.
                {"Name": "tag:aws:autoscaling:groupName", "Values": [f"{self._stack}-*"]},
                {"Name": "instance-state-name", "Values": ["pending", "running"]},
            ]
        )
        instances = pages.search("Reservations[].Instances[]")
        return [Host.from_ec2(each) for each in instances if each["InstanceId"] not in joined]

    def release_hosts(self) -> int:
        """Terminate the cluster's hosts that have no task; return how many they were.

        None while any task waits for a host. Raises CliError where the function fails.
        """
        answer = self._clients.functions.invoke(
            FunctionName=self._keeper, Payload=json.dumps({"Action": "release"})
        )
        said = answer["Payload"].read()
        if answer.get("FunctionError"):
            raise CliError(f"{self._keeper} could not release the hosts: {said.decode()[:500]}")
        found = json.loads(said)["released"]
        return len(found)

    def tasks(self, *, stopped: bool = False) -> list[Task]:
        """The nodes there are, the head first; or those that ended within the last hour."""
        found = []
        for node in NODES:
            arns = self._tasks.of_service(self._services[node], stopped=stopped)
            found += self._tasks.described(node, arns)
        return sorted(found, key=lambda task: (task.node, task.id))
