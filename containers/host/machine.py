"""This machine: log, clock, addresses, ECS task and processes; a question over HTTP.

Addresses and interfaces are asked of the kernel: in awsvpc mode a container has two interfaces, and
their names depend on the host's image. Processes are found in ``/proc``, by a variable of their
environment, which what they start inherits, and by their parents and groups; Linux only.
"""

import contextlib
import ctypes
import fcntl
import http.client
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from contract.errors import InputError


def say(message: str) -> None:
    """One line to the container's log."""
    print(f"node: {message}", file=sys.stderr, flush=True)


class Clock(Protocol):
    """The module ``time``, or a test's own."""

    def time(self) -> float:
        """Unix time."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


def in_background(function: Callable[..., object], *arguments: object) -> threading.Thread:
    """Call a function in a thread that ends with this process."""
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: the IPv4 address of an interface


def address_towards(host: str, port: int = 9) -> str:
    """This node's own address on the way to ``host``. Nothing is sent.

    Raises:
        OSError: There is no route, or ``host`` has no address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
        return address


def own_address() -> str:
    """This node's address on its default route; without one, that of its first interface."""
    try:
        return address_towards("192.0.2.1")  # RFC 5737: unassigned, so the default route's
    except OSError:
        for _, name in socket.if_nameindex():
            address = _address_of(name)
            if address and not address.startswith("127."):
                return address
    return "127.0.0.1"


def interface_of(address: str) -> str:
    """Name of the interface that has ``address``. Raises OSError when none has."""
    for _, name in socket.if_nameindex():
        if _address_of(name) == address:
            return name
    raise OSError(f"no interface has the address {address}")


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return None  # it has no IPv4 address
    return socket.inet_ntoa(answer[20:24])


def wait_for_port(
    host: str,
    port: int,
    *,
    timeout_s: float,
    should_stop: Callable[[], bool],
    say: Callable[[str], None],
) -> str | None:
    """Wait until ``host:port`` accepts connections; return why not, or None when it does.

    The name is looked up anew each time: it may not exist yet, and it may change its address.
    """
    deadline = time.monotonic() + timeout_s
    reason, next_word = "", 0.0
    while not should_stop():
        try:
            with socket.create_connection((host, port), timeout=3):
                return None
        except socket.gaierror:
            reason = f"the name {host} has no address yet"
        except OSError as error:
            reason = f"{host}:{port} does not answer ({error.strerror or error})"
        if time.monotonic() >= deadline:
            break
        if time.monotonic() >= next_word:
            say(f"waiting for the head: {reason}")
            next_word = time.monotonic() + 15
        time.sleep(0.2)  # a refused connection costs nothing, and the head waits for its workers
    return reason


def ask(
    place: str,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] = {},
    timeout_s: float,
) -> tuple[int, str]:
    """Status and body of an answer over HTTP, without the proxies of the environment.

    Args:
        place: host and port.

    Raises:
        OSError: There is no answer, or none of HTTP.
    """
    connection = http.client.HTTPConnection(place, timeout=timeout_s)
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"{place} does not speak HTTP: {error!r}") from error
    finally:
        connection.close()


_METADATA: Final = "ECS_CONTAINER_METADATA_URI_V4"
_METADATA_S: Final = 5
_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h
#: Of ``/proc/PID/io``: by calls, and from and to a disk.
_BYTES: Final = ("rchar", "wchar", "read_bytes", "write_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTask:
    """The task that this process runs in."""

    arn: str
    cluster: str


def own_task() -> OwnTask | None:
    """Ask the agent; None where none runs, as on a laptop.

    Raises:
        InputError: the agent's answer cannot be used.
    """
    address = os.environ.get(_METADATA)
    if not address:
        return None
    try:
        parts = urlsplit(address)
        _, body = ask(parts.netloc, f"{parts.path}/task", timeout_s=_METADATA_S)
        task = json.loads(body)
        return OwnTask(arn=task["TaskARN"], cluster=task["Cluster"])
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{_METADATA}: the ECS agent does not say what this is: {error}") from None


def marked(name: str, value: str) -> list[int]:
    """Ids of the running processes whose environment began with ``name=value``, but this one."""
    wanted = f"{name}={value}".encode()
    found = []
    for pid in _ids():
        if pid == os.getpid():
            continue
        try:
            # Empty for a zombie.
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            continue  # it has ended, or is another user's
    return found


class ProcessEntry(NamedTuple):
    """A process as ``/proc`` lists it."""

    state: str
    """Its letter: ``Z`` has ended and waits for its parent."""
    parent: int
    group: int
    session: int
    born: int
    """Clock ticks since the machine booted; with its id, no other process has the same."""


def processes() -> dict[int, ProcessEntry]:
    """All processes of this machine, by id."""
    found = {}
    for pid in _ids():
        with contextlib.suppress(OSError):  # it has ended
            state, parent, group, session, *rest = _stat(pid)
            found[pid] = ProcessEntry(state, int(parent), int(group), int(session), int(rest[15]))
    return found


def words(pid: int) -> list[str]:
    """Command of a process; empty where it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    return []


def adopt_orphans() -> None:
    """Become the parent of each descendant whose parent ends, in place of the machine's init."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def used(pids: Iterable[int]) -> tuple[float, int]:
    """CPU seconds of processes and of their children that have ended, and the bytes that they have
    read and written, to which all traffic of this machine's network interfaces is added.

    What is read through a mapping is no call: the disk's own count has it, or, where a file system
    in user space keeps none, the page faults that had to wait for it.
    """
    ticks, moved = 0, 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = _stat(pid)
            ticks += sum(map(int, words[11:15]))
            moved += sum(map(int, words[9:11])) * os.sysconf("SC_PAGE_SIZE")
            for line in Path(f"/proc/{pid}/io").read_text().splitlines():
                name, _, value = line.partition(":")
                moved += int(value) * (name in _BYTES)
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            moved += int(numbers.split()[0]) + int(numbers.split()[8])
    return ticks / os.sysconf("SC_CLK_TCK"), moved


def _ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc`` for a process, after its name, which may have spaces and brackets."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
