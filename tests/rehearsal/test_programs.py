"""Programs as users bring them, unchanged, on two containers; some end early, some lose a node.

``tests/containers/program`` has the launcher's details, without containers.
"""

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from contract import exits
from contract import outputs as stack_outputs
from contract.job import JobSpec
from contract.nodes import HEAD, WORKER, Range
from rehearsal import abuse, programs
from rehearsal.abuse import Ended
from rehearsal.cycle import Rehearsal
from rehearsal.inventory import account_at
from rehearsal.programs import Program
from rehearsal.watch import Watch
from tests.conftest import ROOT
from tests.rehearsal.conftest import trainctl
from tests.rehearsal.test_jobs import container_of, eventually, nothing_is_left, printed, shown

pytestmark = [pytest.mark.slow, pytest.mark.engine]

#: The worker node of a job below is released after so long; others after a minute.
IDLE_S = 10
#: In that job's head: its program goes on once this is there.
GO = "/tmp/go"


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


def test_hugging_faces_trainer_trains_on_two_nodes(deployment: Rehearsal, tmp_path: Path) -> None:
    code = tmp_path / "trainer"
    code.mkdir()
    shutil.copy(ROOT / "examples/hf_trainer/train.py", code)
    exit_code, log = ended(deployment, submit(deployment, code, "trainer", "torchrun", "train.py"))
    assert exit_code == exits.OK, log
    starts = re.findall(r"^\[node (\d)\] rank (\d) of 2 starts at step 0$", log, re.MULTILINE)
    assert sorted(node for node, _ in starts) == ["0", "1"], log
    assert sorted(rank for _, rank in starts) == ["0", "1"], log
    result = json.loads(re.findall(r"result (\{.*\})", log)[-1])
    assert (result["world_size"], result["steps"]) == (2, 60)


@pytest.mark.night
def test_accelerates_own_test_passes_on_two_nodes(deployment: Rehearsal, tmp_path: Path) -> None:
    """It needs a folder that all processes share. The nodes of a deployment do not have one, but
    here both are on one host, and share its cache."""
    code = folder_of(
        "accelerate", "test_utils/scripts/test_script.py", into=tmp_path / "accelerate"
    )
    command = 'mkdir -p "$HF_HUB_CACHE" && cd "$HF_HUB_CACHE" && torchrun "$OLDPWD/test_script.py"'
    exit_code, log = ended(deployment, submit(deployment, code, "accelerate", "sh", "-c", command))
    assert exit_code == exits.OK, log
    for part in ("Training integration test", "Breakpoint trigger test"):
        nodes = [line[:8] for line in log.splitlines() if f"**{part}**" in line]
        assert sorted(nodes) == ["[node 0]", "[node 1]"], log


@pytest.mark.night
@pytest.mark.timeout(900)
def test_examples_of_ray_run_and_those_that_ask_for_too_much_end(
    deployment: Rehearsal, tmp_path: Path
) -> None:
    """Ray's own examples, and beside them a program that leaves its worker node idle.

    The first job has Tune queue twenty trials where four fit, trains, and then asks for a fifth
    worker, which it can never have. The idle one asks for GPUs in the end.
    """
    linear, search = "torch_linear_example.py", "async_hyperband_example.py"
    code = folder_of(
        "ray", f"train/examples/pytorch/{linear}", f"tune/examples/{search}", into=tmp_path / "ray"
    )
    examples = (f"{search} --smoke-test", f"{linear} -n 2", f"{linear} -n 5")
    words = " && ".join(f"python {each}" for each in examples)
    job = submit(deployment, code, "ray", "sh", "-c", words)
    container_of(deployment, job, HEAD)  # an execution shows some time after its start
    asleep = start_sleeping(deployment, job, then=("python", linear, "-n", "2", "--use-gpu"))
    head = container_of(deployment, asleep, HEAD)
    container_of(deployment, asleep, WORKER)
    watch = Watch(deployment, asleep)
    said = f"1 worker node has had nothing to do for {IDLE_S} s and will be released"
    eventually("it is said", lambda: printed(watch, said), timeout_s=120)
    eventually("it is released", lambda: no_worker(watch), timeout_s=90)
    deployment.engine("exec", head, "touch", GO)

    exit_code, log = ended(deployment, asleep)
    assert exit_code == exits.ASKS_TOO_MUCH, log
    assert "the program asks for 2 workers of 1 GPU each; this job has at most 0" in log

    exit_code, log = ended(deployment, job)
    assert exit_code == exits.ASKS_TOO_MUCH, log
    assert shown(deployment, job)["reason"] == "failed: asks for more than the job can have"
    assert "Best hyperparameters found" in log
    assert "No available node types" not in log, "of trials that wait their turn"
    assert ranks(log) == ["0", "1"], log
    assert re.search(r"^\{'loss': [\d.e-]+\}$", log, re.MULTILINE), log
    assert "the program asks for 5 workers of 1 CPU each; this job has at most 4" in log
    nothing_is_left(deployment)


def ranks(log: str) -> list[str]:
    """Of the workers of Ray Train, from the list that it prints of each group."""
    return re.findall(r"\(ip=[\d.]+, pid=\d+\) world_rank=(\d+)", log)


def start_sleeping(rehearsal: Rehearsal, like: str, *, then: Sequence[str]) -> str:
    """Start a job with the code of another one, whose command leaves its worker node idle until
    the file ``GO`` is there on its head; return its id."""
    machine = rehearsal.outputs(stack_outputs.TRAINING_STACK)[stack_outputs.JOBS]
    states = account_at(rehearsal.state()["endpoint"]).client("stepfunctions")
    execution = f"{machine}:{like}".replace(":stateMachine:", ":execution:")
    order = states.describe_execution(executionArn=execution)["input"]
    spec = replace(
        JobSpec.from_json(order),
        run="asleep",
        command=("sh", "-c", f"until [ -e {GO} ]; do sleep 1; done; {' '.join(then)}"),
        nodes=Range(1, 1),
        idle_s=IDLE_S,
    )
    job = f"asleep-{like}"
    states.start_execution(stateMachineArn=machine, name=job, input=spec.to_json())
    return job


def no_worker(watch: Watch) -> bool:
    watch.has_ended()
    return not watch.containers(WORKER, 1)


@pytest.mark.night
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
