"""A program's files survive, whatever the bucket and the hosts do: lives of jobs by seed.

The real starts, rounds and restores run against disks and a bucket in memory. Time moves only
inside calls and between events, so other nodes act in the middle of a call. A call may be late (in
half of the lives, often), fail, take effect although it failed, even minutes later, or be the last
of its process. Hosts are lost; what was cut off goes on for a while as if nothing had happened.
Each round that all nodes have is looked at, and not only those that are restored.

The program saves sharded checkpoints as DCP does: shards in place, then node 0 the metadata, then
``latest``; only the newest is kept. It is started again on one to three nodes.
"""

import contextlib
import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import pytest
from botocore.exceptions import ClientError

from containers.program.files import program_files as files_of_program
from containers.program.files.disk import Content, Disk, FileState, Look, Moment
from containers.program.files.program_files import Mirror
from containers.program.files.s3_files import until_answered
from containers.program.files.starts import begin
from contract import files
from contract.errors import InputError, UnreachableError
from contract.files import FileList, Mark, SavedFile
from store.bucket import Bucket
from tests.aws.s3 import NAME, S3, WRITES, Effect

LATEST = "work/latest"
LAST_STEP = 16


class CrashError(BaseException):
    """The process of an actor is over."""


class World:
    """The clock, what will happen, and the bucket."""

    def __init__(self, seed: int, *, has_faults: bool = True) -> None:
        self.random, self.has_faults = random.Random(seed), has_faults
        self.is_slow = self.random.random() < 0.5
        self.now, self.objects = 1_000_000.0, dict[str, bytes]()
        self.wrong: list[str] = []
        self.sent = self.largest = self.restores = self.rounds = 0
        self._events: list[tuple[float, int, Callable[..., Any], Any]] = []
        self._number, self._depth = itertools.count(), 0

    def after(self, seconds: float, happens: Callable[..., Any], *given: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._number), happens, given))

    def run(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        until = self.now + seconds
        while self._events and self._events[0][0] <= until and not is_over():
            when, _, happens, given = heapq.heappop(self._events)
            self.now = max(self.now, when)
            happens(*given)

    def sleep(self, seconds: float) -> None:
        """Others act meanwhile."""
        until = self.now + seconds
        if self._depth < 20:
            self._depth += 1
            try:
                self.run(seconds)
            finally:
                self._depth -= 1
        self.now = max(self.now, until)

    def time(self) -> float:
        return self.now

    monotonic = time


class Actor:
    """A process that calls the bucket."""

    def __init__(self, world: World) -> None:
        self.is_dead = False
        self._storm = world.now + world.random.uniform(0, 4000)
        self._calm = self._storm + world.random.choice([0, 0, 60, 600])

    def is_in_storm(self, now: float) -> bool:
        return self._storm < now < self._calm

    def die(self) -> None:
        self.is_dead = True


class MemoryS3(S3):
    """The bucket as one actor reaches it."""

    page = 1000

    def __init__(self, world: World, actor: Actor) -> None:
        super().__init__(world.time)
        self._world, self._actor, self.objects = world, actor, world.objects

    def _wait(self, seconds: float) -> None:
        self._world.sleep(seconds)
        if self._actor.is_dead:
            raise CrashError

    def request(self, operation: str, key: str, effect: Effect, content: bytes = b"") -> Any:
        del key
        if operation == "delete_objects":
            self._world.largest = max(self._world.largest, sum(map(len, self.objects.values())))
        writes = operation in WRITES
        world, chance = self._world, self._world.random
        if self._actor.is_dead:
            raise CrashError
        fate = chance.random() if world.has_faults else 1.0
        if fate < 0.002:
            self._crash()
        elif 0.004 < fate < 0.006:
            self._wait(chance.choice([20, 90, 400, 1500]))
        elif fate < 0.05 or (world.is_slow and world.has_faults and chance.random() < 0.3):
            self._wait(chance.uniform(0.1, 40))
        else:
            self._wait(chance.uniform(0.01, 0.05))
        if 0.05 < fate < 0.08 or (world.has_faults and self._actor.is_in_storm(world.now)):
            if writes and chance.random() < 0.4:
                # It has arrived although no answer comes, or will arrive late.
                world.after(chance.choice([0, chance.uniform(1, 300)]), unheard, effect)
            self._wait(chance.uniform(0.1, 20))
            raise TimeoutError
        result = effect()
        world.sent += len(content)
        if 0.08 < fate < 0.082:
            self._crash()
        if fate < 0.004 or (0.1 < fate < 0.12 and not writes):
            self._wait(chance.choice([5, 20, 90, 400]))  # the answer is late, and old by then
        return result

    def _crash(self) -> None:
        self._actor.is_dead = True
        raise CrashError

    def delete_objects(self, Bucket: str, Delete: Any) -> Any:  # noqa: N803
        """A few at a time: it may break off."""
        listed = Delete["Objects"]
        for at in range(0, len(listed), 3):
            super().delete_objects(Bucket=Bucket, Delete={"Objects": listed[at : at + 3]})
        return {}


def unheard(effect: Callable[[], object]) -> None:
    """Of what takes effect late, nobody hears whether it is refused."""
    with contextlib.suppress(ClientError):
        effect()


def reached(world: World, actor: Actor) -> Bucket:
    """The bucket as the product's own calls reach it."""
    return Bucket(f"s3://{NAME}", MemoryS3(world, actor))


@dataclass
class File:
    data: bytes
    seen: FileState


class OpenFile(Content):
    def __init__(self, world: World, file: File) -> None:
        self._world, self._file = world, file

    def read(self, offset: int, size: int) -> bytes:
        self._world.sleep(0.01)
        return self._file.data[offset : offset + size]

    def is_as(self, seen: FileState) -> bool:
        return self._file.seen == seen

    def __exit__(self, *_: object) -> None: ...


class MemoryDisk(Disk):
    """A node's folders."""

    def __init__(self, world: World) -> None:
        self._world, self.found = world, dict[str, File]()
        self._folders_ns: dict[str, int] = {"work": 0}
        self._parts: dict[str, dict[int, bytes]] = {}
        self._inode = itertools.count()

    def put(self, name: str, data: bytes, *, is_renamed: bool = False) -> FileState:
        before = self.found.get(name)
        now_ns = int(self._world.now * 1e9)
        inode = before.seen.inode if before and not is_renamed else next(self._inode)
        seen = FileState(len(data), now_ns, now_ns, 0, inode, 0o644)
        if before and not is_renamed:
            before.data, before.seen = data, seen
        else:
            self.found[name] = File(data, seen)
            self._folders_ns[name.rpartition("/")[0]] = now_ns
        return seen

    def text(self, name: str) -> str:
        return self.found[name].data.decode() if name in self.found else ""

    def look(self) -> Look:
        seen = {name: file.seen for name, file in self.found.items()}
        return Look(files=seen, folders=dict(self._folders_ns))

    def others(self, since: float) -> list[tuple[str, int]]:  # noqa: ARG002
        return []

    def open(self, name: str) -> Content:
        if name not in self.found:
            raise FileNotFoundError(name)
        return OpenFile(self._world, self.found[name])

    def create(self, name: str) -> None:
        self._parts[name] = {}

    def write(self, name: str, offset: int, data: bytes) -> None:
        self._parts[name][offset] = data

    def finish(self, file: SavedFile) -> FileState:
        parts = self._parts[file.name]
        return self.put(file.name, b"".join(parts[at] for at in sorted(parts)), is_renamed=True)

    def erase(self, name: str) -> None:
        self.found.pop(name, None)
        folder = name.rpartition("/")[0]
        while folder and not any(each.startswith(f"{folder}/") for each in self.found):
            self._folders_ns.pop(folder, None)
            folder = folder.rpartition("/")[0]
        self._folders_ns[folder or "work"] = int(self._world.now * 1e9)


class Inline(Executor):
    """A pool without threads."""

    def submit(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(call(*given, **named))
        except Exception as error:
            done.set_exception(error)
        return done


class Node(Actor):
    """A host with its disk and its part of the program."""

    def __init__(self, job: "Job", number: int) -> None:
        super().__init__(job.world)
        self.world, self.job, self.number = job.world, job, number
        self.disk, self.is_busy, self.has_ended = MemoryDisk(job.world), False, False
        self.start = 0
        self.mirror = Mirror(
            self.disk,
            reached(job.world, self),
            node=number,
            say=self._hear,
            clock=job.world,
            make_pool=Inline,
        )

    def _hear(self, text: str) -> None:
        """Objects of the base are there, and nothing fails but the bucket."""
        is_expected = any(
            each in text
            for each in ("restored", "Timeout", "again", "taken", "end:", "stops changing")
        )
        if not is_expected or "not restored" in text:
            self.world.wrong.append(text)

    def begin(self) -> None:
        self._plan()
        self.write("work/log", b"")
        self.world.after(1, self.write, "work/node", str(self.number).encode())
        self._log()

    def _log(self) -> None:
        if not self.is_dead and not self.has_ended:
            self.write("work/log", self.disk.found["work/log"].data + b"line\n")
            self.world.after(3, self._log)

    def write(self, name: str, data: bytes, *, is_renamed: bool = False) -> None:
        if not self.is_dead:
            self.disk.put(name, data, is_renamed=is_renamed)

    def remove_before(self, step: int) -> None:
        if not self.is_dead:
            for name in [each for each in self.disk.found if 0 < step_of(each) < step]:
                self.disk.erase(name)

    # The walk takes some time.
    def _plan(self) -> None:
        late = self.world.random.uniform(0, 0.3) if self.world.has_faults else 0
        self.world.after(self.mirror.until_next_round() + late, self._look)

    def _look(self) -> None:
        if (moment := self._try(self.mirror.look)) is not None:
            self.world.after(5, self._round, moment)

    def _try(self, call: Callable[..., Any], *given: Any) -> Any:
        """What the mirror answers; None if the process ends, or has ended."""
        if self.is_dead or self.has_ended:
            return None
        self.is_busy = True
        try:
            return call(*given)
        except CrashError:
            self.job.lose([self])
            return None
        finally:
            self.is_busy = False

    def _round(self, moment: Moment) -> None:
        is_round = self._try(self.mirror.round, moment)
        if is_round:
            self.world.rounds += 1
            self.job.hear_of(self, moment.number)
        if is_round is not None and not self.mirror.is_replaced:
            self._plan()


def step_of(name: str) -> int:
    return int(name.split("/")[1][5:]) if name.startswith("work/step-") else 0


def shard(step: int, node: int) -> bytes:
    return f"{step} {node} ".encode() * 12


class Job:
    """A job from its first start to its end."""

    def __init__(self, world: World, nums: Sequence[int], every_s: float) -> None:
        self.world, self.nums, self.every_s = world, nums, every_s
        self.nodes: list[Node] = []
        self.step = self.best = self._cut_off = 0
        self.is_over = False
        self._heard: dict[tuple[int, int], set[int]] = {}
        self.launch()

    def launch(self) -> None:
        """The head starts the program on new hosts, as often as it must."""
        num = self.world.random.choice(self.nums)
        nodes = [Node(self, number) for number in range(num)]
        self.nodes = nodes
        if self.world.has_faults and self._cut_off < 5 and self.world.random.random() < 0.5:
            # This head is cut off, and goes on beside the next one.
            self._cut_off += 1
            self.world.after(self.world.random.uniform(0.1, 200), self._launch_instead, nodes)
        try:
            self._restore(nodes)
        except (CrashError, InputError, UnreachableError) as error:
            if isinstance(error, InputError) and "taken them over" not in str(error):
                self.world.wrong.append(str(error))
            if self.nodes is nodes:
                self.world.after(self.world.random.uniform(5, 60), self._launch_instead, nodes)

    def _launch_instead(self, nodes: list[Node]) -> None:
        if self.nodes is nodes and not self.is_over:
            for node in nodes:
                self.world.after(self.world.random.uniform(20, 2000), node.die)
            self.launch()

    def _restore(self, nodes: list[Node]) -> None:
        head = reached(self.world, Actor(self.world))
        start = until_answered(
            lambda: begin(head, range(len(nodes))), clock=self.world, say=lambda _: None
        )
        for node in nodes:
            node.start = start.number
            node.mirror.restore(start)
            own = node.disk.text("work/node")
            if node.number in start.base and own not in ("", str(node.number)):
                self.world.wrong.append(f"node {node.number} has the file of node {own}")
        if self.nodes is not nodes:
            return  # another head has begun meanwhile
        self.check([node.disk for node in nodes])
        self.world.restores += 1
        for node in nodes:
            node.begin()
        self.world.after(1, self._train, nodes, self.step)
        if self.world.has_faults:
            self.world.after(self.world.random.expovariate(1 / 900), self._lose_hosts, nodes)

    def check(self, disks: Sequence[MemoryDisk]) -> None:
        """All nodes have the same whole checkpoint, and none that was reported is lost."""
        steps = [self._whole({name: disk.text(name) for name in disk.found}) for disk in disks]
        if len({*steps}) > 1:
            self.world.wrong.append(f"nodes restore steps {steps}")
        if min(steps) < self.best:
            self.world.wrong.append(f"steps {steps} restored, {self.best} was saved")
        self.step = min(steps)

    def _whole(self, found: Mapping[str, str]) -> int:
        """The newest checkpoint that is whole."""
        metas = {step_of(name): num for name, num in found.items() if "meta" in name}
        whole = [
            step
            for step, num in metas.items()
            if all(
                found.get(f"work/step-{step}/{node}") == shard(step, node).decode()
                for node in range(int(num))
            )
        ]
        if max(metas, default=0) not in [0, *whole]:
            self.world.wrong.append(f"a torn checkpoint: {sorted(found)}")
        if (latest := int(found.get(LATEST) or 0)) and latest not in whole:
            self.world.wrong.append(f"latest is {latest}: {sorted(found)}")
        return max(whole, default=0)

    def hear_of(self, node: Node, number: int) -> None:
        """A node was told that its round is saved. One of all nodes is what a start restores."""
        objects, found = self.world.objects, dict[str, tuple[int, str]]()
        heard = self._heard.setdefault((node.start, number), set())
        heard.add(node.number)
        claim = files.Claim.from_json(objects[files.start_key(node.start)])
        if heard != {*claim.nodes}:
            return
        for each in claim.nodes:
            key = objects.get(Mark(start=node.start, round=number, node=each).key, b"").decode()
            if key not in objects:
                return  # a newer start has swept meanwhile
            for file in FileList.from_json(objects[key]).files:
                if any(piece not in objects for piece in file.pieces):
                    return
                content = b"".join(objects[piece] for piece in file.pieces).decode()
                found[file.name] = max(found.get(file.name, (-1, "")), (file.start, content))
        self.best = max(self.best, self._whole({name: text for name, (_, text) in found.items()}))

    def lose(self, lost: Sequence[Node]) -> None:
        if lost[0] in self.nodes:
            nodes = self.nodes
            self.world.after(self.world.random.uniform(5, 40), self._launch_instead, nodes)

    def _lose_hosts(self, nodes: list[Node]) -> None:
        if self.nodes is not nodes or self.is_over:
            return
        for node in nodes:
            if self.world.random.random() < 0.5:
                node.die()
            self.world.after(self.world.random.uniform(20, 2000), node.die)
        self.lose(nodes)

    # --- the program
    def _train(self, nodes: list[Node], step: int) -> None:
        world, step = self.world, step + 1
        if all(node.is_dead for node in nodes):
            return
        if self.nodes is nodes and step > LAST_STEP:
            self._finish(nodes)
            return
        begin_s, end_s = world.random.uniform(5, self.every_s), 0.0
        for node in nodes:
            name = f"work/step-{step}/{node.number}"
            at_s, lasts_s = begin_s + world.random.uniform(0, 6), world.random.uniform(0.1, 12)
            world.after(at_s, node.write, name, b"half")
            world.after(at_s + lasts_s, node.write, name, shard(step, node.number))
            end_s = max(end_s, at_s + lasts_s)
        world.after(end_s + 0.002, self._complete, nodes, step)

    def _complete(self, nodes: list[Node], step: int) -> None:
        if any(node.is_dead for node in nodes):
            return  # the program waits for the others
        first, world = nodes[0], self.world
        first.write(f"work/step-{step}/meta", str(len(nodes)).encode())
        text = str(step).encode()
        world.after(0.5, lambda: first.write(LATEST, text, is_renamed=True))
        for node in nodes:
            world.after(0.7, node.remove_before, step)
        world.after(1, self._train, nodes, step)

    def _finish(self, nodes: list[Node]) -> None:
        if any(node.is_busy for node in nodes):
            self.world.after(5, self._finish, nodes)
            return
        for node in nodes:
            node.has_ended = True
            node.write("work/final", f"of start {node.start}".encode())
        is_saved = True
        for node in nodes:
            try:
                is_saved &= node.mirror.save(self.world.random.choice([100, 3000]))
            except CrashError:
                is_saved = False
        if self.nodes is not nodes:
            return
        if any(node.is_dead for node in nodes):
            self.lose(nodes)
            return
        self.is_over, self.world.has_faults = True, False
        reader = Node(self, 0)
        reader.mirror.restore()
        self.check([reader.disk])
        if is_saved and reader.disk.text("work/final") != f"of start {nodes[0].start}":
            self.world.wrong.append("the last file is lost although all was saved")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", 40)
    monkeypatch.setattr(files_of_program, "_LOG", 400)


def live(seed: int) -> World:
    """One life of a job, of up to 11 hours."""
    world = World(seed)
    job = Job(world, [(1,), (2,), (3,), (1, 2, 3)][seed % 4], world.random.choice([40, 120, 300]))
    world.run(40_000, lambda: job.is_over or bool(world.wrong))
    return world


class Rewriting(Job):
    """Each node rewrites one file of 14 GB every ten minutes, here at a millionth of its size."""

    def _train(self, nodes: list[Node], step: int) -> None:
        for node in nodes:
            text = f"{step} of {node.number} ".encode()
            node.write("work/last.pt", text * (14_000 // len(text)), is_renamed=step % 2 == 0)
        self.world.after(600, self._train, nodes, step + 1)


def test_a_file_that_is_rewritten_for_ten_hours_keeps_at_most_three_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "PIECE", 1_000)
    monkeypatch.setattr(Node, "_log", lambda _: None)
    world = World(0, has_faults=False)
    Rewriting(world, (2,), 600)
    world.run(36_000)
    assert world.rounds > 2_000
    assert world.sent < 61 * 2 * 14_500 + 500_000, "each byte is sent once, beside lists and marks"
    assert world.largest < 3 * 2 * 14_500


def test_files_survive_whatever_bucket_and_hosts_do() -> None:
    # In the last one, the bucket fails while a start finds out that another has taken over.
    lives = {seed: live(seed) for seed in (*range(105), 1135)}
    assert {seed: life.wrong for seed, life in lives.items() if life.wrong} == {}
    assert sum(life.restores for life in lives.values()) > 300
    assert sum(life.rounds for life in lives.values()) > 4_000


@pytest.mark.night
def test_files_survive_in_many_lives() -> None:
    for seed in range(100, 20_100):
        assert live(seed).wrong == [], seed
