"""The head of a job follows its order through whole lives, with Ray and commands played on a
fake clock."""

import functools
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from botocore.exceptions import EndpointConnectionError
from ray.autoscaler._private.util import validate_config
from ray.autoscaler.node_launch_exception import NodeLaunchException

import containers.__main__ as container
from containers import demand, job_head, ray_head
from containers.host.machine import OwnTask
from containers.node import NodeConfig
from containers.program.files.program_files import Mirror, open_mirror
from containers.program.files.s3_files import until_answered
from containers.program.start import code, host_cache, on_node, process
from containers.program.start.code import RAY_VARIABLE
from containers.program.start.ray_defaults import OWN_STORAGE
from containers.ray_head import RayHead
from contract import exits, nodes, times
from contract.errors import InputError
from contract.job import Hold, JobSpec, Placement
from contract.nodes import ClusterSize, Range
from tests.aws.s3 import S3
from tests.clock import FakeClock
from tests.containers.program.saved_files import saved_in
from tests.containers.program.test_launch import WRITES
from tests.eventually import eventually

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


def config(**changed: str) -> ray_head.JobConfig:
    return ray_head.JobConfig.from_environment(ENVIRONMENT | changed)


def ordered(**changed: Any) -> ray_head.JobConfig:
    """The same job with another order."""
    return config(**{nodes.ENV_JOB_SPEC: replace(SPEC, **changed).to_json()})


def provider(own: ray_head.JobConfig) -> Any:
    """What starts the workers is told."""
    return ray_head.worker_provider(own, ENVIRONMENT, task=TASK, address="10.0.0.5")


def autoscaling(own: ray_head.JobConfig, **scale: int) -> dict[str, Any]:
    """What Ray's autoscaler is told."""
    head = NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT)
    return json.loads(ray_head.autoscaling(own, head, provider(own), **scale))  # type: ignore[no-any-return]


def test_ray_leaves_programs_on_nodes_to_linux_where_memory_runs_out() -> None:
    name = "RAY_memory_monitor_refresh_ms"
    for on, expected in ((Placement.NODES, "0"), (Placement.HEAD, None)):
        assert provider(ordered(on=on))["environment"].get(name) == expected


def test_the_autoscaler_is_told_what_the_job_may_have() -> None:
    found = autoscaling(config())
    validate_config(found)  # Ray's own
    kinds = found["available_node_types"]
    assert kinds["worker"]["resources"] == {"CPU": 8, "GPU": 1}
    assert (kinds["worker"]["min_workers"], kinds["worker"]["max_workers"]) == (1, 4)
    assert kinds["head"]["resources"] == {"CPU": 0}
    assert found["idle_timeout_minutes"] == 1.5
    told = found["provider"]
    assert (told["cluster"], told["head"], told["security_groups"]) == (
        "c",
        TASK.arn,
        ["sg-1", "sg-2"],
    )
    assert told["environment"] == {
        nodes.ENV_HEAD_ADDRESS: "10.0.0.5",
        nodes.ENV_JOB: ENVIRONMENT[nodes.ENV_JOB],
        nodes.ENV_DEADLINE: "1800000000",
        nodes.ENV_WATCHED: "10.0.0.5:6379",
    }


def test_a_job_in_a_pool_starts_the_workers_of_that_pool() -> None:
    own = {
        nodes.ENV_WORKER_TASK: "pool-l4:3",
        nodes.ENV_WORKER_PROVIDER: "cp-l4",
        nodes.ENV_WORKER_CPUS: "48",
        nodes.ENV_WORKER_GPUS: "4",
        nodes.ENV_SUBNETS: "subnet-2",
    }
    there = ENVIRONMENT | {nodes.ENV_POOLS: json.dumps({"l4": own})}
    assert ray_head.in_pool(there) == there
    first = {nodes.ENV_JOB_SPEC: replace(SPEC, pools=("default", "l4")).to_json()}
    assert ray_head.in_pool(there | first) == there | first
    spec = {nodes.ENV_JOB_SPEC: replace(SPEC, pools=("l4", "default")).to_json()}
    told = ray_head.in_pool(there | spec)
    assert told == there | spec | own
    job = ray_head.JobConfig.from_environment(told)
    assert (job.worker_cpus, job.worker_gpus) == (48, 4)
    with pytest.raises(InputError, match=r"\bl4\b"):
        ray_head.in_pool(ENVIRONMENT | spec)


