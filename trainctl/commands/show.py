"""``trainctl show``: one job, its nodes and what its run has reached."""

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final

from contract.nodes import WORKER
from contract.runs import RESULT_FILE
from contract.text import dollars, duration, significant, utc
from trainctl import follow, job_log, output, run_list
from trainctl.aws.deployment_bucket import json_object
from trainctl.aws.jobs import JobExecution
from trainctl.aws.tasks import Task
from trainctl.job_log import JobLog
from trainctl.options import AsJson, JobName, Where
from trainctl.pricing import cost_of, goodput_of
from training.record import goodput

#: Reasons of AWS, and of a job's autoscaler, that tell nothing of a node that has done its work.
_ROUTINE: Final = ("Essential container exited", "Ray's autoscaler: not needed any more")


def show(*, name: JobName, as_json: AsJson = False, where: Where) -> None:
    """Show a job: its state, its nodes, what its run has reached."""
    deployment = where.find()
    job = deployment.jobs.find(name)
    tasks = deployment.jobs.all_nodes(job)
    record, result = "", {}
    if job.run:
        bucket = deployment.bucket
        record = bucket.run(job.run).uri
        result = json_object(bucket.read_of_run(job.run, RESULT_FILE))
    jobs, place, waits = deployment.jobs, None, ""
    if not job.is_over:
        place = None if tasks else jobs.queue(deployment.shape.limits).get(job.id)
        waits = "" if place else follow.waiting(deployment, job, tasks).words(time.time())
    deadline = None if job.is_over else jobs.deadline(job)
    reached = follow.progress_of(deployment, job)
    cost, hold = cost_of(deployment, job, tasks), follow.hold_of(deployment, job)
    uses = goodput_of(deployment, job, cost, held=hold.since if hold else None)
    if as_json:
        output.print_json(
            {
                **follow.values(job, place),
                "waiting": waits,
                "tasks": [
                    {**asdict(task), "log_stream": deployment.logs.stream(task)} for task in tasks
                ],
                "node_seconds": cost.seconds,
                "usd": cost.usd,
                "goodput_s": uses,
                "progress": reached and reached.to_json(),
                "result": result,
            }
        )
        return
    said, queued = "", ""
    is_recipe = job.spec is not None and bool(job.spec.recipe)
    if tasks and not job.is_over and not (reached and is_recipe):  # a program prints its figures
        said = "".join(map(job_log.text, JobLog(deployment.logs).last(job, tasks, 1)))
    if began := min((task.since for task in tasks if task.since), default=None):
        waited_s = round((began - job.began).total_seconds())
        queued = f", {duration(waited_s)} of it before its head ran" if waited_s > 0 else ""
    notes = []
    if skipped := result.get("skipped_steps"):
        notes.append(f"skipped steps: {skipped}, whose loss or gradient was not a number")
    if damaged := result.get("damaged_lines"):
        notes.append(f"damaged lines left out of metrics.jsonl: {damaged}")
    by_whom = job.spec and job.spec.submitter
    rows = {
        "job": job.id,
        "run": job.run,
        "state": f"queued: {place.words}" if place else f"{job.reason}{waits and f': {waits}'}",
        "progress": ", ".join(filter(None, (reached.line() if reached else "", said.strip()))),
        "submitted": utc(job.began) + (f" by {by_whom}" if by_whom else ""),
        "lasted" if job.is_over else "for": f"{follow.lasted(job)}{queued}",
        "deadline": utc(deadline) if deadline else "",
        "command": shlex.join(job.spec.command) if job.spec else "",
        "nodes": _nodes(job, tasks),
        "pool": ", ".join(job.spec.pools) if job.spec else "",
        "cost": dollars(cost.usd) if cost.usd is not None else f"unknown: {cost.why_unknown}",
        "paid for": goodput.words(uses),
        "record": f"{record}/" if record else "",
        "result": f"{result.get('status')}: {', '.join(_reached(result))}" if result else "",
        "note": "; ".join(notes),
    }
    output.print_text("\n".join(f"{key:10}{value}" for key, value in rows.items() if value))
    if tasks:
        columns = ["node", "task", "status", "address", "why it ended"]
        output.print_table(
            columns, [_row(task) for task in tasks], prose=columns[-1:], optional=["address"]
        )


def _nodes(job: JobExecution, tasks: Sequence[Task]) -> str:
    """Number of worker nodes; for a range, also how many run or were started."""
    if job.spec is None:
        return ""
    ordered = job.spec.nodes
    if ordered.low == ordered.high:
        return ordered.words
    workers = [task for task in tasks if task.node == WORKER]
    if job.is_over:
        return f"{ordered.words}; {len(workers)} started"
    return f"{ordered.words}; {sum(task.status == 'RUNNING' for task in workers)} running"


def _reached(result: Mapping[str, object]) -> list[str]:
    """The figures of a ``result.json``: its measures, loss and steps."""
    loss, steps = result.get("loss"), result.get("steps")
    others = [f"loss {significant(loss)}"] if isinstance(loss, int | float) else []
    others += [f"steps {steps:,}"] if isinstance(steps, int) and steps else []
    return [*run_list.measures(result), *others]


def _row(task: Task) -> list[str]:
    reason = "" if task.exit_code == 0 and task.stopped_reason in _ROUTINE else task.stopped_reason
    return [task.kind, task.id, task.status, task.address, reason]
