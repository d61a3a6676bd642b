"""Each fault's symptom leads from where it is first seen to the right outcome of the job.

No fault of S3, of a disk, a GPU, Ray or AWS ends a job for good before its deadline. What a user
can fix ends it at once, and a head that is killed, or loses its Ray, again and again ends it too.
"""

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import MagicMock

import pytest
import ray
import ray.train
from botocore.exceptions import (
    EndpointConnectionError,
    IncompleteReadError,
    ProfileNotFound,
    ReadTimeoutError,
)
from ray.exceptions import ActorDiedError, RayTaskError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

import containers.__main__ as container
from containers import job_head, node
from containers.program.files import s3_files
from containers.program.start import code as user_code
from containers.program.start import supervisor
from containers.program.start.on_node import Ended, LaunchSpec, Status
from contract import exits, times
from contract.errors import InputError, UnreachableError
from contract.job import JobStatus, Outcome, Placement, stop_reason
from contract.job_outcome import MOST_IN_VAIN, Ending, ending_of, head_of, verdict
from contract.nodes import Range
from tests.aws.calls import refused
from tests.aws.s3 import S3
from tests.clock import FakeClock
from tests.containers.test_job import ENVIRONMENT, Life, on_head, ordered
from tests.heads import head
from training import command, launch
from training.ddp.settings import DdpConfig
from training.runtime import driver, outcome, ray_cluster, ray_worker, trainer
from training.system import lease

FULL: Final = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
#: What S3 and disks do: 503 as s3fs tells it, silence, no connection, a broken answer, ...
TROUBLE: Final[Mapping[str, Exception]] = {
    "S3 refuses for now": OSError(errno.EBUSY, "Please reduce your request rate."),
    "S3 is silent": ReadTimeoutError(endpoint_url="https://s3"),
    "S3 cannot be reached": EndpointConnectionError(endpoint_url="https://s3"),
    "S3 breaks off": IncompleteReadError(actual_bytes=1, expected_bytes=2),
    "S3 did not answer": UnreachableError("s3://b/data cannot be read"),
    "a disk is full": FULL,
    "a disk fails": OSError(errno.EIO, os.strerror(errno.EIO)),
}
#: What a user can fix.
MISTAKES: Final[Mapping[str, Exception]] = {
    "data is wrong": InputError("a line is no JSON"),
    "a right is missing": InputError("storage s3://b cannot be written: Forbidden"),
    "a refusal that was not foreseen": PermissionError(errno.EACCES, "Forbidden"),
    "a wrong profile": ProfileNotFound(profile="mine"),
}
#: What nothing is known of.
BUGS: Final[Mapping[str, Exception]] = {
    "a bug": KeyError("step"),
    "a GPU has no memory": RuntimeError("CUDA error: out of memory"),
    "a picture is broken": OSError("cannot identify image file"),
}


# --- where a symptom is first seen: each returns the exit code of the head's container ------------
def in_command(patch: pytest.MonkeyPatch, error: Exception) -> int:
    """In the recipe's command on the head."""

    def start(_command: object) -> int:
        raise error

    patch.setattr(launch, "start", start)
    try:
        own = launch.main(["ddp", "--local"])
    except Exception:
        own = 1  # as Python does
    return Life(recipe="ddp", codes=(own,)).run()


