"""The head of a job reads what it is told, tells Ray's autoscaler the right things and refuses what
cannot be right. What it does with real Ray in real containers: tests/rehearsal."""

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from containers import demand, job, job_config, metadata, node
from containers.autoscaler import WorkerSettings
from containers.metadata import OwnTask
from containers.node import NodeConfig
from containers.program import bucket as store
from containers.program import cache, code, head
from containers.program.code import RAY_VARIABLE, Prepared
from containers.program.files import Mirror
from containers.program.process import Program
from contract import exits, nodes, times
from contract.errors import InputError
from contract.files import MANIFEST, Manifest
from contract.job import JobSpec, Placement
from contract.nodes import ClusterSize
from contract.ranges import Range
from tests.conftest import ROOT
from tests.containers.program.s3_in_memory import S3

TASK = OwnTask(arn="arn:aws:ecs:us-east-1:0:task/c/1", cluster="c")
SPEC = JobSpec(run="r1", command=("python", "-c", "print(1)"), nodes=Range(1, 4), idle_s=90)
ENVIRONMENT = {
    "RAY_AUTH_TOKEN": "0123456789abcdef0123",
    nodes.ENV_JOB: "r1-20261121-0900-abcd",
    nodes.ENV_JOB_SPEC: SPEC.to_json(),
    nodes.ENV_WORKER_TASK: "worker:7",
    nodes.ENV_WORKER_PROVIDER: "gpus",
    nodes.ENV_WORKER_CPUS: "8",
    nodes.ENV_WORKER_GPUS: "1",
    nodes.ENV_SUBNETS: "subnet-1",
    nodes.ENV_SECURITY_GROUPS: "sg-1,sg-2",
    nodes.ENV_TRAINS: "0",
    nodes.ENV_DEADLINE: "1800000000",
}


def config(**changed: str) -> job_config.JobConfig:
    return job_config.JobConfig.from_environment(ENVIRONMENT | changed)


def autoscaling(head: NodeConfig) -> dict[str, Any]:
    """What Ray's autoscaler is told."""
    own = config()
    provider = job_config.worker_provider(own, recipe=head.recipe, task=TASK, address="10.0.0.5")
    found: dict[str, Any] = json.loads(job_config.autoscaling(own, head, provider))
    return found


def ordered(**changed: Any) -> job_config.JobConfig:
    """The same job with another order."""
    return config(**{nodes.ENV_JOB_SPEC: replace(SPEC, **changed).to_json()})


def begun(spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> job.Job:
    """The job that a head's container runs for an order."""
    jobs: list[job.Job] = []

    def run(own: job.Job) -> int:
        jobs.append(own)
        return 0

    monkeypatch.setattr(job.Job, "run", run)
    deadline = str(int(time.time()) + 600)
    job.run(ENVIRONMENT | {nodes.ENV_JOB_SPEC: spec.to_json(), nodes.ENV_DEADLINE: deadline})
    (own,) = jobs
    return own


def test_ray_leaves_programs_on_nodes_to_linux_where_memory_runs_out() -> None:
    name = "RAY_memory_monitor_refresh_ms"
    for on, expected in ((Placement.NODES, "0"), (Placement.HEAD, None)):
        own = ordered(on=on)
        provider = job_config.worker_provider(own, recipe="", task=TASK, address="10.0.0.5")
        assert provider["environment"].get(name) == expected


@pytest.mark.parametrize(
    ("recipe", "on", "seconds"),
    [
        ("fsdp", Placement.HEAD, times.RECIPE_STOP_S),
        ("", Placement.HEAD, times.COMMAND_STOP_S),
        ("", Placement.NODES, 90),  # 20 s to end, and then its files are saved
    ],
)
def test_a_recipe_that_is_told_to_stop_has_time_for_its_checkpoint(
    recipe: str, on: Placement, seconds: int
) -> None:
    own = job.Job(
        ordered(recipe=recipe, on=on), NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT)
    )
    assert own._stop_s() == seconds


#: Commands of users' programs that are called like a part of this project.
NAMESAKES = (
    ("python", "training.py"),
    ("torchrun", "training.py"),
    ("python", "-m", "training.launch", "ddp"),
)


