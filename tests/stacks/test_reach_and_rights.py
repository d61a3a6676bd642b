"""Nothing is reachable from outside, and every role may do only what its part needs."""

from collections import Counter
from typing import Any

import pytest

from containers.host.machine import OwnTask
from containers.ray_head import JobConfig, worker_provider
from contract import nodes
from contract.job import NOTIFY_SECRETS, SECRETS_PREFIX, JobSpec
from contract.nodes import Range
from tests.stacks.conftest import OPTIONS, PRESETS, Synth, Templates, statements, text, variables

COMBINATIONS = [*({"preset": preset} for preset in PRESETS), OPTIONS]
each_combination = pytest.mark.parametrize("settings", COMBINATIONS, ids=[*PRESETS, "options"])

# Every action that is allowed on all resources, and why it cannot be narrower.
ON_ANY_RESOURCE = {
    "ecr:GetAuthorizationToken": "has no resource",
    "ecs:DiscoverPollEndpoint": "has no resource",
    "cloudwatch:PutMetricData": "has no resource; limited to one namespace",
    "ecs:ListTasks": "has no resource for a cluster's tasks; limited to one cluster",
    "ecs:ListServices": "the same for its services",
    "ecs:DeregisterTaskDefinition": "has no resource",
    "ecs:ListTaskDefinitions": "has no resource",
    "autoscaling:DescribeAutoScalingGroups": "has no resource",
    "autoscaling:DescribeScalingActivities": "has no resource",
    "ec2:DescribeInstances": "has no resource",
    "ec2:DescribeInstanceTypeOfferings": "has no resource",
    "ec2:DescribeCapacityReservations": "has no resource",
    "ec2:DescribeRouteTables": "has no resource",
    "ec2:DescribeSubnets": "has no resource",
    "ec2:DescribeVpcAttribute": "of a VPC that others own",
    "iam:GetRole": "roles that services make for themselves; shows no credentials",
    "servicequotas:GetAWSDefaultServiceQuota": "has no resource",
    "servicequotas:GetServiceQuota": "shows a number",
    "logs:DescribeLogGroups": "finds one by its name among all; shows names only",
    "ssmmessages:CreateControlChannel": "has no resource",
    "ssmmessages:CreateDataChannel": "has no resource",
    "ssmmessages:OpenControlChannel": "has no resource",
    "ssmmessages:OpenDataChannel": "has no resource",
}
NEEDS_CONDITION = {"cloudwatch:PutMetricData", "ecs:ListServices", "ecs:ListTasks"}


def policies(templates: Templates) -> list[tuple[str, dict[str, Any]]]:
    """(name, statement) of everything that grants a role something."""
    found = []
    for name, resource in templates.resources.items():
        properties = resource.get("Properties", {})
        if resource["Type"] in ("AWS::IAM::Policy", "AWS::IAM::ManagedPolicy"):
            found += [(name, each) for each in statements(properties["PolicyDocument"])]
        if resource["Type"] == "AWS::IAM::Role":
            for policy in properties.get("Policies", []):
                found += [(name, each) for each in statements(policy["PolicyDocument"])]
    assert len(found) > 15
    return found


@each_combination
def test_what_is_allowed_on_all_resources_cannot_be_narrower(
    synth: Synth, settings: dict[str, str]
) -> None:
    for name, statement in policies(synth(**settings)):
        if "*" not in statement["Resource"]:
            continue
        unreasoned = {*statement["Action"]} - ON_ANY_RESOURCE.keys()
        assert not unreasoned, f"{name} allows {unreasoned} on all resources"
        if {*statement["Action"]} & NEEDS_CONDITION:
            assert statement["Condition"], f"{name} must limit {statement['Action']}"


def test_training_code_reaches_one_bucket_and_nothing_that_starts_or_ends_machines(
    synth: Synth,
) -> None:
    templates = synth()
    for role in ("NodesHeadRole", "NodesWorkerRole"):
        of_role = [each for name, each in policies(templates) if name.startswith(role)]
        actions = {action for each in of_role for action in each["Action"]}
        assert {action.partition(":")[0] for action in actions} == {"logs", "s3", "ssmmessages"}
        buckets = {
            resource
            for each in of_role
            for resource in each["Resource"]
            if each["Action"][0].startswith("s3:") and each["Effect"] == "Allow"
        }
        bucket = "<CoreStack:ExportsOutputFnGetAttBucketArn436138FE>"
        assert buckets == {bucket, f"{bucket}/*"}


