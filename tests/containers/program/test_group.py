"""What a job does about its nodes, with real launchers and programs and no Ray: threads stand in
for its actors, so that a node can be lost at any moment, also between two calls."""

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from containers.program import bucket, launch, nodes, ray_nodes
from containers.program.launch import Ended, Launcher, LaunchSpec
from containers.program.nodes import Group, Next, Seat
from containers.program.ray_nodes import NodeInfo, alive
from containers.program.starts import Start
from contract import exits, times
from contract.errors import InputError
from contract.nodes import ENV_JOB, Range
from tests.containers.program.s3_in_memory import S3

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
    monkeypatch.setattr(nodes, "ray", here)
    monkeypatch.setattr(ray_nodes, "ray", here)
    monkeypatch.setattr(nodes, "alive", here.alive)
    monkeypatch.setattr(nodes, "start_launcher", here.start_launcher)
    monkeypatch.setattr(nodes, "_LOOK_S", 0.05)
    yield here
    for actor in here.actors:
        actor.launcher.stop(0)
        actor.launcher.close()


def group(script: str, *, workers: str = "2", capacity_wait_s: float = 30) -> Group:
    return Group(
        LaunchSpec(
            run="r1",
            words=("sh", "-c", script),
            workers=Range.parse(workers, option="workers"),
            variables={},
            capacity_wait_s=capacity_wait_s,
            address="127.0.0.1",
        )
    )


def add(ray: Ray, *names: str) -> None:
    for name in names:
        ray.there[name] = None  # type: ignore[assignment]


def test_a_head_that_trains_is_node_0_and_counts_beside_the_workers(
    ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def node(name: str, **resources: float) -> dict[str, Any]:
        place = {"NodeID": name, "NodeManagerAddress": "127.0.0.1", "Alive": True}
        return {**place, "Resources": {"CPU": 1.0, **resources}}

    found = [node("worker"), node("head", **{"node:__internal_head__": 1.0})]
    monkeypatch.setattr(ray, "nodes", lambda: found, raising=False)
    monkeypatch.setattr(nodes, "alive", alive)
    assert group(f"echo of $NUM_NODES > {tmp_path}/$NODE_RANK", workers="1").run() == exits.OK
    assert [*ray.there] == ["head", "worker"]
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["of 2\n"] * 2


def test_a_node_lost_before_the_start_leaves_no_program_behind(ray: Ray, tmp_path: Path) -> None:
    def prepare(name: str, actor: Actor) -> None:
        def lose() -> None:
            wait_until(count.exists)  # node a's program runs
            actor.is_lost = True
            del ray.there[name]
            add(ray, "c")

        if name == "b":
            actor.before["start"] = lose

    end = tmp_path / "end"
    count = tmp_path / "count"
    add(ray, "a", "b")
    ray.prepare = prepare
    script = f"trap 'echo told >> {count}; exit 0' TERM; echo up >> {count}; "
    script += f"until test -e {end}; do sleep 0.05; done"
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(group(script).run()), daemon=True)
    thread.start()
    wait_until(lambda: count.exists() and count.read_text().count("up") == 3)
    assert count.read_text().count("told") == 1
    end.touch()
    thread.join(30)
    assert codes == [exits.OK]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_error_on_one_node_ends_the_program_on_the_others(ray: Ray, tmp_path: Path) -> None:
    def prepare(name: str, actor: Actor) -> None:
        def fail() -> None:
            wait_until((tmp_path / "up").exists)
            raise InputError("cannot be started here")

        if name == "b":
            actor.before["start"] = fail

    add(ray, "a", "b")
    ray.prepare = prepare
    script = f"trap 'touch {tmp_path}/told; exit 0' TERM; touch {tmp_path}/up; "
    script += "while :; do sleep 0.05; done"
    with pytest.raises(InputError, match="cannot be started here"):
        group(script).run()
    assert (tmp_path / "told").exists()


def test_a_node_that_is_lost_before_the_first_start_is_not_waited_for_without_end(
    ray: Ray, capfd: pytest.CaptureFixture[str]
) -> None:
    add(ray, "a")
    assert group("true", capacity_wait_s=0.5).run() == exits.NO_CAPACITY
    assert "1 of 2 nodes" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["notice", "loss"])
