"""One node: configures, starts and drains Ray, and logs why it ended.

The container's first process. It checks the GPUs, waits for the head and authenticates with the
token, runs ``ray start --block``, forwards SIGTERM so that Ray drains, and logs in one line why it
ended.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Final, Self

from containers import health, spot
from containers.host import hardware, machine
from containers.host.machine import say
from containers.program.files.s3_files import PreparationStopped
from containers.program.start import code, host_cache
from containers.program.start.process import own_output
from contract import exits, host_check, nodes, times
from contract.errors import InputError
from contract.nodes import DASHBOARD_PORT, ClusterSize

TOKEN: Final = "RAY_AUTH_TOKEN"
_ASKED_EVERY_S: Final = 0.5
#: Starts of Ray on a node before its task ends, and the pause before the second one, in seconds;
#: each later pause is twice as long.
_STARTS: Final = 4
_PAUSE_S: Final = 5.0

# Fixed, so that a security group, a tunnel or a person can know them. Worker ports follow.
PORTS: Final = {
    "--node-manager-port": 6380,
    "--object-manager-port": 6381,
    "--runtime-env-agent-port": 6382,
    "--dashboard-agent-grpc-port": 6383,
    "--dashboard-agent-listen-port": nodes.AGENT_PORT,
    "--metrics-export-port": 6384,
    "--min-worker-port": 10002,
    "--max-worker-port": 19999,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeConfig:
    """Settings of this node from the task definition."""

    kind: str
    """``head`` or ``worker``."""
    head: str
    """Name or address of the head; a head itself does not use it."""
    num_cpus: int
    """CPUs that Ray may hand out; 0 on a head that does not train."""
    num_gpus: int
    """GPUs the host has."""
    head_wait_s: float
    """Seconds that a worker waits for the head's port."""
    spot: bool
    """True if hosts of workers are spot instances: the node then watches for a notice."""
    num_efa: int = 0
    """EFA interfaces that the host has."""
    shared: str = ""
    """Folder of the file system that all hosts mount; empty: there is none."""

    @classmethod
    def from_environment(cls, kind: str, environment: Mapping[str, str]) -> Self:
        """Read the variables of ``contract``. Raises InputError when one is wrong."""
        if kind not in (nodes.HEAD, nodes.WORKER):
            raise InputError(f"node {kind!r} is unknown: it must be head or worker")
        if len(environment.get(TOKEN, "")) < 16:
            raise InputError(
                f"{TOKEN} is missing or shorter than 16 characters: every node needs the "
                "cluster's token; on ECS it comes from Secrets Manager"
            )
        head = environment.get(nodes.ENV_HEAD_ADDRESS, "")
        if kind == nodes.WORKER and not head:
            raise InputError(
                f"{nodes.ENV_HEAD_ADDRESS} is missing: a worker needs the name or address of "
                "its head"
            )
        trains = environment.get(nodes.ENV_TRAINS, "1") == "1"
        num_cpus = count(environment, nodes.ENV_NUM_CPUS, os.cpu_count() or 1)
        return cls(
            kind=kind,
            head=head,
            num_cpus=num_cpus if trains else 0,
            num_gpus=count(environment, nodes.ENV_NUM_GPUS, 0),
            head_wait_s=count(environment, nodes.ENV_HEAD_WAIT, times.HEAD_WAIT_S),
            spot=environment.get(nodes.ENV_SPOT) == "1",
            num_efa=count(environment, nodes.ENV_EFA, 0),
            shared=environment.get(nodes.ENV_SHARED, ""),
        )


def host_faults(config: NodeConfig, *, is_in_use: bool = False) -> list[str]:
    """Faults of this host, one line each; empty when it is fit to train.

    Args:
        is_in_use: Whether processes of a training may still hold memory of the host.
    """
    found = hardware.gpu_faults(config.num_gpus, is_in_use=is_in_use) if config.num_gpus else []
    found += hardware.efa_faults(config.num_efa) if config.num_efa else []
    return found + (hardware.mount_faults(config.shared) if config.shared else [])


