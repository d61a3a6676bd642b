"""``trainctl ls | show | stop | wait | cost | logs``: jobs that were submitted."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from contract import exits, outputs, runs
from contract.nodes import HEAD, JOB, WORKER
from trainctl import follow, show
from trainctl.aws import Deployment, Job, Task
from trainctl.errors import CliError, UsageError
from trainctl.options import AsJson, JobName, Profile, Region, Yes
from trainctl.pricing import NAT_USD_PER_HOUR, Price, dollars

#: Within it a job that is told to stop has gone; a node that does not react is killed before.
STOPS_WITHIN_S: Final = 300.0


def ls(
    *,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, newest first.")] = 20,
    running: Annotated[bool, typer.Option("--running", help="Only those that run.")] = False,
    as_json: AsJson = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """List jobs."""
    deployment = Deployment.find(profile=profile, region=region)
    jobs = deployment.jobs(limit=limit, running=running)
    if as_json:
        show.print_json([_values(job) for job in jobs])
    elif not jobs:
        show.print_text("No jobs. Start one: trainctl submit ddp")
    else:
        rows = [
            [job.id, job.run, job.reason, f"{job.began:%Y-%m-%d %H:%M}", _lasted(job)]
            for job in jobs
        ]
        show.print_table(["job", "run", "state", "submitted", "for"], rows)


def show_job(
    *, name: JobName, as_json: AsJson = False, profile: Profile = None, region: Region = None
) -> None:
    """Show a job: its state, its nodes, what its run has reached."""
    deployment = Deployment.find(profile=profile, region=region)
    job = deployment.job(name)
    heads, workers = deployment.heads(job), deployment.workers(job)
    key = f"{runs.RUNS_PREFIX}/{job.run}/{runs.RESULT_FILE}"
    result = show.parsed(deployment.read(key))
    waits = "" if job.is_over else follow.waiting(deployment, job, heads)
    usd, seconds = follow.cost_of(deployment, job)
    if as_json:
        show.print_json(
            {
                **_values(job),
                "waiting": waits,
                "tasks": [asdict(task) for task in [*heads, *workers]],
                "node_seconds": seconds,
                "usd": usd,
                "result": result,
            }
        )
        return
    rows = {
        "job": job.id,
        "run": job.run,
        "state": f"{job.reason}{f': {waits}' if waits else ''}",
        "submitted": f"{job.began:%Y-%m-%d %H:%M:%S %Z}",
        "lasted" if job.is_over else "for": _lasted(job),
        "deadline": "" if job.is_over else f"{job.deadline:%Y-%m-%d %H:%M:%S %Z}",
        "command": " ".join(job.spec.get("command", [])),
        "workers": f"{job.spec.get('min_workers')} to {job.spec.get('max_workers')}",
        "cost": dollars(usd),
        "record": f"s3://{deployment.bucket}/{runs.RUNS_PREFIX}/{job.run}/",
    }
    show.print_text("\n".join(f"{key:10}{value}" for key, value in rows.items() if value))
    if result:
        figures = ("accuracy", "loss", "steps")
        reached = [f"{name} {result[name]}" for name in figures if result.get(name)]
        show.print_text(f"{'result':10}{result.get('status')}: {', '.join(reached)}")
    tasks = [*heads, *workers]
    if tasks:
        show.print_table(
            ["node", "task", "status", "address", "why it ended"],
            [
                [
                    "head" if task.node == JOB else task.node,
                    task.id,
                    task.status,
                    task.address,
                    task.stopped_reason,
                ]
                for task in tasks
            ],
        )


def stop(
    *,
    name: JobName,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is gone.")] = True,
    yes: Yes = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """End a job. Its training saves a checkpoint first; the run can be resumed."""
    deployment = Deployment.find(profile=profile, region=region)
    job = deployment.job(name)
    if job.is_over:
        show.say(f"{job.id} has ended already: {job.reason}")
        return
    show.confirm(f"Stop {job.id}?", yes=yes)
    deployment.stop_job(job, "stopped by user")
    if not wait:
        show.say("Stopping. How far it is: trainctl show " + job.id)
        return
    deadline = time.monotonic() + STOPS_WITHIN_S
    with show.Progress() as progress:
        while True:
            now = deployment.job(job.id)
            left = deployment.alive(now)
            if now.is_over and not left:
                break
            if time.monotonic() > deadline:
                raise CliError(
                    f"{job.id} still has {len(left)} tasks; what nobody looks after is ended by "
                    f"the sweep within minutes. Look: trainctl show {job.id}"
                )
            progress.update(f"waiting for {len(left)} nodes to save and end")
            time.sleep(follow.POLL_S)
    show.say(follow.ending(deployment, now))
    show.say(f"Resume it: give the same trainctl submit again, with --run {job.run}")


def wait(
    *, name: JobName, as_json: AsJson = False, profile: Profile = None, region: Region = None
) -> None:
    """Wait until a job has ended; exit as it did.

    0 it succeeded; 75 no capacity; 124 deadline; 143 stopped by a user; else the exit code of its
    code, or 1.
    """
    deployment = Deployment.find(profile=profile, region=region)
    job = deployment.job(name)
    try:
        job = follow.wait_until_over(deployment, job.id)
    except KeyboardInterrupt:
        show.say(f"\nThe job goes on; wait again: trainctl wait {job.id}")
        raise typer.Exit(exits.INTERRUPTED) from None
    if as_json:
        show.print_json(_values(job))
    else:
        show.print_text(follow.ending(deployment, job))
    raise typer.Exit(job.shell_code)


def cost(
    *, name: JobName, as_json: AsJson = False, profile: Profile = None, region: Region = None
) -> None:
    """Say what a job has cost, at list prices, while its nodes ran."""
    deployment = Deployment.find(profile=profile, region=region)
    job = deployment.job(name)
    usd, seconds = follow.cost_of(deployment, job)
    price, shape = Price.of(deployment.shape), deployment.shape
    lasted = ((job.ended or datetime.now(tz=UTC)) - job.began).total_seconds()
    nat = NAT_USD_PER_HOUR * lasted / 3600
    if as_json:
        show.print_json(
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
    show.print_table(["nodes", "type", "hours", "an hour"], rows)
    so_far = "" if job.is_over else " so far"
    spot = " Spot hosts usually cost less." if shape.spot else ""
    show.print_text(
        f"\n{dollars(usd)}{so_far} at us-east-1's list prices, from the pull of the image to the "
        f"end of each node; the NAT gateway meanwhile {dollars(nat)}. A host's own start and end "
        f"add a few minutes each.{spot}"
    )


def logs(
    *,
    name: JobName,
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="Until it ends; exits as it does.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Of the node on which this rank trained.")
    ] = None,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Show what a job says: its head's log, with its code's output, or a worker node's."""
    deployment = Deployment.find(profile=profile, region=region)
    job = deployment.job(name)
    if rank is None and following:
        raise typer.Exit(follow.follow(deployment, job.id))
    if rank is not None:
        tasks: Sequence[Task] = [_node_of(deployment, job, rank)]
    else:
        tasks = deployment.heads(job)
    found = [follow.Log(deployment, task) for task in tasks]
    while True:
        for log in found:
            for line in log.lines():
                show.print_text(line)
        if not following or deployment.job(job.id).is_over:
            return
        time.sleep(follow.POLL_S)


