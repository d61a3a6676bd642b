"""The stacks are destroyed, the local AWS dies, a user presses Ctrl-C: nothing is left.

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

from contract import exits, outputs
from contract.nodes import WORKER
from rehearsal import children
from rehearsal.children import Steps
from rehearsal.cycle import Rehearsal
from rehearsal.engine import LABEL
from rehearsal.inventory import account_at
from rehearsal.rehearse import SUBMIT
from tests.conftest import ROOT
from tests.eventually import eventually
from tests.rehearsal.conftest import succeeded, trainctl

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def test_after_the_stacks_are_destroyed_the_account_is_as_it_was(deployment: Rehearsal) -> None:
    deployment.undeploy(Steps(1))  # raises where something is left
    assert deployment.state()["before"], "the account was looked at before the stacks"


def test_after_the_local_aws_has_died_commands_say_so_and_all_can_be_removed(
    deployment: Rehearsal,
) -> None:
    image = f"ecs-train-{WORKER}:{deployment.state()['image_tag']}"
    a_node = ("--detach", "--label", f"{LABEL}={deployment.name}", "--entrypoint", "sleep")
    deployment.engine("run", *a_node, image, "600")
    for pid in children.find(deployment.name):
        os.kill(pid, signal.SIGKILL)
    run = trainctl(deployment, "cluster", "status")
    assert run.returncode == exits.STORAGE
    assert "AWS does not answer" in run.stderr
    assert "trainctl local status" in run.stderr
    assert "Traceback" not in run.stderr
    shown = trainctl(deployment, "local", "status")
    assert "the local AWS does not answer: trainctl local down" in shown.stderr
    succeeded(deployment, "local", "down")
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
def left_over(rehearsal: Rehearsal) -> list[str]:
    """What the engine has of this rehearsal: another one may run on the same engine."""
    kinds = ("container", "network", "volume")
    return [each for kind in kinds for each in rehearsal.engine.labelled(kind, rehearsal.name)]


def cloudformation_makes_a_stack(rehearsal: Rehearsal) -> bool:
    try:
        client = account_at(rehearsal.state()["endpoint"]).client("cloudformation")
        client.describe_stacks(StackName=outputs.CORE_STACK)
    except (KeyError, BotoCoreError, ClientError):
        return False
    return True


def containers_run(rehearsal: Rehearsal) -> bool:
    return len(rehearsal.engine.labelled("container", rehearsal.name)) == 3


@pytest.mark.parametrize(
    ("step", "sign", "after_s", "is_kept"),
    [
        ("start the local AWS", None, 0.3, True),
        pytest.param(
            "deploy CoreStack", cloudformation_makes_a_stack, 0.0, True, marks=pytest.mark.night
        ),
        # Without a network it trains on digits: the start of the command is the same.
        pytest.param(
            SUBMIT.partition(" --preset")[0], containers_run, 1.0, False, marks=pytest.mark.night
        ),
    ],
    ids=["emulator starts", "stack is made", "job starts"],
)
def test_an_interrupted_rehearsal_leaves_nothing_but_what_it_names(
    deployment: Rehearsal,
    step: str,
    sign: Callable[[Rehearsal], bool] | None,
    after_s: float,
    is_kept: bool,
    tmp_path: Path,
) -> None:
    """While it comes up, what is up is kept for the same command; later all of it is removed."""
    deployment.down(Steps(1))  # what the tests above have left
    assert left_over(deployment) == []
    environment = {k: v for k, v in os.environ.items() if k != children.NAME}
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
                lambda: step in said.read_text() and (sign is None or sign(deployment)),
                timeout_s=480,
                over=lambda: run.poll() is not None and said.read_text(),
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
    assert ("what is up stays: the same command continues, trainctl local down" in text) == is_kept
    if is_kept:
        down = [sys.executable, "-m", "trainctl", "local", "down"]
        subprocess.run(down, cwd=ROOT, env=environment, check=True, timeout=120)
    assert left_over(deployment) == []
    assert children.find(deployment.name) == []
    assert not deployment.state()
