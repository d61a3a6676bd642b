"""Hosts of ECS as records, and the tasks that are placed on them. Inside ``.venv-aws`` only.

A task of a capacity provider takes a host that is free, or a new one of the provider's group, and
the host stays until it is terminated: that ends the tasks on it as on AWS, and their containers.
ECS ends a task that has waited for a host for 10 to 30 minutes; here it is ``PATIENCE_S``, or
``REHEARSAL_PATIENCE_S``. Files in the local AWS's folder set more:

    ends.json      exit codes of tasks, by ARN, that are to end by themselves
    bad_hosts.json how many of the next hosts of a capacity provider lack their GPU, by its name
    unjoined_hosts.json how many of them boot, are billed and never join their cluster
"""

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from contract.exits import KILLED
from contract.times import HOST_JOINS_S
from rehearsal.ministack.internals import autoscaling, concurrency, ec2, ecs, responses
from rehearsal.ministack.switches import Strict, is_strict

Record = dict[str, Any]

_hosts: dict[str, Record] = {}
_stock: dict[str, Any] = {}
#: What ends a task's containers at once, where it has some.
_kill: list[Callable[[Record], None]] = []


def take(task: Record, most: int | None) -> bool:
    """Give a task a host of its provider; False where none is free and there are ``most``."""
    provider = task["capacityProviderName"]
    forget_gone()
    mine = [host for host in _hosts.values() if host["capacityProviderName"] == provider]
    free = [host for host in mine if not tasks_of(host)]
    if most is not None and len(mine) - len(free) >= most:
        return False
    for host in free:
        if host["status"] == "ACTIVE" and host["_joins"]:
            task["containerInstanceArn"] = host["containerInstanceArn"]
            return True
    if most is not None and len(mine) >= most:
        return False
    cluster = ecs._cluster_name_from_arn(task["clusterArn"])
    place = task["clusterArn"].replace(":cluster/", ":container-instance/")
    arn, instance = f"{place}/{ecs.new_uuid()}", f"i-{ecs.new_uuid().replace('-', '')[:17]}"
    joins = not is_next("unjoined_hosts.json", provider)
    _hosts[arn] = {
        "containerInstanceArn": arn,
        "ec2InstanceId": instance,
        "capacityProviderName": provider,
        "status": "ACTIVE",
        "agentConnected": True,
        "registeredAt": ecs._iso(),
        "_cluster": cluster,
        "_is_bad": is_next("bad_hosts.json", provider),
        "_joins": joins,
        "_leaves": False,
    }
    if joins:
        task["containerInstanceArn"] = arn
    if group := group_of(provider):
        group["DesiredCapacity"] = max(group["DesiredCapacity"], len(group["Instances"]) + 1)
        group["Instances"].append(
            {
                "InstanceId": instance,
                "LifecycleState": "InService",
                "HealthStatus": "Healthy",
                "AvailabilityZone": group["AvailabilityZones"][0],
                "ProtectedFromScaleIn": group["NewInstancesProtectedFromScaleIn"],
            }
        )
        if not joins:
            record_instance(instance, group)
    return joins


def record_instance(instance: str, group: Record) -> None:
    """Have EC2 describe an instance of a group that should have joined its cluster by now."""
    launched = datetime.now(tz=UTC) - timedelta(seconds=HOST_JOINS_S)
    addresses = ("PrivateDnsName", "PrivateIpAddress", "PublicDnsName", "PublicIpAddress")
    names = ("ImageId", "InstanceType", "SubnetId", "VpcId", "RootDeviceName")
    ec2._instances[instance] = {
        **dict.fromkeys((*addresses, *names), ""),
        "InstanceId": instance,
        "State": {"Code": 16, "Name": "running"},
        "LaunchTime": launched.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
        "Placement": {"AvailabilityZone": group["AvailabilityZones"][0], "Tenancy": "default"},
        "Architecture": "x86_64",
        "RootDeviceType": "ebs",
        "Virtualization": "hvm",
        "Hypervisor": "xen",
        "Monitoring": {"State": "disabled"},
        "AmiLaunchIndex": 0,
    }
    tag = {"Key": "aws:autoscaling:groupName", "Value": group["AutoScalingGroupName"]}
    ec2._tags[instance] = [tag]


def is_next(plan: str, provider: str) -> bool:
    """Whether the next host of a capacity provider is one of a file; it is counted."""
    file = folder() / plan
    try:
        planned: dict[str, int] = json.loads(file.read_text())
    except (OSError, ValueError):
        return False
    if planned.get(provider, 0) < 1:
        return False
    file.write_text(json.dumps(planned | {provider: planned[provider] - 1}))
    return True


