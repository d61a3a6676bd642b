"""Programs as users bring them, unchanged, on two containers; some lose a node.

``tests/containers/program`` has the launcher's details, without containers.
"""

import importlib.util
import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from contract import exits
from contract.nodes import HEAD, WORKER
from rehearsal import abuse, programs
from rehearsal.abuse import Ended
from rehearsal.cycle import Rehearsal
from rehearsal.programs import Program
from tests.conftest import ROOT
from tests.rehearsal.conftest import trainctl
from tests.rehearsal.test_jobs import nothing_is_left

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
        done = trainctl(rehearsal, "wait", job, "--json", timeout_s=400)
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


@pytest.mark.timeout(900)
def test_a_lost_head_and_a_lost_worker_change_nothing(
    deployment: Rehearsal, tmp_path: Path
) -> None:
    """Two programs at a time, each of which loses a node while it trains, with no laptop attached.

    ``make abuse`` has more of them, which lose both kinds, at other moments. Here no kill waits for
    the next copy into the bucket: Ray Train saves there at once, and of the other program the node
    that saves is left alone; the one that replaces the lost one gets the files from the bucket.
    """
    steps, epochs = ("--save-every", "200", "--steps"), ("--epochs",)
    chosen: dict[str, tuple[tuple[str, ...], int, str, int | None]] = {
        "ddp": (steps, 8000, WORKER, 0),
        "ray_train": (epochs, 15, HEAD, None),
    }

    def run(program: Program) -> tuple[Ended, list[str]]:
        options, length, victim, spared = chosen[program.name]
        short = replace(
            program,
            words=(*program.words[:2], *options, str(length)),
            ends_with={**dict.fromkeys(program.ends_with, length), "world_size": abuse.NUM_NODES},
            length=length,
        )
        code = short.bring(tmp_path)
        own = Path(shutil.copytree(code, tmp_path / f"own-{program.name}"))
        found = abuse.Abuse(deployment).disturbed(
            short, code, seed=0, victims=(victim,), in_training=1, spared=spared
        )
        return found, found.faults(short, abuse.undisturbed(short, own))

    with ThreadPoolExecutor() as pool:
        results = [*pool.map(run, (each for each in programs.PROGRAMS if each.name in chosen))]
    for found, faults in results:
        text = "\n".join(f"{line.at:.1f} {line.text}" for line in found.lines)
        assert faults == [], text
        assert len(found.kills) == 1, f"it was too quick to be killed\n{text}"
        assert found.starts(rank=0)[-1][2] > 0, f"it has not resumed\n{text}"
    by_ddp = [line.text for line in results[0][0].lines]
    assert any(re.search("files: 1 restored from .*/node-0", text) for text in by_ddp), by_ddp
    heads = {line.task for line in results[1][0].lines if ": head on " in line.text}
    assert len(heads) == 2, "the one that was lost, and another one"
    nothing_is_left(deployment)
