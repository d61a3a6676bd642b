"""How long workers are in collectives, and whom they wait for."""

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from training.record.events import RankTimes, Warned

#: What the profiler has an event for, when all ranks are being watched.
_BEGUN: Final = "training: watching has begun"


class Communication:
    """Watches one step with torch's profiler and measures how long its collectives took.

    That is the time in which any of them was at work, whether training waited or computed beside
    it: what communication would cost if nothing hid it. Usable as a context manager, once, by all
    ranks at the same step: they wait for each other when watching has begun and when it has ended,
    because that takes each of them its own time, which is no communication.
    """

    def __init__(self, device: torch.device) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._device, self._on_gpu = device, device.type == "cuda"
        activity = ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU
        self._profile: Any = profile(activities=[activity])

    def __enter__(self) -> Self:
        self._profile.__enter__()
        self._meet()
        with record_function(_BEGUN):
            pass
        return self

    def __exit__(self, *error: object) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profile.__exit__(*error)
        if error[0] is None:
            self._meet()

    def _meet(self) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(torch.zeros(1, device=self._device))
        if self._on_gpu:
            torch.cuda.synchronize()

    def seconds(self) -> float:
        """Length of the union of all collectives, in seconds."""
        marks = ("nccl",) if self._on_gpu else ("gloo:",)
        events = self._profile.events()
        begun = min(event.time_range.end for event in events if event.name == _BEGUN)
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in events
            if event.name.startswith(marks) and event.time_range.start >= begun
        )
        return union_length(spans) / 1e6


class Watch:
    """Has the collectives of one step between two evaluations measured: the last but one, when all
    has settled, and never the first of the run. Every rank has one, and they watch together."""

    def __init__(
        self,
        device: torch.device,
        *,
        world_size: int,
        evaluates: Callable[[int], bool],
        rest_s: float = 20.0,
    ) -> None:
        """
        Args:
            evaluates: whether an evaluation follows when so many steps are done.
            rest_s: steps that take so long in all pass before another one is watched, because
                watching takes time.
        """
        self._device, self._is_alone = device, world_size == 1
        self._evaluates, self._rest_s = evaluates, rest_s
        self._seconds = 0.0 if self._is_alone else None
        self._found: Communication | None = None
        self._has_found = False
        self._stragglers = Stragglers()
        self._number = self._next = 0
        self.is_watching = False
        """Whether the step that was begun last is the one: its own time is longer than others'."""

    def step(self, number: int) -> AbstractContextManager[object]:
        """The context to take a step in, counted from 1."""
        if not self._number:  # the first of the run
            self._next = number + 1
        self._number = number
        wanted = self._evaluates(number + 1) and not self._evaluates(number)
        self.is_watching = wanted and number >= self._next and not self._is_alone
        if not self.is_watching:
            return nullcontext()
        self._found = Communication(self._device)
        return self._found

    def seconds(self) -> float | None:
        """How long the collectives took in the last step that was watched; None if none was yet."""
        self._has_found = self._found is not None
        if self._found is not None:
            self._seconds, self._found = self._found.seconds(), None
        return self._seconds

    def warnings(self, ranks: Sequence[RankTimes]) -> list[Warned]:
        """What the times of all ranks show of a slow one, if they have just been measured.

        Args:
            ranks: with the ``seconds`` of each rank.
        """
        if not self._has_found:
            return []
        # The same on every rank, because they all have the times of all.
        step_s = max(each.step_time_s for each in ranks)
        self._next = self._number + math.ceil(self._rest_s / max(step_s, 1e-6))
        return self._stragglers.among(ranks)


class Stragglers:
    """Names the worker that the others wait for: in a collective, who comes last waits least."""

    #: Part of a step that the others wait, from which a rank is named.
    _SHARE: Final = 0.25

    def __init__(self) -> None:
        self._suspect: int | None = None
        self._named: set[int] = set()

    def among(self, ranks: Sequence[RankTimes]) -> list[Warned]:
        """A warning about the slow rank of the steps before an evaluation, if it was the slow one
        before the last evaluation as well; once for each rank."""
        suspect, self._suspect = self._suspect, None
        waits = {each.rank: each.communication_s for each in ranks}
        if len(waits) < 2:
            return []
        known = {rank: wait for rank, wait in waits.items() if wait is not None}
        if len(known) < len(waits):
            return []
        slow = min(known, key=lambda rank: known[rank])
        wait_s = statistics.median(wait for rank, wait in known.items() if rank != slow)
        wait_s -= known[slow]
        step_s = statistics.median(each.step_time_s for each in ranks)
        if wait_s < self._SHARE * step_s:
            return []
        self._suspect = slow
        if slow != suspect or slow in self._named:
            return []
        self._named.add(slow)
        return [
            Warned(
                message=f"the other workers wait for rank {slow}: in a step of {step_s:.3g} s, "
                f"{wait_s:.2g} s longer in collectives than it; look at its host (other work, "
                "slow data, a GPU that is hot or faulty)"
            )
        ]


def union_length(spans: Sequence[tuple[float, float]]) -> float:
    """Length of what sorted intervals cover together."""
    covered, reached = 0.0, -math.inf
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