def is_bad(task: Record) -> bool:
    """Whether a task's host lacks its GPU."""
    return bool(_hosts.get(task.get("containerInstanceArn", ""), {}).get("_is_bad"))


def folder() -> Path:
    """Of the local AWS."""
    return Path(os.environ["REHEARSAL_FOLDER"])


def forget_gone() -> None:
    """Drop the hosts that were terminated and whose tasks have ended by now."""
    for arn, host in [*_hosts.items()]:
        if host["_leaves"] and not tasks_of(host):
            del _hosts[arn]
            gone = host["ec2InstanceId"]
            ec2._instances.pop(gone, None)
            ec2._tags.pop(gone, None)
            if group := group_of(host["capacityProviderName"]):
                left = [each for each in group["Instances"] if each["InstanceId"] != gone]
                group["Instances"][:] = left


def tasks_of(host: Record) -> list[Record]:
    """Tasks on a host that have not stopped."""
    arn = host["containerInstanceArn"]
    return [
        task
        for task in ecs._tasks.values()
        if task.get("containerInstanceArn") == arn and task["lastStatus"] != "STOPPED"
    ]


def group_of(provider: str) -> Record | None:
    """The group of a capacity provider, if the account has it."""
    found = ecs._capacity_providers.get(provider) or {}
    arn = (found.get("autoScalingGroupProvider") or {}).get("autoScalingGroupArn", "")
    group: Record | None = autoscaling._asgs.get(arn.rpartition("/")[2])
    return group


# --- calls ----------------------------------------------------------------------------------------
def list_instances(request: Record) -> Any:
    """ListContainerInstances."""
    forget_gone()
    cluster = ecs._resolve_cluster_name(request.get("cluster", "default"))
    found = [host for host in _hosts.values() if host["_cluster"] == cluster and host["_joins"]]
    arns = [host["containerInstanceArn"] for host in found]
    return ecs.json_response({"containerInstanceArns": arns})


def describe_instances(request: Record) -> Any:
    """DescribeContainerInstances."""
    forget_gone()
    found = [_hosts[arn] for arn in request["containerInstances"] if arn in _hosts]
    return ecs.json_response({"containerInstances": [described(each) for each in found]})


def described(host: Record) -> Record:
    """A host as ECS describes it."""
    shown: Record = ecs._sanitize(host)
    return shown | {"runningTasksCount": len(tasks_of(host)), "pendingTasksCount": 0}


def update_state(request: Record) -> Any:
    """UpdateContainerInstancesState."""
    forget_gone()
    found = [_hosts[arn] for arn in request["containerInstances"] if arn in _hosts]
    for host in found:
        if not host["_leaves"]:
            host["status"] = request["status"]
    return ecs.json_response({"containerInstances": [described(each) for each in found]})


def deregister(request: Record) -> Any:
    """DeregisterContainerInstance, by force."""
    host = _hosts.pop(request["containerInstance"], {})
    for task in tasks_of(host) if host else ():
        lose(task, "Host deregistered.", "UserInitiated")
    return ecs.json_response({"containerInstance": ecs._sanitize(host)})


def terminate(request: Record) -> Any:
    """TerminateInstanceInAutoScalingGroup: what still runs there ends with its host, and the host
    waits for what was told to stop, as managed draining has it."""
    instance = autoscaling._p(request, "InstanceId")
    for host in [*_hosts.values()]:
        if host["ec2InstanceId"] != instance:
            continue
        is_first = not host["_leaves"]
        # First: no task that is started meanwhile may come to it.
        host["status"], host["_leaves"] = "DRAINING", True
        for task in tasks_of(host):
            if task["desiredStatus"] != "STOPPED":
                lose(task, f"Host EC2 (instance {instance}) terminated.", "TerminationNotice")
        forget_gone()
        lowers = autoscaling._p(request, "ShouldDecrementDesiredCapacity") == "true"
        if is_first and lowers and (group := group_of(host["capacityProviderName"])):
            group["DesiredCapacity"] -= 1
        name = "TerminateInstanceInAutoScalingGroup"
        return autoscaling._xml(200, f"{name}Response", f"<{name}Result/>")
    return autoscaling._error("ValidationError", f"Instance Id not found - {instance}")


def lose(task: Record, why: str, stop_code: str) -> None:
    """End a task with its host."""
    ecs._mark_task_stopped(task["taskArn"], task, why, stop_code, KILLED)
    for kill in _kill:
        kill(task)


