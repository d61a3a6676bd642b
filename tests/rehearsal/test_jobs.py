"""Jobs in real containers: each brings its own cluster, and takes it away however it ends.

Commands as a user gives them. The local AWS refuses what a role may not do; the last test looks at
all calls that the others, those of the standing cluster too, have caused.
"""

import http.server
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import pytest

from contract import exits, runs
from contract import outputs as stack_outputs
from contract.job import DEFAULT_ATTEMPTS, JOB_GROUP, STOPPED_BY_USER
from contract.nodes import (
    CONTAINER,
    ENV_DEADLINE,
    ENV_HEAD_ADDRESS,
    ENV_HEAD_WAIT,
    ENV_JOB,
    HEAD,
    WORKER,
    Range,
)
from rehearsal.cycle import Rehearsal
from rehearsal.inventory import account_at
from rehearsal.local_aws import METADATA_PORT
from rehearsal.policies import parse
from rehearsal.watch import Watch
from tests.conftest import ROOT, write_wheel
from tests.rehearsal.conftest import LAPTOP, command, trainctl
from tests.stacks.orders import ABORTED, BAD_HOST, KILLED, Attempt, Order, Stage

pytestmark = [pytest.mark.slow, pytest.mark.engine]

#: An order with what a head can meet.
SEED = 853
#: Digits, on one thread in each process: all nodes share this machine's processors.
QUICK = ("--preset", "digits", "--env", "OMP_NUM_THREADS=1")


@pytest.fixture(scope="module")
def rehearsal(deployment: Rehearsal) -> Rehearsal:
    """A deployment without a standing cluster, nor the hosts of one."""
    assert not deployment.engine.labelled("container", deployment.name)
    Orders.of(deployment).clean_up()
    return deployment


@pytest.fixture(autouse=True)
def logs_of_a_failure(request: pytest.FixtureRequest, rehearsal: Rehearsal) -> Iterator[None]:
    """Print what the newest jobs have said when a test fails: it goes with the deployment."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        for job in json.loads(trainctl(rehearsal, "ls", "--limit", "2", "--json").stdout):
            print(f"--- {job}\n{said(rehearsal, job['id'])}")


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
    bucket = rehearsal.outputs(stack_outputs.CORE_STACK)[stack_outputs.BUCKET]
    s3 = account_at(rehearsal.state()["endpoint"]).client("s3")
    return str(s3.get_object(Bucket=bucket, Key=key)["Body"].read().decode())


def record(rehearsal: Rehearsal, run: str, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read(rehearsal, runs.job_record(run, job)))
    return found


def events(rehearsal: Rehearsal, run: str) -> list[dict[str, Any]]:
    text = read(rehearsal, f"{runs.RUNS_PREFIX}/{run}/{runs.METRICS_FILE}")
    return [json.loads(line) for line in text.splitlines()]


def saved(rehearsal: Rehearsal, run: str) -> set[str]:
    """Names of a run's checkpoints that are whole."""
    bucket = rehearsal.outputs(stack_outputs.CORE_STACK)[stack_outputs.BUCKET]
    prefix = f"{runs.RUNS_PREFIX}/{run}/{runs.CHECKPOINTS_DIR}/"
    found = account_at(rehearsal.state()["endpoint"]).items(
        "s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=prefix
    )
    return {each["Key"].split("/")[-2] for each in found if each["Key"].endswith("manifest.json")}


