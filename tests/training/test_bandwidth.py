"""The recipe that measures the network: its formulas, its settings, and a run of it."""

import os
from pathlib import Path

import pytest

from contract.errors import InputError
from contract.nodes import Range
from training.recipes.bandwidth import links
from training.recipes.bandwidth.links import Timing
from training.recipes.bandwidth.settings import MIB, BandwidthConfig
from training.recipes.command import read_command
from training.system.machine import EFA, check_efa, named, transport


@pytest.mark.parametrize(
    ("collective", "num_ranks", "num_bytes", "microseconds", "algorithm", "bus"),
    [
        # One, two and four p4d.24xlarge, as printed in NVIDIA/nccl issue 527.
        ("all-reduce", 8, 1073741824, 8142.6, 131.87, 230.77),
        ("all-reduce", 16, 1073741824, 35215, 30.49, 57.17),
        ("all-reduce", 32, 1073741824, 70253, 15.28, 29.61),
        # 16 GPUs, as printed in bottlerocket-os/bottlerocket-kernel-kit pull request 313.
        ("all-to-all", 16, 524288, 212.76, 2.46, 2.31),
        ("all-gather", 16, 65536, 122.32, 0.54, 0.50),
    ],
)
def test_bandwidths_are_those_that_nccl_tests_prints(
    collective: str,
    num_ranks: int,
    num_bytes: int,
    microseconds: float,
    algorithm: float,
    bus: float,
) -> None:
    seconds = microseconds / 1e6
    timing = Timing(collective=collective, num_bytes=num_bytes, seconds=seconds, slowest_s=seconds)
    assert timing.algorithm_gb_per_s == pytest.approx(algorithm, abs=0.006)
    assert timing.bus_gb_per_s(num_ranks) == pytest.approx(bus, abs=0.006)


def test_one_rank_sends_nothing() -> None:
    timing = Timing(collective="all-reduce", num_bytes=8, seconds=1e-6, slowest_s=1e-6)
    assert timing.bus_gb_per_s(1) == 0


def config(*words: str) -> BandwidthConfig:
    found = read_command(["bandwidth", *words], run="r", workers=Range(2, 2))
    assert isinstance(found, BandwidthConfig)
    return found


def test_sizes_grow_by_the_factor_up_to_the_largest() -> None:
    assert config("--max-bytes", "100").sizes(on_gpu=False) == [8, 16, 32, 64]
    assert config("--min-bytes", "64", "--factor", "100").sizes(on_gpu=False) == [
        64,
        6400,
        640_000,
        64_000_000,
    ]
    assert config().sizes(on_gpu=False)[-1] == 64 * MIB
    assert config().sizes(on_gpu=True)[-1] == 4096 * MIB
    assert config("--preset", "quick").sizes(on_gpu=False) == [MIB, 8 * MIB, 64 * MIB]


def test_what_the_hosts_should_reach_follows_from_their_type() -> None:
    assert config("--instance", "g5.12xlarge").expected_gb_per_s == 5.0
    assert config().expected_gb_per_s is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--collectives", "all-reduce,broadcast"], "names 'broadcast': choose of all-reduce,"),
        (["--collectives", ""], "names '': choose of all-reduce,"),
        (["--min-bytes", "1024", "--max-bytes", "512"], "must be at least --min-bytes, 1024"),
        (["--instance", "g5.13xlarge"], "instance type 'g5.13xlarge' is not known"),
        (["--floor-share", "0.7"], "--floor-share needs --instance"),
        (["--collectives", "all-gather", "--floor", "1"], "a floor is one of the all-reduce"),
        (["--factor", "1"], "--factor is 1: it must be at least 2"),
        (["--lr", "1"], "unknown option --lr"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_settings_that_make_no_sense_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        config(*words)
    assert message in str(caught.value)


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


def test_nccls_log_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "%p.log"))
    log = tmp_path / f"{os.getpid()}.log"
    log.write_text("x NCCL INFO Using network Socket\n")
    assert transport("nccl", num_hosts=2) == "NCCL over Socket"
    assert not log.exists()
    assert transport("nccl", num_hosts=2) == "NCCL over an unknown network"
    assert transport("nccl", num_hosts=1) == "NCCL within the host"
    assert transport("gloo", num_hosts=2) == "gloo over TCP"


@pytest.mark.parametrize(
    ("log", "more", "num_hosts", "backend", "fault"),
    [
        ("NET/OFI Selected Provider is efa (found 4 nics)\n", {}, 2, "nccl", ""),
        ("NCCL INFO Using network Socket\n", {}, 2, "nccl", "and NCCL uses Socket"),
        (None, {}, 2, "nccl", "and NCCL uses an unknown network"),
        ("NCCL INFO Using network Socket\n", {}, 1, "nccl", ""),
        ("NCCL INFO Using network Socket\n", {}, 2, "gloo", ""),
        ("NCCL INFO Using network Socket\n", {"TRAIN_EFA": "0"}, 2, "nccl", ""),
        ("NCCL INFO Using network Socket\n", {"NCCL_NET": "Socket"}, 2, "nccl", ""),
    ],
    ids=["efa", "tcp", "no log", "one host", "gloo", "off", "chosen"],
)
def test_a_host_with_efa_that_is_not_used_ends_the_run_with_the_reason(
    tmp_path: Path, log: str | None, more: dict[str, str], num_hosts: int, backend: str, fault: str
) -> None:
    if log is not None:
        (tmp_path / f"{os.getpid()}.log").write_text(log)
    found = {"TRAIN_EFA": "4", "NCCL_DEBUG_FILE": str(tmp_path / "%p.log"), **more}
    if not fault:
        check_efa(found, backend=backend, num_hosts=num_hosts)
        return
    with pytest.raises(InputError, match=fault) as caught:
        check_efa(found, backend=backend, num_hosts=num_hosts)
    assert "deploy with -c efa=off" in str(caught.value)


def test_a_slow_host_is_told_from_a_slow_link() -> None:
    def speeds(**slow: float) -> dict[tuple[str, str], float]:
        names = ("a", "b", "c")
        return {(x, y): slow.get(x + y, 1.2) for x in names for y in names if x != y}

    assert links.slow(speeds()) == ""
    assert links.slow(speeds(ab=0.8, cb=1.0)) == ""
    assert links.slow(speeds(ba=0.1, bc=0.12)) == (
        "host b is slow: it sends to no other host at more than 0.12 GB/s, and others reach "
        "1.2 GB/s"
    )
    assert "host c is slow: it receives from" in links.slow(speeds(ac=0.1, bc=0.1))
    assert links.slow(speeds(ba=0.1, bc=0.1, ab=0.1, cb=0.1)).startswith("host b is slow: it sends")
    assert links.slow(speeds(ab=0.1)) == (
        "the link from host a to host b is slow: 0.1 GB/s, and others reach 1.2 GB/s"
    )
    assert "link from host b to host a" in links.slow({("a", "b"): 1.0, ("b", "a"): 0.1})
