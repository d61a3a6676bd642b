"""CDK's own custom resources, adapted to this project's rules.

The functions that CDK adds for some properties write to a log group that outlives the stack, with
a role that may create log groups anywhere. Here they get a log group of the stack, and a role that
can only write to that one.
"""

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct

from stacks.log_groups import log_group
from stacks.settings import Settings


def contain_custom_resources(stack: cdk.Stack, *, settings: Settings) -> None:
    """Give every custom resource provider of CDK in ``stack`` a log group that goes with it."""
    for child in stack.node.children:
        if not child.node.id.endswith("CustomResourceProvider"):
            continue
        assert isinstance(child, Construct)
        role, function = child.node.find_child("Role"), child.node.find_child("Handler")
        assert isinstance(role, cdk.CfnResource)
        assert isinstance(function, cdk.CfnResource)
        logs = log_group(child, "Logs", settings=settings)
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
