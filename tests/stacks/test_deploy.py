"""The real CDK command line: synth without a network, and deployments' lives on the local AWS.

A deployment changes, and two others come and go. ``test_lives`` plays what happens to jobs, and
``test_rules`` checks the templates of every preset. The limits of an emulator: docs/limits.md.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import boto3
import pytest

from contract import outputs as stack_outputs
from contract.job import JobSpec
from contract.nodes import Range, pool_hosts, pool_provider
from rehearsal.cdk import Cdk
from rehearsal.children import CommandError
from rehearsal.inventory import difference, inventory
from rehearsal.local_aws import REGION, LocalAws, local_aws
from tests.conftest import ROOT
from tests.stacks.conftest import Synth, Templates
from tests.stacks.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.long]


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


# --- a deployment's life --------------------------------------------------------------------------
class Account:
    """A bootstrapped account of its own: its inventory shows no other resources."""

    def __init__(self, aws: LocalAws, folder: Path) -> None:
        self.aws = aws
        self._command = Cdk(folder, aws.environment())
        self._command.bootstrap()
        self.set_out()

    def cdk(self, command: str, *arguments: str, app: Templates) -> str:
        """Run the command line on templates that are there, which saves it their synth."""
        return self._command(command, *arguments, "--app", app.folder)

    def set_out(self) -> None:
        """What is there from now on and was not before is what ``left`` shows."""
        self._before = inventory(self.aws.endpoint)

    def deploy(self, app: Templates) -> None:
        unasked = ("--require-approval", "never", "--progress", "events")
        self.cdk("deploy", "--all", *unasked, app=app)

    def destroy(self, app: Templates) -> None:
        self.cdk("destroy", "--all", "--force", app=app)

    def left(self) -> Any:
        """What is there now and was not there at the start."""
        return difference(self._before, inventory(self.aws.endpoint))


@contextmanager
def account_in(folder: Path) -> Iterator[Account]:
    """Start a local AWS, and send boto3 there, too."""
    if not (ROOT / ".venv-aws").is_dir():
        pytest.skip("no AWS emulator: `make venv-aws` installs it into .venv-aws")
    started = local_aws(folder / "aws", delay_s=0.5, wait_scale=0.05)
    with started as aws, pytest.MonkeyPatch.context() as patch:
        for name, value in aws.environment().items():
            patch.setenv(name, value)
        yield Account(aws, folder)


def settings(**given: str) -> dict[str, str]:
    """As ``-c`` gives them; the region is the one that the command line would find."""
    return {"region": REGION, "alarm_email": "ops@example.org", **given}


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


L4: Final = {"worker_instance_type": "g6.xlarge"}
POOLS: Final = {"free": L4, "four": {"worker_instance_type": "g6.12xlarge", "max_workers": 1}}


class Deployed(NamedTuple):
    """A deployment that the tests below share; the last of them changes and destroys it."""

    account: Account
    settings: dict[str, str]
    core: dict[str, str]
    training: dict[str, str]
    stage: Stage


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    with account_in(tmp_path_factory.mktemp("account")) as account:
        yield account


@pytest.fixture(scope="module")
def deployed(synth: Synth, account: Account) -> Deployed:
    zone = f"{REGION}a"
    given = settings(preset="ddp", availability_zone=zone, pools=json.dumps(POOLS))
    account.deploy(synth(**given))
    core, training = outputs(stack_outputs.CORE_STACK), outputs(stack_outputs.TRAINING_STACK)
    stage = Stage(account.aws.log.parent, training)
    return Deployed(account, given, core, training, stage)


def test_a_deployment_starts_nothing_and_a_second_one_would_change_nothing(
    deployed: Deployed, synth: Synth
) -> None:
    training = deployed.training
    assert json.loads(training[stack_outputs.SHAPE])["preset"] == "ddp"
    services = boto3.client("ecs").describe_services(
        cluster=training[stack_outputs.CLUSTER],
        services=[training[stack_outputs.HEAD_SERVICE], training[stack_outputs.WORKER_SERVICE]],
    )["services"]
    assert [service["desiredCount"] for service in services] == [0, 0]
    assert not deployed.stage.alive()
    kinds = {"VPC", "subnet", "bucket", "repository", "service", "state machine", "secret"}
    assert {*deployed.account.left()} >= kinds, "the inventory sees what a destroy must remove"

    shown = deployed.account.cdk("diff", "--fail", app=synth(**deployed.settings))
    assert "Number of stacks with differences: 0" in shown


def test_the_end_of_a_job_is_reported_to_whom_it_names(deployed: Deployed) -> None:
    """A queue has subscribed in the place of a mailbox."""
    sqs, topic = boto3.client("sqs"), deployed.core[stack_outputs.NOTICES]
    queue = sqs.create_queue(QueueName="anna")["QueueUrl"]
    arn = topic.replace(":sns:", ":sqs:").rpartition(":")[0] + ":anna"
    only = {"FilterPolicy": json.dumps({"to": ["anna@example.com"]})}
    boto3.client("sns").subscribe(TopicArn=topic, Protocol="sqs", Endpoint=arn, Attributes=only)
    for name in ("bert", "anna"):
        to = f"{name}@example.com"
        order = JobSpec(run="r", command=("true",), nodes=Range(99, 99), notify=to)
        boto3.client("stepfunctions").start_execution(
            stateMachineArn=deployed.training[stack_outputs.JOBS], name=name, input=order.to_json()
        )
    found: list[str] = []

    def look() -> bool:
        answer = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10)
        found.extend(each["Body"] for each in answer.get("Messages", []))
        return bool(found)

    deployed.stage.eventually("anna has mail", look)
    (mail,) = found
    assert "99 worker nodes" in json.loads(mail)["Message"]
    sqs.delete_queue(QueueUrl=queue)


# --- pools ----------------------------------------------------------------------------------------
def test_a_pool_in_which_a_job_runs_is_neither_removed_nor_moved(
    deployed: Deployed, synth: Synth
) -> None:
    """And nothing is taken from its hosts before that shows."""
    ecs, stage, place = boto3.client("ecs"), deployed.stage, stack_outputs.TRAINING_STACK
    (task,) = ecs.run_task(
        cluster=deployed.training[stack_outputs.CLUSTER],
        taskDefinition=pool_hosts(place, "free"),
        capacityProviderStrategy=[{"capacityProvider": pool_provider(place, "free")}],
    )["tasks"]
    stage.eventually("it has a host", stage.hosts)
    kept = {name: each for name, each in POOLS.items() if name != "free"}
    elsewhere = {"free": {**L4, "availability_zone": f"{REGION}b"}}
    for pools in (kept, kept | elsewhere):
        with pytest.raises(CommandError, match="The capacity provider is in use by tasks"):
            deployed.account.deploy(synth(**{**deployed.settings, "pools": json.dumps(pools)}))
        assert stage.alive() == [task["taskArn"]]
    stage.end_task(task["taskArn"], 0)
    stage.clean_up()


def test_a_deployment_changes_in_place_and_leaves_only_a_retained_bucket(
    deployed: Deployed, synth: Synth
) -> None:
    account, core = deployed.account, deployed.core
    # What is in the bucket stays, and nothing of value is replaced.
    s3, bucket = boto3.client("s3"), core[stack_outputs.BUCKET]
    s3.put_object(Bucket=bucket, Key="runs/a/model", Body=b"weights")
    kept = physical_ids(stack_outputs.CORE_STACK), physical_ids(stack_outputs.TRAINING_STACK)
    changed = synth(
        **{**deployed.settings, "pools": json.dumps({"four": POOLS["four"]})},
        **{"max_workers": "5", "image_tag": "abc123", "spot": "true"},
    )
    account.deploy(changed)
    assert physical_ids(stack_outputs.CORE_STACK) == kept[0]
    now = physical_ids(stack_outputs.TRAINING_STACK)
    replaced = {name.partition("Task")[0] for name in now if now[name] != kept[1].get(name)}
    tasks = {"Jobs", "NodesHead", "NodesWorker", "NodesfourPool"}
    assert replaced == tasks, "only task definitions are new ones"
    groups = boto3.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    assert [each["MaxSize"] for each in groups if "Worker" in each["AutoScalingGroupName"]] == [5]
    of_pools = [name for each in groups if "-pool-" in (name := each["AutoScalingGroupName"])]
    assert of_pools == [pool_hosts(stack_outputs.TRAINING_STACK, "four")], "the others are gone"
    training = outputs(stack_outputs.TRAINING_STACK)
    assert json.loads(training[stack_outputs.SHAPE])["spot"] is True

    start_hosts_and_tasks(deployed._replace(training=training))
    account.destroy(changed)
    left = account.left()
    assert [len(items) for items in left.values()] == [1], left
    assert s3.get_object(Bucket=bucket, Key="runs/a/model")["Body"].read() == b"weights"


def start_hosts_and_tasks(deployed: Deployed) -> None:
    """What runs while the stack is deleted: the emulator keeps records of all."""
    autoscaling, ecs = boto3.client("autoscaling"), boto3.client("ecs")
    training, stage = deployed.training, deployed.stage
    spec = JobSpec(run="r", command=("true",), nodes=Range(1, 2))
    for job in ("running", "queued"):  # the second one never starts: tasks of it would be left
        boto3.client("stepfunctions").start_execution(
            stateMachineArn=training[stack_outputs.JOBS], name=job, input=spec.to_json()
        )
        stage.eventually("the first has a head", lambda: stage.tasks("running"))
    for group in autoscaling.describe_auto_scaling_groups()["AutoScalingGroups"]:
        autoscaling.set_desired_capacity(
            AutoScalingGroupName=group["AutoScalingGroupName"], DesiredCapacity=1
        )
    groups = autoscaling.describe_auto_scaling_groups()["AutoScalingGroups"]
    assert [len(group["Instances"]) for group in groups] == [1, 1, 1]
    ecs.run_task(
        cluster=training[stack_outputs.CLUSTER], taskDefinition=training[stack_outputs.HEAD_TASK]
    )
    stage.eventually("both heads show", lambda: len(stage.alive()) == 2)


# --- several deployments, with GPUs ---------------------------------------------------------------
def test_one_of_two_deployments_is_destroyed_and_the_other_one_stays(
    account: Account, synth: Synth
) -> None:
    own = {"preset": "fsdp", "retain_bucket": "false"}
    own |= dict.fromkeys(("head_instance_type", "worker_instance_type"), "p4d.24xlarge")
    first, second = (synth(**settings(**own, deployment=name)) for name in ("one", "two"))
    account.set_out()
    account.deploy(first)
    alone = account.left()
    (dashboard,) = alone["dashboard"]
    body = boto3.client("cloudwatch").get_dashboard(DashboardName=dashboard)["DashboardBody"]
    assert not {"Ref", "Fn::GetAtt"} & {*body.split('"')}, "a reference is left in it"
    account.deploy(second)
    both = account.left()
    # Nothing of the first was replaced, and no name was taken.
    assert {kind: len(found) for kind, found in both.items()} == {
        kind: 2 * len(found) for kind, found in alone.items()
    }
    account.destroy(second)
    assert account.left() == alone
    account.destroy(first)
    assert account.left() == {}