def in_worker(patch: pytest.MonkeyPatch, error: Exception) -> int:
    """On the first rank, by way of Ray Train, its fit and the command."""
    actor, loop = trainer._Events(), MagicMock()
    loop.by_name.return_value.train.return_value.side_effect = error
    names = ("put", "take", "begun_at", "request_stop")
    methods = {name: SimpleNamespace(remote=getattr(actor, name)) for name in names}
    events = SimpleNamespace(**methods)

    def fit() -> None:
        try:
            ray_worker.ray_entry({"config": {}, "run_uri": "", "fence": 1, "events": events})
        except Exception as found:
            # The others feel that their peer has gone.
            peer = UserExceptionWithTraceback(RuntimeError("connection lost"), "")
            own = UserExceptionWithTraceback(found, "")
            raise ray.train.WorkerGroupError(str(found), {0: own, 1: peer}) from None

    names = ("outcome", "processes", "devices", "dist")
    around: dict[str, Any] = dict.fromkeys(names, MagicMock())
    around |= {"recipes": loop, "RayWorker": lambda **_: MagicMock(_events=events)}
    for name, double in around.items():
        patch.setattr(ray_worker, name, double)
    patch.setattr(ray, "get_runtime_context", MagicMock())
    patch.setattr(ray.util, "get_node_ip_address", MagicMock())
    for name in ("_take_over", "_free_places", "_wait_for_places"):
        patch.setattr(trainer, name, MagicMock())
    patch.setattr(trainer, "_trainer", lambda *_: SimpleNamespace(fit=fit))
    patch.setattr(lease, "follow", lambda _uri, fence: fence)
    return in_driver(patch, lambda submission: trainer.fit(submission, events), events)


def in_driver(patch: pytest.MonkeyPatch, fit: Callable[[Any], Any], events: object = None) -> int:
    """In the command, of what Ray tells it about its task ``fit``."""
    idle = SimpleNamespace(take=SimpleNamespace(remote=list))

    def start(task: object, submission: Any, _events: object) -> Any:
        return submission.config if task is trainer.prepare else fit(submission)

    def get(value: Any, **_: object) -> Any:
        if isinstance(value, ray.exceptions.RayError):
            raise value
        return value

    patch.setattr(ray_cluster, "join_cluster", lambda **_: None)
    patch.setattr(trainer, "start_events", lambda: events or idle)
    patch.setattr(trainer, "start", start)
    patch.setattr(ray, "wait", lambda found, **_: (found, []))
    patch.setattr(ray, "get", get)
    patch.setattr(signal, "signal", lambda *_: None)
    patch.setattr(outcome, "environment", dict)
    storage = str(Path(os.environ["PYTEST_TMP"]))
    held: Any = SimpleNamespace(number=1, lost="", confirm=lambda: None, check=None)
    own = driver.Driver(
        DdpConfig(recipe="ddp", run="r", storage=storage, data=""),
        command.parse(["ddp", "--storage", storage]),
        workers=ray_cluster.RayWorkers(workers=Range(1, 1), max_failures=2, verbose=False),
        lease=held,
    ).run()
    return Life(recipe="ddp", codes=(own,)).run()


def in_container(patch: pytest.MonkeyPatch, run: Callable[[], int]) -> int:
    patch.setattr(job_head, "run", lambda _environment: run())
    return container.main(["job"])


def in_head(patch: pytest.MonkeyPatch, error: Exception, *, secret: bool = False) -> int:
    """When the head fetches a program, or a secret."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    client = SimpleNamespace(get_secret_value=fail, get_object=fail)
    client.delete_objects = lambda **_: {}
    patch.setattr(s3_files, "_client", lambda: client)
    patch.setattr("boto3.client", lambda _service: client)
    patch.setattr(user_code, "ARCHIVE", Path(os.environ["PYTEST_TMP"], "code.zip"))
    order: dict[str, Any] = {"secrets": {"A": "training/a"}} if secret else {}
    life = Life(code="s3://bucket/code.zip", **order)
    return in_container(patch, life.run)


def in_restore(patch: pytest.MonkeyPatch, error: Exception) -> int:
    """When the files of a program come back."""
    s3 = S3()
    s3.is_down, s3.trouble = True, error
    return in_container(patch, on_head(s3, patch, "true", clock=FakeClock()).run)


def on_node(patch: pytest.MonkeyPatch, error: Exception) -> int:
    """When a node prepares a program of all nodes; its answer brings the error."""
    ended = Ended(code=exits.FAILED, at=0.0, was_stopped=False, trouble=error)
    seat: Any = {"number": 0, "node": None, "launcher": None, "start": 0}
    group = supervisor.NodeGroup(LaunchSpec(order=ordered(on=Placement.NODES).spec, variables={}))
    group._seats = [supervisor.Seat(**seat, status=Status(start=0, ended=ended))]
    patch.setattr(group, "run", group._failure)
    return Life(codes=(supervisor.run(group),), on=Placement.NODES).run()


def at_start(patch: pytest.MonkeyPatch, fault: str) -> int:
    """The head's own check of its host."""
    patch.setattr(node, "host_faults", lambda _: [fault])
    patch.setattr(signal, "signal", lambda *_: None)
    return job_head.run(ENVIRONMENT)


