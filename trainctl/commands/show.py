"""``trainctl show``: one job, its nodes and what its run has reached."""

from trainctl import output
from trainctl.options import AsJson, JobName, WhereOrHere
from trainctl.runs import curves
from trainctl.watch import boots, overview


def show(*, name: JobName, as_json: AsJson = False, where: WhereOrHere) -> None:
    """Show a job: its state, its nodes, what its run has reached."""
    deployment = where.find()
    view = overview.View(deployment, deployment.jobs.find(name))
    hosts = boots.of_tasks(deployment, view.tasks)
    if as_json:
        output.print_json({**view.values(deployment.logs), "hosts": hosts})
        return
    output.print_text("\n".join(f"{key:10}{value}" for key, value in view.words().items()))
    if view.job.run and not view.job.recipe:
        for curve in curves.LiveRecord(deployment.bucket, view.job.run).curves():
            output.print_text("\n".join(f"{name}  {line}" for name, line in curve.words()))
    if view.trials.rows:
        output.print_table(view.trials.columns, view.trials.cells)
    if view.tasks:
        columns = overview.NODES
        output.print_table(columns, view.node_cells(), prose=columns[-1:], optional=["address"])
    for boot in hosts:
        output.print_text(boots.line(boot))
    if view.use:
        output.print_text("\n".join(["", "Use this model:", *view.use]))
