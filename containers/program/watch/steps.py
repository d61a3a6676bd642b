"""Steps and stacks of a program, to be read from outside its processes.

``startup/sitecustomize.py`` runs this file in each Python of a program. Each process has a file of
its own, ``$TRAIN_WATCH/<pid>``: three mapped numbers, and behind them the stacks of its threads,
which ``faulthandler`` appends when it gets a signal, also while the interpreter is held.
``containers/program/watch/signs.py`` reads both. Nothing of torch is imported until the program
does, and nothing of this project, which the user's code may hide.
"""

from __future__ import annotations  # a program's own Python may be as old as 3.8

import faulthandler
import mmap
import os
import sys
from typing import Any, Final

# As in contract.nodes, training.runtime.processes and containers.program.watch.signs; a test
# compares them.
WATCH: Final = "TRAIN_WATCH"
SIGNAL: Final = 59
SIZE: Final = 24
YAMA: Final = "/proc/sys/kernel/yama/ptrace_scope"
PR_SET_PTRACER: Final = 0x59616D61  # linux/prctl.h
# As in containers.program.watch.joined.
SHARES: Final = ".shares"
#: Frameworks that start a process group once they know of other processes.
_FRAMEWORKS: Final = (
    *("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"),
    *("composer", "deepspeed"),
)

#: Optimizer steps so far; rank, -1 until it is known; number of this file among those open here.
_numbers = memoryview(bytearray(SIZE)).cast("q")
#: Optimizers that have updated their parameters in this step.
_seen: set[int] = set()


def _begin() -> None:
    """Open this process's file; after a fork, the child's own."""
    global _numbers
    _seen.clear()
    _numbers = memoryview(bytearray(SIZE)).cast("q")
    try:
        path = os.path.join(os.environ[WATCH], str(os.getpid()))
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.write(file, bytes(SIZE))
        _numbers = memoryview(mmap.mmap(file, SIZE)).cast("q")
        _numbers[1], _numbers[2] = -1, file
        faulthandler.register(SIGNAL, file=file)
        _let_others_read()
    except (ImportError, KeyError, OSError, ValueError):
        return  # such as a full disk: the program must run without being watched


def _let_others_read() -> None:
    """Let a process that is no ancestor of this one read its stacks, which a kernel with Yama may
    refuse (Linux: admin-guide/LSM/Yama.rst)."""
    if os.path.exists(YAMA):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1))


def _group() -> Any:
    """The module with which this process shares its work; None where it has no process group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        return distributed
    return None


def _rank() -> int:
    try:
        if group := _group():
            return int(group.get_rank())
        return int(os.environ.get("RANK", "-1"))
    except Exception:  # the program's own step must not fail
        return -1


def _note_sharing() -> None:
    """Mark a process that trains and could share its work with others."""
    try:
        # Merely imported, by transformers for one, accelerate shares nothing.
        state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
        is_used = bool(getattr(state, "_shared_state", None))
        if is_used or _group() or {*_FRAMEWORKS} & {*sys.modules}:
            open(os.path.join(os.environ[WATCH], f"{os.getpid()}{SHARES}"), "w").close()
    except Exception:  # the program's own step must not fail
        pass


def _stepped(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """An optimizer has updated its parameters.

    A step of a program with several, such as a GAN's two or one for each parameter, ends when one
    of them comes again.
    """
    one = id(optimizer)
    if one in _seen or not _seen:
        _seen.clear()
        if not _numbers[0]:
            _numbers[1] = _rank()
            _note_sharing()
        _numbers[0] += 1
    _seen.add(one)


def _count(module: Any) -> None:
    # PyTorch before 2.1 has no such hook: other signs of life remain.
    if register := getattr(module, "register_optimizer_step_post_hook", None):
        register(_stepped)


#: Module -> what changes it once it has been imported.
CHANGES: Final = {"torch.optim.optimizer": _count}

_begin()
os.register_at_fork(after_in_child=_begin)
