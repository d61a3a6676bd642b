"""A user's program finds what it has written again at its next start.

Real folders and a bucket in memory. That no failure of a bucket or host harms what is saved is
shown in ``test_files_simulated.py``; the real calls of S3 in ``test_files_in_s3.py``.
"""

import contextlib
import hashlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from containers.program.files import disk, starts
from containers.program.files import program_files as files_of_program
from containers.program.files.program_files import Mirror, open_mirror
from containers.program.files.s3_files import PreparationStopped
from containers.program.files.starts import ProgramStart as StartOfAll
from containers.program.files.starts import begin
from containers.program.start import shell
from contract import files, runs, times
from contract.errors import InputError
from contract.files import HOME, OUTPUT, WORK, FileList, SavedFile
from store.bucket import Bucket
from tests.aws.calls import refused
from tests.aws.s3 import S3
from tests.clock import FakeClock
from tests.conftest import ROOT
from tests.containers.program.saved_files import list_of, saved_in

ADDRESS = "s3://bucket/runs/r/output"
AGO_S = 100


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
        self.folders = {name: self.place / name for name in (WORK, OUTPUT, HOME)}
        self.work, self.output = self.folders[WORK], self.folders[OUTPUT]
        for folder in self.folders.values():
            folder.mkdir(parents=True)
        for name, text in self.code.items():
            self.write(name, text)
        self.mirror: Mirror = open_mirror(
            self.folders,
            ADDRESS,
            node=self.number,
            say=self.said.append,
            client=self.s3,
            **{"every_s": 0.02, "quiet_s": 0.0, **self.options},
        )

    def write(self, name: str, text: str, *, ago_s: float = AGO_S) -> Path:
        path = self.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (time.time() - ago_s,) * 2)
        return path

    def copy(
        self,
        meanwhile: Callable[[], object] = lambda: None,
        before_look: Callable[[], object] | None = None,
    ) -> bool:
        """A round of what is here now; ``meanwhile`` happens after its moment, ``before_look`` also
        before the node has looked."""
        time.sleep(self.mirror.until_next_round())
        if before_look:
            time.sleep(0.02)  # the clock of the file system is up to 4 ms behind
            before_look()
        moment = self.mirror.look()
        meanwhile()
        return self.mirror.round(moment)

    def found(self) -> dict[str, str]:
        """What lies in the folders."""
        return {
            path.relative_to(self.place).as_posix(): path.read_text()
            for folder in self.folders.values()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }


@pytest.fixture
def s3() -> S3:
    return S3()


@pytest.fixture
def start(tmp_path: Path, s3: S3) -> Callable[..., Node]:
    """Start a node: in new folders, restored; the only one of its program unless told otherwise."""
    num = 0

    def start(
        number: int = 0, *, restore: bool = True, files: StartOfAll | None = None, **given: Any
    ) -> Node:
        nonlocal num
        num += 1
        node = Node(
            tmp_path / f"start-{num}",
            s3,
            number=number,
            code=given.pop("code", {}),
            options=given,
        )
        if restore:
            node.mirror.restore(files)
        return node

    return start


Start = Callable[..., Node]


def saved(s3: S3) -> dict[str, str]:
    return saved_in(s3, "r")


def begin_on(s3: S3, *nodes: int) -> StartOfAll:
    return begin(Bucket(ADDRESS, s3), nodes)


