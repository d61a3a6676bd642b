"""CoreStack has the network, bucket, repositories and push role that it promises, and no more."""

import json
from pathlib import Path

from contract import outputs as stack_outputs
from tests.stacks.conftest import EXISTING, OPTIONS, Synth, statements, text
from trainctl.setup import checks

RENAMED = "CloudFormation would replace the resource, and lose what is in it"


#: Kind of resource -> logical ids of all that the two variants below have of it.
STATEFUL = {
    "S3::Bucket": ["Bucket"],
    "ECR::Repository": ["HeadRepository", "WorkerRepository"],
    "EC2::VPC": ["Vpc"],
    "EC2::Subnet": ["VpcNatSubnet1SubnetE1BAC97E", "VpcTrainingSubnet1Subnet9EBCF9C1"],
    "FSx::FileSystem": ["ClusterSharedStorageFileSystemC8C73843"],
    "Logs::LogGroup": [
        "ClusterSharedStorageExportLogs67802DA7",
        "ClusterShellLogs0A2F2552",
        "ClusterTeardownLogs69B65D0E",
        "CustomS3AutoDeleteObjectsCustomResourceProviderLogsB8B1B8F2",
        "CustomVpcRestrictDefaultSGCustomResourceProviderLogs41F6175A",
        "FlowLogs16C1943A",
        "JobsKeeperLogs1AA242E6",
        "NodesLogs65C5865F",
        "TaskEventsLogs3035F93C",
    ],
}


def test_stateful_resources_keep_their_logical_ids(synth: Synth) -> None:
    variants = synth(**OPTIONS), synth(shared_storage="fsx")
    for kind, ids in STATEFUL.items():
        found = {name for each in variants for name in each.of_type(f"AWS::{kind}")}
        assert sorted(found) == ids, RENAMED


def test_the_bootstrap_that_doctor_asks_for_is_what_the_templates_need(synth: Synth) -> None:
    rule = synth().core["Rules"]["CheckBootstrapVersion"]["Assertions"][0]["Assert"]
    too_old = rule["Fn::Not"][0]["Fn::Contains"][0]
    assert [int(each) for each in too_old] == [*range(1, checks.MIN_BOOTSTRAP)]


def test_what_an_organization_has_is_used_as_it_is(synth: Synth) -> None:
    templates = synth(**EXISTING)
    # None of its network, whose owner has routes, endpoints and flow logs, and no bucket.
    assert {each["Type"] for each in templates.core["Resources"].values()} == {
        "AWS::ECR::Repository",
        "AWS::IAM::ManagedPolicy",
        "AWS::ServiceDiscovery::PrivateDnsNamespace",
        "AWS::SNS::Topic",
        "AWS::SNS::TopicPolicy",
    }
    assert templates.only("AWS::ServiceDiscovery::PrivateDnsNamespace")["Vpc"] == EXISTING["vpc_id"]
    subnets = [
        group["VPCZoneIdentifier"]
        for group in templates.of_type("AWS::AutoScaling::AutoScalingGroup").values()
    ]
    assert subnets == [[EXISTING["subnet_id"]]] * 2 + [["subnet-0123456789abcdef1"]]
    assert templates.only("AWS::EC2::SecurityGroup")["VpcId"] == EXISTING["vpc_id"]
    # Jobs read more buckets and write into none of them.
    training = [
        each
        for policy in templates.of_type("AWS::IAM::Policy").values()
        for each in statements(policy["PolicyDocument"])
        if any("acme-images" in text(resource) for resource in each["Resource"])
    ]
    assert {action for each in training for action in each["Action"]} == {
        "s3:GetBucketLocation",
        "s3:GetObject",
        "s3:ListBucket",
    }
    # Only hosts that train have the AMI; all hosts and disks have the tags.
    ami = templates.training["Parameters"]
    (own,) = [name for name, each in ami.items() if each.get("Default") == EXISTING["worker_ami"]]
    for name, template in templates.of_type("AWS::EC2::LaunchTemplate").items():
        data = template["LaunchTemplateData"]
        assert (data["ImageId"] == {"Ref": own}) == ("Head" not in name)
        for tags in data["TagSpecifications"]:
            assert {"Key": "Owner", "Value": "ml team"} in tags["Tags"]
    # The stacks have them too: CDK tags no role that it adds itself, and CloudFormation does.
    manifest = json.loads((Path(templates.folder) / "manifest.json").read_text())
    tags = {"project": "ecs-train", "CostCenter": "42", "Owner": "ml team"}
    for stack in stack_outputs.stacks(""):
        assert manifest["artifacts"][stack]["properties"]["tags"] == tags


def test_each_function_logs_into_a_group_of_its_stack(synth: Synth) -> None:
    templates = synth(**OPTIONS)
    functions = templates.of_type("AWS::Lambda::Function")
    assert len(functions) > 3
    for function in functions.values():
        group = function["LoggingConfig"]["LogGroup"]["Ref"]
        assert templates.resources[group]["Type"] == "AWS::Logs::LogGroup"


def test_the_role_that_pushes_images_is_an_output_where_a_repository_is_named(
    synth: Synth,
) -> None:
    assert "ImagePushRoleArn" not in synth().core["Outputs"]
    outputs = synth(**OPTIONS).core["Outputs"]
    assert text(outputs["ImagePushRoleArn"]["Value"]) == "<ImagePushRoleD191AFB1.Arn>"
