"""A program finds its variables, folder and time to save on each node, and leaves nothing
behind."""

import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from containers.host import machine
from containers.program.files import s3_files as store
from containers.program.files import scalars
from containers.program.files.disk import Disk
from containers.program.files.program_files import Mirror
from containers.program.files.starts import begin
from containers.program.start import code, on_node, process
from containers.program.start.on_node import Ended, Launcher, LaunchSpec, NodePlace
from containers.program.start.process import Lines
from containers.program.watch import signs as watch
from contract import exits
from contract.errors import InputError
from contract.job import JobSpec
from contract.nodes import ENV_NOTICE, ENV_RUN, Range, labelled_node, node_label
from store.bucket import Bucket
from tests.aws.s3 import S3
from tests.containers.program.nodes_here import PATH
from tests.containers.program.saved_files import saved_in
from tests.eventually import eventually
from trainctl.runs.curves import curves_of
from training.record.events import parse_metrics

ORDER = JobSpec(run="r1", command=("true",), nodes=Range(2, 2))
BOTH = ("10.0.0.6", "10.0.0.7")
PLACE = NodePlace(number=1, rank=1, start=0, addresses=BOTH, gpus=4)


def environment(**changed: object) -> dict[str, str]:
    return on_node.launcher_environment(replace(PLACE, **changed))  # type: ignore[arg-type]


def test_launchers_and_plain_programs_read_how_many_nodes_there_are_and_where_they_meet() -> None:
    assert environment() == {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "4",
        "PET_MASTER_ADDR": "10.0.0.6",
        "PET_MASTER_PORT": "29500",
        "MASTER_ADDR": "10.0.0.6",
        "MASTER_PORT": "29500",
        "NODE_RANK": "1",
        "NUM_NODES": "2",
        "NNODES": "2",
        "GPUS_PER_NODE": "4",
        "PYTHONUNBUFFERED": on_node.LINES,
    }
    assert environment(start=3)["MASTER_PORT"] == "29503"
    assert environment(gpus=0)["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.parametrize(
    ("gpus", "num_nodes", "most", "expected"),
    [
        (0, 2, 2, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}),
        (1, 2, 2, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}),
        (4, 2, 2, {}),
        (1, 1, 1, {}),  # nanoGPT takes RANK for a launcher
        # A range that has one node now: a program that reads RANK runs as it does on four.
        (1, 1, 4, {"RANK": "1", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}),
    ],
)
def test_ranks_are_given_together_and_only_to_single_processes_of_several_nodes(
    gpus: int, num_nodes: int, most: int, expected: dict[str, str]
) -> None:
    found = environment(gpus=gpus, addresses=BOTH[:num_nodes], most=most)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert {name: found[name] for name in names if name in found} == expected


def test_accelerate_finds_the_nodes_in_its_default_file() -> None:
    found = json.loads(on_node.accelerate_config(PLACE))
    assert found["distributed_type"] == "MULTI_GPU"
    assert (found["num_machines"], found["num_processes"], found["machine_rank"]) == (2, 8, 1)
    assert (found["main_process_ip"], found["main_process_port"]) == ("10.0.0.6", 29500)


def test_a_program_sees_neither_rays_variables_nor_the_clusters_token() -> None:
    given = {
        "PATH": "/bin",
        "RAY_AUTH_TOKEN": "secret",
        "RAY_JOB_ID": "1",
        "OMP_NUM_THREADS": "1",
        "TRAIN_RUN": "r1",
        "TRAIN_SUBNETS": "s",
        "AWS_REGION": "eu-west-1",
    }
    assert on_node.base_environment(given) == {
        "PATH": "/bin",
        "TRAIN_RUN": "r1",
        "AWS_REGION": "eu-west-1",
    }


# --- lines ----------------------------------------------------------------------------------------
BAR = [(n / 10, f"\r{n} %".encode()) for n in range(101)]


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([(0, b"a\nb"), (0.1, b"c\r\n"), (0.2, b"\n\xff\n")], ["a", "bc", "", "\ufffd"]),
        ([(0, b"half"), (1, b"")], []),
        ([(0, b"half"), (3, b""), (4, b" done\n")], ["half", " done"]),  # after a moment
        (BAR, ["100 %"]),  # after ten seconds
        ([*BAR[:50], (5.0, b"\r50 %\n")], ["50 %"]),
    ],
)
def test_a_stream_is_cut_into_lines_however_it_comes(
    chunks: list[tuple[float, bytes]], expected: list[str]
) -> None:
    said: list[str] = []
    lines = Lines(said.append)
    for now, chunk in chunks:
        lines.feed(chunk, now=now)
    assert said == expected


