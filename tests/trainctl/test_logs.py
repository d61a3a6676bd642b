"""``trainctl logs``: all nodes of a job in one log (``golden/logs``), and with few calls."""

from datetime import timedelta

import pytest

from tests.clock import FakeClock
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from trainctl.watch import follow, polling

SUCCEEDED = {"status": "SUCCEEDED", "output": '{"status": "succeeded", "reason": "succeeded"}'}


def lines(cli: Cli, *words: str) -> list[str]:
    """The log of the job, as these options show it."""
    return cli("logs job", *words).out.splitlines()


def test_a_node_that_has_not_written_yet_hides_no_other(account: Account, cli: Cli) -> None:
    account.add("job")
    account.add_head("job", "head")
    for name, status in (("w1", "RUNNING"), ("w2", "PROVISIONING"), ("w3", "STOPPED")):
        account.add_worker(name, status)
    account.logs = {"job/ray/head": ["one"]}
    assert lines(cli) == ["one"]
    asked = [named["logStreamNames"] for named in account.sent("filter_log_events")[1:]]
    assert asked == [["job/ray/head", "worker/ray/w1", "worker/ray/w3"], ["job/ray/head"]]


def ticking(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    found = FakeClock()
    monkeypatch.setattr("time.sleep", found.sleep)
    monkeypatch.setattr("time.monotonic", found.monotonic)
    monkeypatch.setattr(polling, "SHORTEST_S", 5.0)
    monkeypatch.setattr(polling, "LONGEST_S", 15.0)
    return found


def running(account: Account, *, num_workers: int = 2) -> None:
    """A job that has all of its nodes."""
    account.add("job")
    account.add_head("job", "head")
    for number in range(num_workers):
        account.add_worker(f"w{number}", "RUNNING")
    account.logs = {"job/ray/head": [], **{f"worker/ray/w{i}": [] for i in range(num_workers)}}


def test_following_the_end_of_a_long_log_does_not_read_it_whole(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ticking(monkeypatch)
    running(account)
    account.executions["job"]["startDate"] -= timedelta(hours=9)
    account.logs["job/ray/head"] = [(i - 20_000, f"{i}") for i in range(20_000)]
    account.logs["job/ray/head"] += [(590, "a"), (599, "b"), (599, "c")]
    account.logs["worker/ray/w0"] = [(595, "bye")]
    clock.script = [
        (8, lambda: account.logs["worker/ray/w0"].append((597, "late"))),
        (20, lambda: account.logs["job/ray/head"].extend([(599, "d"), (600, "e")])),
        (60, lambda: account.executions["job"].update(SUCCEEDED, stopDate=account.now)),
    ]
    assert lines(cli, "--follow", "--tail", "2") == ["b", "c", "[worker w0] late", "d", "e"]
    calls = account.sent("filter_log_events")
    starts = [e["startTime"] for e in calls if "job/ray/head" in e.get("logStreamNames", ())]
    assert len(account.events_of("job/ray/head", since=min(starts))) < 1000
    account.calls.clear()
    assert lines(cli, "--follow", "--tail", "0") == []


def per_minute(account: Account, minutes: float) -> dict[str, float]:
    names = {name for name, _ in account.calls} - {"get_paginator"}
    return {name: len(account.sent(name)) / minutes for name in names}


@pytest.mark.parametrize(
    ("words", "state", "most"),
    [
        (["logs", "job", "--follow"], "prints", 38),
        (["logs", "job", "--follow"], "silent", 24),
        (["logs", "job", "--follow"], "silent recipe", 24),
        (["wait", "job"], "silent", 18),
        (["wait", "job"], "without hosts", 18),
    ],
    ids=[
        *("follow a job that prints", "follow a silent job", "follow a silent recipe"),
        *("wait", "wait for hosts"),
    ],
)
def test_ten_people_can_follow_their_jobs_in_one_account(
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    state: str,
    most: float,
    cli: Cli,
) -> None:
    """docs/operations.md states these figures. CloudWatch allows 5 FilterLogEvents a second."""
    clock = ticking(monkeypatch)
    running(account, num_workers=16)
    minutes = 10
    if state == "without hosts":
        for number in range(16):
            account.tasks[f"w{number}"]["lastStatus"] = "PROVISIONING"
    if state == "silent recipe":
        account.change_order("job", recipe="ddp")
    if state == "prints":
        for second in range(0, 60 * minutes, 2):
            line = (600 + second, f"step {second}")
            clock.at(second, account.logs["job/ray/head"].append, line)
    end = account.executions["job"].update
    clock.at(60 * minutes, lambda: end(SUCCEEDED, stopDate=account.now))
    cli(*words)
    assert 60 * minutes <= clock.now <= 60 * minutes + polling.LONGEST_S + follow.LAST_LINES_S
    calls = per_minute(account, minutes)
    assert most - 2 <= sum(calls.values()) <= most, calls
    assert 10 * calls.get("filter_log_events", 0) / 60 < 5 / 2


def test_a_local_aws_is_asked_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ticking(monkeypatch)
    local = polling.Polling(is_local=True)
    for _ in range(10):
        assert local.nodes_are_due()
        local.wait(changed=False)
    assert clock.now == 10
    local.wait(changed=True, at_most=0.25)
    assert clock.now == 10.25
