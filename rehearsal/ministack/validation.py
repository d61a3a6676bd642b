"""Every request is what the model of its service allows. Imported inside ``.venv-aws`` only.

Refused are parameters that there are not or that are missing, other types, values outside of an
enumeration, a pattern or a limit: of requests, of the states of Step Functions that call a service,
and of what CloudFormation makes of a template. ``rehearsal.models`` decides.
"""

import json
from typing import Any

from rehearsal.ministack import wire
from rehearsal.ministack.internals import app, iam_actions, provisioners, router
from rehearsal.ministack.refusals import Answer, Request, refuse
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
    if not is_strict(Strict.REQUESTS):
        return None
    method, path, headers, body, query, _id = request
    params = app._routing_params(method, path, headers, body, query)
    service = router.detect_service(method, path, headers, params)
    if found := wire.found_in(method, path, headers, body, query):
        return refusal(service, CODES.get(service, ANY_OTHER), found, request)
    if found := of_machine(headers.get("x-amz-target", ""), body):
        return refusal(service, "InvalidDefinition", found, request)
    return None


def of_state(resource: str, arguments: Any) -> tuple[str, str] | None:
    """Error and cause of a state's call that its service would refuse; None of any other."""
    if is_strict(Strict.REQUESTS):
        found = task_faults({"Resource": resource, "Arguments": arguments})
        if found:
            return "States.Runtime", "; ".join(found)
    return None


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
    refuse(of_request, of_state)
    check_resources()
