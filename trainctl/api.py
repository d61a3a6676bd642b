"""Jobs from Python: ``from trainctl import submit, Job``.

The words are those of the command line: ``submit("ddp", nodes=2, max_hours=3)`` is ``trainctl
submit ddp --nodes 2 --max-hours 3`` and sends the same order. Nothing is printed, and nothing is
asked: ``plan`` computes the price of a job without starting it.

Errors are those of the command line too: ``UsageError`` where a value is wrong, ``CliError``, of
which it is a kind, where something else is; the message names what to do. Other exceptions are
faults of this program.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import typer
from typer.exceptions import TyperException

from contract.job import JobSpec, JobStatus, Outcome
from contract.runs import METRICS_FILE, RESULT_FILE
from trainctl.aws.deployment import Deployment
from trainctl.aws.deployment_bucket import json_object
from trainctl.aws.errors import CliError, UsageError, explained
from trainctl.aws.jobs import JobExecution as FoundJob
from trainctl.jobs import job_plan, pricing
from trainctl.jobs.job_options import JobOptions
from trainctl.jobs.job_plan import JobPlan
from trainctl.jobs.job_request import JobRequest
from trainctl.options import Where, by_name, flattened, refusal, text, words_of
from trainctl.runs import downloads, trial_list
from trainctl.watch import follow
from trainctl.watch.polling import Polling
from training.record.events import Metrics, parse_metrics
from training.record.result import Result

__all__ = ["CliError", "Job", "UsageError", "plan", "submit"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _explains(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Raise the errors that the command line would print as ``CliError``."""

    @functools.wraps(call)
    def explaining(*arguments: _P.args, **named: _P.kwargs) -> _R:
        try:
            return call(*arguments, **named)
        except TimeoutError:  # of ``wait``
            raise
        except Exception as error:  # the API's boundary
            known = explained(error)
            raise known from (None if known is error else error)

    return explaining


class Job:
    """A job that was submitted. It keeps running after this program has ended.

    ``submit`` returns one; ``Job.find`` finds one by its id.
    """

    def __init__(self, deployment: Deployment, found: FoundJob) -> None:
        self._deployment, self._found = deployment, found

    @classmethod
    @_explains
    def find(
        cls,
        name: str,
        *,
        profile: str | None = None,
        region: str | None = None,
        deployment: str | None = None,
    ) -> Self:
        """The job with this id, or the newest job of the run with this name.

        Raises:
            UsageError: there is neither.
        """
        found = Deployment.find(profile=profile, region=region, name=deployment)
        return cls(found, found.jobs.find(name))

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    @property
    def id(self) -> str:
        """Id of the job, which ``trainctl show`` and other commands take."""
        return self._found.id

    @property
    def run(self) -> str:
        """Name of the run that the job belongs to."""
        return self._found.run

    @property
    def spec(self) -> JobSpec | None:
        """The order; None where another version of trainctl has given it."""
        return self._found.spec

    @property
    def is_over(self) -> bool:
        """True if it has ended; asks AWS."""
        return self._look().is_over

    @property
    def status(self) -> JobStatus:
        """``running``, in the queue and while it waits for hosts too, or how it ended. Asks AWS."""
        return self.outcome.status

    @property
    def outcome(self) -> Outcome:
        """Its end: status, reason in words, exit code; its status is ``running`` before.

        Asks AWS until it has ended.
        """
        return self._look().outcome

    @_explains
    def _look(self) -> FoundJob:
        if not self._found.is_over:
            self._found = self._deployment.jobs.find(self.id)
        return self._found

    @_explains
    def wait(self, *, timeout_s: float | None = None) -> Outcome:
        """Wait until it has ended; return how. A failed job is no error here: look at ``status``.

        Args:
            timeout_s: how long to wait, in seconds; None: until its deadline at the latest, when
                the job is ended.

        Raises:
            TimeoutError: it is still running after ``timeout_s``.
        """
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        polling = Polling(is_local=self._deployment.is_local)
        while not self._look().is_over:
            left = None if give_up is None else give_up - time.monotonic()
            if left is not None and left < 0:
                raise TimeoutError(f"{self.id} is still running after {timeout_s:g} s")
            polling.wait(changed=False, at_most=left)
        return self._found.outcome

    @_explains
    def stop(self) -> Outcome:
        """Stop it and wait until all of its nodes have ended; its run can be resumed.

        Nothing happens where it has ended already.
        """
        if not self._look().is_over and follow.stop(self._deployment, self._found):
            self._found = follow.wait_until_gone(self._deployment, self.id)
        return self._found.outcome

    @_explains
    def cost(self) -> float | None:
        """Cost so far, in US dollars at list prices; None: not known."""
        return pricing.cost_of(self._deployment, self._found).usd

    @_explains
    def result(self) -> Result | None:
        """Result of a recipe's run: measures, loss, steps; None before it has written it.

        Other programs have a result where they wrote one: ``download``.
        """
        values = json_object(self._deployment.bucket.read_of_run(self.run, RESULT_FILE))
        return Result.from_json(values) if values else None

    @_explains
    def trials(self) -> list[dict[str, object]]:
        """Trials of a job with ``vary``, the best first: run, settings, status, and the best value
        of the measure that they are compared by (None: not evaluated yet)."""
        return trial_list.of(self._deployment.bucket, self.run).rows

    @_explains
    def metrics(self) -> Metrics:
        """The record of a recipe's run so far, an event a line; empty before it has begun."""
        return parse_metrics(self._deployment.bucket.read_of_run(self.run, METRICS_FILE) or b"")

    @_explains
    def download(
        self, to: Path | str = "", *, pattern: str = "*", node: int | None = None
    ) -> list[Path]:
        """Fetch the files that the run's program wrote: what has been copied so far.

        Args:
            to: folder for ``node-N/work``, ``node-N/output``, ``node-N/home`` and ``ray``; one with
                the run's name by default. Files that lie there already are replaced.
            pattern: of the name or path of a file or folder: ``*.pt``, ``work/logs``.
            node: only what this node wrote.

        Returns:
            Where they lie now, below ``to``.

        Raises:
            UsageError: there is no such file, or a name of one leads out of ``to``.
            CliError: a file changed while it was fetched: call it again.
        """
        folder = Path(to or self.run)
        found = downloads.download(
            self._deployment.bucket, self.run, folder, pattern=pattern, node=node
        )
        return [each.target for each in found]


