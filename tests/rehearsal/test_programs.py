"""Programs as users bring them, unchanged, on two containers.

``tests/containers/program`` has the launcher's details, without containers.
"""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from contract import exits
from rehearsal.cycle import Rehearsal
from tests.conftest import ROOT
from tests.rehearsal.conftest import trainctl

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def submit(rehearsal: Rehearsal, code: Path, run: str, *words: str) -> str:
    """Start a program on two nodes; return the job's id."""
    options = ("--code", str(code), "--nodes", "2", "--run", run, "--env", "OMP_NUM_THREADS=1")
    done = trainctl(rehearsal, "submit", *options, "--yes", "--", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ended(rehearsal: Rehearsal, job: str) -> tuple[int, str]:
    """Wait for a job; return its exit code and its log."""
    try:
        done = trainctl(rehearsal, "wait", job, "--json", timeout_s=300)
    except subprocess.TimeoutExpired:
        trainctl(rehearsal, "stop", job, "--yes")  # it must not be in the way of other tests
        raise
    return done.returncode, trainctl(rehearsal, "logs", job).stdout


def folder_of(package: str, *files: str, into: Path) -> Path:
    """A folder with a package's own examples or tests, unchanged."""
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    into.mkdir()
    for file in files:
        shutil.copy(Path(found.origin).parent / file, into)
    return into


def test_unchanged_programs_train_on_two_nodes(deployment: Rehearsal, tmp_path: Path) -> None:
    """Hugging Face's Trainer, and accelerate's own test, by a job of two commands.

    The second needs a folder that all processes share. The nodes of a deployment do not have one,
    but here both are on one host, and share its cache.
    """
    script = "test_utils/scripts/test_script.py"
    code = folder_of("accelerate", script, into=tmp_path / "programs")
    shutil.copy(ROOT / "examples/hf_trainer/train.py", code)
    both = 'torchrun train.py && mkdir -p "$HF_HUB_CACHE" && cd "$HF_HUB_CACHE" && '
    both += 'torchrun "$OLDPWD/test_script.py"'
    exit_code, log = ended(deployment, submit(deployment, code, "programs", "sh", "-c", both))
    assert exit_code == exits.OK, log
    starts = re.findall(r"^\[node (\d)\] rank (\d) of 2 starts at step 0$", log, re.MULTILINE)
    assert sorted(node for node, _ in starts) == ["0", "1"], log
    assert sorted(rank for _, rank in starts) == ["0", "1"], log
    result = json.loads(re.findall(r"result (\{.*\})", log)[-1])
    assert (result["world_size"], result["steps"]) == (2, 60)
    for part in ("Training integration test", "Breakpoint trigger test"):
        nodes = [line[:8] for line in log.splitlines() if f"**{part}**" in line]
        assert sorted(nodes) == ["[node 0]", "[node 1]"], log
