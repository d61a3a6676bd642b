"""Jobs in real containers, which bring their own cluster and take it away however they end.

Commands as a user gives them. The local AWS refuses what a role may not do; the last tests look at
all calls that the others, those of the files before this one too, have caused.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
import torch

from contract import exits, runs
from contract import outputs as stack_outputs
from contract.nodes import ENV_RESIZE, HEAD, WORKER, pool_of
from rehearsal.cycle import Rehearsal
from rehearsal.inventory import account_at
from rehearsal.local_aws import METADATA_PORT
from rehearsal.policies import parse
from tests.conftest import ROOT
from tests.eventually import eventually
from tests.loopback import answering
from tests.rehearsal import conftest
from tests.rehearsal.conftest import DEPLOYED, LAPTOP, command, show, succeeded, trainctl
from tests.rehearsal.watch import Watch
from tests.stacks.stage import Stage
from tests.training.sample_pictures import write_tree
from training.data.small_images import BatchOrder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.usefixtures("log_of_a_failure"),
]

#: In the set of pictures.
NUM_PICTURES = 64
#: Small pictures, on one thread in each process: all nodes share this machine's processors.
QUICK = (
    *("--preset", "small", "--model", "efficientnet-b0", "--ema", "0", "--decoders", "1"),
    *("--report-every", "1", "--env", "OMP_NUM_THREADS=1"),
)


@pytest.fixture(scope="module")
def rehearsal(deployment: Rehearsal) -> Rehearsal:
    """A deployment without a standing cluster, nor the hosts of one."""
    assert not deployment.engine.labelled("container", deployment.name)
    stage(deployment).clean_up()
    return deployment


class Containers(Stage):
    """Hosts of jobs whose nodes are containers, which take a while to end."""

    patience_s = 180


def stage(rehearsal: Rehearsal) -> Containers:
    training = rehearsal.outputs(stack_outputs.TRAINING_STACK)
    account = account_at(rehearsal.state()["endpoint"])
    return Containers(rehearsal.folder / "aws", training, account.client)


def read(rehearsal: Rehearsal, key: str) -> str:
    s3 = account_at(rehearsal.state()["endpoint"]).client("s3")
    return str(s3.get_object(Bucket=rehearsal.bucket(), Key=key)["Body"].read().decode())


def events(rehearsal: Rehearsal, run: str) -> list[dict[str, Any]]:
    text = read(rehearsal, f"{runs.RUNS_PREFIX}/{run}/{runs.METRICS_FILE}")
    return [json.loads(line) for line in text.splitlines()]


def recorded(
    watch: Watch, rehearsal: Rehearsal, run: str, kind: str, number: int
) -> list[dict[str, Any]]:
    """Wait until a run has so many events of a kind: its record in S3 follows after each epoch."""

    def look() -> list[dict[str, Any]]:
        watch.look()
        found = [each for each in events(rehearsal, run) if each["type"] == kind]
        return found if len(found) >= number else []

    return eventually(f"{number} {kind}", look, timeout_s=180, every_s=1, over=watch.over)


def saved(rehearsal: Rehearsal, run: str) -> set[str]:
    """Names of a run's checkpoints that are whole."""
    prefix = f"{runs.RUNS_PREFIX}/{run}/{runs.CHECKPOINTS_DIR}/"
    found = account_at(rehearsal.state()["endpoint"]).items(
        "s3", "list_objects_v2", "Contents", Bucket=rehearsal.bucket(), Prefix=prefix
    )
    return {each["Key"].split("/")[-2] for each in found if each["Key"].endswith("manifest.json")}


def nothing_is_left(rehearsal: Rehearsal) -> None:
    """No container, and after the next sweeps no host: one of an attempt before waits for them."""
    eventually(
        "no task of the job is left",
        lambda: not rehearsal.engine.labelled("container", rehearsal.name),
    )
    stage(rehearsal).clean_up()


