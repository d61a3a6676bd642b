"""Proves which failures of a run's workers are counted together, here and around Ray Train."""

import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train
from ray.exceptions import GetTimeoutError
from ray.train.v2._internal import exceptions

from contract import exits, nodes
from contract.errors import UnreachableError
from contract.job import JobSpec
from contract.nodes import Range
from store import storage
from training import recipes
from training.record.events import Event, Failed
from training.runtime import local, outcome, torchrun, trainer
from training.runtime.outcome import Failures
from training.runtime.trainer import Submission
from training.settings import RunConfig

ALLOWED = 2


@pytest.mark.parametrize(
    ("begun_at", "ends"),
    [
        ([8, 8, 8], [False, False, True]),
        # It makes progress, and has all of its failures again where it got to.
        ([*range(0, 160, 8), 152, 152], [False] * 21 + [True]),
        # An earlier checkpoint is no progress.
        ([16, 8, 8], [False, False, True]),
    ],
)
def test_only_failures_without_progress_end_a_run(begun_at: list[int], ends: list[bool]) -> None:
    failures = Failures(ALLOWED)
    assert [failures.is_one_too_many(step) for step in begun_at] == ends


class RayTrain:
    """Ray Train whose workers fail again and again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fits = 0
        self.ends_after = 0
        """How many failures there are before it succeeds; 0: it never does."""
        self.begun_at: int | None = 8
        self.host_faults: list[str] = []
        self.error: Exception = ray.train.TrainingFailedError("a worker died")
        monkeypatch.setattr(trainer, "_trainer", lambda *_: self)
        monkeypatch.setattr(trainer, "_take_over", lambda _: None)
        monkeypatch.setattr(trainer, "_host_faults", lambda: self.host_faults)
        monkeypatch.setattr(trainer, "_free_places", lambda: None)
        monkeypatch.setattr(trainer, "_wait_for_places", lambda _: None)
        monkeypatch.setattr(ray, "get", self.answer)

    def fit(self) -> None:
        self.fits += 1
        if self.fits > self.ends_after > 0:
            return
        raise self.error

    def answer(self, value: int | None, *, timeout: float) -> int:
        """What the actor says; it may have gone with its node."""
        assert timeout > 0
        if value is None:
            raise GetTimeoutError
        return value

    def train(self) -> str | UnreachableError:
        config: Any = RunConfig
        events = SimpleNamespace(begun_at=SimpleNamespace(remote=lambda: self.begun_at))
        submission = Submission(
            config=config,
            run_uri="",
            fence=0,
            workers=Range(1, 1),
            max_failures=ALLOWED,
            environment={},
            folder="",
        )
        return trainer.fit(submission, events)


@pytest.fixture
def ray_train(monkeypatch: pytest.MonkeyPatch) -> RayTrain:
    return RayTrain(monkeypatch)


@pytest.mark.parametrize("begun_at", [8, None], ids=["known", "not known"])
def test_failures_in_a_row_end_a_run_under_ray_train(
    ray_train: RayTrain, begun_at: int | None
) -> None:
    ray_train.begun_at = begun_at
    assert ray_train.train() == "a worker died"
    assert ray_train.fits == ALLOWED + 1


def test_a_failure_with_a_host_that_is_not_fit_is_not_counted(ray_train: RayTrain) -> None:
    ray_train.host_faults = ["GPU 3 (NVIDIA A100) has 2 uncorrected memory errors"]
    ray_train.ends_after = 9
    assert ray_train.train() == ""
    assert ray_train.fits == 10


def test_every_living_node_is_asked_for_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [{"NodeID": name, "Alive": name != "gone"} for name in ("a", "b", "c", "gone")]
    answers: dict[str, Any] = {"a": [], "b": ["GPU 0 is lost"], "c": None}
    monkeypatch.setattr(ray, "nodes", lambda: here)
    monkeypatch.setattr(
        trainer, "on_nodes", lambda _task, given, _within_s: [answers[n] for n in given]
    )
    assert trainer._host_faults() == [], "no container, no check"
    monkeypatch.setenv(nodes.ENV_HOST_CHECK, "/tmp/check")
    assert trainer._host_faults() == ["GPU 0 is lost"]


def test_a_worker_that_is_forked_after_its_command_has_ended_does_nothing(tmp_path: Path) -> None:
    """Ctrl-C while torch is loaded: the server of the workers forks them a moment later."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    removed = tmp_path / "removed" / "rank-0.log"
    worker = context.Process(target=local._run, args=(lambda _: "trained", theirs, removed, {}))
    worker.start()
    theirs.close()
    worker.join(timeout=60)
    assert worker.exitcode == 0
    with pytest.raises(EOFError):
        ours.recv()


def test_a_disk_without_room_ends_a_run_at_once_and_a_job_may_try_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(_worker: object, _config: object) -> None:
        raise storage.FullError("/runs has no room")

    worker = SimpleNamespace(saves=SimpleNamespace(finish=lambda: None))
    recipe: Any = SimpleNamespace(train=lambda: train)
    monkeypatch.setattr(torchrun, "TorchrunWorker", lambda **_: worker)
    monkeypatch.setattr(outcome, "introduce", lambda *_, **__: [])
    monkeypatch.setattr(recipes, "config_from_json", lambda _: SimpleNamespace(recipe="ddp"))
    monkeypatch.setattr(recipes, "by_name", lambda _: recipe)
    sent: list[Event] = []
    local._train(sent.extend, {}, "/runs/r", 1, "")  # no crash: all would start again
    assert sent == [Failed(message="/runs has no room", code=exits.STORAGE)]


@pytest.mark.parametrize(
    ("least", "job", "cluster", "waits"),
    [
        # Whole hosts of a job without GPUs; its GPUs; a cluster of the user's own.
        (2, {"CPU": 4, "GPU": 0}, [{}, {"CPU": 4}, {"CPU": 8}], 2),
        (2, {"CPU": 4, "GPU": 1}, [{"GPU": 1}, {"GPU": 2}], 1),
        (None, None, [{"CPU": 1}, {"CPU": 2}], 1),
        # Its nodes come only when Ray Train asks for them.
        (0, {"CPU": 4, "GPU": 0}, [{}], 0),
    ],
)
def test_ray_train_starts_when_there_is_room_for_the_fewest_workers(
    least: int | None,
    job: dict[str, int] | None,
    cluster: list[dict[str, int]],
    waits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if least is not None:
        spec = JobSpec(run="r", command=("x",), nodes=Range(least, 2))
        monkeypatch.setenv(nodes.ENV_JOB_SPEC, spec.to_json())
    slept: list[float] = []
    monkeypatch.setattr(trainer, "_job_hosts", lambda: job)
    monkeypatch.setattr(ray, "cluster_resources", lambda: cluster[len(slept)])
    monkeypatch.setattr(time, "sleep", slept.append)
    trainer._wait_for_places(2)
    assert len(slept) == waits


def test_waiting_for_hosts_is_no_failure(ray_train: RayTrain) -> None:
    ray_train.error = ray.train.ControllerError(exceptions.WorkerGroupStartupTimeoutError(2))
    ray_train.ends_after = 9
    assert ray_train.train() == ""
