"""Every recipe saves a checkpoint when one is due by the clock, beside those of its own."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import start_processes

from contract.runs import RunPaths
from tests import forks
from tests.training.test_data import write_images
from training import recipes
from training.checkpoint import checkpoints
from training.data import sources
from training.recipes.bookkeeping import Timetable
from training.recipes.ddp.settings import DdpConfig
from training.recipes.fsdp.settings import FsdpConfig
from training.recipes.settings import RunConfig
from training.runtime.torchrun import TorchrunWorker

#: Always over by the next report.
AT_ONCE = 1e-9


def ddp(folder: Path) -> RunConfig:
    """Three steps, an epoch."""
    return DdpConfig(
        recipe="ddp",
        run="d",
        storage=str(folder),
        data=str(write_images(folder / "data", num_train=96, num_test=10)),
        epochs=1,
        global_batch=32,
        report_every=1,
        checkpoints_to_keep=9,
        checkpoint_minutes=AT_ONCE,
    )


def fsdp(folder: Path) -> RunConfig:
    """Three steps of a longer epoch."""
    text = folder / "text.txt"
    text.write_text("".join(f"Line {n} of it.\n\n" for n in range(400)))
    return FsdpConfig(
        recipe="fsdp",
        run="f",
        storage=str(folder),
        data=str(text),
        seq_len=32,
        global_batch=4,
        max_steps=3,
        eval_sequences=2,
        sample_tokens=0,
        report_every=1,
        checkpoints_to_keep=9,
        checkpoint_minutes=AT_ONCE,
    )


def trained(_rank: int, port: int, cache: Path, configs: Sequence[RunConfig]) -> None:
    os.environ[sources.CACHE_VARIABLE] = str(cache)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for config in configs:
        recipe = recipes.by_name(config.recipe)
        uri = RunPaths.of(config.storage, config.run).uri
        worker = TorchrunWorker(run_uri=uri)
        recipe.train()(worker, recipe.prepare(config))
        worker.close()
        names = checkpoints.names(uri)
        assert names == [f"step-{step:08}" for step in (1, 2, 3)], (config.recipe, names)


@pytest.mark.slow
def test_recipes_save_at_any_report_at_which_a_checkpoint_is_due(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = (port, tmp_path / "cache", [ddp(tmp_path), fsdp(tmp_path)])
    start_processes(trained, args=arguments, nprocs=1, start_method=forks.METHOD)


def test_a_checkpoint_is_due_when_its_time_has_passed_since_the_last() -> None:
    now = [100.0]
    timetable = Timetable(15, clock=lambda: now[0])
    never = Timetable(0, clock=lambda: now[0])
    now[0] += 899
    assert not timetable.is_due()
    now[0] += 1
    assert timetable.is_due()
    assert not never.is_due()
    timetable.saved()
    assert not timetable.is_due()
    now[0] += 900
    assert timetable.is_due()


@pytest.mark.parametrize(
    ("total", "per_epoch", "given", "every"),
    [
        (20_000, 20_000, 0, 1000),  # 20 times
        (600, 600, 0, 50),
        (30, 30, 0, 30),  # a short run: as before, at the end
        (100, 20, 0, 20),  # every epoch
        (20_000, 20_000, 25, 25),
    ],
)
def test_a_long_run_is_evaluated_twenty_times_unless_it_is_told_how_often(
    total: int, per_epoch: int, given: int, every: int
) -> None:
    config = FsdpConfig(recipe="fsdp", run="r", storage="/s", data="x", evaluate_every=given)
    assert config.steps_between_evaluations(total, per_epoch) == every
