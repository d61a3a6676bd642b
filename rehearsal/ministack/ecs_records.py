"""What the emulator records of tasks and services, looked up, and two things added to it."""

import json
import logging
from typing import Any

from rehearsal.ministack.internals import ecs, eventbridge, servicediscovery

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
    return max(int(each.get("stopTimeout") or STOP_TIMEOUT_S) for each in definitions)


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
