"""Lease of a run: one process at a time may write it.

    <folder>/leases/00000007.json   who holds it, and when that was last confirmed

The highest number counts. It is taken by creating its file, which the storage lets one process do
and no second one; its holder confirms it by writing that file again every few seconds, and no other
process writes it. So a process that stalls and comes back finds a higher number, and stops. A
number is never removed, so that it is never given twice. It is also part of a checkpoint's name:
what a holder of an earlier lease is still writing lies apart from what its successor writes. For
the same reason, workers that Ray starts again for the same holder get the next number.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from contract.errors import InputError
from contract.nodes import ENV_JOB
from contract.runs import LEASES_DIR, RunPaths
from contract.text import duration
from contract.times import LEASE_RENEW_S, LEASE_S
from contract.typed_json import loads_if_any
from store import storage
from training.system import devices


class LostError(InputError):
    """Another process has taken the lease over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that holds a lease, or did."""

    job: str = ""
    """Id of its job; empty without one."""
    machine: str = ""
    """Id of the machine (since its boot) or container in which ``pid`` is unique."""
    host: str = ""
    """The machine's name, for people."""
    pid: int = 0
    born: str = ""
    """When the process began, in the machine's own count; empty where that is not known."""
    released: bool = False
    """True if the process has ended and released the lease itself."""

    @classmethod
    def here(cls) -> Self:
        """This process."""
        pid = os.getpid()
        return cls(
            job=os.environ.get(ENV_JOB, ""),
            machine=_machine(),
            host=socket.gethostname(),
            pid=pid,
            born=devices.born(pid),
        )

    @classmethod
    def from_json(cls, content: bytes | None) -> Self:
        """Read the output of ``as_json``. Unreadable fields are dropped, so that such a lease
        expires soon."""
        values: Mapping[str, Any] = loads_if_any(content) or {}
        kinds: Mapping[str, type] = {"pid": int, "released": bool}
        known = {
            name: values[name]
            for name in cls.__dataclass_fields__
            if isinstance(values.get(name), kinds.get(name, str))
        }
        return cls(**known)

    def as_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    def is_gone(self, own: "Holder") -> bool:
        """True if it certainly cannot write any more: it has released the lease, belongs to our own
        job, or is a process of this machine that is our own or has ended."""
        if self.released or (self.job and self.job == own.job):
            return True
        if not self.machine or self.machine != own.machine:
            return False
        return self.pid == own.pid or devices.born(self.pid) != self.born

    def __str__(self) -> str:
        return f"job {self.job}" if self.job else f"process {self.pid} on {self.host or 'a host'}"


class Lease:
    """The lease of a folder, while this process holds it."""

    def __init__(self, uri: str, number: int, holder: Holder) -> None:
        """For ``take``."""
        self.number = number
        self._uri, self._holder = uri, holder
        self._lost = ""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def take(
        cls,
        uri: str,
        *,
        take_over: bool = False,
        wait: Callable[[float], None] = time.sleep,
    ) -> Self:
        """Take the lease of a folder, which need not exist yet.

        Args:
            take_over: also from a holder that is still there. A job does that once: started again
                after it lost the run to another one, it leaves the run alone.
            wait: waits for so many seconds, before a lease on disk counts as expired.

        Raises:
            InputError: another process holds it.
        """
        own = Holder.here()
        while True:
            number = newest_number(uri)
            if number:
                other, age_s = _read(uri, number), storage.age_s(_file(uri, number))
                can_take = other.is_gone(own) or (take_over and not _had(uri, number, own.job))
                seems_over = abs(age_s) >= LEASE_S
                if not can_take and (not seems_over or _is_confirmed(uri, number, wait)):
                    raise InputError(_refusal(uri, other, 0.0 if seems_over else age_s))
            if storage.create_bytes(_file(uri, number + 1), own.as_json()):
                return cls(uri, number + 1, own)

    @property
    def lost(self) -> str:
        """Sentence that says how the lease was lost; "" while this process holds it."""
        return self._lost

    def keep(self, every_s: float = LEASE_RENEW_S) -> None:
        """Confirm it from now on, in a thread, until it is released or lost."""
        self._thread = threading.Thread(
            target=self._keep, args=(every_s,), name="lease", daemon=True
        )
        self._thread.start()

    def _keep(self, every_s: float) -> None:
        while not self._lost and not self._ended.wait(every_s):
            with contextlib.suppress(Exception):  # a storage in trouble: the next time, perhaps
                self.confirm()

    def check(self) -> None:
        """Make sure that no other process has taken it.

        Raises:
            LostError: one has.
        """
        newest = newest_number(self._uri)
        if newest > self.number:
            holder = _read(self._uri, newest)
            if holder != self._holder:
                error = _lost(self._uri, holder)
                self._lost = str(error)
                raise error
            self.number = newest  # its workers have been started again

    def confirm(self, *, released: bool = False) -> None:
        """Say that this process is still there, unless another one has taken the lease.

        Args:
            released: say that it has ended instead.
        """
        try:
            self.check()
        except LostError:
            return
        said = replace(self._holder, released=released)
        storage.write_bytes(_file(self._uri, self.number), said.as_json())

    def release(self) -> None:
        """Let others have it at once; where the storage fails, they have it when it expires."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=LEASE_RENEW_S)
        if not self._lost:
            with contextlib.suppress(Exception):
                self.confirm(released=True)


def newest_number(uri: str) -> int:
    """Number of a folder's newest lease; 0 where it has none."""
    names = storage.list_files(RunPaths(uri).file(LEASES_DIR))
    stems = [name.removesuffix(".json") for name in names]
    return max((int(stem) for stem in stems if stem.isdecimal()), default=0)


