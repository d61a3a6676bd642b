"""Check of launchers that would not find a job's other nodes, or would wait for them forever.

Each node has in its environment what torchrun and accelerate need to find the others. Options of
the command that undo this are found here, before hosts are paid for.
"""

import re
from collections.abc import Sequence

from contract.nodes import Range
from contract.text import counted
from trainctl.aws.errors import UsageError


def check(command: Sequence[str], *, nodes: Range, gpus: int) -> None:
    """Fail if a command's launcher cannot start it on its nodes.

    Args:
        gpus: of each node.

    Raises:
        UsageError: it cannot.
    """
    # Also those of sh -c "...", which may have several lines.
    parts = [part for word in command for part in word.replace("\n", " ; ").split()]
    if nodes.high > 1 and "--standalone" in parts:
        raise UsageError(
            "--standalone keeps torchrun from finding the other nodes: leave it out, and "
            "--nproc-per-node too, which is set to the GPUs of a node; or give --nodes 1"
        )
    if nodes.high > 1 and _starts("deepspeed", parts) and "--no_ssh" not in parts:
        raise UsageError(
            "deepspeed finds no other nodes here, and would train on each by itself: start the "
            "script with torchrun, which deepspeed.init_distributed() understands, or give "
            "--nodes 1"
        )
    asked = _processes(parts) if _starts("torchrun", parts) else 0
    if gpus and asked > gpus:
        raise UsageError(
            f"--nproc-per-node is {asked}, and a node has {counted(gpus, 'GPU')}: "
            "leave it out; it is set to the GPUs of a node"
        )


def starts_on_nodes(text: str) -> bool:
    """True if a command, or a line of a shell script, launches one program on all nodes."""
    names = "torchrun|accelerate launch|deepspeed|fabric run|composer"
    modules = r"torch\.distributed\.\w+|accelerate\.commands\.launch"
    parts = text.replace("\n", " ; ").split()
    return _starts(rf"(?:{names}|python[\d.]* (?:-\w+ )*-m (?:{modules}))", parts)


def _starts(launcher: str, parts: Sequence[str]) -> bool:
    """True if a command, or one of those of ``sh -c``, starts its program with this launcher.

    What precedes it may set variables, as ``OMP_NUM_THREADS=1 torchrun`` and ``uv run torchrun``
    do; what follows another launcher is an argument of its program.
    """
    other = r"(?:\S*/)?(?:accelerate|deepspeed|python3?|torchrun) "
    begins = rf"(?:^|[;&|] )(?:(?!{other})[^\s;&|]+ )*(?:\S*/)?{launcher} "
    return re.search(begins, " ".join(parts)) is not None


def _processes(parts: Sequence[str]) -> int:
    """The number that ``--nproc-per-node`` asks for; 0 where it asks for none."""
    for part, after in zip(parts, [*parts[1:], ""], strict=True):
        name, _, value = part.partition("=")
        if name in ("--nproc-per-node", "--nproc_per_node"):
            value = value or after
            return int(value) if value.isdecimal() else 0
    return 0
