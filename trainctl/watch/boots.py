"""Starts: boot reports of hosts, and the seconds of each part of a job's start.

A host writes its own before it takes a task (``stacks.cluster.host_setup``).
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter

from contract.errors import InputError
from contract.job import Life
from contract.runs import HOSTS_PREFIX, job_life
from trainctl.aws.deployment import Deployment
from trainctl.aws.deployment_bucket import json_object
from trainctl.aws.jobs import JobExecution
from trainctl.aws.tasks import Task
from trainctl.jobs.pricing import activity_of

Boot = dict[str, object]


def of_tasks(deployment: Deployment, tasks: Sequence[Task]) -> list[Boot]:
    """Reports of the hosts of tasks, as far as ECS still knows these hosts."""
    hosts = {task.host for task in tasks if task.host}
    names = deployment.cluster.instances(hosts) if hosts else []
    found = (deployment.bucket.get(f"{HOSTS_PREFIX}/{name}.json") for name in sorted(names))
    return [boot for boot in map(json_object, found) if boot]


def last(deployment: Deployment) -> Boot:
    """Report of the host that started last; empty where none has."""
    stored = deployment.bucket.stored(f"{HOSTS_PREFIX}/")
    newest = max(stored, key=lambda each: each.modified, default=None)
    return json_object(deployment.bucket.get(newest.key)) if newest else {}


def line(boot: Boot) -> str:
    """A report in words."""
    words = [f"{name} {value}" for name, value in boot.items() if value and name != "steps"]
    steps = boot.get("steps")
    if isinstance(steps, dict):
        words += [f"{name} {seconds} s" for name, seconds in steps.items()]
    return ", ".join(words)


def start_of(deployment: Deployment, job: JobExecution, tasks: Sequence[Task]) -> dict[str, float]:
    """Seconds of each part of a job's start, from its submission to its first step, as far as they
    are known. Of what goes on side by side, a second belongs to the part that ends next."""
    heads = [task for task in tasks if task.is_head and not task.kept_until]
    if not heads or not heads[-1].started:
        return {}
    moments = {
        "queue": heads[0].created,
        "lost attempts": heads[-1].created if len(heads) > 1 else None,
        "host": heads[-1].pulled,
        "image": heads[-1].started,
    }
    ends = {name: moment.timestamp() for name, moment in moments.items() if moment}
    report = deployment.bucket.get(job_life(job.run, job.id)) or b""
    with suppress(InputError):
        ends |= Life.from_json(report.decode(errors="replace")).phases
    for segment in activity_of(deployment, job).segments[:1]:
        ends["program"] = segment.began
        if segment.stepped:
            ends["first step"] = segment.stepped
    seconds, at = {}, job.began.timestamp()
    for name, end in sorted(ends.items(), key=itemgetter(1)):
        if at <= end <= ends.get("first step", end):
            seconds[name], at = round(end - at, 1), end
    return seconds


def start_line(seconds: Mapping[str, float]) -> str:
    """The same in words, such as ``28.2 s: queue 12.1 s, host 3.4 s, ...``; empty without any."""
    parts = [f"{name} {each:g} s" for name, each in seconds.items()]
    return f"{sum(seconds.values()):.1f} s: {', '.join(parts)}" if parts else ""
