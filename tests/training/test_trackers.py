"""Proves that trackers show what the record has, each step once, and a broken one costs nothing."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

from contract.errors import InputError
from tests.training.bucket import RUN, install
from tests.training.sample_events import start, step
from tests.training.test_record import (
    SETTINGS,
    Silent,
    SlowBucket,
    evaluation,
    finished,
    opened,
    tell,
)
from training import command
from training.record import trackers
from training.record.trackers import Trackers
from training.record.writer import FLUSH_EVERY_S


def lost_and_resumed(folder: Path, *names: str) -> None:
    """A run that loses steps 5 and 6 after its checkpoint of step 4, and does them again."""
    lost = opened(folder, report_to=names)
    tell(lost, start(), *map(step, range(1, 5)), evaluation(1), step(5, 9.0), step(6, 9.0))
    lost._trackers.close(0, wait_s=60)
    resumed = opened(folder, report_to=names)
    tell(resumed, start(4, resumed=True), *map(step, range(5, 9)), evaluation(2), finished())
    assert resumed.close()
    assert resumed.is_complete


def test_tensorboard_reads_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lost_and_resumed(tmp_path / "r", "tensorboard")
    read: Any = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    read.Reload()
    curve = [(each.step, each.value) for each in read.Scalars("train/loss")]
    assert curve == [(number, 1.0) for number in range(1, 9)]
    assert [each.step for each in read.Scalars("evaluation/accuracy")] == [4, 8]
    names = {"loss", "lr", "grad_norm", "epoch"}
    assert {each for each in read.Tags()["scalars"] if each.startswith("train/")} == {
        f"train/{name}" for name in names
    }
    assert read.Scalars("evaluation/images_per_s")[-1].value == 100


@pytest.mark.slow
def test_wandb_reads_the_steps_and_settings_of_a_run_that_was_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    program = f"""
from pathlib import Path
from tests.training.test_trackers import lost_and_resumed
lost_and_resumed(Path({str(tmp_path)!r}) / "r", "wandb")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    parts = sorted(tmp_path.glob("r/wandb/offline-run-*/*.wandb"))
    attempts = [[json.loads(line) for line in inspected(part)] for part in parts]
    [first, second] = map(history, attempts)
    assert ([*first], [*second]) == ([1, 2, 3, 4, 5, 6], [5, 6, 7, 8])
    assert (second[8]["train/loss"], second[8]["evaluation/accuracy"]) == (1.0, 0.5)
    for attempt in attempts:
        # One curve: W&B joins what has the same id, and keeps the first figures of a step.
        [run] = [each["run"] for each in attempt if "run" in each]
        assert (run["run_id"], run["project"]) == ("r", "ddp")
        assert json.dumps(run["config"]).count('"lr"') == 1


def history(attempt: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Figures by step."""
    rows = [each["history"] for each in attempt if "history" in each]
    return {row["step"]["num"]: row["item"] for row in rows}


def inspected(file: Path) -> list[str]:
    """The records of a file, a line each, by W&B's own reader."""
    words = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def test_a_tracker_that_fails_is_reported_once_and_the_others_go_on(tmp_path: Path) -> None:
    full, fine, display = Mock(), Mock(), Silent()
    full().log.side_effect = [None, OSError("No space left on device")]
    with patch.multiple(trackers, _TensorBoard=full, _Wandb=fine):
        kept = opened(tmp_path / "r", display=display, report_to=trackers.NAMES)
        tell(kept, start(), *map(step, range(1, 9)), finished())
        kept.close()
    logged = [each.args for each in fine().log.mock_calls]
    assert [(number, figures["train/loss"]) for number, figures in logged] == [
        (number, 1.0) for number in range(1, 9)
    ]
    fine().close.assert_called_once_with(0)
    (warning,) = display.warnings
    assert "No space left on device" in warning
    assert kept.is_complete


def test_files_of_trackers_reach_s3_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = SlowBucket()
    install(monkeypatch, bucket)
    kept = bucket.opened()
    for file in ("tensorboard/events.1", "wandb/offline-run-1/run-r.wandb", "wandb/run/log.txt"):
        (kept.folder / file).parent.mkdir(parents=True, exist_ok=True)
        (kept.folder / file).write_text(file)
    bucket.now += FLUSH_EVERY_S + 1
    kept.handle(step(2))
    sent = {name for name in bucket.objects if "tensorboard" in name or "wandb" in name}
    folder = RUN.removeprefix("s3://bucket/")
    assert sent == {f"{folder}/tensorboard/events.1", f"{folder}/wandb/offline-run-1/run-r.wandb"}
    kept.handle(finished())
    kept.close()
    assert bucket.objects[f"{folder}/wandb/run/log.txt"] == b"wandb/run/log.txt"


@pytest.mark.parametrize("name", trackers.NAMES)
def test_a_missing_package_is_an_error_before_anything_starts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=f"--report-to {name} needs a package: pip install {name}"):
        trackers.check([name])


def test_wandb_without_a_key_is_an_error_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: True)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=lambda **_: False))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(InputError, match="set WANDB_API_KEY"):
        trackers.check(["wandb"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers.check(["wandb"])


def test_the_command_line_takes_trackers_by_name() -> None:
    assert command.parse(["ddp"]).report_to == ()
    assert command.parse(["ddp", "--report-to", "tensorboard,wandb"]).report_to == trackers.NAMES


def test_a_tracker_that_does_not_answer_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    class Slow:
        def __init__(self, *_: object) -> None:
            answers.wait()

    monkeypatch.setattr(trackers, "_Wandb", Slow)
    slow = Trackers(["wandb"], tmp_path, "r", SETTINGS, say=lambda _: None)
    slow.handle(start())
    for number in range(1, 1000):
        slow.handle(step(number))
    slow.close(0, wait_s=0.01)
    answers.set()  # only now: all the rest came back without it
    slow.close(0, wait_s=60)
