"""This machine without torch: its devices, name and packages, and the network that NCCL uses."""

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

from contract import nodes
from contract.errors import InputError


def num_devices() -> tuple[int, str]:
    """How many workers fit, and of what: a GPU each, or else a CPU each."""
    if gpus := gpu_names():
        return len(gpus), "GPUs"
    return num_cpus(), "CPUs"


def num_cpus() -> int:
    """CPUs that this process may use; fewer than the host's inside a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_names() -> list[str]:
    """Names of the NVIDIA GPUs that the driver shows; empty without one."""
    return output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def born(pid: int) -> str:
    """When a process began, in the clock ticks of this machine: its number may be given to another
    one later. Empty where there is none, or it has ended, or the machine does not say."""
    try:
        # Behind the program's name, which is in brackets and may have spaces in it.
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else rest[18]
    except (OSError, ValueError, IndexError):
        return ""


def has_compiler() -> bool:
    """True if the compiler that torch calls is installed: a C compiler for GPUs, else a C++
    compiler."""
    has_gpu = Path("/dev/nvidiactl").exists()
    return any(map(shutil.which, ("cc", "gcc") if has_gpu else ("c++", "g++")))


def check_compiler(option: str) -> None:
    """
    Raises:
        InputError: there is no compiler, as in this project's images for CPUs.
    """
    if not has_compiler():
        raise InputError(
            f"{option} compiles kernels when they are first used, and there is no compiler here: "
            "train on GPUs, whose image has what they need, or leave the option out"
        )


def output(*command: str) -> str:
    """Output of a command; "" if it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


# Lines of NCCL and of AWS's plug-in for it, the most particular first.
_SIGNS: Final = (
    (re.compile(r"Selected [Pp]rovider is (\S+?)(?:,|\s|$)"), "libfabric provider {}"),
    (re.compile(r"Using network (.+?)\s*$", re.M), "{}"),
    (re.compile(r"NET/(\w+) :"), "{}"),
)
EFA: Final = "libfabric provider efa"
_UNKNOWN: Final = "an unknown network"


def named(log: str) -> str:
    """The network that a log of NCCL names: ``libfabric provider efa``, ``Socket``; empty if none
    is."""
    for sign, words in _SIGNS:
        if found := sign.search(log):
            return words.format(found[1])
    return ""


def transport(backend: str, *, num_hosts: int) -> str:
    """Words for what carries the messages of this process.

    Args:
        backend: of the process group, ``gloo`` or ``nccl``.
        num_hosts: with one, NCCL uses no network, whatever it has found.
    """
    if backend != "nccl":
        return f"{backend} over TCP"
    if num_hosts == 1:
        return "NCCL within the host"
    return f"NCCL over {_network(os.environ)}"


def check_efa(environment: Mapping[str, str], *, backend: str, num_hosts: int) -> None:
    """Fail where the host has EFA and NCCL uses something else; called after a first collective.

    Raises:
        InputError: the job would train at a fraction of the speed that it pays for.
    """
    num_efa = environment.get(nodes.ENV_EFA, "0")
    # NCCL_NET is the user's own choice, as in a study of both.
    if num_efa == "0" or backend != "nccl" or num_hosts == 1 or "NCCL_NET" in environment:
        return
    name = _network(environment)
    if name != EFA:
        raise InputError(
            f"EFA is on ({num_efa} interfaces a host), and NCCL uses {name}: see its log, and "
            "whether the worker image has EFA (docs/network.md); or deploy with -c efa=off, or "
            "submit with --env NCCL_NET=Socket, to train over TCP"
        )


def _network(environment: Mapping[str, str]) -> str:
    """The network that NCCL's log of this process names."""
    where = environment.get("NCCL_DEBUG_FILE", "")
    # As NCCL fills them in: the host's name without its domain.
    host = socket.gethostname().partition(".")[0]
    log = Path(where.replace("%h", host).replace("%p", str(os.getpid())))
    try:
        return named(log.read_text(errors="replace")) or _UNKNOWN
    except OSError:  # it writes none
        return _UNKNOWN


_HERE: Final = Path(__file__).parent


def environment() -> dict[str, object]:
    """Describe the machine that this process runs on, its packages and its command."""
    versions: dict[str, str | None] = {}
    for package in ("torch", "ray", "transformers", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        **versions,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": num_cpus(),
        "gpus": gpu_names(),
        "git_sha": os.environ.get(nodes.ENV_GIT_SHA)
        or output("git", "-C", str(_HERE), "rev-parse", "HEAD")
        or None,
        "command": " ".join(["python -m training.launch", *sys.argv[1:]]),
        "started_at": datetime.now(tz=UTC).isoformat(timespec="seconds"),
    }
