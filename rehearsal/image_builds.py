"""Images of the rehearsal: those of production, built from what this machine can reach.

Where no image registry can be reached, the base image is made of Debian's packages, and the wheels
are fetched by this machine's pip, with the settings that it has. Nothing of the machine gets
into an image: its certificates and package sources stay outside.

A registry on loopback takes the place of ECR: what is pushed there is what the nodes pull. It is
Debian's ``docker-registry``, a plain process; engines need no certificate for 127.0.0.1.
"""

import hashlib
import http.client
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from containers import publish
from contract import nodes
from contract.errors import ReportedError
from contract.images import SOURCES
from rehearsal import children
from rehearsal.children import CommandError
from rehearsal.engine import BUILD_GB, LABEL, Engine, EngineError, check_space
from rehearsal.local_aws import ROOT

REGISTRY_ROLE: Final = "registry"
SECONDS_TO_START: Final = 20

_CONFIG: Final = """\
version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: "{folder}"}}
  delete: {{enabled: true}}
http: {{addr: "{address}"}}
"""


class RegistryError(ReportedError):
    """The registry does not start_registry; the message says why."""


def registry_program() -> str | None:
    """Path of the registry's registry_program, or None where it is not installed."""
    return shutil.which("docker-registry") or shutil.which("registry")


def start_registry(folder: Path, *, name: str) -> str:
    """Start a registry that keeps its images in ``folder``; return its ``host:port``.

    Raises:
        RegistryError: it ends at once, or does not answer.
    """
    command = registry_program()
    if command is None:
        raise RegistryError("no registry: install docker-registry")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / "config.yml", folder / "log"
    config.write_text(_CONFIG.format(folder=folder / "images", address=address))
    server = children.start(
        [command, "serve", str(config)],
        name=name,
        role=REGISTRY_ROLE,
        environment={"OTEL_TRACES_EXPORTER": "none"},
        log=log,
    )
    _wait_until_it_answers(server, address, log)
    return address


def _wait_until_it_answers(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while server.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection(address, timeout=5)
        try:
            connection.request("GET", "/v2/")
            if connection.getresponse().status == http.client.OK:
                return
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)
        finally:
            connection.close()
    said = log.read_text(errors="replace")[-1000:].strip()
    raise RegistryError(f"the image registry does not answer at {address}; it said:\n{said}")


BASE_IMAGE: Final = "python:3.12-slim-trixie"
DEBIAN_IMAGE: Final = "ecs-train-base"
DEBIAN_PYTHON: Final = "3.11"
WHEELS_IMAGE: Final = "ecs-train-wheels"
#: Older images of each node that stay, so that going back to other sources builds nothing.
KEPT: Final = 2
#: Label of an image: name of the checkout that has built it. Not ``LABEL``, which its containers
#: would inherit.
BUILT_BY: Final = "ecs-train.built-by"
REVISION_LABEL: Final = "org.opencontainers.image.revision"


