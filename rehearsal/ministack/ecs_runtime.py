"""ECS tasks as containers, as the hosts of a cluster run them. Imported inside ``.venv-aws`` only.

Of the emulator's own life of a task this keeps the records, and replaces what happens to the
containers (``ecs_containers``): a task waits for a host, its end is polite, and a service pauses
after failures. It assigns to the emulator's module, whose shape is that of one version.

Unlike AWS: every task has a host at once, unless a file says how many there are; hosts start in no
time, and all tasks share one machine's processors. See docs/limits.md.
"""

import logging
import threading
import time
from typing import Any

from docker.errors import DockerException, NotFound

from contract.exits import KILLED
from rehearsal.ministack import ecs_hosts, ecs_placing, ecs_records
from rehearsal.ministack.ecs_containers import ContainerEngine, RuntimeSettings
from rehearsal.ministack.ecs_records import Task
from rehearsal.ministack.internals import concurrency, ecs, responses, servicediscovery

log = logging.getLogger("ecs-runtime")

POLL_S = 0.5
LONGEST_PAUSE_S = 60
HEALTH = {"healthy": "HEALTHY", "unhealthy": "UNHEALTHY"}


def install(settings: RuntimeSettings) -> None:
    """Give the emulator tasks that run as containers."""
    engine = ContainerEngine(settings)
    engine.install()
    Runtime(settings, engine).install()


