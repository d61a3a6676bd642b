"""Rules of AWS that no schema has: reserved names, sizes, and quotas that nobody can raise.

The quick tests hold every synthesized template against this table, with each name at full length,
and the local AWS refuses by it (``rehearsal.ministack.cloudformation``). cfn-lint has the rest.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from contract.reserved import RESERVED

Properties = Mapping[str, Any]


class Name(NamedTuple):
    """Name of a resource: the template's, or the one that CloudFormation generates."""

    property: str
    most: int
    """Characters; a generated name is cut."""
    refused: str = r"(?!)"
    """Pattern of names that the service refuses, beside ``RESERVED``."""


class Size(NamedTuple):
    """Size of a part of a resource."""

    path: str
    """Names of properties, ``*`` for each of a list; empty: all of them."""
    most: int
    """Elements of a list, else characters; of an object those of its JSON."""
    source: str
    pattern: str = ""
    """Pattern of a text; empty: any."""


#: Type -> its name. Sources: the API reference of the action that creates it, and for buckets
#: "General purpose bucket naming rules" in the user guide of S3.
NAMES: Final[Mapping[str, Name]] = {
    "AWS::AutoScaling::AutoScalingGroup": Name("AutoScalingGroupName", 255, ".*:"),
    "AWS::CloudWatch::Alarm": Name("AlarmName", 255),
    "AWS::CloudWatch::Dashboard": Name("DashboardName", 255, r".*[^\w-]"),
    "AWS::EC2::LaunchTemplate": Name("LaunchTemplateName", 128, r".*[^\w().\/-]"),
    "AWS::EC2::SecurityGroup": Name("GroupName", 255),
    "AWS::ECR::Repository": Name("RepositoryName", 256, ".*[A-Z]"),
    "AWS::ECS::CapacityProvider": Name("Name", 255),
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
        r".*[A-Z]|.*(-s3alias|--ol-s3|\.mrap|--x-s3|--table-s3)$",
    ),
    "AWS::SNS::Topic": Name("TopicName", 256),
    "AWS::SSM::Parameter": Name("Name", 1011, "(?i)/?(aws|ssm)"),
    "AWS::ServiceDiscovery::PrivateDnsNamespace": Name("Name", 253),
    "AWS::StepFunctions::StateMachine": Name("StateMachineName", 80),
}
#: What EC2 takes in a description (aws-cloudformation/cfn-lint#173: without an apostrophe;
#: psd401/aistudio#1049: ASCII; agentic-community/mcp-gateway-registry#1728: of rules, too).
_WORDS: Final = r"[\w. :/()#,@\[\]+=&;{}!$*-]*"
_OF_RULES: Final = "mcp-gateway-registry#1728"
#: Type -> sizes of its parts.
SIZES: Final[Mapping[str, tuple[Size, ...]]] = {
    "AWS::CloudWatch::Alarm": (Size("AlarmActions", 5, "CloudWatch, PutMetricAlarm"),),
    "AWS::CloudWatch::Dashboard": (Size("DashboardBody.widgets", 500, "gchq/sleeper#2245"),),
    # 16 KiB, as base64 four characters for three bytes.
    "AWS::EC2::LaunchTemplate": (Size("LaunchTemplateData.UserData", 21_845, "EC2, user data"),),
    "AWS::EC2::SecurityGroup": (
        Size("GroupDescription", 255, "aws-cloudformation/cfn-lint#173", _WORDS),
        Size("SecurityGroupIngress", 60, "aws-samples/aws-cloudfront-samples#53"),
        Size("SecurityGroupIngress.*.Description", 255, _OF_RULES, _WORDS),
        Size("SecurityGroupEgress.*.Description", 255, _OF_RULES, _WORDS),
    ),
    "AWS::EC2::SecurityGroupEgress": (Size("Description", 255, _OF_RULES, _WORDS),),
    "AWS::EC2::SecurityGroupIngress": (Size("Description", 255, _OF_RULES, _WORDS),),
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
        # 4,096 by API, and 2,048 by default.
        Size("EventPattern", 2_048, "hashicorp/terraform-provider-aws#33732"),
        Size("Targets.*.Id", 64, "aws/serverless-application-model#1742"),
    ),
    "AWS::IAM::ManagedPolicy": (Size("PolicyDocument", 6_144, "IAM, quotas"),),
    "AWS::IAM::Policy": (Size("PolicyDocument", 10_240, "IAM, quotas"),),
    "AWS::IAM::Role": (
        Size("AssumeRolePolicyDocument", 2_048, "IAM, quotas"),
        Size("ManagedPolicyArns", 10, "IAM, quotas"),
    ),
    "AWS::Lambda::Function": (
        Size("Environment.Variables", 4_096, "Lambda, quotas"),
        Size("Description", 256, "aws/aws-cdk#20475"),
        Size("Code.ZipFile", 4_194_304, "aws/aws-cdk#30761"),
    ),
    "AWS::Logs::MetricFilter": (
        Size("FilterPattern", 1_024, "hashicorp/terraform-provider-aws#1810"),
    ),
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
        if re.match(rule.refused, name) or name.lower().startswith(RESERVED.get(kind, ())):
            yield f"{logical_id}: {name} is a name that {kind} refuses"
    yield from (f"{logical_id}: {each}" for each in _too_large(properties, SIZES.get(kind, ())))
    if len(properties.get("Tags", ())) > 50:
        yield f"{logical_id}: more than 50 tags"


def in_template(template: Mapping[str, Any], stack: str) -> Iterator[str]:
    """Faults that AWS finds in a template; each reference is as long as it can be."""
    resources = template["Resources"]
    yield from _too_large({part: [*each] for part, each in template.items()}, _TEMPLATE)
    kinds = Counter(each["Type"] for each in resources.values())
    # Of an account and region, and not adjustable: aws/copilot-cli#5743, aws/aws-cdk#22307.
    if kinds["AWS::Logs::ResourcePolicy"] > 10:
        yield "more than 10 log resource policies"
    of_role = Counter[str]()
    for logical_id, each in resources.items():
        properties = _resolved(each.get("Properties", {}), resources, stack)
        yield from refusals(each["Type"], logical_id, properties, stack)
        for role in properties.get("Roles", ()) if each["Type"] == "AWS::IAM::Policy" else ():
            of_role[role] += len(_json(properties["PolicyDocument"]))
    # All of a role's inline policies together: aws/aws-cdk#18457.
    yield from (f"{role}: policies of {size:,}" for role, size in of_role.items() if size > 10_240)


def _too_large(properties: Properties, sizes: Iterable[Size]) -> Iterator[str]:
    for size in sizes:
        for value in _at(properties, size.path.split(".")):
            found = len(_json(value) if isinstance(value, dict) else value)
            if found > size.most:
                yield f"{size.path or 'all'}: {found:,}, at most {size.most:,} ({size.source})"
            if size.pattern and not re.fullmatch(size.pattern, value or "", re.ASCII):
                yield f"{size.path}: {value!r} has other characters than AWS takes ({size.source})"


def _at(value: Any, path: list[str]) -> Iterator[Any]:
    """Values at a path, also within a text that is JSON."""
    if isinstance(value, str) and path:
        value = json.loads(value)
    if path in ([], [""]):
        yield value
    elif path[0] == "*":
        for each in value:
            yield from _at(each, path[1:])
    else:
        yield from _at(value.get(path[0], {}), path[1:])


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


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
