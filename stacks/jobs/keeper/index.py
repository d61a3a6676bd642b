"""Lambda function: admit jobs, and clean up after attempts and aborts and every few minutes.

A separate Lambda function, without dependencies beyond what Lambda provides (boto3) and the
project's ``contract`` package, which is packed beside it. Its events, by ``Action``:

    admit    the state machine, of a job that waits for its turn: says whether its head may start
    end      the state machine, after its head task has ended in any way: stops what is left of the
             job, releases its hosts, says why it ended and whether it should be tried again
    aborted  EventBridge, when an execution was aborted or timed out: the same, without a retry
    sweep    EventBridge, every few minutes, and where there are pools when EC2 has refused a host:
             stops the tasks of executions that have ended, and heads that have waited for a host
             for longer than their job wants to, or whose job can try another pool; terminates
             hosts that have had no task for a while, that never joined the cluster, or that
             cannot take the task that waits
    take     a job's head, before it starts workers: frees hosts that are kept for its user
    release  a job's head, of ``Hosts`` that it needs no more: terminates those without a task; no
             other task comes to those that ``AreBad``
             trainctl, when a standing cluster has been stopped: terminates all without a task

A job's tasks are known by what they were started with: their group, ``job:<id>``.
"""

import functools
import json
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import boto3

from contract import exits, faults, runs, times
from contract.admission import Limits, in_order
from contract.errors import InputError
from contract.job import (
    HEAD_STATE,
    STOPPED_BY_USER,
    Hold,
    JobSpec,
    JobStatus,
    Life,
    Outcome,
    Placement,
    execution_arn,
    record_json,
    status_of_stop,
    stop_reason,
)
from contract.job_outcome import (
    Ending,
    at_hold,
    deadline_of,
    ending_of,
    env_override,
    head_of,
    is_in_vain,
    job_of,
    keeper_of,
    text_of,
    verdict,
)
from contract.nodes import DEFAULT_POOL, ENV_JOB_SPEC, Range
from stacks.jobs.keeper import kept, notices
from stacks.jobs.keeper.cluster import (
    FAMILIES,
    POOLS,
    QUICK,
    described,
    each_of,
    is_waiting,
    provider_of,
    refusal_of,
    release,
    release_idle,
    running,
    stop,
    tasks_of_services,
    unused_hosts,
)

if TYPE_CHECKING:  # Lambda has boto3 and not its types
    from mypy_boto3_ecs.type_defs import TaskTypeDef

BUCKET = os.environ.get("BUCKET", "")
HEAD_FAMILY = os.environ.get("HEAD_FAMILY", "")
STATE_MACHINE = os.environ.get("STATE_MACHINE", "")
LIMITS = Limits(
    max_heads=int(os.environ.get("MAX_HEADS", "1")),
    max_workers=int(os.environ.get("MAX_WORKERS", "1")),
    max_jobs_per_user=int(os.environ.get("MAX_JOBS_PER_USER", "0")),
    pools=POOLS,
)
#: Ends of which the head tells more, and the first words of what it says.
_FIRST_WORDS = {
    JobStatus.FILES_LOST: "files lost",
    JobStatus.FAILED: "failed",
    JobStatus.SUCCEEDED: "succeeded",
}
#: Exit codes that say it all, or of a head that could say nothing.
_UNEXPLAINED = (None, exits.ASKS_TOO_MUCH, exits.KILLED)


# --- AWS ------------------------------------------------------------------------------------------
def spec_of(order: str | None) -> JobSpec | None:
    """A job's order; None where there is none, or none that can be understood. What another
    deployment's order has besides is for that deployment's images."""
    if not order:
        return None
    try:
        return JobSpec.from_json(order, ignores_unknown=True)
    except InputError as error:
        print(f"an order is not understood: {error}")
        return None


def history(job: str) -> list[dict[str, Any]]:
    """The events of a job's execution."""
    arn, size = execution_arn(STATE_MACHINE, job), {"PageSize": 1000}
    of = {"executionArn": arn, "PaginationConfig": size}
    return [*each_of("stepfunctions", "get_execution_history", "events", **of)]


def executions(status: str, **more: Any) -> Iterator[Any]:
    """The executions of jobs that have a status, as they are listed."""
    of = {"stateMachineArn": STATE_MACHINE, "statusFilter": status, **more}
    return each_of("stepfunctions", "list_executions", "executions", **of)


