"""Lambda function: admit jobs, and clean up after attempts and aborts and every few minutes.

A Lambda function of its own, without dependencies beyond what Lambda provides (boto3) and the
project's ``contract`` package, which is packed beside it. Its events, told apart by ``Action``:

    admit    the state machine, of a job that waits for its turn: says whether its head may start
    end      the state machine, after its head task has ended in any way: stops what is left of the
             job, releases its hosts, says why it ended and whether it should be tried again
    aborted  EventBridge, when an execution was aborted or timed out: the same, without a retry
    sweep    EventBridge, every few minutes: stops the tasks of executions that have ended, and
             heads that have waited for a host for longer than their job wants to; terminates
             hosts that have had no task for a while, that never joined the cluster, or that
             cannot take the task that waits
    release  a job's head, of ``Hosts`` that it needs no more: terminates those without a task; no
             other task comes to those that ``AreBad``
             trainctl, when a standing cluster has been stopped: terminates all without a task

A job's tasks are known by what they were started with: their group, ``job:<id>``.
"""

import json
import math
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import boto3

from contract import exits, runs, times
from contract.admission import Limits, in_order
from contract.errors import InputError
from contract.job import (
    JobSpec,
    JobStatus,
    Outcome,
    execution_arn,
    record_json,
    stop_reason,
)
from contract.job_outcome import (
    DISCONNECTED_SINCE,
    Ending,
    deadline_of,
    disconnected_since,
    ending_of,
    head_of,
    job_of,
    text_of,
    told,
    verdict,
)
from contract.nodes import ENV_JOB_SPEC, Range

if TYPE_CHECKING:  # Lambda has boto3 and not its types
    from mypy_boto3_ecs.type_defs import (
        AttributeTypeDef,
        ContainerInstanceTypeDef,
        ListTasksRequestPaginateTypeDef,
        TaskTypeDef,
    )

CLUSTER = os.environ.get("CLUSTER", "")
BUCKET = os.environ.get("BUCKET", "")
HEAD_FAMILY = os.environ.get("HEAD_FAMILY", "")
STATE_MACHINE = os.environ.get("STATE_MACHINE", "")
LIMITS = Limits(
    max_heads=int(os.environ.get("MAX_HEADS", "1")),
    max_workers=int(os.environ.get("MAX_WORKERS", "1")),
)
#: Groups of hosts and their capacity providers; families of the deployment's tasks.
GROUPS = dict(each.split("=") for each in os.environ.get("GROUPS", "").split())
FAMILIES = os.environ.get("FAMILIES", "").split()
#: By which EC2 Auto Scaling marks the instances of a group.
GROUP_TAG = "aws:autoscaling:groupName"
#: Ends of which the head tells more, and the first words of what it says.
_TOLD_BY_HEAD = {JobStatus.FILES_LOST: "files lost", JobStatus.FAILED: "failed"}
#: Exit codes that say it all, or of a head that could say nothing.
_NOT_TOLD = (None, exits.ASKS_TOO_MUCH, exits.KILLED)


# --- AWS ------------------------------------------------------------------------------------------
def described(arns: list[str]) -> "list[TaskTypeDef]":
    ecs = boto3.client("ecs")
    return [
        task
        for first in range(0, len(arns), 100)
        for task in ecs.describe_tasks(cluster=CLUSTER, tasks=arns[first : first + 100])["tasks"]
    ]


def running(*, started_by: str = "", family: str = "") -> "list[TaskTypeDef]":
    """Tasks of the cluster, all or those with one property.

    Those that were told to stop are missing, but for seconds: lists are eventually consistent.
    """
    # ECS's default is the same as this: those whose desired status is RUNNING.
    request: ListTasksRequestPaginateTypeDef = {"cluster": CLUSTER}
    if started_by:  # which must be the only filter
        request["startedBy"] = started_by
    if family:
        request["family"] = family
    pages = boto3.client("ecs").get_paginator("list_tasks").paginate(**request)
    return described([arn for page in pages for arn in page["taskArns"]])


