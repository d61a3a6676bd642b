"""Every table of the command line, as an ordinary terminal shows it: nothing that names is cut."""

import json
import re
from datetime import timedelta
from typing import Any

import pytest

from tests.trainctl.account import Account
from trainctl import output
from trainctl.__main__ import main

JOB = "resnet-baseline-2-lusab-babad-gutih"  # 35 characters, of 36 that an id may have
RUN = "resnet-baseline-2-with-a-learning-rate-of-1e-3-and-warm-up-00001"[:63]
REASON = "failed: the head was killed, 3 times: its program may be the reason"


#: How twenty jobs are: the state that is shown, and what AWS tells of them.
STATES: dict[str, dict[str, Any]] = {
    "failed (137)": {"status": "FAILED", "cause": {"status": "failed", "exit_code": 137}},
    "failed": {"status": "FAILED", "cause": {"status": "failed"}},
    "host lost": {"status": "FAILED", "cause": {"status": "host_lost"}},
    "no capacity": {"status": "FAILED", "cause": {"status": "no_capacity", "exit_code": 75}},
    "stopped": {"status": "ABORTED"},
    "deadline": {"status": "TIMED_OUT"},
    "succeeded": {"status": "SUCCEEDED"},
    "running": {},
    "waiting": {},
    "queued 1": {},
}
#: Characters of an id: those of a run with a name of usual length.
USUAL = 24


def jobs(account: Account, *, length: int = len(JOB)) -> list[str]:
    """Twenty jobs, two of each state but for what runs; the reasons of failures are long."""
    account.shape["max_heads"] = 2
    ids = []
    for number in range(20):
        state = [*STATES][number] if number < 10 else [*STATES][number % 7]
        job = f"{JOB[: length - 2]}{number:02}"
        told = {**STATES[state]}
        if "cause" in told:
            told["cause"] = json.dumps({"reason": REASON, **told["cause"]})
        began = account.now - timedelta(hours=17 - number if number < 10 else number)
        account.add(job, run=RUN, startDate=began, **told)
        account.change_order(job, nodes="1", submitter="bernhard@example.com")
        at = began.isoformat()
        if state not in ("waiting", "queued 1", "running"):
            for task, by in (("h", "AWS Step Functions"), ("w", job)):
                event = {"taskArn": f"t/{task}{number}", "group": f"job:{job}", "startedBy": by}
                event |= {"pullStartedAt": at, "stoppedAt": account.now.isoformat()}
                account.task_events.append(event)
        ids.append(job)
    account.add_head(ids[7], "head", pullStartedAt=account.now - timedelta(hours=1))
    account.add_worker("w7", "RUNNING", job=ids[7], group=f"job:{ids[7]}")
    progress = {"time": 1, "job": ids[7], "step": 30, "total_steps": 184, "loss": 1.0}
    account.objects[f"runs/{RUN}/progress.json"] = json.dumps(progress).encode()
    assert main(["ls"]) == 0
    return ids


def test_twenty_jobs_are_twenty_one_lines(
    account: Account, terminal: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = jobs(account, length=USUAL)
    heading, *rows = plain(capsys).splitlines()
    assert sorted(row.split()[0] for row in rows) == sorted(ids)
    assert [row for row in rows if len(row) > terminal] == []
    found = dict(zip((row.split()[0] for row in rows), rows, strict=True))
    assert [
        each for each, job in zip(STATES, ids, strict=False) if f" {each} " not in found[job]
    ] == []
    assert heading.split() == ["job", "state", "nodes", "done", "age", "cost", "who"]
    assert found[ids[7]].split()[1:] == ["running", "1", "16%", "10", "h", "$0.11", "bernhard"]


def plain(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, without colors."""
    output._console.cache_clear()
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> int:
    """Width of the terminal that stdout seems to be."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output._console.cache_clear()
    return 80


@pytest.mark.usefixtures("terminal")
def test_on_the_narrowest_terminal_all_columns_wrap_and_no_letter_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    row = ["ddp-lusab-babad", "STOPPED", "its host was lost, none was available", "left out"]
    output.print_table(["id", "state", "why", "age"], [row], prose=["why"], optional=["age"])
    shown = plain(capsys)
    assert max(map(len, shown.splitlines())) <= 30
    assert sorted(re.sub(r"\s", "", shown)) == sorted(
        re.sub(r"\s", "", "idstatewhy" + "".join(row[:3]))
    )
