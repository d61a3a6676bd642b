"""Build the images of head and worker, try them out, push them: ``python -m containers.publish``.

What the CI pipeline runs, and what a laptop or the rehearsal runs: the same builds, the same tags,
any registry. Standard library only, so that a CI machine needs nothing installed but Docker.

    python -m containers.publish --head REPOSITORY_URI --worker REPOSITORY_URI

The tag is the commit, and a tag is never pushed twice: what runs can always be traced to a source.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from contract import exits, nodes
from contract.errors import InputError

ROOT: Final = Path(__file__).resolve().parents[1]
DOCKERFILE: Final = "containers/Dockerfile"
#: Two steps over scikit-learn's digits, which every image holds.
TWO_STEPS: Final = (
    *("ddp", "--local", "--workers", "1", "--run", "try-out", "--json"),
    *("--preset", "digits", "--epochs", "1", "--batch-per-worker", "700"),
)
_STDERR: Final = 2  # the file descriptor: stdout is for the result
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class PublishError(RuntimeError):
    """A build, a try-out or a push failed; what the tool printed is above."""


class Docker(Protocol):
    """The ``docker`` command, as the functions below call it."""

    def run(self, *arguments: str, capture: bool = False) -> str:
        """Run a command; return its stdout where that is captured.

        Raises:
            PublishError: it failed.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class DockerCommand:
    """The ``docker`` command, and what it needs in its environment."""

    client: str = "docker"
    environment: Mapping[str, str] = field(
        default_factory=lambda: os.environ | {"DOCKER_BUILDKIT": "1"}
    )

    def run(self, *arguments: str, capture: bool = False) -> str:
        """Run a command, its output on stderr; return its stdout where that is captured.

        Raises:
            PublishError: it failed, or there is no such command.
        """
        try:
            done = subprocess.run(
                [self.client, *arguments],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if capture else _STDERR,
                text=True,
                check=False,
            )
        except OSError:
            raise PublishError(f"there is no command {self.client!r}: install Docker") from None
        if done.returncode:
            raise PublishError(f"docker {arguments[0]} failed with exit code {done.returncode}")
        return done.stdout or ""


def build(
    docker: Docker,
    *,
    targets: Mapping[str, str],
    git_sha: str,
    build_arguments: Sequence[str] = (),
    options: Sequence[str] = (),
) -> None:
    """Build ``targets`` (``head``, ``worker``), each under the name given.

    Args:
        build_arguments: as ``NAME=VALUE``, those of the Dockerfile.
        options: more options of ``docker build``, such as where its cache is.
    """
    given = [*build_arguments, f"VERSION={version()}", f"GIT_SHA={git_sha}"]
    # An action of a CI pipeline that keeps the cache elsewhere needs the command of buildx.
    command = ["buildx", "build", "--load"] if options else ["build"]
    for target, image in targets.items():
        docker.run(
            *command,
            *("--file", DOCKERFILE, "--target", target, "--tag", image),
            *[part for each in given for part in ("--build-arg", each)],
            *[part for each in _versions() for part in ("--label", each)],
            *options,
            ".",
        )


def _versions() -> list[str]:
    """Labels that say which Ray and which PyTorch are inside, without starting the image."""
    pins = (ROOT / "containers" / "requirements.txt").read_text(encoding="utf-8")
    found = re.findall(r"^(ray|torch|transformers)\b[^=]*==(\S+)", pins, re.MULTILINE)
    return [f"ecs-train.{name}={number}" for name, number in found]


def try_out(docker: Docker, image: str) -> dict[str, object]:
    """Train two steps inside an image, without a network, as an ordinary user, on a file system
    that cannot be written; return the result of that run.

    Raises:
        PublishError: the training failed, or was no training.
    """
    printed = docker.run(
        *("run", "--rm", "--network", "none", "--shm-size", "1g"),
        *("--read-only", "--tmpfs", "/tmp:size=2g,mode=1777", "--entrypoint", "python"),
        *(image, "-m", "training.launch", *TWO_STEPS),
        capture=True,
    )
    result: dict[str, object] = json.loads(printed)
    if result["steps"] != 2 or result["status"] != "succeeded":
        raise PublishError(f"{image}: two steps of training ended as {result}")
    return result


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
    """The commit that is checked out.

    Raises:
        InputError: there is none, or files differ from it.
    """

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise InputError(
                f"no commit to name the images after ({error}): give a name with --tag"
            ) from None
        return done.stdout.strip()

    sha = git("rev-parse", "HEAD")
    sources = ("contract", "training", "containers", "requirements.lock")
    if changed := git("status", "--porcelain", "--", *sources):
        raise InputError(
            "the images would hold changes that no commit has, and a tag must name what is in it: "
            f"commit them, or give a name with --tag\n{changed}"
        )
    return sha


