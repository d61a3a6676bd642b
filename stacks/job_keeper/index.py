"""Cleans up after jobs: after each attempt, after an abort, and every few minutes after anything.

A Lambda function of its own, without dependencies beyond what Lambda provides (boto3). Three
events, told apart by ``Action``:

    end      the state machine, after its head task has ended in any way: stops what is left of the
             job, gives its hosts back, says why it ended and whether it should be tried again
    aborted  EventBridge, when an execution was aborted or timed out: the same, without a retry
    sweep    EventBridge, every few minutes: stops what no execution looks after any more, and
             heads that have waited for a host for longer than their job wants to

A job's tasks are known by what they were started with: their group, ``job:<id>``.
"""

import json
import math
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import boto3

CLUSTER = os.environ.get("CLUSTER", "")
BUCKET = os.environ.get("BUCKET", "")
HEAD_FAMILY = os.environ.get("HEAD_FAMILY", "")
STATE_MACHINE = os.environ.get("STATE_MACHINE", "")

# As in contract/; a test compares them.
GROUP = "job:"
RUNS = "runs"
EXIT_NO_CAPACITY, EXIT_DEADLINE, EXIT_INTERRUPTED, EXIT_TERMINATED = 75, 124, 130, 143
EXIT_KILLED = 137

STOPPED_BY_USER = "stopped by user"
NO_CAPACITY = "no capacity"
#: What the stop code says of a task whose host went away below it.
HOST_LOST = ("SpotInterruption", "TerminationNotice")
#: An execution may take this long to tidy up after its deadline.
GRACE_S = 300

Task = dict[str, Any]


# --- why a job ended ------------------------------------------------------------------------------
def verdict(
    task: Task, error: str, *, deadline: float, attempt: int, attempts: int
) -> dict[str, Any]:
    """What the end of a head task means.

    Args:
        task: its description, as Step Functions writes it (``Containers``, ``StopCode`` ...); empty
            when there was none.
        error: name of Step Functions' error, with its cause where that is no task.
        deadline: Unix time.

    Returns:
        ``status`` (one word), ``reason`` (a sentence), ``exit_code`` and ``again``.
    """
    container: dict[str, Any] = next(iter(task.get("Containers") or []), {})
    code, stop = container.get("ExitCode"), task.get("StopCode", "")
    said = container.get("Reason") or task.get("StoppedReason") or ""
    host_lost = stop in HOST_LOST or re.search(r"Host EC2 .*(terminated|stopped)", said)
    killed = code == EXIT_KILLED and "OutOfMemory" not in said and stop != "UserInitiated"
    answer: dict[str, Any] = {"exit_code": code, "again": False}
    if code == 0:
        return answer | {"status": "succeeded", "reason": "succeeded"}
    if code == EXIT_DEADLINE or error.startswith("States.Timeout") or time.time() > deadline:
        return answer | {"status": "deadline", "reason": "deadline"}
    if code == EXIT_NO_CAPACITY or NO_CAPACITY in said or "Capacity is unavailable" in said:
        return answer | {"status": "no_capacity", "reason": NO_CAPACITY}
    if host_lost or killed:
        what = "its host was lost" if host_lost else "the head was killed"
        again = attempt < attempts
        times = f", {attempt} times" if attempt > 1 else ""
        return answer | {
            "status": "host_lost",
            "reason": f"failed: {what}{times}",
            "again": again,
        }
    if stop == "UserInitiated" or code in (EXIT_TERMINATED, EXIT_INTERRUPTED):
        return answer | {"status": "stopped", "reason": STOPPED_BY_USER}
    if "CannotPullContainer" in said:
        return answer | {"status": "image_not_found", "reason": f"image not found: {said}"}
    if "OutOfMemory" in said:
        return answer | {"status": "failed", "reason": "failed: out of memory on the head"}
    if code is not None:
        return answer | {"status": "failed", "reason": f"failed: user code exit {code}"}
    return answer | {
        "status": "failed",
        "reason": f"failed: the head did not start: {said or error or 'unknown'}"[:1000],
    }


# --- AWS ------------------------------------------------------------------------------------------
def pages(client: Any, operation: str, key: str, **arguments: Any) -> Iterator[Any]:
    for page in client.get_paginator(operation).paginate(**arguments):
        yield from page[key]


def described(arns: list[str]) -> list[Task]:
    ecs = boto3.client("ecs")
    return [
        task
        for first in range(0, len(arns), 100)
        for task in ecs.describe_tasks(cluster=CLUSTER, tasks=arns[first : first + 100])["tasks"]
    ]


def running(**which: str) -> list[Task]:
    """Tasks of the cluster that nobody has stopped yet."""
    ecs = boto3.client("ecs")
    return described(
        [*pages(ecs, "list_tasks", "taskArns", cluster=CLUSTER, desiredStatus="RUNNING", **which)]
    )


def job_of(task: Task) -> str:
    """The job that a task belongs to; "" for one of the standing cluster."""
    group = str(task.get("group") or "")
    return group.removeprefix(GROUP) if group.startswith(GROUP) else ""


def told(task: Task, name: str, default: float) -> float:
    """A number of the environment that a task was started with."""
    for container in (task.get("overrides") or {}).get("containerOverrides") or []:
        for each in container.get("environment") or []:
            if each["name"] == name:
                return float(each["value"])
    return default


def stop(tasks: list[Task], reason: str) -> None:
    ecs = boto3.client("ecs")
    for task in tasks:
        print(f"stopping {task['taskArn']}: {reason}")
        ecs.stop_task(cluster=CLUSTER, task=task["taskArn"], reason=reason)


