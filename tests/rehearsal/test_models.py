"""Requests and state machines that AWS would refuse are found by AWS's own models."""

from typing import Any

import pytest

from rehearsal.models import faults, request_shape, state_faults

TASK = {"Type": "Task", "Resource": "arn:aws:states:::ecs:runTask.sync"}


@pytest.mark.parametrize(
    ("service", "action", "given", "expected"),
    [
        ("ecs", "RunTask", {"taskDefinition": 1}, "taskDefinition: 1 is no string"),
        ("ecs", "RunTask", {"taskDefinition": "a", "count": True}, "count: True is no integer"),
        (
            "ecs",
            "RunTask",
            {"taskDefinition": "a", "networkConfiguration": {"awsvpcConfiguration": {}}},
            "networkConfiguration.awsvpcConfiguration.subnets: it is required and missing",
        ),
        (
            "ecs",
            "RunTask",
            {"taskDefinition": "a", "tags": [{"Key": "a"}]},
            "tags[0].Key: there is no such parameter",
        ),
        (
            "ecs",
            "RunTask",
            {"taskDefinition": "a", "launchType": "EC3"},
            "launchType: 'EC3' is not one of EC2, FARGATE, EXTERNAL, MANAGED_INSTANCES",
        ),
        (
            "ecs",
            "TagResource",
            {"resourceArn": "a", "tags": [{"key": "a", "value": "b;c"}]},
            "tags[0].value: 'b;c' does not match ([",
        ),
        (
            "autoscaling",
            "TerminateInstanceInAutoScalingGroup",
            {"InstanceId": "i-\x01", "ShouldDecrementDesiredCapacity": True},
            "InstanceId: 'i-\\x01' does not match [",
        ),
        ("stepfunctions", "ListExecutions", {"maxResults": 1001}, "maxResults: 1001 is more than"),
        (
            "stepfunctions",
            "StartExecution",
            {"stateMachineArn": "a", "name": ""},
            "name: 0 is less than 1",
        ),
        ("ecs", "RunTask", "a", "RunTaskRequest: 'a' is no structure"),
    ],
)
def test_what_a_service_would_refuse_is_named(
    service: str, action: str, given: Any, expected: str
) -> None:
    (found,) = faults(request_shape(service, action), given)
    assert found.startswith(expected)


def test_what_a_service_takes_passes() -> None:
    given = {
        "taskDefinition": "a",
        "tags": [{"key": "a", "value": "ü b_1/c@d"}],
        "overrides": {"containerOverrides": [{"name": "a", "environment": []}]},
    }
    assert faults(request_shape("ecs", "RunTask"), given) == []


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"Arguments": {"TaskDefinition": "{% $it %}"}}, []),
        ({"Arguments": "{% $all %}"}, []),
        ({"Parameters": {"TaskDefinition.$": "$.it"}}, []),
        (
            {"Arguments": {"taskDefinition": "a"}},
            [
                "Run: TaskDefinition: it is required and missing",
                "Run: taskDefinition: there is no such parameter",
            ],
        ),
        (
            {"Resource": "arn:aws:states:::aws-sdk:ecs:RunTask"},
            ["Run: there is no action ecs:RunTask"],
        ),
        (
            {"Resource": "arn:aws:states:::aws-sdk:esc:runTask"},
            ["Run: there is no action esc:runTask"],
        ),
        (
            {"Resource": "arn:aws:states:::sfn:startExecution", "Arguments": {"Input": "{}"}},
            ["Run: StateMachineArn: it is required and missing"],
        ),
        ({"Resource": "arn:aws:lambda:us-east-1:000000000000:function:own"}, []),
        ({"Resource": "ecs"}, ["Run: ecs calls no service"]),
    ],
)
def test_each_call_of_a_state_machine_is_looked_at(
    state: dict[str, Any], expected: list[str]
) -> None:
    inner = {"States": {"Run": TASK | state, "End": {"Type": "Succeed"}}}
    for machine in (inner, {"States": {"All": {"Type": "Parallel", "Branches": [inner]}}}):
        assert state_faults(machine) == expected
