"""Templates keep AWS's rules that no schema has, with every name at full length."""

import json
from typing import Any

import pytest

from contract.outputs import CORE_STACK, TRAINING_STACK
from rehearsal import unwritten
from tests.stacks.conftest import OPTIONS, PRESETS, Synth

#: The longest that a deployment may be called.
LONGEST = "m" * 30
MOST_POOLS = json.dumps(
    {
        f"a-pool-of-20-chars-{letter}": {"worker_instance_type": "g5.12xlarge"}
        for letter in "abcdefghijklmnopqr"
    }
)


@pytest.mark.parametrize(
    "settings",
    [
        *({"preset": name} for name in PRESETS),
        OPTIONS | {"efa": "on", "shared_storage": "fsx", "availability_zone": ""},
        {"availability_zone": "us-west-2a", "pools": MOST_POOLS},
    ],
    ids=[*PRESETS, "options", "pools"],
)
def test_the_templates_break_no_rule(synth: Synth, settings: dict[str, str]) -> None:
    made = synth(**settings, deployment=LONGEST)
    for name, template in ((CORE_STACK, made.core), (TRAINING_STACK, made.training)):
        assert [*unwritten.in_template(template, f"{LONGEST}-{name}")] == []


POLICY = {"Statement": [{"Effect": "Allow", "Action": "s3:GetObject", "Resource": "x" * 700}] * 20}


@pytest.mark.parametrize(
    ("kind", "properties", "stack", "part"),
    [
        ("AWS::ECS::CapacityProvider", {}, "ECS-ml", "a name that"),
        ("AWS::ECS::CapacityProvider", {"Name": "FARGATE-x"}, "s", "a name that"),
        ("AWS::EC2::SecurityGroup", {}, "sg-team", "a name that"),
        ("AWS::S3::Bucket", {}, "xn--team", "a name that"),
        ("AWS::S3::Bucket", {"BucketName": "mine--ol-s3"}, "s", "a name that"),
        ("AWS::SSM::Parameter", {"Name": "/AWS/x"}, "s", "a name that"),
        ("AWS::Logs::LogGroup", {"LogGroupName": "aws/x"}, "s", "a name that"),
        ("AWS::CloudWatch::Dashboard", {"DashboardName": "a.b"}, "s", "a name that"),
        ("AWS::IAM::Role", {"RoleName": "r" * 65}, "s", "65 characters"),
        ("AWS::StepFunctions::StateMachine", {"StateMachineName": "m" * 81}, "s", "81 characters"),
        ("AWS::IAM::Policy", {"PolicyDocument": POLICY}, "s", "at most 10,240"),
        ("AWS::IAM::ManagedPolicy", {"PolicyDocument": POLICY}, "s", "at most 6,144"),
        (
            "AWS::S3::BucketPolicy",
            {"PolicyDocument": {"Statement": POLICY["Statement"] * 2}},
            "s",
            "at most 20,480",
        ),
        (
            "AWS::ECS::ClusterCapacityProviderAssociations",
            {"CapacityProviders": ["p"] * 21},
            "s",
            "at most 20 ",
        ),
        ("AWS::Events::Rule", {"Targets": [{}] * 6}, "s", "at most 5 "),
        (
            "AWS::Lambda::Function",
            {"Environment": {"Variables": {"A": "x" * 4096}}, "Code": {}},
            "s",
            "at most 4,096",
        ),
        ("AWS::Logs::ResourcePolicy", {"PolicyDocument": "x" * 5121}, "s", "at most 5,120"),
        ("AWS::SNS::Topic", {"Tags": [{}] * 51}, "s", "50 tags"),
        # Of public reports, which the table names.
        ("AWS::EC2::SecurityGroup", {"GroupDescription": "the team's"}, "s", "other characters"),
        ("AWS::EC2::SecurityGroup", {"GroupDescription": "a → b"}, "s", "other characters"),
        (
            "AWS::EC2::SecurityGroup",
            {"SecurityGroupIngress": [{"Description": "a > b"}]},
            "s",
            "other characters",
        ),
        ("AWS::EC2::SecurityGroupEgress", {"Description": "a > b"}, "s", "other characters"),
        ("AWS::EC2::SecurityGroup", {"SecurityGroupIngress": [{}] * 61}, "s", "at most 60 "),
        ("AWS::Lambda::Function", {"Description": "x" * 257}, "s", "at most 256 "),
        ("AWS::Lambda::Function", {"Code": {"ZipFile": "x" * 4_194_305}}, "s", "at most 4,194"),
        ("AWS::Logs::MetricFilter", {"FilterPattern": "x" * 1025}, "s", "at most 1,024"),
        ("AWS::Events::Rule", {"Targets": [{"Id": "x" * 65}]}, "s", "at most 64 "),
        ("AWS::Events::Rule", {"EventPattern": {"source": ["x" * 2048]}}, "s", "at most 2,048"),
        (
            "AWS::CloudWatch::Dashboard",
            {"DashboardBody": json.dumps({"widgets": [{}] * 501})},
            "s",
            "at most 500 ",
        ),
    ],
)
def test_what_a_service_refuses_is_named(
    kind: str, properties: dict[str, Any], stack: str, part: str
) -> None:
    resource = {"Type": kind, "Properties": properties}
    (found,) = unwritten.in_template({"Resources": {"It": resource}}, stack)
    assert part in found


def test_what_many_resources_have_together_is_named() -> None:
    half = {"Statement": POLICY["Statement"][:10]}
    policy = {"Type": "AWS::IAM::Policy", "Properties": {"Roles": ["r"], "PolicyDocument": half}}
    logs = {"Type": "AWS::Logs::ResourcePolicy", "Properties": {"PolicyDocument": "x"}}
    for resource, number in ((policy, 2), (logs, 11)):
        few, many = (
            {"Resources": {f"r{each}": resource for each in range(count)}}
            for count in (number - 1, number)
        )
        assert [*unwritten.in_template(few, "s")] == []
        assert len([*unwritten.in_template(many, "s")]) == 1


def test_a_name_that_is_generated_is_cut_and_keeps_its_end() -> None:
    found = unwritten.name_of("AWS::Lambda::Function", "Logical", {}, "s" * 80)
    assert len(found) == 64
    assert found.endswith("s-0123456789AB")