def test_ray_knows_how_long_it_may_wait_for_a_node_to_show() -> None:
    # Read when the module is imported, so in a process of its own.
    program = (
        "from ray.autoscaler.v2.instance_manager.config import InstanceReconcileConfig as C; "
        "print(C().request_status_timeout_s)"
    )
    variables = os.environ | ray_head.for_autoscaler()
    asked = subprocess.run((sys.executable, "-c", program), env=variables, capture_output=True)
    assert int(asked.stdout) == times.NODE_ASKED_S


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({nodes.ENV_JOB: ""}, "TRAIN_JOB is missing"),
        ({nodes.ENV_JOB_SPEC: ""}, "TRAIN_JOB_SPEC is missing"),
        ({nodes.ENV_JOB_SPEC: ""}, "of different versions; push new images and deploy"),
        ({nodes.ENV_WORKER_CPUS: "many"}, "TRAIN_WORKER_CPUS is 'many'"),
        ({nodes.ENV_DEADLINE: "soon"}, "TRAIN_DEADLINE is 'soon'"),
    ],
)
def test_a_wrong_variable_is_named(changed: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        config(**changed)


@pytest.mark.parametrize(
    ("on", "scale", "expected"),
    [
        (Placement.HEAD, {}, (1, 4)),
        (Placement.NODES, {}, (4, 4)),  # it asks Ray for nothing, and takes whatever joins
        (Placement.NODES, {"least": 0, "most": 0}, (0, 0)),
    ],
)
def test_ray_is_told_how_many_workers_there_shall_be(
    on: Placement, scale: dict[str, int], expected: tuple[int, int]
) -> None:
    found = autoscaling(ordered(on=on), **scale)
    worker = found["available_node_types"]["worker"]
    assert (worker["min_workers"], worker["max_workers"]) == expected
    assert found["max_workers"] == expected[1]


# --- whole lives ----------------------------------------------------------------------------------
class Ray:
    """Does what a test says; its head is up at once."""

    address = "10.0.0.5"

    def __init__(self, own: ray_head.JobConfig) -> None:
        self.size: ClusterSize | None = None
        head = NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT)
        self.demand = demand.DemandWatch(ray_head.nodes_of(own, head))
        self.code: int | None = None
        self.failed_starts = 0
        self.scaled: list[tuple[int | None, int | None]] = []
        self.done: list[str] = []
        self.num_requests = 0

    @property
    def is_up(self) -> bool:
        return self.size is not None

    def start(self) -> None:
        self.have(0)

    def request(self) -> None:
        self.num_requests += 1

    def poll(self) -> int | None:
        return self.code

    def last_lines(self) -> list[str]:
        return ["the last line of Ray"]

    def scale(self, *, least: int | None = None, most: int | None = None) -> None:
        self.scaled.append((least, most))

    def release_workers(self) -> None:
        self.done.append("workers released")

    def end(self, *, keeps_workers: bool) -> None:
        self.done.append("ended, workers kept" if keeps_workers else "ended")

    # --- what a script lets happen
    def have(self, workers: int) -> None:
        self.size = ClusterSize(num_nodes=1 + workers, num_cpus=8 * workers, num_gpus=workers)

    def die(self) -> None:
        self.code = 1

    def be_asked(self, requests: int, *, now: float) -> None:
        request = demand.ResourceRequest(bundles=({"CPU": 8.0},) * requests, strategy="PACK")
        self.demand.take(demand.RayReport(requests=(request,), idle_s=()), now=now)

    def idle(self, *seconds: float) -> None:
        self.demand.idle_s = seconds


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(_config: object, ray: Ray, _now: float) -> Mock:
        ray.done.append("demand is watched")
        return Mock(check=lambda *_: "")

    monkeypatch.setattr(job_head, "RayWatch", watch)


@dataclass
class Command:
    """A program that ends at a time of the clock."""

    clock: FakeClock
    words: tuple[str, ...]
    environment: Mapping[str, str]
    ends: float
    code: int
    stops_in: float
    """Seconds after it was told to end."""
    told: float | None = None
    killed: float | None = None

    def poll(self) -> int | None:
        return self.code if self.clock.now >= self.ends else None

    def terminate(self) -> None:
        self.told = self.clock.now
        self.ends = min(self.ends, self.clock.now + self.stops_in)

    def wait(self, until: Callable[[], float]) -> None:
        while self.poll() is None and self.clock.now < until():
            self.clock.sleep(0.1)

    def outlived(self) -> dict[int, list[str]]:
        return {}

    def end(self, _until: object = None) -> int:
        if self.poll() is None and self.killed is None:
            self.killed = self.clock.now
        code = self.poll()
        return exits.KILLED if code is None else code


class Life:
    """A job from its start to its end, in which the clock's script lets things happen."""

    def __init__(
        self,
        *,
        lasts: float = 30.0,
        codes: tuple[int, ...] = (0,),
        stops_in: float = 0.0,
        deadline: int = 1_000_000,
        **order: Any,
    ) -> None:
        """
        Args:
            lasts: seconds of each command.
            codes: of its commands, in their order.
            stops_in: seconds that a command takes to end when it is told to.
        """
        own = replace(ordered(**order), deadline=deadline)
        self.clock, self.ray, self.commands = FakeClock(), Ray(own), list[Command]()
        self._codes, self._lasts, self._stops_in = codes, lasts, stops_in
        self.s3 = S3()
        self.job = job_head.JobHead(
            own,
            cast(RayHead, self.ray),
            {nodes.ENV_STORAGE: "s3://bucket"},
            spawn=self._spawn,
            make_questions=Mock,
            client=self.s3,
            clock=self.clock,
        )

    def _spawn(self, words: tuple[str, ...], *, environment: Mapping[str, str], **_: Any) -> Any:
        self.commands.append(
            Command(
                clock=self.clock,
                words=words,
                environment=environment,
                ends=self.clock.now + self._lasts,
                code=self._codes[len(self.commands)],
                stops_in=self._stops_in,
            )
        )
        return self.commands[-1]

    def run(self) -> int:
        code = self.job.run()
        kept = ", workers kept" if code in exits.TRIED_AGAIN else ""
        assert self.ray.done[-1] == f"ended{kept}"
        return code


