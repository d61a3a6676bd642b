"""ECS tasks as containers, as the hosts of a cluster run them. Imported inside ``.venv-aws`` only.

The emulator can start containers by itself, but without what this project's tasks are made of: a
network with names, limits, health checks, users, the digest of the image. ``ecs_hosts`` decides
when a task starts and what ends it; here is what that does to its containers, and that a service
pauses after failures. It assigns to the emulator's module, whose shape is that of one version.

Unlike AWS, all tasks share one machine's processors. See docs/limits.md.
"""

import base64
import copy
import json
import logging
import math
import os
import re
import resource
import time
from collections.abc import Callable
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
from rehearsal.ministack import ecs_hosts
from rehearsal.ministack.ecs_hosts import LOCK, spawn
from rehearsal.ministack.internals import ec2, ecs, responses, servicediscovery

log = logging.getLogger("ecs-runtime")

Task = dict[str, Any]

# As the agent's: ECS takes 30 s where the container definition says nothing.
STOP_TIMEOUT_S = 30


def task_id(arn: str) -> str:
    return arn.rpartition("/")[2]


def service_key(task: Task) -> str | None:
    """Key of a task's service in the emulator's records; None for a task of RunTask."""
    kind, _, name = task.get("group", "").partition(":")
    return f"{ecs._cluster_name_from_arn(task['clusterArn'])}/{name}" if kind == "service" else None


def deployment_of(task: Task) -> Any:
    service = ecs._services.get(service_key(task) or "")
    return ecs._deployment_for_task(service, task) if service else None


def registered_names(task: Task) -> list[tuple[str, str]]:
    """Ids of the Cloud Map services that a task belongs to, and its names there."""
    service = ecs._services.get(service_key(task) or "") or {}
    found = []
    for registry in service.get("serviceRegistries") or []:
        entry = servicediscovery._services.get(task_id(registry["registryArn"])) or {}
        zone = entry.get("NamespaceId") or (entry.get("DnsConfig") or {}).get("NamespaceId")
        namespace = servicediscovery._namespaces.get(zone)
        if namespace:
            found.append((entry["Id"], f"{entry['Name']}.{namespace['Name']}"))
    return found


def stop_timeout(task: Task) -> int:
    """Seconds between SIGTERM and SIGKILL: the longest of a task's containers."""
    key = ecs._resolve_td_key(task["taskDefinitionArn"])
    definitions = (ecs._task_defs.get(key) or {}).get("containerDefinitions", [])
    of_agent = agent_stop_timeout()
    return max(int(each.get("stopTimeout") or of_agent) for each in definitions)


def agent_stop_timeout() -> int:
    """The setting of the ECS agent in the user data of hosts, which is the same for all of them."""
    for template in ec2._launch_templates.values():
        for version in template["Versions"]:
            script = base64.b64decode(version["LaunchTemplateData"].get("UserData", "")).decode()
            if found := re.search(r"ECS_CONTAINER_STOP_TIMEOUT=(\d+)s", script):
                return int(found[1])
    return STOP_TIMEOUT_S


def say(service: dict[str, Any], message: str) -> None:
    """Add to a service's events, once as long as it is the newest."""
    events = service["events"]
    if not events or events[0]["message"] != message:
        event = {"id": ecs.new_uuid(), "createdAt": ecs._iso(), "message": message}
        events.insert(0, event)


def publish(task: Task) -> None:
    """The event that ECS sends when a task's state changes."""
    detail = ecs._sanitize(task)
    ecs_hosts.publish("aws.ecs", "ECS Task State Change", task["taskArn"], detail)


