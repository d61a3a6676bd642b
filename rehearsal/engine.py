"""The Docker Engine of this machine: its checks, and what a rehearsal has left in it.

Through the ``docker`` command, which a machine with an engine has; no library is needed for that.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from contract.errors import ReportedError

#: Label of everything that a rehearsal makes; ``rehearsal.ministack`` sets it too.
LABEL: Final = "ecs-train.rehearsal"
#: Images, their layers and the cache of the build, on an engine that has none of them.
BUILD_GB: Final = 10
#: What the containers of a rehearsal write.
RUN_GB: Final = 2


class EngineError(ReportedError):
    """There is no usable engine, or it refuses something; the message says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """A Docker Engine that answers, and a client that can build images with it."""

    client: str
    """Path of the ``docker`` command."""
    address: str
    """Where the engine listens, such as ``unix:///var/run/docker.sock``."""

    def __call__(self, *arguments: str, check: bool = True) -> str:
        """Run a ``docker`` command and return what it prints on stdout, without the last newline.

        Raises:
            EngineError: it failed, with what it printed.
        """
        run = subprocess.run(
            [self.client, *arguments],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode and check:
            said = run.stderr.strip() or run.stdout.strip()
            raise EngineError(f"docker {' '.join(arguments[:2])} failed: {said}")
        return run.stdout.strip()

    def environment(self) -> dict[str, str]:
        """This process's, with what makes the client talk to this engine and build."""
        return os.environ | {"DOCKER_HOST": self.address, "DOCKER_BUILDKIT": "1"}

    def inspect(self, kind: str, name: str) -> Any:
        """Parsed output of ``docker inspect`` for a network, image or container; None if it does
        not exist."""
        found = self(kind, "inspect", name, check=False)
        records = json.loads(found or "[]")
        return records[0] if records else None

    def labelled(self, kind: str, name: str) -> list[str]:
        """Ids of the containers, networks or volumes of a rehearsal."""
        every = ["--all"] if kind == "container" else []
        found = self(kind, "ls", *every, "--quiet", "--filter", f"label={LABEL}={name}")
        return found.split()

    # --- network ----------------------------------------------------------------------------
    def make_network(self, name: str) -> str:
        """Make a rehearsal's network, or take the one it has; return its gateway's address."""
        networks = self.labelled("network", name)
        if not networks:
            # Once and never again: an engine takes a second network of the same name, too.
            self("network", "create", "--label", f"{LABEL}={name}", name)
        record = self.inspect("network", name)
        assert record is not None
        gateway: str = record["IPAM"]["Config"][0]["Gateway"]
        return gateway

    def remove(self, name: str) -> int:
        """Remove all of a rehearsal but its images; return how many things that were."""
        containers = self.labelled("container", name)
        if containers:
            self("container", "rm", "--force", "--volumes", *containers, check=False)
        volumes = self.labelled("volume", name)
        if volumes:
            self("volume", "rm", "--force", *volumes, check=False)
        networks = self.labelled("network", name)
        if networks:
            self("network", "rm", *networks)
        return len(containers) + len(volumes) + len(networks)


def find_engine() -> Engine:
    """The engine that the ``docker`` command talks to.

    Raises:
        EngineError: there is no client, no engine that answers, or none that can build images.
    """
    clients = list(_clients())
    if not clients:
        raise EngineError(
            "no Docker: there is no docker command on the PATH. Install a Docker Engine "
            "(Debian and Ubuntu: apt-get install docker.io)"
        )
    address = _address(clients[0])
    last = ""
    for client in clients:
        engine = Engine(client=client, address=address)
        asked = subprocess.run(
            [client, "version", "--format", "{{.Client.Version}} {{.Server.Version}}"],
            env=engine.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode:
            last = asked.stderr.strip().splitlines()[-1] if asked.stderr.strip() else "no answer"
            continue
        if _builds(engine, asked.stdout.split()[0]):
            return engine
        last = "buildx"
    if last == "buildx":
        raise EngineError(
            f"the Docker client {clients[0]} cannot build with BuildKit: it has no buildx. Install "
            "it (Docker's packages: docker-buildx-plugin), or Debian's docker.io, which needs none"
        )
    raise EngineError(
        f"no Docker Engine answers at {address}: {last}. Start it (systemctl start docker; "
        "without systemd: dockerd as root in another terminal), or set DOCKER_HOST"
    )


def check_space(engine: Engine, *, needed_gb: float, what: str) -> None:
    """Raises EngineError when the engine's disk has no ``needed_gb`` GB left for ``what``."""
    root = Path(engine("info", "--format", "{{.DockerRootDir}}"))
    if not root.is_dir():
        return  # in another machine, or not to be seen by this user
    free = shutil.disk_usage(root).free / 1e9
    if free < needed_gb:
        raise EngineError(
            f"too little space: {root} has {free:.1f} GB free, and {what} up to "
            f"{needed_gb} GB. Remove what is not used (docker system prune)"
        )


def _clients() -> Iterator[str]:
    """Every docker command on the PATH: another than the first may be the one that can build."""
    seen = set()
    for folder in os.get_exec_path():
        path = shutil.which("docker", path=folder)
        if path and os.path.realpath(path) not in seen:
            seen.add(os.path.realpath(path))
            yield path


def _address(client: str) -> str:
    if os.environ.get("DOCKER_HOST"):
        return os.environ["DOCKER_HOST"]
    context = subprocess.run(
        [client, "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return context or "unix:///var/run/docker.sock"


def _builds(engine: Engine, version: str) -> bool:
    """True if a client can build with BuildKit: through buildx, or, from version 18 to 22, without
    it."""
    if subprocess.run([engine.client, "buildx", "version"], capture_output=True).returncode == 0:
        return True
    major = re.match(r"\d+", version)
    return major is not None and 18 <= int(major[0]) < 23