def eventually(what: str, condition: Callable[[], Any], *, timeout_s: float) -> Any:
    """Wait until it is true; return what it was.

    Conditions ask AWS themselves: a command takes nearly a second of a processor, which a job here
    needs itself.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.5)
    return found


def nothing_is_left(rehearsal: Rehearsal, *, retried: bool = False) -> None:
    """``retried``: a host of an attempt before may wait for the sweep, which comes at once here."""
    eventually(
        "no task of the job is left",
        lambda: not rehearsal.engine.labelled("container", rehearsal.name),
        timeout_s=60,
    )
    if retried:
        stage = Orders.of(rehearsal)
        stage.clean_up()
        eventually("no host of the job is left", lambda: not stage.hosts(), timeout_s=30)


class Orders(Stage):
    """Jobs whose heads are containers, without workers, that end by no command of theirs."""

    command = ("sleep", "600")
    nodes = Range(0, 0)
    patience_s = 180

    @classmethod
    def of(cls, rehearsal: Rehearsal) -> Self:
        core, training = (
            rehearsal.outputs(each)
            for each in (stack_outputs.CORE_STACK, stack_outputs.TRAINING_STACK)
        )
        account = account_at(rehearsal.state()["endpoint"])
        return cls(rehearsal.folder / "aws", core, training, account.client)

    def wait_until_it_runs(self, task: str) -> None:
        self.eventually(f"{task} runs", lambda: self.is_running(task))


def container_of(rehearsal: Rehearsal, job: str, node: str) -> str:
    """Id of the running container of a job's node, once there is one."""

    watch = Watch(rehearsal, job)

    def look() -> list[str]:
        watch.has_ended()
        return watch.containers(node, 1)

    (container,) = eventually(f"the {node} of {job} runs", look, timeout_s=180)
    return str(container)


def runs_still(rehearsal: Rehearsal, container: str) -> bool:
    found = rehearsal.engine.inspect("container", container)
    return found is not None and bool(found["State"]["Running"])


def printed(watch: Watch, words: str) -> int:
    """How many lines of a job's log have ``words`` by now."""
    watch.has_ended()
    return sum(words in line.text for line in watch.lines())


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


# --- several at a time ----------------------------------------------------------------------------
def slow_down(rehearsal: Rehearsal, container: str) -> str:
    """Limit what a container receives to 300 Mbit/s; return its host name."""
    link = rehearsal.engine("exec", container, "cat", "/sys/class/net/eth0/iflink").strip()
    (device,) = (
        place.parent.name
        for place in Path("/sys/class/net").glob("*/ifindex")
        if place.read_text().strip() == link
    )
    limit = ("root", "tbf", "rate", "300mbit", "burst", "256kb", "latency", "50ms")
    subprocess.run(("tc", "qdisc", "add", "dev", device, *limit), check=True)
    return rehearsal.engine("exec", container, "hostname").strip()


