"""Cleans up after jobs: after each attempt, after an abort, and every few minutes after anything.

A Lambda function of its own, without dependencies beyond what Lambda provides (boto3) and the
project's ``contract`` package, which is packed beside it. Three events, told apart by ``Action``:

    end      the state machine, after its head task has ended in any way: stops what is left of the
             job, releases its hosts, says why it ended and whether it should be tried again
    aborted  EventBridge, when an execution was aborted or timed out: the same, without a retry
    sweep    EventBridge, every few minutes: stops the tasks of executions that have ended, and
             heads that have waited for a host for longer than their job wants to; terminates
             hosts that have had no task for a while
    release  trainctl, when a standing cluster has been stopped: terminates hosts without a task

A job's tasks are known by what they were started with: their group, ``job:<id>``.
"""

import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import boto3

from contract import exits, runs, times
from contract.endings import Ending, ending
from contract.errors import InputError
from contract.job import (
    JOB_GROUP,
    STOPPED_BY_USER,
    JobSpec,
    JobStatus,
    Outcome,
    execution_arn,
    record_json,
    status_of_stop,
    stop_reason,
)
from contract.nodes import ENV_DEADLINE, ENV_JOB_SPEC

if TYPE_CHECKING:  # Lambda has boto3 and not its types
    from mypy_boto3_ecs.type_defs import (
        ContainerInstanceTypeDef,
        ListTasksRequestPaginateTypeDef,
        TaskTypeDef,
    )

CLUSTER = os.environ.get("CLUSTER", "")
BUCKET = os.environ.get("BUCKET", "")
HEAD_FAMILY = os.environ.get("HEAD_FAMILY", "")
STATE_MACHINE = os.environ.get("STATE_MACHINE", "")
GROUPS = os.environ.get("GROUPS", "").split()

#: ECS's words where no host came for a task, or none has room.
NO_HOST = r"capacity provider|capacity is unavailable|\bRESOURCE:|No Container Instances"
#: ECS's own words when a user stops a task without giving a reason.
NO_REASON_GIVEN = "Task stopped by user"


# --- why a job ended ------------------------------------------------------------------------------
def verdict(
    task: Mapping[str, Any],
    error: str,
    *,
    deadline: float,
    patience: float,
    attempt: int,
    attempts: int,
) -> Outcome:
    """What the end of a head task means.

    Args:
        task: its description, as Step Functions writes it (``Containers``, ``StopCode`` ...); empty
            when there was none.
        error: name of Step Functions' error, with its cause where that is no task.
        deadline: Unix time.
        patience: Unix time until which a host for the head is asked for.
        attempt: number of this attempt, from 1.
        attempts: as many as the job may have.
    """
    container: dict[str, Any] = next(iter(task.get("Containers") or []), {})
    code = container.get("ExitCode")
    stopped = task.get("StoppedReason") or ""
    said = container.get("Reason") or stopped
    ordered = status_of_stop(stopped)  # by this function's sweep
    how = ending(stop_code=task.get("StopCode") or "", reason=said, exit_code=code)

    def ended(status: JobStatus, reason: str, *, again: bool = False) -> Outcome:
        return Outcome(status=status, reason=reason, exit_code=code, again=again, attempts=attempt)

    if code == exits.OK:
        return ended(JobStatus.SUCCEEDED, "succeeded")
    is_late = error.startswith("States.Timeout") or time.time() > deadline
    if code == exits.DEADLINE or ordered == JobStatus.DEADLINE or is_late:
        return ended(JobStatus.DEADLINE, "deadline")
    if code == exits.NO_CAPACITY or ordered == JobStatus.NO_CAPACITY:
        return ended(JobStatus.NO_CAPACITY, "no capacity")
    if how is Ending.NOT_STARTED and re.search(NO_HOST, f"{said} {error}", re.IGNORECASE):
        # It did not run, so it does not count.
        found = ended(JobStatus.NO_CAPACITY, "no capacity", again=time.time() < patience)
        return replace(found, attempts=attempt - 1)
    lost = {
        exits.BAD_HOST: "its host's GPUs or EFA devices are not healthy",
        exits.RAY_FAILED: "Ray did not start on its head, or ended there by itself",
    }.get(code or exits.OK)
    if lost is None and how in (Ending.HOST_LOST, Ending.KILLED):
        lost = "its host was lost" if how is Ending.HOST_LOST else "the head was killed"
    if lost is not None:
        repeated = f", {attempt} times" if attempt > 1 else ""
        return ended(JobStatus.HOST_LOST, f"failed: {lost}{repeated}", again=attempt < attempts)
    if how is Ending.STOPPED:
        by_user = stopped in ("", STOPPED_BY_USER, NO_REASON_GIVEN)
        return ended(
            JobStatus.STOPPED, STOPPED_BY_USER if by_user else f"its head was stopped: {stopped}"
        )
    if code in (exits.TERMINATED, exits.INTERRUPTED):
        return ended(JobStatus.STOPPED, f"its command was stopped (exit code {code})")
    if how is Ending.IMAGE_NOT_FOUND:
        return ended(JobStatus.IMAGE_NOT_FOUND, f"image not found: {said}")
    if how is Ending.OUT_OF_MEMORY:
        return ended(JobStatus.FAILED, "failed: out of memory on the head")
    if code == exits.ASKS_TOO_MUCH:
        return ended(JobStatus.FAILED, "failed: asks for more than the job can have")
    if code is not None:
        return ended(JobStatus.FAILED, f"failed: user code exit {code}")
    why = said or error or "unknown"
    return ended(JobStatus.FAILED, f"failed: the head did not start: {why}"[:1000])


