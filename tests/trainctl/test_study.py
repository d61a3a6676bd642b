"""``examples/study.py``: a job for each number of nodes, one after the other, and their figures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from contract.job import JobSpec
from examples import study
from tests.trainctl.account import Account
from trainctl.api import Job
from training.record.events import Event, RankTimes, Step, to_json
from training.record.fields import Rate

PHASES = {"data": 0.01, "forward": 0.03, "backward": 0.05, "optimizer": 0.01}
#: Steps of an epoch with one worker; a node has 4.
STEPS_PER_EPOCH = 100


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the study is written."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stretch(
    epoch: int, workers: int, phases: Mapping[str, float], *, slowest_s: float = 0.0
) -> list[Event]:
    """An epoch's times; the last rank is slower than the others by ``slowest_s``."""
    return [
        RankTimes(
            step=epoch * STEPS_PER_EPOCH // workers,
            epoch=epoch,
            rank=rank,
            step_time_s=sum(phases.values()) + slowest_s * (rank == workers - 1),
            phases=phases,
            communication_s=0.02,
            rate=Rate(items="images", per_s=64 / sum(phases.values())),
        )
        for rank in range(workers)
    ]


def recorded(account: Account, run: str, events: list[Event]) -> None:
    lines = "".join(json.dumps(to_json(each)) + "\n" for each in events)
    account.objects[f"runs/{run}/metrics.jsonl"] = lines.encode()


def trains(
    account: Account, monkeypatch: pytest.MonkeyPatch, *, fails_at: int = 0, slower: str = "-"
) -> None:
    """Every job ends at once and has trained. The one with ``fails_at`` nodes finds no hosts; those
    with ``slower`` in their names take twice the time."""
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
        # The second node makes backward twice as long. The first epoch is slower: a warm-up.
        times = 2 if f"-{slower}-" in order.run else 1
        phases = {**PHASES, "backward": 0.05 * nodes}
        phases = {name: times * seconds for name, seconds in phases.items()}
        warm_up = {name: 5 * seconds for name, seconds in phases.items()}
        recorded(account, order.run, stretch(1, 4 * nodes, warm_up) + stretch(2, 4 * nodes, phases))
        result = {"run": order.run, "status": "failed" if failed else "succeeded"}
        account.objects[f"runs/{order.run}/result.json"] = json.dumps(result).encode()
        config = {"recipe": "ddp", "run": order.run}
        account.objects[f"runs/{order.run}/config.json"] = json.dumps(config).encode()
        return answer

    monkeypatch.setattr(account, "on_start_execution", ended)


def figures(here: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((here / "study-ddp" / "study.json").read_text())
    return found


def test_each_number_of_nodes_is_a_job_and_known_times_give_the_known_figures(
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trains(account, monkeypatch)
    given = ["--nodes", "2,1", "--max-hours", "1", "--max-usd", "100", "--", "ddp"]
    assert study.main([*given, "--batch-per-worker", "64", "--max-steps", "200"]) == 0
    one, two = account.orders
    assert (one.run, two.run) == ("study-ddp-1", "study-ddp-2")
    assert (one.nodes.high, two.nodes.high) == (1, 2)
    assert one.max_seconds == 3600
    assert [*one.command[-4:]] == ["--batch-per-worker", "64", "--max-steps", "200"]

    # A step takes 0.1 s with 4 workers, of 25 steps an epoch, and 0.15 s with 8, of 12.5.
    small, large = figures(here)
    assert (small["nodes"], small["workers"], large["workers"]) == (1, 4, 8)
    assert small["epoch_s"] == pytest.approx(0.1 * 25)
    assert small["items_per_s"] == pytest.approx(4 * 64 / 0.1)
    assert small["phases"] == pytest.approx(PHASES)
    assert small["efficiency"] == 1
    assert large["efficiency"] == pytest.approx(0.1 * 25 * 4 / (0.15 * 12.5 * 8))
    assert one.prices is not None
    hourly = one.prices.usd_per_hour(1)
    assert hourly is not None
    assert small["usd_per_epoch"] == pytest.approx(hourly * 0.1 * 25 / 3600)
    assert (here / "study-ddp" / "study.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr()
    assert [len(line.split()) for line in said.out.splitlines()] == [10, 12, 12]
    assert one.run in said.err


def test_two_networks_are_two_series_of_the_same_training(
    account: Account, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    account.shape |= {"worker_instance_type": "p4d.24xlarge", "efa": True}
    trains(account, monkeypatch, slower="tcp")
    given = ["ddp", "--nodes", "1,2", "--networks", "efa,tcp", "--max-usd", "1000"]
    assert study.main(given) == 0
    found = account.orders
    assert [each.run for each in found] == [
        *("study-ddp-efa-1", "study-ddp-efa-2", "study-ddp-tcp-1", "study-ddp-tcp-2")
    ]
    assert [each.variables for each in found] == [{}, {}, *[{"NCCL_NET": "Socket"}] * 2]
    efa, _, tcp, _ = figures(here)
    assert (efa["network"], tcp["network"]) == ("efa", "tcp")
    assert (efa["efficiency"], tcp["efficiency"]) == (1, 1)
    assert tcp["epoch_s"] == pytest.approx(2 * efa["epoch_s"])


def test_a_job_that_fails_is_named_and_trained_again_by_the_same_command(
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        trains(account, patch, fails_at=2)
        assert study.main(["ddp", "--nodes", "1,2,4", "--max-usd", "1000"]) == 1
    assert "no hosts" in capsys.readouterr().err, "the words of its outcome"
    assert [each["nodes"] for each in figures(here)] == [1, 4]
    trains(account, monkeypatch)
    assert study.main(["ddp", "--nodes", "1,2,4", "--max-usd", "1000"]) == 0
    assert [each["nodes"] for each in figures(here)] == [1, 2, 4]
    assert [each.run[-1] for each in account.orders] == ["1", "2", "4", "2"]


@pytest.mark.parametrize(
    "words",
    [
        "ddp --nodes 1:2",
        "ddp --nodes 1,9",
        "-- ddp --epoch 2",
        "ddp --networks ib",
        "ddp --networks efa,tcp",  # the hosts have no EFA
        "ddp --max-usd 0.01",
    ],
)
def test_mistakes_are_refused_before_anything_starts(account: Account, words: str) -> None:
    code: object
    try:
        code = study.main(words.split())
    except SystemExit as end:  # argparse's way
        code = end.code
    assert code == 2
    assert account.changes == []


def measured(account: Account, *events: Event) -> study.Point:
    account.add("job", run="r")
    recorded(account, "r", [*events])
    return study.measured(Job.find("r"), network="", nodes=1)


def test_a_step_takes_as_long_as_on_the_slowest_worker(account: Account) -> None:
    found = measured(account, *stretch(1, 4, PHASES), *stretch(2, 4, PHASES, slowest_s=0.1))
    assert found.step_s == pytest.approx(0.2)


def test_of_a_run_evaluated_once_the_steps_of_the_first_report_do_not_count(
    account: Account,
) -> None:
    reports = [(10, 100.0), (20, 101.0), (30, 102.0), (40, 103.0)]  # 0.1 s each, and no first ones
    found = measured(
        account,
        *(
            Step(step=step, epoch=1, loss=1.0, lr=0.1, grad_norm=1.0, time=time)
            for step, time in reports
        ),
        *stretch(1, 1, {"data": 0.04, "forward": 0.16}),
    )
    assert found.step_s == pytest.approx(0.1)
    assert found.phases == pytest.approx({"data": 0.02, "forward": 0.08})
