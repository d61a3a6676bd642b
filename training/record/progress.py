"""Progress of a run: a line of a plain log, and as often ``progress.json`` in the bucket."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from contract.errors import InputError
from contract.instance_types import Prices
from contract.job import JobSpec
from contract.nodes import ENV_JOB, ENV_JOB_SPEC, Gpus
from contract.text import counted, duration, significant
from training.record.events import Start, Step
from training.record.fields import Rate, Rated, Record, number

#: Between two lines of a log. Steps that take longer have a line each.
EVERY_S: Final = 30.0
#: Reports of steps over which the rate is measured.
_REPORTS: Final = 13


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Record, Rated):
    """Progress of a run. ``progress.json``."""

    time: float
    """Unix time in seconds."""
    job: str = ""
    """Id of the job that trains it; empty without one."""
    step: int
    """Optimizer steps done; of a program of the user's, since it was last started."""
    total_steps: int = 0
    """The whole run's; 0 where that is not known, as of a program of the user's."""
    step_s: float | None = None
    """Seconds a step, of such a program."""
    epoch: int = 0
    """Epoch of that step, counted from 1."""
    epochs: int = 0
    """The whole run's; 0 where there are none."""
    loss: float | None = None
    """Loss of that step; None of such a program."""
    rate: Rate | None = None
    """Items per second of all workers together, over the last reports."""
    left_s: float | None = None
    """Seconds until the last step, at this rate, without evaluations to come; None before it is
    known."""
    usd: float | None = None
    """About what the job has cost so far, in US dollars at the list prices of its order; None where
    that is not known."""
    warning: str = ""
    """Probable fault of a user's program."""

    def brief(self, *more: str) -> str:
        """``epoch 2/8, step 1,200/20,000, 2,540 tokens/s``, with ``more`` before the rate;
        ``1,200 steps, 0.52 s/step`` of a program of the user's."""
        if not self.total_steps:
            pace = [] if self.step_s is None else [f"{significant(self.step_s)} s/step"]
            return ", ".join(filter(None, [self.share, *pace, self.warning]))
        parts = [f"epoch {self.epoch}/{self.epochs}"] if self.epochs > 1 else []
        parts += [f"step {self.step:,}/{self.total_steps:,}", *more, *speed(self.rate)]
        return ", ".join(parts)

    def line(self) -> str:
        """``step 1,200/20,000, loss 2.3100, 2,540 tokens/s, 2 h 5 min left, $3.20 so far``."""
        parts = [self.brief(*([] if self.loss is None else [f"loss {self.loss:.4f}"]))]
        if (left_s := number(self.left_s)) is not None:
            parts.append(f"{duration(round(left_s))} left")
        if self.usd is not None:
            parts.append(f"about ${self.usd:,.2f} so far")
        return ", ".join(parts)

    @property
    def share(self) -> str:
        """Share of the steps that are done: ``6%``; how many, where there is no total."""
        if not self.total_steps:
            return counted(self.step, "step")
        return f"{self.step / self.total_steps:.0%}"


def speed(rate: Rate | None) -> list[str]:
    """``1,234 images/s``; nothing where it was not measured."""
    if not rate or rate.per_s is None:
        return []
    per_s = f"{rate.per_s:,.0f}" if rate.per_s >= 10 else f"{rate.per_s:.2g}"
    return [f"{per_s} {rate.items}/s"]


def num_epochs(start: Start) -> int:
    """Epochs of a whole run, the last one maybe in part; 0 where there are none."""
    return -(-start.total_steps // start.steps_per_epoch) if start.steps_per_epoch else 0


class Pace:
    """Steps per second over the last dozen reports."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def add(self, event: Step) -> None:
        if self._seen and self._seen[-1][0] == event.time:
            self._seen[-1] = (event.time, event.step)
        else:
            self._seen = [*self._seen[1 - _REPORTS :], (event.time, event.step)]

    @property
    def steps_per_s(self) -> float | None:
        """None before the second report."""
        if len(self._seen) < 2:
            return None
        (t0, s0), (t1, s1) = self._seen[0], self._seen[-1]
        return (s1 - s0) / (t1 - t0) if t1 > t0 and s1 > s0 else None

    def progress(
        self, start: Start, last: Step, *, job: str = "", usd: float | None = None
    ) -> Progress:
        """Progress of a run after its last step."""
        per_s, rate, left_s = self.steps_per_s, None, None
        if per_s is not None:
            left_s = (start.total_steps - last.step) / per_s
            if start.items:
                rate = Rate(items=start.items, per_s=per_s * start.items_per_step)
        return Progress(
            time=time.time(),
            job=job,
            step=last.step,
            total_steps=start.total_steps,
            epoch=int(last.epoch),
            epochs=num_epochs(start),
            loss=last.loss,
            rate=rate,
            left_s=left_s,
            usd=usd,
        )


class Spending:
    """About what a job costs while it trains: the hosts that are there, since this process began.

    Hosts that come before training begins, and their start, are not in it: ``trainctl cost`` knows
    better, once ECS has told of the nodes' ends.
    """

    def __init__(
        self, prices: Prices, *, head_trains: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock``: seconds, from any beginning."""
        self._prices, self._head_trains, self._clock = prices, head_trains, clock
        self._at = clock()
        self._num_nodes = 0
        self._usd: float | None = 0.0

    def begin_with(self, usd: float) -> None:
        """Add what an earlier head of the same job has counted."""
        if self._usd is not None:
            self._usd += usd

    def set_hosts(self, hosts: tuple[str, ...]) -> None:
        """Take note of the node of each rank, by address."""
        self.usd()
        self._num_nodes = max(0, len({*hosts}) - self._head_trains)

    def usd(self) -> float | None:
        """US dollars so far; None where a price is missing."""
        now = self._clock()
        hourly = self._prices.usd_per_hour(self._num_nodes)
        if hourly is None or self._usd is None:
            self._usd = None
        else:
            self._usd += hourly * (now - self._at) / 3600
        self._at = now
        return self._usd


def of_job(environment: Mapping[str, str] = os.environ) -> tuple[str, Spending | None]:
    """Id of the job whose head this process runs on, and what counts its cost.

    Returns:
        "" and None without a job; no ``Spending`` where its order has no prices.
    """
    job, order = environment.get(ENV_JOB, ""), environment.get(ENV_JOB_SPEC, "")
    try:
        prices = JobSpec.from_json(order).prices if order else None
        head_trains = Gpus.from_environment(environment).on_head is not None
    except InputError:
        return job, None
    return job, Spending(prices, head_trains=head_trains) if prices else None