@functools.lru_cache(maxsize=1000)
def order_of(job: str) -> JobSpec | None:
    """A job's order, as it was submitted, which never changes."""
    states, arn = boto3.client("stepfunctions"), execution_arn(STATE_MACHINE, job)
    return spec_of(states.describe_execution(executionArn=arn).get("input"))


def begun(job: str) -> list[JobSpec | None]:
    """The order of a job that was admitted, with what it was granted; empty: its head is not asked
    for yet."""
    entered = (each.get("stateEnteredEventDetails") for each in history(job))
    heads = [each for each in entered if each and each["name"] == HEAD_STATE]
    if not heads:
        return []
    # The answer by which it was admitted.
    spec, found = order_of(job), json.loads(heads[0].get("input") or "{}").get("Payload")
    if spec and found:
        pools = found.get("pools", spec.pools)
        spec = replace(spec, nodes=Range.parse(found["nodes"], option="nodes"), pools=(*pools,))
    return [spec]


def user_of(job: str) -> str:
    """User who submitted a job."""
    return spec.submitter if (spec := order_of(job)) else ""


def head_starts(job: str) -> list[float] | None:
    """Unix times at which the head of a job was started, from its execution's history; None: it
    cannot be read."""
    try:
        events = history(job)
        submitted = [(each["timestamp"], each.get("taskSubmittedEventDetails")) for each in events]
        return [at.timestamp() for at, task in submitted if task and task["resourceType"] == "ecs"]
    except Exception as error:  # boto3's; the caller knows None
        print(f"the history of {job} cannot be read: {error}")
        return None


def end_tasks(job: str, reason: str) -> set[str]:
    """Stop all tasks of a job; return the hosts that they run on."""
    found = {task["taskArn"]: task for task in running(startedBy=job)}
    heads = running(family=HEAD_FAMILY)
    found |= {task["taskArn"]: task for task in heads if job_of(task) == job}
    stop([*found.values()], reason)
    return {arn for task in found.values() if (arn := task.get("containerInstanceArn"))}


def write_record(job: str, spec: JobSpec, outcome: Outcome) -> Outcome:
    """Write down how a job ended, beside what it was, and report it; return what is written.

    Once: neither an abort that comes while its end is being cleaned up, nor another try of this
    function, changes how it ended.
    """
    s3, mark = boto3.client("s3", **QUICK), runs.job_report(spec.run, job)
    try:
        s3.put_object(
            Bucket=BUCKET,
            Key=runs.job_record(spec.run, job),
            Body=record_json(job, spec, outcome).encode(),
            ContentType="application/json",
            IfNoneMatch="*",
        )
    except s3.exceptions.ClientError as error:
        if error.response["Error"]["Code"] != "PreconditionFailed":
            raise
        # By another try, or by the first request of this one, whose answer was lost.
        outcome = record_of(job, spec) or outcome
    if spec.notify and not object_of(mark):
        notices.send(job, spec, outcome)
        with suppress(Exception):  # reported twice is better than not at all
            s3.put_object(Bucket=BUCKET, Key=mark, Body=b"{}")
    return outcome


def record_of(job: str, spec: JobSpec, *, may_fail: bool = False) -> Outcome | None:
    """Outcome of a job, from its record; None if there is none that can be read."""
    with suppress(InputError):
        found = object_of(runs.job_record(spec.run, job), may_fail=may_fail)
        return replace(Outcome.from_json(found), again=False)
    return None


def hold_of(job: str, spec: JobSpec | None, *, began: float, may_fail: bool = False) -> Hold | None:
    """Hold of a job that has failed; None: it has not, or its hosts do not stay.

    Args:
        began: Unix time of the attempt. A head before, of which nothing was known, may have left a
            hold too.
    """
    if not (spec and spec.hold_s):
        return None
    with suppress(InputError):
        hold = Hold.from_json(object_of(runs.job_hold(spec.run, job), may_fail=may_fail))
        return hold if hold.since >= began else None
    return None


