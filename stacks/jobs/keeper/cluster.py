"""The tasks and hosts of the cluster, for the function in ``index.py``: list, stop, release.

Packed beside it, under this name; not for other parts of the project.
"""

import json
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import boto3

from contract import times
from contract.job import JOB_TAG, JobStatus, stop_reason
from contract.job_outcome import (
    AILING_SINCE,
    DISCONNECTED_SINCE,
    job_of,
    keeper_of,
    refusal,
    seen_since,
)
from contract.nodes import GROUP_TAG, pool_hosts, pool_provider

if TYPE_CHECKING:  # Lambda has boto3 and not its types
    from mypy_boto3_autoscaling.type_defs import AutoScalingGroupTypeDef
    from mypy_boto3_ecs.type_defs import (
        AttributeTypeDef,
        ContainerInstanceTypeDef,
        TaskTypeDef,
    )

#: For clients of S3: a call without an answer must not use up the time in which hosts are released.
QUICK: dict[str, Any] = {}
if "AWS_LAMBDA_FUNCTION_NAME" in os.environ:
    from botocore.config import Config

    QUICK["config"] = Config(
        connect_timeout=3, read_timeout=5, retries={"mode": "standard", "total_max_attempts": 2}
    )
CLUSTER = os.environ.get("CLUSTER", "")
STACK = os.environ.get("STACK", "")
#: Pools of workers beside the deployment's own, and the most hosts of each.
POOLS: dict[str, int] = json.loads(os.environ.get("POOLS", "{}"))
#: Groups of hosts and their capacity providers: heads, workers, and workers in pools.
GROUPS = dict(each.split("=") for each in os.environ.get("GROUPS", "").split())
#: The pools and their places (``nodes.pool_place``).
PLACES = dict(each.split("=") for each in os.environ.get("PLACES", "").split())
#: Families of the deployment's tasks.
FAMILIES = os.environ.get("FAMILIES", "").split()
FAMILIES += [pool_hosts(STACK, each) for each in PLACES.values()]
GROUPS |= {pool_hosts(STACK, each): pool_provider(STACK, each) for each in PLACES.values()}


# --- tasks ----------------------------------------------------------------------------------------
def each_of(service: str, call: str, key: str, **arguments: Any) -> Iterator[Any]:
    """Items under ``key`` on all pages of a paginated call."""
    client: Any = boto3.client(service)  # type: ignore[call-overload]
    for page in client.get_paginator(call).paginate(**arguments):
        yield from page[key]


def each_described(call: str, key: str, arns: list[str]) -> Iterator[Any]:
    """Descriptions by a call of ECS, which takes at most 100 ARNs."""
    describe = getattr(boto3.client("ecs"), call)
    for first in range(0, len(arns), 100):
        yield from describe(cluster=CLUSTER, **{key: arns[first : first + 100]})[key]


def described(arns: list[str]) -> "list[TaskTypeDef]":
    return [*each_described("describe_tasks", "tasks", arns)]


def listed(**which: str) -> list[str]:
    return [*each_of("ecs", "list_tasks", "taskArns", cluster=CLUSTER, **which)]


def running(**which: str) -> "list[TaskTypeDef]":
    """Tasks of the cluster, all or those with one property; ``startedBy`` takes no other beside it.

    Tasks that are being stopped are missing, if not at once: lists are eventually consistent.
    """
    # ECS's default is those whose desired status is RUNNING.
    return described(listed(**which))


def is_waiting(task: "TaskTypeDef") -> bool:
    """True if a task has no host yet."""
    return task["lastStatus"] == "PROVISIONING" and not task.get("containerInstanceArn")


def is_wanted(provider: str, wanted: Collection[str]) -> bool:
    """True if a task waits for a capacity provider, or ("") for any."""
    return provider in wanted or "" in wanted


def provider_of(pool: str) -> str:
    """Capacity provider of a pool of workers; of heads, for an empty name."""
    heads, workers, *_ = GROUPS.values()
    if not pool:
        return heads
    place = PLACES.get(pool, "")
    return pool_provider(STACK, place) if place else workers


