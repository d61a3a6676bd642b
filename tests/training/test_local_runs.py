"""Proves, with the real command, that a run on this machine trains, can be stopped and killed in
every way, resumes exactly, and leaves no process behind."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from tests.training.kills import killed, play
from tests.training.local_runs import (
    DIGITS,
    REPO,
    Command,
    assert_nothing_is_left,
    launcher,
)
from tests.training.test_data import write_images
from training import recipes
from training.data import small_images
from training.record import fields, reader
from training.record.events import Step
from training.record.result import Table

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Command]]:
    """Below a path with spaces and a letter of another language, and without a home folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", "/dev/null/none")  # which root cannot make either
        patch.delenv("MPLCONFIGDIR")
        with launcher(tmp_path_factory.mktemp("my project (é)"), "ddp") as run:
            yield run


@pytest.fixture(scope="module")
def uninterrupted(start: Callable[..., Command]) -> Command:
    command = start("whole", *DIGITS, "--json")
    assert json.loads(command.succeed()) == command.result()
    assert_nothing_is_left(command)
    return command


def test_a_run_trains_and_leaves_its_whole_record(uninterrupted: Command) -> None:
    result = uninterrupted.result()
    assert result["status"] == "succeeded"
    assert result["accuracy"] >= 0.9
    assert (result["steps"], result["world_size"]) == (69, 2)
    folder = uninterrupted.run_folder
    assert (folder / "model" / "model.safetensors").stat().st_size > 4 * 11_175_370
    assert (folder / "report.html").stat().st_size > 10_000
    assert [line["rank"] for line in uninterrupted.metrics("rank")] == [0, 1] * 3
    evaluation = reader.read_json(str(folder), "evaluation.json")
    assert evaluation is not None
    matrix = fields.from_json(Table, evaluation).rows
    assert sum(map(sum, matrix)) == 359
    correct = sum(row[i] for i, row in enumerate(matrix))
    assert correct / 359 == pytest.approx(result["accuracy"], abs=1e-9)


def test_the_lines_that_use_its_model_tell_digits_as_in_the_evaluation(
    uninterrupted: Command,
) -> None:
    lines = "\n".join(recipes.by_name("ddp").use(str(uninterrupted.run_folder), {})[1:])
    lines = lines.replace('PIL.Image.open("PICTURE").convert("L")', "pictures")
    data = small_images.load("digits")
    names: dict[str, Any] = {"pictures": [Image.fromarray(each) for each in data.test_images]}
    exec(lines.replace("print(", "found = (").replace("argmax()", "argmax(dim=1)"), names)
    right = (names["found"].numpy() == data.test_labels).mean()
    assert right == pytest.approx(uninterrupted.result()["accuracy"])


def test_the_losses_are_those_stored(uninterrupted: Command) -> None:
    uninterrupted.has_stored_losses({1: (2.4975, 1e-3), 2: (2.3106, 2e-3), 5: (1.3699, 5e-3)})


def test_a_complete_run_is_not_trained_again(
    start: Callable[..., Command], uninterrupted: Command
) -> None:
    code, out, err = start("whole", *DIGITS, "--json").end()
    assert code == 0
    assert "already complete" in err
    assert "loading PyTorch" not in err
    assert json.loads(out) == uninterrupted.result()


def test_a_run_listens_on_loopback_only(start: Callable[..., Command]) -> None:
    command = start("open", *DIGITS, "--report-every", "1", "--epochs", "1")
    command.wait_until(lambda: command.steps_done() > 0)
    listening = [
        each.laddr.ip
        for process in psutil.Process(command.process.pid).children(recursive=True)
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    ]
    command.succeed()
    assert {*listening} <= {"127.0.0.1", "::1"}


@killed([("server", "save"), ("Ctrl-C", "step"), ("command", "report")])
def test_a_killed_run_resumes_where_it_was_saved_and_ends_the_same(
    kills: list[tuple[str, str]],
    start: Callable[..., Command],
    uninterrupted: Command,
) -> None:
    words = [*DIGITS, "--report-every", "1", "--checkpoint-minutes", "0.03"]
    command = play(kills, start, uninterrupted, words)
    for name in ("train_loss", "loss", "accuracy"):
        found, expected = (
            [line[name] for line in run.metrics("evaluation")] for run in (command, uninterrupted)
        )
        assert found == pytest.approx(expected, abs=1e-6)


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
    assert losses[0] == pytest.approx(uninterrupted.losses()[1], abs=1e-6)


@pytest.mark.night
def test_a_complete_run_made_longer_is_as_if_it_had_been_so_from_the_start(
    start: Callable[..., Command],
) -> None:
    words = [*DIGITS, "--schedule", "constant", "--keep-best", "loss", "--checkpoints-to-keep", "1"]
    straight = start("straight", *words)
    straight.succeed()
    start("longer", *words, "--epochs", "1").succeed()
    longer = start("longer", *words, "--epochs", "3")
    longer.succeed()
    assert longer.losses() == straight.losses()
    assert longer.result()["loss"] == straight.result()["loss"]
    found = [run.metrics("evaluation") for run in (longer, straight)]
    best = min(found[1], key=lambda each: each["loss"])
    assert [[each["loss"] for each in run] for run in found] == [[e["loss"] for e in found[1]]] * 2
    # The model is that of the best evaluation, whose checkpoint is kept beside the newest.
    names = {path.name for path in (straight.run_folder / "checkpoints").iterdir()}
    assert names == {f"step-{step:08}" for step in (best["step"], 69)}
    assert straight.result()["loss"] == pytest.approx(best["loss"], abs=1e-9)
