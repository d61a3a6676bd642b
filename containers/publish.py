"""Build the images of head and worker, test them, push them: ``python -m containers.publish``.

    python -m containers.publish                          # to the repositories of CoreStack
    python -m containers.publish --head URI --worker URI  # to a registry docker is logged in to

The tag is the hash of what goes into the images, as the stacks compute it too, so no tag is
copied by hand, and what is pushed already is neither built nor pushed again. With --head and
--worker only the standard library and Docker are needed: CI runs it that way.
"""

import argparse
import base64
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from contract import exits, faults, nodes, outputs
from contract.errors import InputError, ReportedError
from contract.images import SOURCES, content_tag, setting

ROOT: Final = Path(__file__).resolve().parents[1]
DOCKERFILE: Final = "containers/Dockerfile"
#: Two steps of each recipe over data that every image holds.
TWO_STEPS: Final = {
    "ddp": ("--preset", "digits", "--epochs", "1", "--batch-per-worker", "700"),
    "fsdp": ("--preset", "tiny", "--max-steps", "2"),
}
#: Platform of the hosts, on any machine that builds.
PLATFORM: Final = "linux/amd64"
#: Prefix of the labels with the versions of ray, torch and transformers.
LABEL: Final = "ecs-train."
_STDERR: Final = 2  # the file descriptor: stdout is for the result
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class PublishError(ReportedError):
    """A build, a try-out or a push failed; what the tool printed is above."""


class Docker(Protocol):
    """The ``docker`` command, as the functions below call it."""

    def run(self, *arguments: str, capture: bool = False) -> str:
        """Run a command; return its stdout where that is captured.

        Raises:
            PublishError: it failed.
        """


class DockerCommand:
    """The ``docker`` command."""

    def run(self, *arguments: str, capture: bool = False) -> str:
        """Run a command, its output on stderr; return its stdout where that is captured.

        Raises:
            PublishError: it failed, or there is no such command.
        """
        return self._run(arguments, stdout=subprocess.PIPE if capture else _STDERR)

    def log_in(self, registry: str, *, password: str) -> None:
        """Log in to a registry of ECR. Raises PublishError."""
        command = ("login", "--username", "AWS", "--password-stdin", registry)
        self._run(command, stdout=subprocess.DEVNULL, stdin=password)

    def has(self, image: str) -> bool:
        """True if the registry has an image."""
        nowhere = subprocess.DEVNULL
        try:
            self._run(("manifest", "inspect", image), stdout=nowhere, stderr=nowhere)
        except PublishError:
            return False
        return True

    def _run(
        self, arguments: Sequence[str], *, stdout: int, stderr: int | None = None, stdin: str = ""
    ) -> str:
        try:
            done = subprocess.run(
                ["docker", *arguments],
                cwd=ROOT,
                env=os.environ | {"DOCKER_BUILDKIT": "1"},
                input=stdin,
                stdout=stdout,
                stderr=stderr,
                text=True,
                check=False,
            )
        except OSError:
            raise PublishError("there is no command 'docker': install Docker") from None
        if done.returncode:
            raise PublishError(f"docker {arguments[0]} failed with exit code {done.returncode}")
        return done.stdout or ""


def build(
    docker: Docker,
    *,
    targets: Mapping[str, str],
    git_sha: str,
    build_arguments: Sequence[str] = (),
    platform: str = "",
) -> None:
    """Build ``targets`` (``head``, ``worker``), each under the name given.

    Args:
        build_arguments: as ``NAME=VALUE``, those of the Dockerfile.
        platform: such as ``linux/amd64``; empty: this machine's.
    """
    values = [*build_arguments, f"VERSION={version()}", f"GIT_SHA={git_sha}"]
    for target, image in targets.items():
        docker.run(
            *("build", "--file", DOCKERFILE, "--target", target, "--tag", image),
            *[part for each in values for part in ("--build-arg", each)],
            *[part for each in _versions() for part in ("--label", each)],
            *(["--platform", platform] if platform else []),
            ".",
        )


