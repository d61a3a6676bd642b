"""The head of a job: a Ray cluster that is there for one command, and starts its own workers.

    python -m containers job

Ray runs here with its autoscaler, which starts worker tasks on ECS (``containers.autoscaler``). The
command runs beside it; its exit code is the container's. At the deadline, or when the workers that
are needed at least do not come, the command is ended first and says goodbye in its own way.
"""

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, Self

from containers import cluster, gpus, metadata, network, node
from containers.log import say
from containers.node import TOKEN, NodeConfig, count
from containers.program import code as user_code
from containers.program.requirements import Stopped
from contract import exits, times
from contract.errors import InputError
from contract.job import JobSpec
from contract.nodes import (
    ENV_DEADLINE,
    ENV_HEAD_ADDRESS,
    ENV_JOB,
    ENV_JOB_SPEC,
    ENV_RECIPE,
    ENV_RUN,
    ENV_SECURITY_GROUPS,
    ENV_SUBNETS,
    ENV_WORKER_CPUS,
    ENV_WORKER_GPUS,
    ENV_WORKER_PROVIDER,
    ENV_WORKER_TASK,
    GCS_PORT,
    HEAD,
    WORKER,
    ClusterSize,
)
from training import recipes

if TYPE_CHECKING:
    from containers.autoscaler import ProviderConfig  # which imports Ray

#: Of things on this machine that cost next to nothing to look at.
_POLL_S: Final = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """What the task's environment says: the job's order, and what its workers run on."""

    job: str
    """Id of the job."""
    spec: JobSpec
    deadline: float
    """Unix time."""
    worker_cpus: int
    worker_gpus: int
    worker_task: str
    worker_provider: str
    subnets: tuple[str, ...]
    security_groups: tuple[str, ...]

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
            worker_task=environment[ENV_WORKER_TASK],
            worker_provider=environment.get(ENV_WORKER_PROVIDER, ""),
            subnets=_listed(environment.get(ENV_SUBNETS, "")),
            security_groups=_listed(environment.get(ENV_SECURITY_GROUPS, "")),
        )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(each for each in text.split(",") if each)


def recipe_of(command: Sequence[str]) -> str:
    """The recipe that a command trains; empty for other programs, and with --verbose, for which
    nodes must bring along what Ray's processes print."""
    words = [*command[:4], "", "", "", ""]
    is_ours = words[1:3] == ["-m", "training.launch"] and words[3] in recipes.NAMES
    return words[3] if is_ours and "--verbose" not in command else ""


def worker_provider(
    config: JobConfig, *, recipe: str, task: metadata.OwnTask, address: str
) -> "ProviderConfig":
    """What ``containers.autoscaler`` needs to start workers.

    Args:
        recipe: the only one that is trained, or empty.
        task: the head's own.
        address: the head's.
    """
    return {
        "cluster": task.cluster,
        "head": task.arn,
        "job": config.job,
        "task_definition": config.worker_task,
        "capacity_provider": config.worker_provider,
        "subnets": [*config.subnets],
        "security_groups": [*config.security_groups],
        # An address, because names take time to spread, and no is remembered for minutes.
        "environment": {
            ENV_HEAD_ADDRESS: address,
            ENV_JOB: config.job,
            ENV_DEADLINE: f"{config.deadline:.0f}",
            **({ENV_RECIPE: recipe} if recipe else {}),
            **user_code.for_workers(config.spec),
        },
    }


