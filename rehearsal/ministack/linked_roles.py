"""Service-linked roles, as AWS names and makes them. Imported inside ``.venv-aws`` only.

ECS makes its role with an account's first cluster, EC2 Auto Scaling with the first group. Both
outlive what they were made for.
"""

import functools
from collections.abc import Callable
from typing import Any

from rehearsal.ministack.internals import iam, provisioners

NAMES = {
    "autoscaling.amazonaws.com": "AWSServiceRoleForAutoScaling",
    "ecs.amazonaws.com": "AWSServiceRoleForECS",
    "spot.amazonaws.com": "AWSServiceRoleForEC2Spot",
}
#: Types with whose first resource a service makes its role.
MADE_WITH = {
    "AWS::AutoScaling::AutoScalingGroup": "autoscaling.amazonaws.com",
    "AWS::ECS::Cluster": "ecs.amazonaws.com",
}


def create(parameters: dict[str, Any]) -> Any:
    """CreateServiceLinkedRole: the emulator derives names from those of services."""
    service = iam._p(parameters, "AWSServiceName")
    name = NAMES.get(service)
    if name is None:
        return iam._create_service_linked_role(parameters)
    if name in iam._roles:
        said = f"Service role name {name} has been taken in this account"
        return iam._error(400, "InvalidInput", said, ns="iam")
    before = {*iam._roles}
    status, headers, body = iam._create_service_linked_role(parameters)
    (own,) = {*iam._roles} - before
    role = iam._roles.pop(own)
    arn = role["Arn"].rpartition("/")[0] + f"/{name}"
    iam._roles[name] = {**role, "RoleName": name, "Arn": arn}
    return status, headers, body.replace(own.encode(), name.encode())


def made_with(stock: Callable[..., Any], service: str, *arguments: Any) -> Any:
    """Create a resource, and the role of its service where there is none."""
    if NAMES[service] not in iam._roles:
        create({"AWSServiceName": service})
    return stock(*arguments)


def install() -> None:
    """Give the emulator these roles."""
    iam._IAM_HANDLERS["CreateServiceLinkedRole"] = create
    for kind, service in MADE_WITH.items():
        handler = provisioners._RESOURCE_HANDLERS[kind]
        handler["create"] = functools.partial(made_with, handler["create"], service)
