"""In what the local AWS is as strict as AWS.

Tasks are records here, and a caller with a role has its ARN as the session token, as functions
and containers do.
"""

import functools
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Final

import boto3
import pytest
from botocore.exceptions import ClientError

from rehearsal.local_aws import ACCOUNT, REGION, LocalAws, local_aws
from tests.conftest import ROOT
from tests.eventually import eventually

pytestmark = pytest.mark.slow

EVENTS: Final = "events.amazonaws.com"


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAws]:
    """One whose ECS waits for a second for a host."""
    if not (ROOT / ".venv-aws" / "bin" / "python").exists():
        pytest.skip("no AWS emulator: `make venv-aws` installs it into .venv-aws")
    with local_aws(tmp_path_factory.mktemp("strict"), patience_s=1, delay_s=2) as running:
        yield running


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
    items = "arn:aws:s3:::guarded/*"
    role = make_role(aws, "guest", "lambda.amazonaws.com")
    as_role = client(aws, "s3", role)

    def put() -> object:
        return as_role.put_object(Bucket="guarded", Key="a", Body=b"")

    assert refusal(put) == "AccessDenied"
    let_in = {"Principal": {"AWS": role}, "Action": "s3:*", "Resource": items}
    s3.put_bucket_policy(Bucket="guarded", Policy=policy(let_in))
    assert refusal(put) == ""
    keep_out = {"Effect": "Deny", "Principal": "*", "Action": "s3:Put*", "Resource": items}
    s3.put_bucket_policy(Bucket="guarded", Policy=policy(let_in, keep_out))
    assert refusal(put) == "AccessDenied"


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
    execution = states.start_execution(stateMachineArn=made["stateMachineArn"])
    found = ended(states, execution["executionArn"])
    assert found["error"] == "Lambda.AWSLambdaException"
    assert "role/powerless is not authorized to perform: lambda:InvokeFunction" in found["cause"]


def ended(states: Any, execution: str) -> dict[str, Any]:
    """An execution, once it has ended."""

    def look() -> dict[str, Any] | None:
        if refusal(states.describe_execution, executionArn=execution):
            return None  # it does not show yet
        found: dict[str, Any] = states.describe_execution(executionArn=execution)
        return found if found["status"] != "RUNNING" else None

    found: dict[str, Any] = eventually("the execution has ended", look)
    return found


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
def by_hand(aws: LocalAws, target: str, **parameters: Any) -> str:
    """Type of the error that a request which no SDK has made ends with; "" where it succeeds."""
    service = {"AmazonEC2ContainerServiceV20141113": "ecs", "AWSStepFunctions": "states"}
    scope = f"{ACCOUNT}/20260101/{REGION}/{service[target.partition('.')[0]]}/aws4_request"
    request = urllib.request.Request(
        aws.endpoint,
        json.dumps(parameters).encode(),
        {
            "Content-Type": "application/x-amz-json-1.1",
            "X-Amz-Target": target,
            "Authorization": f"AWS4-HMAC-SHA256 Credential={scope}, Signature=none",
        },
    )
    try:
        with urllib.request.urlopen(request):
            return ""
    except urllib.error.HTTPError as error:
        return str(json.load(error)["__type"])


def test_a_request_has_what_its_service_knows_and_nothing_else(aws: LocalAws) -> None:
    run = "AmazonEC2ContainerServiceV20141113.RunTask"
    define(aws, "checked")
    given = {"cluster": "checked", "taskDefinition": "checked"}
    assert by_hand(aws, run, **given) == ""
    for wrong in ({"Group": "a"}, {"propagateTags": "ALL"}):
        assert by_hand(aws, run, **given, **wrong) == "InvalidParameterException"


def test_a_machine_or_a_template_with_a_parameter_that_there_is_not_is_refused(
    aws: LocalAws,
) -> None:
    state = {
        "Type": "Task",
        "Resource": "arn:aws:states:::ecs:runTask.sync",
        "Arguments": {"cluster": "a", "TaskDefinition": "b"},
        "End": True,
    }
    machine = {"StartAt": "Run", "QueryLanguage": "JSONata", "States": {"Run": state}}
    task = {
        "Type": "AWS::ECS::TaskDefinition",
        "Properties": {
            "Family": "typo",
            "ContainerDefinitions": [{"Name": "a", "Image": "b", "Memory": "512", "Initt": True}],
        },
    }
    role = make_role(aws, "typo", "states.amazonaws.com")
    given = {"name": "typo", "definition": json.dumps(machine), "roleArn": role}
    create = client(aws, "stepfunctions").create_state_machine
    assert refusal(create, **given) == "InvalidDefinition"
    stacks = client(aws, "cloudformation")
    stacks.create_stack(StackName="typo", TemplateBody=json.dumps({"Resources": {"Task": task}}))

    def settled() -> list[str]:
        events = stacks.describe_stack_events(StackName="typo")["StackEvents"]
        if not events[0]["ResourceStatus"].endswith(("_COMPLETE", "_FAILED")):
            return []
        return [str(event.get("ResourceStatusReason")) for event in events]

    fault = "ContainerDefinitions[0].Initt: there is no such parameter"
    assert any(fault in reason for reason in eventually("the stack has settled", settled))