def watch_host(
    request: Path,
    check: Callable[[], list[str]],
    leave: Callable[[], None],
    ended: threading.Event,
) -> None:
    """Check this host whenever that is requested, until it is not fit; runs in a separate thread.

    Args:
        request: See ``contract.host_check``.
        check: Returns the faults of this host.
        leave: Keeps Ray from starting anything more here; called before the answer is given.
        ended: Ends the watch.
    """
    while not ended.wait(_ASKED_EVERY_S):
        if not request.exists():
            continue
        try:
            faults = check()
        except Exception as error:  # no memory for another process, for example
            say(f"this host was not checked: {error}")
            faults = []
        for fault in faults:
            say(f"this host can no longer train: {fault}")
        if faults:
            leave()
        try:
            host_check.answer(request, faults)
        except OSError as error:  # the disk is full: no answer is taken for a fit host
            say(f"the answer about this host was not written: {error}")
        if faults:
            return


def start_watching_host(
    config: NodeConfig, request: Path, leave: Callable[[], None], ended: threading.Event
) -> None:
    """Run ``watch_host`` in a thread, for a host whose memory a training may hold."""
    check = functools.partial(host_faults, config, is_in_use=True)
    machine.in_background(watch_host, request, check, leave, ended)


def count(environment: Mapping[str, str], name: str, default: int) -> int:
    """A whole number of the environment. Raises InputError when it is none."""
    value = environment.get(name, str(default))
    if not value.isdecimal():
        raise InputError(f"{name} is {value!r}: it must be a whole number")
    return int(value)


def ray_command(config: NodeConfig, address: str) -> list[str]:
    """The command that starts Ray on this node and stays until it ends."""
    # Its notes on how it drains would stand in the log of every job, as if something were wrong.
    ray = [sys.executable, "-m", "containers.ray_start", "--logging-level=warning"]
    command = [*ray, "start", "--block"]
    command += ["--disable-usage-stats", f"--node-ip-address={address}"]
    command += [f"--num-cpus={config.num_cpus}", f"--num-gpus={config.num_gpus}"]
    command += [f"{option}={port}" for option, port in PORTS.items()]
    if config.kind == nodes.HEAD:
        command += ["--head", f"--port={nodes.GCS_PORT}"]
        # Reached by the workers' token check and by a tunnel; the token guards it.
        command += ["--dashboard-host=0.0.0.0", f"--dashboard-port={nodes.DASHBOARD_PORT}"]
    else:
        command += [f"--address={config.head}:{nodes.GCS_PORT}"]
    return command


