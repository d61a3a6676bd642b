"""Training in this process and in groups of processes, without Ray and without a record.

For measurements and tests on a machine that has PyTorch and little else.
"""

import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from contract import nodes
from contract.nodes import Range
from training import command as commands
from training.record.events import Event
from training.runtime.torchrun import TorchrunWorker

_TIMEOUT_S: Final = 900


def train_here(words: Sequence[str]) -> list[Event]:
    """Train a recipe in this process, on its GPU if it has one; return all events of the run.

    The loop, its model and its data path are the recipe's own; checkpoints are written to a folder
    that is removed again.

    Args:
        words: arguments of ``training.launch``, recipe first.

    Raises:
        InputError: a setting or the data is wrong.
    """
    command = commands.parse(words)
    events: list[Event] = []
    with tempfile.TemporaryDirectory(prefix="training-") as storage:
        config = commands.configure(
            command, run="run", storage=storage, workers=Range(1, 1), gpus=nodes.ONE_EACH
        ).begun({})
        config = command.recipe.prepare(config)
        os.environ |= _variables(rank=0, world_size=1, port=_free_port())
        worker = TorchrunWorker(run_uri=str(Path(storage) / "run"))
        worker.on_events = lambda *new: events.extend(new)
        try:
            command.recipe.train()(worker, config)
        finally:
            worker.close()
    return events


def run(
    world_size: int, work: Callable[..., Any], *arguments: Any, method: str = "spawn"
) -> list[Any]:
    """Run ``work(*arguments)`` in processes with torchrun's variables; return what each returns,
    in the order of ranks. ``method`` is that of ``multiprocessing``.

    Raises:
        RuntimeError: one failed; its traceback is on stderr.
    """
    port = _free_port()
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


def _free_port() -> int:
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
