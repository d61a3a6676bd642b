"""Proves, with the real command, that a run on this machine trains, can be stopped and killed in
every way, resumes exactly, and leaves no process behind."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from containers.host import machine
from tests.forks import Ranks, ranks
from tests.training.test_data import write_images
from training.record import fields, reader
from training.record.events import Step
from training.record.result import Classification

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
#: Variable in the environment of all that a command starts.
MARK = "MARK_OF_TEST"
# About six seconds of training on two cores.
DIGITS = ["--preset", "digits", "--epochs", "3", "--workers", "2"]


@dataclass
class Run:
    """A run, and what its processes write."""

    process: "subprocess.Popen[str] | Ranks"
    folder: Path
    run: str

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / self.run

    def steps_done(self) -> int:
        events = reader.read_metrics(str(self.run_folder)).events
        return max((event.step for event in events if isinstance(event, Step)), default=0)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.05)

    def end(self, timeout_s: float = 400) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        code = self.process.poll()
        assert code is not None
        return code, out, err

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.run_folder / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line["type"] == kind]

    def result(self) -> dict[str, Any]:
        found = reader.read_json(str(self.run_folder), "result.json")
        assert found is not None
        return found


@dataclass
class Command(Run):
    """The launch command in a process group of its own, as a terminal would start it."""

    process: subprocess.Popen[str]
    mark: str
    """Marks all of its processes: other tests, and other checkouts, have runs of the same name."""

    def processes(self) -> list[int]:
        """Ids of all that run, however far they have detached themselves."""
        return machine.marked(MARK, self.mark)

    def server(self) -> psutil.Process | None:
        """The process that the workers are forked from; None before it is there."""
        for each in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):
                if "multiprocessing.forkserver" in " ".join(each.cmdline()):
                    return each
        return None

    def workers(self) -> list[psutil.Process]:
        """The training processes, in the order of their starts."""
        server = self.server()
        found = server.children() if server else []
        return sorted(found, key=lambda process: process.create_time())


@dataclass
class RankedRun(Run):
    """The same loop as so many ranks, as torchrun starts them: quicker, for what the command has no
    part in."""

    process: Ranks


@contextmanager
def launcher(folder: Path, recipe: str) -> Iterator[Callable[..., Command]]:
    """Start ``python -m training.launch RECIPE --local`` in a folder; whatever is left at the end
    is killed.
    """
    started: list[subprocess.Popen[str]] = []

    def run(name: str, *arguments: str, local: bool = True, under: Sequence[str] = ()) -> Command:
        start = [*under, sys.executable, "-m", "training.launch"]
        command = [*start, recipe, "--run", name, *arguments]
        mark = secrets.token_hex(8)
        process = subprocess.Popen(
            [*command, "--local"] if local else command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPO), MARK: mark},
            start_new_session=True,
        )
        started.append(process)
        return Command(process, folder, name, mark)

    yield run
    for process in started:
        with process:  # closes its pipes, which would spoil a later test
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def ranked(folder: Path, recipe: str) -> Iterator[Callable[..., RankedRun]]:
    """Start a recipe as so many ranks in a folder; whatever is left at the end is killed."""
    started: list[Ranks] = []

    def run(name: str, *arguments: str, world: int) -> RankedRun:
        command = ("-m", "training.launch", recipe, "--run", name, *arguments)
        out, err = (folder / f"{name}-{len(started)}.{each}" for each in ("out", "err"))
        started.append(ranks(command, folder=folder, out=out, err=err, world=world))
        return RankedRun(started[-1], folder, name)

    yield run
    for each in started:
        each.kill()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Command]]:
    with launcher(tmp_path_factory.mktemp("runs"), "ddp") as run:
        yield run


def assert_nothing_is_left(command: Command, within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while left := command.processes():
        assert time.monotonic() < deadline, [psutil.Process(pid).name() for pid in left]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def uninterrupted(start: Callable[..., Command]) -> Command:
    command = start("whole", *DIGITS, "--json")
    code, out, err = command.end()
    assert code == 0, err
    assert json.loads(out) == command.result()
    assert_nothing_is_left(command)
    return command


def test_a_run_trains_and_leaves_its_whole_record(uninterrupted: Command) -> None:
    result = uninterrupted.result()
    assert result["status"] == "succeeded"
    assert result["accuracy"] >= 0.9
    assert (result["steps"], result["world_size"]) == (69, 2)
    folder = uninterrupted.run_folder
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        "step-00000046",
        "step-00000069",
    }
    from transformers import ResNetForImageClassification

    model = ResNetForImageClassification.from_pretrained(folder / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_175_370
    assert (folder / "report.html").stat().st_size > 10_000
    assert [line["rank"] for line in uninterrupted.metrics("rank")] == [0, 1] * 3
    evaluation = reader.read_json(str(folder), "evaluation.json")
    assert evaluation is not None
    matrix = fields.from_json(Classification, evaluation).confusion_matrix
    assert sum(map(sum, matrix)) == 359
    correct = sum(row[i] for i, row in enumerate(matrix))
    assert correct / 359 == pytest.approx(result["accuracy"], abs=1e-9)


def test_the_losses_are_those_stored(uninterrupted: Command) -> None:
    # Stored on a CPU in fp32, seed 0. A change of these is a change of the recipe. Rounding
    # differs from one kind of CPU to the next, and grows with the steps.
    expected = {1: (2.4975, 1e-3), 2: (2.3106, 2e-3), 5: (1.3699, 5e-3)}
    losses = {line["step"]: line["loss"] for line in uninterrupted.metrics("step")}
    for step, (loss, tolerance) in expected.items():
        assert losses[step] == pytest.approx(loss, abs=tolerance)


def test_a_complete_run_is_not_trained_again(
    start: Callable[..., Command], uninterrupted: Command
) -> None:
    code, out, err = start("whole", *DIGITS, "--json").end()
    assert code == 0
    assert "already complete" in err
    assert "loading PyTorch" not in err
    assert json.loads(out) == uninterrupted.result()


def test_however_it_is_ended_a_run_resumes_and_ends_as_if_nothing_had_happened(
    start: Callable[..., Command], uninterrupted: Command
) -> None:
    # Ctrl-C in the middle of the first epoch, to the whole group, as a terminal sends it.
    command = start("broken", *DIGITS)
    command.wait_until(lambda: command.steps_done() >= 5)
    os.killpg(command.process.pid, signal.SIGINT)
    code, _, err = command.end(timeout_s=90)
    assert code == 130, err
    assert "stopped at step" in err
    assert "Traceback" not in err
    assert_nothing_is_left(command)
    stopped_at = command.result()["steps"]
    assert 5 <= stopped_at < 23

    # A worker is killed in the second epoch: all start again where the first one ended.
    command = start("broken", *DIGITS)
    command.wait_until(lambda: command.steps_done() >= 25)
    command.workers()[1].kill()
    command.wait_until(lambda: len(command.metrics("resume")) == 2)

    # The command is killed in the third: what it started goes with it, and what came after the
    # second epoch is lost.
    command.wait_until(lambda: command.steps_done() >= 48)
    assert len(command.processes()) >= 4
    command.process.kill()
    _, _, err = command.end()
    assert "worker 1 ended (SIGKILL): all start again from the last checkpoint" in err
    assert_nothing_is_left(command)
    killed = shutil.copytree(command.run_folder, command.folder / "runs" / "fewer")

    command = start("broken", *DIGITS, "--json")
    code, out, err = command.end()
    assert code == 0, err
    result, expected = json.loads(out), uninterrupted.result()
    assert result["resumed_from"] == 46
    assert result["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-6)
    assert result["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    losses = [line["loss"] for line in command.metrics("step")]
    assert losses == pytest.approx(
        [line["loss"] for line in uninterrupted.metrics("step")], abs=1e-6
    )
    assert [line["step"] for line in command.metrics("resume")] == [stopped_at, 23, 46]
    train_losses = [line["train_loss"] for line in command.metrics("evaluation")]
    assert train_losses == pytest.approx(
        [line["train_loss"] for line in uninterrupted.metrics("evaluation")], abs=1e-6
    )

    # The same, resumed by one worker: other batch statistics, the same curve.
    config = json.loads((killed / "config.json").read_text())
    (killed / "config.json").write_text(json.dumps({**config, "run": "fewer"}))
    with ranked(command.folder, "ddp") as ranks:
        code, out, err = ranks("fewer", *DIGITS[:4], "--json", world=1).end()
    assert code == 0, err
    assert json.loads(out)["world_size"] == 1
    assert json.loads(out)["accuracy"] == pytest.approx(expected["accuracy"], abs=0.02)


def test_ctrl_c_ends_a_command_that_still_loads(
    start: Callable[..., Command],
) -> None:
    command = start("early", *DIGITS)
    command.wait_until(lambda: command.server() is not None)
    os.killpg(command.process.pid, signal.SIGINT)
    code, _, err = command.end(timeout_s=60)
    assert (code, err.splitlines()[1:]) == (
        130,
        ["stopped; the same command with --run early resumes it"],
    )
    assert_nothing_is_left(command)


@pytest.mark.long
def test_without_the_server_of_its_workers_a_run_starts_another(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    data = write_images(tmp_path / "data", num_train=640)
    command = start("served", "--data", str(data), "--epochs", "2", "--workers", "2")
    command.wait_until(lambda: command.steps_done() >= 1)
    server = command.server()
    assert server is not None
    server.kill()
    code, _, err = command.end()
    assert code == 0, err
    assert "all start again" in err
    assert_nothing_is_left(command)


def test_a_loss_that_is_not_a_number_names_the_step_and_keeps_the_checkpoint(
    start: Callable[..., Command], uninterrupted: Command
) -> None:
    # The second half of an otherwise good run: its checkpoint is there, its learning rate is not.
    folder = uninterrupted.folder / "runs" / "diverging"
    shutil.copytree(uninterrupted.run_folder, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000069")
    (folder / "result.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "run": "diverging", "lr": 1e35}))
    command = start("diverging", *DIGITS, "--lr", "1e35")
    code, out, err = command.end()
    assert code == 2, err
    assert out == ""
    assert "training diverged at step 4" in err
    assert "resumes from checkpoint step-00000046, which is kept" in err
    assert "lower --lr (now 1e+35)" in err
    assert "Traceback" not in err
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000046"]
    assert_nothing_is_left(command)


def test_data_damaged_inside_is_refused_before_a_run_is_made(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    data = write_images(tmp_path / "data", size=32)
    command = start("unborn", "--data", str(data))
    code, out, err = command.end()
    assert (code, out) == (2, "")
    assert "32 x 32 pixels" in err
    assert "Traceback" not in err
    assert [path.name for path in command.run_folder.iterdir()] == ["leases"]
    assert_nothing_is_left(command)


def test_without_a_cluster_the_remedy_is_named(start: Callable[..., Command]) -> None:
    # Ray looks for a cluster among all processes, and another test may have one: here they are out
    # of sight, where the system can do that.
    unseen = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    can_hide = (
        shutil.which("unshare") and not subprocess.run([*unseen, "true"], check=False).returncode
    )
    code, _, err = start("alone", local=False, under=unseen if can_hide else []).end()
    assert code == 2, err
    assert "add --local" in err
    assert "Traceback" not in err


@pytest.mark.long
def test_a_run_kept_in_s3_leaves_its_record_there_and_is_known_when_started_again(
    start: Callable[..., Command], s3_endpoint: str, tmp_path: Path
) -> None:
    del s3_endpoint  # the environment points at it
    from training.checkpoint import checkpoints
    from training.system import storage

    storage.filesystem("s3://").mkdir("s3://local-runs")
    data = write_images(tmp_path / "data", num_train=640, num_test=100)
    for path in data.iterdir():
        storage.write_bytes(f"s3://local-runs/data/{path.name}", path.read_bytes())
    arguments = ["--storage", "s3://local-runs", "--data", "s3://local-runs/data", "--json"]
    arguments += ["--epochs", "3", "--workers", "2", "--batch-per-worker", "32"]
    code, out, err = start("remote", *arguments).end()
    assert code == 0, err
    run = "s3://local-runs/runs/remote"
    assert json.loads(out) == reader.read_json(run, "result.json")
    assert checkpoints.names(run) == ["step-00000020", "step-00000030"]
    last = checkpoints.newest(run, pytest.fail)
    assert last is not None
    assert last.position.step == 30
    for name in ("report.html", "model/model.safetensors", "metrics.jsonl"):
        assert storage.exists(f"{run}/{name}"), name
    code, again, err = start("remote", *arguments).end()
    assert (code, again) == (0, out)
    assert "already complete" in err


def test_the_same_loop_runs_under_torchrun_without_ray(
    uninterrupted: Command, tmp_path: Path
) -> None:
    # Ray made impossible to import, as on a machine that has only PyTorch.
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError('no Ray here')")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--standalone", "-m", "training.launch", "--", "ddp", "--preset", "digits"),
        *("--epochs", "1", "--run", "plain", "--json"),
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "succeeded"
    steps = reader.read_metrics(str(tmp_path / "runs" / "plain")).of(Step)
    losses = [step.loss for step in steps]
    # One epoch has another schedule than three, so only the first step is the same.
    first = uninterrupted.metrics("step")[0]["loss"]
    assert losses[0] == pytest.approx(first, abs=1e-6)
    assert len(losses) == 23
