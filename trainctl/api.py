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
from pathlib import Path
from typing import Final, Literal, ParamSpec, Self, TypedDict, TypeVar, Unpack

from contract.job import JobSpec, JobStatus, Outcome
from contract.runs import METRICS_FILE, RESULT_FILE
from trainctl import downloads, follow, job_log, job_plan, pricing
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import CliError, UsageError, explained
from trainctl.aws.files import json_object
from trainctl.aws.jobs import Job as FoundJob
from trainctl.job_log import JobLog, Wanted
from trainctl.job_options import JobOptions
from trainctl.job_plan import JobPlan
from trainctl.polling import Polling
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
        except Exception as error:
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
        """What ``trainctl show`` and the other commands take."""
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
    def logs(self, *, node: int | None = None) -> list[str]:
        """The lines of all its nodes so far, those of workers with a label, in order of time.

        Args:
            node: only what its command printed on this node, of a command that runs on all nodes.
        """
        found = self._look()
        log = JobLog(self._deployment.logs, Wanted(node=node, routine=True))
        return [
            job_log.text(line) for line in log.new(found, self._deployment.jobs.all_nodes(found))
        ]

    @_explains
    def stop(self) -> Outcome:
        """Stop it and wait until all of its nodes have ended; its run can be resumed.

        Nothing happens where it has ended already.
        """
        if not self._look().is_over:
            self._deployment.jobs.stop(self._found)
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


#: Options that may be given several times, each with a text.
_REPEATED: Final = ("keep_files", "skip_files", "not_secret")


class Options(TypedDict, total=False):
    """Keyword arguments of ``submit`` and ``plan``, with the command line's defaults."""

    run: str
    """Name of the run; the same again resumes it. A new name by default."""
    nodes: int | str
    """Worker nodes: a number, or a range such as ``"1:4"``; as many as were deployed by default."""
    on: Literal["head", "nodes", "auto"]
    """Nodes on which the command of ``code`` runs: once on the head, or on every node."""
    max_hours: float
    """Deadline, in hours after the admission, waiting for hosts included."""
    max_cost: float
    """US dollars that the maximum cost may reach; without ``max_hours`` the deadline follows."""
    wait_minutes: float
    """Minutes to wait for hosts."""
    grace: int
    """Seconds that the command of ``code`` has to save at a stop, and before the deadline."""
    hang_minutes: float
    """Minutes after which a command of ``code`` that does nothing is ended; 0: it is not."""
    keep_files: Sequence[str]
    """Patterns of files of ``code``'s command that must be saved."""
    skip_files: Sequence[str]
    """Patterns of those that are not saved."""
    hold: float
    """Minutes for which the hosts of a job that has failed stay, until its deadline at most."""
    spot: bool
    """Refuse a deployment that has not spot (True) or on-demand (False) instances."""
    env: Mapping[str, str | float | Path]
    """Variables for the code, by name."""
    secret: Mapping[str, str]
    """Variables with the value of a secret: name of the variable -> name of the secret."""
    not_secret: Sequence[str]
    """Files, variables and options of the command that look like secrets and are none."""
    code: Path | str
    """Folder of your own code, in place of a recipe."""
    profile: str | None
    """Profile of the AWS configuration."""
    region: str | None
    """Region of the deployment."""
    deployment: str | None
    """Name of the deployment, where there are several."""


@_explains
def plan(*command: str | float | Path, **options: Unpack[Options]) -> JobPlan:
    """Plan what ``submit`` would start with the same arguments, with its price; start nothing.

    Raises:
        UsageError: a value is wrong, or the job could not be started now.
        CliError: there is no deployment, or AWS refuses.
    """
    given = _job_options(command, options)
    return job_plan.plan_of(_deployment(options), given)


@_explains
def submit(*command: str | float | Path, **options: Unpack[Options]) -> Job:
    """Start a job; it keeps running when this program has ended.

    Args:
        command: a recipe and its settings, ``"ddp", "--epochs", 3``; with ``code`` the words of
            a command, ``"torchrun", "train.py"``.
        options: see ``Options``.

    Raises:
        UsageError: a value is wrong, or the run is being trained by another job.
        CliError: there is no deployment, or AWS refuses.
    """
    given = _job_options(command, options)
    deployment = _deployment(options)
    job = job_plan.start(deployment, job_plan.plan_of(deployment, given), given.code)
    return Job(deployment, deployment.jobs.find(job))


def _deployment(options: Options) -> Deployment:
    return Deployment.find(
        profile=options.get("profile"),
        region=options.get("region"),
        name=options.get("deployment"),
        to_start=True,
    )


def _job_options(command: Sequence[str | float | Path], options: Options) -> JobOptions:
    """The options, by the command line's own parser.

    Raises:
        TypeError: there is no such option.
        UsageError: the command line would refuse a value.
    """
    if unknown := sorted(options.keys() - Options.__annotations__.keys()):
        raise TypeError(f"{', '.join(unknown)}: submit and plan have no such option")
    words: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if name in ("profile", "region", "deployment"):  # of the deployment, not of the job
            continue
        if name == "spot" and isinstance(value, bool):
            words.append("--spot" if value else "--on-demand")
        elif isinstance(value, Mapping):
            words += [f"{option}={each}={_word(value[each], f'{name} {each!r}')}" for each in value]
        elif name in _REPEATED and isinstance(value, list | tuple):
            words += [f"{option}={_word(each, name)}" for each in value]
        else:
            words.append(f"{option}={_word(value, name)}")
    given = JobOptions.parse([*words, "--", *(_word(each, "a word") for each in command)])
    job_plan.check_given(given)
    return given


def _word(value: object, name: str) -> str:
    """
    Raises:
        UsageError: it is None, which would become a text.
    """
    if value is None:
        raise UsageError(f"{name} is None: leave it out for the default")
    return str(value)
