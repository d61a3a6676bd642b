"""Workers of a run on one machine (``--local``), without Ray: forks of a server that has loaded
torch and the recipe's loop.

The server is the standard library's (``multiprocessing``). It ends with the command, and Linux ends
what it has forked with it, so that nothing is left after a SIGKILL. The command itself loads no
torch. Elsewhere than on Linux, workers are started the slow way, each with its own imports.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

from contract import exits, faults
from contract.errors import InputError, UnreachableError
from store import storage
from training import recipes
from training.recipe import Recipe
from training.record.events import Event, Failed, Process, Start, Warned
from training.runtime import outcome, processes
from training.runtime.outcome import Failures, prepared
from training.runtime.processes import ProcessState
from training.settings import RunConfig
from training.system import devices

_METHOD: Final = "forkserver" if sys.platform == "linux" else "spawn"
_CONTEXT: Final[Any] = multiprocessing.get_context(_METHOD)
#: A person does not notice a tenth of a second, nor does a processor.
_POLL_S: Final = 0.1
#: A worker that was killed may be seen later than the errors of those that talked to it.
_SETTLE_S: Final = 0.3
#: Longest path of a temporary folder below which Linux lets multiprocessing name a socket: it
#: allows 107 bytes, and multiprocessing adds some 30 of its own.
_LONGEST_FOLDER: Final = 70
#: Interface of gloo's and NCCL's own sockets.
_LOOPBACK: Final = dict.fromkeys(
    ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo0" if sys.platform == "darwin" else "lo"
)
#: The name of this machine in the run's record.
_HOST: Final = "localhost"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Done:
    """A process's last message: what it has found, or what it was told to do is done."""

    found: RunConfig | InputError | UnreachableError | None = None
    is_touched: bool = False
    """A package that the server has loaded uses the GPU: no fork of it can use it then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Crash:
    """The error that ends a worker."""

    text: str
    time: float
    code: int
    """Exit code of the command, if the run fails because of it."""


@dataclass(slots=True)
class _Rank:
    """One process, as the command sees it."""

    process: Any
    messages: Connection
    done: _Done | None = None
    crash: _Crash | None = None

    def receive(self) -> Iterator[Event]:
        """The events that have come in; notes how the process ends."""
        with contextlib.suppress(EOFError, OSError):
            while self.messages.poll():
                match self.messages.recv():
                    case _Done() as done:
                        self.done = done
                    case _Crash() as crash:
                        self.crash = crash
                    case events:
                        yield from events

    @property
    def has_failed(self) -> bool:
        return self.done is None and (self.crash is not None or self.process.exitcode is not None)


class LocalWorkers:
    """Forked processes on this machine."""

    start_text = "loading PyTorch"
    stop_grace_s = 10.0

    def __init__(self, recipe: Recipe, *, max_failures: int, verbose: bool) -> None:
        """
        Args:
            max_failures: failures in a row that the run survives.
            verbose: show what the workers print, instead of keeping it in files.
        """
        self.failure, self.failure_code = "", exits.FAILED
        self.found: RunConfig | InputError | UnreachableError | None = None
        self.is_done = False
        self._recipe, self._is_verbose = recipe, verbose
        self._failures = Failures(max_failures)
        self._ranks: list[_Rank] = []
        self._begun_at = 0
        self._loading = threading.Thread()
        self._again: Callable[[], None] | None = None
        self._context = _CONTEXT
        self._stores: Path | None = None
        self._logs: Path | None = None
        """Folder with the workers' output, one file per worker; None if it is shown instead."""

    @property
    def logs(self) -> str:
        return f"what its workers printed is in {self._logs}" if self._logs else ""

    def start(self, num_workers: int) -> None:
        """Have the server load torch and the loop."""
        if not self._is_verbose:
            self._logs = Path(tempfile.mkdtemp(prefix="train-logs-"))
        # Read by torch when it is loaded: the workers share the processors.
        threads = max(1, devices.num_cpus() // num_workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ.update(self._recipe.variables)
        if _METHOD != "forkserver":
            return
        # The server inherits that these are blocked: a terminal's Ctrl-C goes to the whole group,
        # and the command decides what becomes of its workers. To the command they come later.
        resource_tracker.ensure_running()  # which would unblock them, if the server started it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        folder = tempfile.gettempdir()
        try:
            if len(os.fsencode(folder)) > _LONGEST_FOLDER:
                tempfile.tempdir = "/tmp"
            first = ("training.runtime.ends_with_command", "training.runtime.torchrun")
            preload = [*first, self._recipe.loop, *self._recipe.preload]
            _CONTEXT.set_forkserver_preload(preload)
            forkserver.ensure_running()
        finally:
            tempfile.tempdir = folder
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def prepare(self, config: RunConfig) -> None:
        """Begin to look at the data; ``found`` has the result.

        In a thread: the server forks once it has loaded torch, and Ctrl-C must not wait for that.
        """

        def launch() -> None:
            try:
                self._launch(_prepare, config, [{}])
            except (EOFError, OSError) as error:
                self.failure = f"the server of the workers has ended ({error!r})"

        self._loading = threading.Thread(target=launch, daemon=True)
        self._loading.start()

    def train(self, config: RunConfig, run_uri: str, fence: int) -> None:
        """Begin to train."""

        def launch() -> None:
            # A file: torch's own server listens on all interfaces, whatever address it is given
            # (pytorch/pytorch#173909), and trusts who connects.
            store = f"{self._stores}/{uuid.uuid4().hex}"
            world = str(config.num_workers)
            common = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, **_LOOPBACK}
            variables = [
                {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                for rank in range(config.num_workers)
            ]
            self._launch(_train, config, variables, run_uri, fence, store)

        self._stores = Path(tempfile.mkdtemp(prefix="train-store-"))
        self._again = launch
        launch()

    def _launch(
        self, task: Callable[..., _Done], config: RunConfig, environments: Sequence[Any], *more: Any
    ) -> None:
        self.is_done, self._ranks = False, []
        for rank, variables in enumerate(environments):
            ours, theirs = self._context.Pipe(duplex=False)
            log = self._logs / f"rank-{rank}.log" if self._logs else None
            process = self._context.Process(
                target=_run, args=(task, theirs, log, variables, config.to_json(), *more)
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours))

    def poll(self) -> list[Event]:
        """Wait a moment for events, and start failed workers again."""
        if self._loading.is_alive() or self.failure:
            self._loading.join(_POLL_S)
            self.is_done = bool(self.failure)
            return []
        wait(
            [each.messages for each in self._ranks if not each.done]
            + [each.process.sentinel for each in self._ranks if not each.done],
            _POLL_S,
        )
        events = self._receive()
        if self._has_failed():
            time.sleep(_SETTLE_S)
            events += self._receive()
        if self._has_failed():
            reason = self._reason()
            self._end()
            if self._again is None or self._failures.is_one_too_many(self._begun_at):
                self.failure, self.is_done = reason, True
                return events
            self._again()
            what = reason.splitlines()[-1]
            return [*events, Warned(message=f"{what}: all start again from the last checkpoint")]
        found = [each.done for each in self._ranks if each.done]
        if len(found) == len(self._ranks):
            self.found, self.is_done = found[0].found, True
            if found[0].is_touched:
                self._context = multiprocessing.get_context("spawn")
        return events

    def _has_failed(self) -> bool:
        return any(each.has_failed for each in self._ranks)

    def _receive(self) -> list[Event]:
        events = [event for each in self._ranks for event in each.receive()]
        for event in events:
            if isinstance(event, Start):
                self._begun_at = event.step
        return events

    def _reason(self) -> str:
        """The first failure: others follow from it, as those of ranks that talked to it."""
        for rank, each in enumerate(self._ranks):
            code = each.process.exitcode
            if each.has_failed and each.crash is None:
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                return f"worker {rank} ended ({how})"
        crashed = [(rank, each.crash) for rank, each in enumerate(self._ranks) if each.crash]
        rank, crash = min(crashed, key=lambda each: each[1].time)
        self.failure_code = crash.code
        return f"{crash.text}\nworker {rank} failed ({crash.text.splitlines()[-1]})"

    def request_stop(self) -> None:
        """Have the workers save and leave; those that fail now are not started again."""
        self._again = None
        for each in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.process.pid, signal.SIGTERM)

    def look(self, found: Sequence[Process]) -> list[ProcessState]:
        return processes.look(found)

    def end(self, found: Sequence[Process]) -> None:
        processes.end(found)

    def _end(self) -> None:
        for each in self._ranks:
            each.process.kill()
        for each in self._ranks:
            each.process.join()
            each.messages.close()

    def close(self) -> None:
        """End what still runs; keep what the workers printed only where they failed."""
        self._end()
        self._ranks = []
        if self._stores:
            shutil.rmtree(self._stores, ignore_errors=True)
        if self._logs and not self.failure:
            shutil.rmtree(self._logs, ignore_errors=True)