def test_a_node_that_goes_after_its_program_has_ended_is_no_loss(
    ray: Ray, tmp_path: Path, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    add(ray, "a", "b")
    end, count = tmp_path / "end", tmp_path / "count"
    script = f"echo up >> {count}; test $NODE_RANK = 1 || until test -e {end}; do sleep 0.05; done"
    running = group(script)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(running.run()), daemon=True)
    thread.start()
    wait_until(lambda: bool(running._seats[1:]) and running._seats[1].is_done)
    leaves = running._seats[1].launcher
    if how == "loss":
        leaves.lose()
    else:
        leaves.launcher._notice_file.write_text(str(time.time() + 60))
    wait_until(lambda: running._seats[1].notice is None)
    time.sleep(0.2)
    end.touch()
    thread.join(30)
    assert codes == [exits.OK]
    assert count.read_text().count("up") == 2
    assert "started again" not in capfd.readouterr().err


def test_a_program_moves_away_from_a_node_that_has_notice(ray: Ray, tmp_path: Path) -> None:
    add(ray, "a", "b")
    end, count = tmp_path / "end", tmp_path / "count"
    script = f"trap 'echo told >> {count}; exit 0' TERM; echo up >> {count}; "
    script += f"until test -e {end}; do sleep 0.05; done"
    running = group(script)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(running.run()), daemon=True)
    thread.start()
    wait_until(lambda: count.exists() and count.read_text().count("up") == 2)
    add(ray, "c")
    ray.actors[1].launcher._notice_file.write_text(str(time.time() + 60))
    wait_until(lambda: count.read_text().count("up") == 4)
    assert count.read_text().count("told") == 2
    assert [seat.node.id for seat in running._seats] == ["a", "c"]
    end.touch()
    thread.join(30)
    assert codes == [exits.OK]


@pytest.mark.parametrize(("times_bad", "code"), [(2, exits.OK), (9, exits.FAILED)])
def test_a_disk_in_trouble_is_tried_again_some_times(
    ray: Ray, capfd: pytest.CaptureFixture[str], times_bad: int, code: int
) -> None:
    errors = iter([OSError(errno.ENOSPC, "No space left on device")] * times_bad)

    def prepare(name: str, actor: Actor) -> None:
        def fail() -> None:
            if error := next(errors, None):
                raise error

        if name == "b":
            actor.before["prepare"] = fail

    add(ray, "a", "b")
    ray.prepare = prepare
    assert group("true").run() == code
    said = capfd.readouterr().err
    assert said.count("cannot prepare: [Errno 28] No space left") == min(times_bad, 5)
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
            actor.before["wait"] = lose

    add(ray, "a", "b")
    ray.prepare = prepare
    assert group("sleep 1000").run() == exits.FAILED
    assert number == 5
    assert "5 times in a row" in capfd.readouterr().err


@pytest.mark.parametrize("is_told", [False, True])
def test_the_last_files_have_as_long_as_they_need_unless_the_job_must_end(
    ray: Ray, is_told: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    running = group("true" if not is_told else "sleep 1000", workers="1")
    hurried = threading.Event()

    def prepare(_name: str, actor: Actor) -> None:
        def save(_within_s: float | None) -> list[str]:
            if is_told:
                return []
            running.stop()
            return ["work/last"] if hurried.wait(30) else []

        actor.launcher.save = save  # type: ignore[method-assign, assignment]
        actor.launcher.hurry = lambda _: hurried.set()  # type: ignore[method-assign, assignment]
        if is_told:
            actor.before["wait"] = running.stop

    add(ray, "a")
    ray.prepare = prepare
    running.run()
    (saved,) = [given for name, given in ray.actors[0].called if name == "save"]
    assert saved == ((60,) if is_told else (None,))
    assert hurried.is_set()
    what = "not saved: 1 file of node 0: work/last\n"
    assert (what in capfd.readouterr().err) is not is_told


@dataclass
class Files:
    """What a node's last copy does: stands in for ``Mirror``."""

    lost: list[str]
    is_replaced: bool = False
    is_down: bool = False
    limits: list[float | None] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)

    def save(self, within_s: float | None = None) -> bool:
        self.limits.append(within_s)
        if self.is_down:
            time.sleep(120)
        return not self.lost

    def restore(self, start: Start, **_: object) -> None:
        self.starts.append(start)

    def start(self) -> None: ...
    def hurry(self, _within_s: float) -> None: ...
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
        told = replace(self.group._told, storage="s3://bucket", deadline=self.deadline)
        self.group._told = told

        def report(what: str, *, storage: str, run: str, job: str) -> None:
            if storage:
                self.reported.append((what, run, job))

        def open_mirror(*_: object, node: int, **__: object) -> Files:
            return [*files.values()][node]

        s3 = S3()
        monkeypatch.setattr(bucket, "_client", lambda: s3)
        monkeypatch.setattr(launch, "open_mirror", open_mirror)
        monkeypatch.setattr(nodes, "report", report)
        monkeypatch.setenv(ENV_JOB, "j1")
        add(ray, *(files if not workers else [*files][:2]))