def test_what_a_resource_depends_on_that_cannot_be_deleted_stays(aws: LocalAws) -> None:
    """A bucket with an object cannot; it is in the way of the first two of four log groups."""

    def group(name: str, **more: Any) -> dict[str, Any]:
        return {"Type": "AWS::Logs::LogGroup", "Properties": {"LogGroupName": name}, **more}

    resources = {
        "First": group("stays-1"),
        "Second": group("stays-2", DependsOn="First"),
        "Full": {
            "Type": "AWS::S3::Bucket",
            "DependsOn": "Second",
            "Properties": {"BucketName": "stays"},
        },
        "After": group("goes-1", DependsOn="Full"),
        "Other": group("goes-2"),
    }
    stacks, s3, logs = (client(aws, name) for name in ("cloudformation", "s3", "logs"))
    template = json.dumps({"Resources": resources})
    stack = stacks.create_stack(StackName="stays", TemplateBody=template)["StackId"]

    def settled() -> dict[str, Any] | None:
        (found,) = stacks.describe_stacks(StackName=stack)["Stacks"]
        return None if found["StackStatus"].endswith("_IN_PROGRESS") else found

    assert eventually("the stack has settled", settled)["StackStatus"] == "CREATE_COMPLETE"
    s3.put_object(Bucket="stays", Key="a", Body=b"")
    stacks.delete_stack(StackName="stays")
    found = eventually("the stack has settled", settled)
    assert found["StackStatus"] == "DELETE_FAILED"
    assert found["StackStatusReason"].endswith("failed to delete: [Full].")
    groups = logs.describe_log_groups()["logGroups"]
    names = [group["logGroupName"] for group in groups]
    assert [name for name in names if name.startswith(("stays", "goes"))] == ["stays-1", "stays-2"]

    # What was in the way is gone, and so is everything after another deletion.
    s3.delete_object(Bucket="stays", Key="a")
    stacks.delete_stack(StackName="stays")
    assert eventually("the stack has settled", settled)["StackStatus"] == "DELETE_COMPLETE"
    groups = logs.describe_log_groups(logGroupNamePrefix="stays")["logGroups"]
    assert groups == []


# --- tasks ----------------------------------------------------------------------------------------
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


def have_hosts(aws: LocalAws, **numbers: int) -> None:
    """As many hosts for each capacity provider."""
    (aws.log.parent / "capacity.json").write_text(json.dumps(numbers))


def start(aws: LocalAws, name: str, **more: Any) -> str:
    """ARN of a task on the hosts of a provider of the same name."""
    strategy = [{"capacityProvider": name, "weight": 1}]
    started = client(aws, "ecs").run_task(
        cluster=name, taskDefinition=name, capacityProviderStrategy=strategy, **more
    )
    return str(started["tasks"][0]["taskArn"])


def described(aws: LocalAws, name: str, task: str) -> dict[str, Any]:
    (found,) = client(aws, "ecs").describe_tasks(cluster=name, tasks=[task])["tasks"]
    return dict(found)


def test_a_task_that_no_host_comes_for_is_ended_by_ecs(aws: LocalAws) -> None:
    define(aws, "queue")
    have_hosts(aws, queue=1)
    first, second = start(aws, "queue"), start(aws, "queue")
    assert described(aws, "queue", first)["lastStatus"] == "RUNNING"
    task = described(aws, "queue", second)
    assert task["lastStatus"] == "PROVISIONING"
    assert "containerInstanceArn" not in task

    def end() -> dict[str, Any] | None:
        found = described(aws, "queue", second)
        return found if found["lastStatus"] == "STOPPED" else None

    found = eventually("the task has ended", end)
    assert (found["stopCode"], found["stoppedReason"]) == (
        "TaskFailedToStart",
        "EMPTY CAPACITY PROVIDER",
    )
    assert "exitCode" not in found["containers"][0]
    # A host that comes later is for those that still wait.
    third = start(aws, "queue")
    have_hosts(aws, queue=2)
    eventually("the task runs", lambda: described(aws, "queue", third)["lastStatus"] == "RUNNING")


