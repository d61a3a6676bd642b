"""Faults of simulated lives: what AWS, the hosts and people do to jobs."""

import functools
from dataclasses import replace
from typing import Final

from contract import exits
from contract.job import JobSpec, Placement
from contract.nodes import Range, pool_place, pool_provider
from rehearsal.model import Record
from tests.simulation.account import DAY_S, Execution
from tests.simulation.lives import FAMILIES, PROVIDERS, SHORT, Fault, Life

#: Ends after which an execution can be redriven (API reference of Step Functions).
ENDED_BADLY: Final = ("FAILED", "ABORTED", "TIMED_OUT")


def spot_host_is_taken(life: Life) -> list[Execution] | None:
    if not (host := life.any_host()):
        return None
    hit = life.on(host)
    life.model.lose(host["containerInstanceArn"])
    if life.chance.random() < 0.5:  # EC2 takes spot hosts where it is short of them
        life.shorten(host["capacityProviderName"], life.chance.choice([300, 1200, 5000]))
    return hit


def agent_is_disconnected_for_a_while(life: Life) -> list[Execution] | None:
    return disconnected(life, host) if (host := life.any_host()) else None


def disconnected(life: Life, host: Record) -> list[Execution]:
    connect = functools.partial(life.model.connect, host["containerInstanceArn"])
    connect(is_connected=False)
    life.world.after(life.chance.uniform(60, 500), lambda: connect(is_connected=True))
    return life.on(host)


def agent_dies(life: Life) -> list[Execution] | None:
    if not (host := life.any_host()):
        return None
    life.model.connect(host["containerInstanceArn"], is_connected=False)
    return life.on(host)


def next_host_never_joins(life: Life) -> list[Execution]:
    life._fates[life.chance.choice([*FAMILIES])].append("unjoined")
    return life.running()


def next_host_lacks_its_gpu(life: Life) -> list[Execution]:
    life._fates[life.chance.choice([*FAMILIES])].append("lacks")
    return life.running()


def next_host_is_bad(life: Life) -> list[Execution]:
    life._fates[life.chance.choice([*FAMILIES])].append("bad")
    return life.running()


def next_hosts_docker_hangs(life: Life) -> list[Execution]:
    """Tasks stay PENDING there."""
    life._fates[life.chance.choice([*FAMILIES])].append("hangs")
    return life.running()


def s3_does_not_answer(life: Life) -> list[Execution]:
    if not life.account.s3.is_down:
        life.account.records.set_down(is_down=True)
        seconds = life.chance.choice([60, 600, 2400, 7000])
        life.world.after(seconds, functools.partial(life.account.records.set_down, is_down=False))
    return life.running()


def node_is_dead_and_ecs_does_not_notice(life: Life) -> list[Execution] | None:
    """Its container is gone below a task that stays RUNNING and HEALTHY (aws/amazon-ecs-agent 333,
    364)."""
    return hung(life, "HEALTHY", _is_unnoticed=True)


def node_hangs(life: Life) -> list[Execution] | None:
    """Its container runs, and does not answer its health check."""
    return hung(life, "UNHEALTHY")


def hung(life: Life, health: str, **more: object) -> list[Execution] | None:
    tasks = life.model.tasks.values()
    running = [each for each in tasks if each["lastStatus"] == "RUNNING"]
    running = [each for each in running if "_hangs_since" not in each]
    if not running:
        return None
    task = life.chance.choice(running)
    task |= {"healthStatus": health, "_hangs_since": life.world.now, "_joins": 1e12, **more}
    if head := life.heads.get(task["taskArn"]):
        head.process.is_dead = True
        life.forsake(head)
    job = life.account.job_of(task)
    return [job] if job else []


def ec2_has_no_host(life: Life) -> list[Execution]:
    provider = life.chance.choice([*FAMILIES])
    life.shorten(provider, life.chance.choice([300, 1200, 5000]), life.chance.choice(SHORT))
    return life.running()


def aws_is_in_trouble(life: Life) -> list[Execution]:
    life.account.trouble = life.chance.choice([0.1, 0.3, 0.6])
    seconds = life.chance.choice([60, 300, 1500])
    life.world.after(seconds, setattr, life.account, "trouble", 0.01)
    return life.running()


def keeper_is_broken(life: Life) -> list[Execution]:
    life.account.is_broken = True
    seconds = life.chance.choice([60, 600, 2400])
    life.world.after(seconds, setattr, life.account, "is_broken", False)
    return life.running()


def user_stops_a_job(life: Life) -> list[Execution] | None:
    """As ``trainctl stop``."""
    if not (running := life.running()):
        return None
    job = life.chance.choice(running)
    life.world.spawn(life.stop, job.name)
    return [job]


def job_is_aborted(life: Life) -> list[Execution] | None:
    if not (running := life.running()):
        return None
    job = life.chance.choice(running)
    job.abort()
    return [job]


def standing_cluster_goes_down(life: Life) -> list[Execution]:
    """As ``trainctl cluster down``, whose hosts go at once: not those that a job waits for."""
    life.account.notify({"Action": "release"})
    return life.running()


