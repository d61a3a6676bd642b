"""Proves that no checkpoint is lost to a crash at any write, a storage that fails, a lack of memory
or a second writer, and that a run which cannot use any of its checkpoints does not start again by
itself."""

import errno
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from contract.errors import InputError
from contract.nodes import ENV_JOB
from contract.runs import MANIFEST_FILE, RunPaths
from contract.times import STORAGE_RETRY_S
from tests.training.bucket import RUN, Bucket, CrashError, install
from training.checkpoint import checkpoints, dcp, sharded_checkpoints
from training.checkpoint.checkpoints import Position, Snapshot
from training.checkpoint.manifest import Manifest
from training.record.events import Event, Warned
from training.system import storage
from training.system.lease import Holder, Lease, LostError, check, newest_number

SLOW_DOWN = OSError(errno.EBUSY, "Please reduce your request rate.")
NO_MEMORY = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"
)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return install(monkeypatch)


def snapshot(step: int, value: float | None = None) -> Snapshot:
    return Snapshot(
        model={"w": torch.full((8,), float(step) if value is None else value)},
        model_config="{}",
        optimizer={},
        rng=torch.get_rng_state(),
        position=Position(step=step),
        config={},
        data="x",
    )


def save(run: str, *steps: int, keep: int = 2, fence: int = 0) -> None:
    for step in steps:
        checkpoints.save(run, snapshot(step), keep=keep, fence=fence)


def newest_step(run: str) -> int | None:
    found = checkpoints.newest(run, pytest.fail)
    return found.position.step if found else None


def whole(bucket: Bucket) -> list[str]:
    """The checkpoints in a bucket that have all their files, unchanged."""
    found = []
    for name in checkpoints.names(RUN):
        files = {
            key.rpartition("/")[2]: content
            for key, content in bucket.objects.items()
            if f"/{name}/" in key
        }
        if MANIFEST_FILE in files:
            listed = Manifest.from_json(files[MANIFEST_FILE]).files
            hashes = {file: hashlib.sha256(files.get(file, b"")).hexdigest() for file in listed}
            if hashes == {file: entry.sha256 for file, entry in listed.items()}:
                found.append(name)
    return found


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


# --- what is damage, and what is not -------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("torch.load", NO_MEMORY),
        ("torch.load", MemoryError()),
        ("safetensors.torch.load_file", OSError(errno.ENOMEM, "Cannot allocate memory")),
        ("training.checkpoint.checkpoints._sha256", OSError(errno.EIO, "Input/output error")),
        ("training.system.storage.read_bytes", OSError(errno.ESTALE, "Stale file handle")),
    ],
)
def test_a_lack_of_memory_or_a_failing_disk_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    run = str(tmp_path)
    save(run, 100, 200)
    with monkeypatch.context() as patch:
        patch.setattr(where, raising(error))
        with pytest.raises(type(error)):
            checkpoints.newest(run, pytest.fail)
    assert newest_step(run) == 200


def test_what_a_second_look_finds_whole_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(str(tmp_path), 100)
    hashed, answers = checkpoints._sha256, iter(["0" * 64])
    monkeypatch.setattr(checkpoints, "_sha256", lambda path: next(answers, None) or hashed(path))
    assert newest_step(str(tmp_path)) == 100


def test_a_checkpoint_without_a_file_that_its_list_does_not_name_is_damaged(tmp_path: Path) -> None:
    run = str(tmp_path)
    save(run, 100, 200)
    folder = tmp_path / "checkpoints" / "step-00000200"
    (folder / "state.pt").unlink()
    listed = json.loads((folder / MANIFEST_FILE).read_text())
    del listed["files"]["state.pt"]
    (folder / MANIFEST_FILE).write_text(json.dumps(listed))
    warnings: list[str] = []
    found = checkpoints.newest(run, warnings.append)
    assert found is not None
    assert found.position.step == 100
    assert "state.pt" in warnings[0]


def damage(run: str, name: str) -> None:
    uri = f"{checkpoints.place_of(run, name)}/config.json"
    assert storage.exists(uri)
    storage.write_bytes(uri, b"[]")


def test_a_run_of_which_no_checkpoint_is_usable_refuses_to_start_unless_told_to(
    tmp_path: Path,
) -> None:
    run = str(tmp_path / "mine")
    save(run, 100, 200)
    for name in checkpoints.names(run):
        damage(run, name)
    for _ in range(2):  # nor the next time
        with pytest.raises(InputError, match=r"'mine' has .* none .*checksum.*--from-scratch"):
            checkpoints.newest(run, pytest.fail)
    assert checkpoints.names(run) == ["step-00000100", "step-00000200"]
    warnings: list[str] = []
    assert checkpoints.newest(run, warnings.append, from_scratch=True) is None
    assert len(warnings) == 2
    assert "step-00000200 is damaged" in warnings[0]
    assert "training starts at step 0" in warnings[0]
    assert (tmp_path / "mine" / "checkpoints" / "damaged-step-00000200").is_dir()
    save(run, 100)
    assert checkpoints.newest(run, pytest.fail, from_scratch=True) is not None