#: Less than what looking at the data takes here, which does not count.
WAITS: dict[str, Any] = {"capacity_wait_s": 60}
REASONS: dict[int, Callable[[Life], None]] = {
    exits.TERMINATED: lambda life: life.clock.at(50, life.job.stop),
    exits.DEADLINE: lambda _life: None,
    exits.RAY_FAILED: lambda life: life.clock.at(50, life.ray.die),
    exits.BAD_HOST: lambda life: life.clock.at(50, life.job.leave_host),
    exits.NO_CAPACITY: lambda life: life.clock.at(40, life.ray.have, 0),
}


@pytest.mark.parametrize("code", REASONS)
def test_a_job_ends_for_a_reason_with_a_code_of_its_own(code: int) -> None:
    life = Life(lasts=math.inf, deadline=900, recipe="fsdp", nodes=Range(2, 2), capacity_wait_s=60)
    life.ray.start = lambda: life.ray.have(2)  # type: ignore[method-assign]
    REASONS[code](life)
    assert life.run() == code
    ended = {exits.DEADLINE: 900.0, exits.NO_CAPACITY: 100.0}.get(code, 50.0)
    assert life.commands[0].told == pytest.approx(ended, abs=0.3)
    # No node is paid for while a command ends that has none.
    released = ["workers released"] if code == exits.NO_CAPACITY else []
    assert (life.ray.done[:-1], life.ray.scaled) == (released, [(0, 0)] * len(released))


@pytest.mark.parametrize(("code", "num_commands"), [(exits.BAD_INPUT, 1), (exits.OK, 2)])
def test_a_recipe_reads_its_data_before_workers_are_asked_for(code: int, num_commands: int) -> None:
    words = ("python", "-m", "training.launch", "fsdp", "--run", "r1")
    life = Life(
        lasts=100, codes=(code, 0), recipe="fsdp", command=words, nodes=Range(2, 2), **WAITS
    )
    life.clock.at(150, life.ray.have, 2)
    assert life.run() == code
    assert [each.words for each in life.commands] == [(*words, "--look"), words][:num_commands]
    assert life.ray.num_requests == num_commands - 1


def test_workers_are_requested_at_once_where_the_same_has_passed_the_questions_before() -> None:
    words = ("python", "-m", "training.launch", "fsdp", "--run")
    order: dict[str, Any] = {"recipe": "fsdp", "nodes": Range(2, 2)}
    known: dict[str, bytes] = {}

    def requested(code: int, run: str, *more: str, task: str = "worker:7") -> float:
        """Time at which a job requests its workers."""
        own = order | {"run": run, "command": (*words, run, *more)}
        life = Life(lasts=100, codes=(code, 0), **own)
        life.s3.objects |= known
        life.job._environment = {**life.job._environment, nodes.ENV_WORKER_TASK: task}
        asked: list[float] = []
        life.ray.request = lambda: asked.append(life.clock.now)  # type: ignore[method-assign]
        life.clock.at(100, life.ray.have, 2)
        assert life.run() == code
        known.update(life.s3.objects)
        if asked == [0]:  # the command itself looks again, as the first thing that it does
            (command,) = life.commands
            assert command.words == (*words, run, *more)
            assert command.ends == pytest.approx(200, abs=0.3)
        return asked[0] if asked else math.inf

    assert requested(exits.BAD_INPUT, "r1") == math.inf, "what is refused leaves no mark"
    assert requested(exits.OK, "r1") == pytest.approx(100, abs=0.3)
    assert requested(exits.OK, "r2") == 0
    assert requested(exits.OK, "r2", "--epochs", "3") == pytest.approx(100, abs=0.3)
    assert requested(exits.OK, "r2", task="worker:8") == pytest.approx(100, abs=0.3)
    assert requested(exits.BAD_INPUT, "r3") == 0, "its data may have changed"


def test_a_job_that_goes_with_another_ends_with_it_and_may_save_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code, "prepare", lambda *_, **how: until_answered(dict, say=print, **how))
    life = Life(
        lasts=math.inf,
        stops_in=40,
        recipe="fsdp",
        command=("python", "-m", "training.launch"),
        with_run="other",
        after="other-bado",
    )
    life.clock.at(100, lambda: life.s3.objects.update({"ends/other/other-bado.json": b"{}"}))
    life.clock.at(150, life.job.report_life)
    assert life.run() == exits.OK
    (command,) = life.commands
    assert command.told == pytest.approx(150, abs=0.3)
    assert not command.killed
    assert (life.run(), life.ray.num_requests) == (exits.OK, 0)  # nor has it passed


