"""Rules of AWS that no schema has: reserved names, sizes, and quotas that nobody can raise.

The quick tests hold every synthesized template against this table, with each name at full length,
and the local AWS refuses by it (``rehearsal.ministack.cloudformation``). cfn-lint has the rest.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

Properties = Mapping[str, Any]


class Name(NamedTuple):
    """Name of a resource: the template's, or the one that CloudFormation generates."""

    property: str
    most: int
    """Characters; a generated name is cut."""
    refused: str = r"(?!)"
    """Pattern of names that the service refuses."""


class Size(NamedTuple):
    """Size of a part of a resource."""

    path: str
    """Names of properties; empty: all of them."""
    most: int
    """Elements of a list, else characters; of an object those of its JSON."""
    source: str


#: Type -> its name. Sources: the API reference of the action that creates it, and for buckets
#: "General purpose bucket naming rules" in the user guide of S3.
NAMES: Final[Mapping[str, Name]] = {
    "AWS::AutoScaling::AutoScalingGroup": Name("AutoScalingGroupName", 255, ".*:"),
    "AWS::CloudWatch::Alarm": Name("AlarmName", 255),
    "AWS::CloudWatch::Dashboard": Name("DashboardName", 255, r".*[^\w-]"),
    "AWS::EC2::LaunchTemplate": Name("LaunchTemplateName", 128, r".*[^\w().\/-]"),
    # Also kubernetes-sigs/cluster-api-provider-aws#1725.
    "AWS::EC2::SecurityGroup": Name("GroupName", 255, "sg-"),
    "AWS::ECR::Repository": Name("RepositoryName", 256, ".*[A-Z]"),
    # In any case of letters: aws/aws-cdk#29151, #17321, #36584.
    "AWS::ECS::CapacityProvider": Name("Name", 255, "(?i)aws|ecs|fargate"),
    "AWS::ECS::Cluster": Name("ClusterName", 255),
    "AWS::ECS::TaskDefinition": Name("Family", 255),
    "AWS::Events::Rule": Name("Name", 64),
    "AWS::IAM::InstanceProfile": Name("InstanceProfileName", 128),
    "AWS::IAM::ManagedPolicy": Name("ManagedPolicyName", 128),
    "AWS::IAM::Role": Name("RoleName", 64),
    "AWS::Lambda::Function": Name("FunctionName", 64),
    "AWS::Logs::LogGroup": Name("LogGroupName", 512, "aws/"),
    "AWS::S3::Bucket": Name(
        "BucketName",
        63,
        r"xn--|sthree-|amzn-s3-demo-|.*[A-Z]|.*(-s3alias|--ol-s3|\.mrap|--x-s3|--table-s3)$",
    ),
    "AWS::SNS::Topic": Name("TopicName", 256),
    "AWS::SSM::Parameter": Name("Name", 1011, "(?i)/?(aws|ssm)"),
    "AWS::ServiceDiscovery::PrivateDnsNamespace": Name("Name", 253),
    "AWS::StepFunctions::StateMachine": Name("StateMachineName", 80),
}
#: Type -> sizes of its parts.
SIZES: Final[Mapping[str, tuple[Size, ...]]] = {
    "AWS::CloudWatch::Alarm": (Size("AlarmActions", 5, "CloudWatch, PutMetricAlarm"),),
    # 16 KiB, as base64 four characters for three bytes.
    "AWS::EC2::LaunchTemplate": (Size("LaunchTemplateData.UserData", 21_845, "EC2, user data"),),
    "AWS::EC2::VPCEndpoint": (Size("PolicyDocument", 20_480, "VPC, quotas"),),
    # aws/containers-roadmap#2716; aws-cloudformation/cloudformation-coverage-roadmap#1086.
    "AWS::ECS::ClusterCapacityProviderAssociations": (
        Size("CapacityProviders", 20, "ECS, quotas"),
    ),
    "AWS::ECS::TaskDefinition": (
        Size("", 65_536, "ECS, quotas"),
        Size("ContainerDefinitions", 10, "ECS, quotas"),
    ),
    "AWS::Events::Rule": (
        Size("Targets", 5, "EventBridge, quotas"),
        Size("EventPattern", 4_096, "EventBridge, PutRule"),
    ),
    "AWS::IAM::ManagedPolicy": (Size("PolicyDocument", 6_144, "IAM, quotas"),),
    "AWS::IAM::Policy": (Size("PolicyDocument", 10_240, "IAM, quotas"),),
    "AWS::IAM::Role": (
        Size("AssumeRolePolicyDocument", 2_048, "IAM, quotas"),
        Size("ManagedPolicyArns", 10, "IAM, quotas"),
    ),
    "AWS::Lambda::Function": (Size("Environment.Variables", 4_096, "Lambda, quotas"),),
    "AWS::Logs::ResourcePolicy": (Size("PolicyDocument", 5_120, "Logs, PutResourcePolicy"),),
    "AWS::S3::BucketPolicy": (Size("PolicyDocument", 20_480, "S3, bucket policies"),),
    "AWS::StepFunctions::StateMachine": (
        Size("DefinitionString", 1_048_576, "Step Functions, quotas"),
    ),
}
_TEMPLATE: Final = (
    Size("Resources", 500, "CloudFormation, quotas"),
    Size("Outputs", 200, "CloudFormation, quotas"),
)
_SUFFIX: Final = "0123456789AB"


