"""Groups of processes, without Ray, for measurements and tests."""

import os
import socket
from collections.abc import Callable
from typing import Any, Final

import torch

_TIMEOUT_S: Final = 900


def run(
    world_size: int, work: Callable[..., Any], *arguments: Any, method: str = "spawn"
) -> list[Any]:
    """Run ``work(*arguments)`` in processes with torchrun's variables; return what each returns,
    in the order of ranks. ``method`` is that of ``multiprocessing``.

    Raises:
        RuntimeError: one failed; its traceback is on stderr.
    """
    port = free_port()
    context: Any = torch.multiprocessing.get_context(method)
    results = context.SimpleQueue()
    processes: list[Any] = [
        context.Process(target=_member, args=(rank, world_size, port, results, work, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
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
    os.environ |= _variables(rank=rank, world_size=world_size, port=port)
    torch.set_num_threads(1)
    results.put((rank, work(*arguments)))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # threads of gloo that outlive their group may abort an ordinary exit


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def _variables(*, rank: int, world_size: int, port: int) -> dict[str, str]:
    """torchrun's environment variables of one rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