# --- in the forked processes --------------------------------------------------------------------
def _run(
    task: Callable[..., _Done],
    messages: Connection,
    log: Path | None,
    variables: Mapping[str, str],
    *arguments: Any,
) -> None:
    """Do a task in a process of its own."""
    processes.end_with_parent()
    os.environ.update(variables)
    if log is None:
        os.dup2(2, 1)  # stdout is for the result
    else:
        try:
            file = log.open("ab")
        except FileNotFoundError:
            return  # the command has ended meanwhile, and has taken the folder away
        with file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    try:
        messages.send(task(messages.send, *arguments))
    except BaseException as error:
        text, code = traceback.format_exc().strip(), exits.FAILED
        if faults.is_passing(error):  # its traceback tells nothing about the program
            text, code = faults.text(error), exits.STORAGE
        messages.send(_Crash(text=text, time=time.time(), code=code))
        raise


def _prepare(send: Callable[[Any], None], settings: Mapping[str, object]) -> _Done:
    import torch

    found = prepared(recipes.config_from_json(settings), send, node=_HOST)
    # What transformers imports wherever it is installed, such as torchao, may ask for the GPU.
    is_touched = torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()
    return _Done(found=found, is_touched=is_touched)


def _train(
    send: Callable[[Any], None],
    settings: Mapping[str, object],
    run_uri: str,
    fence: int,
    store: str,
) -> _Done:
    """Train as one of the ranks.

    A user's mistake is an event and no failure: starting again would not help.
    """
    from training.runtime.torchrun import TorchrunWorker

    config = recipes.config_from_json(settings)
    worker = TorchrunWorker(run_uri=run_uri, fence=fence, store=store)
    worker.on_events = lambda *events: send(events)
    outcome.introduce(worker, node=_HOST, host=_HOST)
    try:
        recipes.by_name(config.recipe).train()(worker, config)
    except Exception as error:
        reported = faults.explained(error)
        if not isinstance(reported, InputError | storage.FullError):
            raise
        worker.saves.finish()
        send([Failed(message=str(reported), code=faults.exit_code(reported))])
    else:
        worker.saves.finish()
    return _Done()
