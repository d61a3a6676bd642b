"""A job reacts to lost and new nodes, with real launchers and threads in the place of Ray's
actors."""

import errno
import functools
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from containers.program.files import s3_files, starts
from containers.program.files.s3_files import PreparationStopped
from containers.program.files.starts import ProgramStart
from containers.program.start import on_node, ray_nodes, supervisor
from containers.program.start.on_node import Ended, Launcher, LaunchSpec, NodePlace
from containers.program.start.ray_nodes import NodeInfo, alive
from containers.program.start.supervisor import Next, NodeGroup, Seat
from containers.program.watch import joined
from containers.program.watch import signs as watch
from contract import exits, times
from contract.errors import InputError
from contract.job import JobSpec
from contract.nodes import ENV_JOB, Range
from tests.aws.s3 import S3
from tests.containers.program.stub_torch import write_program
from tests.eventually import eventually
from training.record import progress
from training.record.goodput import Activity
from training.record.progress import Progress

Ref = Future[Any]


class Actor:
    """A launcher as Ray shows it: each method has a ``remote``, which returns at once."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.is_lost = False
        self.before: dict[str, Callable[[], None]] = {}
        self.called: list[tuple[str, tuple[Any, ...]]] = []
        self._refs: list[Ref] = []

    def __getattr__(self, name: str) -> Any:
        actor = self

        class Method:
            def remote(self, *given: Any) -> Ref:
                ref: Ref = Future()
                actor._refs.append(ref)
                threading.Thread(target=actor._call, args=(ref, name, given), daemon=True).start()
                return ref

        return Method()

    def _call(self, ref: Ref, name: str, given: tuple[Any, ...]) -> None:
        self.called.append((name, given))
        try:
            if name in self.before:
                self.before[name]()
            found = None if self.is_lost else getattr(self.launcher, name)(*given)
        except Exception as error:
            if not ref.done():
                ref.set_exception(error)
            return
        if self.is_lost:
            self.lose()
        elif not ref.done():
            ref.set_result(found)

    def lose(self) -> None:
        """The node is gone: no call returns any more."""
        self.is_lost = True
        for ref in self._refs:
            if not ref.done():
                ref.set_exception(RayActorError())
        self.launcher.stop(0)


class Ray:
    """What the programs' nodes use of Ray."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.there: dict[str, Actor] = {}
        self.actors: list[Actor] = []
        self.prepare: Callable[[str, Actor], None] = lambda _name, _actor: None

    def alive(self) -> list[NodeInfo]:
        return [
            NodeInfo(id=name, address="127.0.0.1", cpus=1, gpus=0, is_head=False)
            for name in self.there
        ]

    def prepare_on(self, node: str, call: Callable[[Actor, NodePlace], None]) -> None:
        """Let this happen on a node ("": on each) instead of its preparation."""

        def replace_it(name: str, actor: Actor) -> None:
            if node in ("", name):
                actor.launcher._prepare = functools.partial(call, actor)  # type: ignore[method-assign]

        self.prepare = replace_it

    def start_launcher(self, told: LaunchSpec, node: NodeInfo) -> Actor:
        folder = self.folder / f"{len(self.actors)}-{node.id}"
        actor = self.there[node.id] = Actor(Launcher(told, folder=str(folder)))
        self.actors.append(actor)
        self.prepare(node.id, actor)
        return actor

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        try:
            return ref.result(timeout)
        except TimeoutError as error:
            raise GetTimeoutError from error

    def wait(
        self, refs: Sequence[Ref], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Ref], list[Ref]]:
        wait(refs, timeout, ALL_COMPLETED if num_returns == len(refs) else FIRST_COMPLETED)
        done = [ref for ref in refs if ref.done()][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def kill(self, actor: Actor) -> None:
        actor.lose()


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    here = Ray(tmp_path)
    monkeypatch.setattr(supervisor, "ray", here)
    monkeypatch.setattr(ray_nodes, "ray", here)
    monkeypatch.setattr(supervisor, "alive", here.alive)
    monkeypatch.setattr(supervisor, "start_launcher", here.start_launcher)
    for name, seconds in (
        *(("_POLL_S", 0.05), ("_OTHERS_S", 0.5)),
        *(("_SETTLE_S", 0.5), ("_GROW_AFTER_S", 0.5)),
    ):
        monkeypatch.setattr(supervisor, name, seconds)
    yield here
    for actor in here.actors:
        actor.launcher.stop(0)


def group(
    script: str, *, workers: str = "2", capacity_wait_s: int = 30, hang_s: int = 0
) -> NodeGroup:
    order = JobSpec(
        run="r1",
        command=("sh", "-c", script),
        nodes=Range.parse(workers, option="workers"),
        capacity_wait_s=capacity_wait_s,
        hang_s=hang_s,
    )
    return NodeGroup(LaunchSpec(order=order, variables={}))


class Running:
    """A group that runs in a thread."""

    def __init__(self, group: NodeGroup) -> None:
        self.group, self._codes = group, list[int]()
        run = lambda: self._codes.append(group.run())  # noqa: E731
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def code(self) -> int:
        self._thread.join(60)
        return self._codes[0]


def add(ray: Ray, *names: str) -> None:
    for name in names:
        ray.there[name] = None  # type: ignore[assignment]


def wait_until(is_so: Callable[[], bool]) -> None:
    eventually("it", is_so, timeout_s=30, every_s=0.05)


@dataclass
class Script:
    """A program that notes its starts and its SIGTERMs, and ends when it is let go."""

    place: Path

    def __str__(self) -> str:
        script = (
            f"trap 'echo told >> {self.place}/count; exit 0' TERM; echo up >> {self.place}/count; "
        )
        return script + f"until test -e {self.place}/end; do sleep 0.05; done"

    def count(self, word: str) -> int:
        path = self.place / "count"
        return path.read_text().count(word) if path.exists() else 0

    def let_go(self) -> None:
        (self.place / "end").touch()


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_a_head_that_trains_is_node_0_and_counts_beside_the_workers(
    ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def node(name: str, **resources: float) -> dict[str, Any]:
        place = {"NodeID": name, "NodeManagerAddress": "127.0.0.1", "Alive": True}
        return {**place, "Resources": {"CPU": 1.0, **resources}}

    found = [node("worker"), node("head", **{"node:__internal_head__": 1.0})]
    monkeypatch.setattr(ray, "nodes", lambda: found, raising=False)
    monkeypatch.setattr(supervisor, "alive", alive)
    assert group(f"echo of $NUM_NODES > {tmp_path}/$NODE_RANK", workers="1").run() == exits.OK
    assert [*ray.there] == ["head", "worker"]
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["of 2\n"] * 2


def test_a_node_lost_at_the_start_leaves_no_program_behind(ray: Ray, script: Script) -> None:
    def prepare(name: str, actor: Actor) -> None:
        def lose() -> None:
            wait_until(lambda: script.count("up") == 1)  # node a's program
            actor.is_lost = True
            del ray.there[name]
            add(ray, "c")

        if name == "b":
            actor.before["start"] = lose

    add(ray, "a", "b")
    ray.prepare = prepare
    running = Running(group(str(script)))
    wait_until(lambda: script.count("up") == 3)
    assert script.count("told") == 1
    script.let_go()
    assert running.code() == exits.OK


def test_an_error_on_one_node_ends_the_program_on_the_others(ray: Ray, script: Script) -> None:
    def fail(_actor: Actor, _place: NodePlace) -> None:
        wait_until(lambda: script.count("up") == 1)
        raise KeyError("not here")

    add(ray, "a", "b")
    ray.prepare_on("b", fail)
    with pytest.raises(KeyError, match="not here"):
        group(str(script)).run()
    assert script.count("told") == 1


@pytest.mark.parametrize("when", ["while the program runs", "when it is told to start it"])
def test_a_launcher_that_is_lost_alone_is_replaced_on_its_node(
    ray: Ray, script: Script, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LONG_RUN_S", 0.0)
    monkeypatch.setattr(supervisor, "_STARTS_IN_VAIN", 2)
    num_lost = 2 if when.startswith("while") else 1

    def prepare(_name: str, actor: Actor) -> None:
        if len(ray.actors) == 2 and when.startswith("when"):
            actor.before["start"] = actor.lose

    add(ray, "a", "b")
    ray.prepare = prepare
    running = Running(group(str(script)))
    wait_until(lambda: script.count("up") > 0)

    def all_run(num_actors: int) -> bool:
        seats = running.group._seats
        has_begun = math.isfinite(running.group._began) and all(seat.runs for seat in seats)
        return len(ray.actors) == num_actors and has_begun

    for number in range(num_lost if when.startswith("while") else 0):
        wait_until(functools.partial(all_run, 2 + number))
        ray.actors[-1].lose()  # after a long run: the first in a row
    wait_until(functools.partial(all_run, 2 + num_lost))
    assert [seat.node.id for seat in running.group._seats] == ["a", "b"]
    script.let_go()
    assert running.code() == exits.OK


def test_a_node_lost_before_the_first_start_is_waited_for_within_limits(
    ray: Ray, capfd: pytest.CaptureFixture[str]
) -> None:
    add(ray, "a")
    assert group("true", capacity_wait_s=1).run() == exits.NO_CAPACITY
    assert "1 of 2 nodes" in capfd.readouterr().err


def test_a_node_that_has_notice_after_its_program_has_ended_is_no_loss(
    ray: Ray, script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    add(ray, "a", "b")
    running = Running(group(f"test $NODE_RANK = 1 && exit; {script}"))
    wait_until(lambda: len(running.group._seats) == 2 and running.group._seats[1].is_done)
    running.group._seats[1].launcher.launcher._notice.write_text(str(time.time() + 60))
    wait_until(lambda: "b" in running.group._leaving)
    time.sleep(0.2)
    script.let_go()
    assert running.code() == exits.OK
    assert script.count("up") == 1
    assert "started again" not in capfd.readouterr().err


def test_a_program_moves_away_from_a_node_that_has_notice(ray: Ray, script: Script) -> None:
    add(ray, "a", "b")
    running = Running(group(str(script)))
    wait_until(lambda: script.count("up") == 2)
    add(ray, "c")
    ray.actors[1].launcher._notice.write_text(str(time.time() + 60))
    wait_until(lambda: script.count("up") == 4)
    assert script.count("told") == 2
    assert [seat.node.id for seat in running.group._seats] == ["a", "c"]
    script.let_go()
    assert running.code() == exits.OK


@pytest.mark.parametrize(("times_bad", "code"), [(2, exits.OK), (9, exits.FAILED)])
def test_a_disk_in_trouble_is_tried_again_some_times(
    ray: Ray, capfd: pytest.CaptureFixture[str], times_bad: int, code: int
) -> None:
    errors = iter([OSError(errno.ENOSPC, "No space left on device")] * times_bad)

    def fail(actor: Actor, place: NodePlace) -> None:
        if error := next(errors, None):
            raise error
        Launcher._prepare(actor.launcher, place)

    add(ray, "a", "b")
    ray.prepare_on("b", fail)
    assert group("true").run() == code
    said = capfd.readouterr().err
    assert said.count("cannot start: [Errno 28] No space left") == min(times_bad, 5)
    assert ("5 times in a row" in said) == (code == exits.FAILED)


def test_nodes_that_are_lost_at_each_start_end_the_job(
    ray: Ray, capfd: pytest.CaptureFixture[str]
) -> None:
    number = 0

    def prepare(name: str, actor: Actor) -> None:
        def lose() -> None:
            nonlocal number
            number += 1
            actor.is_lost = True
            del ray.there[name]
            add(ray, f"b{number}")

        if name.startswith("b"):
            actor.before["start"] = lose

    add(ray, "a", "b")
    ray.prepare = prepare
    assert group("sleep 1000").run() == exits.FAILED
    assert number == 5
    assert "5 times in a row" in capfd.readouterr().err


@dataclass
class Files:
    """What a node's last copy does: stands in for ``Mirror``."""

    lost: list[str] = field(default_factory=list)
    newest_ns: int = field(default_factory=time.time_ns)
    worked_ns: int = 0
    is_replaced: bool = False
    is_down: bool = False
    """The last copy lasts until it is hurried."""
    limits: list[float | None] = field(default_factory=list)
    starts: list[ProgramStart] = field(default_factory=list)
    hurried: threading.Event = field(default_factory=threading.Event)

    def save(self, within_s: float | None = None) -> bool:
        self.limits.append(within_s)
        if self.is_down:
            assert self.hurried.wait(60)
        return not self.lost

    def restore(self, start: ProgramStart, **_: object) -> None:
        self.starts.append(start)

    def hurry(self, within_s: float) -> None:
        assert within_s == 60
        self.hurried.set()

    def start(self) -> None: ...
    def close(self) -> None: ...


class Stored:
    """A group whose nodes' files are kept, and what it reports as lost."""

    def __init__(
        self,
        ray: Ray,
        monkeypatch: pytest.MonkeyPatch,
        script: str,
        workers: str = "",
        /,
        **files: Files,
    ) -> None:
        self.reported: list[tuple[str, str, str]] = []
        self.group = group(script, workers=workers or str(len(files)))
        self.deadline = time.time() + 600
        self.group._spec = replace(self.group._spec, storage="s3://bucket", deadline=self.deadline)

        def report(what: str, *, storage: str, run: str, job: str) -> None:
            if storage:
                self.reported.append((what, run, job))

        def open_mirror(*_: object, node: int, **__: object) -> Files:
            return [*files.values()][node]

        self.s3 = S3()
        monkeypatch.setattr(s3_files, "_client", lambda: self.s3)
        monkeypatch.setattr(on_node, "open_mirror", open_mirror)
        monkeypatch.setattr(supervisor, "report", report)
        monkeypatch.setenv(ENV_JOB, "j1")
        add(ray, *(files if not workers else [*files][:2]))

    def progress(self) -> Progress | None:
        """What the program has reached, as far as it is in the bucket."""
        content = self.s3.objects.get("runs/r1/progress.json")
        return Progress.from_json(json.loads(content)) if content else None


class Broken(Files):
    def save(self, within_s: float | None = None) -> bool:
        raise OSError(errno.EIO, f"within {within_s}: Input/output error")


def aged(seconds: float) -> Files:
    """Files of which the newest is so many seconds old."""
    return Files(newest_ns=time.time_ns() - int(seconds * 1e9))


LOST = [f"output/{number}" for number in range(7)]


@pytest.mark.parametrize(
    ("script", "files", "code", "reason"),
    [
        (
            "true",
            lambda: [Files(newest_ns=0), Files(newest_ns=0)],
            exits.OK,
            "succeeded, but no file was saved: keep results in",
        ),
        (
            "true",
            lambda: [Files(newest_ns=0), aged(7300)],
            exits.OK,
            "succeeded, but its newest file is from 2 h 1 min before its end",
        ),
        ("true", lambda: [Files(newest_ns=0), aged(3000)], exits.OK, ""),
        (
            f"test $NODE_RANK = 0 || {sys.executable} -c 'raise SystemExit(3)'; true",
            lambda: [aged(7300), aged(7300)],
            exits.OK,
            "succeeded, but python -c 'raise SystemExit(3)' ended with exit code 3 on node 1; its "
            "newest file is from 2 h",
        ),
        (
            "true",
            lambda: [Files(), Files(lost=LOST)],
            exits.FILES_LOST,
            "files lost: 7 files of node 1: output/0, output/1, output/2, output/3, output/4 and 2 "
            "more",
        ),
        (
            "true",
            lambda: [Broken()],
            exits.FILES_LOST,
            "files lost: 1 file of node 0: all, because of OSError",
        ),
        (
            "exit 3",
            lambda: [Files(lost=["output/last"])],
            3,
            "failed on node 0: exit code 3; trainctl logs r1 --node 0",
        ),
        # The system's own codes are not taken over from a program.
        (
            f"exit {exits.FILES_LOST}",
            lambda: [Files()],
            exits.FAILED,
            "failed on node 0: exit code 74",
        ),
    ],
)
def test_the_end_of_a_program_and_of_its_files_is_one_code_and_reason(
    ray: Ray,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    files: Callable[[], list[Files]],
    code: int,
    reason: str,
) -> None:
    of_nodes = dict(zip("ab", files(), strict=False))
    here = Stored(ray, monkeypatch, script, **of_nodes)
    assert here.group.run() == code
    assert [(what[: len(reason)], run, job) for what, run, job in here.reported] == [
        (reason, "r1", "j1")
    ] * bool(reason)
    left = here.deadline - time.time()
    limits = [limit for each in of_nodes.values() for limit in each.limits]
    assert all(left - 70 < (each or 0) < left - 50 for each in limits), "before the head's end"


@pytest.mark.parametrize("has_saved", [True, False])
def test_a_node_lost_after_its_program_ended_has_saved_its_files_or_lost_them(
    ray: Ray, script: Script, monkeypatch: pytest.MonkeyPatch, has_saved: bool
) -> None:
    files = {"a": Files(), "b": Files(is_down=not has_saved)}
    here = Stored(ray, monkeypatch, f"test $NODE_RANK = 1 && exit; {script}", **files)
    running = Running(here.group)
    wait_until(lambda: bool(files["b"].limits))
    (seat,) = [seat for seat in here.group._seats if seat.number == 1]
    wait_until(lambda: seat.is_over if has_saved else seat.is_done)
    ray.there["b"].lose()
    script.let_go()
    assert running.code() == (exits.OK if has_saved else exits.FILES_LOST)
    files["b"].hurried.set()
    lost = [("files lost: the last files of node 1, which is lost", "r1", "j1")]
    assert here.reported == ([] if has_saved else lost)


def test_last_files_have_as_long_as_they_need_unless_the_job_must_end(
    ray: Ray, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    files = Files(is_down=True, lost=["work/last"])
    here = Stored(ray, monkeypatch, "true", a=files)
    running = Running(here.group)
    wait_until(lambda: bool(files.limits))
    time.sleep(0.5)
    assert not files.hurried.is_set()
    here.group.stop()
    running.code()
    assert files.hurried.is_set()
    assert "not saved: 1 file of node 0: work/last\n" in capfd.readouterr().err


def test_a_program_ends_on_all_nodes_when_another_job_takes_over_its_files(
    ray: Ray, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"a": Files(), "b": Files()}
    here = Stored(ray, monkeypatch, str(script), **files)
    running = Running(here.group)
    wait_until(lambda: script.count("up") == 2)
    files["b"].is_replaced = True
    ray.there["b"].launcher.stop(20)  # as its mirror does
    assert running.code() == exits.FILES_LOST
    assert script.count("told") == 2
    assert here.reported == [
        ("files lost: another job has taken over the files of the run", "r1", "j1")
    ]


def test_a_stop_does_not_wait_for_files_that_are_restored(
    ray: Ray, script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    restoring = threading.Event()

    def restore(actor: Actor, _place: NodePlace) -> None:
        restoring.set()
        wait_until(lambda: actor.launcher._is_ending)
        raise PreparationStopped

    add(ray, "a", "b")
    ray.prepare_on("b", restore)
    running = Running(group(str(script)))
    assert restoring.wait(30)
    running.group.stop()
    assert running.code() == exits.TERMINATED
    assert "started again" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "within_s"),
    [("true", 60), ("test $NODE_RANK = 1 && exit 7; true", times.COMMAND_STOP_S)],
    ids=["stopped", "failed elsewhere"],
)
def test_a_program_has_its_grace_where_what_it_saves_counts(
    ray: Ray, script: Script, words: str, within_s: int
) -> None:
    given: list[float] = []

    def prepare(_name: str, actor: Actor) -> None:
        stop = actor.launcher.stop

        def noted(within_s: float, *save_s: float) -> None:
            given.append(within_s)
            stop(within_s, *save_s)

        actor.launcher.stop = noted  # type: ignore[method-assign, assignment]

    add(ray, "a", "b")
    ray.prepare = prepare
    running = Running(group(f"{words}; {script}"))
    wait_until(lambda: script.count("up") > 0)
    if within_s == 60:
        running.group.stop()
    running.code()
    assert {*given} == {within_s}


@pytest.mark.usefixtures("ray")
def test_nodes_that_do_not_answer_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_LAUNCHER_START_S", 0.3)
    silent = SimpleNamespace(status=SimpleNamespace(remote=Ref))
    node = NodeInfo(id="a", address="127.0.0.1", cpus=1, gpus=0, is_head=False)
    seats = [Seat(number=number, node=node, launcher=silent) for number in range(20)]
    began = time.monotonic()
    while not all(seat.is_lost for seat in seats):
        supervisor.ask(seats)
        assert time.monotonic() - began < 5
    assert time.monotonic() - began > 0.3


def test_a_program_that_failed_beside_a_bad_gpu_is_restarted_elsewhere(
    ray: Ray, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def prepare(name: str, actor: Actor) -> None:
        def host_faults() -> list[str]:
            if name != "b":
                return []
            add(ray, "c")
            return ["GPU 0 (NVIDIA A100) has 7 uncorrected memory errors"]

        actor.launcher.host_faults = host_faults  # type: ignore[method-assign]

    add(ray, "a", "b")
    ray.prepare = prepare
    count = tmp_path / "count"
    # Node 0 fails too: a collective breaks on all nodes, wherever the GPU is.
    script = f"echo up >> {count}; test $(grep -c up {count}) -gt 2 || exit 9"
    assert group(script).run() == exits.OK
    assert [actor.is_lost for actor in ray.actors] == [False, True, False]
    said = capfd.readouterr().err
    assert "node 1 (127.0.0.1) needs another host: GPU 0 (NVIDIA A100) has 7 unc" in said
    assert "the program is started again" in said


def test_files_that_cannot_be_restored_end_the_job_before_its_start(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Stored(ray, monkeypatch, "true", a=Files(), b=Files())
    monkeypatch.setattr(starts, "begin", Mock(side_effect=InputError("damaged")))
    assert supervisor.run(here.group) == exits.BAD_INPUT
    assert "the files of the run cannot be restored: damaged" in here.reported[0][0]


# --- decisions ------------------------------------------------------------------------------------
OK = Ended(code=0, at=1.0, was_stopped=False)
FAILED = Ended(code=3, at=1.0, was_stopped=False)
TOLD = Ended(code=143, at=0.5, was_stopped=True)


@pytest.mark.parametrize(
    ("ends", "given", "expected"),
    [
        ([None, None], {}, Next.WAIT),
        ([None, OK], {}, Next.WAIT),
        ([OK, OK], {}, Next.DONE),
        ([None, FAILED], {}, Next.FAILED),
        ([OK, FAILED], {"can_grow": True}, Next.FAILED),
        ([None, FAILED], {"is_lost": True}, Next.AGAIN),
        ([OK, None], {"is_lost": True}, Next.AGAIN),
        ([None, None], {"can_grow": True}, Next.AGAIN),
        ([None, OK], {"can_grow": True}, Next.WAIT),
        ([None, replace(TOLD, was_replaced=True)], {"is_lost": True}, Next.REPLACED),
    ],
)
def test_a_program_ends_or_is_started_again(
    ends: list[Ended | None], given: dict[str, bool], expected: Next
) -> None:
    assert supervisor.after(ends, **{"is_lost": False, "can_grow": False, **given}) is expected


# --- ranges of nodes ------------------------------------------------------------------------------
def test_a_range_shrinks_with_a_loss_and_grows_when_a_node_comes(
    ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, end = tmp_path / "count", tmp_path / "end"
    script = f"echo $NODE_RANK of $PET_NNODES at $MASTER_PORT >> {count}; "
    script += f"until test -e {end}; do sleep 0.05; done"
    files = {"a": Files(), "b": Files()}
    here = Stored(ray, monkeypatch, script, "1:2", **files)
    running = Running(here.group)

    def wait_for(*lines: str) -> None:
        wait_until(
            lambda: count.exists() and sorted(count.read_text().splitlines()) == sorted(lines)
        )
        count.unlink()

    wait_for("0 of 2 at 29500", "1 of 2 at 29500")
    ray.there.pop("a").lose()
    wait_for("0 of 1 at 29501")
    add(ray, "c")
    wait_for("0 of 2 at 29502", "1 of 2 at 29502")
    end.touch()
    assert running.code() == exits.OK
    # The node that is left keeps its number, and with it its files.
    assert [start.nodes for start in files["b"].starts] == [(0, 1), (1,), (0, 1)]


def test_more_nodes_wait_until_files_are_restored(ray: Ray, script: Script) -> None:
    restoring, is_restored = threading.Event(), threading.Event()

    def restore(actor: Actor, place: NodePlace) -> None:
        restoring.set()
        assert is_restored.wait(60)
        Launcher._prepare(actor.launcher, place)

    add(ray, "a")
    ray.prepare_on("", restore)
    running = Running(group(str(script), workers="1:2"))
    assert restoring.wait(30)
    add(ray, "b")
    time.sleep(1)
    assert len(ray.actors) == 1
    is_restored.set()
    wait_until(lambda: script.count("up") == 3)
    assert script.count("told") == 1
    script.let_go()
    assert running.code() == exits.OK


def test_a_program_is_not_ended_for_a_node_that_cannot_start_it(ray: Ray, tmp_path: Path) -> None:
    def prepare(name: str, actor: Actor) -> None:
        actor.is_lost = name == "b"

    add(ray, "a", "b")
    ray.prepare = prepare
    count = tmp_path / "count"
    assert group(f"echo up >> {count}; sleep 3", workers="1:2").run() == exits.OK
    assert count.read_text() == "up\n"


# --- why it failed --------------------------------------------------------------------------------
def test_the_reason_of_a_program_that_fails_is_the_first_error_on_any_node(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Node 0 ends first, and with what it feels of node 1.
    noted = '{"rank": "%s", "at": %s, "parent": 0, "attempt": "", "line": "%s"}'
    felt = noted % (0, 1, "RuntimeError: Connection closed by peer")
    own = noted % (1, 2, "ValueError: shapes do not match (train.py:5)")
    script = f"trap 'exit 1' TERM; test $NODE_RANK = 1 && echo '{own}' > $TRAIN_ERRORS/1.json "
    script += "&& while :; do sleep 0.05; done; "
    script += f"sleep 0.5; echo '{felt}' > $TRAIN_ERRORS/1.json; exit 7"
    here = Stored(ray, monkeypatch, script, a=Files(), b=Files())
    assert here.group.run() == 7
    reason = "failed on node 1, rank 1: ValueError: shapes do not match (train.py:5)"
    assert here.reported == [(f"{reason}; trainctl logs r1 --node 1", "r1", "j1")]


# --- hangs ----------------------------------------------------------------------------------------
LOOP = """
import atexit, os, signal, sys, time
from torch.distributed import all_reduce
from torch.optim.optimizer import Optimizer
rank, optimizer = int(os.environ["RANK"]), Optimizer()
def load():
    time.sleep(30)
for step in range(20):
    optimizer.step()
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        (
            "load() if rank else all_reduce()",
            exits.HUNG,
            "failed: hung: no step or new line for [0-9] s; rank 1 on node 1 was in load "
            r"\(program.py:7\); all stacks: trainctl logs r1; --hang-minutes lets",
        ),
        (
            "os.kill(os.getpid(), signal.SIGSTOP) if rank else all_reduce()",
            exits.HUNG,
            r"no step or new line for .*; rank 1 on node 1 was in state T \(stopped\)",
        ),
        (
            "atexit.register(all_reduce) if rank else None",
            exits.OK,
            "warning: node 1: the program does not end after its last line, and is ended",
        ),
        (
            "atexit.register(all_reduce)",
            exits.OK,
            "warning: node 0, node 1: the program does not end after its last line",
        ),
        (
            "if rank:\n    atexit.register(all_reduce)\n    raise ValueError('no loss')",
            exits.HUNG,
            r"not on node 1; .* in all_reduce .*; before that, ValueError: no loss \(program.py:13",
        ),
        (
            "load() if rank else None",
            exits.HUNG,
            "the program has ended on the other nodes, and not on node 1; .* in load",
        ),
    ],
    ids=[
        "a rank sleeps",
        "a rank is stopped",
        "a deadlock at exit",
        "the same on all nodes",
        "an error and a deadlock",
        "left alone",
    ],
)
def test_a_program_that_hangs_is_ended_with_the_stacks_of_its_ranks(
    ray: Ray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    program: str,
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(watch, "EVERY_S", 0.2)
    monkeypatch.setattr(times, "COMMAND_STOP_S", 1)
    path = write_program(tmp_path / "code", f"{LOOP}{program}\n")
    add(ray, "a", "b")
    assert group(f"{sys.executable} {path}", hang_s=2).run() == code
    log, errors = capfd.readouterr()
    assert re.search(said, errors, re.MULTILINE), errors
    assert "the stacks of all processes are in the log" in errors
    assert "[node 1] rank 1, process" in log
    for actor in ray.actors:
        looks = [given[-1] for name, given in actor.called if name == "look"]
        assert True not in looks[:-1]


def test_the_steps_of_a_program_are_written_into_its_run(
    ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "EVERY_S", 0.1)
    monkeypatch.setattr(progress, "EVERY_S", 0.1)
    path = write_program(
        tmp_path / "code", f"{LOOP}while not os.path.exists('{tmp_path}/end'): optimizer.step()\n"
    )
    files = {"a": Files(worked_ns=5), "b": Files(newest_ns=0), "c": Files()}
    here = Stored(ray, monkeypatch, f"{sys.executable} {path}", "2", **files)
    running = Running(here.group)

    def activity() -> Activity:
        return Activity.from_json(json.loads(here.s3.objects["runs/r1/jobs/j1.activity"]))

    def is_known() -> bool:
        now = here.progress()
        return now is not None and now.step > 20 and now.step_s is not None

    wait_until(is_known)
    assert [seat.status.signs.written_ns for seat in here.group._seats] == [5, 0]
    ray.there["b"].lose()
    add(ray, "c")
    wait_until(lambda: len(activity().segments) == 2 and bool(activity().segments[1].stepped))
    (tmp_path / "end").touch()
    assert running.code() == exits.OK
    assert (found := here.progress())
    assert found.job == "j1"
    assert activity().nodes == ("127.0.0.1", "127.0.0.1")
    first, second = activity().segments
    for each in (first, second):
        assert each.stepped
        assert each.last
        assert each.began <= each.stepped <= each.last
    assert (first.resumes, (first.last or 0) < second.began) == (0, True)
    assert second.resumes == 0, "no file was saved: all was lost"


#: Steps on each node; the second one connects to the first from an address of its own.
APART = """
import os, socket, time
{imports}
from torch.optim.optimizer import Optimizer
if {connects} and os.environ["RANK"] == "0":
    server = socket.create_server(("127.0.0.1", 0))
    with open("{folder}/new", "w") as file:
        file.write(str(server.getsockname()[1]))
    os.rename("{folder}/new", "{folder}/port")
    other, _ = server.accept()
elif {connects}:
    while not os.path.exists("{folder}/port"):
        time.sleep(0.05)
    with open("{folder}/port") as file:
        place = ("127.0.0.1", int(file.read()))
    other = socket.create_connection(place, source_address=("127.0.0.2", 0))
while not os.path.exists("{folder}/end"):
    Optimizer().step()
    time.sleep(0.02)
"""


@pytest.mark.parametrize(
    ("imports", "connects", "is_named"),
    [
        ("import lightning.pytorch", False, True),
        ("import lightning.pytorch", True, False),
        ("import json", False, False),
    ],
    ids=["apart", "joined", "a sweep of plain loops"],
)
def test_a_program_whose_nodes_train_apart_has_a_warning_everywhere(
    ray: Ray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    imports: str,
    connects: bool,
    is_named: bool,
) -> None:
    for module in (watch, progress):
        monkeypatch.setattr(module, "EVERY_S", 0.1)
    monkeypatch.setattr(joined, "_APART_S", 1.0)
    code = tmp_path / "code"
    path = write_program(code, APART.format(imports=imports, connects=connects, folder=tmp_path))
    (code / "lightning").mkdir()
    (code / "lightning" / "pytorch.py").touch()
    here = Stored(ray, monkeypatch, f"{sys.executable} {path}", a=Files(), b=Files())
    of_ray, addresses = ray.alive, {"a": "127.0.0.1", "b": "127.0.0.2"}
    monkeypatch.setattr(
        supervisor,
        "alive",
        lambda: [replace(each, address=addresses[each.id]) for each in of_ray()],
    )
    running = Running(here.group)

    def has_stepped() -> bool:
        now = here.progress()
        return now is not None and now.step > 100 and bool(now.warning) == is_named

    wait_until(has_stepped)
    (tmp_path / "end").touch()
    assert running.code() == exits.OK
    words = "node 1 has not joined node 0: each trains by itself"
    assert (f"warning: {words}" in capfd.readouterr().err) == is_named
    assert [what for what, *_ in here.reported] == [f"succeeded, but {words}"] * is_named
    assert (found := here.progress())
    assert found.brief().endswith(words) == is_named