def head_is_killed(life: Life) -> list[Execution] | None:
    alive = [each for each in life.heads.values() if each.is_alive]
    if not alive:
        return None
    head = life.chance.choice(alive)
    life.kill(head.task)
    life.model.end(head.task, exits.KILLED)
    return [head.job]


# --- rare ones ------------------------------------------------------------------------------------
def launches_fail_for_more_than_a_day(life: Life) -> list[Execution]:
    """Then Auto Scaling may suspend them."""
    life.model.times = replace(life.model.times, suspends=DAY_S)
    for provider in life.chance.choice([FAMILIES, ("for-heads",)]):
        life.shorten(provider, life.chance.uniform(27, 40) * 3600)
    return life.running()


def group_replaces_a_host(life: Life) -> list[Execution] | None:
    """As it does after a failed status check: a task runs on there for two days at most."""
    if not (host := life.any_host()) or not life.model.on(host):
        return None
    return replaced(life, host)


def replaced(life: Life, host: Record) -> list[Execution]:
    life.model.terminate(host["ec2InstanceId"], lowers=False)
    for task in life.model.on(host):
        task["_drains_since"] = life.world.now
    return life.on(host)


def group_replaces_a_host_of_a_job_of_days(life: Life) -> list[Execution] | None:
    heads = [each for each in life.heads.values() if each.is_alive and each.job.name[:2] == "r0"]
    hosts = [life.model.hosts[each.task["containerInstanceArn"]] for each in heads]
    hosts = [each for each in hosts if not each["_leaves"] and each["agentConnected"]]
    return replaced(life, hosts[0]) if hosts else None


def event_of_an_abort_comes_a_day_late(life: Life) -> list[Execution] | None:
    if not (running := life.running()):
        return None
    job = life.chance.choice(running)
    job.event_s = life.chance.uniform(0.8, 1) * DAY_S
    job.abort()
    return [job]


def person_suspends_launches(life: Life) -> list[Execution]:
    group = life.chance.choice([*life.model.groups.values()])
    reason = "User suspended at 2026-11-27T10:00:00Z"
    group.record["SuspendedProcesses"] = [{"ProcessName": "Launch", "SuspensionReason": reason}]
    life.world.after(life.chance.uniform(600, 6000), life.resume_launches)
    return life.running()


def stop_is_never_carried_out(life: Life) -> list[Execution] | None:
    """A process in uninterruptible sleep outlasts SIGKILL."""
    tasks = [each for each in life.model.tasks.values() if each["lastStatus"] == "RUNNING"]
    tasks = [each for each in tasks if each["desiredStatus"] == "RUNNING"]
    if not tasks:
        return None
    task = life.chance.choice(tasks)
    task["_is_stuck"] = True
    job = life.account.job_of(task)
    return [job] if job else []


def host_takes_no_attributes(life: Life) -> list[Execution] | None:
    """Which the sweep wants to put on it, as its agent is disconnected."""
    if not (host := life.any_host()):
        return None
    host["_refuses_until"] = life.world.now + life.chance.uniform(600, 6000)
    return disconnected(life, host)


def clock_of_the_keeper_is_off(life: Life) -> list[Execution]:
    account = life.account
    account.skew_s = life.chance.choice([-1, 1]) * life.chance.uniform(60, 300)
    account.slack_s = max(account.slack_s, abs(account.skew_s))
    return life.running()


def hosts_boot_for_half_an_hour(life: Life) -> list[Execution]:
    """As bare metal and P instances may."""
    life.account.instance_type = life.chance.choice(["g4dn.metal", "p5.48xlarge"])
    life.model.times = replace(life.model.times, boots=(600, 2000))
    return life.running()


def person_starts_an_execution_with_any_input(life: Life) -> list[Execution]:
    orders = ("{}", '"x"', "[1]", "null", '{"max_seconds": "x"}', '{"run": "../x", "nodes": 9}')
    name = f"any-{len(life.account.executions)}"
    life.account.start(name, life.chance.choice(orders))
    return [life.account.executions[name]]


def person_redrives_an_execution(life: Life) -> list[Execution] | None:
    ended = [each for each in life.account.executions.values() if each.status in ENDED_BADLY]
    ended = [each for each in ended if not each.is_redriven and each.admitted_at]
    if not ended:
        return None
    job = life.chance.choice(ended)
    job.redrive()
    return [job]


def deploy_of_other_limits(life: Life) -> list[Execution]:
    account, chance = life.account, life.chance
    heads, workers = chance.randint(1, 3), chance.randint(1, 4)
    limits = replace(
        account.keeper.LIMITS,
        max_heads=heads,
        max_workers=workers,
        pools={"l4": workers, "spot": workers},
    )
    vars(account.keeper)["LIMITS"] = limits
    account.deployed_at = life.world.now
    account.least_workers = min(account.least_workers, workers)
    for group in life.model.groups.values():
        most = heads if group.provider == "for-heads" else workers
        group.record["MaxSize"] = most  # Auto Scaling asks for no more than that at once
        group.desired = min(group.desired, most)
    return life.running()


