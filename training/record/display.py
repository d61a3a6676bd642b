"""Display of a run while it trains: a live bar on a terminal, plain lines elsewhere.

All of it goes to stderr; stdout is for results.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from contract.text import counted, duration, percent
from training.record.colors import colored
from training.record.events import (
    Evaluation,
    Event,
    Loaded,
    Measure,
    Noted,
    Phase,
    Preempted,
    RankTimes,
    Silent,
    Skipped,
    Start,
    Step,
    Warned,
    described,
)
from training.record.progress import Pace, num_epochs, speed
from training.record.progress import Progress as RunProgress
from training.record.result import SUCCEEDED, Result

#: Of a log before the first step.
_QUIET_S: Final = 10.0
#: Columns of a terminal that has room for a bar and a clock.
_WIDE: Final = 100
#: Of the time per step, up to which ranks are alike.
_ALIKE: Final = 1.1


class Display:
    """A bar over the whole run on a terminal, and lines that stay; in a log file or a CI job only
    the lines, with one of the progress every half a minute."""

    def __init__(
        self,
        measures: Sequence[Measure] = (),
        *,
        verbose: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            measures: those of the recipe.
            verbose: show each rank's times, although they are alike.
            clock: seconds, from any beginning.
        """
        self._measures, self._is_verbose, self._clock = measures, verbose, clock
        self._said_at = self._began_at = clock()
        self._ranks: list[RankTimes] = []
        self._console = console or Console(stderr=True)
        self._is_live = self._console.is_interactive
        # The figures come first on a narrow terminal.
        wide = (BarColumn(bar_width=None), TimeElapsedColumn()) * (self._console.width >= _WIDE)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            *wide[:1],
            TextColumn("{task.fields[figures]}"),
            *wide[1:],
            console=self._console,
            transient=True,
            disable=not self._is_live,
        )
        self._task: TaskID = self._progress.add_task("starting", total=None, figures="")
        self._pace = Pace()
        self._start: Start | None = None
        self._hosts: tuple[str, ...] = ()
        self._progress.start()

    def phase(self, text: str, *, transient: bool = False) -> None:
        """Say what is going on before the first step and after the last.

        ``transient`` texts come often and are worth no line in a log.
        """
        self._progress.update(self._task, description=text, figures="")
        if not transient:
            self._began_at = self._clock()
        if not (self._is_live or transient):
            self.say(text)

    def wait(self) -> None:
        """Show in a log now and then that a phase is not over; on a terminal, something moves."""
        if not self._is_live and self._clock() - self._said_at >= _QUIET_S:
            seconds = duration(round(self._clock() - self._began_at))
            self.say(f"still {self._progress.tasks[self._task].description}, {seconds}")

    def say(self, text: str) -> None:
        self._said_at = self._clock()
        self._console.print(colored(text), soft_wrap=True)

    def show(self, event: Event) -> None:
        match event:
            case Start():
                self._start = event
                self._pace = Pace()
                total = event.total_steps
                self._progress.update(self._task, total=total, completed=event.step)
            case Phase():
                self._hosts = event.hosts or self._hosts
            case Step() if self._is_live:
                assert self._start is not None
                self._pace.add(event)
                self._progress.update(
                    self._task,
                    completed=event.step,
                    description="training",
                    figures=self._pace.progress(self._start, event).line(),
                )
        if line := self._line(event):
            self.say(line)

    def progress(self, progress: RunProgress) -> None:
        if not self._is_live:  # the bar shows it already
            self.say(progress.line())

    def close(self) -> None:
        self._progress.stop()

    def _line(self, event: Event) -> str:
        """The line of an event; empty for those that have none."""
        match event:
            case Start():
                return _start_line(event)
            case RankTimes():
                return self._rank_lines(event)
            case Evaluation():
                return _evaluation_line(event, self._measures)
            case Loaded():
                return f"checkpoint of step {event.step:,}: evaluation loss {event.loss:.4f}"
            case Preempted():
                return f"{len(event.nodes)} of the hosts will be taken away: saving until then"
            case Silent():
                return _silent_line(event)
            case Skipped():
                return f"step {event.step:,} was skipped: its loss or gradient is not a number"
            case Warned():
                return f"warning: {event.message}"
            case Noted():
                return event.message
        return ""

    def _rank_lines(self, event: RankTimes) -> str:
        """The lines of all ranks with the last one's event; one line where all are processes of one
        machine's CPU that take the same time."""
        assert self._start is not None
        self._ranks.append(event)
        if event.rank + 1 < self._start.world_size:
            return ""
        ranks, self._ranks = self._ranks, []
        slowest = max(ranks, key=lambda each: each.step_time_s)
        are_alike = slowest.step_time_s <= _ALIKE * min(each.step_time_s for each in ranks)
        is_one = self._start.device == "CPU" and len({*self._hosts}) < 2
        if are_alike and is_one and len(ranks) > 1 and not self._is_verbose:
            return self._rank_line(slowest, "each rank")
        return "\n".join(self._rank_line(each, f"rank {each.rank}") for each in ranks)

    def _rank_line(self, event: RankTimes, rank: str) -> str:
        """``epoch 1/10 [GPU1: rank 1] (NVIDIA A10G, 10.0.1.7): 235 steps of 128 images in …``."""
        start = self._start
        assert start is not None
        host = self._hosts[event.rank : event.rank + 1]
        if start.device != "CPU":  # numbered on each host by its ranks
            number = self._hosts[: event.rank].count(*host) if host else event.rank
            rank = f"[GPU{number}: {rank}]"
        figures = [f"{event.step_time_s * 1e3:.1f} ms/step", *speed(event.rate)]
        if event.steps is not None and start.items_per_step:
            # Of a full batch: the last one of an epoch may be smaller.
            batch = f"{start.items_per_step / start.world_size:,.0f} {start.items}"
            steps = f"{counted(event.steps, 'step')} of {batch}"
            figures.insert(0, f"{steps} in {duration(event.steps * event.step_time_s)}")
        if event.compiling_s:
            figures.append(f"compiled for {duration(event.compiling_s)} beside")
        epoch = f"epoch {_epoch(event.epoch)}/{num_epochs(start)} " if start.steps_per_epoch else ""
        return f"{epoch}{rank} ({', '.join([start.device, *host])}): {', '.join(figures)}"


