"""``trainctl logs``: all nodes of a job in one log, and with few calls."""

import json
from datetime import datetime, timedelta
from typing import Any

import pytest

from contract import exits
from contract.job import JobSpec, Placement
from contract.nodes import Range
from tests.aws.calls import refused
from tests.clock import FakeClock
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from trainctl import follow, polling
from trainctl.__main__ import main

SUCCEEDED = {"status": "SUCCEEDED", "output": '{"status": "succeeded", "reason": "succeeded"}'}


def ended(task: str, address: str = "", **more: Any) -> dict[str, Any]:
    """The event of a job's task that ended."""
    details = [{"name": "privateIPv4Address", "value": address}] if address else []
    return {
        "taskArn": f"arn:aws:ecs:eu-west-1:1:task/c/{task}",
        "startedBy": "job",
        "group": "job:job",
        "startedAt": "2026-11-21T09:00:00Z",
        "stoppedAt": "2026-11-21T09:10:00Z",
        "attachments": [{"details": details}],
        **more,
    }


def on_nodes(account: Account, **changed: Any) -> None:
    """A job whose command runs on two nodes, with the logs of its head and of them."""
    spec = JobSpec(run="r1", command=("x",), nodes=Range(2, 2), on=Placement.NODES)
    account.add("job", input=spec.to_json(), **changed)
    account.add_head("job", "head", lastStatus="STOPPED")
    account.add_worker("w1", "STOPPED")
    account.task_events = [ended("w1"), ended("w2")]  # ECS has forgotten the second one
    account.logs = {
        "job/ray/head": ["node: running x on 2 nodes"],
        "worker/ray/w1": ["node: worker on 10.0.0.7", (3, "[node 1] one")],
        "worker/ray/w2": [(2, "[node 0] zero"), (4, "[node 0] again")],
    }


def of_recipe(account: Account) -> None:
    """A recipe's job that ended long ago: a head, which was replaced, and two workers, all of which
    ECS has forgotten."""
    account.add("job", startDate=account.now - timedelta(hours=3), **SUCCEEDED)
    account.add_head("job", "first")
    account.add_head("job", "second")
    account.tasks.clear()
    account.task_events = [
        ended("first", "10.0.0.5", startedBy="AWS Step Functions"),
        ended("0a1b2c3d4e5f", "10.0.0.7", stoppedReason="Host was taken"),
        ended("f9e8d7c6b5a4", "10.0.0.8"),
    ]
    account.logs = {
        "job/ray/first": [(-9000, "epoch 1: loss 2.5"), (-8980, "epoch 2: loss 2.25")],
        "job/ray/second": [(60, "epoch 3: loss 2.125")],
        "worker/ray/0a1b2c3d4e5f": [(-8990, "node: worker on 10.0.0.7")],
        "worker/ray/f9e8d7c6b5a4": [(-8989, "node: worker on 10.0.0.8"), (70, "node: bye")],
    }


WHOLE = [
    "epoch 1: loss 2.5",
    "[worker 0a1b2c] node: worker on 10.0.0.7",
    "[worker f9e8d7] node: worker on 10.0.0.8",
    "epoch 2: loss 2.25",
    "epoch 3: loss 2.125",
    "[worker f9e8d7] node: bye",
]


def lines(cli: Cli, *words: str) -> list[str]:
    """The log of the job, as these options show it."""
    return cli("logs", "job", *words).out.splitlines()


@pytest.mark.parametrize("following", [[], ["--follow"]])
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], WHOLE),
        (["--tail", "2"], WHOLE[-2:]),
        (["--tail", "0"], []),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_the_log_of_all_nodes_is_merged_when_ecs_has_forgotten_them(
    account: Account,
    cli: Cli,
    words: list[str],
    shown: list[str],
    following: list[str],
) -> None:
    of_recipe(account)
    assert lines(cli, *words, *following) == shown


