"""Runs a recipe in a process that torchrun started, without Ray: for debugging and profiling."""

import sys
from pathlib import Path

from contract import exits
from contract.errors import InputError
from training import launch, recipes, storage
from training.recipes.settings import RunConfig
from training.record.display import make_display
from training.record.environment import environment
from training.record.events import Failed
from training.record.writer import RunRecord
from training.worker import TorchrunWorker


def run_torchrun(config: RunConfig, *, as_json: bool) -> int:
    """Train as one of torchrun's processes; return the exit code. Rank 0 keeps the record."""
    config = recipes.by_name(config.recipe).prepare(
        config
    )  # each process; the first of a node does the work
    run_uri = storage.join(config.storage, config.run)
    worker = TorchrunWorker(run_uri=run_uri)
    kept: RunRecord | None = None
    report: Path | None = None
    display = make_display() if worker.rank == 0 else None
    if display is not None:
        kept = RunRecord(
            run_uri,
            run=config.run,
            recipe=config.recipe,
            settings=config.to_json(),
            environment=environment(),
            display=display,
        )
        worker.on_event = kept.handle
    code = exits.OK
    try:
        recipes.by_name(config.recipe).train()(worker, config)
        if worker.stop_requested():
            code = exits.INTERRUPTED
    except InputError as error:
        code = exits.BAD_INPUT
        if kept is not None:
            kept.handle(Failed(message=str(error)))
            print(f"error: {error}", file=sys.stderr)
    finally:
        worker.close()
        if kept is not None and display is not None:
            report = kept.close()
            display.close()
    if kept is not None and kept.result is not None and kept.is_complete:
        places = launch.places(run_uri, config.recipe)
        if report is not None:
            places["report"] = str(report)
        launch.print_result(kept.result, places, as_json=as_json)
    return code
