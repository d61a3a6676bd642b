"""``trainctl study``: a job for each number of nodes, one after the other, and what they show."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.job import JobSpec
from contract.nodes import Range
from tests.trainctl.account import Account
from tests.training.test_study import stretch
from trainctl.__main__ import main
from training.record.events import to_json
from training.study.draw import FIGURES_FILE, PICTURE_FILE

PHASES = {"data": 0.01, "forward": 0.03, "backward": 0.05, "optimizer": 0.01}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the study is written."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trains(
    account: Account, monkeypatch: pytest.MonkeyPatch, *, fails_at: int = 0, slower: str = "-"
) -> None:
    """Every job ends at once and has trained; a node has 4 workers. The one with ``fails_at`` nodes
    finds no hosts; those with ``slower`` in their names take twice the time."""
    start = account.on_start_execution

    def ended(*, name: str, input: str, **more: Any) -> Any:
        answer = start(name=name, input=input, **more)
        order = JobSpec.from_json(input)
        nodes = order.nodes.high
        failed = nodes == fails_at
        outcome = {"status": "no_capacity" if failed else "succeeded", "reason": "no hosts"}
        account.executions[name] |= {
            "status": "FAILED" if failed else "SUCCEEDED",
            "stopDate": account.now,
            "output": json.dumps(outcome),
            "cause": json.dumps(outcome),
        }
        # The second node makes backward twice as long.
        times = 2 if f"-{slower}-" in order.run else 1
        phases = {**PHASES, "backward": 0.05 * nodes}
        phases = {name: times * seconds for name, seconds in phases.items()}
        events = stretch(1, 4 * nodes, phases) + stretch(2, 4 * nodes, phases)
        lines = "".join(json.dumps(to_json(each)) + "\n" for each in events)
        account.objects[f"runs/{order.run}/metrics.jsonl"] = lines.encode()
        return answer

    monkeypatch.setattr(account, "on_start_execution", ended)


def orders(account: Account) -> list[JobSpec]:
    return [JobSpec.from_json(each["input"]) for each in account.sent("start_execution")]


def test_each_number_of_nodes_is_a_job_of_the_same_training(
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    here: Path,
) -> None:
    trains(account, monkeypatch)
    given = ["study", "ddp", "--nodes", "2,1", "--steps", "200", "--batch-per-worker", "64"]
    assert main([*given, "--max-hours", "1", "--env", "OMP_NUM_THREADS=1", "--yes"]) == 0
    said = capsys.readouterr()
    one, two = orders(account)
    assert one.variables["OMP_NUM_THREADS"] == two.variables["OMP_NUM_THREADS"] == "1"
    assert (one.run, two.run) == ("study-ddp-1", "study-ddp-2")
    assert (one.nodes.high, two.nodes.high) == (1, 2)
    assert one.max_seconds == 3600
    assert [*one.command[-4:]] == ["--batch-per-worker", "64", "--max-steps", "200"]
    assert "2 jobs, one after the other; at most $" in said.err
    (found,) = json.loads((here / "study-ddp" / FIGURES_FILE).read_text())
    small, large = found["points"]
    assert (small["nodes"], small["workers"], large["workers"]) == (1, 4, 8)
    assert large["efficiency"] == pytest.approx(0.1 * 25 * 4 / (0.15 * 12 * 8))
    assert one.prices is not None
    hourly = one.prices.usd_per_hour(1)
    assert hourly is not None
    assert small["usd_per_epoch"] == pytest.approx(hourly * 0.1 * 25 / 3600)
    assert (here / "study-ddp" / PICTURE_FILE).is_file()
    assert found["bottleneck"] in said.out


def test_two_networks_are_two_series_of_the_same_training(
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    here: Path,
) -> None:
    account.shape |= {"worker_instance_type": "p4d.24xlarge", "efa": True}
    trains(account, monkeypatch, slower="tcp")
    assert main(["study", "ddp", "--nodes", "1,2", "--network", "efa,tcp", "--yes"]) == 0
    found = orders(account)
    assert [each.run for each in found] == [
        *("study-ddp-efa-1", "study-ddp-efa-2", "study-ddp-tcp-1", "study-ddp-tcp-2")
    ]
    assert [each.variables for each in found] == [{}, {}, *[{"NCCL_NET": "Socket"}] * 2]
    efa, tcp = json.loads((here / "study-ddp" / FIGURES_FILE).read_text())
    assert (efa["network"], tcp["network"]) == ("efa", "tcp")
    said = capsys.readouterr().out
    assert "With 8 workers an epoch over efa takes 50% of the time that it takes over tcp." in said


def test_given_again_it_starts_nothing_that_has_succeeded(
    account: Account, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trains(account, monkeypatch)
    assert main(["study", "ddp", "--nodes", "1", "--yes"]) == 0
    assert main(["study", "ddp", "--nodes", "1,2", "--json", "--yes"]) == 0
    assert [each.run for each in orders(account)] == ["study-ddp-1", "study-ddp-2"]
    said = capsys.readouterr()
    assert said.err.count("1 job; at most $") == 2
    (found,) = json.loads(said.out[said.out.index("[\n") :])
    assert len(found["points"]) == 2


def test_with_other_settings_it_is_another_study(
    account: Account, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trains(account, monkeypatch)
    assert main(["study", "ddp", "--nodes", "1", "--yes", "--steps", "60"]) == 0
    assert main(["study", "ddp", "--nodes", "1", "--yes", "--steps", "90"]) == 2
    assert (
        "run study-ddp-1 is of another study, of ddp --max-steps 60: give this one a --name"
        in capsys.readouterr().err
    )


def test_a_run_of_own_code_is_no_part_of_a_study(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    order = JobSpec(run="study-ddp-1", command=("python", "mine.py"), nodes=Range(1, 1))
    account.add("job", run="study-ddp-1", input=order.to_json())
    assert main(["study", "ddp", "--nodes", "1", "--yes"]) == 2
    assert "run study-ddp-1 is of another study, of python mine.py" in capsys.readouterr().err


def test_a_job_that_fails_ends_it_and_what_the_others_showed_is_shown(
    account: Account, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trains(account, monkeypatch, fails_at=2)
    assert main(["study", "ddp", "--nodes", "1,2,4", "--yes"]) == 1
    said = capsys.readouterr()
    assert "of 2 nodes: no hosts. Its log: trainctl logs" in said.err
    assert "the same command continues the study" in said.err
    assert "One number of workers tells nothing about scaling" in said.out
    assert len(orders(account)) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a recipe and its settings"),
        (["bandwidth"], "bandwidth trains nothing"),
        (["ddp", "--nodes", "1:2"], "--nodes is '1:2': give numbers with commas"),
        (["ddp", "--nodes", "1,9"], "--nodes is 9: this deployment takes"),
        (["ddp", "--workers", "2"], "there is no option --workers here"),
        (["ddp", "--epoch", "2"], "did you mean --epochs?"),
        (["ddp", "--network", "ib"], "--network is 'ib': give efa or tcp, or both: efa,tcp"),
        (["ddp", "--network", "efa,tcp"], "the hosts of this deployment have no EFA"),
        (["ddp"], "stdin is not a terminal"),
    ],
    ids=[
        "recipe",
        "bandwidth",
        "range",
        "too many",
        "workers",
        "setting",
        "network",
        "no efa",
        "unasked",
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    account: Account, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", *words]) == 2
    assert message in capsys.readouterr().err
    assert account.changes == []