def write_tag(path: Path, tag: str) -> None:
    """Set ``image_tag`` in a ``cdk.json``, where the next deploy reads it, and change nothing else.

    Raises:
        InputError: the file has no such setting.
    """
    text = path.read_text(encoding="utf-8")
    changed, count = re.subn(r'("image_tag":\s*")[^"]*(")', rf"\g<1>{tag}\g<2>", text)
    if count != 1:
        raise InputError(f"{path} has no setting image_tag: is it this project's cdk.json?")
    temporary = path.with_suffix(".part")
    temporary.write_text(changed, encoding="utf-8")
    temporary.replace(path)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m containers.publish",
        description="Build the images of head and worker, train two steps inside each, and push "
        "them. The repositories are outputs of CoreStack.",
        epilog="TORCH_INDEX in the environment says where the CPU build of torch comes from: the "
        "page 'Start Locally' of PyTorch shows the address. Log in to the registry first: aws ecr "
        "get-login-password | docker login ... Exit codes: 0 pushed, 1 something failed, 2 wrong "
        "input.",
    )
    parser.add_argument("--head", metavar="URI", help="repository of the head's image")
    parser.add_argument("--worker", metavar="URI", help="repository of the workers' image")
    parser.add_argument("--tag", help="instead of the commit that is checked out")
    parser.add_argument(
        "--worker-torch",
        choices=("cuda", "cpu"),
        default="cuda",
        help="build of torch in the workers' image [%(default)s]",
    )
    parser.add_argument(
        "--build-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another argument of the Dockerfile, such as BASE_IMAGE; may be repeated",
    )
    parser.add_argument(
        "--build-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option of docker buildx build: --cache-from=type=gha; may be repeated",
    )
    parser.add_argument(
        "--no-build", action="store_true", help="push what an earlier call has built and tried out"
    )
    parser.add_argument("--no-push", action="store_true", help="build and try out, push nothing")
    parser.add_argument(
        "--write-tag", metavar="FILE", type=Path, help="then set image_tag in this cdk.json"
    )
    return parser


def publish(options: argparse.Namespace) -> dict[str, str | dict[str, str]]:
    """What the command does; return what it prints: ``tag``, and for each target its ``image`` and,
    once pushed, ``digest``."""
    repositories = {nodes.HEAD: options.head, nodes.WORKER: options.worker}
    if not options.no_push and not all(repositories.values()):
        raise InputError("--head and --worker are needed to push; --no-push only builds")
    sha = "unknown" if options.tag else commit()
    tag = options.tag or sha
    if not _TAG.fullmatch(tag):
        raise InputError(f"tag {tag!r} is not usable: letters, digits, '.', '_' and '-', up to 128")
    docker = DockerCommand()
    images = {node: f"{uri or f'ecs-train-{node}'}:{tag}" for node, uri in repositories.items()}
    arguments = [f"WORKER_TORCH={options.worker_torch}", *options.build_arg]
    if index := os.environ.get("TORCH_INDEX"):
        arguments.insert(0, f"TORCH_CPU_INDEX={index}")
    done = {node: {"image": image} for node, image in images.items()}
    if not options.no_build:
        build(
            docker,
            targets=images,
            git_sha=sha,
            build_arguments=arguments,
            options=options.build_option,
        )
        for image in images.values():
            try_out(docker, image)
            print(f"publish: {image}: two steps of training succeeded", file=sys.stderr)
    if not options.no_push:
        for node, image in images.items():
            done[node]["digest"] = push(docker, image)
    if options.write_tag:
        write_tag(options.write_tag, tag)
    return {"tag": tag, **done}


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    try:
        print(json.dumps(publish(options), indent=1))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return exits.BAD_INPUT
    except PublishError as error:
        print(f"error: {error}", file=sys.stderr)
        return exits.FAILED
    return exits.OK


if __name__ == "__main__":
    sys.exit(main())