def test_a_label_is_read_back_from_a_line_and_only_from_its_beginning() -> None:
    assert labelled_node(f"{node_label(12)} loss 1.0") == 12
    assert labelled_node("[node 3]") == 3
    assert labelled_node("node: head on 10.0.0.5") is None
    assert labelled_node("a [node 3] b") is None


# --- the program ----------------------------------------------------------------------------------
@pytest.fixture
def notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "notice"
    monkeypatch.setenv(ENV_NOTICE, str(path))
    return path


class Here:
    """A launcher in this process, for a script of the shell."""

    launchers: ClassVar[list[Launcher]] = []

    def __init__(
        self, folder: Path, script: str, *words: str, variables: Mapping[str, str] = {}, **told: str
    ) -> None:
        self.folder = folder
        order = replace(ORDER, command=words or ("sh", "-c", script))
        given = LaunchSpec(order=order, variables=variables, **told)  # type: ignore[arg-type]
        self.launcher = Launcher(given, folder=str(folder))
        self.launchers.append(self.launcher)

    @property
    def program(self) -> process.ProgramProcess:
        return eventually("a program", lambda: self.launcher._program, every_s=0.02)

    def start(self, **place: object) -> None:
        self.launcher.start(replace(PLACE, **place))  # type: ignore[arg-type]

    def wait(self) -> Ended:
        eventually("end", lambda: self.launcher.status().lost is not None, every_s=0.02)
        ended = self.launcher.status().ended
        assert ended
        return ended

    def run(self) -> Ended:
        self.start()
        return self.wait()

    def wait_for(self, name: str) -> Path:
        path = self.folder / "work" / name
        eventually(name, path.exists, every_s=0.02)
        return path

    def wrote(self, name: str) -> str:
        return (self.folder / "work" / name).read_text()


