"""Proves that a disk that becomes full or read-only at any write of a run ends it with a sentence,
without anything half written that counts, and that the same command continues when it has room."""

import errno
import itertools
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from contract import exits
from tests.training.local_runs import REPO
from training import launch
from training.data.sources import CACHE_VARIABLE
from training.record import reader
from training.record.events import Step

pytestmark = pytest.mark.slow

_SHORT: Final = ["--max-steps", "4", "--report-every", "1"]
WORDS: Final = {
    "fsdp": (
        f"fsdp --preset tiny --data {REPO / 'LICENSE'} --held-out-every 5 --evaluate-every 2 "
        "--checkpoint-every 2 --eval-sequences 2 --sample-tokens 1 --seq-len 32 --global-batch 2"
    ).split(),
    "ddp": [
        "ddp",
        "--preset",
        "digits",
        "--checkpoint-minutes",
        "0.0001",
        "--batch-per-worker",
        "8",
        "--epochs",
        "4",
    ],
}
#: What writes, as Python's audit events call it; a full disk still removes and renames.
_WRITES: Final = {"open", "os.mkdir", "os.link"}
_CHANGES: Final = _WRITES | {"os.rename", "os.remove", "os.rmdir"}


class Disk:
    """A folder that takes nothing more from the first write to a file of some name on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name, self.number = str(folder), "", 0
        self.left, self.has_failed = 0, False

    def fail(self, name: str, number: int, *, times: int = 1) -> None:
        self.name, self.number, self.left, self.has_failed = name, number, times, False

    def audit(self, event: str, given: tuple[Any, ...]) -> None:
        """Called by Python before each call of the system."""
        if not self.number or event not in (_WRITES if self.number == errno.ENOSPC else _CHANGES):
            return
        is_read = event == "open" and not given[2] & (os.O_WRONLY | os.O_RDWR)
        place = str(given[0])
        if is_read or not place.startswith(self.folder):
            return
        self.left -= self.name in place
        if self.left <= 0:
            self.has_failed = True
            raise OSError(self.number, os.strerror(self.number), place)


_disks: list[Disk] = []


def _audit(event: str, given: tuple[Any, ...]) -> None:
    if _disks and given:
        _disks[-1].audit(event, given)


sys.addaudithook(_audit)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """The folder of all runs; each is one rank, in this process."""
    folder = tmp_path_factory.mktemp("full")
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**rank, "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "x"}.items():
            patch.setenv(name, value)
        patch.setenv(CACHE_VARIABLE, str(folder / "cache"))
        (folder / "runs").mkdir()
        _disks.append(Disk(folder / "runs"))
        yield _disks[-1]
        _disks.clear()


def trained(disk: Disk, recipe: str, run: str) -> int:
    return launch.main([*WORDS[recipe], *_SHORT, "--storage", disk.folder, "--run", run])


def losses(disk: Disk, run: str) -> list[float]:
    return [each.loss for each in reader.read_metrics(f"{disk.folder}/{run}").of(Step)]


#: In the order in which they are written first.
NAMES: Final = (
    *("", "leases/", ".config.json.", "metrics.jsonl", ".part", "state.", "manifest.json"),
    *("evaluation.json", ".staging-", "report.html", "result.json"),
)
IN_CI: Final = {("fsdp", ".config.json.", errno.ENOSPC), ("fsdp", ".part", errno.ENOSPC)}


CASES: Final = [
    pytest.param(*each, marks=[] if each in IN_CI else [pytest.mark.night])
    for each in itertools.product(WORDS, NAMES, (errno.ENOSPC, errno.EROFS))
    if each[:2] != ("fsdp", ".staging-")  # it publishes no model
]


@pytest.mark.parametrize(("recipe", "name", "number"), CASES)
def test_it_ends_with_a_sentence_and_continues_when_there_is_room_again(
    recipe: str, name: str, number: int, disk: Disk, capfd: pytest.CaptureFixture[str]
) -> None:
    if not Path(disk.folder, recipe).exists():
        assert trained(disk, recipe, recipe) == exits.OK
    run = f"{recipe}-{NAMES.index(name)}-{number}"
    capfd.readouterr()
    disk.fail(name, number)
    code = trained(disk, recipe, run)
    disk.number = 0
    said = capfd.readouterr().err
    assert disk.has_failed
    # Only a person makes a disk writable again.
    assert code == exits.STORAGE or (number == errno.EROFS and code == exits.BAD_INPUT), said
    assert len([line for line in said.splitlines() if line.startswith("error: ")]) == 1, said
    assert "Traceback" not in said
    assert os.strerror(number) in said or "is full" in said
    assert not Path(disk.folder, run, "result.json").exists() or name == "result.json"

    assert trained(disk, recipe, run) == exits.OK
    assert losses(disk, run) == losses(disk, recipe)
    folder = Path(disk.folder, run)
    assert (folder / "report.html").exists()
    assert {path.name for path in folder.rglob(".*")} <= {".metadata"}
