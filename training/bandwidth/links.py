"""Bandwidth of the way between each two hosts, one at a time."""

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist

from contract.text import significant

#: Large enough that the start of a transfer does not count.
_BYTES: Final = 16 << 20
_REPEATS: Final = 3
#: A link below this share of the fastest one is slow.
_SLOW: Final = 0.5
#: Of more hosts only two links of each are measured, not all.
_ALL_PAIRS: Final = 8

Links = Mapping[tuple[str, str], float]
"""From and to, by the names of the hosts -> 10^9 bytes per second."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def hosts() -> list[str]:
    """Name of each rank's host, in the order of the ranks."""
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, socket.gethostname())
    return found


def measured(ranks: Sequence[str], device: torch.device) -> dict[tuple[str, str], float]:
    """Each link between two hosts, while all others are silent.

    Args:
        ranks: name of each rank's host.
    """
    names = list(dict.fromkeys(ranks))
    first = {name: ranks.index(name) for name in names}
    num = len(names)
    found = {}
    for distance in range(1, num) if num <= _ALL_PAIRS else (1, 2):
        for place, name in enumerate(names):
            other = names[(place + distance) % num]
            found[name, other] = _link(first[name], first[other], device)
    return found


def _link(sender: int, receiver: int, device: torch.device) -> float:
    """10^9 bytes per second from one rank to another, known to all of them afterwards."""
    rank = dist.get_rank()
    buffer = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    ready = torch.zeros(1, device=device)
    speed = torch.zeros(1, device=device)
    dist.barrier()
    if rank == sender:
        for _ in range(_REPEATS + 1):  # the first one makes the connection
            dist.recv(ready, receiver)
            dist.send(buffer, receiver)
    elif rank == receiver:
        seconds = []
        for _ in range(_REPEATS + 1):
            dist.send(ready, sender)
            began = time.perf_counter()
            dist.recv(buffer, sender)
            synchronize(device)
            seconds.append(time.perf_counter() - began)
        speed += _BYTES / min(seconds[1:]) / 1e9
    dist.all_reduce(speed)
    return float(speed.item())


def slow(links: Links) -> str:
    """A sentence about the slowest link, where it is much slower than the fastest; else empty.

    It blames neither host: on a busy machine, one measurement tells too little for that.
    """
    sender, receiver = min(links, key=lambda link: links[link])
    least, best = links[sender, receiver], max(links.values())
    if least >= _SLOW * best:
        return ""
    return (
        f"the link from host {sender} to host {receiver} is slow: {significant(least)} GB/s, and "
        f"others reach {significant(best)} GB/s"
    )