def result_table(
    result: Result,
    places: Mapping[str, str],
    *,
    measures: Sequence[Measure] = (),
    use: Sequence[str] = (),
) -> str:
    """The figures of a run, and where its files are, for people: lines that nothing wraps, so that
    a command can be copied.

    Args:
        places: words for a place, and its address.
        measures: those of the recipe.
        use: lines that use the model.
    """
    rows = {"run": f"{result.run} ({result.status})", **figures(result, measures=measures)}
    rows |= places
    width = max(map(len, rows)) + 2
    lines = [f"{name:{width}}{value}" for name, value in rows.items()]
    return "\n".join([*lines, *(["", "Use this model:", *use] if use else [])])


def figures(result: Result, *, measures: Sequence[Measure] = ()) -> dict[str, str]:
    """The figures of a run in words, by their labels.

    Args:
        measures: those of the recipe.
    """
    rows = {}
    for name, value in result.measures.items():
        measure = described(name, measures)
        rows[measure.phrase_label] = measure.words(value)
    if result.loss is not None:
        rows["evaluation loss"] = f"{result.loss:.4f}"
    for rate in speed(result.rate):
        rows["throughput"] = f"{rate} on {result.device}"
    of_all = f" of {result.total_steps:,}" if result.status != SUCCEEDED else ""
    rows["steps"] = f"{result.steps:,}{of_all} on {counted(result.world_size, 'worker')}"
    if result.resumed_from is not None:
        rows["steps"] += f", resumed from {result.resumed_from:,}"
    if result.skipped_steps:
        steps = counted(result.skipped_steps, "step")
        rows["skipped"] = f"{steps} (loss or gradient was not a number)"
    if result.preempted:
        rows["preempted"] = f"{result.preempted} (hosts that were taken away)"
    if result.seconds is not None:
        rows["training time"] = duration(result.seconds)
    if result.total_seconds is not None:
        rows["with start-up"] = duration(result.total_seconds)
    if result.usd is not None:
        rows["cost"] = f"about ${result.usd:,.2f} at list prices"
    if result.mfu is not None:
        rows["MFU"] = f"{result.mfu:.1%} of the {result.device}'s bf16 peak"
    if result.gpu_utilization is not None:
        rows["GPU utilization"] = percent(result.gpu_utilization)
    if result.memory_bytes is not None:
        rows["memory"] = f"{result.memory_bytes / 2**30:.3g} GiB per worker"
    return rows


def _start_line(event: Start) -> str:
    how = "training" if event.parameters else "running"
    precision = f" ({event.precision})" if event.precision else ""
    batch = f" of {event.items_per_step:,} {event.items}" if event.items_per_step else ""
    if 0 < event.steps_per_epoch < event.total_steps:
        batch += f", {event.steps_per_epoch:,} an epoch"
    figures = [
        f"{event.parameters:,} parameters" if event.parameters else "",
        f"{counted(event.world_size, 'worker')} on {event.device}{precision}",
        f"{counted(event.total_steps, 'step')}{batch}",
    ]
    return (
        f"{f'resuming at step {event.step:,}' if event.resumed else how}: "
        f"{', '.join(filter(None, figures))}"
    )


def _silent_line(event: Silent) -> str:
    others = [each for each in event.states if not each.endswith("S (sleeping)")]
    where = f"; stacks are in {event.stacks}" if event.stacks else ""
    return (
        f"nothing was heard for {duration(event.seconds)} after step {event.after:,} "
        f"({', '.join(others) or 'all workers wait'}){where}: all are ended"
    )


def _evaluation_line(event: Evaluation, measures: Sequence[Measure]) -> str:
    """Every figure that an evaluation has, after the place where it was made."""
    figures = []
    if event.train_loss is not None:
        figures.append(f"train loss {event.train_loss:.4f}")
    if event.loss is not None:
        figures.append(f"evaluation loss {event.loss:.4f}")
    figures += [described(name, measures).phrase(value) for name, value in event.measures.items()]
    figures += speed(event.rate)
    if event.place:
        where = event.place
    elif not event.step:
        where = "before training"
    elif event.epoch == math.floor(event.epoch):
        where = f"epoch {event.epoch:.0f}" if event.epoch else f"step {event.step:,}"
    else:
        where = f"epoch {_epoch(event.epoch)}, step {event.step:,}"
    return f"{where}: {', '.join(figures)}"


def _epoch(epoch: float) -> str:
    """The epoch, with a fraction where it is under way."""
    return f"{epoch:.0f}" if epoch == math.floor(epoch) else f"{epoch:.2f}"
