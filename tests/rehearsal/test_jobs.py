"""Jobs in real containers: each brings its own cluster, and takes it away however it ends.

One deployment for the whole file, with nothing running in it; commands as a user gives them. The
last test compares all calls of AWS that the others have caused with what the roles may do.
"""

import fnmatch
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rehearsal import processes
from rehearsal.cycle import Rehearsal, Steps
from rehearsal.engine import EngineError
from rehearsal.inventory import account_at
from rehearsal.local_aws import METADATA_PORT
from tests.conftest import ROOT
from training import contract

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Digits, on one thread in each process: all nodes share this machine's processors.
QUICK = ("--preset", "digits", "--env", "OMP_NUM_THREADS=1")


@pytest.fixture(scope="module")
def rehearsal() -> Iterator[Rehearsal]:
    """A deployment without a standing cluster; nothing is left afterwards."""
    try:
        found = Rehearsal.here()
    except EngineError as error:
        pytest.skip(f"no Docker Engine: {error}")
    if any(found.status()[what] for what in ("processes", "containers", "networks")):
        pytest.skip("a local deployment is up already: trainctl local down")
    try:
        found.up(Steps(5), standing=False)
        yield found
    finally:
        os.environ.pop(processes.NAME, None)
        found.down(Steps(1))


def command(rehearsal: Rehearsal, *arguments: str) -> dict[str, Any]:
    """Arguments of ``subprocess`` for a command of trainctl."""
    return {
        "args": [sys.executable, "-m", "trainctl", *arguments],
        "cwd": ROOT,
        "env": {**os.environ, **rehearsal.environment()},
        "stdin": subprocess.DEVNULL,
        "text": True,
    }


def trainctl(rehearsal: Rehearsal, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        **command(rehearsal, *arguments), capture_output=True, timeout=300, check=False
    )


def submit(rehearsal: Rehearsal, *arguments: str) -> str:
    """Submit a job, do not wait for it; return its id."""
    run = trainctl(rehearsal, "submit", *arguments)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def wait(rehearsal: Rehearsal, job: str) -> tuple[int, dict[str, Any]]:
    """Wait for a job; return the exit code and what is known of it."""
    run = trainctl(rehearsal, "wait", job, "--json")
    assert run.stdout, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return run.returncode, found


def shown(rehearsal: Rehearsal, job: str) -> dict[str, Any]:
    run = trainctl(rehearsal, "show", job, "--json")
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def said(rehearsal: Rehearsal, job: str) -> str:
    run = trainctl(rehearsal, "logs", job)
    assert run.returncode == 0, run.stderr
    return run.stdout


def read(rehearsal: Rehearsal, key: str) -> str:
    bucket = rehearsal.outputs(contract.CORE_STACK)[contract.OUT_BUCKET]
    s3 = account_at(rehearsal.state()["endpoint"]).client("s3")
    return str(s3.get_object(Bucket=bucket, Key=key)["Body"].read().decode())


def record(rehearsal: Rehearsal, run: str, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read(rehearsal, contract.job_record(run, job)))
    return found


def events(rehearsal: Rehearsal, run: str) -> list[dict[str, Any]]:
    text = read(rehearsal, f"{contract.RUNS_PREFIX}/{run}/{contract.METRICS_FILE}")
    return [json.loads(line) for line in text.splitlines()]


def eventually(what: str, condition: Callable[[], Any], *, timeout_s: float) -> Any:
    """Wait until it is true; return what it was."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.5)
    return found


def nothing_is_left(rehearsal: Rehearsal, *, within_s: float = 30) -> None:
    eventually(
        "no task of the job is left",
        lambda: not rehearsal.engine.labelled("container", rehearsal.name),
        timeout_s=within_s,
    )


def container_of(rehearsal: Rehearsal, job: str, node: str) -> str:
    """Id of the running container of a job's node, once there is one."""

    def look() -> str:
        return next(
            (
                str(task["runtime_id"])
                for task in shown(rehearsal, job)["tasks"]
                if task["node"] == node and task["status"] == "RUNNING"
            ),
            "",
        )

    return str(eventually(f"the {node} of {job} runs", look, timeout_s=60))


@contextmanager
def hosts(rehearsal: Rehearsal, number: int) -> Iterator[Callable[[int], None]]:
    """Only so many hosts for workers; the number may be changed on the way."""
    provider = rehearsal.outputs(contract.TRAINING_STACK)[contract.OUT_WORKER_PROVIDER]
    file = rehearsal.folder / "aws" / "capacity.json"

    def have(count: int) -> None:
        file.write_text(json.dumps({provider: count}))

    have(number)
    try:
        yield have
    finally:
        file.unlink()


