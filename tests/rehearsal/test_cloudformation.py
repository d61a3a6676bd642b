"""Each type of resource that the rehearsal adds to the emulator's CloudFormation: it is recorded,
changed in place or replaced, and removed.

Through CloudFormation's own API, as the CDK reaches it. Everything that is deployed here is deleted
here, and an inventory of the account shows it. CI has ``tests/stacks/test_deploy.py`` in its place:
our stacks are deployed, changed in place, and destroyed with nothing left.
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
IMAGES = "/aws/service/ecs/optimized-ami/amazon-linux-2023"


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


def test_rules_outside_of_their_security_group(account: Account) -> None:
    ec2 = boto3.client("ec2")
    resources = NETWORK | {
        "Group": resource("AWS::EC2::SecurityGroup", GroupDescription="-", VpcId=ref("Vpc")),
        "In": resource(
            "AWS::EC2::SecurityGroupIngress",
            GroupId=get("Group", "GroupId"),
            IpProtocol="-1",
            SourceSecurityGroupId=get("Group", "GroupId"),
            Description="one",
        ),
        "Out": resource(
            "AWS::EC2::SecurityGroupEgress",
            GroupId=get("Group", "GroupId"),
            IpProtocol="tcp",
            FromPort=443,
            ToPort=443,
            CidrIp="10.0.0.0/8",
        ),
        # A group of the VPC itself outlives nothing, but this rule must not outlive its stack.
        "Foreign": resource(
            "AWS::EC2::SecurityGroupIngress",
            GroupId=ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"],
            IpProtocol="tcp",
            FromPort=22,
            ToPort=22,
            CidrIp="10.1.0.0/16",
        ),
    }

    def rules(group: str) -> dict[str, Any]:
        found = ec2.describe_security_group_rules(
            Filters=[{"Name": "group-id", "Values": [group]}]
        )["SecurityGroupRules"]
        return {each["SecurityGroupRuleId"]: each for each in found}

    ids = account.deploy("rules", resources)
    found = rules(ids["Group"])
    assert found[ids["In"]]["ReferencedGroupInfo"]["GroupId"] == ids["Group"]
    assert (found[ids["Out"]]["IsEgress"], found[ids["Out"]]["FromPort"]) == (True, 443)

    resources["In"]["Properties"]["Description"] = "two"
    resources["Out"]["Properties"]["CidrIp"] = "10.0.0.0/16"
    updated = account.deploy("rules", resources)
    found = rules(ids["Group"])
    assert updated["In"] == ids["In"]
    assert found[ids["In"]]["Description"] == "two"
    assert ids["Out"] not in found
    assert found[updated["Out"]]["CidrIpv4"] == "10.0.0.0/16"

    del resources["In"]
    account.deploy("rules", resources)
    assert ids["In"] not in rules(ids["Group"])


def test_placement_group(account: Account) -> None:
    ec2 = boto3.client("ec2")
    resources = {"Group": resource("AWS::EC2::PlacementGroup", Strategy="cluster")}
    ids = account.deploy("placement", resources)
    [group] = ec2.describe_placement_groups()["PlacementGroups"]
    assert (group["GroupName"], group["Strategy"]) == (ids["Group"], "cluster")

    resources["Group"]["Properties"] = {"Strategy": "partition", "PartitionCount": 3}
    updated = account.deploy("placement", resources)
    [group] = ec2.describe_placement_groups()["PlacementGroups"]
    assert (group["GroupName"], group["PartitionCount"]) == (updated["Group"], 3)
    assert updated["Group"] != ids["Group"]


def test_flow_log(account: Account) -> None:
    ec2 = boto3.client("ec2")
    resources = NETWORK | {
        "Logs": resource("AWS::Logs::LogGroup"),
        "Flow": resource(
            "AWS::EC2::FlowLog",
            ResourceId=ref("Vpc"),
            ResourceType="VPC",
            TrafficType="ALL",
            LogGroupName=ref("Logs"),
        ),
    }
    ids = account.deploy("flow", resources)
    [flow] = ec2.describe_flow_logs()["FlowLogs"]
    assert (flow["FlowLogId"], flow["ResourceId"]) == (ids["Flow"], ids["Vpc"])

    resources["Flow"]["Properties"]["TrafficType"] = "REJECT"
    updated = account.deploy("flow", resources)
    [flow] = ec2.describe_flow_logs()["FlowLogs"]
    assert (flow["FlowLogId"], flow["TrafficType"]) == (updated["Flow"], "REJECT")


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


def test_capacity_provider_follows_another_group(account: Account) -> None:
    ids = account.deploy("follow", capacity(100))
    resources = capacity(100)
    resources["Group"]["Properties"]["AutoScalingGroupName"] = "another"
    updated = account.deploy("follow", resources)
    assert updated["Group"] == "another"
    assert updated["Provider"] != ids["Provider"]
    [cluster] = boto3.client("ecs").describe_clusters(clusters=[ids["Cluster"]])["clusters"]
    assert cluster["capacityProviders"] == [updated["Provider"]]


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


def test_oidc_provider(account: Account) -> None:
    iam = boto3.client("iam")
    resources = {
        "Provider": resource(
            "AWS::IAM::OIDCProvider",
            Url="https://token.example.com",
            ClientIdList=["sts.amazonaws.com"],
        )
    }
    arn = account.deploy("oidc", resources)["Provider"]
    assert iam.get_open_id_connect_provider(OpenIDConnectProviderArn=arn)["ClientIDList"] == [
        "sts.amazonaws.com"
    ]
    resources["Provider"]["Properties"]["ClientIdList"] = ["one", "two"]
    assert account.deploy("oidc", resources)["Provider"] == arn
    assert iam.get_open_id_connect_provider(OpenIDConnectProviderArn=arn)["ClientIDList"] == [
        "one",
        "two",
    ]


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

#: Of functions: what those below call. The emulator refuses the rest.
CALLER = json.loads(json.dumps(ROLE))
CALLER["Properties"]["Policies"] = [
    {
        "PolicyName": "calls",
        "PolicyDocument": {
            "Version": "2012-10-17",
            "Statement": [
                {
                    "Effect": "Allow",
                    "Action": [
                        *("s3:PutObject", "s3:GetBucketTagging", "s3:ListAllMyBuckets"),
                        "ec2:DescribeVpcs",
                    ],
                    "Resource": "*",
                }
            ],
        },
    }
]

# Writes down each of its calls in S3, so that the test sees the delete too.
PYTHON_HANDLER = """\
import boto3, cfnresponse, json

