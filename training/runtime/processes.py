"""Processes of a run's workers: find them, see what they are doing, end them.

A worker that hangs cannot be asked. On Linux, what can be read from outside is read by another
process of its node (on a cluster, in a task of Ray): the state in ``/proc``, and the stack of every
thread, which py-spy, a dependency of Ray's, reads from the process's memory.

Python's ``faulthandler`` writes stacks when it gets a signal, also while the interpreter is held.
That may crash a process whose threads come and go (python/cpython#116008, #128421, #131580), so a
signal is sent only to a process that is ended next.
"""

import contextlib
import ctypes
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from training.record.events import Process
from training.system import devices

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
#: SIGRTMAX - 5: programs, and libraries such as Lightning, have their own use for SIGUSR1 and 2.
SIGNAL: Final = 59
#: faulthandler writes at once, unless the machine has no memory or no processor to spare.
_STACKS_S: Final = 2.0
_PY_SPY_S: Final = 10.0
#: A task is a process that may still have to be started, on a node that is in trouble.
_NODE_S: Final = 30.0
_UNREADABLE: Final = "its Python stacks cannot be read"
#: In the first line of a thread's stack, as faulthandler writes it.
MOST_RECENT: Final = "most recent call first"
_NO_ANSWER: Final = "its node does not answer"
_FILES: Final[list[Any]] = []  # kept open as long as this process


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """State of a process that was looked at."""

    rank: int
    state: str
    """As Linux has it, such as ``T (stopped)``; ``gone`` where there is no such process; or that
    its node does not answer."""
    details: str
    """Its threads and stacks, for people; many lines."""

    @property
    def is_gone(self) -> bool:
        return self.state == "gone"

    @property
    def is_out_of_reach(self) -> bool:
        return self.state == _NO_ANSWER


def this_one(rank: int, node: str) -> Process | None:
    """This process, from now on ready to be looked at; None where that is not possible."""
    if sys.platform != "linux":
        return None
    file = tempfile.TemporaryFile("w+")  # noqa: SIM115, open until the process ends
    _FILES.append(file)
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    pid = os.getpid()
    return Process(rank=rank, node=node, pid=pid, born=devices.born(pid), stacks=file.fileno())


def end_with_parent() -> None:
    """Have Linux end this process with the one that started it.

    One that hangs in a collective, or at its own end, does not notice that by itself, and would
    hold a GPU until the collective's time is up.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def look(processes: Sequence[Process], *, is_last: bool = True) -> list[ProcessState]:
    """See what processes of this node are doing.

    Args:
        is_last: they are ended next, so that a signal may be sent.
    """
    asked = {each: _ask_for_stacks(each) for each in processes} if is_last else {}
    with ThreadPoolExecutor() as pool:
        return [*pool.map(lambda each: _seen(each, asked.get(each)), processes)]


def end(processes: Sequence[Process]) -> None:
    """Kill processes of this node, stopped ones too."""
    for each in processes:
        if _state(each) != "gone":
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)


def look_everywhere(processes: Sequence[Process]) -> list[ProcessState]:
    """See what processes are doing, each on its node; those of a node that is lost are gone."""
    found: list[ProcessState] = []
    for each, answer in _on_nodes(look, processes):
        if isinstance(answer, list):
            found += answer
            continue
        state = _NO_ANSWER if answer == _NO_ANSWER else "gone"
        details = f"node {each[0].node}: {'no answer' if answer == _NO_ANSWER else 'lost'}"
        found += [ProcessState(rank=one.rank, state=state, details=details) for one in each]
    return sorted(found, key=lambda seen: seen.rank)


def end_everywhere(processes: Sequence[Process]) -> None:
    """Kill processes, each on its node."""
    for _ in _on_nodes(end, processes):
        pass


def _on_nodes(task: Any, processes: Sequence[Process]) -> list[tuple[list[Process], Any]]:
    """Call a function on each node with its processes; see ``on_nodes``."""
    by_node: dict[str, list[Process]] = {}
    for each in processes:
        by_node.setdefault(each.node, []).append(each)
    answers = on_nodes(task, {node: (of_node,) for node, of_node in by_node.items()}, _NODE_S)
    return [*zip(by_node.values(), answers, strict=True)]


def on_nodes(task: Any, by_node: Mapping[str, tuple[Any, ...]], within_s: float) -> list[Any]:
    """Call a function on each node with its arguments; return the results in that order: None for a
    node that is lost, and ``_NO_ANSWER`` for one that takes longer than ``within_s``."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(task)
    asked = [
        remote.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(*arguments)
        for node, arguments in by_node.items()
    ]
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=within_s)
    found: list[Any] = []
    for reference in asked:
        answer = None
        if reference in ready:
            with contextlib.suppress(ray.exceptions.RayError):
                answer = ray.get(reference)
        else:
            answer = _NO_ANSWER
            ray.cancel(reference)
        found.append(answer)
    return found


