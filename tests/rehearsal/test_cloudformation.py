"""What the rehearsal adds to the emulator's CloudFormation, where our stacks do not show it:
resources that are replaced, and what is refused.

Through CloudFormation's own API, as the CDK reaches it. Everything that is deployed here is deleted
here, and an inventory of the account shows it. In ``tests/stacks/test_deploy.py`` our stacks are
deployed, changed in place, and destroyed with nothing left.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest

from rehearsal.inventory import difference, inventory
from rehearsal.local_aws import LocalAws
from tests.rehearsal.test_local_aws import workers

pytestmark = [pytest.mark.slow, pytest.mark.night]

Resources = dict[str, dict[str, Any]]


def ref(logical_id: str) -> dict[str, str]:
    return {"Ref": logical_id}


def get(logical_id: str, attribute: str) -> dict[str, list[str]]:
    return {"Fn::GetAtt": [logical_id, attribute]}


def resource(kind: str, /, **properties: Any) -> dict[str, Any]:
    return {"Type": kind, "Properties": properties}


class Account:
    """The account of the local AWS, as a deployment sees it."""

    def __init__(self) -> None:
        self.cloudformation = boto3.client("cloudformation")
        self.stacks: set[str] = set()

    def deploy(self, name: str, resources: Resources) -> dict[str, str]:
        """Create or update a stack. Returns the physical id of each resource."""
        make = "update_stack" if name in self.stacks else "create_stack"
        getattr(self.cloudformation, make)(
            StackName=name,
            TemplateBody=json.dumps({"Resources": resources}),
            Capabilities=["CAPABILITY_NAMED_IAM"],
        )
        self.stacks.add(name)
        status = self.settled(name)
        if status not in ("CREATE_COMPLETE", "UPDATE_COMPLETE"):
            raise AssertionError(f"{name}: {status}\n" + "\n".join(self.reasons(name)))
        found = self.cloudformation.describe_stack_resources(StackName=name)["StackResources"]
        return {each["LogicalResourceId"]: each["PhysicalResourceId"] for each in found}

    def delete(self, name: str) -> None:
        stack_id = self.cloudformation.describe_stacks(StackName=name)["Stacks"][0]["StackId"]
        self.cloudformation.delete_stack(StackName=name)
        status = self.settled(stack_id)
        assert status == "DELETE_COMPLETE", "\n".join(self.reasons(stack_id))
        self.stacks.discard(name)

    def settled(self, name: str) -> str:
        deadline = time.monotonic() + 60
        while True:
            [stack] = self.cloudformation.describe_stacks(StackName=name)["Stacks"]
            if not stack["StackStatus"].endswith("_IN_PROGRESS"):
                return str(stack["StackStatus"])
            assert time.monotonic() < deadline, f"{name} is still {stack['StackStatus']}"
            time.sleep(0.05)

    def reasons(self, name: str) -> list[str]:
        events = self.cloudformation.describe_stack_events(StackName=name)["StackEvents"]
        return [
            f"{event['LogicalResourceId']}: {event['ResourceStatusReason']}"
            for event in events
            if event.get("ResourceStatusReason")
        ]


@pytest.fixture
def account(s3_endpoint: str) -> Iterator[Account]:
    """An account in which everything that the test deploys is gone when its stacks are."""
    before = inventory(s3_endpoint)
    account = Account()
    yield account
    for name in list(account.stacks):
        account.delete(name)
    # On AWS too, the log group that Lambda makes for a function outlives the function.
    logs = boto3.client("logs")
    for group in logs.describe_log_groups(logGroupNamePrefix="/aws/lambda/")["logGroups"]:
        logs.delete_log_group(logGroupName=group["logGroupName"])
    assert difference(before, inventory(s3_endpoint)) == {}


NETWORK: Resources = {
    "Vpc": resource("AWS::EC2::VPC", CidrBlock="10.0.0.0/16"),
    "Subnet": resource("AWS::EC2::Subnet", VpcId=ref("Vpc"), CidrBlock="10.0.0.0/24"),
}


def test_address_and_nat_gateway(account: Account) -> None:
    ec2 = boto3.client("ec2")
    resources = NETWORK | {
        "Address": resource("AWS::EC2::EIP", Domain="vpc", Tags=[{"Key": "a", "Value": "1"}]),
        "Nat": resource(
            "AWS::EC2::NatGateway",
            SubnetId=ref("Subnet"),
            AllocationId=get("Address", "AllocationId"),
        ),
        "Routes": resource("AWS::EC2::RouteTable", VpcId=ref("Vpc")),
        "Out": resource(
            "AWS::EC2::Route",
            RouteTableId=ref("Routes"),
            DestinationCidrBlock="0.0.0.0/0",
            NatGatewayId=ref("Nat"),
        ),
    }
    ids = account.deploy("nat", resources)
    [address] = ec2.describe_addresses()["Addresses"]
    [nat] = ec2.describe_nat_gateways()["NatGateways"]
    assert ids["Address"] == address["PublicIp"]
    assert (nat["NatGatewayId"], nat["SubnetId"]) == (ids["Nat"], ids["Subnet"])
    tags = {tag["Key"]: tag["Value"] for tag in address["Tags"]}
    assert (tags["a"], tags["aws:cloudformation:stack-name"]) == ("1", "nat")

    # Tags change in place; another subnet is another gateway, and the routes follow.
    resources["Address"]["Properties"]["Tags"][0]["Value"] = "2"
    resources["Other"] = resource("AWS::EC2::Subnet", VpcId=ref("Vpc"), CidrBlock="10.0.1.0/24")
    resources["Nat"]["Properties"]["SubnetId"] = ref("Other")
    updated = account.deploy("nat", resources)
    assert updated["Address"] == ids["Address"]
    assert updated["Nat"] != ids["Nat"]
    [address] = ec2.describe_addresses()["Addresses"]
    assert {"Key": "a", "Value": "2"} in address["Tags"]
    states = {
        each["NatGatewayId"]: each["State"] for each in ec2.describe_nat_gateways()["NatGateways"]
    }
    assert states == {ids["Nat"]: "deleted", updated["Nat"]: "available"}
    [routes] = ec2.describe_route_tables(RouteTableIds=[ids["Routes"]])["RouteTables"]
    assert updated["Nat"] in {route.get("NatGatewayId") for route in routes["Routes"]}


def test_nat_gateway_without_its_subnet_is_refused(account: Account) -> None:
    with pytest.raises(AssertionError, match="Nat: subnet 'subnet-0' does not exist"):
        account.deploy(
            "lost-nat",
            {"Nat": resource("AWS::EC2::NatGateway", SubnetId="subnet-0", AllocationId="x")},
        )


def test_property_that_a_type_does_not_have_is_refused(account: Account) -> None:
    with pytest.raises(AssertionError, match=r"AWS::EC2::EIP Address: .* no property Domian"):
        account.deploy("typo", {"Address": resource("AWS::EC2::EIP", Domian="vpc")})


def capacity(target: int) -> Resources:
    return NETWORK | {
        "Template": resource(
            "AWS::EC2::LaunchTemplate", LaunchTemplateData={"InstanceType": "g5.xlarge"}
        ),
        "Group": resource(
            "AWS::AutoScaling::AutoScalingGroup",
            MinSize="0",
            MaxSize="2",
            VPCZoneIdentifier=[ref("Subnet")],
            LaunchTemplate={
                "LaunchTemplateId": ref("Template"),
                "Version": get("Template", "LatestVersionNumber"),
            },
            NewInstancesProtectedFromScaleIn=True,
        ),
        "Cluster": resource("AWS::ECS::Cluster"),
        "Provider": resource(
            "AWS::ECS::CapacityProvider",
            AutoScalingGroupProvider={
                "AutoScalingGroupArn": ref("Group"),
                "ManagedScaling": {"Status": "ENABLED", "TargetCapacity": target},
                "ManagedTerminationProtection": "ENABLED",
            },
        ),
        "Associations": resource(
            "AWS::ECS::ClusterCapacityProviderAssociations",
            Cluster=ref("Cluster"),
            CapacityProviders=[ref("Provider")],
            DefaultCapacityProviderStrategy=[{"CapacityProvider": ref("Provider"), "Weight": 1}],
        ),
    }


def test_capacity_provider_and_its_association(account: Account) -> None:
    ecs = boto3.client("ecs")

    def provider(name: str) -> Any:
        [found] = ecs.describe_capacity_providers(capacityProviders=[name])["capacityProviders"]
        return found["autoScalingGroupProvider"]

    def associated(cluster: str) -> tuple[list[str], Any]:
        [found] = ecs.describe_clusters(clusters=[cluster])["clusters"]
        return found["capacityProviders"], found["defaultCapacityProviderStrategy"]

    ids = account.deploy("capacity", capacity(100))
    assert provider(ids["Provider"])["autoScalingGroupArn"].endswith(ids["Group"])
    assert provider(ids["Provider"])["managedScaling"]["targetCapacity"] == 100
    strategy = [{"capacityProvider": ids["Provider"], "weight": 1}]
    assert associated(ids["Cluster"]) == ([ids["Provider"]], strategy)

    # Tags of the cluster: the emulator on its own forgets the association then.
    resources = capacity(50)
    resources["Cluster"]["Properties"]["Tags"] = [{"Key": "a", "Value": "1"}]
    updated = account.deploy("capacity", resources)
    assert updated == ids
    assert provider(ids["Provider"])["managedScaling"]["targetCapacity"] == 50
    assert provider(ids["Provider"])["managedTerminationProtection"] == "ENABLED"
    assert associated(ids["Cluster"]) == ([ids["Provider"]], strategy)

    resources["Associations"]["Properties"] |= {
        "CapacityProviders": ["FARGATE"],
        "DefaultCapacityProviderStrategy": [],
    }
    account.deploy("capacity", resources)
    assert associated(ids["Cluster"]) == (["FARGATE"], [])

    del resources["Associations"]
    account.deploy("capacity", resources)
    assert associated(ids["Cluster"]) == ([], [])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "ecs-train",
            lambda _resources: None,
            "names that begin with aws, ecs or fargate are reserved",
        ),
        (
            "unprotected",
            lambda resources: resources["Group"]["Properties"].pop(
                "NewInstancesProtectedFromScaleIn"
            ),
            "needs NewInstancesProtectedFromScaleIn",
        ),
    ],
)
def test_capacity_provider_that_aws_refuses_is_refused(
    account: Account, name: str, change: Callable[[Resources], object], message: str
) -> None:
    resources = capacity(100)
    change(resources)
    with pytest.raises(AssertionError, match=message):
        account.deploy(name, resources)


ROLE = resource(
    "AWS::IAM::Role",
    AssumeRolePolicyDocument={
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"Service": "lambda.amazonaws.com"},
                "Action": "sts:AssumeRole",
            }
        ],
    },
)


def function(code: str, **properties: Any) -> Resources:
    return {
        "Role": ROLE,
        "Function": resource(
            "AWS::Lambda::Function",
            Code={"ZipFile": code},
            Handler="index.handler",
            Runtime="python3.13",
            Role=get("Role", "Arn"),
            Timeout=30,
            **properties,
        ),
    }


def test_a_function_writes_to_its_own_log_group_and_ends_with_its_stack(
    account: Account, aws: LocalAws
) -> None:
    code = "def handler(event, context):\n    print('here')\n"
    resources = function(code, LoggingConfig={"LogGroup": ref("Logs")})
    resources["Logs"] = resource("AWS::Logs::LogGroup")
    ids = account.deploy("logs", resources)
    logs, functions = boto3.client("logs"), boto3.client("lambda")
    functions.invoke(FunctionName=ids["Function"], Payload=b"{}")
    found = logs.filter_log_events(logGroupName=ids["Logs"])["events"]
    assert "here" in [event["message"] for event in found]
    searched = logs.filter_log_events(logGroupName=ids["Logs"], filterPattern="%^h[e]re$%")
    assert [event["message"] for event in searched["events"]] == ["here"]
    # As when a stack is deleted while a function of it runs.
    logs.delete_log_group(logGroupName=ids["Logs"])
    functions.invoke(FunctionName=ids["Function"], Payload=b"{}")
    assert not logs.describe_log_groups(logGroupNamePrefix=ids["Logs"])["logGroups"]
    assert workers(aws)
    account.delete("logs")
    assert workers(aws) == []  # the emulator on its own keeps the worker


def test_custom_resource_that_crashes_fails_at_once_and_says_why(account: Account) -> None:
    resources = function("def handler(event, context):\n    raise RuntimeError('no such thing')\n")
    resources["Custom"] = resource("Custom::Crash", ServiceToken=get("Function", "Arn"))
    with pytest.raises(AssertionError, match="no such thing"):
        account.deploy("custom-crash", resources)
