"""Log groups: kept for a set time, removed with the stack."""

from aws_cdk import RemovalPolicy, Stack
from aws_cdk import aws_logs as logs
from constructs import Construct


def log_group(scope: Construct, id_: str) -> logs.LogGroup:
    """A log group, whose retention ``retain_logs`` sets.

    Its name is generated: a late writer may re-create a deleted group (aws-cdk 31487), which must
    not be in the way of the next deployment.
    """
    return logs.LogGroup(scope, id_, removal_policy=RemovalPolicy.DESTROY)


def retain_logs(stack: Stack, *, days: int) -> None:
    """Set the retention of all log groups of a stack; the enumeration of CDK hides the days."""
    for construct in stack.node.find_all():
        if isinstance(construct, logs.CfnLogGroup):
            construct.retention_in_days = days