# --- AWS ------------------------------------------------------------------------------------------
def described(arns: list[str]) -> "list[TaskTypeDef]":
    ecs = boto3.client("ecs")
    return [
        task
        for first in range(0, len(arns), 100)
        for task in ecs.describe_tasks(cluster=CLUSTER, tasks=arns[first : first + 100])["tasks"]
    ]


def running(*, started_by: str = "", family: str = "", instance: str = "") -> "list[TaskTypeDef]":
    """Tasks of the cluster that were not told to stop yet; all, or those with one property."""
    # ECS's default is the same as this: those whose desired status is RUNNING.
    request: ListTasksRequestPaginateTypeDef = {"cluster": CLUSTER}
    if started_by:  # which must be the only filter
        request["startedBy"] = started_by
    if family:
        request["family"] = family
    if instance:
        request["containerInstance"] = instance
    pages = boto3.client("ecs").get_paginator("list_tasks").paginate(**request)
    return described([arn for page in pages for arn in page["taskArns"]])


def job_of(task: "TaskTypeDef") -> str:
    """The job that a task belongs to; "" for one of the standing cluster."""
    group = str(task.get("group") or "")
    return group.removeprefix(JOB_GROUP) if group.startswith(JOB_GROUP) else ""


def told(task: "TaskTypeDef", name: str) -> str | None:
    """A variable of the environment that a task was started with."""
    for container in (task.get("overrides") or {}).get("containerOverrides") or []:
        for each in container.get("environment") or []:
            if each["name"] == name:
                return str(each["value"])
    return None


def deadline_of(task: "TaskTypeDef", *, default: float) -> float:
    """Unix time at which the job of a task ends."""
    value = told(task, ENV_DEADLINE)
    return float(value) if value else default


def patience_of(task: "TaskTypeDef") -> float:
    """How long a head may wait for its host, in seconds; a worker's is its head's to watch."""
    spec = spec_of(told(task, ENV_JOB_SPEC))
    if spec:
        return spec.capacity_wait_s
    # A head that the state machine of the version before started.
    return float(told(task, "TRAIN_CAPACITY_WAIT_S") or math.inf)


def spec_of(order: str | dict[str, Any] | None) -> JobSpec | None:
    """A job's order; None where there is none, or none that can be understood.

    It is text, but an execution keeps the definition that it began with, and that of the version
    before sends the order as an object.
    """
    if not order:
        return None
    text = order if isinstance(order, str) else json.dumps(order)
    try:
        return JobSpec.from_json(text, ignore_unknown=True)
    except InputError as error:
        print(f"an order is not understood: {error}")
        return None


def stop(tasks: "list[TaskTypeDef]", reason: str) -> None:
    ecs = boto3.client("ecs")
    for task in tasks:
        print(f"stopping {task['taskArn']}: {reason}")
        ecs.stop_task(cluster=CLUSTER, task=task["taskArn"], reason=reason)