def test_a_run_whose_only_upload_was_cut_off_starts_at_its_beginning(bucket: Bucket) -> None:
    save(RUN, 100)
    bucket.rm_file(f"{RUN}/checkpoints/step-00000100/manifest.json")
    warnings: list[str] = []
    assert checkpoints.newest(RUN, warnings.append) is None
    assert "cut off" in warnings[0]
    assert checkpoints.names(RUN) == []


# --- a storage that fails -------------------------------------------------------------------------


def test_a_crash_at_any_write_leaves_the_checkpoint_before_or_this_one(
    bucket: Bucket,
) -> None:
    for number in range(1, 40):
        bucket.objects.clear()
        bucket.crash_at = None
        save(RUN, 100, 200)
        bucket.num_writes, bucket.crash_at = 0, number
        is_done = False
        try:
            save(RUN, 300)
            is_done = True
        except CrashError:
            pass
        bucket.crash_at = None
        found = checkpoints.newest(RUN, lambda _: None)
        assert found is not None
        assert found.position.step in ({300} if is_done else {200, 300}), number
        assert not any("damaged" in key for key in bucket.objects), number
        if is_done:
            assert number > 8, "a save has more writes"
            return
    pytest.fail("a save does not end")


@pytest.mark.parametrize("seed", range(12))
def test_whatever_fails_what_was_saved_is_found_and_as_many_are_kept_as_asked_for(
    bucket: Bucket, seed: int
) -> None:
    bucket.random.seed(seed)
    saved: list[int] = []
    for step in range(100, 2100, 100):
        bucket.share_failing = 0.12
        try:
            save(RUN, step)
            saved.append(step)
        except OSError:
            pass
        bucket.share_failing = 0.0
        names = whole(bucket)
        assert len(names) >= min(2, len(saved)), (step, names)
        if saved:
            assert names[-1] >= f"step-{saved[-1]:08d}"
    assert 5 < len(saved) < 20, "too many or too few failures"


def test_torn_checkpoints_do_not_count_and_are_removed_once_a_later_one_is_whole(
    bucket: Bucket,
) -> None:
    save(RUN, 100, 200)
    for step in (300, 400, 600):
        bucket.pipe_file(f"{RUN}/checkpoints/step-{step:08d}/model.safetensors", b"half")
    save(RUN, 500)
    assert checkpoints.names(RUN) == ["step-00000200", "step-00000500", "step-00000600"]


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_JOB, "j-1")


class Weather:
    """A task that fails a few times, and a sleep that takes no time."""

    def __init__(self, *errors: BaseException) -> None:
        self._errors = [*errors]
        self.slept: list[float] = []
        self.said: list[str] = []

    def task(self) -> str:
        if self._errors:
            raise self._errors.pop(0)
        return "done"

    def retried(self) -> str:
        return storage.retried(self.task, say=self.said.append, sleep=self.slept.append)


@pytest.mark.usefixtures("in_job")
def test_a_job_waits_for_its_storage() -> None:
    from botocore.exceptions import ReadTimeoutError

    silent = ReadTimeoutError(endpoint_url="https://s3")
    weather = Weather(SLOW_DOWN, silent, storage.UnreachableError("no answer"), TimeoutError())
    assert weather.retried() == "done"
    assert weather.slept == [STORAGE_RETRY_S] * 4
    assert "Please reduce your request rate.: trying again in 30 s" in weather.said[0]