XID = "GPU 3 has fallen off the bus (Xid 79)"
SLOW_DOWN, FORBIDDEN = refused("SlowDown"), refused("AccessDenied")
GONE = refused("404")
THROTTLED = refused("ThrottlingException")
LOST_ACTOR = ActorDiedError()
BUG_IN_FIT = RayTaskError("fit", "traceback", KeyError("step"))

Symptom = tuple[str, Callable[[pytest.MonkeyPatch], int], int]
SYMPTOMS: list[Symptom] = [
    *(
        (f"{what} {where.__name__}", lambda patch, w=where, e=error: w(patch, e), code)
        for where in (in_command, in_worker)
        for errors, code in ((TROUBLE, 79), (MISTAKES, 2), (BUGS, 1))
        for what, error in errors.items()
    ),
    ("Ray loses the command's task", lambda p: in_driver(p, lambda _: LOST_ACTOR), 77),
    ("a bug in the command's task", lambda p: in_driver(p, lambda _: BUG_IN_FIT), 1),
    ("Ray ends after the command", lambda _: after_command(ray_ends=True), 77),
    ("the command fails by itself", lambda _: after_command(ray_ends=False), 1),
    ("a GPU fails at the start", lambda p: at_start(p, XID), 76),
    ("S3 has no answer with the code", lambda p: in_head(p, SLOW_DOWN), 79),
    ("S3 is silent with the code", lambda p: in_head(p, TROUBLE["S3 is silent"]), 79),
    ("the disk is full with the code", lambda p: in_head(p, FULL), 79),
    ("the code may not be read", lambda p: in_head(p, FORBIDDEN), 2),
    ("the code is gone", lambda p: in_head(p, GONE), 2),
    ("Secrets Manager throttles", lambda p: in_head(p, THROTTLED, secret=True), 79),
    ("a secret may not be read", lambda p: in_head(p, FORBIDDEN, secret=True), 2),
    ("S3 gives no files", lambda p: in_restore(p, SLOW_DOWN), 79),
    ("the disk takes no files", lambda p: in_restore(p, FULL), 79),
    ("files may not be read", lambda p: in_restore(p, FORBIDDEN), 2),
    ("S3 gives a node no files", lambda p: on_node(p, UnreachableError("no files")), 79),
    ("files are damaged on a node", lambda p: on_node(p, InputError("damaged")), 2),
]


def after_command(*, ray_ends: bool) -> int:
    life = Life(recipe="ddp", codes=(1,), lasts=50)
    if ray_ends:
        life.clock.at(51, life.ray.die)
    return life.run()


def judged(
    task: dict[str, Any],
    error: str = "",
    *,
    in_a_row: int = 1,
    left_s: float = 600,
    patience_s: float = 300,
) -> Outcome:
    now = time.time()
    return verdict(
        task,
        error,
        deadline=now + left_s,
        capacity_deadline=now + patience_s,
        attempt=60,
        in_a_row=in_a_row,
    )


