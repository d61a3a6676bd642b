"""What a user's program writes is saved while it runs, and is there again at its next start.

Real folders and a bucket in memory; the real calls of S3 are in ``test_files_in_s3.py``.
"""

import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from boto3.exceptions import Boto3Error, RetriesExceededError
from botocore.exceptions import EndpointConnectionError

from containers.program import saving
from containers.program.files import Mirror
from containers.program.requirements import Stopped
from contract import runs, times
from contract.errors import InputError
from contract.runs import MANIFEST, OUTPUT, WORK, Manifest
from tests.clock import FakeClock
from tests.containers.program.s3_in_memory import S3, refused

PREFIX = "runs/r/output"
AGO_S = 100
"""Older than a folder that is waited for."""


@dataclass
class Node:
    """A node at one start: fresh folders, with the code in them."""

    place: Path
    s3: S3
    number: int = 0
    code: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for folder in (self.work, self.output):
            folder.mkdir(parents=True)
        for name, text in self.code.items():
            self.write(name, text)
        self.mirror = Mirror(
            {WORK: self.work, OUTPUT: self.output},
            address(self.number),
            say=self.said.append,
            client=self.s3,
            **{"every_s": 0.05, **self.options},
        )

    @property
    def work(self) -> Path:
        return self.place / "work"

    @property
    def output(self) -> Path:
        return self.place / "output"

    def write(self, name: str, text: str, *, ago_s: float = AGO_S) -> Path:
        path = self.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (time.time() - ago_s,) * 2)
        return path

    def found(self) -> dict[str, str]:
        """What lies in the folders."""
        return {
            path.relative_to(self.place).as_posix(): path.read_text()
            for folder in (self.work, self.output)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }


def address(number: int) -> str:
    return f"s3://bucket/{PREFIX}/node-{number}"


@pytest.fixture
def s3() -> S3:
    return S3()


@pytest.fixture
def start(tmp_path: Path, s3: S3) -> Callable[..., Node]:
    """Start a node: in new folders, restored."""
    starts: list[Node] = []

    def start(number: int = 0, *, restore: bool = True, **given: Any) -> Node:
        code = given.pop("code", {})
        place = tmp_path / f"start-{len(starts)}"
        starts.append(Node(place, s3, number=number, code=code, options=given))
        if restore:
            starts[-1].mirror.restore(address(0))
        return starts[-1]

    return start


def saved(s3: S3, number: int = 0) -> dict[str, str]:
    """What is saved of a node, according to its list."""
    prefix = f"{PREFIX}/node-{number}/"
    manifest = Manifest.from_json(s3.objects[prefix + MANIFEST])
    return {
        file.name: s3.objects[prefix + file.object].decode()
        for file in manifest.files
        if not file.link
    }


def contents(s3: S3) -> list[bytes]:
    """Of the objects in the bucket, lists left out."""
    return sorted(each for key, each in s3.objects.items() if not key.endswith(MANIFEST))


Start = Callable[..., Node]


def test_files_of_both_folders_come_back_with_their_modes_and_times(start: Start, s3: S3) -> None:
    node = start()
    node.write("work/a/b/last.pt", "one")
    node.write("output/metrics.csv", "1,2").chmod(0o755)
    assert node.mirror.save()
    assert saved(s3) == {"work/a/b/last.pt": "one", "output/metrics.csv": "1,2"}

    again = start()
    assert again.found() == {"work/a/b/last.pt": "one", "output/metrics.csv": "1,2"}
    assert os.access(again.output / "metrics.csv", os.X_OK)
    assert not os.access(again.work / "a/b/last.pt", os.X_OK)
    assert abs((again.output / "metrics.csv").stat().st_mtime - (time.time() - AGO_S)) < 20
    assert again.said == [f"files: 2 restored from {address(0)}"]


def test_what_has_not_changed_is_not_sent_again(start: Start, s3: S3) -> None:
    node = start()
    node.write("work/a", "one")
    assert node.mirror.copy()
    num = len(s3.written)
    assert node.mirror.copy()
    assert len(s3.written) == num
    node.write("work/a", "one", ago_s=50)  # another time, the same content: the list alone
    assert node.mirror.copy()
    assert s3.written[num:] == [f"{PREFIX}/node-0/{MANIFEST}"]


def test_the_code_is_not_saved_until_the_program_changes_it(start: Start, s3: S3) -> None:
    code = {"work/train.py": "code", "work/config.yaml": "lr: 1"}
    node = start(code=code)
    node.mirror.save()
    assert saved(s3) == {}
    node.write("work/config.yaml", "lr: 2")
    node.mirror.save()
    assert saved(s3) == {"work/config.yaml": "lr: 2"}

    assert start(code=code).found()["work/config.yaml"] == "lr: 2"
    newer = start(code={**code, "work/config.yaml": "lr: 3"})
    assert newer.found()["work/config.yaml"] == "lr: 3", "the user's newer code counts"
    assert "which has changed since" in newer.said[0]