def groups_of(provider: str) -> list[str]:
    return [name for name, own in GROUPS.items() if own == provider]


def refusal_of(provider: str, since: float) -> str:
    """AWS's reason why a capacity provider gets no host; "" if it has given none."""
    groups = boto3.client("autoscaling")
    for name in groups_of(provider):
        with suppress(groups.exceptions.ClientError):
            found = groups.describe_scaling_activities(AutoScalingGroupName=name)
            return refusal(found["Activities"], since=since)
    return ""


def unused_hosts(provider: str, tasks: "list[TaskTypeDef]") -> int:
    """Number of instances of a capacity provider's group that none of these tasks is on; those that
    boot count."""
    found = boto3.client("autoscaling").describe_auto_scaling_groups(
        AutoScalingGroupNames=groups_of(provider)
    )
    used = [each for each in tasks if each.get("containerInstanceArn")]
    return sum(map(num_staying, found["AutoScalingGroups"])) - len(used)


def num_staying(group: "AutoScalingGroupTypeDef") -> int:
    """Number of instances of a group that are not being terminated."""
    states = [each.get("LifecycleState", "") for each in group["Instances"]]
    return sum("Terminating" not in state for state in states)


def tasks_of_services() -> set[str]:
    """Tasks that ECS itself keeps running: a task's group is the word of who has started it."""
    services = each_of("ecs", "list_services", "serviceArns", cluster=CLUSTER)
    # By its name: that a list takes an ARN is not documented.
    names = [each.rpartition("/")[2] for each in services]
    return {arn for name in names for arn in listed(serviceName=name)}


def stop(tasks: "list[TaskTypeDef]", reason: str) -> None:
    ecs = boto3.client("ecs")
    for task in tasks:
        print(f"stopping {task['taskArn']}: {reason}")
        ecs.stop_task(cluster=CLUSTER, task=task["taskArn"], reason=reason)


# --- hosts ----------------------------------------------------------------------------------------
def drain(host: str) -> None:
    """Let no more tasks start on a host."""
    boto3.client("ecs").update_container_instances_state(
        cluster=CLUSTER, containerInstances=[host], status="DRAINING"
    )


def release(
    instances: Collection[str],
    *,
    wanted: Collection[str] = (),
    are_bad: bool = False,
    at_once: bool = False,
) -> None:
    """Terminate the hosts that no longer run anything.

    What goes wrong here is done again by the next sweep, so it does not fail a job.

    Args:
        wanted: capacity providers that a task waits for, "" for any: their groups start another
            host in the place of one that is terminated.
        are_bad: no more tasks may start there, even if one has already: each would fail.
        at_once: do not wait for tasks that are being stopped there: they never end.
    """
    until = time.monotonic() + times.CONSISTENT_S  # of all: the function's own time is limited
    for instance in sorted(instances):
        try:
            if not are_bad and not unused(instance, until=until):
                continue
            drain(instance)
            # Another job's task may have come until then; none comes from now on. It stays so even
            # if one has: to take it back could undo what another call does, and a sweep ends the
            # host after that task.
            if found := unused(instance, until=until):
                terminate(
                    found["ec2InstanceId"],
                    is_replaced=is_wanted(found.get("capacityProviderName", ""), wanted),
                    at_once=at_once or not found["runningTasksCount"],
                )
        except Exception as error:  # one host must not keep the others
            print(f"{instance} is left to the next sweep: {error}")


def terminate(instance: str, *, is_replaced: bool, at_once: bool) -> None:
    """Terminate an instance; its group starts another one in its place if it ``is_replaced``.

    ECS's draining keeps it until its tasks have ended, for 48 hours at most, and maybe one that
    never joined or has lost its agent, too (containers-roadmap 2467, 2685); ``at_once``, EC2
    does not wait for that.
    """
    groups = boto3.client("autoscaling")
    end = partial(groups.terminate_instance_in_auto_scaling_group, InstanceId=instance)
    try:
        end(ShouldDecrementDesiredCapacity=not is_replaced)
    except groups.exceptions.ClientError as error:
        code = error.response["Error"]["Code"]
        if code == "ValidationError" and not is_replaced:
            # A group that asks for none already, because a scale-in has spared a protected
            # instance, cannot ask for less, and starts no other one.
            end(ShouldDecrementDesiredCapacity=False)
        elif code != "ScalingActivityInProgress":  # it is being terminated, and kept
            raise
    if at_once:
        boto3.client("ec2").terminate_instances(InstanceIds=[instance])


