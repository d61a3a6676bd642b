"""Trains a recipe in this process, on its GPU if it has one, without Ray and without a record.

For measurements on a machine that has PyTorch and little else. The loop, its model and its data
path are the recipe's own; checkpoints are written to a folder that is removed again.
"""

import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from contract import nodes
from contract.nodes import Range
from training.recipes import command as commands
from training.record.events import Event
from training.runtime.torchrun import TorchrunWorker


def train(words: Sequence[str]) -> list[Event]:
    """Train with the words of ``training.launch``, recipe first; return all events of the run.

    Raises:
        InputError: a setting or the data is wrong.
    """
    command = commands.parse(words)
    events: list[Event] = []
    with tempfile.TemporaryDirectory(prefix="training-") as storage:
        run_uri = str(Path(storage) / "run")
        config = commands.configure(
            command, run="run", storage=storage, workers=Range(1, 1), gpus=nodes.ONE_EACH
        ).begun({})
        config = command.recipe.prepare(config)
        alone = join_nobody(run_uri)
        alone.on_events = lambda *new: events.extend(new)
        try:
            command.recipe.train()(alone, config)
        finally:
            alone.close()
    return events


def join_nobody(run_uri: str = "") -> TorchrunWorker:
    """The only worker, as torchrun would have started it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return TorchrunWorker(run_uri=run_uri)