def handler(event, context):
    properties = event["ResourceProperties"]
    key = f"{event['RequestType']}-{properties['Value']}"
    boto3.client("s3").put_object(Bucket=properties["Bucket"], Key=key, Body=b"")
    answer = {"Echo": properties["Value"]}
    cfnresponse.send(event, context, cfnresponse.SUCCESS, answer, "made-by-python")
"""

NODE_HANDLER = """\
const http = require("http");

exports.handler = async (event) => {
  const answer = JSON.stringify({
    Status: "SUCCESS",
    PhysicalResourceId: "made-by-node",
    StackId: event.StackId,
    RequestId: event.RequestId,
    LogicalResourceId: event.LogicalResourceId,
    Data: { Echo: event.ResourceProperties.Value },
  });
  await new Promise((resolve, reject) => {
    const headers = { "content-type": "", "content-length": Buffer.byteLength(answer) };
    const request = http.request(event.ResponseURL, { method: "PUT", headers }, resolve);
    request.on("error", reject);
    request.end(answer);
  });
};
"""


def custom(code: str, runtime: str, value: str, **properties: Any) -> Resources:
    return {
        "Role": CALLER,
        "Function": resource(
            "AWS::Lambda::Function",
            Code={"ZipFile": code},
            Handler="index.handler",
            Runtime=runtime,
            Role=get("Role", "Arn"),
            Timeout=30,
        ),
        "Custom": resource(
            "Custom::Recorder",
            ServiceToken=get("Function", "Arn"),
            Value=value,
            **properties,
        ),
        "Echo": resource(
            "AWS::SSM::Parameter", Name="echo", Type="String", Value=get("Custom", "Echo")
        ),
    }


@pytest.fixture
def calls() -> Iterator[str]:
    """A bucket in which functions leave a trace."""
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="calls")
    yield "calls"
    for entry in s3.list_objects_v2(Bucket="calls").get("Contents", []):
        s3.delete_object(Bucket="calls", Key=entry["Key"])
    s3.delete_bucket(Bucket="calls")


def test_custom_resource_of_inline_python_runs_on_create_update_and_delete(
    account: Account, aws: LocalAws, calls: str
) -> None:
    ssm, s3 = boto3.client("ssm"), boto3.client("s3")
    for value in ("1", "2"):
        ids = account.deploy(
            "custom-python", custom(PYTHON_HANDLER, "python3.13", value, Bucket=calls)
        )
        assert ids["Custom"] == "made-by-python"
        assert ssm.get_parameter(Name="echo")["Parameter"]["Value"] == value
    assert workers(aws)
    account.delete("custom-python")
    assert workers(aws) == []  # the emulator on its own keeps the worker
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket=calls)["Contents"]]
    assert keys == ["Create-1", "Delete-2", "Update-2"]


def test_custom_resource_of_node_runs_on_create_update_and_delete(account: Account) -> None:
    ssm = boto3.client("ssm")
    for value in ("1", "2"):
        ids = account.deploy("custom-node", custom(NODE_HANDLER, "nodejs20.x", value))
        assert ids["Custom"] == "made-by-node"
        assert ssm.get_parameter(Name="echo")["Parameter"]["Value"] == value


# As the CDK's own functions do it: the client of all operations, awaited, errors by name.
SDK_HANDLER = """\
const { S3, ListBucketsCommand, S3Client } = require("@aws-sdk/client-s3");
const { EC2 } = require("@aws-sdk/client-ec2");

