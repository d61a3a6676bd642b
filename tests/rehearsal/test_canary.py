"""`make canary` beside the deployment of the other tests: nothing of it is left."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from contract import outputs as stack_outputs
from contract.nodes import HEAD, WORKER
from rehearsal import canary, replay
from rehearsal.answers import read
from rehearsal.canary import Canary
from rehearsal.cycle import Rehearsal
from rehearsal.inventory import account_at

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1500)]


@pytest.fixture
def here(deployment: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    """The canary's account is the local AWS; its images come from the rehearsal's registry."""

    def push(_: Canary) -> None:
        account = account_at(deployment.state()["endpoint"])
        for node in (HEAD, WORKER):
            uri = account.outputs(canary.CORE)[stack_outputs.REPOSITORIES[node]]
            tag = deployment.state()["image_tag"]
            deployment._push(deployment.docker(), f"ecs-train-{node}:{tag}", uri, tag)

    for name, value in deployment.shell().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(canary, "push_images", push)
    monkeypatch.setattr(canary, "EVERY_S", 1)
    monkeypatch.setattr(canary, "shutil", SimpleNamespace(which=lambda _: "docker"))
    return deployment


@pytest.mark.night
@pytest.mark.usefixtures("here")
def test_a_canary_shows_what_it_must_and_leaves_nothing(tmp_path: Path) -> None:
    Canary(tmp_path).run(is_sure=True)  # raises where something is left, or nothing resumed
    rows = read(tmp_path / "answers.jsonl")
    assert [row["status"] for row in rows if row["kind"] == "execution"].count("SUCCEEDED") == 3
    assert [row for row in rows if row.get("stopCode") == "TerminationNotice"]
    assert [row for row in rows if row.get("ResourceStatus") == "DELETE_COMPLETE"]
    # Hosts come at once here, and a task that is told to stop has the state that AWS documents.
    found = replay.replay(tmp_path / "answers.jsonl")
    assert [each for each in found if "s in the model" not in each] == [
        each for each in found if "STOPPING" in each
    ]


def test_a_canary_that_is_interrupted_in_mid_job_leaves_nothing(
    here: Rehearsal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(one: Canary, _answers: object) -> None:
        if one.running():
            os.kill(os.getpid(), signal.SIGINT)
            monkeypatch.undo()  # once

    monkeypatch.setattr(Canary, "_look", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Canary(tmp_path).run(is_sure=True)
    assert not (tmp_path / "state.json").exists()  # and so nothing is left in the account
    assert here.engine.labelled("container", here.name) == []
