"""The recipe that measures the network: its formulas, its settings, and a run of it."""

import os
import socket
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from contract.errors import InputError
from contract.nodes import Range
from tests import forks
from training.bandwidth import train as bandwidth
from training.bandwidth.settings import MIB, BandwidthConfig
from training.bandwidth.train import Timing, bus_gb_per_s, train
from training.command import read_command
from training.record.events import Event, Warned
from training.runtime.torchrun import TorchrunWorker
from training.system.devices import EFA, check_efa, named, transport


@pytest.mark.parametrize(
    ("num_ranks", "algorithm", "bus"),
    [
        # One, two and four p4d.24xlarge, 1 GiB, as printed in NVIDIA/nccl issue 527.
        (8, 131.87, 230.77),
        (16, 30.49, 57.17),
        (32, 15.28, 29.61),
        (1, 20.0, 0.0),  # sends nothing
    ],
)
def test_bandwidths_are_those_that_nccl_tests_prints(
    num_ranks: int, algorithm: float, bus: float
) -> None:
    assert bus_gb_per_s(algorithm, num_ranks) == pytest.approx(bus, abs=0.011)


def config(*words: str) -> BandwidthConfig:
    found = read_command(["bandwidth", *words], run="r", workers=Range(2, 2))
    assert isinstance(found, BandwidthConfig)
    return found


def test_sizes_grow_by_the_factor_up_to_the_largest() -> None:
    assert config("--max-bytes", "100").sizes(on_gpu=False) == [8, 16, 32, 64]
    assert config().sizes(on_gpu=False)[-1] == 64 * MIB
    assert config().sizes(on_gpu=True)[-1] == 4096 * MIB
    assert config("--preset", "quick").sizes(on_gpu=False) == [MIB, 8 * MIB, 64 * MIB]


@pytest.mark.parametrize(
    ("log", "name"),
    [
        ("ip-1:1:1 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)\n", EFA),
        (
            "a:1:2 [0] NCCL INFO NET/OFI Selected provider is tcp, fabric is x\n",
            "libfabric provider tcp",
        ),
        ("a:1:2 [0] NCCL INFO Using network Socket\n", "Socket"),
        (
            "a:1:2 [0] NCCL INFO Using network AWS Libfabric\nb NET/OFI Selected Provider is efa\n",
            EFA,
        ),
        ("a:1:2 [0] NCCL INFO NET/IB : No device found.\n", "IB"),
        ("a:1:2 [0] NCCL INFO cudaDriverVersion 13000\n", ""),
    ],
    ids=["efa", "tcp", "socket", "plug-in", "infiniband", "none"],
)
def test_the_network_is_the_one_that_nccl_names(log: str, name: str) -> None:
    assert named(log) == name


def test_nccls_log_is_read_and_stays_where_a_user_may_want_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "%p.log"))
    log = tmp_path / f"{os.getpid()}.log"
    log.write_text("x NCCL INFO Using network Socket\n")
    assert transport("nccl", num_hosts=2) == "NCCL over Socket"
    assert log.exists()
    log.write_text("")
    assert transport("nccl", num_hosts=2) == "NCCL over an unknown network"
    assert transport("nccl", num_hosts=1) == "NCCL within the host"
    assert transport("gloo", num_hosts=2) == "gloo over TCP"


@pytest.mark.parametrize(
    ("log", "more", "num_hosts", "backend", "fault"),
    [
        ("NET/OFI Selected Provider is efa (found 4 nics)\n", {}, 2, "nccl", ""),
        ("NCCL INFO Using network Socket\n", {}, 2, "nccl", "and NCCL uses Socket"),
        ("NCCL INFO Using network Socket\n", {}, 1, "nccl", ""),
        ("NCCL INFO Using network Socket\n", {"TRAIN_EFA": "0"}, 2, "nccl", ""),
        ("NCCL INFO Using network Socket\n", {"NCCL_NET": "Socket"}, 2, "nccl", ""),
    ],
    ids=["efa", "tcp", "one host", "off", "chosen"],
)
def test_a_host_with_efa_that_is_not_used_ends_the_run_with_the_reason(
    tmp_path: Path, log: str, more: dict[str, str], num_hosts: int, backend: str, fault: str
) -> None:
    (tmp_path / f"{os.getpid()}.log").write_text(log)
    found = {"TRAIN_EFA": "4", "NCCL_DEBUG_FILE": str(tmp_path / "%p.log"), **more}
    if not fault:
        check_efa(found, backend=backend, num_hosts=num_hosts)
        return
    with pytest.raises(InputError, match=fault):
        check_efa(found, backend=backend, num_hosts=num_hosts)


@pytest.mark.parametrize(
    ("counts", "device", "is_right", "fault"),
    [
        ([10, 9], "cuda", True, ""),
        ([10, 10, 7], "cuda", True, "rank 2 on c"),
        ([10, 10, 7], "cpu", True, ""),
        ([10, 10], "cuda", False, "b, cuda"),
    ],
)
def test_a_burn_in_names_the_gpu_that_is_slow_or_wrong(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], device: str, is_right: bool, fault: str
) -> None:
    matrix = torch.ones(2, 2)

    def gather(found: list[int], num: int) -> None:
        assert num > 0
        found[:] = counts

    monkeypatch.setattr("training.bandwidth.train.time.monotonic", count().__next__)
    monkeypatch.setattr(torch, "randn", lambda *_, **__: matrix)
    monkeypatch.setattr(torch, "equal", lambda *_: is_right)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(RuntimeError, match=fault) if fault else nullcontext():
        bandwidth._burn_in(3, torch.device(device), [*"abc"][: len(counts)])


def measured(folder: str) -> list[Event]:
    """Measure as one of two hosts."""
    worker = TorchrunWorker(run_uri=folder)
    events: list[Event] = []
    worker.on_events = lambda *found: events.extend(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"host-{worker.rank}")
        train(worker, config("--preset", "quick", "--max-bytes", "4194304", "--burn-in-s", "1"))
    worker.close()
    return events


@pytest.mark.slow
def test_a_size_is_measured_over_all_workers(tmp_path: Path) -> None:
    *_, scored, end = forks.run(2, measured, str(tmp_path))[0]
    assert scored.place == "1.0 MB, gloo over TCP"
    assert end.measures == scored.measures
    [row] = end.evaluation.rows
    assert (row[0], row[4]) == (1 << 20, end.measures["all_reduce"])
    assert end.evaluation.title.startswith("2 workers on 2 hosts, gloo over TCP. Bus bandwidth of")
    alone = forks.run(1, measured, str(tmp_path / "alone"))[0]
    assert [each.message[:15] for each in alone if isinstance(each, Warned)] == ["a single worker"]


def test_a_stall_of_one_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([2.0, 0.2, 0.3, 5.0, 0.3, 0.3])
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", lambda _: None)
    monkeypatch.setattr(bandwidth, "_repeated", lambda *_: Timing(*[next(seconds)] * 2))
    assert bandwidth._timed(1024, torch.device("cpu")) == Timing(0.3, 0.3)
