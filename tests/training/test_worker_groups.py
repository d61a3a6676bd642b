"""Proves which failures of a run's workers are counted together.

What happens to a group that loses a worker as it starts is in ``test_forkserver``.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train import FailureConfig
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.exceptions import WorkerGroupError

from contract import nodes
from training.runtime import worker_groups
from training.runtime.worker_groups import FailuresInARow

ALLOWED = 2


class Failures:
    """A run that fails again and again, and what becomes of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun_at: int | None = 0
        asked: Any = SimpleNamespace(begun_at=SimpleNamespace(remote=lambda: self.begun_at))
        monkeypatch.setattr(ray, "get", self.answer)
        self.host_faults: list[str] = []
        self._policy = FailuresInARow(
            FailureConfig(max_failures=ALLOWED), asked, host_faults=lambda: self.host_faults
        )

    def answer(self, value: int | None, *, timeout: float) -> int:
        """What the actor says; it may have gone with its node."""
        assert timeout > 0
        if value is None:
            raise GetTimeoutError
        return value

    def resumes_after(self, begun_at: int | None, *, is_preempted: bool = False) -> bool:
        """Whether the run goes on after a failure of workers that began at a checkpoint."""
        self.begun_at = begun_at
        error = RayActorError(preempted=True) if is_preempted else RuntimeError("lost")
        lost = WorkerGroupError("a worker died", {0: error})
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


def test_a_failure_with_a_host_that_is_not_fit_is_not_counted(failures: Failures) -> None:
    failures.host_faults = ["GPU 3 (NVIDIA A100) has 2 uncorrected memory errors"]
    assert all(failures.resumes_after(8) for _ in range(5))
    failures.host_faults = []
    assert [failures.resumes_after(8) for _ in range(ALLOWED + 1)] == [True] * ALLOWED + [False]


def test_a_host_that_is_reclaimed_and_not_fit_gives_a_run_no_more_failures(
    failures: Failures,
) -> None:
    failures.host_faults = ["nvidia-smi failed: GPU is lost"]
    assert failures.resumes_after(8, is_preempted=True)
    failures.host_faults = []
    assert [failures.resumes_after(8) for _ in range(ALLOWED + 1)] == [True] * ALLOWED + [False]


def test_every_living_node_is_asked_for_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [{"NodeID": name, "Alive": name != "gone"} for name in ("a", "b", "c", "gone")]
    answers: dict[str, Any] = {"a": [], "b": ["GPU 0 is lost"], "c": None}
    monkeypatch.setattr(ray, "nodes", lambda: here)
    monkeypatch.setattr(
        worker_groups, "on_nodes", lambda _task, given, _within_s: [answers[n] for n in given]
    )
    assert worker_groups._host_faults() == [], "no container, no check"
    monkeypatch.setenv(nodes.ENV_HOST_CHECK, "/tmp/check")
    assert worker_groups._host_faults() == ["GPU 0 is lost"]
