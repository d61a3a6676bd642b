"""Bandwidth between three hosts of which one is slow: the run fails, and names it.

The hosts are network namespaces of this machine, joined by a bridge; Linux limits what each sends.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long]

RATES_MBIT = (800, 80, 800)
SLOW = 1


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def quietly(*words: str) -> None:
    subprocess.run(words, check=False, capture_output=True)


def connect(switch: str, names: list[str]) -> None:
    """Make the hosts, and the bridge that joins them."""
    # In a namespace of its own, where no firewall of Docker's looks at what passes.
    run("ip", "netns", "add", switch)
    run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    run("ip", "-n", switch, "link", "set", "bridge", "up")
    for number, (host, rate) in enumerate(zip(names, RATES_MBIT, strict=True)):
        run("ip", "netns", "add", host)
        run("ip", "link", "add", f"{host}a", "type", "veth", "peer", "name", f"{host}b")
        run("ip", "link", "set", f"{host}a", "netns", switch)
        run("ip", "-n", switch, "link", "set", f"{host}a", "master", "bridge", "up")
        run("ip", "link", "set", f"{host}b", "netns", host, "name", "eth0")
        run("ip", "-n", host, "addr", "add", f"10.214.77.{number + 1}/24", "dev", "eth0")
        run("ip", "-n", host, "link", "set", "eth0", "up")
        run("ip", "-n", host, "link", "set", "lo", "up")
        limit = ["tbf", "rate", f"{rate}mbit", "burst", "256kb", "latency", "50ms"]
        run("ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", "eth0", "root", *limit)


def end_all(host: str) -> None:
    """Kill what runs on a host."""
    found = subprocess.run(
        ["ip", "netns", "pids", host], check=True, capture_output=True, text=True
    )
    for process in map(int, found.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of the network namespaces, 10.214.77.1 to .3."""
    mark = f"b{secrets.token_hex(4)}"  # names of namespaces are the machine's
    switch, names = f"{mark}s", [f"{mark}{number}" for number in range(len(RATES_MBIT))]
    try:
        try:
            connect(switch, names)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no such network can be made here: {getattr(error, 'stderr', error)}")
        yield names
    finally:
        with contextlib.suppress(FileNotFoundError):
            for host in names:  # one whose way into its namespace failed
                quietly("ip", "link", "del", f"{host}a")
            for host in (*names, switch):
                quietly("ip", "netns", "del", host)


def test_a_slow_host_fails_the_run_and_is_named(hosts: list[str], tmp_path: Path) -> None:
    words = ["bandwidth", "--preset", "quick", "--max-bytes", "4194304"]
    words += ["--floor", "0.05"]
    started: list[subprocess.Popen[str]] = []
    deadline = time.monotonic() + 400
    for number, host in enumerate(hosts):
        named = f'hostname host-{number} && exec "$0" "$@"'
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts))),
            *("--node-rank", str(number), "--nproc-per-node", "1"),
            *("--master-addr", "10.214.77.1", "--master-port", "29500"),
            *("-m", "training.launch", "--", *words),
            *("--storage", str(tmp_path), "--run", "net", "--json"),
        ]
        started.append(
            subprocess.Popen(
                # Each with a host name of its own, which is what it is told apart by.
                ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", named, *torchrun],
                cwd=ROOT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        ended = [
            each.communicate(timeout=max(deadline - time.monotonic(), 0.1)) for each in started
        ]
    finally:
        for host in hosts:  # the agents, and their workers, which are in sessions of their own
            end_all(host)
        for each in started:
            each.wait(timeout=10)
    said = ended[0][1]
    assert started[0].returncode != 0, said
    slow = RATES_MBIT[SLOW] / 8 / 1e3  # GB/s
    result = json.loads((tmp_path / "net" / "result.json").read_text())
    assert result["status"] == "failed"
    assert f"host host-{SLOW} is slow: it sends to no other host at more than" in result["error"]
    assert "below the floor of 0.05 GB/s" in result["error"]
    assert result["error"] in said
    # Limits of the kernel, not of this machine: less may pass, more may not.
    assert 0 < result["slowest_link"] <= 1.2 * slow
    assert 0 < result["all_reduce"] <= 1.5 * slow
    table = json.loads((tmp_path / "net" / "evaluation.json").read_text())
    assert [row[0] for row in table["rows"]] == [1 << 20]
    assert table["title"].startswith("3 workers on 3 hosts, gloo over TCP. Bus bandwidth of an")
