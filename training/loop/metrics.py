"""Measurements while training: time of a step's parts, share of the peak, use of the GPU, time in
collectives."""

import ctypes
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from contract import text
from contract.instance_types import INSTANCE_TYPES
from training.record.events import Evaluation, RankTimes, Skipped, Start, Step
from training.record.fields import Rate
from training.record.fields import number as finite

#: ResNet50 on one H200, 2026-11-28: share of the peak without compilation, the share of the time
#: that compilation saves, and about what it takes for each size of the pictures.
_UNCOMPILED: Final = 0.107
_SAVED: Final = 0.29
_COMPILING_S: Final = 60.0

# GPU -> dense bf16 tensor-core peak (fp16 where the chip has no bf16), operations per second.
_PEAK_FLOPS: Final = {
    machine.gpu.name: 1e12 * machine.gpu.tflops
    for machine in INSTANCE_TYPES.values()
    if machine.gpu
}


def peak_flops(device: torch.device) -> float | None:
    """Dense half-precision peak of a GPU in operations per second; None when it is not known,
    which is always so for a CPU."""
    if device.type != "cuda":
        return None
    return _PEAK_FLOPS.get(torch.cuda.get_device_name(device))


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step over all workers."""

    loss: float
    """Mean over what the global batch holds: images, tokens."""
    grad_norm: float
    """Before clipping."""
    size: int
    """Images or tokens in the global batch."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class StepMeans(NamedTuple):
    """Where one worker's time went: means over some steps. ``RankTimes`` has the same fields."""

    phases: Mapping[str, float]
    """Seconds of each phase, in their order."""
    steps: int
    """Number that began, those included that are not in the means."""
    items_per_step: float
    """Mean number of images or tokens that this worker trained on per step."""
    step_time_s: float
    """Mean duration of a complete step, in seconds."""
    compiling_s: float = 0.0
    """Seconds of steps in which torch compiled; the means are of the others, if there are any."""


@dataclass
class _Step:
    marks: list[tuple[str, Any]]
    """Readings of the clock, or events of a GPU, at the end of each phase."""
    items: int = 0
    compiles: bool = False
    """torch has compiled in it."""


