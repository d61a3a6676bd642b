"""Tasks that ECS's hosts would not run are refused, with a stand-in for the Docker Engine."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from contract.job import JobStatus
from contract.job_outcome import verdict
from tests.conftest import ROOT

PYTHON = ROOT / ".venv-aws" / "bin" / "python"

#: An engine whose host is x86-64 and whose one image is for the processors that are asked for.
RUN = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace

import docker
from rehearsal.ministack import ecs_runtime
from rehearsal.ministack.internals import ecs

image = SimpleNamespace(attrs={"Architecture": sys.argv[1], "RepoDigests": []})
started = []
docker.from_env = lambda **_: SimpleNamespace(
    version=lambda: {"Arch": "amd64"},
    networks=SimpleNamespace(get=str),
    images=SimpleNamespace(get=lambda _name: image),
    containers=SimpleNamespace(run=lambda name, **_: started.append(name)),
)
settings = ecs_runtime.RuntimeSettings(
    name="a", network="a", gateway="a", registry="", metadata="a", folder=Path("/nonexistent")
)
arguments = {"labels": {"com.amazonaws.ecs.task-arn": "none"}}
try:
    engine = ecs_runtime.ContainerEngine(settings)
    engine.run(None, {"image": "own:1", "name": "main"}, arguments)
except ecs._ImagePullError as error:
    print(json.dumps({"started": started, "error": str(error)}))
else:
    print(json.dumps({"started": started, "error": ""}))
"""
REFUSED = "own:1: image Manifest does not contain descriptor matching platform 'linux/amd64'"


def in_emulator(script: str, *arguments: str | Path) -> tuple[Any, str]:
    """The JSON that a script prints last in the emulator's Python, and its warnings."""
    if not PYTHON.exists():
        pytest.skip("no AWS emulator: `make venv-aws` installs it")
    run = subprocess.run(
        [PYTHON, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1]), run.stderr


@pytest.mark.parametrize(("architecture", "error"), [("amd64", ""), ("arm64", REFUSED)])
def test_an_image_for_other_processors_does_not_start(architecture: str, error: str) -> None:
    found, _ = in_emulator(RUN, architecture)
    assert found == {"started": [] if error else ["own:1"], "error": error}


#: What Docker is asked to run for a task definition that wants this whole machine.
ASK = """
import json, sys
from pathlib import Path
from types import SimpleNamespace

import docker
from rehearsal.ministack import ecs_runtime
from rehearsal.ministack.internals import ecs

docker.from_env = lambda **_: SimpleNamespace(
    version=lambda: {"Arch": "amd64"}, networks=SimpleNamespace(get=str), api=None
)
settings = ecs_runtime.RuntimeSettings(
    name="a", network="a", gateway="a", registry="", metadata="a", folder=Path(sys.argv[1])
)
ecs._tasks["t"] = {"capacityProviderName": "p"}
container = {
    "name": "main",
    "image": "own:1",
    "privileged": True,
    "linuxParameters": {"capabilities": {"add": ["SYS_ADMIN"]}},
    "mountPoints": [{"sourceVolume": name, "containerPath": f"/{name}"} for name in "abcd"],
}
task = {"pidMode": "host", "networkMode": "host", "volumes": [
    {"name": "a", "host": {"sourcePath": "/var/cache/train"}},
    {"name": "b", "host": {"sourcePath": "/../../.."}},
    {"name": "c", "host": {"sourcePath": "/"}},
    {"name": "d", "host": {"sourcePath": "/var/cache/train/link"}},
]}
engine = ecs_runtime.ContainerEngine(settings)
given = (container, task, {}, {}, None, True, "t", "t", None, "c")
stock = engine._stock_build_run_kwargs(*given)
print(json.dumps({"stock": [*stock], "own": engine.build_run_kwargs(*given)}, default=str))
"""


def test_no_task_definition_opens_this_machine(tmp_path: Path) -> None:
    cache = tmp_path / "hosts" / "p" / "var" / "cache" / "train"
    cache.mkdir(parents=True)
    (cache / "link").symlink_to("/etc")  # as a container could leave it there
    found, warnings = in_emulator(ASK, tmp_path)
    powers = {"privileged", "cap_add", "pid_mode", "network_mode"}
    assert powers <= {*found["stock"]}, "the emulator would ask for them"
    assert not powers & found["own"].keys()
    assert found["own"]["volumes"] == [f"{cache}:/a:rw"]
    assert warnings.count("which no task needs") == 4
    assert warnings.count("is not mounted") == 3


#: ECS's request for a mark on a host -> the resources that policies are asked about.
MARK = """
import json
from rehearsal.ministack import calls

host = {"name": "silent", "targetId": "arn:aws:ecs:us-east-1:1:container-instance/c/h1"}
asked = calls.ecs_calls("keeper", "ecs:PutAttributes", {"cluster": "c", "attributes": [host]})
print(json.dumps([each.resource.partition(":container-")[2] for each in asked]))
"""


def test_a_mark_on_a_host_is_a_right_on_that_host() -> None:
    assert in_emulator(MARK)[0] == ["instance/c/h1"]


def test_a_job_with_an_image_for_other_processors_is_not_tried_again() -> None:
    reason = f"CannotPullContainerError: {REFUSED}"
    task = {"StopCode": "TaskFailedToStart", "StoppedReason": reason, "Containers": []}
    found = verdict(task, "", deadline=2**40, capacity_deadline=2**40, attempt=1, in_a_row=1)
    assert (found.status, found.again) == (JobStatus.IMAGE_NOT_FOUND, False)
