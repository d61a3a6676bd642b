"""Refusal of requests that the model of their service does not allow. Inside ``.venv-aws`` only.

Refused are parameters that do not exist or are missing, other types, values outside of an
enumeration, a pattern or a limit. ``rehearsal.models`` decides. A test holds the request of the
state that starts heads against the same models (tests/stacks).

Of requests, those in JSON are read, which ECS, Step Functions, the logs and the secrets take. The
SDKs check what EC2, IAM and S3 are sent, but for patterns and limits.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from botocore.exceptions import UnknownServiceError

from rehearsal.ministack.internals import app, iam_actions, router, stepfunctions
from rehearsal.models import faults, service

Answer = tuple[int, dict[str, str], bytes]


class Request(NamedTuple):
    """A request as the emulator's server takes it."""

    method: str
    path: str
    headers: dict[str, str]
    """Their names in lower case."""
    body: bytes
    query: dict[str, Any]
    id_: str


def refuse(
    of_request: Callable[[Request], Answer | None],
    of_state: Callable[[str, Any], tuple[str, str] | None] = lambda *_: None,
) -> None:
    """Have the emulator ask first, before all that it asks already.

    Args:
        of_request: the answer to a request that is refused; None where it is not.
        of_state: the same of a state of Step Functions that calls a service: its resource and its
            arguments, and for the answer the name of an error and its cause.
    """
    stock, stock_resource = app._dispatch_service_request, stepfunctions._invoke_resource

    async def dispatch(*arguments: Any) -> Any:
        return of_request(Request(*arguments)) or await stock(*arguments)

    def invoke(resource: str, arguments: Any) -> Any:
        if found := of_state(resource, arguments):
            raise stepfunctions._ExecutionError(*found)
        return stock_resource(resource, arguments)

    app._dispatch_service_request = dispatch
    stepfunctions._invoke_resource = invoke


#: Where botocore calls a service otherwise than its requests do.
NAMES = {"monitoring": "cloudwatch", "states": "stepfunctions", "api.ecr": "ecr"}
_SCOPE = re.compile(r"Credential=[^/]+/\d+/[^/]+/([^/]+)/aws4_request")


def found_in(headers: Mapping[str, str], body: bytes) -> list[str]:
    """Faults that the service would find in a signed JSON request; empty for a valid request, and
    for requests of another form.

    Args:
        headers: their names in lower case.
    """
    scope = _SCOPE.search(headers.get("authorization", ""))
    action = headers.get("x-amz-target", "").rpartition(".")[2]
    if not scope or not action:
        return []
    try:
        model = service(NAMES.get(scope[1], scope[1]))
    except UnknownServiceError:
        return [f"there is no service {scope[1]}"]
    if action not in model.operation_names:
        return [f"there is no action {model.service_name}:{action}"]
    try:
        request = json.loads(body or b"{}")
    except ValueError as error:
        return [f"the body is no JSON: {error}"]
    return faults(model.operation_model(action).input_shape, request)


#: What the services that are asked most call such a request.
CODES = {
    "ecs": "InvalidParameterException",
    "logs": "InvalidParameterException",
    "secretsmanager": "InvalidParameterException",
}
ANY_OTHER = "ValidationException"


def refusal(service: str, code: str, found: list[str], request: Request) -> Answer:
    """A service's answer to a request that it does not take."""
    number = f"{len(found)} validation error{'s' if len(found) > 1 else ''} detected: "
    _forbidden, answer, body = iam_actions.access_denied_response(
        service,
        "",
        "",
        request.id_,
        error_code=code,
        message=number + "; ".join(found),
        headers=request.headers,
    )
    return 400, answer, body


def routed(request: Request) -> tuple[str, dict[str, Any]]:
    """The service of a request, and its parameters."""
    method, path, headers, body, query, _id = request
    params = app._routing_params(method, path, headers, body, query)
    return router.detect_service(method, path, headers, params), params


def of_request(request: Request) -> Answer | None:
    """The answer to a request that its service would refuse; None to any other."""
    service, _params = routed(request)
    if found := found_in(request.headers, request.body):
        return refusal(service, CODES.get(service, ANY_OTHER), found, request)
    return None


def install() -> None:
    """Give the emulator this. Before what asks for rights: AWS answers that first."""
    refuse(of_request)