@pytest.mark.parametrize(
    ("seen", "code"), [each[1:] for each in SYMPTOMS], ids=[each[0] for each in SYMPTOMS]
)
def test_a_symptom_has_one_exit_code_and_no_fault_of_machines_ends_the_job(
    seen: Callable[[pytest.MonkeyPatch], int],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    with monkeypatch.context() as patch:
        found = seen(patch)
    assert found == code
    assert judged(head(code)).again == (code in exits.TRIED_AGAIN)


# --- how ECS and Step Functions tell it -----------------------------------------------------------
FAULT, DOUBT, END = "tried again", "tried again, not for ever", "over"
NO_FABRIC = (
    "CannotStartContainerError: error gathering device information while adding custom device "
    '"/dev/efa/0": no such file or directory'
)


def not_started(reason: str) -> dict[str, Any]:
    return head(StopCode="TaskFailedToStart", reason=reason)


def by_user(code: int, reason: str = "") -> dict[str, Any]:
    return head(code, StopCode="UserInitiated", StoppedReason=reason)


Seen = dict[str, Any] | str
"""The head's task; or the error of Step Functions, where there is none."""


def ends(
    how: Ending, status: str, reason: str, then: str, *seen: Seen
) -> list[tuple[Ending, str, str, str, Seen]]:
    """How attempts have ended, the job's status, its reason and what comes then.

    Args:
        reason: with ``{}`` for what AWS says.
    """

    def said(each: Seen) -> str:
        return each if isinstance(each, str) else each["Containers"][0].get("Reason", "unknown")

    return [(how, status, reason.format(said(each)), then, each) for each in seen]


ENDS = [
    *ends(Ending.EXITED, "succeeded", "succeeded", END, head(0)),
    *ends(Ending.EXITED, "failed", "failed: user code exit 3", END, head(3)),
    *ends(
        *(Ending.EXITED, "failed", "failed: user code exit 1", END),
        head(1, reason="nvidia-container-cli"),
    ),
    *ends(Ending.EXITED, "files_lost", "files lost", END, head(74)),
    *ends(Ending.EXITED, "no_capacity", "no capacity", END, head(75)),
    *ends(
        *(Ending.BAD_HOST, "host_lost"),
        *("failed: its host's GPUs or EFA devices are not healthy", FAULT),
        head(76),
    ),
    *ends(
        *(Ending.EXITED, "host_lost"),
        *("failed: Ray did not start on its head, or ended there by itself", DOUBT),
        head(77),
    ),
    *ends(
        *(Ending.EXITED, "failed", "failed: asks for more than the job can have", END, head(78)),
    ),
    *ends(Ending.EXITED, "failed", "failed: hung", END, head(80)),
    *ends(
        *(Ending.EXITED, "host_lost"),
        *("failed: its storage did not answer, or a disk was full", FAULT),
        head(79),
    ),
    *ends(Ending.EXITED, "deadline", "deadline", END, head(124)),
    *ends(Ending.NOT_STARTED, "deadline", "deadline", END, "States.Timeout"),
    *ends(
        *(Ending.STOPPED, "no_capacity", "no capacity", END),
        by_user(143, stop_reason(JobStatus.NO_CAPACITY, "job j: no host within 60 s")),
    ),
    *ends(
        *(Ending.STOPPED, "stopped", "stopped by user", END),
        *(by_user(code) for code in (143, 137, *exits.TRIED_AGAIN)),
        by_user(143, "Task stopped by user"),
    ),
    *ends(
        *(Ending.STOPPED, "stopped", "its head was stopped: cost control: no capacity left", END),
        by_user(143, "cost control: no capacity left"),
    ),
    # By a sweep that found it hung, as its program may have done; what never ran is its host's.
    *ends(
        *(Ending.STOPPED, "host_lost", "failed: x", DOUBT),
        by_user(137, stop_reason(JobStatus.HOST_LOST, "x")) | {"StartedAt": 9e12},
    ),
    *ends(
        *(Ending.STOPPED, "host_lost", "failed: x", FAULT),
        by_user(137, stop_reason(JobStatus.HOST_LOST, "x")),
    ),
    *ends(Ending.EXITED, "stopped", "its command was stopped (exit code 130)", END, head(130)),
    *ends(
        *(Ending.SURPLUS, "stopped", "its command was stopped (exit code 143)", END),
        head(143, StopCode="ServiceSchedulerInitiated"),
    ),
    *ends(Ending.KILLED, "host_lost", "failed: the head was killed", DOUBT, head(137)),
    *ends(
        *(Ending.OUT_OF_MEMORY, "failed", "failed: out of memory on the head", END),
        head(137, reason="OutOfMemoryError: Container killed due to memory usage"),
    ),
    *ends(
        *(Ending.HOST_LOST, "host_lost", "failed: its host was lost", FAULT),
        head(137, StopCode="SpotInterruption"),
        head(StopCode="TerminationNotice"),
        head(StoppedReason="Host EC2 (instance i-0a) terminated."),
    ),
    *ends(
        *(Ending.HOST_FAULT, "host_lost", "failed: the head could not be started: {}", FAULT),
        not_started("CannotPullContainerError: toomanyrequests: Rate exceeded"),
        not_started("CannotPullContainerError: i/o timeout"),
        not_started("ResourceInitializationError: unable to pull secrets"),
        "ECS.AmazonECSException: Rate exceeded",
        "ECS.ServerException: x",
        "AmazonECS.Unknown: AGENT",
    ),
    *ends(
        *(Ending.BAD_HOST, "host_lost", "failed: its host is not fit: {}", FAULT),
        not_started("CannotStartContainerError: nvidia-container-cli: initialization error"),
        not_started("CannotPullContainerError: write /layer: no space left on device"),
        not_started(NO_FABRIC),
    ),
    *ends(
        *(Ending.IMAGE_NOT_FOUND, "image_not_found", "image not found: {}", END),
        not_started("CannotPullContainerError: manifest unknown"),
    ),
    *ends(
        *(Ending.NOT_STARTED, "failed", "failed: the head did not start: {}", END),
        not_started("ResourceInitializationError: secrets: ResourceNotFoundException"),
        "ECS.AccessDeniedException: no",
        not_started(""),
    ),
]


@pytest.mark.parametrize(("how", "status", "reason", "then", "seen"), ENDS)
def test_every_end_has_a_status_a_reason_and_maybe_another_attempt(
    how: Ending, status: str, reason: str, then: str, seen: Seen
) -> None:
    task, error = ({}, seen) if isinstance(seen, str) else (seen, "")
    assert ending_of(task, error) is how
    found = judged(task, error)
    assert (found.status, found.reason, found.again) == (status, reason, then != END)
    assert (found.attempts, found.in_a_row) == (60, 1)
    for in_a_row, again in ((MOST_IN_VAIN - 1, then != END), (50, then == FAULT)):
        later = judged(task, error, in_a_row=in_a_row)
        assert (later.status, later.again) == (status, again)
    assert not judged(task, error, left_s=-1).again, "nothing is tried again after the deadline"
    if not task:
        return
    # It has run for long, and saved: what was before does not count.
    ended = time.time()
    began = ended - times.LONG_RUN_S - 60
    ran = task | {"StartedAt": began * 1000, "StoppedAt": ended * 1000}
    found = judged(ran, error, in_a_row=50)
    assert (found.again, found.attempts, found.in_a_row) == (then != END, 60, 1)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("TaskFailedToStart: EMPTY CAPACITY PROVIDER", ""),
        ("Capacity is unavailable at this time", ""),
        ("", "AmazonECS.Unknown: RESOURCE:GPU"),
        ("", "AmazonECS.Unknown: No Container Instances were found in your capacity provider"),
    ],
)
def test_a_head_that_ecs_has_given_up_on_is_asked_for_again_as_long_as_the_job_waits(
    said: str, error: str
) -> None:
    task = head(StopCode="TaskFailedToStart", StoppedReason=said) if said else {}
    for in_a_row in (1, 3):
        found = judged(task, error, in_a_row=in_a_row)
        assert (found.status, found.reason) == (JobStatus.NO_CAPACITY, "no capacity")
        assert found.again, "it did not run"
        assert (found.attempts, found.in_a_row) == (59, in_a_row - 1), "and does not count"
    over = judged(task, error, patience_s=-1)
    assert (over.status, over.again) == (JobStatus.NO_CAPACITY, False)


FAILURES = [{"Arn": "a", "Reason": "RESOURCE:GPU"}]


@pytest.mark.parametrize(
    ("cause", "error"),
    [
        (json.dumps({"Failures": FAILURES, "Tasks": []}), "E: RESOURCE:GPU"),
        (json.dumps(FAILURES), "E: RESOURCE:GPU"),
        ("the role may not", "E: the role may not"),
    ],
)
def test_what_ecs_answers_about_a_task_that_it_did_not_start_is_read(
    cause: str, error: str
) -> None:
    assert head_of({"Error": "E", "Cause": cause}) == ({}, error)