def patience_of(task: "TaskTypeDef") -> float:
    """How long a head may wait for its host, in seconds; a worker's is its head's to watch."""
    spec = spec_of(told(task, ENV_JOB_SPEC))
    return spec.capacity_wait_s if spec else math.inf


def spec_of(order: str | None) -> JobSpec | None:
    """A job's order; None where there is none, or none that can be understood."""
    if not order:
        return None
    try:
        return JobSpec.from_json(order)
    except InputError as error:
        print(f"an order is not understood: {error}")
        return None


def stop(tasks: "list[TaskTypeDef]", reason: str) -> None:
    ecs = boto3.client("ecs")
    for task in tasks:
        print(f"stopping {task['taskArn']}: {reason}")
        ecs.stop_task(cluster=CLUSTER, task=task["taskArn"], reason=reason)


def release(
    instances: Collection[str], *, wanted: Collection[str] = (), are_bad: bool = False
) -> None:
    """Terminate the hosts that nothing runs on any more.

    What goes wrong here is done again by the next sweep, so it does not fail a job.

    Args:
        wanted: capacity providers that a task waits for, "" for any: their groups start another
            host in the place of one that is terminated.
        are_bad: no task may come to them any more, even if one has already: each would end there.
    """
    ecs = boto3.client("ecs")
    until = time.monotonic() + times.CONSISTENT_S  # of all: the function's own time is limited
    for instance in sorted(instances):
        try:
            if not are_bad and not unused(instance, until=until):
                continue
            ecs.update_container_instances_state(
                cluster=CLUSTER, containerInstances=[instance], status="DRAINING"
            )
            # Another job's task may have come until then; none comes from now on. It stays so even
            # if one has: to take it back could undo what another call does, and a sweep ends the
            # host after that task.
            if found := unused(instance, until=until):
                is_wanted = bool({"", found.get("capacityProviderName", "")} & {*wanted})
                terminate(found["ec2InstanceId"], is_wanted=is_wanted)
        except Exception as error:
            print(f"{instance} is left to the next sweep: {error}")


def terminate(instance: str, *, is_wanted: bool) -> None:
    """Terminate an instance; its group starts another one in its place if that ``is_wanted``."""
    groups = boto3.client("autoscaling")
    end = partial(groups.terminate_instance_in_auto_scaling_group, InstanceId=instance)
    try:
        end(ShouldDecrementDesiredCapacity=not is_wanted)
    except groups.exceptions.ClientError as error:
        if is_wanted or error.response["Error"]["Code"] != "ValidationError":
            raise
        # A group that asks for none already, because a scale-in has spared a protected instance,
        # cannot ask for less, and starts no other one.
        end(ShouldDecrementDesiredCapacity=False)


def unused(instance: str, *, until: float = 0) -> "ContainerInstanceTypeDef | None":
    """A host, if no task runs on it, or comes to it, that was not told to stop.

    The lists of tasks are eventually consistent and may lack one that has just started; the numbers
    that ECS keeps of a host have it. They may still have one that has just stopped: until ``until``
    (``time.monotonic()``) the host is looked at again, as to subtract that could hide a new one.
    """
    ecs, these = boto3.client("ecs"), [instance]
    while True:
        found = ecs.describe_container_instances(cluster=CLUSTER, containerInstances=these)
        ended = tasks_on(instance)
        is_used = any(task["desiredStatus"] != "STOPPED" for task in ended)
        if is_used or not found["containerInstances"]:  # it is gone already
            return None
        host = found["containerInstances"][0]
        stopping = [task for task in ended if not task.get("stoppedAt")]
        never_ran = [task for task in stopping if not task.get("startedAt")]
        pending, alive = host["pendingTasksCount"], host["runningTasksCount"]
        if pending <= len(never_ran) and pending + alive <= len(stopping):
            return host
        since = time.time() - times.CONSISTENT_S
        ends = [end.timestamp() for task in ended if (end := task.get("stoppedAt"))]
        if max(ends, default=0) < since or time.monotonic() >= until:
            return None
        time.sleep(1)


