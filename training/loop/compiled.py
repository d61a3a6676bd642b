"""What torch has compiled for a run, kept in the run's folder: its next start, on another host too,
compiles none of it again.

Such artifacts are code. They are read from the run's own folder only, into which jobs write and no
role of a person does (docs/security.md).
"""

import contextlib
import threading

import torch

from contract.runs import COMPILED_FILE
from store import storage
from training.loop.metrics import num_graphs
from training.loop.worker import Worker


class CompiledCode:
    """Artifacts of ``torch.compile`` of one run."""

    def __init__(self, worker: Worker, *, is_used: bool) -> None:
        """Load what an earlier start has left: before the first step, in which torch compiles.

        Args:
            is_used: the run asks for compilation.
        """
        self._uri = storage.join(worker.run_uri, COMPILED_FILE)
        self._keeps, self._num_kept = is_used and worker.rank == 0, num_graphs()
        if not is_used:
            return
        # What cannot be read is compiled.
        with contextlib.suppress(Exception):
            if content := storage.read_bytes(self._uri):
                torch.compiler.load_cache_artifacts(content)

    def keep(self) -> None:
        """Save what has been compiled since the last call, beside the training; a start that comes
        too early compiles."""
        num = num_graphs()
        if not self._keeps or num == self._num_kept:
            return
        self._num_kept = num
        if found := torch.compiler.save_cache_artifacts():
            writing = threading.Thread(target=self._write, args=(found[0],), daemon=True)
            writing.start()

    def _write(self, content: bytes) -> None:
        with contextlib.suppress(Exception):  # a storage that fails is reported by the next save
            storage.write_bytes(self._uri, content)
