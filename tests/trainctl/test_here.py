"""Runs of this machine in ``trainctl``: the views of jobs on a folder, and ``trainctl run``."""

import json
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.trainctl.conftest import Cli
from tests.training.sample_events import start, step
from tests.training.test_record import evaluation, finished, opened, tell
from trainctl.here import Here
from trainctl.ui.pages import Pages
from training import launch


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """One that is complete, one that trains, and one that was killed."""
    for name in ("complete", "trains", "killed"):
        kept = opened(tmp_path / name)
        tell(kept, start(), *map(step, range(1, 5)), evaluation(1))
        lease = tmp_path / name / "leases" / "00000001.json"
        lease.parent.mkdir()
        lease.write_text(json.dumps({"released": name == "complete"}))
        if name == "complete":
            tell(kept, finished())
            kept.close()
    os.utime(tmp_path / "killed" / "leases" / "00000001.json", (0, 0))
    progress = {"time": 1, "step": 4, "total_steps": 8}
    (tmp_path / "trains" / "progress.json").write_text(json.dumps(progress))
    return tmp_path


def test_views_of_jobs_show_the_runs_of_a_folder(runs: Path, cli: Cli) -> None:
    words = ("--runs", str(runs))
    states = {each["id"]: each["state"] for each in cli.json("ls", *words)}
    assert states == {"complete": "succeeded", "trains": "running", "killed": "failed"}
    assert [each["id"] for each in cli.json("ls --running", *words)] == ["trains"]
    shown = cli("show complete", *words).out
    assert f"trainctl predict {runs}/complete PICTURE" in shown
    assert "the same command resumes it" in cli("show killed", *words).out
    top = cli.json("top trains", *words)
    assert top["progress"]["step"] == 4
    assert top["curves"]["Loss"]["training"] == [[number, 1.0] for number in range(1, 5)]
    cli("report complete --no-browser --output", str(runs / "page.html"), *words)
    assert "Training report" in (runs / "page.html").read_text()
    assert "trainctl ls lists them" in cli.refuses("report", "none", *words)
    pages = Pages(Here(runs))
    assert b'href="jobs/trains"' in pages.page("", "/t/").content
    assert b"step 4/8" in pages.page("jobs/trains", "/t/").content


def test_a_recipe_trains_here_with_the_words_of_submit(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "main", lambda words: 70 + words.index("--local"))
    cli("run ddp --run mine --workers 2", code=75)
    assert "--max-hours is for jobs on AWS" in cli.refuses("run", "ddp", "--max-hours", "3")
    assert "did you mean --epochs?" in cli.refuses("run", "ddp", "--epohs", "3")
    assert "submit --code" in cli.refuses("run", "--code", ".", "--", "torchrun", "train.py")
    # Without torch
    monkeypatch.setitem(sys.modules, "training.predict", None)
    assert "not installed" in cli.refuses("predict", "r1", __file__)


def test_the_model_of_a_run_here_is_exported_and_asked_here(
    runs: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in ("export complete --to new", "generate complete text"):
        main = Mock(return_value=70)
        monkeypatch.setitem(sys.modules, f"training.{words.split()[0]}", Mock(main=main))
        cli(words, "--runs", str(runs), code=70)
        (asked,) = main.call_args.args
        assert {*words.split()[1:], "--storage", str(runs)} <= {*asked}