def tasks_on(instance: str) -> "list[TaskTypeDef]":
    """Tasks of a host, those of the last hour that have ended among them.

    A task that was just told to stop may be in the list of those that run.
    """
    lists = boto3.client("ecs").get_paginator("list_tasks")
    pages = [
        page
        for status in ("RUNNING", "STOPPED")
        for page in lists.paginate(
            cluster=CLUSTER, containerInstance=instance, desiredStatus=status
        )
    ]
    return described([*{arn: None for page in pages for arn in page["taskArns"]}])


def release_idle(tasks: "list[TaskTypeDef]", *, idle_s: float) -> list[str]:
    """End hosts that have had no task for ``idle_s``, and ask for no more than there are.

    Managed scaling keeps a surplus host, and one whose task ended by itself, for a quarter of an
    hour at least; EC2 Auto Scaling keeps asking for hosts that no task waits for any more. While a
    task waits for a host of a group nothing is done to that group: a host that just came would be
    taken from it. A host that drains, or whose agent stays disconnected, takes no task, so it is no
    host for one that waits. A disconnected agent also never reports that a task has stopped. Nor is
    one that has idled for ``HOST_JOINS_S`` beside a task that waits (it lacks a GPU, say), nor one
    that has not joined the cluster by then: the group would be full with them.

    Args:
        tasks: all that run in the cluster.
    """
    now = time.time()
    # Capacity providers that a task waits for, and since when.
    wanted: dict[str, float] = {}
    for task in tasks:
        if task["lastStatus"] == "PROVISIONING":
            provider, since = task.get("capacityProviderName", ""), task["createdAt"].timestamp()
            wanted[provider] = min(since, wanted.get(provider, now))
    ecs, groups = boto3.client("ecs"), boto3.client("autoscaling")
    pages = ecs.get_paginator("list_container_instances").paginate(cluster=CLUSTER)
    arns = [arn for page in pages for arn in page["containerInstanceArns"]]
    idle: set[str] = set()
    joined: set[str] = set()
    for first in range(0, len(arns), 100):
        page = ecs.describe_container_instances(
            cluster=CLUSTER, containerInstances=arns[first : first + 100]
        )
        for host in page["containerInstances"]:
            joined.add(host["ec2InstanceId"])
            if disconnected_s(host) >= times.DISCONNECTED_S:
                arn = host["containerInstanceArn"]
                idle |= {arn} if unused(arn) else set()
                continue
            if host["runningTasksCount"] or host["pendingTasksCount"]:
                continue
            provider, limit = host.get("capacityProviderName", ""), idle_s
            if wanted.keys() & {"", provider} and host["status"] != "DRAINING":
                # ECS places a task that waits on a host that can take it within this time.
                if now - wanted.get(provider, now) < times.SWEEP_EVERY_S:
                    continue
                limit = times.HOST_JOINS_S
            if now - unused_since(host) >= limit:
                idle.add(host["containerInstanceArn"])
    release(idle, wanted=wanted)
    unjoined = end_unjoined(joined, wanted)
    found = groups.describe_auto_scaling_groups(AutoScalingGroupNames=[*GROUPS])
    for group in found["AutoScalingGroups"]:
        there, name = len(group["Instances"]), group["AutoScalingGroupName"]
        if group["DesiredCapacity"] > there and not wanted.keys() & {"", GROUPS[name]}:
            print(f"{name} asks for {there} hosts, not {group['DesiredCapacity']}")
            groups.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=there)
    return [*sorted(idle), *unjoined]