def runs_still(rehearsal: Rehearsal, container: str) -> bool:
    found = rehearsal.engine.inspect("container", container)
    return found is not None and bool(found["State"]["Running"])


@contextmanager
def hosts(rehearsal: Rehearsal, number: int) -> Iterator[Callable[[int], None]]:
    """Only so many hosts for workers; the number may be changed on the way."""
    provider = rehearsal.outputs(stack_outputs.TRAINING_STACK)[stack_outputs.WORKER_PROVIDER]
    file = rehearsal.folder / "aws" / "capacity.json"

    def have(count: int) -> None:
        file.write_text(json.dumps({provider: count}))

    have(number)
    try:
        yield have
    finally:
        file.unlink()


@contextmanager
def variables(rehearsal: Rehearsal, **values: str) -> Iterator[None]:
    """More of them in every container that is started."""
    file = rehearsal.folder / "aws" / "environment.json"
    file.write_text(json.dumps(values))
    try:
        yield
    finally:
        file.unlink()


# --- hosts that come and go -----------------------------------------------------------------------
class Metadata:
    """Instances' metadata, version 2; one of them has a notice."""

    noticed = ""
    at = ""

    def answer(self, request: BaseHTTPRequestHandler, _body: bytes) -> tuple[int, str]:
        if request.command == "PUT":
            return 200, "a-token"
        if request.headers.get("X-aws-ec2-metadata-token") != "a-token":
            return 401, ""
        if request.client_address[0] == self.noticed:
            return 200, json.dumps({"action": "terminate", "time": self.at})
        return 404, ""


#: Instead of the two minutes that AWS gives: polling and the margin take 15 s of them.
NOTICE_S = 40


def epochs_of_each_picture(lines: list[dict[str, Any]], config: dict[str, Any]) -> int:
    """The number of whole epochs, each of which had each picture once.

    Of the steps that count: those after the last checkpoint before a loss were done again.

    Lines that a killed head had not yet put into the bucket are missing; the checkpoint from which
    the run resumed has those steps.

    Args:
        lines: of the run's record.
        config: its settings, from which the pictures of a step follow.
    """
    steps: list[int] = []
    for each in lines:
        if each["type"] == "resume":
            kept = [step for step in steps if step <= each["step"]]
            assert kept == [*range(1, len(kept) + 1)]
            steps = [*range(1, each["step"] + 1)]
        elif each["type"] == "step":
            steps.append(each["step"])
    batch, seed = config["global_batch"], config["seed"]
    order = BatchOrder(num_images=NUM_PICTURES, global_batch=batch, seed=seed)
    num_epochs = steps[-1] // order.steps_per_epoch
    seen = torch.cat([order.indices(step - 1) for step in steps])[: num_epochs * NUM_PICTURES]
    epochs = seen.view(num_epochs, NUM_PICTURES).sort(dim=1).values
    assert torch.equal(epochs, torch.arange(NUM_PICTURES).expand_as(epochs))
    return num_epochs


