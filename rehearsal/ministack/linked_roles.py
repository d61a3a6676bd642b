"""Service-linked roles, as AWS names them. Imported inside ``.venv-aws`` only.

They are missing until they are asked for, as in an account that never used a service.
"""

from typing import Any

from rehearsal.ministack.internals import iam

NAMES = {
    "autoscaling.amazonaws.com": "AWSServiceRoleForAutoScaling",
    "ecs.amazonaws.com": "AWSServiceRoleForECS",
    "spot.amazonaws.com": "AWSServiceRoleForEC2Spot",
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


def install() -> None:
    """Give the emulator these roles."""
    iam._IAM_HANDLERS["CreateServiceLinkedRole"] = create
