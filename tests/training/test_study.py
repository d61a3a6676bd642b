"""What a scaling study tells: efficiency, cost, where the time goes, and the bottleneck."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from contract.errors import InputError
from contract.nodes import numbers_of
from tests.conftest import ROOT
from training.record.events import Event, Metrics, RankTimes, Step, parse_metrics, to_json
from training.record.fields import Rate
from training.study import draw
from training.study.__main__ import main
from training.study.series import COMPARED, MEASURED, NOT_MEASURED, Point, Series, command_of, text

STEPS_PER_EPOCH = 100


def record(*events: Event) -> Metrics:
    return parse_metrics(b"".join(json.dumps(to_json(each)).encode() + b"\n" for each in events))


def stretch(
    epoch: int,
    workers: int,
    phases: Mapping[str, float],
    *,
    communication_s: float | None = None,
    slowest_s: float = 0.0,
) -> list[Event]:
    """An epoch's times; the last rank is slower than the others by ``slowest_s``."""
    steps_per_epoch = STEPS_PER_EPOCH // workers
    return [
        RankTimes(
            step=epoch * steps_per_epoch,
            epoch=epoch,
            rank=rank,
            step_time_s=sum(phases.values()) + slowest_s * (rank == workers - 1),
            phases=phases,
            communication_s=communication_s,
            rate=Rate(items="images", per_s=64 / sum(phases.values())),
        )
        for rank in range(workers)
    ]


def point(
    workers: int,
    *,
    data: float = 0.01,
    forward: float = 0.03,
    backward: float = 0.05,
    optimizer: float = 0.01,
    communication_s: float | None = None,
    slowest_s: float = 0.0,
    usd_per_hour: float | None = None,
) -> Point:
    phases = {"data": data, "forward": forward, "backward": backward, "optimizer": optimizer}
    warm_up = {name: 5 * seconds for name, seconds in phases.items()}
    events = stretch(1, workers, warm_up) + stretch(
        2, workers, phases, communication_s=communication_s, slowest_s=slowest_s
    )
    return Point.of(record(*events), run=f"r-{workers}", usd_per_hour=usd_per_hour)


def series(*points: Point) -> Series:
    return Series(recipe="ddp", points=points)


def test_known_times_give_the_known_efficiency() -> None:
    # A step takes 0.1 s with one worker, and 0.125 s with four, each of which does a quarter of
    # the steps: 10 s an epoch become 3.125 s, where 2.5 s would be ideal.
    found = series(
        point(4, backward=0.075, usd_per_hour=8.0), point(1, usd_per_hour=2.0)
    )  # in any order
    one, four = found.points
    assert [each.workers for each in found.points] == [1, 4]
    assert one.epoch_s == pytest.approx(10)
    assert four.epoch_s == pytest.approx(3.125)
    assert found.ideal_epoch_s(four) == pytest.approx(2.5)
    assert found.efficiency(one) == 1
    assert found.efficiency(four) == pytest.approx(0.8)
    assert one.usd_per_epoch == pytest.approx(2 * 10 / 3600)
    assert four.usd_per_epoch == pytest.approx(8 * 3.125 / 3600)
    assert four.items_per_s == pytest.approx(4 * 64 / 0.125)


def test_the_first_slower_epoch_does_not_count() -> None:
    assert point(2).step_s == pytest.approx(0.1)
    only = Point.of(record(*stretch(1, 2, {"data": 0.5})), run="r")
    assert only.has_warm_up
    assert "take more for a figure" in " ".join(series(only).notes())


def test_in_a_single_stretch_the_steps_of_the_first_report_do_not_count() -> None:
    steps = [(10, 100.0), (20, 101.0), (30, 102.0), (40, 103.0)]  # 0.1 s each, and no first ones
    events: list[Event] = [
        Step(step=step, epoch=1, loss=1.0, lr=0.1, grad_norm=1.0, time=time) for step, time in steps
    ]
    events += stretch(1, 1, {"data": 0.04, "forward": 0.16})
    found = Point.of(record(*events), run="r")
    assert found.step_s == pytest.approx(0.1)
    assert found.phases == pytest.approx({"data": 0.02, "forward": 0.08})
    assert not found.has_warm_up


def test_what_backward_waits_is_told_from_computing_that_is_slower_itself() -> None:
    # Two workers share a machine: forward takes twice as long, and so would backward.
    found = series(point(1), point(2, forward=0.06, backward=0.12, optimizer=0.02))
    split = found.split(found.points[1])
    assert split.source == COMPARED
    assert split.communication == pytest.approx(0.12 - 2 * 0.05)
    assert split.compute == pytest.approx(0.06 + 0.1 + 0.02)
    assert split.data == pytest.approx(0.01)
    assert split.other == pytest.approx(0)
    assert "~20 ms" in text(found)


def test_measured_communication_is_shown_as_it_was_measured() -> None:
    found = series(point(2, communication_s=0.02), point(4, backward=0.15, communication_s=0.08))
    split = found.split(found.points[1])
    assert split.source == MEASURED
    assert split.communication == pytest.approx(0.08)
    assert split.compute == pytest.approx(0.03 + 0.15 + 0.01)  # it ran beside communication
    lost = found.lost(found.points[1])
    # 0.1 s a step more, for each of 4 workers and 25 steps: of that, 0.08 s had a collective.
    assert lost["communication"] == pytest.approx(0.08 * 100)
    assert lost["compute"] == pytest.approx(0.02 * 100)


