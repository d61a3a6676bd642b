"""A run works where paths have spaces and letters of other languages, and for an ordinary user
without a home folder that can be written."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.training.test_data import write_images

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="users and mounts of Linux"),
]

#: Runs a command as nobody. Python may lie in root's own folder (pyenv's does): for this command
#: alone, that folder is replaced by one that holds nothing but what Python needs.
AS_NOBODY = """
set -e
if ! setpriv --reuid=65534 --regid=65534 --clear-groups test -x "$BASE/bin/python3"; then
    mkdir -p "$SCRATCH/base"
    mount --bind "$BASE" "$SCRATCH/base"
    mount -t tmpfs -o mode=755 tmpfs /root
    mkdir -p "$BASE"
    mount --bind "$SCRATCH/base" "$BASE"
fi
exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"
"""


@pytest.fixture
def project() -> Iterator[Path]:
    """A checkout and its virtual environment in a folder with such a name.

    The environment has a Python of its own and everybody's packages: an installation takes minutes.
    """
    folder = Path("/tmp") / f"my project (é) {os.getpid()}"
    folder.mkdir()
    for package in ("contract", "training"):
        shutil.copytree(ROOT / package, folder / package)
    venv.create(folder / ".venv", symlinks=True, with_pip=False)
    (site,) = (folder / ".venv").glob("lib/python*/site-packages")
    (site / "everything.pth").write_text(sysconfig.get_path("purelib"))
    write_images(folder / "data")
    yield folder
    shutil.rmtree(folder)


def train(project: Path, *before: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(project / ".venv" / "bin" / "python"), "-m", "training.launch", "ddp"]
    command += ["--local", "--workers", "2", "--data", "data", "--epochs", "1", "--run", "mine"]
    kept = {k: v for k, v in os.environ.items() if k not in ("MPLCONFIGDIR", "PYTHONPATH")}
    return subprocess.run(
        [*before, *command, "--batch-per-worker", "16"],
        cwd=project,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_an_ordinary_user_trains_without_a_home(project: Path, tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can become another user")
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("this machine allows no mounts")
    readable = project / ".venv"
    packages = Path(sysconfig.get_path("purelib"))
    for folder in [*packages.parents, *readable.parents]:
        if not folder.stat().st_mode & 0o001 and folder != Path("/root"):
            pytest.skip(f"others cannot enter {folder}")
    shutil.chown(project, 65534, 65534)
    before = ("unshare", "--mount", "sh", "-c", AS_NOBODY, "sh")
    done = train(
        project,
        *before,
        HOME="/nonexistent",
        BASE=sys.base_prefix,
        SCRATCH=str(tmp_path),
        TMPDIR="/tmp",
    )
    assert done.returncode == 0, done.stderr
    assert (project / "runs" / "mine" / "report.html").stat().st_uid == 65534
    assert "/nonexistent" not in done.stderr
