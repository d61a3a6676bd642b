"""Shells and tunnels: sessions for the Session Manager plug-in."""

import json
from dataclasses import dataclass

from contract import nodes
from trainctl.aws.clients import Clients
from trainctl.aws.tasks import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """An open session, in the form in which the plug-in takes it."""

    answer: str
    """What AWS has answered, JSON."""
    request: str
    """What AWS was asked, JSON."""


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
        document = "AWS-StartPortForwardingSession"
        parameters = {"portNumber": [str(port)], "localPortNumber": [str(local_port)]}
        answer = self._clients.ssm.start_session(
            Target=self.target(task), DocumentName=document, Parameters=parameters
        )
        request = {
            "Target": self.target(task),
            "DocumentName": document,
            "Parameters": parameters,
        }
        return Session(
            answer=json.dumps(
                {
                    "SessionId": answer["SessionId"],
                    "StreamUrl": answer["StreamUrl"],
                    "TokenValue": answer["TokenValue"],
                }
            ),
            request=json.dumps(request),
        )

    def target(self, task: Task) -> str:
        """What Systems Manager calls a node's container."""
        return f"ecs:{self._cluster}_{task.id}_{task.runtime_id}"
