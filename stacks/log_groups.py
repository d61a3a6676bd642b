"""Log groups: kept for a set time, removed with the stack."""

from aws_cdk import RemovalPolicy
from aws_cdk import aws_logs as logs
from constructs import Construct

from stacks.settings import Settings


def log_group(scope: Construct, id_: str, *, settings: Settings) -> logs.LogGroup:
    """A log group with the retention of the settings.

    Its name is generated: a late writer may re-create a deleted group (aws-cdk 31487), which must
    not be in the way of the next deployment.
    """
    group = logs.LogGroup(scope, id_, removal_policy=RemovalPolicy.DESTROY)
    resource = group.node.default_child
    assert isinstance(resource, logs.CfnLogGroup)
    resource.retention_in_days = settings.log_retention_days  # days, which the enumeration hides
    return group