def test_a_file_that_is_removed_is_gone_at_the_next_start(start: Start, s3: S3) -> None:
    node = start()
    node.write("work/old.pt", "old")
    node.write("work/new.pt", "new")
    node.mirror.save()
    (node.work / "old.pt").unlink()
    node.mirror.save()
    assert contents(s3) == [b"new"]
    assert start().found() == {"work/new.pt": "new"}


def test_nothing_but_the_files_and_their_list_is_left_in_the_bucket(start: Start, s3: S3) -> None:
    node = start()
    for text in ("one", "two"):
        node.write("work/a", text)
        node.write("work/b", "same content")
        node.write("work/c", "same content")
        assert node.mirror.save()
    assert contents(s3) == [b"same content", b"two"]


# --- while the program runs
def test_a_file_that_is_open_for_writing_waits_until_it_is_closed(start: Start, s3: S3) -> None:
    node = start()
    with (node.work / "last.pt").open("w") as file:
        file.write("half")
        file.flush()
        assert not node.mirror.copy()
        assert saved(s3) == {}
        file.seek(0)
        file.write("all of it")
    assert node.mirror.copy()
    assert saved(s3) == {"work/last.pt": "all of it"}


def test_a_changed_file_that_is_open_keeps_the_copy_it_had(start: Start, s3: S3) -> None:
    node = start()
    node.write("work/last.pt", "step 1")
    node.mirror.copy()
    with (node.work / "last.pt").open("w") as file:
        file.write("ste")
        file.flush()
        assert not node.mirror.copy()
        assert saved(s3) == {"work/last.pt": "step 1"}


def test_a_log_that_stays_open_is_saved_as_far_as_it_goes(start: Start, s3: S3) -> None:
    node = start()
    with (node.work / "log.txt").open("w") as log:
        for line in range(3):
            log.write(f"line {line}\n")
            log.flush()
            node.mirror.copy()
    assert saved(s3) == {"work/log.txt": "line 0\nline 1\nline 2\n"}
    with (node.work / "log.txt").open("a") as log:
        log.write("line 3\n")
    node.mirror.copy()
    assert saved(s3)["work/log.txt"].endswith("line 3\n")


def test_an_open_file_that_changes_inside_is_no_log(start: Start, s3: S3) -> None:
    node = start()
    with (node.work / "data.db").open("w") as file:
        for step in range(4):
            file.seek(0)
            file.write(f"step {step}\n" + "row\n" * step)
            file.flush()
            assert not node.mirror.copy()
    assert saved(s3) == {}
    assert node.mirror.copy(), "it is closed"
    assert saved(s3)["work/data.db"].startswith("step 3")


def test_an_open_file_to_which_nothing_is_written_is_saved(start: Start, s3: S3) -> None:
    node = start()
    with (node.work / "data.db").open("w") as file:
        file.write("rows")
        file.flush()
        assert not node.mirror.copy()
        assert node.mirror.copy()
    assert saved(s3) == {"work/data.db": "rows"}


def test_a_new_folder_is_saved_when_nothing_in_it_changes_any_more(start: Start, s3: S3) -> None:
    node = start()
    node.write("work/step-1/model", "1")
    assert node.mirror.copy()
    node.write("work/step-2/model", "2", ago_s=0)  # its optimizer is still to come
    node.write("work/latest", "1")
    assert not node.mirror.copy()
    assert saved(s3) == {"work/step-1/model": "1", "work/latest": "1"}
    node.write("work/step-2/model", "2")
    node.write("work/step-2/optimizer", "2")
    assert node.mirror.copy()
    assert saved(s3).keys() == {
        *("work/step-1/model", "work/latest", "work/step-2/model", "work/step-2/optimizer")
    }


def test_a_new_folder_in_which_something_always_changes_waits_a_few_rounds(
    start: Start, s3: S3
) -> None:
    node = start()
    rounds = 0
    while not saved(s3) and rounds < 20:
        node.write("work/logs/done", "done")
        node.write("work/logs/now", str(rounds), ago_s=0)
        node.mirror.copy()
        rounds += 1
    assert rounds == saving._PATIENCE + 1
    assert saved(s3).keys() == {"work/logs/done", "work/logs/now"}


