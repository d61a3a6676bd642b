"""Lambda functions of the deployment, each with its own role and log group.

What a function may do is the caller's to say; beside that it can write into its log group, and
nothing else. This holds for the functions that CDK adds, too.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from aws_cdk import CfnResource, CustomResource, Duration, Stack
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from stacks.log_groups import log_group
from stacks.rights import Rights

ROOT: Final = Path(__file__).parents[1]


def lambda_function(
    scope: Construct,
    name: str,
    *,
    what: str,
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
    logs = log_group(scope, f"{name}Logs")
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


def stage(function: Path, folder: Path) -> None:
    """Copy a function's module, its package and ``contract`` into a folder, as Lambda shall see
    them."""
    shutil.copy(function, folder / function.name)
    for package in (ROOT / "contract", function.parent):
        target = folder / package.relative_to(ROOT)
        target.mkdir(parents=True)
        for suffix in (".py", ".json"):
            for module in sorted({*package.glob(f"*{suffix}")} - {function}):
                shutil.copy(module, target / module.name)


@contextlib.contextmanager
def staged(function: Path) -> Iterator[str]:
    """A folder with the code of a function that uses the ``contract`` package; CDK copies it while
    the function is being defined."""
    with tempfile.TemporaryDirectory(prefix="lambda-") as folder:
        stage(function, Path(folder))
        yield folder


def custom_resource(
    scope: Construct,
    name: str,
    *,
    function: lambda_.Function,
    properties: Mapping[str, Any],
    kind: str = "",
) -> CustomResource:
    """A resource that a function of this deployment makes and deletes, of the type ``kind``, which
    is by default its name."""
    resource = CustomResource(
        scope,
        name,
        service_token=function.function_arn,
        resource_type=f"Custom::{kind or name}",
        properties=properties,
    )
    # The function needs its permissions until its last call, which deletes the resource.
    assert function.role
    resource.node.add_dependency(function.role, function.log_group)
    return resource


def contain_custom_resources(stack: Stack) -> None:
    """Give every custom resource provider of CDK in ``stack`` a log group that goes with it.

    By default it has one that outlives the stack, with a role that may create log groups anywhere.
    """
    for child in stack.node.children:
        if not child.node.id.endswith("CustomResourceProvider"):
            continue
        assert isinstance(child, Construct)
        role, function = child.node.find_child("Role"), child.node.find_child("Handler")
        assert isinstance(role, CfnResource)
        assert isinstance(function, CfnResource)
        logs = log_group(child, "Logs")
        policy = iam.CfnPolicy(
            child,
            "WriteLogs",
            policy_name="WriteLogs",
            roles=[role.ref],
            policy_document={
                "Version": "2012-10-17",
                "Statement": [
                    {
                        "Effect": "Allow",
                        "Action": ["logs:CreateLogStream", "logs:PutLogEvents"],
                        "Resource": logs.log_group_arn,
                    }
                ],
            },
        )
        role.add_property_deletion_override("ManagedPolicyArns")
        function.add_property_override("LoggingConfig", {"LogGroup": logs.log_group_name})
        function.add_resource_dependency(policy)
