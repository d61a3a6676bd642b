"""However a rehearsal ends, nothing of it is left: the local AWS dies, or a user presses Ctrl-C.

The last of the tests in containers: they take down what the others have used.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from contract import exits, outputs, runs
from rehearsal import processes
from rehearsal.cycle import Rehearsal
from rehearsal.inventory import account_at
from rehearsal.steps import Steps
from tests.conftest import ROOT
from tests.rehearsal.conftest import trainctl

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def eventually(what: str, condition: Callable[[], bool], *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.2)


def test_after_the_local_aws_has_died_commands_say_so_and_all_can_be_removed(
    deployment: Rehearsal,
) -> None:
    assert trainctl(deployment, "cluster", "up", "--yes", "--no-wait").returncode == 0
    eventually(
        "containers run",
        lambda: len(deployment.engine.labelled("container", deployment.name)) == 3,
        timeout_s=60,
    )
    for pid in processes.find(deployment.name):
        if pid != os.getpid():
            os.kill(pid, signal.SIGKILL)
    run = trainctl(deployment, "cluster", "status")
    assert run.returncode == exits.FAILED
    assert "AWS does not answer" in run.stderr
    assert "trainctl local status" in run.stderr
    assert "Traceback" not in run.stderr
    shown = trainctl(deployment, "local", "status")
    assert "the local AWS does not answer: trainctl local down" in shown.stderr
    removed = trainctl(deployment, "local", "down")
    assert removed.returncode == 0, removed.stderr
    assert deployment.engine.labelled("container", deployment.name) == []
    assert deployment.engine.labelled("network", deployment.name) == []
    # No local deployment can give the command its variables now.
    again = subprocess.run(
        [sys.executable, "-m", "trainctl", "local", "down"],
        cwd=ROOT,
        env={**os.environ, "DOCKER_HOST": deployment.engine.address},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert again.stderr.endswith("Nothing was up.\n")


# --- interruptions --------------------------------------------------------------------------------
def engine_state(rehearsal: Rehearsal) -> tuple[str, str, str]:
    return (
        rehearsal.engine("ps", "--all", "--quiet"),
        rehearsal.engine("network", "ls", "--quiet"),
        rehearsal.engine("volume", "ls", "--quiet"),
    )


def cloudformation_makes_a_stack(rehearsal: Rehearsal) -> bool:
    try:
        client = account_at(rehearsal.state()["endpoint"]).client("cloudformation")
        client.describe_stacks(StackName=outputs.CORE_STACK)
    except (KeyError, BotoCoreError, ClientError):
        return False
    return True


def containers_run(rehearsal: Rehearsal) -> bool:
    return len(rehearsal.engine.labelled("container", rehearsal.name)) == 3


def a_checkpoint_is_saved(rehearsal: Rehearsal) -> bool:
    """In the bucket, and so the recipe trains."""
    account = account_at(rehearsal.state()["endpoint"])
    bucket = rehearsal.outputs(outputs.CORE_STACK)[outputs.BUCKET]
    prefix = f"{runs.RUNS_PREFIX}/rehearsal/{runs.CHECKPOINTS_DIR}/"
    return bool([*account.items("s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=prefix)])


@pytest.mark.parametrize(
    ("step", "sign", "after_s"),
    [
        ("start the local AWS", None, 0.3),
        # The templates are being made.
        pytest.param("deploy CoreStack", None, 2.0, marks=pytest.mark.night),
        pytest.param(
            "deploy CoreStack", cloudformation_makes_a_stack, 0.0, marks=pytest.mark.night
        ),
        ("bring up the standing cluster", containers_run, 1.0),
        pytest.param("train the DDP recipe", a_checkpoint_is_saved, 0.0, marks=pytest.mark.night),
    ],
    ids=["emulator starts", "synth", "stack is made", "cluster starts", "training"],
)
def test_an_interrupted_rehearsal_leaves_nothing(
    deployment: Rehearsal,
    step: str,
    sign: Callable[[Rehearsal], bool] | None,
    after_s: float,
    tmp_path: Path,
) -> None:
    deployment.down(Steps(1))  # what the tests above have left
    before = engine_state(deployment)
    environment = {k: v for k, v in os.environ.items() if k != processes.NAME}
    said = tmp_path / "said"
    with said.open("wb") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "rehearsal", "all"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            eventually(
                step,
                lambda: (
                    run.poll() is not None
                    or (step in said.read_text() and (sign is None or sign(deployment)))
                ),
                timeout_s=480,
            )
            time.sleep(after_s)
            last = re.findall(r"\[ *\d+/\d+\] (.*?) \.\.\.", said.read_text())[-1]
            run.send_signal(signal.SIGINT)
            code = run.wait(timeout=120)
        finally:
            run.kill()
    text = said.read_text()
    assert step in last, f"interrupted too late, in the step {last!r}"
    assert code == exits.INTERRUPTED, text
    assert "Traceback" not in text
    assert engine_state(deployment) == before
    assert processes.find(deployment.name) == []
    assert not deployment.state()
