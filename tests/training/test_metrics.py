"""Proves that times, rates and losses are summed as they should be, in one process and in two."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist

from tests import forks
from tests.training import test_bookkeeping
from training.loop import metrics
from training.loop.worker import Pulse
from training.record.events import Evaluating, RankTimes
from training.record.fields import Rate

CPU = torch.device("cpu")


def test_the_phases_of_a_step_add_up_to_the_step() -> None:
    now = iter([0.0, 1.0, 3.0, 10.0, 13.0, 17.0, 20.0, 29.0])
    timer = metrics.StepTimer(("data", "forward"), CPU, clock=lambda: next(now))
    for _ in range(2):
        timer.start()
        timer.mark("data")
        timer.mark("forward", items=8)
    timer.start()  # a step that never ended is not in the means
    timer.mark("data")
    means = timer.means()
    assert means.phases == {"data": 2.0, "forward": 3.0}
    assert (means.steps, means.items_per_step, means.step_time_s) == (3, 8, 5.0)
    assert timer.means() == ({"data": 0.0, "forward": 0.0}, 0, 0, 0, 0)


def test_steps_that_compile_and_waits_for_saves_are_not_in_the_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three steps of 1 s, 0.5 s of which wait for a save, after one that compiled for a minute and
    graphs of an evaluation between them."""
    now, graphs = [0.0], [0]
    timer = metrics.StepTimer(
        ("forward", "checkpoint"), CPU, clock=lambda: now[0], graphs=lambda: graphs[0]
    )
    for number, (compiled, seconds) in enumerate([(7, 60.0), (0, 0.5), (0, 0.5), (0, 0.5)]):
        timer.start()
        now[0] += seconds
        graphs[0] += compiled
        timer.mark("forward", items=8)
        assert timer.has_compiled() == (number == 0)
        if number:
            now[0] += 0.5
            timer.mark("checkpoint")
        graphs[0] += 1
    means = timer.means()
    assert (means.steps, means.step_time_s, means.compiling_s) == (4, 1.0, 60.0)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_gather_object", lambda found, own: found.__setitem__(0, own))
    (event,) = replace(COURSE, world_size=1).ranks(means, step=4, epoch=1)
    assert (event.items_per_s, event.compiling_s) == (16, 60)


def test_torch_counts_the_graphs_that_it_compiles() -> None:
    before = metrics.num_graphs()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert metrics.num_graphs() == before + 1


COURSE = replace(test_bookkeeping.COURSE, flops_per_item=1e12, world_size=2)


def test_mfu_is_work_over_peak_and_unknown_without_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = Rate(items="images", per_s=125.0)
    ranks = [replace(each, rate=rate) for each in times((None, None))]
    scored = partial(COURSE.evaluation, ranks, measures={}, train_loss=1.0, seconds=1.0)
    assert scored().mfu is None
    monkeypatch.setattr(metrics, "peak_flops", lambda _device: 2.5e14)
    assert scored().mfu == pytest.approx(0.5)


