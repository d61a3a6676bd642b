"""The standing cluster: two ECS services that keep a head and workers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from contract import nodes
from trainctl.aws.clients import Clients
from trainctl.aws.tasks import Task, Tasks
from trainctl.errors import CliError

if TYPE_CHECKING:
    from mypy_boto3_ecs.type_defs import DeploymentTypeDef

NODES: Final = (nodes.HEAD, nodes.WORKER)


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


class StandingCluster:
    """What runs in the two services, and how many tasks they keep."""

    def __init__(
        self, clients: Clients, *, cluster: str, services: Mapping[str, str], keeper: str
    ) -> None:
        """``services``: names of the services by node; ``keeper``: of the function that releases
        hosts."""
        self._clients, self._cluster, self._services = clients, cluster, services
        self._keeper = keeper
        self._tasks = Tasks(clients, cluster=cluster)

    def services(self) -> dict[str, Service]:
        """Both services by node."""
        names = {name: node for node, name in self._services.items()}
        found = self._clients.ecs.describe_services(cluster=self._cluster, services=[*names])
        services = {}
        for each in found["services"]:
            node = names[each["serviceName"]]
            newest: DeploymentTypeDef = {}
            for one in each.get("deployments", []):
                if one.get("status") == "PRIMARY":
                    newest = one
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