def test_only_jobs_start_anything_and_that_is_heads_and_workers_in_this_cluster(
    synth: Synth,
) -> None:
    templates = synth()
    start = ("ecs:RunTask", "ecs:StartTask", "iam:PassRole", "ec2:RunInstances")
    found = {
        (name.partition("Default")[0], action): each
        for name, each in policies(templates)
        for action in each["Action"]
        if action in start
    }
    # The head starts workers; the state machine starts heads; the keeper keeps hosts of both.
    starts = {
        ("JobsRole", "ecs:RunTask"): ["NodesWorkerTask"],
        ("JobsExecutionRole", "ecs:RunTask"): ["JobsTask"],
        ("JobsKeeperRole", "ecs:StartTask"): ["JobsTask", "NodesWorkerTask"],
    }
    assert {each for each in found if each[1] != "iam:PassRole"} == {*starts}
    assert {name for name, _ in found} == {name for name, _ in starts}
    for (name, action), tasks in starts.items():
        run = found[name, action]
        for task, definition in zip(tasks, run["Resource"], strict=True):
            assert task in definition
        assert run["Condition"]["ArnEquals"].keys() == {"ecs:cluster"}
        passed = found[name, "iam:PassRole"]
        assert len(passed["Resource"]) == 1 + len(tasks)
        assert passed["Condition"] == {
            "StringEquals": {"iam:PassedToService": "ecs-tasks.amazonaws.com"}
        }


def test_a_job_reads_no_other_secrets_than_those_meant_for_jobs(synth: Synth) -> None:
    found = {
        (name.partition("Default")[0], resource)
        for name, each in policies(synth())
        for resource in each["Resource"]
        if "secretsmanager:GetSecretValue" in each["Action"]
    }
    heads = [resource for name, resource in found if name == "JobsRole"]
    assert len(heads) == 1
    assert heads[0].endswith(f":secret:{SECRETS_PREFIX}*")
    keepers = [resource for name, resource in found if name == "JobsKeeperRole"]
    assert len(keepers) == 1
    assert keepers[0].endswith(f":secret:{NOTIFY_SECRETS}*")
    # ECS itself reads the cluster's token for all nodes.
    own = {name for name, _ in found if not name.startswith("PeopleOperate")}
    assert own == {"JobsRole", "JobsKeeperRole", "NodesExecutionRole"}


def test_the_head_of_a_job_is_told_what_its_workers_are(synth: Synth) -> None:
    (task,) = [
        each["ContainerDefinitions"][0]
        for name, each in synth(preset="fsdp").of_type("AWS::ECS::TaskDefinition").items()
        if name.startswith("JobsTask")
    ]
    spec = JobSpec(run="r", command=("true",), nodes=Range(1, 1))
    told = variables(task) | {nodes.ENV_JOB: "j", nodes.ENV_JOB_SPEC: spec.to_json()}
    config = JobConfig.from_environment(told)
    own = OwnTask(arn="task/1", cluster="c")
    provider = worker_provider(config, told, task=own, address="10.0.0.5")
    assert task["Command"] == [nodes.JOB]
    assert (config.worker_cpus, config.worker_gpus) == (48, 4)
    assert "NodesWorkerTask" in provider["task_definition"]
    assert len(provider["subnets"]) == len(provider["security_groups"]) == 1
    assert provider["capacity_provider"]


def test_each_role_is_trusted_to_one_service_for_this_account_where_it_tells_its_own(
    synth: Synth,
) -> None:
    own = {"StringEquals": {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}}
    templates = synth(**OPTIONS)
    trusts = Counter(
        (text(statement["Principal"]["Service"]).partition(".")[0], str(statement.get("Condition")))
        for role in templates.of_type("AWS::IAM::Role").values()
        for statement in role["AssumeRolePolicyDocument"]["Statement"]
        if "Service" in statement["Principal"]
    )
    assert trusts == {
        ("ecs-tasks", str(own)): 4,  # execution, head, worker, head of a job
        ("states", str(own)): 1,
        ("vpc-flow-logs", str(own)): 1,
        # They send no account when they assume a role: a condition would keep them out.
        ("ec2", "None"): 1,
        ("lambda", "None"): 4,  # teardown, keeper, CDK's for security group and bucket
    }
    (publish,) = [
        statement
        for policy in templates.of_type("AWS::SNS::TopicPolicy").values()
        for statement in policy["PolicyDocument"]["Statement"]
        if statement["Effect"] == "Allow"
    ]
    assert publish["Condition"] == own


@each_combination
def test_nothing_is_there_that_takes_requests_from_outside(
    synth: Synth, settings: dict[str, str]
) -> None:
    templates = synth(**settings)
    kinds = {resource["Type"] for resource in templates.resources.values()}
    assert not {
        kind
        for kind in kinds
        if kind.startswith(("AWS::ElasticLoadBalancing", "AWS::ApiGateway", "AWS::CloudFront"))
        or kind in ("AWS::Lambda::Url", "AWS::EC2::Instance")
    }
    # The keeper is called by two rules of this stack, and by nothing else but its role's owner.
    for permission in templates.of_type("AWS::Lambda::Permission").values():
        assert permission["Principal"] == "events.amazonaws.com"
        assert "Jobs" in permission["SourceArn"]["Fn::GetAtt"][0]


@each_combination
def test_policies_of_resources_name_whom_they_let_in(
    synth: Synth, settings: dict[str, str]
) -> None:
    templates = synth(**settings)
    for kind in ("AWS::S3::BucketPolicy", "AWS::SNS::TopicPolicy"):
        for policy in templates.of_type(kind).values():
            for statement in statements(policy["PolicyDocument"]):
                anyone = statement["Principal"] in ("*", {"AWS": "*"})
                assert not anyone or statement["Effect"] == "Deny"