def autoscaling(config: JobConfig, head: NodeConfig, provider: "ProviderConfig") -> str:
    """The file that Ray's autoscaler reads: one kind of worker, between least and most.

    It is JSON, which is YAML too.
    """
    own_provider = {
        "type": "external",
        "module": "containers.autoscaler.EcsNodeProvider",
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "use_internal_ips": True,
        "worker_liveness_check": False,
        **provider,
    }
    worker = {"CPU": config.worker_cpus}
    if config.worker_gpus:
        worker["GPU"] = config.worker_gpus
    own = {"CPU": head.num_cpus}
    if head.num_gpus:
        own["GPU"] = head.num_gpus
    wanted = {
        "cluster_name": config.job,
        "max_workers": config.spec.nodes.high,
        "upscaling_speed": 1000,  # all at once: a training that starts with a part waits anyway
        "idle_timeout_minutes": config.spec.idle_s / 60,
        "provider": own_provider,
        "head_node_type": HEAD,
        "available_node_types": {
            HEAD: {
                "resources": own,
                "node_config": {},
                "min_workers": 0,
                "max_workers": 0,
            },
            WORKER: {
                "resources": worker,
                "node_config": {},
                "min_workers": config.spec.nodes.low,
                "max_workers": config.spec.nodes.high,
            },
        },
        # What follows is for clusters that Ray sets up over SSH; it must be there.
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }
    return json.dumps(wanted, indent=1)


