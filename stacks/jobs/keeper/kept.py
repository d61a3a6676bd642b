"""Hosts that are kept after a job for its user's next one, for the function in ``index.py``.

A task that does nothing takes each of them: managed scaling counts the host as used, and no other
job's task finds room there. It is stopped as soon as a job of the same user asks for hosts of its
kind. Packed beside ``index.py``, under this name; not for other parts of the project.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import boto3

from contract import times
from contract.admission import Limits
from contract.job import KEPT_GROUP, JobSpec, JobStatus, Outcome, keeps_as, overrides
from contract.job_outcome import job_of, keeper_of, kept_until
from contract.nodes import ENV_KEPT, ENV_NODE, HEAD, WORKER, pool_of
from stacks.jobs.keeper import cluster

if TYPE_CHECKING:  # Lambda has boto3 and not its types
    from mypy_boto3_ecs.type_defs import TaskTypeDef

HEAD_FAMILY = os.environ.get("HEAD_FAMILY", "")
SECURITY_GROUP = os.environ.get("SECURITY_GROUP", "")
#: Ends after which hosts are kept: the command has come to its end.
ENDS = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.FILES_LOST)


def keep(hosts: Collection[str], job: str, spec: JobSpec | None, outcome: Outcome) -> set[str]:
    """Keep hosts of a job that has ended; return those that are not kept.

    A host has room once the task that ran there has ended, which is waited for.
    """
    has_ended = outcome.status in ENDS and not outcome.again
    if not (hosts and spec and spec.keep_s and spec.user_id and has_ended):
        return {*hosts}
    began, left, failed = time.monotonic(), {*hosts}, set[str]()
    until = round(time.time() + spec.keep_s)
    while left and time.monotonic() - began < times.KEEP_STARTS_S:
        for host in sorted(left):
            try:
                if _start(host, job, spec, until):
                    left.remove(host)
            except Exception as error:  # it is released
                print(f"{host} cannot be kept: {error}")
                left.remove(host)
                failed.add(host)
        if left:
            time.sleep(2)
    left |= failed
    print(f"{job}: {len(hosts) - len(left)} of {len(hosts)} hosts are kept until {until}")
    return left


def _start(host: str, job: str, spec: JobSpec, until: int) -> bool:
    """Start the task that keeps a host, of the same definition as the last one there."""
    last = max(cluster.tasks_on(host), key=lambda each: each["createdAt"])
    if keeper_of(last):  # by an earlier try of this function
        return True
    node = HEAD if family_of(last) == HEAD_FAMILY else WORKER
    network = [each for part in last["attachments"] for each in part["details"]]
    subnets = [each["value"] for each in network if each["name"] == "subnetId"]
    variables: Any = overrides({ENV_KEPT: str(until), ENV_NODE: node})
    answer = boto3.client("ecs").start_task(
        cluster=cluster.CLUSTER,
        taskDefinition=last["taskDefinitionArn"],
        containerInstances=[host],
        startedBy=keeps_as(spec.user_id),
        group=KEPT_GROUP + job,
        overrides=variables,
        tags=[{"key": key, "value": value} for key, value in spec.tags(job).items()],
        networkConfiguration={
            "awsvpcConfiguration": {
                "subnets": subnets,
                "securityGroups": [SECURITY_GROUP],
                "assignPublicIp": "DISABLED",
            }
        },
    )
    return bool(answer["tasks"])


def take(job: str, spec: JobSpec, count: int, *, pool: str) -> None:
    """Free hosts that are kept for the user of a job, for tasks that it starts now.

    While a task of another job waits for such a host, none is freed: it would go there. The sweep
    tries again.

    Args:
        count: at most so many.
        pool: of workers; empty: hosts of heads.
    """
    tasks, provider = cluster.running(), cluster.provider_of(pool)
    own = [
        each
        for each in tasks
        if each.get("startedBy") == keeps_as(spec.user_id)
        and keeper_of(each)
        and _pool(each) == pool
    ]
    others = [
        each
        for each in tasks
        if cluster.is_waiting(each)
        and each.get("capacityProviderName") == provider
        and job_of(each) != job
    ]
    if own and not others:
        cluster.stop(own[:count], "its host is for its user's next job")


def take_for_waiting(tasks: "list[TaskTypeDef]", order_of: Callable[[str], JobSpec | None]) -> None:
    """Free hosts for tasks that wait although hosts are kept for their users."""
    if not any(map(keeper_of, tasks)):
        return
    waiting = Counter((job_of(each), _pool(each)) for each in tasks if cluster.is_waiting(each))
    for (job, pool), count in waiting.items():
        try:
            if job and (spec := order_of(job)):
                take(job, spec, count, pool=pool)
        except Exception as error:  # it must keep no host from being released
            print(f"{job}: no kept host is freed: {error}")


def limits_left(limits: Limits, spec: JobSpec) -> Limits:
    """Limits of a deployment without the hosts that are kept for other users than a job's."""
    kept = [each for each in cluster.running() if keeper_of(each)]
    found = Counter(_pool(each) for each in kept if each.get("startedBy") != keeps_as(spec.user_id))
    return limits.without(found.pop("", 0), found)


def is_over(task: "TaskTypeDef") -> bool:
    """True if a task has kept its host for long enough."""
    return time.time() >= kept_until(task)


def family_of(task: "TaskTypeDef") -> str:
    """Family of a task's definition."""
    return task["taskDefinitionArn"].rpartition("/")[2].partition(":")[0]


def _pool(task: "TaskTypeDef") -> str:
    """Pool of a task's host; empty for a head's."""
    return "" if family_of(task) == HEAD_FAMILY else pool_of(task["taskDefinitionArn"])