exports.handler = async (event) => {
  const s3 = new S3({});
  try {
    await s3.getBucketTagging({ Bucket: event.missing });
  } catch (error) {
    if (error.name !== "NoSuchBucket") throw error;
  }
  const { Buckets } = await new S3Client({}).send(new ListBucketsCommand({}));
  await s3.putObject({ Bucket: event.bucket, Key: "a", Body: "b" });
  const { Vpcs } = await new EC2({}).describeVpcs({});
  return { isDate: Buckets[0].CreationDate instanceof Date, vpcs: Vpcs.length };
};
"""


def test_function_in_javascript_has_the_sdk_of_aws(account: Account, calls: str) -> None:
    resources = custom(SDK_HANDLER, "nodejs22.x", "1")
    ids = account.deploy("sdk", {name: resources[name] for name in ("Role", "Function")})
    event = {"bucket": calls, "missing": "no-such-bucket-here"}
    answer = boto3.client("lambda").invoke(FunctionName=ids["Function"], Payload=json.dumps(event))
    result = json.load(answer["Payload"])
    assert result == {"isDate": True, "vpcs": 1}
    listing = boto3.client("s3").list_objects_v2(Bucket=calls)
    assert [entry["Key"] for entry in listing["Contents"]] == ["a"]


def test_function_with_a_log_group_of_its_own_makes_no_other(account: Account) -> None:
    resources = custom("def handler(event, context):\n    print('here')\n", "python3.13", "1")
    resources = {name: resources[name] for name in ("Role", "Function")}
    resources["Logs"] = resource("AWS::Logs::LogGroup")
    resources["Function"]["Properties"]["LoggingConfig"] = {"LogGroup": ref("Logs")}
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


def test_custom_resource_that_crashes_fails_at_once_and_says_why(account: Account) -> None:
    code = "def handler(event, context):\n    raise RuntimeError('no such thing')\n"
    with pytest.raises(AssertionError, match="no such thing"):
        account.deploy("custom-crash", custom(code, "python3.13", "1"))


@pytest.mark.usefixtures("s3_endpoint")
def test_images_for_ecs_instances_have_parameters() -> None:
    ssm = boto3.client("ssm")
    for image in ("recommended/image_id", "gpu/recommended/image_id"):
        value = ssm.get_parameter(Name=f"{IMAGES}/{image}")["Parameter"]["Value"]
        assert value.startswith("ami-")


def test_bucket_keeps_its_tags_and_is_not_deleted_while_it_holds_an_object(
    account: Account,
) -> None:
    s3 = boto3.client("s3")
    tags = [{"Key": "a", "Value": "1"}]
    bucket = account.deploy("full", {"Bucket": resource("AWS::S3::Bucket", Tags=tags)})["Bucket"]
    assert tags[0] in s3.get_bucket_tagging(Bucket=bucket)["TagSet"]
    s3.put_object(Bucket=bucket, Key="a", Body=b"")
    with pytest.raises(AssertionError, match="is not empty"):
        account.delete("full")
    s3.delete_object(Bucket=bucket, Key="a")
    account.delete("full")
