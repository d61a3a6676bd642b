"""Progress of a run reaches its log and folder every half minute, or with each longer step."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from contract.instance_types import Prices, instance_type
from contract.job import JobSpec
from contract.nodes import ENV_JOB, ENV_JOB_SPEC, ENV_NUM_GPUS, ENV_TRAINS, Range
from store import storage
from tests.clock import FakeClock
from tests.training.sample_events import start, step
from tests.training.test_record import Silent, opened
from training.record import progress
from training.record.events import Event, Finished, Phase
from training.record.progress import Progress, Spending

PRICES = Prices.of(
    region="us-east-1",
    head=instance_type("m5.large"),
    worker=instance_type("g5.xlarge"),
    spot=False,
)


class Run:
    """A record, and a clock that passes with its steps."""

    def __init__(self, folder: Path, *, job: str = "", spending: Spending | None = None) -> None:
        self.clock, self.display, self.folder = FakeClock(1000.0), Silent(), folder
        self.last = 0
        self.record = opened(
            folder, display=self.display, job=job, spending=spending, clock=self.clock.time
        )
        self.record.handle(start())

    def report(self, *, steps: int, seconds: float) -> None:
        """A report of some steps that took so long together."""
        self.clock.now += seconds
        first, self.last = self.last + 1, self.last + steps
        found: list[Event] = [
            replace(step(n), time=self.clock.now) for n in range(first, self.last + 1)
        ]
        self.record.handle(*found)

    @property
    def reached(self) -> list[int]:
        return [each.step for each in self.display.reached]

    def written(self) -> Progress:
        return Progress.from_json(json.loads((self.folder / "progress.json").read_text()))


def test_fast_steps_have_a_line_every_half_minute(tmp_path: Path) -> None:
    run = Run(tmp_path / "r")
    for _ in range(100):
        run.report(steps=2, seconds=1.0)
    # Whole reports: the last step of each, and what is left at their rate.
    assert run.reached == [60, 120, 180]
    last = run.display.reached[-1]
    assert last.rate is not None
    assert last.rate.per_s == pytest.approx(2 * start().items_per_step)
    assert last.left_s == pytest.approx((start().total_steps - 180) / 2)
    assert run.written() == last


@pytest.mark.parametrize(
    ("num", "seconds", "lines"),
    [(4, 50.0, [1, 2, 3, 4]), (8, 3.0, [])],
    ids=["a line of its own for a long step", "none in a short run"],
)
def test_the_lines_of_single_steps(
    num: int, seconds: float, lines: list[int], tmp_path: Path
) -> None:
    run = Run(tmp_path / "r")
    for _ in range(num):
        run.report(steps=1, seconds=seconds)
        run.record.flush_in_time()  # the driver looks in meanwhile
    assert run.reached == lines
    assert (tmp_path / "r" / "progress.json").exists() == bool(lines)


def test_a_storage_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "r")

    def fail(*_: object, **__: object) -> None:
        raise OSError("SlowDown")

    monkeypatch.setattr(storage, "write_bytes", fail)
    run.report(steps=1, seconds=40.0)
    assert run.reached == [1]


def test_the_cost_so_far_follows_the_hosts_that_train() -> None:
    clock = FakeClock(1000.0)
    spending = Spending(PRICES, head_trains=False, clock=clock.time)
    head, worker = 0.096 + 9.8 / 730 + 0.05, 1.006 + 35 / 730
    clock.now += 360  # the head waits for its workers
    spending.set_hosts(("10.0.0.1", "10.0.0.1", "10.0.0.2"))
    clock.now += 3600
    assert spending.usd() == pytest.approx(1.1 * head + 2 * worker, abs=1e-5)
    spending.set_hosts(("10.0.0.1",))
    clock.now += 3600
    assert spending.usd() == pytest.approx(2.1 * head + 3 * worker, abs=1e-5)


def test_a_head_that_takes_over_counts_on_and_another_job_begins_anew(tmp_path: Path) -> None:
    usd = []
    for job in ("j1", "j1", "j2"):
        clock = FakeClock(1000.0)
        spending = Spending(PRICES, head_trains=False, clock=clock.time)
        run = Run(tmp_path / "r", job=job, spending=spending)
        run.record.handle(Phase(name="workers_ready", time=1.0, hosts=("10.0.0.1",)))
        clock.now += 3600
        run.report(steps=1, seconds=40.0)
        written = run.written()
        assert written.usd is not None
        usd.append(written.usd)
        run.record.handle(Finished(step=1, seconds=30.0))
        assert run.record.result is not None
        assert run.record.result.usd == pytest.approx(written.usd)
        assert run.record.result.total_seconds == 40
    assert usd[1] == pytest.approx(2 * usd[0])
    assert usd[2] == pytest.approx(usd[0])


def test_without_a_price_there_is_no_cost() -> None:
    prices = Prices.of(
        region="eu-west-1",
        head=instance_type("m5.large"),
        worker=instance_type("g5.xlarge"),
        spot=False,
    )
    assert Spending(prices, head_trains=False).usd() is None


@pytest.mark.parametrize(
    ("environment", "job", "counts"),
    [
        ({}, "", False),
        ({ENV_JOB: "j1", ENV_JOB_SPEC: "damaged"}, "j1", False),
        ({ENV_JOB: "j1", ENV_TRAINS: "1", ENV_NUM_GPUS: "4"}, "j1", True),
    ],
)
def test_the_environment_of_a_head_tells_its_job_and_its_prices(
    environment: Mapping[str, str], job: str, counts: bool
) -> None:
    spec = JobSpec(run="r", command=("x",), nodes=Range(1, 2), prices=PRICES)
    found = {ENV_JOB_SPEC: spec.to_json(), **environment} if counts else environment
    name, spending = progress.of_job(found)
    assert name == job
    assert (spending is not None) == counts


@pytest.mark.parametrize(
    ("reached", "line", "share"),
    [
        (
            Progress(time=1.0, step=1200, total_steps=20000, loss=2.31, left_s=7500.0, usd=3.2),
            "step 1,200/20,000, loss 2.3100, 2 h 5 min left, about $3.20 so far",
            "6%",
        ),
        (
            Progress(time=1.0, step=1, total_steps=3, loss=0.5),
            "step 1/3, loss 0.5000",
            "33%",
        ),
        # A program of the user's.
        (
            Progress(time=1.0, step=1200, step_s=0.5234),
            "1,200 steps, 0.5234 s/step",
            "1,200 steps",
        ),
        (Progress(time=1.0, step=1), "1 step", "1 step"),
    ],
)
def test_it_can_be_read_in_a_line(reached: Progress, line: str, share: str) -> None:
    assert (reached.line(), reached.share) == (line, share)
