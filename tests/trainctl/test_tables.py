"""Every table of the command line, as an ordinary terminal shows it: nothing that names is cut."""

import json
import re

import pytest

from tests.trainctl.account import Account
from tests.trainctl.test_ui import many
from trainctl import output
from trainctl.__main__ import main


def test_twenty_jobs_are_twenty_one_lines(
    account: Account, terminal: int, capsys: pytest.CaptureFixture[str]
) -> None:
    many(account, 20, running=3, queued=3)
    reason = "failed: the head was killed, 3 times: its program may be the reason"
    cause = {"status": "failed", "exit_code": 137, "reason": reason}
    account.executions["resnet-280-lusab-babad"] |= {"status": "FAILED", "cause": json.dumps(cause)}
    main(["ls"])
    heading, *rows = plain(capsys).splitlines()
    assert sorted(row.split()[0] for row in rows) == sorted(account.executions)
    assert [row for row in rows if len(row) > terminal] == []
    assert heading.split() == ["job", "state", "nodes", "done", "age", "cost", "who"]
    found = {row.split()[0]: row.split()[1:] for row in rows}
    assert found["resnet-280-lusab-babad"][:2] == ["failed", "(137)"]
    assert found["resnet-294-lusab-babad"][:3] == ["running", "1", "25%"]


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