def is_running(pid: int) -> bool:
    """Whether a process runs: one that has ended may wait for its parent for ever."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def folder(tmp_path: Path, notice: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(process, "_LEAVE_S", 0.1)
    assert not notice.exists()
    yield tmp_path / "program"
    for launcher in Here.launchers:
        launcher.stop(0)
    Here.launchers.clear()


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", exits.KILLED)]
)
def test_the_exit_code_is_the_programs(folder: Path, script: str, code: int) -> None:
    ended = Here(folder, script).run()
    assert (ended.code, ended.was_stopped) == (code, False)
    assert abs(ended.at - time.time()) < 10


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_shell_is_in_the_place_of_the_program_also_after_its_end(
    folder: Path, has_begun: bool
) -> None:
    here = Here(folder, "echo 1 > step", variables={"LEVEL": "high", "PYTHONPATH": "lib"})
    if has_begun:
        here.run()
    script = "echo $(cat step) $NODE_RANK $LEVEL $TRAIN_ERRORS$TRAIN_WATCH $PYTHONPATH"
    place = folder.with_name("program-shell.json")
    program = "import sys, pathlib; from containers.program.start import shell; "
    program += "sys.exit(shell.main(sys.argv[2:], place=pathlib.Path(sys.argv[1])))"

    def opened(*words: str) -> subprocess.CompletedProcess[str]:
        given = (sys.executable, "-c", program, str(place), *words)
        return subprocess.run(given, capture_output=True, text=True, check=False)

    found = opened("sh", "-c", script)
    if has_begun:
        paths = f"{code.STARTUP}:{folder / 'work'}:lib"
        assert found.stdout.startswith(f"1 1 high {paths}"), "errors and steps are the program's"
        assert place.stat().st_mode & 0o777 == 0o600, "variables may be confidential"
    else:
        assert "no program of the job has begun" in found.stderr
        assert found.returncode == 0
    ask = "from containers.program.start import shell; print(shell.is_open())"
    assert opened("sh", "-c", f"{sys.executable} -c '{ask}'; true").stdout == "True\n"
    found = opened("no-such")
    assert (found.returncode, "error: no-such cannot be run" in found.stderr) == (2, True)


def test_processes_of_one_node_write_each_line_in_one_piece(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # -u as torchrun starts its processes.
    loop = "for i in range(500): print('process', n, 'has a line')"
    start = f'for n in 0 1 2 3; do {sys.executable} -u -c "n = $n\n{loop}" & done; wait'
    assert Here(folder, start).run().code == 0
    found = capfd.readouterr().out.splitlines()
    assert sorted(found) == [
        f"{node_label(1)} process {n} has a line" for n in range(4) for _ in range(500)
    ]


@pytest.mark.parametrize("command", ["python", "python -u", "python -S", "sh"])
def test_a_line_is_in_the_log_at_once(
    folder: Path, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    script = "echo first; sleep 1000"
    if command != "sh":
        options = command.removeprefix("python")
        program = "import time; print('first'); time.sleep(1000)"
        script = f'exec {sys.executable}{options} -c "{program}"'
    here = Here(folder, script)
    here.start()
    assert eventually("line", lambda: capfd.readouterr().out) == f"{node_label(1)} first\n"
    here.launcher.stop(0)
    assert here.wait().was_stopped


BUFFERS = "import sys; print(sys.stdout.line_buffering, sys.stdout.write_through)"


@pytest.mark.parametrize(
    ("script", "variables", "expected"),
    [
        ("$PYTHON -c '$BUFFERS'", {}, "True False"),
        ("$PYTHON -c '$BUFFERS'", {"PYTHONUNBUFFERED": "1"}, "False True"),
        ("$PYTHON -c '$BUFFERS'", {"PYTHONUNBUFFERED": ""}, "False False"),
        # Beside ours.
        ("echo 'print(1)' > sitecustomize.py; $PYTHON -c ''", {}, "1"),
        ("echo $PET_NNODES $MASTER_PORT", {"PET_NNODES": "9", "MASTER_PORT": "7"}, "9 7"),
    ],
)
def test_what_a_user_sets_wins_over_what_the_launcher_sets(
    folder: Path, script: str, variables: dict[str, str], expected: str
) -> None:
    script = script.replace("$PYTHON", sys.executable).replace("$BUFFERS", BUFFERS)
    here = Here(folder, f"({script}) > said", variables=variables)
    assert here.run().code == 0
    assert here.wrote("said") == f"{expected}\n"


def test_a_program_that_does_not_exist_is_the_users_mistake(folder: Path) -> None:
    trouble = Here(folder, "", "nosuch").run().trouble
    assert isinstance(trouble, InputError)
    assert str(trouble) == "nosuch cannot be run: No such file or directory"


def test_a_program_that_ignores_sigterm_is_killed_with_all_that_it_started(folder: Path) -> None:
    # The second process has a session of its own, as those of torchrun do.
    here = Here(
        folder,
        "trap '' TERM; setsid sleep 1000 & echo $! > child; touch up; while :; do sleep 0.05; done",
    )
    here.start()
    here.wait_for("up")
    began = time.monotonic()
    here.launcher.stop(0.5)
    ended = here.wait()
    assert (ended.code, ended.was_stopped) == (exits.KILLED, True)
    assert 0.4 < time.monotonic() - began < 10
    assert not is_running(int(here.wrote("child")))


def test_what_a_program_leaves_running_ends_with_it(folder: Path) -> None:
    here = Here(folder, "setsid sleep 1000 & echo $! > child")
    assert here.run().code == 0
    assert not is_running(int(here.wrote("child")))


def test_what_a_shell_has_started_gets_sigterm_too_and_time_to_end(folder: Path) -> None:
    inner = "trap 'sleep 0.5; touch saved; exit 0' TERM; touch up; while :; do sleep 0.05; done"
    here = Here(folder, f'true && sh -c "{inner}" && true')
    here.start()
    here.wait_for("up")
    began = time.monotonic()
    here.launcher.stop(30)
    assert here.wait().was_stopped
    here.wait_for("saved")
    assert time.monotonic() - began < 20


#: A process notes its id, in the place of a loop that waits for it.
UP = "sh -c 'echo $$ > new; mv new up; trap : TERM; while :; do sleep 0.05; done'"
UNTIL_UP = "until test -e up; do sleep 0.02; done; sleep 1000"


@pytest.mark.parametrize(
    "words",
    [
        # Writes over the area that /proc shows, as setproctitle does.
        lambda: (sys.executable, "-c", OVERWRITES),
        lambda: ("sh", "-c", f"env -i PATH=$PATH setsid {UP} & {UNTIL_UP}"),
        # Its parent ends at once.
        lambda: ("sh", "-c", f"env -i PATH=$PATH setsid -f {UP}; {UNTIL_UP}"),
    ],
    ids=["another title", "a cleared environment", "a daemon"],
)
def test_a_process_that_cannot_be_known_by_its_environment_counts_and_is_killed(
    folder: Path, words: Callable[[], tuple[str, ...]]
) -> None:
    here = Here(folder, "", *words())
    here.start()
    pid = int(here.wait_for("up").read_text())
    assert pid not in machine.marked(ENV_RUN, "r1")
    assert pid in here.program.left()
    here.launcher.stop(0.5)
    assert here.wait().was_stopped
    assert not is_running(pid)


def zombies() -> set[int]:
    there = machine.processes().items()
    return {pid for pid, each in there if each.state == "Z" and each.parent == os.getpid()}


def test_orphans_that_have_ended_leave_no_zombies(folder: Path) -> None:
    before = zombies()  # of other tests
    here = Here(folder, "for i in 1 2 3; do setsid -f true; done; touch up; sleep 1000")
    here.start()
    here.wait_for("up")
    eventually("none", lambda: not here.program.left() or zombies() <= before, every_s=0.02)


def test_what_is_read_through_a_mapping_counts(tmp_path: Path) -> None:
    size = 2**24
    with (tmp_path / "weights").open("w+b") as file:
        file.write(os.urandom(size))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = machine.used([os.getpid()])[1]
        with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
            sum(mapped[i] for i in range(0, size, mmap.PAGESIZE))
    if os.statvfs(tmp_path).f_fsid == 0:
        pytest.skip("a file system in memory reads nothing")
    assert machine.used([os.getpid()])[1] - before > size * 0.8


def test_lines_that_differ_are_counted_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVERY_S", 0)
    here = Here(folder, "echo wait 1; echo wait 2; echo done; touch up; sleep 1000")
    here.start()
    here.wait_for("up")
    eventually("lines", lambda: here.launcher.status().signs.printed == 3, every_s=0.02)
    monkeypatch.setattr(watch, "is_served", {*here.program.left()}.__eq__)
    signs = here.launcher.status().signs
    assert (signs.lines, signs.is_served) == (2, True), "as with a notebook in a browser"


@pytest.mark.parametrize(
    ("script", "hidden"),
    [
        ("cp .no here; true", []),
        ("python fail.py & sleep 0.05; wait", ["python fail.py ended with exit code 3 on node 1"]),
        ("python train.py & until test -e up; do :; done", ["python train.py still ran and was"]),
        ("tail -f /dev/null & (while :; do sleep 60; done) & true", []),
        ("trap 'exit 0' TERM; python train.py & touch up; wait", None),
    ],
)
def test_what_fails_inside_a_command_that_ends_with_0_is_known_at_its_end(
    folder: Path, script: str, hidden: list[str] | None
) -> None:
    here = Here(folder, f"{WRITE_PROGRAMS}; {script}", variables={"PATH": PATH})
    here.start()
    if hidden is None:
        here.wait_for("up")
        here.launcher.stop(5)
    ended = here.wait()
    assert [line[: len(text)] for line, text in zip(ended.hidden, hidden or [], strict=True)] == (
        hidden or []
    )


WRITE_PROGRAMS = (
    "echo 'raise SystemExit(3)' > fail.py; "
    'echo \'import time; open("up", "w"); time.sleep(100)\' > train.py'
)


OVERWRITES = """
import ctypes, os, signal, time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
begin, end = int(words[47]), int(words[48])
ctypes.memset(begin, 0, end - begin)
Path("new").write_text(str(os.getpid()))
Path("new").rename("up")
time.sleep(1000)
"""


def test_a_process_that_the_kernel_holds_keeps_no_job_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU's driver may keep one for good, which no signal ends."""
    monkeypatch.setattr(process, "_KILL_S", 0.2)
    monkeypatch.setattr(process, "_signal", lambda *_: None)
    program = process.ProgramProcess(("sleep", "5"), folder=None, environment=os.environ)
    assert program.end() == exits.KILLED
    monkeypatch.undo()
    program.end()


