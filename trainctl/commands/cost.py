"""``trainctl cost``: the cost of a job, from the run time of each of its nodes."""

from dataclasses import asdict

from contract.nodes import HEAD, WORKER
from contract.text import dollars
from trainctl import output
from trainctl.options import AsJson, JobName, Where
from trainctl.pricing import NOT_INCLUDED, at_list_prices, cost_of


def cost(*, name: JobName, as_json: AsJson = False, where: Where) -> None:
    """Print what a job has cost while its nodes ran, at the list prices of its submission."""
    deployment = where.find()
    job = deployment.jobs.find(name)
    found = cost_of(deployment, job)
    prices = job.prices
    hosts = {HEAD: prices.head, WORKER: prices.worker} if prices else {}
    if as_json:
        output.print_json(
            {
                "job": job.id,
                "is_over": job.is_over,
                "node_seconds": found.seconds,
                "usd_per_hour": {node: host.usd_per_hour for node, host in hosts.items()},
                "usd": found.usd,
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
            f"{found.seconds[node] / 3600:.3f}" if found.seconds else "unknown",
            dollars(host.usd_per_hour),
        ]
        for node, host in hosts.items()
    ]
    if rows:
        output.print_table(["nodes", "type", "disk", "hours", "an hour"], rows)
        output.print_text("")
    so_far = "" if job.is_over else " so far"
    if prices is None or found.usd is None:
        output.print_text(f"unknown{so_far}: {found.why_unknown}")
        return
    shared = f", shared file system {dollars(found.shared_usd)} more" if found.shared_usd else ""
    output.print_text(
        f"{dollars(found.usd)}{so_far} {at_list_prices(prices)}, with disks; NAT gateway "
        f"{dollars(found.nat_usd)} more{shared}. AWS also bills some minutes of each host's start "
        f"and end, and {NOT_INCLUDED}."
    )
