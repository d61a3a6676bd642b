"""Over what the workers exchange data: NCCL writes it into its log, and nowhere else."""

import os
import re
import socket
from pathlib import Path
from typing import Final

# Lines of NCCL and of AWS's plug-in for it, the most particular first.
_SIGNS: Final = (
    (re.compile(r"Selected [Pp]rovider is (\S+?)(?:,|\s|$)"), "libfabric provider {}"),
    (re.compile(r"Using network (.+?)\s*$", re.M), "{}"),
    (re.compile(r"NET/(\w+) :"), "{}"),
)
EFA: Final = "libfabric provider efa"


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
    where = os.environ.get("NCCL_DEBUG_FILE", "")
    # As NCCL fills them in: the host's name without its domain.
    host = socket.gethostname().partition(".")[0]
    log = Path(where.replace("%h", host).replace("%p", str(os.getpid())))
    try:
        name = named(log.read_text(errors="replace")) if where else ""
        log.unlink(missing_ok=True)
    except OSError:
        name = ""
    return f"NCCL over {name or 'an unknown network'}"