def test_what_changes_while_it_is_sent_is_left_for_the_next_round(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_SMALL", 3)  # nothing is read at once
    node = start()
    path = node.write("work/large", "first content")

    def rewrite(_key: str) -> None:
        s3.on_upload = lambda _key: None
        path.write_text("second content")

    s3.on_upload = rewrite
    assert not node.mirror.copy()
    assert saved(s3) == {}
    assert node.mirror.copy()
    assert saved(s3) == {"work/large": "second content"}


def test_a_large_file_that_is_always_rewritten_is_saved_all_the_same(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_SMALL", 3)
    node = start()
    path = node.write("work/large", "content 0")
    num = 0

    def rewrite(_key: str) -> None:
        nonlocal num
        num += 1
        path.write_text(f"content {num}")

    s3.on_upload = rewrite
    assert not node.mirror.copy()
    assert node.mirror.copy(), "from a copy on the disk, which is faster than the network"
    assert saved(s3) == {"work/large": "content 1"}


def test_a_file_that_is_replaced_while_it_is_sent_is_saved_whole(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_SMALL", 3)
    node = start()
    path = node.write("work/large", "old content")
    newer = node.write("newer", "new content")

    def replace_it(_key: str) -> None:
        if newer.exists():
            newer.replace(path)

    s3.on_upload = replace_it
    assert node.mirror.copy()
    assert saved(s3) == {"work/large": "old content"}


def test_the_list_is_written_after_what_it_names(start: Start, s3: S3) -> None:
    """Wherever the writing breaks off, a restore sees one state and not parts of two."""
    first = start()
    first.write("work/model", "step 1")
    first.write("work/step", "1")
    first.mirror.save()
    first.write("work/model", "step 2")
    first.write("work/step", "2")
    for num_calls in range(1, 40):
        broken = S3()
        broken.objects = dict(s3.objects)
        node = Node(first.place.with_name(f"cut-{num_calls}"), broken)
        node.mirror.restore()
        node.write("work/model", "step 2")
        node.write("work/step", "2")
        broken.calls_left = num_calls
        is_done = node.mirror.save(within_s=0.05)
        broken.calls_left, broken.is_down = None, False
        after = Node(first.place.with_name(f"after-{num_calls}"), broken)
        after.mirror.restore()
        assert after.found() in (
            {"work/model": "step 1", "work/step": "1"},
            {"work/model": "step 2", "work/step": "2"},
        ), num_calls
        if is_done:
            assert after.found()["work/step"] == "2"
            assert num_calls == 3, "two uploads and the list"
            break
    else:
        pytest.fail("it never came to its end")


def test_a_thread_copies_until_it_is_ended(start: Start, s3: S3) -> None:
    node = start()
    node.mirror.start()
    node.write("work/a", "one")
    until = time.monotonic() + 20
    while not saved(s3) and time.monotonic() < until:
        time.sleep(0.01)
    node.mirror.close()
    assert saved(s3) == {"work/a": "one"}
    node.write("work/b", "two")
    time.sleep(0.2)
    assert saved(s3) == {"work/a": "one"}


def test_nodes_copy_at_the_same_moments_whenever_they_were_started(start: Start) -> None:
    """So that after a lost host all nodes restore what they had at one moment."""

    for began in (86_401.0, 86_417.25, 86_429.5):
        node = start(every_s=30, clock=FakeClock(now=began))
        assert began + node.mirror.until_next_copy() == 86_430


# --- names
def test_links_come_back_and_lead_nowhere_else(start: Start, tmp_path: Path, s3: S3) -> None:
    (tmp_path / "secret").write_text("hidden")
    node = start()
    node.write("work/step-1/model", "1")
    (node.work / "latest").symlink_to("step-1")
    (node.work / "absolute").symlink_to(node.work / "step-1" / "model")
    (node.work / "out").symlink_to(tmp_path / "secret")
    (node.work / "up").symlink_to("../..")
    node.mirror.save()
    assert saved(s3) == {"work/step-1/model": "1"}
    assert sum("leads out of its folder" in line for line in node.said) == 2

    again = start()
    assert (again.work / "latest" / "model").read_text() == "1"
    assert (again.work / "absolute").read_text() == "1"
    assert (again.work / "absolute").resolve().is_relative_to(again.work.resolve())
    assert not (again.work / "out").is_symlink()
    assert not (again.work / "up").is_symlink()


@pytest.mark.parametrize(
    "name", ["../x", "work/../../x", "/etc/x", "elsewhere/x", "x", "work//x", "work/a\nb"]
)
def test_a_list_that_names_another_place_is_refused(start: Start, s3: S3, name: str) -> None:
    node = start()
    node.write("work/a", "one")
    node.mirror.save()
    key = f"{PREFIX}/node-0/{MANIFEST}"
    manifest = Manifest.from_json(s3.objects[key])
    entry = replace(manifest.files[0], name=name, key="work/a")
    s3.objects[key] = replace(manifest, files=(entry,)).to_json().encode()
    again = start(restore=False)
    with pytest.raises(InputError, match=r"cannot be restored: .*(refused|lies in none)"):
        again.mirror.restore()
    assert again.found() == {}


def test_links_that_lead_out_by_way_of_each_other_are_refused(start: Start, s3: S3) -> None:
    node = start()
    node.write("work/d/e/a", "one")
    node.mirror.save()
    key = f"{PREFIX}/node-0/{MANIFEST}"
    manifest = Manifest.from_json(s3.objects[key])
    real = manifest.files[0]
    links = [
        replace(real, name="work/d/k", link=".", sha256="", key=""),
        replace(real, name="work/d/out", link="k/k/k/../../..", sha256="", key=""),
    ]
    s3.objects[key] = replace(manifest, files=(real, *links)).to_json().encode()
    again = start()
    assert not (again.work / "d" / "out").is_symlink()
    assert any("work/d/out is damaged" in line for line in again.said)


def test_a_file_of_the_list_is_not_written_through_a_link(start: Start, s3: S3) -> None:
    node = start()
    node.write("work/a/b", "one")
    node.mirror.save()
    again = start(restore=False)
    (again.place / "elsewhere").mkdir()
    (again.work / "a").symlink_to(again.place / "elsewhere")
    with pytest.raises(InputError, match="leads out"):
        again.mirror.restore()
    assert not [*(again.place / "elsewhere").iterdir()]
    assert saved(s3) == {"work/a/b": "one"}


def test_names_that_the_bucket_cannot_hold_are_named_once(start: Start, s3: S3) -> None:
    node = start()
    node.write("work/line\nbreak", "x")
    node.write("work/back\\slash", "x")
    (Path(os.fsdecode(os.fsencode(node.work) + b"/\xff.txt"))).write_text("x")
    deep = "work" + "/abcdefghi" * 100
    node.write(deep, "x")
    node.write("work/é ü/中.txt", "x")
    node.mirror.save()
    node.mirror.save()
    assert saved(s3) == {"work/é ü/中.txt": "x"}
    assert len(node.said) == 4
    assert all(line.endswith("it is not saved") for line in node.said)


def test_caches_and_what_is_excluded_are_left_out(start: Start, s3: S3) -> None:
    node = start(excluded=["work/.venv", "work/big.bin"])
    for name in ("__pycache__/a.pyc", "sub/__pycache__/b.pyc", ".venv/c", "big.bin", "hub/x"):
        node.write(f"work/{name}", "x")
    node.write("work/hub/CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55")
    os.mkfifo(node.work / "pipe")
    node.write("work/kept/.venv/d", "x")
    node.mirror.save()
    assert saved(s3).keys() == {"work/kept/.venv/d"}


def test_empty_folders_come_back(start: Start) -> None:
    node = start()
    (node.work / "logs" / "tensorboard").mkdir(parents=True)
    node.write("work/a/b", "x")
    node.mirror.save()
    again = start()
    assert (again.work / "logs" / "tensorboard").is_dir()


def test_many_small_files(start: Start, s3: S3) -> None:
    node = start()
    for number in range(500):
        node.write(f"work/samples/{number % 7}/{number}.txt", str(number))
    assert node.mirror.copy()
    assert len(saved(s3)) == 500
    assert len(start().found()) == 500


# --- limits and errors
def test_above_the_limit_output_comes_first_and_then_the_newest(start: Start, s3: S3) -> None:
    node = start(limit_bytes=3000)
    node.write("work/old.pt", "a" * 1000, ago_s=900)
    node.write("work/data/part", "b" * 2000, ago_s=500)
    assert node.mirror.copy()
    node.write("output/model", "c" * 1000, ago_s=1000)
    node.write("work/step-2/model", "d" * 1000, ago_s=100)
    node.write("work/step-2/state", "e" * 900, ago_s=200)
    assert not node.mirror.copy()
    assert saved(s3).keys() == {"output/model", "work/step-2/model", "work/step-2/state"}
    assert len(contents(s3)) == 3, "what is not kept is not paid for"
    (told,) = node.said
    assert told.startswith("files: 2 files are not saved: work/data/part, work/old.pt. The folders")
    assert not node.mirror.copy()
    assert node.said == [told], "until it is something else"
    assert not node.mirror.save(), "without trying again: it would be in vain"
    assert node.mirror.lost == ["work/data/part", "work/old.pt"]
    (node.work / "data" / "part").unlink()
    assert not node.mirror.copy()
    assert "1 files are not saved: work/old.pt" in node.said[-1]
    (node.output / "model").unlink()
    assert node.mirror.save()
    assert saved(s3).keys() == {"work/old.pt", "work/step-2/model", "work/step-2/state"}
    assert node.mirror.lost == []


def test_a_folder_that_is_above_the_limit_by_itself_is_saved_in_part(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start(limit_bytes=3000)
    node.write("work/large", "x" * 4000, ago_s=10)
    for number in range(5):
        node.write(f"output/samples/{number}", str(number) * 1000, ago_s=100 + number)
    assert not node.mirror.save()
    assert saved(s3).keys() == {f"output/samples/{number}" for number in range(3)}
    assert node.mirror.lost == ["output/samples/3", "output/samples/4", "work/large"]
    monkeypatch.setattr(runs, "OUTPUT_LIMIT_FILES", 2)
    node = start(1)
    for number in range(4):
        node.write(f"work/{number}", str(number), ago_s=100 + number)
    assert not node.mirror.save()
    assert saved(s3, 1) == {"work/0": "0", "work/1": "1"}


def test_an_older_checkpoint_makes_room_only_for_one_that_is_saved(start: Start, s3: S3) -> None:
    node = start(limit_bytes=1500)
    node.write("work/step-1/model", "1" * 1000)
    assert node.mirror.copy()
    path = node.write("work/step-2/model", "2" * 1000)
    with path.open("a"):
        assert not node.mirror.copy()
        assert saved(s3).keys() == {"work/step-1/model"}
    assert not node.mirror.copy()
    assert saved(s3).keys() == {"work/step-2/model"}


def test_a_bucket_that_does_not_answer_is_named_once_and_asked_again(start: Start, s3: S3) -> None:
    node = start()
    node.write("work/a", "one")
    s3.is_down = True
    assert not node.mirror.copy()
    assert not node.mirror.copy()
    assert not node.mirror.save(within_s=0.2)
    assert node.mirror.lost == ["work/a"]
    assert node.said[0].startswith("files: not saved: EndpointConnectionError: ")
    assert node.said[1:] == ["files: not saved at the program's end: work/a"]
    s3.is_down = False
    assert node.mirror.copy()
    assert node.said[2:] == ["files: saved again"]
    assert saved(s3) == {"work/a": "one"}


REFUSALS = [
    refused("AccessDenied", 403),
    refused("NoSuchBucket", 404),
    OSError(errno.ENOSPC, "No space left on device"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=str)
def test_a_program_is_not_started_without_files_that_are_refused(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(times, "FILES_REFUSED_S", 0.2)
    s3.trouble = error
    s3.is_down = True
    node = start(restore=False)
    with pytest.raises(InputError, match="is not started without them"):
        node.mirror.restore()
    assert any("trying again" in line for line in node.said), "rights may be some seconds late"


TROUBLES = [
    EndpointConnectionError(endpoint_url="s3"),
    refused("SlowDown", 503),
    refused("InternalError", 500),
    ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    RetriesExceededError(Boto3Error("the body stopped")),
]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda each: type(each).__name__)
def test_a_bucket_in_trouble_is_waited_for(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    monkeypatch.setattr(times, "FILES_REFUSED_S", -1)  # the patience is over
    node = start()
    node.write("work/a", "one")
    node.mirror.save()
    again = start(restore=False)
    if isinstance(trouble, RetriesExceededError):
        download, left = s3.download_file, [trouble] * 3

        def break_off(*given: Any, **named: Any) -> None:
            if left:
                raise left.pop()
            download(*given, **named)

        monkeypatch.setattr(s3, "download_file", break_off)
    else:
        s3.trouble = trouble
        s3.is_down, s3.calls_until_up = True, 3
    again.mirror.restore()
    assert again.found() == {"work/a": "one"}
    assert "not restored: " in again.said[0]


def test_a_start_that_waits_for_the_bucket_ends_when_the_job_does(start: Start, s3: S3) -> None:
    s3.is_down = True
    node = start(restore=False)
    asked: list[bool] = []

    def is_over() -> bool:
        asked.append("not restored" in "".join(node.said))
        return asked[-1]

    with pytest.raises(Stopped):
        node.mirror.restore(should_stop=is_over)


def test_a_restore_that_is_broken_off_returns_at_once_and_changes_nothing(
    start: Start, s3: S3
) -> None:
    first = start()
    first.write("work/a", "1")
    first.mirror.save()
    saved = dict(s3.objects)
    second, asked, ended = start(restore=False), threading.Event(), threading.Event()

    def download(_key: str) -> None:
        asked.set()
        assert ended.wait(30)

    s3.on_download = download
    with pytest.raises(Stopped):
        second.mirror.restore(should_stop=asked.is_set)
    ended.set()
    # What the program of another start may have written here is no news for the bucket.
    second.write("work/b", "2")
    assert second.mirror.save(), "the bucket has all that there is"
    assert not second.mirror.copy()
    for _ in range(50):
        time.sleep(0.02)
        assert not (second.work / "a").exists(), "nor does it go on behind one's back"
    assert {key for key in s3.objects if MANIFEST not in key} == {
        key for key in saved if MANIFEST not in key
    }


def test_what_a_restore_brought_before_it_failed_is_not_taken_for_code(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start()
    node.write("work/a", "one")
    node.write("work/b", "two")
    node.mirror.save()
    again = start(restore=False)
    download = s3.download_file

    def fail_once(bucket: str, key: str, target: str, **options: Any) -> None:
        if key.endswith("/b"):
            until = time.monotonic() + 20
            while not (again.work / "a").exists() and time.monotonic() < until:
                time.sleep(0.01)
            monkeypatch.setattr(s3, "download_file", download)
            raise EndpointConnectionError(endpoint_url="s3")
        download(bucket, key, target, **options)

    monkeypatch.setattr(s3, "download_file", fail_once)
    again.mirror.restore()
    assert again.found() == {"work/a": "one", "work/b": "two"}
    again.write("work/c", "three")
    again.mirror.save()
    assert saved(s3) == {"work/a": "one", "work/b": "two", "work/c": "three"}


def test_an_object_that_is_not_what_was_saved_is_not_restored(start: Start, s3: S3) -> None:
    node = start()
    node.write("work/a", "one")
    node.write("work/b", "two")
    node.mirror.save()
    (key,) = [key for key, content in s3.objects.items() if content == b"one"]
    s3.objects[key] = b"something else"
    again = start()
    assert again.found() == {"work/b": "two"}
    assert f"files: work/a is damaged in {address(0)}: it is not restored" in again.said


def test_a_copy_that_must_end_leaves_out_what_does_not_fit(start: Start, s3: S3) -> None:
    clock = FakeClock()
    node = start(clock=clock)
    node.write("work/a", "one")
    node.mirror.save()
    node.write("work/a", "two")
    node.write("work/step-2/model", "2")
    s3.on_upload = lambda _key: clock.sleep(3)
    assert not node.mirror.save(within_s=2)
    assert saved(s3) == {"work/a": "one"}
    assert node.mirror.lost == ["work/a", "work/step-2/model"]
    assert node.said == ["files: not saved at the program's end: work/a, work/step-2/model"]
    s3.on_upload = lambda _key: None
    assert node.mirror.save(within_s=20)
    assert saved(s3) == {"work/a": "two", "work/step-2/model": "2"}
    assert start().found() == {"work/a": "two", "work/step-2/model": "2"}


def test_the_last_copy_is_repeated_until_the_bucket_takes_all(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start()
    files = {f"work/{number:02}": str(number) for number in range(20)}
    for name, text in files.items():
        node.write(name, text)
    refusals = [
        refused("SlowDown", 503),
        EndpointConnectionError(endpoint_url="s3"),
        TimeoutError(),
    ]
    put, names_then = s3.put_object, []

    def upload(_key: str) -> None:
        if refusals:
            raise refusals.pop()

    def put_object(**given: Any) -> Any:
        names_then.append(len(Manifest.from_json(given["Body"]).files))
        if len(names_then) == 1:
            return put(**given)
        if len(names_then) < 4:
            raise refused("InternalError", 500)
        return put(**given)

    s3.on_upload = upload
    monkeypatch.setattr(s3, "put_object", put_object)
    assert node.mirror.save()
    assert saved(s3) == files
    assert names_then[0] == 17, "three uploads that fail do not keep the others out of the list"
    sent = [key.rpartition("/")[2] for key in s3.written if not key.endswith(MANIFEST)]
    assert len(sent) == len({*sent}) == 20, "nothing is sent twice"
    assert node.mirror.lost == []
    assert node.said[0].startswith("files: not saved: ")
    assert node.said[1:] == ["files: saved again"]


def test_a_last_copy_that_the_bucket_refuses_is_given_up(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start()
    node.write("work/a", "1")
    s3.trouble, s3.is_down = refused("AccessDenied", 403), True
    monkeypatch.setattr(times, "FILES_REFUSED_S", 0.0)
    assert not node.mirror.save()
    assert node.mirror.lost == ["work/a"]


def test_what_could_not_be_saved_in_time_is_named(start: Start, s3: S3) -> None:
    node = start(clock=FakeClock(), every_s=30)
    for number in range(20):
        node.write(f"work/{number:02}", str(number))
    bad = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(7)]

    def upload(key: str) -> None:
        if key.rpartition("/")[2] in bad:
            raise EndpointConnectionError(endpoint_url="s3")

    s3.on_upload = upload
    assert not node.mirror.save(within_s=60)
    assert len(saved(s3)) == 13
    assert node.mirror.lost == [f"work/{number:02}" for number in range(7)]
    assert node.said[-1] == (
        "files: not saved at the program's end: work/00, work/01, work/02, work/03, work/04 and "
        "2 more"
    )
    s3.on_upload = lambda _key: None
    assert node.mirror.save()
    assert node.mirror.lost == []


def test_while_the_program_runs_files_of_one_moment_are_listed_together(
    start: Start, s3: S3
) -> None:
    node = start()
    node.write("work/model", "step 1")
    node.write("work/step", "1")
    assert node.mirror.copy()
    node.write("work/model", "step 2")
    node.write("work/step", "2")
    model = hashlib.sha256(b"step 2").hexdigest()

    def upload(key: str) -> None:
        if key.endswith(model):
            raise EndpointConnectionError(endpoint_url="s3")

    s3.on_upload = upload
    assert not node.mirror.copy()
    assert saved(s3) == {"work/model": "step 1", "work/step": "1"}
    s3.on_upload = lambda _key: None
    assert node.mirror.copy()
    assert saved(s3) == {"work/model": "step 2", "work/step": "2"}


def test_a_list_whose_answer_was_lost_is_written_again_before_anything_is_removed(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start()
    node.write("work/step", "1")
    assert node.mirror.copy()
    put = s3.put_object

    def lose_the_answer(**given: Any) -> Any:
        monkeypatch.setattr(s3, "put_object", put)
        put(**given)
        raise EndpointConnectionError(endpoint_url="s3")

    monkeypatch.setattr(s3, "put_object", lose_the_answer)
    new = node.write("work/new", "2")
    assert not node.mirror.copy()
    assert saved(s3) == {"work/new": "2", "work/step": "1"}
    new.unlink()
    assert node.mirror.copy()
    assert saved(s3) == {"work/step": "1"}
    again = start()
    assert again.found() == {"work/step": "1"}
    assert not any("damaged" in line for line in again.said)


def test_a_last_copy_ends_one_that_takes_too_long(start: Start, s3: S3) -> None:
    node = start(every_s=0.01)
    node.write("work/a", "one")
    is_busy, is_over = threading.Event(), threading.Event()
    ended: list[str] = []

    def hang(key: str) -> None:
        is_busy.set()
        is_over.wait(60)
        ended.append(key)

    s3.on_upload = hang
    node.mirror.start()
    assert is_busy.wait(20)
    assert not node.mirror.save(within_s=0.1)
    assert not ended, "what hangs is not waited for"
    is_over.set()
    node.mirror.close()


def test_a_last_copy_is_hurried_while_it_is_made(start: Start, s3: S3) -> None:
    clock = FakeClock()
    node = start(clock=clock)
    for number in range(40):
        node.write(f"work/{number:02}", str(number))
    begun: list[str] = []

    def upload(key: str) -> None:
        begun.append(key)
        if len(begun) == 20:
            node.mirror.hurry(1)
            clock.sleep(2)

    s3.on_upload = upload
    assert not node.mirror.save(within_s=600)
    assert 12 <= len(saved(s3)) < 20, "but for the eight that were on their way"
    s3.on_upload = lambda _key: None
    assert node.mirror.save(within_s=600), "the time was that of one copy"


def test_of_two_last_copies_each_keeps_to_its_time(start: Start, s3: S3) -> None:
    clock = FakeClock()
    node = start(clock=clock, every_s=30)
    node.write("work/a", "one")
    s3.is_down = True
    second = threading.Thread(target=node.mirror.save, kwargs={"within_s": 60})
    clock.at(10, second.start)
    assert not node.mirror.save(within_s=60)
    second.join(timeout=60)
    s3.is_down = False
    assert not second.is_alive()


def test_an_upload_that_hangs_does_not_keep_the_list_waiting(start: Start, s3: S3) -> None:
    node = start()
    node.write("work/small", "1")
    node.write("work/stuck", "2")
    stuck = hashlib.sha256(b"2").hexdigest()
    is_over = threading.Event()
    ended: list[str] = []

    def upload(key: str) -> None:
        if key.endswith(stuck):
            is_over.wait(60)
            ended.append(key)

    s3.on_upload = upload
    assert not node.mirror.save(within_s=0.6)
    assert not ended, "the upload hangs"
    assert saved(s3) == {"work/small": "1"}
    assert node.said == ["files: not saved at the program's end: work/stuck"]
    is_over.set()


def test_an_upload_that_ends_right_before_the_deadline_is_in_the_list(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    node = start(clock=clock)
    node.write("work/a", "1")

    def wait_too_long(left: Any, **_: Any) -> Any:
        futures.wait(left)  # it ends between the last look and the deadline
        clock.sleep(100)
        return SimpleNamespace(not_done=left)

    monkeypatch.setattr(saving, "wait", wait_too_long)
    assert node.mirror.save(within_s=2)
    assert saved(s3) == {"work/a": "1"}


# --- who saves, and who gets what
def test_a_node_that_was_started_again_elsewhere_does_not_save_any_more(start: Start) -> None:
    stale = start()
    stale.write("work/a", "one")
    stale.mirror.save()
    newer = start()
    newer.write("work/a", "two")
    newer.mirror.save()
    stale.write("work/a", "late")
    stale.write("work/b", "late")
    assert not stale.mirror.save()
    assert not stale.mirror.save()
    assert sum("started again elsewhere" in line for line in stale.said) == 1
    newer.write("work/c", "three")
    assert newer.mirror.save()
    assert start().found() == {"work/a": "two", "work/c": "three"}


class Stalling(S3):
    """The same bucket for a node whose call number ``stall_at`` is answered late."""

    def __init__(self, s3: S3) -> None:
        super().__init__()
        self.objects = s3.objects
        self.stall_at: int | None = None
        self.is_stalled, self.goes_on = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def _check(self) -> None:
        with self._lock:
            is_late = self.stall_at == 0
            self.stall_at = None if self.stall_at is None else self.stall_at - 1
        if is_late:
            self.is_stalled.set()
            assert self.goes_on.wait(30)


@pytest.mark.parametrize("stalls_in", ["restore", "save"])
def test_a_node_that_was_replaced_changes_nothing_of_what_its_successor_has(
    tmp_path: Path, stalls_in: str
) -> None:
    """At whatever call it stalls while its successor restores and saves."""
    for number in range(20):
        s3, place = S3(), tmp_path / str(number)
        first = Node(place / "first", s3)
        first.mirror.restore()
        first.write("output/ckpt.pt", "v0")
        first.write("output/old", "old")
        assert first.mirror.save()

        late = Stalling(s3)
        stale = Node(place / "stale", s3)
        folders = {WORK: stale.work, OUTPUT: stale.output}
        stale.mirror = Mirror(folders, address(0), every_s=0.05, say=stale.said.append, client=late)
        if stalls_in == "save":
            stale.mirror.restore()
            stale.write("output/ckpt.pt", "v1")
            assert stale.mirror.save()
            stale.write("output/ckpt.pt", "v2")
            (stale.output / "old").unlink()
        late.stall_at = number
        call = stale.mirror.restore if stalls_in == "restore" else stale.mirror.save
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        while thread.is_alive() and not late.is_stalled.is_set():
            time.sleep(0.001)
        if not late.is_stalled.is_set():
            break

        successor = Node(place / "successor", s3)
        successor.mirror.restore()
        assert successor.found().get("output/ckpt.pt") in ("v0", "v1", "v2")
        # New content, and content that was there before.
        successor.write("output/ckpt.pt", "v1")
        successor.write("output/old", "v3")
        assert successor.mirror.save()
        found = successor.found()
        late.goes_on.set()
        thread.join(30)
        assert not thread.is_alive()

        third = Node(place / "third", s3)
        third.mirror.restore()
        assert third.found() == found, number
        assert not any("damaged" in line for line in third.said), number
    assert number >= 3, "uploads, lists and removals were late"


def test_a_node_that_was_replaced_reports_it_once(start: Start) -> None:
    replaced: list[None] = []
    stale = start(on_replaced=lambda: replaced.append(None))
    stale.write("work/a", "one")
    stale.mirror.save()
    newer = start()
    assert not stale.mirror.is_replaced
    stale.write("work/a", "two")
    for _ in range(2):
        assert not stale.mirror.copy()
        assert stale.mirror.is_replaced
        assert replaced == [None]
    assert not stale.mirror.save(), "it does not wait until it is not replaced any more"
    assert stale.mirror.lost == ["work/a"]
    assert newer.mirror.save()


def test_a_node_gets_what_node_0_wrote_where_it_has_nothing_itself(start: Start, s3: S3) -> None:
    zero, one = start(0), start(1)
    zero.write("work/last.pt", "step 1")
    zero.write("work/log", "of node 0")
    one.write("work/log", "of node 1")
    zero.mirror.save()
    one.mirror.save()

    zero, one, two = start(0), start(1), start(2)
    assert one.found() == {"work/last.pt": "step 1", "work/log": "of node 1"}
    assert two.found() == {"work/last.pt": "step 1", "work/log": "of node 0"}
    two.write("work/log", "of node 2")
    assert two.mirror.save()
    assert one.mirror.save()
    assert saved(s3, 1) == {"work/log": "of node 1"}, "node 0's are not its own"
    assert saved(s3, 2) == {"work/log": "of node 2"}

    zero.write("work/last.pt", "step 2")
    zero.mirror.save()
    assert start(1).found()["work/last.pt"] == "step 2", "as node 0 has it now"


def test_a_node_that_survived_gets_what_node_0_has_now_and_keeps_its_own(start: Start) -> None:
    zero = start(0)
    zero.write("work/last.pt", "step 1")
    zero.write("work/old.pt", "step 0")
    zero.mirror.save()
    one = start(1)
    one.write("work/mine", "not saved yet")
    zero.write("work/last.pt", "step 2")
    (zero.work / "old.pt").unlink()
    zero.mirror.save()
    one.mirror.restore(address(0))
    assert one.found() == {"work/last.pt": "step 2", "work/mine": "not saved yet"}
    one.write("work/last.pt", "my own")
    zero.write("work/last.pt", "step 3")
    zero.mirror.save()
    one.mirror.restore(address(0))
    assert one.found() == {"work/last.pt": "my own", "work/mine": "not saved yet"}


def test_node_0_is_not_its_own_fallback(start: Start) -> None:
    zero = start(0)
    zero.write("work/a", "one")
    zero.mirror.save()
    zero.mirror.restore(address(0) + "/")
    assert zero.found() == {"work/a": "one"}
    assert zero.said == []


def test_a_file_that_cannot_be_read_is_named_and_holds_nothing_up(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start()
    node.write("work/step/secret", "x")
    node.write("work/step/model", "1")
    opened = Path.open

    def refuse(path: Path, *given: Any, **named: Any) -> Any:
        if path.name == "secret":  # tests may run as root, who can read everything
            raise PermissionError
        return opened(path, *given, **named)

    monkeypatch.setattr(Path, "open", refuse)
    assert node.mirror.copy()
    assert saved(s3) == {"work/step/model": "1"}
    assert node.said == ["files: work/step/secret cannot be read; it is not saved"]


def test_it_starts_only_after_a_restore(start: Start) -> None:
    node = start(restore=False)
    with pytest.raises(AssertionError, match="comes first"):
        node.mirror.start()
    assert not node.mirror.save()


def test_where_the_system_does_not_say_who_writes_a_fresh_file_waits(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "being_written", lambda: None)
    node = start()
    node.write("work/old", "x")
    node.write("work/fresh", "x", ago_s=0)
    assert not node.mirror.copy()
    assert saved(s3) == {"work/old": "x"}
