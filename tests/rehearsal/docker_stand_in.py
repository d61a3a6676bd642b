"""Stands for ``docker`` where `make images` meets a local AWS: a registry that is not there.

The images exist, since the rehearsal has built them from the same sources; what the stand-in does
about them is what the real command would leave behind. ``test_in_containers`` builds, tries out and
pushes with the real one.

The environment says where: ``STAND_IN_DOCKER`` is the real client, and the address of ECR is that
of the local AWS.
"""

import itertools
import json
import os
import subprocess
import sys

import boto3

#: The result of a try-out, as ``containers.publish`` reads it.
TWO_STEPS = {"status": "succeeded", "steps": 2}


def real(*arguments: str) -> int:
    """The real client; return its exit code."""
    return subprocess.call([os.environ["STAND_IN_DOCKER"], *arguments], stdout=subprocess.DEVNULL)


def main(arguments: list[str]) -> int:
    command, image = arguments[0], arguments[-1]
    # Without its registry, which has no such name here: the nodes find it in the engine.
    local = image.partition("/")[2]
    repository, _, tag = local.rpartition(":")
    match command:
        case "login" | "logout":
            return 0
        case "manifest":
            found = boto3.client("ecr").batch_get_image(
                repositoryName=repository, imageIds=[{"imageTag": tag}]
            )
            return 0 if found["images"] else 1
        case "build":
            options = dict(itertools.pairwise(arguments))
            assert options["--platform"] == "linux/amd64"
            name = options["--tag"].partition("/")[2]
            return real("tag", f"ecs-train-{options['--target']}:{name.rpartition(':')[2]}", name)
        case "run":
            print(json.dumps(TWO_STEPS))
            return 0
        case "push":
            boto3.client("ecr").put_image(
                repositoryName=repository, imageTag=tag, imageManifest="{}"
            )
            return 0
        case "image":
            print(json.dumps([f"{image.rpartition(':')[0]}@sha256:{0:064x}"]))
            return 0
    print(f"docker: the stand-in knows no command {command!r}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
