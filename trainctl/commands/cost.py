"""``trainctl cost``: the cost of a job, from the run time of each of its nodes; sums of many."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC
from enum import StrEnum
from typing import Annotated, Final

import typer

from contract.nodes import HEAD, WORKER
from contract.text import dollars
from trainctl import output
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import UsageError
from trainctl.aws.jobs import JobExecution
from trainctl.jobs.pricing import MOST_JOBS, NOT_INCLUDED, Cost, at_list_prices, cost_of, costs_of
from trainctl.options import AsJson, JobName, Where


class By(StrEnum):
    """Groups whose costs are added up."""

    USER = "user"
    RUN = "run"
    MONTH = "month"


_OF: Final[Mapping[By, Callable[[JobExecution], str]]] = {
    By.USER: lambda job: job.submitter,
    By.RUN: lambda job: job.run,
    By.MONTH: lambda job: f"{job.began.astimezone(UTC):%Y-%m}",
}


def cost(
    *,
    name: JobName = "",
    by: Annotated[By | None, typer.Option(help="Add up all jobs of the last 90 days.")] = None,
    as_json: AsJson = False,
    where: Where,
) -> None:
    """Print what a job has cost while its nodes ran, at the list prices of its submission."""
    if bool(name) == bool(by):
        raise UsageError("give a job, or --by user, run or month")
    deployment = where.find()
    if by:
        _sums(deployment, by, as_json=as_json)
        return
    job = deployment.jobs.find(name)
    found, prices = cost_of(deployment, job), job.prices
    hosts = {HEAD: prices.head, WORKER: prices.worker} if prices else {}
    seconds = found.seconds
    if prices and prices.pools and seconds and found.paid:  # then by pool
        hosts, seconds = {HEAD: prices.head}, {HEAD: seconds[HEAD]}
        for pool, host in prices.pools.items():
            own = (each.seconds for each in found.paid if not each.is_head and each.pool == pool)
            kind = f"{WORKER} in {pool}"
            hosts[kind], seconds[kind] = host, sum(own)
    if as_json:
        output.print_json(
            {
                "job": job.id,
                "is_over": job.is_over,
                "node_seconds": seconds,
                "kept_seconds": found.kept_s,
                "usd_per_hour": {node: host.usd_per_hour for node, host in hosts.items()},
                "usd": found.usd,
                "planned_usd": job.spec.planned_usd if job.spec else None,
                "nat_usd": found.nat_usd,
                "shared_usd": found.shared_usd,
                "why_unknown": found.why_unknown,
                "prices": asdict(prices) if prices else None,
            }
        )
        return
    rows = [
        [
            node,
            host.type,
            f"{host.disk_gib} GiB",
            f"{seconds[node] / 3600:.3f}" if seconds else "unknown",
            dollars(host.usd_per_hour),
        ]
        for node, host in hosts.items()
    ]
    if rows:
        output.print_table(["nodes", "type", "disk", "hours", "an hour"], rows)
        output.print_text("")
    output.print_text(_in_words(job, found))


def _in_words(job: JobExecution, found: Cost) -> str:
    """Cost of a job, and what it leaves out."""
    so_far = "" if job.is_over else " so far"
    spec, prices = job.spec, job.prices
    if spec is None or prices is None or found.usd is None:
        return f"unknown{so_far}: {found.why_unknown}"
    shared = f", shared file system {dollars(found.shared_usd)} more" if found.shared_usd else ""
    planned = spec.planned_usd
    steps = "" if planned is None else f" (planned: {dollars(planned)} for its steps)"
    kept = f" with {found.kept_s / 3600:.3f} hours of kept hosts" if found.kept_s else ""
    return (
        f"{dollars(found.usd)}{so_far}{steps}{kept} {at_list_prices(prices)}, with disks; NAT "
        f"gateway {dollars(found.nat_usd)} more{shared}. AWS also bills some minutes of each "
        f"host's start and end, and {NOT_INCLUDED}."
    )


def _sums(deployment: Deployment, by: By, *, as_json: bool) -> None:
    """Print the costs of all jobs by what they have in common, the highest first."""
    jobs = deployment.jobs.newest(limit=MOST_JOBS)
    costs = costs_of(deployment, jobs)
    found: dict[str, list[float | None]] = {}
    for job in jobs:
        found.setdefault(_OF[by](job), []).append(costs[job.id])
    rows = [
        (name, len(own), sum(filter(None, own)), own.count(None)) for name, own in found.items()
    ]
    rows.sort(key=lambda row: row[2], reverse=True)
    if as_json:
        columns = (by, "jobs", "usd", "unknown")
        output.print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    shown = [[name, str(jobs), dollars(usd), str(unknown)] for name, jobs, usd, unknown in rows]
    output.print_table([by, "jobs", "cost", "unknown"], shown)
