"""A recipe is one folder and one entry in a list: a copy of the project gets a third one.

It is unlike the other two wherever a recipe may be: it is judged by an error of its own and has no
loss on held-out data, it trains on samples, its steps have other parts, it leaves no details of
its evaluation, and it has no model that could be kept.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow

RECORD = '''
"""Toy: the slope of a line, from samples that the recipe draws itself."""

from dataclasses import dataclass
from typing import Final

from training.recipe import ModelForm, Recipe
from training.settings import TrainingConfig, option
from training.record.events import Measure

MEAN_ERROR: Final = Measure(name="mean_error", unit="mm", higher_is_better=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig(TrainingConfig):
    batch: int = option(32, low=2, help="samples per step")
    lr: float = option(0.5, above=0, help="learning rate")
    error_limit: float = option(0.0, low=0, help="largest mean error (0: any)")
    fault: str = option("", same_on_resume=False, help="what the second rank fails with")


RECIPE: Final = Recipe(
    name="toy",
    config=ToyConfig,
    presets={"plain": {"epochs": 4, "report_every": 5}, "slow": {"lr": 0.1}},
    built_in_data="a line",
    built_in_preset="plain",
    data_help="none: it draws its own",
    loop="training.toy.train",
    measures=(MEAN_ERROR,),
    model=ModelForm.NONE,
)
'''

LOOP = '''
"""The toy recipe's loop: one weight, trained by SGD."""

import time

import torch
import torch.distributed as dist
from torch import nn

from training.loop import metrics
from training.record.events import Finished

SLOPE = 2.0


