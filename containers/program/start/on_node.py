"""The user's program on one node: working directory, environment, logs, exit.

``containers.program.start.supervisor`` runs a ``Launcher`` on each node of a job, inside Ray, which
only holds the node for it: the program itself need not know Ray. Its environment has what torchrun,
accelerate, DeepSpeed, Lightning and plain ``init_process_group`` read, so that a command that works
on one machine works on all nodes without a change.

``prepare_head`` sets up a command that runs on the head itself, for programs that use Ray.
"""

import contextlib
import json
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from containers.host.machine import in_background
from containers.program.files import scalars
from containers.program.files.program_files import Mirror, open_mirror
from containers.program.files.s3_files import PreparationStopped, open_bucket
from containers.program.files.starts import ProgramStart
from containers.program.start import code, shell
from containers.program.start.process import NodeLog, ProgramProcess
from containers.program.watch import joined
from containers.program.watch import signs as watch
from containers.program.watch.cause import Error, LogEnd, errors_in, hidden
from contract import exits, host_check, runs, times
from contract.errors import InputError
from contract.files import HOME, OUTPUT, WORK
from contract.job import JobSpec
from contract.nodes import (
    ENV_ERRORS,
    ENV_JOB,
    ENV_NOTICE,
    ENV_OUTPUT,
    ENV_RAY_NAMES,
    ENV_RAY_STORAGE,
    ENV_RUN,
    ENV_STORAGE,
    ENV_WATCH,
    MASTER_PORT,
)

