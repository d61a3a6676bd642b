"""Several nodes of a job on this machine: real Ray, real launchers, no containers.

Each node is a Ray node of its own with a temporary folder of its own, by which all that runs on it
is found, so that it can be lost as a host is: everything at once, by SIGKILL.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ray.cluster_utils import Cluster

from containers.host import machine
from containers.program.start.on_node import ENV_PROGRAM, LaunchSpec
from contract import nodes
from contract.job import JobSpec
from contract.nodes import Range
from tests.conftest import ROOT
from tests.eventually import eventually

#: As in a container: the programs of this environment come first.
PATH: Final = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))


def kill_all(folder: str) -> None:
    """SIGKILL for all that runs with this temporary folder, also for what is being started."""
    while there := machine.marked("TMPDIR", folder):
        for pid in there:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


class Run:
    """A program on the nodes, run by ``python -m containers.program.start.supervisor`` as on a
    job's
    head, and what both say."""

    def __init__(self, told: LaunchSpec, address: str, log: Path) -> None:
        self._log, self._first = log, len(log.read_text())
        self._said = log.with_name(f"said-{self._first}-{time.time_ns()}")
        with self._said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "containers.program.start.supervisor"],
                cwd=ROOT,
                env={**os.environ, ENV_PROGRAM: told.to_json(), "RAY_ADDRESS": address},
                stdin=subprocess.DEVNULL,
                stderr=said,
            )

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(300)

    def lines(self, number: int | None = None) -> list[str]:
        """What the program has printed on one node, or on all, without the labels."""
        return [
            line.partition("] ")[2]
            for line in self._log.read_text()[self._first :].splitlines()
            if number is None or nodes.labelled_node(line) == number
        ]

    def wait_for(self, text: str, *, times: int = 1) -> None:
        """Wait until so many lines of the program, or of its start, contain ``text``."""
        eventually(
            f"{times} x {text!r}",
            lambda: sum(text in line for line in f"{self}".splitlines()) >= times,
            timeout_s=240,
            every_s=0.1,
            over=lambda: None if self.process.poll() is None else f"{self}",
        )

    def close(self) -> None:
        """End it, and its connection to Ray, which ends its launchers."""
        if self.process.poll() is None:
            self.process.terminate()
            self.wait()

    def __str__(self) -> str:
        return self._said.read_text() + self._log.read_text()[self._first :]


class LocalNodes:
    """A Ray cluster whose head only coordinates, and its worker nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        self._run: Run | None = None
        self._log = folder / "log"
        self._log.touch()
        self.nodes: dict[str, Any] = {}
        # Ray's sockets have short paths, and its head must not be a node of the program's.
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                # Any free one: where the usual one is taken, Ray leaves a socket open.
                "dashboard_port": None,
                "env_vars": self._variables("head"),
            },
        )
        self.address = str(self.cluster.address)

    def _variables(self, name: str) -> dict[str, str]:
        place = self.folder / name
        place.mkdir()
        return {
            "TMPDIR": str(place),
            nodes.ENV_NOTICE: str(place / "notice"),
            nodes.ENV_LOG: str(self._log),
            # As on a node: else programs get what other processes leave of the processors.
            "RAY_worker_niceness": "0",
            "RAY_NODE_TYPE_NAME": nodes.HEAD if name == "head" else nodes.WORKER,
        }

    def add(self) -> None:
        """Add a worker node."""
        self._number += 1
        name = f"n{self._number}"
        self.nodes[name] = self.cluster.add_node(
            num_cpus=1, num_gpus=0, env_vars=self._variables(name), wait=True
        )

    def lose(self, name: str) -> None:
        """What a lost host does: everything on it is gone at once."""
        node = self.nodes.pop(name)
        kill_all(str(self.folder / name))
        self.cluster.remove_node(node, allow_graceful=False)

    def running_on(self, name: str) -> list[int]:
        return machine.marked("TMPDIR", str(self.folder / name))

    def start(self, *words: str, capacity_wait_s: int = 60) -> Run:
        """Run a program; one at a time."""
        self.close()
        order = JobSpec(run="r1", command=words, nodes=Range(2, 2), capacity_wait_s=capacity_wait_s)
        told = LaunchSpec(order=order, variables={"OMP_NUM_THREADS": "1", "PATH": PATH})
        self._run = Run(told, self.address, self._log)
        return self._run

    def close(self) -> None:
        """End what a test that failed has left running."""
        if self._run is not None:
            self._run.close()

    def stop(self) -> None:
        self.close()
        self.cluster.shutdown()
        for path in self.folder.iterdir():
            kill_all(str(path))


@contextmanager
def local_nodes(folder: Path, num: int) -> Iterator[LocalNodes]:
    here = LocalNodes(folder)
    try:
        for _ in range(num):
            here.add()
        yield here
    finally:
        here.stop()
