"""Proves that the record of a run survives kills and restarts, and says what happened."""

import json
from pathlib import Path
from typing import Any

import pytest

from training.recipes.config import DdpConfig
from training.record import record
from training.record.events import Event


class Silent:
    """A display for nobody."""

    def __init__(self) -> None:
        self.shown: list[Event] = []

    def show(self, event: Event) -> None:
        self.shown.append(event)


def config(storage: Path) -> DdpConfig:
    return DdpConfig(recipe="ddp", run="r", storage=str(storage), data="digits", global_batch=64)


def opened(folder: Path) -> record.RunRecord:
    folder.mkdir(exist_ok=True)
    return record.RunRecord(str(folder), config(folder.parent), {"python": "3"}, Silent())


def start(step: int = 0, *, resumed: bool = False) -> Event:
    return {
        "type": "start",
        "step": step,
        "resumed": resumed,
        "world_size": 2,
        "global_batch": 64,
        "items": "images",
        "items_per_step": 64,
        "steps_per_epoch": 4,
        "total_steps": 8,
        "parameters": 10,
        "trained_parameters": 5,
        "device": "CPU",
        "precision": "fp32",
    }


def step(number: int, loss: float = 1.0) -> Event:
    return {"type": "step", "step": number, "loss": loss, "time": float(number)}


def evaluation(epoch: int, rate: float = 100.0) -> Event:
    return {
        "type": "evaluation",
        "epoch": epoch,
        "step": 4 * epoch,
        "loss": 1 / epoch,
        "accuracy": 0.5,
        "images_per_s": rate,
        "seconds": float(epoch),
        "flops_per_s": 1e9,
        "mfu": None,
    }


def finished() -> Event:
    return {
        "type": "finished",
        "step": 8,
        "loss": 0.5,
        "accuracy": 0.5,
        "seconds": 2.0,
        "evaluation": {"class_names": ["a"], "confusion_matrix": [[1]], "samples": []},
    }


def metrics_of(folder: Path) -> list[Event]:
    return record.read_lines(folder / "metrics.jsonl")


def result_of(folder: Path) -> dict[str, Any]:
    found = record.read_json(str(folder), "result.json")
    assert found is not None
    return found


def test_a_run_that_ends_leaves_every_file_of_its_record(tmp_path: Path) -> None:
    kept = opened(tmp_path / "r")
    events = [start(), *map(step, range(1, 5)), evaluation(1, 90.0), *map(step, range(5, 9))]
    for event in [*events, evaluation(2, 110.0), finished()]:
        kept.handle(event)
    report = kept.close()
    assert report == tmp_path / "r" / "report.html"
    assert kept.is_complete
    result = result_of(tmp_path / "r")
    assert result["status"] == "succeeded"
    assert result["images_per_s"] == 100.0
    assert (result["steps"], result["world_size"], result["resumed_from"]) == (8, 2, None)
    names = {path.name for path in (tmp_path / "r").iterdir()}
    assert names >= {"config.json", "environment.json", "evaluation.json", "metrics.jsonl"}
    assert names >= {"result.json", "report.html", "plots"}
    assert [line["step"] for line in metrics_of(tmp_path / "r") if line["type"] == "step"] == [
        *range(1, 9)
    ]


