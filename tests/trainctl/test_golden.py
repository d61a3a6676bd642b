"""Golden commands: what a user types, reads and changes, a folder per case in ``golden/``.

* ``account.json``: the account before; ``line N`` in it: what changes before that line.
* ``command``: a command per line, as a user types it, with its exit code if that is not 0.
* ``stdout``, ``stderr``, ``calls``: what each line prints, and what it changes in AWS.

``pytest tests/trainctl/test_golden.py --write-goldens`` writes them from the commands of today.
"""

import json
import re
import shlex
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from contract.job import JobSpec
from contract.nodes import Range
from tests.aws.calls import refused
from tests.clock import FakeClock
from tests.trainctl.account import CHANGES, Account
from tests.trainctl.conftest import foreign_options
from trainctl import output
from trainctl.__main__ import main
from trainctl.watch import polling

CASES: Final = Path(__file__).parent / "golden"
NOW: Final = datetime(2026, 1, 15, 12, tzinfo=UTC)
OURS: Final = ("trainctl", "training", "contract", "tests.trainctl.account")
#: Fields of an order that are not shown: what most orders have, and what differs by machine.
USUAL: Final = json.loads(JobSpec(run="r", command=("x",), nodes=Range(0, 0)).to_json())
NOT_SHOWN: Final = ("prices", "code_sha256", "submitter", "user_id")
#: Shown by what they write.
WRITES: Final = {"put_object", "delete_objects", "upload_file"}


def moment(value: Any) -> Any:
    """A value of JSON; ``-600s`` is ten minutes ago."""
    if isinstance(value, str) and re.fullmatch(r"[+-]\d+s", value):
        return NOW + timedelta(seconds=int(value[:-1]))
    return value


def read(file: Path) -> dict[str, Any]:
    """A file of JSON, with its moments."""
    values: dict[str, Any] = json.loads(
        file.read_text(), object_hook=lambda each: {key: moment(each[key]) for key in each}
    )
    return values


def arrange(account: Account, state: dict[str, Any]) -> None:
    """Give the account this state: attributes, which replace those of before, and what follows."""
    account.shape |= state.pop("shape", {})
    for name, text in state.pop("files", {}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    for name, content in state.pop("objects", {}).items():
        key, *age = name.split()
        account.objects[key] = json.dumps(content).encode()
        account.modified[key] = moment(*age or ["-0s"])
    for name, error in state.pop("fails", {}).items():
        account.fails[name] = error and refused(*error.split(": "))
    for job, about in state.pop("jobs", {}).items():
        order, heads, workers = (about.pop(each, {}) for each in ("order", "heads", "workers"))
        account.add(job, run=job.rpartition("-")[0] or job, **about)
        if order:
            account.change_order(job, **order)
        for task, has in heads.items():
            account.add_head(job, task, **has)
        for task, has in workers.items():
            account.add_worker(task, "RUNNING", job=job, **{"group": f"job:{job}"} | has)
    for name, value in state.items():
        assert name in vars(account), name
        setattr(account, name, value)


def call(operation: str, given: dict[str, Any]) -> str:
    """A call as a line."""
    if order := given.get("input"):
        given = {"name": given["name"]} | {
            name: value
            for name, value in json.loads(order).items()
            if name not in NOT_SHOWN and value != USUAL[name]
        }
    return f"{operation} {json.dumps(given, separators=(',', ':'))}"


def played(case: Path, account: Account, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The files of a case as the commands make them now."""
    state = read(case / "account.json")
    later = {key: state.pop(key) for key in [*state] if key.startswith("line ")}
    arrange(account, state)
    found: defaultdict[str, str] = defaultdict(str)
    for number, line in enumerate((case / "command").read_text().splitlines(), 1):
        arrange(account, later.get(f"line {number}", {}))
        account.calls.clear()
        before = {*account.objects.items()}
        _, *words = shlex.split(line, comments=True)
        code = main(words)
        out, err = capsys.readouterr()
        assert foreign_options(words, err) == set()
        changes = [call(*each) for each in account.calls if each[0] in CHANGES - WRITES]
        after = account.objects
        written = sorted({key for key, _ in before ^ {*after.items()}})
        changes += [f"{'write' if key in after else 'delete'} {key}" for key in written]
        found["command"] += line.partition("  # ")[0] + (f"  # exit {code}\n" if code else "\n")
        for name, text in (("stdout", out), ("stderr", err), ("calls", "\n".join(changes))):
            lines = text.rstrip().splitlines()
            found[name] += f"[{number}] {lines[0]}\n" if len(lines) == 1 else ""
            found[name] += "\n".join([f"[{number}]", *lines, ""]) if len(lines) > 1 else ""
    return {name: text for name, text in found.items() if text}


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A clock that only sleeping moves, ids by a seed, and a folder of its own."""
    clock, gmtime = FakeClock(NOW.timestamp()), time.gmtime

    class Clocked(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(clock.now, tz)

    for name, module in [*sys.modules.items()]:
        if name.startswith(OURS) and getattr(module, "datetime", None) is datetime:
            monkeypatch.setattr(module, "datetime", Clocked)
    for name in ("time", "monotonic", "sleep"):
        monkeypatch.setattr(f"time.{name}", getattr(clock, name))
    monkeypatch.setattr("time.gmtime", lambda *given: gmtime(*given or (clock.now,)))
    monkeypatch.setattr("trainctl.aws.jobs.random", Random(0))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    output.set_options("")


@pytest.mark.usefixtures("fixed", "laptop_is_ready")
@pytest.mark.parametrize("case", sorted(CASES.iterdir()), ids=lambda case: case.name)
def test_a_command_prints_and_changes_what_its_golden_files_hold(
    case: Path,
    account: Account,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(polling, "SHORTEST_S", 60.0)  # or the clock stands still
    monkeypatch.setattr(polling, "LONGEST_S", 60.0)
    found = played(case, account, capsys)
    names = ("command", "stdout", "stderr", "calls")
    if request.config.getoption("write_goldens", default=False):
        for name in names:
            (case / name).unlink(missing_ok=True)
        for name, text in found.items():
            (case / name).write_text(text)
    assert found == {name: (case / name).read_text() for name in names if (case / name).exists()}
