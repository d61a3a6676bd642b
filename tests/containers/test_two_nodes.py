"""A head and a worker on two hosts: they find each other, and end as they should.

The hosts are network namespaces of this machine, each with an address and an interface of its own,
so that nothing can work by accident over loopback. Real Ray, real entry point.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract import exits
from tests.conftest import ROOT
from tests.eventually import eventually

pytestmark = pytest.mark.slow

HEAD, WORKER = "10.213.77.1", "10.213.77.2"
TOKEN = "0123456789abcdef0123"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Host:
    """One network namespace, and what runs in it."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address, self.folder = name, address, folder
        folder.mkdir()
        self.ray_folder = Path(tempfile.mkdtemp(dir="/tmp"))
        self.processes: list[subprocess.Popen[bytes]] = []

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, sys.executable, "-m", *arguments]

    def environment(self, **changed: str) -> dict[str, str]:
        # Ray's sockets lie in its temporary folder, and a path to a socket has 107 characters.
        return {
            **os.environ,
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_AUTH_MODE": "token",
            "RAY_TMPDIR": str(self.ray_folder),
            "TRAIN_HEAD_ADDRESS": HEAD,
            "TRAIN_NUM_CPUS": "1",
            "TRAIN_NUM_GPUS": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "3",  # times.RAY_RECONNECT_S otherwise
            **changed,
        }

    def start(self, kind: str, **changed: str) -> subprocess.Popen[bytes]:
        """Start the entry point of a node, as the container does."""
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                self.command("containers", kind),
                cwd=ROOT,
                env=self.environment(**changed),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def run(self, *arguments: str, **changed: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=ROOT,
            env=self.environment(**changed),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def is_healthy(self, kind: str) -> bool:
        return self.run("containers.health", TRAIN_NODE=kind).returncode == 0

    def said(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def kill(self) -> None:
        """What a lost host does: everything on it is gone at once."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False
        ).stdout.split()
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.processes:
            process.wait(timeout=60)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them."""
    # Namespaces and cables are the machine's, and so are their names.
    mark = secrets.token_hex(4)
    names = f"h{mark}", f"w{mark}"
    try:
        ip("netns", "add", names[0])
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
    pair = Host(names[0], HEAD, tmp_path / "head"), Host(names[1], WORKER, tmp_path / "worker")
    try:
        ip("netns", "add", names[1])
        cable = f"e{mark}a", f"e{mark}b"
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for host, end in zip(pair, cable, strict=True):
            ip("link", "set", end, "netns", host.name)
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", end)
            ip("-n", host.name, "link", "set", end, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield pair
    finally:
        for host in pair:
            host.kill()
            subprocess.run(["ip", "netns", "del", host.name], check=False)
            shutil.rmtree(host.ray_folder, ignore_errors=True)


def waits_for_its_head(worker: Host) -> None:
    eventually("worker waits", lambda: "waiting for the head" in worker.said(), every_s=0.5)


def wait_for_health(host: Host, kind: str) -> None:
    eventually(f"{kind} is healthy", lambda: host.is_healthy(kind), timeout_s=120, every_s=0.5)


@pytest.mark.long
def test_two_nodes_leave_when_told_or_without_a_head(hosts: tuple[Host, Host]) -> None:
    head, worker = hosts
    first = worker.start("worker")
    waits_for_its_head(worker)
    coordinator = head.start("head")
    wait_for_health(head, "head")
    wait_for_health(worker, "worker")

    # A node with another token is refused, and says that it is the token.
    stranger = worker.run("containers", "worker", RAY_AUTH_TOKEN="another-token-of-20-chars")
    assert stranger.returncode == exits.REFUSED
    assert "refuses this node's token" in stranger.stderr

    def num_drained() -> int:
        logs = head.ray_folder.glob("ray/session_latest/logs/raylet*.out")  # of both nodes
        return sum("The node is drained" in each.read_text() for each in logs)

    def leave(host: Host, process: subprocess.Popen[bytes]) -> None:
        before = num_drained()
        process.terminate()  # as ECS does; Ray drains
        assert process.wait(timeout=90) == exits.OK
        assert num_drained() == before + 1
        assert "Draining" not in host.said(), "a good end has no notes of Ray's"
        assert host.said().rstrip().endswith("ended normally")

    leave(worker, first)
    # Its successor ends by itself once there is no head.
    second = worker.start("worker")
    wait_for_health(worker, "worker")
    leave(head, coordinator)
    assert second.wait(timeout=120) == exits.NO_HEAD
    assert "the head is lost" in worker.said()


def test_a_worker_without_a_head_gives_up_and_says_so(hosts: tuple[Host, Host]) -> None:
    _, worker = hosts
    process = worker.start("worker", TRAIN_HEAD_WAIT_S="2")
    assert process.wait(timeout=60) == exits.NO_HEAD
    assert f"giving up after 2 s: {HEAD}:6379 does not answer" in worker.said()


def test_a_worker_that_is_stopped_while_it_waits_ends_at_once(hosts: tuple[Host, Host]) -> None:
    _, worker = hosts
    process = worker.start("worker")
    waits_for_its_head(worker)
    process.terminate()
    assert process.wait(timeout=10) == exits.TERMINATED