def device_name(device: torch.device) -> str:
    """Name of a GPU, or ``CPU``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """Constants of a run, known before its first step. Builds the run's events from them and from
    measurements."""

    items: str
    """Unit of the training data, such as ``images`` or ``tokens``."""
    items_per_step: int
    global_batch: int
    """Images or sequences in the batch of all workers."""
    steps_per_epoch: int
    total_steps: int
    learning_rate: Callable[[int], float]
    """Learning rate of a step, counted from 0."""
    flops_per_item: float | None
    """Floating-point operations of one forward and backward pass; None where not known."""
    world_size: int
    device: torch.device

    def is_due(self, num_done: int, *, every: int) -> bool:
        """True after every N-th step and after the last one."""
        return num_done % every == 0 or num_done == self.total_steps

    def why_not_compile(self, step: int, *, num_shapes: int) -> str:
        """Reason not to compile a picture model for the steps after ``step``; empty if that pays.

        Args:
            num_shapes: sizes of pictures, each of which torch compiles by itself.
        """
        if self.device.type != "cuda":
            return "that is for GPUs"
        peak = peak_flops(self.device)
        if not peak or not self.flops_per_item:
            return ""
        items = (self.total_steps - step) * self.items_per_step / self.world_size
        saved_s = _SAVED * items * self.flops_per_item / (_UNCOMPILED * peak)
        if saved_s >= _COMPILING_S * num_shapes:
            return ""
        return f"in the steps left that saves {text.duration(round(saved_s))}, less than it takes"

    def start(self, model: torch.nn.Module, *, step: int, parameters: int, bf16: bool) -> Start:
        """The event that training begins after ``step``, that of a checkpoint unless it is 0.

        Args:
            model: as it is trained, which may be less than the ``parameters`` that are saved.
        """
        trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        return Start(
            step=step,
            resumed=step > 0,
            world_size=self.world_size,
            global_batch=self.global_batch,
            items=self.items,
            items_per_step=self.items_per_step,
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.total_steps,
            parameters=parameters,
            trained_parameters=trained,
            device=device_name(self.device),
            precision="bf16" if bf16 else "fp32",
        )

    def steps(self, found: Sequence[StepMetrics], *, last: int) -> list[Step | Skipped]:
        """An event for each of the steps that end with ``last``, counted from 1."""
        now = time.time()
        return [
            Step(
                step=number,
                epoch=(number - 1) // self.steps_per_epoch + 1,
                loss=each.loss,
                lr=self.learning_rate(number - 1),
                grad_norm=each.grad_norm,
                time=now,
            )
            if each.is_finite
            else Skipped(
                step=number, loss=finite(each.loss), grad_norm=finite(each.grad_norm), time=now
            )
            for number, each in enumerate(found, start=last - len(found) + 1)
        ]

    def ranks(
        self,
        means: StepMeans,
        *,
        step: int,
        epoch: float,
        communication_s: float | None = None,
        memory_bytes: float | None = None,
        gpu_utilization: float | None = None,
    ) -> list[RankTimes]:
        """An event for each rank of all workers; every rank calls this.

        Args:
            means: this rank's, from ``StepTimer.means``.
            step: the last one of those measured.
            epoch: epochs done by then.
            communication_s: of this rank, if it was measured.
            memory_bytes: the same.
            gpu_utilization: the same.
        """
        # While training waits for a save, it computes nothing.
        step_s = means.step_time_s - means.phases.get("checkpoint", 0.0)
        per_s = means.items_per_step / step_s if step_s else 0.0
        mine = RankTimes(
            rank=dist.get_rank(),
            step=step,
            epoch=epoch,
            rate=Rate(items=self.items, per_s=per_s),
            communication_s=communication_s,
            memory_bytes=memory_bytes,
            gpu_utilization=gpu_utilization,
            **means._asdict(),
        )
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, mine)
        return found

    def evaluation(
        self,
        ranks: Sequence[RankTimes],
        *,
        loss: float | None = None,
        measures: Mapping[str, float],
        train_loss: float | None,
        seconds: float,
    ) -> Evaluation:
        """The event of an evaluation after the steps that ``ranks`` measured.

        Args:
            measures: values of the recipe's measures.
        """
        items_per_s = sum(each.items_per_s or 0.0 for each in ranks)
        flops_per_s = None if self.flops_per_item is None else self.flops_per_item * items_per_s
        peak = peak_flops(self.device)
        memory = [each.memory_bytes for each in ranks if each.memory_bytes is not None]
        use = [each.gpu_utilization for each in ranks if each.gpu_utilization is not None]
        return Evaluation(
            step=ranks[0].step,
            epoch=ranks[0].epoch,
            loss=loss,
            measures=measures,
            train_loss=train_loss,
            rate=Rate(items=self.items, per_s=items_per_s),
            seconds=seconds,
            flops_per_s=flops_per_s,
            mfu=flops_per_s / (self.world_size * peak) if flops_per_s and peak else None,
            gpu_utilization=statistics.fmean(use) if use else None,
            memory_bytes=max(memory, default=None),
        )


def perplexity(loss: float) -> float:
    """Perplexity of a language model, from its mean loss per token in nats; large, but never
    infinite."""
    return math.exp(min(loss, 700.0))


def compiler_count(group: str, name: str) -> int:
    """One of the counters of ``torch.compile`` in this process; 0 if it compiles nothing."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters[group][name]) if dynamo else 0


def num_graphs() -> int:
    """Number of graphs that torch has compiled in this process."""
    return compiler_count("stats", "unique_graphs")


