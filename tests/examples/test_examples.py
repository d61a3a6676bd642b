"""Each example trains on two processes, is killed, resumes, and ends as if it had not been."""

import json
import runpy
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import ROOT
from tests.forks import Ranks, ranks

pytestmark = pytest.mark.slow


class Example(NamedTuple):
    """A program of ``examples/``, and when it can be killed."""

    name: str
    length: str
    """The option that says how long it trains."""
    every: int
    """Steps or epochs between two saves."""
    saving: str
    """What it prints right before each save."""
    second: str
    """The same of the second save: the first one is complete."""
    fresh: str
    """How it starts with nothing to resume from."""
    arguments: tuple[str, ...] = ()
    good_loss: float = float("inf")


# Higher learning rates than the defaults: a few steps show that a program learns.
DDP = Example(
    "ddp", "--steps", 20, "\nstep ", "step 40 ", "starts at step 0", arguments=("--lr", "0.01")
)
TRAINER = Example(
    "hf_trainer",
    "--max_steps",
    10,
    "{'loss'",
    "'epoch': '0.078",
    "starts at step 0",
    # The default falls to 0 at the last step, and a run that is killed has another last step.
    arguments=(
        *("--logging_steps", "10", "--save_steps", "10"),
        *("--learning_rate", "0.01", "--lr_scheduler_type", "constant"),
    ),
    good_loss=3.6,
)
ACCELERATE = Example(
    "accelerate", "--epochs", 1, "\nepoch ", "epoch 2 ", "starts at epoch 0", good_loss=0.1
)


def folder_of(example: Example, place: Path) -> Path:
    """A copy of an example's files."""
    return shutil.copytree(ROOT / "examples" / example.name, place)


@contextmanager
def started(script: Path, *arguments: str, log: Path) -> Iterator[Ranks]:
    """The processes of an example; none of them is left afterwards."""
    group = ranks([str(script), *arguments], folder=script.parent, out=log, err=log)
    try:
        yield group
    finally:
        group.kill()


def result_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(each, id=each.name, marks=() if each is DDP else pytest.mark.long)
        for each in (DDP, TRAINER, ACCELERATE)
    ],
)
def test_an_example_that_was_killed_ends_like_one_that_was_not(
    example: Example, tmp_path: Path
) -> None:
    whole, killed = folder_of(example, tmp_path / "whole"), tmp_path / "killed"
    shutil.copytree(whole, killed)

    def start(folder: Path, length: int, log: str) -> AbstractContextManager[Ranks]:
        given = (*example.arguments, example.length, str(length))
        return started(folder / "train.py", *given, log=tmp_path / log)

    # It would never end, so it is not killed too late.
    with start(killed, 1_000_000, "first.log") as group:
        group.wait_for(example.second)
        group.kill()
        assert group.wait() == [-signal.SIGKILL] * 2
        length = example.every * (group.text().count(example.saving) + 1)
    assert not (killed / "result.json").exists()

    with start(killed, length, "second.log") as group:
        assert group.wait() == [0, 0], group.text()
        assert example.fresh not in group.text(), "it began anew"
    with start(whole, length, "whole.log") as group:
        assert group.wait() == [0, 0], group.text()
        text = group.text()
        assert [text.count(f"rank {rank} of 2 {example.fresh}") for rank in (0, 1)] == [1, 1]

    expected = result_of(whole)
    assert expected["world_size"] == 2
    assert expected.get("loss", 0.0) < example.good_loss
    assert expected.get("accuracy", 1.0) > 0.9
    assert result_of(killed) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("steps", range(4))
def test_a_kill_while_a_checkpoint_takes_its_place_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.chdir(tmp_path)
    train = runpy.run_path(str(ROOT / "examples" / "accelerate" / "train.py"))
    accelerator, progress = train["Accelerator"](cpu=True), train["EpochCount"]()
    accelerator.register_for_checkpointing(progress)
    progress.epoch = 1
    train["save"](accelerator)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]

    done = 0

    def or_killed(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal done
            if done == steps:
                raise KeyboardInterrupt
            done += 1
            return step(*arguments, **named)

        return call

    progress.epoch = 2
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", or_killed(Path.rename))
        patch.setattr(shutil, "rmtree", or_killed(shutil.rmtree))
        with pytest.raises(KeyboardInterrupt):
            train["save"](accelerator)
    progress.epoch = 0
    train["recover"](accelerator)
    accelerator.load_state("checkpoint")
    assert progress.epoch == (2 if steps == 3 else 1)
    train["save"](accelerator)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_an_example_saves_when_it_is_asked_to_end(tmp_path: Path) -> None:
    script = folder_of(DDP, tmp_path / "ddp") / "train.py"
    with started(script, "--steps", "1000000", log=tmp_path / "first.log") as group:
        group.wait_for("step 20 ")
        group.terminate()
        assert group.wait() == [128 + signal.SIGTERM] * 2, group.text()
        step = int(group.text().rpartition("\nstep ")[2].split()[0])
    with started(script, "--steps", str(step + 2), log=tmp_path / "second.log") as group:
        assert group.wait() == [0, 0], group.text()
        assert f"starts at step {step}" in group.text()