def end_unjoined(joined: set[str], wanted: Collection[str]) -> list[str]:
    """Terminate the instances of the groups that have not joined the cluster in time.

    No task ever comes to them, and the protection from scale-in that each instance starts with is
    lifted from hosts of the cluster only: nothing else would end them.

    Args:
        joined: instances that are hosts of the cluster.
        wanted: capacity providers that a task waits for, "" for any.

    Returns:
        Their ids.
    """
    ec2 = boto3.client("ec2")
    pages = ec2.get_paginator("describe_instances").paginate(
        Filters=[
            {"Name": f"tag:{GROUP_TAG}", "Values": [*GROUPS]},
            {"Name": "instance-state-name", "Values": ["pending", "running"]},
        ]
    )
    reservations = [each for page in pages for each in page["Reservations"]]
    ended = []
    for instance in [each for part in reservations for each in part["Instances"]]:
        name, age = instance["InstanceId"], time.time() - instance["LaunchTime"].timestamp()
        if name in joined or age < times.HOST_JOINS_S:
            continue
        tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
        group = tags[GROUP_TAG]
        print(f"{name} of {group} has not joined the cluster within {age:.0f} s")
        try:
            terminate(name, is_wanted=bool({"", GROUPS[group]} & {*wanted}))
            ended.append(name)
        except Exception as error:
            print(f"{name} is left to the next sweep: {error}")
    return ended


def disconnected_s(host: "ContainerInstanceTypeDef") -> float:
    """How long a host's agent has been disconnected, as far as sweeps have seen; 0: it is not.

    ECS does not tell since when, so the sweep that sees it first writes that on the host.
    """
    ecs, since = boto3.client("ecs"), disconnected_since(host)
    mark: AttributeTypeDef = {"name": DISCONNECTED_SINCE, "targetId": host["containerInstanceArn"]}
    mark["targetType"] = "container-instance"
    if host["agentConnected"]:
        if since is not None:
            ecs.delete_attributes(cluster=CLUSTER, attributes=[mark])
        return 0
    if since is None:
        print(f"the agent of {host['ec2InstanceId']} is disconnected")
        since = round(time.time())
        ecs.put_attributes(cluster=CLUSTER, attributes=[{**mark, "value": str(since)}])
    return time.time() - since


def unused_since(host: "ContainerInstanceTypeDef") -> float:
    """Unix time since which nothing has run on a host that runs nothing."""
    tasks = tasks_on(host["containerInstanceArn"])
    ends = [task["stoppedAt"] for task in tasks if task.get("stoppedAt")]
    return max(each.timestamp() for each in [host["registeredAt"], *ends])


def head_starts(job: str) -> list[float] | None:
    """Unix times at which the head of a job was started, from its execution's history; None: it
    cannot be read."""
    try:
        pages = (
            boto3.client("stepfunctions")
            .get_paginator("get_execution_history")
            .paginate(
                executionArn=execution_arn(STATE_MACHINE, job), PaginationConfig={"PageSize": 1000}
            )
        )
        events = [event for page in pages for event in page["events"]]
        submitted = [(each["timestamp"], each.get("taskSubmittedEventDetails")) for each in events]
        return [at.timestamp() for at, task in submitted if task and task["resourceType"] == "ecs"]
    except Exception as error:
        print(f"the history of {job} cannot be read: {error}")
        return None


def end_tasks(job: str, reason: str) -> set[str]:
    """Stop all tasks of a job; return the hosts that they run on."""
    found = {task["taskArn"]: task for task in running(started_by=job)}
    heads = running(family=HEAD_FAMILY)
    found |= {task["taskArn"]: task for task in heads if job_of(task) == job}
    stop([*found.values()], reason)
    return {arn for task in found.values() if (arn := task.get("containerInstanceArn"))}


def write_record(job: str, spec: JobSpec, outcome: Outcome) -> Outcome:
    """Write down how a job ended, beside what it was; return what is written.

    Once: neither an abort that comes while its end is being cleaned up, nor another try of this
    function, changes how it ended.
    """
    s3, key = boto3.client("s3"), runs.job_record(spec.run, job)
    try:
        s3.put_object(
            Bucket=BUCKET,
            Key=key,
            Body=record_json(job, spec, outcome).encode(),
            ContentType="application/json",
            IfNoneMatch="*",
        )
    except s3.exceptions.ClientError as error:
        if error.response["Error"]["Code"] != "PreconditionFailed":
            raise
        print(f"{job} has its record already")
        body = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        with suppress(InputError):  # any job can write there, but start none anew
            return replace(Outcome.from_json(body.decode(errors="replace")), again=False)
    return outcome