def test_a_program_whose_last_files_are_not_saved_has_not_succeeded(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [f"output/{number}" for number in range(7)]
    files = {"a": Files(lost=[]), "b": Files(lost=lost)}
    here = Stored(ray, monkeypatch, "true", **files)
    assert here.group.run() == exits.FILES_LOST
    named = "output/0, output/1, output/2, output/3, output/4 and 2 more"
    assert here.reported == [(f"files lost: 7 files of node 1: {named}", "r1", "j1")]
    (limit,) = files["b"].limits
    left = here.deadline - time.time()
    assert left - 70 < (limit or 0) < left - 50, "over before the head ends the job"


def test_a_program_that_has_failed_keeps_its_exit_code_where_files_are_lost(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Stored(ray, monkeypatch, "exit 3", a=Files(lost=["output/last"]))
    assert here.group.run() == 3
    reason = "failed on node 0: exit code 3; trainctl logs r1 --node 0"
    assert here.reported == [(reason, "r1", "j1")]


@pytest.mark.parametrize("code", [exits.FILES_LOST, exits.NO_CAPACITY])
def test_an_exit_code_of_the_systems_own_is_not_taken_over_from_a_program(
    ray: Ray, code: int
) -> None:
    add(ray, "a")
    assert group(f"exit {code}", workers="1").run() == exits.FAILED


@pytest.mark.parametrize("has_saved", [True, False])
def test_a_node_that_goes_after_its_program_has_ended_has_saved_its_files_or_lost_them(
    ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_saved: bool
) -> None:
    end = tmp_path / "end"
    script = f"test $NODE_RANK = 1 || until test -e {end}; do sleep 0.05; done"
    files = {"a": Files(lost=[]), "b": Files(lost=[], is_down=not has_saved)}
    here = Stored(ray, monkeypatch, script, **files)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(here.group.run()), daemon=True)
    thread.start()
    wait_until(lambda: bool(files["b"].limits))
    (seat,) = [seat for seat in here.group._seats if seat.number == 1]
    if has_saved:
        wait_until(lambda: seat.save is not None and seat.save.done())
    ray.there["b"].lose()
    end.touch()
    thread.join(30)
    assert codes == [exits.OK if has_saved else exits.FILES_LOST]
    lost = [("files lost: the last files of node 1, which is lost", "r1", "j1")]
    assert here.reported == ([] if has_saved else lost)


def test_a_program_ends_on_all_nodes_when_another_job_takes_over_the_files_of_one(
    ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"trap 'touch {tmp_path}/told-$NODE_RANK; exit 0' TERM; touch {tmp_path}/up-$NODE_RANK"
    files = {"a": Files(lost=[]), "b": Files(lost=[])}
    here = Stored(ray, monkeypatch, f"{script}; while :; do sleep 0.05; done", **files)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(here.group.run()), daemon=True)
    thread.start()
    wait_until(lambda: all((tmp_path / f"up-{rank}").exists() for rank in (0, 1)))
    files["b"].is_replaced = True
    ray.there["b"].launcher.stop(20)  # as its mirror does
    thread.join(30)
    assert codes == [exits.FILES_LOST]
    assert all((tmp_path / f"told-{rank}").exists() for rank in (0, 1))
    assert here.reported == [
        ("files lost: another job has taken over the files of the run", "r1", "j1")
    ]


def test_a_stop_does_not_wait_for_files_that_are_restored(
    ray: Ray, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    restoring = threading.Event()

    def prepare(name: str, actor: Actor) -> None:
        def restore(_place: object) -> bool:
            restoring.set()
            return not actor.launcher._is_broken_off.wait(120)

        if name == "b":
            actor.launcher.prepare = restore  # type: ignore[method-assign, assignment]

    add(ray, "a", "b")
    ray.prepare = prepare
    running = group(f"touch {tmp_path}/up; while :; do sleep 0.05; done")
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(running.run()), daemon=True)
    thread.start()
    assert restoring.wait(30)
    began = time.monotonic()
    running.stop()
    thread.join(120)
    assert time.monotonic() - began < 60
    assert codes == [exits.TERMINATED]
    assert not (tmp_path / "up").exists()
    assert "started again" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("script", "within_s"),
    [("sleep 1000", 60), ("test $NODE_RANK = 1 && exit 7; sleep 1000", times.COMMAND_STOP_S)],
    ids=["stopped", "failed elsewhere"],
)
def test_a_program_has_its_grace_where_what_it_saves_counts(
    ray: Ray, script: str, within_s: int
) -> None:
    given: list[float] = []
    running = group(script)

    def prepare(_name: str, actor: Actor) -> None:
        stop = actor.launcher.stop

        def noted(within_s: float) -> None:
            given.append(within_s)
            stop(within_s)

        actor.launcher.stop = noted  # type: ignore[method-assign]
        if within_s == 60:
            actor.before["wait"] = running.stop

    add(ray, "a", "b")
    ray.prepare = prepare
    running.run()
    assert {*given} == {within_s}


