"""Ray's head on this machine: its settings, and the autoscaler that starts a job's workers.

Only for the head of a job (``containers.job_head``); workers and clusters start Ray in
``containers.node``.
"""

import contextlib
import functools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from containers import demand, health, node
from containers.host import machine
from containers.host.machine import say
from containers.node import TOKEN, NodeConfig, count
from containers.program.start import code as user_code
from containers.program.start.process import ProgramProcess
from contract import times
from contract.errors import InputError
from contract.job import JobSpec, Placement
from contract.nodes import (
    AGENT_PORT,
    DEFAULT_POOL,
    ENV_DEADLINE,
    ENV_HEAD_ADDRESS,
    ENV_JOB,
    ENV_JOB_SPEC,
    ENV_KEEPER,
    ENV_POOLS,
    ENV_SECURITY_GROUPS,
    ENV_SUBNETS,
    ENV_WATCHED,
    ENV_WORKER_CPUS,
    ENV_WORKER_GPUS,
    ENV_WORKER_PROVIDER,
    ENV_WORKER_TASK,
    GCS_PORT,
    HEAD,
    WORKER,
    ClusterSize,
)
from contract.text import counted
from contract.typed_json import loads

if TYPE_CHECKING:
    # They import Ray.
    from containers.autoscaler import EcsNodeProvider, ProviderConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """Settings from the task's environment: the job's order, and the size of its workers."""

    job: str
    """Id of the job."""
    spec: JobSpec
    deadline: float
    """Unix time."""
    worker_cpus: int
    worker_gpus: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read the variables of ``contract.nodes``. Raises InputError when one is wrong."""
        needed = (ENV_JOB, ENV_JOB_SPEC, ENV_WORKER_TASK)
        if missing := [name for name in needed if not environment.get(name)]:
            raise InputError(
                f"{', '.join(missing)} is missing: the state machine of the jobs sets it, so the "
                "images and the stacks are of different versions; push new images and deploy"
            )
        spec = JobSpec.from_json(environment[ENV_JOB_SPEC])
        return cls(
            job=environment[ENV_JOB],
            spec=spec,
            deadline=count(environment, ENV_DEADLINE, int(time.time()) + spec.max_seconds),
            worker_cpus=count(environment, ENV_WORKER_CPUS, 1),
            worker_gpus=count(environment, ENV_WORKER_GPUS, 0),
        )


def in_pool(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a head's task, with the variables of the pool of its job's workers.

    Raises:
        InputError: the order is wrong, or names a pool that the task does not know.
    """
    pools = loads(environment.get(ENV_POOLS, "{}"), what=ENV_POOLS)
    order = environment.get(ENV_JOB_SPEC)
    pool = JobSpec.from_json(order).ladder[0] if order else DEFAULT_POOL
    if pool == DEFAULT_POOL:
        return {**environment}
    if not isinstance(own := pools.get(pool), dict):
        raise InputError(f"this deployment has no pool {pool}: deploy it, or give another --pool")
    return {**environment, **own}


def for_ray(spec: JobSpec) -> dict[str, str]:
    """Variables of Ray on all nodes of a job.

    Where a program runs on its own, Linux ends what takes too much memory: the program. Ray would
    end the launcher, as if the node were lost.
    """
    return {"RAY_memory_monitor_refresh_ms": "0"} if spec.on == Placement.NODES else {}


def for_autoscaler() -> dict[str, str]:
    """Variables of Ray's autoscaler, v2.

    It matches any new node with the oldest request of its kind. If one of two requests fails late,
    it waits for the other's node, which has joined already, before it asks again.
    """
    return {
        "RAY_enable_autoscaler_v2": "1",
        "RAY_AUTOSCALER_RECONCILE_REQUEST_STATUS_TIMEOUT_S": str(times.NODE_ASKED_S),
    }


def worker_provider(
    config: JobConfig, environment: Mapping[str, str], *, task: machine.OwnTask, address: str
) -> "ProviderConfig":
    """Settings with which ``containers.autoscaler`` starts workers.

    Args:
        environment: of the head's task, which names the workers' task definition and network.
        task: the head's own.
        address: the head's.
    """

    def listed(name: str) -> list[str]:
        return [each for each in environment.get(name, "").split(",") if each]

    return {
        "cluster": task.cluster,
        "head": task.arn,
        "job": config.job,
        "tags": config.spec.tags(config.job),
        "task_definition": environment[ENV_WORKER_TASK],
        "capacity_provider": environment.get(ENV_WORKER_PROVIDER, ""),
        "keeper": environment.get(ENV_KEEPER, ""),
        "subnets": listed(ENV_SUBNETS),
        "security_groups": listed(ENV_SECURITY_GROUPS),
        # An address: DNS names take time to spread, and failed look-ups are cached for minutes.
        "environment": {
            ENV_HEAD_ADDRESS: address,
            ENV_JOB: config.job,
            ENV_DEADLINE: f"{config.deadline:.0f}",
            ENV_WATCHED: f"{address}:{GCS_PORT}" * config.spec.uses_ray,
            **user_code.for_workers(config.spec),
            **for_ray(config.spec),
        },
    }


