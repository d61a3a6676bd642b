"""The user's program on one node: working directory, environment, logs, exit.

``containers.program.nodes`` runs a ``Launcher`` on each node of a job, inside Ray, which only holds
the node for it: the program itself need not know Ray. What it finds in its environment is what
torchrun, accelerate, DeepSpeed, Lightning and plain ``init_process_group`` read, so that a command
that works on one machine works on all nodes without a change.

``prepare_head`` sets up a command that runs on the head itself, for programs that use Ray.
"""

import json
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Self

from containers.host import machine
from containers.program import code
from containers.program.cause import Error, LastError, errors_in
from containers.program.code import RAY_VARIABLE, Prepared
from containers.program.files import Mirror, open_mirror
from containers.program.process import NodeLog, Program
from containers.program.requirements import Stopped
from containers.program.starts import Start
from contract import host_check, runs, times
from contract.errors import InputError
from contract.files import OUTPUT, WORK
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
    MASTER_PORT,
    Range,
)

#: Of Python's path: a folder whose ``sitecustomize.py`` each Python of a program runs first.
STARTUP: Final = Path(__file__).parent / "startup"
#: Value of PYTHONUNBUFFERED with which ``sitecustomize.py`` makes Python write whole lines. Where
#: Python does not run that file, it has no buffer at all, so that its lines come at once too.
LINES: Final = "lines"
#: Of the system's own variables, what a program may see.
_KEPT: Final = (ENV_JOB, ENV_NOTICE, ENV_RUN, ENV_STORAGE)
#: Ray sets it for its workers to the processors that they ask for; torchrun has its own default.
_OF_RAY: Final = ("OMP_NUM_THREADS",)
_POLL_S: Final = 0.1


