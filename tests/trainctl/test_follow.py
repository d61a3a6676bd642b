"""The line of ``submit --follow``: on a terminal it shows at any moment what the job does."""

import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from contract.nodes import JOB
from tests.clock import FakeClock
from tests.trainctl.account import PRICES, Account
from tests.trainctl.test_logs import SUCCEEDED, running, ticking
from trainctl import output
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import CliError
from trainctl.commands.shell import choose
from trainctl.watch import follow
from trainctl.watch.job_log import JobLog


class Screen(io.StringIO):
    """A terminal. One of the system shows what was written at some later moment."""

    def isatty(self) -> bool:
        return True


class Terminal:
    """A terminal of 100 columns, on which rich's thread draws once a second of the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._screen = Screen()
        console = Console(file=self._screen, width=100, soft_wrap=True, highlight=False)
        assert console.is_terminal
        made: list[Live] = []

        class Noted(Live):
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                self.auto_refresh = False  # the thread, which would draw by another clock
                made.append(self)

        monkeypatch.setattr(output, "_console", lambda **_: console)
        monkeypatch.setattr("rich.live.Live", Noted)
        self._made = made

    def draw(self) -> str:
        """Draw the line; return what the terminal got."""
        before = len(self._screen.getvalue())
        self._made[-1].refresh()
        drawn = self._screen.getvalue()[before:]
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]", "", drawn).strip()[2:]  # no spinner


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    return Terminal(monkeypatch)


def shown(
    terminal: Terminal, account: Account, clock: FakeClock, events: dict[int, Callable[[], Any]]
) -> dict[int, str]:
    """The line at each second of a job that ends in second 500, to which this happens."""
    lines: dict[int, str] = {}

    def note(second: int) -> None:
        lines[second] = terminal.draw()

    for second, happens in events.items():
        clock.at(second, happens)
    for second in range(1, 500):
        clock.at(second, note, second)
    end = account.executions["job"].update
    clock.at(500, lambda: end(SUCCEEDED, stopDate=account.now))
    deployment = Deployment.find(profile=None, region=None)
    follow.watch(
        deployment,
        "job",
        log=JobLog(deployment.logs),
        clock=lambda: account.now.timestamp() + clock.now,
    )
    return lines


def of_recipe(account: Account) -> None:
    """A job of a recipe on one worker node, of which nothing has been started yet."""
    running(account, num_workers=1)
    account.change_order("job", recipe="ddp", nodes="1")
    account.executions["job"]["startDate"] = account.now
    account.history["job"] = []
    account.tasks.clear()


def test_a_followed_job_shows_its_states_in_order_and_its_clock_moves_every_second(
    account: Account, monkeypatch: pytest.MonkeyPatch, terminal: Terminal
) -> None:
    """What AWS knows is asked for every 5 to 30 s, so a state is shown that much later."""
    clock = ticking(monkeypatch)
    account.now = account.now.replace(microsecond=0)  # no fraction, which no float has exactly
    account.add("first", startDate=account.now - timedelta(hours=1))
    of_recipe(account)
    step = {"time": 1, "job": "job", "step": 45, "total_steps": 184, "loss": 1.0}
    step |= {"epoch": 2, "epochs": 8, "images_per_s": 560.2}

    def at(seconds: float) -> Any:
        return account.now + timedelta(seconds=seconds)

    def head(name: str, status: str) -> Callable[[], None]:
        return lambda: account.add_head("job", name, lastStatus=status)

    def becomes(task: str, status: str, **more: Any) -> Callable[[], None]:
        return lambda: account.tasks[task].update(lastStatus=status, **more)

    def pauses() -> None:
        account.tasks["w0"]["lastStatus"] = account.tasks["h0"]["lastStatus"] = "STOPPED"
        until = {"reason": "failed: its host was lost", "until": at(430).timestamp()}
        details = {"name": "Pause", "input": json.dumps(until)}
        account.history["job"].append(
            {"type": "WaitStateEntered", "stateEnteredEventDetails": details}
        )

    lines = shown(
        terminal,
        account,
        clock,
        {
            20: lambda: account.executions.pop("first"),
            50: head("h0", "PROVISIONING"),
            100: becomes("h0", "PENDING", pullStartedAt=at(100)),
            150: becomes("h0", "RUNNING", startedAt=at(150)),
            200: lambda: account.add_worker("w0", "PENDING", pullStartedAt=at(210)),
            250: becomes("w0", "RUNNING"),
            310: lambda: account.objects.update(
                {"runs/r1/progress.json": json.dumps(step).encode()}
            ),
            370: pauses,
            440: head("h1", "PROVISIONING"),
        },
    )
    shows = {10: "after first", 40: "head", 90: "m5.large", 145: "head", 195: "g5.xlarge"}
    shows |= {245: "1 of 1", 300: "$0.0", 365: "45/184", 435: "now", 499: "m5.large"}
    assert [second for second, words in shows.items() if words not in lines[second]] == []
    same = [
        after
        for after, line in lines.items()
        if line == lines.get(after - 1) and not line.endswith("now")
    ]
    assert same == [], "its clock moves every second"
    assert re.search(r"3 min 20 s, \$0\.0\d+, .*2/8, .*45/184, 560 ", lines[350])
    assert lines[420].endswith(" 10 s")


def test_the_line_shows_the_cost_of_this_moment_and_the_last_line_of_a_program(
    account: Account, monkeypatch: pytest.MonkeyPatch, terminal: Terminal
) -> None:
    clock = ticking(monkeypatch)
    running(account, num_workers=1)
    account.tasks["w0"]["pullStartedAt"] = account.now
    account.logs["worker/ray/w0"] = [(600, "a\n10%\r20% of \x1b[31mepoch 1")]
    hourly = PRICES.worker.usd_per_hour
    assert hourly is not None
    long = (690, "x" * 200)
    events = {90: lambda: account.logs["worker/ray/w0"].append(long)}
    lines = shown(terminal, account, clock, events)
    costs = [float(line.split("$")[1].split(",")[0]) for line in [*lines.values()][20:]]
    expected = [hourly * second / 3600 for second in [*lines][20:]]
    for cost, usd in zip(costs, expected, strict=True):
        assert cost == pytest.approx(usd, abs=0.0006 if usd < 0.0095 else 0.0055)
    assert "11 min 20 s, $0.0" in lines[80]
    assert lines[80].endswith(", 20% of epoch 1")
    assert len(lines[499]) <= 98
    assert lines[499].endswith("xx…"), "a long line stays one line"


@pytest.mark.parametrize("to_file", [False, True])
def test_lines_of_a_followed_log_go_above_the_line_or_into_the_file_that_stdout_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, to_file: bool
) -> None:
    terminal, file = Screen(), tmp_path / "log"
    monkeypatch.setenv("TERM", "xterm")
    with file.open("w") as opened:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(sys, "stdout", opened if to_file else terminal)
        output._console.cache_clear()
        with output.ProgressLine() as progress:
            progress.update("running")
            assert progress._live
            progress._live.refresh()  # now, and not when its thread comes to it
            output.print_text("a line")
            print("{}")
        output._console.cache_clear()
    if to_file:
        assert file.read_text() == "a line\n{}\n"
    else:  # each where the line of the state was erased
        assert re.findall(r"\x1b\[2K(a line|{})\n", terminal.getvalue()) == ["a line", "{}"]
    assert "running" in terminal.getvalue()


#: Every state of a task, by ECS's documentation of its life cycle, from the first to the last.
STARTING = ("PROVISIONING", "PENDING", "ACTIVATING")
ENDING = ("DEACTIVATING", "STOPPING", "DEPROVISIONING", "STOPPED")


@pytest.mark.parametrize("status", [*STARTING, "RUNNING", *ENDING])
def test_a_node_that_ends_is_not_waited_for_as_if_it_started(account: Account, status: str) -> None:
    running(account, num_workers=2)
    for worker in ("w0", "w1"):
        account.tasks[worker]["lastStatus"] = status
    deployment = Deployment.find(profile=None, region=None)
    job = deployment.jobs.find("job")
    nodes = deployment.jobs.all_nodes(job)
    reason = follow.waiting(deployment, job, nodes).reason
    assert (" 2 " in reason) == (status in STARTING)
    (head,) = [node for node in nodes if node.node == JOB]
    with nullcontext() if status == "RUNNING" else pytest.raises(CliError, match=status):
        choose([replace(head, status=status)], node="head", task_id=None)
    # One that has replaced another.
    assert choose([replace(head, id="lost", status=status), head], node="head") == head
    account.tasks[head.id]["lastStatus"] = status
    reason = follow.waiting(deployment, job, deployment.jobs.all_nodes(job)).reason
    assert bool(reason) == (status != "RUNNING")


def test_workers_that_nobody_has_requested_yet_are_not_waited_for(account: Account) -> None:
    """A head first prepares a program that runs on nodes."""
    running(account, num_workers=1)
    account.change_order("job", nodes="1", on="nodes", code="s3://bucket/code.zip")
    deployment = Deployment.find(profile=None, region=None)
    job = deployment.jobs.find("job")
    heads = deployment.jobs.heads(job)
    assert "head" in follow.waiting(deployment, job, heads).reason
    workers = deployment.jobs.workers(job)
    assert not follow.waiting(deployment, job, [*heads, *workers]).reason


def test_a_long_wait_is_not_silent_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = FakeClock()
    with output.ProgressLine(clock=lambda: clock.now) as progress:
        for second in range(0, 190, 10):
            clock.now = second
            progress.update("waiting for 1 x g5.xlarge")
        # The line of a job that runs is moved by its own log.
        for second in range(190, 400, 10):
            clock.now = second
            progress.update("running", line=lambda _now: "running")
    *waits, runs = capsys.readouterr().err.splitlines()
    assert [re.findall(r"\d min", line) for line in waits] == [[], ["1 min"], ["2 min"], ["3 min"]]
    assert "running" in runs
