"""``trainctl top``: one job while it runs, in a terminal."""

import sys

from trainctl import output
from trainctl.options import AsJson, JobName, WhereOrHere
from trainctl.runs.curves import LiveRecord
from trainctl.watch.overview import View
from trainctl.watch.polling import Polling


def top(*, name: JobName, as_json: AsJson = False, where: WhereOrHere) -> None:
    """Watch a job's steps, seconds a step, GPU use and memory per rank, and cost, until Ctrl-C.

    Once with --json, and where stdout is no terminal.
    """
    deployment = where.find()
    job = deployment.jobs.find(name)
    record = LiveRecord(deployment.bucket, job.run)
    polling = Polling(is_local=deployment.is_local)
    while True:
        view = View(deployment, job)
        curves = record.curves() if job.run else []
        if as_json:
            lines = {curve.title: curve.lines for curve in curves}
            output.print_json(view.values(deployment.logs) | {"curves": lines})
            return
        words = view.words()
        shown = [(name, words.get(name, "")) for name in ("job", "state", "progress", "cost")]
        for curve in curves:
            shown += curve.words()
        output.clear()
        output.print_text("\n".join(f"{what:24}{text}" for what, text in shown if text))
        if job.is_over or not sys.stdout.isatty():
            return
        polling.wait(changed=True)
        job = deployment.jobs.find(job.id)
