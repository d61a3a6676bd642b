"""Lambda functions of the deployment, each with its own role and log group.

What a function may do is the caller's to say; beside that it can write into its log group, and
nothing else.
"""

from collections.abc import Mapping
from typing import Any

from aws_cdk import CustomResource, Duration
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from stacks.log_groups import log_group
from stacks.rights import Rights
from stacks.settings import Settings


def lambda_function(
    scope: Construct,
    name: str,
    *,
    what: str,
    settings: Settings,
    rights: Rights,
    code: lambda_.Code,
    timeout: Duration,
    environment: Mapping[str, str] | None = None,
    function_name: str | None = None,
) -> lambda_.Function:
    """A function with its role and log group: the constructs ``name``, ``nameRole``, ``nameLogs``.

    Args:
        name: "" for a scope that has only this function, which is then called ``Function``.
        what: what it does, in words.
        code: with ``handler`` in the module ``index``.
        function_name: where what it needs must know it before it is there.
    """
    logs = log_group(scope, f"{name}Logs", settings=settings)
    role = iam.Role(
        scope,
        f"{name}Role",
        description=what,
        assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"),
    )
    rights.grant(role)
    logs.grant_write(role)
    return lambda_.Function(
        scope,
        name or "Function",
        description=what,
        runtime=lambda_.Runtime.PYTHON_3_14,
        handler="index.handler",
        code=code,
        timeout=timeout,
        # Lambda gives processor time in proportion: with 256 MB, to release the hosts of a job with
        # 128 workers would take longer than the function may.
        memory_size=1024,
        role=role,
        log_group=logs,
        environment=environment,
        function_name=function_name,
    )


def custom_resource(
    scope: Construct, name: str, *, function: lambda_.Function, properties: Mapping[str, Any]
) -> CustomResource:
    """A resource that a function of this deployment makes and deletes, of the type ``name``."""
    resource = CustomResource(
        scope,
        name,
        service_token=function.function_arn,
        resource_type=f"Custom::{name}",
        properties=properties,
    )
    # The function needs its permissions until its last call, which deletes the resource.
    assert function.role
    resource.node.add_dependency(function.role, function.log_group)
    return resource
