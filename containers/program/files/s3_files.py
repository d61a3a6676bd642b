"""S3 client for a program's files, and for what a head records there."""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from containers.host.machine import Clock
from containers.host.machine import say as say_to_log
from contract import faults, runs, times
from contract.errors import InputError, UnreachableError
from contract.secret_text import masked
from store.bucket import Bucket
from training.record.goodput import Activity, Recorder

#: Uploads and downloads at a time: many small files wait for answers and not for the network.
PARALLEL: Final = 8
#: Exceptions of a call that the bucket does not answer, or refuses.
ERRORS: Final = (BotoCoreError, ClientError, OSError)
#: Between two attempts; doubled from one to the next.
PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 10.0
_NOT_RESTORED: Final = "the files of the run cannot be restored"

T = TypeVar("T")


class PreparationStopped(Exception):  # noqa: N818 - no error: the node was told to end
    """Preparation was interrupted because the node has to end."""


def open_bucket(uri: str, client: Any = None) -> Bucket:
    """Objects below ``s3://BUCKET/PREFIX``.

    Args:
        client: of S3; by default one whose calls take seconds.
    """
    return Bucket(uri, client or _client())


def _client() -> Any:
    import boto3
    from botocore.config import Config

    # Short, because what waits for it may have seconds left; what fails is tried again anyway.
    config = Config(
        retries={"mode": "standard", "total_max_attempts": 4},
        connect_timeout=5,
        read_timeout=20,
        max_pool_connections=2 * PARALLEL,
    )
    return boto3.client("s3", config=config)


# --- errors
def until_answered(
    call: Callable[[], T],
    *,
    say: Callable[[str], None],
    clock: Clock = time,
    should_stop: Callable[[], bool] = lambda: False,
) -> T:
    """Call until the bucket answers.

    Args:
        should_stop: asked before each attempt.

    Raises:
        InputError: the bucket refuses for longer than ``times.FILES_REFUSED_S``, or holds what it
            should not. To start without the files would be to lose them.
        UnreachableError: it does not answer, or the disk fails, for as long.
        Stopped: ``should_stop`` returned true.
    """
    began, pause = clock.monotonic(), PAUSE_S
    while not should_stop():
        try:
            return call()
        except (*ERRORS, InputError) as error:
            reason = faults.text(error)
            is_over = clock.monotonic() - began > times.FILES_REFUSED_S
            if is_over and faults.is_passing(error):
                raise UnreachableError(f"{_NOT_RESTORED}: {reason}") from None
            if is_over or isinstance(error, InputError):
                raise InputError(
                    f"{_NOT_RESTORED}: {reason}. The program is not started without its files: "
                    "submit the run again, or under another name to start afresh"
                ) from None
        if pause == PAUSE_S:
            say(f"{_NOT_RESTORED}: {reason}; trying again")
        clock.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    raise PreparationStopped


def report(reason: str, *, storage: str, run: str, job: str, client: Any = None) -> None:
    """Say why a job ends: in the log, and to the function that writes its outcome.

    Args:
        reason: of the outcome, in words that begin with its status.
        storage: ``s3://BUCKET``; another one: nothing is kept.
        client: of S3; boto3's by default.
    """
    reason = masked(reason)  # the outcome is kept, and shown to others
    say_to_log(f"{'warning' if reason.startswith('succeeded') else 'error'}: {reason}")
    if not storage.startswith("s3://"):
        return
    try:
        open_bucket(storage, client).put(
            # A file's name in it need not be UTF-8.
            runs.job_reason(run, job),
            " ".join(reason.splitlines()).encode(errors="replace"),
        )
    except ERRORS as error:
        say_to_log(f"the outcome cannot tell: {faults.text(error)}")


def open_recorder(storage: str, run: str, job: str) -> Recorder:
    """Recorder of a job's activity, which continues what earlier heads of the job have written."""
    earlier = None
    with contextlib.suppress(*ERRORS, ValueError):
        folder = open_bucket(f"{storage}/{runs.run_prefix(run)}")
        content = folder.get(runs.job_activity(job))
        earlier = Activity.from_json(json.loads(content or b"{}"))
    return Recorder(earlier)


def write_records(storage: str, run: str, records: Mapping[str, object]) -> None:
    """Write JSON files into a run's folder, as far as the bucket takes them."""
    with contextlib.suppress(*ERRORS):
        folder = open_bucket(f"{storage}/{runs.run_prefix(run)}")
        for name, content in records.items():
            folder.put(name, json.dumps(content).encode())
