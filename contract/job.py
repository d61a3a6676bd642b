"""Order of a job, and its outcome: JSON that the command line, state machine and nodes exchange.

``trainctl submit`` builds a ``JobSpec``, whose JSON is the input of the state machine; the machine
hands it to the head of the job in one variable, ``TRAIN_JOB_SPEC``; the head and the function that
cleans up read it from there. All of them build the same object, so the command line refuses what
the head would refuse. Every default is here.

``Outcome`` comes back: the function that cleans up writes it, as the result of the execution and
into the bucket, and the command line reads it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Final, Self

from contract import exits
from contract.errors import InputError
from contract.files import check_pattern
from contract.instance_types import Prices
from contract.nodes import CONTAINER, DEFAULT_POOL, ENV_DEADLINE, ENV_JOB, ENV_JOB_SPEC, Range
from contract.runs import check_run_name
from contract.times import DEFAULT_GRACE_S, MAX_GRACE_S
from contract.typed_json import from_json, loads

JOB_GROUP: Final = "job:"  # before a job's id: the group of its ECS tasks
KEPT_GROUP: Final = "kept:"  # the same of the tasks that keep its hosts after its end
SECRETS_PREFIX: Final = "training/"  # only secrets with such names can be given to a job
NOTIFY_SECRETS: Final = f"{SECRETS_PREFIX}notify/"  # those that hold the address of a webhook
MAIL: Final = r"[^@\s<>,;]+@[^@\s<>,;]+\.[^@\s<>,;]+"  # pattern of an address
HEAD_STATE: Final = "Head"  # of the state machine: asks for the head
PAUSE_STATE: Final = "Pause"  # of the state machine: between two attempts of a head
JOB_TAG: Final = "job"  # keys of tags of a job's tasks
RUN_TAG: Final = "run"
USER_TAG: Final = "user"
USER_ID_TAG: Final = "user-id"  # by which IAM tells who may stop them
MAX_JOB_ID: Final = 36  # characters of ECS's startedBy, and so of a job's id
#: Version of ``JobSpec``'s JSON. Raise it with every change; trainctl refuses to start jobs on a
#: deployment that has another one.
ORDER_VERSION: Final = 15
MAX_OVERRIDES: Final = 8192  # characters that ECS accepts of what a task is started with
#: First parts of variable names that belong to this project, Ray and AWS.
RESERVED: Final = (
    *("TRAIN_", "AWS_", "ECS_"),
    *("RAY_ADDRESS", "RAY_AUTH_", "RAY_CLOUD_", "RAY_JOB_", "RAY_NODE_", "RAY_OVERRIDE_"),
)

_TAG_VALUE: Final = (r"[\w .:/=+@-]{0,256}", "at most 256 letters, digits, spaces and .:/=+@-_")
#: Fields of an order that are texts -> their pattern, and the same in words.
_TEXTS: Final = {
    "code": (r"(s3://[^/]+/.+)?", "the s3:// address of an archive, or empty"),
    "code_sha256": (r"([0-9a-f]{64})?", "64 hexadecimal digits, or empty"),
    "notify": (
        rf"({MAIL}|{NOTIFY_SECRETS}[\w/+=.@-]+)?",
        f"a mail address, or the name of a secret that begins with {NOTIFY_SECRETS}, or empty",
    ),
    "after": (r"[A-Za-z0-9_-]{0,80}", "the id of a job, or empty"),
    "with_run": (r"[A-Za-z0-9._-]{0,63}", "the name of a run, or empty"),
    "submitter": _TAG_VALUE,
    "user_id": _TAG_VALUE,
}
#: Module that starts a recipe, and its option to read and check the data only.
LAUNCH: Final = "training.launch"
LOOK: Final = "--look"
DEFAULT_MAX_SECONDS: Final = 24 * 3600
MAX_SECONDS: Final = 14 * 24 * 3600
MAX_HOLD_S: Final = 2 * 3600
MAX_KEEP_S: Final = 2 * 3600
#: Fields of an order that are whole numbers -> their limits.
_NUMBERS: Final = {
    "max_seconds": (1, MAX_SECONDS),
    "capacity_wait_s": (0, MAX_SECONDS),
    "grace_s": (0, MAX_GRACE_S),
    "idle_s": (1, MAX_SECONDS),
    "hang_s": (0, MAX_SECONDS),
    "hold_s": (0, MAX_HOLD_S),
    "keep_s": (0, MAX_KEEP_S),
}
DEFAULT_CAPACITY_WAIT_S: Final = 30 * 60
DEFAULT_IDLE_S: Final = 60
DEFAULT_HANG_S: Final = 10 * 60


class Placement(StrEnum):
    """Nodes on which a job's command runs."""

    HEAD = "head"
    """Once, on the head, with Ray beside it: recipes, and programs that use Ray."""
    NODES = "nodes"
    """Once on every worker node, and on a head that trains: programs with a launcher or a process
    group of their own."""