def test_the_peak_is_that_of_the_gpu_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tflops in {
        "NVIDIA A10G": 70,
        "NVIDIA L40S": 362,
        "NVIDIA L4": 121,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", Mock(return_value=name))
        assert metrics.peak_flops(torch.device("cuda", 0)) == tflops * 1e12
    monkeypatch.setattr(torch.cuda, "get_device_name", Mock(return_value="Quadro P1000"))
    assert metrics.peak_flops(torch.device("cuda", 0)) is None


class Driver:
    """Stand-in for NVML: five samples a second, of which it keeps the last 71."""

    def __init__(self) -> None:
        self.nvmlInit_v2 = lambda: 0
        self.nvmlDeviceGetHandleByUUID = lambda uuid, _: 6 * (uuid != b"GPU-bb3f9cc3")
        self.nvmlDeviceGetSamples = Mock(side_effect=self._samples)
        self.kept = [(1_795_833_756_973_507, 0)]

    def ran(self, seconds: int, percent: int) -> None:
        last, _ = self.kept[-1]
        new = [(last + 200_000 * each, percent) for each in range(1, 5 * seconds + 1)]
        self.kept = [*self.kept, *new][-71:]

    def _samples(self, _: Any, kind: int, since: Any, __: Any, num: Any, samples: Any) -> int:
        assert (kind, num._obj.value) == (1, len(samples))
        new = [each for each in self.kept if each[0] >= since.value]
        num._obj.value = len(new)
        for place, (at, percent) in enumerate(new):
            samples[place].time, samples[place].percent = at, percent
        return 0


GPU = torch.device("cuda", 0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A host with a GPU, and its driver."""
    found = SimpleNamespace(uuid="bb3f9cc3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    return Driver()


def test_use_of_a_gpu_is_the_mean_of_all_samples_since_the_last(driver: Driver) -> None:
    driver.ran(3, 7)
    now = [0.0]
    used = metrics.GpuUse(GPU, load=lambda _: driver, clock=lambda: now[0])
    assert used.take() is None, "what was before does not count, nor do no samples"
    for percent in (100, 50, 0):  # more than the driver keeps
        driver.ran(12, percent)
        now[0] += 12
        used.read()
    assert used.take() == pytest.approx(0.5)
    driver.ran(2, 80)
    used.read(now=True)
    driver.ran(4, 10)  # as in a save
    used.drop()
    assert used.take() == pytest.approx(0.8)
    num_reads = driver.nvmlDeviceGetSamples.call_count
    for _ in range(20):  # reports of a fast run
        now[0] += 1
        used.read()
    assert driver.nvmlDeviceGetSamples.call_count <= num_reads + 4


def test_use_is_absent_without_a_gpu_or_what_knows_it(driver: Driver) -> None:
    driver.ran(3, 90)
    unknown = Driver()
    unknown.nvmlDeviceGetHandleByUUID = lambda *_: 6
    without = Mock(side_effect=OSError("libnvidia-ml.so.1: cannot open shared object file"))
    for device, load in ((CPU, lambda _: driver), (GPU, without), (GPU, lambda _: unknown)):
        used = metrics.GpuUse(device, load=load)
        used.read()
        assert used.take() is None
    scored = partial(COURSE.evaluation, measures={}, train_loss=1.0, seconds=1.0)
    ranks = times((None, None))
    assert scored(ranks).gpu_utilization is None
    busy = [replace(each, gpu_utilization=0.5 + each.rank / 2) for each in ranks]
    assert scored(busy).gpu_utilization == 0.75


def gathered(own: object) -> list[Any]:
    """What each rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def wait_for_a_slow_rank(rank: int) -> None:
    """Rank 1 comes 0.2 s later to a collective: what rank 0 waits is its communication."""
    with metrics.Communication(CPU) as watched:
        time.sleep(0.2 * rank)
        dist.all_reduce(torch.ones(10))
    waits = gathered(watched.seconds())
    assert waits[0] > waits[1] > 0


def two_ranks() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = metrics.StepLog(CPU)
    # Shares of 5 and 3 images: the mean is over the images, not over the ranks.
    log.add(loss_sum=torch.tensor([10.0, 6.0][rank]), norm=torch.tensor(1.5), size=8)
    log.add(loss_sum=torch.tensor([math.nan, 6.0][rank]), norm=torch.tensor(2.5), size=8)
    steps, stopping = log.collect(stop=rank == 1)
    assert stopping
    assert (steps[0].loss, steps[0].grad_norm, steps[0].size) == (2.0, 1.5, 8)
    assert not steps[1].is_finite
    log.add(loss_sum=torch.tensor(4.0), norm=torch.tensor(1.0), size=8)
    assert not log.save_asked
    steps, stopping = log.collect(stop=False, save=rank == 0)
    assert log.save_asked
    assert not stopping
    assert [step.loss for step in steps] == [1.0]
    wait_for_a_slow_rank(rank)
    means = metrics.StepMeans({"data": rank + 0.1}, 3, 8, 5.0)
    ranks = COURSE.ranks(means, step=4, epoch=1)
    assert [(each.rank, each.phases["data"], each.items_per_s) for each in ranks] == [
        (0, 0.1, 1.6),
        (1, 1.1, 1.6),
    ]


def test_losses_stops_and_times_are_shared_by_all_ranks() -> None:
    forks.run(2, two_ranks)


def test_time_that_collectives_share_counts_once() -> None:
    assert metrics.union_length([]) == 0
    assert metrics.union_length([(0, 4), (1, 2), (3, 6), (10, 11)]) == 7


def times(waits: Sequence[float | None], *, step_s: float = 1.0) -> list[RankTimes]:
    return [
        RankTimes(step=1, epoch=1, rank=rank, step_time_s=step_s, communication_s=each)
        for rank, each in enumerate(waits)
    ]


def watch_of_two(**options: float) -> metrics.StepWatch:
    """Of two workers, which are evaluated after every other step."""
    return metrics.StepWatch(CPU, world_size=2, evaluates=lambda done: done % 2 == 0, **options)


def test_watching_takes_little_of_a_run_and_none_of_its_first_step() -> None:
    for began_at, rest_s, expected in [(0, 0.0, [3, 5, 7, 9]), (2, 0.0, [5, 7, 9]), (0, 1, [3, 9])]:
        watch, watched = watch_of_two(rest_s=rest_s), list[int]()
        for step in range(began_at + 1, 11):
            with watch.step(step):
                watched += [step] * watch.is_watching
            if step % 2 == 0:
                assert (watch.seconds() is None) is (not watched)
                watch.rest(times((0.1, 0.1), step_s=0.3))
        assert watched == expected


def test_an_evaluation_that_takes_long_says_now_and_then_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, now = Mock(), [0.0]
    monkeypatch.setattr("training.loop.worker.time", SimpleNamespace(monotonic=lambda: now[0]))
    pulse = Pulse(worker)
    for _ in range(100):
        now[0] += 1
        pulse.beat()
    assert worker.emit.mock_calls == [call(Evaluating())] * 4