#: What each bash of a program runs first.
BASH_ENV: Final = code.STARTUP / "bash_env"
#: Value of PYTHONUNBUFFERED with which ``sitecustomize.py`` makes Python write whole lines. Where
#: Python does not run that file, it has no buffer at all, so that its lines come at once too.
LINES: Final = "lines"
#: The system's own variables that a program may see.
_KEPT: Final = (ENV_JOB, ENV_NOTICE, ENV_RUN, ENV_STORAGE)
#: Ray sets it for its workers to the processors that they ask for; torchrun has its own default.
_OF_RAY: Final = ("OMP_NUM_THREADS",)
ENV_PROGRAM: Final = "TRAIN_PROGRAM"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """Launch of a program on every node: the head passes it to
    ``containers.program.start.supervisor``, which passes it to the launchers."""

    order: JobSpec
    variables: Mapping[str, str]
    """The user's: they override the system's own."""
    storage: str = ""
    """``s3://bucket`` in which the program's files are kept; empty: nowhere."""
    deadline: float = math.inf
    """Unix time at which the job is told to end."""

    def to_json(self) -> str:
        return json.dumps([self.order.to_json(), self.variables, self.storage, self.deadline])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` writes."""
        order, variables, storage, deadline = json.loads(text)
        order = JobSpec.from_json(order)
        return cls(order=order, variables=variables, storage=storage, deadline=deadline)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlace:
    """Place of one node among the others of a start."""

    number: int
    """Number of this node in the log and in the bucket; a node that replaces it has the same."""
    rank: int
    """The same as its number, unless a range of nodes has lost some."""
    start: int
    """0, and 1 more each time that the program is started again on all nodes."""
    addresses: tuple[str, ...]
    """Addresses of the nodes that start together, by rank."""
    gpus: int
    """Number of GPUs of this node."""
    files: ProgramStart | None = None
    """Files to restore before this start; None: files are not kept."""
    most: int = 1
    """Number of nodes that a start of this job may have."""

    @property
    def num_nodes(self) -> int:
        return len(self.addresses)

    @property
    def master(self) -> str:
        """Address of the node with rank 0."""
        return self.addresses[0]

    @property
    def port(self) -> int:
        """Rendezvous port, a new one at each start: leftovers of an earlier start must not meet the
        new one."""
        return MASTER_PORT + self.start % 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """End of a program on one node."""

    code: int
    """Its exit code; 128 + N where signal N ended it."""
    at: float
    """Unix time."""
    was_stopped: bool
    """It was told to end: another node failed, or this one must go."""
    was_replaced: bool = False
    """Another job has taken over the files of this node."""
    errors: tuple[Error, ...] = ()
    """Errors that its processes have noted."""
    hidden: tuple[str, ...] = ()
    """Failures inside it although it has ended with 0; see ``cause.hidden``."""
    log: LogEnd | None = None
    """End of what it has printed."""
    trouble: Exception | None = None
    """Reason why it could not be started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Answer of a launcher that is polled."""

    start: int = -1
    """The one that it was told last."""
    runs: bool = False
    """Its program has been started: files are restored before, which may take long."""
    ended: Ended | None = None
    """End of that start's program, once it has ended."""
    lost: tuple[str, ...] | None = None
    """Names of its files that could not be saved; None until the others are."""
    newest_ns: int = 0
    """Newest change of a file that is saved, Unix time; 0: there is none."""
    leaves_at: float | None = None
    """Unix time at which this node must have ended, once that is known."""
    signs: watch.Signs = field(default_factory=watch.Signs)
    """Its signs of life."""
    peers: joined.Peers = field(default_factory=joined.Peers)
    """Its connections to other nodes."""


def launcher_environment(place: NodePlace) -> dict[str, str]:
    """The variables from which launchers and programs learn about the other nodes.

    The five ``PET_`` variables are torchrun's static rendezvous: its nodes are numbered by what
    they are told. ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` are there only where a job may have
    several nodes, and each has a single process: elsewhere a launcher must start the processes, and
    it numbers them.
    """
    per_node = max(1, place.gpus)
    found = {
        "PET_NNODES": str(place.num_nodes),
        "PET_NPROC_PER_NODE": str(per_node),
        "PET_NODE_RANK": str(place.rank),
        "PET_MASTER_ADDR": place.master,
        "PET_MASTER_PORT": str(place.port),
        "MASTER_ADDR": place.master,
        "MASTER_PORT": str(place.port),
        "NODE_RANK": str(place.rank),
        "NUM_NODES": str(place.num_nodes),
        "NNODES": str(place.num_nodes),
        "GPUS_PER_NODE": str(place.gpus),
        "PYTHONUNBUFFERED": LINES,
    }
    if not place.gpus:
        # Else accelerate, and with it the Trainer, starts no process group without a GPU.
        found["ACCELERATE_USE_CPU"] = "true"
    if per_node == 1 and max(place.num_nodes, place.most) > 1:
        found |= {
            "WORLD_SIZE": str(place.num_nodes),
            "RANK": str(place.rank),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
    return found


def accelerate_config(place: NodePlace) -> str:
    """Default file of ``accelerate launch``, which reads the nodes from no variable.

    It is JSON, which is YAML too.
    """
    per_node = max(1, place.gpus)
    many = per_node * place.num_nodes > 1
    kind = ("MULTI_GPU" if place.gpus else "MULTI_CPU") if many else "NO"
    values = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "use_cpu": place.gpus == 0,
        "num_machines": place.num_nodes,
        "num_processes": per_node * place.num_nodes,
        "machine_rank": place.rank,
        "main_process_ip": place.master,
        "main_process_port": place.port,
        "mixed_precision": "no",
        "same_network": True,
    }
    return json.dumps(values, indent=1)


def base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment that a program inherits from its node, without Ray's variables and token."""
    return {
        name: value
        for name, value in environment.items()
        if (name in _KEPT or not name.startswith(("RAY_", "TRAIN_"))) and name not in _OF_RAY
    }


