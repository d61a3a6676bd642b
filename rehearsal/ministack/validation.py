"""Refusal of requests that the model of their service does not allow. Inside ``.venv-aws`` only.

Refused are parameters that do not exist or are missing, other types, values outside of an
enumeration, a pattern or a limit: of requests, of the states of Step Functions that call a service,
and of what CloudFormation makes of a template. ``rehearsal.models`` decides.

Of requests, those in JSON are read, which ECS, Step Functions, the logs and the secrets take. The
SDKs check what EC2, IAM and S3 are sent, but for patterns and limits.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from botocore.exceptions import UnknownServiceError

from rehearsal.ministack.internals import app, iam_actions, provisioners, router, stepfunctions
from rehearsal.models import faults, pascal, request_shape, service, state_faults, task_faults

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
    of_state: Callable[[str, Any], tuple[str, str] | None],
) -> None:
    """Have the emulator ask first, before all that it asks already.

    Args:
        of_request: the answer to a request that is refused; None where it is not.
        of_state: the same of a state of Step Functions that calls a service: its resource and its
            arguments, and for the answer the name of an error and its cause.
    """
    stock, stock_resource = app._dispatch_service_request, stepfunctions._invoke_resource

    async def dispatch(*given: Any) -> Any:
        return of_request(Request(*given)) or await stock(*given)

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
    """What the service of a signed request in JSON would refuse in it; empty where it would take
    it, and for requests of another form.

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
        given = json.loads(body or b"{}")
    except ValueError as error:
        return [f"the body is no JSON: {error}"]
    return faults(model.operation_model(action).input_shape, given)


#: What the services that are asked most call such a request.
CODES = {
    "ecs": "InvalidParameterException",
    "logs": "InvalidParameterException",
    "secretsmanager": "InvalidParameterException",
}
ANY_OTHER = "ValidationException"
MACHINES = {f"AWSStepFunctions.{each}StateMachine" for each in ("Create", "Update")}
#: Types of CloudFormation whose properties are the parameters of one call of ECS, spelled
#: otherwise: the call, and the name that CloudFormation makes up where there is none.
CALLS = {
    "AWS::ECS::Service": ("CreateService", "ServiceName"),
    "AWS::ECS::TaskDefinition": ("RegisterTaskDefinition", "Family"),
}
STATE_MACHINE = "AWS::StepFunctions::StateMachine"


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


def of_request(request: Request) -> Answer | None:
    """The answer to a request that its service would refuse; None to any other."""
    method, path, headers, body, query, _id = request
    params = app._routing_params(method, path, headers, body, query)
    service = router.detect_service(method, path, headers, params)
    if found := found_in(headers, body):
        return refusal(service, CODES.get(service, ANY_OTHER), found, request)
    if found := of_machine(headers.get("x-amz-target", ""), body):
        return refusal(service, "InvalidDefinition", found, request)
    return None


def of_state(resource: str, arguments: Any) -> tuple[str, str] | None:
    """Error and cause of a state's call that its service would refuse; None of any other."""
    found = task_faults({"Resource": resource, "Arguments": arguments})
    return ("States.Runtime", "; ".join(found)) if found else None


def of_machine(target: str, body: bytes) -> list[str]:
    """What Step Functions would refuse in the definition of a machine that a request has."""
    if target not in MACHINES:
        return []
    try:
        definition = json.loads(json.loads(body).get("definition", "{}"))
    except ValueError:  # the emulator refuses what is no JSON
        return []
    return state_faults(definition)


def of_properties(kind: str, properties: dict[str, Any]) -> list[str]:
    """What the service would refuse in what CloudFormation makes of a resource.

    CloudFormation itself makes numbers of text, and a name where there is none.
    """
    if kind == STATE_MACHINE:
        text = properties.get("DefinitionString")
        return state_faults(json.loads(text) if text else properties.get("Definition", {}))
    action, name = CALLS[kind]
    given = {name: "made"} | properties
    found = faults(request_shape("ecs", action), given, spelling=pascal, is_template=True)
    return [each for each in found if not each.endswith((" is no integer", " is no boolean"))]


def check_resources() -> None:
    """Have CloudFormation make none of the resources above that its service would refuse."""
    for kind in (*CALLS, STATE_MACHINE):
        handlers = provisioners._RESOURCE_HANDLERS[kind]
        stock = handlers["create"]

        def create(
            logical_id: str, properties: Any, stack: str, kind: str = kind, stock: Any = stock
        ) -> Any:
            if found := of_properties(kind, properties):
                raise ValueError(f"{kind} {logical_id}: {'; '.join(found)}")
            return stock(logical_id, properties, stack)

        provisioners._RESOURCE_HANDLERS[kind] = handlers | {"create": create}


def install() -> None:
    """Give the emulator this. Before what asks for rights: AWS answers that first."""
    refuse(of_request, of_state)
    check_resources()
