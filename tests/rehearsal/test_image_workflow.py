"""The workflow that builds and pushes the images does so: each of its commands, in order. By night.

GitHub's actions are left out, and the builder is replaced: it needs GitHub's cache and Docker Hub,
so the images are those of these tests.
"""

import json
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rehearsal.cycle import Rehearsal
from tests.image_workflow import run_workflow

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.night]

#: ``docker``, but for its builder: what the cache of GitHub Actions keeps are images of the tests.
DOCKER = """#!/bin/sh
if [ "$1" != buildx ]; then exec {docker} "$@"; fi
if [ "$2" = create ]; then exit 0; fi
target='' name=''
while [ $# -gt 0 ]; do
    case $1 in --target) target=$2 ;; --tag) name=$2 ;; esac
    shift
done
exec {docker} tag "ecs-train-$target:{tag}" "$name"
"""
#: ``aws``, which asks the registry that stands for ECR.
AWS = """#!/bin/sh
if [ "$2" != batch-get-image ]; then echo password; exit; fi
docker manifest inspect --insecure "{registry}/$4:${{6#imageTag=}}" >/dev/null 2>&1 ||
    echo ImageNotFound
"""


@pytest.mark.timeout(900)
def test_the_images_are_tried_out_and_pushed_and_then_not_built_again(
    deployment: Rehearsal, tmp_path: Path
) -> None:
    state = deployment.state()
    registry = state["registry"]
    if not registry:
        pytest.skip("no registry: install docker-registry")
    docker = subprocess.check_output(["which", "docker"], text=True).strip()
    variables = {
        "HEAD_REPOSITORY": f"{registry}/workflow/head",
        "WORKER_REPOSITORY": f"{registry}/workflow/worker",
        "TORCH_CPU_INDEX": "",
    }
    programs = {
        "docker": DOCKER.format(docker=docker, tag=state["image_tag"]),
        "aws": AWS.format(registry=registry),
        "sudo": "#!/bin/sh\n",  # it makes room on GitHub's disk
    }

    def forget(_job: str) -> None:
        """Nothing but the cache reaches the next job."""
        found = ["docker", "image", "ls", "--quiet", f"{registry}/workflow/*"]
        for image in {*subprocess.check_output(found, text=True).split()}:
            names = ["docker", "image", "inspect", "--format", "{{json .RepoTags}}", image]
            for name in json.loads(subprocess.check_output(names, text=True)):
                if name.startswith(f"{registry}/workflow/"):
                    subprocess.run(["docker", "image", "rm", name], check=True)

    first = tmp_path / "first"
    first.mkdir()
    outcome = run_workflow(first, variables=variables, programs=programs, after_job=forget)
    assert outcome.jobs == dict.fromkeys(("look", "build", "push"), "success"), outcome.said
    assert len(outcome.steps) == 6
    pushed = json.loads(outcome.summary)
    for kind in ("head", "worker"):
        digest = manifest_digest(registry, f"workflow/{kind}", pushed["tag"])
        image = f"{registry}/workflow/{kind}:{pushed['tag']}"
        assert pushed[kind] == {"image": image, "digest": digest}

    second = tmp_path / "second"
    second.mkdir()
    outcome = run_workflow(second, variables=variables, programs=programs)
    assert outcome.jobs == {"look": "success", "build": "skipped", "push": "skipped"}
    assert "nothing is built" in outcome.summary


def manifest_digest(registry: str, repository: str, tag: str) -> Any:
    """What the registry says it has under a tag."""
    request = urllib.request.Request(f"http://{registry}/v2/{repository}/manifests/{tag}")
    request.add_header("Accept", "application/vnd.docker.distribution.manifest.v2+json")
    with urllib.request.urlopen(request) as answer:
        return answer.headers["Docker-Content-Digest"]
