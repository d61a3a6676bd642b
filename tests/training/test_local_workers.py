"""Proves that no signal is lost while a local run starts its workers' server."""

import os
import signal
from multiprocessing import forkserver
from unittest import mock

import pytest

from training import recipes
from training.runtime import local


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_comes_after_the_server_was_started_and_is_not_lost(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[str] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def ensure_running() -> None:
        signal.raise_signal(number)
        came.append("started")

    monkeypatch.setattr(forkserver, "ensure_running", ensure_running)
    monkeypatch.setattr(local, "_METHOD", "forkserver")
    monkeypatch.setattr(local, "_CONTEXT", mock.Mock())
    monkeypatch.setattr(os, "environ", dict(os.environ))
    old = signal.signal(number, lambda *_: came.append("signal"))
    try:
        workers = local.LocalWorkers(recipes.by_name("ddp"), max_failures=0, verbose=True)
        workers.start(1)
    finally:
        signal.signal(number, old)
    assert came == ["started", "signal"]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