def test_processors_that_two_workers_share_are_not_taken_for_communication() -> None:
    # Two workers compute half as fast each, and backward waits 0.01 s on top of that; their
    # collectives, which need the processors as well, are at work for much longer.
    found = series(
        point(1, communication_s=0.0),
        point(2, forward=0.06, backward=0.11, optimizer=0.02, communication_s=0.09),
    )
    lost = found.lost(found.points[1])
    steps = 2 * STEPS_PER_EPOCH / 2
    assert lost["communication"] == pytest.approx(0.01 * steps)
    assert lost["compute"] == pytest.approx((0.06 + 0.1 + 0.02 - 0.09) * steps)
    assert "is computing" in found.bottleneck()


def test_what_was_not_measured_says_so() -> None:
    found = series(point(2), point(4, backward=0.15))
    split = found.split(found.points[1])
    assert (split.source, split.communication) == (NOT_MEASURED, None)
    assert text(found).count(NOT_MEASURED) == 2
    assert "which the record does not tell apart" in found.bottleneck()
    assert "the price of these hosts is not known here" in text(found)


@pytest.mark.parametrize(
    ("largest", "said"),
    [
        (point(4, backward=0.15), "is communication: efficiency is 0.5, and 100% of the lost"),
        (point(4, data=0.11), "is reading data: efficiency is 0.5, and 100% of the lost"),
        (point(4, forward=0.08, backward=0.1), "is computing: efficiency is 0.5"),
        (point(4, slowest_s=0.1), "is waiting for saves and for slower workers"),
        (point(4, forward=0.01), "was slower than it should be: from 1 to 4 workers"),
        (point(4), "Nothing holds it back from 1 to 4 workers: efficiency 1; the largest part"),
    ],
    ids=["communication", "data", "compute", "slower worker", "slow base", "nothing"],
)
def test_the_bottleneck_is_where_most_time_is_lost(largest: Point, said: str) -> None:
    sentence = series(point(1), largest).bottleneck()
    assert said in sentence
    assert len(re.findall(r"\.(?:\s|$)", sentence)) == 1, "one sentence"


def test_a_single_number_of_workers_is_no_series() -> None:
    assert series(point(2)).bottleneck() == (
        "One number of workers tells nothing about scaling; the largest part of a step is "
        "computing (90%)."
    )


def test_a_run_without_times_is_refused_by_its_name() -> None:
    with pytest.raises(InputError, match="run r-9 has no times of steps"):
        Point.of(record(), run="r-9")


def test_figures_and_picture_are_written(tmp_path: Path) -> None:
    found = series(point(1), point(2))
    figures, picture = draw.write([found], tmp_path / "new")
    (written,) = json.loads(figures.read_text())
    assert written == json.loads(json.dumps(found.to_json()))
    assert [each["efficiency"] for each in written["points"]] == [1, pytest.approx(1)]
    assert picture.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="give another --output"):
        draw.write([found], tmp_path / "file")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bandwidth"], "bandwidth trains nothing"),
        (["ddp", "--workers", "2,0"], "--workers is '2,0': give numbers with commas"),
        (["ddp", "--steps", "0"], "--steps is 0: it must be at least 1"),
        (["ddp", "--", "--epoch", "3"], "unknown option --epoch: did you mean --epochs?"),
        (["ddp", "--", "--run", "x"], "--run is not an option"),
        (["ddp", "--workers", "1,4", "--", "--global-batch", "16"], "too small for 4 workers"),
        (["ddp", "--name", "a/b"], "run name 'a/b' is not usable"),
    ],
)
def test_mistakes_are_refused_before_anything_trains(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_numbers_are_sorted_and_each_is_there_once() -> None:
    assert numbers_of("4, 1,2,2", option="--nodes") == [1, 2, 4]


def test_steps_become_a_setting_of_the_recipe() -> None:
    assert command_of("ddp", ["--preset", "digits"], steps=40) == [
        *("ddp", "--preset", "digits", "--max-steps", "40")
    ]


@pytest.mark.long
@pytest.mark.slow
def test_a_study_of_local_workers_has_table_figures_and_picture(tmp_path: Path) -> None:
    # The second run ends within an epoch, as runs of so many steps do.
    command = [sys.executable, "-m", "training.study", "ddp", "--workers", "1,2", "--steps", "60"]
    ran = subprocess.run(
        [*command, "--name", "mine", "--", "--preset", "digits"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    (found,) = json.loads((tmp_path / "mine" / draw.FIGURES_FILE).read_text())
    one, two = found["points"]
    assert (one["workers"], two["workers"]) == (1, 2)
    # 1,438 images in batches of 32 a worker: 45 steps an epoch, and 23.
    assert one["steps_per_epoch"] == pytest.approx(45)
    assert two["steps_per_epoch"] == pytest.approx(23)
    assert two["efficiency"] == pytest.approx(one["epoch_s"] / two["epoch_s"] / 2)
    assert two["split_s"]["source"] == MEASURED
    assert found["bottleneck"] in ran.stdout
    assert "efficiency" in ran.stdout.splitlines()[0]
    assert (tmp_path / "mine" / draw.PICTURE_FILE).read_bytes().startswith(b"\x89PNG")