class StepTimer:
    """Splits each step into named phases without making a GPU wait for the host.

    On a GPU the marks are CUDA events, read only in ``means``; on a CPU they are clock readings.
    """

    def __init__(
        self,
        phases: Sequence[str],
        device: torch.device,
        *,
        clock: Callable[[], float] = time.perf_counter,
        graphs: Callable[[], int] = num_graphs,
    ) -> None:
        """``graphs``: how many graphs torch has compiled by now."""
        assert "step_time" not in phases, "the name of the whole step's time"
        self.phases = tuple(phases)
        self._on_gpu, self._clock = device.type == "cuda", clock
        self._graphs, self._num_graphs = graphs, graphs()
        self._steps: list[_Step] = []

    def start(self) -> None:
        """Begin a step."""
        self._steps.append(_Step([("", self._now())]))
        self._num_graphs = self._graphs()

    def mark(self, phase: str, *, items: int = 0) -> None:
        """End a stretch of a step that belongs to ``phase``, and add the items that the step
        trained on there. A phase may come several times in a step."""
        assert phase in self.phases, phase
        step, before = self._steps[-1], self._num_graphs
        step.marks.append((phase, self._now()))
        step.items += items
        self._num_graphs = self._graphs()
        step.compiles |= self._num_graphs > before

    def has_compiled(self) -> bool:
        """True if torch has compiled in the last step."""
        return self._steps[-1].compiles

    def means(self) -> StepMeans:
        """Means of the steps since the last call."""
        num_all = len(self._steps)
        ended = [step for step in self._steps if step.items]  # one that never ended has none
        steps = [step for step in ended if not step.compiles] or ended
        items = sum(step.items for step in steps)
        self._steps = []
        if self._on_gpu:
            torch.cuda.synchronize()
        totals = dict.fromkeys(self.phases, 0.0)
        for step in steps:
            for (_, before), (phase, after) in pairwise(step.marks):
                totals[phase] += self._seconds(before, after)
        num = max(1, len(steps))
        total = sum(totals.values())
        compiling = [step.marks for step in ended if step.compiles]
        return StepMeans(
            phases={phase: seconds / num for phase, seconds in totals.items()},
            steps=num_all,
            items_per_step=items / num,
            step_time_s=total / num,
            compiling_s=sum(self._seconds(marks[0][1], marks[-1][1]) for marks in compiling),
        )

    def _now(self) -> Any:
        if not self._on_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3 if self._on_gpu else end - start


class StepLog:
    """Losses and gradient norms of the steps since the last report, left on the device.

    Reading one number from a GPU makes the host wait for it, so all wait until ``collect``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loss_sums: list[torch.Tensor] = []
        self._norms: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self.save_asked = False
        """True if any rank requested a checkpoint at the last ``collect``."""
        self._began = time.monotonic()
        self.step_s = math.inf
        """Mean duration of the steps of the last ``collect``, the same on every rank; infinite
        before."""

    def add(self, *, loss_sum: torch.Tensor, norm: torch.Tensor, size: int) -> None:
        """Note a step: this rank's summed loss (scalar), the gradient norm, the global batch."""
        self._loss_sums.append(loss_sum.detach())
        self._norms.append(norm)
        self._sizes.append(size)

    def collect(self, *, stop: bool, save: bool = False) -> tuple[list[StepMetrics], bool]:
        """Sum the losses over all ranks in one reduction; every rank gets the same answer.

        Args:
            stop: Whether this rank was asked to end.
            save: Whether a checkpoint is due by this rank's clock; ``save_asked`` is the answer.

        Returns:
            The steps since the last call, and whether any rank was asked to end.
        """
        before, self._began = self._began, time.monotonic()
        own = torch.tensor([float(stop), float(save), self._began - before], device=self._device)
        reduced = torch.cat([torch.stack(self._loss_sums), own])
        world_size = dist.get_world_size()
        if world_size > 1:
            dist.all_reduce(reduced)
        *sums, stop_votes, save_votes, seconds = reduced.tolist()
        self.save_asked = save_votes > 0
        self.step_s = seconds / world_size / len(sums)
        norms = torch.stack(self._norms).tolist()
        steps = [
            StepMetrics(loss=total / size, grad_norm=norm, size=size)
            for total, norm, size in zip(sums, norms, self._sizes, strict=True)
        ]
        self._loss_sums, self._norms, self._sizes = [], [], []
        return steps, stop_votes > 0


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held so far: allocated on its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib if sys.platform == "darwin" else kib * 1024  # macOS counts bytes


