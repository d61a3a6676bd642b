"""A command imports what it needs and waits for what may come: no more of either."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT
from trainctl.watch import follow
from trainctl.watch.job_log import JobLog

HEAVY = ("boto3", "botocore", "pygments", "ray", "rehearsal", "rich", "torch")


def imported_by(*arguments: str, prints: str = "", **variables: str) -> set[str]:
    """Those of ``HEAVY`` that a command has imported when it ends, having printed this."""
    program = f"""
import sys
from trainctl.__main__ import main
main(sys.argv[1:])
print(*({set(HEAVY)!r} & sys.modules.keys()), sep="\\n", file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert prints in done.stdout
    return {*done.stderr.splitlines()} & {*HEAVY}


@pytest.mark.parametrize(
    "arguments",
    ["--help", "submit --help", "cluster --help", "local up --help", "--version", "begin"],
)
def test_help_and_mistakes_load_neither_aws_clients_nor_rich(arguments: str) -> None:
    assert imported_by(*arguments.split()) == set()


def test_a_table_is_drawn_by_rich_and_what_a_command_imports_is_noticed() -> None:
    assert imported_by("settings", "ddp") == {"rich"}


@pytest.mark.parametrize(
    ("ended_s_ago", "waits"), [(0, [follow.LAST_LINES_S]), (30, [follow.LAST_LINES_S]), (90, [])]
)
def test_last_lines_are_waited_for_only_where_the_job_has_just_ended(
    ended_s_ago: float, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("trainctl.watch.follow.time.sleep", slept.append)
    ended = datetime.now(tz=UTC) - timedelta(seconds=ended_s_ago)
    job = SimpleNamespace(is_over=True, began=ended, ended=ended, spec=None)
    jobs = SimpleNamespace(find=lambda _name: job, all_nodes=lambda _job: [])
    deployment: Any = SimpleNamespace(jobs=jobs, is_local=False, logs=None)
    found: object = follow.watch(deployment, "job", log=JobLog(deployment.logs))
    assert found is job
    assert slept == waits


@pytest.mark.parametrize("name", ["training", "store", "contract"])
@pytest.mark.parametrize("words", [["-m", "trainctl", "--help"], ["-c", "import trainctl"]])
def test_a_folder_that_hides_a_package_of_ours_is_named(
    tmp_path: Path, name: str, words: list[str]
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    own = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=own, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.decode().startswith(f"error: {tmp_path / name} hides ")
    own["PYTHONPATH"] = str(ROOT)
    subprocess.run([sys.executable, "-P", *words], cwd=tmp_path, env=own, check=True)
