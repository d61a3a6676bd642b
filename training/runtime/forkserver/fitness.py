"""What may be forked, and by which server; Ray starts the rest as usual.

* Servers have a single thread, or they refuse to fork: a lock that another thread holds would stay
  locked forever in the child. Arrow's allocator is told not to start one (``parent.OF_SERVER``).
* Ray's core must not have drawn a random number before the fork, or all forks would draw the same
  ids and Ray would take one's objects for another's. Ray's actor classes get a random id when their
  module is imported: while the server imports, Python draws it.
* Nothing touches CUDA before the fork, or the child could not use it. A server that has a GPU's
  device open refuses to fork.
"""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from training.runtime.forkserver.client import READ_LATE

if TYPE_CHECKING:
    from training.runtime.forkserver.client import Request

#: Beginnings of the names of variables that a process reads once, when it starts or imports: a fork
#: would ignore them, so all must be what they were for the server (but see ``READ_LATE``).
READ_ONCE = (
    *("LD_", "DYLD_", "PYTHON", "MALLOC_", "JE_", "MIMALLOC_", "ARROW_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH_", "RAY_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_"),
)


def why_not_to_fork(threads: Sequence[str], files: Sequence[str]) -> str:
    """Why a process with these threads and open files must not fork; empty when it may."""
    if len(threads) > 1:
        return f"{len(threads)} threads run after the imports, where only one may"
    if any(each.startswith(("/dev/nvidia", "/dev/dri", "/dev/kfd")) for each in files):
        return "an import has opened a GPU, which a fork could not use"
    return ""


def why_not_forked(request: "Request", given: Mapping[str, str]) -> str:
    """Why a process cannot be a fork of a server with the environment ``given``; empty if it can.

    What Ray's runtime environments do (pip, conda, a container, another Python) shows in the
    context; what they set, and what the raylet's environment has, must not be something that a
    process only reads when it starts.
    """
    argv, context = request["argv"] or [], request["context"]
    if "--language=PYTHON" not in argv:
        return "not a worker of Python"
    if context.get("command_prefix") or context.get("override_worker_entrypoint"):
        return "its runtime environment has a command of its own"
    if context.get("py_executable") not in (None, sys.executable):
        return "its runtime environment has a Python of its own"
    wanted = {
        name: value
        for name, value in request["environment"].items()
        if not name.startswith("RAY_")  # the server of a job is started with these
    } | (context.get("env_vars") or {})
    names = {
        name
        for name in (*wanted, *given)
        if name.startswith(READ_ONCE) and not name.startswith(READ_LATE)
    }
    for name in sorted(names):
        if wanted.get(name) != given.get(name) and (not name.startswith("RAY_") or name in wanted):
            return f"its environment has another {name}"
    return ""


def draw_ids_of_classes_in_python() -> None:
    """Keep Ray's core from seeding its generator while modules with actor classes are imported."""
    import types

    from ray import actor
    from ray._raylet import ActorClassID as ClassID

    vars(actor)["ActorClassID"] = types.SimpleNamespace(
        from_random=lambda: ClassID(os.urandom(ClassID.size()))
    )


def random_id() -> str:
    """An id as a fork of this process, and of Ray's core in it, would draw it."""
    from ray._raylet import JobID, PlacementGroupID

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, PlacementGroupID.of(JobID.from_int(1)).hex().encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as said:
        found = said.read()
    os.waitpid(pid, 0)
    return found


def open_files(folder: str) -> list[str]:
    """What the links in a folder like /proc/self/fd point to."""
    found = []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.append(os.readlink(os.path.join(folder, name)))
    return found
