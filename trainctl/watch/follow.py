"""Watch a job: its state, its log, its end."""

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import typer

from contract import exits, faults, runs
from contract.errors import InputError
from contract.instance_types import Prices
from contract.job import Hold, JobStatus, Placement
from contract.job_outcome import LOSS_CODES
from contract.runs import PROGRESS_FILE
from contract.text import counted, dollars, duration
from contract.times import JOB_STOP_S
from trainctl import output
from trainctl.aws.deployment import Deployment
from trainctl.aws.deployment_bucket import json_object
from trainctl.aws.errors import DENIED, CliError
from trainctl.aws.jobs import JobExecution, QueuePlace
from trainctl.aws.tasks import Task
from trainctl.jobs.pricing import cost_of, usd_so_far
from trainctl.watch import boots
from trainctl.watch.job_log import JobLog
from trainctl.watch.polling import Polling
from training.record.progress import Progress

#: CloudWatch shows a line a second or two after it was written, which may be after the job's end.
LAST_LINES_S: Final = 3.0
#: The log of a job that ended this long ago is complete.
COMPLETE_AFTER: Final = timedelta(minutes=1)


class Waits(NamedTuple):
    """Reason why a job waits."""

    reason: str = ""
    """In words; empty when it runs with all that it asked for."""
    until: float | None = None
    """Unix time at which that has an end; None: not known."""
    hold: Hold | None = None
    """The time that its hosts stay, where its command has failed."""

    def words(self, now: float) -> str:
        """``waiting for 1 x g5.xlarge``, or ``its host was lost; trying again in 28 s``."""
        if self.until is None:
            return self.reason
        left = int(self.until - now)
        return f"{self.reason} in {duration(left)}" if left > 0 else f"{self.reason} now"


def follow(deployment: Deployment, name: str, *, log: JobLog | None = None) -> int:
    """Print a job's log until it ends; return the exit code of the command.

    Ctrl-C leaves the job running, and prints how to come back.

    Args:
        deployment: where it runs.
        name: its id.
        log: its lines and how they are printed; all of them, as text, by default.
    """
    try:
        job = watch(deployment, name, log=log or JobLog(deployment.logs))
    except KeyboardInterrupt:
        output.say(
            f"\nDetached; the job keeps running.\n  follow it   trainctl logs {name} --follow\n"
            f"  its state   trainctl show {name}\n  stop it     trainctl stop {name}"
        )
        raise typer.Exit(exits.INTERRUPTED) from None
    output.say(ending(deployment, job))
    return job.shell_code


def watch(
    deployment: Deployment,
    name: str,
    *,
    log: JobLog | None = None,
    clock: Callable[[], float] = time.time,
) -> JobExecution:
    """Watch a job to its end, with a line that shows its state.

    Args:
        log: printed meanwhile; None: it is not read.
        clock: Unix time in seconds.
    """
    jobs = deployment.jobs
    polling = Polling(is_local=deployment.is_local)
    tasks: dict[str, Task] = {}
    num_heads = 0
    waits: Waits | None = None
    reached: Progress | None = None
    said, has_stepped = "", False
    with output.ProgressLine(clock=clock) as progress:
        while True:
            # Its nodes are read less often than its state: they take five calls.
            job = jobs.find(name)
            if has_new_nodes := job.is_over or polling.nodes_are_due():
                found = [*jobs.heads(job), *jobs.workers(job)] if tasks else jobs.all_nodes(job)
                # Tasks that ECS has forgotten since still have logs.
                tasks |= {task.id: task for task in found}
                has_stepped = has_stepped or _say_start(deployment, job, [*tasks.values()])
            seen = [*tasks.values()]

            # A head replaces another one: that was lost, or its pool has no hosts.
            heads = [task for task in seen if task.is_head]
            if len(heads) > max(1, num_heads):
                output.say(f"{_end_of_head(heads[-2])}; another head takes over")
            num_heads = len(heads)

            # The log, of which the last line is a program's state.
            lines = log.print_new(job, seen) if log else []
            if lines:
                # A progress bar writes many states into one line of a log.
                said = re.split("[\r\n]", lines[-1].text.strip())[-1]
            if job.is_over:
                break

            # The state line. Progress is written about as often as the nodes are read.
            if has_new_nodes:
                reached = progress_of(deployment, job)
            figures = reached.brief() if reached else said
            before, waits = waits, waiting(deployment, job, seen)
            progress.update(waits.reason or "running", line=_line(job, waits, seen, figures))
            polling.wait(changed=bool(lines) or waits != before)
    assert job.ended is not None
    if log and datetime.now(tz=UTC) - job.ended < COMPLETE_AFTER:
        time.sleep(LAST_LINES_S)
        log.print_new(job, seen)
    return job