def test_a_second_start_ends_the_first_one(folder: Path) -> None:
    here = Here(folder, "echo $$ >> pids; trap 'exit 0' TERM; while :; do sleep 0.05; done")
    here.start()
    first = int(here.wait_for("pids").read_text())
    here.start(start=1)
    assert not is_running(first)
    here.wait_for("pids")
    here.launcher.stop(20)
    assert here.wait().was_stopped


class SavedFor(Mirror):
    """Notes the limits of each last copy."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Disk({"work": folder}), Bucket("s3://bucket/runs/r1/output", S3()))
        self.limits: list[float | None] = []

    def save(self, within_s: float | None = None) -> bool:
        self.limits.append(within_s)
        return True


def test_a_programs_last_files_have_all_the_time_that_the_node_has(
    folder: Path, notice: Path
) -> None:
    here = Here(folder, "exit 0")
    here.launcher._mirror = mirror = SavedFor(folder)
    here.launcher._save()
    here.launcher.stop(10, 60)
    here.launcher._save()
    assert mirror.limits == [None, 60]
    notice.write_text(str(time.time() + 30))
    here.launcher.status()
    here.launcher._save()
    assert 20 < (mirror.limits[-1] or 0) <= 30


def test_a_program_whose_files_another_job_has_taken_over_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = S3()
    monkeypatch.setattr(store, "_client", lambda: s3)
    here = Here(folder, "echo 1 > step; while :; do sleep 0.02; done", storage="s3://bucket")
    bucket = Bucket("s3://bucket/runs/r1/output", s3)
    here.start(number=0, files=begin(bucket, [0]))
    here.wait_for("step")
    begin(bucket, [0])
    assert here.launcher._mirror
    here.launcher._mirror.round(here.launcher._mirror.look())
    ended = here.wait()
    assert (ended.code, ended.was_stopped, ended.was_replaced) == (143, True, True)


def test_leftovers_of_an_earlier_start_are_not_taken_for_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = S3()
    monkeypatch.setattr(store, "_client", lambda: s3)
    bucket = Bucket("s3://bucket/runs/r1/output", s3)
    script = "test -e model || echo 1 > model; echo $TRAIN_RUN >> ~/state"
    here = Here(folder, script, storage="s3://bucket")
    here.start(number=0, files=begin(bucket, [0]))
    here.wait()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as of a read-only folder
    here.start(number=0, start=1, files=begin(bucket, [0]))
    assert here.wait().code == 0
    assert saved_in(s3, "r1") == {"work/model": "1\n", "home/state": "r1\nr1\n"}


#: A program with TensorBoard's own writer, which torch's SummaryWriter uses, and a torn file.
WRITES = """
from pathlib import Path
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.summary.writer.record_writer import RecordWriter