def test_files_links_and_empty_folders_come_back(start: Start, s3: S3, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    node = start()
    node.write("work/a/b/last.pt", "one")
    node.write("output/metrics.csv", "1,2").chmod(0o755)
    node.write("work/é ü/中.txt", "x")
    node.write("work/empty", "")
    node.write("home/.cache/project/model.pt", "trained")
    node.write("home/.cache/huggingface/mine/model.pt", "there too")
    expected = node.found()
    # What is left out, silently.
    for name in ("__pycache__/a.pyc", "sub/__pycache__/b.pyc", "hub/x", "env/pyvenv.cfg"):
        node.write(f"work/{name}", "x")
    for name in ("huggingface/hub/m", "huggingface/token", "torch/k", "uv/a", "pip/b"):
        node.write(f"home/.cache/{name}", "x")
    for name in (".netrc", ".ssh/id", ".triton/k", ".nv/k", ".local/lib/p"):
        node.write(f"home/{name}", "x")
    node.write("work/hub/CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55")
    os.mkfifo(node.work / "pipe")
    # What is left out, and said.
    for name in ("line\nbreak", "back\\slash"):
        node.write(f"work/{name}", "x")
    Path(os.fsdecode(os.fsencode(node.work) + b"/\xff.txt")).write_text("x")
    # Other kinds.
    (node.work / "out").symlink_to(tmp_path / "data")
    (node.work / "latest").symlink_to("a/b")
    (node.work / "absolute").symlink_to(node.work / "a" / "b" / "last.pt")
    (node.work / "best").symlink_to(node.output)
    (node.work / "odd").symlink_to("line\nbreak")
    assert node.mirror.save()
    assert node.mirror.save()
    assert len(node.said) == 4
    assert all(" is not saved: " in line for line in node.said)
    assert saved(s3) == expected

    again = start()
    assert again.found() == expected
    assert os.access(again.output / "metrics.csv", os.X_OK)
    assert not os.access(again.work / "a/b/last.pt", os.X_OK)
    assert abs((again.output / "metrics.csv").stat().st_mtime - (time.time() - AGO_S)) < 20
    assert (again.work / "latest" / "last.pt").read_text() == "one"
    assert (again.work / "absolute").resolve().is_relative_to(again.work.resolve())
    assert (again.work / "best").resolve() == again.output
    assert (again.work / "out").readlink() == tmp_path / "data"
    assert again.said == [f"files: 10 restored from {ADDRESS}"]


def test_the_code_is_not_saved_until_the_program_changes_it(start: Start, s3: S3) -> None:
    code = {"work/train.py": "code", "work/config.yaml": "lr: 1"}
    node = start(code=code)
    assert node.mirror.save()
    assert saved(s3) == {}
    node.write("work/config.yaml", "lr: 2")
    assert node.mirror.save()
    assert saved(s3) == {"work/config.yaml": "lr: 2"}

    assert start(code=code).found()["work/config.yaml"] == "lr: 2"
    newer = start(code={**code, "work/config.yaml": "lr: 3"})
    assert newer.found()["work/config.yaml"] == "lr: 3", "the user's newer code counts"
    assert "which has changed since" in newer.said[0]


def test_a_file_that_has_become_a_folder_in_the_code_holds_nothing_up(start: Start) -> None:
    node = start()
    for name in ("work/results", "work/logs/first", "work/model"):
        node.write(name, "1")
    assert node.mirror.save()
    code = {"work/results/.keep": "", "work/logs": "of the code"}
    again = start(code=code)
    assert again.found() == {**code, "work/model": "1"}
    assert sum("is not restored" in line for line in again.said) == 2


# --- a round is one moment
def test_a_file_that_never_rests_is_saved_as_it_is_unless_it_is_large(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_of_program, "_LOG", 16)
    node = start(every_s=0.1)

    def change() -> None:
        with (node.work / "log").open("a") as log:
            log.write(".")
        with (node.work / "database").open("a") as database:
            database.write("0123456789")

    s3.on_upload = lambda _key, content: change() if content.startswith(b".") else None
    change()
    done = [node.copy(meanwhile=change, before_look=change) for _ in range(5)]
    assert done == [False, False, False, True, True]
    assert saved(s3).keys() == {"work/log"}
    assert saved(s3)["work/log"].startswith("........")
    assert "work/database keeps changing" in node.said[-1]


def test_a_file_that_is_replaced_while_it_is_sent_is_saved_whole(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE", 4)
    monkeypatch.setattr(files_of_program, "_LOG", 4)
    node = start()
    path = node.write("work/large", "old content")
    newer = node.write("newer", "new content")

    def replace_it(_key: str, _content: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):  # the other pieces' threads are here too
            newer.replace(path)

    s3.on_upload = replace_it
    assert node.copy()
    assert saved(s3) == {"work/large": "old content"}


def test_what_cannot_be_read_is_named_and_holds_nothing_up(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start()
    node.write("work/step/secret", "x")
    node.write("work/step/model", "1")
    node.write("work/private/model", "1")
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path.parent.name == "private":
            raise PermissionError("no")
        return real(path)

    # Tests may run as root, who can read everything.
    monkeypatch.setattr(os, "access", lambda path, _mode: path.name != "secret")
    monkeypatch.setattr(Path, "lstat", lstat)
    assert node.copy()
    assert saved(s3) == {"work/step/model": "1"}
    assert sorted(node.said) == [
        "files: 'work/private/model' is not saved: no",
        "files: 'work/step/secret' is not saved: Permission denied",
    ]


def test_a_program_that_removes_its_output_folder_is_saved_in_time(start: Start, s3: S3) -> None:
    node = start()
    node.write("work/model", "1")
    node.output.rmdir()
    assert node.copy()
    assert saved(s3) == {"work/model": "1"}


def test_a_file_that_is_removed_while_the_node_looks_was_there(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start(every_s=0.1)
    paths = [node.write(f"work/{name}", name) for name in ("old", "new")]
    assert node.copy()

    def access(path: Path, _mode: int) -> bool:
        """Remove the other file: the folder was listed before, with both."""
        time.sleep(0.02)  # as in copy()
        next(each for each in paths if each != path).unlink(missing_ok=True)
        return True

    monkeypatch.setattr(os, "access", access)
    assert not node.copy()
    assert saved(s3) == {"work/old": "old", "work/new": "new"}


# --- what is in the bucket is not trusted
def forge(s3: S3, *entries: SavedFile) -> None:
    """A node's list names these files."""
    bucket, content = Bucket(ADDRESS, s3), FileList(files=entries).to_json()
    key = files.object_key(1, 0, 99, hashlib.sha256(content).hexdigest())
    bucket.put(key, content)
    for mark in [key for key in s3.objects if "/rounds/" in key]:
        s3.objects[mark] = key.encode()


@pytest.mark.parametrize(
    "name", ["../x", "work/../../x", "/etc/x", "elsewhere/x", "x", "work//x", "work/a\nb"]
)
def test_a_list_that_names_another_place_is_refused(start: Start, s3: S3, name: str) -> None:
    node = start()
    node.write("work/a", "one")
    node.mirror.save()
    forge(s3, replace(list_of(s3, "r").files[0], name=name))
    again = start(restore=False)
    with pytest.raises(InputError, match=r"cannot be restored: .*(refused|lies in none)"):
        again.mirror.restore()
    assert again.found() == {}


def test_an_object_that_is_not_what_was_saved_is_not_restored(start: Start, s3: S3) -> None:
    node = start()
    node.write("work/a", "one")
    node.write("work/b", "two")
    node.mirror.save()
    (key,) = [key for key, content in s3.objects.items() if content == b"one"]
    s3.objects[key] = b"something else"
    with pytest.raises(InputError, match=r"damaged. The program is not started"):
        start()


def test_a_change_of_any_file_is_seen(start: Start) -> None:
    node = start(code={"work/train.py": "code"})
    node.copy()
    assert node.mirror.newest_ns == 0
    node.write("work/log", "one")
    node.copy()
    first = node.mirror.newest_ns
    node.write("output/log", "two")
    node.copy()
    last = node.mirror.newest_ns
    assert 0 < first < last == node.mirror.worked_ns
    node.write("work/wandb/run-1/files/a", "a tracker's")
    node.copy()
    assert node.mirror.worked_ns == last < node.mirror.newest_ns


# --- limits
def test_above_the_limit_output_comes_first_and_then_the_newest(start: Start, s3: S3) -> None:
    node = start(limit_bytes=3000)
    node.write("work/old.pt", "a" * 1000, ago_s=900)
    node.write("work/data/part", "b" * 2000, ago_s=500)
    assert node.copy()
    node.write("output/model", "c" * 1000, ago_s=1000)
    node.write("work/step-2/model", "d" * 1000, ago_s=100)
    node.write("work/step-2/state", "e" * 900, ago_s=200)
    assert node.copy(), "what is older than a complete round does not matter"
    assert saved(s3).keys() == {"output/model", "work/step-2/model", "work/step-2/state"}
    (told,) = node.said
    assert told.startswith("files: 2 files are not saved: work/data/part, work/old.pt. The folders")
    node.write("work/step-3", "f" * 4000)
    assert not node.copy()
    assert not node.copy()
    assert node.said == [told], "until it is twice as many"
    assert not node.mirror.save(), "without trying again: it would be in vain"
    assert node.mirror.lost == ["work/step-3"]
    (node.work / "step-3").unlink()
    (node.work / "data" / "part").unlink()
    (node.output / "model").unlink()
    assert node.mirror.save()
    assert saved(s3).keys() == {"work/old.pt", "work/step-2/model", "work/step-2/state"}
    assert node.mirror.lost == []


def test_a_folder_that_is_above_a_limit_by_itself_is_saved_in_part(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start(limit_bytes=3000)
    for number in range(5):
        node.write(f"output/samples/{number}", str(number) * 1000, ago_s=100 + number)
    for most in (3, 2):
        assert not node.mirror.save()
        assert saved(s3).keys() == {f"output/samples/{number}" for number in range(most)}
        monkeypatch.setattr(runs, "OUTPUT_LIMIT_FILES", 2)


def test_patterns_of_the_user_say_what_is_not_saved(start: Start, s3: S3) -> None:
    node = start(skip=["data", "*.tmp", "logs/*.csv", "home/"])
    for name in ("work/data/a/b", "output/data", "work/x.tmp", "work/logs/a.csv", "home/x"):
        node.write(name, "x")
    for name in ("work/mydata", "work/a.tmp.pt", "work/more/logs/a.csv", "work/logs/a.txt"):
        node.write(name, "y")
    assert node.mirror.save()
    assert set(saved(s3).values()) == {"y"}
    assert len(saved(s3)) == 4


def test_files_in_other_places_are_reported_once_and_when_they_double(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "tmp"
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(disk, "_writable", lambda: [place])
    (place / "old").mkdir(parents=True)
    (place / "old" / "file").write_text("of another program")
    time.sleep(0.02)  # the clock of the file system is up to 4 ms behind
    node = start()
    own = [shell.PLACE.name, "ray/log", "torchinductor_root/k", "torchelastic_x/0"]
    for path in (ROOT / "containers").rglob("*.py"):
        own += [f"{each}ab12cd3_/x" for each in re.findall(r'prefix="(\w+-)"', path.read_text())]
    for name in ("tmpab12cd3_/x", *own):
        node.write(f"../tmp/{name}", "not the user's")
    node.write("errors/1.json", "of the launcher")
    node.write("work/model", "saved")
    node.write("../tmp/lock", "")
    node.mirror._warn_of_others()
    assert node.said == []
    node.write("results/model.pt", "x" * 1000)
    node.write("../tmp/abs/model.pt", "x" * 1000)
    for _ in range(2):
        assert node.mirror.save()
    assert node.said == [
        "files: warning: 2 files (2.0 kB) outside the working folder and HOME will not be kept: "
        f"../results/model.pt, {place}/abs/model.pt; to keep files, write them to $TRAIN_OUTPUT"
    ]
    for number in range(2):
        node.write(f"../tmp/{number}.pt", "x")
    assert node.mirror.save()
    assert "warning: 4 files" in node.said[-1]


#: Other tests look at no folder of this machine.
WRITABLE = disk._writable


def test_what_others_write_to_a_temporary_folder_is_not_the_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert Path("/tmp") not in {path.parent for path in {*WRITABLE()} - disk._temporary()}


# --- a bucket in trouble
def test_what_time_does_not_change_is_given_up(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "FILES_REFUSED_S", 0.2)
    node = start()
    node.write("work/a", "1")
    s3.trouble, s3.is_down = refused("AccessDenied"), True
    assert not node.mirror.save()
    assert node.mirror.lost == ["work/a"]
    again = start(restore=False)
    with pytest.raises(InputError, match="is not started without its files"):
        again.mirror.restore()
    assert any("trying again" in line for line in again.said), "rights may be some seconds late"


def test_a_bucket_in_trouble_is_waited_for(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble = refused("SlowDown")
    node = start()
    node.write("work/a", "one")
    monkeypatch.setattr(times, "FILES_REFUSED_S", -1)  # at the end, it is waited for longer
    s3.trouble, s3.is_down = trouble, True
    assert not node.copy()
    assert not node.copy()
    assert node.said == [f"files: not saved: {trouble}; trying again"]
    s3.calls_until_up = 3
    assert node.mirror.save()
    assert node.said[1:] == ["files: saved again"]
    monkeypatch.undo()
    s3.calls_until_up = 3
    again = start(clock=FakeClock(time.time()))
    assert again.found() == {"work/a": "one"}
    assert "cannot be restored: " in again.said[0]


def test_a_start_that_waits_for_the_bucket_ends_when_the_job_does(start: Start, s3: S3) -> None:
    s3.is_down = True
    node = start(restore=False)
    with pytest.raises(PreparationStopped):
        node.mirror.restore(should_stop=lambda: "cannot be restored" in "".join(node.said))


def test_a_restore_that_is_broken_off_returns_at_once_and_changes_nothing(
    start: Start, s3: S3
) -> None:
    first = start()
    first.write("work/a", "1")
    first.mirror.save()
    second, asked, ended = start(restore=False), threading.Event(), threading.Event()

    def download(key: str) -> None:
        if key.endswith(hashlib.sha256(b"1").hexdigest()):
            asked.set()
            assert ended.wait(30)

    s3.on_download = download
    with pytest.raises(PreparationStopped):
        second.mirror.restore(should_stop=asked.is_set)
    ended.set()
    # What the program of another start may have written here is no news for the bucket.
    second.write("work/b", "2")
    assert second.mirror.save(), "the bucket has all that there is"
    assert not second.copy()
    for _ in range(20):
        time.sleep(0.02)
        assert (second.work / "a").read_text() == "", "what comes late is not written"
    assert start().found() == {"work/a": "1"}


# --- the end
def test_files_not_saved_in_time_are_named_and_the_rest_is_kept(start: Start, s3: S3) -> None:
    node = start(clock=FakeClock(time.time()), every_s=30)
    node.write("work/old", "before")
    assert node.mirror.save()
    for number in range(20):
        node.write(f"work/{number:02}", str(number))

    def upload(_key: str, content: bytes) -> None:
        if content in [str(number).encode() for number in range(7)]:
            raise EndpointConnectionError(endpoint_url="s3")

    s3.on_upload = upload
    assert not node.mirror.save(within_s=60)
    assert len(saved(s3)) == 1 + 13
    assert node.mirror.lost == [f"work/{number:02}" for number in range(7)]
    assert node.said[-1] == (
        "files: not saved at the program's end: work/00, work/01, work/02, work/03, work/04 and "
        "2 more"
    )
    assert start().found() == {"work/old": "before"}, "no part of a moment is restored"
    s3.on_upload = lambda _key, _content: None


def test_an_upload_that_hangs_does_not_keep_the_list_waiting(start: Start, s3: S3) -> None:
    node = start()
    node.write("work/small", "1")
    node.write("work/stuck", "2")
    is_over, ended = threading.Event(), list[str]()

    def upload(key: str, content: bytes) -> None:
        if content == b"2":
            is_over.wait(60)
            ended.append(key)

    s3.on_upload = upload
    assert not node.mirror.save(within_s=0.6)
    assert not ended, "the upload hangs"
    assert saved(s3) == {"work/small": "1"}
    assert node.mirror.lost == ["work/stuck"]
    # A round that hangs ends for the last one too.
    node.mirror.start()
    time.sleep(0.1)
    assert not node.mirror.save(within_s=0.3)
    is_over.set()
    node.mirror.close()


def test_a_last_copy_is_hurried_while_it_is_made(start: Start, s3: S3) -> None:
    clock = FakeClock(time.time())
    node = start(clock=clock)
    for number in range(40):
        node.write(f"work/{number:02}", str(number))
    begun: list[str] = []

    def upload(key: str, _content: bytes) -> None:
        begun.append(key)
        if len(begun) == 20:
            node.mirror.hurry(1)
            node.mirror.hurry(600)  # takes nothing back
            clock.sleep(2)

    s3.on_upload = upload
    assert not node.mirror.save(within_s=600)
    assert 12 <= len(saved(s3)) < 30, "what was on its way has arrived"
    s3.on_upload = lambda _key, _content: None


# --- who saves, and who gets what
def test_a_node_of_an_earlier_start_saves_nothing_and_reports_it_once(start: Start) -> None:
    stale = start()
    newer = start()
    for _ in range(2):
        stale.write("work/a", "late")
        assert not stale.copy()
        assert stale.mirror.is_replaced
        assert len(stale.said) == 1
        assert "another job has taken over" in stale.said[0]
    assert not stale.mirror.save(), "it does not wait until it is not replaced any more"
    assert stale.mirror.lost == ["work/a"]
    newer.write("work/a", "two")
    assert newer.mirror.save()
    assert start().found() == {"work/a": "two"}
    last = start()
    start()
    last.write("work/a", "three")
    assert not last.mirror.save(), "no start restores it"


def test_a_node_that_is_late_removes_nothing_that_a_newer_start_restores(
    start: Start, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = begin_on(s3, 0, 1)
    zero, one = start(0, files=both, every_s=1000), start(1, files=both, every_s=1000)
    nodes, newer, listed = (zero, one), list[StartOfAll](), Bucket.keys

    def save(node: Node, number: int) -> bool:
        node.write("work/step", str(number))
        return node.mirror._copy(node.mirror._look(number, time.time_ns() + 10**9))

    def replace_first(bucket: Bucket, prefix: str) -> list[str]:
        if prefix.startswith(files.ROUNDS) and not newer:
            newer.append(both)
            newer[0] = begin_on(s3, 0, 1)
            with pytest.raises(files_of_program.ReplacedError):
                save(one, 2)  # its mark is there all the same
        return listed(bucket, prefix)

    assert all(save(node, 1) for node in nodes)
    monkeypatch.setattr(starts, "_sweep", lambda *_: None)  # it comes later
    monkeypatch.setattr(Bucket, "keys", replace_first)
    with pytest.raises(files_of_program.ReplacedError):
        save(zero, 2)
    assert start(0, files=newer[0]).found() == {"work/step": "1"}


@pytest.mark.parametrize("keep", [(), (".config/mine",)])
def test_hidden_files_of_home_are_saved_only_where_asked_for(
    tmp_path: Path, keep: tuple[str, ...]
) -> None:
    # Where usual tools keep credentials.
    names = """
        .netrc .npmrc .pgpass .pypirc .git-credentials .huggingface/token .mlflow/credentials
        .kaggle/kaggle.json .aws/credentials .docker/config.json .ssh/id_ed25519 .comet.config
        .config/wandb/settings .config/kaggle/kaggle.json .config/gh/hosts.yml .config/mine/a.json
        .config/git/credentials .config/pip/pip.conf .config/gcloud/application_default.json
        .cache/huggingface/token .local/share/x/auth.json kaggle.json id_rsa
    """
    saved = ["results.csv", ".cache/mine/model.pt"]
    for name in [*names.split(), *saved]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    found = {
        each.removeprefix("home/") for each in disk.Disk({"home": tmp_path}, keep).look().files
    }
    assert found == {*saved, *([".config/mine/a.json"] * len(keep))}