def _say_start(deployment: Deployment, job: JobExecution, tasks: Sequence[Task]) -> bool:
    """Print the seconds of a start that is over; False: it is not."""
    seconds = boots.start_of(deployment, job, tasks)
    is_over = "first step" in seconds
    if is_over:
        output.say(f"started in {boots.start_line(seconds)}")
    return is_over


def _end_of_head(head: Task) -> str:
    """Reason why a head ended that another one replaces, in words."""
    # Of a job with several pools: the keeper's, with AWS's words.
    refused = head.stopped_reason.partition("[no_capacity] ")[2]
    return refused or LOSS_CODES.get(head.exit_code or 0, "the head was lost")


def _line(
    job: JobExecution, waits: Waits, tasks: Sequence[Task], figures: str
) -> Callable[[float], str] | None:
    """The state of a job at any moment: ``running 3 min 12 s, $0.04, step 45/184``.

    Returns:
        None where the line is how long it has waited for what.
    """
    if waits.reason:
        return waits.words if waits.until else None
    heads = [task.since for task in tasks if task.since and task.is_head]
    began = min(heads, default=job.began).timestamp()

    def running(now: float) -> str:
        usd = usd_so_far(job, tasks, now=datetime.fromtimestamp(now, tz=UTC))
        spent = dollars(usd) if usd else ""
        return ", ".join(filter(None, (f"running {duration(int(now - began))}", spent, figures)))

    return running


def waiting(
    deployment: Deployment, job: JobExecution, tasks: Sequence[Task], *, explains: bool = True
) -> Waits:
    """Find what a running job waits for.

    Args:
        explains: ask AWS why no host comes, where it waits for one.
        tasks: all that it has had. Workers that have ended are replaced, and so waited for, only
            where the head has asked ECS for others.
    """
    if deployment.is_here:
        return Waits()
    if hold := hold_of(deployment, job):
        reason = f"its command has failed, exit code {hold.code}; its hosts are released"
        return Waits(reason, hold.until, hold)
    jobs, heads = deployment.jobs, [task for task in tasks if task.is_head]
    if not heads and (place := jobs.queue(deployment.shape.limits).get(job.id)):
        return Waits(f"queued: {place.words}")

    # Between two heads.
    status = heads[-1].status if heads else ""
    if status != "RUNNING" and not any(task.is_starting for task in heads[-1:]):
        if pause := jobs.pause(job):
            reason, until = pause
            return Waits(f"{reason.removeprefix('failed: ')}; trying again", until)
        end = "its nodes to end" if heads else "the head to be started"
        return Waits(f"waiting for {end}")

    # Hosts of its order: the deployment may have others by now.
    hosts = job.prices or deployment.shape.prices(deployment.region)
    asked = deployment if explains else None
    if status == "PROVISIONING":
        return Waits(
            f"waiting for 1 x {hosts.head.type}, for the head{_refusal(asked, heads[-1:])}"
        )
    if status != "RUNNING":
        return Waits("waiting for the head to pull its image and start")
    workers = [task for task in tasks if not task.is_head]
    return Waits(_workers_to_come(asked, job, workers, hosts))


def _workers_to_come(
    asked: Deployment | None, job: JobExecution, workers: Sequence[Task], hosts: Prices
) -> str:
    """Workers that a job waits for while its head runs, in words; empty if it has all of them.

    Args:
        asked: the deployment that knows why no host comes; None: it is not asked.
    """
    if job.spec and job.spec.code and job.spec.on == Placement.NODES and not workers:
        return "preparing the program on the head"
    # Beyond the fewest that it may have, it waits for those that it has asked for.
    to_come = max(0, job.spec.nodes.low - len(workers)) if job.spec else 0
    present = [task for task in workers if not task.has_stopped]
    to_come += sum(task.status == "PROVISIONING" for task in present)
    if to_come:
        pool = f" in pool {present[0].pool}" if hosts.pools and present else ""
        host = hosts.workers_in(present[-1].pool if present else "")
        return f"waiting for {to_come} x {host.type}{pool}{_refusal(asked, present)}"
    if pulling := [task for task in present if task.is_starting]:
        left = f"{len(pulling)} of {counted(len(present), 'worker')}"
        return f"waiting for {left} to pull the image and start"
    return ""


