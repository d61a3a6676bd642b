"""Boot reports: what hosts are, and the seconds of each step of their start.

A host writes its own before it takes a task (``stacks.cluster.host_setup``).
"""

from collections.abc import Sequence

from contract.runs import HOSTS_PREFIX
from trainctl.aws.deployment import Deployment
from trainctl.aws.deployment_bucket import json_object
from trainctl.aws.tasks import Task

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