def ray_environment(
    config: NodeConfig, interface: str, task: Mapping[str, str] = {}
) -> dict[str, str]:
    """Environment of Ray and the training processes.

    Args:
        interface: of this node's address.
        task: environment of the task, which overrides most of it.
    """
    only_coordinates = config.kind == nodes.HEAD and config.num_cpus == 0
    return {
        nodes.ENV_NODE: config.kind,
        **host_cache.variables(),
        # A node that trains has this long to tell the others and to save. A head that does not
        # train has nothing to hand over.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(
            times.COORDINATOR_DRAIN_S if only_coordinates else times.RAY_DRAIN_S
        ),
        "RAY_AUTH_MODE": "token",
        "PYTHONUNBUFFERED": "1",
        # On the standing cluster too, torchvision fetches FashionMNIST from where a node can.
        "PYTHONPATH": str(code.STARTUP),
        "NCCL_DEBUG": "WARN",
        # A rank that lost its peer must fail, not wait for half an hour.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # 15 by default: anything else on the host would starve training.
        "RAY_worker_niceness": "0",
        # Otherwise Ray starts an idle process per processor for each program that connects.
        "RAY_prestart_worker_first_driver": "0",
        # The head asks its dashboard for the nodes; by default Ray goes on without it after 60 s.
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(times.RAY_START_S),
        # A worker that is slow to start is waited for; Ray's default is a minute.
        "RAY_worker_register_timeout_seconds": str(times.WORKER_REGISTER_S),
        # A node whose processes have ended is detected in 6 s, one that hangs in 24 s; the
        # defaults take a minute. Quicker still, one with busy processors would be taken for dead.
        "RAY_health_check_initial_delay_ms": str(times.RAY_HEALTH_DELAY_S * 1000),
        "RAY_health_check_period_ms": str(times.RAY_HEALTH_EVERY_S * 1000),
        "RAY_health_check_timeout_ms": str(times.RAY_HEALTH_TIMEOUT_S * 1000),
        "RAY_health_check_failure_threshold": "3",
        # A worker that has lost its head ends after this long, and releases its host.
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(times.RAY_RECONNECT_S),
        # Ray Train's picture of the nodes is up to 20 s old: after a loss it may wait for a node
        # that has gone, this long, before it looks again.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(times.WORKER_GROUP_START_S),
        # Workers that are about to be killed are first asked to leave their process group.
        "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": str(times.PROCESS_GROUP_STOP_S),
        # A process of its own, and all ranks agree after every report whether a host goes.
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1" if config.spot else "0",
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # or every line is printed twice
        **task,
        # Found by its address, because awsvpc and a laptop's Docker name it differently. Gloo and
        # NCCL would otherwise try all of them, the one for ECS's own credentials too. An interface
        # in the image's environment is another machine's.
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }


def token_refused(head: str, token: str) -> str | None:
    """Reason why the head does not accept ``token``; None if it does, or cannot say."""
    place, headers = f"{head}:{nodes.DASHBOARD_PORT}", {"Authorization": f"Bearer {token}"}
    try:
        status, _ = machine.ask(place, "/api/version", headers=headers, timeout_s=5)
    except OSError:
        return None  # the dashboard starts after the port that was waited for; Ray checks too
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return f"the head {head} refuses this node's token: {TOKEN} differs from the head's"
    return None


