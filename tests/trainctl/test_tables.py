"""Every table of the command line, as an ordinary terminal shows it: nothing that names is cut."""

import re
from collections.abc import Callable

import pytest

from tests.trainctl.account import Account
from tests.trainctl.test_runs import checkpoint, four_runs
from trainctl import output
from trainctl.__main__ import main
from training import recipes
from training.recipes import command

JOB = "resnet-baseline-2-lusab-babad-gutih"  # 35 characters, of 36 that an id may have
RUN = "resnet-baseline-2-with-a-learning-rate-of-1e-3-and-warm-up-00001"[:63]
REASON = "failed: the head was killed, 3 times: its program may be the reason"


def jobs(account: Account) -> list[str]:
    account.add(
        JOB, run=RUN, status="FAILED", cause=f'{{"status": "failed", "reason": "{REASON}"}}'
    )
    assert main(["ls"]) == 0
    return [JOB, RUN, "submitted", "UTC"]


def job(account: Account) -> list[str]:
    account.add(JOB, run=RUN)
    account.add_head(JOB, "0123456789abcdef0123456789abcdef", lastStatus="RUNNING")
    assert main(["show", JOB]) == 0
    return [JOB, RUN, "0123456789abcdef0123456789abcdef", "RUNNING"]


def settings_of(recipe: str) -> Callable[[Account], list[str]]:
    def show(_account: Account) -> list[str]:
        assert main(["settings", recipe]) == 0
        found = recipes.by_name(recipe)
        listed = command.listed(found, found.preset_for(None))
        return [each.option for each in listed] + [str(each.default) for each in listed]

    return show


def checks(_account: Account) -> list[str]:
    assert main(["doctor"]) in (0, 1)
    return ["ok", "credentials", "image of the head", "image of the worker", "account"]


def cluster(account: Account) -> list[str]:
    account.wanted = {"head-service": 1, "worker-service": 2}
    assert main(["cluster", "status"]) == 0
    return ["RUNNING", "address", "health"]


def cost(account: Account) -> list[str]:
    account.add(JOB, run=RUN)
    assert main(["cost", JOB]) == 0
    return ["m5.large", "g5.xlarge", "an hour"]


def runs_in_the_bucket(account: Account) -> list[str]:
    four_runs(account)
    account.objects[f"runs/{RUN}/config.json"] = b'{"recipe": "ddp"}'
    assert main(["runs"]) == 0
    return [RUN, "goes-on", "failed: user code exit 3", "accuracy 93.61%", "1,250", "UTC"]


def checkpoints_of_a_run(account: Account) -> list[str]:
    checkpoint(account, "r1", 12_345_678, hours_ago=1)
    assert main(["checkpoints", "r1"]) == 0
    return ["12,345,678", "UTC", "kB"]


TABLES: dict[str, Callable[[Account], list[str]]] = {
    "ls": jobs,
    "show": job,
    "doctor": checks,
    "cluster status": cluster,
    "cost": cost,
    "runs": runs_in_the_bucket,
    "checkpoints": checkpoints_of_a_run,
    **{f"settings {name}": settings_of(name) for name in recipes.NAMES},
}


@pytest.fixture(params=[80, 60])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Width of the terminal that stdout seems to be."""
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output._console.cache_clear()
    width: int = request.param
    return width


@pytest.mark.parametrize("table", TABLES)
def test_on_a_narrow_terminal_nothing_that_names_is_cut(
    table: str, terminal: int, account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = TABLES[table](account)
    output._console.cache_clear()
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert [each for each in whole if each not in shown] == []
    assert "…" not in shown
    # What is wider is a long name on a line of its own, or a sentence, which the terminal wraps.
    wide = [line for line in shown.splitlines() if len(line) > terminal and "  " in line.strip()]
    assert [line for line in wide if RUN not in line] == []


@pytest.mark.parametrize("width", [200, 100, 60, 40])
def test_no_word_is_cut_and_none_is_lost_at_any_width(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ["id", "state", "why"]
    rows = [
        ["ddp-lusab-babad", "STOPPED", "its host was lost, and another one was not available"],
        ["fsdp-gutih-tugad", "RUNNING", ""],
    ]
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    output._console.cache_clear()
    output.print_table(columns, rows, prose=["why"])
    output._console.cache_clear()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    words = {word for row in rows for cell in row for word in cell.split()}
    assert words <= {word for line in lines for word in line.split()}
    assert max(map(len, lines)) <= width


def test_where_stdout_is_no_terminal_a_row_is_a_line(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs(account)
    row = capsys.readouterr().out.splitlines()[1]
    assert row.split("  ")[:3] == [JOB, RUN, REASON]