@pytest.mark.parametrize("words", NAMESAKES, ids=" ".join)
def test_a_users_program_called_like_a_recipe_is_no_recipe(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = begun(replace(SPEC, command=words, code="s3://bucket/code.zip"), monkeypatch)
    assert own._head.recipe == ""
    assert own._stop_s() == times.COMMAND_STOP_S
    own._ray = Process()  # type: ignore[assignment]
    monkeypatch.setattr(demand.Watch, "run", lambda *_: None)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # restored afterwards: the watch sets it
    own._watch_demand("10.0.0.5:6379", threading.Event())
    assert own._demand is not None, "a request that cannot be met would wait until the deadline"
    assert wait_for(own, "sh", "-c", f"exit {exits.RAY_FAILED}") == exits.FAILED


def test_the_autoscaler_is_told_what_the_job_may_have() -> None:
    head = NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT)
    found = autoscaling(head)
    kinds = found["available_node_types"]
    assert kinds["worker"]["resources"] == {"CPU": 8, "GPU": 1}
    assert (kinds["worker"]["min_workers"], kinds["worker"]["max_workers"]) == (1, 4)
    assert kinds["head"]["resources"] == {"CPU": 0}
    assert found["idle_timeout_minutes"] == 1.5
    settings = WorkerSettings.from_provider(found["provider"])
    assert settings == WorkerSettings(
        cluster="c",
        job="r1-20261121-0900-abcd",
        head=TASK.arn,
        task_definition="worker:7",
        capacity_provider="gpus",
        subnets=("subnet-1",),
        security_groups=("sg-1", "sg-2"),
        environment={
            nodes.ENV_HEAD_ADDRESS: "10.0.0.5",
            nodes.ENV_JOB: "r1-20261121-0900-abcd",
            nodes.ENV_DEADLINE: "1800000000",
        },
    )


def test_ray_takes_the_configuration_as_valid() -> None:
    from ray.autoscaler._private.util import validate_config

    head = NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT)
    validate_config(autoscaling(head))


def test_ray_knows_how_long_it_may_wait_for_a_node_to_show() -> None:
    # Read when the module is imported, so in a process of its own.
    program = (
        "from ray.autoscaler.v2.instance_manager.config import InstanceReconcileConfig as C; "
        "print(C().request_status_timeout_s)"
    )
    variables = os.environ | job_config.for_autoscaler()
    asked = subprocess.run((sys.executable, "-c", program), env=variables, capture_output=True)
    assert int(asked.stdout) == times.NODE_ASKED_S


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({nodes.ENV_JOB: ""}, "TRAIN_JOB is missing"),
        ({nodes.ENV_JOB_SPEC: ""}, "TRAIN_JOB_SPEC is missing"),
        ({nodes.ENV_JOB_SPEC: ""}, "of different versions; push new images and deploy"),
        ({nodes.ENV_JOB_SPEC: "python -c 1"}, "order is not a JSON object: 'python -c 1'"),
        ({nodes.ENV_JOB_SPEC: '{"run": "r", "nodes": "1"}'}, "order has no command"),
        (
            {nodes.ENV_JOB_SPEC: SPEC.to_json().replace("{", '{"priority": 1, ', 1)},
            "has priority, which this version does not know",
        ),
        ({nodes.ENV_WORKER_CPUS: "many"}, "TRAIN_WORKER_CPUS is 'many'"),
        ({nodes.ENV_DEADLINE: "soon"}, "TRAIN_DEADLINE is 'soon'"),
    ],
)
def test_a_wrong_variable_is_named(changed: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        config(**changed)


def test_outside_ecs_a_job_says_that_it_cannot_start_workers() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRAIN_", "RAY_"))}
    done = subprocess.run(
        [sys.executable, "-m", "containers", "job"],
        cwd=ROOT,
        env=environment | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == exits.BAD_INPUT
    assert done.stderr == (
        "node: error: a job starts its workers on ECS, and this is no task of ECS\n"
    )


class Process:
    """Stands for Ray, which runs or has ended."""

    def __init__(self, returncode: int | None = None) -> None:
        self.returncode = returncode

    def poll(self) -> int | None:
        return self.returncode


def reason(own: job.Job, ray: Any) -> int | None:
    return own._reason_to_end(ray)


def test_a_job_ends_for_a_reason_with_a_code_of_its_own() -> None:
    head = NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT)
    running = Process()
    assert reason(job.Job(config(), head), running) is None
    late = job.Job(config(**{nodes.ENV_DEADLINE: str(int(time.time()) - 1)}), head)
    assert reason(late, running) == exits.DEADLINE
    now = [0.0]
    alone = waiting(now)
    now[0] = 61.0
    assert reason(alone, running) == exits.NO_CAPACITY
    assert reason(job.Job(config(), head), Process(1)) == exits.RAY_FAILED
    unfit = job.Job(config(), head)
    unfit._on_unfit()
    assert reason(unfit, running) == exits.BAD_HOST


@pytest.mark.parametrize(
    ("before", "code", "said"),
    [
        ((), None, ""),
        (("sh", "-c", "exit 0"), None, "before the job's command: sh -c exit 0"),
        (("sh", "-c", "exit 1"), 1, "the job's command is not started"),
    ],
    ids=["none", "passed", "failed"],
)
def test_what_must_succeed_before_the_command_ends_the_job_where_it_fails(
    before: tuple[str, ...], code: int | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    head = NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT)
    own = job.Job(ordered(before=before), head)
    own._ray = Process()  # type: ignore[assignment]
    assert own._pass_gate("10.0.0.5", os.environ) == code
    assert said in capsys.readouterr().err


def test_a_gate_knows_the_job_and_its_ray(tmp_path: Path) -> None:
    script = f'echo "$TRAIN_RUN $RAY_ADDRESS" > {tmp_path}/seen'
    own = job.Job(
        ordered(before=("sh", "-c", script)), NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT)
    )
    own._ray = Process()  # type: ignore[assignment]
    assert own._pass_gate("10.0.0.5", os.environ) is None
    assert (tmp_path / "seen").read_text() == "r1 10.0.0.5:6379\n"


