"""No checkpoint, lease or record is lost, whatever storage, disks and processes do: lives by seed.

The real saves, restores and prunes of both layouts, the lease and the record run against a bucket
in memory, or a folder of this machine, whose every call may crash its process, fail, stall while
others act, or take effect although it failed; in S3 also later. Time moves only inside calls and
between events, so a holder that stalls goes on beside its successor. Ranks that were given up go on
beside those that replace them. A folder may also lose power: then what was not synced is gone.

After each restore, and each save that was reported, the whole storage is looked at.
"""

import errno
import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from contract.errors import InputError, UnreachableError
from contract.runs import MANIFEST_FILE, METRICS_FILE, checkpoint_key, checkpoint_name
from contract.times import LEASE_RENEW_S, LEASE_S
from store import storage
from tests.aws.s3 import NAME, WRITES, Effect
from tests.containers.program.test_files_simulated import World
from tests.training.bucket import RUN, Bucket, CrashError, install
from tests.training.sample_events import step
from tests.training.test_checkpoint_faults import one_rank, snapshot
from tests.training.test_record import opened_at
from training.checkpoint import checkpoints, sharded_checkpoints
from training.checkpoint.dcp import Share
from training.checkpoint.manifest import CLOSED
from training.record import reader
from training.record.events import Saving, Start, Step
from training.runtime import trainer
from training.system import lease
from training.system.lease import Holder, Lease, LostError

pytestmark = pytest.mark.usefixtures("group")

STEP_S: Final = 20.0
LATE_S: Final = 15.0
"""A write that failed may still take effect for so long; a removal for minutes."""
_CALLS: Final = ("open", "os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.scandir")


class Actor:
    """A process: the head of a run, or its ranks."""

    def __init__(self, name: str, fence: int = 0) -> None:
        self.name, self.fence, self.is_dead = name, fence, False