def test_ray_starts_meanwhile_and_workers_are_waited_for_once_it_is_up() -> None:
    words = ("python", "-m", "training.launch", "fsdp", "--run", "r1")
    order: dict[str, Any] = {"recipe": "fsdp", "command": words, "nodes": Range(2, 2), **WAITS}
    life = Life(lasts=100, codes=(0, 0), keep_s=600, **order)
    life.ray.start = lambda: None  # type: ignore[method-assign]
    life.clock.at(130, life.ray.have, 0)
    life.clock.at(185, life.ray.have, 2)
    assert life.job.run() == exits.OK
    assert [each.ends for each in life.commands] == pytest.approx([100, 285], abs=0.3)
    assert life.ray.done[-1] == "ended, workers kept", "their hosts are kept for the next job"
    life.job.report_life()
    report = json.loads(life.s3.objects["heads/r1/r1-20261121-0900-abcd.life"])
    ends = {"packages": 0, "questions": 100, "Ray": 130, "workers": 185}
    assert report["phases"] == pytest.approx(ends, abs=0.3)


@pytest.mark.parametrize(
    ("recipe", "on", "seconds"),
    [
        ("fsdp", Placement.HEAD, times.RECIPE_STOP_S),
        ("", Placement.HEAD, 100),
        ("", Placement.NODES, 170),  # and then its files are saved
    ],
)
def test_what_is_told_to_stop_has_time_to_save(recipe: str, on: Placement, seconds: int) -> None:
    life = Life(lasts=math.inf, stops_in=math.inf, recipe=recipe, on=on, grace_s=100)
    life.clock.at(10, life.job.stop)
    assert life.run() == exits.TERMINATED
    (command,) = life.commands
    assert command.told is not None
    assert command.killed == pytest.approx(command.told + seconds, abs=0.2)


@pytest.mark.parametrize(("max_seconds", "told"), [(900, 810), (200, 850)])
def test_a_program_is_told_to_end_before_the_deadline(max_seconds: int, told: float) -> None:
    life = Life(lasts=math.inf, stops_in=50, deadline=900, grace_s=90, max_seconds=max_seconds)
    assert life.run() == exits.DEADLINE
    assert life.commands[0].told == pytest.approx(told, abs=0.3)
    assert life.commands[0].killed is None


@pytest.mark.parametrize(
    ("code", "own"),
    [(0, 0), (7, 7), (143, 1), (exits.KILLED, 1), *((c, 1) for c in exits.OF_THE_SYSTEM)],
)
def test_the_exit_code_of_a_program_never_reads_as_one_of_the_system(
    code: int, own: int, capfd: pytest.CaptureFixture[str]
) -> None:
    life = Life(codes=(code,))
    assert life.run() == own
    assert "demand is watched" in life.ray.done, "a request that cannot be met would wait for ever"
    said = capfd.readouterr().err
    assert ("the command was killed (exit code 137)" in said) == (code == exits.KILLED)
    taken = f"exit code {code} is reserved here"
    assert (taken in said) == (code in exits.OF_THE_SYSTEM)


def test_a_program_beside_ray_that_hangs_is_ended_and_its_hosts_are_held() -> None:
    life = Life(lasts=math.inf, hold_s=100)
    life.clock.at(50, lambda: setattr(life.job._watch, "check", lambda *_: "no new line"))
    assert life.run() == exits.HUNG
    assert told(life.s3).startswith("failed: hung: no new line; all stacks: trainctl logs r1; ")
    assert life.clock.now == pytest.approx(150, abs=5)


@pytest.mark.parametrize("code", [exits.FILES_LOST, exits.NO_CAPACITY])
def test_a_program_on_nodes_ends_with_the_systems_own_codes(
    code: int,
) -> None:
    life = Life(codes=(code,), on=Placement.NODES)
    assert life.run() == code
    assert life.ray.done == ["ended"], "no demand is watched"


