"""S3 client for a program's files, and for what a head records there."""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError

from containers.host.machine import Clock
from containers.host.machine import say as say_to_log
from containers.program.requirements import Stopped
from contract import faults, runs, times
from contract.errors import InputError, UnreachableError
from training.record.goodput import Activity, Recorder

#: Uploads and downloads at a time: many small files wait for answers and not for the network.
PARALLEL: Final = 8
#: Exceptions of a call that the bucket does not answer, or refuses.
ERRORS: Final = (BotoCoreError, ClientError, OSError)
#: Between two attempts; doubled from one to the next.
PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 10.0
_NOT_RESTORED: Final = "the files of the run cannot be restored"
_MISSING: Final = ("NoSuchKey", "404")

T = TypeVar("T")


class Bucket:
    """Objects below ``address``, ``s3://BUCKET/PREFIX``.

    S3 checks what arrives by boto3's own checksum; what is read is checked by its key.
    """

    def __init__(self, address: str, client: Any = None) -> None:
        """``client``: of S3; boto3's by default."""
        parts = urlsplit(address)
        assert parts.scheme == "s3", address
        assert parts.netloc, address
        self.address = address.rstrip("/")
        self.client = client or _client()
        self._name, self._prefix = parts.netloc, f"{parts.path.strip('/')}/".lstrip("/")

    def put(self, key: str, content: bytes, **condition: str) -> None:
        """Write an object."""
        self.client.put_object(Bucket=self._name, Key=self._prefix + key, Body=content, **condition)

    def create(self, key: str, content: bytes) -> bool:
        """Write an object unless there is one; return whether it was written."""
        try:
            self.put(key, content, IfNoneMatch="*")
        except ClientError as error:
            if not faults.is_taken(error):
                raise
            return False
        return True

    def get(self, key: str) -> bytes | None:
        """Content of an object; None if there is none."""
        try:
            answer = self.client.get_object(Bucket=self._name, Key=self._prefix + key)
        except ClientError as error:
            if faults.code_of(error) in _MISSING:
                return None
            raise
        return bytes(answer["Body"].read())

    def list(self, prefix: str) -> list[str]:
        """Keys that begin with ``prefix``."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self._name, Prefix=self._prefix + prefix
        )
        found = [each["Key"] for page in pages for each in page.get("Contents", [])]
        return [key.removeprefix(self._prefix) for key in found]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; nothing happens where there is none."""
        for start in range(0, len(keys), 1000):  # as many as S3 takes at a time
            listed = [{"Key": self._prefix + key} for key in keys[start : start + 1000]]
            self.client.delete_objects(Bucket=self._name, Delete={"Objects": listed, "Quiet": True})


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
    raise Stopped


def report(reason: str, *, storage: str, run: str, job: str, client: Any = None) -> None:
    """Say why a job ends: in the log, and to the function that writes its outcome.

    Args:
        reason: of the outcome, in words that begin with its status.
        storage: ``s3://BUCKET``; another one: nothing is kept.
        client: of S3; boto3's by default.
    """
    say_to_log(f"{'warning' if reason.startswith('succeeded') else 'error'}: {reason}")
    if not storage.startswith("s3://"):
        return
    try:
        Bucket(storage, client).put(
            # A file's name in it need not be UTF-8.
            runs.job_reason(run, job),
            " ".join(reason.splitlines()).encode(errors="replace"),
        )
    except ERRORS as error:
        say_to_log(f"the outcome cannot tell: {faults.text(error)}")


def open_recorder(storage: str, run: str, job: str, *, client: Any = None) -> Recorder:
    """Recorder of a job's activity, which continues what earlier heads of the job have written."""
    earlier = None
    with contextlib.suppress(*ERRORS, ValueError):
        content = Bucket(f"{storage}/{runs.run_prefix(run)}", client).get(runs.job_activity(job))
        earlier = Activity.from_json(json.loads(content or b"{}"))
    return Recorder(earlier)


def write_records(
    storage: str, run: str, records: Mapping[str, object], *, client: Any = None
) -> None:
    """Write JSON files into a run's folder, as far as the bucket takes them."""
    with contextlib.suppress(*ERRORS):
        folder = Bucket(f"{storage}/{runs.run_prefix(run)}", client)
        for name, content in records.items():
            folder.put(name, json.dumps(content).encode())