def give_back(instances: set[str]) -> None:
    """End the hosts that nothing runs on any more; managed scaling would wait a quarter of an hour.

    What goes wrong here costs that quarter of an hour and no more, so it does not fail a job.
    """
    ecs, groups = boto3.client("ecs"), boto3.client("autoscaling")
    for instance in sorted(instances):
        arguments = {"cluster": CLUSTER, "containerInstances": [instance]}
        try:
            # Drained first, or another job's task comes while this looks whether it may go.
            ecs.update_container_instances_state(**arguments, status="DRAINING")
            (found,) = ecs.describe_container_instances(**arguments)["containerInstances"]
            if running(containerInstance=instance):
                ecs.update_container_instances_state(**arguments, status="ACTIVE")
                continue
            groups.terminate_instance_in_auto_scaling_group(
                InstanceId=found["ec2InstanceId"], ShouldDecrementDesiredCapacity=True
            )
        except Exception as error:
            print(f"{instance} is left to managed scaling: {error}")


def end_tasks(job: str, reason: str, *, hosts: bool) -> None:
    """Stop all tasks of a job and, if ``hosts``, give back what they ran on."""
    found = {task["taskArn"]: task for task in running(startedBy=job)}
    heads = running(family=HEAD_FAMILY)
    found |= {task["taskArn"]: task for task in heads if job_of(task) == job}
    stop([*found.values()], reason)
    if hosts:
        give_back({arn for task in found.values() if (arn := task.get("containerInstanceArn"))})


def write_record(job: str, spec: dict[str, Any], **outcome: Any) -> None:
    """Write down how a job ended, beside what it was."""
    record = {"job": job, "run": spec["run"], **outcome}
    record |= {name: spec[name] for name in ("command", "min_workers", "max_workers")}
    boto3.client("s3").put_object(
        Bucket=BUCKET,
        Key=f"{RUNS}/{spec['run']}/jobs/{job}.json",
        Body=json.dumps(record, indent=1).encode(),
        ContentType="application/json",
    )


# --- what it is called for ------------------------------------------------------------------------
def end(event: dict[str, Any]) -> dict[str, Any]:
    """After an attempt: tidy up, and say what became of it."""
    spec, job = event["Spec"], event["Job"]
    task: Task = event.get("Task") or {}
    error = str(event.get("Error") or "")
    if cause := event.get("Cause"):
        try:
            task = json.loads(cause)
        except ValueError:
            error = f"{error}: {cause}"
    if not isinstance(task, dict):
        task, error = {}, f"{error}: {task}"
    found = verdict(
        task,
        error,
        deadline=event["Deadline"],
        attempt=event["Attempt"],
        attempts=spec.get("attempts", 3),
    )
    # Hosts stay for another attempt. The head's own goes with the job's other ones.
    end_tasks(job, f"job {job}: {found['reason']}", hosts=not found["again"])
    if not found["again"]:
        if host := task.get("ContainerInstanceArn"):
            give_back({host})
        write_record(
            job,
            spec,
            status=found["status"],
            reason=found["reason"],
            exit_code=found["exit_code"],
            attempts=event["Attempt"],
            began=event["Began"],
            ended=time.time(),
            deadline=event["Deadline"],
        )
    return found


def aborted(event: dict[str, Any]) -> None:
    """After an execution that did not come to its own end."""
    detail = event["detail"]
    job, spec = detail["name"], json.loads(detail["input"])
    end_tasks(job, f"job {job}: its execution was aborted", hosts=True)
    timed_out = detail["status"] == "TIMED_OUT"
    write_record(
        job,
        spec,
        status="deadline" if timed_out else "stopped",
        reason="deadline" if timed_out else STOPPED_BY_USER,
        exit_code=None,
        attempts=1,
        began=detail["startDate"] / 1000,
        ended=(detail.get("stopDate") or time.time() * 1000) / 1000,
    )


def sweep() -> dict[str, Any]:
    """Stop what escaped: nothing may run longer than somebody looks after it."""
    states = boto3.client("stepfunctions")
    executions: dict[str, str] = {}
    stopped: list[str] = []
    now = time.time()
    for task in running():
        job = job_of(task)
        if not job:
            continue
        if job not in executions:
            arn = STATE_MACHINE.replace(":stateMachine:", ":execution:") + f":{job}"
            try:
                executions[job] = states.describe_execution(executionArn=arn)["status"]
            except states.exceptions.ExecutionDoesNotExist:
                executions[job] = "unknown"
        deadline = told(task, "TRAIN_DEADLINE", now)
        waited = now - task["createdAt"].timestamp()
        patience = told(task, "TRAIN_CAPACITY_WAIT_S", math.inf)  # of a head alone
        if executions[job] != "RUNNING":
            reason = f"its execution is over ({executions[job]})"
        elif now > deadline + GRACE_S:
            reason = "its deadline is over"
        elif task["lastStatus"] == "PROVISIONING" and waited > patience:
            reason = f"{NO_CAPACITY}: no host within {patience:.0f} s"
        else:
            continue
        stop([task], f"job {job}: {reason}")
        stopped.append(task["taskArn"])
        if task.get("containerInstanceArn"):
            give_back({task["containerInstanceArn"]})
    return {"stopped": stopped}


def handler(event: dict[str, Any], _context: Any) -> Any:
    """What Lambda calls."""
    if event.get("detail-type") == "Step Functions Execution Status Change":
        return aborted(event)
    if event.get("Action") == "end":
        return end(event)
    return sweep()
