"""Bandwidth between three hosts of which one is slow: the run fails, and names it.

The hosts are network namespaces of this machine, joined by a bridge; Linux limits what each sends.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

RATES_MBIT = (800, 80, 800)
SLOW = 1


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def name(number: int) -> str:
    return f"b{os.getpid() % 10_000}n{number}"


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of the network namespaces, 10.214.77.1 to .3."""
    switch = name(9)
    try:
        # In a namespace of its own, where no firewall of Docker's looks at what passes.
        run("ip", "netns", "add", switch)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
    names = [name(number) for number in range(len(RATES_MBIT))]
    try:
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
        yield names
    finally:
        for host in (*names, switch):
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def test_a_slow_host_fails_the_run_and_is_named(hosts: list[str], tmp_path: Path) -> None:
    words = ["bandwidth", "--preset", "quick", "--max-bytes", "4194304"]
    words += ["--seconds-each", "0.2", "--floor", "0.05"]
    started = []
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
        ended = [each.communicate(timeout=200) for each in started]
    finally:
        for each in started:
            each.kill()
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
    assert table["title"].startswith("3 workers on 3 hosts, gloo over TCP. Bus bandwidth in GB/s:")
