"""Trials of a recipe's settings: what is tried, how it is compared, and what a job keeps of it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract.errors import InputError
from contract.runs import RunPaths
from training import tune
from training.record.events import Evaluation, Measure, to_json
from training.trials import Tuning, by_value, is_hopeless

ACCURACY = Measure(name="accuracy")


def test_all_combinations_are_tried_or_some_by_a_seed() -> None:
    grid = Tuning.of(["lr=0.1,0.2", "--weight_decay=0,1,2"])
    assert len(grid.trials()) == 6
    assert grid.trials()[1] == {"lr": "0.1", "weight-decay": "1"}
    drawn = Tuning.of(["lr=0.1,0.2", "wd=0,1,2"], trials="4:7")
    assert drawn.trials() == Tuning.of([*("lr=0.1,0.2", "wd=0,1,2")], trials="4:7").trials()
    assert drawn.trials() != Tuning.of(["lr=0.1,0.2", "wd=0,1,2"], trials="4:8").trials()
    assert len(drawn.runs("r")) == 4
    again = Tuning.of([each.removeprefix("--vary=") for each in drawn.words()[:2]], trials="4:7")
    assert again == drawn, "its words mean the same"


@pytest.mark.parametrize(
    ("vary", "trials", "said"),
    [
        (["lr"], "", "NAME=V1,V2"),
        (["lr=1,1"], "", "NAME=VALUE"),
        (["lr=1", "lr=2"], "", "once for each name"),
        (["lr=1,2"], "3", "at most 2"),
        (["lr=1,2"], "x", "NUMBER:SEED"),
        ([f"a{n}=1,2,3,4" for n in range(6)], "", "4096 combinations"),
    ],
)
def test_what_cannot_be_tried_is_refused(vary: list[str], trials: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Tuning.of(vary, trials=trials)


def test_two_trials_never_share_a_run() -> None:
    assert [*Tuning.of(["lr=1e-3,2e-3", "data=s3://a/b"]).runs("r")] == [
        "r-1e_3-s3_a_b",
        "r-2e_3-s3_a_b",
    ]
    for values in ("a-b,a_b", f"{'x' * 70}1,{'x' * 70}2"):
        with pytest.raises(InputError, match="two trials would be run r-"):
            Tuning.of([f"data={values}"]).runs("r")


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        ([0.1, 0.2, 0.3], [[0.2, 0.3, 0.9], [0.5, 0.6, 0.7], [0.3, 0.4, 0.2]], True),
        ([0.1, 0.2, 0.8], [[0.2, 0.3, 0.9], [0.5, 0.6, 0.7], [0.3, 0.4, 0.2]], False),
        ([0.1, 0.2], [[0.2, 0.3], [0.5, 0.6], [0.3, 0.4]], False),  # too early to tell
        ([0.1, 0.2, 0.3], [[0.2, 0.3, 0.9], [0.5, 0.6]], False),  # too few to compare with
    ],
)
def test_a_trial_is_hopeless_below_the_median_of_the_others_by_then(
    own: list[float], others: list[list[float]], expected: bool
) -> None:
    assert is_hopeless(own, others, ACCURACY) is expected
    loss = Measure(name="loss", higher_is_better=False)
    assert is_hopeless([-x for x in own], [[-x for x in each] for each in others], loss) is expected


def test_trials_without_a_value_are_last() -> None:
    rows: list[dict[str, object]] = [{"accuracy": None}, {"accuracy": 0.1}, {"accuracy": 0.9}]
    assert [each["accuracy"] for each in by_value(rows, ACCURACY)] == [0.9, 0.1, None]


class Ray:
    """Runs each task in its turn; a training reports its evaluations one by one."""

    def __init__(self, root: Path, reached: dict[str, list[float]]) -> None:
        self._root, self._reached = root, reached
        self.words: dict[str, list[str]] = {}
        self.steps: dict[str, int] = {}
        self.cancelled: list[str] = []

    def remote(self, _call: object) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._start))

    def _start(self, words: list[str]) -> str:
        run = words[words.index("--run") + 1]
        self.words[run], self.steps[run] = words, 0
        return run

    def wait(self, left: list[str], *, timeout: float) -> tuple[list[str], list[str]]:
        assert timeout
        done = [each for each in left if self._is_done(each)]
        for run in left:
            self.steps[run] += 1
            values = self._reached[run][: self.steps[run]]
            lines = [
                Evaluation(step=step, epoch=step, loss=1.0, measures={"accuracy": value})
                for step, value in enumerate(values)
            ]
            file = self._root / run / "metrics.jsonl"
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(json.dumps(to_json(each)) + "\n" for each in lines))
        return done, [each for each in left if each not in done]

    def _is_done(self, run: str) -> bool:
        return run in self.cancelled or self.steps[run] >= len(self._reached[run])

    def get(self, run: str) -> int:
        if run in self.cancelled:
            raise RuntimeError
        return int(not self._reached[run])

    def cancel(self, run: str) -> None:
        self.cancelled.append(run)


def test_a_study_keeps_a_table_and_stops_what_is_hopeless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reached = {
        "s-0.1": [0.5, 0.6, 0.7, 0.8],
        "s-0.2": [0.5, 0.7, 0.8, 0.9],
        "s-0.3": [0.4, 0.6, 0.7, 0.8],
        "s-0.4": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
        "s-0.5": [],
    }
    ray = Ray(tmp_path, reached)
    monkeypatch.setitem(__import__("sys").modules, "ray", ray)
    tuning = Tuning.of(["lr=0.1,0.2,0.3,0.4,0.5"], hopeless=True)
    study = tune.Study("s", ["ddp", "--preset", "digits"], tuning, str(tmp_path))
    assert study.run() == 0
    assert ray.cancelled == ["s-0.4"]
    assert ray.words["s-0.2"][:4] == ["ddp", "--preset", "digits", "--lr=0.2"]
    kept = json.loads(Path(RunPaths.of(str(tmp_path), "s").file("trials.json")).read_text())
    found = {each["run"]: (each["status"], each["accuracy"]) for each in kept["trials"]}
    assert found == {
        "s-0.1": ("succeeded", 0.8),
        "s-0.2": ("succeeded", 0.9),
        "s-0.3": ("succeeded", 0.8),
        "s-0.4": ("stopped", found["s-0.4"][1]),
        "s-0.5": ("failed", None),
    }
    assert study.table()[0].startswith("run=s-0.2 lr=0.2")
    assert "--lr=0.5: failed, no evaluation" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.long
def test_two_trials_train_at_a_time_with_real_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setenv("TRAIN_WORKER_CPUS", "1")
    monkeypatch.setenv("TRAIN_WORKER_GPUS", "0")
    ray.init("local", num_cpus=2, include_dashboard=False, configure_logging=False)
    try:
        words = ["ddp", "--preset", "digits", "--epochs", "1", "--workers", "1"]
        study = tune.Study("s", words, Tuning.of(["lr=0.001,0.002"]), str(tmp_path))
        assert study.run() == 0
        assert [each.status for each in study.trials] == ["succeeded"] * 2
        assert all(0 < each.reached[-1] < 1 for each in study.trials)
    finally:
        ray.shutdown()