class NodeRunner:
    """Runs one node until Ray ends or the container is told to stop."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self._ray: subprocess.Popen[bytes] | None = None
        self._stopped_by: int | None = None
        self._notice: Path | None = None
        self._noticed_at = float("inf")
        self._is_unfit = False
        self._is_up = False
        self._hangs = False
        self._began = 0.0  # the last start of Ray, by the monotonic clock

    def run(self) -> int:
        """Start Ray and wait; return the container's exit code.

        Raises:
            InputError: the code of this node's job cannot be used.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        config = self.config
        if faults := host_faults(config):
            for fault in faults:
                say(f"not joining: {fault}")
            return exits.BAD_HOST
        host_cache.make_room()
        if config.kind == nodes.WORKER:
            if not self._prepare_code():
                say("stopped while requirements were installed")
                return exits.TERMINATED
            early = self._meet_head()
            if early is not None:
                return early
            address = machine.address_towards(config.head)
        else:
            address = machine.own_address()
        interface = machine.interface_of(address)
        say(
            f"{config.kind} on {address} ({interface}), {config.num_cpus} CPUs, "
            f"{config.num_gpus} GPUs for training"
        )
        environment = ray_environment(config, interface, os.environ)
        if os.environ.get("RAY_NODE_TYPE_NAME") and (task := machine.own_task()):
            # Started by a job's autoscaler, which knows its nodes by their tasks.
            environment["RAY_CLOUD_INSTANCE_ID"] = task.arn
        with tempfile.TemporaryDirectory(prefix="node-") as folder:
            # For the launcher of a program that runs on this node.
            self._notice = Path(folder) / "notice"
            environment |= {
                nodes.ENV_LOG: own_output(),
                nodes.ENV_NOTICE: str(self._notice),
                nodes.ENV_HOST_CHECK: str(Path(folder) / "check"),
            }
            return self._run_ray(ray_command(config, address), environment, address)

    def _run_ray(self, command: list[str], environment: dict[str, str], address: str) -> int:
        """Start Ray and wait for its end; return the container's exit code."""
        config = self.config
        began = time.monotonic()
        ended = threading.Event()
        if head := os.environ.get(nodes.ENV_WATCHED):
            subprocess.Popen((sys.executable, "-m", "containers.ray_watch", head, address))
        request = Path(environment[nodes.ENV_HOST_CHECK])
        start_watching_host(config, request, self._leave, ended)
        if config.kind == nodes.HEAD:
            machine.in_background(
                watch_cluster, os.environ[TOKEN], lambda size: say(size.line()), ended
            )
        elif config.spot:
            drain = spot.Drain(head=config.head, address=address, environment=environment, say=say)

            def on_notice(notice: spot.Notice) -> bool:
                self._give_notice(notice.at - times.SPOT_MARGIN_S)
                return drain(notice)

            machine.in_background(spot.watch, on_notice, say, ended)
        ray_code = self._start_in_turn(command, environment)
        for number in range(1, _STARTS):
            if self._may_not_start_again():
                break
            pause = _PAUSE_S * 2 ** (number - 1)
            say(
                f"Ray did not come up on this node (exit code {ray_code}) and is started again in "
                f"{pause:.0f} s ({number + 1} of {_STARTS})"
            )
            time.sleep(pause)
            ray_code = self._start_in_turn(command, environment)
        ended.set()
        return self._explain(ray_code, time.monotonic() - began)

    def _may_not_start_again(self) -> bool:
        is_stopping = self._is_unfit or self._stopped_by is not None
        return self._is_up or self._hangs or is_stopping or bool(self._lost_head())

    def _start_in_turn(self, command: list[str], environment: dict[str, str]) -> int:
        """Start Ray and wait for its end; return its exit code. No other node of this host starts
        meanwhile: a start keeps a processor busy for ten seconds, within limits of Ray's own."""
        with host_cache.turn(
            within_s=times.START_TURN_S, should_stop=lambda: self._stopped_by is not None
        ):
            ray = self._start(command, environment)
            until = time.monotonic() + times.START_TURN_S
            self._wait(ray, lambda: self._is_up or time.monotonic() > until)
        return self._wait(ray, lambda: False)

    def _start(self, command: list[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        # stdout has hints for interactive use only; warnings and errors go to stderr.
        self._ray = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        self._began = time.monotonic()
        if self._stopped_by is not None:  # told so while it was being started
            self._ray.send_signal(signal.SIGTERM)
        return self._ray

    def _prepare_code(self) -> bool:
        """Prepare the code and packages of this node's job, if any, before the node joins Ray;
        return False when told to stop meanwhile."""
        with tempfile.TemporaryDirectory(prefix="code-") as folder:
            try:
                code.prepare_worker(
                    os.environ, Path(folder), should_stop=lambda: self._stopped_by is not None
                )
            except PreparationStopped:
                return False
        return True

    def _meet_head(self) -> int | None:
        """Wait for the head and check that it accepts the token; return an exit code where that
        fails."""
        config = self.config
        reason = machine.wait_for_port(
            config.head,
            nodes.GCS_PORT,
            timeout_s=config.head_wait_s,
            should_stop=lambda: self._stopped_by is not None,
            say=say,
        )
        if self._stopped_by is not None:
            say("stopped while waiting for the head")
            return exits.TERMINATED
        if reason:
            say(f"giving up after {config.head_wait_s:.0f} s: {reason}")
            return exits.NO_HEAD
        if refusal := token_refused(config.head, os.environ[TOKEN]):
            say(refusal)
            return exits.REFUSED
        return None

    def _wait(self, ray: "subprocess.Popen[bytes]", is_enough: Callable[[], bool]) -> int:
        """Wait until Ray has ended, or it is enough. Ray is ended where it drains for a head that
        is gone, and where it does not come up in time."""
        while not is_enough():
            try:
                return ray.wait(1)
            except subprocess.TimeoutExpired:
                self._is_up = self._is_up or health.listens(nodes.AGENT_PORT)
            if self._stopped_by is not None and self._lost_head():
                say("the head has ended: this node ends too")
                ray.kill()
            elif not self._is_up and time.monotonic() - self._began > times.AGENT_START_S:
                say(f"Ray's agent did not start on this node within {times.AGENT_START_S} s")
                self._hangs = True
                ray.kill()
        return exits.OK

    def _lost_head(self) -> str | None:
        """Reason why the head does not answer this worker; None if it does, or this is the head."""
        if self.config.kind == nodes.HEAD:
            return None
        return machine.wait_for_port(
            self.config.head, nodes.GCS_PORT, timeout_s=0, should_stop=bool, say=say
        )

    def _explain(self, code: int, lasted_s: float) -> int:
        """Turn Ray's exit code into this node's, and log what it means."""
        if self._is_unfit:
            return exits.BAD_HOST
        if self._stopped_by is not None:
            say("ended normally")
            return exits.OK
        if lost := self._lost_head():
            say(f"the head is lost after {lasted_s:.0f} s: {lost}")
            return exits.NO_HEAD
        say(f"Ray ended on its own after {lasted_s:.0f} s (exit code {code}); its log is above")
        return exits.FAILED if self._is_up else exits.RAY_FAILED

    def _give_notice(self, at: float) -> None:
        """Tell a program on this node when the node must have ended, as Unix time."""
        if self._notice is None or at >= self._noticed_at:
            return
        self._noticed_at = at
        with contextlib.suppress(OSError):  # its folder goes when Ray has ended
            new = self._notice.with_suffix(".new")
            new.write_text(f"{at:.3f}")
            new.replace(self._notice)

    def _leave(self) -> None:
        """End Ray on a host that is not fit."""
        self._is_unfit = True
        self._drain()

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self._stopped_by = number
        self._drain()

    def _drain(self) -> None:
        self._give_notice(time.time() + times.RAY_DRAIN_S)
        if self._ray is not None and self._ray.poll() is None:
            self._ray.send_signal(signal.SIGTERM)


#: The answer lists all nodes, and takes the dashboard some milliseconds.
SIZE_POLL_S: Final = 1.0
#: Poll interval before the first answer, for which a job's command waits.
FIRST_SIZE_S: Final = 0.2
_NODES_PATH: Final = "/api/v0/nodes?detail=1&limit=10000&timeout=5"


def cluster_size(token: str) -> ClusterSize:
    """Ask this node's dashboard.

    Raises:
        OSError: it does not answer (yet).
        ValueError: it answers something else.
    """
    place, headers = f"127.0.0.1:{DASHBOARD_PORT}", {"Authorization": f"Bearer {token}"}
    status, body = machine.ask(place, _NODES_PATH, headers=headers, timeout_s=10)
    if status != HTTPStatus.OK:
        raise ValueError(f"the dashboard answered {status}")
    return counted(body)


def counted(answer: str) -> ClusterSize:
    """Add up what the nodes of the state API's answer have. Raises ValueError on another answer."""
    try:
        nodes = json.loads(answer)["data"]["result"]["result"]
        alive = [node["resources_total"] for node in nodes if node["state"] == "ALIVE"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"no list of nodes in the dashboard's answer: {error!r}") from error
    return ClusterSize(
        num_nodes=len(alive),
        num_cpus=int(sum(each.get("CPU", 0) for each in alive)),
        num_gpus=int(sum(each.get("GPU", 0) for each in alive)),
    )


def watch_cluster(
    token: str, on_size: Callable[[ClusterSize], None], stopped: threading.Event
) -> None:
    """Pass on the cluster's size at the start and whenever it changes, until ``stopped`` is set."""
    last: ClusterSize | None = None
    while not stopped.wait(SIZE_POLL_S if last else FIRST_SIZE_S):
        try:
            now = cluster_size(token)
        except (OSError, ValueError):
            continue  # not up yet, or busy; the node's own health check says when it is worse
        if now != last and now.num_nodes:
            on_size(now)
            last = now
