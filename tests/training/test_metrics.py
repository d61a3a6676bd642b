"""Proves that times, rates and losses are summed as they should be, in one process and in two."""

import math
import socket
import time

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tests import forks
from training import metrics

CPU = torch.device("cpu")


def test_the_phases_of_a_step_add_up_to_the_step() -> None:
    timer = metrics.StepTimer(("data", "forward"), CPU)
    for _ in range(3):
        timer.start()
        time.sleep(0.01)
        timer.mark("data")
        time.sleep(0.02)
        timer.mark("forward", items=8)
    timer.start()  # a step that never ended does not count
    timer.mark("data")
    means = timer.means()
    assert means.phases["data"] >= 0.01
    assert means.phases["forward"] >= 0.02
    assert means.step_time_s == pytest.approx(sum(means.phases.values()))
    assert means.items_per_s == pytest.approx(8 / means.step_time_s)
    nothing = {"data": 0.0, "forward": 0.0}
    assert timer.means() == metrics.StepMeans(phases=nothing, step_time_s=0, items_per_s=0)


def test_mfu_is_work_over_peak_and_unknown_without_a_peak() -> None:
    found = metrics.model_flops_utilization(flops_per_s=5e14, num_workers=4, peak=2.5e14)
    assert found == pytest.approx(0.5)
    assert metrics.model_flops_utilization(flops_per_s=1.0, num_workers=1, peak=None) is None
    assert metrics.peak_flops(CPU) is None


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A10G", 70),
        ("Tesla T4", 65),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H200", 989),
        ("Quadro P1000", None),
    ],
)
def test_the_peak_is_that_of_the_gpu_by_its_name(
    name: str, tflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
    peak = metrics.peak_flops(torch.device("cuda", 0))
    assert peak == (tflops * 1e12 if tflops else None)


@pytest.mark.parametrize(
    ("loss", "norm", "finite"), [(1.0, 2.0, True), (math.nan, 2.0, False), (1.0, math.inf, False)]
)
def test_a_step_is_finite_if_loss_and_gradient_are(loss: float, norm: float, finite: bool) -> None:
    assert metrics.StepMetrics(loss=loss, grad_norm=norm, size=8).is_finite is finite


def two_ranks(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
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
    gathered = metrics.gather({"a": rank + 0.1, "b": 7.0}, CPU)
    assert gathered == [{"a": 0.1, "b": 7.0}, {"a": 1.1, "b": 7.0}]
    dist.destroy_process_group()


def test_losses_stops_and_times_are_shared_by_all_ranks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    start_processes(two_ranks, args=(port,), nprocs=2, start_method=forks.METHOD)


def test_time_that_collectives_share_counts_once() -> None:
    assert metrics.union_length([]) == 0
    assert metrics.union_length([(0, 4), (1, 2), (3, 6), (10, 11)]) == 7
