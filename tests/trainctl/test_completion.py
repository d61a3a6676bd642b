"""Completion answers shells as they ask: by variables, with the answer alone on stdout."""

import time
from typing import Any

import pytest
from botocore.exceptions import NoCredentialsError

from tests.trainctl.account import Account
from trainctl import completion
from trainctl.__main__ import main


class Shell:
    """Presses the tab key."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def tab(self, line: str) -> list[str]:
        """What bash is offered at the end of ``line``."""
        words = line.split(" ")
        self._monkeypatch.setenv("_TRAINCTL_COMPLETE", "complete_bash")
        self._monkeypatch.setenv("COMP_WORDS", line)
        self._monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        assert main([]) == 0
        said = self._capsys.readouterr()
        assert said.err == ""
        return [each for each in said.out.splitlines() if each]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


@pytest.mark.usefixtures("account")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("trainctl chec", ["checkpoints"]),
        ("trainctl submit ", ["ddp", "fsdp", "imagenet", "bandwidth"]),
        ("trainctl plan fs", ["fsdp"]),
        ("trainctl submit ddp --ep", ["--epochs"]),
        ("trainctl submit ddp --max-f", ["--max-failures"]),
        ("trainctl submit ddp --max-h", ["--max-hours"]),
        ("trainctl submit ddp --sto", []),
        ("trainctl submit ddp --preset dig", ["digits"]),
        ("trainctl submit ddp --preset = dig", ["digits"]),
        ("trainctl submit ddp --data fashion", ["fashion-mnist"]),
        ("trainctl submit ddp --epochs ", []),
        ("trainctl submit ddp --on no", ["nodes"]),
        ("trainctl submit --code . --ep", []),
        ("trainctl submit no-recipe --ep", []),
        ("trainctl settings d", ["ddp"]),
    ],
)
def test_what_is_known_here_is_offered(line: str, offered: list[str], shell: Shell) -> None:
    assert shell.tab(line) == offered


def some_jobs(account: Account) -> None:
    account.add("first-lusab-gutih")
    account.add("second-babad-fadom", status="SUCCEEDED")
    for run in ("first", "fine", "old"):
        account.objects[f"runs/{run}/config.json"] = b"{}"


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("trainctl show ", ["second-babad-fadom", "first-lusab-gutih", "fine", "first", "old"]),
        ("trainctl logs fi", ["first-lusab-gutih", "fine", "first"]),
        ("trainctl stop sec", ["second-babad-fadom"]),
        ("trainctl shell sec", ["second-babad-fadom"]),
        ("trainctl checkpoints f", ["fine", "first"]),
        ("trainctl report o", ["old"]),
        ("trainctl submit ddp --run f", ["fine", "first"]),
    ],
)
def test_jobs_and_runs_are_those_of_the_account(
    account: Account, shell: Shell, line: str, offered: list[str]
) -> None:
    some_jobs(account)
    assert shell.tab(line) == offered
    assert account.changes == []


def test_what_goes_wrong_completes_nothing(account: Account, shell: Shell) -> None:
    some_jobs(account)
    account.fails["get_caller_identity"] = NoCredentialsError()
    assert shell.tab("trainctl show ") == []


def test_aws_is_not_waited_for(
    account: Account, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    some_jobs(account)
    monkeypatch.setattr(completion, "AWS_S", 0.05)
    answer = account.on_get_caller_identity

    def late(**named: Any) -> Any:
        time.sleep(0.3)
        return answer(**named)

    account.__dict__["on_get_caller_identity"] = late
    assert shell.tab("trainctl show ") == []
