"""Accepted findings of the rule checkers, each with its reason.

Those about what a role may do are beside its rights (``stacks.rights``). Accepted where the
resource is made, read by cdk-nag; ``docs/security.md`` explains the more important ones. A finding
without a reason fails ``make check``.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from aws_cdk import Acknowledgment, Stack, Validations
from constructs import IConstruct


def accept(construct: IConstruct, findings: Mapping[str, str]) -> None:
    """Accept ``findings`` (rule, or ``rule[finding]`` -> reason) of ``construct`` and its parts."""
    Validations.of(construct).acknowledge(
        *(Acknowledgment(id=rule, reason=reason) for rule, reason in findings.items())
    )


def wildcard(construct: IConstruct, arn: str = "*") -> str:
    """Id of cdk-nag's finding that a policy allows ``arn``, which contains a wildcard."""
    return f"AwsSolutions-IAM5[Resource::{_flat(Stack.of(construct).resolve(arn))}]"


def _flat(value: Any) -> str:
    """A template's value as cdk-nag writes it: references in angle brackets."""
    match value:
        case str():
            return re.sub(r"\$\{(.+?)\}", r"<\1>", value)  # a variable of the policy
        case {"Ref": name}:
            return f"<{name}>"
        case {"Fn::GetAtt": [name, attribute]}:
            return f"<{name}.{attribute}>"
        case {"Fn::ImportValue": name}:
            return _flat(name)
        case {"Fn::Join": [separator, parts]}:
            return str(separator).join(_flat(part) for part in parts)
    raise TypeError(f"cdk-nag's name of {value!r} is not known")


# AWS Solutions, by resource.
BUCKET: Final = {
    "AwsSolutions-S1": "Access logs need a second bucket that outlives this one and "
    "holds a line per read of a shard; CloudTrail's data events are the better "
    "choice where an audit asks for them.",
}
HOST_GROUP: Final = {
    "AwsSolutions-AS3": "Hosts come and go with every job; failed tasks raise the "
    "alarm that counts, and notices of each start would hide it.",
}
RAY_TOKEN: Final = {
    "AwsSolutions-SMG4": "All nodes of a running cluster must have the same token; "
    "it changes with each new deployment, or by hand between two runs.",
}
ZONE: Final = {
    "CloudFormation-Validate::W3010": "A pool of hosts is in the zone that its settings name.",
}
TASK_DEFINITION: Final = {
    "AwsSolutions-ECS2": "Names, sizes and addresses of the deployment, none of them "
    "a secret; the token comes from Secrets Manager.",
}
STATE_MACHINE: Final = {
    "AwsSolutions-SF1": "An execution has four states and keeps its history for 90 "
    "days; how it ended is written into the bucket.",
    "AwsSolutions-SF2": "One task per execution: there is no path of calls to trace.",
}

# NIST 800-53 R5, which `make night` checks: findings that follow from one decision and hold for
# every resource of their kind. Rules that are about one resource are accepted where it is made.
AUDIT: Final = {
    "NIST.800.53.R5-CloudWatchAlarmAction": (
        "Whom an alarm is sent to is a setting, alarm_email, empty by default; it is on the "
        "dashboard either way."
    ),
    "NIST.800.53.R5-IAMNoInlinePolicy": (
        "Each policy belongs to one role, names its resources, and goes with it; a managed "
        "policy could be attached to something else."
    ),
    "NIST.800.53.R5-CloudWatchLogGroupEncrypted": (
        "Encrypted with CloudWatch's own key. A customer key would be billed by the month and "
        "keep deleted stacks' logs readable for no one."
    ),
    "NIST.800.53.R5-S3DefaultEncryptionKMS": (
        "Encrypted with S3's own key. Calls to KMS for every shard of a checkpoint are billed "
        "and throttled; neither can be read from outside the account."
    ),
    "NIST.800.53.R5-S3BucketLoggingEnabled": (
        "As AwsSolutions-S1: CloudTrail's data events are the better record where one is asked for."
    ),
    "NIST.800.53.R5-S3BucketReplicationEnabled": (
        "Checkpoints can be computed again; a copy in another region costs more than the run "
        "it saves."
    ),
    "NIST.800.53.R5-S3BucketVersioningEnabled": (
        "Checkpoints are pruned all the time; kept versions of them would be billed for ever."
    ),
    "NIST.800.53.R5-VPCNoUnrestrictedRouteToIGW": (
        "The one public subnet holds the NAT gateway and nothing else, and gives no instance "
        "a public address."
    ),
    "NIST.800.53.R5-EC2RestrictedCommonPorts": (
        "The source is the security group itself: Ray, NCCL and Gloo use random ports among "
        "the nodes."
    ),
    "NIST.800.53.R5-LambdaConcurrency": (
        "Teardown runs once, when the stack is deleted, the jobs' keeper for seconds after a job. "
        "Reserved concurrency would be taken from the account for nothing."
    ),
    "NIST.800.53.R5-LambdaDLQ": (
        "Callers wait for the answer: CloudFormation, and the jobs' state machine, which asks "
        "again. What an event's call misses, the next sweep does."
    ),
    "NIST.800.53.R5-LambdaInsideVPC": (
        "It only calls AWS; inside the VPC it would hold interfaces in the subnet that is "
        "being deleted."
    ),
    "NIST.800.53.R5-SecretsManagerRotationEnabled": (
        "As AwsSolutions-SMG4: all nodes of a running cluster must have the same token."
    ),
    "NIST.800.53.R5-SecretsManagerUsingKMSKey": (
        "Encrypted with Secrets Manager's own key; the token opens one cluster inside one VPC."
    ),
    "NIST.800.53.R5-SNSEncryptedKMS": (
        "Alarms name a metric and no secret; CloudWatch cannot publish to a topic under SNS's "
        "own key, and a customer key is billed by the month."
    ),
}
