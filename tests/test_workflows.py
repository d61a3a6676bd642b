"""The workflows break no rule of zizmor (syntax, pinned actions, rights, injection), and run what a
laptop runs. What only GitHub itself can show is in docs/limits.md."""

import re
import subprocess
import sys
from pathlib import Path

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
    assert [path.name for path in WORKFLOWS] == ["check.yml", "images.yml", "night.yml"]
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


def test_they_run_what_a_laptop_runs() -> None:
    check, images, night = (path.read_text() for path in WORKFLOWS)
    assert "run: .ci/run" in check
    assert "run: make night" in night
    assert "python3 -m containers.publish" in images
    assert "docker push" not in images


def jobs(path: Path) -> dict[str, str]:
    """The text of each job of a workflow."""
    body = path.read_text().partition("\njobs:\n")[2]
    parts = re.split(r"^  (\w+):\n", body, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_images_are_pushed_from_main_after_the_checks_and_never_for_a_pull_request() -> None:
    check, images, _ = WORKFLOWS
    assert "  push:\n    branches: [main]\n" in check.read_text()
    caller = jobs(check)["images"]
    assert "needs: check\n" in caller
    assert "if: github.event_name == 'push' &&" in caller
    # Nothing else starts it.
    assert re.findall(r"^on:\n((?:  .*\n)+)", images.read_text(), re.MULTILINE) == [
        "  workflow_call:\n"
    ]


def test_the_night_shows_its_table_after_a_failure_too() -> None:
    steps = jobs(WORKFLOWS[2])["night"].split("      - ")
    assert 'cat build/night.md >> "$GITHUB_STEP_SUMMARY"\n        if: always()\n' in steps[-1]
    assert "NIGHT := build/night.md\n" in (ROOT / "Makefile").read_text()


def test_what_runs_other_peoples_packages_has_no_rights_and_both_images_are_scanned() -> None:
    parts = jobs(WORKFLOWS[1])
    assert [*parts] == ["build", "push"]
    assert "id-token" not in parts["build"]
    assert "    needs: build\n" in parts["push"]
    assert "id-token: write" in parts["push"]
    assert all("run:\n        shell: bash" in part for part in parts.values())
    assert re.findall(r"image-ref: \$\{\{ vars\.(\w+) }}", parts["build"]) == [
        "WORKER_REPOSITORY",
        "HEAD_REPOSITORY",
    ]
    # The tag is that of the content: nothing is written into a file, and no pull request is made.
    text = WORKFLOWS[1].read_text()
    assert "--print-tag" in text
    writes = ("gh pr", "git push", "cdk.json", "contents: write")
    assert [word for word in writes if word in text] == []
