"""A container of an ECS task, as the agent of a host starts and ends it.

The emulator can start containers by itself, but without what this project's tasks are made of: a
network with names, limits, health checks, users, the digest of the image.
"""

import json
import logging
import math
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import docker
from docker.errors import APIError, DockerException, NotFound
from docker.types import EndpointConfig, Ulimit

from contract.errors import InputError
from contract.exits import KILLED
from contract.nodes import CONTAINER_USER, ENV_NUM_GPUS
from contract.runs import safe_join
from rehearsal.engine import LABEL
from rehearsal.ministack import ecs_hosts, ecs_records
from rehearsal.ministack.internals import ecs, responses
from rehearsal.ministack.switches import Strict, is_strict

log = logging.getLogger("ecs-runtime")

#: What the emulator hands to Docker of any task definition, by Docker's names, and no task of the
#: deployment has: with it a container could take over this machine.
POWERS = ("privileged", "cap_add", "pid_mode", "network_mode")


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeSettings:
    """What ``rehearsal.local_aws`` tells through the environment."""

    name: str
    network: str
    """Docker network of the tasks; it must exist."""
    gateway: str
    """How a container reaches this process."""
    registry: str
    """``host:port`` that stands for ECR, or "" where images are only in the engine."""
    metadata: str
    """Where instances would find their metadata, spot notices among it; it need not answer."""
    folder: Path
    """Of the local AWS. ``capacity.json`` in it may say how many hosts each capacity provider has
    (name -> number); without, there is always one more. ``environment.json`` may hold more
    variables of all containers."""

    @classmethod
    def from_environment(cls) -> Self:
        get = os.environ.__getitem__
        return cls(
            name=get("REHEARSAL_NAME"),
            network=get("REHEARSAL_NETWORK"),
            gateway=get("MINISTACK_HOST"),
            registry=get("REHEARSAL_REGISTRY"),
            metadata=get("REHEARSAL_METADATA"),
            folder=Path(get("REHEARSAL_FOLDER")),
        )