def life_of(task: "TaskTypeDef") -> Life:
    """Last report of a job's head; if there is none, or S3 does not answer, one without faults:
    the head may be of an earlier version, and what is not known ends no task."""
    life, spec = Life(at=time.time(), is_complete=False), spec_of(env_override(task, ENV_JOB_SPEC))
    if not (spec and "startedAt" in task):
        return life
    heard = task["startedAt"].timestamp()
    try:
        with suppress(InputError):  # there is none
            found = Life.from_json(object_of(runs.job_life(spec.run, job_of(task))))
            # What the head before it has reported is not its own.
            if found.at >= heard:
                life, heard = found, found.at
    except Exception as error:  # boto3's; an unknown report ends no job
        print(f"{task['taskArn']}: its last report cannot be read: {error}")
        heard = 0.0
    # After an outage of S3 it is old, or none has come, and the nodes may have come since.
    is_old = time.time() - heard > 3 * times.HEAD_REPORTS_S
    return replace(life, is_complete=life.is_complete or is_old)


def object_of(key: str, *, may_fail: bool = False) -> str:
    """Text of an object in the bucket, the beginning of a long one; "" where there is none or, if
    it ``may_fail``, where S3 does not answer."""
    s3 = boto3.client("s3", **QUICK)
    try:
        # Jobs write some of them, of any size.
        found = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read(100_000)
        return str(found.decode(errors="replace"))
    except Exception as error:
        # Without the right to list, what is missing is forbidden.
        if not may_fail and faults.code_of(error) not in ("NoSuchKey", "AccessDenied"):
            raise
    return ""


# --- what it is called for ------------------------------------------------------------------------
def admit(event: dict[str, Any]) -> dict[str, Any]:
    """Before the first attempt: the head may start (``running``, with its job's ``pools`` and
    ``nodes``), asks again after a ``pause`` in seconds (``queued``), or the job has ended."""
    job, spec, now = event["Job"], spec_of(event["Spec"]), time.time()
    waited = now - event["Began"]
    status, reason, place = JobStatus.FAILED, "failed: its order is not understood", None
    if spec is None:
        pass
    elif LIMITS.place(spec, []) is None:
        there = [f"{LIMITS.workers.get(each, 0)} in pool {each}" for each in spec.ladder]
        has = ", ".join(there) if spec.pools else f"{LIMITS.max_workers} at most"
        reason = (
            f"failed: it needs {spec.nodes.low} worker nodes, and the deployment has {has}: give "
            "fewer --nodes, or deploy a higher max_workers"
        )
    elif spec.user_id and object_of(runs.job_stop(spec.user_id, job)):
        status, reason = JobStatus.STOPPED, STOPPED_BY_USER
    elif spec.after and (other := execution(spec.after).get("status")) != (
        "RUNNING" if spec.with_run else "SUCCEEDED"
    ):
        status = JobStatus.QUEUED if other == "RUNNING" else JobStatus.FAILED
        reason = f"{status}: {spec.after} has {'ended' if spec.with_run else 'not succeeded'}"
    elif place := admitted(job, spec):
        status, reason = JobStatus.RUNNING, "running"
        if record := record_of(job, spec):  # of a look before a deploy, whose answer was lost
            place, status, reason = None, record.status, record.reason
        else:
            kept.take(job, spec, 1, pool="")
    elif waited < times.QUEUE_S:
        status, reason = JobStatus.QUEUED, "queued"
    else:
        status = JobStatus.NO_CAPACITY
        reason = f"no capacity: it was not its turn within {times.QUEUE_S / 86400:.0f} days"
    outcome = Outcome(status=status, reason=reason)
    if spec and status not in (JobStatus.RUNNING, JobStatus.QUEUED):
        ended = replace(outcome, attempts=0, began=event["Began"], ended=now)
        outcome = write_record(job, spec, ended)
    answer: dict[str, Any] = json.loads(outcome.to_json())
    # It grows with the time that has been waited, as an execution has at most 25,000 events.
    answer["pause"] = math.floor(min(times.QUEUE_LOOK_S, max(times.CONSISTENT_S, waited / 20)))
    return answer | {"pools": [*place[0]], "nodes": str(place[1])} if place else answer


def admitted(job: str, spec: JobSpec) -> tuple[tuple[str, ...], Range] | None:
    """The pools and worker nodes that a job may have now; None where it is not its turn."""
    found, overtakes = turn_of(job, spec)
    if not (found and overtakes):
        return found
    # Those that it overtakes may have begun, or have passed it by while it waited for its user's
    # others. The last that did not know of this one has begun by then, and its history shows it.
    time.sleep(3 * times.CONSISTENT_S)
    return turn_of(job, spec)[0]