class Priority(StrEnum):
    """Place of a job in the queue, before the order of submission."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """Order of a job: its command, its nodes and its time limits.

    Raises:
        InputError: a value is not usable; the message names the field.
    """

    run: str
    """Name of the run that the job belongs to."""
    command: tuple[str, ...]
    """Words of the command."""
    nodes: Range
    """Worker nodes, beside the head: it starts when MIN have joined and grows up to MAX. 0: the
    head works by itself."""
    max_seconds: int = DEFAULT_MAX_SECONDS
    """Seconds from the admission to the deadline, waiting for hosts included."""
    capacity_wait_s: int = DEFAULT_CAPACITY_WAIT_S
    """Seconds that an admitted job waits for its head's host, and then for MIN worker nodes."""
    grace_s: int = DEFAULT_GRACE_S
    """Seconds between SIGTERM and SIGKILL for a program of the user's at a stop; and SIGTERM comes
    this long before the deadline. A recipe saves a checkpoint instead."""
    idle_s: int = DEFAULT_IDLE_S
    """A worker node that has had nothing to do for this long is released."""
    hang_s: int = DEFAULT_HANG_S
    """A program of the user's that gives no sign of life for this long is ended; 0: it is not."""
    hold_s: int = 0
    """Seconds for which its hosts stay after its command has failed, until the deadline at most."""
    keep_s: int = 0
    """Seconds for which its hosts stay after its command has ended, for the same user's next job.
    They are billed; 0: they are released."""
    after: str = ""
    """Id of the job that has to succeed before this one is admitted; empty: it waits for none."""
    with_run: str = ""
    """Run of that job, where this one begins once that job has begun, and ends with it."""
    recipe: str = ""
    """Name of the recipe that the command trains; empty: it is another program. The words of the
    command do not tell: a user's script may have any name."""
    on: Placement = Placement.HEAD
    """Nodes on which the command runs."""
    code: str = ""
    """``s3://`` address of an archive with the user's code; empty: the image's own."""
    code_sha256: str = ""
    """SHA-256 of that archive, 64 hexadecimal digits: another archive is not unpacked. Empty only
    without code."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables for the command, and for every process that it starts through Ray."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """The same, but name of the variable -> name of the secret that holds its value."""
    keep_files: tuple[str, ...] = ()
    """Patterns of files of the program that must be saved."""
    skip_files: tuple[str, ...] = ()
    """Patterns of those that are not saved."""
    prices: Prices | None = None
    """Types and prices of its hosts; None: not known."""
    submitter: str = ""
    """User or role session of AWS that has submitted it."""
    user_id: str = ""
    """Its ``aws:userid``, which says that it is the same in a policy."""
    pools: tuple[str, ...] = ()
    """Pools of its worker nodes; it starts in the first. Empty: the deployment's own hosts."""
    notify: str = ""
    """Where its end is reported: a mail address, or a secret with the address of a webhook."""
    priority: Priority = Priority.NORMAL
    planned_usd: float | None = None
    """US dollars that its steps were expected to cost; None: not computed."""

    @property
    def uses_ray(self) -> bool:
        """It runs a program of the user's on the head, which Ray brings to other nodes."""
        return self.on == Placement.HEAD and not self.recipe

    def __post_init__(self) -> None:
        check_run_name(self.run)
        if not self.command or not self.command[0]:
            raise _wrong("command", [*self.command], "a list whose first word is a program")
        for name, (low, high) in _NUMBERS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise _wrong(name, value, f"a whole number from {low} to {high}")
        for name, (pattern, allowed) in _TEXTS.items():
            text = getattr(self, name)
            if not re.fullmatch(pattern, text):
                raise _wrong(name, text, allowed)
        if self.code_sha256 and not self.code:
            raise InputError("code_sha256 is given without code: give the archive's address too")
        if self.recipe and self.code:
            raise InputError(
                f"recipe is {self.recipe!r}, and code is given too: a recipe is code of the image; "
                "give one of them"
            )
        for pattern in (*self.keep_files, *self.skip_files):
            check_pattern(pattern, option="a pattern of files")
        for name in self.variables:
            check_variable(name)
        for name, secret in self.secrets.items():
            check_variable(name)
            if not secret.startswith(SECRETS_PREFIX):
                raise _wrong(
                    f"secret of {name}",
                    secret,
                    f"the name of a secret that begins with {SECRETS_PREFIX}: jobs may read no "
                    "other ones",
                )
        if both := self.variables.keys() & self.secrets.keys():
            raise InputError(
                f"{', '.join(sorted(both))}: given both as a variable and as a secret; give one"
            )

    @property
    def ladder(self) -> tuple[str, ...]:
        """The same, with the name of the deployment's own hosts."""
        return self.pools or (DEFAULT_POOL,)

    @property
    def webhook(self) -> str:
        """Secret with the address of a webhook; empty: its end is mailed, or not reported."""
        return self.notify if self.notify.startswith(NOTIFY_SECRETS) else ""

    def to_json(self) -> str:
        """All fields, as ``from_json`` reads them."""
        return json.dumps(self._values(), ensure_ascii=False, separators=(",", ":"))

    def _values(self) -> dict[str, object]:
        return asdict(self) | {"nodes": str(self.nodes)}

    @classmethod
    def from_json(cls, text: str, *, ignores_unknown: bool = False) -> Self:
        """Read an order, which may be any JSON: an execution can be started without trainctl.

        Args:
            ignores_unknown: as its job began before a deploy that knows fewer fields.

        Raises:
            InputError: it is no order, or a field is wrong, missing or unknown.
        """
        what = "a job's order"
        values = loads(text, what=what)
        if "nodes" in values:
            values["nodes"] = asdict(Range.parse(str(values["nodes"]), option="nodes"))
        return from_json(cls, values, what=what, ignores_unknown=ignores_unknown)

    def tags(self, job: str) -> dict[str, str]:
        """Tags of the tasks of a job: what costs are told apart by, and who may stop them."""
        user = {USER_TAG: self.submitter, USER_ID_TAG: self.user_id}
        return {JOB_TAG: job, RUN_TAG: self.run, **user}

    def check_size(self, job: str) -> None:
        """Fail if ECS would not start the head of ``job`` with this order.

        Raises:
            InputError: it is too long.
        """
        # Escaped, which is never shorter: whether Step Functions and ECS count a letter beyond
        # ASCII as one character or as its escape is not documented.
        spec = json.dumps(self._values(), separators=(",", ":"))
        # The deadline has ten digits until the year 2286.
        variables = head_variables(job=job, deadline="1" * 10, spec=spec)
        size = len(json.dumps(overrides(variables), separators=(",", ":")))
        if size > MAX_OVERRIDES:
            raise InputError(
                f"command, variables and secrets' names make an order of {size:,} characters, and "
                f"ECS accepts {MAX_OVERRIDES:,}: put what is long into a file of the code, or into "
                "the bucket"
            )


