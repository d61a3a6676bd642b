"""Curves of a run in TensorBoard and in Weights & Biases (``--report-to``).

The record passes its events on, and a thread writes them: a tracker that is slow, or fails, holds
up neither the record nor the training. Neither package is imported unless it is asked for. Curves
have the names of ``metrics.jsonl`` (docs/record.md), behind ``train/`` and ``evaluation/``.

For a look at one run at its end, ``report.html`` needs neither.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final

from contract.errors import InputError
from training.record.events import Evaluation, Event, Noted, Start, Step, Warned, to_json
from training.record.fields import number

#: Each is the name of its package, too.
NAMES: Final = ("tensorboard", "wandb")
#: What they write while a run goes on, in the run's folder.
FILES: Final = ("tensorboard/*", "wandb/*/*.wandb")
#: How long the end of a run waits for W&B to send the rest; ``wandb sync`` sends what is left. A
#: command that is told to stop has little more (``contract.times.RECIPE_STOP_S``).
UPLOAD_S: Final = 10.0

Say = Callable[[Noted | Warned], None]


class _TensorBoard:
    """Event files in the folder ``tensorboard``, one for each start of the workers."""

    def __init__(self, start: Start, folder: Path, *_: object) -> None:
        # Not torch's SummaryWriter: the process that keeps the record loads no torch.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(folder / "tensorboard"), flush_secs=30)
        # Readers forget this step and later ones of earlier files: they are trained again.
        begins = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(start.step + start.resumed, session_log=begins)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=each) for tag, each in figures.items()]
        self._add(step, summary=self._summary(value=values))

    def _add(self, step: int, **fields: object) -> None:
        self._writer.add_event(self._event(step=step, wall_time=time.time(), **fields))

    def close(self, _code: int) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases under the name of ours, with its files in the folder ``wandb``."""

    def __init__(
        self, start: Start, folder: Path, run: str, settings: Mapping[str, object], say: Say
    ) -> None:
        import wandb

        self._run = wandb.init(
            id=run,
            name=run,
            project=os.environ.get("WANDB_PROJECT", str(settings.get("recipe"))),
            config=dict(settings),
            dir=folder,
            # Without a checkpoint all is trained again, and W&B begins the run afresh.
            resume="allow" if start.resumed else None,
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,  # of this machine, which may not be one that trains
                init_timeout=30,  # until then, also the end of a command waits for it
                finish_timeout=UPLOAD_S,
            ),
        )
        self._next = self._run.step
        if not self._run.offline:
            say(Noted(message=f"curves: {self._run.url}"))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step >= self._next:  # W&B keeps its figures of steps that are trained again
            self._run.log({**figures}, step=step)

    def close(self, code: int) -> None:
        self._run.finish(code)


def check(names: Sequence[str]) -> None:
    """Check that trackers can be used, before a run starts.

    Raises:
        InputError: a package is missing, or the key of W&B.
    """
    for name in names:
        if find_spec(name) is None:
            raise InputError(f"--report-to {name} needs a package: pip install {name}")
    check_key(names, os.environ, has_key=_is_logged_in)


def check_key(
    names: Sequence[str], variables: Mapping[str, str], *, has_key: Callable[[], bool]
) -> None:
    """Check that W&B has its key where a run reports to it.

    Raises:
        InputError: it needs one and has none.
    """
    is_sent = "wandb" in names and variables.get("WANDB_MODE", "online") == "online"
    if is_sent and not has_key():
        raise InputError(
            "--report-to wandb needs a key: set WANDB_API_KEY (for a job: --secret "
            "WANDB_API_KEY=training/SECRET), or WANDB_MODE=offline (for a job: --env)"
        )


def _is_logged_in() -> bool:
    import wandb

    return bool(wandb.login(prompt=False, verify=False))


class Trackers:
    """The trackers of a run, and the thread that serves them."""

    def __init__(self, names: Sequence[str], *place: Any, say: Say) -> None:
        """
        Args:
            names: of ``NAMES``.
            place: folder of the run, its name and its settings.
            say: shows a line; called from the thread.
        """
        self._names, self._place, self._say = [*names], (*place, say), say
        self._open: dict[str, _TensorBoard | _Wandb] = {}
        self._queue: SimpleQueue[Start | Step | Evaluation | int] = SimpleQueue()
        self._thread = Thread(target=self._work, daemon=True)
        if names:
            self._thread.start()

    def handle(self, event: Event) -> None:
        """Pass on an event of the run."""
        if self._names and isinstance(event, Start | Step | Evaluation):
            self._queue.put(event)

    def close(self, code: int, *, wait_s: float) -> None:
        """End them with the run's exit code, and wait for that. May be called again, to wait on."""
        self._queue.put(code)
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _work(self) -> None:
        item: Start | Step | Evaluation | int | None = None
        while not isinstance(item, int):
            item = self._queue.get()
            for name in [*self._names]:
                try:
                    self._pass_on(name, item)
                except Exception as error:  # each package has its own
                    self._names.remove(name)
                    reason = str(error).partition("\n")[0] or type(error).__name__
                    text = f"{name} failed ({reason}): it gets no more of this run"
                    self._say(Warned(message=text))

    def _pass_on(self, name: str, item: Start | Step | Evaluation | int) -> None:
        if isinstance(item, Step | Evaluation):
            self._open[name].log(item.step, figures(item))
            return
        # Workers that start again begin at an earlier step: so does the tracker, as in a new run.
        if tracker := self._open.pop(name, None):
            tracker.close(0 if isinstance(item, Start) else item)
        if isinstance(item, Start):
            kind = _TensorBoard if name == "tensorboard" else _Wandb
            self._open[name] = kind(item, *self._place)


def figures(event: Step | Evaluation) -> dict[str, float]:
    """The finite numbers of an event, by the names of their curves."""
    kind = "train" if isinstance(event, Step) else "evaluation"
    return {
        f"{kind}/{name}": figure
        for name, value in to_json(event).items()
        if name not in ("step", "time") and (figure := number(value)) is not None
    }