def turn_of(job: str, spec: JobSpec) -> tuple[tuple[tuple[str, ...], Range] | None, bool]:
    """The same, beside those that are before it and those that have begun without knowing of it;
    and whether there may be some of the latter."""
    names = in_order(executions("RUNNING"), order_of, has_begun=begun, now=time.time())
    order = LIMITS.in_turn(names, user_of)
    # A list without the job itself may lack those just before it, too.
    if job not in order[: LIMITS.max_heads]:
        return None, False
    before = order[: order.index(job)]
    # What was submitted after it, in the same way, has always known of it. Those before it count in
    # any case; whether they have begun matters to a user's limit only.
    others = [
        each
        for each in names
        if each != job
        and (
            LIMITS.max_jobs_per_user
            or (
                each not in before
                and (spec.after or getattr(order_of(each), "priority", None) != spec.priority)
            )
        )
    ]
    ahead = {each: found for each in others if (found := begun(each))}
    # Of a user's jobs, those that have begun count before others of a higher priority.
    order = LIMITS.in_turn(sorted(names, key=lambda each: each not in ahead), user_of)
    if job not in order:
        return None, False
    before = [each for each in before if each in order]
    earlier = [order_of(each) for each in before]
    for each in ahead.keys() - {*before}:
        earlier += ahead[each]
    limits = kept.limits_left(LIMITS, spec)
    return limits.place(spec, earlier), not {*others} <= {*before}


def end(event: dict[str, Any]) -> dict[str, Any]:
    """After an attempt: clean up, and say how it ended."""
    job, spec = event["Job"], spec_of(event["Spec"])
    task, error = head_of(event)
    if error.startswith("ECS."):
        # It may have hidden that a head was started, which no list shows at first, and which may
        # have come to its end.
        time.sleep(times.CONSISTENT_S)
    # An execution that began before an update of the stack does not send all of this.
    asked = event.get("Asked", event["Began"])
    capacity_deadline = asked + (spec.capacity_wait_s if spec else 0)
    judge = functools.partial(
        verdict,
        deadline=event["Deadline"],
        capacity_deadline=capacity_deadline,
        attempt=event["Attempt"],
        in_a_row=event.get("InARow", event["Attempt"]),
    )
    outcome = judge(task, error)
    # Before S3 is asked, which may not answer, and before the hold of an unknown head is read.
    hosts = end_tasks(job, stop_reason(outcome.status, f"job {job}: {outcome.reason}"))
    own_pools = pools = spec.pools if spec else ()
    try:
        # A job that ends waits for S3 anyway, which keeps its record; no other one does.
        if hold := hold_of(job, spec, began=asked, may_fail=outcome.again):
            task = at_hold(task, hold)
            outcome = judge(task, "")
        if spec:
            outcome = explained(job, spec, outcome, asked)
            pools, outcome = moved(task, outcome, spec, capacity_deadline=capacity_deadline)
        if not outcome.again:
            outcome = replace(
                outcome, began=event["Began"], ended=time.time(), deadline=event["Deadline"]
            )
            if spec:
                outcome = write_record(job, spec, outcome)
    finally:
        moves, workers = pools != own_pools, provider_of(spec.ladder[0] if spec else DEFAULT_POOL)
        if outcome.again and not moves:  # they stay for another attempt
            hosts = set()
        own = {host} if (host := text_of(task, "ContainerInstanceArn")) else set()
        if ending_of(task) is Ending.BAD_HOST:  # neither the next attempt nor another job finds it
            release(own, are_bad=True)
        elif not outcome.again:
            hosts |= own
        release(kept.keep(hosts, job, spec, outcome))
        if moves or (outcome.status is JobStatus.NO_CAPACITY and not outcome.again):
            # What has come without the others would idle until a sweep ends it.
            release_idle(running(), idle_s=times.IDLE_HOST_S, missed=[workers])
    answer: dict[str, Any] = json.loads(outcome.to_json())
    return answer | {"pools": [*pools]} if outcome.again else answer


