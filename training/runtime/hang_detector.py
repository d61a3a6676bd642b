"""Detector of hung workers: they start again when nothing was heard of them for too long.

What a hung worker costs is the time until it is noticed, with every GPU billed. What started the
workers sees a process that has ended, but not one whose training stands still. The command receives
every step, so it knows best.
"""

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from contract.nodes import ENV_SILENCE
from contract.runs import STACKS_DIR
from contract.times import SILENCE_S
from store import storage
from training.record.events import (
    Evaluating,
    Event,
    Joined,
    Process,
    Saving,
    Silent,
    Start,
    Step,
)
from training.runtime.processes import ProcessState

#: So many steps of usual length without a word are too many.
_STEPS: Final = 20
#: And a pause so many times as long as any that training came back from.
_PAUSES: Final = 3
#: Before the first step of each start, until it is known how long steps take, in evaluations, and
#: after the last step until the model is published, a run may be silent for so many times as long
#: as otherwise: compilers and data that is read for the first time. The same for a save that writes
#: nothing: S3 is asked again for a quarter of an hour.
_QUIET_FACTOR: Final = 6
#: The same before the start: data is prepared, and a model of 140 GB comes at 100 MB/s, goes to the
#: bucket and comes from there, partly in silence.
_LOADING: Final = 24
#: A command that has not looked for so long stood still itself, and knows nothing of that time.
_STOOD_STILL_S: Final = 10.0
_REMEMBERED: Final = 200


class HangDetector:
    """Watches the workers of one run, and restarts those that are silent for longer than the run's
    own events let expect."""

    def __init__(
        self,
        run_uri: str,
        *,
        look: Callable[[Sequence[Process]], list[ProcessState]],
        end: Callable[[Sequence[Process]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            look: returns what processes are doing.
            end: kills processes, stopped ones too.
            clock: seconds, from any beginning.
        """
        self._run_uri, self._look, self._end, self._clock = run_uri, look, end, clock
        # No shorter silence is too long.
        self._least_s = float(os.environ.get(ENV_SILENCE, SILENCE_S))
        self._processes: list[Process] = []
        self._is_watching = self._has_stepped = self._is_evaluating = False
        self._saving: Saving | None = None
        self._is_save_stuck = False
        self._heard_at = self._looked_at = clock()
        self.step = 0
        """The last step that was heard of."""
        self._total = 0
        self._longest_s = 0.0
        self._per_step: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def seconds(self) -> float:
        """Duration of the silence so far."""
        return self._clock() - self._heard_at

    def hear(self, *events: Event) -> None:
        """Take note of events that came together."""
        if not events:
            return
        saves = [each for each in events if isinstance(each, Saving)]
        before_these, self._saving = self._saving, saves[-1] if saves else self._saving
        if len(saves) == len(events) and self._saving == before_these:
            self._is_save_stuck = True  # no sign of life: nothing was written since the last one
            return
        is_apart = self._is_evaluating or self._is_save_stuck  # such a pause is not one of steps
        self._is_save_stuck = False
        paused_s, before = self.seconds, self.step
        self._heard_at += paused_s
        for event in events:
            match event:
                case Joined():
                    self._processes = [*event.processes]
                    self._is_watching, self._total = True, 0
                case Start():
                    self._is_watching, self._has_stepped = True, False
                    self.step = before = event.step
                    self._total = event.total_steps
                case Step():
                    self.step = event.step
        stepped = self.step - before
        if stepped > 0 and self._has_stepped and not is_apart:
            self._per_step.append(paused_s / stepped)
            self._longest_s = max(self._longest_s, paused_s)
        self._has_stepped = self._has_stepped or stepped > 0
        self._is_evaluating = isinstance(events[-1], Evaluating)

    def forget(self) -> None:
        """Expect nothing until workers join: they may wait for hosts for days."""
        self._is_watching = self._is_save_stuck = False
        self._saving = None  # workers that are being ended may still report the save they wait for

    def limit_s(self) -> float:
        """Maximum duration of a silence at this moment."""
        if not self._total:
            return _LOADING * self._least_s
        has_pace = self._has_stepped and self._per_step and self.step < self._total
        if self._is_evaluating or self._is_save_stuck or not has_pace:
            return _QUIET_FACTOR * self._least_s
        usual_s = statistics.median(self._per_step)
        return max(self._least_s, _STEPS * usual_s, _PAUSES * self._longest_s)

    def is_too_long(self) -> bool:
        """Check the silence against its limit; call this every few seconds."""
        now = self._clock()
        if now - self._looked_at > _STOOD_STILL_S:
            self._heard_at += now - self._looked_at
        self._looked_at = now
        return self._is_watching and self.seconds > self.limit_s()

    def restart_if_silent(self) -> Silent | None:
        """Where nothing has been heard for too long, note what the workers are doing and end them:
        that counts as a failure, and they are started again.

        Returns:
            What was found; None where all is well.
        """
        if not self._processes or not self.is_too_long():
            return None
        seconds = self.seconds
        seen = self._look(self._processes)
        if any(each.is_out_of_reach for each in seen):
            self._heard_at = self._clock()  # what cannot be ended now is looked at again
        else:
            self.forget()
        if all(each.is_gone for each in seen):
            return None  # that is known already, and others are waited for
        # First of all, and without many tries: the storage may be what the workers wait for.
        self._end(self._processes)
        name = f"{STACKS_DIR}/step-{self.step:08d}-{int(time.time())}.txt"
        text = "\n\n".join(each.details or f"rank {each.rank}: gone" for each in seen)
        try:
            content = f"{text}\n".encode()
            storage.write_bytes(storage.join(self._run_uri, name), content, quick=True)
        except Exception:  # s3fs lets botocore's many exceptions through
            name = ""
        return Silent(
            after=self.step,
            seconds=round(seconds, 1),
            states=tuple(f"rank {each.rank}: {each.state}" for each in seen),
            stacks=name,
            time=time.time(),
        )
