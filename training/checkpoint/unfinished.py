"""Checkpoints that were begun and not completed: by the time others resume, they never will be.

A rank that has stalled for minutes may complete its save after it was replaced, although it looked
at the lease right before. The record forgets the steps after the checkpoint that others resume
from, so that a later one would have steps that the record lacks.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from contract.runs import MANIFEST_FILE, RunPaths, checkpoint_key
from store import storage
from training.checkpoint.manifest import CLOSED
from training.loop.worker import Worker


def close(worker: Worker, names: Callable[[str], Sequence[str]]) -> None:
    """On rank 0, make sure that nothing counts that is completed later under an earlier lease.

    Args:
        names: gives those of a run's checkpoints.
    """
    if worker.rank or not worker.fence:
        return
    paths = RunPaths(worker.run_uri)
    storage.remove_leftovers(paths.uri)
    if not storage.is_s3(paths.uri):
        discard(Path(paths.checkpoints), worker.fence)
        return
    for name in names(paths.uri):
        if lease_of(name) < worker.fence:
            storage.create_bytes(f"{paths.checkpoints}/{name}/{MANIFEST_FILE}", CLOSED)


def discard(folder: Path, number: int) -> None:
    """Remove what saves under leases up to ``number`` have begun in a folder on disk."""
    for hidden in folder.glob(".step-*.part"):
        if lease_of(hidden.name[1:].partition(".")[0]) <= number:
            # Away from its name at once: its writer may be about to give it another one.
            gone = hidden.with_suffix(".gone.part")
            with contextlib.suppress(FileNotFoundError):  # it has done so
                hidden.rename(gone)
            storage.remove_folder(str(gone))


def lease_of(name: str) -> int:
    """Number of the lease in a checkpoint's name; 0 in other names."""
    return (checkpoint_key(name) or (0, 0))[1]
