"""Shells and tunnels through the Session Manager plug-in."""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from contract import nodes
from trainctl.aws.clients import Clients
from trainctl.aws.tasks import Task

#: The plug-in reads a session from this variable where its name is the argument: every user of a
#: machine can read arguments (aws/aws-cli#8336).
_RESPONSE: Final = "AWS_SSM_START_SESSION_RESPONSE"


class PluginCall(NamedTuple):
    """How the plug-in is started for a session."""

    arguments: list[str]
    variables: dict[str, str]
    """Additional environment variables of the process: they hold the session's token."""


class Sessions:
    """Opens sessions to the containers of one ECS cluster."""

    def __init__(self, clients: Clients, *, cluster: str, region: str, profile: str | None) -> None:
        self._clients, self._cluster = clients, cluster
        self._region, self._profile = region, profile

    def shell(self, task: Task, command: str) -> PluginCall:
        """Start a command in a node's container, by ECS Exec."""
        answer = self._clients.ecs.execute_command(
            cluster=self._cluster,
            task=task.id,
            container=nodes.CONTAINER,
            command=command,
            interactive=True,
        )
        return self._call(answer["session"], {"Target": self.target(task)})

    def tunnel(self, task: Task, *, port: int, local_port: int) -> PluginCall:
        """Open a port of a node on this machine."""
        request: dict[str, Any] = {
            "Target": self.target(task),
            "DocumentName": "AWS-StartPortForwardingSession",
            "Parameters": {"portNumber": [str(port)], "localPortNumber": [str(local_port)]},
        }
        answer: Mapping[str, Any] = self._clients.ssm.start_session(**request)
        names = ("SessionId", "StreamUrl", "TokenValue")
        return self._call({name: answer[name] for name in names}, request)

    def _call(self, answer: object, request: dict[str, Any]) -> PluginCall:
        own = [self._region, "StartSession", self._profile or ""]
        endpoint = self._clients.ssm.meta.endpoint_url
        arguments = [_RESPONSE, *own, json.dumps(request), endpoint]
        return PluginCall(arguments, {_RESPONSE: json.dumps(answer)})

    def target(self, task: Task) -> str:
        """Name of a node's container in Systems Manager."""
        return f"ecs:{self._cluster}_{task.id}_{task.runtime_id}"