class Life(World):
    """Storage, and what happens to a run."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed)
        self.seed = seed
        choose = self.random.choice
        self.folder, self.is_sharded, self.in_s3 = (
            folder,
            choose([False, False, True]),
            choose([True, True, False]),
        )
        self.uri = RUN if self.in_s3 else str(folder / "runs" / "r")
        self.keep, self.every = choose([1, 2, 3]), choose([1, 2, 3])
        self.is_job = choose([False, False, True])
        """Then the next head takes the run at once, and not when its lease is over."""
        self.rate = choose([0.005, 0.01, 0.03, 0.1])
        self.history: list[str] = []
        self.actor = Actor("nobody")
        self.heads: list[Head] = []
        self.values: dict[str, float] = {}
        """What the weights of each checkpoint are, by its name."""
        self.reported: list[tuple[int, str]] = []
        self.leases: set[int] = set()
        """Numbers that were taken."""
        self.recorded: set[int] = set()
        """Steps that were written down."""
        self.refused: set[int] = set()
        """Steps that storage refused when their head wrote them: training continues without."""
        self.num = dict.fromkeys(("restores", "saves", "zombies", "cuts", "flips"), 0)
        self.touched: dict[str, float] = {}
        """When each lease on disk was written."""
        self.is_record_synced = False
        self._synced: dict[int, tuple[int, int]] = {}
        self._renamed: list[tuple[str, str]] = []
        self._is_looking = False
        self.bucket = LiveBucket(self)

    def note(self, text: str) -> None:
        self.history.append(f"{self.now - 1_000_000:8.1f} s  {self.actor.name:12} {text}")

    def fail(self, text: str) -> None:
        self.note(f"WRONG: {text}")
        self.wrong.append(text)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """What is done in it is done by the test: nothing fails."""
        before, self._is_looking = self._is_looking, True
        try:
            yield
        finally:
            self._is_looking = before

    def act(self, actor: Actor, do: Callable[[], Any]) -> Any:
        """Let a process do something, if it still can."""
        if actor.is_dead:
            return None
        before, self.actor = self.actor, actor
        try:
            return do()
        except CrashError:
            return None
        finally:
            self.actor = before

    # --- faults
    def call(self, what: str, effect: Callable[[], None], *, writes: bool) -> None:
        """A call to storage by the process that acts, with its fate."""
        if self._is_looking:
            effect()
            return
        actor, chance = self.actor, self.random
        if actor.is_dead:
            raise CrashError
        self.now += chance.uniform(0.01, 0.2)
        fate = chance.random() if self.has_faults else 1.0
        if fate < self.rate / 4:
            self.crash(f"crashes before {what}")
        if fate < self.rate / 2:
            self.stall(what)
        elif fate < self.rate:
            self.note(f"is refused {what}")
            if writes and self.in_s3 and chance.random() < 0.5:
                most = 300 if what.startswith("delete") else LATE_S
                late = chance.choice([0, chance.uniform(0, most)])
                self.note(f"  which takes effect in {late:.0f} s")
                self.after(late, self._late, actor, effect)
            raise OSError(errno.EBUSY, "Please reduce your request rate.")
        effect()
        if self.rate < fate < self.rate * 1.2:
            self.crash(f"crashes after {what}")

    def _late(self, actor: Actor, effect: Callable[[], None]) -> None:
        before, self.actor = self.actor, actor
        with self.looking(), suppress(OSError):  # nobody hears of it
            effect()
        self.actor = before

    def wait(self, seconds: float) -> None:
        actor = self.actor
        self.sleep(seconds)
        self.actor = actor
        if actor.is_dead:
            raise CrashError

    def stall(self, what: str) -> None:
        seconds = self.random.choice([10, 60, 150, 400])
        self.note(f"stalls for {seconds} s before {what}")
        self.num["zombies"] += 1
        self.wait(seconds)
        self.note(f"goes on with {what}")

    def crash(self, text: str) -> None:
        self.note(text)
        self.actor.is_dead = True
        if not self.in_s3 and self.random.random() < 0.5:
            self.cut_power()
        raise CrashError

    # --- a folder of this machine
    def audit(self, event: str, given: tuple[Any, ...]) -> None:
        """Called by Python before each call of the system."""
        place = self._place(given) if event in _CALLS and not self._is_looking else ""
        if not place.startswith(str(self.folder / "runs")):
            return
        is_opened = event == "open" and bool(given[2] & (os.O_WRONLY | os.O_RDWR))
        writes = is_opened or event not in ("open", "os.scandir")
        name = place.removeprefix(self.uri)
        if event == "os.rename" and place.endswith(".part") and str(given[1])[-5:] != ".part":
            self.check_right(name)
        self.call(f"{event} {name}", lambda: None, writes=writes)
        if writes:
            self.check_owner(place)
            self.touched[place] = self.now
        if event in ("os.rename", "os.link"):
            self.touched[str(given[1])] = self.now
            self.check_owner(str(given[1]))
            self._renamed.append((place, str(given[1])))

    def _place(self, given: tuple[Any, ...]) -> str:
        if not given or not isinstance(given[0], str | os.PathLike):
            return ""
        place, of_folder = str(given[0]), given[-1]
        if not place.startswith("/") and isinstance(of_folder, int) and of_folder >= 0:
            return f"{os.readlink(f'/proc/self/fd/{of_folder}')}/{place}"
        return place

    def fsync(self, opened: int) -> None:
        found = os.fstat(opened)
        place = os.readlink(f"/proc/self/fd/{opened}")
        self.is_record_synced |= place.endswith(METRICS_FILE)
        if stat.S_ISDIR(found.st_mode):
            self._renamed = [each for each in self._renamed if os.path.dirname(each[1]) != place]
        self._note_synced(found)

    def cut_power(self) -> None:
        """End every process, and lose some of what was not synced."""
        self.note("and the machine loses power")
        self.num["cuts"] += 1
        for head in self.heads:
            head.is_dead = True
            for ranks in head.ranks:
                ranks.is_dead = True
        with self.looking():
            while self._renamed and self.random.random() < 0.5:
                source, target = self._renamed.pop()
                if Path(target).is_dir() and not Path(source).exists():
                    Path(target).rename(source)
                    self.note(f"  {target.removeprefix(self.uri)} has its old name")
            for path in self.folder.joinpath("runs").rglob("*"):
                found = path.stat()
                seen = self._synced.get(found.st_ino, (0, 0))
                is_safe = seen == (found.st_mtime_ns, found.st_size)
                if path.is_file() and not is_safe and self.random.random() < 0.7:
                    # What was appended is lost, and all of a new file.
                    size = seen[1] if path.name == METRICS_FILE and seen[1] < found.st_size else 0
                    os.truncate(path, size)
                    self.note(f"  {path.name} has {size} bytes")
                self._note_synced(path.stat())

    def _note_synced(self, found: os.stat_result) -> None:
        self._synced[found.st_ino] = (found.st_mtime_ns, found.st_size)

    # --- what must hold
    def check_owner(self, key: str) -> None:
        """Nobody changes what belongs to a holder after it."""
        parts = key.removeprefix(self.uri.removeprefix(f"s3://{NAME}/")).strip("/").split("/")
        if parts[0] != "checkpoints" or len(parts) < 2 or "damaged" in parts[1]:
            return
        found = checkpoint_key(parts[1].removeprefix(".").removesuffix(".part"))
        if found and found[1] > max(1, self.actor.fence):
            self.fail(f"lease {self.actor.fence} changes {'/'.join(parts[1:])}")

    def check_right(self, key: str) -> None:
        """Who completes a checkpoint has the lease, if not when that takes effect."""
        if not self._is_looking and self.actor.fence < self.newest_lease():
            self.fail(f"completes {key} without the lease")

    def contents(self) -> dict[str, dict[str, bytes]]:
        """Files of all checkpoints, by name of checkpoint and file."""
        found: dict[str, dict[str, bytes]] = {}
        with self.looking():
            for name in checkpoints.names(self.uri):
                place = checkpoints.place_of(self.uri, name)
                files = storage.sizes(place)
                found[name] = {each: storage.read_bytes(f"{place}/{each}") or b"" for each in files}
        return found

    def whole(self) -> list[str]:
        """Checkpoints that have all their files, unchanged."""
        return [name for name, files in self.contents().items() if is_whole(files)]

    def newest_lease(self) -> int:
        with self.looking():
            return lease.newest_number(self.uri)

    def flip(self) -> None:
        """Change a bit in a reported checkpoint, if another one is left."""
        sure = [name for _, name in self.reported if name in self.whole()]
        if len({*sure}) < 2:
            return
        name = sure[-1]
        files = self.contents()[name]
        file = self.random.choice(sorted(each for each in files if each != MANIFEST_FILE))
        content = bytearray(files[file])
        content[self.random.randrange(len(content))] ^= 1
        place = f"{checkpoints.place_of(self.uri, name)}/{file}"
        if self.in_s3:
            self.bucket.objects[place.removeprefix(f"s3://{NAME}/")] = bytes(content)
        else:
            with self.looking():
                Path(place).write_bytes(content)
        self.reported = [each for each in self.reported if each[1] != name]
        self.num["flips"] += 1
        self.note(f"a bit of {name}/{file} changes")

    # --- the run
    def start(self) -> None:
        """Start a head, as the first one or because the one before is gone."""
        head = Head(self, len(self.heads) + 1)
        self.heads.append(head)
        self.act(head, head.begin)
        if self.is_needed(head):
            self.after(self.random.uniform(5, 60), self.replace, head)

    def is_needed(self, head: "Head") -> bool:
        return self.heads[-1] is head and head.ranks == []

    def replace(self, head: "Head") -> None:
        if self.heads[-1] is head and not self.wrong:
            self.start()

    def watch(self) -> None:
        """A head that is dead, or has stalled for long, is replaced."""
        head = self.heads[-1]
        if self.has_faults:
            if head.is_dead or self.now - head.alive_at > 90:
                self.start()
            elif head.ranks and (head.ranks[-1].is_dead or self.random.random() < 0.03):
                head.lose_ranks()
            elif self.keep > 1 and self.random.random() < 0.02:
                self.flip()
                head.lose_ranks()
        self.after(STEP_S, self.watch)


def value_of(weights: torch.Tensor) -> float:
    """The value of all weights; none where they differ."""
    return float(weights[0]) if (weights == weights[0]).all() else float("nan")


def is_whole(files: dict[str, bytes]) -> bool:
    if files.get(MANIFEST_FILE, b"") in (b"", CLOSED):
        return False
    listed = json.loads(files[MANIFEST_FILE])["files"]
    return all(
        hashlib.sha256(files.get(name, b"")).hexdigest() == entry["sha256"]
        for name, entry in listed.items()
    )


class LiveBucket(Bucket):
    def __init__(self, life: Life) -> None:
        super().__init__(life.time)
        self._life = life

    def request(self, operation: str, key: str, effect: Effect, content: bytes = b"") -> Any:
        life, request, answers = self._life, super().request, list[Any]()
        is_last = key.endswith(MANIFEST_FILE) and "damaged" not in key
        if operation == "put_object" and is_last and content != CLOSED:
            life.check_right(key)

        def checked() -> None:
            before = self.objects.get(key)
            answers.append(request(operation, key, effect, content))
            if self.objects.get(key) == before:
                return
            life.check_owner(key)
            has_changed = before is not None and key in self.objects
            if has_changed and f"{key.rpartition('/')[0]}/{MANIFEST_FILE}" in self.objects:
                life.fail(f"{key} is written again, in a whole checkpoint")

        life.call(f"{operation} {key}", checked, writes=operation in WRITES)
        return answers[0]


class Head(Actor):
    """The command of a start: it has the lease, and keeps the record."""

    def __init__(self, life: Life, number: int) -> None:
        super().__init__(f"head {number}")
        self.life, self.number, self.alive_at = life, number, life.now
        self.ranks: list[Ranks] = []
        self.told: set[int] = set()
        self.events = trainer._Events()
        self.is_busy = False

    def begin(self) -> None:
        life = self.life
        try:
            self.lease = Lease.take(life.uri, wait=life.wait)
        except InputError as error:
            life.note(f"is refused: {str(error)[:90]}")
            return
        except Exception as error:
            life.note(f"cannot take the lease: {error}")
            return
        self.fence = self.lease.number
        life.note(f"has lease {self.fence}")
        if self.fence in life.leases:
            life.fail(f"has lease {self.fence}, as another head has")
        life.leases.add(self.fence)
        try:
            self.record = opened_at(
                life.uri,
                lease=self.lease.number,
                check=self.lease.check,
                clock=life.time,
            )
        except (OSError, LostError) as error:
            life.note(f"cannot open the record: {error}")
            self.is_dead = True
            return
        life.after(LEASE_RENEW_S, self.confirm)
        self.start_ranks(self.fence)

    def confirm(self) -> None:
        self.life.act(self, self._confirm)

    def _confirm(self) -> None:
        with suppress(OSError):
            self.lease.confirm()
        if self.lease.lost:
            self.life.note("has lost the lease")
            self.record.abandon()
            self.is_dead = True
            for ranks in self.ranks:  # they go on until the command has ended them
                self.life.after(self.life.random.uniform(0, 30), setattr, ranks, "is_dead", True)
            return
        self.alive_at = self.life.now
        self.life.after(LEASE_RENEW_S, self.confirm)

    def start_ranks(self, fence: int) -> None:
        ranks, self.fence = Ranks(self, fence), fence
        self.ranks.append(ranks)
        self.life.after(1, self.life.act, ranks, ranks.begin)

    def lose_ranks(self) -> None:
        """Ray gives up the ranks, which may be cut off, and starts others."""
        if self.ranks:
            life = self.life
            life.note(f"gives up the ranks of {self.name}")
            life.after(life.random.choice([0, 100, 400]), setattr, self.ranks[-1], "is_dead", True)
            life.act(self, self.follow)

    def follow(self) -> None:
        old = self.ranks[-1].fence
        try:
            self.start_ranks(lease.follow(self.life.uri, old))
        except OSError as error:
            self.life.note(f"cannot start ranks: {error}")
            self.is_dead = True

    def tell(self, event: Any) -> None:
        """Put an event where the command finds it when it looks again."""
        self.events.put([event])
        self.life.after(self.life.random.uniform(0, 2), self.poll)

    def poll(self) -> None:
        """Take events one by one, until there are none; the command has one thread."""
        life = self.life
        if self.is_busy:
            life.after(1, self.poll)
            return
        self.is_busy = True
        events = [] if self.is_dead else self.events.take()
        for event in events:
            if isinstance(event, Start):
                life.recorded = {each for each in life.recorded if each <= event.step}
                self.told &= life.recorded
            life.is_record_synced = False
            try:
                life.act(self, partial(self.record.handle, event))
            except (OSError, LostError) as error:
                life.note(f"{self.name} cannot write its record: {error}")
                self.is_dead = True
            if isinstance(event, Step):
                self.told.add(event.step)
            is_safe = life.in_s3 or life.is_record_synced
            is_owner = self.fence == life.newest_lease()
            if is_safe and self.has_written and is_owner:
                life.recorded |= self.told
                life.refused -= self.told
            elif isinstance(event, Saving) and not self.is_dead:
                life.refused |= self.told - life.recorded
        self.is_busy = False
        if events:
            life.after(0.1, self.poll)

    @property
    def has_written(self) -> bool:
        """Whether all that it has taken is in storage."""
        kept = self.record
        return not (kept._unsent or kept._lines or kept._is_anew or self.is_dead)


class Ranks(Actor):
    """Those that train, until they end or are replaced."""

    def __init__(self, head: Head, fence: int) -> None:
        super().__init__(f"ranks {head.number}/{fence}", fence)
        self.head, self.life = head, head.life
        self.step = self.num_failed = 0

    @property
    def is_replaced(self) -> bool:
        return self.head.ranks[-1] is not self

    def begin(self) -> None:
        life = self.life
        before = {*life.reported}
        try:
            name, value = self.restore()
        except Exception as error:
            if self.is_dead:  # torch has caught the crash
                return
            is_refusal = isinstance(error, InputError) and "does not answer" not in str(error)
            if is_refusal and self.fence == life.newest_lease():  # else it may be gone by now
                life.fail(f"the run refuses: {error}")
            life.note(f"cannot restore: {error}")
            self.end()
            return
        life.num["restores"] += 1
        life.note(f"restores {name or 'nothing'}")
        is_owner = self.fence == life.newest_lease()
        best = max((step for step, _ in before & {*life.reported}), default=0)
        if is_owner and self.step < best:
            life.fail(f"{name or 'nothing'} is restored, step {best} was reported")
        if name and value != life.values.get(name):
            life.fail(f"{name} has {value}, not {life.values.get(name)}")
        if self.is_replaced:
            self.is_dead = True
            return
        self.head.tell(
            Start(step=self.step, resumed=bool(name), world_size=1, total_steps=9, device="CPU")
        )
        self.wait_for_record(partial(self.check_record, self.step))
        self.go_on()

    def wait_for_record(self, then: Callable[[], None], num_sent: int | None = None) -> None:
        """Continue when the command has what was sent; ranks that Ray gave up may not wait."""
        num_put, num_kept = self.head.events.counts()
        num_sent = num_put if num_sent is None else num_sent
        if num_kept < num_sent and not self.is_replaced:
            self.life.after(1, self.life.act, self, partial(self.wait_for_record, then, num_sent))
        else:
            then()

    def restore(self) -> tuple[str, float]:
        uri = self.life.uri
        if self.life.is_sharded:
            found = sharded_checkpoints.newest(one_rank(uri, self.fence))
            if found is None:
                return "", 0.0
            self.step = found.position.step
            weights = found.read_weights(["w"])["w"]
            return found.uri.rpartition("/")[2], value_of(weights)
        one = checkpoints.newest(one_rank(uri, self.fence))
        if one is None:
            return "", 0.0
        self.step = one.position.step
        value = value_of(one.model["w"])
        return next((name for name, each in self.life.values.items() if each == value), "?"), value

    def check_record(self, began: int) -> None:
        """It has every step before the checkpoint, and none that was not trained again since."""
        life = self.life
        if not self.head.has_written or self.fence != life.newest_lease():
            return
        with life.looking():
            read = reader.read_metrics(life.uri)
        found = [event.step for event in read.of(Step)]
        if read.num_damaged:
            life.fail("the record is torn")
        if [*found] != sorted({*found}) or any(each > self.step for each in found):
            life.fail(f"the record has steps {found}, resumed from {began}, now {self.step}")
        if missing := life.recorded - {*found}:
            life.fail(f"the record lacks steps {sorted(missing)}")
        if missing := {*range(1, began + 1)} - {*found} - life.refused:
            life.fail(f"the record lacks steps {sorted(missing)} of checkpoint {began}")

    def end(self) -> None:
        """With an error: others take over."""
        self.is_dead = True
        if not self.is_replaced:
            self.life.act(self.head, self.head.follow)

    def train(self) -> None:
        life = self.life
        self.step += 1
        if not self.is_replaced:
            self.head.tell(step(self.step))
        if self.step % life.every:
            self.go_on()
            return
        if not self.is_replaced:
            self.head.tell(Saving(step=self.step, written=0))
        self.wait_for_record(self.save)

    def go_on(self) -> None:
        self.life.after(STEP_S, self.life.act, self, self.train)

    def save(self) -> None:
        life = self.life
        value = float(1000 * len(life.values) + self.step)
        name = checkpoint_name(self.step, self.fence)
        life.values[name] = value
        try:
            self.write(value)
        except LostError:
            life.note("has lost the run")
            self.is_dead = True
        except (OSError, RuntimeError, UnreachableError) as error:
            if self.is_dead:  # torch has caught the crash
                return
            life.note(f"cannot save step {self.step}: {error}")
            self.num_failed += 1
            if self.num_failed == 3:
                self.end()
        else:
            self.num_failed = 0
            life.num["saves"] += 1
            life.note(f"has saved {name}")
            if self.fence == life.newest_lease():
                self.report(name)
        self.go_on()

    def write(self, value: float) -> None:
        life = self.life
        if not life.is_sharded:
            taken = snapshot(self.step, value)
            checkpoints.save(life.uri, taken, keep=life.keep, fence=self.fence)
            return
        position = {"position": {"step": self.step}, "config": {}}
        group = dist.group.WORLD
        assert group is not None
        sharded_checkpoints.write_checkpoint(
            life.uri,
            self.step,
            Share().copy({"model": {"w": torch.full((8,), value)}, "optimizer": {"lr": 0.1}}),
            files={sharded_checkpoints.STATE_FILE: json.dumps(position).encode()},
            group=group,
            fence=self.fence,
        )
        checkpoints.prune(life.uri, keep=life.keep, step=self.step, fence=self.fence)

    def report(self, name: str) -> None:
        life = self.life
        life.reported.append((self.step, name))
        found = life.contents()
        num_whole = sum(map(is_whole, found.values()))
        if name not in life.whole():
            life.fail(f"{name} is not whole")
        if not life.num["flips"] and num_whole < min(life.keep, len(life.reported)):
            life.fail(f"{num_whole} checkpoints are whole: {', '.join(found)}")
        if life.has_faults or life.num["flips"]:
            return
        hidden = [] if life.in_s3 else Path(life.uri, "checkpoints").glob(".*")
        if len(found) != num_whole or num_whole > life.keep or [*hidden]:
            life.fail(f"after the faults {', '.join(found)} are left")


_living: list[Life] = []


def _audit(event: str, given: tuple[Any, ...]) -> None:
    if _living and not _living[-1].in_s3:
        _living[-1].audit(event, given)


sys.addaudithook(_audit)


def live(seed: int) -> Life:
    """An hour with faults, then what must work without them."""
    on_shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="life-", dir=on_shm) as folder:
        life = Life(seed, Path(folder))
        (life.folder / "tmp").mkdir()
        with pytest.MonkeyPatch.context() as patch:
            install(patch, life.bucket)
            patch.setattr(tempfile, "tempdir", f"{folder}/tmp")
            patch.setattr(os, "fsync", life.fsync)
            patch.setattr(Holder, "here", lambda: holder(life))
            if not life.in_s3:
                patch.setattr(storage, "age_s", lambda uri: life.now - life.touched[uri])
            _living.append(life)
            try:
                play(life)
            finally:
                _living.pop()
    return life


def holder(life: Life) -> Holder:
    name = life.actor.name
    return Holder(job="j" if life.is_job else "", machine=name, host="h", pid=1, born=name)


def play(life: Life) -> None:
    life.start()
    life.after(STEP_S, life.watch)
    life.run(life.random.choice([300, 600, 1200]), lambda: bool(life.wrong))
    # The faults end, and so does each process; what is late arrives.
    life.actor = Actor("nobody")
    life.note("the faults end")
    life.has_faults = False
    for head in life.heads:
        for each in (head, *head.ranks):
            each.is_dead = True
    life.sleep(LEASE_S + LATE_S + 1)
    if life.wrong:
        return
    before = life.num["saves"]
    life.start()
    life.run(STEP_S * 4 + 3, lambda: bool(life.wrong))
    if not life.wrong and life.num["saves"] == before:
        life.fail("the next save does not succeed")


def test_nothing_is_lost_whatever_storage_and_processes_do() -> None:
    played = [live(seed) for seed in range(200)]
    assert_right(played)
    for name, least in (("restores", 400), ("saves", 1000), ("zombies", 100), ("cuts", 20)):
        assert sum(life.num[name] for life in played) > least, name


@pytest.mark.night
def test_nothing_is_lost_in_many_lives() -> None:
    for first in range(200, 20_200, 100):
        assert_right([live(seed) for seed in range(first, first + 100)])


def assert_right(played: list[Life]) -> None:
    for life in played:
        if life.wrong:
            pytest.fail("\n".join([f"seed {life.seed}: {life.wrong[0]}", *life.history[-80:]]))
