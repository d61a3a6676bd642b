"""The workflow that builds and pushes the images does so: each of its commands, in order. By night.

GitHub's actions are left out, and its artifact is a folder that both jobs see. The builder is
replaced: it needs GitHub's cache and Docker Hub, so the images are those of these tests.
"""

import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # PyYAML, which Ray brings along

from rehearsal.cycle import Rehearsal
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.night]

#: ``docker``, but for its builder.
DOCKER = """#!/bin/sh
if [ "$1" != buildx ]; then exec {docker} "$@"; fi
target='' name=''
while [ $# -gt 0 ]; do
    case $1 in --target) target=$2 ;; --tag) name=$2 ;; esac
    shift
done
exec {docker} tag "ecs-train-$target:{tag}" "$name"
"""


def program(folder: Path, name: str, text: str) -> None:
    """Write a program that takes the place of one of the runner's."""
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.mark.timeout(900)
def test_the_images_are_tried_out_saved_loaded_and_pushed(
    deployment: Rehearsal, tmp_path: Path
) -> None:
    state = deployment.state()
    registry = state["registry"]
    if not registry:
        pytest.skip("no registry: install docker-registry")
    programs = tmp_path / "bin"
    programs.mkdir()
    docker = subprocess.check_output(["which", "docker"], text=True).strip()
    program(programs, "docker", DOCKER.format(docker=docker, tag=state["image_tag"]))
    program(programs, "sudo", "#!/bin/sh\n")  # it makes room on GitHub's disk
    program(programs, "aws", "#!/bin/sh\necho password\n")
    variables = {
        "vars.HEAD_REPOSITORY": f"{registry}/workflow/head",
        "vars.WORKER_REPOSITORY": f"{registry}/workflow/worker",
        "vars.AWS_REGION": "us-east-1",
        "vars.TORCH_CPU_INDEX": "",
    }
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "DOCKER_CONFIG": str(tmp_path / "docker"),
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
    }
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "images.yml").read_text())
    ran, tag = [], ""
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            if "run" not in step:
                continue
            given = {**job["env"], **step.get("env", {})}
            done = subprocess.run(
                ["bash", "-eo", "pipefail", "-c", step["run"]],
                cwd=ROOT,
                env={**environment, **{k: filled(v, variables) for k, v in given.items()}},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{step['name']}: {done.stdout}{done.stderr}"
            ran.append(step["name"])
            if step.get("id") == "tag":
                _, _, tag = (tmp_path / "output").read_text().strip().partition("=")
                variables |= {"steps.tag.outputs.tag": tag, "needs.build.outputs.tag": tag}
        # Nothing but the artifact reaches the next job.
        for kind in ("HEAD", "WORKER"):
            image = f"{variables[f'vars.{kind}_REPOSITORY']}:{tag}"
            subprocess.run(["docker", "image", "rm", image], capture_output=True, check=True)
    assert len(ran) == 7
    pushed = json.loads((tmp_path / "summary").read_text())
    for kind in ("head", "worker"):
        digest = manifest_digest(registry, f"workflow/{kind}", tag)
        assert pushed[kind] == {"image": f"{registry}/workflow/{kind}:{tag}", "digest": digest}


def filled(value: str, variables: dict[str, str]) -> str:
    """A value of the workflow, with what GitHub puts in the place of its expressions."""
    for name, known in variables.items():
        value = value.replace(f"${{{{ {name} }}}}", known)
    assert "${{" not in value
    return value


def manifest_digest(registry: str, repository: str, tag: str) -> Any:
    """What the registry says it has under a tag."""
    request = urllib.request.Request(f"http://{registry}/v2/{repository}/manifests/{tag}")
    request.add_header("Accept", "application/vnd.docker.distribution.manifest.v2+json")
    with urllib.request.urlopen(request) as answer:
        return answer.headers["Docker-Content-Digest"]