def told_by_head(run: str, job: str) -> str:
    """Why a job has ended, in the words of its head, which any job can write; empty: none."""
    s3 = boto3.client("s3")
    try:
        found = s3.get_object(Bucket=BUCKET, Key=runs.job_reason(run, job))["Body"]
        said = found.read(1000).decode(errors="replace")
    except s3.exceptions.ClientError:
        return ""
    return "".join(each if each.isprintable() else "?" for each in said)


# --- what it is called for ------------------------------------------------------------------------
def admit(event: dict[str, Any]) -> dict[str, Any]:
    """Before the first attempt: whether the head may start (``running``, with the ``nodes`` that
    its job may have), is to ask again after a ``pause``, in seconds (``queued``), or how the job
    ended that gets no turn."""
    job, spec, now = event["Job"], spec_of(event["Spec"]), time.time()
    waited = now - event["Began"]
    status, reason, nodes = JobStatus.FAILED, "failed: its order is not understood", None
    if spec and LIMITS.admit(spec.nodes, []) is None:
        reason = (
            f"failed: it needs {spec.nodes.low} worker nodes, and the deployment has "
            f"{LIMITS.max_workers} at most: give fewer --nodes, or deploy a higher max_workers"
        )
    elif spec and (nodes := admitted(job, spec.nodes)):
        status, reason = JobStatus.RUNNING, "running"
    elif spec and waited < times.QUEUE_S:
        status, reason = JobStatus.QUEUED, "queued"
    elif spec:
        status = JobStatus.NO_CAPACITY
        reason = f"no capacity: it was not its turn within {times.QUEUE_S / 86400:.0f} days"
    outcome = Outcome(status=status, reason=reason)
    if spec and status not in (JobStatus.RUNNING, JobStatus.QUEUED):
        ended = replace(outcome, attempts=0, began=event["Began"], ended=now)
        outcome = write_record(job, spec, ended)
    answer: dict[str, Any] = json.loads(outcome.to_json())
    # It grows with the time that has been waited, as an execution has at most 25,000 events.
    answer["pause"] = math.floor(min(times.QUEUE_LOOK_S, max(times.CONSISTENT_S, waited / 20)))
    return answer | {"nodes": str(nodes)} if nodes else answer


def admitted(job: str, nodes: Range) -> Range | None:
    """The worker nodes that a job may have now; None where it is not its turn."""
    states = boto3.client("stepfunctions")
    pages = states.get_paginator("list_executions").paginate(
        stateMachineArn=STATE_MACHINE, statusFilter="RUNNING"
    )
    order = in_order(each for page in pages for each in page["executions"])
    # A list without the job itself may lack those just before it, too.
    if job not in order or order.index(job) >= LIMITS.max_heads:
        return None
    earlier = []
    for each in order[: order.index(job)]:
        found = states.describe_execution(executionArn=execution_arn(STATE_MACHINE, each))
        spec = spec_of(found.get("input"))
        # An order that is not understood, of another version maybe, holds no more than a head.
        earlier.append(spec.nodes if spec else Range(0, 0))
    return LIMITS.admit(nodes, earlier)


