"""The local AWS is as strict as AWS.

Tasks are records here, and a caller with a role has its ARN as the session token, as functions
and containers do.
"""

import functools
import json
from collections.abc import Callable
from typing import Any, Final

import boto3
import pytest
from botocore.exceptions import ClientError

from rehearsal.local_aws import ACCOUNT, REGION, LocalAws
from tests.eventually import eventually

pytestmark = pytest.mark.slow

EVENTS: Final = "events.amazonaws.com"


def client(aws: LocalAws, service: str, role: str | None = None) -> Any:
    """A client of the account's administrator, or of a role."""
    connect: Any = boto3.client  # its types know each service by a literal name
    return connect(
        service,
        endpoint_url=aws.endpoint,
        region_name=REGION,
        aws_access_key_id=ACCOUNT,
        aws_secret_access_key="test",
        aws_session_token=role,
    )


def policy(*statements: dict[str, Any]) -> str:
    allowed = [{"Effect": "Allow", **each} for each in statements]
    return json.dumps({"Version": "2012-10-17", "Statement": allowed})


def make_role(aws: LocalAws, name: str, service: str, *statements: dict[str, Any]) -> str:
    """ARN of a role that a service takes, with these rights."""
    iam = client(aws, "iam")
    trust = policy({"Principal": {"Service": service}, "Action": "sts:AssumeRole"})
    found = iam.create_role(RoleName=name, AssumeRolePolicyDocument=trust)
    if statements:
        iam.put_role_policy(RoleName=name, PolicyName="own", PolicyDocument=policy(*statements))
    return str(found["Role"]["Arn"])


def refusal(call: Callable[..., object], **arguments: Any) -> str:
    """Code of the error that a call ends with; "" where it succeeds."""
    try:
        call(**arguments)
    except ClientError as error:
        return error.response["Error"]["Code"]
    return ""


def arn(service: str, resource: str) -> str:
    return f"arn:aws:{service}:{REGION}:{ACCOUNT}:{resource}"


# --- policies -------------------------------------------------------------------------------------
def run_a_task(aws: LocalAws, name: str, *rights: dict[str, Any]) -> str:
    """How RunTask of a role with these rights is refused, if it is."""
    ecs = client(aws, "ecs")
    ecs.create_cluster(clusterName=name)
    ecs.register_task_definition(
        family=name,
        networkMode="awsvpc",
        taskRoleArn=make_role(aws, f"{name}-task", "ecs-tasks.amazonaws.com"),
        containerDefinitions=[{"name": "main", "image": "none", "memory": 512}],
    )
    role = make_role(aws, name, "states.amazonaws.com", *rights)
    as_role = client(aws, "ecs", role)
    return refusal(as_role.run_task, cluster=name, taskDefinition=name)


def test_what_a_roles_policies_do_not_allow_is_refused(aws: LocalAws) -> None:
    client(aws, "s3").create_bucket(Bucket="strict")
    right = {"Action": "s3:PutObject", "Resource": "arn:aws:s3:::strict/mine/*"}
    role = make_role(aws, "writer", "lambda.amazonaws.com", right)
    s3 = client(aws, "s3", role)
    s3.put_object(Bucket="strict", Key="mine/a", Body=b"")
    assert refusal(s3.put_object, Bucket="strict", Key="a", Body=b"") == "AccessDenied"
    # As the deletion of a stack does, while something still runs.
    client(aws, "iam").delete_role_policy(RoleName="writer", PolicyName="own")
    assert refusal(s3.put_object, Bucket="strict", Key="mine/a", Body=b"") == "AccessDenied"


def test_a_bucket_policy_counts_too(aws: LocalAws) -> None:
    s3 = client(aws, "s3")
    s3.create_bucket(Bucket="guarded")
    role = make_role(aws, "guest", "lambda.amazonaws.com")
    put = functools.partial(client(aws, "s3", role).put_object, Bucket="guarded", Key="a", Body=b"")
    assert refusal(put) == "AccessDenied"
    items = {"Resource": "arn:aws:s3:::guarded/*"}
    let_in = {"Principal": {"AWS": role}, "Action": "s3:*", **items}
    keep_out = {"Effect": "Deny", "Principal": "*", "Action": "s3:Put*", **items}
    for statements, refused in (([let_in], ""), ([let_in, keep_out], "AccessDenied")):
        s3.put_bucket_policy(Bucket="guarded", Policy=policy(*statements))
        assert refusal(put) == refused