def size(workers: int) -> str:
    """What the head reports of its cluster."""
    return ClusterSize(num_nodes=1 + workers, num_cpus=8 * workers, num_gpus=workers).line()


def waiting(now: list[float], **changed: Any) -> job.Job:
    """A job that waits 60 s for hosts; ``now`` is its clock."""
    head = NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT)
    return job.Job(ordered(capacity_wait_s=60, **changed), head, clock=lambda: now[0])


def test_a_recipe_that_lost_a_node_waits_for_another_as_long_as_at_its_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    own = waiting(now, recipe="fsdp", nodes=Range(2, 2))
    own._on_size(size(2))
    now[0] = 5000.0  # however long it has trained before
    own._on_size(size(1))
    now[0] += 60
    assert reason(own, Process()) is None
    own._on_size(size(2))  # replaced in time
    now[0] += 5000
    assert reason(own, Process()) is None
    own._on_size(size(1))
    now[0] += 50
    own._on_size(size(0))  # another loss does not begin the wait anew
    now[0] += 11
    assert reason(own, Process()) == exits.NO_CAPACITY
    assert "0 of 2 worker nodes, 61 s after a loss: no capacity" in capsys.readouterr().err


def test_an_elastic_recipe_that_trains_with_fewer_nodes_does_not_wait() -> None:
    now = [0.0]
    own = waiting(now, recipe="fsdp", nodes=Range(1, 4))
    own._on_size(size(4))
    own._on_size(size(1))
    now[0] += 5000
    assert reason(own, Process()) is None


def test_a_job_without_worker_nodes_waits_for_none() -> None:
    now = [0.0]
    own = waiting(now, nodes=Range(0, 0))
    now[0] = 61.0  # its own Ray may still be starting
    assert reason(own, Process()) is None


@pytest.mark.parametrize("on", [Placement.HEAD, Placement.NODES])
def test_a_program_may_go_on_without_the_nodes_that_it_lost(on: Placement) -> None:
    now = [0.0]
    own = waiting(now, on=on)
    own._on_size(size(1))
    own._on_size(size(0))
    now[0] += 5000
    assert reason(own, Process()) is None