def test_a_revision_that_was_replaced_starts_no_task(aws: LocalAws) -> None:
    old, ecs = define(aws, "revised"), client(aws, "ecs")
    define(aws, "revised")
    ecs.deregister_task_definition(taskDefinition=old)
    assert refusal(ecs.run_task, cluster="revised", taskDefinition=old) == "ClientException"
    assert refusal(ecs.run_task, cluster="revised", taskDefinition="revised") == ""


def lists(ecs: Any, tasks: list[str], **which: str) -> bool:
    return bool(ecs.list_tasks(**which)["taskArns"] == tasks)


def test_tasks_are_listed_by_who_started_them_and_nothing_else(aws: LocalAws) -> None:
    define(aws, "listed")
    task, ecs = start(aws, "listed", startedBy="job"), client(aws, "ecs")
    start(aws, "listed", startedBy="other")
    by_job = {"cluster": "listed", "startedBy": "job"}
    eventually("the task is listed", functools.partial(lists, ecs, [task], **by_job))
    for other in ({"family": "listed"}, {"desiredStatus": "STOPPED"}):
        assert refusal(ecs.list_tasks, **by_job, **other) == "InvalidParameterException"


def numbers(ecs: Any, states: Any, machine: str) -> list[int]:
    """Of tasks that run, executions that run, and those that were aborted, as lists have them."""
    of = [
        states.list_executions(stateMachineArn=machine, statusFilter=status)["executions"]
        for status in ("RUNNING", "ABORTED")
    ]
    return [len(ecs.list_tasks(cluster="late")["taskArns"]), *map(len, of)]


def until(look: Callable[[], object], expected: object) -> None:
    eventually(f"it is {expected!r}", lambda: look() == expected)


def test_what_has_just_changed_shows_a_moment_later(aws: LocalAws) -> None:
    define(aws, "late")
    ecs, states = client(aws, "ecs"), client(aws, "stepfunctions")
    machine = {
        "StartAt": "Wait",
        "States": {"Wait": {"Type": "Wait", "Seconds": 60, "End": True}},
    }
    made = states.create_state_machine(
        name="late",
        definition=json.dumps(machine),
        roleArn=make_role(aws, "late", "states.amazonaws.com"),
    )

    shown = functools.partial(numbers, ecs, states, made["stateMachineArn"])
    # Of twenty, a few show at once, whatever the seed.
    tasks = [start(aws, "late") for _ in range(20)]
    runs = [
        states.start_execution(stateMachineArn=made["stateMachineArn"])["executionArn"]
        for _ in range(20)
    ]
    told = [refusal(states.describe_execution, executionArn=run) for run in runs]
    num_tasks, num_runs, _ = shown()
    assert num_tasks < 20
    assert num_runs < 20
    assert "ExecutionDoesNotExist" in told
    until(shown, [20, 20, 0])
    for task, run in zip(tasks, runs, strict=True):
        ecs.stop_task(cluster="late", task=task)
        states.stop_execution(executionArn=run)
    num_tasks, _, num_aborted = shown()
    assert num_tasks
    assert num_aborted < 20
    ends = [states.describe_execution(executionArn=run)["status"] for run in runs]
    assert "RUNNING" in ends
    until(shown, [0, 0, 20])


def test_a_shell_needs_a_task_that_was_started_for_it(aws: LocalAws) -> None:
    how = {"cluster": "shell", "command": "bash", "interactive": True}
    define(aws, "shell")
    ecs = client(aws, "ecs")
    assert (
        refusal(ecs.execute_command, task=start(aws, "shell"), **how) == "InvalidParameterException"
    )
    task = start(aws, "shell", enableExecuteCommand=True)
    assert refusal(ecs.execute_command, task=task, **how) == ""


def test_throttling_has_the_name_in_a_state_machine_that_it_has_on_aws(aws: LocalAws) -> None:
    definition = define(aws, "busy")
    state = {
        "Type": "Task",
        "Resource": "arn:aws:states:::ecs:runTask.sync",
        "Arguments": {"Cluster": "busy", "TaskDefinition": definition},
        "End": True,
    }
    machine = {"StartAt": "Run", "QueryLanguage": "JSONata", "States": {"Run": state}}
    rights = {"Action": ["ecs:*", "events:*"], "Resource": "*"}
    states = client(aws, "stepfunctions")
    made = states.create_state_machine(
        name="busy",
        definition=json.dumps(machine),
        roleArn=make_role(aws, "busy", "states.amazonaws.com", rights),
    )
    (aws.log.parent / "throttle").touch()
    execution = states.start_execution(stateMachineArn=made["stateMachineArn"])
    found = ended(states, execution["executionArn"])
    assert (found["error"], found["cause"]) == ("ECS.AmazonECSException", "Rate exceeded")