def end(event: dict[str, Any]) -> dict[str, Any]:
    """After an attempt: clean up, and say how it ended."""
    job, spec = event["Job"], spec_of(event["Spec"])
    task, error = head_of(event)
    outcome = verdict(
        task,
        error,
        deadline=event["Deadline"],
        # An execution that began before an update of the stack does not send all of this.
        patience=event.get("Asked", event["Began"]) + (spec.capacity_wait_s if spec else 0),
        attempt=event["Attempt"],
        in_a_row=event.get("InARow", event["Attempt"]),
    )
    try:
        begins = _TOLD_BY_HEAD.get(outcome.status)
        if begins and spec and outcome.exit_code not in _NOT_TOLD:
            reason = told_by_head(spec.run, job)
            # What the attempt before this one has said may be there still.
            outcome = replace(outcome, reason=reason) if reason.startswith(begins) else outcome
        if not outcome.again:
            outcome = replace(
                outcome, began=event["Began"], ended=time.time(), deadline=event["Deadline"]
            )
            if spec:
                outcome = write_record(job, spec, outcome)  # before an abort can come
    finally:
        if error.startswith("ECS."):
            # It may have hidden that a head was started, which no list shows at first.
            time.sleep(times.CONSISTENT_S)
        reason = stop_reason(outcome.status, f"job {job}: {outcome.reason}")
        hosts = end_tasks(job, reason)
        if outcome.again:  # they stay for another attempt
            hosts = set()
        own = {host} if (host := text_of(task, "ContainerInstanceArn")) else set()
        if ending_of(task) is Ending.BAD_HOST:  # neither the next attempt nor another job finds it
            release(own, are_bad=True)
        elif not outcome.again:
            hosts |= own
        release(hosts)
    answer: dict[str, Any] = json.loads(outcome.to_json())
    return answer


def aborted(event: "Mapping[str, Any]") -> None:
    """After an execution that did not come to its own end."""
    detail = event["detail"]
    job, spec = detail["name"], spec_of(detail.get("input"))
    if detail["status"] == "TIMED_OUT":
        outcome = Outcome(status=JobStatus.DEADLINE, reason="deadline")
    elif detail["status"] == "FAILED":
        outcome = Outcome(status=JobStatus.FAILED, reason="failed: its clean-up failed too")
    else:
        found = described_abort(job)
        outcome = Outcome.of_abort(error=found.get("error"), cause=found.get("cause"))
    release(end_tasks(job, stop_reason(outcome.status, f"job {job}: {outcome.reason}")))
    if spec:
        starts, stopped = head_starts(job), detail.get("stopDate")
        outcome = replace(
            outcome,
            attempts=None if starts is None else len(starts),
            began=detail["startDate"] / 1000,
            ended=stopped / 1000 if stopped else time.time(),
            deadline=math.floor(starts[0]) + spec.max_seconds if starts else None,
        )
        write_record(job, spec, outcome)


def described_abort(job: str) -> "Mapping[str, Any]":
    """What Step Functions tells of an execution that was aborted.

    Its answers are eventually consistent: for a while they may be those of before the abort, which
    lack who has done it.
    """
    states, until = boto3.client("stepfunctions"), time.monotonic() + times.CONSISTENT_S
    while True:
        found: Mapping[str, Any] = {}
        with suppress(states.exceptions.ExecutionDoesNotExist):
            found = states.describe_execution(executionArn=execution_arn(STATE_MACHINE, job))
        if found.get("status") == "ABORTED" or time.monotonic() > until:
            return found
        time.sleep(1)


def close_records() -> None:
    """Write down how executions ended whose record is missing: this function has failed then."""
    states, s3 = boto3.client("stepfunctions"), boto3.client("s3")
    now = time.time()
    for status in ("ABORTED", "FAILED", "TIMED_OUT"):
        found = states.list_executions(
            stateMachineArn=STATE_MACHINE, statusFilter=status, maxResults=100
        )
        for each in found["executions"]:
            age = now - each["stopDate"].timestamp()
            if not times.SWEEP_GRACE_S < age < times.CLOSED_S:
                continue  # its own clean-up may still come, or has been looked for
            order = states.describe_execution(executionArn=each["executionArn"])["input"]
            if (spec := spec_of(order)) is None:
                continue
            try:
                s3.get_object(Bucket=BUCKET, Key=runs.job_record(spec.run, each["name"]))
            except s3.exceptions.ClientError:
                print(f"{each['name']} has no record")
                dates = {name: each[name].timestamp() * 1000 for name in ("startDate", "stopDate")}
                detail = {"name": each["name"], "status": status, "input": order, **dates}
                aborted({"detail": detail})