def deploy_of_other_pools(life: Life) -> list[Execution] | None:
    """A pool is moved, renamed or removed, in the order of CloudFormation: its new group and the
    keeper; ECS's list of capacity providers, from which none can go that a task uses, and all goes
    back then; at last the old group, at once and by force (``stacks.teardown``)."""
    account, model, chance = life.account, life.model, life.chance
    pool, how = chance.choice(["l4", "spot"]), chance.choice(["moved", "renamed", "removed"])
    old, before = PROVIDERS[pool], life.providers
    names = {"moved": pool_place(pool, "us-east-1c"), "renamed": f"{pool}-2", "removed": ""}
    new = pool_provider("S", names[how])
    after = {name: each for name, each in before.items() if name != pool}
    if how == "moved":
        after[pool] = new
    if new in model.groups:
        life.world.blame(f"a deploy moves {old} below its hosts")
    elif how != "removed":
        life.add_group(new, model.groups[old].record["MaxSize"])

    def tell(providers: dict[str, str]) -> None:
        life.deploy(providers)
        life.world.tell(f"deploy: pools {providers}")

    def use(provider: str) -> bool:
        tasks = (each for each in model.tasks.values() if each["lastStatus"] != "STOPPED")
        return any(each.get("capacityProviderName") == provider for each in tasks)

    def give_up(provider: str) -> None:
        """As ``continue-update-rollback``, as often as it takes."""
        if use(provider):
            life.world.after(600, give_up, provider)
            return
        account.families.pop(provider)
        group = model.groups[provider]
        group.record["MaxSize"] = group.desired = 0
        group.record.pop("SuspendedProcesses", None)
        for instance in [*group.instances]:
            model.end_at_once(instance)

    def switch() -> None:
        back = use(old)
        life.world.happened[f"pool {how}{', and ECS refuses' if back else ''}"] += 1
        if back:
            tell(before)
        if how != "removed" or not back:
            give_up(new if back else old)

    life.world.after(chance.uniform(5, 60), tell, after)
    life.world.after(chance.uniform(60, 300), switch)
    return life.running()


def deploy_of_another_version_of_orders(life: Life) -> list[Execution] | None:
    if not (running := life.running()):
        return None
    life.account.outdated.update(each.spec.run for each in running if each.spec)
    life.account.keeper.order_of.cache_clear()
    return running


def deploy_of_another_state_machine(life: Life) -> list[Execution] | None:
    """Executions keep the definition that they began with."""
    if not (running := life.running()):
        return None
    for each in running:
        each.is_old = True
    return running


def many_jobs_are_aborted_at_once(life: Life) -> list[Execution]:
    """While the keeper is broken: sweeps write their records."""
    account, chance = life.account, life.chance
    spec = JobSpec(run="many", command=("x",), nodes=Range(0, 0), on=Placement.HEAD)
    jobs = [
        Execution(account, f"many-{n}", spec.to_json()) for n in range(chance.randint(101, 105))
    ]
    for each in jobs:
        life.world.after(chance.uniform(1, 9), each.abort)
    account.is_broken = True
    life.world.after(chance.uniform(420, 1800), setattr, account, "is_broken", False)
    return jobs[:1]


FAULTS: Final[tuple[Fault, ...]] = (
    spot_host_is_taken,
    spot_host_is_taken,
    agent_is_disconnected_for_a_while,
    agent_dies,
    next_host_never_joins,
    next_host_lacks_its_gpu,
    next_host_is_bad,
    next_hosts_docker_hangs,
    node_hangs,
    node_is_dead_and_ecs_does_not_notice,
    s3_does_not_answer,
    s3_does_not_answer,
    ec2_has_no_host,
    aws_is_in_trouble,
    keeper_is_broken,
    user_stops_a_job,
    job_is_aborted,
    standing_cluster_goes_down,
    head_is_killed,
)
#: Those that take days, and for how many days the first job trains then.
LONG: Final[dict[Fault, float]] = {
    launches_fail_for_more_than_a_day: 0.2,
    group_replaces_a_host_of_a_job_of_days: 2.2,
}
#: Of which a life has one at most.
RARE: Final[tuple[Fault, ...]] = (
    *LONG,
    group_replaces_a_host,
    event_of_an_abort_comes_a_day_late,
    person_suspends_launches,
    stop_is_never_carried_out,
    host_takes_no_attributes,
    clock_of_the_keeper_is_off,
    hosts_boot_for_half_an_hour,
    person_starts_an_execution_with_any_input,
    person_redrives_an_execution,
    deploy_of_other_limits,
    deploy_of_other_pools,
    deploy_of_other_pools,  # more often: it may come to three things, or be refused
    deploy_of_another_version_of_orders,
    deploy_of_another_state_machine,
    many_jobs_are_aborted_at_once,
    group_replaces_a_host_of_a_job_of_days,  # twice: of its hosts, some drain for two days
)