def _versions() -> list[str]:
    """Labels that say which Ray and which PyTorch are inside, without starting the image."""
    pins = (ROOT / "requirements" / "training.txt").read_text(encoding="utf-8")
    found = re.findall(r"^(ray|torch|transformers)\b[^=]*==(\S+)", pins, re.MULTILINE)
    return [f"{LABEL}{name}={number}" for name, number in found]


def try_out(docker: Docker, image: str) -> None:
    """Train two steps of each recipe inside an image, without a network, as an ordinary user, on a
    file system that cannot be written.

    Raises:
        PublishError: a training failed, or was no training.
    """
    for recipe, settings in TWO_STEPS.items():
        printed = docker.run(
            *("run", "--rm", "--network", "none", "--shm-size", "1g"),
            *("--read-only", "--tmpfs", "/tmp:size=2g,mode=1777", "--entrypoint", "python"),
            *(image, "-m", "training.launch", recipe, "--local", "--workers", "1"),
            *("--run", f"try-{recipe}", "--json", *settings),
            capture=True,
        )
        result = json.loads(printed)
        if result["steps"] != 2 or result["status"] != "succeeded":
            raise PublishError(f"{image}: two steps of {recipe} ended as {result}")


def push(docker: Docker, image: str) -> str:
    """Push an image; return the digest by which the registry knows it."""
    docker.run("push", image)
    names = json.loads(
        docker.run("image", "inspect", "--format", "{{json .RepoDigests}}", image, capture=True)
    )
    repository = image.rpartition(":")[0]
    for name in names:
        if name.partition("@")[0] == repository:
            return str(name.partition("@")[2])
    raise PublishError(f"{image} has no digest after its push")


def version() -> str:
    """The project's, read and not imported: it names what is in this folder."""
    source = (ROOT / "training" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'__version__ = "([^"]+)"', source)
    assert found, "training/__init__.py has a version"
    return found[1]


