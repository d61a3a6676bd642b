"""``trainctl generate``: a head continues a text, and only what it adds is on stdout."""

import io
import json
import sys
from typing import Any

import pytest

from contract import exits
from contract.nodes import Range
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from tests.trainctl.test_export import ends_at_once
from trainctl.watch import follow

FOUND = {"prompt": "To be, or", "before": " xqz", "after": " not to be:\n'tis", "step": 40}


def continues(account: Account, monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
    """Every job has written this at once."""
    ending = {"status": "SUCCEEDED", "output": '{"status": "succeeded"}'}
    content = json.dumps(found).encode()
    ends_at_once(account, monkeypatch, names=(".",), content=content, **ending)


def test_a_continuation_is_made_by_a_head_alone_within_an_hour(
    account: Account, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    continues(account, monkeypatch, **FOUND)
    said = cli("generate r1", "To be, or", "--tokens", "8", "--greedy", "--yes")
    assert said.out == f"{FOUND['after']}\n"
    assert "a line of the log" in said.err
    (spec,) = account.orders
    assert (spec.nodes, spec.max_seconds, spec.code) == (Range(0, 0), 3600, "")
    assert spec.command[:-5] == (
        *("python", "-m", "training.generate"),
        *("--tokens", "8", "--seed=0", "--greedy"),
    )
    # Quoted, so that the line can be copied.
    assert "-- r1 'To be, or'\n" in said.err
    given = cli("generate r1", "Who?", "--seed", "-3", "--chat", "--json", "--yes")
    found = json.loads(given.out)
    assert found == {"job": [*account.executions][-1], **FOUND}
    assert {"--seed=-3", "--chat"} < {*account.orders[-1].command}


@pytest.mark.parametrize("text", ['it\'s "so"', "two\nlines", "--yes", "$(true) é", " led"])
@pytest.mark.parametrize("is_piped", [False, True])
def test_a_text_arrives_as_it_was_given(
    account: Account, monkeypatch: pytest.MonkeyPatch, cli: Cli, text: str, is_piped: bool
) -> None:
    continues(account, monkeypatch, **FOUND)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{text}\n"))
    cli("generate r1 --yes --", "-" if is_piped else text)
    (spec,) = account.orders
    assert spec.command[-3:] == ("--", "r1", text)


def test_bytes_that_are_no_text_are_refused(
    account: Account, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    cli.refuses("generate r1 - --yes")
    assert account.changes == []


def test_a_job_that_left_nothing_is_no_success(
    account: Account, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    continues(account, monkeypatch)
    cli.refuses("generate r1", "To be", "--yes", code=exits.FAILED)


def test_ctrl_c_leaves_the_job_running_and_prints_how_to_see_it(
    account: Account, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    continues(account, monkeypatch, **FOUND)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow, "watch", interrupted)
    said = cli("generate r1", "To be", "--yes", code=exits.INTERRUPTED)
    assert said.out == ""
    assert [*account.executions][-1] in said.err