#: What the emulator hands to Docker of any task definition, by Docker's names, and no task of the
#: deployment has: with it a container could take over this machine.
POWERS = ("privileged", "cap_add", "pid_mode", "network_mode")


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeSettings:
    """Settings that ``rehearsal.local_aws`` passes in environment variables."""

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
    """Folder of the local AWS. ``environment.json`` in it may add variables to all containers."""

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
        self.is_bad: Callable[[Task], bool] = lambda _: False
        """Predicate: True if a task's host lacks its GPU."""
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
        """Add the agent's variables to a container's environment, with keys that SDKs accept
        here."""
        environment, is_host_mode = arguments[5], arguments[6]
        token = self._stock_register_metadata(
            *arguments[:7], None if is_host_mode else self.settings.gateway
        )
        # SDKs refuse credentials from a plain address that is not the agent's.
        for name in ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN"):
            environment.pop(name, None)
        variables = {
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
        for name, value in variables.items():
            environment.setdefault(name, value)
        return token

    def build_run_kwargs(self, definition: dict[str, Any], *arguments: Any) -> dict[str, Any]:
        """Arguments of ``docker run`` for a container definition."""
        stock = without_powers(self._stock_build_run_kwargs(definition, *arguments))
        is_host_mode, task_id, task_arn = arguments[4], arguments[5], arguments[6]
        linux = definition.get("linuxParameters") or {}
        found: dict[str, Any] = {
            "init": linux.get("initProcessEnabled"),
            "shm_size": mebibytes(linux.get("sharedMemorySize")),
            "mem_limit": mebibytes(definition.get("memory")),
            "cpu_shares": int(definition.get("cpu") or 0),
            "healthcheck": health_check(definition.get("healthCheck")),
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
        if self.is_bad(ecs._tasks[task_arn]):
            # One GPU more than there is: the node's own check finds that.
            wanted["environment"] = {**wanted["environment"], ENV_NUM_GPUS: "1"}
        if (more := self.settings.folder / "environment.json").exists():
            wanted["environment"] = {**wanted["environment"], **json.loads(more.read_text())}
        if not is_host_mode:
            names = [name for _id, name in registered_names(ecs._tasks[task_arn])]
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
        if made_for != self._architecture:
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


POLL_S = 0.5
LONGEST_PAUSE_S = 60
HEALTH = {"healthy": "HEALTHY", "unhealthy": "UNHEALTHY"}


def install(settings: RuntimeSettings) -> None:
    """Give the emulator tasks that run as containers."""
    engine = ContainerEngine(settings)
    engine.install()
    Runtime(engine).install()


class Runtime(ecs_hosts.Records):
    """Agent of hosts on which tasks are containers. Its methods replace functions of the emulator's
    ECS and call the original ones."""

    def __init__(self, engine: ContainerEngine) -> None:
        self.engine = engine
        self._pauses: dict[str, tuple[int, float]] = {}
        # The emulator's own functions, before ``install`` replaces them.
        self._stock_run_task_worker = ecs._run_task_worker
        self._stock_record_service_task_failure = ecs._record_service_task_failure
        self._stock_reconcile_service_tasks = ecs._reconcile_service_tasks

    def install(self) -> None:
        """Give the emulator this runtime."""
        ecs_hosts.install(self)
        self.engine.is_bad = self._is_bad
        # Tags are immutable here as in ECR: a tag means one digest, and it is told after the pull.
        ecs._prepare_service_images = lambda task, *_arguments: deployment_of(task)
        ecs._deployment_needs_first_task = lambda *_arguments: False
        # The model places a task, and says then that its container may start.
        ecs._run_task_worker = lambda *_arguments: None
        ecs._mark_task_pending = ecs._mark_task_activating = ecs._task_is_active
        ecs._mark_task_running = self.mark_task_running
        ecs._watch_task_lifecycle = self.watch
        ecs._record_service_task_failure = self.record_service_task_failure
        ecs._reconcile_service_tasks = self.reconcile_service_tasks

    # --- the life of a task -------------------------------------------------------------------
    def _is_bad(self, task: Task) -> bool:
        return bool(self.hosts.hosts[task["containerInstanceArn"]]["_fate"] == "bad")

    def pull(self, task: Task) -> None:
        task["pullStartedAt"] = ecs._iso()
        definition = copy.deepcopy(ecs._task_defs[ecs._resolve_td_key(task["taskDefinitionArn"])])
        overrides = task["overrides"].get("containerOverrides", [])
        place = responses.get_account_id(), responses.get_region()
        arguments = (task, definition, overrides, self.engine.docker, *place)
        spawn("ecs-start", self._stock_run_task_worker, *arguments)

    def mark_task_running(self, _arn: str, task: Task) -> bool:
        with LOCK:
            self.hosts.begin(task)
            return bool(task["lastStatus"] == "RUNNING")

    def start(self, task: Task) -> None:
        super().start(task)
        for service, _name in registered_names(task):
            attributes = {"AWS_INSTANCE_IPV4": ecs._task_ip(task) or ""}
            instance = task_id(task["taskArn"])
            servicediscovery._register_instance(
                {"ServiceId": service, "InstanceId": instance, "Attributes": attributes}
            )
        publish(task)

    def ended(self, task: Task) -> None:
        for service, _name in registered_names(task):
            servicediscovery._deregister_instance(
                {"ServiceId": service, "InstanceId": task_id(task["taskArn"])}
            )
        publish(task)
        super().ended(task)

    def watch(self, task: Task, _docker: Any, account: str, region: str) -> None:
        """Follow a running task's container: its health, and its end."""
        service = service_key(task)
        if service:
            ecs._schedule_service_deployment_completion(
                service.partition("/")[0], service, account, region, healthy_task=task
            )

        def follow() -> None:
            ids = list(task["_docker_ids"])
            while ecs._task_is_active(task["taskArn"], task):
                self._look_at(task, ids)
                time.sleep(POLL_S)
            if task["lastStatus"] == "STOPPED":  # by itself; the log is read to its end
                time.sleep(2)
                self._remove(ids)

        spawn("ecs-watch", follow)

    def _remove(self, ids: list[str]) -> None:
        for container in ids:
            self.engine.remove(container)

    def kill(self, task: Task) -> None:
        """End a task's containers at once, as their host's end does."""
        spawn("ecs-kill", self._remove, [*task.get("_docker_ids", ())])

    def _look_at(self, task: Task, ids: list[str]) -> None:
        try:
            states = [self.engine.docker.containers.get(each).attrs["State"] for each in ids]
        except NotFound:  # removed by hand: gone, as from a host that was lost
            with LOCK:
                self.hosts.end(task, KILLED, "TerminationNotice", "Host EC2 terminated.")
            return
        except DockerException as error:
            log.warning("task %s: %s", task["taskArn"], error)
            return
        for container, state in zip(task["containers"], states, strict=False):
            health = state.get("Health", {}).get("Status")
            container["healthStatus"] = task["healthStatus"] = HEALTH.get(health, "UNKNOWN")
            if state.get("OOMKilled"):
                container["reason"] = "OutOfMemoryError: Container killed due to memory usage"
        if any(state["Status"] == "exited" for state in states):
            ecs._maybe_mark_stopped(task, self.engine.docker)
        elif task["healthStatus"] == "UNHEALTHY" and service_key(task):
            ecs._stop_task(
                {
                    "cluster": task["clusterArn"],
                    "task": task["taskArn"],
                    "reason": "Task failed container health checks",
                }
            )

    def terminate(self, task: Task) -> None:
        """SIGTERM, the container's stop timeout, SIGKILL."""
        task["lastStatus"] = "STOPPING"
        publish(task)

        def end() -> None:
            seconds = stop_timeout(task)
            code = max(self.engine.end(each, seconds) for each in [*task["_docker_ids"]])
            with LOCK:
                self.hosts.end(task, code)
            ecs._cleanup_task_resources(task, self.engine.docker)
            if service := service_key(task):
                ecs._reconcile_service_tasks(service.partition("/")[0], service)

        spawn("ecs-stop", end)

    # --- services -----------------------------------------------------------------------------
    def record_service_task_failure(
        self, task: Task, digest_resolution_failed: bool = False
    ) -> None:
        """A task that keeps failing is started less and less often, as ECS does."""
        key = service_key(task)
        if key:
            failures, until = self._pauses.get(key, (0, 0.0))
            failures = failures + 1 if time.time() - until < LONGEST_PAUSE_S else 1
            pause = min(LONGEST_PAUSE_S, 2 ** (failures - 1) - 1)
            self._pauses[key] = (failures, time.time() + pause)
            service = ecs._services.get(key)
            if service and failures >= 2:
                say(
                    service,
                    f"(service {service['serviceName']}) is unable to consistently start tasks "
                    "successfully.",
                )
        self._stock_record_service_task_failure(task, digest_resolution_failed)

    def reconcile_service_tasks(self, cluster: str, key: str) -> None:
        """Start what is missing: not before a pause is over, and not while an old task ends.

        A task takes a whole host, so the next one has no place before the old one is gone.
        """
        service = ecs._services.get(key)
        pause = self._pauses.get(key, (0, 0.0))[1] - time.time()
        tasks = [task for task in ecs._tasks.values() if service_key(task) == key]
        alive = sum(task["lastStatus"] in ecs._PRE_STOP_STATUSES for task in tasks)
        is_growing = bool(service) and alive < int(service.get("desiredCount") or 0)
        if is_growing and any(task["lastStatus"] == "STOPPING" for task in tasks):
            return  # the thread that ends it calls this again
        if not is_growing or pause <= 0:
            self._stock_reconcile_service_tasks(cluster, key)
            return
        if service.get("_paused"):
            return
        service["_paused"] = True

        def later() -> None:
            time.sleep(pause + 0.05)
            service.pop("_paused", None)
            self.reconcile_service_tasks(cluster, key)

        spawn("ecs-pause", later)
