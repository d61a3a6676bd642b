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

from rehearsal.cycle import Rehearsal
from tests.conftest import ROOT
from tests.rehearsal.conftest import trainctl

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(600)]


def submit(rehearsal: Rehearsal, code: Path, run: str, *words: str) -> str:
    """Start a program on two nodes; return the job's id."""
    options = ("--code", str(code), "--nodes", "2", "--run", run, "--env", "OMP_NUM_THREADS=1")
    done = trainctl(rehearsal, "submit", *options, "--yes", "--", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def log_of(rehearsal: Rehearsal, job: str) -> str:
    """Wait for a job, which must succeed; return its log."""
    try:
        done = trainctl(rehearsal, "wait", job, "--json", timeout_s=300)
    except subprocess.TimeoutExpired:
        trainctl(rehearsal, "stop", job, "--yes")  # it must not be in the way of other tests
        raise
    log = trainctl(rehearsal, "logs", job).stdout
    assert done.returncode == 0, f"{done.stdout}\n{log}"
    return log


def test_unchanged_programs_train_on_two_nodes(deployment: Rehearsal, tmp_path: Path) -> None:
    """Hugging Face's Trainer, and accelerate's own test of its steps.

    accelerate's ``test_script.py`` needs a file that all processes share.
    """
    package = importlib.util.find_spec("accelerate")
    assert package is not None
    assert package.origin is not None
    folder = tmp_path / "accelerate-test"
    folder.mkdir()
    shutil.copy(Path(package.origin).parent / "test_utils" / "scripts" / "test_sync.py", folder)
    # One after the other: six nodes at once are too many for two processors.
    trainer = submit(deployment, ROOT / "examples/hf_trainer", "trainer", "torchrun", "train.py")
    log = log_of(deployment, trainer)
    starts = re.findall(r"^\[node (\d)\] rank (\d) of 2 starts at step 0$", log, re.MULTILINE)
    assert sorted(node for node, _ in starts) == ["0", "1"], log
    assert sorted(rank for _, rank in starts) == ["0", "1"], log
    result = json.loads(re.findall(r"result (\{.*\})", log)[-1])
    assert (result["world_size"], result["steps"]) == (2, 60)

    of_accelerate = submit(deployment, folder, "accelerate-test", "torchrun", "test_sync.py")
    log = log_of(deployment, of_accelerate)
    distributed = {line[:8] for line in log.splitlines() if "**Test Distributed" in line}
    assert distributed == {"[node 0]", "[node 1]"}, log
