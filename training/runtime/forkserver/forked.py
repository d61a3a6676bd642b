"""A forked process: how it becomes what Ray has asked for, and how it ends with its server."""

import contextlib
import os
import runpy
import signal
import sys
from typing import TYPE_CHECKING

from training.runtime.forkserver.client import CONTEXT, MEMORY_MARK, write

if TYPE_CHECKING:
    from training.runtime.forkserver.client import Request

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
#: Whether this process is a fork that has become a process of Ray's.
is_fork = False


def be_killed_with(parent: int) -> None:
    """Have Linux kill this process when ``parent``, which has started it, ends."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before that
        os._exit(0)


def become(request: "Request") -> None:
    """Be the process that Ray has asked for."""
    global is_fork
    import resource  # not on every platform that imports this module

    be_killed_with(request["parent"])
    with contextlib.suppress(OSError):  # the client has ended, and this process is about to
        os.setpgid(0, request["group"])
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.SIGTERM not in request["ignored"]:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    os.nice(max(0, request["nice"] - os.nice(0)))
    write(MEMORY_MARK, request["memory"])
    resource.setrlimit(resource.RLIMIT_NOFILE, request["files"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])

    import numpy as np
    from ray._private.utils import update_envs

    update_envs(request["context"].get("env_vars") or {})
    # Or all forks would draw the same numbers. A fork seeds Python's own generator by itself.
    np.random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    is_fork = True
    own = [w for w in (request["argv"] or ())[1:] if not w.startswith((CONTEXT, "--language="))]
    sys.argv = own
    runpy.run_path(own[0], run_name="__main__")


def use_threads_of_environment() -> None:
    """Give torch as many threads as OMP_NUM_THREADS says, as it would have on its own.

    It asks when it is loaded, which in a fork was before Ray decided on the number.
    """
    if is_fork and (number := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        import torch

        torch.set_num_threads(max(1, int(number)))