class _Sample(ctypes.Structure):
    """NVML's ``nvmlSample_t``: Unix time in microseconds, and a value of eight bytes."""

    _fields_ = (
        ("time", ctypes.c_ulonglong),
        ("percent", ctypes.c_uint),
        ("unused", ctypes.c_uint),
    )


class GpuUse:
    """Utilization of a GPU: the share of time in which any kernel ran, those that wait for other
    workers included.

    The driver takes five samples a second and keeps them for 14 s (H100). Reading them takes 2 ms
    and waits for no kernel. The library belongs to the driver: no package is needed.
    """

    _UTILIZATION: Final = 1  # NVML_GPU_UTILIZATION_SAMPLES
    _MOST: Final = 128  # samples that the driver keeps
    _EVERY_S: Final = 5.0

    def __init__(
        self,
        device: torch.device,
        *,
        load: Callable[[str], Any] = ctypes.CDLL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml: Any = None
        """None where it is not known: on a CPU, or without the driver's library."""
        self._gpu, self._seen, self._clock = ctypes.c_void_p(), 0, clock
        self._percents: list[int] = []
        if device.type != "cuda":
            return
        # By its UUID: torch counts only those in CUDA_VISIBLE_DEVICES, NVML all of the host.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        try:
            nvml = load("libnvidia-ml.so.1")
        except OSError:
            return
        if not (
            nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._gpu))
        ):
            self._nvml = nvml
        self.take()  # what was before

    def read(self, *, now: bool = False) -> None:
        """Read the samples, now or if some seconds have passed since the last call."""
        if self._nvml is not None and (now or self._clock() - self._read_at >= self._EVERY_S):
            self._read()

    def drop(self) -> None:
        """Leave out the samples since they were read."""
        num = len(self._percents)
        self.read(now=True)
        del self._percents[num:]

    def take(self) -> float | None:
        """Mean since the last call, 0 to 1; None where it is not known."""
        if self._nvml is not None:
            self._read()
        percents, self._percents = self._percents, []
        return statistics.fmean(percents) / 100 if percents else None

    def _read(self) -> None:
        self._read_at = self._clock()
        samples, num, kind = (_Sample * self._MOST)(), ctypes.c_uint(self._MOST), ctypes.c_uint()
        failed = self._nvml.nvmlDeviceGetSamples(
            self._gpu,
            self._UTILIZATION,
            ctypes.c_ulonglong(self._seen),
            ctypes.byref(kind),
            ctypes.byref(num),
            samples,
        )
        if failed:  # none are new, or a part of a GPU (MIG) has none
            return
        # The last one may come again.
        new = [each for each in samples[: num.value] if each.time > self._seen]
        self._percents += [each.percent for each in new]
        self._seen = max((each.time for each in new), default=self._seen)


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


class StepWatch:
    """Measures the collectives of one step between two evaluations: the last but one, when speeds
    have settled, and never the first of the run. Every rank has one, and they watch together."""

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
        self._number = self._next = 0
        self.is_watching = False
        """True if the latest step is the measured one, which takes longer than others."""

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

    def rest(self, ranks: Sequence[RankTimes]) -> None:
        """Watch no step for some time, if one has just been measured; the same on every rank.

        Args:
            ranks: the times of all of them.
        """
        if self._has_found:
            step_s = max(each.step_time_s for each in ranks)
            self._next = self._number + math.ceil(self._rest_s / max(step_s, 1e-6))


def union_length(spans: Sequence[tuple[float, float]]) -> float:
    """Length of what sorted intervals cover together."""
    covered, reached = 0.0, -math.inf
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