class Runtime:
    """Replaces functions of the emulator's ECS by its methods, which call the stock ones."""

    def __init__(self, settings: RuntimeSettings, engine: ContainerEngine) -> None:
        self.settings = settings
        self.engine = engine
        self._pauses: dict[str, tuple[int, float]] = {}
        # The emulator's own functions, before ``install`` replaces them.
        self._stock_task_is_active = ecs._task_is_active
        self._stock_mark_task_pending = ecs._mark_task_pending
        self._stock_mark_task_running = ecs._mark_task_running
        self._stock_mark_task_stopped = ecs._mark_task_stopped
        self._stock_stop_task = ecs._stop_task
        self._stock_record_service_task_failure = ecs._record_service_task_failure
        self._stock_reconcile_service_tasks = ecs._reconcile_service_tasks

    def install(self) -> None:
        """Give the emulator this runtime."""
        # Tags are immutable here as in ECR: a tag means one digest, and it is told after the pull.
        ecs._prepare_service_images = lambda task, *_given: ecs_records.deployment_of(task)
        ecs._deployment_needs_first_task = lambda *_arguments: False
        ecs._watch_task_lifecycle = self.watch
        ecs._task_is_active = self.task_is_active
        ecs._mark_task_pending = self.mark_task_pending
        ecs._mark_task_running = self.mark_task_running
        ecs._mark_task_stopped = self.mark_task_stopped
        ecs._stop_task = self.stop_task
        ecs._record_service_task_failure = self.record_service_task_failure
        ecs._reconcile_service_tasks = self.reconcile_service_tasks
        ecs_hosts.install(self.kill)
        ecs._ACTION_MAP["StopTask"] = lambda data: self.stop_task(data, "UserInitiated")

    # --- the life of a task -------------------------------------------------------------------
    def task_is_active(self, arn: str, task: Task) -> bool:
        """Also for the thread that brings a task to its end, which the stock calls inactive."""
        ends_here = (
            task.get("_ended_by") == threading.get_ident() and task["lastStatus"] != "STOPPED"
        )
        return bool(self._stock_task_is_active(arn, task)) or ends_here

    def mark_task_pending(self, arn: str, task: Task) -> bool:
        """Place a task on a host, when there is one: until then it is PROVISIONING."""
        if task.get("capacityProviderName"):
            task.pop("containerInstanceArn")  # the emulator makes one up
        return ecs_placing.place(task, lambda: self._stock_mark_task_pending(arn, task))

    def mark_task_running(self, arn: str, task: Task) -> bool:
        done = bool(self._stock_mark_task_running(arn, task))
        if done:
            for service, _name in ecs_records.registered_names(task):
                attributes = {"AWS_INSTANCE_IPV4": ecs._task_ip(task) or ""}
                servicediscovery._register_instance(
                    {
                        "ServiceId": service,
                        "InstanceId": ecs_records.task_id(arn),
                        "Attributes": attributes,
                    }
                )
            ecs_records.publish(task)
        return done

    def mark_task_stopped(
        self, arn: str, task: Task, reason: str, stop_code: str, exit_code: int | None = None
    ) -> bool:
        done = bool(self._stock_mark_task_stopped(arn, task, reason, stop_code, exit_code))
        if done:
            for service, _name in ecs_records.registered_names(task):
                servicediscovery._deregister_instance(
                    {"ServiceId": service, "InstanceId": ecs_records.task_id(arn)}
                )
            ecs_records.publish(task)
        return done

    def watch(self, task: Task, _docker: Any, account: str, region: str) -> None:
        """Follow a running task's container: its health, and its end."""
        service = ecs_records.service_key(task)
        if service:
            ecs._schedule_service_deployment_completion(
                service.partition("/")[0], service, account, region, healthy_task=task
            )

        def follow() -> None:
            with responses.request_scope(account, region):
                ids = list(task["_docker_ids"])
                while ecs._task_is_active(task["taskArn"], task):
                    self._look_at(task, ids)
                    time.sleep(POLL_S)
                if "_ended_by" not in task:  # ended by itself; the log is read to its end
                    time.sleep(2)
                    for container in ids:
                        self.engine.remove(container)

        concurrency.spawn_background(
            follow, thread_name=f"ecs-watch-{ecs_records.task_id(task['taskArn'])[:8]}"
        )

    def kill(self, task: Task) -> None:
        """End a task's containers at once, as their host's end does."""
        for container in task.get("_docker_ids", ()):
            self.engine.remove(container)

    def _look_at(self, task: Task, ids: list[str]) -> None:
        try:
            states = [self.engine.docker.containers.get(each).attrs["State"] for each in ids]
        except NotFound:  # removed by hand: gone, as from a host that was lost
            ecs._mark_task_stopped(
                task["taskArn"], task, "Host EC2 terminated.", "TerminationNotice", exit_code=KILLED
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
            ecs._maybe_mark_stopped(task, self.engine.docker)
        elif task["healthStatus"] == "UNHEALTHY" and ecs_records.service_key(task):
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
            return self._stock_stop_task(data)
        arn, reason = task["taskArn"], data.get("reason", "Task stopped by user")
        with concurrency.resource_lock("ecs-task", arn):
            if task["desiredStatus"] == "STOPPED":  # an earlier call has stopped it
                return ecs.json_response({"task": ecs._sanitize(task)})
            task["desiredStatus"], task["lastStatus"] = "STOPPED", "STOPPING"
            task["stoppingAt"], task["stoppedReason"] = ecs._iso(), reason
            task["stopCode"] = stop_code
            task["_ended_by"] = None
        ecs_records.publish(task)
        account, region = responses.get_account_id(), responses.get_region()

        def end() -> None:
            with responses.request_scope(account, region):
                task["_ended_by"] = threading.get_ident()
                code = 0
                for container in list(task["_docker_ids"]):
                    code = max(code, self.engine.end(container, ecs_records.stop_timeout(task)))
                ecs._mark_task_stopped(arn, task, reason, stop_code, exit_code=code)
                ecs._cleanup_task_resources(task, self.engine.docker)
                if service := ecs_records.service_key(task):
                    ecs._reconcile_service_tasks(service.partition("/")[0], service)

        concurrency.spawn_background(end, thread_name=f"ecs-stop-{ecs_records.task_id(arn)[:8]}")
        return ecs.json_response({"task": ecs._sanitize(task)})

    # --- services -----------------------------------------------------------------------------
    def record_service_task_failure(
        self, task: Task, digest_resolution_failed: bool = False
    ) -> None:
        """A task that keeps failing is started less and less often, as ECS does."""
        key = ecs_records.service_key(task)
        if key:
            failures, until = self._pauses.get(key, (0, 0.0))
            failures = failures + 1 if time.time() - until < LONGEST_PAUSE_S else 1
            pause = min(LONGEST_PAUSE_S, 2 ** (failures - 1) - 1)
            self._pauses[key] = (failures, time.time() + pause)
            service = ecs._services.get(key)
            if service and failures >= 2:
                ecs_records.say(
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
        tasks = [task for task in ecs._tasks.values() if ecs_records.service_key(task) == key]
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
        account, region = responses.get_account_id(), responses.get_region()

        def later() -> None:
            time.sleep(pause + 0.05)
            service.pop("_paused", None)
            with responses.request_scope(account, region):
                self.reconcile_service_tasks(cluster, key)

        concurrency.spawn_background(later, thread_name="ecs-pause")
