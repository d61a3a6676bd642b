"""Over what the workers exchange data: NCCL writes it into its log, and nowhere else."""

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from contract import nodes
from contract.errors import InputError

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
    """Words for what carries the messages of this process. Removes NCCL's log.

    Args:
        backend: of the process group, ``gloo`` or ``nccl``.
        num_hosts: with one, NCCL uses no network, whatever it has found.
    """
    if backend != "nccl":
        return f"{backend} over TCP"
    if num_hosts == 1:
        return "NCCL within the host"
    log = _log(os.environ)
    name = _read(log)
    if log is not None:
        log.unlink(missing_ok=True)
    return f"NCCL over {name or _UNKNOWN}"


def check_efa(environment: Mapping[str, str], *, backend: str, num_hosts: int) -> None:
    """Fail where the host has EFA and NCCL uses something else; called after a first collective.

    Raises:
        InputError: the job would train at a fraction of the speed that it pays for.
    """
    num_efa = environment.get(nodes.ENV_EFA, "0")
    # NCCL_NET is the user's own choice, as in a study of both.
    if num_efa == "0" or backend != "nccl" or num_hosts == 1 or "NCCL_NET" in environment:
        return
    name = _read(_log(environment)) or _UNKNOWN
    if name != EFA:
        raise InputError(
            f"EFA is on ({num_efa} interfaces a host), and NCCL uses {name}: the worker image "
            "needs libfabric and AWS's plug-in for NCCL (docs/network.md: BASE_IMAGE); or deploy "
            "with -c efa=off, or submit with --env NCCL_NET=Socket, to train over TCP"
        )


def _log(environment: Mapping[str, str]) -> Path | None:
    """Where NCCL writes; None where it does not."""
    where = environment.get("NCCL_DEBUG_FILE", "")
    # As NCCL fills them in: the host's name without its domain.
    host = socket.gethostname().partition(".")[0]
    return Path(where.replace("%h", host).replace("%p", str(os.getpid()))) if where else None


def _read(log: Path | None) -> str:
    try:
        return named(log.read_text(errors="replace")) if log is not None else ""
    except OSError:
        return ""
