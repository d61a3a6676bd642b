"""Quick tests fail for each fault of ``planted_faults.toml``, planted in a copy of the project."""

import os
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conftest import ROOT, copy_project

FAULTS: Final[dict[str, dict[str, Any]]] = tomllib.loads(
    (ROOT / "tests" / "planted_faults.toml").read_text()
)
#: What tests need and git does not track.
_LINKED: Final = (".venv", ".venv-aws", "node_modules", "../shared")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project as it is now."""
    copy = tmp_path_factory.mktemp("faults") / "project"
    copy_project(copy)
    for name in _LINKED:
        (copy / name).symlink_to((ROOT / name).resolve())
    return copy


def _run(project: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    paths = [f"tests/{name}" for name in tests]
    options = ["-qx", "-p", "no:cacheprovider", "-m", "not slow and not night", "--timeout=600"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *paths],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        check=False,
    )


_without_fault = cache(_run)


@pytest.mark.night
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_its_tests(name: str, project: Path) -> None:
    fault, tests = FAULTS[name], tuple(FAULTS[name]["tests"])
    file = project / fault["file"]
    text = file.read_text()
    assert text.count(fault["old"]) == 1, "the fault does not apply: change planted_faults.toml"
    clean = _without_fault(project, tests)
    assert clean.returncode == 0, clean.stdout[-2000:]
    file.write_text(text.replace(fault["old"], fault["new"]))
    try:
        found = _run(project, tests)
    finally:
        file.write_text(text)
    print(*found.stdout.splitlines()[-1:])
    assert found.returncode == 1, f"{fault['felt']}, and no test fails:\n{found.stdout[-2000:]}"
