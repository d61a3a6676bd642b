"""``trainctl cost``: what a job has cost, from how long each of its nodes ran."""

from datetime import UTC, datetime

from contract.nodes import HEAD, WORKER
from trainctl import follow, output
from trainctl.aws.deployment import Deployment
from trainctl.options import AsJson, JobName, Profile, Region
from trainctl.pricing import NAT_USD_PER_HOUR, Price, dollars


def cost(
    *, name: JobName, as_json: AsJson = False, profile: Profile = None, region: Region = None
) -> None:
    """Print what a job has cost, at list prices, while its nodes ran."""
    deployment = Deployment.find(profile=profile, region=region)
    job = deployment.jobs.find(name)
    usd, seconds = follow.cost_of(deployment, job)
    price, shape = Price.of(deployment.shape), deployment.shape
    ran_s = ((job.ended or datetime.now(tz=UTC)) - job.began).total_seconds()
    nat = NAT_USD_PER_HOUR * ran_s / 3600
    if as_json:
        output.print_json(
            {
                "job": job.id,
                "is_over": job.is_over,
                "node_seconds": seconds,
                "usd_per_hour": {"head": price.head, "worker": price.worker},
                "usd": usd,
                "nat_usd": nat,
            }
        )
        return
    kinds = {
        HEAD: (shape.head.name, price.head),
        WORKER: (shape.worker.name, price.worker),
    }
    rows = [
        [node, type_, f"{seconds[node] / 3600:.3f}", dollars(hourly)]
        for node, (type_, hourly) in kinds.items()
    ]
    output.print_table(["nodes", "type", "hours", "an hour"], rows)
    so_far = "" if job.is_over else " so far"
    spot = " Spot instances usually cost less." if shape.spot else ""
    output.print_text(
        f"\n{dollars(usd)}{so_far} at us-east-1's list prices, from the pull of the image to the "
        f"end of each node; the NAT gateway meanwhile {dollars(nat)}. A host's own start and end "
        f"add a few minutes each.{spot}"
    )