def check(uri: str, number: int) -> None:
    """Make sure that a lease is the newest one, before something is written that others would use.

    Args:
        number: 0 stands for none, and is not checked.

    Raises:
        LostError: it is not.
    """
    newest = newest_number(uri) if number else 0
    if newest > number:
        holder = _read(uri, newest)
        if holder == _read(uri, number):
            raise RuntimeError("the workers of this run have been started again elsewhere")
        raise _lost(uri, holder)


def _lost(uri: str, holder: Holder) -> LostError:
    return LostError(
        f"run {uri.rpartition('/')[2]!r} has been taken over by {holder}, which continues it from "
        "its last checkpoint: nothing more is written here"
    )


def follow(uri: str, number: int) -> int:
    """Number for workers that are started again under a lease; the earlier ones write no more.

    It is the old one where another process holds the run: the workers will find out.
    """
    while True:
        newest = newest_number(uri)
        holder = _read(uri, newest)
        if holder != _read(uri, number):
            return number
        if storage.create_bytes(_file(uri, newest + 1), holder.as_json()):
            return newest + 1


def _is_confirmed(uri: str, number: int, wait: Callable[[float], None]) -> bool:
    """Watch whether a lease that looks expired is being confirmed: the clock of its host may differ
    from that of this one, and either may have been set. Objects in S3 have one clock."""
    if storage.is_s3(uri):
        return False

    def stamp() -> tuple[int, int]:  # each time it is another file
        found = Path(_file(uri, number)).stat()
        return found.st_ino, found.st_mtime_ns

    before = stamp()
    wait(2 * LEASE_RENEW_S)
    return stamp() != before


def _refusal(uri: str, other: Holder, age_s: float) -> str:
    ago, left = max(0, round(age_s)), max(1, round(LEASE_S - age_s))
    return (
        f"run {uri.rpartition('/')[2]!r} is being trained by {other}, which said so "
        f"{duration(ago)} ago: wait until that has ended, or give --take-over to end it; if it is "
        f"gone already, the run is free in {duration(left)}"
    )


def _had(uri: str, newest: int, job: str) -> bool:
    """True if a job held an earlier lease than the newest."""
    return bool(job) and any(_read(uri, number).job == job for number in range(1, newest))


def _file(uri: str, number: int) -> str:
    return RunPaths(uri).file(f"{LEASES_DIR}/{number:08d}.json")


def _read(uri: str, number: int) -> Holder:
    return Holder.from_json(storage.read_bytes(_file(uri, number)))


def _machine() -> str:
    """Id of the boot and PID namespace in which process numbers are unique; "" if unknown."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""
