"""Maximum cost of a job before it starts, and its cost so far, at list prices.

``docs/cost.md`` explains the figures, and a test computes its example with this module.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from contract import nodes, runs, times
from contract.cluster_shape import ClusterShape
from contract.instance_types import Prices
from contract.job import JobStatus
from contract.nodes import Range
from contract.text import dollars
from trainctl.aws.deployment import Deployment
from trainctl.aws.deployment_bucket import json_object
from trainctl.aws.jobs import JobExecution
from trainctl.aws.tasks import Task
from training.record.goodput import Activity, Paid, goodput

#: Costs that no figure here includes.
NOT_INCLUDED: Final = "S3, CloudWatch and data through the NAT gateway"

#: Jobs that are added up: one call of AWS for each.
MOST_JOBS: Final = 1000


def usd_at_most(
    prices: Prices, shape: ClusterShape, *, num_nodes: int, max_seconds: int, keep_s: int = 0
) -> float | None:
    """A job's maximum cost, in US dollars at list prices; None where a price is missing.

    Its head and all its worker nodes run from the admission until the deadline and the time that
    the clean-up may take, with the NAT gateway. Managed scaling may start one host too many in
    each group, which waits there until it is scaled in.

    Args:
        num_nodes: most worker nodes.
        max_seconds: deadline after the admission.
        keep_s: how long its hosts stay after its end; a sweep ends that.
    """
    prices = prices.dearest
    hourly = prices.usd_per_hour(num_nodes)
    if hourly is None:
        return None
    # A group that is full cannot start one more.
    heads = min(1, shape.max_heads - 1)
    workers = min(1, max(0, shape.max_workers - num_nodes)) if num_nodes else 0
    surplus = heads * (prices.head.usd_per_hour or 0) + workers * (prices.worker.usd_per_hour or 0)
    if keep_s:
        max_seconds += times.KEEP_STARTS_S + keep_s + times.SWEEP_EVERY_S
    return (hourly * (max_seconds + times.JOB_TAIL_S) + surplus * times.SURPLUS_HOST_S) / 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Cost of a job so far."""

    usd: float | None
    """Cost of its hosts while its nodes ran, disks included; None: not known."""
    nat_usd: float | None
    """Cost of the NAT gateway in the meantime."""
    shared_usd: float | None
    """Cost of the shared file system in the meantime."""
    paid: list[Paid] | None
    """Run time of each of its nodes; None: not known."""
    kept_s: float = 0
    """Seconds, of all its hosts together, for which they waited for the next job."""
    why_unknown: str = ""
    """Reason for a missing ``usd``, in a phrase."""

    @property
    def seconds(self) -> dict[str, float] | None:
        """Run time of its nodes, by kind; None: not known."""
        if self.paid is None:
            return None
        seconds = {nodes.HEAD: 0.0, nodes.WORKER: 0.0}
        for each in self.paid:
            seconds[nodes.HEAD if each.is_head else nodes.WORKER] += each.seconds
        return seconds


def cost_of(deployment: Deployment, job: JobExecution, tasks: Sequence[Task] | None = None) -> Cost:
    """Cost of a job so far, with the hosts and prices of its order.

    Args:
        deployment: where it ran.
        job: which.
        tasks: all nodes that it has had, where they have been asked for already.
    """
    if deployment.is_here:
        return Cost(usd=None, nat_usd=None, shared_usd=None, paid=None)
    now = datetime.now(tz=UTC)
    prices = job.prices
    ran_s = ((job.ended or now) - job.began).total_seconds()
    hourly = (prices.nat_usd_per_hour, prices.shared_usd_per_hour) if prices else (None, None)
    nat_usd, shared_usd = (None if usd is None else usd * ran_s / 3600 for usd in hourly)
    kept = timedelta(days=deployment.shape.log_retention_days)
    paid, why = None, ""
    if now - job.began >= kept:
        why = f"ECS's events of this job have expired (log_retention_days is {kept.days})"
    else:
        tasks = deployment.jobs.all_nodes(job) if tasks is None else tasks
        # A job without any node has cost nothing, but none succeeds without one.
        if tasks or job.status != JobStatus.SUCCEEDED:
            paid = paid_of(tasks, now=now)
        if paid is None:
            why = "ECS's events of this job are missing"
    usd = None if prices is None or paid is None else _usd(prices, paid)
    if usd is None and not why:
        why = prices.why_unknown if prices else "its order has no prices"
    return Cost(
        usd=usd,
        nat_usd=nat_usd,
        shared_usd=shared_usd,
        paid=paid,
        kept_s=_kept_s(tasks or (), now=now),
        why_unknown=why,
    )


def _kept_s(tasks: Sequence[Task], *, now: datetime) -> float:
    """Seconds of the nodes that only kept their hosts, as far as they are known."""
    kept = paid_of([each for each in tasks if each.kept_until], now=now)
    return sum(each.seconds for each in kept or ())