def test_who_starts_a_task_must_be_allowed_to_pass_its_roles(aws: LocalAws) -> None:
    def run(name: str) -> dict[str, Any]:
        cluster = {"ArnEquals": {"ecs:cluster": arn("ecs", f"cluster/{name}")}}
        definition = arn("ecs", f"task-definition/{name}:*")
        return {"Action": "ecs:RunTask", "Resource": definition, "Condition": cluster}

    to_pass = {
        "Action": "iam:PassRole",
        "Resource": f"arn:aws:iam::{ACCOUNT}:role/both-task",
        "Condition": {"StringEquals": {"iam:PassedToService": "ecs-tasks.amazonaws.com"}},
    }
    assert run_a_task(aws, "neither") == "AccessDeniedException"
    assert run_a_task(aws, "starts", run("starts")) == "AccessDeniedException"
    assert run_a_task(aws, "both", run("both"), to_pass) == ""


def test_a_state_machine_may_do_what_its_role_may(aws: LocalAws) -> None:
    state = {
        "Type": "Task",
        "Resource": "arn:aws:states:::lambda:invoke",
        "Arguments": {"FunctionName": arn("lambda", "function:there-is-none")},
        "End": True,
    }
    machine = {"StartAt": "Call", "QueryLanguage": "JSONata", "States": {"Call": state}}
    states = client(aws, "stepfunctions")
    role = make_role(aws, "powerless", "states.amazonaws.com")
    made = states.create_state_machine(
        name="powerless", definition=json.dumps(machine), roleArn=role
    )
    execution = states.start_execution(stateMachineArn=made["stateMachineArn"])["executionArn"]

    def end() -> dict[str, Any] | None:
        found: dict[str, Any] = states.describe_execution(executionArn=execution)
        return found if found["status"] != "RUNNING" else None

    found = eventually("the execution has ended", end)
    assert found["error"] == "Lambda.AWSLambdaException"
    assert "role/powerless is not authorized to perform: lambda:InvokeFunction" in found["cause"]


def test_events_are_written_only_where_the_policy_of_the_logs_lets_them(aws: LocalAws) -> None:
    logs, events = client(aws, "logs"), client(aws, "events")
    rule = events.put_rule(Name="kept", EventPattern='{"source": ["mine"]}')["RuleArn"]
    only = {"ArnEquals": {"aws:SourceArn": rule}}
    group = arn("logs", "log-group:kept")

    def right(*actions: str, **more: Any) -> dict[str, Any]:
        by = {"Principal": {"Service": EVENTS}, "Resource": f"{group}:*"}
        return {"Action": [f"logs:{each}" for each in actions], **by, **more}

    def lines_after(target: str, *statements: dict[str, Any]) -> int:
        """How many lines the group has after one event."""
        if statements:
            document = policy(*statements)
            logs.put_resource_policy(policyName="kept", policyDocument=document)
        events.put_targets(Rule="kept", Targets=[{"Id": "1", "Arn": target}])
        event = {"Source": "mine", "DetailType": "d", "Detail": "{}"}
        events.put_events(Entries=[event])
        return len(logs.filter_log_events(logGroupName="kept")["events"])

    logs.create_log_group(logGroupName="kept")
    make, write = right("CreateLogStream"), right("PutLogEvents", Condition=only)
    try:
        assert lines_after(group) == 0
        # EventBridge does not tell its rule when it makes a stream.
        both = right("CreateLogStream", "PutLogEvents", Condition=only)
        assert lines_after(group, both) == 0
        assert lines_after(f"{group}:*", make, write) == 0
        assert lines_after(group, make, write) == 1
    finally:
        events.remove_targets(Rule="kept", Ids=["1"])
        events.delete_rule(Name="kept")
        logs.delete_log_group(logGroupName="kept")
        logs.delete_resource_policy(policyName="kept")


# --- requests -------------------------------------------------------------------------------------
def test_a_request_has_what_its_service_knows_and_nothing_else(aws: LocalAws) -> None:
    """As one that no SDK has made."""
    define(aws, "checked")
    ecs, more = client(aws, "ecs"), dict[str, str]()

    def add(params: dict[str, Any], **_: Any) -> None:
        params["body"] = json.dumps(json.loads(params["body"]) | more)

    ecs.meta.events.register("before-call.ecs.RunTask", add)
    run = functools.partial(ecs.run_task, cluster="checked", taskDefinition="checked")
    assert refusal(run) == ""
    for wrong in ({"Group": "a"}, {"propagateTags": "ALL"}):
        more.clear()
        more.update(wrong)
        assert refusal(run) == "InvalidParameterException"