def commit() -> str:
    """The commit that is checked out, for the images' labels; ``…-dirty`` where sources of the
    images differ from it, ``unknown`` where there is none."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        sha = git("rev-parse", "HEAD")
        return f"{sha}-dirty" if git("status", "--porcelain", "--", *SOURCES) else sha
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def repositories_of_the_stack() -> tuple[dict[str, str], str]:
    """The repositories of the deployed CoreStack by node, and the password of their registry.

    Raises:
        InputError: boto3 is not installed, or CoreStack is not deployed in the account and region
            in use.
        UnreachableError: AWS does not answer.
    """
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise InputError(
            "to find the repositories, boto3 is needed (pip install -r requirements/laptop.txt); "
            "or name them with --head and --worker"
        ) from None
    session = boto3.Session(region_name=os.environ.get("AWS_REGION"))
    once = Config(connect_timeout=1.2, retries={"total_max_attempts": 1})  # as trainctl's first
    core, _ = outputs.stacks(os.environ.get("TRAIN_DEPLOYMENT") or setting(ROOT, "deployment"))
    if not session.region_name:
        raise InputError("no region is set: set AWS_REGION, or give --head and --worker")
    try:
        client = session.client("cloudformation", config=once)
        stack = client.describe_stacks(StackName=core)
        found = {each["OutputKey"]: each["OutputValue"] for each in stack["Stacks"][0]["Outputs"]}
        data = session.client("ecr").get_authorization_token()["authorizationData"][0]
    except Exception as error:  # botocore has many
        if "does not exist" not in str(error):
            raise faults.explained(error, "the repositories cannot be read") from None
        raise InputError(
            f"{core} is not deployed in {session.region_name}: make deploy first, or "
            "name the repositories with --head and --worker"
        ) from None
    password = base64.b64decode(data["authorizationToken"]).decode().removeprefix("AWS:")
    return {node: found[output] for node, output in outputs.REPOSITORIES.items()}, password


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m containers.publish",
        description="Build the images of head and worker, train two steps inside each, and push "
        "them. Images that the repositories have already are left alone.",
        epilog="TORCH_INDEX in the environment is the address of an index with the CPU build of "
        "torch [PyTorch's own]. Exit codes: 0 pushed or there already, 1 something failed, 2 wrong "
        "input.",
    )
    parser.add_argument(
        "--head",
        metavar="URI",
        help="repository of the head's image, in a registry that docker is logged in to "
        "[that of the deployed CoreStack]",
    )
    parser.add_argument("--worker", metavar="URI", help="the same, of the workers' image")
    parser.add_argument("--tag", help="instead of the hash of what goes into the images")
    parser.add_argument(
        "--worker-torch",
        choices=("cuda", "cpu"),
        default="cuda",
        help="build of torch in the workers' image [%(default)s]; cpu needs --tag",
    )
    parser.add_argument(
        "--build-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another argument of the Dockerfile, such as EFA_INSTALLER=; may be repeated, needs "
        "--tag",
    )
    parser.add_argument(
        "--no-build", action="store_true", help="push what an earlier call has built and tried out"
    )
    parser.add_argument("--no-push", action="store_true", help="build and try out, push nothing")
    parser.add_argument("--print-tag", action="store_true", help="print the tag, and do no more")
    return parser


def publish(options: argparse.Namespace) -> dict[str, str | dict[str, str]]:
    """Build, try out and push; return the tag, and for each node its ``image`` and, once pushed,
    ``digest``."""
    tag = _tag(options)
    docker = DockerCommand()
    repositories = {nodes.HEAD: options.head, nodes.WORKER: options.worker}
    registry = ""
    if bool(options.head) != bool(options.worker):
        raise InputError("give both --head and --worker, or neither")
    if not (options.head or options.no_push):
        repositories, password = repositories_of_the_stack()
        registry = repositories[nodes.HEAD].partition("/")[0]
        docker.log_in(registry, password=password)
    try:
        return _publish(docker, options, repositories, tag)
    finally:
        if registry:
            with contextlib.suppress(PublishError):
                docker.run("logout", registry, capture=True)


def _tag(options: argparse.Namespace) -> str:
    if options.tag:
        if not _TAG.fullmatch(options.tag):
            raise InputError(
                f"tag {options.tag!r} is not usable: letters, digits, '.', '_' and '-', up to 128"
            )
        return str(options.tag)
    if options.worker_torch != "cuda" or options.build_arg:
        raise InputError(
            "the tag that the stacks compute is that of the standard build: name this one with "
            "--tag NAME, and deploy it with -c image_tag=NAME"
        )
    return content_tag(ROOT, base=setting(ROOT, "base_image"))


def _publish(
    docker: DockerCommand,
    options: argparse.Namespace,
    repositories: Mapping[str, str | None],
    tag: str,
) -> dict[str, str | dict[str, str]]:
    images = {node: f"{uri or f'ecs-train-{node}'}:{tag}" for node, uri in repositories.items()}
    done = {node: {"image": image} for node, image in images.items()}

    # What is pushed already is left alone.
    there = [] if options.no_push else sorted(node for node in images if docker.has(images[node]))
    if there and options.tag and not options.no_build:
        raise PublishError(
            f"{images[there[0]]} is there already, perhaps of other sources, and tags cannot be "
            "replaced: give another --tag"
        )
    for node in there:
        _say(f"{images.pop(node)} is there already")

    # The rest is built, tried out and pushed.
    if images and not options.no_build:
        build(
            docker,
            targets=images,
            git_sha=commit(),
            build_arguments=_build_arguments(options),
            platform=PLATFORM,
        )
        for image in images.values():
            try_out(docker, image)
            _say(f"{image}: two steps of each recipe succeeded")
    for node, image in () if options.no_push else images.items():
        done[node]["digest"] = push(docker, image)
    return {"tag": tag, **done}


def _build_arguments(options: argparse.Namespace) -> list[str]:
    """Arguments of the Dockerfile: of the environment, of ``cdk.json``, of the command line."""
    values = {
        "TORCH_CPU_INDEX": os.environ.get("TORCH_INDEX"),
        "BASE_IMAGE": setting(ROOT, "base_image"),
    }
    found = [f"{name}={value}" for name, value in values.items() if value]
    return [*found, f"WORKER_TORCH={options.worker_torch}", *options.build_arg]


def _say(text: str) -> None:
    print(f"publish: {text}", file=sys.stderr)


@faults.command()
def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    print(_tag(options) if options.print_tag else json.dumps(publish(options), indent=1))
    return exits.OK


if __name__ == "__main__":
    sys.exit(main())
