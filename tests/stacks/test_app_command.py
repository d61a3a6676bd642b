"""The CDK command line starts the app with the first Python here that can import aws_cdk."""

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: Answers whether it has aws_cdk, and otherwise prints which one it is and what it was told to run.
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit {lacks}
echo "{name} $*"
"""


def run(folder: Path, pythons: dict[str, bool]) -> subprocess.CompletedProcess[str]:
    """Start the app as the CDK does, where just these Pythons are; which of them have aws_cdk."""
    search = folder / "bin"
    search.mkdir()
    for name, has in pythons.items():
        place = folder / name if "/" in name else search / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(PYTHON.format(name=name, lacks=int(not has)))
        place.chmod(place.stat().st_mode | stat.S_IXUSR)
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/app", folder / ".ci")
    command = json.loads((ROOT / "cdk.json").read_text())["app"]
    return subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": str(search)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({".venv/bin/python": True, "python3": True}, ".venv/bin/python"),
        ({".venv/bin/python": False, "python3": True}, "python3"),
        ({"python3": True}, "python3"),
        ({"python3": False, "python": True}, "python"),
    ],
)
def test_the_first_python_that_has_the_cdk_runs_the_app(
    tmp_path: Path, pythons: dict[str, bool], chosen: str
) -> None:
    done = run(tmp_path, pythons)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{chosen} app.py\n", "")


@pytest.mark.parametrize("pythons", [{}, {".venv/bin/python": False, "python3": False}])
def test_without_one_it_says_what_to_install(tmp_path: Path, pythons: dict[str, bool]) -> None:
    done = run(tmp_path, pythons)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "error: no Python here can import aws_cdk: pip install -r requirements.txt\n"
    )
