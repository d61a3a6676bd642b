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
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from containers import cluster, demand, metadata, network, node, processes
from containers.job_config import (
    JobConfig,
    autoscaling,
    capacity,
    for_autoscaler,
    for_ray,
    worker_provider,
)
from containers.log import say
from containers.node import TOKEN, NodeConfig
from containers.program import cache
from containers.program import code as user_code
from containers.program import head as on_head
from containers.program.code import RAY_VARIABLE
from containers.program.files import Mirror, report_lost
from containers.program.lines import log_pipe
from containers.program.process import Program
from containers.program.requirements import Stopped
from containers.program.told import ENV_PROGRAM, Told
from contract import exits, times
from contract.errors import InputError
from contract.files import WORK
from contract.job import Placement
from contract.nodes import (
    ENV_HOST_CHECK,
    ENV_LOG_PIPE,
    ENV_RUN,
    ENV_STORAGE,
    GCS_PORT,
    HEAD,
    PROGRAM_DIR,
    ClusterSize,
)
from contract.text import listed
from training.runtime.forkserver import ForkServer

if TYPE_CHECKING:
    from containers.autoscaler import ProviderConfig  # which imports Ray

#: Below the job's folder: what Ray's autoscaler reads.
_SCALING: Final = "autoscaling.yaml"
#: Marks Ray and all that it starts.
_ENV_RAY: Final = "TRAIN_RAY_OF_JOB"
#: Of things on this machine that cost next to nothing to look at.
_POLL_S: Final = 0.1


