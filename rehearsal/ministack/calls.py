"""Writes down which role called what. Imported inside ``.venv-aws`` only.

On AWS a role's keys say who calls. Here all keys are one account's; a function or task gets the
ARN of its role as the session token, which every request carries. A test compares what was called
with what the roles' policies allow (tests/rehearsal/test_jobs.py).
"""

import json
import threading
from pathlib import Path
from typing import Any

from rehearsal.ministack.internals import (
    app,
    iam_actions,
    lambda_runtime,
    responses,
    router,
    stepfunctions,
)

INSTANCE = "container-instance"
_lock = threading.Lock()


class Calls:
    """A file with one line for each kind of call."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: set[str] = set()

    def note(self, caller: str, action: str, resource: str, cluster: str = "") -> None:
        """Write a call down, unless it was before."""
        call = {"caller": caller, "action": action, "resource": resource, "cluster": cluster}
        line = json.dumps(call)
        with _lock:
            if line not in self._seen:
                self._seen.add(line)
                with self._file.open("a", encoding="utf-8") as output:
                    output.write(line + "\n")

    def note_request(
        self, method: str, path: str, headers: dict[str, str], body: bytes, query: dict[str, Any]
    ) -> None:
        """Write down what a signed request asks for."""
        if "authorization" not in headers:
            return
        params = app._routing_params(method, path, headers, body, query)
        service = router.detect_service(method, path, headers, params)
        action = iam_actions.extract_iam_action(service, method, path, headers, body, params)
        if action is None:
            return
        arn = iam_actions.extract_resource_arn(
            service,
            method,
            path,
            headers,
            body,
            params,
            router.extract_region(headers),
            responses.get_account_id(),
        )
        caller = headers.get("x-amz-security-token", "") or "cli"
        if service != "ecs":
            self.note(caller, action, arn)
            return
        given: dict[str, Any] = json.loads(body or b"{}")
        for resource in ecs_resources(action, given) or [arn]:
            self.note(caller, action, resource, given.get("cluster", ""))


def ecs_resources(action: str, given: dict[str, Any]) -> list[str]:
    """What policies name as the resources of a call of ECS, which the emulator does not tell."""
    kind, names = {
        "ecs:RunTask": ("", [given.get("taskDefinition", "")]),
        "ecs:DescribeTasks": ("task", given.get("tasks", [])),
        "ecs:StopTask": ("task", [given.get("task", "")]),
        "ecs:DescribeContainerInstances": (INSTANCE, given.get("containerInstances", [])),
        "ecs:UpdateContainerInstancesState": (INSTANCE, given.get("containerInstances", [])),
    }.get(action, ("", []))
    cluster = given.get("cluster", "").rpartition("/")[2]
    prefix = f"arn:aws:ecs:{responses.get_region()}:{responses.get_account_id()}:{kind}/{cluster}/"
    return [name if name.startswith("arn:") else prefix + name for name in names]


def install(file: Path) -> None:
    """Note every request, and give Lambda functions the name of their role."""
    calls = Calls(file)
    stock, stock_credentials = app._dispatch_service_request, lambda_runtime.execution_credentials
    stock_resource = stepfunctions._invoke_resource

    async def dispatch(
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        query: dict[str, Any],
        request: str,
    ) -> Any:
        try:
            calls.note_request(method, path, headers, body, query)
        except Exception as error:  # a request that is not understood is the service's to refuse
            calls.note("?", f"{method} {path}", repr(error))
        return await stock(method, path, headers, body, query, request)

    def credentials(config: dict[str, Any]) -> dict[str, str]:
        found: dict[str, str] = stock_credentials(config)
        return found | {"AWS_SESSION_TOKEN": config.get("Role", "")}

    def invoke(resource: str, arguments: dict[str, Any]) -> Any:
        # Inside the emulator no request is made of it.
        action, target = {
            "arn:aws:states:::ecs:runTask.sync": ("ecs:RunTask", "TaskDefinition"),
            "arn:aws:states:::lambda:invoke": ("lambda:InvokeFunction", "FunctionName"),
        }.get(resource, (resource, ""))
        calls.note("states", action, arguments.get(target, ""), arguments.get("Cluster", ""))
        return stock_resource(resource, arguments)

    app._dispatch_service_request = dispatch
    lambda_runtime.execution_credentials = credentials
    stepfunctions._invoke_resource = invoke
