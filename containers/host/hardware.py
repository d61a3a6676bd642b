"""Checks of a host's GPUs, EFA devices and shared file system, before the node joins.

A GPU that is missing, has memory errors or computes nonsense would fail hours later, inside some
collective, with a message about something else. A host that has lost its mount, after a restart for
example, would show an empty folder, and a run would train on nothing. GPUs are checked again after
a failure.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

QUERY: Final = ("index", "name", "ecc.errors.uncorrected.volatile.total")
#: Memory of a GPU or of the host ran out: Linux then kills the process that tries the GPUs.
#: cuBLAS, which comes after the context and the matrices, reports it with other words.
_NO_MEMORY: Final = re.compile(
    r"out of memory|[Cc]annot allocate memory|MemoryError|code -9$"
    r"|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
)
_DRIVER_S: Final = 60
_TRIAL_S: Final = 300  # torch may come from a cold disk
SIZE: Final = 2048  # of the matrices; some milliseconds on any GPU


def gpu_faults(num_gpus: int, *, is_in_use: bool = False) -> list[str]:
    """Faults of the host's GPUs, one line each; empty when they are fit.

    Args:
        num_gpus: How many there should be.
        is_in_use: Whether processes of a training may still hold memory, which is no fault then.
    """
    found = _gpu_faults(num_gpus)
    return [each for each in found if not (is_in_use and _NO_MEMORY.search(each))]


def _gpu_faults(num_gpus: int) -> list[str]:
    try:
        run = _run(
            ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"],
            _DRIVER_S,
        )
    except FileNotFoundError:
        return ["nvidia-smi is not here: the container was started without GPUs"]
    except subprocess.TimeoutExpired:
        return [f"nvidia-smi did not answer within {_DRIVER_S} s: the driver hangs"]
    if run.returncode:
        return [f"nvidia-smi failed: {(run.stderr or run.stdout).strip()}"]
    rows = [[part.strip() for part in line.split(",")] for line in run.stdout.splitlines() if line]
    return _from_driver(rows, num_gpus) or _in_a_child(num_gpus)


def _run(command: Sequence[str], within_s: float) -> "subprocess.CompletedProcess[str]":
    """Run a command; raise TimeoutExpired where it does not end in time.

    ``subprocess.run`` would then wait for its end: a process that hangs in the driver cannot be
    killed.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _in_a_child(num_gpus: int) -> list[str]:
    """``_from_arithmetic`` in a process that ends: one that has used a GPU keeps half a gigabyte of
    its memory, and can fork no process that uses it too."""
    command = [sys.executable, "-m", "containers.host.hardware", str(num_gpus)]
    try:
        run = _run(command, _TRIAL_S)
    except subprocess.TimeoutExpired:
        return [f"the GPUs did not multiply two matrices within {_TRIAL_S} s"]
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:] or [f"exit code {run.returncode}"]
        return [f"the GPUs could not be tried: {last[0]}"]
    return run.stdout.splitlines()


def _from_driver(rows: Sequence[Sequence[str]], num_gpus: int) -> list[str]:
    if len(rows) != num_gpus:
        return [f"{len(rows)} GPUs are visible, {num_gpus} should be"]
    return [
        f"GPU {index} ({name}) has {errors} uncorrected memory errors"
        for index, name, errors in rows
        if errors.isdecimal() and int(errors)  # "[N/A]" where the GPU does not count them
    ]


def _from_arithmetic(num_gpus: int) -> list[str]:
    """Multiply two matrices on every GPU and compare with what must come out."""
    import torch

    if torch.cuda.device_count() != num_gpus:
        return [f"torch sees {torch.cuda.device_count()} GPUs, {num_gpus} should be visible"]
    found = []
    for index in range(num_gpus):
        try:
            ones = torch.ones(SIZE, SIZE, device=f"cuda:{index}")
            product = ones @ ones
            if not bool((product == SIZE).all()):
                found.append(f"GPU {index} computes a wrong matrix product")
        except RuntimeError as error:
            found.append(f"GPU {index} cannot compute: {str(error).splitlines()[0]}")
    return found


if __name__ == "__main__":
    for fault in _from_arithmetic(int(sys.argv[1])):
        print(fault)


DEVICES: Final = Path("/dev/infiniband")


def efa_faults(num_efa: int, devices: Path = DEVICES) -> list[str]:
    """Faults of the devices, a line each; empty when all are fit.

    Args:
        num_efa: How many there should be.
        devices: Folder of them.
    """
    found = sorted(devices.glob("uverbs*"))
    if len(found) != num_efa:
        return [f"{len(found)} EFA devices are in {devices}, {num_efa} should be"]
    return [
        f"this user may not read and write {each}"
        for each in found
        if not os.access(each, os.R_OK | os.W_OK)
    ]


MOUNTS: Final = Path("/proc/self/mountinfo")
MOUNT_KIND: Final = "lustre"


def mount_faults(folder: str, mounts: Path = MOUNTS) -> list[str]:
    """Faults of the mount, a line each; empty when it is as it should be.

    Args:
        folder: Where it should be.
        mounts: What Linux has mounted for this process: proc(5), mountinfo.
    """
    for line in mounts.read_text().splitlines():
        mounted, _, source = line.partition(" - ")
        if mounted.split()[4] == folder:
            found = source.split()[0]
            if found != MOUNT_KIND:
                return [
                    f"{folder} is {found} and not {MOUNT_KIND}: the shared file system is not there"
                ]
            return []
    return [f"nothing is mounted at {folder}: the shared file system is not there"]