def sweep() -> dict[str, Any]:
    """Stop what escaped: no task may run longer than there is an execution that watches it.

    Raises RuntimeError, after all is done that can be, where some of it could not be.
    """
    statuses: dict[str, str] = {}
    stopped, left = [], []
    tasks, served = running(), tasks_of_services()
    # Too new to tell: the list of its service may not have it yet.
    new = time.time() - times.CONSISTENT_S
    served |= {each["taskArn"] for each in tasks if each["createdAt"].timestamp() > new}
    for task in tasks:
        try:
            reason = reason_to_stop(task, statuses, served)
            if reason:
                stop([task], reason)
                stopped.append(task["taskArn"])
                if task.get("containerInstanceArn"):
                    release({task["containerInstanceArn"]})
        except Exception as error:  # one task must not keep the others running
            left.append(f"{task['taskArn']}: {error}")
    found = {"stopped": stopped, "released": release_idle(tasks, idle_s=times.IDLE_HOST_S)}
    try:
        close_records()
    except Exception as error:
        left.append(f"records: {error}")
    if left:
        raise RuntimeError(f"left to the next sweep: {'; '.join(left)}")
    return found


def tasks_of_services() -> set[str]:
    """Tasks that ECS itself keeps running: a task's group is the word of who has started it."""
    ecs = boto3.client("ecs")
    services, tasks = ecs.get_paginator("list_services"), ecs.get_paginator("list_tasks")
    return {
        arn
        for listed in services.paginate(cluster=CLUSTER)
        for service in listed["serviceArns"]
        # By its name: that a list takes an ARN is not documented.
        for page in tasks.paginate(cluster=CLUSTER, serviceName=service.rpartition("/")[2])
        for arn in page["taskArns"]
    }


def reason_to_stop(task: "TaskTypeDef", statuses: dict[str, str], served: Collection[str]) -> str:
    """Why the sweep stops a task; "" where it does not.

    Args:
        statuses: of the executions by now, job -> status; filled here.
        served: tasks of services, and those that may be.
    """
    job = job_of(task)
    if not job:
        family = task["taskDefinitionArn"].rpartition("/")[2].partition(":")[0]
        is_stray = family in FAMILIES and task["taskArn"] not in served
        return "it belongs to no job and no service" if is_stray else ""
    if job not in statuses:
        statuses[job] = status_of(job)
    if statuses[job] != "RUNNING":
        return f"job {job}: its execution has ended ({statuses[job]})"
    now = time.time()
    if now > deadline_of(task, default=now) + times.SWEEP_GRACE_S:
        return stop_reason(JobStatus.DEADLINE, f"job {job}: its deadline is over")
    if task["lastStatus"] != "PROVISIONING":
        return ""
    patience = patience_of(task)
    if now - task["createdAt"].timestamp() > patience:
        why = f"job {job}: no host within {patience:.0f} s"
        return stop_reason(JobStatus.NO_CAPACITY, why)
    return ""


def status_of(job: str) -> str:
    """Status of a job's execution. It is shown by the time that there is a task: the state machine
    has waited for that."""
    states = boto3.client("stepfunctions")
    try:
        return states.describe_execution(executionArn=execution_arn(STATE_MACHINE, job))["status"]
    except states.exceptions.ExecutionDoesNotExist:
        return "unknown"


def handler(event: dict[str, Any], _context: Any) -> Any:
    """What Lambda calls."""
    match event:
        case {"detail-type": "Step Functions Execution Status Change"}:
            return aborted(event)
        case {"Action": "admit"}:
            return admit(event)
        case {"Action": "end"}:
            return end(event)
        case {"Action": "release", "Hosts": [_, *_] as hosts}:
            release({*hosts}, are_bad=event.get("AreBad", False))
            return {"released": hosts}
        case {"Action": "release"}:
            return {"released": release_idle(running(), idle_s=0)}
    return sweep()