def hold_of(deployment: Deployment, job: JobExecution) -> Hold | None:
    """The time that the hosts of a failed job stay; None: they are released."""
    if not (job.spec and job.spec.hold_s):
        return None
    with contextlib.suppress(InputError):
        found = deployment.bucket.get(runs.job_hold(job.run, job.id))
        return Hold.from_json(found.decode(errors="replace")) if found else None
    return None


def _refusal(deployment: Deployment | None, tasks: Sequence[Task]) -> str:
    """AWS's sentence why no host comes for the tasks that wait for one, after a colon."""
    for task in tasks:
        if deployment and task.status == "PROVISIONING" and task.since:
            said = deployment.cluster.refusal(task.kind, task.pool, since=task.since)
            return f": {said}" if said else ""
    return ""


def stop(deployment: Deployment, job: JobExecution) -> bool:
    """End a job for its user; return true if it ends now.

    Else it was canceled by a user without the right to stop executions: the keeper ends it at its
    next look at the queue.
    """
    from botocore.exceptions import ClientError

    try:
        deployment.jobs.stop(job)
    except ClientError as error:
        is_own = job.spec and job.spec.user_id == deployment.user_id
        is_denied = error.operation_name == "StopExecution" and faults.code_of(error) in DENIED
        if not (is_own and is_denied) or deployment.jobs.heads(job):
            raise
        deployment.bucket.put(runs.job_stop(deployment.user_id, job.id), b"stop")
        return False
    return True


def wait_until_gone(
    deployment: Deployment, name: str, *, hear: Callable[[str], None] = lambda _text: None
) -> JobExecution:
    """Wait until a stopped job and all of its nodes have ended.

    Args:
        hear: called with what is waited for.

    Raises:
        CliError: nodes are left after the time that they have to end.
    """
    deadline = time.monotonic() + JOB_STOP_S
    polling = Polling(is_local=deployment.is_local)
    while True:
        job = deployment.jobs.find(name)
        left = deployment.jobs.alive(job)
        if job.is_over and not left:
            return job
        if time.monotonic() > deadline:
            raise CliError(
                f"{job.id} still has {counted(len(left), 'task')}; the sweep stops orphaned "
                f"tasks every five minutes. Their state: trainctl show {job.id}"
            )
        what = f"{counted(len(left), 'node')} to save and end" if left else "its end"
        hear(f"waiting for {what}")
        polling.wait(changed=True)


def ending(deployment: Deployment, job: JobExecution) -> str:
    """End of a job, its duration and its cost, in a line."""
    found = f"{job.id}: {job.reason}, after {lasted(job)}"
    with contextlib.suppress(Exception):  # how it ended matters more than its price
        found += f", cost {dollars(cost_of(deployment, job).usd)}"
    return found


def progress_of(deployment: Deployment, job: JobExecution) -> Progress | None:
    """Progress of a running job's run; None if it has written none, or is over."""
    if job.is_over or not job.run:
        return None
    content = deployment.bucket.read_of_run(job.run, PROGRESS_FILE)
    try:
        found = Progress.from_json(json_object(content))
    except ValueError:
        return None
    trained_by = "" if deployment.is_here else job.id
    return found if found.job == trained_by else None  # else it is of an earlier job


def lasted(job: JobExecution) -> str:
    """Duration of a job so far, or in all."""
    return duration(round(((job.ended or datetime.now(tz=UTC)) - job.began).total_seconds()))


def values(job: JobExecution, place: QueuePlace | None = None) -> dict[str, object]:
    """A job for ``--json``, with its place in the queue."""
    spec = json_object(job.spec.to_json()) if job.spec else None
    return {
        "id": job.id,
        "run": job.run,
        "status": JobStatus.QUEUED if place else job.status,
        "reason": f"queued: {place.words}" if place else job.reason,
        "queue": place and place.to_json(),
        "exit_code": job.outcome.exit_code,
        "began": job.began.astimezone(UTC).isoformat(),
        "ended": job.ended and job.ended.astimezone(UTC).isoformat(),
        "spec": spec,
    }
