"""``trainctl plan``: a job as ``submit`` would start it, and its price.

What fits on which hosts, and how fast it trains, is another question: ``python -m training.plan``.
"""

from trainctl import output
from trainctl.jobs import job_plan
from trainctl.jobs.job_options import JobOptions
from trainctl.jobs.job_request import JobRequest
from trainctl.options import AsJson, Context, Where
from trainctl.setup import checkout_settings


def plan(
    *,
    options: JobOptions,
    context: Context = None,
    as_json: AsJson = False,
    where: Where,
) -> None:
    """Check a job and print where it would run and its maximum cost; start nothing.

    With -c it needs neither a deployment nor an account: trainctl plan ddp -c preset=ddp
    """
    request = JobRequest.of(options)
    if context:
        deployment = checkout_settings.undeployed(context, region=where.region)
        found = job_plan.priced(deployment, request)
    else:
        found = job_plan.plan_of(where.find(to_start=True), request)
    for each in found.warnings:
        output.say(f"warning: {each}")
    if as_json:
        output.print_json(found.values())
    else:
        output.print_text(found.text())