class ImageError(ReportedError):
    """The images cannot be built here; the message says what is lacking."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuietDocker:
    """The engine, for the functions of ``publish``: it writes to a log, and ends on Ctrl-C."""

    client: str
    environment: Mapping[str, str]
    name: str
    """Name of the rehearsal; leftovers of an interrupted command are found in the engine by it."""
    log: Path

    def run(self, *arguments: str, capture: bool = False) -> str:
        if label := {"run": LABEL, "build": BUILT_BY}.get(arguments[0]):
            arguments = (arguments[0], "--label", f"{label}={self.name}", *arguments[1:])
        try:
            output = children.run(
                [self.client, *arguments], environment=self.environment, folder=ROOT, log=self.log
            )
        except CommandError as error:
            raise publish.PublishError(str(error)) from None
        return output if capture else ""


def build(
    engine: Engine, docker: QuietDocker, *, image_tag: str, say: Callable[[str], None]
) -> dict[str, str]:
    """Build both images, unless the engine has them; return their names there by node.

    Raises:
        EngineError, ImageError, CommandError, publish.PublishError: it does not work; the message
            says why.
    """
    images = {node: f"ecs-train-{node}:{image_tag}" for node in (nodes.HEAD, nodes.WORKER)}
    git_sha = _git_sha()
    own_base = os.environ.get("BASE_IMAGE")
    if not own_base and all(_is_built(engine, image, git_sha) for image in images.values()):
        return images
    check_space(engine, needed_gb=BUILD_GB, what="building the images needs")
    arguments = ["WORKER_TORCH=cpu"]
    base = own_base or _reachable(engine, BASE_IMAGE)
    if base is None:
        say(f"no image registry can be reached for {BASE_IMAGE}: using Debian's packages")
        base = _debian(engine)
        arguments.append(f"WHEELS_IMAGE={wheels(engine, DEBIAN_PYTHON)}")
    elif index := _torch_index():
        arguments.append(f"TORCH_CPU_INDEX={index}")
    arguments.append(f"BASE_IMAGE={base}")
    publish.build(docker, targets=images, git_sha=git_sha, build_arguments=arguments)
    if removed := _remove_older(engine, images, name=docker.name):
        say(f"{removed} images of earlier sources were removed from the Docker Engine")
    return images


def _remove_older(engine: Engine, images: Mapping[str, str], *, name: str) -> int:
    """Remove what this checkout has built from earlier sources, except the ``KEPT`` newest images
    of each node; return how many were removed. The engine keeps those that a container uses."""
    own = ("image", "ls", "--filter", f"label={BUILT_BY}={name}")
    old: list[str] = []
    for built in images.values():
        repository = built.partition(":")[0]
        listed = engine(
            *(*own, "--filter", f"reference={repository}:content-*"),
            *("--format", "{{.Repository}}:{{.Tag}}"),  # the newest one comes first
        )
        old += [image for image in listed.split() if image != built][KEPT:]
    # Those whose name a newer image of the same sources has taken.
    old += engine(*own, "--filter", "dangling=true", "--quiet").split()
    return sum(bool(engine("image", "rm", image, check=False)) for image in old)


def _is_built(engine: Engine, image: str, git_sha: str) -> bool:
    """True if the engine has an image of these sources whose label names this commit."""
    record = engine.inspect("image", image)
    return record is not None and record["Config"]["Labels"].get(REVISION_LABEL) == git_sha


def _torch_index() -> str:
    """The index given to `make`, now or when the environment was made."""
    remembered = ROOT / ".venv" / "torch-index"
    return os.environ.get("TORCH_INDEX") or (
        remembered.read_text().strip() if remembered.exists() else ""
    )


def _git_sha() -> str:
    try:
        return children.run(
            ["git", "rev-parse", "HEAD"], environment=os.environ, folder=ROOT
        ).strip()
    except (OSError, CommandError):
        return "unknown"


def _reachable(engine: Engine, image: str) -> str | None:
    """``image`` if the engine has it or can get it."""
    if engine.inspect("image", image):
        return image
    try:
        engine("pull", "--quiet", image)
    except EngineError:
        return None
    return image


def _debian(engine: Engine) -> str:
    """A base image of Debian's packages, made once for each version of its recipe."""
    recipe = ROOT / "rehearsal" / "debian_base.sh"
    image = f"{DEBIAN_IMAGE}:{_digest(recipe.read_bytes())}"
    if engine.inspect("image", image):
        return image
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise ImageError(
            f"the base image {BASE_IMAGE} cannot be pulled, and making one here needs root and "
            "debootstrap (apt-get install debootstrap); or name another with BASE_IMAGE=..."
        )
    with tempfile.TemporaryDirectory(prefix="debian-base-") as folder:
        children.run(
            ["sh", str(recipe), engine.client, image, folder],
            environment=engine.environment(),
            folder=ROOT,
        )
    return image


def wheels(
    engine: Engine, python: str, *, environment: Mapping[str, str] = os.environ, mark: str = ""
) -> str:
    """An image with the wheels of all locked packages, made once for each state of the lock.

    Args:
        environment: pip's, which decides where they come from.
        mark: tells the images of different environments apart.
    """
    *lists, lock = (ROOT / name for name in SOURCES if name.startswith("requirements"))
    key = _digest(*(file.read_bytes() for file in (lock, *lists)), f"{python}{mark}".encode())
    image = f"{WHEELS_IMAGE}:{key}"
    if engine.inspect("image", image):
        return image
    # Without the hashes: pip would insist on one for torch too, whose build depends on the index.
    pins = re.findall(r"(?m)^[^\s#]+", lock.read_text())
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder:
        downloads, constraints = Path(folder, "wheels"), Path(folder, "constraints.txt")
        constraints.write_text("\n".join(pins))
        own = ".".join(platform.python_version_tuple()[:2])
        other = [] if own == python else ["--python-version", python, "--only-binary", ":all:"]
        children.run(
            [
                *(sys.executable, "-m", "pip", "download", "--dest", str(downloads)),
                *(*other, "--constraint", str(constraints), "pip", "setuptools"),
                *[part for path in lists for part in ("--requirement", str(path))],
            ],
            environment=environment,
            folder=ROOT,
        )
        for wheel in downloads.glob("torchvision-*"):
            _add_schemas(wheel)
        children.run(
            ["sh", "-c", 'tar -c wheels | "$0" import - "$1"', engine.client, image],
            environment=engine.environment(),
            folder=Path(folder),
        )
    return image


#: Schemas that torchvision needs at its import, and that its compiled part defines.
_SCHEMAS: Final = """
if not _has_ops():
    for name in ("nms", "qnms"):
        signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", signature)
"""


def _add_schemas(wheel: Path) -> None:
    """Let torchvision be imported where its compiled part, for CUDA, cannot be: beside a CPU build
    of torch. All of it works but its own operators. With the right build this changes nothing."""
    name = "torchvision/extension.py"
    with zipfile.ZipFile(wheel, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the name exists: the last one counts
        archive.writestr(name, archive.read(name).decode() + _SCHEMAS)


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:12]