def release(instances: set[str]) -> None:
    """End the hosts that nothing runs on any more.

    What goes wrong here is done again by the next sweep, so it does not fail a job.
    """
    ecs, groups = boto3.client("ecs"), boto3.client("autoscaling")
    for instance in sorted(instances):
        these = [instance]
        try:
            # Drained first, or another job's task comes while this looks whether it may go.
            ecs.update_container_instances_state(
                cluster=CLUSTER, containerInstances=these, status="DRAINING"
            )
            (found,) = ecs.describe_container_instances(cluster=CLUSTER, containerInstances=these)[
                "containerInstances"
            ]
            if running(instance=instance):
                ecs.update_container_instances_state(
                    cluster=CLUSTER, containerInstances=these, status="ACTIVE"
                )
                continue
            groups.terminate_instance_in_auto_scaling_group(
                InstanceId=found["ec2InstanceId"], ShouldDecrementDesiredCapacity=True
            )
        except Exception as error:
            print(f"{instance} is left to the next sweep: {error}")


def release_idle(tasks: "list[TaskTypeDef]", *, idle_s: float) -> list[str]:
    """End hosts that have had no task for ``idle_s``, and ask for no more than there are.

    Managed scaling keeps a surplus host, and one whose task ended by itself, for a quarter of an
    hour at least; EC2 Auto Scaling keeps asking for hosts that no task waits for any more. While a
    task waits for its host nothing is done: a host that just came would be taken from it.

    Args:
        tasks: all that run in the cluster.
    """
    if any(task["lastStatus"] == "PROVISIONING" for task in tasks):
        return []
    ecs, groups = boto3.client("ecs"), boto3.client("autoscaling")
    pages = ecs.get_paginator("list_container_instances").paginate(cluster=CLUSTER)
    arns = [arn for page in pages for arn in page["containerInstanceArns"]]
    idle: set[str] = set()
    for first in range(0, len(arns), 100):
        page = ecs.describe_container_instances(
            cluster=CLUSTER, containerInstances=arns[first : first + 100]
        )
        for host in page["containerInstances"]:
            is_used = host["runningTasksCount"] or host["pendingTasksCount"]
            if not is_used and time.time() - unused_since(host) >= idle_s:
                idle.add(host["containerInstanceArn"])
    release(idle)
    found = groups.describe_auto_scaling_groups(AutoScalingGroupNames=GROUPS)
    for group in found["AutoScalingGroups"]:
        there = len(group["Instances"])
        if group["DesiredCapacity"] > there:
            name = group["AutoScalingGroupName"]
            print(f"{name} asks for {there} hosts, not {group['DesiredCapacity']}")
            groups.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=there)
    return sorted(idle)


def unused_since(host: "ContainerInstanceTypeDef") -> float:
    """Unix time since which nothing has run on a host that runs nothing."""
    pages = (
        boto3.client("ecs")
        .get_paginator("list_tasks")
        .paginate(
            cluster=CLUSTER,
            containerInstance=host["containerInstanceArn"],
            desiredStatus="STOPPED",
        )
    )
    tasks = described([arn for page in pages for arn in page["taskArns"]])
    ends = [task["stoppedAt"] for task in tasks if task.get("stoppedAt")]
    return max(each.timestamp() for each in [host["registeredAt"], *ends])


def execution_of(job: str) -> str:
    """ARN of a job's execution."""
    return execution_arn(STATE_MACHINE, job)


def heads_started(job: str) -> int | None:
    """How often the head of a job was started, from its execution's history."""
    try:
        pages = (
            boto3.client("stepfunctions")
            .get_paginator("get_execution_history")
            .paginate(executionArn=execution_of(job))
        )
        events = [event for page in pages for event in page["events"]]
        submitted = [event.get("taskSubmittedEventDetails") for event in events]
        return sum(1 for task in submitted if task and task["resourceType"] == "ecs")
    except Exception as error:
        print(f"the history of {job} cannot be read: {error}")
        return None


def end_tasks(job: str, reason: str, *, hosts: bool) -> None:
    """Stop all tasks of a job and, if ``hosts``, release what they ran on."""
    found = {task["taskArn"]: task for task in running(started_by=job)}
    heads = running(family=HEAD_FAMILY)
    found |= {task["taskArn"]: task for task in heads if job_of(task) == job}
    stop([*found.values()], reason)
    if hosts:
        release({arn for task in found.values() if (arn := task.get("containerInstanceArn"))})


def write_record(job: str, spec: JobSpec, outcome: Outcome) -> None:
    """Write down how a job ended, beside what it was."""
    boto3.client("s3").put_object(
        Bucket=BUCKET,
        Key=runs.job_record(spec.run, job),
        Body=record_json(job, spec, outcome).encode(),
        ContentType="application/json",
    )


