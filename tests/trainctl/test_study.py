"""``examples/study.py``: a job for each number of nodes, one after the other, and their figures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract.job import JobSpec
from examples import study
from tests.trainctl.account import Account
from training.record.events import RankTimes, to_json

#: Steps of an epoch with one worker; a node has 4.
STEPS_PER_EPOCH = 100


def trained(account: Account, start: Callable[..., Any], **asked: Any) -> Any:
    """A job that ends at once; on two nodes a step takes 1.5 times as long as on one, and on three
    there are no hosts."""
    answer, order = start(**asked), JobSpec.from_json(asked["input"])
    nodes, workers = order.nodes.high, 4 * order.nodes.high
    status = "no_capacity" if nodes == 3 else "succeeded"
    outcome = json.dumps({"status": status, "reason": "no hosts"})
    ended = {"status": "FAILED" if nodes == 3 else "SUCCEEDED", "stopDate": account.now}
    account.executions[asked["name"]] |= {**ended, "output": outcome, "cause": outcome}
    events = [
        RankTimes(
            step=epoch * STEPS_PER_EPOCH // workers,
            epoch=epoch,
            rank=rank,
            # The first epoch is slow, and so is the last rank.
            step_time_s=step_time_s * 5 ** (epoch == 1),
        )
        for epoch in (1, 2)
        for rank in range(workers)
        for step_time_s in [(0.05 + 0.05 * (rank == workers - 1)) * (1 + nodes) / 2]
    ]
    lines = "".join(json.dumps(to_json(each)) + "\n" for each in events)
    account.objects[f"runs/{order.run}/metrics.jsonl"] = lines.encode()
    result = {"run": order.run, "status": "succeeded"}
    account.objects[f"runs/{order.run}/result.json"] = json.dumps(result).encode()
    config = {"recipe": "ddp", "run": order.run}
    account.objects[f"runs/{order.run}/config.json"] = json.dumps(config).encode()
    return answer


def test_each_number_of_nodes_is_a_job_and_known_times_give_the_known_figures(
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    start = account.on_start_execution
    monkeypatch.setattr(
        account, "on_start_execution", lambda **asked: trained(account, start, **asked)
    )
    for _ in range(2):  # the second takes what is there
        assert study.main(["1,2", "ddp", "--batch-per-worker", "64", "--max-steps", "200"]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "1 nodes: epoch 2.5 s, efficiency 1.00",
            "2 nodes: epoch 1.9 s, efficiency 0.67",
        ]
    assert [each.run for each in account.orders] == ["study-ddp-1", "study-ddp-2"]
    assert (tmp_path / "study-ddp.png").read_bytes().startswith(b"\x89PNG")
    assert study.main(["1,3", "ddp", "--batch-per-worker", "64", "--max-steps", "200"]) == 1
    assert "no hosts" in capsys.readouterr().err, "the words of its outcome"
