"""A run works where paths have spaces and letters of other languages, and without a home folder."""

import os
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.training.test_data import write_images

pytestmark = pytest.mark.slow


@pytest.fixture
def project() -> Iterator[Path]:
    """A checkout and its virtual environment in a folder with such a name.

    The environment has a Python of its own and everybody's packages: an installation takes minutes.
    """
    folder = Path("/tmp") / f"my project (é) {os.getpid()}"
    folder.mkdir()
    for package in ("contract", "store", "training"):
        shutil.copytree(ROOT / package, folder / package)
    venv.create(folder / ".venv", symlinks=True, with_pip=False)
    (site,) = (folder / ".venv").glob("lib/python*/site-packages")
    (site / "everything.pth").write_text(sysconfig.get_path("purelib"))
    write_images(folder / "data")
    yield folder
    shutil.rmtree(folder)


def test_a_run_needs_no_home_and_no_plain_path(project: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("MPLCONFIGDIR", "PYTHONPATH")}
    words = ["--local", "--workers", "2", "--data", "data", "--epochs", "1", "--run", "mine"]
    done = subprocess.run(
        [project / ".venv/bin/python", "-m", "training.launch", "ddp", *words],
        cwd=project,
        env={**kept, "HOME": "/dev/null/none"},  # which root cannot make either
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (project / "runs" / "mine" / "report.html").exists()
    assert "/dev/null" not in done.stderr