@pytest.fixture(scope="module")
def pictures(rehearsal: Rehearsal, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A set of pictures in the bucket, prepared from a tree in ImageNet's layout."""
    tree = write_tree(tmp_path_factory.mktemp("tree"), num_train=NUM_PICTURES, num_val=20)
    place = f"s3://{rehearsal.bucket()}/datasets/pictures"
    words = [str(tree), "--to", place, "--size", "64", "--processes", "1"]
    command = [sys.executable, "-m", "training.data.pictures", *words]
    # As the user of a laptop, whose calls are compared with what the docs ask for.
    environment = {**rehearsal.shell(), "AWS_SESSION_TOKEN": LAPTOP}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    return place


@pytest.mark.timeout(900)
def test_a_run_outlives_its_laptop_its_hosts_and_its_head_and_is_stopped(
    rehearsal: Rehearsal, pictures: str
) -> None:
    """One host at first, after one without its GPU, then two; one is taken away with notice, and
    then the head's host without."""
    # A host that goes with notice is no failure, of which none is forgiven here.
    long = ("--data", pictures, "--epochs", "900", "--max-failures", "0")
    settings = ("--run", "elastic", "--nodes", "1:2", "--yes", "--follow", *long)
    there = stage(rehearsal)
    metadata = Metadata()
    with (
        answering(metadata.answer, host=conftest.gateway(rehearsal), port=METADATA_PORT),
        hosts(rehearsal, 1) as have,
        variables(rehearsal, **{ENV_RESIZE: "2"}),
    ):
        there.have_bad_hosts(1, of=there.worker_provider)
        following = subprocess.Popen(
            **command(rehearsal, "submit", "imagenet", *settings, *QUICK),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert following.stdout is not None
        job = following.stdout.readline().strip()
        for line in following.stdout:
            if ", 1 worker on" in line:
                break
        assert "1 x m5.large" in show(rehearsal, job)["waiting"]
        # A host without its GPU has cost one task, and is gone.
        workers = [each for each in there.tasks(job) if each.get("startedBy") == job]
        # Which of those that wait gets the next host is not defined.
        (bad,) = [
            each for each in workers if each["containers"][0].get("exitCode") == exits.BAD_HOST
        ]
        assert [each["lastStatus"] for each in workers].count("RUNNING") == 1
        assert bad["containerInstanceArn"] not in there.hosts()

        # --- the laptop goes, and another host comes
        have(2)
        following.send_signal(signal.SIGINT)
        _, note = following.communicate(timeout=60)
        assert following.returncode == exits.INTERRUPTED
        assert f"trainctl logs {job} --follow" in note
        watch = Watch(rehearsal, job)
        watch.wait_for(", 2 workers on")
        grown = recorded(watch, rehearsal, "elastic", "resume", 1)[-1]
        assert grown["world_size"] == 2
        assert grown["step"] > 0
        assert there.call_keeper()["stopped"] == [], "a sweep leaves a job that runs"

        # --- a worker's host goes, with notice
        have(1)
        victim = next(
            task
            for task in show(rehearsal, job)["tasks"]
            if (task["node"], task["status"]) == (WORKER, "RUNNING")
        )
        goes = time.time() + NOTICE_S
        metadata.at = datetime.fromtimestamp(goes, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata.noticed = victim["address"]
        watch.wait_for("will be taken away", timeout_s=NOTICE_S)
        while time.time() < goes and runs_still(rehearsal, victim["runtime_id"]):
            time.sleep(0.5)
        there.take_host(victim["host"])  # whether its node has ended by then or not
        metadata.noticed = ""
        watch.wait_for(", 1 worker on", times=2)
        shrunk = recorded(watch, rehearsal, "elastic", "resume", 2)[-1]

        # --- the head's host goes, without
        (head,) = watch.containers(HEAD)
        rehearsal.engine("kill", "--signal", "KILL", head)
        watch.wait_for(", 1 worker on", times=3)
        succeeded(rehearsal, "stop", job, "--yes")
        nothing_is_left(rehearsal)
    waited = trainctl(rehearsal, "wait", job, "--json")
    assert waited.returncode == exits.TERMINATED
    assert json.loads(waited.stdout)["reason"] == "stopped by user"
    again = trainctl(rehearsal, "stop", job, "--yes")
    assert "has ended already: stopped by user" in again.stderr
    record = json.loads(read(rehearsal, runs.job_record("elastic", job)))
    assert (record["status"], record["attempts"]) == ("stopped", 2)
    result = json.loads(read(rehearsal, "runs/elastic/result.json"))
    assert (result["status"], result["resumed_from"] > 0) == ("stopped", True)
    last = runs.checkpoint_name(result["steps"])
    assert any(name.startswith(last) for name in saved(rehearsal, "elastic"))
    lines = events(rehearsal, "elastic")
    (told,) = [each for each in lines if each["type"] == "preempted"]
    before = [
        each["step"] for each in lines if each["type"] == "step" and each["time"] <= told["time"]
    ]
    assert shrunk["step"] >= max(before), "what was done before the notice was saved after it"
    config = json.loads(read(rehearsal, "runs/elastic/config.json"))
    assert epochs_of_each_picture(lines, config) > 2


@pytest.mark.night
def test_pictures_are_trained_to_the_last_epoch_though_a_host_is_lost(
    rehearsal: Rehearsal, pictures: str
) -> None:
    settings = ("--run", "whole", "--nodes", "1", "--yes", "--data", pictures, "--epochs", "60")
    job = trainctl(rehearsal, "submit", "imagenet", *settings, *QUICK).stdout.strip()
    watch = Watch(rehearsal, job)
    watch.wait_for(", 1 worker on")
    recorded(watch, rehearsal, "whole", "evaluation", 2)
    (worker,) = watch.containers(WORKER)
    rehearsal.engine("kill", "--signal", "KILL", worker)
    succeeded(rehearsal, "wait", job, timeout_s=600)
    nothing_is_left(rehearsal)
    lines = events(rehearsal, "whole")
    assert [each["type"] for each in lines].count("resume") == 1
    config = json.loads(read(rehearsal, "runs/whole/config.json"))
    assert epochs_of_each_picture(lines, config) == 60
    result = json.loads(read(rehearsal, "runs/whole/result.json"))
    assert result["status"] == "succeeded"


@pytest.mark.night
@pytest.mark.timeout(900)
def test_a_run_whose_spot_host_is_taken_resumes_on_demand(
    rehearsal: Rehearsal, pictures: str
) -> None:
    rehearsal.deploy(
        rehearsal.environment(),
        image_tag=rehearsal.state()["image_tag"],
        settings={**DEPLOYED, "pools": json.dumps({"on-demand": {}})},
    )
    settings = ("--run", "moved", "--nodes", "1", "--yes", "--data", pictures, "--epochs", "40")
    words = ("imagenet", *settings, *QUICK, "--pool", "default,on-demand")
    there, ec2 = stage(rehearsal), account_at(rehearsal.state()["endpoint"]).client("ec2")
    with hosts(rehearsal, 1) as have:
        job = trainctl(rehearsal, "submit", *words).stdout.strip()
        watch = Watch(rehearsal, job)
        watch.wait_for(", 1 worker on")
        recorded(watch, rehearsal, "moved", "evaluation", 2)
        have(0)
        (worker,) = (each for each in there.tasks(job) if each["startedBy"] == job)
        host = worker["containerInstanceArn"].rpartition("/")[2]
        ec2.terminate_instances(InstanceIds=[f"i-{host}"])
        succeeded(rehearsal, "wait", job, timeout_s=600)
    nodes = [each for each in there.tasks(job) if each["startedBy"] == job]
    pools = [pool_of(each["taskDefinitionArn"]) for each in nodes if "startedAt" in each]
    assert pools == ["default", "on-demand"]
    nothing_is_left(rehearsal)
    lines = events(rehearsal, "moved")
    assert [each["type"] for each in lines].count("resume") == 1
    config = json.loads(read(rehearsal, "runs/moved/config.json"))
    assert epochs_of_each_picture(lines, config) == 40


# --- rights ---------------------------------------------------------------------------------------
#: What roles may do that no test above makes them do, and why they may.
UNUSED = {
    "s3:AbortMultipartUpload": "a large upload that fails",
    "s3:ListMultipartUploadParts": "a large upload that is taken up again",
    "s3:ListBucketMultipartUploads": "the same",
    "s3:GetObject": "the keeper, where a job has lost files; the others use it",
    "s3:GetBucketLocation": "asked by some S3 clients before the first request",
    "logs:DescribeLogGroups": "ECS Exec, which an emulator has not",
    "logs:DescribeLogStreams": "the same",
    "ssmmessages:CreateControlChannel": "ECS Exec, which an emulator has not",
    "ssmmessages:CreateDataChannel": "the same",
    "ssmmessages:OpenControlChannel": "the same",
    "ssmmessages:OpenDataChannel": "the same",
    "autoscaling:SetDesiredCapacity": "the sweep, where a group asks for hosts that do not come",
    "autoscaling:DescribeScalingActivities": "the keeper, where no host comes",
    "autoscaling:ResumeProcesses": "the same, for a day",
    "ecs:DeleteAttributes": "the local AWS's hosts have no agent that disconnects",
    "ecs:PutAttributes": "the same",
    "ecs:StopTask": "Step Functions stops the head of an execution that is aborted",
    "ecs:DescribeTasks": "Step Functions looks at the head itself",
    "states:GetExecutionHistory": "asked after an abort, which tests/stacks/test_deploy.py has",
    "sns:Publish": "a job with --notify, which tests/stacks/test_deploy.py has",
    "secretsmanager:GetSecretValue": "the same, by a webhook: tests/stacks/test_job_keeper.py",
    "logs:CreateLogStream": "Lambda's own runtime, and ECS Exec",
    "logs:PutLogEvents": "the same",
}


#: Asked for by Arrow, to learn from the refusal which kind of server answers.
PROBED = "arn:aws:s3:::$extremelyunlikelytoexist$"


#: Whose calls together need every other right of the roles.
CALLERS = {
    "test_the_first_hour_as_it_stands_on_the_page",
    "test_a_program_of_ones_own_trains_on_two_nodes",
    "test_a_sharded_run_is_killed_resumed_and_exported_in_the_bucket",
    "test_a_run_outlives_its_laptop_its_hosts_and_its_head_and_is_stopped",
}


def all_calls(rehearsal: Rehearsal) -> list[dict[str, Any]]:
    """Of the deployment's life, with their callers."""
    lines = (rehearsal.folder / "aws" / "calls.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_every_call_was_allowed_and_those_of_a_laptop_are_documented(rehearsal: Rehearsal) -> None:
    calls = all_calls(rehearsal)
    assert not [call for call in calls if call["caller"] == "?"]
    assert [call for call in calls if not call["allowed"] and call["resource"] != PROBED] == []
    documented = (ROOT / "docs" / "security.md").read_text()
    laptop = {call["action"] for call in calls if call["caller"] == LAPTOP}
    missing = {action for action in laptop if f"`{action}`" not in documented}
    assert not missing, "docs/security.md lists what a user of trainctl must be allowed"


def test_what_is_allowed_was_called(rehearsal: Rehearsal) -> None:
    if missing := CALLERS - conftest.PASSED:
        pytest.skip(f"not all rights are used without {', '.join(sorted(missing))}")
    calls = all_calls(rehearsal)
    iam = account_at(rehearsal.state()["endpoint"]).client("iam")
    wanted = {
        "JobsRole": "head of a job",
        "NodesWorkerRole": "worker",
        "JobsKeeperRole": "keeper",
        "JobsExecutionRole": "states",
    }
    roles = {
        title: role
        for role in iam.list_roles()["Roles"]
        for name, title in wanted.items()
        if role["RoleName"].startswith(f"TrainingStack-{name}")
    }
    assert roles.keys() == {*wanted.values()}
    unused = []
    for title, role in roles.items():
        used = {call["action"] for call in calls if call["caller"] == role["Arn"]}
        assert used, f"nothing was called by the {title}"
        unused += [
            (title, action)
            for policy in iam.list_role_policies(RoleName=role["RoleName"])["PolicyNames"]
            for statement in parse(
                iam.get_role_policy(RoleName=role["RoleName"], PolicyName=policy)["PolicyDocument"]
            )
            for action in {*statement.actions} - used - UNUSED.keys()
        ]
    assert unused == []