# --- one way it should go -------------------------------------------------------------------------
def test_a_job_brings_its_cluster_trains_and_takes_it_away(rehearsal: Rehearsal) -> None:
    assert not rehearsal.engine.labelled("container", rehearsal.name)
    run = trainctl(
        rehearsal, "submit", "ddp", "--workers", "2", "--run", "r1", "--yes", "--follow", *QUICK
    )
    assert run.returncode == 0, run.stderr
    assert "at most   $" in run.stderr, "what it may cost is said before"
    assert "succeeded, after" in run.stderr
    nothing_is_left(rehearsal)
    job = run.stdout.split()[0]
    found = record(rehearsal, "r1", job)
    assert (found["status"], found["exit_code"], found["attempts"]) == ("succeeded", 0, 1)
    result = json.loads(read(rehearsal, "runs/r1/result.json"))
    assert result["accuracy"] > 0.95
    assert len({*result["hosts"]}) == 2, "a rank on each worker"
    # The same again has nothing to do, and says so.
    code, _ = wait(
        rehearsal, submit(rehearsal, "ddp", "--workers", "1", "--run", "r1", "--yes", *QUICK)
    )
    assert code == 0
    assert "already complete" in said(rehearsal, "r1")
    price = json.loads(trainctl(rehearsal, "cost", job, "--json").stdout)
    assert price["is_over"]
    assert price["node_seconds"]["worker"] > price["node_seconds"]["head"] * 0.5
    assert price["usd"] > 0
    listed = json.loads(trainctl(rehearsal, "ls", "--json").stdout)
    assert [each["run"] for each in listed] == ["r1", "r1"]


def test_two_jobs_at_a_time_share_no_node(rehearsal: Rehearsal) -> None:
    short = (*QUICK, "--epochs", "2")
    jobs = [
        submit(rehearsal, "ddp", "--workers", "1", "--run", name, "--yes", *short)
        for name in ("left", "right")
    ]
    again = trainctl(rehearsal, "submit", "ddp", "--run", "left", "--yes")
    assert again.returncode == contract.EXIT_BAD_INPUT
    assert f"is being trained already, by job {jobs[0]}" in again.stderr
    nodes: list[set[str]] = []
    for job in jobs:
        container_of(rehearsal, job, contract.WORKER)
        nodes.append({task["address"] for task in shown(rehearsal, job)["tasks"]})
    assert [len(each) for each in nodes] == [2, 2]
    assert not nodes[0] & nodes[1]
    for job in jobs:
        assert wait(rehearsal, job)[0] == 0
    results = [
        json.loads(read(rehearsal, f"runs/{name}/result.json")) for name in ("left", "right")
    ]
    assert {*results[0]["hosts"]} <= nodes[0]
    assert {*results[1]["hosts"]} <= nodes[1]
    nothing_is_left(rehearsal)


# --- one's own code -------------------------------------------------------------------------------
OWN = """
import os, sys, ray, greeting, helper

ray.init()

@ray.remote(num_cpus=1)
def there():
    import greeting, helper
    return greeting.WORDS, helper.NAME, os.environ["COLOUR"], os.environ["API_KEY"]

print("found", *ray.get(there.remote()), ray.get_runtime_context().get_node_id() != "", flush=True)
print("here", greeting.WORDS, helper.NAME, os.environ["COLOUR"], sys.argv[1:], flush=True)
sys.exit(3)
"""