@pytest.mark.parametrize(
    ("order", "workers", "ends", "lack"),
    [
        ({"nodes": Range(1, 4)}, {}, 60, "0 of 1 worker nodes, 60 s after the start"),
        (
            {"recipe": "fsdp", "nodes": Range(2, 2)},
            # Another loss does not begin the wait anew.
            {50: 2, 500: 1, 555: 2, 1000: 1, 1050: 0},
            1060,
            "0 of 2 worker nodes, 60 s after a loss",
        ),
        ({"recipe": "fsdp", "nodes": Range(1, 4)}, {5: 4, 10: 1}, 1100, ""),
        ({"on": Placement.HEAD}, {5: 4, 10: 0}, 1100, ""),
        ({"on": Placement.NODES}, {5: 4, 10: 0}, 1100, ""),
        ({"nodes": Range(0, 0)}, {5: 4, 10: 0}, 1100, ""),
    ],
    ids=["never", "lost", "trains with fewer", "a program", "a program on nodes", "has none"],
)
def test_a_job_waits_so_long_for_nodes_that_it_cannot_do_without(
    order: dict[str, Any],
    workers: dict[int, int],
    ends: int,
    lack: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    life = Life(lasts=1100, capacity_wait_s=60, **order)
    for when, number in workers.items():
        life.clock.at(when, life.ray.have, number)
    assert life.run() == (exits.NO_CAPACITY if lack else exits.OK)
    assert life.clock.now == pytest.approx(ends, abs=0.5)
    assert lack in capsys.readouterr().err


def test_a_worker_that_cannot_prepare_ends_the_job_at_once_with_its_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(on=Placement.NODES, nodes=Range(2, 2), code="s3://bucket/code.zip")
    monkeypatch.setattr(code, "prepare", lambda *_, **__: {})

    failed = {"code.zip/failed": b"requirements.txt cannot be installed:\nno such package"}
    life.s3.objects |= failed  # of an earlier attempt
    life.clock.at(20, life.s3.objects.update, failed)
    assert life.run() == exits.BAD_INPUT
    assert 20 < life.clock.now < 30
    said = capsys.readouterr().err
    assert "a worker node cannot prepare the code: requirements.txt cannot be installed" in said
    assert "no capacity" not in said


@pytest.mark.parametrize("is_old", [False, True])
def test_a_node_that_cannot_replace_a_lost_one_gives_the_reason(
    monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    """Unless the failure is of a node that was replaced since by one that could."""
    order: dict[str, Any] = {"on": Placement.NODES, "nodes": Range(2, 2)}
    order["code"] = "s3://bucket/code.zip"
    life = Life(lasts=900, codes=(exits.NO_CAPACITY,), **order)
    monkeypatch.setattr(code, "prepare", lambda *_, **__: {})
    for when, workers in ((5, 2), (100, 1), (300, 2), (500, 1)):
        life.clock.at(when, life.ray.have, workers)
    failed = {"code.zip/failed": b"requirements.txt cannot be installed: x is gone"}
    life.clock.at(200 if is_old else 600, life.s3.objects.update, failed)
    assert life.run() == (exits.NO_CAPACITY if is_old else exits.BAD_INPUT)
    if not is_old:
        assert told(life.s3).endswith(
            "prepare the code: requirements.txt cannot be installed: x is gone"
        )


@pytest.mark.parametrize(
    ("own", "stops", "deadline", "ends"),
    [
        (3, None, 1_000_000, 130 + 600),
        (3, 200, 1_000_000, 200),
        (3, None, 400, 400 - times.HOLD_MARGIN_S),
        (exits.HUNG, None, 1_000_000, 130 + 600),
        (exits.OK, None, 1_000_000, 130),
        (exits.STORAGE, None, 1_000_000, 130),
        (0, 100, 1_000_000, 100),
    ],
    ids=["held", "stopped", "deadline", "hung", "succeeded", "tried again", "stopped before"],
)
def test_the_hosts_of_a_job_that_has_failed_are_held_for_as_long_as_it_wants(
    own: int, stops: float | None, deadline: int, ends: float
) -> None:
    life = Life(lasts=130, codes=(own,), deadline=deadline, recipe="fsdp", hold_s=600)
    life.ray.start = lambda: life.ray.have(3)  # type: ignore[method-assign]
    if stops:
        life.clock.at(stops, life.job.stop)
    life.clock.at(160, life.ray.have, 2)
    stopped = stops is not None and stops < 130
    assert life.run() == (exits.TERMINATED if stopped else own)
    assert life.clock.now == pytest.approx(ends, abs=5)  # Ray may have ended, too
    mark = life.s3.objects.get("heads/r1/r1-20261121-0900-abcd.hold")
    is_held = ends > 150
    assert (mark is not None) == is_held
    if mark:
        hold = Hold.from_json(mark.decode())
        assert hold.code == own
        assert hold.since == pytest.approx(130, abs=5)
        assert hold.until == pytest.approx(min(hold.since + 600, deadline - times.HOLD_MARGIN_S))
        # What idles stays, and nothing comes for a host that goes.
        assert life.ray.scaled[-2:] == [(3, 3), (2, 2)]


def test_hosts_are_not_held_where_the_keeper_could_not_know_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def put_object(**_: Any) -> None:
        raise EndpointConnectionError(endpoint_url="s3")

    life = Life(codes=(3,), hold_s=600)
    monkeypatch.setattr(life.s3, "put_object", put_object)
    assert life.run() == 3
    assert life.clock.now < 60


def test_a_head_that_is_told_to_end_while_it_saves_holds_no_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life = Life(codes=(3,), hold_s=600)

    def save_files() -> bool:
        life.job.stop()
        return True

    monkeypatch.setattr(life.job, "_save_files", save_files)
    assert life.run() == 3
    assert life.clock.now < 60
    assert not [key for key in life.s3.objects if key.endswith(".hold")]


@pytest.mark.parametrize(
    ("hangs", "said"),
    [
        (False, "Ray ended on its own (exit code 1)"),
        (True, f"Ray did not start within {times.RAY_START_S} s"),
    ],
)
def test_a_job_whose_ray_does_not_start_ends_with_rays_words(
    hangs: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    life = Life(capacity_wait_s=1000)
    life.ray.start = (lambda: None) if hangs else life.ray.die  # type: ignore[method-assign]
    assert life.run() == exits.RAY_FAILED
    assert life.clock.now == pytest.approx(times.RAY_START_S if hangs else 0, abs=0.3)
    assert f"{said}; its last lines:\nthe last line of Ray" in capsys.readouterr().err


@pytest.mark.parametrize(("failed", "code"), [(2, exits.OK), (3, exits.FAILED)])
def test_a_job_whose_nodes_cannot_start_ray_ends_with_that_reason(failed: int, code: int) -> None:
    words = ("python", "-m", "training.launch", "fsdp", "--run", "r1")
    life = Life(codes=(0, 0), recipe="fsdp", command=words, nodes=Range(2, 2), run="r1")
    life.clock.at(100, lambda: setattr(life.ray, "failed_starts", failed))
    life.clock.at(200, life.ray.have, 2)
    assert life.run() == code
    # The recipe's command, which needs a processor too, begins when the nodes are there.
    began = [each.ends - 30 for each in life.commands[1:]]
    assert began == pytest.approx([200.0] * (code == exits.OK), abs=1)
    if code:
        assert told(life.s3).startswith("failed: Ray did not start on worker nodes, 3 times")


def test_a_program_that_asks_for_more_than_the_job_can_have_ends_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    life = Life(lasts=math.inf)
    for now in (10, 10 + demand.MEANT_S):
        life.clock.at(now, functools.partial(life.ray.be_asked, 5, now=now))
    assert life.run() == exits.ASKS_TOO_MUCH
    said = "node: the program asks for 5 workers of 8 CPUs each; this job has at most 4\n"
    assert said in capfd.readouterr().err


def test_nodes_without_work_are_reported_and_released_after_the_idle_time(
    capfd: pytest.CaptureFixture[str],
) -> None:
    life = Life(lasts=400, idle_s=90, nodes=Range(2, 4))
    scaled: list[tuple[float, int]] = []
    life.ray.scale = lambda **least: scaled.append((life.clock.now, *least.values()))  # type: ignore[method-assign]
    life.ray.idle(200.0, 0.0)  # of a node that came first: not before all have joined
    life.clock.at(50, life.ray.have, 2)
    life.clock.at(100, life.ray.idle)  # what Ray was seen to report lags behind
    life.clock.at(145, life.ray.idle, 89.0, 0.0)  # it would go without a word
    life.clock.at(200, life.ray.idle, 95.0, 0.0)
    assert life.run() == exits.OK
    ((when, least),) = scaled
    assert when == pytest.approx(200, abs=0.2)
    assert least == 0
    assert capfd.readouterr().err.count("1 worker node has had nothing to do for 90 s") == 1


@pytest.mark.parametrize("is_over", [False, True])
def test_the_first_workers_are_requested_before_ray_looks_after_them(
    tmp_path: Path, is_over: bool
) -> None:
    ray = ray_head.RayHead(
        ordered(nodes=Range(2, 4), on=Placement.NODES),
        NodeConfig.from_environment(nodes.HEAD, ENVIRONMENT),
        address="10.0.0.5",
        environment={},
        folder=tmp_path,
        provider=cast(Any, {}),
    )

    def start_first(count: int) -> None:
        if is_over:  # the job has given up meanwhile
            ray.scale(least=0)
        raise NodeLaunchException("x", f"{count} hosts", None)

    vars(ray)["_nodes"] = Mock(start_first=start_first)
    ray.request()
    place = tmp_path / "autoscaling.yaml"
    eventually("Ray reads it", place.exists)
    worker = json.loads(place.read_text())["available_node_types"]["worker"]
    assert worker["min_workers"] == (0 if is_over else 4)


# --- the files of a program on the head -----------------------------------------------------------
def on_head(
    s3: S3,
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    clock: Any = time,
    lasts: int = 600,
    job: str = ENVIRONMENT[nodes.ENV_JOB],
) -> job_head.JobHead:
    """One attempt at a job whose bucket is in memory.

    Args:
        clock: of its files; they are copied often by the real one.
        lasts: seconds to the deadline.
    """
    monkeypatch.setattr(code, "prepare", lambda *_, **__: {})
    order = ordered(command=words, on=Placement.HEAD, max_seconds=lasts, code="s3://bucket/c.zip")
    own = replace(order, deadline=time.time() + lasts, job=job)
    every_s, quiet_s = (0.05, 0) if clock is time else (30, 5)
    return job_head.JobHead(
        own,
        cast(RayHead, Ray(own)),
        {**os.environ, nodes.ENV_STORAGE: "s3://bucket"},
        client=s3,
        make_mirror=functools.partial(
            open_mirror, client=s3, every_s=every_s, quiet_s=quiet_s, clock=clock
        ),
    )


def saved(s3: S3) -> dict[str, str]:
    """What the list of the head's files names."""
    return saved_in(s3, "r1")


def test_a_head_reports_that_it_runs_and_whether_all_its_nodes_have_been_there() -> None:
    life = Life(lasts=200, recipe="fsdp", nodes=Range(2, 2), capacity_wait_s=60)
    found: list[Any] = []

    def report() -> None:
        life.job.report_life()
        (content,) = life.s3.objects.values()
        found.append(json.loads(content)["is_complete"])

    for at, nodes_ in ((20, 0), (40, 2), (60, 1)):  # one is lost again
        life.clock.at(at, life.ray.have, nodes_)
        life.clock.at(at + 10, report)
    life.run()
    assert found == [False, True, True]


def test_a_head_reports_until_it_has_ended() -> None:
    ended, reports = Mock(), Mock()
    ended.wait.side_effect = [False, False, True]
    job_head._repeat(reports, ended)
    assert (reports.call_count, ended.wait.call_args.args) == (2, (times.HEAD_REPORTS_S,))


def told(s3: S3) -> str:
    """The reason of the job, as its head has told it."""
    return s3.objects.get("runs/r1/jobs/r1-20261121-0900-abcd.reason", b"").decode()


class Refusing(S3):
    """A bucket that refuses so many uploads before it takes them."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times
        self.on_upload = self._refuse

    def _refuse(self, _key: str, _content: bytes) -> None:
        self.left -= 1
        if self.left >= 0:
            raise EndpointConnectionError(endpoint_url="s3")


@pytest.mark.parametrize("own_code", [0, 3])
def test_a_program_on_the_head_whose_last_files_are_not_saved_has_not_succeeded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], own_code: int
) -> None:
    s3 = Refusing(1_000_000)
    script = f"for n in 1 2 3 4 5 6 7; do echo $n > result-$n; done; exit {own_code}"
    own = on_head(s3, monkeypatch, "sh", "-c", script, clock=FakeClock())
    assert own.run() == (exits.FILES_LOST if own_code == 0 else own_code)
    what = ", ".join(f"work/result-{number}" for number in range(1, 6)) + " and 2 more"
    assert f"files lost: 7 files: {what}" in capfd.readouterr().err
    reason = f"files lost: 7 files: {what}"
    if own_code:
        reason = "failed: exit code 3; trainctl logs r1"
    assert told(s3) == reason


def test_scalars_of_a_program_on_the_head_are_in_its_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tensorboard")
    s3 = S3()
    assert on_head(s3, monkeypatch, sys.executable, "-c", WRITES).run() == exits.OK
    assert b"train/loss runs/good" in s3.objects["runs/r1/metrics.jsonl"]


@pytest.mark.parametrize(("lasts", "code"), [(600, exits.OK), (5, exits.FILES_LOST)])
def test_the_last_files_of_a_program_on_the_head_are_tried_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch, lasts: int, code: int
) -> None:
    clock, s3 = FakeClock(), Refusing(20)
    words = ("sh", "-c", "echo 1 > result")
    assert on_head(s3, monkeypatch, *words, clock=clock, lasts=lasts).run() == code
    assert saved(s3) == ({} if code else {"work/result": "1\n"})
    assert (clock.now > times.FILES_SAVE_S) == (code == exits.OK), (
        "longer than a node has that must end"
    )


@contextmanager
def saving(own: job_head.JobHead, s3: S3) -> Iterator[tuple[threading.Thread, list[int]]]:
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
        own.stop()
        thread.join(30)


def test_a_program_on_the_head_ends_when_another_job_takes_over_its_files(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    s3 = S3()
    go = tmp_path / "go"
    script = f"echo 1 > step; until [ -e {go} ]; do sleep 0.1; done; echo 2 > step; sleep 600"
    own = on_head(s3, monkeypatch, "sh", "-c", script)
    with saving(own, s3) as (thread, codes):
        assert on_head(s3, monkeypatch, "true", job="r1-20261121-0901-efgh").run() == exits.OK
        go.touch()
        thread.join(60)
    assert codes == [exits.FILES_LOST]
    assert "another job has taken over the files" in capfd.readouterr().err
    assert told(s3) == "files lost: another job has taken over the files of the run"


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (
            "def f():\n    raise ValueError('shapes do not match')\nf()",
            exits.FAILED,
            "failed: ValueError: shapes do not match (<string>:2); trainctl logs r1",
        ),
        (
            "import argparse; argparse.ArgumentParser('t').parse_args(['--follow'])",
            exits.BAD_INPUT,
            "failed: t: error: unrecognized arguments: --follow; trainctl logs r1",
        ),
        (
            "import threading; threading.Thread(target=lambda: 1 / 0).start()",
            exits.OK,
            "succeeded, with an exception that was not caught: ZeroDivisionError: division by zero "
            "(<string>:1); trainctl logs r1; no file was saved: keep results in the working "
            "folder, in HOME or in $TRAIN_OUTPUT",
        ),
        (
            ("sh", "-c", f"{sys.executable} -c 'raise SystemExit(3)'; echo > done"),
            exits.OK,
            "succeeded, but python -c 'raise SystemExit(3)' ended with exit code 3",
        ),
        (
            ("sh", "-c", f"{sys.executable} -c 'import time; time.sleep(99)' & echo > done"),
            exits.OK,
            "succeeded, but python -c 'import time; time.sleep(99)' still ran and was ended",
        ),
        # Ray saves where the program has said.
        (("sh", "-c", f'> "${nodes.ENV_RAY_NAMES}/{OWN_STORAGE}"'), exits.OK, ""),
    ],
    ids=["exception", "argparse", "thread", "exit code", "background", "own storage"],
)
def test_the_reason_of_a_program_on_the_head_is_its_error_or_its_last_words(
    monkeypatch: pytest.MonkeyPatch, words: str | tuple[str, ...], code: int, reason: str
) -> None:
    monkeypatch.setattr(process, "_LEAVE_S", 0.1)
    s3 = S3()
    given = (sys.executable, "-c", words) if isinstance(words, str) else words
    assert on_head(s3, monkeypatch, *given).run() == code
    assert told(s3) == reason


def test_the_reason_of_a_recipe_is_the_sentence_of_its_launcher(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def spawn(_words: tuple[str, ...], *, emit: Callable[[str], None], **_: Any) -> Any:
        emit("error: the text has 1 documents: give more text")
        return Command(clock=life.clock, words=(), environment={}, ends=0, code=2, stops_in=0)

    life = Life(recipe="fsdp")
    life.job._spawn = spawn
    assert life.run() == exits.BAD_INPUT
    assert told(life.s3) == "failed: the text has 1 documents: give more text; trainctl logs r1"
    assert "error: the text has 1 documents" in capfd.readouterr().out, "it is in the log"


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
        assert on_head(s3, monkeypatch, *words).run() == 0
    assert saved(s3)["work/said"] == "r1\nr1\n"
    lines = saved(s3)["output/said"].splitlines()
    assert lines[0] == "r1", "of the working directory"
    assert lines.count("s3://bucket/runs/r1/ray") == 2, "of the output, and of this attempt"


def test_a_command_that_cannot_be_run_leaves_what_an_earlier_attempt_has_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3 = S3()
    assert on_head(s3, monkeypatch, "sh", "-c", "echo 1 > step").run() == 0
    with pytest.raises(InputError, match="no-such-command cannot be run"):
        on_head(s3, monkeypatch, "no-such-command").run()
    time.sleep(0.5)  # several rounds, if the files were still copied
    assert saved(s3) == {"work/step": "1\n"}
    assert told(s3).startswith("failed: no-such-command cannot be run")


def test_a_stop_does_not_wait_for_the_files_of_a_program_on_the_head(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    s3 = S3()
    assert on_head(s3, monkeypatch, "sh", "-c", "echo 1 > step").run() == 0
    before = saved(s3)
    own = on_head(s3, monkeypatch, "sh", "-c", "echo 2 > step")
    told = threading.Event()
    ended: list[str] = []

    def download(key: str) -> None:
        if s3.objects[key] == b"1\n":  # a file; a list is small, and is waited for
            own.stop()
            told.wait(120)
            ended.append(key)

    s3.on_download = download
    assert own.run() == exits.TERMINATED
    assert not ended, "the download hangs"
    told.set()
    said = capfd.readouterr().err
    assert said.count("stopped on request") == 1
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
    work = tmp_path if has_code else None
    found = on_node.prepare_head(SPEC, {"A": "b"}, work, {nodes.ENV_STORAGE: storage})
    assert found == ({"A": "b"} | code.for_ray({"A": "b"}, work), None)


def test_a_program_on_the_head_and_its_ray_workers_share_variables(
    tmp_path: Path,
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").touch()
    own = {"A": "b", "PYTHONPATH": "/mine"}
    made: list[tuple[dict[str, Path], str]] = []

    def make_mirror(folders: dict[str, Path], address: str, **options: Any) -> Mirror:
        made.append((folders, address))
        return open_mirror(folders, address, client=S3(), **options)

    spec = replace(SPEC, command=("python", "train.py"), code="s3://bucket/code.zip")
    environment = {nodes.ENV_STORAGE: "s3://bucket"}
    found, _ = on_node.prepare_head(spec, own, work, environment, make_mirror=make_mirror)
    told = json.loads(found[RAY_VARIABLE])["runtime_env"]
    for name in (nodes.ENV_RUN, nodes.ENV_RAY_STORAGE, nodes.ENV_WATCH, "PYTHONPATH", "A"):
        assert told["env_vars"][name] == found[name]
    assert found["PYTHONPATH"].endswith(f"startup{os.pathsep}/mine")
    assert [*Path(told["working_dir"]).iterdir()] == [Path(told["working_dir"]) / "train.py"]
    assert told["working_dir"] != str(work), "what it writes is not sent to other nodes"
    folders = {"work": work, "output": tmp_path / "output", "home": tmp_path / "home"}
    assert made == [(folders, "s3://bucket/runs/r1/output/")]
    assert found["HOME"] == str(tmp_path / "home")
    assert "HOME" not in told["env_vars"], "it is a folder of this node"


def test_a_job_begins_with_the_cache_of_its_host_and_needs_ecs_to_start_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began: list[bool] = []
    monkeypatch.setattr(host_cache, "make_room", lambda: began.append(True))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert container.main(["job"]) == exits.BAD_INPUT
    assert "ECS" in capsys.readouterr().err
    assert began == [True]
