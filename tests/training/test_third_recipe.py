"""A recipe is one folder and one entry in a list: a copy of the project gets a third one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

RECORD = '''
"""Toy: which of ten symbols follows which, in a text that the recipe makes itself."""

from dataclasses import dataclass
from typing import Final

from training.recipes.recipe import Recipe
from training.recipes.settings import RunConfig, option


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig(RunConfig):
    batch: int = option(32, low=2, help="symbols per step")
    lr: float = option(0.5, above=0, help="learning rate")


RECIPE: Final = Recipe(
    name="toy",
    config=ToyConfig,
    presets={"plain": {"epochs": 4, "report_every": 5}, "slow": {"lr": 0.1}},
    built_in_data="counting",
    built_in_preset="plain",
    data_help="none: it makes its own",
    loop="training.recipes.toy.loop",
)
'''

LOOP = '''
"""The toy recipe's loop: a table of ten by ten, trained by SGD."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from training import metrics
from training.record.events import Evaluation, Finished
from training.record.result import HeldOutText


def train(worker, config):
    torch.manual_seed(config.seed)
    model = nn.Embedding(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    course = metrics.Course(
        items="symbols",
        items_per_step=config.batch,
        global_batch=config.batch,
        steps_per_epoch=10,
        total_steps=10 * config.epochs,
        learning_rate=lambda step: config.lr,
        flops_per_item=600.0,
        world_size=worker.world_size,
        device=worker.device,
    )
    worker.emit(course.start(model, step=0, resumed=False, parameters=100, bf16=False))
    timer = metrics.StepTimer(("data", "forward", "backward", "optimizer"), worker.device)
    log = metrics.StepLog(worker.device)
    clock = metrics.Clock(earlier_s=0.0)
    for step in range(course.total_steps):
        timer.start()
        symbols = (torch.arange(config.batch) + step)[worker.rank :: worker.world_size]
        timer.mark("data")
        loss_sum = F.cross_entropy(model(symbols % 10), (symbols + 1) % 10, reduction="sum")
        timer.mark("forward")
        (loss_sum / config.batch).backward()
        dist.all_reduce(model.weight.grad)
        timer.mark("backward")
        norm = model.weight.grad.norm()
        optimizer.step()
        optimizer.zero_grad()
        log.add(loss_sum=loss_sum, norm=norm, size=config.batch)
        timer.mark("optimizer", items=len(symbols))
        if (step + 1) % config.report_every:
            continue
        steps, _ = log.collect(stop=worker.stop_requested())
        worker.emit(*course.steps(steps, last=step + 1))
    loss = F.cross_entropy(model(torch.arange(10)), (torch.arange(10) + 1) % 10).item()
    perplexity = metrics.perplexity(loss)
    ranks = course.ranks(timer.means(), step=course.total_steps, epoch=config.epochs)
    evaluation = course.evaluation(
        ranks, loss=loss, train_loss=loss, seconds=clock.seconds(), perplexity=perplexity
    )
    assert isinstance(evaluation, Evaluation)
    worker.emit(*ranks, evaluation)
    worker.emit(
        Finished(
            step=course.total_steps,
            loss=loss,
            perplexity=perplexity,
            seconds=clock.seconds(),
            evaluation=HeldOutText(
                loss=loss, perplexity=perplexity, unigram_loss=2.3, num_tokens=10
            ),
        )
    )
'''

CHECK = """
import sys
from contract.errors import InputError
from contract.ranges import Range
from training.recipes.command import read_command

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
    for package in ("contract", "training", "trainctl"):
        shutil.copytree(ROOT / package, folder / package)
    recipes = folder / "training" / "recipes"
    (recipes / "toy").mkdir()
    (recipes / "toy" / "__init__.py").write_text(RECORD)
    (recipes / "toy" / "loop.py").write_text(LOOP)
    text = (recipes / "__init__.py").read_text()
    assert "(DDP, FSDP)" in text
    entry = "from training.recipes.toy import RECIPE as TOY\n\nALL"
    (recipes / "__init__.py").write_text(
        text.replace("(DDP, FSDP)", "(DDP, FSDP, TOY)").replace("\nALL", entry, 1)
    )
    return folder


def python(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_third_recipe_trains_is_checked_is_listed_and_has_a_report(project: Path) -> None:
    launched = python(
        project, *("-m", "training.launch", "toy", "--local", "--workers", "2"), "--run", "r"
    )
    assert launched.returncode == 0, launched.stderr
    result = json.loads((project / "runs" / "r" / "result.json").read_text())
    assert (result["recipe"], result["status"], result["steps"]) == ("toy", "succeeded", 40)
    assert result["world_size"] == 2
    assert result["perplexity"] < 9, "it has learned which symbol comes next"
    report = (project / "runs" / "r" / "report.html").read_text()
    assert "recipe toy" in report
    assert "Perplexity" in report

    checked = python(project, "-c", CHECK)
    assert checked.stdout.splitlines() == [
        "2.0",
        "--lr is 0.0: it must be greater than 0",
        "unknown recipe 'tot': did you mean toy?",
    ], checked.stderr

    listed = python(project, "-m", "trainctl", "settings", "toy", "--preset", "slow", "--json")
    settings = json.loads(listed.stdout)
    assert settings["--batch"] == {"default": 32, "help": "symbols per step"}
    assert settings["--lr"]["default"] == 0.1