def keeps_as(user_id: str) -> str:
    """``startedBy`` of the tasks that keep hosts for a user: ECS lists them by it."""
    return f"kept-{hashlib.sha256(user_id.encode()).hexdigest()[:24]}"


def head_variables(*, job: str, deadline: str, spec: str) -> dict[str, str]:
    """Environment variables of a job's head task.

    The state machine calls it with expressions in place of the values.
    """
    return {ENV_JOB: job, ENV_DEADLINE: deadline, ENV_JOB_SPEC: spec}


def overrides(variables: Mapping[str, str]) -> dict[str, object]:
    """The ``overrides`` of ECS's RunTask that give a task these variables."""
    environment = [{"name": name, "value": value} for name, value in variables.items()]
    return {"containerOverrides": [{"name": CONTAINER, "environment": environment}]}


def check_variable(name: str, *, what: str = "variable") -> str:
    """Return ``name`` if a job's user may set a variable that is called so.

    Args:
        what: names the origin in the error, such as an option.

    Raises:
        InputError: it is no name of a variable, or the system's own.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise _wrong(what, name, "a name of letters, digits and _ that begins with no digit")
    if name.startswith(RESERVED):
        raise InputError(
            f"{what} {name}: names that begin with {', '.join(RESERVED)} are reserved for the "
            "system; choose another name"
        )
    return name


def execution_arn(state_machine_arn: str, job: str) -> str:
    """ARN of a job's execution, which is named after it; ``*`` for all of them.

    Also for the CDK's placeholders of ARNs that are not known yet.
    """
    return f"{state_machine_arn.replace(':stateMachine:', ':execution:')}:{job}"


class JobStatus(StrEnum):
    """State of a job, or how it ended."""

    QUEUED = "queued"
    """Waits to be admitted: earlier jobs have the hosts."""
    RUNNING = "running"
    """Waits for hosts, or runs; it has no outcome yet."""
    SUCCEEDED = "succeeded"
    """Its command ended with exit code 0."""
    FILES_LOST = "files_lost"
    """Its command succeeded, and some of the files that it wrote could not be saved."""
    FAILED = "failed"
    """Its command failed, or the head could not be started."""
    STOPPED = "stopped"
    """Ended by a person: ``trainctl stop``, ECS's or Step Functions' console."""
    DEADLINE = "deadline"
    """Was still running at its deadline."""
    NO_CAPACITY = "no_capacity"
    """The hosts that it needs at least were not available in time."""
    HOST_LOST = "host_lost"
    """The head was killed, or lost its Ray, again and again."""
    IMAGE_NOT_FOUND = "image_not_found"
    """ECS could not pull the image of its head."""


#: Reason of a task or execution that ``trainctl stop`` ends, and of the job then.
STOPPED_BY_USER: Final = "stopped by user"
#: Error with which ``trainctl stop`` ends an execution that has no head yet.
STOP_ERROR: Final = "stopped"


@dataclass(frozen=True)
class _Report:
    """Report of a job's head in the bucket."""

    __slots__ = ()

    def to_json(self) -> str:
        """All fields, as ``from_json`` reads them."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Ignores what else the text holds. Raises InputError if it is another object."""
        return from_json(cls, loads(text, what="a report"), what="a report", ignores_unknown=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(_Report):
    """End of a job, or of one attempt of it."""

    status: JobStatus
    reason: str
    """The status in words."""
    exit_code: int | None = None
    """Exit code of the head's container; None where it did not start or AWS does not know."""
    again: bool = False
    """Retry: only this attempt has ended, not the job."""
    attempts: int | None = None
    """Number of starts of the head; None where that is not known."""
    in_a_row: int | None = None
    """Number of attempts since the head last ran for long."""
    began: float | None = None
    """Unix time of the submission."""
    ended: float | None = None
    """Unix time."""
    deadline: float | None = None
    """Unix time; None for a job that was never admitted."""

    @property
    def brief(self) -> str:
        """The status for a list: ``succeeded``, ``failed (1)``, ``no capacity``."""
        code = self.exit_code if self.status == JobStatus.FAILED else None
        return self.status.replace("_", " ") + (f" ({code})" if code else "")

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read an outcome: of an execution, or of a record in a run's folder.

        What else a record holds (the job, its command) is ignored.

        Raises:
            InputError: it is not an outcome.
        """
        what = "a job's outcome"
        values = loads(text, what=what)
        values.setdefault("reason", values.get("status"))
        return from_json(cls, values, what=what, ignores_unknown=True)

    @classmethod
    def of_abort(cls, *, error: str | None, cause: str | None) -> Self:
        """Outcome of an aborted execution, from the error and the cause that were given.

        ``trainctl stop`` gives both. Step Functions' console gives none unless a user types
        them, and other programs may give their own.
        """
        if error == STOP_ERROR:
            return cls(status=JobStatus.STOPPED, reason=STOPPED_BY_USER)
        said = ": ".join(filter(None, (error, cause)))
        reason = f"its execution was aborted{f': {said}' if said else ''}"
        return cls(status=JobStatus.STOPPED, reason=reason)


def record_json(job: str, spec: JobSpec, outcome: Outcome) -> str:
    """The JSON that is kept in the bucket of how a job of a run ended.

    ``Outcome.from_json`` reads it. Variables are left out: they may be confidential.
    """
    record = {
        "job": job,
        "run": spec.run,
        **json.loads(outcome.to_json()),
        "recipe": spec.recipe,
        "command": [*spec.command],
        "nodes": str(spec.nodes),
        "prices": spec.prices and asdict(spec.prices),
    }
    return json.dumps(record, indent=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold(_Report):
    """Hosts of a job that stay after its command has failed, for a person to look at."""

    code: int
    """Exit code of the job."""
    since: float
    """Unix time."""
    until: float
    """Unix time."""

    def __post_init__(self) -> None:
        if self.code in exits.NOT_HELD:
            raise InputError(f"a hold has exit code {self.code}: no command has failed with it")


@dataclass(frozen=True, kw_only=True, slots=True)
class Life(_Report):
    """Report of a job's head that it runs."""

    at: float
    """Unix time."""
    is_complete: bool
    """All worker nodes that the job needs have been there."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Parts of its start -> Unix time of their ends."""


# --- why a task was stopped -----------------------------------------------------------------------
def stop_reason(status: JobStatus, text: str) -> str:
    """The reason to stop a task with, from which ``status_of_stop`` reads the job's status."""
    return f"[{status}] {text}"


def status_of_stop(reason: str) -> JobStatus | None:
    """The status that a task's stop reason names; None when it is not one of ours."""
    match = re.match(r"\[(\w+)\] ", reason)
    return JobStatus(match[1]) if match and match[1] in {*JobStatus} else None


# --- plumbing -------------------------------------------------------------------------------------
def _wrong(name: str, value: object, allowed: str) -> InputError:
    return InputError(f"{name} is {value!r}: it must be {allowed}")