class Job:
    """Runs one job until its command ends, or has to."""

    def __init__(self, config: JobConfig, head: NodeConfig) -> None:
        self._config, self._head = config, head
        self._stopped = False
        self._size: ClusterSize | None = None
        self._ray_log: Path | None = None
        self._began = time.monotonic()
        self._has_capacity = False

    def run(self) -> int:
        """Return the container's exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        server = node.start_fork_server(self._head)
        if self._head.num_gpus and (faults := gpus.faults(self._head.num_gpus)):
            for fault in faults:
                say(f"not starting: {fault}")
            return exits.BAD_HOST
        task = metadata.own_task()
        if task is None:
            raise InputError("a job starts its workers on ECS, and this is no task of ECS")
        address = network.own_address()
        interface = network.interface_of(address)
        say(
            f"job {self._config.job}: head on {address}, {self._config.spec.nodes.low} to "
            f"{self._config.spec.nodes.high} worker nodes"
        )
        with tempfile.TemporaryDirectory(prefix="job-") as folder:
            file = Path(folder) / "autoscaling.yaml"
            provider = worker_provider(
                self._config, recipe=self._head.recipe, task=task, address=address
            )
            file.write_text(autoscaling(self._config, self._head, provider), encoding="utf-8")
            environment = node.ray_environment(self._head, interface) | os.environ
            environment |= {
                "GLOO_SOCKET_IFNAME": interface,
                "NCCL_SOCKET_IFNAME": interface,
                "RAY_enable_autoscaler_v2": "1",
                "RAY_CLOUD_INSTANCE_ID": task.arn,
                "RAY_NODE_TYPE_NAME": HEAD,
            }
            command = node.ray_command(self._head, address, server)
            command += [f"--autoscaling-config={file}"]
            self._ray_log = Path(folder) / "ray.log"
            # What it says at its start is for people who start it by hand.
            with self._ray_log.open("wb") as log:
                ray = subprocess.Popen(
                    command, env=environment, stdout=log, stderr=subprocess.STDOUT
                )
            ended = threading.Event()
            threading.Thread(
                target=cluster.watch, args=(os.environ[TOKEN], self._on_size, ended), daemon=True
            ).start()
            try:
                return self._run_beside(ray, address, environment)
            finally:
                ended.set()
                _end(ray, times.RAY_STOP_S)  # first, or its autoscaler would replace what goes
                release_workers(provider)

    def _run_beside(
        self, ray: "subprocess.Popen[bytes]", address: str, environment: Mapping[str, str]
    ) -> int:
        # Its port alone is not enough: the head is a node of its own cluster some seconds later.
        while self._size is None:
            if (early := self._reason_to_end(ray)) is not None:
                return early
            if time.monotonic() - self._began > times.RAY_START_S:
                self._say_of_ray(f"Ray did not start within {times.RAY_START_S} s")
                return exits.FAILED
            time.sleep(_POLL_S)
        words = self._config.spec.command
        with tempfile.TemporaryDirectory(prefix="code-") as folder:
            try:
                own = user_code.prepare(
                    self._config.spec,
                    Path(folder),
                    should_stop=lambda: self._reason_to_end(ray) is not None,
                )
            except Stopped:
                return self._reason_to_end(ray) or exits.FAILED
            say(f"running {' '.join(words)}")
            # A group of its own, so that what it starts ends with it.
            try:
                command = subprocess.Popen(
                    words,
                    cwd=own.folder,
                    env={
                        **environment,
                        **own.environment,
                        ENV_RUN: self._config.spec.run,
                        "RAY_ADDRESS": f"{address}:{GCS_PORT}",
                    },
                    start_new_session=True,
                )
            except OSError as error:
                raise InputError(f"{words[0]} cannot be run: {error.strerror}") from None
            return self._wait(command, ray)

    def _wait(self, command: "subprocess.Popen[bytes]", ray: "subprocess.Popen[bytes]") -> int:
        """Exit code of the command, or of what ended it."""
        code: int | None = None
        while command.poll() is None and code is None:
            time.sleep(_POLL_S)
            code = self._reason_to_end(ray)
        if code is not None:
            _end(command, times.COMMAND_STOP_S)
            return code
        own = command.returncode
        # The shell's way to say that a signal ended it.
        return 128 - own if own < 0 else own

    def _reason_to_end(self, ray: "subprocess.Popen[bytes]") -> int | None:
        """Exit code of a job that must not go on; None while it may."""
        config = self._config
        if self._stopped:
            say("stopped as told")
            return exits.TERMINATED
        if time.time() > config.deadline:
            say("the deadline has come")
            return exits.DEADLINE
        if ray.poll() is not None:
            self._say_of_ray(f"Ray ended on its own (exit code {ray.returncode})")
            return exits.FAILED
        waited = time.monotonic() - self._began
        there = self._size.num_nodes - 1 if self._size else 0
        needed = config.spec.nodes.low
        # Once they have all come, what is lost later is no lack of capacity.
        is_late = not self._has_capacity and waited > config.spec.capacity_wait_s
        if there < needed and is_late:
            say(f"{there} of {needed} worker nodes after {waited:.0f} s: no capacity")
            return exits.NO_CAPACITY
        return None

    def _say_of_ray(self, what: str) -> None:
        lines = self._ray_log.read_text(errors="replace").splitlines() if self._ray_log else []
        say("\n".join([f"{what}; it said last:", *lines[-20:]]))

    def _on_size(self, line: str) -> None:
        self._size = ClusterSize.from_line(line)
        say(line)
        if self._size and self._size.num_nodes > self._config.spec.nodes.low:
            self._has_capacity = True

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopped = True


def release_workers(provider: "ProviderConfig") -> None:
    """Stop the workers of a job; what fails here is left to the function that cleans up."""
    # Only now: importing Ray would keep the job's beginning waiting for a second.
    from botocore.exceptions import BotoCoreError, ClientError
    from ray.autoscaler.tags import NODE_KIND_WORKER, TAG_RAY_NODE_KIND

    from containers.autoscaler import EcsNodeProvider

    try:
        nodes = EcsNodeProvider(provider, provider["job"])
        workers = nodes.non_terminated_nodes({TAG_RAY_NODE_KIND: NODE_KIND_WORKER})
        nodes.terminate_nodes(workers)
    except (ClientError, BotoCoreError) as error:
        say(f"the workers could not be stopped: {error}")
    else:
        say(f"{len(workers)} workers stopped")


def _end(process: "subprocess.Popen[bytes]", within_s: float) -> None:
    """SIGTERM, then SIGKILL."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run(environment: Mapping[str, str]) -> int:
    """Run the job that a task's environment describes; return the container's exit code.

    Raises:
        InputError: a variable is missing or wrong.
    """
    head = NodeConfig.from_environment(HEAD, environment)
    config = JobConfig.from_environment(environment)
    # Processes that see a user's code are not forked.
    recipe = "" if config.spec.code else recipe_of(config.spec.command)
    return Job(config, replace(head, recipe=recipe)).run()
