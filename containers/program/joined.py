"""Nodes of a program that train by themselves, although the program could share its work.

A framework that is not given the number of nodes, or a rendezvous at which each node finds only
itself, makes as many trainings as there are nodes, and each of them succeeds. A node has joined
once a process of the program has a TCP connection to another node, or from it: rendezvous, gloo and
NCCL's own set-up keep theirs. Only nodes count whose processes make optimizer steps and have a
process group, accelerate or a framework that starts one: a sweep of plain loops, or inference on
parts of the data, needs no connection.

``Apart`` and ``connections`` are pure: what was read, and the time, are handed in.
"""

import contextlib
import ipaddress
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from contract.text import listed

#: Between two looks at the sockets of a node that has not joined yet.
EVERY_S: Final = 30.0
#: Nodes that step for so long without a connection are reported.
_APART_S: Final = 120.0
#: Name of an empty file beside the steps of a process that can share its work, after its id.
SHARES: Final = ".shares"
_ESTABLISHED: Final = "01"


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """Other nodes as a node's program knows them."""

    addresses: frozenset[str] = frozenset()
    """Those to which it has a connection."""
    shares: bool = False
    """A process that steps can share its work."""


class Apart:
    """Finds nodes that train by themselves, from samples; one for each start of a program."""

    def __init__(self) -> None:
        self._since = math.inf
        self.words = ""
        """``node 1 has not joined node 0: each trains by itself``, once that is certain."""

    def hear(self, now: float, nodes: Mapping[int, Peers], addresses: Mapping[int, str]) -> bool:
        """Take a sample of the nodes that run; true if it is the first with ``words``."""
        known = {address for peers in nodes.values() for address in peers.addresses}
        apart = [
            number
            for number, peers in sorted(nodes.items())
            if peers.shares and not peers.addresses and addresses[number] not in known
        ]
        self._since = min(self._since, now) if len(apart) > 1 else math.inf
        if self.words or now - self._since < _APART_S:
            return False
        first, *others = apart
        have = "have" if len(others) > 1 else "has"
        named = listed([f"node {number}" for number in others])
        self.words = f"{named} {have} not joined node {first}: each trains by itself"
        return True


def peers(pids: Collection[int], folder: Path, others: Collection[str]) -> Peers:
    """Sample a node.

    Args:
        pids: of the program.
        folder: in which its processes count their steps.
        others: addresses of the other nodes.
    """
    sockets = {*_sockets(pids)}
    tables = [Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6")]
    found = frozenset(
        address
        for table in tables
        if table.exists()
        for address, inode in connections(table.read_text())
        if inode in sockets and address in others
    )
    shares = any((folder / f"{pid}{SHARES}").exists() for pid in pids)
    return Peers(addresses=found, shares=shares)


def connections(table: str) -> Iterator[tuple[str, int]]:
    """Address of the other end, and inode, of the connections in ``/proc/net/tcp`` or ``tcp6``."""
    for line in table.splitlines()[1:]:
        words = line.split()
        if words[3] == _ESTABLISHED:
            # Words of four bytes, each in the order of this machine, which is little-endian.
            raw = bytes.fromhex(words[2].partition(":")[0])
            address = ipaddress.ip_address(
                b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
            )
            yield str(getattr(address, "ipv4_mapped", None) or address), int(words[9])


def _sockets(pids: Collection[int]) -> Iterator[int]:
    """Inodes of the sockets that processes have open."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it has been closed
                    if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path)):
                        yield int(found[1])