def test_lines_after_the_checkpoint_are_dropped_when_a_run_resumes(tmp_path: Path) -> None:
    killed = opened(tmp_path / "r")
    for event in [
        start(),
        *(step(n, loss=1.0) for n in range(1, 5)),
        evaluation(1),
        step(5),
        step(6),
    ]:
        killed.handle(event)
    with (tmp_path / "r" / "metrics.jsonl").open("a") as file:
        file.write('{"type": "step", "st')  # killed while it wrote

    resumed = opened(tmp_path / "r")
    for event in [start(4, resumed=True), *(step(n, loss=2.0) for n in range(5, 9))]:
        resumed.handle(event)
    resumed.handle(evaluation(2))
    resumed.handle(finished())
    lines = metrics_of(tmp_path / "r")
    steps = [line for line in lines if line["type"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert [line["loss"] for line in steps] == [1.0] * 4 + [2.0] * 4
    assert [line for line in lines if line["type"] == "resume"] == [
        {"type": "resume", "step": 4, "world_size": 2, "checkpoint": "step-00000004"}
    ]
    assert result_of(tmp_path / "r")["resumed_from"] == 4


def test_a_worker_lost_on_the_way_does_not_make_the_attempt_a_resumed_one(tmp_path: Path) -> None:
    kept = opened(tmp_path / "r")
    for event in [start(), *map(step, range(1, 5)), evaluation(1), step(5)]:
        kept.handle(event)
    for event in [start(4, resumed=True), *map(step, range(5, 9)), evaluation(2), finished()]:
        kept.handle(event)
    assert result_of(tmp_path / "r")["resumed_from"] is None
    lines = metrics_of(tmp_path / "r")
    assert [line["step"] for line in lines if line["type"] == "step"] == list(range(1, 9))


def test_hosts_that_were_taken_away_are_counted_over_all_attempts(tmp_path: Path) -> None:
    def taken(*nodes: str) -> Event:
        return {"type": "preempted", "nodes": [*nodes], "time": 1.0}

    kept = opened(tmp_path / "r")
    # The host goes; the workers start again within this attempt.
    for event in [start(), *map(step, range(1, 5)), taken("a"), start(4, resumed=True)]:
        kept.handle(event)
    # The head is lost as well: another process keeps the record from here on.
    again = opened(tmp_path / "r")
    for event in [start(4, resumed=True), step(5), taken("b", "c"), evaluation(2), finished()]:
        again.handle(event)
    assert result_of(tmp_path / "r")["preempted"] == 3


def test_a_stopped_run_has_a_result_and_a_report_of_what_there_is(tmp_path: Path) -> None:
    kept = opened(tmp_path / "r")
    for event in [start(), *map(step, range(1, 5)), evaluation(1), step(5)]:
        kept.handle(event)
    kept.handle({"type": "stopped", "step": 5})
    assert kept.close() == tmp_path / "r" / "report.html"
    result = result_of(tmp_path / "r")
    assert (result["status"], result["steps"], result["accuracy"]) == ("stopped", 5, 0.5)


def test_a_failed_run_names_its_error(tmp_path: Path) -> None:
    kept = opened(tmp_path / "r")
    kept.handle(start())
    kept.handle({"type": "error", "message": "training diverged at step 3"})
    kept.close()
    result = result_of(tmp_path / "r")
    assert (result["status"], result["error"]) == ("failed", "training diverged at step 3")


def test_a_run_that_never_started_gets_no_result(tmp_path: Path) -> None:
    kept = opened(tmp_path / "r")
    kept.handle({"type": "error", "message": "no data"})
    assert kept.close() is None
    assert record.read_json(str(tmp_path / "r"), "result.json") is None


def test_unreadable_files_of_a_record_are_taken_for_missing(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{")
    (tmp_path / "config.json").write_text("[]")
    for name in ("result.json", "config.json", "none.json"):
        assert record.read_json(str(tmp_path), name) is None


def test_the_environment_names_machine_and_versions() -> None:
    found = record.environment()
    assert found["torch"].startswith("2.")
    assert found["cores"] >= 1
    assert json.dumps(found)


@pytest.mark.slow
def test_a_record_in_s3_is_up_to_date_after_every_epoch(s3_endpoint: str) -> None:
    del s3_endpoint  # the environment points at it
    from training import storage

    storage.filesystem("s3://").mkdir("s3://record-test")
    uri = "s3://record-test/runs/r"
    kept = record.RunRecord(uri, config(Path("/unused")), {}, Silent())
    for event in [start(), *map(step, range(1, 5)), evaluation(1), step(5)]:
        kept.handle(event)
    lines = (storage.read_bytes(f"{uri}/metrics.jsonl") or b"").decode().splitlines()
    assert len(lines) == 5
    resumed = record.RunRecord(uri, config(Path("/unused")), {}, Silent())
    for event in [start(4, resumed=True), *map(step, range(5, 9)), evaluation(2), finished()]:
        resumed.handle(event)
    resumed.close()
    assert storage.exists(f"{uri}/report.html")
    assert storage.exists(f"{uri}/plots/loss.png")
    assert not resumed.folder.exists()
    found = record.read_json(uri, "result.json")
    assert found is not None
    assert found["resumed_from"] == 4