def costs_of(
    deployment: Deployment,
    jobs: Sequence[JobExecution],
    tasks: Mapping[str, Sequence[Task]] | None = None,
) -> dict[str, float | None]:
    """Costs of jobs so far, by their ids, as are all nodes that they have had."""
    tasks = tasks or deployment.jobs.all_nodes_of(jobs)
    return {job.id: cost_of(deployment, job, tasks[job.id]).usd for job in jobs}


def spent(deployment: Deployment) -> tuple[float, float]:
    """US dollars that the jobs of this month, by UTC, have cost so far, and those that jobs which
    run, wait or keep hosts can cost beside."""
    now = datetime.now(tz=UTC)
    began = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    newest = partial(deployment.jobs.newest, limit=MOST_JOBS)
    # A job of last month may run still.
    jobs = {job.id: job for job in [*newest(running=True), *newest(since=began)]}
    tasks = deployment.jobs.all_nodes_of([*jobs.values()])
    costs = costs_of(deployment, [*jobs.values()], tasks)
    used, left = 0.0, 0.0
    for job in jobs.values():
        so_far = costs[job.id] or 0
        used += so_far if job.began >= began else 0
        if job.is_over:
            left += _usd_kept(job, tasks[job.id], now.timestamp())
        else:
            left += max(0, _usd_at_most(job, deployment.shape) - so_far)
    return used, left


def _usd_kept(job: JobExecution, tasks: Sequence[Task], now: float) -> float:
    """US dollars that the hosts can still cost which are kept after a job."""
    kept = [
        Paid(
            is_head=task.is_head,
            pool=task.pool,
            pulled=now,
            started=None,
            ended=max(now, task.kept_until + times.SWEEP_EVERY_S),
        )
        for task in tasks
        if task.kept_until and not task.has_stopped
    ]
    return (_usd(job.prices, kept) if job.prices else None) or 0


def _usd_at_most(job: JobExecution, shape: ClusterShape) -> float:
    """US dollars that a job can cost; 0 where that is not known."""
    if not (job.spec and job.prices):
        return 0
    pool = shape.in_pools.get(job.spec.ladder[0], shape)
    num_nodes, spec = job.spec.nodes.high, job.spec
    usd = usd_at_most(
        job.prices, pool, num_nodes=num_nodes, max_seconds=spec.max_seconds, keep_s=spec.keep_s
    )
    return usd or 0


def usd_so_far(job: JobExecution, tasks: Sequence[Task], *, now: datetime) -> float | None:
    """Cost of a running job's hosts, in US dollars, by the nodes that it has had; None: not
    known. Asks AWS for nothing."""
    paid = paid_of(tasks, now=now)
    return None if job.prices is None or paid is None else _usd(job.prices, paid)


def _usd(prices: Prices, paid: Sequence[Paid]) -> float | None:
    """US dollars of the hosts of these nodes; None where a price is missing."""
    usd = 0.0
    for each in paid:
        host = prices.head if each.is_head else prices.workers_in(each.pool)
        if host.usd_per_hour is None:
            return None
        usd += host.usd_per_hour * each.seconds / 3600
    return usd


def paid_of(tasks: Sequence[Task], *, now: datetime) -> list[Paid] | None:
    """The time of each node that is paid for; None if one has ended at an unknown time."""
    if any(task.has_stopped and task.stopped is None for task in tasks):
        return None
    return [
        Paid(
            is_head=task.is_head,
            pool=task.pool,
            pulled=task.pulled.timestamp(),
            started=task.started.timestamp() if task.started else None,
            ended=max(task.pulled, task.stopped or now).timestamp(),
        )
        for task in tasks
        if task.pulled is not None
    ]


def goodput_of(deployment: Deployment, job: JobExecution, cost: Cost) -> float | None:
    """Share of a job's paid time that was training, 0 to 1; None if unknown."""
    return goodput(cost.paid, activity_of(deployment, job)) if cost.paid else None


def activity_of(deployment: Deployment, job: JobExecution) -> Activity:
    """Activity of a job's program; empty where there is none that can be read."""
    with contextlib.suppress(ValueError):
        if job.run:
            content = deployment.bucket.read_of_run(job.run, runs.job_activity(job.id))
            return Activity.from_json(json_object(content))
    return Activity()


def an_hour(prices: Prices, num_nodes: int) -> str:
    """Price of an hour of a head and its worker nodes in words, or why it is not known."""
    usd = prices.usd_per_hour(num_nodes)
    if usd is None:
        return f"unknown: {prices.why_unknown}"
    return f"{dollars(usd)} an hour with disks and {prices.standing}, {at_list_prices(prices)}"


def machines(shape: ClusterShape, nodes: Range) -> str:
    """``1 head (m5.large) + 2 workers (m5.large)``."""
    head = f"1 head ({shape.head.name}{', trains too' if shape.head_trains else ''})"
    kind = f"{shape.worker.name}{', spot' if shape.spot else ''}"
    plural = "s" if nodes.high > 1 else ""
    return f"{head} + {nodes.words} worker{plural} ({kind})" if nodes.high else head


def at_list_prices(prices: Prices) -> str:
    """``at us-west-2's list prices``, and what that leaves open."""
    less = "; spot instances usually cost less" if prices.spot else ""
    return f"at {prices.region}'s list prices{less}"