ENV_PROGRAM: Final = "TRAIN_PROGRAM"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """What runs on every node of a job: the head passes it to ``containers.program.nodes``, which
    passes it to the launchers."""

    run: str
    words: tuple[str, ...]
    workers: Range
    """Worker nodes."""
    variables: Mapping[str, str]
    """The user's: they override the system's own."""
    capacity_wait_s: float
    """How long lost nodes are waited for."""
    address: str
    """Of the head."""
    archive: str = ""
    """Path of the code's archive on each node; empty: the program brings none."""
    storage: str = ""
    """``s3://bucket`` in which the program's files are kept; empty: nowhere."""
    deadline: float = math.inf
    """Unix time at which the job is told to end."""
    grace_s: int = times.DEFAULT_GRACE_S
    """Seconds between SIGTERM and SIGKILL where what the program saves then counts."""

    def to_json(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps(
            values | {"workers": str(self.workers), "variables": dict(self.variables)}
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises KeyError, TypeError or ValueError where it is not what ``to_json`` writes."""
        values = json.loads(text)
        values["words"] = tuple(values["words"])
        values["workers"] = Range.parse(str(values["workers"]), option="workers")
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one node is among the others of a start."""

    number: int
    """Of this node in the log and in the bucket; a node that replaces it has the same."""
    rank: int
    """The same as its number, unless a range of nodes has lost some."""
    start: int
    """0, and 1 more each time that the program is started again on all nodes."""
    addresses: tuple[str, ...]
    """Of the nodes that begin together, by rank."""
    gpus: int
    """Of this node."""
    files: Start | None = None
    """What is restored before this start; None: files are not kept."""

    @property
    def num_nodes(self) -> int:
        return len(self.addresses)

    @property
    def master(self) -> str:
        """Address of the node with rank 0."""
        return self.addresses[0]

    @property
    def port(self) -> int:
        """Another one at each start: what is left of the one before must not meet the new one."""
        return MASTER_PORT + self.start % 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a program ended on one node."""

    code: int
    """Its exit code; 128 + N where signal N ended it."""
    at: float
    """Unix time."""
    was_told: bool
    """It was told to end: another node failed, or this one must go."""
    was_replaced: bool = False
    """Another job has taken over the files of this node."""
    errors: tuple[Error, ...] = ()
    """What its processes have noted."""
    last_error: str = ""
    """Of its log."""


def launcher_environment(place: Place) -> dict[str, str]:
    """The variables from which launchers and programs learn about the other nodes.

    The five ``PET_`` variables are torchrun's static rendezvous: its nodes are numbered by what
    they are told. ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` are there only where each of several
    nodes has a single process: elsewhere a launcher must start the processes, and it numbers them.
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
        "GPUS_PER_NODE": str(place.gpus),
        "PYTHONUNBUFFERED": LINES,
    }
    if not place.gpus:
        # Else accelerate, and with it the Trainer, starts no process group without a GPU.
        found["ACCELERATE_USE_CPU"] = "true"
    if per_node == 1 and place.num_nodes > 1:
        found |= {
            "WORLD_SIZE": str(place.num_nodes),
            "RANK": str(place.rank),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
    return found


def accelerate_config(place: Place) -> str:
    """What ``accelerate launch`` reads from its default file: it asks no variable for its nodes.

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
        "main_training_function": "main",
        "mixed_precision": "no",
        "rdzv_backend": "static",
        "same_network": True,
        "downcast_bf16": "no",
        "debug": False,
    }
    return json.dumps(values, indent=1)


def huggingface_environment(environment: Mapping[str, str], home: Path) -> dict[str, str]:
    """Variables that make ``home`` the private folder of Hugging Face's libraries.

    What they download stays where it was, so that other jobs on this host find it.
    """
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    shared = Path(environment.get("HF_HOME") or cache / "huggingface")
    return {
        "HF_HUB_CACHE": str(shared / "hub"),
        "HF_DATASETS_CACHE": str(shared / "datasets"),
        **{name: environment[name] for name in _HF_CACHES if name in environment},
        "HF_HOME": str(home),
    }


_HF_CACHES: Final = ("HF_HUB_CACHE", "HF_DATASETS_CACHE")


def base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a program inherits of its node: neither Ray's variables and token nor the system's."""
    return {
        name: value
        for name, value in environment.items()
        if (name in _KEPT or not name.startswith(("RAY_", "TRAIN_"))) and name not in _OF_RAY
    }


class Launcher:
    """Starts the program on one node, again where it must, and ends it; an actor of Ray.

    Its methods are called from several threads at once.
    """

    def __init__(self, told: LaunchSpec, *, folder: str = "") -> None:
        """``folder``: below which the program works; by default one of this node."""
        self._told = told
        self._base = Path(folder or default_folder())
        self._work, self._output = self._base / WORK, self._base / OUTPUT
        self._errors, self._last_error = self._base / "errors", LastError()
        self._log: NodeLog | None = None
        self._mirror: Mirror | None = None
        self._program: Program | None = None
        self._told_at: float | None = None
        self._kill_at = float("inf")
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._ended: Ended | None = None
        self._notice = threading.Event()
        self._closed = threading.Event()
        self._is_broken_off = threading.Event()
        default = self._base.with_name(f"{self._base.name}-notice")
        self._notice_file = Path(os.environ.get(ENV_NOTICE) or default)
        threading.Thread(target=self._watch_notice, daemon=True).start()

    def address(self) -> str:
        """This node's, as the others reach it; also shows that the node is alive."""
        return machine.address_towards(self._told.address)

    def prepare(self, place: Place) -> bool:
        """Bring the code and the files of the run to this node; again before each start.

        Returns:
            Whether they are here; not after ``break_off``.

        Raises:
            InputError: the files cannot be restored.
        """
        self._end_program()
        if self._mirror is not None:
            self._mirror.close()
        if self._log is None or place.files:
            self._log = self._log or NodeLog(place.number, os.environ)
            # What another start has left is in the bucket.
            shutil.rmtree(self._base, ignore_errors=True)
            self._work.mkdir(parents=True, exist_ok=True)
            self._output.mkdir(exist_ok=True)
            if self._told.archive:
                code.unpack(Path(self._told.archive), self._work)
        if place.files:
            self._mirror = open_mirror(
                {WORK: self._work, OUTPUT: self._output},
                f"{self._told.storage}/{runs.output_prefix(self._told.run)}",
                node=place.number,
                say=self._log.write,
                # What the program computes from now on would be lost.
                on_replaced=lambda: self.stop(times.COMMAND_STOP_S),
            )
            try:
                self._mirror.restore(place.files, should_stop=self._is_broken_off.is_set)
            except Stopped:
                return False
            self._mirror.start()
        return True

    def _end_program(self) -> None:
        """End that of a start that another node did not live to see; two would clash."""
        if self._program is not None:
            self.stop(times.COMMAND_STOP_S)
            self._end.wait()

    def break_off(self) -> None:
        """End what ``prepare`` is doing: the job has to end."""
        self._is_broken_off.set()

    def start(self, place: Place) -> None:
        """Start the program, which was prepared; ``wait`` returns when it has ended.

        Raises:
            InputError: there is no such program.
        """
        work = self._work
        shutil.rmtree(self._errors, ignore_errors=True)
        self._errors.mkdir()
        self._last_error = LastError()
        home = self._base / "huggingface"  # nothing of it is kept
        config = home / "accelerate" / "default_config.yaml"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(accelerate_config(place), encoding="utf-8")
        own = base_environment(os.environ)
        of_user = self._told.variables.get("PYTHONPATH")
        # A sitecustomize of the user's comes after ours, which runs it.
        paths = (str(STARTUP), str(work), of_user, own.get("PYTHONPATH"))
        environment = {
            **own,
            **launcher_environment(place),
            **huggingface_environment(own, home),
            ENV_RUN: self._told.run,
            ENV_OUTPUT: str(self._output),
            ENV_ERRORS: str(self._errors),
            ENV_NOTICE: str(self._notice_file),
            **self._told.variables,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        with self._lock:
            try:
                self._program = Program(
                    self._told.words, folder=work, environment=environment, emit=self._hear
                )
            except OSError as error:
                word = self._told.words[0]
                raise InputError(f"{word} cannot be run: {error.strerror}") from None
            self._ended, self._told_at = None, None
            self._kill_at = float("inf")
            self._end.clear()
        threading.Thread(target=self._watch, args=(self._program, place), daemon=True).start()
        if self._notice.is_set():
            self.stop(self._seconds_left())

    def _hear(self, line: str) -> None:
        """A line that the program has printed."""
        assert self._log is not None, "prepare() comes first"
        self._log.write(line)
        self._last_error.hear(line)

    def wait(self) -> Ended:
        """How the program that was started last has ended, once it has."""
        self._end.wait()
        assert self._ended is not None
        return self._ended

    def wait_for_notice(self) -> float:
        """Unix time at which this node must have ended, once that is known."""
        self._notice.wait()
        return self._notice_at()

    def stop(self, within_s: float) -> None:
        """SIGTERM for the program, and SIGKILL after ``within_s`` seconds; ``wait`` returns."""
        with self._lock:
            if self._program is None or self._ended is not None:
                return
            if self._told_at is None:
                self._told_at = time.time()
                self._program.terminate()
            self._kill_at = min(self._kill_at, time.monotonic() + within_s)

    def host_faults(self) -> list[str]:
        """Faults of this node's host, which is checked now; see ``contract.host_check``."""
        return host_check.ask()

    def close(self) -> None:
        """End the threads of this launcher, whose program has ended."""
        self._closed.set()
        if self._mirror is not None:
            self._mirror.close()

    def save(self, within_s: float | None = None) -> list[str]:
        """Bring the files of the program, which has ended, to the bucket.

        Args:
            within_s: how long that may take; None: as long as it needs, or as this node has.

        Returns:
            Names of the files that are not there.
        """
        if self._mirror is None:
            return []
        if self._notice.is_set():
            left = self._seconds_to_notice()
            within_s = left if within_s is None else min(left, within_s)
        self._mirror.save(within_s)
        return self._mirror.lost

    def hurry(self, within_s: float) -> None:
        """What is being saved must be done within so many seconds: the job has to end."""
        if self._mirror is not None:
            self._mirror.hurry(within_s)

    def _watch(self, program: Program, place: Place) -> None:
        """Wait for the program's end, and bring it about where it does not come."""
        program.wait(lambda: self._kill_at)
        at, was_told = time.time(), self._told_at is not None
        # What outlives a program that has ended by itself is not waited for.
        code = program.end(lambda: self._kill_at if was_told else 0.0)
        was_replaced = self._mirror is not None and self._mirror.is_replaced
        ended = Ended(
            code=code,
            at=at,
            was_told=was_told,
            was_replaced=was_replaced,
            errors=errors_in(self._errors, place.number),
            last_error=self._last_error.line,
        )
        with self._lock:
            self._ended = ended
        if self._notice.is_set():
            self.save()  # now: this node has no time for what the others do first
        self._end.set()

    def _watch_notice(self) -> None:
        """Pass a notice that this node goes on to the program, as SIGTERM."""
        while not self._notice_file.exists():
            if self._closed.wait(_POLL_S * 5):
                return
        self._notice.set()
        self.stop(self._seconds_left())
        self.hurry(self._seconds_to_notice())
        if self._end.is_set():
            self.save()  # the others may run for longer than this node is there

    def _seconds_to_notice(self) -> int:
        return max(1, round(self._notice_at() - time.time()))

    def _notice_at(self) -> float:
        """Unix time at which this node must have ended."""
        try:
            return float(self._notice_file.read_text())
        except (OSError, ValueError):
            return time.time() + times.RAY_DRAIN_S

    def _seconds_left(self) -> float:
        """For the program, on a node that must end; a third of the time is for its files."""
        return max(1.0, (self._notice_at() - time.time()) * 2 / 3)


def default_folder() -> Path:
    """Below which the program of a job works on this node."""
    return Path(tempfile.gettempdir()) / "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadProgram:
    """What the command on the head is started with."""

    folder: Path | None
    """Where it runs; None: where the node's own program does."""
    environment: dict[str, str]
    """Variables, beside those of the node."""
    mirror: Mirror | None
    """Its files; None where they are not kept."""
    errors: Path | None = None
    """Where its processes note why they fail."""


def prepare_head(
    spec: JobSpec,
    own: Prepared,
    place: Path,
    environment: Mapping[str, str],
    *,
    make_mirror: Callable[[dict[str, Path], str], Mirror] = open_mirror,
) -> HeadProgram:
    """Set up a job's command on the head; ``mirror.restore()`` is still to be called.

    Only a user's code has files that are kept: a recipe saves checkpoints itself.

    Args:
        spec: the job's order.
        own: its code, if any, which has been unpacked into a folder below ``place``.
        place: a folder of the job's own on this node.
        environment: of the node.
        make_mirror: of the folders and the address.
    """
    storage = environment.get(ENV_STORAGE, "")
    if not storage.startswith("s3://") or own.folder is None:
        return HeadProgram(folder=own.folder, environment=own.environment, mirror=None)
    folders = {WORK: own.folder, OUTPUT: place / OUTPUT}
    names, errors = place / "names", place / "errors"
    for folder in (*folders.values(), names, errors):
        folder.mkdir(exist_ok=True)
    given = {
        ENV_RUN: spec.run,
        ENV_RAY_STORAGE: f"{storage}/{runs.ray_prefix(spec.run)}".rstrip("/"),
    }
    runtime = json.loads(own.environment.get(RAY_VARIABLE, '{"runtime_env": {}}'))["runtime_env"]
    variables = dict(runtime.get("env_vars", {}))
    # Of the command and of what Ray starts for it alike, on every node at the same place.
    paths = [str(STARTUP), variables.get("PYTHONPATH", "")]
    given["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    runtime["env_vars"] = {**variables, **given}
    # What the program writes and what comes back is not sent to the other nodes with its code.
    code = place / "code"
    shutil.copytree(own.folder, code, symlinks=True)
    runtime["working_dir"] = str(code)
    return HeadProgram(
        folder=own.folder,
        environment={
            "PYTHONUNBUFFERED": LINES,
            **own.environment,
            **given,
            RAY_VARIABLE: json.dumps({"runtime_env": runtime}),
            # A program may name a runtime environment of its own; without this, Ray refuses both.
            "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
            # Every few seconds, a line for each trial that waits its turn would call it impossible.
            # What can never be had, the head reports.
            "RAY_SCHEDULER_EVENTS": "0",
            ENV_RAY_NAMES: str(names),
            ENV_ERRORS: str(errors),
            ENV_OUTPUT: str(folders[OUTPUT]),
        },
        mirror=make_mirror(folders, f"{storage}/{runs.output_prefix(spec.run)}"),
        errors=errors,
    )
