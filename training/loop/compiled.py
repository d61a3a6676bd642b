"""Compiler artifacts, kept in a run's folder and beside it: its next start, and the next run of its
kind, compile nothing again, on other hosts too.

Such artifacts are code. They are read only from where runs are stored: jobs write there, and no
role of a person does (docs/security.md).
"""

import contextlib
import hashlib
import threading
from collections.abc import Mapping
from typing import Any

import torch

from contract.runs import COMPILED_FILE
from store import storage
from training.loop import metrics
from training.loop.worker import Worker
from training.record.events import Warned


def uncompiled() -> str:
    """Warning about functions that torch could not compile in this process; empty if it could."""
    total = _num_functions()
    num_failed = total - metrics.compiler_count("frames", "ok")
    if not num_failed:
        return ""
    return f"torch could not compile {num_failed} of {total} parts: they run as they are, slower"


def _num_functions() -> int:
    """Number of functions that torch has tried to compile in this process."""
    return metrics.compiler_count("frames", "total")


class CompiledCode:
    """Artifacts of ``torch.compile`` of one run."""

    def __init__(self, worker: Worker, settings: Mapping[str, Any]) -> None:
        """Load what an earlier start has left: before torch compiles, for an evaluation or a step.

        Args:
            settings: of the run. Runs of a recipe and model share artifacts; what torch loads, it
                uses only for the same code, settings and GPU.
        """
        compiles, kind = settings.get("compile"), f"{settings['recipe']} {settings.get('model')}"
        gpu = torch.cuda.get_device_name() if worker.device.type == "cuda" else ""
        mark = hashlib.sha256(f"{kind} {torch.__version__} {gpu}".encode()).hexdigest()[:12]
        folder, _, _ = worker.run_uri.rpartition("/")
        self._worker = worker
        self._uris = [
            storage.join(worker.run_uri, COMPILED_FILE),
            storage.join(folder, f"{mark}-{COMPILED_FILE}"),
        ]
        self._keeps, self._num_kept = bool(compiles) and worker.rank == 0, _num_functions()
        # What cannot be read is compiled.
        for uri in self._uris if compiles else ():
            with contextlib.suppress(Exception):
                content = storage.read_bytes(uri)
                if content and torch.compiler.load_cache_artifacts(content):
                    break

    def keep(self) -> None:
        """Save what has been compiled since the last call, beside the training, and warn of what
        could not be; a start that comes too early compiles."""
        num = _num_functions()
        if not self._keeps or num == self._num_kept:
            return
        self._num_kept = num
        if found := torch.compiler.save_cache_artifacts():
            writing = threading.Thread(target=self._write, args=(found[0],), daemon=True)
            writing.start()
        if lack := uncompiled():
            self._worker.emit(Warned(message=lack))

    def _write(self, content: bytes) -> None:
        with contextlib.suppress(Exception):  # a storage that fails is reported by the next save
            for uri in self._uris:
                storage.write_bytes(uri, content)
