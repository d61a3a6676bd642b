"""Nodes of a program that train by themselves, although the program could share its work.

A framework that is not given the number of nodes, or a rendezvous at which each node finds only
itself, makes as many trainings as there are nodes, and each of them succeeds. A node has joined
once a process of the program has a TCP connection to another node, or from it: rendezvous, gloo and
NCCL's own set-up keep theirs. Only nodes count whose processes make optimizer steps and have a
process group, accelerate or a framework that starts one: a sweep of plain loops, or inference on
parts of the data, needs no connection.

``Apart`` is pure: what was read, and the time, are handed in.
"""

import contextlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from contract.text import listed

#: Nodes that step for so long without a connection are reported.
_APART_S: Final = 120.0
#: Name of an empty file beside the steps of a process that can share its work, after its id.
SHARES: Final = ".shares"


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
    found = set[str]()
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):  # it has ended
            for each in psutil.Process(pid).net_connections("tcp"):
                if each.status == psutil.CONN_ESTABLISHED:
                    # Of a socket of version 6, which torch's store has, too.
                    found.add(each.raddr.ip.removeprefix("::ffff:"))
    shares = any((folder / f"{pid}{SHARES}").exists() for pid in pids)
    return Peers(addresses=frozenset(found.intersection(others)), shares=shares)