def set_desired(request: Record) -> Any:
    """SetDesiredCapacity: hosts that are protected from scale-in stay, also where they are more."""
    group = autoscaling._asgs.get(autoscaling._p(request, "AutoScalingGroupName")) or {}
    ids = {host["ec2InstanceId"] for host in _hosts.values()}
    kept = [each for each in group.get("Instances", []) if each["InstanceId"] in ids]
    answer = _stock["SetDesiredCapacity"](request)
    if kept:
        others = [each for each in group["Instances"] if each["InstanceId"] not in ids]
        group["Instances"][:] = [*kept, *others[: max(0, group["DesiredCapacity"] - len(kept))]]
    return answer


# --- ends -----------------------------------------------------------------------------------------
def end_tasks() -> None:
    """End the tasks that are to end by themselves."""
    try:
        ends = json.loads((folder() / "ends.json").read_text())
    except (OSError, ValueError):
        return
    for arn, code in ends.items():
        if (task := ecs._tasks.get(arn)) and task["lastStatus"] != "STOPPED":
            why = "Essential container in task exited"
            ecs._mark_task_stopped(arn, task, why, "EssentialContainerExited", code)


def install(kill: Callable[[Record], None] | None = None) -> None:
    """Give the emulator these hosts. ``kill``: ends a task's containers at once."""
    if kill:
        _kill.append(kill)
    stock = ecs._describe_tasks

    def describe_tasks(request: Record) -> Any:
        end_tasks()
        return stock(request)

    ecs._describe_tasks = describe_tasks
    ecs._ACTION_MAP |= {
        "DescribeTasks": describe_tasks,
        "ListContainerInstances": list_instances,
        "DescribeContainerInstances": describe_instances,
        "UpdateContainerInstancesState": update_state,
        "DeregisterContainerInstance": deregister,
    }
    _stock["SetDesiredCapacity"] = autoscaling._ACTION_MAP["SetDesiredCapacity"]
    autoscaling._ACTION_MAP |= {
        "SetDesiredCapacity": set_desired,
        "TerminateInstanceInAutoScalingGroup": terminate,
    }


PATIENCE_S = 60
POLL_S = 0.25
#: What ECS says of a task on EC2 that no host came for.
NO_HOST_CAME = "EMPTY CAPACITY PROVIDER"

_placing = threading.Lock()


def has_host(task: dict[str, Any]) -> bool:
    """Whether a host is free: ``capacity.json`` in the local AWS's folder may say how many there
    are for a capacity provider; without, there is always one more. The task has it then."""
    provider = task.get("capacityProviderName") or ""
    try:
        most = json.loads((folder() / "capacity.json").read_text()).get(provider)
    except (OSError, ValueError):
        most = None
    return not provider or take(task, most)


def place(task: dict[str, Any], become: Any) -> bool:
    """Wait until a task has a host and give it that: ``become()`` makes it what it is on it.

    Returns what ``become`` does; False where the task has ended before.
    """
    arn, began = task["taskArn"], time.monotonic()
    patience = float(os.environ.get("REHEARSAL_PATIENCE_S") or PATIENCE_S)
    while ecs._task_is_active(arn, task):
        with _placing:
            if has_host(task):
                return bool(become())
        if time.monotonic() - began > patience and is_strict(Strict.PATIENCE):
            ecs._mark_task_stopped(arn, task, NO_HOST_CAME, "TaskFailedToStart")
            return False
        time.sleep(POLL_S)
    return False


def place_record(task: dict[str, Any]) -> None:
    """The same for a task that is only a record, which the emulator says is running at once."""
    task["lastStatus"] = "PROVISIONING"
    for container in task["containers"]:
        container["lastStatus"] = "PENDING"

    def run() -> bool:
        task["lastStatus"] = "RUNNING"
        for container in task["containers"]:
            container["lastStatus"] = "RUNNING"
        return True

    account, region = responses.get_account_id(), responses.get_region()

    def wait() -> None:
        with responses.request_scope(account, region):
            place(task, run)

    concurrency.spawn_background(wait, thread_name=f"ecs-place-{task['taskArn'][-8:]}")


def install_for_records() -> None:
    """Give hosts to tasks that are only records, too."""
    install()
    stock = ecs._ACTION_MAP["RunTask"]

    def run_task(request: dict[str, Any]) -> Any:
        status, headers, body = stock(request)
        answer = json.loads(body)
        for each in answer.get("tasks", []):
            task = ecs._tasks[each["taskArn"]]
            own = task.pop("containerInstanceArn")
            with _placing:
                is_placed = has_host(task)
            if not task.get("capacityProviderName"):
                task["containerInstanceArn"] = own
            if not is_placed:
                place_record(task)
            each.pop("containerInstanceArn", None)
            each.update(ecs._sanitize(task))
        return status, headers, json.dumps(answer).encode()

    ecs._ACTION_MAP["RunTask"] = run_task