def test_own_code_runs_with_its_requirements_variables_and_secrets_and_its_exit_code_counts(
    rehearsal: Rehearsal, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "helper.py").write_text('NAME = "helped"\n')
    wheel = tmp_path / "greeting-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("greeting.py", 'WORDS = "installed"\n')
        metadata = "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n"
        file.writestr("greeting-1.0.dist-info/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        file.writestr("greeting-1.0.dist-info/WHEEL", tags)
        file.writestr("greeting-1.0.dist-info/RECORD", "")
    (tmp_path / "requirements.txt").write_text(f"./{wheel.name}\n")
    manager = account_at(rehearsal.state()["endpoint"]).client("secretsmanager")
    manager.create_secret(Name="training/key", SecretString="hidden")
    options = ("--workers", "1", "--run", "own", "--env", "COLOUR=green", "--yes")
    secret = ("--secret", "API_KEY=training/key")
    job = submit(
        rehearsal, "--code", str(tmp_path), *options, *secret, "--", "python", "mine.py", "--x"
    )
    code, found = wait(rehearsal, job)
    text = said(rehearsal, job)
    assert (code, found["reason"]) == (3, "failed: user code exit 3"), text
    assert "found installed helped green hidden True" in text
    assert "here installed helped green ['--x']" in text
    assert "hidden" not in json.dumps(found), "a secret is in no record"
    assert record(rehearsal, "own", job)["exit_code"] == 3
    nothing_is_left(rehearsal)


def test_a_deadline_and_a_lack_of_hosts_end_a_job_and_say_so(
    rehearsal: Rehearsal, tmp_path: Path
) -> None:
    (tmp_path / "sleep.py").write_text("import time\ntime.sleep(600)\n")
    own = ("--code", str(tmp_path), "--workers", "1", "--yes")
    sleep = ("--", "python", "sleep.py")
    with hosts(rehearsal, 0):
        late = submit(rehearsal, *own, "--run", "late", "--max-hours", "0.01667", *sleep)
        none = submit(rehearsal, *own, "--run", "none", "--wait-minutes", "0.5", *sleep)
        waits = eventually(
            "it says what it waits for",
            lambda: "1 x m5.large" in shown(rehearsal, none)["waiting"],
            timeout_s=40,
        )
        assert waits
        code, found = wait(rehearsal, none)
        assert (code, found["reason"]) == (contract.EXIT_NO_CAPACITY, "no capacity")
        code, found = wait(rehearsal, late)
        assert (code, found["reason"]) == (contract.EXIT_DEADLINE, "deadline")
        lasted = datetime.fromisoformat(found["ended"]) - datetime.fromisoformat(found["began"])
        assert timedelta(seconds=60) <= lasted <= timedelta(seconds=75)
    assert record(rehearsal, "late", late)["status"] == "deadline"
    nothing_is_left(rehearsal)


# --- what goes wrong ------------------------------------------------------------------------------
def test_neither_the_laptop_nor_the_first_head_is_needed_to_the_end(rehearsal: Rehearsal) -> None:
    settings = ("--run", "lost", "--workers", "1", "--yes", *QUICK, "--epochs", "6")
    laptop = subprocess.Popen(
        **command(rehearsal, "submit", "ddp", *settings, "--follow"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert laptop.stdout is not None
    job = laptop.stdout.readline().strip()
    laptop.kill()
    laptop.wait()
    laptop.stdout.close()

    def is_saved() -> bool:
        lines = said(rehearsal, job)
        return "epoch 2: train loss" in lines

    eventually("two epochs are done", is_saved, timeout_s=120)
    rehearsal.engine("kill", "--signal", "KILL", container_of(rehearsal, job, contract.JOB))
    code, found = wait(rehearsal, job)
    assert code == 0, said(rehearsal, job)
    assert record(rehearsal, "lost", job)["attempts"] == 2
    result = json.loads(read(rehearsal, "runs/lost/result.json"))
    steps = result["steps"]
    assert result["resumed_from"] in (steps // 6, steps // 3, steps // 2)
    assert found["exit_code"] == 0
    nothing_is_left(rehearsal)


def test_ctrl_c_detaches_and_stop_ends_it_saved(rehearsal: Rehearsal) -> None:
    settings = ("--run", "halted", "--workers", "1", "--yes", *QUICK, "--epochs", "50")
    following = subprocess.Popen(
        **command(rehearsal, "submit", "ddp", *settings, "--follow"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert following.stdout is not None
    job = following.stdout.readline().strip()
    for line in following.stdout:
        if "epoch 1: train loss" in line:
            break
    following.send_signal(signal.SIGINT)
    _, note = following.communicate(timeout=30)
    assert following.returncode == contract.EXIT_INTERRUPTED
    assert f"trainctl logs {job} --follow" in note
    assert shown(rehearsal, job)["status"] == "running"

    began = time.monotonic()
    run = trainctl(rehearsal, "stop", job, "--yes")
    assert run.returncode == 0, run.stderr
    nothing_is_left(rehearsal, within_s=max(1, 30 - (time.monotonic() - began)))
    code, found = wait(rehearsal, job)
    assert (code, found["reason"]) == (contract.EXIT_TERMINATED, "stopped by user")
    result = json.loads(read(rehearsal, "runs/halted/result.json"))
    assert result["status"] == "stopped"
    saved = contract.checkpoint_name(result["steps"])
    assert "step" in read(rehearsal, f"runs/halted/checkpoints/{saved}/manifest.json")
    again = trainctl(rehearsal, "stop", job, "--yes")
    assert "has ended already: stopped by user" in again.stderr


def test_what_escapes_is_swept(rehearsal: Rehearsal) -> None:
    """An orphan: a job's task, long after its deadline, with no execution that looks after it."""
    outputs = rehearsal.outputs(contract.TRAINING_STACK)
    account = account_at(rehearsal.state()["endpoint"])
    ecs = account.client("ecs")
    variables = {
        contract.ENV_JOB: "orphan-1",
        contract.ENV_DEADLINE: str(int(time.time()) - 86_400),
        contract.ENV_HEAD_ADDRESS: "192.0.2.1",
        contract.ENV_HEAD_WAIT: "600",
    }
    override = {
        "name": contract.CONTAINER,
        "environment": [{"name": name, "value": value} for name, value in variables.items()],
    }
    which = {"cluster": outputs[contract.OUT_CLUSTER]}
    (orphan,) = ecs.run_task(
        **which,
        taskDefinition=outputs[contract.OUT_WORKER_TASK],
        overrides={"containerOverrides": [override]},
        group=f"{contract.JOB_GROUP}orphan-1",
        startedBy="orphan-1",
    )["tasks"]
    (other,) = ecs.run_task(
        **which,
        taskDefinition=outputs[contract.OUT_WORKER_TASK],
        overrides={"containerOverrides": [override]},
        group="family:somebody-elses",
    )["tasks"]
    assert eventually(
        "both run",
        lambda: len(rehearsal.engine.labelled("container", rehearsal.name)) == 2,
        timeout_s=30,
    )
    answer = account.client("lambda").invoke(
        FunctionName=outputs[contract.OUT_KEEPER], Payload=b"{}"
    )
    swept = json.loads(answer["Payload"].read())
    assert swept == {"stopped": [orphan["taskArn"]]}

    def status_of(task: dict[str, Any]) -> str:
        (found,) = ecs.describe_tasks(**which, tasks=[task["taskArn"]])["tasks"]
        return str(found["lastStatus"])

    eventually("the orphan has ended", lambda: status_of(orphan) == "STOPPED", timeout_s=30)
    assert status_of(other) == "RUNNING"
    ecs.stop_task(**which, task=other["taskArn"])
    nothing_is_left(rehearsal)


# --- hosts that come and go -----------------------------------------------------------------------
def test_a_run_starts_with_the_hosts_there_are_and_grows_when_there_are_more(
    rehearsal: Rehearsal,
) -> None:
    settings = ("--run", "grows", "--workers", "1:2", "--yes", *QUICK, "--epochs", "30")
    with hosts(rehearsal, 1) as have:
        job = submit(rehearsal, "ddp", *settings)
        eventually(
            "it trains on one worker",
            lambda: ", 1 workers on" in said(rehearsal, job),
            timeout_s=120,
        )
        assert "1 x m5.large" in shown(rehearsal, job)["waiting"]
        eventually(
            "it has saved", lambda: "epoch 1: train loss" in said(rehearsal, job), timeout_s=60
        )
        have(2)
        eventually(
            "it trains on two workers",
            lambda: ", 2 workers on" in said(rehearsal, job),
            timeout_s=150,
        )
        assert trainctl(rehearsal, "stop", job, "--yes").returncode == 0
    (resume, *_) = [each for each in events(rehearsal, "grows") if each["type"] == "resume"]
    assert resume["world_size"] == 2
    assert resume["step"] > 0
    nothing_is_left(rehearsal)


class Metadata(http.server.BaseHTTPRequestHandler):
    """Instances' metadata, version 2; one of them has a notice."""

    noticed: str = ""
    at: str = ""

    def do_PUT(self) -> None:
        self._answer(200, "a-token")

    def do_GET(self) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") != "a-token":
            self._answer(401, "")
        elif self.client_address[0] == self.noticed:
            self._answer(200, json.dumps({"action": "terminate", "time": self.at}))
        else:
            self._answer(404, "")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def test_a_spot_notice_costs_a_run_its_host_and_nothing_it_has_saved(rehearsal: Rehearsal) -> None:
    gateway = rehearsal.state()["endpoint"].partition("//")[2].partition(":")[0]
    server = http.server.ThreadingHTTPServer((gateway, METADATA_PORT), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        settings = ("--run", "spot", "--workers", "2", "--yes", *QUICK, "--epochs", "40")
        job = submit(rehearsal, "ddp", *settings)
        eventually(
            "it trains on two workers",
            lambda: "epoch 1: train loss" in said(rehearsal, job),
            timeout_s=150,
        )
        victim = next(
            task for task in shown(rehearsal, job)["tasks"] if task["node"] == contract.WORKER
        )
        Metadata.at = (datetime.now(tz=UTC) + timedelta(seconds=25)).strftime("%Y-%m-%dT%H:%M:%SZ")
        Metadata.noticed = victim["address"]
        eventually(
            "training is told",
            lambda: "will be taken away" in said(rehearsal, job),
            timeout_s=25,
        )
        time.sleep(10)
        rehearsal.engine("kill", "--signal", "KILL", victim["runtime_id"])
        Metadata.noticed = ""

        def has_resumed() -> bool:
            return said(rehearsal, job).count(", 2 workers on") == 2

        eventually("it goes on with another host", has_resumed, timeout_s=150)
        assert trainctl(rehearsal, "stop", job, "--yes").returncode == 0
    finally:
        server.shutdown()
        server.server_close()
    result = json.loads(read(rehearsal, "runs/spot/result.json"))
    assert result["preempted"] == 1
    text = said(rehearsal, job)
    assert "Worker group encountered a failure" not in text
    (resume,) = [each for each in events(rehearsal, "spot") if each["type"] == "resume"]
    told = next(each for each in events(rehearsal, "spot") if each["type"] == "preempted")
    before = [
        each["step"]
        for each in events(rehearsal, "spot")
        if each["type"] == "step" and each["time"] <= told["time"]
    ]
    assert resume["step"] >= max(before), "what was done before the notice was saved after it"
    nothing_is_left(rehearsal)


# --- rights ---------------------------------------------------------------------------------------
#: What roles may do that no test above makes them do, and why they may.
UNUSED = {
    "s3:AbortMultipartUpload": "a large upload that fails",
    "s3:ListMultipartUploadParts": "a large upload that is taken up again",
    "s3:ListBucketMultipartUploads": "the same",
    "s3:GetBucketLocation": "asked by some S3 clients before the first request",
    "ssmmessages:CreateControlChannel": "ECS Exec, which an emulator has not",
    "ssmmessages:CreateDataChannel": "the same",
    "ssmmessages:OpenControlChannel": "the same",
    "ssmmessages:OpenDataChannel": "the same",
    "autoscaling:TerminateInstanceInAutoScalingGroup": "there are no hosts in the emulator",
    "ecs:TagResource": "asked by ECS itself, for a task that is started with tags",
    "iam:PassRole": "asked by ECS itself, for a task that is started",
    "ecs:StopTask": "Step Functions stops the head of an execution that is aborted",
    "ecs:DescribeTasks": "Step Functions looks at the head itself",
    "events:DescribeRule": "Step Functions' own rule",
    "events:PutRule": "Step Functions' own rule",
    "events:PutTargets": "Step Functions' own rule",
    "logs:CreateLogStream": "Lambda's own runtime",
    "logs:PutLogEvents": "Lambda's own runtime",
}


def allowed(statements: list[dict[str, Any]], call: dict[str, str]) -> bool:
    """Whether one of the statements allows a call."""

    def listed(value: Any) -> list[str]:
        return value if isinstance(value, list) else [value]

    for statement in statements:
        if call["action"] not in listed(statement["Action"]):
            continue
        cluster = statement.get("Condition", {}).get("ArnEquals", {}).get("ecs:cluster")
        if cluster and call["cluster"] not in (cluster, cluster.rpartition("/")[2]):
            continue
        resources = listed(statement["Resource"])
        if any(fnmatch.fnmatchcase(call["resource"], each) for each in resources):
            return True
        if "*" in resources:
            return True
    return False


def test_every_call_was_allowed_and_what_is_allowed_was_called(rehearsal: Rehearsal) -> None:
    lines = (rehearsal.folder / "aws" / "calls.jsonl").read_text().splitlines()
    calls = [json.loads(line) for line in lines]
    assert not [call for call in calls if call["caller"] == "?"]
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
    refused, unused = [], []
    for title, role in roles.items():
        statements = [
            statement
            for policy in iam.list_role_policies(RoleName=role["RoleName"])["PolicyNames"]
            for statement in iam.get_role_policy(RoleName=role["RoleName"], PolicyName=policy)[
                "PolicyDocument"
            ]["Statement"]
        ]
        caller = "states" if title == "states" else role["Arn"]
        made = [call for call in calls if call["caller"] == caller]
        assert made, f"nothing was called by the {title}"
        refused += [(title, call) for call in made if not allowed(statements, call)]
        used = {call["action"] for call in made}
        granted = {
            action
            for statement in statements
            for action in (
                statement["Action"]
                if isinstance(statement["Action"], list)
                else [statement["Action"]]
            )
        }
        unused += [(title, action) for action in granted - used if action not in UNUSED]
    assert refused == []
    assert unused == []
