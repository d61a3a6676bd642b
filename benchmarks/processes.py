"""Processes of one gloo group on this machine, for benchmarks that need several ranks."""

import os
import socket
from collections.abc import Callable
from typing import Any, Final

import torch

_TIMEOUT_S: Final = 900


def start(
    world_size: int, work: Callable[..., Any], *arguments: Any, method: str = "spawn"
) -> tuple[list[Any], Any]:
    """Start ``work(*arguments)`` in processes with torchrun's variables; return them and a queue of
    ``(rank, result)``. ``method`` is that of ``multiprocessing``."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context: Any = torch.multiprocessing.get_context(method)
    results = context.SimpleQueue()
    processes: list[Any] = [
        context.Process(target=_member, args=(rank, world_size, port, results, work, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes, results


def run(
    world_size: int, work: Callable[..., Any], *arguments: Any, method: str = "spawn"
) -> list[Any]:
    """Run ``work`` in processes; return what each returns, in the order of ranks.

    Raises:
        RuntimeError: one failed; its traceback is on stderr.
    """
    processes, results = start(world_size, work, *arguments, method=method)
    for process in processes:
        process.join(_TIMEOUT_S)
    codes = [process.exitcode for process in processes]
    if any(codes):
        for process in processes:
            process.kill()
        raise RuntimeError(f"the processes ended with {codes}")
    found = dict(results.get() for _ in processes)
    return [found[rank] for rank in range(world_size)]


def _member(
    rank: int,
    world_size: int,
    port: int,
    results: Any,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    results.put((rank, work(*arguments)))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # threads of gloo that outlive their group may abort an ordinary end