@pytest.mark.usefixtures("in_job")
@pytest.mark.parametrize(
    "error",
    [
        InputError("wrong"),
        FileNotFoundError(errno.ENOENT, "no such bucket"),
        PermissionError(errno.EACCES, "denied"),
        OSError(errno.EINVAL, "wrong region"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError("cannot identify image file"),
        NO_MEMORY,
        KeyError("a bug"),
    ],
)
def test_a_job_does_not_wait_for_what_time_does_not_change(error: Exception) -> None:
    weather = Weather(error)
    with pytest.raises(type(error)):
        weather.retried()
    assert weather.slept == []


class OneRank:
    """The only worker of a run."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def __init__(self, run_uri: str) -> None:
        self.run_uri, self.fence = run_uri, 0
        self.said: list[str] = []

    def emit(self, *events: Event) -> None:
        self.said += [event.message for event in events if isinstance(event, Warned)]

    def stop_requested(self) -> bool:
        return False

    def is_losing_a_node(self) -> bool:
        return False

    def save(self, step: int | None, write: Callable[[], str] | None) -> None:
        raise NotImplementedError

    def finish_saves(self, *, retry: bool = False) -> None:
        del retry


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Makes pauses take no time; how long they would have been."""
    slept: list[float] = []
    monkeypatch.setattr(storage, "retried", partial(storage.retried, sleep=slept.append))
    return slept


@pytest.mark.usefixtures("in_job")
def test_a_job_waits_for_a_checkpoint_that_cannot_be_read(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, at_once: list[float]
) -> None:
    save(RUN, 100)
    fetch, errors = bucket.get_file, [SLOW_DOWN, SLOW_DOWN]

    def get_file(uri: str, local: str) -> None:
        if errors:
            raise errors.pop()
        fetch(uri, local)

    monkeypatch.setattr(bucket, "get_file", get_file)
    worker = OneRank(RUN)
    found = checkpoints.shared_newest(worker)
    assert found is not None
    assert found.position.step == 100
    assert at_once == [STORAGE_RETRY_S] * 2
    assert "a checkpoint cannot be read: [Errno 16] Please reduce" in worker.said[0]


# --- checkpoints of a sharded model ---------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


Trained = tuple[nn.Module, torch.optim.Optimizer]


def trained(width: int = 4) -> Trained:
    model = nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_sharded(
    run: str, step: int, made: Trained, group: dist.ProcessGroup, *, fence: int = 0
) -> str:
    state = {"position": {"step": step}, "config": {}}
    return sharded_checkpoints.write_checkpoint(
        run,
        step,
        sharded_checkpoints.state_of(*made),
        files={sharded_checkpoints.STATE_FILE: json.dumps(state).encode()},
        group=group,
        fence=fence,
    )


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def failing_shards(monkeypatch: pytest.MonkeyPatch, errors: list[Exception]) -> None:
    """Let shards be read once the errors have been raised."""
    real = dcp.StorageFiles.create_stream

    def create_stream(files: dcp.StorageFiles, path: Any, mode: str) -> Any:
        if str(path).endswith(".distcp") and errors:
            raise errors.pop(0)
        return real(files, path, mode)

    monkeypatch.setattr(dcp.StorageFiles, "create_stream", create_stream)


def found_in(run: str) -> sharded_checkpoints.Found:
    found = sharded_checkpoints.newest(OneRank(run))
    assert found is not None
    return found


@pytest.mark.usefixtures("in_job")
def test_a_job_waits_for_shards_that_cannot_be_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at_once: list[float],
    group: dist.ProcessGroup,
) -> None:
    made = trained()
    save_sharded(str(tmp_path), 5, made, group)
    found = found_in(str(tmp_path))
    failing_shards(monkeypatch, [SLOW_DOWN, TimeoutError()])
    model, optimizer = trained()
    said: list[str] = []
    found.load(model, optimizer, warn=said.append)
    assert at_once == [STORAGE_RETRY_S] * 2
    assert "Please reduce your request rate" in said[0]
    assert same_weights(model, made[0])


@pytest.mark.parametrize("error", [SLOW_DOWN, NO_MEMORY])
def test_what_fails_while_shards_are_read_is_not_the_users_mistake(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: dist.ProcessGroup,
    error: Exception,
) -> None:
    monkeypatch.delenv(ENV_JOB, raising=False)
    save_sharded(str(tmp_path), 5, trained(), group)
    found = found_in(str(tmp_path))
    failing_shards(monkeypatch, [error])
    with pytest.raises(type(error)) as raised:
        found.load(*trained())
    assert not isinstance(raised.value, InputError | CheckpointException)