def test_lines_as_json_tell_when_and_where_they_were_written(account: Account, cli: Cli) -> None:
    of_recipe(account)
    epoch, bye = map(json.loads, lines(cli, "--json", "--tail", "2"))
    assert datetime.fromisoformat(epoch.pop("at")) == pytest.approx(
        account.now - timedelta(seconds=540), abs=timedelta(milliseconds=1)
    )
    assert epoch == {
        "node": "head",
        "task": "second",
        "program_node": None,
        "line": "epoch 3: loss 2.125",
    }
    assert (bye["node"], bye["task"], bye["line"]) == ("worker", "f9e8d7c6b5a4", "node: bye")
    on_nodes(account)
    (one,) = map(json.loads, lines(cli, "--json", "--node", "1"))
    assert (one["program_node"], one["line"]) == (1, "[node 1] one")


def test_logs_of_a_job_on_nodes_hold_what_its_command_printed_on_each(
    account: Account, cli: Cli
) -> None:
    on_nodes(account, **SUCCEEDED)
    said = lines(cli)
    assert said == [
        "node: running x on 2 nodes",
        "[worker w1] node: worker on 10.0.0.7",
        "[node 0] zero",
        "[node 1] one",
        "[node 0] again",
    ]
    assert lines(cli, "--follow") == said
    assert lines(cli, "--node", "0") == ["[node 0] zero", "[node 0] again"]
    assert lines(cli, "--node", "0", "--tail", "1") == ["[node 0] again"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["logs", "job", "--node", "3"], "--node is 3: job has nodes 0 to 2"),
        (["logs", "other", "--node", "0"], "--node: the command of other runs on its head only"),
    ],
)
def test_what_no_log_can_be_asked_for_is_refused(
    account: Account, cli: Cli, words: list[str], error: str
) -> None:
    on_nodes(account)
    account.add("other")
    assert error in cli.refuses(*words)


def test_follow_shows_each_line_once_and_how_it_ended(account: Account, cli: Cli) -> None:
    account.add(
        "job", status="FAILED", cause='{"status": "failed", "reason": "why", "exit_code": 5}'
    )
    account.add_head("job", "first", lastStatus="STOPPED")
    account.add_head("job", "second", lastStatus="STOPPED")
    account.logs = {"job/ray/first": ["one"], "job/ray/second": [(1, "two"), (2, "three")]}
    said = cli("logs", "job", "--follow", code=5)
    assert said.out.splitlines() == ["one", "two", "three"]
    assert "another one takes over" in said.err
    assert "job: why, after 10 min" in said.err


def test_a_node_that_has_not_written_yet_hides_no_other(account: Account, cli: Cli) -> None:
    account.add("job")
    account.add_head("job", "head")
    for name, status in (("w1", "RUNNING"), ("w2", "PROVISIONING"), ("w3", "STOPPED")):
        account.add_worker(name, status)
    account.logs = {"job/ray/head": ["one"]}
    assert lines(cli) == ["one"]
    asked = [named["logStreamNames"] for named in account.sent("filter_log_events")[1:]]
    assert asked == [["job/ray/head", "worker/ray/w1", "worker/ray/w3"], ["job/ray/head"]]


def test_a_fault_of_cloudwatch_is_not_taken_for_an_empty_log(account: Account, cli: Cli) -> None:
    of_recipe(account)
    account.fails["filter_log_events"] = refused("ThrottlingException", "FilterLogEvents")
    assert "ThrottlingException" in cli.refuses("logs", "job", code=exits.STORAGE)


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


def test_where_there_is_no_terminal_a_line_is_printed_only_when_something_else_happens(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ticking(monkeypatch)
    running(account)
    account.tasks["w0"]["lastStatus"] = "PROVISIONING"
    clock.script = [
        (60, lambda: account.tasks["w0"].update(lastStatus="RUNNING")),
        (600, lambda: account.executions["job"].update(SUCCEEDED, stopDate=account.now)),
    ]
    assert cli("logs", "job", "--follow").err.splitlines()[:-1] == [
        "waiting for 1 x g5.xlarge ...",
        "running ...",
    ]


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
    assert main(words) == 0
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


def test_a_log_without_lines_is_not_silent(account: Account, cli: Cli) -> None:
    on_nodes(account, **SUCCEEDED)
    account.logs["worker/ray/w1"] = []
    said = cli("logs", "job", "--node", "1")
    assert (said.out, said.err) == ("", "There are no such lines so far.\n")