def test_the_commands_words_reach_it_as_they_are() -> None:
    words = ["python", "-c", "print('a b')"]
    assert ordered(command=tuple(words)).spec.command == tuple(words)


@pytest.mark.parametrize(
    ("recipe", "option", "prepared"),
    [
        ("ddp", "--epochs", "ddp"),
        ("fsdp", "--epochs", "fsdp"),
        ("ddp", "--verbose", ""),  # what Ray's processes print is brought to the head
        ("", "--epochs", ""),
    ],
)
def test_nodes_prepare_for_the_recipe_that_a_job_trains(
    recipe: str, option: str, prepared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = begun(replace(SPEC, command=(*SPEC.command, option), recipe=recipe), monkeypatch)
    assert own._head.recipe == prepared
    told = autoscaling(own._head)["provider"]
    assert told["environment"].get(nodes.ENV_RECIPE, "") == prepared


def test_a_program_on_all_nodes_is_given_as_many_as_the_job_may_have() -> None:
    head = NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT)
    own = ordered(on=Placement.NODES)
    found = json.loads(job_config.autoscaling(own, head, {}))
    worker = found["available_node_types"]["worker"]
    assert (worker["min_workers"], worker["max_workers"]) == (4, 4)
    found = json.loads(job_config.autoscaling(own, head, {}, least=0, most=0))
    worker = found["available_node_types"]["worker"]
    assert (found["max_workers"], worker["min_workers"], worker["max_workers"]) == (0, 0, 0)


class StartsAnew(job.Job):
    """A job whose Ray ends as often as it is told, and then stays."""

    def __init__(self, *, fails: int) -> None:
        super().__init__(config(), NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT))
        self.fails, self.starts = fails, 0

    def _start_ray(self, *_arguments: Any) -> None:
        self.starts += 1
        words = ["false"] if self.starts <= self.fails else ["sleep", "600"]
        self._ray = subprocess.Popen(words)
        if self.starts > self.fails:
            self._on_size(ClusterSize(num_nodes=1, num_cpus=0, num_gpus=0).line())

    def bring_up(self) -> int | None:
        self._start_ray()
        try:
            return self._bring_up("10.0.0.5", {})
        finally:
            self._ray.kill()
            self._ray.wait()


@pytest.mark.parametrize(
    ("fails", "starts", "code"), [(0, 1, None), (1, 2, None), (2, 2, exits.RAY_FAILED)]
)
def test_ray_is_started_once_more_where_it_ends_before_it_is_up(
    fails: int, starts: int, code: int | None
) -> None:
    own = StartsAnew(fails=fails)
    assert own.bring_up() == code
    assert own.starts == starts


def test_a_program_that_asks_for_more_than_the_job_can_have_ends_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    head = NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT)
    own = job.Job(config(), head)
    own._demand = demand.Watch(job_config.capacity(config(), head))
    assert reason(own, Process()) is None
    seen = demand.Seen(
        requests=(demand.Request(bundles=({"CPU": 8.0},) * 5, strategy="PACK"),),
        totals={},
        idle_s=(),
    )
    for now in (0.0, demand.MEANT_S):
        own._demand.take(seen, now=now)
    assert reason(own, Process()) == exits.ASKS_TOO_MUCH
    assert capfd.readouterr().err == (
        "node: the program asks for 5 workers of 8 CPUs each; this job has at most 4\n"
    )


def test_nodes_without_work_are_reported_and_released_after_the_idle_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    head = NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT)
    own = job.Job(ordered(idle_s=1), head)
    own._folder, own._provider = tmp_path, {}
    own._demand = demand.Watch(job_config.capacity(config(), head))
    own._demand.idle_s = (5.0, 0.0)
    own._scale()

    def least() -> int:
        found = json.loads((tmp_path / "autoscaling.yaml").read_text())
        return int(found["available_node_types"]["worker"]["min_workers"])

    own._release_unused()
    assert least() == 1, "not before all have joined"
    own._on_size(ClusterSize(num_nodes=3, num_cpus=8, num_gpus=1).line())
    own._release_unused()
    assert least() == 1, "not before the idle time"
    time.sleep(1.1)
    for idle_s in ((), (0.9, 0.0)):  # what Ray was seen to report lags behind
        own._demand.idle_s = idle_s
        own._release_unused()
        assert least() == 1, "it would go without a word"
    own._demand.idle_s = (5.0, 0.0)
    own._release_unused()
    own._release_unused()
    assert least() == 0
    assert capfd.readouterr().err.count("1 worker node has had nothing to do for 1 s") == 1