def explained(job: str, spec: JobSpec, outcome: Outcome, asked: float) -> Outcome:
    """An outcome with the reason of the head, or of AWS since the head was asked for."""
    begins = _FIRST_WORDS.get(outcome.status)
    if begins and outcome.exit_code not in _UNEXPLAINED:
        # Any job can write them.
        said = object_of(runs.job_reason(spec.run, job))[:1000]
        reason = "".join(each if each.isprintable() else "?" for each in said)
        # The reason of the attempt before may still be there.
        return replace(outcome, reason=reason) if reason.startswith(begins) else outcome
    if outcome.reason != "no capacity":
        return outcome
    # Of the head's group, or of the workers', for which the head has waited.
    heads, workers = provider_of(""), provider_of(spec.ladder[0])
    if why := refusal_of(workers if outcome.exit_code == exits.NO_CAPACITY else heads, asked):
        again = outcome.again and not is_in_vain(why)
        outcome = replace(outcome, reason=f"no capacity: {why}", again=again)
    # AWS may have answered otherwise in another try of this function, which ended the job.
    ended = record_of(job, spec, may_fail=True) if outcome.again else None
    return ended if ended and ended.status is JobStatus.NO_CAPACITY else outcome


def moved(
    task: Mapping[str, Any], outcome: Outcome, spec: JobSpec, *, capacity_deadline: float
) -> tuple[tuple[str, ...], Outcome]:
    """The pools of a job in the order in which they are tried from now on, and how its attempt has
    ended: where the first had no hosts for its workers, the next is tried.

    Args:
        capacity_deadline: Unix time until which it waits for hosts; after a loss it waits as
            long again.
    """
    lacks_hosts = len(spec.pools) > 1 and outcome.status is JobStatus.NO_CAPACITY
    if not (lacks_hosts and "StartedAt" in task):  # a head that had no host is in no pool
        return spec.pools, outcome
    ran_s = task.get("StoppedAt", time.time() * 1000) / 1000 - task["StartedAt"] / 1000
    waits_s = spec.capacity_wait_s if outcome.exit_code == exits.NO_CAPACITY else 0
    has_lost = ran_s > waits_s + times.HOST_JOINS_S  # it has had them
    if not has_lost and time.time() >= capacity_deadline:
        return spec.pools, outcome
    pools = (*spec.pools[1:], spec.pools[0])
    reason = f"{outcome.reason} (pool {spec.pools[0]}); pool {pools[0]} is next"
    found = replace(outcome, again=True, reason=reason)
    if has_lost:
        return pools, replace(found, status=JobStatus.HOST_LOST)
    # An attempt that has found no hosts says nothing of the program.
    return pools, replace(found, in_a_row=(outcome.in_a_row or 1) - 1)


def aborted(event: "Mapping[str, Any]") -> None:
    """After an execution that did not come to its own end."""
    detail = event["detail"]
    job, spec = detail["name"], spec_of(detail.get("input"))
    # Before Step Functions and S3 are asked, which may not answer.
    said = f"job {job}: its execution has ended ({detail['status']})"
    release(end_tasks(job, stop_reason(JobStatus.STOPPED, said)))
    if detail["status"] == "TIMED_OUT":
        outcome = Outcome(status=JobStatus.DEADLINE, reason="deadline")
    elif detail["status"] == "FAILED":
        outcome = Outcome(status=JobStatus.FAILED, reason="failed: its clean-up failed too")
    else:
        found = described_abort(job)
        outcome = Outcome.of_abort(error=found.get("error"), cause=found.get("cause"))
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
    """Description of an execution that was aborted.

    The answers of Step Functions are eventually consistent: for a while they may be those of before
    the abort, which lack who has done it.
    """
    until = time.monotonic() + times.CONSISTENT_S
    while True:
        found = execution(job)
        if found.get("status") == "ABORTED" or time.monotonic() > until:
            return found
        time.sleep(1)


def close_records() -> None:
    """Record and report how executions ended where this function has failed to."""
    states, now = boto3.client("stepfunctions"), time.time()
    for status in ("ABORTED", "FAILED", "TIMED_OUT"):
        # The newest, of 90 days
        for each in executions(status, PaginationConfig={"MaxItems": 1000}):
            age = now - each["stopDate"].timestamp()
            if not times.SWEEP_GRACE_S < age < times.CLOSED_S:
                continue  # its own clean-up may still come, or has been looked for
            order = states.describe_execution(executionArn=each["executionArn"])["input"]
            if (spec := spec_of(order)) is None:
                continue
            keys = [runs.job_record, *([runs.job_report] if spec.notify else [])]
            is_whole = all(object_of(key(spec.run, each["name"])) for key in keys)
            if not (is_whole or object_of(runs.job_claim(spec.run, each["name"]))):
                print(f"{each['name']} has no record, or was not reported")
                dates = {name: each[name].timestamp() * 1000 for name in ("startDate", "stopDate")}
                detail = {"name": each["name"], "status": status, "input": order, **dates}
                aborted({"detail": detail})


