"""Proves that DDP is gone when its process group is destroyed, in the examples and in the recipes.

Freed afterwards it can deadlock: it holds Python's lock while it waits for a thread of gloo that
waits for the lock. That is rare, so these tests look for what is alive instead of for a hang.
"""

import gc
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests import forks
from tests.conftest import ROOT
from training.runtime.torchrun import TorchrunWorker


def living() -> int:
    """Number of DDP models in this process."""
    return sum(issubclass(type(each), DistributedDataParallel) for each in gc.get_objects())


def watch() -> list[int]:
    """Count DDP models from now on: whenever one is made, and when the process group ends."""
    found: list[int] = []
    destroy: Any = dist.destroy_process_group
    make: Any = DistributedDataParallel.__init__

    def counted(model: Any, *arguments: Any, **named: Any) -> None:
        make(model, *arguments, **named)
        found.append(living())

    def destroyed(*arguments: Any) -> None:
        found.append(living())
        destroy(*arguments)

    patch.object(DistributedDataParallel, "__init__", counted).start()
    patch.object(dist, "destroy_process_group", destroyed).start()
    return found


def run_example(folder: str, arguments: tuple[str, ...]) -> None:
    os.chdir(folder)
    sys.argv = ["train.py", *arguments]
    found = watch()
    runpy.run_path("train.py", run_name="__main__")
    assert found == [1, 0], "DDP models when one was made, and when the process group ended"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ddp", ("--steps", "2")),
        ("accelerate", ("--epochs", "1")),
    ],
)
def test_an_example_frees_ddp_before_its_process_group(
    name: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / name
    shutil.copytree(ROOT / "examples" / name, folder)
    forks.run(2, run_example, str(folder), arguments)


def test_every_example_that_destroys_its_process_group_is_looked_at() -> None:
    programs = (ROOT / "examples").glob("*/train.py")
    ends = ("destroy_process_group(", ".end_training(", "trainer.end(")
    ending = {each.parent.name for each in programs if any(end in each.read_text() for end in ends)}
    # Hugging Face's Trainer keeps its model of DDP, so that example ends the group of NCCL only.
    assert ending == {"ddp", "accelerate", "hf_trainer"}


def fail(model: nn.Module) -> None:
    """Fail as a recipe does when it explains an error: the first error holds a frame as well."""
    try:
        loss = model(torch.ones(1, 2)).sum()
        raise ZeroDivisionError(float(loss))
    except ZeroDivisionError:
        raise ValueError("explained") from None


def train(how: str) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    if how == "in a cycle":
        model.itself = [model]  # type: ignore[assignment]
    if how == "after an error":
        fail(model)


def end_worker(how: str) -> None:
    found = watch()
    worker = TorchrunWorker(run_uri="/run")
    try:
        try:
            train(how)
        finally:
            worker.close()
    except ValueError:
        assert how == "after an error"
    assert found == [1, 0]


@pytest.mark.parametrize("how", ["after an error", "in a cycle"])
def test_a_recipe_under_torchrun_frees_ddp_before_its_process_group(how: str) -> None:
    forks.run(1, end_worker, how)