def test_a_checkpoint_of_another_model_is_the_users_mistake(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    save_sharded(str(tmp_path), 5, trained(), group)
    with pytest.raises(InputError, match=r"does not fit the model: .*Size mismatch.*another --run"):
        found_in(str(tmp_path)).load(*trained(width=6))
    wider = nn.Linear(4, 4)
    wider.register_parameter("more", nn.Parameter(torch.zeros(1)))
    with pytest.raises(InputError, match=r"does not fit the model: .*Missing key.*another --run"):
        found_in(str(tmp_path)).load(wider, torch.optim.AdamW(wider.parameters()))


@pytest.mark.usefixtures("in_job")
def test_a_sharded_run_of_which_no_checkpoint_is_usable_refuses_to_start_unless_told_to(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at_once: list[float],
    group: dist.ProcessGroup,
) -> None:
    run = str(tmp_path / "mine")
    for step in (5, 6):
        save_sharded(run, step, trained(), group)
    worker = OneRank(run)
    with monkeypatch.context() as patch:
        patch.setattr(sharded_checkpoints, "verify", raising(NO_MEMORY))
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            sharded_checkpoints.newest(worker)
        patch.undo()
        patch.setattr(dcp, "_check", raising(MemoryError()))
        with pytest.raises(MemoryError):
            sharded_checkpoints.newest(worker)
        errors, verify = [SLOW_DOWN], sharded_checkpoints.Found
        patch.undo()
        patch.setattr(
            sharded_checkpoints,
            "Found",
            lambda uri: raising(errors.pop())() if errors else verify(uri),
        )
        found = sharded_checkpoints.newest(worker)
    assert found is not None
    assert found.position.step == 6
    assert at_once == [STORAGE_RETRY_S]
    for name in checkpoints.names(run):
        (tmp_path / "mine" / "checkpoints" / name / "state.json").write_bytes(b"{}")
    with pytest.raises(InputError, match=r"'mine' has .* none .*state.json.*--from-scratch"):
        sharded_checkpoints.newest(worker)
    assert len(checkpoints.names(run)) == 2
    assert sharded_checkpoints.newest(worker, from_scratch=True) is None
    assert checkpoints.names(run) == []


# --- two writers ----------------------------------------------------------------------------------


#: Number of the write that is a checkpoint's manifest.
MANIFEST = 4


def holder(job: str) -> Holder:
    return Holder(job=job, machine=job, host="far", pid=1, born="1", confirmed=time.time())


def taken_over(run: str) -> int:
    """Number of the lease that another process takes."""
    number = newest_number(run) + 1
    assert storage.create_bytes(f"{run}/leases/{number:08d}.json", holder("b").as_json())
    return number


@pytest.mark.parametrize("stalls_before", range(1, MANIFEST + 1))
@pytest.mark.parametrize("keep", [1, 2])
def test_a_writer_that_lost_the_run_damages_no_checkpoint_of_its_successor(
    bucket: Bucket, stalls_before: int, keep: int
) -> None:
    own = Lease.take(RUN)
    save(RUN, 100, keep=keep, fence=own.number)
    bucket.num_writes = 0

    def stall(number: int) -> None:
        if number != stalls_before:
            return
        bucket.before_write = lambda _: None
        later = taken_over(RUN)
        # The same step, as steps are deterministic; sums of floats in another order.
        checkpoints.save(RUN, snapshot(200, 200.001), keep=keep, fence=later)

    bucket.before_write = stall
    try:
        save(RUN, 200, keep=keep, fence=own.number)
        is_reported = True
    except LostError:
        is_reported = False
    assert newest_number(RUN) == 2, "it has stalled"
    # Right before its manifest, after the last check, it writes a whole one, which does no harm.
    assert is_reported == (stalls_before == MANIFEST)
    assert "step-00000200-lease2" in whole(bucket)
    found = checkpoints.newest(RUN, lambda _: None)
    assert found is not None
    assert found.model["w"][0] == pytest.approx(200.001)


def test_a_writer_that_lost_the_run_removes_nothing_that_its_successor_is_writing(
    bucket: Bucket,
) -> None:
    save(RUN, 300, fence=1)
    bucket.pipe_file(f"{RUN}/checkpoints/step-00000200-lease2/model.safetensors", b"half")
    checkpoints.prune(RUN, keep=1, step=300, fence=1)
    assert checkpoints.names(RUN) == ["step-00000200-lease2", "step-00000300"]


def test_a_sharded_writer_that_lost_the_run_writes_apart_from_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    run = str(tmp_path)
    own = Lease.take(run)
    real = state_dict_saver.save
    successor = trained()

    def stalls(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(sharded_checkpoints, "save", real)
        save_sharded(run, 5, successor, group, fence=taken_over(run))
        return real(*arguments, **options)

    monkeypatch.setattr(sharded_checkpoints, "save", stalls)
    with pytest.raises(LostError, match="has been taken over"):
        save_sharded(run, 5, trained(), group, fence=own.number)
    found = found_in(run)
    assert found.uri == RunPaths(run).checkpoint(5, 2)
    model, optimizer = trained()
    found.load(model, optimizer)
    assert same_weights(model, successor[0])


def test_a_lease_is_never_given_twice(bucket: Bucket) -> None:
    refused = Lease.take(RUN)  # a first start, which ends before the run began
    later: list[int] = []

    def take_over(_number: int) -> None:
        bucket.before_write = lambda _: None
        later.append(taken_over(RUN))

    bucket.before_write = take_over
    refused.release()
    assert later == [2]
    third = Lease.take(RUN, take_over=True)
    assert third.number == 3
    with pytest.raises(LostError):
        check(RUN, 2)


def test_the_run_of_a_start_that_was_refused_is_free_at_once(bucket: Bucket) -> None:
    del bucket
    Lease.take(RUN).release()
    assert Lease.take(RUN).number == 2