def unused(instance: str, *, until: float = 0) -> "ContainerInstanceTypeDef | None":
    """A host, if all tasks that run there, or are about to, are being stopped.

    The lists of tasks are eventually consistent and may lack one that has just started; the numbers
    that ECS keeps of a host have it. They may still have one that has just stopped: until ``until``
    (``time.monotonic()``) the host is looked at again, as to subtract that could hide a new one.
    """
    ecs, these = boto3.client("ecs"), [instance]
    while True:
        found = ecs.describe_container_instances(cluster=CLUSTER, containerInstances=these)
        ended = tasks_on(instance)
        is_used = any(task["desiredStatus"] != "STOPPED" for task in ended)
        if is_used or not found["containerInstances"]:  # it no longer exists
            return None
        host = found["containerInstances"][0]
        stopping = [task for task in ended if not task.get("stoppedAt")]
        never_ran = [task for task in stopping if not task.get("startedAt")]
        pending, alive = host["pendingTasksCount"], host["runningTasksCount"]
        if pending <= len(never_ran) and pending + alive <= len(stopping):
            return host
        since = time.time() - times.CONSISTENT_S
        if last_end(ended) < since or time.monotonic() >= until:
            return None
        time.sleep(1)


def tasks_on(instance: str) -> "list[TaskTypeDef]":
    """Tasks of a host, those of the last hour that have ended among them.

    A task that is being stopped may still be in the list of those that run.
    """
    both = [
        arn
        for status in ("RUNNING", "STOPPED")
        for arn in listed(containerInstance=instance, desiredStatus=status)
    ]
    return described([*dict.fromkeys(both)])


def release_idle(
    tasks: "list[TaskTypeDef]",
    *,
    idle_s: float,
    missed: Collection[str] = (),
    silent: Collection[str] | None = None,
) -> list[str]:
    """Terminate hosts that have had no task for ``idle_s``, and let their groups ask for no more
    than there are.

    A task that fares badly on its host is stopped there, and no other one comes to that host.
    Managed scaling keeps a surplus host, and one whose task ended by itself, for at least a quarter
    of an hour.

    Args:
        tasks: all that run in the cluster.
        missed: capacity providers for whose job EC2 had too few hosts: those that boot, or have
            never had a task, go at once.
        silent: heads that no longer report; None: not known.
    """
    # Capacity providers that a task waits for, and since when.
    wanted: dict[str, float] = {}
    for task in filter(is_waiting, tasks):
        provider, since = task.get("capacityProviderName", ""), task["createdAt"].timestamp()
        wanted[provider] = min(since, wanted.get(provider, since))
    on = {arn: task for task in tasks if (arn := task.get("containerInstanceArn"))}
    idle, lost, joined = set[str](), set[str](), dict[str, str]()
    arns = [*each_of("ecs", "list_container_instances", "containerInstanceArns", cluster=CLUSTER)]
    for host in each_described("describe_container_instances", "containerInstances", arns):
        arn = host["containerInstanceArn"]
        joined[host["ec2InstanceId"]] = job_of(on.get(arn, {}))
        try:
            wrong = ailment(host, on.get(arn), silent)
            away = None if host["agentConnected"] else ""
            if wrong and arn in on:
                drain(arn)
                stop([on[arn]], stop_reason(JobStatus.HOST_LOST, wrong))
                idle.add(arn)
            # A disconnected agent takes no task, and never reports that one has stopped.
            elif wrong or seen_s(host, DISCONNECTED_SINCE, away) >= times.DISCONNECTED_S:
                lost.add(arn)
            elif is_surplus(host, wanted, missed, idle_s=idle_s):
                idle.add(arn)
        except Exception as error:  # one host must not keep the others billed
            print(f"{arn} is left to the next sweep: {error}")
    # First, or a group starts another host in the place of one that is terminated.
    correct_groups(wanted)
    release(lost, wanted=wanted, at_once=True)
    release(idle, wanted=wanted)
    unjoined = tag_or_end(joined, wanted, missed)
    return [*sorted(idle | lost), *unjoined]