@_explains
def plan(*command: str | float | Path, **options: object) -> JobPlan:
    """Plan what ``submit`` would start with the same arguments, with its price; start nothing.

    Raises:
        UsageError: a value is wrong, or the job could not be started now.
        CliError: there is no deployment, or AWS refuses.
    """
    request, where = _request(command, options)
    return job_plan.plan_of(where.find(to_start=True), request)


@_explains
def submit(*command: str | float | Path, **options: object) -> Job:
    """Start a job; it keeps running when this program has ended.

    Args:
        command: a recipe and its settings, ``"ddp", "--epochs", 3``; with ``code`` the words of
            a command, ``"torchrun", "train.py"``.
        options: those of ``trainctl submit`` by their long names, with ``_`` for ``-``:
            ``nodes="1:4"``, ``max_hours=3``. ``env`` and ``secret`` are dictionaries, options
            that may be repeated are lists, ``spot`` is True, or False for ``--on-demand``;
            ``profile``, ``region`` and ``deployment`` may be None.

    Raises:
        UsageError: a value is wrong, or the run is being trained by another job.
        CliError: there is no deployment, or AWS refuses.
    """
    request, where = _request(command, options)
    deployment = where.find(to_start=True)
    job = job_plan.start(deployment, job_plan.plan_of(deployment, request))
    return Job(deployment, deployment.jobs.find(job))


def _request(command: Sequence[object], options: Mapping[str, object]) -> tuple[JobRequest, Where]:
    """A job and its deployment, by the command line's own parser.

    Raises:
        UsageError: the command line would refuse a value.
    """
    of_where = {each.name for each in fields(Where)}
    values = {
        key: value for key, value in options.items() if value is not None or key not in of_where
    }
    parser = typer.Typer(add_completion=False)
    parser.command()(flattened(_parsed))
    read: Any = typer.main.get_command(parser)
    words = words_of(values, by_name(read.params))
    try:
        options_of_job, where = read.main(
            [*words, "--", *(text("a word", each) for each in command)], standalone_mode=False
        )
    except TyperException as error:
        raise refusal(error) from None
    return JobRequest.of(options_of_job), where


def _parsed(*, options: JobOptions, where: Where) -> tuple[JobOptions, Where]:
    return options, where