def doing_well() -> job.Job:
    """A job that has no reason to end."""
    return job.Job(
        config(**{nodes.ENV_DEADLINE: str(int(time.time()) + 600)}),
        NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT),
    )


def wait_for(own: job.Job, *words: str) -> int:
    """What the head's container exits with after a command."""
    ray: Any = Process()
    return own._wait(Program(words, folder=None, environment=os.environ), ray)


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 1), ("exit 137", 1)],
)
def test_a_command_that_was_killed_does_not_count_as_a_head_that_was(
    script: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert wait_for(doing_well(), "sh", "-c", script) == code
    assert ("the command was killed (exit code 137)" in capfd.readouterr().err) == (code == 1)


@pytest.mark.parametrize("code", exits.OF_THE_SYSTEM)
def test_an_exit_code_of_the_systems_own_is_not_taken_over_from_a_command(
    code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert wait_for(doing_well(), "sh", "-c", f"exit {code}") == exits.FAILED
    assert f"exit code {code} has a meaning of its own here" in capfd.readouterr().err


@pytest.mark.parametrize("code", [exits.FILES_LOST, exits.NO_CAPACITY])
def test_what_runs_programs_on_nodes_reports_their_end_with_the_systems_own_codes(
    code: int,
) -> None:
    own = doing_well()
    own._config = replace(own._config, spec=replace(SPEC, on=Placement.NODES))
    assert wait_for(own, "sh", "-c", f"exit {code}") == code


PROGRAM = """
import signal, sys, time
def save(*_):
    time.sleep(0.3)
    open(sys.argv[1], "a").write("saved")
    sys.exit()
signal.signal(signal.SIGTERM, save if sys.argv[2] == "kind" else signal.SIG_IGN)
open(sys.argv[1], "w").write("began ")
time.sleep(60)
"""


def behind_a_shell(file: Path, kind: str) -> Program:
    """A program that a shell waits for, once it runs."""
    run = 'python="$1"; shift; "$python" -c "$@" && true'
    words = ("sh", "-c", run, "sh", sys.executable, PROGRAM, str(file), kind)
    shell = Program(words, folder=None, environment=os.environ)
    until = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    return shell


def test_a_program_behind_a_shell_is_told_to_end_and_waited_for(tmp_path: Path) -> None:
    shell = behind_a_shell(tmp_path / "file", "kind")
    own, ray = doing_well(), Process(1)  # Ray's end is a reason to end
    assert own._wait(shell, ray) == exits.RAY_FAILED  # type: ignore[arg-type]
    assert (tmp_path / "file").read_text() == "began saved"
    assert shell._left() == set()


@pytest.mark.parametrize("within_s", [0.5, 0])
def test_a_program_behind_a_shell_that_does_not_end_is_killed(
    tmp_path: Path, within_s: float
) -> None:
    shell = behind_a_shell(tmp_path / "file", "stubborn")
    began = time.monotonic()
    shell.terminate()
    shell.wait(lambda: began + within_s)
    shell.end(lambda: began + within_s)
    assert time.monotonic() - began < 10
    assert shell._left() == set()


def test_a_command_that_has_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    shell = behind_a_shell(tmp_path / "file", "kind")
    shell._process.kill()
    shell._process.wait()
    assert shell._left(), "the program goes on"
    assert shell.end() == exits.KILLED
    assert shell._left() == set()
    assert (tmp_path / "file").read_text() == "began "


# --- the files of a program on the head -----------------------------------------------------------
class OnHead(job.Job):
    """A job whose head has brought up Ray, at one attempt; its bucket is in memory."""

    def __init__(self, s3: S3, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
        given = ENVIRONMENT | {
            nodes.ENV_DEADLINE: str(int(time.time()) + 600),
            nodes.ENV_JOB_SPEC: replace(SPEC, command=words, on=Placement.HEAD).to_json(),
        }
        super().__init__(
            job_config.JobConfig.from_environment(given),
            NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT),
        )
        self._ray = Process()  # type: ignore[assignment]
        prepare = functools.partial(
            head.prepare, make_mirror=functools.partial(Mirror, client=s3, every_s=0.05)
        )
        monkeypatch.setattr(head, "prepare", prepare)
        monkeypatch.setattr(
            code, "prepare", lambda _spec, folder, **_: Prepared(folder=folder, environment={})
        )
        monkeypatch.setattr(store, "_client", lambda: s3)
        monkeypatch.setenv(nodes.ENV_STORAGE, "s3://bucket")

    def run(self) -> int:
        return self._run_command("10.0.0.5", {**os.environ, nodes.ENV_STORAGE: "s3://bucket"})


def saved(s3: S3) -> dict[str, str]:
    """What the list of the head's files names."""
    prefix = "runs/r1/output/node-0"
    text = s3.objects.get(f"{prefix}/{MANIFEST}")
    files = Manifest.from_json(text).files if text else ()
    return {file.name: s3.objects[f"{prefix}/{file.object}"].decode() for file in files}


@pytest.mark.parametrize("own_code", [0, 3])
def test_a_program_on_the_head_whose_last_files_are_not_saved_has_not_succeeded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], own_code: int
) -> None:
    s3 = S3()

    def upload(_key: str) -> None:
        assert own._mirror
        own._mirror.hurry(0.3)  # as at the deadline
        raise EndpointConnectionError(endpoint_url="s3")

    s3.on_upload = upload
    script = f"for n in 1 2 3 4 5 6 7; do echo $n > result-$n; done; exit {own_code}"
    own = OnHead(s3, monkeypatch, "sh", "-c", script)
    assert own.run() == (exits.FILES_LOST if own_code == 0 else own_code)
    what = ", ".join(f"work/result-{number}" for number in range(1, 6)) + " and 2 more"
    assert f"not saved: 7 files: {what}" in capfd.readouterr().err
    assert s3.objects["runs/r1/jobs/r1-20261121-0900-abcd.lost"].decode() == f"7 files: {what}"


