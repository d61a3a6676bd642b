"""Shells and tunnels through the Session Manager plug-in."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contract import nodes
from trainctl.aws.clients import Clients
from trainctl.aws.tasks import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """An open session, in the form in which the plug-in takes it."""

    answer: str
    """Answer of AWS, JSON."""
    request: str
    """Request to AWS, JSON."""


class Sessions:
    """Opens sessions to the containers of one ECS cluster."""

    def __init__(self, clients: Clients, *, cluster: str) -> None:
        self._clients, self._cluster = clients, cluster

    def shell(self, task: Task, command: str) -> Session:
        """A command in a node's container, by ECS Exec."""
        answer = self._clients.ecs.execute_command(
            cluster=self._cluster,
            task=task.id,
            container=nodes.CONTAINER,
            command=command,
            interactive=True,
        )
        return Session(
            answer=json.dumps(answer["session"]),
            request=json.dumps({"Target": self.target(task)}),
        )

    def tunnel(self, task: Task, *, port: int, local_port: int) -> Session:
        """A port of a node on this machine."""
        request: dict[str, Any] = {
            "Target": self.target(task),
            "DocumentName": "AWS-StartPortForwardingSession",
            "Parameters": {"portNumber": [str(port)], "localPortNumber": [str(local_port)]},
        }
        answer: Mapping[str, Any] = self._clients.ssm.start_session(**request)
        names = ("SessionId", "StreamUrl", "TokenValue")
        return Session(
            answer=json.dumps({name: answer[name] for name in names}), request=json.dumps(request)
        )

    def target(self, task: Task) -> str:
        """Name of a node's container in Systems Manager."""
        return f"ecs:{self._cluster}_{task.id}_{task.runtime_id}"
