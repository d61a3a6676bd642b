"""The workflows break no rule of zizmor (syntax, pinned actions, rights, injection), and run what a
laptop runs. What only GitHub itself can show is in docs/limits.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rehearsal.images import SOURCES
from tests.conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ZIZMOR = Path(sys.executable).parent / "zizmor"


def zizmor(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ZIZMOR, "--offline", "--persona", "pedantic", "--no-progress", *files],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_linter_finds_nothing() -> None:
    assert [path.name for path in WORKFLOWS] == ["check.yml", "images.yml"]
    run = zizmor(*WORKFLOWS)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_linter_looks(tmp_path: Path) -> None:
    (tmp_path / ".github" / "workflows").mkdir(parents=True)
    broken = tmp_path / ".github" / "workflows" / "broken.yml"
    broken.write_text(
        "on: pull_request_target\npermissions: write-all\njobs:\n  a:\n    runs-on: ubuntu-24.04\n"
        "    steps:\n      - uses: actions/checkout@main\n"
        "      - run: echo ${{ github.event.pull_request.title }}\n"
    )
    run = zizmor(broken)
    assert run.returncode != 0
    for rule in ("unpinned-uses", "template-injection", "dangerous-triggers"):
        assert rule in run.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.stem))
def test_every_action_is_pinned_to_a_commit(path: Path) -> None:
    used = re.findall(r"uses: (\S+)", path.read_text())
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", each)] == []


def test_they_run_what_a_laptop_runs() -> None:
    check, images = (path.read_text() for path in WORKFLOWS)
    assert "run: .ci/run" in check
    assert "python3 -m containers.publish" in images
    assert "docker push" not in images


def test_a_change_of_any_source_of_the_images_starts_their_pipeline() -> None:
    text = (ROOT / ".github" / "workflows" / "images.yml").read_text()
    (paths,) = re.findall(r"^    paths: \[(.*)\]$", text, re.MULTILINE)
    found = {each.strip(' "').removesuffix("/**") for each in paths.split(",")}
    assert found == {*SOURCES}
