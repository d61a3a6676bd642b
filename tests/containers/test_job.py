"""The head of a job reads what it is told, tells Ray's autoscaler the right things and refuses what
cannot be right. What it does with real Ray in real containers: tests/rehearsal."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from containers import demand, job, job_config, metadata, node, processes
from containers.autoscaler import WorkerSettings
from containers.metadata import OwnTask
from containers.node import NodeConfig
from containers.program import cache
from contract import exits, nodes
from contract.errors import InputError
from contract.job import JobSpec, Placement
from contract.nodes import ClusterSize
from contract.ranges import Range
from tests.conftest import ROOT

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


def test_ray_leaves_programs_on_nodes_to_linux_where_memory_runs_out() -> None:
    name = "RAY_memory_monitor_refresh_ms"
    for on, expected in ((Placement.NODES, "0"), (Placement.HEAD, None)):
        own = ordered(on=on)
        provider = job_config.worker_provider(own, recipe="", task=TASK, address="10.0.0.5")
        assert provider["environment"].get(name) == expected


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
    alone = job.Job(ordered(capacity_wait_s=0), head)
    time.sleep(0.01)
    assert reason(alone, running) == exits.NO_CAPACITY
    assert reason(job.Job(config(), head), Process(1)) == exits.FAILED


def test_workers_that_came_once_are_no_lack_of_capacity_later() -> None:
    head = NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT)
    own = job.Job(ordered(capacity_wait_s=0), head)
    own._on_size(ClusterSize(num_nodes=2, num_cpus=8, num_gpus=1).line())
    own._on_size(ClusterSize(num_nodes=1, num_cpus=0, num_gpus=0).line())
    time.sleep(0.01)
    assert reason(own, Process()) is None


def test_the_commands_words_reach_it_as_they_are() -> None:
    words = ["python", "-c", "print('a b')"]
    assert ordered(command=tuple(words)).spec.command == tuple(words)


@pytest.mark.parametrize(
    ("command", "recipe"),
    [
        (["python", "-m", "training.launch", "ddp", "--workers", "2"], "ddp"),
        (["python", "-m", "training.launch", "fsdp"], "fsdp"),
        (["python", "-m", "training.launch", "ddp", "--verbose"], ""),
        (["python", "-m", "training.launch"], ""),
        (["python", "train.py"], ""),
        (["ls"], ""),
    ],
)
def test_nodes_prepare_for_the_recipe_that_a_job_trains(command: list[str], recipe: str) -> None:
    assert job_config.recipe_of(command) == recipe
    head = NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT | {nodes.ENV_RECIPE: recipe})
    told = autoscaling(head)["provider"]
    assert told["environment"].get(nodes.ENV_RECIPE, "") == recipe


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
    ("fails", "starts", "code"), [(0, 1, None), (1, 2, None), (2, 2, exits.FAILED)]
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
    assert reason(own, Process()) == exits.BAD_INPUT
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
    own._release_unused()
    own._release_unused()
    assert least() == 0
    assert capfd.readouterr().err.count("1 worker node has had nothing to do for 1 s") == 1


def wait_for(own: job.Job, *words: str) -> tuple[int, "subprocess.Popen[bytes]"]:
    """What the head's container exits with after a command, and the command."""
    command = subprocess.Popen(words, start_new_session=True)
    ray: Any = Process()
    return own._wait(command, ray), command


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 1), ("exit 137", 1)],
)
def test_a_command_that_was_killed_does_not_count_as_a_head_that_was(
    script: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    own = job.Job(
        config(**{nodes.ENV_DEADLINE: str(int(time.time()) + 600)}),
        NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT),
    )
    assert wait_for(own, "sh", "-c", script)[0] == code
    assert ("the command was killed (exit code 137)" in capfd.readouterr().err) == (code == 1)


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


def behind_a_shell(file: Path, kind: str) -> "subprocess.Popen[bytes]":
    """A program that a shell waits for, once it runs."""
    run = 'python="$1"; shift; "$python" -c "$@" && true'
    words = ["sh", "-c", run, "sh", sys.executable, PROGRAM, str(file), kind]
    shell = subprocess.Popen(words, start_new_session=True)
    until = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    return shell


def test_a_program_behind_a_shell_is_told_to_end_and_waited_for(tmp_path: Path) -> None:
    shell = behind_a_shell(tmp_path / "file", "kind")
    job.end_group(shell, 30)
    assert (tmp_path / "file").read_text() == "began saved"
    assert processes.in_group(shell.pid) == []


@pytest.mark.parametrize("within_s", [0.5, 0])
def test_a_program_behind_a_shell_that_does_not_end_is_killed(
    tmp_path: Path, within_s: float
) -> None:
    shell = behind_a_shell(tmp_path / "file", "stubborn")
    began = time.monotonic()
    job.end_group(shell, within_s)
    assert time.monotonic() - began < 10
    assert processes.in_group(shell.pid) == []


def test_a_command_that_has_ended_leaves_nothing_behind_in_its_group(tmp_path: Path) -> None:
    shell = behind_a_shell(tmp_path / "file", "kind")
    shell.kill()
    shell.wait()
    assert processes.in_group(shell.pid), "the program goes on"
    job.end_group(shell, 0)
    assert processes.in_group(shell.pid) == []
    assert (tmp_path / "file").read_text() == "began "


def test_a_job_begins_with_the_cache_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[bool] = []
    monkeypatch.setattr(cache, "start_trimming", lambda: began.append(True))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(node, "start_fork_server", lambda _head: None)
    monkeypatch.setattr(metadata, "own_task", lambda: None)
    with pytest.raises(InputError, match="no task of ECS"):
        job.Job(config(), NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT)).run()
    assert began == [True]