def _node_of(deployment: Deployment, job: Job, rank: int) -> Task:
    """The worker node that a rank trained on, as the run's record says."""
    key = f"{runs.RUNS_PREFIX}/{job.run}/{runs.METRICS_FILE}"
    hosts: list[str] = []
    for line in (deployment.read(key) or b"").splitlines():
        event = show.parsed(line)
        if event.get("name") == "workers_ready":
            hosts = event.get("hosts", hosts)
    if not hosts:
        raise CliError(f"{job.run} has not said yet where its ranks are: trainctl logs {job.id}")
    if rank >= len(hosts):
        raise UsageError(f"--rank is {rank}: {job.run} has ranks 0 to {len(hosts) - 1}")
    nodes = [*deployment.workers(job), *deployment.heads(job)]
    for task in nodes:
        if task.address == hosts[rank]:
            return task
    raise CliError(
        f"the node of rank {rank} ({hosts[rank]}) ended more than an hour ago, and ECS has "
        "forgotten which one it was; all logs of workers: aws logs tail "
        f"{deployment.output(outputs.LOG_GROUP)} --log-stream-name-prefix worker/"
    )


def _values(job: Job) -> dict[str, Any]:
    return {**asdict(job), "began": job.began.isoformat(), "ended": job.ended and str(job.ended)}


def _lasted(job: Job) -> str:
    return show.duration(((job.ended or datetime.now(tz=UTC)) - job.began).total_seconds())
