"""The real CDK command line: synth without a network, and a deployment's life on the local AWS.

Bootstrap, deploy, no differences, a changed deploy in place, destroy with tasks and hosts still
there; afterwards the account is as it was. What an emulator cannot show is in docs/limits.md.
"""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from contract import nodes, runs
from contract import outputs as stack_outputs
from contract.instance_types import instance_type
from contract.job import DEFAULT_ATTEMPTS, JOB_GROUP, JobSpec
from contract.ranges import Range
from rehearsal.cdk import Cdk
from rehearsal.commands import CommandError
from rehearsal.inventory import difference, inventory
from rehearsal.local_aws import LocalAws, local_aws
from tests.conftest import ROOT
from tests.stacks.orders import ABORTED_LATE, Order, Stage

pytestmark = pytest.mark.slow

SETTINGS = ("-c", "retain_bucket=false", "-c", "alarm_email=ops@example.org")


# --- without an account ---------------------------------------------------------------------------
def test_synth_needs_no_network_no_account_and_warns_of_nothing(tmp_path: Path) -> None:
    isolate = ("unshare", "--map-root-user", "--net")
    probe = subprocess.run([*isolate, "ip", "route"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no network namespace here: {probe.stderr.strip()}")
    assert probe.stdout == "", "the namespace has a route to somewhere"
    cdk = Cdk(tmp_path, {})
    output = cdk("synth", "--quiet", before=isolate)
    assert "warning" not in output.lower(), output
    assert {path.name for path in cdk.templates.glob("*.template.json")} == {
        "CoreStack.template.json",
        "TrainingStack.template.json",
    }


def test_a_bad_setting_ends_the_command_line_with_one_sentence(tmp_path: Path) -> None:
    cdk = Cdk(tmp_path, {})
    with pytest.raises(CommandError) as caught:
        cdk("synth", "--quiet", "-c", "max_workers=1000")
    message = str(caught.value)
    assert "error: setting max_workers is 1000: it must be 1 to 64" in message
    assert "Traceback" not in message


# --- a deployment's life --------------------------------------------------------------------------
@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAws]:
    """An account of its own: the inventory below must see no other resources."""
    if not (ROOT / ".venv-aws").is_dir():
        pytest.skip("no AWS emulator: `make venv-aws` installs it into .venv-aws")
    folder = tmp_path_factory.mktemp("aws")
    with local_aws(folder, patience_s=2, delay_s=0.5, wait_scale=0.02) as running:
        yield running


@pytest.fixture
def cdk(aws: LocalAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cdk:
    """The command line in a bootstrapped account; boto3 is sent there too."""
    for name, value in aws.environment().items():
        monkeypatch.setenv(name, value)
    command = Cdk(tmp_path, aws.environment())
    command.bootstrap()
    return command


def physical_ids(stack: str) -> dict[str, str]:
    pages = boto3.client("cloudformation").get_paginator("list_stack_resources")
    return {
        resource["LogicalResourceId"]: resource["PhysicalResourceId"]
        for page in pages.paginate(StackName=stack)
        for resource in page["StackResourceSummaries"]
    }


def outputs(stack: str) -> dict[str, str]:
    (found,) = boto3.client("cloudformation").describe_stacks(StackName=stack)["Stacks"]
    return {each["OutputKey"]: each["OutputValue"] for each in found["Outputs"]}


def worker_interfaces() -> list[dict[str, Any]]:
    """The network interfaces of the launch template of the workers' hosts."""
    ec2: Any = boto3.client("ec2")
    (template,) = [
        each["LaunchTemplateId"]
        for each in ec2.describe_launch_templates()["LaunchTemplates"]
        if "WorkerHosts" in each["LaunchTemplateName"]
    ]
    versions = ec2.describe_launch_template_versions(
        LaunchTemplateId=template, Versions=["$Latest"]
    )
    data = versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]
    found: list[dict[str, Any]] = list(data["NetworkInterfaces"])
    return found


def start_hosts_and_a_task(training: dict[str, str]) -> None:
    """What runs while the stack is deleted: the emulator keeps records of both."""
    autoscaling, ecs = boto3.client("autoscaling"), boto3.client("ecs")
    for group in autoscaling.describe_auto_scaling_groups()["AutoScalingGroups"]:
        autoscaling.set_desired_capacity(
            AutoScalingGroupName=group["AutoScalingGroupName"], DesiredCapacity=1
        )
    groups = autoscaling.describe_auto_scaling_groups()["AutoScalingGroups"]
    assert [len(group["Instances"]) for group in groups] == [1, 1]
    cluster = training[stack_outputs.CLUSTER]
    ecs.run_task(cluster=cluster, taskDefinition=training[stack_outputs.HEAD_TASK])
    # And the head of a job.
    assert eventually(lambda: len(ecs.list_tasks(cluster=cluster)["taskArns"]) == 2)


def eventually(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def disturb_jobs(stage: Stage) -> None:
    """Twenty jobs with throttled requests, lost answers, lost hosts and aborts in the orders of
    twenty seeds: each has one record, which is true, and nothing is left."""
    orders = [Order.from_seed(seed, most=DEFAULT_ATTEMPTS) for seed in range(20)]
    ends = {attempt.end for order in orders for attempt in order.attempts}
    faults = {fault for order in orders for each in order.attempts for fault in each.faults}
    assert (len(ends), len(faults)) == (5, 2), "every kind is among them"
    stage.play_all(orders)
    stage.clean_up()
    for order in orders:
        (record,) = stage.records(order.job)
        assert record["status"] in order.statuses, order
        if record["status"] != "stopped":
            assert record["attempts"] == len(order.attempts), order
        expected = {"succeeded": "SUCCEEDED", "stopped": "ABORTED"}.get(record["status"], "FAILED")
        late = order.attempts[-1].end == ABORTED_LATE
        assert stage.status(order.job) in {expected, *(["ABORTED"] if late else [])}, order


def queue_jobs(stage: Stage) -> None:
    """Three jobs behind one host for heads: ECS gives up on two of them, and all three run."""
    stage.have_hosts(1)
    jobs = [f"queued-{number}" for number in range(3)]
    for job in jobs:
        stage.start(job)
    seen: set[str] = set()

    def look() -> bool:
        (*running,) = [task for task in stage.alive() if stage.is_running(task)]
        assert len(running) <= 1, "there is one host"
        for task in running:
            if time.monotonic() - began > 5:  # the others have been given up on by now
                stage.exit(task, 0)
                seen.add(task)
        return all(stage.status(job) == "SUCCEEDED" for job in jobs)

    began = time.monotonic()
    try:
        eventually(look)
    finally:
        stage.have_hosts(99)
    assert len(seen) == 3
    for job in jobs:
        (record,) = stage.records(job)
        assert (record["status"], record["attempts"]) == ("succeeded", 1)
    stage.clean_up()


def replace_a_host_that_never_joins(stage: Stage) -> None:
    """A group is full with an instance that is billed and takes no task: a sweep terminates it, and
    the head that waits gets another one."""
    stage.have_hosts(1)
    stage.have_unjoined_hosts(1, of=stage.head_provider)
    stage.start("unjoined")

    def ended() -> list[str]:
        return [each for each in stage.call_keeper()["released"] if each.startswith("i-")]

    try:
        assert len(stage.eventually("the sweep ends it", ended)) == 1

        def running() -> list[str]:
            return [task for task in stage.alive() if stage.is_running(task)]

        (head,) = stage.eventually("the head runs", running)
        stage.exit(head, 0)
        stage.eventually("the job ends", lambda: stage.status("unjoined") == "SUCCEEDED")
    finally:
        stage.have_hosts(99)
    stage.clean_up()


def run_jobs(core: dict[str, str], training: dict[str, str], preset: str) -> None:
    """One job is stopped, one aborted: both are tidied up after, and say so. A third one stays."""
    states, ecs, s3 = boto3.client("stepfunctions"), boto3.client("ecs"), boto3.client("s3")
    which: dict[str, Any] = {"cluster": training[stack_outputs.CLUSTER]}
    spec = JobSpec(
        run="r",
        command=("echo", 'a "quoted" word', "ü"),
        nodes=Range(1, 2),
        max_seconds=3600,
        variables={"A": "one", "B": "two"},
    )

    def start(job: str) -> tuple[str, str]:
        # The emulator remembers executions of a machine that was deleted.
        execution = states.start_execution(
            stateMachineArn=training[stack_outputs.JOBS],
            name=f"{preset}-{job}",
            input=spec.to_json(),
        )["executionArn"]

        def look() -> list[str]:
            # The list may still have the tasks of the job before.
            arns = ecs.list_tasks(**which)["taskArns"]
            found = ecs.describe_tasks(**which, tasks=arns)["tasks"] if arns else []
            group = f"{JOB_GROUP}{preset}-{job}"
            return [each["taskArn"] for each in found if each["group"] == group]

        (task,) = eventually(look)
        return execution, task

    def record(job: str) -> dict[str, Any]:
        key = runs.job_record("r", f"{preset}-{job}")
        bucket = core[stack_outputs.BUCKET]
        # Written after the tasks were ended, which is what was waited for.
        eventually(lambda: s3.list_objects_v2(Bucket=bucket, Prefix=key)["KeyCount"])
        found: dict[str, Any] = json.loads(s3.get_object(Bucket=bucket, Key=key)["Body"].read())
        return found

    execution, task = start("ended")
    (head,) = ecs.describe_tasks(**which, tasks=[task])["tasks"]
    assert head["group"] == f"{JOB_GROUP}{preset}-ended"
    (override,) = head["overrides"]["containerOverrides"]
    told = {each["name"]: each["value"] for each in override["environment"]}
    assert JobSpec.from_json(told[nodes.ENV_JOB_SPEC]) == spec
    assert 3500 < int(told[nodes.ENV_DEADLINE]) - time.time() <= 3600
    # Without a container below, a task that is stopped has ended well.
    ecs.stop_task(**which, task=task)
    assert record("ended")["reason"] == "succeeded"

    execution, task = start("aborted")
    # Of the job too, as its head would have started it.
    (worker,) = ecs.run_task(
        **which, taskDefinition=training[stack_outputs.WORKER_TASK], startedBy=f"{preset}-aborted"
    )["tasks"]
    # What the list does not have yet when the job is aborted is left to the sweep.
    eventually(lambda: worker["taskArn"] in ecs.list_tasks(**which)["taskArns"])
    states.stop_execution(executionArn=execution, error="Budget", cause="spent")
    eventually(lambda: not ecs.list_tasks(**which)["taskArns"])
    found = record("aborted")
    assert (found["status"], found["attempts"]) == ("stopped", 1)
    assert found["reason"] == "its execution was aborted: Budget: spent"

    start("running")


@pytest.mark.parametrize("preset", ["cpu", pytest.param("fsdp", marks=pytest.mark.long)])
def test_deploy_change_and_destroy(aws: LocalAws, cdk: Cdk, preset: str) -> None:
    before = inventory(aws.endpoint)
    settings = (*SETTINGS, "-c", f"preset={preset}")
    deploy = ("deploy", stack_outputs.CORE_STACK, stack_outputs.TRAINING_STACK)
    unasked = ("--require-approval", "never", "--progress", "events")

    cdk(*deploy, *unasked, *settings)
    core, training = outputs(stack_outputs.CORE_STACK), outputs(stack_outputs.TRAINING_STACK)
    assert json.loads(training[stack_outputs.SHAPE])["preset"] == preset
    ecs = boto3.client("ecs")
    services = ecs.describe_services(
        cluster=training[stack_outputs.CLUSTER],
        services=[training[stack_outputs.HEAD_SERVICE], training[stack_outputs.WORKER_SERVICE]],
    )["services"]
    assert [service["desiredCount"] for service in services] == [0, 0]
    assert not ecs.list_tasks(cluster=training[stack_outputs.CLUSTER])["taskArns"]

    assert "Number of stacks with differences: 0" in cdk("diff", "--fail", again=True)

    # A change happens in place: what is in the bucket stays, and nothing of value is replaced.
    s3 = boto3.client("s3")
    s3.put_object(Bucket=core[stack_outputs.BUCKET], Key="runs/a/result.json", Body=b"{}")
    kept = physical_ids(stack_outputs.CORE_STACK), physical_ids(stack_outputs.TRAINING_STACK)
    changed = (*settings, "-c", "max_workers=5", "-c", "image_tag=abc123", "-c", "spot=true")
    cdk(*deploy, *unasked, *changed)
    content = s3.get_object(Bucket=core[stack_outputs.BUCKET], Key="runs/a/result.json")
    assert content["Body"].read() == b"{}"
    assert physical_ids(stack_outputs.CORE_STACK) == kept[0]
    now = physical_ids(stack_outputs.TRAINING_STACK)
    replaced = {name.partition("Task")[0] for name in now if now[name] != kept[1].get(name)}
    assert replaced == {"Jobs", "NodesHead", "NodesWorker"}, "only task definitions are new ones"
    (group,) = [
        each
        for each in boto3.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
        if "Worker" in each["AutoScalingGroupName"]
    ]
    assert group["MaxSize"] == 5
    assert json.loads(outputs(stack_outputs.TRAINING_STACK)[stack_outputs.SHAPE])["spot"] is True

    if preset == "cpu":
        training = outputs(stack_outputs.TRAINING_STACK)
        stage = Stage(aws.log.parent, core, training)
        disturb_jobs(stage)
        queue_jobs(stage)
        replace_a_host_that_never_joins(stage)
    run_jobs(core, training, preset)
    start_hosts_and_a_task(training)
    cdk("destroy", "--all", "--force", again=True)
    assert difference(before, inventory(aws.endpoint)) == {}


@pytest.mark.long
def test_a_bucket_that_is_to_be_retained_is_all_that_stays(aws: LocalAws, cdk: Cdk) -> None:
    before = inventory(aws.endpoint)
    cdk("deploy", stack_outputs.CORE_STACK, "--require-approval", "never")
    bucket = outputs(stack_outputs.CORE_STACK)[stack_outputs.BUCKET]
    boto3.client("s3").put_object(Bucket=bucket, Key="runs/a/model", Body=b"weights")
    cdk("destroy", "--all", "--force", again=True)
    left: dict[str, Any] = difference(before, inventory(aws.endpoint))
    assert [len(items) for items in left.values()] == [1], left
    assert boto3.client("s3").get_object(Bucket=bucket, Key="runs/a/model")["Body"].read()


@pytest.mark.long
def test_a_shared_file_system_grows_in_place_and_is_not_destroyed_before_all_is_exported(
    aws: LocalAws, cdk: Cdk
) -> None:
    before = inventory(aws.endpoint)
    settings = (*SETTINGS, "-c", "preset=fsdp", "-c", "efa=on", "-c", "shared_storage=fsx")
    deploy = ("deploy", stack_outputs.CORE_STACK, stack_outputs.TRAINING_STACK)
    unasked = ("--require-approval", "never", "--progress", "events")
    cdk(*deploy, *unasked, *settings)
    fsx = boto3.client("fsx")
    (files,) = fsx.describe_file_systems()["FileSystems"]
    (link,) = fsx.describe_data_repository_associations()["Associations"]
    bucket = outputs(stack_outputs.CORE_STACK)[stack_outputs.BUCKET]
    assert link["DataRepositoryPath"] == f"s3://{bucket}/datasets/"
    machine = json.loads(outputs(stack_outputs.TRAINING_STACK)[stack_outputs.SHAPE])
    shown = [
        (each["NetworkCardIndex"], each["DeviceIndex"], each["InterfaceType"], len(each["Groups"]))
        for each in worker_interfaces()
    ]
    plan = instance_type(machine["worker_instance_type"]).efa_plan
    kinds = {True: "efa", False: "efa-only"}
    assert shown == [(each.card, each.device, kinds[each.has_ip], 1) for each in plan]

    # A larger one is the same one.
    cdk(*deploy, *unasked, *settings, "-c", "fsx_capacity_gib=2400")
    (now,) = fsx.describe_file_systems()["FileSystems"]
    assert now["FileSystemId"] == files["FileSystemId"]
    assert now["StorageCapacity"] == 2400
    core = physical_ids(stack_outputs.CORE_STACK)

    # A deploy that forgets it is rolled back.
    with pytest.raises(CommandError) as caught:
        cdk(*deploy, *unasked, *settings, "-c", "shared_storage=none")
    assert "give -c shared_storage=fsx" in str(caught.value)
    (now,) = fsx.describe_file_systems()["FileSystems"]
    assert now["FileSystemId"] == files["FileSystemId"]

    # What cannot be exported stops the deletion: the file system stays, with all that it needs.
    def unexported(number: int) -> None:
        tag = {"Key": "rehearsal:unexported", "Value": str(number)}
        fsx.tag_resource(ResourceARN=files["ResourceARN"], Tags=[tag])

    unexported(7)
    with pytest.raises(CommandError) as caught:
        cdk("destroy", "--all", "--force", again=True)
    assert f"7 files of {files['FileSystemId']} are not in the bucket" in str(caught.value)
    (link,) = fsx.describe_data_repository_associations()["Associations"]
    assert link["S3"]["AutoExportPolicy"]["Events"], "they go on being exported"
    (kept,) = fsx.describe_file_systems()["FileSystems"]
    ec2 = boto3.client("ec2")
    assert ec2.describe_subnets(SubnetIds=kept["SubnetIds"])["Subnets"]
    assert physical_ids(stack_outputs.CORE_STACK) == core

    unexported(0)
    cdk("destroy", "--all", "--force", again=True)
    assert difference(before, inventory(aws.endpoint)) == {}