def name_of(kind: str, logical_id: str, properties: Properties, stack: str) -> str:
    """Name of a resource: the template's, or as CloudFormation generates it, at full length."""
    rule = NAMES.get(kind)
    if rule and (own := properties.get(rule.property)):
        return str(own)
    name = f"{stack}-{logical_id}-{_SUFFIX}"
    if rule:
        name = name[: rule.most - len(_SUFFIX) - 1].rstrip("-") + name[-len(_SUFFIX) - 1 :]
    lower = kind in ("AWS::S3::Bucket", "AWS::ECR::Repository")
    return name.lower() if lower else name


def refusals(kind: str, logical_id: str, properties: Properties, stack: str) -> Iterator[str]:
    """Faults that a service finds in a resource whose properties are resolved."""
    if rule := NAMES.get(kind):
        name = name_of(kind, logical_id, properties, stack)
        if len(name) > rule.most:
            yield f"{logical_id}: {name} has {len(name)} characters, {kind} takes {rule.most}"
        if re.match(rule.refused, name):
            yield f"{logical_id}: {name} is a name that {kind} refuses"
    yield from (f"{logical_id}: {each}" for each in _too_large(properties, SIZES.get(kind, ())))
    if len(properties.get("Tags", ())) > 50:
        yield f"{logical_id}: more than 50 tags"


def in_template(template: Mapping[str, Any], stack: str) -> Iterator[str]:
    """Faults that AWS finds in a template; each reference is as long as it can be."""
    resources = template["Resources"]
    yield from _too_large({part: [*each] for part, each in template.items()}, _TEMPLATE)
    for logical_id, each in resources.items():
        properties = _resolved(each.get("Properties", {}), resources, stack)
        yield from refusals(each["Type"], logical_id, properties, stack)


def _too_large(properties: Properties, sizes: Iterable[Size]) -> Iterator[str]:
    for size in sizes:
        value: Any = properties
        for name in filter(None, size.path.split(".")):
            value = value.get(name, {})
        found = len(json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else value)
        if found > size.most:
            yield f"{size.path or 'all'}: {found:,}, at most {size.most:,} ({size.source})"


def _resolved(value: Any, resources: Mapping[str, Any], stack: str) -> Any:
    """A value with texts in the place of CloudFormation's functions."""
    if isinstance(value, list):
        return [_resolved(each, resources, stack) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) > 1 or not (key := next(iter(value), "")).startswith(("Ref", "Fn::")):
        return {name: _resolved(each, resources, stack) for name, each in value.items()}
    inner = value[key]
    if key == "Ref":
        return _of_aws(inner) or _reference(inner, resources, stack)
    if key == "Fn::GetAtt":
        name = _reference(inner[0], resources, stack)
        return f"arn:aws-us-gov:service:ap-southeast-2:123456789012:kind/{name}"
    if key == "Fn::Join":
        return inner[0].join(map(str, _resolved(inner[1], resources, stack)))
    if key == "Fn::Base64":
        return _resolved(inner, resources, stack)
    return "x" * 100  # an import, or a part of another value


def _of_aws(name: str) -> str:
    return {
        "AWS::Region": "ap-southeast-2",
        "AWS::AccountId": "123456789012",
        "AWS::Partition": "aws-us-gov",
        "AWS::URLSuffix": "amazonaws.com",
    }.get(name, "")


def _reference(logical_id: str, resources: Mapping[str, Any], stack: str) -> str:
    kind = resources.get(logical_id, {}).get("Type", "")
    return f"arn:aws:x:ap-southeast-2:123456789012:{name_of(kind, logical_id, {}, stack)}"
