"""Proves that people see every kind of run as it goes, on a terminal and in a log."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from tests.training.sample_events import start, step
from tests.training.test_report import RESULT
from training import recipes
from training.record.display import Display, result_table
from training.record.events import (
    ACCURACY,
    Evaluation,
    Event,
    Loaded,
    Measure,
    RankTimes,
    phase,
)
from training.record.fields import Rate
from training.record.progress import Progress

START = start()
BANDWIDTH = Measure(name="bus_bandwidth", unit="GB/s")
IMAGES = Rate(items="images", per_s=1234.5)
TOKENS = Rate(items="tokens", per_s=98765.4)


@pytest.mark.parametrize(
    ("event", "figures"),
    [
        (START, ["1,200", "2", "CPU", "fp32", "64 images"]),
        (
            Evaluation(
                step=4, epoch=1, loss=0.5, measures={"accuracy": 0.9}, train_loss=0.6, rate=IMAGES
            ),
            ["epoch 1", "0.6000", "0.5000", "90.00%", "1,234 images/s"],
        ),
        (
            Evaluation(step=1000, epoch=0.25, loss=4.0, measures={"perplexity": 8103.1}),
            ["epoch 0.25", "1,000", "4.0000", "8,103"],
        ),
        (Evaluation(step=3, epoch=0, measures={"bus_bandwidth": 92.44}), ["3", "92.44 GB/s"]),
        (Loaded(step=1000, loss=4.0), ["1,000", "4.0000"]),
        (step(1), []),
    ],
)
def test_a_log_has_a_line_with_the_figures_of_what_happened(
    event: Event, figures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    display = Display([BANDWIDTH, ACCURACY])
    for before in (phase("workers_ready", hosts=["10.0.1.7", "10.0.1.8"]), START):
        display.show(before)
    capsys.readouterr()
    display.show(event)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", bool(figures))
    assert [each for each in figures if each not in err] == []


def test_a_log_has_a_line_of_how_far_the_run_is(capsys: pytest.CaptureFixture[str]) -> None:
    reached = Progress(time=1.0, step=1200, total_steps=20000, loss=2.31, rate=TOKENS)
    Display().progress(reached)
    assert "1,200/20,000" in capsys.readouterr().err


def test_a_terminal_shows_how_fast_it_goes_and_what_is_left() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, _environ={})
    display = Display(console=console)
    rank = RankTimes(step=4, epoch=1, rank=1, step_time_s=0.25)
    scored = Evaluation(step=4, epoch=1, loss=1.0)
    events: list[Event] = [START, *map(step, range(1, 5)), rank, scored]
    for event in events:
        display.show(event)
        display._progress.refresh()
    display.progress(Progress(time=1.0, step=4, total_steps=8, loss=2.31))
    display.close()
    text = file.getvalue()
    for figures in ("epoch 1/2", "step 4/8", "64 images/s", "4 s", "250.0 ms/step"):
        assert figures in text
    assert "2.31" not in text, "the bar shows it already"


def rank_lines(
    capsys: pytest.CaptureFixture[str],
    *seconds: float,
    device: str = "CPU",
    hosts: tuple[str, ...] = (),
    verbose: bool = False,
) -> list[str]:
    """What a log has of an epoch with a smaller last batch, by the time per step of each rank."""
    display = Display(verbose=verbose)
    display.show(phase("workers_ready", hosts=hosts))
    display.show(replace(start(), device=device, world_size=len(seconds)))
    capsys.readouterr()
    for rank, step_time_s in enumerate(seconds):
        display.show(
            RankTimes(
                step=4,
                epoch=1,
                rank=rank,
                steps=4,
                items_per_step=30.5,
                step_time_s=step_time_s,
                rate=IMAGES,
            )
        )
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("seconds", "more", "places"),
    [
        ((0.1, 0.105), {"hosts": ("localhost", "localhost")}, ["each rank (CPU, localhost)"]),
        ((0.1, 0.12), {"hosts": ("localhost", "localhost")}, ["rank 0 ", "rank 1 "]),
        ((0.1, 0.1), {"verbose": True}, ["rank 0 ", "rank 1 "]),
        ((0.1, 0.1), {"hosts": ("10.0.1.7", "10.0.1.8")}, ["rank 0 ", "rank 1 "]),
        (
            (0.1, 0.1, 0.1),
            {"device": "NVIDIA A10G", "hosts": ("10.0.1.7", "10.0.1.7", "10.0.1.8")},
            ["[GPU0: rank 0]", "[GPU1: rank 1]", "[GPU0: rank 2]"],
        ),
    ],
    ids=["alike", "different", "verbose", "two hosts", "GPUs"],
)
def test_ranks_have_a_line_each_unless_those_of_one_cpu_are_alike(
    seconds: tuple[float, ...],
    more: dict[str, Any],
    places: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = rank_lines(capsys, *seconds, **more)
    assert [place in line for place, line in zip(places, lines, strict=True)] == [True] * len(lines)


def test_a_log_shows_every_ten_seconds_that_a_phase_is_not_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    display = Display(clock=lambda: now[0])
    display.phase("loading PyTorch")
    for second in range(26):
        now[0] = float(second)
        display.phase(f"reading the data: {second}%", transient=True)
        display.wait()
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "loading PyTorch",
        "still reading the data: 10%, 10 s",
        "still reading the data: 20%, 20 s",
    ]


def test_the_result_is_a_table_for_people() -> None:
    result = replace(
        RESULT,
        recipe="fsdp",
        measures={"perplexity": 54.6},
        loss=4.0,
        seconds=185.0,
        total_seconds=190.4,
        usd=0.351,
        rate=TOKENS,
        resumed_from=500,
        preempted=1,
        skipped_steps=3,
        mfu=0.25,
        memory_bytes=None,
        device="NVIDIA A10G",
    )
    folder = f"/{'deep/' * 30}r"
    table = result_table(result, recipes.by_name("fsdp").places(folder))
    assert [line.split("  ")[0] for line in table.splitlines()] == [
        *("run", "perplexity", "evaluation loss", "throughput", "steps", "skipped", "preempted"),
        *("training time", "with start-up", "cost", "MFU", "GPU utilization"),
        *("report", "export"),
    ]
    assert folder in table, "it can be copied"
    for words in ("98,765", "500", "25.0%", "0.35"):
        assert words in table
