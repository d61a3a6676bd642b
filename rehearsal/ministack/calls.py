"""Record of calls by role, refused where the role's policies do not allow them. Imported inside
``.venv-aws`` only.

On AWS a role's keys say who calls. Here all keys are one account's; a function or task gets the
ARN of its role as the session token, which every request carries. What the account's own keys ask
for is an administrator's, and only written down. A test compares what was called with what the
roles' policies allow (tests/rehearsal/test_jobs.py).
"""

import json
import threading
from pathlib import Path
from typing import Any

from rehearsal.ministack import authorization
from rehearsal.ministack.internals import (
    autoscaling,
    ec2,
    ecs,
    iam_actions,
    lambda_runtime,
    responses,
    router,
    stepfunctions,
)
from rehearsal.ministack.step_functions import RUN_AND_WAIT, current_execution
from rehearsal.ministack.validation import Answer, Request, refuse, routed
from rehearsal.policies import Call

INSTANCE = "container-instance"
INVOKE_FUNCTION = "arn:aws:states:::lambda:invoke"
#: By it Step Functions learns that a task has ended.
RULE = "StepFunctionsGetEventsForECSTaskRule"
PROPAGATED = ("TASK_DEFINITION", "SERVICE")
ROLES_OF_TASKS = ("taskRoleArn", "executionRoleArn")

_roles: dict[str, str] = {}


class Calls:
    """A file with one line for each kind of call."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def refused(self, wanted: list[Call]) -> Call | None:
        """Write calls down that were not before; return the first that is not allowed."""
        found = None
        for call in wanted:
            is_allowed = authorization.is_allowed(call)
            self.note(call, is_allowed=is_allowed)
            if not is_allowed and found is None:
                found = call
        return found

    def note(self, call: Call, *, is_allowed: bool) -> None:
        fields = {"caller": call.caller, "action": call.action, "resource": call.resource}
        line = json.dumps({**fields, "allowed": is_allowed})
        with self._lock:
            if line not in self._seen:
                self._seen.add(line)
                with self._file.open("a", encoding="utf-8") as output:
                    output.write(line + "\n")


# --- what a request asks for ----------------------------------------------------------------------
def requested(request: Request) -> tuple[str, list[Call]]:
    """The service of a request, and the calls that it is for policies; none if it is not signed."""
    method, path, headers, body, _query, _id = request
    service, params = routed(request)
    if "authorization" not in headers:
        return service, []
    action = iam_actions.extract_iam_action(service, method, path, headers, body, params)
    if action is None:
        return service, []
    caller = headers.get("x-amz-security-token", "") or "cli"
    if service == "ecs":
        return service, ecs_calls(caller, action, json.loads(body or b"{}"))
    region, account = router.extract_region(headers), responses.get_account_id()
    arn = iam_actions.extract_resource_arn(
        service, method, path, headers, body, params, region, account
    )
    if service == "autoscaling" and arn == "*":
        arn = group_of(autoscaling._p(params, "InstanceId"))
    keys: dict[str, str] = {}
    if action in ("ec2:TerminateInstances", "ec2:CreateTags"):
        # The keeper names one instance, and gives it one tag.
        instance = ec2._p(params, "InstanceId.1") or ec2._p(params, "ResourceId.1")
        arn = f"arn:aws:ec2:{region}:{account}:instance/{instance}"
        tags = ec2._tags.get(instance, [])
        keys = {f"aws:ResourceTag/{each['Key']}": each["Value"] for each in tags}
        keys["aws:TagKeys"] = ec2._p(params, "Tag.1.Key")
    wanted = [(action, arn)]
    if service == "s3":  # an object that is copied, or several that are deleted
        wanted += iam_actions.s3_additional_checks(method, path, headers, body, params)
    return service, [Call(caller=caller, action=do, resource=on, keys=keys) for do, on in wanted]


def group_of(instance: str) -> str:
    """ARN of the group of an EC2 instance; ``*`` where there is none."""
    for group in autoscaling._asgs.values():
        if any(each.get("InstanceId") == instance for each in group.get("Instances", [])):
            return str(group["AutoScalingGroupARN"])
    return "*"


def ecs_calls(caller: str, action: str, request: dict[str, Any]) -> list[Call]:
    """Calls to authorize for a request to ECS: with the resources that policies name, which the
    emulator does not report, and with the further permissions that the request needs."""
    # A definition may be named by its family, as a cluster by its name.
    name = request.get("cluster", "").rpartition("/")[2]
    keys = {"ecs:cluster": arn("ecs", f"cluster/{name}")} if name else {}

    def call(what: str, resource: str) -> Call:
        return Call(caller=caller, action=what, resource=resource, keys=keys)

    targets = [each.get("targetId", "") for each in request.get("attributes", [])]
    kind, names = {
        "ecs:PutAttributes": (INSTANCE, targets),
        "ecs:DeleteAttributes": (INSTANCE, targets),
        "ecs:DescribeTasks": ("task", request.get("tasks", [])),
        "ecs:StopTask": ("task", [request.get("task", "")]),
        "ecs:DescribeContainerInstances": (INSTANCE, request.get("containerInstances", [])),
        "ecs:UpdateContainerInstancesState": (INSTANCE, request.get("containerInstances", [])),
    }.get(action, ("", []))
    if names:
        path = f"{kind}/{name}/"
        return [call(action, arn("ecs", path + each.rpartition("/")[2])) for each in names]
    if action in ("ecs:RunTask", "ecs:StartTask"):
        definition = definition_of(request)
        return [
            call(action, definition.get("taskDefinitionArn") or request.get("taskDefinition", "")),
            *needed_to_run(caller, request, definition, name, action.removeprefix("ecs:")),
        ]
    if action in ("ecs:ListTasks", "ecs:ListTaskDefinitions", "ecs:DeregisterTaskDefinition"):
        return [call(action, "*")]
    return [call(action, keys.get("ecs:cluster", "*"))]


def needed_to_run(
    caller: str, request: dict[str, Any], definition: dict[str, Any], cluster: str, how: str
) -> list[Call]:
    """Further calls that a caller of RunTask or StartTask must be allowed: to pass on the roles,
    and to tag."""
    overrides = request.get("overrides") or {}
    roles = {overrides.get(each) or definition.get(each) for each in ROLES_OF_TASKS}
    found = [
        Call(
            caller=caller,
            action="iam:PassRole",
            resource=role,
            keys={"iam:PassedToService": "ecs-tasks.amazonaws.com"},
        )
        for role in sorted(each for each in roles if each)
    ]
    if request.get("tags") or request.get("propagateTags") in PROPAGATED:
        task = arn("ecs", f"task/{cluster}/new")
        keys = {"ecs:CreateAction": how}
        found.append(Call(caller=caller, action="ecs:TagResource", resource=task, keys=keys))
    return found


def definition_of(request: dict[str, Any]) -> dict[str, Any]:
    """The task definition that a request names; {} for one that there is not."""
    key = ecs._resolve_td_key(request.get("taskDefinition", ""))
    found: dict[str, Any] = ecs._task_defs.get(key) or {}
    return found


def arn(service: str, resource: str) -> str:
    """An ARN of this account and region."""
    return f"arn:aws:{service}:{responses.get_region()}:{responses.get_account_id()}:{resource}"


def role_of(machine: str) -> str:
    """ARN of a state machine's role; executions outlive their machine, and keep its role."""
    if machine in stepfunctions._state_machines:
        _roles[machine] = stepfunctions._state_machines[machine]["roleArn"]
    return _roles.get(machine, "")