class ContainerEngine:
    """Starts and ends containers; replaces three functions of the emulator's ECS."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self.settings = settings
        self.docker = docker.from_env(timeout=120)
        self._architecture = str(self.docker.version()["Arch"])
        self.docker.networks.get(settings.network)  # made once, before this process is started
        self._stock_register_metadata = ecs._register_metadata
        self._stock_build_run_kwargs = ecs._build_run_kwargs

    def install(self) -> None:
        """Give the emulator this engine."""
        ecs._docker = self.docker
        ecs._register_metadata = self.register_metadata
        ecs._build_run_kwargs = self.build_run_kwargs
        ecs._run_docker_container = self.run

    def image(self, uri: str) -> str:
        """Where the engine gets an image of ECR from."""
        registry, slash, rest = uri.partition("/")
        if ".dkr.ecr." in registry and slash:
            return f"{self.settings.registry}/{rest}" if self.settings.registry else rest
        return uri

    def register_metadata(self, *arguments: Any) -> Any:
        """What the agent adds to a container's environment, with keys that SDKs accept here."""
        environment, is_host_mode = arguments[5], arguments[6]
        token = self._stock_register_metadata(
            *arguments[:7], None if is_host_mode else self.settings.gateway
        )
        # SDKs refuse credentials from a plain address that is not the agent's.
        for name in ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN"):
            environment.pop(name, None)
        given = {
            "AWS_ACCESS_KEY_ID": responses.get_account_id(),
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": responses.get_region(),
            "AWS_DEFAULT_REGION": responses.get_region(),
            # The SDKs need no credentials from there; the watcher of spot notices looks.
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.settings.metadata,
            # Whose keys these are, for rehearsal.ministack.calls.
            "AWS_SESSION_TOKEN": arguments[2].get("taskRoleArn", ""),
        }
        for name, value in given.items():
            environment.setdefault(name, value)
        return token

    def build_run_kwargs(self, definition: dict[str, Any], *arguments: Any) -> dict[str, Any]:
        """Arguments of ``docker run`` for a container definition."""
        stock = without_powers(self._stock_build_run_kwargs(definition, *arguments))
        is_host_mode, task_id, task_arn = arguments[4], arguments[5], arguments[6]
        linux = definition.get("linuxParameters") or {}
        found: dict[str, Any] = {
            "entrypoint": definition.get("entryPoint"),
            "user": definition.get("user"),
            "working_dir": definition.get("workingDirectory"),
            "read_only": definition.get("readonlyRootFilesystem"),
            "init": linux.get("initProcessEnabled"),
            "shm_size": mebibytes(linux.get("sharedMemorySize")),
            "mem_limit": mebibytes(definition.get("memory")),
            "mem_reservation": mebibytes(definition.get("memoryReservation")),
            "cpu_shares": int(definition.get("cpu") or 0),
            "healthcheck": health_check(definition.get("healthCheck")),
            "tmpfs": {
                each["containerPath"]: f"size={each['size']}m" for each in linux.get("tmpfs") or []
            },
            "ulimits": [
                Ulimit(name=each["name"], soft=int(each["softLimit"]), hard=int(each["hardLimit"]))
                for each in definition.get("ulimits") or []
            ],
        }
        wanted = stock | {name: value for name, value in found.items() if value}
        if binds := wanted.get("volumes"):
            provider = ecs._tasks[task_arn].get("capacityProviderName") or "host"
            folders = [self._on_host(each, provider) for each in binds]
            wanted["volumes"] = [each for each in folders if each]
        wanted["labels"] = stock["labels"] | {LABEL: self.settings.name}
        if ecs_hosts.is_bad(ecs._tasks[task_arn]):
            # One GPU more than there is: the node's own check finds that.
            wanted["environment"] = {**wanted["environment"], ENV_NUM_GPUS: "1"}
        if (more := self.settings.folder / "environment.json").exists():
            wanted["environment"] = {**wanted["environment"], **json.loads(more.read_text())}
        if not is_host_mode:
            names = [name for _id, name in ecs_records.registered_names(ecs._tasks[task_arn])]
            names.append(f"{definition['name']}-{task_id[:8]}")
            wanted["network"] = self.settings.network
            wanted["networking_config"] = {
                self.settings.network: EndpointConfig(self.docker.api._version, aliases=names)
            }
            wanted.pop("extra_hosts", None)
        return wanted

    def _on_host(self, bind: str, provider: str) -> str:
        """A folder of a host, as ``docker run --volume`` takes it: all hosts of a capacity provider
        share one below this rehearsal's folder, which user data has set up on AWS; "" where a path
        would lead out of it."""
        source, target, mode = bind.rsplit(":", 2)
        place = self.settings.folder / "hosts" / provider
        try:
            folder = safe_join(place, source.strip("/"), what="folder of a host")
        except InputError as error:
            log.warning("%s is not mounted: %s", target, error)
            return ""
        folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            os.chown(folder, CONTAINER_USER, CONTAINER_USER)
            folder.chmod(0o700)
        else:
            folder.chmod(0o777)
        return f"{folder}:{target}:{mode}"

    def run(
        self, _docker: Any, definition: dict[str, Any], arguments: dict[str, Any], **_stock: Any
    ) -> Any:
        """Pull the image, as the agent does, and start the container."""
        uri = definition["image"]
        source = self.image(uri)
        try:
            image = (
                self.docker.images.pull(source)
                if self.settings.registry
                else self.docker.images.get(source)
            )
        except DockerException as error:
            what = getattr(error, "explanation", None) or error
            raise ecs._ImagePullError(f"{uri}: {what}") from error
        made_for = image.attrs.get("Architecture", self._architecture)
        # The engine would run it where it can translate; a host cannot.
        if made_for != self._architecture and is_strict(Strict.ARCHITECTURE):
            raise ecs._ImagePullError(
                f"{uri}: image Manifest does not contain descriptor matching platform "
                f"'linux/{self._architecture}'"
            )
        container = self._run_within_limits(source, arguments)
        task = ecs._tasks.get(arguments["labels"]["com.amazonaws.ecs.task-arn"]) or {}
        digests = [each.partition("@")[2] for each in image.attrs.get("RepoDigests") or []]
        for each in task.get("containers", []):
            if each["name"] == definition["name"] and digests:
                each["imageDigest"] = digests[0]
        return container

    def _run_within_limits(self, image: str, arguments: dict[str, Any]) -> Any:
        """``docker run``; where the engine may not raise limits that far, as far as it may."""
        try:
            return self.docker.containers.run(image, **arguments)
        except APIError as error:
            if "rlimit" not in str(error) or "ulimits" not in arguments:
                raise
            log.warning("%s: limits are lowered: %s", arguments["name"], error)
            self.remove(arguments["name"])
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        limits = [
            Ulimit(name=each.name, soft=min(each.soft, most), hard=min(each.hard, most))
            for each in arguments["ulimits"]
            if each.name == "nofile"
        ]
        return self.docker.containers.run(image, **arguments | {"ulimits": limits})

    def remove(self, container: str) -> None:
        """Remove a container, if it is still there."""
        try:
            self.docker.containers.get(container).remove(v=True, force=True)
        except NotFound:
            pass
        except DockerException as error:
            log.warning("container %s: %s", container, error)

    def end(self, container_id: str, timeout_s: int) -> int:
        """SIGTERM, ``timeout_s`` seconds, SIGKILL; return the exit code."""
        try:
            container = self.docker.containers.get(container_id)
            container.stop(timeout=timeout_s)
            code = int(container.wait(timeout=30)["StatusCode"])
            time.sleep(1)  # the last lines of its log are still on their way
            return code
        except DockerException as error:
            log.warning("container %s: %s", container_id, error)
            return KILLED


def without_powers(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``docker run`` without those that open this machine to a container."""
    for name in POWERS:
        if arguments.get(name):
            log.warning("%s runs without %s, which no task needs", arguments["name"], name)
    return {name: value for name, value in arguments.items() if name not in POWERS}


def mebibytes(number: Any) -> str | None:
    return f"{math.ceil(float(number))}m" if number else None


def health_check(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """A container definition's health check as Docker takes it, in nanoseconds."""
    if not wanted:
        return None
    second = 10**9
    return {
        "test": wanted["command"],
        "interval": int(wanted.get("interval") or 30) * second,
        "timeout": int(wanted.get("timeout") or 5) * second,
        "retries": int(wanted.get("retries") or 3),
        "start_period": int(wanted.get("startPeriod") or 0) * second,
    }
