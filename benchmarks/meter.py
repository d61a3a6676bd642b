"""CPU seconds of a command together with everything it starts, and an end to all of it.

A cgroup counts exactly, processes that have ended included, and needs root or a delegated group.
Where none can be made, processes are found by a variable in their environment and their times are
added up at every reading: a process that lives between two readings only is missed. For a single
Python process without children ``time.process_time`` is enough.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol, Self

import psutil

MARK: Final = "BENCHMARK_TREE"
_END_TIMEOUT_S: Final = 20.0
_SHELL: Final = 'echo $$ > "$0" && exec "$@"'


def marked(mark: str) -> list[psutil.Process]:
    """Running processes that have ``mark`` as their ``MARK``, however far they have detached
    themselves from the one that started them."""
    found = []
    for process in psutil.process_iter():
        # Ended in between, or another user's.
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL to all; the end of one may be the end of another before its turn comes."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


class _Counter(Protocol):
    """Knows the processes of one tree."""

    method: str
    """How the seconds are found, for the result."""

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command that starts ``command`` as a member of the tree."""

    def cpu_s(self) -> float:
        """CPU seconds, user and system, of all members so far."""

    def pids(self) -> list[int]:
        """Members that are running; no zombies."""

    def close(self) -> None:
        """Forget the tree, which has no members any more."""


class Tree:
    """A running command with all its descendants. Ends them all on exit from its ``with``."""

    def __init__(
        self, command: Sequence[str], *, folder: Path, environment: Mapping[str, str], log: Path
    ) -> None:
        """
        Args:
            folder: Working directory of the command.
            log: File that gets what the command prints on both streams.
        """
        mark = secrets.token_hex(8)
        self._log = log
        self._counter: _Counter = _cgroup(mark) or _Marked(mark)
        self.began = time.time()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self._counter.wrap(command),
                cwd=folder,
                env={**environment, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the benchmark, which ends the tree
            )

    @property
    def method(self) -> str:
        return self._counter.method

    @property
    def exit_code(self) -> int | None:
        """Exit code of the command; None while it runs."""
        return self._process.poll()

    def cpu_s(self) -> float:
        return self._counter.cpu_s()

    def commands(self) -> list[str]:
        """Command lines of the members that are running."""
        found = []
        for pid in self._counter.pids():
            with suppress(psutil.Error):
                found.append(" ".join(psutil.Process(pid).cmdline())[:160])
        return found

    def printed(self) -> str:
        """What the command has printed, the last 4,000 characters."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-4000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        # Again and again: a member may start another one while this goes through the list.
        deadline = time.monotonic() + _END_TIMEOUT_S
        while pids := self._counter.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            if time.monotonic() > deadline:
                raise RuntimeError(f"still running after SIGKILL: {self.commands()}")
            time.sleep(0.05)
        self._process.wait()
        self._counter.close()


class _Cgroup:
    """A cgroup of its own: version 1 with the ``cpuacct`` controller, or version 2."""

    def __init__(self, folder: Path, *, version: int) -> None:
        self._folder = folder
        self._version = version
        self.method = f"cgroup v{version}"
        folder.mkdir()

    def wrap(self, command: Sequence[str]) -> list[str]:
        return ["sh", "-c", _SHELL, str(self._folder / "cgroup.procs"), *command]

    def cpu_s(self) -> float:
        if self._version == 1:
            return int((self._folder / "cpuacct.usage").read_text()) / 1e9
        fields = dict(line.split() for line in (self._folder / "cpu.stat").read_text().splitlines())
        return int(fields["usage_usec"]) / 1e6

    def pids(self) -> list[int]:
        members = (self._folder / "cgroup.procs").read_text().split()
        return [int(pid) for pid in members if _is_running(int(pid))]

    def close(self) -> None:
        # Zombies stay members until their parent, perhaps process 1, has waited for them.
        deadline = time.monotonic() + _END_TIMEOUT_S
        while True:
            try:
                self._folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return


def _cgroup(mark: str) -> _Cgroup | None:
    """A new cgroup below this process's own; None where none can be made or entered."""
    for parent, version in _cgroup_parents():
        try:
            group = _Cgroup(parent / f"benchmark-{mark}", version=version)
        except OSError:
            continue
        entered = subprocess.run(group.wrap(["true"]), capture_output=True, check=False)
        with suppress(OSError, KeyError):
            if entered.returncode == 0 and group.cpu_s() > 0:
                return group
        with suppress(OSError):
            group.close()
    return None


def _cgroup_parents() -> Iterator[tuple[Path, int]]:
    """Folders of this process's cgroups that may count CPU time, with the cgroup version."""
    if sys.platform != "linux":
        return
    try:
        own = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return
    # Controllers of each hierarchy -> path of this process in it; version 2 has no controllers.
    paths = {line.split(":")[1]: line.split(":", 2)[2] for line in own}
    for mount in mounts:
        _, place, kind, options = mount.split()[:4]
        if kind == "cgroup" and "cpuacct" in options.split(","):
            path = next((p for names, p in paths.items() if "cpuacct" in names.split(",")), "/")
            version = 1
        elif kind == "cgroup2":
            path, version = paths.get("", "/"), 2
        else:
            continue
        # In a container the path may be the host's, and the mount this container's own group.
        inside = Path(place) / path.lstrip("/")
        yield (inside if inside.is_dir() else Path(place)), version


class _Marked:
    """Members carry a variable in their environment, or have a parent that is a member.

    The second rule is for processes that write a title over their environment, as Ray's do.
    """

    method = "sum over the processes seen at each reading"

    def __init__(self, mark: str) -> None:
        self._mark = mark
        # By pid and start time, because pids are used again. Ended members keep their last value.
        self._cpu_s: dict[tuple[int, float], float] = {}
        self._others: set[tuple[int, float]] = set()

    def wrap(self, command: Sequence[str]) -> list[str]:
        return list(command)

    def cpu_s(self) -> float:
        self.pids()
        return sum(self._cpu_s.values())

    def pids(self) -> list[int]:
        found: set[int] = set()
        for process in psutil.process_iter():  # in the order of pids, so mostly parents first
            with suppress(psutil.Error, OSError):
                key = (process.pid, process.create_time())
                if key in self._others or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if key not in self._cpu_s and not self._is_member(process, found):
                    self._others.add(key)
                    continue
                times = process.cpu_times()
                self._cpu_s[key] = times.user + times.system
                found.add(process.pid)
        return sorted(found)

    def _is_member(self, process: psutil.Process, members: set[int]) -> bool:
        if process.ppid() in members:
            return True
        try:
            return process.environ().get(MARK) == self._mark
        except psutil.AccessDenied:
            return False  # another user's

    def close(self) -> None:
        pass


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def busy_s() -> float | None:
    """CPU seconds that all processes of this machine have used since it started; Linux only."""
    if sys.platform != "linux":
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / float(os.sysconf("SC_CLK_TCK"))


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM unwind like Ctrl-C, so that everything started here is ended and removed."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