def of_state_machine(resource: str, arguments: dict[str, Any]) -> list[Call]:
    """The calls of a state: inside the emulator no request is made of them."""
    caller = role_of(current_execution()["stateMachineArn"])
    if resource == RUN_AND_WAIT:
        request = stepfunctions._pascal_to_camel(arguments)
        rule = arn("events", f"rule/{RULE}")
        return [
            *ecs_calls(caller, "ecs:RunTask", request),
            *(
                Call(caller=caller, action=f"events:{each}", resource=rule)
                for each in ("DescribeRule", "PutRule", "PutTargets")
            ),
        ]
    if resource == INVOKE_FUNCTION:
        function = arguments.get("FunctionName", "")
        return [Call(caller=caller, action="lambda:InvokeFunction", resource=function)]
    return [Call(caller=caller, action=resource, resource="*")]


# --- the emulator ---------------------------------------------------------------------------------
def install(file: Path) -> None:
    """Note every request, and give Lambda functions the name of their role."""
    calls = Calls(file)
    stock_credentials = lambda_runtime.execution_credentials

    def of_request(request: Request) -> Answer | None:
        try:
            service, wanted = requested(request)
        except Exception as error:  # a request that is not understood is the service's to refuse
            service, action = "", f"{request.method} {request.path}"
            wanted = [Call(caller="?", action=action, resource=repr(error))]
        if not (refused := calls.refused(wanted)):
            return None
        answer: Answer = iam_actions.access_denied_response(
            service,
            refused.action,
            refused.caller,
            request.id_,
            headers=request.headers,
            resource_arn=refused.resource,
        )
        return answer

    def of_state(resource: str, arguments: dict[str, Any]) -> tuple[str, str] | None:
        if not (refused := calls.refused(of_state_machine(resource, arguments))):
            return None
        # As Step Functions names it: by the service, or for Lambda by its client's error.
        error = {INVOKE_FUNCTION: "Lambda.AWSLambdaException"}.get(
            resource, "ECS.AccessDeniedException"
        )
        why = f"{refused.caller} is not authorized to perform: {refused.action} on resource: "
        return error, why + refused.resource

    def credentials(config: dict[str, Any]) -> dict[str, str]:
        found: dict[str, str] = stock_credentials(config)
        return found | {"AWS_SESSION_TOKEN": config.get("Role", "")}

    refuse(of_request, of_state)
    lambda_runtime.execution_credentials = credentials
