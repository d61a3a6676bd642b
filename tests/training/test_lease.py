"""Proves that one process at a time writes a run: a second one is refused or takes over, one that
is gone does not count, and one that lost the run writes nothing that others would use."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from contract.errors import InputError
from contract.nodes import ENV_JOB
from contract.runs import RunPaths
from contract.times import LEASE_RENEW_S, LEASE_S
from store import storage
from tests import forks
from tests.training.local_runs import DIGITS, Command, launcher
from training import launch
from training.checkpoint import checkpoints, sharded_checkpoints
from training.checkpoint.checkpoints import Position
from training.runtime.torchrun import TorchrunWorker
from training.system import lease
from training.system.lease import Holder, Lease, newest_number

TAKE = """
import sys, time
from training.system.lease import Lease
lease = Lease.take(sys.argv[1])
lease.keep()
print(lease.number, flush=True)
sys.stdin.readline()
lease.release()
print("released", flush=True)
"""


@contextmanager
def another(run: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds the run until it reads a line."""
    command = [sys.executable, "-c", TAKE, run]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(tmp_path / "runs" / "mine")


def elsewhere(run: str, number: int, *, age_s: float = 0.0, job: str = "") -> None:
    """A lease of a process on another machine, confirmed so long ago."""
    holder = Holder(job=job, machine="m", host="far", pid=7, born="1")
    uri = f"{run}/leases/{number:08d}.json"
    assert storage.create_bytes(uri, holder.as_json())
    if age_s:
        touch(uri, age_s)


def touch(uri: str, age_s: float) -> None:
    os.utime(uri, (time.time() - age_s,) * 2)


def test_a_second_process_is_refused_until_the_first_one_has_ended(run: str) -> None:
    with another(run) as process:
        with pytest.raises(InputError, match=r"'mine' is being trained by process \d+ on .*: wait"):
            Lease.take(run)
        assert process.communicate("\n")[0] == "released\n"
    with another(run) as process:
        process.kill()
        process.wait()
        # Its number may be another's by now, but when that one began tells them apart.
        assert Lease.take(run).number == 3