def sweep() -> dict[str, Any]:
    """Stop what escaped: no task may run longer than there is an execution that watches it.

    Raises RuntimeError, after all is done that can be, where some of it could not be.
    """
    statuses, listed = dict[str, str](), set[str]()
    stopped, left = [], []
    # One call for all: each that is not in the list is asked for. The right ends with the stack.
    with suppress(Exception):
        listed |= {each["name"] for each in executions("RUNNING")}
    tasks, served = running(), tasks_of_services()
    # Too new to tell: the list of its service may not have it yet.
    new = time.time() - times.CONSISTENT_S
    served |= {each["taskArn"] for each in tasks if each["createdAt"].timestamp() > new}
    missed = set[str]()
    for task in tasks:
        if task["taskArn"] in stopped:
            continue
        try:
            gone = stop_escaped(task, tasks, statuses, served, listed)
            stopped += [each["taskArn"] for each in gone]
            missed |= {each.get("capacityProviderName", "") for each in gone[1:]}
        except Exception as error:  # one task must not keep the others running
            left.append(f"{task['taskArn']}: {error}")
    alive = [each for each in tasks if each["taskArn"] not in stopped]
    kept.take_for_waiting(alive, order_of)
    lives = {each["taskArn"]: life_of(each).at for each in alive}
    silent = [arn for arn, at in lives.items() if time.time() - at > times.HEAD_SILENT_S]
    found = {
        "stopped": stopped,
        "released": release_idle(alive, idle_s=times.IDLE_HOST_S, missed=missed, silent=silent),
    }
    try:
        close_records()
    except Exception as error:  # raised below, after the rest
        left.append(f"records: {error}")
    if left:
        raise RuntimeError(f"left to the next sweep: {'; '.join(left)}")
    return found


def stop_escaped(
    task: "TaskTypeDef", tasks: "list[TaskTypeDef]", *known: Any
) -> "list[TaskTypeDef]":
    """Stop a task if there is a reason to, and with a head that lacks hosts what waits for them;
    return what was stopped. The arguments are those of ``reason_to_stop``."""
    reason = reason_to_stop(task, tasks, *known)
    lacks_hosts = status_of_stop(reason) is JobStatus.NO_CAPACITY
    if lacks_hosts:
        # A host may have come since the tasks were listed.
        own = [each["taskArn"] for each in tasks if job_of(each) == job_of(task)]
        tasks = [each for each in described(own) if each["desiredStatus"] == "RUNNING"]
        now = [each for each in tasks if each["taskArn"] == task["taskArn"]]
        reason = reason_to_stop(now[0], tasks, *known) if now else ""
    if not reason:
        return []
    waiting = [each for each in tasks if each.get("startedBy") == job_of(task) and is_waiting(each)]
    gone = [task, *waiting] if lacks_hosts else [task]
    stop(gone, reason)
    # The host of a head that lacks others may serve its next one: its clean-up decides.
    if task.get("containerInstanceArn") and not lacks_hosts:
        release({task["containerInstanceArn"]})
    return gone


def reason_to_stop(
    task: "TaskTypeDef",
    tasks: "list[TaskTypeDef]",
    statuses: dict[str, str],
    served: Collection[str],
    listed: Collection[str],
) -> str:
    """Reason for the sweep to stop a task; "" if there is none.

    Args:
        tasks: all that run.
        statuses: of the executions by now, job -> status; filled here.
        served: tasks of services, and those that may be.
        listed: jobs whose executions run, by a list.
    """
    job = job_of(task)
    if keeper_of(task):
        return "its host was kept for long enough" if kept.is_over(task) else ""
    if not job:
        is_stray = kept.family_of(task) in FAMILIES and task["taskArn"] not in served
        return "it belongs to no job and no service" if is_stray else ""
    if job not in statuses:
        is_listed = job in listed
        statuses[job] = "RUNNING" if is_listed else execution(job).get("status", "unknown")
        if is_held_too_long(job, tasks):
            statuses[job] = "held for long enough"
    if statuses[job] != "RUNNING":
        return f"job {job}: its execution has ended ({statuses[job]})"
    now = time.time()
    if now > deadline_of(task, default=now) + times.SWEEP_GRACE_S:
        return stop_reason(JobStatus.DEADLINE, f"job {job}: its deadline is over")
    # A head waits for its workers' hosts, too.
    spec = spec_of(env_override(task, ENV_JOB_SPEC))
    why = lack_of_hosts(task, spec, tasks) if spec else ""
    return stop_reason(JobStatus.NO_CAPACITY, f"no capacity: {why}") if why else ""