# --- what it is called for ------------------------------------------------------------------------
def end(event: dict[str, Any]) -> dict[str, Any]:
    """After an attempt: clean up, and say how it ended."""
    job, spec = event["Job"], spec_of(event["Spec"])
    task: Any = event.get("Task") or {}
    error = str(event.get("Error") or "")
    if cause := event.get("Cause"):
        try:
            task = json.loads(cause)
        except ValueError:
            error = f"{error}: {cause}"
    # A list, or an object with one, of what ECS could not start.
    failures = task.get("Failures") if isinstance(task, dict) else task
    if failures:
        why = "; ".join(str(each.get("Reason") or each) for each in failures if each)
        task, error = {}, f"{error}: {why}"
    outcome = verdict(
        task,
        error,
        deadline=event["Deadline"],
        # An execution that began before an update of the stack does not send it.
        patience=event.get("Asked", event["Began"]) + (spec.capacity_wait_s if spec else 0),
        attempt=event["Attempt"],
        attempts=spec.attempts if spec else 1,
    )
    # Hosts stay for another attempt. The head's own goes with the job's other ones.
    reason = stop_reason(outcome.status, f"job {job}: {outcome.reason}")
    end_tasks(job, reason, hosts=not outcome.again)
    is_bad = outcome.exit_code == exits.BAD_HOST  # the next attempt must not find it
    if (is_bad or not outcome.again) and (host := task.get("ContainerInstanceArn")):
        release({host})
    if not outcome.again:
        outcome = replace(
            outcome, began=event["Began"], ended=time.time(), deadline=event["Deadline"]
        )
        if spec:
            write_record(job, spec, outcome)
    answer: dict[str, Any] = json.loads(outcome.to_json())
    return answer


def aborted(event: dict[str, Any]) -> None:
    """After an execution that did not come to its own end."""
    detail = event["detail"]
    job, spec = detail["name"], spec_of(detail.get("input"))
    if detail["status"] == "TIMED_OUT":
        outcome = Outcome(status=JobStatus.DEADLINE, reason="deadline")
    else:
        found = boto3.client("stepfunctions").describe_execution(executionArn=execution_of(job))
        outcome = Outcome.of_abort(error=found.get("error"), cause=found.get("cause"))
    end_tasks(job, stop_reason(outcome.status, f"job {job}: {outcome.reason}"), hosts=True)
    if spec:
        began = detail["startDate"] / 1000
        stopped = detail.get("stopDate")
        outcome = replace(
            outcome,
            attempts=heads_started(job),
            began=began,
            ended=stopped / 1000 if stopped else time.time(),
            deadline=math.floor(began) + spec.max_seconds,
        )
        write_record(job, spec, outcome)


def sweep() -> dict[str, Any]:
    """Stop what escaped: no task may run longer than there is an execution that watches it."""
    states = boto3.client("stepfunctions")
    executions: dict[str, str] = {}
    stopped: list[str] = []
    now = time.time()
    tasks = running()
    for task in tasks:
        job = job_of(task)
        if not job:
            continue
        if job not in executions:
            try:
                found = states.describe_execution(executionArn=execution_of(job))
                executions[job] = found["status"]
            except states.exceptions.ExecutionDoesNotExist:
                executions[job] = "unknown"
        waited = now - task["createdAt"].timestamp()
        patience = patience_of(task)
        if executions[job] != "RUNNING":
            reason = f"job {job}: its execution has ended ({executions[job]})"
        elif now > deadline_of(task, default=now) + times.SWEEP_GRACE_S:
            reason = stop_reason(JobStatus.DEADLINE, f"job {job}: its deadline is over")
        elif task["lastStatus"] == "PROVISIONING" and waited > patience:
            why = f"job {job}: no host within {patience:.0f} s"
            reason = stop_reason(JobStatus.NO_CAPACITY, why)
        else:
            continue
        stop([task], reason)
        stopped.append(task["taskArn"])
        if task.get("containerInstanceArn"):
            release({task["containerInstanceArn"]})
    return {"stopped": stopped, "released": release_idle(tasks, idle_s=times.IDLE_HOST_S)}


def handler(event: dict[str, Any], _context: Any) -> Any:
    """What Lambda calls."""
    if event.get("detail-type") == "Step Functions Execution Status Change":
        return aborted(event)
    if event.get("Action") == "end":
        return end(event)
    if event.get("Action") == "release":
        return {"released": release_idle(running(), idle_s=0)}
    return sweep()