class Launcher:
    """Starts the program on one node, again where it must, and ends it; an actor of Ray.

    Its methods are called from several threads at once, and return at once; ``status`` tells how
    far it is.
    """

    def __init__(self, spec: LaunchSpec, *, folder: str = "") -> None:
        """``folder``: below which the program works; by default one of this node."""
        self._spec = spec
        self._base = Path(folder or Path(tempfile.gettempdir()) / "train")
        self._work, self._output = self._base / WORK, self._base / OUTPUT
        self._home = self._base / HOME
        self._errors, self._log_end = self._base / NOTED_ERRORS, LogEnd()
        self._watched = self._base / "watch"
        self._log: NodeLog | None = None
        self._mirror: Mirror | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._reset(-1)
        self._others = set[str]()  # addresses of the other nodes
        # A head that trains too ends by itself at a notice, and has no such file.
        default = self._base.with_name(f"{self._base.name}-notice")
        self._notice = Path(os.environ.get(ENV_NOTICE) or default)

    def _reset(self, start: int) -> None:
        self._start = start
        self._program: ProgramProcess | None = None
        self._ended: Ended | None = None
        self._lost: tuple[str, ...] | None = None
        self._is_ending = False
        self._kill_at = self._save_s = math.inf
        self._signs, self._sampled_at, self._lines = watch.Signs(), -math.inf, watch.NewLines()
        self._peers = joined.Peers()

    def start(self, place: NodePlace) -> Status:
        """Bring the code and the files of the run to this node, and start the program."""
        if self._thread is not None:
            # Left over from a start during which another node died; two programs would clash.
            self.stop(times.COMMAND_STOP_S)
            self._thread.join()
        with self._lock:
            self._reset(place.start)
            self._others = {*place.addresses} - {place.addresses[place.rank]}
        self._thread = in_background(self._run, place)
        return self.status()

    def status(self) -> Status:
        """Status of the program, and a sign that the node is alive. Ends the program after a notice
        that this node goes, or where another job has taken over its files."""
        leaves_at = self._leaves_at()
        if leaves_at is not None:
            left = leaves_at - time.time()
            self.stop(max(1.0, left * 2 / 3), left)  # a third of the time is for the files
        if self._was_replaced:  # what the program computes from now on would be lost
            self.stop(times.COMMAND_STOP_S)
        program, now = self._program, time.monotonic()
        if program and self._ended is None and now - self._sampled_at >= watch.EVERY_S:
            self._sampled_at = now
            pids = program.left()
            self._signs = watch.signs(
                pids,
                self._watched,
                lines=self._lines.num_new,
                printed=self._lines.num,
                written_ns=self._mirror.worked_ns if self._mirror else 0,
                is_served=watch.is_served(pids) or shell.is_open(),
            )
            if self._others and not self._peers.addresses:
                self._peers = joined.peers(pids, self._watched, self._others)
        return Status(
            start=self._start,
            runs=program is not None,
            ended=self._ended,
            lost=self._lost,
            newest_ns=self._newest_ns,
            leaves_at=leaves_at,
            signs=self._signs,
            peers=self._peers,
        )

    def look(
        self, number: int, is_last: bool = True
    ) -> tuple[list[watch.Found], tuple[Error, ...]]:
        """Write what each process of the program is doing to the log of this node; return it, and
        the errors that they have noted.

        Args:
            is_last: the program is ended next.
        """
        program, found = self._program, list[watch.Found]()
        if program and self._log:
            found = watch.look(program.left(), self._watched, node=str(number), is_last=is_last)
            for line in "\n".join(each.seen.details for each in found).splitlines():
                self._log.write(line)
        return found, errors_in(self._errors, number)

    def stop(self, within_s: float, save_s: float = math.inf) -> None:
        """End the program: SIGTERM, and SIGKILL after ``within_s`` seconds.

        Args:
            save_s: how long its last files may take, beside that.
        """
        with self._lock:
            self._save_s = min(self._save_s, save_s)
            if self._ended is not None:
                if self._mirror is not None and save_s < math.inf:
                    self._mirror.hurry(save_s)
                return
            if not self._is_ending and self._program is not None:
                self._program.terminate()
            self._is_ending = True
            self._kill_at = min(self._kill_at, time.monotonic() + within_s)

    @property
    def _newest_ns(self) -> int:
        return self._mirror.newest_ns if self._mirror else 0

    @property
    def _was_replaced(self) -> bool:
        return self._mirror is not None and self._mirror.is_replaced

    def _leaves_at(self) -> float | None:
        """Unix time at which this node must have ended, once that is known."""
        try:
            return float(self._notice.read_text())
        except OSError:
            return None

    def _run(self, place: NodePlace) -> None:
        at, trouble, code, failed = time.time(), None, exits.TERMINATED, list[str]()
        read_last: Callable[[], None] | None = None
        try:
            self._prepare(place)
            if place.rank == 0 and place.files is not None:
                record = f"{self._spec.storage}/{runs.run_prefix(self._spec.order.run)}"
                read_last = scalars.start(self._base, open_bucket(record), self._hear)
            program = self._begin(place)
            program.wait(lambda: self._kill_at)
            at, was_stopped = time.time(), self._is_ending
            if not was_stopped:
                failed = hidden(self._errors, program.outlived(), place.number)
            # Processes that outlive a program which has ended by itself are not waited for.
            code = program.end(lambda: self._kill_at if was_stopped else 0.0)
        except PreparationStopped:
            was_stopped = True
        except Exception as error:  # the head waits for a result, whatever has failed here
            trouble, code, was_stopped = error, exits.FAILED, False
        ended = Ended(
            code=code,
            at=at,
            was_stopped=was_stopped,
            was_replaced=self._was_replaced,
            errors=errors_in(self._errors, place.number),
            hidden=tuple(failed),
            log=self._log_end,
            trouble=trouble,
        )
        with self._lock:
            self._ended = ended
        try:
            lost = self._save()
        except Exception as error:  # such as a disk that cannot be read
            lost = (f"all, because of {type(error).__name__}: {error}",)
        if read_last:
            read_last()
        self._lost = lost

    def _save(self) -> tuple[str, ...]:
        """Bring what the program wrote last to the bucket; return what is not there."""
        if self._mirror is None:
            return ()
        # Over before the job's deadline.
        left = self._spec.deadline - times.FILES_SAVE_S - time.time()
        left = min(max(left, times.FILES_SAVE_S), self._save_s)
        try:
            self._mirror.save(None if left == math.inf else left)
        finally:
            self._mirror.close()
        return tuple(self._mirror.lost)

    def _prepare(self, place: NodePlace) -> None:
        """Bring the code and the files of the run to this node."""
        self._mirror = None
        self._log = self._log or NodeLog(place.number, os.environ)
        # Files of an earlier start are in the bucket. They move away first: what cannot be removed,
        # such as a folder that is read-only, must not lie among the code.
        with (
            tempfile.TemporaryDirectory(dir=self._base.parent, ignore_cleanup_errors=True) as gone,
            contextlib.suppress(FileNotFoundError),
        ):
            self._base.rename(Path(gone, "gone"))
        for folder in (self._work, self._output, self._home, self._errors, self._watched):
            folder.mkdir(parents=True)
        if self._spec.order.code:
            code.unpack(code.ARCHIVE, self._work)
        if place.files:
            self._mirror = open_mirror(
                {WORK: self._work, OUTPUT: self._output, HOME: self._home},
                f"{self._spec.storage}/{runs.output_prefix(self._spec.order.run)}",
                node=place.number,
                keep=self._spec.order.keep_files,
                skip=self._spec.order.skip_files,
                say=self._log.write,
            )
            self._mirror.restore(place.files, should_stop=lambda: self._is_ending)
            self._mirror.start()

    def _begin(self, place: NodePlace) -> ProgramProcess:
        """Start the program.

        Raises:
            InputError: there is no such program.
            Stopped: it was told to end.
        """
        self._log_end = LogEnd()
        # Of accelerate's file only: models and data are in the host's cache.
        hugging_face = self._home / ".cache" / "huggingface"
        config = hugging_face / "accelerate" / "default_config.yaml"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(accelerate_config(place), encoding="utf-8")
        own, variables = base_environment(os.environ), self._spec.variables
        # A sitecustomize of the user's comes after ours, which runs it.
        paths = (
            str(code.STARTUP),
            str(self._work),
            variables.get("PYTHONPATH"),
            own.get("PYTHONPATH"),
        )
        environment = {
            **own,
            **launcher_environment(place),
            "HOME": str(self._home),
            "HF_HOME": str(hugging_face),
            ENV_RUN: self._spec.order.run,
            ENV_OUTPUT: str(self._output),
            ENV_ERRORS: str(self._errors),
            "BASH_ENV": str(BASH_ENV),
            ENV_WATCH: str(self._watched),
            ENV_NOTICE: str(self._notice),
            **variables,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        note = self._base.with_name(f"{self._base.name}-shell.json")
        shell.note(self._work, environment, place=note)
        words = self._spec.order.command
        with self._lock:
            if self._is_ending:
                raise PreparationStopped
            try:
                self._program = ProgramProcess(
                    words, folder=self._work, environment=environment, emit=self._hear, adopts=True
                )
            except OSError as error:
                raise InputError(f"{words[0]} cannot be run: {error.strerror}") from None
            return self._program

    def _hear(self, line: str) -> None:
        """A line that the program has printed."""
        assert self._log is not None, "_prepare() comes first"
        self._lines.hear(line)
        self._log.write(line)
        self._log_end.hear(line)

    def host_faults(self) -> list[str]:
        """Faults of this node's host, which is checked now; see ``contract.host_check``."""
        return host_check.ask()


#: Folder beside the program's own in which its processes note why they fail.
NOTED_ERRORS: Final = "errors"
#: Folder beside it: names of the trainings of Ray that its program starts.
NAMES: Final = "names"


def prepare_head(
    spec: JobSpec,
    variables: Mapping[str, str],
    work: Path | None,
    environment: Mapping[str, str],
    *,
    make_mirror: Callable[..., Mirror] = open_mirror,
) -> tuple[dict[str, str], Mirror | None]:
    """Set up a job's command on the head.

    Only a user's code has files that are kept: a recipe saves checkpoints itself.

    Args:
        spec: the job's order.
        variables: of the command.
        work: where its code was unpacked, in a folder of the job's own on this node.
        environment: of the node.
        make_mirror: as ``open_mirror``.

    Returns:
        Its variables, beside those of the node; and its files, still to be restored, or None where
        they are not kept.
    """
    storage = environment.get(ENV_STORAGE, "")
    if not storage.startswith("s3://") or work is None:
        return {**variables, **code.for_ray(variables, work)}, None
    place = work.parent
    output, home, names, errors = (place / name for name in (OUTPUT, HOME, NAMES, NOTED_ERRORS))
    for folder in (output, home, names, errors):
        folder.mkdir(exist_ok=True)
    # Same path on every node, for the command and for what Ray starts for it.
    paths = [str(code.STARTUP), variables.get("PYTHONPATH", "")]
    common = {
        **variables,
        ENV_RUN: spec.run,
        ENV_RAY_STORAGE: f"{storage}/{runs.ray_prefix(spec.run)}".rstrip("/"),
        ENV_WATCH: str(code.WATCHED),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    # Outputs and restored files are not sent to the other nodes with the code.
    shutil.copytree(work, place / "code", symlinks=True)
    own = {
        "PYTHONUNBUFFERED": LINES,
        **common,
        **code.for_ray(common, place / "code"),
        # A program may name a runtime environment of its own; without this, Ray refuses both.
        "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
        # Every few seconds, a line for each trial that waits its turn would call it impossible.
        # The head reports requests that can never be met.
        "RAY_SCHEDULER_EVENTS": "0",
        ENV_RAY_NAMES: str(names),
        ENV_ERRORS: str(errors),
        "BASH_ENV": str(BASH_ENV),
        ENV_OUTPUT: str(output),
        # Of the command only: what Ray starts for it may be on another node.
        "HOME": variables.get("HOME", str(home)),
    }
    mirror = make_mirror(
        {WORK: work, OUTPUT: output, HOME: home},
        f"{storage}/{runs.output_prefix(spec.run)}",
        keep=spec.keep_files,
        skip=spec.skip_files,
    )
    return own, mirror
