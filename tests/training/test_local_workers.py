"""Proves that no signal is lost while a local run starts its workers' server, that the server
starts below any temporary folder, and that a worker reports a storage that fails
as what it is."""

import errno
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from unittest import mock

import pytest
import torch

from contract import exits
from training import recipes
from training.runtime import local, processes


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Starts a worker, and its server as the argument has it."""
    monkeypatch.setattr(local, "_METHOD", "forkserver")
    monkeypatch.setattr(local, "_CONTEXT", mock.Mock())
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def started(ensure_running: Callable[[], object]) -> None:
        monkeypatch.setattr(forkserver, "ensure_running", ensure_running)
        local.LocalWorkers(recipes.by_name("ddp"), max_failures=0, verbose=True).start(1)

    return started


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_comes_after_the_server_was_started_and_is_not_lost(
    number: signal.Signals, start: Callable[[Callable[[], object]], None]
) -> None:
    came: list[str] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def ensure_running() -> None:
        signal.raise_signal(number)
        came.append("started")

    old = signal.signal(number, lambda *_: came.append("signal"))
    try:
        start(ensure_running)
    finally:
        signal.signal(number, old)
    assert came == ["started", "signal"]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_the_servers_socket_has_a_path_that_linux_allows_whatever_tmpdir_is(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[Callable[[], object]], None]
) -> None:
    far = f"/{'far/' * 30}"
    folders: list[str] = []
    monkeypatch.setattr(tempfile, "tempdir", far)
    start(lambda: folders.append(tempfile.gettempdir()))
    assert folders == ["/tmp"]
    assert tempfile.gettempdir() == far, "all else lies where the user wants it"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "[Errno 28] No space left on device"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_worker_reports_a_storage_that_fails_in_a_sentence_and_with_its_code(
    error: OSError, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(_send: object) -> local._Done:
        raise error

    monkeypatch.setattr(processes, "end_with_parent", lambda: None)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    messages = mock.Mock()
    with pytest.raises(type(error)):
        local._run(save, messages, None, {})
    crash = messages.send.call_args.args[0]
    assert crash.text == text
    assert crash.code == exits.STORAGE


@pytest.mark.parametrize("is_touched", [False, True])
def test_workers_are_no_forks_of_a_process_that_has_touched_the_gpu(
    is_touched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after the import of torchao, which transformers imports wherever it is installed.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_touched)
    monkeypatch.setattr(local, "prepared", lambda *_, **__: None)
    monkeypatch.setattr(recipes, "config_from_json", lambda _: None)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    theirs.send(local._prepare(theirs.send, {}))
    workers = local.LocalWorkers(recipes.by_name("ddp"), max_failures=0, verbose=True)
    workers._ranks = [local._Rank(mock.Mock(sentinel=theirs, exitcode=None), ours)]
    while not workers.is_done:
        workers.poll()
    method = workers._context.get_start_method()
    assert method == ("spawn" if is_touched else local._METHOD)
