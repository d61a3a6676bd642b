"""``trainctl data rm`` and ``trainctl runs rm``: they ask, and remove what was named."""

from datetime import timedelta
from pathlib import Path

import pytest
import typer

from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli

RUN = ("runs/a/config.json", "runs/a/jobs/a-1.json", "runs/a/checkpoints/step-00000001/state.pt")
SET = ("data/a.json", "data/a/one.txt", "data/a/more/two.txt")
OTHERS = (
    *("runs/ab/config.json", "runs/a.b/x", "runs/a", "data/ab.json", "data/ab/one.txt"),
    *("data/a.json.json", "data/a.json/one.txt", "data/a-", "exports/a/x", "other/runs/a/x"),
)
KINDS = [("runs", "run 'a'", RUN), ("data", "data set 'a'", SET)]


@pytest.fixture
def full(account: Account) -> Account:
    """A bucket with run ``a``, data set ``a``, and what is called nearly so."""
    for key in (*RUN, *SET, *OTHERS):
        account.objects[key] = b"12345"
        account.modified[key] = account.now - timedelta(hours=2)
    return account


@pytest.mark.parametrize(("kind", "what", "keys"), KINDS)
def test_what_was_named_is_removed_and_nothing_else(
    kind: str, what: str, keys: tuple[str, ...], full: Account, cli: Cli
) -> None:
    kept = full.objects.keys() - {*keys}
    cli.refuses(kind, "rm", "a")
    assert full.changes == []
    assert cli.json(kind, "rm", "a", "--yes") == {"removed": what, "files": 3, "size": 15}
    assert full.objects.keys() == kept
    cli.refuses(kind, "rm", "a")


def test_enter_removes_and_replaces_nothing(
    full: Account, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda _question, *, default, **_: default)
    (tmp_path / "two.txt").touch()
    full.objects["data/a.json"] = b'{"name": "a", "files": {}, "uploaded": "yesterday"}'
    for words in (["runs", "rm", "a"], ["data", "rm", "a"], ["data", "put", ".", "--as", "a"]):
        monkeypatch.chdir(tmp_path)
        cli(*words)
        assert full.changes == [], words


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("runs", {"run": "a"}),
        ("runs", {"command": ["x", "--model", "s3://bucket/runs/a/model"]}),
        ("data", {"command": ["x", "--data=s3://bucket/data/a/"]}),
        ("data", {"command": ["x", "--data", "s3://bucket/data/ab=1,s3://bucket/data/a=2"]}),
        ("data", {"command": ["x", "--data", "/mnt/shared/data/a"]}),
        ("data", {"variables": {"DATA": "s3://bucket/data/a"}}),
        ("runs", {"of another version": "unknown"}),
    ],
)
def test_what_a_job_uses_is_not_removed(
    kind: str, order: dict[str, object], full: Account, cli: Cli
) -> None:
    full.add("user", run="b")
    full.change_order("user", **order)
    assert "user" in cli.refuses(kind, "rm", "a", "--yes")
    assert full.changes == []
    full.executions["user"]["status"] = "SUCCEEDED"
    cli(kind, "rm", "a", "--yes")


def test_jobs_of_other_runs_and_data_sets_do_not_matter(full: Account, cli: Cli) -> None:
    full.add("other", run="ab")
    full.change_order("other", command=["x", "--data", "s3://bucket/data/a.json/", "runs/a", "a"])
    for kind in ("runs", "data"):
        cli(kind, "rm", "a", "--yes")
