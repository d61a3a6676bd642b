"""What a person sees while a run trains: a live bar on a terminal, plain lines elsewhere.

All of it goes to stderr; stdout is for results.
"""

import sys
from typing import Any

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

from training.record.events import Event


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
        self._rate = _Rate()
        self._start: Event = {}
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
        match event["type"]:
            case "start":
                self._start = event
                self._rate = _Rate()
                total = event["total_steps"]
                self._progress.update(self._task, total=total, completed=event["step"])
                self.say(_start_line(event))
            case "step":
                self._rate.add(event)
                epochs = _num_epochs(self._start)
                self._progress.update(
                    self._task,
                    completed=event["step"],
                    description=f"epoch {event['epoch']}/{epochs}",
                    figures=f"step {event['step']}/{self._start['total_steps']}  "
                    f"loss {event['loss']:.4f}  {self._rate.text(self._start, event)}",
                )
            case _:
                if line := _line_of(event):
                    self.say(line)

    def close(self) -> None:
        self._progress.stop()


class PlainDisplay:
    """A line per epoch and rank: what a log file or a CI job can use."""

    def __init__(self) -> None:
        self._start: Event = {}

    def phase(self, text: str, *, transient: bool = False) -> None:
        if not transient:
            self.say(text)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def show(self, event: Event) -> None:
        match event["type"]:
            case "start":
                self._start = event
                self.say(_start_line(event))
            case "rank":
                items = self._start["items"]
                self.say(
                    f"epoch {_epoch(event)}/{_num_epochs(self._start)} rank {event['rank']}: "
                    f"{event['step_time_s'] * 1e3:.1f} ms/step, "
                    f"{event[f'{items}_per_s']:.0f} {items}/s"
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


def result_table(result: dict[str, Any], places: dict[str, str]) -> Table:
    """The figures of a run, and where its files are, for people."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = {"run": f"{result['run']} ({result['status']})"}
    if result["accuracy"] is not None:
        rows["test accuracy"] = f"{result['accuracy']:.4f}"
    if result["loss"] is not None:
        what = "test loss" if result.get("perplexity") is None else "held-out loss"
        rows[what] = f"{result['loss']:.4f}"
    if result.get("perplexity") is not None:
        rows["perplexity"] = f"{result['perplexity']:,.2f}"
    for items in ("images", "tokens"):
        if rate := result.get(f"{items}_per_s"):
            rows["throughput"] = f"{rate:,.0f} {items}/s on {result['device']}"
    rows["steps"] = f"{result['steps']:,} on {result['world_size']} workers"
    if result["resumed_from"] is not None:
        rows["steps"] += f", resumed from {result['resumed_from']:,}"
    if result.get("preempted"):
        rows["preempted"] = f"{result['preempted']} (hosts that were taken away)"
    if result["seconds"] is not None:
        rows["training time"] = _duration(result["seconds"])
    if result["mfu"] is not None:
        rows["MFU"] = f"{result['mfu']:.1%} of the {result['device']}'s bf16 peak"
    for name, value in {**rows, **places}.items():
        table.add_row(name, value)
    return table


class _Rate:
    """Steps per second over the last dozen reports."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def add(self, event: Event) -> None:
        if self._seen and self._seen[-1][0] == event["time"]:
            self._seen[-1] = (event["time"], event["step"])
        else:
            self._seen = [*self._seen[-12:], (event["time"], event["step"])]

    def text(self, start: Event, event: Event) -> str:
        if len(self._seen) < 2:
            return ""
        (t0, s0), (t1, s1) = self._seen[0], self._seen[-1]
        if t1 <= t0 or s1 <= s0:
            return ""
        per_s = (s1 - s0) / (t1 - t0)
        left = (start["total_steps"] - event["step"]) / per_s
        rate = per_s * start["items_per_step"]
        return f"{rate:,.0f} {start['items']}/s  {_duration(left)} left"


def _start_line(event: Event) -> str:
    how = f"resuming at step {event['step']:,}" if event["resumed"] else "training"
    return (
        f"{how}: {event['parameters']:,} parameters, {event['world_size']} workers on "
        f"{event['device']} ({event['precision']}), {event['total_steps']:,} steps of "
        f"{event['items_per_step']:,} {event['items']}"
    )


def _line_of(event: Event) -> str:
    """The line that stays of an event; empty for those that have none."""
    match event["type"]:
        case "evaluation":
            return _evaluation_line(event)
        case "loaded":
            return f"checkpoint of step {event['step']:,}: held-out loss {event['loss']:.4f}"
        case "preempted":
            return f"{len(event['nodes'])} of the hosts will be taken away: saving until then"
        case "warning":
            return f"warning: {event['message']}"
    return ""


def _evaluation_line(event: Event) -> str:
    if "perplexity" not in event:
        return (
            f"epoch {event['epoch']}: train loss {event['train_loss']:.4f}, test loss "
            f"{event['loss']:.4f}, accuracy {event['accuracy']:.4f}, "
            f"{event['images_per_s']:,.0f} images/s"
        )
    figures = f"held-out loss {event['loss']:.4f}, perplexity {event['perplexity']:,.1f}"
    if "tokens_per_s" not in event:
        return f"before training: {figures}"
    return (
        f"epoch {_epoch(event)}, step {event['step']:,}: train loss {event['train_loss']:.4f}, "
        f"{figures}, {event['tokens_per_s']:,.0f} tokens/s"
    )


def _epoch(event: Event) -> str:
    """The epoch, with a fraction where it is under way."""
    epoch = event["epoch"]
    return f"{epoch:.0f}" if epoch == int(epoch) else f"{epoch:.2f}"


def _num_epochs(start: Event) -> int:
    num: int = -(-start["total_steps"] // start["steps_per_epoch"])
    return num


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"
