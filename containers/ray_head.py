"""Ray's head on this machine, with the autoscaler that starts a job's workers.

Only for the head of a job (``containers.job``); workers and clusters start Ray in
``containers.node``.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from containers import cluster, demand, node, processes
from containers.job_config import JobConfig, autoscaling, capacity
from containers.log import say
from containers.node import TOKEN, NodeConfig
from contract import times
from contract.nodes import GCS_PORT, ClusterSize

if TYPE_CHECKING:
    from containers.autoscaler import ProviderConfig  # which imports Ray

#: Below the job's folder: what Ray's autoscaler reads.
_SCALING: Final = "autoscaling.yaml"
#: Marks Ray and all that it starts.
_ENV_RAY: Final = "TRAIN_RAY_OF_JOB"


class RayHead:
    """Ray of one job."""

    def __init__(
        self,
        config: JobConfig,
        head: NodeConfig,
        *,
        address: str,
        environment: Mapping[str, str],
        folder: Path,
        provider: "ProviderConfig",
    ) -> None:
        """
        Args:
            address: of this node.
            environment: of Ray and all that it starts.
            folder: for files that Ray reads and writes.
            provider: how workers are started.
        """
        self._config, self._head, self._environment = config, head, environment
        self._folder, self._provider = folder, provider
        self._log = folder / "ray.log"
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.address = address
        self.size: ClusterSize | None = None
        """Of the cluster as it is now; None until Ray is up."""
        self.demand = demand.Watch(capacity(config, head))

    def start(self) -> None:
        """Start Ray, and end what is left of an earlier start."""
        if self._process is None:
            self.scale()
            watch = (os.environ[TOKEN], self._on_size, self._ended)
            threading.Thread(target=cluster.watch, args=watch, daemon=True).start()
        processes.kill_marked(_ENV_RAY, self._config.job)
        command = node.ray_command(self._head, self.address)
        command += [f"--autoscaling-config={self._folder / _SCALING}"]
        # What it says at its start is for people who start it by hand.
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**self._environment, _ENV_RAY: self._config.job},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def poll(self) -> int | None:
        """Ray's exit code, once it has ended."""
        assert self._process is not None, "start() comes first"
        return self._process.poll()

    def last_lines(self) -> list[str]:
        """What Ray printed last."""
        return self._log.read_text(errors="replace").splitlines()[-20:]

    def scale(self, *, least: int | None = None, most: int | None = None) -> None:
        """Tell the autoscaler how many workers there shall be; it reads the file every time.

        Args:
            least: workers that are kept without work; as many as the job needs by default.
            most: workers at a time; as many as the job may have by default.
        """
        text = autoscaling(self._config, self._head, self._provider, least=least, most=most)
        new = self._folder / "new.yaml"
        new.write_text(text, encoding="utf-8")
        new.replace(self._folder / _SCALING)

    def watch_demand(self) -> None:
        """Watch from now on what a program asks Ray for."""
        os.environ["RAY_AUTH_MODE"] = "token"  # read by Ray's client, in this process
        watched = (f"{self.address}:{GCS_PORT}", self._ended)
        threading.Thread(target=self.demand.run, args=watched, daemon=True).start()

    def release_workers(self) -> None:
        """Stop the workers; what fails here is left to the function that cleans up."""
        # Only now: importing Ray would keep the job's beginning waiting for a second.
        from botocore.exceptions import BotoCoreError, ClientError
        from ray.autoscaler.tags import NODE_KIND_WORKER, TAG_RAY_NODE_KIND

        from containers.autoscaler import EcsNodeProvider

        try:
            nodes = EcsNodeProvider(self._provider, self._provider["job"])
            workers = nodes.non_terminated_nodes({TAG_RAY_NODE_KIND: NODE_KIND_WORKER})
            nodes.terminate_nodes(workers)
        except (ClientError, BotoCoreError) as error:
            say(f"the workers could not be stopped: {error}")
        else:
            say(f"{len(workers)} workers stopped")

    def end(self) -> None:
        """End Ray first, which would replace what goes, and then the workers."""
        self._ended.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(times.RAY_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.release_workers()

    def _on_size(self, line: str) -> None:
        self.size = ClusterSize.from_line(line)
        say(line)