class Job:
    """Runs one job until its command ends, or has to."""

    def __init__(
        self,
        config: JobConfig,
        head: NodeConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._head, self._clock = config, head, clock
        self._stopped = False
        self._size: ClusterSize | None = None
        self._ray_log: Path | None = None
        # None while there are as many worker nodes as it needs.
        self._short_since: float | None = clock() if config.spec.nodes.low else None
        self._capacity_at: float | None = None  # when there first were
        self._demand: demand.Watch | None = None
        self._has_released = False
        self._mirror: Mirror | None = None
        self._is_told = False  # to end, and has little time left
        self._is_unfit = False  # the head's own host
        self._ending: int | None = None  # exit code, of a reason to end before the command runs

    def run(self) -> int:
        """Return the container's exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        server = node.start_fork_server(self._head)
        if faults := node.host_faults(self._head):
            for fault in faults:
                say(f"not starting: {fault}")
            return exits.BAD_HOST
        cache.start_trimming()
        task = metadata.own_task()
        if task is None:
            raise InputError("a job starts its workers on ECS, and this is no task of ECS")
        address = network.own_address()
        interface = network.interface_of(address)
        say(
            f"job {self._config.job}: head on {address}, worker nodes: "
            f"{self._config.spec.nodes.words}"
        )
        provider = worker_provider(
            self._config, recipe=self._head.recipe, task=task, address=address
        )
        environment = node.ray_environment(self._head, interface) | os.environ
        environment |= {
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "RAY_CLOUD_INSTANCE_ID": task.arn,
            "RAY_NODE_TYPE_NAME": HEAD,
            **for_autoscaler(),
            **for_ray(self._config.spec),
        }
        ended = threading.Event()
        with tempfile.TemporaryDirectory(prefix="job-") as folder, log_pipe(Path(folder)) as pipe:
            self._folder, self._provider = Path(folder), provider
            request = self._folder / "check"
            environment |= {ENV_LOG_PIPE: str(pipe), ENV_HOST_CHECK: str(request)}
            node.start_watching_host(self._head, request, self._on_unfit, ended)
            self._scale()
            threading.Thread(
                target=cluster.watch, args=(os.environ[TOKEN], self._on_size, ended), daemon=True
            ).start()
            self._start_ray(address, environment, server)
            try:
                code = self._bring_up(address, environment)
                if code is None:
                    code = self._pass_gate(address, environment)
                if code is None:
                    self._watch_demand(f"{address}:{GCS_PORT}", ended)
                    code = self._run_command(address, environment)
                return code
            finally:
                ended.set()
                _end(self._ray, times.RAY_STOP_S)  # first, or it would replace what goes
                release_workers(provider)

    def _start_ray(
        self, address: str, environment: Mapping[str, str], server: ForkServer | None
    ) -> None:
        """Start Ray's head, and end what is left of one that was started before."""
        processes.kill_marked(_ENV_RAY, self._config.job)
        command = node.ray_command(self._head, address, server)
        command += [f"--autoscaling-config={self._folder / _SCALING}"]
        self._ray_log = self._folder / "ray.log"
        # What it says at its start is for people who start it by hand.
        with self._ray_log.open("wb") as log:
            self._ray = subprocess.Popen(
                command,
                env={**environment, _ENV_RAY: self._config.job},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _bring_up(self, address: str, environment: Mapping[str, str]) -> int | None:
        """Wait until Ray, which was started, is up; start it once more where it ends instead."""
        code = self._until_up()
        if code == exits.RAY_FAILED and self._ray.poll() is not None:
            # Ray waits 30 s for its own processes, which a busy host may exceed once.
            say("Ray is started once more")
            self._start_ray(address, environment, None)
            code = self._until_up()
        return code

    def _until_up(self) -> int | None:
        """Wait until Ray is up; an exit code where that does not come."""
        began = time.monotonic()
        # Its port alone is not enough: the head is a node of its own cluster some seconds later.
        while self._size is None:
            if (early := self._reason_to_end(self._ray)) is not None:
                return early
            if time.monotonic() - began > times.RAY_START_S:
                self._say_of_ray(f"Ray did not start within {times.RAY_START_S} s")
                return exits.RAY_FAILED
            time.sleep(_POLL_S)
        return None

    def _scale(self, *, least: int | None = None, most: int | None = None) -> None:
        """Tell Ray's autoscaler how many nodes there shall be; it reads the file every time."""
        text = autoscaling(self._config, self._head, self._provider, least=least, most=most)
        new = self._folder / "new.yaml"
        new.write_text(text, encoding="utf-8")
        new.replace(self._folder / _SCALING)

    def _pass_gate(self, address: str, environment: Mapping[str, str]) -> int | None:
        """Run what must succeed before the job's command; an exit code where it does not."""
        words = self._config.spec.before
        if not words:
            return None
        say(f"before the job's command: {' '.join(words)}")
        given = dict(self._config.spec.variables)
        # For its workers too: which network NCCL uses may be among them.
        runtime = {RAY_VARIABLE: json.dumps({"runtime_env": {"env_vars": given}})} if given else {}
        gate = self._start(words, None, address, {**environment, **given, **runtime})
        code = self._wait(gate, self._ray)
        if code == exits.OK:
            return None
        say(
            f"the job's command is not started: what must succeed before it has ended with exit "
            f"code {code}, for the reason above"
        )
        return code

    def _start(
        self,
        words: tuple[str, ...],
        folder: Path | None,
        address: str,
        environment: Mapping[str, str],
    ) -> Program:
        """
        Raises:
            InputError: there is no such program.
        """
        own = {ENV_RUN: self._config.spec.run, "RAY_ADDRESS": f"{address}:{GCS_PORT}"}
        try:
            return Program(words, folder=folder, environment={**environment, **own})
        except OSError as error:
            raise InputError(f"{words[0]} cannot be run: {error.strerror}") from None

    def _run_command(self, address: str, environment: Mapping[str, str]) -> int:
        spec = self._config.spec
        # A process of Ray may still write there.
        with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder:
            work = Path(folder) / WORK
            work.mkdir()
            words, variables, place = spec.command, dict[str, str](), None
            try:
                own = user_code.prepare(spec, work, should_stop=self._must_end)
                if spec.on == Placement.NODES:
                    # Ray's own variable is for programs that use Ray.
                    of_user = {k: v for k, v in own.environment.items() if k[:4] != "RAY_"}
                    words = (sys.executable, "-m", "containers.program.nodes")
                    variables = {ENV_PROGRAM: self._program(address, of_user).to_json()}
                else:
                    program = on_head.prepare(spec, own, Path(folder), environment)
                    variables, place = program.environment, program.folder
                    if program.mirror:
                        program.mirror.restore(should_stop=self._must_end)
                        program.mirror.start()
                        self._mirror = program.mirror
                    say(f"running {' '.join(words)}")
            except Stopped:
                return self._ending or exits.FAILED
            command = self._start(words, place, address, {**environment, **variables})
            try:
                code = self._wait(command, self._ray)
            finally:
                command.end()  # what it has left behind writes no more
                is_saved = self._save_files()
            return code if is_saved or code != exits.OK else exits.FILES_LOST

    def _must_end(self) -> bool:
        """Whether there is a reason to end, before the command runs; says it once."""
        if self._ending is None:
            self._ending = self._reason_to_end(self._ray)
        return self._ending is not None

    def _save_files(self) -> bool:
        """Save what the command on the head wrote last; return whether all of it is saved."""
        if self._mirror is None:
            return True
        left = 0 if self._is_told else self._config.deadline - time.time()
        is_saved = self._mirror.save(max(times.FILES_SAVE_S, left))
        self._mirror.close()
        if not is_saved:
            what = f"{len(self._mirror.lost):,} files: {listed(self._mirror.lost)}"
            if self._mirror.is_replaced:
                what = "another job has taken over the files of the run"
            storage, run = os.environ.get(ENV_STORAGE, ""), self._config.spec.run
            report_lost(what, storage=storage, run=run, job=self._config.job)
        return is_saved

    def _program(self, address: str, variables: Mapping[str, str]) -> Told:
        """What runs on all nodes."""
        spec = self._config.spec
        return Told(
            run=spec.run,
            words=spec.command,
            workers=spec.nodes,
            variables=variables,
            capacity_wait_s=spec.capacity_wait_s,
            address=address,
            archive=f"{PROGRAM_DIR}/{user_code.ARCHIVE}" if spec.code else "",
            storage=os.environ.get(ENV_STORAGE, ""),
            deadline=self._config.deadline,
        )

    def _watch_demand(self, address: str, ended: threading.Event) -> None:
        """Watch what a program asks Ray for. Recipes were counted on the laptop."""
        if self._config.spec.on == Placement.NODES or self._config.spec.recipe:
            return
        os.environ["RAY_AUTH_MODE"] = "token"  # read by Ray's client, in this process
        self._demand = demand.Watch(capacity(self._config, self._head))
        threading.Thread(target=self._demand.run, args=(address, ended), daemon=True).start()

    def _release_unused(self) -> None:
        """Release worker nodes that have had nothing to do since all had joined."""
        spec = self._config.spec
        if self._capacity_at is None or self._demand is None or self._has_released:
            return
        if self._clock() - self._capacity_at < spec.idle_s:
            return
        idle = sum(each >= spec.idle_s for each in self._demand.idle_s)
        if not idle:
            return  # yet; one that works now may be done later
        self._has_released = True
        self._scale(least=0)
        nodes = "1 worker node has" if idle == 1 else f"{idle} worker nodes have"
        say(
            f"{nodes} had nothing to do for {spec.idle_s} s and will be released; the command "
            "runs on the head, and only Ray brings its work to other nodes (--on nodes runs it "
            "on every node)"
        )

    def _wait(self, command: Program, ray: "subprocess.Popen[bytes]") -> int:
        """Exit code of the command, or of what ended it."""
        code: int | None = None
        while command.poll() is None and code is None:
            time.sleep(_POLL_S)
            code = self._reason_to_end(ray)
            self._release_unused()
        if code is not None:
            self._is_told = True
            if code == exits.NO_CAPACITY:
                # Nothing trains; no node is paid for while the command ends.
                self._scale(least=0, most=0)
                release_workers(self._provider)
            until = time.monotonic() + self._stop_s()
            command.terminate()
            command.wait(lambda: until)
            command.end(lambda: until)
            return code
        own = command.end()
        if own == exits.KILLED:
            # From the head's container it would mean that the head was killed, and be tried again.
            say(f"the command was killed (exit code {own}), maybe for its memory: the job fails")
            return exits.FAILED
        is_program = not (self._config.spec.recipe or self._config.spec.on == Placement.NODES)
        if own in exits.OF_THE_SYSTEM and is_program:
            say(f"the command's exit code {own} has a meaning of its own here: the job's is 1")
            return exits.FAILED
        return own

    def _stop_s(self) -> int:
        """How long the command may take to end, in seconds."""
        if self._config.spec.recipe:
            return times.RECIPE_STOP_S  # it saves a checkpoint
        if self._config.spec.on == Placement.NODES:
            # The programs end, and then their files are saved.
            return times.COMMAND_STOP_S + times.FILES_SAVE_S + times.FILES_SLACK_S
        return times.COMMAND_STOP_S

    def _reason_to_end(self, ray: "subprocess.Popen[bytes]") -> int | None:
        """Exit code of a job that must not go on; None while it may."""
        config = self._config
        if self._stopped:
            say("stopped as told")
            return exits.TERMINATED
        if self._mirror is not None and self._mirror.is_replaced:
            say("another job has taken over the files of this run: the command is ended")
            return exits.FILES_LOST
        if time.time() > config.deadline:
            say("the deadline has come")
            return exits.DEADLINE
        if ray.poll() is not None:
            self._say_of_ray(f"Ray ended on its own (exit code {ray.returncode})")
            return exits.RAY_FAILED
        if self._is_unfit:
            return exits.BAD_HOST
        if self._demand is not None and self._demand.reason:
            say(f"the program {self._demand.reason}")
            return exits.ASKS_TOO_MUCH
        return self._lack_of_capacity()

    def _lack_of_capacity(self) -> int | None:
        """Exit code of a job that has waited long enough for worker nodes; None while it may wait.

        A recipe waits for the nodes that it has lost while the others are billed. A program may go
        on without them, and one on all nodes has its own patience (``containers.program.nodes``).
        """
        has_lost = self._capacity_at is not None
        short_since = self._short_since
        if short_since is None or (has_lost and not self._config.spec.recipe):
            return None
        waited = self._clock() - short_since
        if waited <= self._config.spec.capacity_wait_s:
            return None
        there = self._size.num_nodes - 1 if self._size else 0
        needed = self._config.spec.nodes.low
        after = "after a loss" if has_lost else "after the start"
        say(f"{there} of {needed} worker nodes, {waited:.0f} s {after}: no capacity")
        return exits.NO_CAPACITY

    def _say_of_ray(self, what: str) -> None:
        lines = self._ray_log.read_text(errors="replace").splitlines() if self._ray_log else []
        say("\n".join([f"{what}; it said last:", *lines[-20:]]))

    def _on_size(self, line: str) -> None:
        self._size = ClusterSize.from_line(line)
        say(line)
        enough = self._size and self._size.num_nodes > self._config.spec.nodes.low
        if enough:
            self._short_since = None
            if self._capacity_at is None:
                self._capacity_at = self._clock()
        elif self._short_since is None:
            self._short_since = self._clock()

    def _on_unfit(self) -> None:
        self._is_unfit = True

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopped = True
        if self._mirror:
            self._mirror.hurry(times.COMMAND_STOP_S + times.FILES_SAVE_S)


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
    # With --verbose, nodes bring along what Ray's processes print: Ray starts those as usual.
    recipe = "" if "--verbose" in config.spec.command else config.spec.recipe
    return Job(config, replace(head, recipe=recipe)).run()