# --- tasks ----------------------------------------------------------------------------------------
def test_a_stack_ends_at_a_name_that_the_service_reserves(aws: LocalAws) -> None:
    group = {"Type": "AWS::EC2::SecurityGroup", "Properties": {"GroupDescription": "x"}}
    stacks = client(aws, "cloudformation")
    for name in ("sg-mine", "mine"):
        stacks.create_stack(StackName=name, TemplateBody=json.dumps({"Resources": {"A": group}}))

    def state(name: str) -> str:
        return str(stacks.describe_stacks(StackName=name)["Stacks"][0]["StackStatus"])

    eventually("end of a stack", lambda: state("sg-mine").startswith("ROLLBACK"))
    eventually("stack", lambda: state("mine") == "CREATE_COMPLETE")


def make_group(aws: LocalAws, name: str, most: int = 99) -> None:
    """A group of hosts, and a capacity provider of the same name."""
    ecs, groups = client(aws, "ecs"), client(aws, "autoscaling")
    sizes = {"MinSize": 0, "MaxSize": most, "AvailabilityZones": [f"{REGION}a"]}
    groups.create_auto_scaling_group(AutoScalingGroupName=name, **sizes)
    found = groups.describe_auto_scaling_groups(AutoScalingGroupNames=[name])
    of = {"autoScalingGroupArn": found["AutoScalingGroups"][0]["AutoScalingGroupARN"]}
    ecs.create_capacity_provider(name=name, autoScalingGroupProvider=of)


def define(aws: LocalAws, name: str, **more: Any) -> str:
    """ARN of a revision of a task definition; a cluster and a group of hosts of that name."""
    ecs = client(aws, "ecs")
    if not ecs.describe_clusters(clusters=[name])["clusters"]:
        make_group(aws, name)
        ecs.create_cluster(clusterName=name, capacityProviders=[name])
    found = ecs.register_task_definition(
        family=name,
        containerDefinitions=[{"name": "main", "image": "none", "memory": 512}],
        **more,
    )
    return str(found["taskDefinition"]["taskDefinitionArn"])


def start(aws: LocalAws, name: str, **more: Any) -> str:
    """ARN of a task on the hosts of a provider of the same name."""
    strategy = [{"capacityProvider": name, "weight": 1}]
    started = client(aws, "ecs").run_task(
        cluster=name, taskDefinition=name, capacityProviderStrategy=strategy, **more
    )
    return str(started["tasks"][0]["taskArn"])


def test_a_capacity_provider_leaves_its_cluster_when_no_task_uses_it(aws: LocalAws) -> None:
    """So ECS refuses a deploy without a pool in which a job runs, before anything is deleted."""
    ecs = client(aws, "ecs")
    define(aws, "leaves")
    task = start(aws, "leaves")
    without: dict[str, list[Any]] = {"capacityProviders": [], "defaultCapacityProviderStrategy": []}
    put = functools.partial(ecs.put_cluster_capacity_providers, cluster="leaves", **without)
    assert refusal(put) == "ResourceInUseException"
    ecs.stop_task(cluster="leaves", task=task)
    assert eventually("it leaves", lambda: not refusal(put))


def test_a_revision_that_was_replaced_starts_no_task(aws: LocalAws) -> None:
    old, ecs = define(aws, "revised"), client(aws, "ecs")
    define(aws, "revised")
    ecs.deregister_task_definition(taskDefinition=old)
    assert refusal(ecs.run_task, cluster="revised", taskDefinition=old) == "ClientException"
    assert refusal(ecs.run_task, cluster="revised", taskDefinition="revised") == ""


def test_who_has_started_tasks_is_the_only_filter_of_a_list(aws: LocalAws) -> None:
    """``test_model`` compares what is listed."""
    define(aws, "listed")
    for other in ({"family": "listed"}, {"desiredStatus": "STOPPED"}):
        listing = client(aws, "ecs").list_tasks
        refused = refusal(listing, cluster="listed", startedBy="job", **other)
        assert refused == "InvalidParameterException"