def is_surplus(
    host: "ContainerInstanceTypeDef",
    wanted: Mapping[str, float],
    missed: Collection[str],
    *,
    idle_s: float,
) -> bool:
    """True if a host has idled for too long.

    While a task waits for a host of its group a new host stays: it may be for that task. One that
    drains takes none. Nor does one that has idled for ``HOST_JOINS_S`` meanwhile (it lacks a GPU,
    say): the group would be full with such hosts.
    """
    if host["runningTasksCount"] or host["pendingTasksCount"]:
        return False
    now, provider = time.time(), host.get("capacityProviderName", "")
    ended = tasks_on(host["containerInstanceArn"])
    if is_wanted(provider, wanted) and host["status"] != "DRAINING":
        # ECS places a task that waits on a host that can take it within this time.
        if now - wanted.get(provider, now) < times.SWEEP_EVERY_S:
            return False
        idle_s = times.HOST_JOINS_S
    elif provider in missed and not ended:
        idle_s = 0
    elif ended and keeper_of(max(ended, key=lambda each: each["createdAt"])):
        idle_s = min(idle_s, times.TAKEN_HOST_S)
    return now - max(host["registeredAt"].timestamp(), last_end(ended)) >= idle_s


def correct_groups(wanted: Collection[str]) -> None:
    """Resume what AWS has suspended, and ask for no more hosts than there are, unless a task waits
    for one: EC2 Auto Scaling keeps asking for hosts after the tasks that waited for them."""
    groups = boto3.client("autoscaling")
    found = groups.describe_auto_scaling_groups(AutoScalingGroupNames=[*GROUPS])
    for group in found["AutoScalingGroups"]:
        there, name = num_staying(group), group["AutoScalingGroupName"]
        # AWS may suspend what has failed for a day (administrative suspension): it resumes nothing.
        for each in group.get("SuspendedProcesses", []):
            reason = each.get("SuspensionReason", "")
            print(f"{name}: {each['ProcessName']} is suspended: {reason}")
            if not reason.startswith("User suspended"):
                # A right that an organization has taken away keeps nothing else from being done.
                with suppress(groups.exceptions.ClientError):
                    groups.resume_processes(
                        AutoScalingGroupName=name, ScalingProcesses=[each["ProcessName"]]
                    )
        if group["DesiredCapacity"] > there and not is_wanted(GROUPS[name], wanted):
            print(f"{name} asks for {there} hosts, not {group['DesiredCapacity']}")
            groups.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=there)


def tag_or_end(
    joined: dict[str, str], wanted: Collection[str], missed: Collection[str]
) -> list[str]:
    """Tag the instances of the groups with their jobs, and terminate those that have not joined the
    cluster in time.

    No task ever comes to the latter, and ECS lifts the protection from scale-in, with which each
    instance starts, only from hosts of the cluster: nothing else would end them.

    Args:
        joined: instances that are hosts of the cluster, and the job of each; "" for none.
        wanted: capacity providers that a task waits for, "" for any.
        missed: those whose hosts are not waited for, unless a task waits.

    Returns:
        The ids of those that were terminated.
    """
    which = [
        {"Name": f"tag:{GROUP_TAG}", "Values": [*GROUPS]},
        {"Name": "instance-state-name", "Values": ["pending", "running"]},
    ]
    reservations = each_of("ec2", "describe_instances", "Reservations", Filters=which)
    ended = []
    for instance in [each for part in reservations for each in part["Instances"]]:
        name, age = instance["InstanceId"], time.time() - instance["LaunchTime"].timestamp()
        is_slow = times.is_slow(instance.get("InstanceType", ""))
        limit = times.SLOW_HOST_JOINS_S if is_slow else times.HOST_JOINS_S
        tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
        group = tags[GROUP_TAG]
        is_awaited = is_wanted(GROUPS[group], wanted)
        try:
            if name in joined:
                if tags.get(JOB_TAG, "") != (job := joined[name]):
                    boto3.client("ec2").create_tags(
                        Resources=[name], Tags=[{"Key": JOB_TAG, "Value": job}]
                    )
                continue
            if age < limit and (is_awaited or GROUPS[group] not in missed):
                continue
            print(f"{name} of {group} has not joined the cluster within {age:.0f} s")
            terminate(name, is_replaced=is_awaited, at_once=True)
            ended.append(name)
        except Exception as error:  # one host must not keep the others
            print(f"{name} is left to the next sweep: {error}")
    return ended


