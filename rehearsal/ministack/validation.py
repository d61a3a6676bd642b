"""Every request is what the model of its service allows. Imported inside ``.venv-aws`` only.

Refused are parameters that there are not or that are missing, other types, values outside of an
enumeration, a pattern or a limit: of requests, of the states of Step Functions that call a service,
and of what CloudFormation makes of a template. ``rehearsal.models`` decides.
"""

import json
from typing import Any

from rehearsal.ministack import wire
from rehearsal.ministack.internals import app, iam_actions, provisioners, router, stepfunctions
from rehearsal.ministack.switches import Strict, is_strict
from rehearsal.models import faults, pascal, request_shape, state_faults, task_faults

#: What the services that are asked most call such a request.
CODES = {
    "autoscaling": "ValidationError",
    "cloudformation": "ValidationError",
    "ec2": "InvalidParameterValue",
    "ecs": "InvalidParameterException",
    "iam": "ValidationError",
    "lambda": "InvalidParameterValueException",
    "logs": "InvalidParameterException",
    "s3": "InvalidArgument",
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


def refusal(
    service: str, code: str, found: list[str], request: str, headers: dict[str, str]
) -> tuple[int, dict[str, str], bytes]:
    """A service's answer to a request that it does not take."""
    number = f"{len(found)} validation error{'s' if len(found) > 1 else ''} detected: "
    _forbidden, answer, body = iam_actions.access_denied_response(
        service,
        "",
        "",
        request,
        error_code=code,
        message=number + "; ".join(found),
        headers=headers,
    )
    return 400, answer, body


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
            if is_strict(Strict.REQUESTS) and (found := of_properties(kind, properties)):
                raise ValueError(f"{kind} {logical_id}: {'; '.join(found)}")
            return stock(logical_id, properties, stack)

        provisioners._RESOURCE_HANDLERS[kind] = handlers | {"create": create}


def install() -> None:
    """Give the emulator this. Before what asks for rights: AWS answers that first."""
    stock, stock_resource = app._dispatch_service_request, stepfunctions._invoke_resource

    async def dispatch(
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        query: dict[str, Any],
        request: str,
    ) -> Any:
        if is_strict(Strict.REQUESTS):
            params = app._routing_params(method, path, headers, body, query)
            service = router.detect_service(method, path, headers, params)
            if found := wire.found_in(method, path, headers, body, query):
                return refusal(service, CODES.get(service, ANY_OTHER), found, request, headers)
            if found := of_machine(headers.get("x-amz-target", ""), body):
                return refusal(service, "InvalidDefinition", found, request, headers)
        return await stock(method, path, headers, body, query, request)

    def invoke(resource: str, arguments: Any) -> Any:
        if is_strict(Strict.REQUESTS):
            found = task_faults({"Resource": resource, "Arguments": arguments})
            if found:
                raise stepfunctions._ExecutionError("States.Runtime", "; ".join(found))
        return stock_resource(resource, arguments)

    app._dispatch_service_request = dispatch
    stepfunctions._invoke_resource = invoke
    check_resources()