def test_the_command_refuses_a_run_that_is_being_trained(
    run: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    elsewhere(run, 1, job="j-1", age_s=30)
    words = ["ddp", "--local", "--storage", str(tmp_path / "runs"), "--run", "mine", "--overwrite"]
    (tmp_path / "runs" / "mine" / "config.json").write_text("{}")
    assert launch.main(words) == 2
    err = capsys.readouterr().err
    assert "--take-over" in err
    assert (tmp_path / "runs" / "mine" / "config.json").exists(), (
        "it is not this process's to delete"
    )


@pytest.mark.parametrize(
    ("age_s", "confirms", "said"),
    [
        (0, False, "0 s ago.* free in 2 min"),
        (LEASE_S - 5, False, "1 min 55 s ago.* free in 5 s"),
        (LEASE_S, False, ""),
        (LEASE_S, True, "0 s ago.* free in 2 min"),
        (3600, True, "0 s ago.* free in 2 min"),  # this clock has jumped, or the other is behind
        (-3600, True, "0 s ago.* free in 2 min"),
        (-3600, False, ""),
    ],
)
def test_what_cannot_be_seen_expires_unless_confirmed_whatever_clocks_show(
    run: str, age_s: float, confirms: bool, said: str
) -> None:
    elsewhere(run, 3, age_s=age_s)
    uri = f"{run}/leases/00000003.json"

    def wait(seconds: float) -> None:
        assert seconds >= 2 * LEASE_RENEW_S
        if confirms:
            storage.write_bytes(uri, Path(uri).read_bytes())
            touch(uri, age_s)

    if said:
        with pytest.raises(InputError, match=f"process 7 on far, which said so {said}"):
            Lease.take(run, wait=wait)
    else:
        assert Lease.take(run, wait=wait).number == 4
    assert Lease.take(run, take_over=True).number == newest_number(run)


def test_a_damaged_lease_holds_nothing_up_for_long(run: str) -> None:
    elsewhere(run, 1)
    uri = f"{run}/leases/00000001.json"
    Path(uri).write_bytes(b"{")
    with pytest.raises(InputError, match=r"the run is free in 2 min"):
        Lease.take(run)
    touch(uri, LEASE_S)
    storage.write_bytes(f"{run}/leases/notes.txt", b"")
    assert Lease.take(run, wait=lambda _: None).number == 2


def test_a_job_follows_itself_and_takes_a_run_over_once(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(run, 1, job="other")
    monkeypatch.setenv(ENV_JOB, "mine")
    assert Lease.take(run, take_over=True).number == 2
    elsewhere(run, 3, job="mine")  # its next head, on another host
    assert Lease.take(run).number == 4
    elsewhere(run, 5, job="third")
    # The same words, once more, because its head was started again.
    with pytest.raises(InputError, match="is being trained by job third"):
        Lease.take(run, take_over=True)


def test_who_lost_the_run_hears_of_it_and_writes_no_lease(run: str) -> None:
    first = Lease.take(run)
    first.keep(every_s=0.05)
    elsewhere(run, 2, job="new")
    deadline = time.monotonic() + 30
    while not first.lost:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "'mine' has been taken over by job new" in first.lost
    before = storage.read_bytes(f"{run}/leases/00000001.json")
    first.release()
    assert storage.read_bytes(f"{run}/leases/00000001.json") == before


def contest(run: str) -> None:
    """Many at once: each number goes to one of them."""
    for number in range(1, 4):
        create = partial(storage.create_bytes, f"{run}/leases/{number:08d}.json")
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(create, [b"{}"] * 8)].count(True) == 1
    assert newest_number(run) == 3
    assert storage.list_files(f"{run}/leases") == [f"{number:08d}.json" for number in (1, 2, 3)]
    assert storage.list_folders(f"{run}/leases") == []


@pytest.mark.parametrize("has_links", [True, False])
def test_of_many_at_once_one_has_it(
    has_links: bool, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk without links too: a memory stick, and some network file systems."""
    if not has_links:
        monkeypatch.setattr("os.link", Mock(side_effect=PermissionError))
    contest(run)


@pytest.mark.slow
def test_in_s3_too(s3_endpoint: str) -> None:
    del s3_endpoint
    storage.filesystem("s3://").mkdir("s3://lease-test")
    contest("s3://lease-test/runs/many")
    run = "s3://lease-test/runs/one"
    elsewhere(run, 1)
    with pytest.raises(InputError, match="being trained"):
        Lease.take(run)
    lease = Lease.take(run, take_over=True)
    storage.write_bytes(f"{run}/config.json", b"{}")
    storage.write_bytes(f"{run}/notes.txt", b"a")
    for name in ("model/config.json", "checkpoints/step-00000001/state.pt", "stacks/step-1.txt"):
        storage.write_bytes(f"{run}/{name}", b"a")
    storage.remove_run(run)
    assert storage.list_files(run) == ["notes.txt"]
    assert storage.list_folders(run) == ["leases"]
    lease.release()
    assert Lease.take(run).number == 3


def save_shards(run: str, number: int) -> None:
    fence = 0 if os.environ["RANK"] == "1" else number  # the lease is rank 0's alone
    worker = TorchrunWorker(run_uri=run, fence=fence)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = optim.AdamW(model.parameters())
    saver = sharded_checkpoints.ShardedSaver(
        worker, model, optimizer, files={}, settings={}, keep=1
    )
    saver.save(Position(step=5))
    worker.close()


def test_under_torchrun_all_ranks_of_a_resumed_run_write_the_same_checkpoint(run: str) -> None:
    Lease.take(run)
    number = Lease.take(run).number
    forks.run(2, save_shards, run, number)
    assert checkpoints.names(run) == ["step-00000005-lease2"]
    checkpoints.verify(RunPaths(run).checkpoint(5, number))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    with launcher(tmp_path, "ddp") as run:
        yield run


@pytest.mark.slow
def test_a_run_that_is_taken_over_ends(start: Callable[..., Command]) -> None:
    command = start("taken", *DIGITS[:2], "--epochs", "9000", "--workers", "1")
    command.wait_until(lambda: command.steps_done() >= 1)
    new = Lease.take(str(command.run_folder), take_over=True)
    assert new.number == 2
    code, _, err = command.end(timeout_s=90)
    assert code == 2, err
    assert "run 'taken' has been taken over by process" in err
    assert "Traceback" not in err
    assert not (command.run_folder / "result.json").exists()


@pytest.mark.parametrize("start", ["take", "follow"])
def test_a_number_that_another_takes_at_the_same_moment_is_the_others(
    run: str, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    own = Lease.take(run)
    if start == "take":
        own.release()

    def newest(uri: str) -> int:
        monkeypatch.undo()
        number = newest_number(uri)
        elsewhere(uri, number + 1, job="other")  # right after the look
        return number

    monkeypatch.setattr(lease, "newest_number", newest)
    if start == "take":
        with pytest.raises(InputError, match="job other"):
            Lease.take(run)
    else:
        assert lease.follow(run, own.number) == own.number
    assert b"other" in (storage.read_bytes(f"{run}/leases/{own.number + 1:08d}.json") or b"")