@pytest.mark.timeout(900)
def test_a_study_and_other_jobs_share_no_node_and_a_gate_stops_one_on_a_slow_network(
    rehearsal: Rehearsal, tmp_path: Path
) -> None:
    """Two jobs at a time: the study takes the second one, which is of its series, as its own.

    Before that one the network is measured, and before a third, of which a node is slowed down.
    """
    assert not rehearsal.engine.labelled("container", rehearsal.name)
    series = ("--nodes", "1,2", "--name", "size", "--steps", "60", "--output", str(tmp_path))
    studying = subprocess.Popen(
        **command(rehearsal, "study", "ddp", *series, *QUICK, "--yes", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert studying.stderr is not None
    left = next(line.split()[-1] for line in studying.stderr if line.startswith("size-1: job "))
    gated = ("--nodes", "2", "--before", "bandwidth", "--yes", *QUICK, "--max-steps", "60")
    # Followed from the beginning, as `make rehearse` follows one alone.
    following = subprocess.Popen(
        **command(rehearsal, "submit", "ddp", "--run", "size-2", *gated, "--follow"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert following.stdout is not None
    right = following.stdout.readline().strip()
    container_of(rehearsal, right, HEAD)  # an execution shows some time after its start
    again = trainctl(rehearsal, "submit", "ddp", "--run", "size-2", "--yes")
    assert again.returncode == exits.BAD_INPUT
    assert f"is being trained already, by job {right}" in again.stderr
    nodes: list[set[str]] = []
    for job in (left, right):
        container_of(rehearsal, job, WORKER)
        nodes.append({task["address"] for task in shown(rehearsal, job)["tasks"]})
    assert [len(each) for each in nodes] == [2, 3]
    assert not nodes[0] & nodes[1]

    log, notes = following.communicate(timeout=400)
    assert following.returncode == 0, notes
    assert "at most   $" in notes, "what it may cost is said before"
    assert "succeeded, after" in notes
    assert log.index("before the job's command: python -m training.launch bandwidth") < log.index(
        "epoch 2: train loss"
    )
    slow = submit(rehearsal, "ddp", "--run", "slow", *gated)
    watch = Watch(rehearsal, slow)

    def look() -> list[str]:
        watch.has_ended()
        found = watch.containers(WORKER, 2)
        return found if len(found) == 2 else []

    slowed = slow_down(rehearsal, eventually("its nodes run", look, timeout_s=180)[0])
    code, found = wait(rehearsal, slow)
    text = said(rehearsal, slow)
    assert (code, found["reason"]) == (exits.FAILED, "failed: user code exit 1"), text
    assert "below the floor of 0.06562 GB/s; the link from host" in text
    assert f"to host {slowed} is slow" in text
    assert "train loss" not in text
    printed_json, notes = studying.communicate(timeout=400)
    assert studying.returncode == 0, notes
    assert f"size-2: job {right}" in notes
    assert json.loads(printed_json) == json.loads((tmp_path / "study.json").read_text())
    (figures,) = json.loads(printed_json)
    assert [(each["nodes"], each["workers"]) for each in figures["points"]] == [(1, 1), (2, 2)]
    assert all(each["efficiency"] > 0 and each["usd_per_epoch"] > 0 for each in figures["points"])
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    table = trainctl(rehearsal, "study", "ddp", *series, *QUICK)
    assert table.returncode == 0, table.stderr
    assert "efficiency" in table.stdout.splitlines()[0]
    assert len(table.stdout.splitlines()) > 3

    nothing_is_left(rehearsal)
    for job, run, own in ((left, "size-1", nodes[0]), (right, "size-2", nodes[1])):
        found = record(rehearsal, run, job)
        assert (found["status"], found["exit_code"], found["attempts"]) == ("succeeded", 0, 1)
        assert {*json.loads(read(rehearsal, f"runs/{run}/result.json"))["hosts"]} <= own
        seconds = json.loads(trainctl(rehearsal, "cost", job, "--json").stdout)["node_seconds"]
        assert seconds["head"] > seconds["worker"] / (len(own) - 1) > 10
    listed = json.loads(trainctl(rehearsal, "ls", "--json").stdout)
    assert {each["run"] for each in listed} == {"size-1", "size-2", "slow"}


# --- your own code --------------------------------------------------------------------------------
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


def code_folder(folder: Path) -> Path:
    """A script, a module beside it, and a package that it requires."""
    folder.mkdir()
    (folder / "mine.py").write_text(OWN)
    (folder / "helper.py").write_text('NAME = "helped"\n')
    wheel = write_wheel(folder)
    (folder / "requirements.txt").write_text(f"./{wheel.name}\n")
    return folder


def test_own_code_a_deadline_and_a_lack_of_hosts_each_end_a_job_in_their_way(
    rehearsal: Rehearsal, tmp_path: Path
) -> None:
    """Three jobs at once, one host for workers."""
    manager = account_at(rehearsal.state()["endpoint"]).client("secretsmanager")
    manager.create_secret(Name="training/key", SecretString="hidden")
    # The same requirements in both: the host keeps what the first of them has installed.
    sleeping = shutil.copytree(code_folder(tmp_path / "own"), tmp_path / "sleeping")
    (sleeping / "sleep.py").write_text("import time\ntime.sleep(600)\n")
    sleep = ("--code", str(sleeping), "--yes")
    after = ("--", "python", "sleep.py")
    with hosts(rehearsal, 1):
        given = ("--env", "COLOUR=green", "--secret", "API_KEY=training/key")
        own = ("--code", str(tmp_path / "own"), "--run", "own", "--nodes", "1")
        mine = submit(rehearsal, *own, *given, "--yes", "--", "python", "mine.py", "--x")
        container_of(rehearsal, mine, WORKER)
        limits = ("--run", "late", "--nodes", "1", "--max-hours", "0.025")
        late = submit(rehearsal, *sleep, *limits, *after)
        # Two cannot be had, and so it does not matter when the one is free.
        limits = ("--run", "none", "--nodes", "2", "--wait-minutes", "1")
        none = submit(rehearsal, *sleep, *limits, *after)
        container_of(rehearsal, none, HEAD)
        eventually(
            "it says what it waits for",
            lambda: "x m5.large" in shown(rehearsal, none)["waiting"],
            timeout_s=120,
        )
        code, found = wait(rehearsal, mine)
        text = said(rehearsal, mine)
        assert (code, found["reason"]) == (3, "failed: user code exit 3"), text
        assert "found installed helped green hidden True" in text
        assert "here installed helped green ['--x']" in text
        assert "requirements.txt: installed in" in text
        assert "requirements.txt: installed on this host already" in said(rehearsal, late)
        assert "hidden" not in json.dumps(found), "a secret is in no record"
        assert record(rehearsal, "own", mine)["exit_code"] == 3

        code, found = wait(rehearsal, none)
        assert (code, found["reason"]) == (exits.NO_CAPACITY, "no capacity")
        code, found = wait(rehearsal, late)
        assert (code, found["reason"]) == (exits.DEADLINE, "deadline")
        lasted = datetime.fromisoformat(found["ended"]) - datetime.fromisoformat(found["began"])
        assert timedelta(seconds=90) <= lasted <= timedelta(seconds=130)
    assert record(rehearsal, "late", late)["status"] == "deadline"
    nothing_is_left(rehearsal)


# --- what goes wrong ------------------------------------------------------------------------------
def test_neither_the_laptop_nor_the_first_head_is_needed_to_the_end(rehearsal: Rehearsal) -> None:
    settings = ("--run", "lost", "--nodes", "1", "--yes", *QUICK, "--epochs", "3")
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
    eventually("an epoch is saved", lambda: saved(rehearsal, "lost"), timeout_s=300)
    rehearsal.engine("kill", "--signal", "KILL", container_of(rehearsal, job, HEAD))
    code, found = wait(rehearsal, job)
    assert (code, found["exit_code"]) == (0, 0), said(rehearsal, job)
    assert record(rehearsal, "lost", job)["attempts"] == 2
    result = json.loads(read(rehearsal, "runs/lost/result.json"))
    assert result["resumed_from"] in (result["steps"] // 3, result["steps"] * 2 // 3)
    nothing_is_left(rehearsal, retried=True)


def test_what_escapes_is_swept(rehearsal: Rehearsal) -> None:
    """A job's task, long after its deadline, with no execution that looks after it, and a task of
    nothing that there is."""
    outputs = rehearsal.outputs(stack_outputs.TRAINING_STACK)
    account = account_at(rehearsal.state()["endpoint"])
    ecs = account.client("ecs")
    variables = {
        ENV_JOB: "orphan-1",
        ENV_DEADLINE: str(int(time.time()) - 86_400),
        ENV_HEAD_ADDRESS: "192.0.2.1",
        ENV_HEAD_WAIT: "600",
    }
    override = {
        "name": CONTAINER,
        "environment": [{"name": name, "value": value} for name, value in variables.items()],
    }
    which = {"cluster": outputs[stack_outputs.CLUSTER]}
    (orphan,) = ecs.run_task(
        **which,
        taskDefinition=outputs[stack_outputs.WORKER_TASK],
        overrides={"containerOverrides": [override]},
        group=f"{JOB_GROUP}orphan-1",
        startedBy="orphan-1",
    )["tasks"]
    # Of the deployment's definitions, and of no job or service.
    (stray,) = ecs.run_task(
        **which,
        taskDefinition=outputs[stack_outputs.WORKER_TASK],
        overrides={"containerOverrides": [override]},
        group="family:somebody-elses",
    )["tasks"]
    assert eventually(
        "both run",
        lambda: len(rehearsal.engine.labelled("container", rehearsal.name)) == 2,
        timeout_s=60,
    )
    stopped: list[str] = []

    def sweep() -> bool:
        """Once does not do: what has just been started may not be in the list of tasks yet."""
        answer = account.client("lambda").invoke(
            FunctionName=outputs[stack_outputs.KEEPER], Payload=b"{}"
        )
        swept = json.loads(answer["Payload"].read())
        assert swept["released"] == []
        stopped.extend(swept["stopped"])
        return len(stopped) >= 2

    eventually("both are swept", sweep, timeout_s=60)
    assert sorted(stopped) == sorted([orphan["taskArn"], stray["taskArn"]])

    def status_of(task: dict[str, Any]) -> str:
        (found,) = ecs.describe_tasks(**which, tasks=[task["taskArn"]])["tasks"]
        return str(found["lastStatus"])

    eventually(
        "both have ended",
        lambda: {status_of(orphan), status_of(stray)} == {"STOPPED"},
        timeout_s=60,
    )
    nothing_is_left(rehearsal)


def test_heads_on_bad_hosts_lost_hosts_lost_answers_and_an_abort(rehearsal: Rehearsal) -> None:
    """The order of a seed, behind a host without the GPU that it should have."""
    stage, seeded = Orders.of(rehearsal), Order.from_seed(SEED, most=DEFAULT_ATTEMPTS - 1)
    assert [each.end for each in seeded.attempts] == [KILLED, ABORTED]
    assert [each.faults for each in seeded.attempts] == [("lost",), ("throttled",)]
    bad = Attempt(faults=(), end=BAD_HOST)
    order = replace(seeded, attempts=(bad, *seeded.attempts))
    stage.have_bad_hosts(1, of=stage.head_provider)
    stage.play(order)
    nothing_is_left(rehearsal, retried=True)
    (found,) = stage.records(order.job)
    assert (found["status"], found["attempts"]) == ("stopped", 3)
    assert found["reason"] == STOPPED_BY_USER
    first, *others = stage.tasks(order.job)
    assert (first["containers"][0]["exitCode"], first["stopCode"]) == (
        exits.BAD_HOST,
        "EssentialContainerExited",
    )
    assert len(others) == 3, "one of them was started by a request whose answer was lost"
    assert first["containerInstanceArn"] not in {each["containerInstanceArn"] for each in others}


# --- hosts that come and go -----------------------------------------------------------------------
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


@contextmanager
def metadata_of_instances(rehearsal: Rehearsal) -> Iterator[None]:
    gateway = rehearsal.state()["endpoint"].partition("//")[2].partition(":")[0]
    server = http.server.ThreadingHTTPServer((gateway, METADATA_PORT), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        Metadata.noticed = ""
        server.shutdown()
        server.server_close()


def test_a_run_grows_with_its_hosts_and_outlives_them_and_is_stopped(rehearsal: Rehearsal) -> None:
    """One host at first, after one without its GPU, then two, then one of them is taken away; a
    user follows it."""
    # A host that goes with notice is no failure, of which none is forgiven here.
    long = ("--epochs", "90", "--max-failures", "0")
    settings = ("--run", "elastic", "--nodes", "1:2", "--yes", *QUICK, *long)
    stage = Orders.of(rehearsal)
    with metadata_of_instances(rehearsal), hosts(rehearsal, 1) as have:
        stage.have_bad_hosts(1, of=stage.worker_provider)
        following = subprocess.Popen(
            **command(rehearsal, "submit", "ddp", *settings, "--follow"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert following.stdout is not None
        job = following.stdout.readline().strip()
        for line in following.stdout:
            if ", 1 workers on" in line:
                break
        assert "1 x m5.large" in shown(rehearsal, job)["waiting"]
        # A host without its GPU has cost one task, and is gone.
        bad, *others = [each for each in stage.tasks(job) if each.get("startedBy") == job]
        assert bad["containers"][0]["exitCode"] == exits.BAD_HOST
        # Which of those that wait gets the next host is not defined.
        assert [each["lastStatus"] for each in others].count("RUNNING") == 1
        assert bad["containerInstanceArn"] not in stage.hosts()
        have(2)
        following.send_signal(signal.SIGINT)
        _, note = following.communicate(timeout=60)
        assert following.returncode == exits.INTERRUPTED
        assert f"trainctl logs {job} --follow" in note
        watch = Watch(rehearsal, job)
        eventually(
            "it trains on two workers", lambda: printed(watch, ", 2 workers on"), timeout_s=300
        )
        # The record in S3 is written anew after each epoch.
        (grown,) = eventually(
            "its growth is recorded",
            lambda: [each for each in events(rehearsal, "elastic") if each["type"] == "resume"],
            timeout_s=120,
        )
        assert grown["world_size"] == 2
        assert grown["step"] > 0

        # Two minutes are long for a test: the notice says one.
        have(1)
        workers = [
            task
            for task in shown(rehearsal, job)["tasks"]
            if (task["node"], task["status"]) == (WORKER, "RUNNING")
        ]
        victim = workers[0]
        goes = time.time() + 60
        Metadata.at = datetime.fromtimestamp(goes, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        Metadata.noticed = victim["address"]
        eventually("training is told", lambda: printed(watch, "will be taken away"), timeout_s=45)
        while time.time() < goes and runs_still(rehearsal, victim["runtime_id"]):
            time.sleep(0.5)
        stage.take_host(victim["host"])  # whether its node has ended by then or not
        Metadata.noticed = ""
        eventually(
            "it goes on with what is left",
            lambda: printed(watch, ", 1 workers on") == 2,
            timeout_s=300,
        )
        run = trainctl(rehearsal, "stop", job, "--yes")
        assert run.returncode == 0, run.stderr
        nothing_is_left(rehearsal)
    code, found = wait(rehearsal, job)
    assert (code, found["reason"]) == (exits.TERMINATED, "stopped by user")
    again = trainctl(rehearsal, "stop", job, "--yes")
    assert "has ended already: stopped by user" in again.stderr
    result = json.loads(read(rehearsal, "runs/elastic/result.json"))
    assert (result["status"], result["preempted"]) == ("stopped", 1)
    assert runs.checkpoint_name(result["steps"]) in saved(rehearsal, "elastic")
    lines = events(rehearsal, "elastic")
    told = next(each for each in lines if each["type"] == "preempted")
    before = [
        each["step"] for each in lines if each["type"] == "step" and each["time"] <= told["time"]
    ]
    resumed = [each["step"] for each in lines if each["type"] == "resume"]
    assert resumed[-1] >= max(before), "what was done before the notice was saved after it"


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
    "ecs:DeleteAttributes": "the local AWS's hosts have no agent that disconnects",
    "ecs:PutAttributes": "the same",
    "ecs:StopTask": "Step Functions stops the head of an execution that is aborted",
    "ecs:DescribeTasks": "Step Functions looks at the head itself",
    "states:GetExecutionHistory": "asked after an abort, which tests/stacks/test_deploy.py has",
    "logs:CreateLogStream": "Lambda's own runtime, and ECS Exec",
    "logs:PutLogEvents": "the same",
}


#: Asked for by Arrow, to learn from the refusal which kind of server answers.
PROBED = "arn:aws:s3:::$extremelyunlikelytoexist$"


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
    assert [call for call in calls if not call["allowed"] and call["resource"] != PROBED] == []
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
    documented = (ROOT / "docs" / "security.md").read_text()
    laptop = {call["action"] for call in calls if call["caller"] == LAPTOP}
    assert "states:StartExecution" in laptop
    missing = {action for action in laptop if f"`{action}`" not in documented}
    assert not missing, "docs/security.md lists what a user of trainctl must be allowed"