for folder in ("runs/good", "more/good", "runs/torn"):
    writer = EventFileWriter(folder)
    for step in [*range(200), *range(99)]:
        value = Summary.Value(tag="train/loss", simple_value=1.0 / (step + 1))
        writer.add_event(Event(step=step, summary=Summary(value=[value])))
    writer.close()
(torn,) = Path("runs/torn").iterdir()
torn.write_bytes(torn.read_bytes()[:-9])
# None of them can be read; TensorBoard alone would read nothing beside them.
with open("runs/tfevents", "wb") as file:
    RecordWriter(file).write(b"\\xff")
Path("runs/good/events.out.tfevents.0").symlink_to("nowhere")
Path("runs/m\\udcfcll").mkdir()
Path("runs/m\\udcfcll/tfevents").touch()
"""


def test_scalars_of_a_program_are_curves_of_its_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    s3 = S3()
    monkeypatch.setattr(store, "_client", lambda: s3)
    here = Here(folder, "", sys.executable, "-c", WRITES, storage="s3://bucket")
    here.start(number=0, rank=0, files=begin(Bucket("s3://bucket/runs/r1/output", s3), [0]))
    assert here.wait().code == 0
    curves = curves_of(parse_metrics(s3.objects["runs/r1/metrics.jsonl"]))
    found = [(each.title, *points[-1][:1]) for each in curves for points in each.lines.values()]
    assert found == [
        (f"Train/loss {name}", 199) for name in ("more/good", "runs/good", "runs/torn")
    ]
    out = capfd.readouterr().out
    assert out.count("warning: TensorBoard: Truncated record in ") == 1
    assert out.count(" is skipped: ") == 1
    s3.objects = {"runs/r1/config.json": b"{}"}
    said: list[str] = []
    monkeypatch.setattr(scalars, "_MOST_CURVES", 2)
    scalars.start(folder, Bucket("s3://bucket/runs/r1", s3), said.append)()
    assert len(s3.objects) == 1  # the record of a recipe stays
    assert "warning: TensorBoard: 1 of 3 curves are left out" in said


def test_a_notice_reaches_the_program_as_sigterm_with_the_time_left(
    folder: Path, notice: Path
) -> None:
    here = Here(
        folder,
        f"trap 'cat ${ENV_NOTICE} > told; exit 0' TERM; touch up; while :; do sleep 0.05; done",
    )
    here.start()
    here.wait_for("up")
    at = time.time() + 60
    notice.write_text(str(at))
    assert here.launcher.status().leaves_at == at
    assert here.wait().was_stopped
    assert float(here.wrote("told")) == at
