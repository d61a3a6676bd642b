"""Proves which failures of a run's workers are counted together.

What happens to a group that loses a worker as it starts is in ``test_forkserver``.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError
from ray.train import FailureConfig
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.exceptions import WorkerGroupError

from training.runtime.worker_groups import FailuresInARow

ALLOWED = 2


class Failures:
    """A run that fails again and again, and what becomes of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun_at: int | None = 0
        asked: Any = SimpleNamespace(begun_at=SimpleNamespace(remote=lambda: self.begun_at))
        monkeypatch.setattr(ray, "get", self.answer)
        self._policy = FailuresInARow(FailureConfig(max_failures=ALLOWED), asked)

    def answer(self, value: int | None, *, timeout: float) -> int:
        """What the actor says; it may have gone with its node."""
        assert timeout > 0
        if value is None:
            raise GetTimeoutError
        return value

    def resumes_after(self, begun_at: int | None) -> bool:
        """Whether the run goes on after a failure of workers that began at a checkpoint."""
        self.begun_at = begun_at
        lost = WorkerGroupError("a worker died", {0: RuntimeError("lost")})
        return bool(self._policy.make_decision(lost) == FailureDecision.RETRY)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Failures:
    return Failures(monkeypatch)


def test_a_run_that_gets_nowhere_ends(failures: Failures) -> None:
    assert [failures.resumes_after(8) for _ in range(ALLOWED + 1)] == [True] * ALLOWED + [False]


def test_a_run_that_gets_on_may_fail_as_often_as_it_likes(failures: Failures) -> None:
    assert all(failures.resumes_after(step) for step in range(0, 160, 8))
    # And has all of its failures again where it got to.
    assert [failures.resumes_after(152) for _ in range(ALLOWED)] == [True, False]


@pytest.mark.parametrize("begun_at", [None, 8], ids=["not-known", "an-earlier-checkpoint"])
def test_what_is_no_progress_is_not_taken_for_it(failures: Failures, begun_at: int | None) -> None:
    assert failures.resumes_after(16)
    assert [failures.resumes_after(begun_at) for _ in range(ALLOWED)] == [True, False]
