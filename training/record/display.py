"""What a person sees while a run trains: a live bar on a terminal, plain lines elsewhere.

All of it goes to stderr; stdout is for results.
"""

import math
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from contract.text import duration
from training.record.events import (
    Evaluation,
    Event,
    Loaded,
    Preempted,
    RankTimes,
    Start,
    Step,
    Warned,
)
from training.record.fields import Rate
from training.record.result import Result


class LiveDisplay:
    """One bar over the whole run, and a line that stays for every epoch."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID = self._progress.add_task("starting", total=None, figures="")
        self._pace = _Pace()
        self._start: Start | None = None
        self._progress.start()

    def phase(self, text: str, *, transient: bool = False) -> None:
        """Say what is going on before the first step and after the last.

        ``transient`` texts come often and are worth no line in a log.
        """
        del transient
        self._progress.update(self._task, description=text, figures="")

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def show(self, event: Event) -> None:
        match event:
            case Start():
                self._start = event
                self._pace = _Pace()
                total = event.total_steps
                self._progress.update(self._task, total=total, completed=event.step)
                self.say(_start_line(event))
            case Step():
                assert self._start is not None
                self._pace.add(event)
                self._progress.update(
                    self._task,
                    completed=event.step,
                    description=f"epoch {_epoch(event.epoch)}/{_num_epochs(self._start)}",
                    figures=f"step {event.step}/{self._start.total_steps}  "
                    f"loss {event.loss:.4f}  {self._pace.text(self._start, event)}",
                )
            case _:
                if line := _line_of(event):
                    self.say(line)

    def close(self) -> None:
        self._progress.stop()


class PlainDisplay:
    """A line per epoch and rank: what a log file or a CI job can use."""

    def __init__(self) -> None:
        self._start: Start | None = None

    def phase(self, text: str, *, transient: bool = False) -> None:
        if not transient:
            self.say(text)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def show(self, event: Event) -> None:
        match event:
            case Start():
                self._start = event
                self.say(_start_line(event))
            case RankTimes():
                assert self._start is not None
                self.say(
                    f"epoch {_epoch(event.epoch)}/{_num_epochs(self._start)} rank {event.rank}: "
                    f"{event.step_time_s * 1e3:.1f} ms/step, {_rate(event.rate)}"
                )
            case _:
                if line := _line_of(event):
                    self.say(line)

    def close(self) -> None:
        pass


def make_display() -> LiveDisplay | PlainDisplay:
    """The display that suits stderr."""
    console = Console(stderr=True)
    return LiveDisplay(console) if console.is_terminal else PlainDisplay()


def result_table(result: Result, places: Mapping[str, str]) -> Table:
    """The figures of a run, and where its files are, for people."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = {"run": f"{result.run} ({result.status})"}
    if result.accuracy is not None:
        rows["test accuracy"] = f"{result.accuracy:.4f}"
    if result.loss is not None:
        what = "test loss" if result.perplexity is None else "held-out loss"
        rows[what] = f"{result.loss:.4f}"
    if result.perplexity is not None:
        rows["perplexity"] = f"{result.perplexity:,.2f}"
    if rate := _rate(result.rate):
        rows["throughput"] = f"{rate} on {result.device}"
    rows["steps"] = f"{result.steps:,} on {result.world_size} workers"
    if result.resumed_from is not None:
        rows["steps"] += f", resumed from {result.resumed_from:,}"
    if result.preempted:
        rows["preempted"] = f"{result.preempted} (hosts that were taken away)"
    if result.seconds is not None:
        rows["training time"] = duration(result.seconds)
    if result.mfu is not None:
        rows["MFU"] = f"{result.mfu:.1%} of the {result.device}'s bf16 peak"
    for name, value in {**rows, **places}.items():
        table.add_row(name, value)
    return table


class _Pace:
    """Steps per second over the last dozen reports."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def add(self, event: Step) -> None:
        if self._seen and self._seen[-1][0] == event.time:
            self._seen[-1] = (event.time, event.step)
        else:
            self._seen = [*self._seen[-12:], (event.time, event.step)]

    def text(self, start: Start, event: Step) -> str:
        if len(self._seen) < 2:
            return ""
        (t0, s0), (t1, s1) = self._seen[0], self._seen[-1]
        if t1 <= t0 or s1 <= s0:
            return ""
        per_s = (s1 - s0) / (t1 - t0)
        left = (start.total_steps - event.step) / per_s
        rate = Rate(items=start.items, per_s=per_s * start.items_per_step)
        return f"{_rate(rate)}  {duration(left)} left"


def _start_line(event: Start) -> str:
    how = f"resuming at step {event.step:,}" if event.resumed else "training"
    return (
        f"{how}: {event.parameters:,} parameters, {event.world_size} workers on "
        f"{event.device} ({event.precision}), {event.total_steps:,} steps of "
        f"{event.items_per_step:,} {event.items}"
    )


def _line_of(event: Event) -> str:
    """The line that stays of an event; empty for those that have none."""
    match event:
        case Evaluation():
            return _evaluation_line(event)
        case Loaded():
            return f"checkpoint of step {event.step:,}: held-out loss {event.loss:.4f}"
        case Preempted():
            return f"{len(event.nodes)} of the hosts will be taken away: saving until then"
        case Warned():
            return f"warning: {event.message}"
    return ""


def _evaluation_line(event: Evaluation) -> str:
    """Every figure that an evaluation has, after the place where it was made."""
    of_text = event.perplexity is not None
    figures = [f"{'held-out' if of_text else 'test'} loss {event.loss:.4f}"]
    if event.accuracy is not None:
        figures.append(f"accuracy {event.accuracy:.4f}")
    if event.perplexity is not None:
        figures.append(f"perplexity {event.perplexity:,.1f}")
    if event.train_loss is None:
        return f"before training: {', '.join(figures)}"
    figures.insert(0, f"train loss {event.train_loss:.4f}")
    if rate := _rate(event.rate):
        figures.append(rate)
    where = f"epoch {_epoch(event.epoch)}"
    if of_text:  # evaluated within an epoch too
        where += f", step {event.step:,}"
    return f"{where}: {', '.join(figures)}"


def _rate(rate: Rate | None) -> str:
    """``1,234 images/s``; empty where nothing was measured."""
    return f"{rate.per_s:,.0f} {rate.items}/s" if rate and rate.per_s is not None else ""


def _epoch(epoch: float) -> str:
    """The epoch, with a fraction where it is under way."""
    return f"{epoch:.0f}" if epoch == math.floor(epoch) else f"{epoch:.2f}"


def _num_epochs(start: Start) -> int:
    return -(-start.total_steps // start.steps_per_epoch)