def train(worker, config):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    course = metrics.Course(
        items="samples",
        items_per_step=config.batch,
        global_batch=config.batch,
        steps_per_epoch=10,
        total_steps=10 * config.epochs,
        learning_rate=lambda step: config.lr,
        flops_per_item=6.0,
        world_size=worker.world_size,
        device=worker.device,
    )
    worker.emit(course.start(model, step=0, parameters=1, bf16=False))
    timer = metrics.StepTimer(("draw", "fit", "communication"), worker.device)
    log = metrics.StepLog(worker.device)
    began = time.monotonic()
    for step in range(course.total_steps):
        timer.start()
        torch.manual_seed(step)
        samples = torch.rand(config.batch, 1)[worker.rank :: worker.world_size]
        timer.mark("draw")
        loss_sum = (model(samples) - SLOPE * samples).square().sum()
        (loss_sum / config.batch).backward()
        timer.mark("fit")
        dist.all_reduce(model.weight.grad)
        timer.mark("communication", items=len(samples))
        norm = model.weight.grad.norm()
        optimizer.step()
        optimizer.zero_grad()
        log.add(loss_sum=loss_sum, norm=norm, size=config.batch)
        if worker.rank == 1 and step == 12 and config.fault:
            raise ValueError(config.fault)
        num_done = step + 1
        if num_done % config.report_every:
            continue
        steps, _ = log.collect(stop=worker.stop_requested())
        worker.emit(*course.steps(steps, last=num_done))
        if num_done % 10:
            continue
        error = 0.5 * abs(model.weight.item() - SLOPE)
        figures = {"mean_error": error}
        seconds = time.monotonic() - began
        ranks = course.ranks(timer.means(), step=num_done, epoch=num_done // 10)
        evaluation = course.evaluation(
            ranks, measures=figures, train_loss=steps[-1].loss, seconds=seconds
        )
        worker.emit(*ranks, evaluation)
    short = None
    if config.error_limit and error > config.error_limit:
        short = f"the mean error is {error:.2g} mm, above --error-limit {config.error_limit}"
    worker.emit(
        Finished(
            step=course.total_steps, measures=figures, seconds=seconds, shortfall=short
        )
    )
'''

CHECK = """
import sys
from contract.errors import InputError
from contract.nodes import Range
from training.command import read_command

for words in (["toy", "--lr", "2"], ["toy", "--lr", "0"], ["tot"]):
    try:
        print(read_command(words, run="r", workers=Range(1, 4)).lr)
    except InputError as error:
        print(error)
assert "torch" not in sys.modules
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project with one more folder, and one more entry in the list."""
    folder = tmp_path / "project"
    for package in ("contract", "store", "training", "trainctl"):
        shutil.copytree(ROOT / package, folder / package)
    toy = folder / "training" / "toy"
    toy.mkdir()
    (toy / "__init__.py").write_text(RECORD)
    (toy / "train.py").write_text(LOOP)
    recipes = folder / "training" / "recipes.py"
    text = recipes.read_text()
    longer = re.sub(r"(?m)^(ALL: Final = \(.*)\)$", r"\1, TOY)", text)
    assert longer != text
    recipes.write_text(longer.replace("\nALL", "from training.toy import RECIPE as TOY\n\nALL", 1))
    return folder


def python(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_a_third_recipe_trains_is_checked_is_listed_and_has_a_report(project: Path) -> None:
    launch = ("-m", "training.launch", "toy", "--local", "--workers", "2")
    launched = python(project, *launch, "--run", "r")
    assert launched.returncode == 0, launched.stderr
    assert "mean error" in launched.stdout

    result = json.loads((project / "runs" / "r" / "result.json").read_text())
    assert (result["recipe"], result["status"], result["steps"]) == ("toy", "succeeded", 40)
    assert (result["world_size"], result["loss"]) == (2, None)
    assert 0 < result["mean_error"] < 0.1, "it has learned the slope"
    assert result["samples_per_s"] > 0
    assert not {"accuracy", "perplexity"} & {*result}
    lines = (project / "runs" / "r" / "metrics.jsonl").read_text().splitlines()
    times = [each for each in map(json.loads, lines) if each["type"] == "rank"]
    assert len(times) == 8
    assert all(each["phases"] == ["draw", "fit", "communication"] for each in times)

    report = (project / "runs" / "r" / "report.html").read_text()
    assert "<dt>mean error</dt>" in report
    for word in ("Accuracy", "Perplexity", "Confusion", "forward"):
        assert word not in report

    exported = python(project, "-m", "training.export", "r", "--to", "model")
    assert exported.returncode == 2

    checked = python(project, "-c", CHECK)
    taken, refused, unknown = checked.stdout.splitlines()
    assert (taken, "--lr" in refused, "toy" in unknown) == ("2.0", True, True)

    listed = python(project, "-m", "trainctl", "settings", "toy", "--preset", "slow", "--json")
    assert json.loads(listed.stdout)["--lr"]["default"] == 0.1

    short = python(project, *launch, "--run", "short", "--error-limit", "1e-9", "--json")
    result = json.loads(short.stdout)
    assert (short.returncode, result["status"]) == (1, "failed")
    assert 0 < result["mean_error"] < 0.1


@pytest.mark.long
def test_a_bug_is_tried_again_and_has_a_log(project: Path) -> None:
    launch = ("-m", "training.launch", "toy", "--local", "--workers", "2", "--max-failures", "1")
    bug = python(project, *launch, "--run", "bug", "--fault", "the labels are wrong")
    assert bug.returncode == 1, bug.stderr
    again = "worker 1 failed (ValueError: the labels are wrong): all start again"
    assert bug.stderr.count(again) == 1, "one failure in a row is allowed"
    last = bug.stderr.splitlines()[-1]
    assert last.startswith("error: run 'bug' failed; what its workers printed is in ")
    logs = Path(
        last.removesuffix(". The same command resumes it from its last checkpoint").split()[-1]
    )
    assert "ValueError: the labels are wrong" in (logs / "rank-1.log").read_text()
    shutil.rmtree(logs)
    result = json.loads((project / "runs" / "bug" / "result.json").read_text())
    assert result["status"] == "failed"
    assert "train.py" in result["error"], "the traceback"
