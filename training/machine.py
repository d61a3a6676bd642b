"""What this machine has: its devices and its name, without importing torch."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

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


def check_compiler(option: str) -> None:
    """Make sure that there is a C compiler, which torch's compiler calls.

    Raises:
        InputError: there is none, as in this project's images, which run what they are built with.
    """
    if not (shutil.which("cc") or shutil.which("gcc")):
        raise InputError(
            f"{option} compiles kernels when they are first used, and there is no C compiler here: "
            "build the worker's image with one (docs/fsdp.md), or leave the option out"
        )


def output(*command: str) -> str:
    """What a command prints; nothing when there is no such command or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
