"""``trainctl cluster down``: stop the standing cluster."""

from trainctl import output
from trainctl.aws.cluster import NODES
from trainctl.aws.deployment import Deployment
from trainctl.aws.tasks import Task
from trainctl.errors import CliError, explained
from trainctl.options import Profile, Region, Wait, Yes
from trainctl.pace import Pace


def down(
    *,
    wait: Wait = True,
    yes: Yes = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Stop head and workers.

    Training on them saves what it can within the stop timeout. Empty hosts are terminated at once;
    with --no-wait, within about ten minutes, and cost until then.
    """
    deployment = Deployment.find(profile=profile, region=region)
    cluster = deployment.cluster
    services, tasks = cluster.services(), cluster.tasks()
    if not tasks and not any(service.wanted for service in services.values()):
        output.say("The standing cluster is down already.")
        return
    output.say(f"Stopping {len(tasks)} nodes: {', '.join(f'{t.node} {t.id[:8]}' for t in tasks)}")
    output.confirm("Stop them?", yes=yes)
    # Workers first: a worker that loses its head before it has drained cannot leave in order.
    for node in reversed(NODES):
        cluster.set_wanted(node, 0)
    if not wait:
        output.say("Going down. Its state: trainctl cluster status")
        return
    pace, shown = Pace(is_local=deployment.is_local), 0
    with output.Progress() as progress:
        while tasks := cluster.tasks() + _ending(deployment):
            progress.update(f"waiting for {len(tasks)} nodes to end")
            pace.wait(changed=len(tasks) != shown)
            shown = len(tasks)
    output.say(f"Down. {_release(deployment)}; make destroy removes the deployment itself.")


def _release(deployment: Deployment) -> str:
    """Terminate the empty hosts; say what became of them."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        count = deployment.cluster.release_hosts()
    except (CliError, ClientError, BotoCoreError) as error:
        output.say(f"The hosts were not terminated at once: {explained(error)}")
        return "Empty hosts terminate within about ten minutes"
    return f"{count} empty host{'' if count == 1 else 's'} terminated"


def _ending(deployment: Deployment) -> list[Task]:
    """Nodes that were told to stop and have not ended yet."""
    return [task for task in deployment.cluster.tasks(stopped=True) if not task.has_stopped]
