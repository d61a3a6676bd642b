"""ECS tasks as containers, as the hosts of a cluster run them. Imported inside ``.venv-aws`` alone.

The emulator can start containers by itself, but without what this project's tasks are made of: a
network with names, limits, health, a polite end, a pause after a failure, the digest of the image.
Mended from outside, by assigning to the emulator's module; the shape of that is one version's.

Unlike AWS: every task has a host at once, unless a file says how many there are; hosts start in no
time, and all tasks share one machine's processors. See docs/limits.md.
"""

import json
import logging
import math
import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import docker
from docker.errors import APIError, DockerException, NotFound
from docker.types import EndpointConfig, Ulimit
from ministack.core.concurrency import resource_lock, spawn_background
from ministack.core.responses import get_account_id, get_region, request_scope
from ministack.services import ecs, eventbridge, servicediscovery

log = logging.getLogger("ecs-runtime")

Task = dict[str, Any]

#: Label of everything that a rehearsal makes in Docker; its value is the rehearsal's name.
LABEL = "ecs-train.rehearsal"

POLL_S = 0.5
# As the agent's: ECS takes 30 s where the container definition says nothing.
STOP_TIMEOUT_S = 30
LONGEST_PAUSE_S = 60
HEALTH = {"healthy": "HEALTHY", "unhealthy": "UNHEALTHY"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What ``rehearsal.local_aws`` tells through the environment."""

    name: str
    network: str
    """Docker network of the tasks; it must exist."""
    gateway: str
    """How a container reaches this process."""
    registry: str
    """``host:port`` that stands for ECR, or "" where images are only in the engine."""
    metadata: str
    """Where instances would find their metadata, spot notices among it; nobody need answer."""
    folder: Path
    """Of the local AWS. ``capacity.json`` in it may say how many hosts each capacity provider has
    (name -> number); without, there is always one more."""

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


class Runtime:
    """Replaces functions of the emulator's ECS by its methods, which call the stock ones."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine = docker.from_env(timeout=120)
        self.engine.networks.get(settings.network)  # made once, by whoever starts this
        self._pauses: dict[str, tuple[int, float]] = {}
        self._placing = threading.Lock()
        self._stock = {
            name: getattr(ecs, name)
            for name in (
                "_task_is_active",
                "_build_run_kwargs",
                "_register_metadata",
                "_mark_task_pending",
                "_mark_task_running",
                "_mark_task_stopped",
                "_stop_task",
                "_record_service_task_failure",
                "_reconcile_service_tasks",
            )
        }

    def install(self) -> None:
        """Give the emulator this runtime."""
        ecs._docker = self.engine
        # Tags are immutable here as in ECR: a tag means one digest, and it is told after the pull.
        ecs._prepare_service_images = lambda task, _definition, _docker: deployment_of(task)
        ecs._deployment_needs_first_task = lambda *_arguments: False
        ecs._run_docker_container = self.run_container
        ecs._watch_task_lifecycle = self.watch
        for name in self._stock:
            setattr(ecs, name, getattr(self, name.removeprefix("_")))
        ecs._ACTION_MAP["StopTask"] = lambda data: self.stop_task(data, "UserInitiated")

    # --- a container ------------------------------------------------------------------------
    def image(self, uri: str) -> str:
        """Where the engine gets an image of ECR from."""
        registry, slash, rest = uri.partition("/")
        if ".dkr.ecr." in registry and slash:
            return f"{self.settings.registry}/{rest}" if self.settings.registry else rest
        return uri

    def register_metadata(self, *arguments: Any) -> Any:
        """What the agent adds to a container's environment, with keys that SDKs accept here."""
        environment, is_host_mode = arguments[5], arguments[6]
        token = self._stock["_register_metadata"](
            *arguments[:7], None if is_host_mode else self.settings.gateway
        )
        # SDKs refuse credentials from a plain address that is not the agent's.
        for name in ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN"):
            environment.pop(name, None)
        given = {
            "AWS_ACCESS_KEY_ID": get_account_id(),
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": get_region(),
            "AWS_DEFAULT_REGION": get_region(),
            # The SDKs need no credentials from there; the watcher of spot notices looks.
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.settings.metadata,
            # Whose keys these are, for rehearsal.calls.
            "AWS_SESSION_TOKEN": arguments[2].get("taskRoleArn", ""),
        }
        for name, value in given.items():
            environment.setdefault(name, value)
        return token

    def build_run_kwargs(self, definition: dict[str, Any], *arguments: Any) -> dict[str, Any]:
        """Arguments of ``docker run`` for a container definition."""
        stock: dict[str, Any] = self._stock["_build_run_kwargs"](definition, *arguments)
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
        wanted["labels"] = stock["labels"] | {LABEL: self.settings.name}
        if not is_host_mode:
            names = [name for _id, name in registered_names(ecs._tasks[task_arn])]
            names.append(f"{definition['name']}-{task_id[:8]}")
            wanted["network"] = self.settings.network
            wanted["networking_config"] = {
                self.settings.network: EndpointConfig(self.engine.api._version, aliases=names)
            }
            wanted.pop("extra_hosts", None)
        return wanted

    def run_container(
        self, _docker: Any, definition: dict[str, Any], arguments: dict[str, Any], **_stock: Any
    ) -> Any:
        """Pull the image, as the agent does, and start the container."""
        uri = definition["image"]
        source = self.image(uri)
        try:
            image = (
                self.engine.images.pull(source)
                if self.settings.registry
                else self.engine.images.get(source)
            )
        except DockerException as error:
            what = getattr(error, "explanation", None) or error
            raise ecs._ImagePullError(f"{uri}: {what}") from error
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
            return self.engine.containers.run(image, **arguments)
        except APIError as error:
            if "rlimit" not in str(error) or "ulimits" not in arguments:
                raise
            log.warning("%s: limits are lowered: %s", arguments["name"], error)
            self._remove(arguments["name"])
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        limits = [
            Ulimit(name=each.name, soft=min(each.soft, most), hard=min(each.hard, most))
            for each in arguments["ulimits"]
            if each.name == "nofile"
        ]
        return self.engine.containers.run(image, **arguments | {"ulimits": limits})

    def _remove(self, container: str) -> None:
        try:
            self.engine.containers.get(container).remove(v=True, force=True)
        except NotFound:
            pass
        except DockerException as error:
            log.warning("container %s: %s", container, error)

    # --- the life of a task -------------------------------------------------------------------
    def task_is_active(self, arn: str, task: Task) -> bool:
        """Also for the thread that brings a task to its end, which the stock calls inactive."""
        ends_here = (
            task.get("_ended_by") == threading.get_ident() and task["lastStatus"] != "STOPPED"
        )
        return bool(self._stock["_task_is_active"](arn, task)) or ends_here

    def mark_task_pending(self, arn: str, task: Task) -> bool:
        """Place a task on a host, when there is one: until then it is PROVISIONING."""
        while ecs._task_is_active(arn, task):
            with self._placing:
                if self._has_host(task):
                    return bool(self._stock["_mark_task_pending"](arn, task))
            time.sleep(POLL_S)
        return False

    def _has_host(self, task: Task) -> bool:
        provider = task.get("capacityProviderName") or ""
        try:
            most = json.loads((self.settings.folder / "capacity.json").read_text()).get(provider)
        except (OSError, ValueError):
            most = None
        taken = [
            other
            for other in ecs._tasks.values()
            if other.get("capacityProviderName") == provider
            and other["lastStatus"] not in ("PROVISIONING", "STOPPED")
        ]
        return most is None or len(taken) < most

    def mark_task_running(self, arn: str, task: Task) -> bool:
        done = bool(self._stock["_mark_task_running"](arn, task))
        if done:
            for service, _name in registered_names(task):
                attributes = {"AWS_INSTANCE_IPV4": ecs._task_ip(task) or ""}
                servicediscovery._register_instance(
                    {"ServiceId": service, "InstanceId": task_id(arn), "Attributes": attributes}
                )
            publish(task)
        return done

    def mark_task_stopped(
        self, arn: str, task: Task, reason: str, stop_code: str, exit_code: int | None = None
    ) -> bool:
        done = bool(self._stock["_mark_task_stopped"](arn, task, reason, stop_code, exit_code))
        if done:
            for service, _name in registered_names(task):
                servicediscovery._deregister_instance(
                    {"ServiceId": service, "InstanceId": task_id(arn)}
                )
            publish(task)
        return done

    def watch(self, task: Task, _docker: Any, account: str, region: str) -> None:
        """Follow a running task's container: its health, and its end."""
        service = service_key(task)
        if service:
            ecs._schedule_service_deployment_completion(
                service.partition("/")[0], service, account, region, healthy_task=task
            )

        def follow() -> None:
            with request_scope(account, region):
                ids = list(task["_docker_ids"])
                while ecs._task_is_active(task["taskArn"], task):
                    self._look_at(task, ids)
                    time.sleep(POLL_S)
                if "_ended_by" not in task:  # ended by itself; the log is read to its end
                    time.sleep(2)
                    for container in ids:
                        self._remove(container)

        spawn_background(follow, thread_name=f"ecs-watch-{task_id(task['taskArn'])[:8]}")

    def _look_at(self, task: Task, ids: list[str]) -> None:
        try:
            states = [self.engine.containers.get(each).attrs["State"] for each in ids]
        except NotFound:  # removed by hand: gone, as from a host that was lost
            ecs._mark_task_stopped(
                task["taskArn"], task, "Host EC2 terminated.", "TerminationNotice", exit_code=137
            )
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
            ecs._maybe_mark_stopped(task, self.engine)
        elif task["healthStatus"] == "UNHEALTHY" and service_key(task):
            self.stop_task(
                {
                    "cluster": task["clusterArn"],
                    "task": task["taskArn"],
                    "reason": "Task failed container health checks",
                }
            )

    def stop_task(self, data: dict[str, Any], stop_code: str = "ServiceSchedulerInitiated") -> Any:
        """SIGTERM, the container's stop timeout, SIGKILL; the call itself returns at once."""
        cluster = ecs._resolve_cluster_name(data.get("cluster", "default"))
        task = cluster and ecs._resolve_task(data.get("task", ""), cluster)
        if not task or not task.get("_docker_ids") or task["lastStatus"] != "RUNNING":
            return self._stock["_stop_task"](data)
        arn, reason = task["taskArn"], data.get("reason", "Task stopped by user")
        with resource_lock("ecs-task", arn):
            if task["desiredStatus"] == "STOPPED":  # somebody has stopped it already
                return ecs.json_response({"task": ecs._sanitize(task)})
            task["desiredStatus"], task["lastStatus"] = "STOPPED", "STOPPING"
            task["stoppingAt"], task["stoppedReason"] = ecs._iso(), reason
            task["stopCode"] = stop_code
            task["_ended_by"] = None
        publish(task)
        account, region = get_account_id(), get_region()

        def end() -> None:
            with request_scope(account, region):
                task["_ended_by"] = threading.get_ident()
                code = 0
                for container in list(task["_docker_ids"]):
                    code = max(code, self._end_container(container, stop_timeout(task)))
                ecs._mark_task_stopped(arn, task, reason, stop_code, exit_code=code)
                ecs._cleanup_task_resources(task, self.engine)
                if service := service_key(task):
                    ecs._reconcile_service_tasks(service.partition("/")[0], service)

        spawn_background(end, thread_name=f"ecs-stop-{task_id(arn)[:8]}")
        return ecs.json_response({"task": ecs._sanitize(task)})

    def _end_container(self, container_id: str, timeout_s: int) -> int:
        try:
            container = self.engine.containers.get(container_id)
            container.stop(timeout=timeout_s)
            code = int(container.wait(timeout=30)["StatusCode"])
            time.sleep(1)  # the last lines of its log are still on their way
            return code
        except DockerException as error:
            log.warning("container %s: %s", container_id, error)
            return 137

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
        self._stock["_record_service_task_failure"](task, digest_resolution_failed)

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
            return  # whoever ends it calls this again
        if not is_growing or pause <= 0:
            self._stock["_reconcile_service_tasks"](cluster, key)
            return
        if service.get("_paused"):
            return
        service["_paused"] = True
        account, region = get_account_id(), get_region()

        def later() -> None:
            time.sleep(pause + 0.05)
            service.pop("_paused", None)
            with request_scope(account, region):
                self.reconcile_service_tasks(cluster, key)

        spawn_background(later, thread_name="ecs-pause")


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
    return max(int(each.get("stopTimeout") or STOP_TIMEOUT_S) for each in definitions)


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


def say(service: dict[str, Any], message: str) -> None:
    """Add to a service's events, once as long as it is the newest."""
    events = service["events"]
    if not events or events[0]["message"] != message:
        event = {"id": ecs.new_uuid(), "createdAt": ecs._iso(), "message": message}
        events.insert(0, event)


def publish(task: Task) -> None:
    """The event that ECS sends to EventBridge when a task's state changes."""
    detail = {name: value for name, value in task.items() if not name.startswith("_")}
    entry = {
        "Source": "aws.ecs",
        "DetailType": "ECS Task State Change",
        "Resources": [task["taskArn"]],
        "Detail": json.dumps(detail, default=str),
    }
    try:
        eventbridge._put_events({"Entries": [entry]}, allow_aws_source=True)
    except Exception:
        log.exception("event of %s", task["taskArn"])
