"""Begin and end of a run, for every way to start one: data, record, failures, printed result."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract import faults
from contract.errors import InputError, UnreachableError
from contract.runs import RunPaths
from store import storage
from training import recipes
from training.command import Command
from training.data import download
from training.recipe import Recipe
from training.record.events import Event, Joined, Noted, Reading, phase
from training.record.result import Result
from training.record.writer import EventDisplay, RunRecord
from training.runtime import processes
from training.settings import RunConfig
from training.system.devices import environment
from training.system.lease import Lease

if TYPE_CHECKING:
    from training.loop.worker import Worker


def introduce(worker: "Worker", *, node: str, host: str) -> list[str]:
    """Send where each rank is, from rank 0; return the host of each rank, in their order. A
    collective: every rank calls this.

    Args:
        node: name of this rank's node, as ``Process`` has it.
        host: address of this rank's node.
    """
    import torch.distributed as dist

    found: list[Any] = [None] * worker.world_size
    dist.all_gather_object(found, (host, processes.this_one(worker.rank, node)))
    hosts, of_ranks = zip(*found, strict=True)
    known = tuple(each for each in of_ranks if each is not None)
    worker.emit(Joined(processes=known), phase("workers_ready", hosts=hosts))
    return list(hosts)


def prepared(
    config: RunConfig, send: Callable[[list[Event]], object], *, node: str
) -> RunConfig | InputError | UnreachableError:
    """Look at a run's data; return the settings with what was decided, or what is wrong.

    Args:
        send: sends events to the command.
        node: name of this process's node, as ``Process`` has it.
    """

    def report(done: int, total: int) -> None:
        send([Reading(done=done, total=total)])

    download.say = storage.say = lambda text: send([Noted(message=text)])
    if here := processes.this_one(0, node):
        send([Joined(processes=(here,))])
    try:
        return recipes.by_name(config.recipe).prepare(config, report)
    except Exception as error:  # raised in the caller's process
        reported = faults.explained(error)
        assert isinstance(reported, InputError | UnreachableError)
        return reported.with_traceback(None)


def opened_record(
    config: RunConfig,
    command: Command,
    *,
    display: EventDisplay,
    lease: Lease | None,
    **more: Any,
) -> RunRecord:
    """Open the record of a run.

    Args:
        more: what ``RunRecord`` takes besides.
    """
    recipe, run_uri = command.recipe, RunPaths.of(config.storage, config.run).uri
    if lease is not None:
        more |= {"lease": lease.number, "check": lease.check}
    return RunRecord(
        run_uri,
        run=config.run,
        recipe=config.recipe,
        settings=config.to_json(),
        environment=environment() | recipe.places(run_uri),
        display=display,
        measures=recipe.measures,
        use=recipe.use(run_uri, config.to_json()),
        report_to=command.report_to,
        **more,
    )


class Failures:
    """Failures in a row: the count starts anew once the workers have resumed from a later
    checkpoint than before. A run of weeks is not ended by the third failure of its life; one that
    makes no progress is."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: failures in a row that the run survives.
        """
        self._most = most
        self._number = self._begun_at = 0

    def is_one_too_many(self, begun_at: int, *, is_counted: bool = True) -> bool:
        """Take note of a failure; return whether it ends the run.

        Args:
            begun_at: step at which the workers that failed had begun.
            is_counted: False where the machine is to blame.
        """
        if begun_at > self._begun_at:
            self._number, self._begun_at = 0, begun_at
        self._number += is_counted
        return self._number > self._most


def print_result(
    result: Result,
    recipe: Recipe,
    run_uri: str,
    *,
    settings: Mapping[str, object],
    report: Path | None = None,
    as_json: bool,
) -> None:
    """Print a run's figures on stdout, as JSON or as a table.

    Args:
        result: what the record has as the outcome.
        recipe: of the run.
        run_uri: address of its folder.
        settings: content of its ``config.json``.
        report: where its report is, if that is on this machine.
    """
    if as_json:
        print(json.dumps(result.to_json(), indent=1))
        return
    from rich.console import Console

    from training.record.colors import colored
    from training.record.display import result_table

    near = _near(run_uri)
    places = recipe.places(near)
    if report is not None:
        places["report"] = _near(str(report.absolute()))
    use = recipe.use(near, settings)
    table = result_table(result, places, measures=recipe.measures, use=use)
    Console().print(colored(table), soft_wrap=True)


def _near(place: str) -> str:
    """A folder below the current one, as a person would type it."""
    return place.removeprefix(f"{Path.cwd()}{os.sep}")