def lack_of_hosts(head: "TaskTypeDef", spec: JobSpec, tasks: "list[TaskTypeDef]") -> str:
    """Reason to stop a head that waits for a host, or whose workers do; "" while it may wait."""
    waits = is_waiting(head)
    # A head waits for workers until the first has a host, and no longer than its job wants to.
    for_s = time.time() - head.get("startedAt", head["createdAt"]).timestamp()
    own = [head] if waits else [each for each in tasks if each.get("startedBy") == job_of(head)]
    # A program continues without nodes that it has had.
    is_new = for_s < spec.capacity_wait_s and not life_of(head).is_complete
    why = ""
    if waits or (is_new and own and all(map(is_waiting, own))):
        why = refusal_of(own[0].get("capacityProviderName", ""), own[0]["createdAt"].timestamp())
    if refused := refusal_of_pool(head, spec, own, is_new=is_new):
        return refused
    if waits and for_s > spec.capacity_wait_s:
        return why or f"no host within {spec.capacity_wait_s} s"
    return why if is_in_vain(why) else ""


def refusal_of_pool(
    head: "TaskTypeDef", spec: JobSpec, workers: "list[TaskTypeDef]", *, is_new: bool
) -> str:
    """AWS's sentence if it has no host for the workers of a job that can try another pool; "" if it
    has, or hosts are about to come, or the job continues without.

    Args:
        is_new: the job may not have had all of its nodes yet.
    """
    lacking = [each for each in workers if is_waiting(each)]
    missing = spec.nodes.low - (len(workers) - len(lacking))
    goes_on = not (is_new or spec.recipe or spec.on == Placement.NODES)
    # Before the head has started, its workers are those of the attempt before.
    is_over = goes_on or "startedAt" not in head
    if len(spec.pools) < 2 or missing <= 0 or not lacking or is_over:
        return ""
    provider = lacking[0].get("capacityProviderName", "")
    since = min(each["createdAt"].timestamp() for each in lacking)
    why = refusal_of(provider, since)
    return why if why and unused_hosts(provider, workers) < missing else ""


def is_held_too_long(job: str, tasks: "list[TaskTypeDef]") -> bool:
    """True if its head, which may not answer, should have released the hosts of a job."""
    heads = {
        each["createdAt"].timestamp(): order
        for each in tasks
        if job_of(each) == job and (order := env_override(each, ENV_JOB_SPEC))
    }
    if not heads:
        return False
    began = max(heads)
    hold = hold_of(job, spec_of(heads[began]), began=began, may_fail=True)
    return hold is not None and time.time() > hold.until + times.HEAD_GRACE_S


def execution(job: str) -> "Mapping[str, Any]":
    """Description of a job's execution; empty if there is none. By the time that there is a task
    Step Functions shows it: the state machine has waited for that."""
    states = boto3.client("stepfunctions")
    with suppress(states.exceptions.ExecutionDoesNotExist):
        return states.describe_execution(executionArn=execution_arn(STATE_MACHINE, job))
    return {}


def handler(event: dict[str, Any], _context: Any) -> Any:
    """Entry point of the Lambda function."""
    match event:
        case {"detail-type": "Step Functions Execution Status Change"}:
            return aborted(event)
        case {"Action": "admit"}:
            return admit(event)
        case {"Action": "end"}:
            return end(event)
        case {"Action": "take", "Job": job, "Count": count, "Pool": pool}:
            return kept.take(job, spec, count, pool=pool) if (spec := order_of(job)) else None
        case {"Action": "release", "Hosts": [_, *_] as hosts}:
            release({*hosts}, are_bad=event.get("AreBad", False))
            return {"released": hosts}
        case {"Action": "release"}:
            return {"released": release_idle(running(), idle_s=0)}
    return sweep()