def test_nodes_that_do_not_answer_are_waited_for_together(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(ray, "a")
    monkeypatch.setattr(nodes, "ANSWER_S", 1.0)
    told, (node,) = group("true")._told, ray.alive()
    some = [
        Seat(number=number, node=node, launcher=ray.start_launcher(told, node), wait=Ref())
        for number in range(20)
    ]
    last = Ended(code=0, at=0.0, was_told=True)
    some[-1].wait.set_result(last)
    began = time.monotonic()
    nodes.end_programs(some, 1.0)
    assert time.monotonic() - began < 15, "each by itself would take 38 s together"
    assert [seat.ended for seat in some] == [None] * 19 + [last]
    assert not any(seat.wait for seat in some)


def test_a_program_that_failed_beside_a_bad_gpu_is_started_again_on_another_host(
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
    assert "the program is started again on 2 nodes" in said


def test_a_program_that_failed_by_itself_is_not_started_again(ray: Ray) -> None:
    add(ray, "a", "b")
    assert group("exit 9").run() == 9
    assert len(ray.actors) == 2
    assert any(name == "host_faults" for name, _ in ray.actors[0].called)


# --- decisions ------------------------------------------------------------------------------------
OK = Ended(code=0, at=1.0, was_told=False)
FAILED = Ended(code=3, at=1.0, was_told=False)
TOLD = Ended(code=143, at=0.5, was_told=True)


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
    assert nodes.after(ends, **{"is_lost": False, "can_grow": False, **given}) is expected


def test_the_first_failure_is_the_earliest_that_nobody_asked_for() -> None:
    assert nodes.first_failure([OK, None, TOLD]) is None
    assert nodes.first_failure([replace(FAILED, at=2.0), TOLD, FAILED]) == 2


def test_free_seats_are_taken_by_number() -> None:
    here = [
        NodeInfo(id=name, address=name, cpus=1, gpus=0, is_head=False) for name in ("a", "b", "c")
    ]
    seats = nodes.new_seats(here, {"a": 1}, most=4, unfit={"b"})
    assert [(number, node.id) for number, node in seats] == [(0, "c")]
    assert nodes.new_seats(here, {"x": 0, "y": 1}, most=2, unfit=()) == []
    seats = nodes.new_seats(here, {"x": 0, "y": 2}, most=4, unfit=())
    assert [(number, node.id) for number, node in seats] == [(1, "a"), (3, "b")]


# --- ranges of nodes ------------------------------------------------------------------------------
def test_a_range_shrinks_with_a_loss_and_grows_when_a_node_comes(
    ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_SETTLE_S", 0.5)
    monkeypatch.setattr(nodes, "_GROW_AFTER_S", 1.0)
    count, end = tmp_path / "count", tmp_path / "end"
    script = f"echo $NODE_RANK of $PET_NNODES at $MASTER_PORT >> {count}; "
    script += f"until test -e {end}; do sleep 0.05; done"
    files = {"a": Files(lost=[]), "b": Files(lost=[])}
    here = Stored(ray, monkeypatch, script, "1:2", **files)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(here.group.run()), daemon=True)
    thread.start()

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
    thread.join(30)
    assert codes == [exits.OK]
    # The node that is left keeps its number, and with it its files.
    assert [start.nodes for start in files["b"].starts] == [(0, 1), (1,), (0, 1)]


def test_a_program_is_not_ended_for_a_node_that_cannot_start_it(
    ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(name: str, actor: Actor) -> None:
        actor.is_lost = name == "b"

    monkeypatch.setattr(nodes, "_SETTLE_S", 0.2)
    monkeypatch.setattr(nodes, "_GROW_AFTER_S", 0.2)
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
    here = Stored(ray, monkeypatch, script, a=Files(lost=[]), b=Files(lost=[]))
    assert here.group.run() == 7
    reason = "failed on node 1, rank 1: ValueError: shapes do not match (train.py:5)"
    assert here.reported == [(f"{reason}; trainctl logs r1 --node 1", "r1", "j1")]
