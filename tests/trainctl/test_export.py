"""``trainctl export``: the model lands in the named folder, and nothing outside it."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from contract.nodes import Range
from contract.runs import DEFAULT_EXPORT_DTYPE, EXPORT_DTYPES
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from tests.trainctl.test_runs import checkpoint
from trainctl.commands.export import Dtype


def test_the_types_are_those_of_the_program_that_exports() -> None:
    assert get_args(Dtype) == (DEFAULT_EXPORT_DTYPE, *EXPORT_DTYPES)


def ends_at_once(
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
    *,
    names: tuple[str, ...] = ("sub/model",),
    content: bytes = b"weights",
    **ending: Any,
) -> None:
    """Every job that is started has ended at the first look, and left a line in its log and these
    objects."""

    def start(own: Account, *, name: str, input: str, **_: Any) -> Any:
        own.add(name)
        own.executions[name] |= {"input": input, "stopDate": own.now, **ending}
        own.add_head(name, "head")
        own.logs["job/ray/head"] = ["a line of the log"]
        words = json.loads(input)["command"]
        place = words[words.index("--to") + 1].removeprefix("s3://bucket/")
        for name in names:
            own.objects[f"{place}/{name}" if name != "." else place] = content
        return {}

    monkeypatch.setattr(Account, "on_start_execution", start)
    account.objects["runs/r1/config.json"] = b'{"recipe": "fsdp"}'
    checkpoint(account, "r1", 10, hours_ago=1)


def test_an_export_is_made_by_a_head_alone_and_fetched(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    # An empty object may stand for a folder.
    names = ("", "sub/", "sub/model")
    ends_at_once(
        account, monkeypatch, names=names, status="SUCCEEDED", output='{"status": "succeeded"}'
    )
    # It has no hosts of a capacity block that is over.
    account.shape["capacity_reservation_id"] = "cr-0123456789abcdef0"
    account.reservation = {"EndDate": account.now}
    place = tmp_path / "model"
    said = cli("export r1 --to", str(place), "--dtype", "bf16", "--yes")
    (spec,) = account.orders
    assert spec.command[:4] == ("python", "-m", "training.export", "r1")
    assert spec.command[-2:] == ("--dtype", "bf16")
    assert spec.nodes == Range(0, 0)
    assert (place / "sub" / "model").read_bytes() == b"weights"
    assert said.out == f"{place}\n"
    assert "a line of the log" in said.err
    cli("export r1 --to s3://other/place --yes")
    assert not account.sent("download_file")[1:], "what is to stay in S3 is not fetched"


def test_an_export_that_fails_leaves_no_folder(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    cause = '{"status": "failed", "reason": "failed: user code exit 2", "exit_code": 2}'
    ends_at_once(account, monkeypatch, status="FAILED", cause=cause)
    cli.refuses("export r1 --to", str(tmp_path / "model"), "--yes")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "name",
    [
        "/ABSOLUTE",  # .../exports/JOB//ABSOLUTE
        *("../climbed", "sub/../../climbed", "..", "a//b", "./a", "a/./b"),
        *("a\\..\\b", "nul\0", "line\nbreak"),
    ],
)
def test_a_key_that_leaves_the_folder_is_refused_before_any_file_is_written(
    account: Account,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
    name: str,
) -> None:
    outside = tmp_path / "outside"
    names = ("first", name.replace("ABSOLUTE", str(outside).lstrip("/")), "last")
    ends_at_once(
        account, monkeypatch, names=names, status="SUCCEEDED", output='{"status": "succeeded"}'
    )
    place = tmp_path / "deep" / "model"
    cli.refuses("export r1 --to", str(place), "--yes")
    assert not account.sent("download_file")
    assert [*tmp_path.rglob("*")] == []