def seen_s(host: "ContainerInstanceTypeDef", name: str, what: str | None) -> float:
    """Seconds for which sweeps have seen ``what`` on a host; 0: it is new, or None.

    ECS does not report since when, so the sweep that sees it first writes that on the host.
    """
    ecs, since = boto3.client("ecs"), seen_since(host, name, what or "")
    mark: AttributeTypeDef = {
        "name": name,
        "targetId": host["containerInstanceArn"],
        "targetType": "container-instance",
    }
    if what is None:
        if any(each["name"] == name for each in host.get("attributes", [])):
            ecs.delete_attributes(cluster=CLUSTER, attributes=[mark])
        return 0
    if since is None:
        print(f"{host['ec2InstanceId']}: {name} {what}")
        since = round(time.time())
        ecs.put_attributes(
            cluster=CLUSTER, attributes=[{**mark, "value": f"{since} {what}".strip()}]
        )
    return time.time() - since


def ailment(
    host: "ContainerInstanceTypeDef", task: "TaskTypeDef | None", silent: Collection[str] | None
) -> str:
    """Fault of the task that should run on a host, or should have ended; "" if there is none.

    ECS replaces an unhealthy task only for a service (containers-roadmap 161), and a task whose
    container is never made (a Docker that hangs) for none; such a Docker ends none either. It may
    never notice that a container has exited (amazon-ecs-agent 333, 364).
    """
    arn, what, limit_s = host["containerInstanceArn"], "", 0
    status = task["lastStatus"] if task else ""
    if status in ("PROVISIONING", "PENDING", "ACTIVATING"):
        what, limit_s = "did not start", times.TASK_STARTS_S
    elif task and silent and task["taskArn"] in silent:
        what, limit_s = "did not answer for 20 minutes", times.SWEEP_EVERY_S // 2
    elif task and not host["agentConnected"]:
        what, limit_s = "lost its agent", times.AGENT_LOST_S
    elif task and task.get("healthStatus") == "UNHEALTHY":
        what, limit_s = "did not answer its health check", times.SWEEP_EVERY_S // 2
    elif not task and host["runningTasksCount"] + host["pendingTasksCount"]:
        what, limit_s, task = "did not end", times.STOP_TIMEOUT_S, unended(arn)
    elif task and silent is None:
        return ""  # what a sweep has noted of its silence stays
    which = task["taskArn"].rpartition("/")[2] if task and what else ""
    # By its first words: a node that fails its health check, and then no longer reports, is one.
    mark = " ".join([which, *what.split()[:3]])
    seen = seen_s(host, AILING_SINCE, mark if which else None)
    return f"the node {what} on {host['ec2InstanceId']}" if seen > limit_s else ""


def unended(host: str) -> "TaskTypeDef | None":
    """First task of a host that should have ended and has not."""
    stopped = [each for each in tasks_on(host) if each["desiredStatus"] == "STOPPED"]
    left = [each for each in stopped if not each.get("stoppedAt")]
    return min(left, key=lambda each: each["taskArn"], default=None)


def last_end(tasks: "list[TaskTypeDef]") -> float:
    """Unix time at which the last of these tasks stopped; 0 if none has."""
    ends = (end.timestamp() for task in tasks if (end := task.get("stoppedAt")))
    return max(ends, default=0)
