"""Proves that an S3 in trouble when a run starts, loads or publishes ends only an attempt, and that
the next one does it. Saves: ``test_storage_simulated.py``."""

import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ReadTimeoutError

from contract import exits
from tests.training.bucket import Bucket, install
from training import export, generate, launch

TROUBLE = [OSError(errno.EBUSY, "Please reduce your rate"), ReadTimeoutError(endpoint_url="s3")]


def failing(bucket: Bucket, request: str, error: Exception) -> Callable[[], None]:
    """Let a request fail; returns what ends that."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    setattr(bucket, request, fail)
    return lambda: delattr(bucket, request)


@pytest.mark.parametrize("error", TROUBLE)
@pytest.mark.parametrize("request_", ["pipe_file", "cat_file", "ls"])
def test_a_start_is_tried_again(
    request_: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    complete = SimpleNamespace(run=lambda: exits.OK)
    monkeypatch.setattr("training.runtime.driver.Driver", lambda *_, **__: complete)
    bucket = install(monkeypatch)
    words = ["ddp", "--workers", "2", "--storage", "s3://bucket", "--run", "r"]
    end = failing(bucket, request_, error)
    assert launch.main(words) == exits.STORAGE
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ")
    assert said.endswith("; check the address, or try again later")
    end()
    assert launch.main(words) == exits.OK


@pytest.mark.parametrize(
    ("command", "more"), [(export.main, ["--to", "s3://bucket/x"]), (generate.main, ["To be"])]
)
@pytest.mark.parametrize("error", TROUBLE)
def test_a_model_that_cannot_be_read_now_ends_its_command_with_a_line(
    command: Callable[[list[str]], int],
    more: list[str],
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bucket = install(monkeypatch)
    words = ["r", *more, "--storage", "s3://bucket"]
    end = failing(bucket, "exists", error)
    assert command(words) == exits.STORAGE
    (said,) = capsys.readouterr().err.splitlines()
    assert said == f"error: {error}; check the address, or try again later"
    end()
    assert command(words) == exits.BAD_INPUT
    assert "there is no run at s3://bucket/r" in capsys.readouterr().err