def autoscaling(
    config: JobConfig,
    head: NodeConfig,
    provider: "ProviderConfig",
    *,
    least: int | None = None,
    most: int | None = None,
) -> str:
    """The file that Ray's autoscaler reads, again and again: one kind of worker, and how many.

    It is JSON, which is YAML too.

    Args:
        least: worker nodes that are kept without work; as many as the job needs by default.
        most: worker nodes at a time; as many as the job may have by default.
    """
    most = config.spec.nodes.high if most is None else most
    least = _least(config) if least is None else least
    own_provider = {
        "type": "external",
        "module": "containers.autoscaler.EcsNodeProvider",
        "disable_node_updaters": True,
        **provider,
    }
    wanted = {
        "cluster_name": config.job,
        "max_workers": most,
        "upscaling_speed": 1000,  # all at once: a training that starts with a part waits anyway
        "idle_timeout_minutes": config.spec.idle_s / 60,
        "provider": own_provider,
        "head_node_type": HEAD,
        "available_node_types": {
            HEAD: {
                "resources": _resources(head.num_cpus, head.num_gpus),
                "node_config": {},
                "min_workers": 0,
                "max_workers": 0,
            },
            WORKER: {
                "resources": _resources(config.worker_cpus, config.worker_gpus),
                "node_config": {},
                "min_workers": min(least, most),
                "max_workers": most,
            },
        },
        # Ray asks for these, and uses them only for clusters that it sets up over SSH.
        "cluster_synced_files": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
    }
    return json.dumps(wanted, indent=1)


def _least(config: JobConfig) -> int:
    """Number of worker nodes that a job needs without work."""
    # A program on all nodes asks Ray for nothing, and takes whatever joins.
    nodes = config.spec.nodes
    return nodes.high if config.spec.on == Placement.NODES else nodes.low


def _resources(num_cpus: int, num_gpus: int) -> dict[str, int]:
    return {"CPU": num_cpus, "GPU": num_gpus} if num_gpus else {"CPU": num_cpus}


def nodes_of(config: JobConfig, head: NodeConfig) -> list[dict[str, int]]:
    """Resources of each node that a job can have at a time, the head first."""
    worker = _resources(config.worker_cpus, config.worker_gpus)
    return [_resources(head.num_cpus, head.num_gpus), *[worker] * config.spec.nodes.high]


#: Below the job's folder: what Ray's autoscaler reads, and what ours writes.
_SCALING: Final = "autoscaling.yaml"
_FAILED: Final = "failed-starts"


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
        self._folder = folder
        self._provider: ProviderConfig = {
            **provider,
            "failed_starts": str(folder / _FAILED),
            "first": str(folder / "first"),
        }
        self._said = deque[str](maxlen=20)
        self._ended = threading.Event()
        self._is_scaled = False
        self._ray: ProgramProcess | None = None
        self.address = address
        self.size: ClusterSize | None = None
        """Size of the cluster now; None until Ray is up."""
        self.demand = demand.DemandWatch(nodes_of(config, head))

    def start(self) -> None:
        """Start Ray; no worker is requested yet."""
        self._write(least=0)
        machine.in_background(node.watch_cluster, os.environ[TOKEN], self._on_size, self._ended)
        command = node.ray_command(self._head, self.address)
        command += [f"--autoscaling-config={self._folder / _SCALING}"]
        # `ray start` prints hints for interactive use; keep them out of the job's log.
        self._ray = ProgramProcess(
            tuple(command), folder=None, environment=self._environment, emit=self._said.append
        )

    def poll(self) -> int | None:
        """Ray's exit code, once it has ended."""
        assert self._ray is not None, "start() comes first"
        return self._ray.poll()

    @property
    def is_up(self) -> bool:
        """True once a program can connect."""
        # Its dashboard, which has the size, is up seconds later.
        return self.size is not None or health.listens(AGENT_PORT)

    @property
    def failed_starts(self) -> int:
        """How often Ray did not start in tasks of worker nodes, of late."""
        with contextlib.suppress(OSError, ValueError):  # none yet, or just being written
            return int((self._folder / _FAILED).read_text(encoding="utf-8"))
        return 0

    def last_lines(self) -> list[str]:
        """Last lines that Ray printed."""
        return [*self._said]

    def scale(self, *, least: int | None = None, most: int | None = None) -> None:
        """Tell the autoscaler how many workers there shall be; it reads the file every time.

        Args:
            least: workers that are kept without work; as many as the job needs by default.
            most: workers at a time; as many as the job may have by default.
        """
        self._is_scaled = True
        self._write(least=least, most=most)

    def request(self) -> None:
        """Request the workers that the job needs, from ECS itself: Ray's autoscaler, which looks
        after them from then on, comes up meanwhile."""
        machine.in_background(self._request)

    def _request(self) -> None:
        try:
            self._nodes.start_first(_least(self._config))
        except Exception as error:  # the autoscaler requests what is missing
            say(f"the workers are left to Ray's autoscaler: {error}")
        if not self._is_scaled:
            self.scale()

    @functools.cached_property
    def _nodes(self) -> "EcsNodeProvider":
        # Imported late: importing Ray takes a second, which the job's start need not wait for.
        from containers.autoscaler import EcsNodeProvider

        return EcsNodeProvider(self._provider, self._provider["job"])

    def _write(self, *, least: int | None = None, most: int | None = None) -> None:
        text = autoscaling(self._config, self._head, self._provider, least=least, most=most)
        new = self._folder / "new.yaml"
        new.write_text(text, encoding="utf-8")
        new.replace(self._folder / _SCALING)

    def release_workers(self) -> None:
        """Stop the workers; what fails here is left to the function that cleans up."""
        try:
            workers = self._nodes.workers()
            self._nodes.terminate_nodes(workers)
        except Exception as error:  # the keeper stops what is left
            say(f"the workers could not be stopped: {error}")
        else:
            say(f"{counted(len(workers), 'worker')} stopped")

    def end(self, *, keeps_workers: bool) -> None:
        """Stop Ray first, which would otherwise replace the workers, and then the workers."""
        self._ended.set()
        if self._ray is not None:
            until = time.monotonic() + times.RAY_STOP_S
            self._ray.terminate()
            self._ray.wait(lambda: until)
            self._ray.end()
        if not keeps_workers:
            self.release_workers()

    def _on_size(self, size: ClusterSize) -> None:
        self.size = size
        say(size.line())
