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
from collections.abc import Iterable
from dataclasses import MISSING, asdict, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from contract.job import JobSpec
from tests.aws.calls import refused
from tests.clock import FakeClock
from tests.trainctl.account import CHANGES, Account
from tests.trainctl.conftest import foreign_options
from trainctl import job_plan, output, polling
from trainctl.__main__ import main

CASES: Final = Path(__file__).parent / "golden"
NOW: Final = datetime(2026, 1, 15, 12, tzinfo=UTC)
OURS: Final = ("trainctl", "training", "contract", "tests.trainctl.account")
UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
#: Of an order: what other tests prove, and what is random or the same in all.
NOT_SHOWN: Final = {"prices", "code_sha256", "submitter", "user_id"}


def moments(value: Any) -> Any:
    """A value of JSON in which ``-10m`` is ten minutes ago."""
    if isinstance(value, dict):
        return {key: moments(each) for key, each in value.items()}
    if isinstance(value, list):
        return [moments(each) for each in value]
    if isinstance(value, str) and (found := re.fullmatch(r"([+-]\d+)([smhd])", value)):
        return NOW + timedelta(**{UNITS[found[2]]: int(found[1])})
    return value


def arrange(account: Account, state: dict[str, Any]) -> None:
    """Give the account this state: attributes, which replace those of before, and what follows."""
    account.shape |= state.pop("shape", {})
    for name, text in state.pop("files", {}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    for name, content in state.pop("objects", {}).items():
        key, *age = name.split()
        text = content if isinstance(content, str) else json.dumps(content)
        account.objects[key] = text.encode()
        account.modified[key] = moments(*age or ["-0s"])
    for name, error in state.pop("fails", {}).items():
        account.fails[name] = refused(*error.split(": ")) if error else None
    for job, about in moments(state.pop("jobs", {})).items():
        order, heads, workers = (about.pop(each, {}) for each in ("order", "heads", "workers"))
        outcome = about.pop("outcome", None)
        more = {} if outcome is None else dict.fromkeys(("output", "cause"), json.dumps(outcome))
        account.add(job, **about, **more)
        if order:
            account.change_order(job, **order)
        for task, has in heads.items():
            account.add_head(job, task, **has)
        for task, has in workers.items():
            account.add_worker(
                task, has.pop("lastStatus", "RUNNING"), job=job, group=f"job:{job}", **has
            )
    for name, lines in state.pop("logs", {}).items():
        account.logs[name] = [tuple(each) if isinstance(each, list) else each for each in lines]
    for name, value in moments(state).items():
        assert name in vars(account), name
        setattr(account, name, value)


def essence(operation: str, given: dict[str, Any]) -> str:
    """A call in one line: of an order, what differs from an order's defaults."""
    if "input" in given:
        order = {**asdict(JobSpec.from_json(given["input"]))}
        for each in fields(JobSpec):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if each.name in NOT_SHOWN or order[each.name] == default:
                del order[each.name]
        given = {"name": given["name"], "order": order | {"command": " ".join(order["command"])}}
    kept = {name: each for name, each in given.items() if name not in ("cluster", "Bucket")}
    return f"{operation} {json.dumps(kept, default=str)}"


def numbered(texts: Iterable[str]) -> str:
    """The texts of all lines, each with its number, if not empty."""
    found = ""
    for number, text in enumerate(texts, 1):
        gap = "\n" if "\n" in text.rstrip("\n") else " "
        found += f"[{number}]{gap}{text.rstrip()}\n" if text else ""
    return found


def played(case: Path, account: Account, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The files of a case as the commands make them now."""
    state = (
        json.loads((case / "account.json").read_text()) if (case / "account.json").exists() else {}
    )
    later = {key: state.pop(key) for key in [*state] if key.startswith("line ")}
    arrange(account, state)
    commands, printed, errors, calls = [], [], [], []
    for number, line in enumerate((case / "command").read_text().splitlines(), 1):
        arrange(account, later.get(f"line {number}", {}))
        account.calls.clear()
        before = dict(account.objects)
        words = shlex.split(line, comments=True)
        assert words.pop(0) == "trainctl"
        code = main(words)
        out, err = capsys.readouterr()
        assert foreign_options(words, err) == set()
        commands.append(line.partition("  # exit ")[0] + (f"  # exit {code}" if code else ""))
        printed.append(out)
        errors.append(err)
        made = [
            essence(*each)
            for each in account.calls
            if each[0] in {*CHANGES, "invoke"} - {"put_object", "delete_objects", "upload_file"}
        ]
        after = account.objects
        made += [f"write {key}" for key in sorted(after) if after[key] != before.get(key)]
        made += [f"delete {key}" for key in sorted(before.keys() - after.keys())]
        calls.append("\n".join(made))
    found = {"command": "\n".join(commands) + "\n"}
    for name, texts in (("stdout", printed), ("stderr", errors), ("calls", calls)):
        found[name] = numbered(texts).replace(str(Path.cwd()), "/here")
    return {name: text for name, text in found.items() if text}


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A clock that only sleeping moves, ids by a seed, and a folder of its own."""
    clock = FakeClock(NOW.timestamp())

    class Clocked(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(clock.now, tz)

    for name, module in [*sys.modules.items()]:
        if name.startswith(OURS) and getattr(module, "datetime", None) is datetime:
            monkeypatch.setattr(module, "datetime", Clocked)
    for name in ("time", "monotonic", "sleep"):
        monkeypatch.setattr(f"time.{name}", getattr(clock, name))
    gmtime = time.gmtime
    monkeypatch.setattr("time.gmtime", lambda *given: gmtime(*given or (clock.now,)))
    monkeypatch.setattr(job_plan, "random", Random(0))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    output.set_options("")


@pytest.mark.usefixtures("fixed", "laptop_is_ready")
@pytest.mark.parametrize("case", sorted(each.name for each in CASES.iterdir()))
def test_a_command_prints_and_changes_what_its_golden_files_hold(
    case: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # After the clock is fixed: jobs are dated from the start of the account.
    account: Account = request.getfixturevalue("account")
    folder = CASES / case
    monkeypatch.setattr(polling, "SHORTEST_S", 60.0)  # or the clock stands still
    monkeypatch.setattr(polling, "LONGEST_S", 60.0)
    found = played(folder, account, capsys)
    if request.config.getoption("write_goldens", default=False):
        for name in ("stdout", "stderr", "calls"):
            (folder / name).unlink(missing_ok=True)
        for name, text in found.items():
            (folder / name).write_text(text)
    kept = {file.name: file.read_text() for file in folder.iterdir() if file.name != "account.json"}
    assert found == kept
