"""The tag of the images changes with every file that they hold, and with nothing else."""

import re
from pathlib import Path

import pytest

from contract.images import SOURCES, content_tag
from tests.conftest import ROOT


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("contract", "store", "training", "containers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("x = 1\n")
    (tmp_path / "requirements").mkdir()
    for name in ("requirements.lock", "requirements/training.txt", "requirements/laptop.txt"):
        (tmp_path / name).write_text("torch==2\n")
    return tmp_path


#: Files that are in the images, and others.
HELD = """contract/a.py store/a.py training/a.py containers/a.py requirements.lock
    requirements/training.txt training/new.py containers/program/new.py containers/Dockerfile"""
OTHER = """training/__pycache__/a.pyc docs/a.md containers/publish.py app.py requirements/laptop.txt
    training/.DS_Store contract/.idea/x.xml training/x.egg-info/PKG-INFO training/README.md"""


@pytest.mark.parametrize("name", [*HELD.split(), *OTHER.split()])
def test_a_change_of_what_the_images_hold_changes_the_tag(project: Path, name: str) -> None:
    before = content_tag(project)
    assert re.fullmatch("content-.{12}", before)
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text("x = 2\n")
    assert (content_tag(project) != before) == (name in HELD.split())


def test_a_renamed_file_and_a_moved_line_change_it_too(project: Path) -> None:
    before = content_tag(project)
    (project / "training" / "a.py").rename(project / "training" / "b.py")
    renamed = content_tag(project)
    (project / "training" / "b.py").write_text("")
    (project / "training" / "c.py").write_text("x = 1\n")
    moved = content_tag(project)
    (project / "containers" / "a.py").chmod(0o755)  # that a file may be run is in the images too
    assert len({before, renamed, moved, content_tag(project)}) == 4


def test_the_build_gets_the_files_that_are_hashed() -> None:
    ignored = (ROOT / "containers" / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules == [
        "*",
        *(f"!{source}" for source in SOURCES),
        "**/__pycache__",
        "**/.*",
        "**/*.egg-info",
        "**/README.md",
        "containers/Dockerfile.dockerignore",
        "containers/publish.py",
    ]
