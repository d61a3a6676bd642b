"""Run of a recipe in a process that torchrun started, for debugging and profiling; the worker
here is also that of ``--local``."""

import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from contract import exits, faults
from contract.runs import RunPaths
from contract.times import COLLECTIVE_START_S
from training import recipes
from training.command import Command
from training.loop.saving import Saves
from training.record.events import Event, Failed
from training.record.writer import RunRecord
from training.runtime.outcome import opened_record, print_result
from training.settings import RunConfig
from training.system.lease import Lease


def run_torchrun(
    config: RunConfig,
    command: Command,
    *,
    lease: Lease | None,
    replace: Callable[[], None] | None = None,
) -> int:
    """Train as one of torchrun's processes; return the exit code. Rank 0 keeps the record.

    Args:
        lease: the run's; None on other ranks than 0.
        replace: see ``RunRecord``.
    """
    # Not above: benchmarks use the worker below on machines that do not have rich.
    from training.record.display import Display

    recipe = recipes.by_name(config.recipe)
    config = recipe.prepare(config)  # each process; the first of a node does the work
    run_uri = RunPaths.of(config.storage, config.run).uri
    os.environ.update(recipe.variables)
    worker = TorchrunWorker(run_uri=run_uri, fence=lease.number if lease else 0)
    kept: RunRecord | None = None
    report: Path | None = None
    display = Display(recipe.measures, verbose=command.verbose) if worker.rank == 0 else None
    if display is not None:
        kept = opened_record(config, command, display=display, lease=lease, replace=replace)
        worker.on_events = kept.handle
    code = exits.OK
    try:
        recipe.train()(worker, config)
        if worker.stop_requested():
            code = exits.INTERRUPTED
    except Exception as error:  # the worker's boundary
        reported = faults.explained(error)
        code = faults.exit_code(reported)
        if kept is not None:
            kept.handle(Failed(message=str(reported), code=code))
        # Of every rank: what stops one may be unknown to rank 0, which keeps the record.
        print(f"error: {reported}", file=sys.stderr)
    finally:
        worker.close()
        if lease is not None:
            with contextlib.suppress(Exception):  # a save may have found out first
                lease.confirm()
        if kept is not None and lease is not None and lease.lost:
            kept.abandon()  # another process writes the record now
        elif kept is not None:
            report = kept.close()
        if display is not None:
            display.close()
    if kept is not None and kept.result is not None and kept.is_finished:
        print_result(
            kept.result,
            recipe,
            run_uri,
            settings=config.to_json(),
            report=report,
            as_json=command.json,
        )
        if kept.error is not None:
            print(f"error: {kept.error}", file=sys.stderr)
            code = kept.exit_code
    return code


class TorchrunWorker:
    """One of the processes of a machine, known by torchrun's variables. What rank 0 emits goes to
    ``on_events``."""

    def __init__(self, *, run_uri: str, fence: int = 0, store: str = "") -> None:
        """``store``: a file by which the processes of this machine find each other; without one, by
        torchrun's variables."""
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        self.run_uri = run_uri
        self.on_events: Callable[..., None] | None = None
        self._stop = False
        self.saves = Saves(self.emit)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask_to_stop)
        # A worker of ``--local`` starts with these blocked, so that none comes too early.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            init_method=f"file://{store}" if store else None,
            rank=self.rank if store else -1,
            world_size=self.world_size if store else -1,
            timeout=timedelta(seconds=COLLECTIVE_START_S),
            device_id=self.device if self.device.type == "cuda" else None,
        )
        # Rank 0 alone has the lease, and its number is in the names of what all ranks write.
        box = [fence]
        dist.broadcast_object_list(box, src=0)
        self.fence = box[0]

    def _ask_to_stop(self, _number: int, _frame: Any) -> None:
        self._stop = True

    def emit(self, *events: Event) -> None:
        if self.rank == 0 and self.on_events is not None:
            self.on_events(*events)

    def stop_requested(self) -> bool:
        self.saves.look()
        return self._stop

    def is_losing_a_node(self) -> bool:
        return False  # a single machine gets no notice

    def close(self) -> None:
        """Wait for saves and destroy the process group; called when the recipe has ended, also from
        the ``finally`` of an error."""
        self.saves.finish()
        # DDP that is freed after its process group holds Python's lock while it waits for a thread
        # of gloo, which may wait for that lock: the process never ends. The frames of an error keep
        # DDP alive, and so do cycles that torch.compile leaves.
        error = sys.exception()
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__context__
        gc.collect()
        dist.destroy_process_group()
