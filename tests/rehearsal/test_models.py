"""Requests that AWS would refuse are found by AWS's own models."""

from typing import Any

import pytest

from rehearsal.models import faults, request_shape


@pytest.mark.parametrize(
    ("service", "action", "given", "expected"),
    [
        (
            "ecs",
            "RunTask",
            {"taskDefinition": "a", "tags": [{"Key": "a"}]},
            'Unknown parameter in tags[0]: "Key", must be one of: key, value',
        ),
        (
            "ecs",
            "RunTask",
            {"taskDefinition": "a", "launchType": "EC3"},
            "Invalid value for parameter launchType, value: 'EC3', valid values: EC2, FARGATE, ",
        ),
        (
            "ecs",
            "TagResource",
            {"resourceArn": "a", "tags": [{"key": "a", "value": "b;c"}]},
            "Invalid value for parameter tags[0].value, value: 'b;c', valid pattern: ([",
        ),
        (
            "autoscaling",
            "TerminateInstanceInAutoScalingGroup",
            {"InstanceId": "i-\x01", "ShouldDecrementDesiredCapacity": True},
            "Invalid value for parameter InstanceId, value: 'i-\\x01', valid pattern: [",
        ),
        (
            "ecs",
            "DescribeServices",
            {"services": ["a"], "include": ["TAGZ"]},
            "Invalid value for parameter include[0], value: 'TAGZ', valid values: TAGS",
        ),
        (
            "stepfunctions",
            "ListExecutions",
            {"maxResults": 1001},
            "Invalid value for parameter maxResults, value: 1001, valid max: 1000",
        ),
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
