"""Proves that a save that fails costs no training: it is told, and the next one is tried; too many
in a row, or one that can never succeed, end the run. None begins before its steps are recorded."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train.torch
import torch

from contract.errors import InputError
from store import storage
from training.checkpoint.dcp import Share
from training.loop.saving import Saves
from training.record.events import Event, Saved, Saving, Warned
from training.runtime import ray_worker, trainer


@pytest.fixture
def told() -> list[Event]:
    return []


@pytest.fixture
def saves(told: list[Event]) -> Saves:
    return Saves(lambda *events: told.extend(events))


def fails(error: Exception) -> Callable[[], str]:
    def write() -> str:
        raise error

    return write


SLOW_DOWN = OSError(16, "Please reduce your request rate.\nmore")


FULL = storage.FullError("/runs has no room")


@pytest.mark.parametrize(
    ("errors", "retry", "tries", "raised"),
    [
        # The next one is tried, and two in a row that fail are not too many.
        ([SLOW_DOWN, SLOW_DOWN, None, SLOW_DOWN, SLOW_DOWN], False, 5, None),
        ([SLOW_DOWN] * 3, False, 3, OSError),
        # The last save is tried again before the run says that it is saved, but not on a full disk.
        ([SLOW_DOWN, None], True, 2, None),
        ([SLOW_DOWN] * 2, True, 2, OSError),
        ([FULL, FULL], True, 2, storage.FullError),
    ],
    ids=["some fail", "three in a row", "the last", "the last twice", "a full disk"],
)
def test_a_save_that_fails_is_told_and_only_too_many_end_the_run(
    errors: list[Exception | None],
    retry: bool,
    tries: int,
    raised: type[Exception] | None,
    saves: Saves,
    told: list[Event],
) -> None:
    left = [*errors]

    def write() -> str:
        if error := left.pop(0):
            raise error
        return "kept"

    is_tried_again = retry and errors[0] is SLOW_DOWN
    for number in range(1 if is_tried_again else len(errors)):
        saves.start(10 * number + 10, write)
    with pytest.raises(raised) if raised else nullcontext():
        saves.finish(retry=retry)
    assert len(errors) - len(left) == tries
    warnings = [each.message for each in told if isinstance(each, Warned)]
    assert len(warnings) == len([each for each in errors if each]) - bool(raised)
    assert not any("\n" in each for each in warnings)


def test_what_trying_again_cannot_help_ends_the_run_at_once(saves: Saves) -> None:
    saves.start(10, fails(InputError("taken over")))
    while saves.is_saving:
        time.sleep(0.01)
    with pytest.raises(InputError, match="taken over"):
        saves.look()


def test_a_save_that_is_waited_for_is_reported_with_the_bytes_written_so_far(
    told: list[Event], tmp_path: Path, group: Any
) -> None:
    is_slow, goes_on = threading.Event(), threading.Event()

    begun = storage.Written.total
    share = Share().copy({"w": torch.ones(3)})
    share.plan(group)

    def emit(*events: Event) -> None:
        told.extend(events)
        if len(told) == 3:
            is_slow.set()
        if any(isinstance(each, Saving) and each.written > begun for each in events):
            goes_on.set()

    def write() -> str:
        assert is_slow.wait(10)
        share.write(str(tmp_path), 0)
        assert goes_on.wait(10)
        return "kept"

    saves = Saves(emit, report_every_s=0.05)
    saves.start(7, write)
    saves.finish()
    reported = [(each.step, each.written) for each in told if isinstance(each, Saving)]
    assert told[len(reported) :] == [Saved(step=7)], "nothing failed"
    assert reported[:3] == [(7, begun)] * 3
    assert reported[-1] == (7, begun + (tmp_path / "__0_0.distcp").stat().st_size)


def test_under_ray_a_save_begins_when_the_command_has_recorded_what_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events, done = trainer._Events(), list[str]()
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)

    def call(name: str) -> Any:
        return SimpleNamespace(remote=getattr(events, name))

    def sleep(_seconds: float) -> None:
        done.append("takes" if events.take() else "asks again")

    def write() -> str:
        done.append("saves")
        return "kept"

    monkeypatch.setattr(ray, "get", lambda value: value)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(ray_worker, "time", SimpleNamespace(sleep=sleep))
    actor = SimpleNamespace(put=call("put"), counts=call("counts"))
    worker = ray_worker.RayWorker(run_uri="", fence=1, events=actor)
    worker.saves.start(7, write)
    worker.saves.finish()
    assert done == ["takes", "asks again", "saves"]