def _state(process: Process) -> str:
    """Its state as Linux has it, or ``gone``."""
    status = _status(f"/proc/{process.pid}/status")
    return status if status and devices.born(process.pid) == process.born else "gone"


def _status(file: str, name: str = "State") -> str:
    with contextlib.suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return line.removeprefix(f"{name}:").strip()
    return ""


def _ask_for_stacks(process: Process) -> int:
    """Have it write its stacks; return where in its file they will begin."""
    size = 0
    if _state(process) != "gone":
        with contextlib.suppress(OSError):
            size = os.stat(f"/proc/{process.pid}/fd/{process.stacks}").st_size
            # A process that has become another program since would end.
            catches = _status(f"/proc/{process.pid}/status", "SigCgt")
            if int(catches or "0", 16) >> (SIGNAL - 1) & 1:
                os.kill(process.pid, SIGNAL)
    return size


def _seen(process: Process, begin: int | None) -> ProcessState:
    """Look at one process.

    Args:
        begin: where in its file its own stacks begin; None: it was not asked for them.
    """
    state = _state(process)
    if state == "gone":
        return ProcessState(rank=process.rank, state=state, details="")
    if begin is None or state[0] in "Tt":
        stacks = _py_spy(process.pid)
    else:
        stacks = _written(f"/proc/{process.pid}/fd/{process.stacks}", begin)
    rank = f"rank {process.rank}, " if process.rank >= 0 else ""
    parts = [
        f"{rank}process {process.pid} on node {process.node}: {state}",
        _threads(process.pid),
        stacks,
    ]
    return ProcessState(rank=process.rank, state=state, details="\n".join(parts))


def _written(file: str, begin: int) -> str:
    """Text that faulthandler appended to its file, read until the file stops growing."""
    deadline, text = time.monotonic() + _STACKS_S, b""
    while time.monotonic() < deadline:
        time.sleep(0.1)
        with contextlib.suppress(OSError), open(file, "rb") as opened:
            opened.seek(begin)
            more = opened.read()
            if more and more == text:
                break
            text = more
    return text.decode(errors="replace").strip() or _UNREADABLE


def _py_spy(pid: int, tries: int = 4) -> str:
    """Stacks of a process as faulthandler writes them, its main thread last; or why there are
    none."""
    places = (os.path.dirname(sys.executable), *os.get_exec_path())
    program = shutil.which("py-spy", path=os.pathsep.join(places)) or "py-spy"
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PY_SPY_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        if tries:  # its threads may have begun or ended meanwhile
            return _py_spy(pid, tries - 1)
        said = error.stderr.partition("Stack backtrace")[0].split()
        return f"{_UNREADABLE} from outside: {' '.join(said)}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{_UNREADABLE} from outside: {error}"
    frames = re.sub(
        r"(?m)^    (?:.*\.)?(\S+) \((.*):(\d+)\)$", r'  File "\2", line \3 in \1', done.stdout
    )
    _, *threads = re.split(r"(?m)^(?=Thread )", frames)
    return "".join(
        re.sub(r"$", f" ({MOST_RECENT}):", each.strip(), count=1, flags=re.M) + "\n"
        for each in sorted(threads, key=lambda each: '"MainThread"' in each.partition("\n")[0])
    )


def _threads(pid: int) -> str:
    """Number of threads in each state, and where in the kernel they wait."""
    kinds: Counter[str] = Counter()
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        where = ""
        for name in ("stack", "wchan"):  # the first one is for root alone
            with contextlib.suppress(OSError):
                where = where or (folder / name).read_text().strip().partition("\n")[0]
        kinds[f"{_status(f'{folder}/status')} {where.removeprefix('[<0>] ')}".strip()] += 1
    return "\n".join(f"  {number} threads: {kind}" for kind, number in kinds.most_common())
