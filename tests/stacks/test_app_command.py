"""The CDK command line starts the app with the first Python here that can import aws_cdk."""

import json
import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: A Python that prints its prefix if it has aws_cdk, and otherwise what it was started with.
STAND_IN = """#!/bin/sh
if [ "$1" = -c ]; then echo {prefix}; else echo "{name} $*"; fi
"""


def run(folder: Path, pythons: dict[str, bool]) -> subprocess.CompletedProcess[str]:
    """Start the app as the CDK does, where just these Pythons are; which of them have aws_cdk."""
    search = folder / "bin"
    search.mkdir()
    for name, has in pythons.items():
        place = folder / name if "/" in name else search / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if name == "python3":  # a real one, whose aws_cdk says that it is imported
            real = folder / "real"
            venv.create(real)
            place.write_text(f'#!/bin/sh\nexec {real}/bin/python "$@"\n')
            if has:
                (packages,) = real.glob("lib/python*/site-packages")
                (packages / "aws_cdk.py").write_text("print('python3 app.py'); raise SystemExit\n")
        else:
            place.write_text(STAND_IN.format(name=name, prefix="/a/prefix" if has else ""))
        place.chmod(0o755)
    shutil.copy(ROOT / "app.py", folder)
    command = json.loads((ROOT / "cdk.json").read_text())["app"]
    return subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": str(search)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({".venv/bin/python": True, "python3": True}, ".venv/bin/python"),
        ({".venv/bin/python": True, "python3": False}, ".venv/bin/python"),
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


@pytest.mark.parametrize(
    "pythons", [{"python3": False}, {".venv/bin/python": False, "python3": False}]
)
def test_without_one_it_says_what_to_install(tmp_path: Path, pythons: dict[str, bool]) -> None:
    done = run(tmp_path, pythons)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "error: no Python here can import aws_cdk: pip install -r requirements/laptop.txt\n"
    )