def test_the_last_files_of_a_program_on_the_head_are_tried_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(times, "FILES_SAVE_S", 0.1)
    s3 = S3()
    refusals = [EndpointConnectionError(endpoint_url="s3") for _ in range(5)]

    def upload(_key: str) -> None:
        if refusals:
            raise refusals.pop()

    s3.on_upload = upload
    assert OnHead(s3, monkeypatch, "sh", "-c", "echo 1 > result").run() == exits.OK
    assert saved(s3) == {"work/result": "1\n"}


@contextmanager
def saving(own: OnHead, s3: S3) -> Iterator[tuple[threading.Thread, list[int]]]:
    """A job that runs in a thread and has saved its program's file ``step``; it is stopped in the
    end. Yields the thread, and a list that gets the job's exit code."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(own.run()), daemon=True)
    thread.start()
    until = time.monotonic() + 30
    try:
        while "work/step" not in saved(s3):
            assert time.monotonic() < until
            time.sleep(0.02)
        yield thread, codes
    finally:
        own._stop(0, None)
        thread.join(30)


def test_a_program_on_the_head_ends_when_another_job_takes_over_its_files(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    s3 = S3()
    own = OnHead(s3, monkeypatch, "sh", "-c", "while :; do date +%N > step; sleep 0.05; done")
    with saving(own, s3) as (thread, codes):
        assert OnHead(s3, monkeypatch, "true").run() == exits.OK
        thread.join(20)
    assert codes == [exits.FILES_LOST]
    assert "another job has taken over the files" in capfd.readouterr().err
    lost = s3.objects["runs/r1/jobs/r1-20261121-0900-abcd.lost"]
    assert lost == b"another job has taken over the files of the run"


def test_a_program_on_the_head_gets_back_what_it_wrote_at_an_earlier_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3 = S3()
    script = "cat said $TRAIN_OUTPUT/said; echo $TRAIN_RUN >> said; echo $TRAIN_RAY_STORAGE"
    words = (
        "sh",
        "-c",
        f"({script}) > $TRAIN_OUTPUT/said.new 2>&1; mv -f $TRAIN_OUTPUT/said.new "
        "$TRAIN_OUTPUT/said",
    )
    for _ in range(2):
        assert OnHead(s3, monkeypatch, *words).run() == 0
    assert saved(s3)["work/said"] == "r1\nr1\n"
    lines = saved(s3)["output/said"].splitlines()
    assert lines[0] == "r1", "of the working directory"
    assert lines.count("s3://bucket/runs/r1/ray") == 2, "of the output, and of this attempt"


def test_files_are_saved_while_the_program_on_the_head_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3 = S3()
    own = OnHead(s3, monkeypatch, "sh", "-c", "echo 1 > step; sleep 600")
    with saving(own, s3) as (_, codes):
        pass
    assert codes == [exits.TERMINATED]


def test_a_stop_does_not_wait_for_the_files_of_a_program_on_the_head(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    s3 = S3()
    assert OnHead(s3, monkeypatch, "sh", "-c", "echo 1 > step").run() == 0
    before = saved(s3)
    own = OnHead(s3, monkeypatch, "sh", "-c", "echo 2 > step")
    told = threading.Event()

    def download(_key: str) -> None:
        own._stop(0, None)
        told.wait(120)

    s3.on_download = download
    began = time.monotonic()
    assert own.run() == exits.TERMINATED
    assert time.monotonic() - began < 60
    told.set()
    said = capfd.readouterr().err
    assert said.count("stopped as told") == 1
    assert "running" not in said.partition("stopped")[2], "the command is not started"
    assert saved(s3) == before


@pytest.mark.parametrize(
    ("has_code", "storage"),
    [(False, "s3://bucket"), (True, "")],
    ids=["a recipe", "no bucket"],
)
def test_neither_recipes_nor_programs_without_a_bucket_have_files_that_are_kept(
    tmp_path: Path, has_code: bool, storage: str
) -> None:
    own = Prepared(folder=tmp_path if has_code else None, environment={"A": "b"})
    found = head.prepare(SPEC, own, tmp_path, {nodes.ENV_STORAGE: storage})
    assert found == head.HeadProgram(folder=own.folder, environment={"A": "b"}, mirror=None)


def test_a_program_on_the_head_and_what_ray_starts_for_it_have_the_same_variables(
    tmp_path: Path,
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").touch()
    runtime = {"working_dir": str(work), "env_vars": {"A": "b", "PYTHONPATH": "/mine"}}
    own = Prepared(
        folder=work,
        environment={"A": "b", RAY_VARIABLE: json.dumps({"runtime_env": runtime})},
    )
    made: list[tuple[dict[str, Path], str]] = []

    def make_mirror(folders: dict[str, Path], address: str) -> Mirror:
        made.append((folders, address))
        return Mirror(folders, address, client=S3())

    spec = replace(SPEC, command=("python", "train.py"), code="s3://bucket/code.zip")
    environment = {nodes.ENV_STORAGE: "s3://bucket"}
    found = head.prepare(spec, own, tmp_path, environment, make_mirror=make_mirror)
    told = json.loads(found.environment[RAY_VARIABLE])["runtime_env"]
    for name in (nodes.ENV_RUN, nodes.ENV_RAY_STORAGE, "PYTHONPATH", "A"):
        assert told["env_vars"][name] == found.environment[name]
    assert found.environment["PYTHONPATH"].endswith(f"startup{os.pathsep}/mine")
    assert found.folder == work
    assert [*Path(told["working_dir"]).iterdir()] == [Path(told["working_dir"]) / "train.py"]
    assert told["working_dir"] != str(work), "what it writes is not sent to other nodes"
    assert made == [
        ({"work": work, "output": tmp_path / "output"}, "s3://bucket/runs/r1/output/node-0/")
    ]


def test_a_job_begins_with_the_cache_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[bool] = []
    monkeypatch.setattr(cache, "start_trimming", lambda: began.append(True))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(node, "start_fork_server", lambda _head: None)
    monkeypatch.setattr(metadata, "own_task", lambda: None)
    with pytest.raises(InputError, match="no task of ECS"):
        job.Job(config(), NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT)).run()
    assert began == [True]
