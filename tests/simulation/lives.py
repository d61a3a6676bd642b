"""Lives of ten hours: jobs of a deployment, what happens to them, and what must hold.

The keeper, the node provider, the head's decisions and the synthesized state machine are the
product's own. A stand-in for Ray asks for nodes; a stand-in for the program runs for some time.
"""

import contextlib
import functools
import json
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest
from botocore.exceptions import BotoCoreError, ClientError
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.tags import NODE_KIND_WORKER, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

from containers import autoscaler
from containers.autoscaler import EcsNodeProvider
from containers.decisions import Decisions, Observation
from contract import exits, job_outcome, runs, times
from contract.admission import Limits
from contract.job import (
    STOP_ERROR,
    STOPPED_BY_USER,
    JobSpec,
    JobStatus,
    Placement,
    Priority,
)
from contract.job import Life as HeadLife
from contract.job_outcome import deadline_of, env_override, is_in_vain, keeper_of
from contract.nodes import DEFAULT_POOL, ENV_JOB_SPEC, JOB, WORKER, Range, pool_hosts
from rehearsal.model import NO_HOST, Group, Model, Record, Times
from stacks.jobs.keeper import cluster, kept
from tests.aws.account import stamp
from tests.aws.s3 import NAME
from tests.simulation.account import DAY_S, MACHINE, Account, Execution, name_of
from tests.simulation.market import PLENTY, Market
from tests.simulation.world import BEGAN, World
from trainctl.aws import jobs
from trainctl.aws.errors import CliError
from trainctl.aws.jobs import Jobs
from trainctl.aws.tasks import Task
from trainctl.jobs import pricing
from trainctl.watch import follow, polling
from training.record.goodput import Recorder, goodput

HOURS: Final = 10
#: Nothing goes wrong any more after so many; the rest is for what must come of it.
QUIET_AFTER_H: Final = 5
FAULTS_UNTIL_H: Final = 4
FAMILIES: Final = {
    "for-heads": "head",
    "for-workers": "worker",
    "cp-S-pool-l4": "worker",
    "cp-S-pool-spot": "worker",
}
#: Pools of jobs: most have one, some others to go to.
POOLS: Final = (
    (),
    (),
    ("l4",),
    ("l4", "default"),
    ("default", "l4"),
    ("spot", "default"),
    ("spot", "l4", "default"),
)
PROVIDERS: Final = {"default": "for-workers", "l4": "cp-S-pool-l4", "spot": "cp-S-pool-spot"}
TAGS: Final = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER, TAG_RAY_USER_NODE_TYPE: WORKER}
WORKERS: Final = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER}
#: EC2's sentences where it starts no host; to wait for what the first two say may help.
SHORT: Final = (
    "We currently do not have sufficient g5.xlarge capacity in the Availability Zone you requested "
    "(us-east-1a). Launching EC2 instance failed.",
    "You have requested more vCPU capacity than your current vCPU limit of 8 allows for the "
    "instance bucket that the specified instance type belongs to. Launching EC2 instance failed.",
    "You have requested more vCPU capacity than your current vCPU limit of 0 allows for the "
    "instance bucket that the specified instance type belongs to. Launching EC2 instance failed.",
    "You are not authorized to perform this operation. Launching EC2 instance failed.",
)
#: Between two looks of a head; always Ray's five seconds would take four times as long.
TICKS_S: Final = (5.0, 20.0, 40.0)
#: The same in a life of days, unless something happens.
LONG_TICK_S: Final = 1800.0
#: The same for a head whose hosts are held.
HELD_TICK_S: Final = 20.0
#: Of lives that have one more fault, of the rare ones.
RARE_SHARE: Final = 0.5
#: Of lives in which EC2 has now many hosts and now none, as it has had in zones of its own.
MARKET_SHARE: Final = 0.4


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What a job's command does, if it is let."""

    seconds: float
    code: int


#: Returns the jobs that it happens to; None: there is nothing that it could happen to.
Fault = Callable[["Life"], list[Execution] | None]


class Groups(dict[str, str]):
    """Capacity providers by group, of a keeper that may have begun before a deploy."""

    def __missing__(self, group: str) -> str:
        return group.removeprefix("group-")


class Clock:
    """The clock of the keeper, which may be off by minutes."""

    def __init__(self, account: Account) -> None:
        self._account, self._world = account, account.world
        self.monotonic, self.sleep = self._world.time, self._world.sleep

    def time(self) -> float:
        return self._world.now + self._account.skew_s


class Life:
    """One deployment, from its first job until nothing may be left."""

    def __init__(
        self,
        seed: int,
        *,
        states: Record,
        keeper: ModuleType,
        faults: Sequence[Fault],
        rare: Sequence[Fault],
        long: Mapping[Fault, float],
    ) -> None:
        """
        Args:
            rare: faults of which a life has one at most.
            long: those that take days, and for how many the first job trains then.
        """
        world = self.world = World(seed)
        self.chance: Random = world.random
        self.max_heads, self.max_workers = self.chance.randint(1, 3), self.chance.randint(1, 4)
        self.sizes = dict.fromkeys(FAMILIES, self.max_workers) | {"for-heads": self.max_heads}
        self.folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, self.folder)
        self.is_exact = False
        """EventBridge loses no event."""
        self._offers = dict.fromkeys(FAMILIES, PLENTY)
        self._markets: list[Market] = []
        self._short_until = dict.fromkeys(FAMILIES, 0.0)
        self._sentences = dict.fromkeys(FAMILIES, SHORT[0])
        self._fates: dict[str, list[str]] = {provider: [] for provider in FAMILIES}
        self.model = Model(
            (
                Group(
                    record={
                        "AutoScalingGroupName": f"group-{provider}",
                        "DesiredCapacity": 0,
                        "MaxSize": most,
                    },
                    provider=provider,
                    cluster="arn:aws:ecs:us-east-1:1:cluster/c",
                )
                for provider, most in self.sizes.items()
            ),
            self,
            now=world.time,
            after=world.after,
            random=self.chance,
            times=Times(
                places=self.chance.choice([1, 1, 40]), suspends=self.chance.choice([1800, 86_400])
            ),
            stamp=stamp,
            refusal=self._refusal,
            fate=self._fate,
        )
        self.account = Account(
            world, self.model, states=states, keeper=keeper, families={**FAMILIES}
        )
        self.providers = dict(PROVIDERS)
        """Of pools, as they were deployed last."""
        self._deploys = [(0.0, self.providers)]
        self.account.records.renew = self._renew
        user: Any = self.account.client("user")
        clients: Any = SimpleNamespace(ecs=user, stepfunctions=user)
        self.jobs = Jobs(clients, machine=MACHINE, cluster="c", task_events="")
        self.pairs: Counter[tuple[str, str]] = Counter()
        """Of a fault and the state of the job that it hit."""
        self._ambushes: list[tuple[str, Fault]] = []
        """What happens when a job next comes to a state."""
        self.num_faults = 0
        self.programs: dict[str, Program] = {}
        self.heads: dict[str, Head] = {}
        self.own: dict[str, int] = {}
        """Of heads: how their command has ended by itself."""
        self.recorders: dict[str, Recorder] = {}
        """Of the activity of each job."""
        self._faults = faults
        self._rare = self.chance.choice(rare) if self.chance.random() < RARE_SHARE else None
        self._days = long.get(self._rare, 0) if self._rare else 0
        self.is_long = self._days > 0
        self.hours, self.calm_h = (100, 80) if self.is_long else (HOURS, QUIET_AFTER_H)
        self.account.skips = self.is_long
        if self.is_long:  # a day has many minutes
            self.model.times = replace(self.model.times, scales=300)
        self.account.least_workers = self.max_workers
        self.users = Random(f"users {seed}")  # of their own, as those of holds below
        self.limits = Limits(
            max_heads=self.max_heads,
            max_workers=self.max_workers,
            max_jobs_per_user=self.users.choice([0, 1, 2]),
            pools={"l4": self.max_workers, "spot": self.max_workers},
        )
        self._refused_at = dict.fromkeys(FAMILIES, 0.0)

    # --- deploys
    def add_group(self, provider: str, most: int) -> None:
        """A group and capacity provider of workers, beside those that are there."""
        like, cluster = PROVIDERS["l4"], self.model.groups["for-workers"].cluster
        tables: list[dict[str, Any]]
        tables = [self.sizes, self._offers, self._short_until, self._sentences]
        for known in tables:
            known[provider] = known[like]
        self._fates[provider], self._refused_at[provider] = [], 0.0
        name = f"group-{provider}"
        record = {"AutoScalingGroupName": name, "DesiredCapacity": 0, "MaxSize": most}
        self.account.families[provider] = "worker"
        self.model.add(Group(record=record, provider=provider, cluster=cluster))

    def deploy(self, providers: dict[str, str]) -> None:
        """Deploy pools with these capacity providers: the keeper has others from now on, and so
        have executions that begin; the others keep what they began with."""
        self.providers = providers
        self._deploys.append((self.world.now, providers))
        self.account.deployed_at = self.world.now
        pools = {each: self.max_workers for each in providers if each != "default"}
        own = {
            "PLACES": {each: providers[each].removeprefix("cp-S-pool-") for each in pools},
            "POOLS": pools,
            "GROUPS": Groups(
                (f"group-{each}", each)
                for each in ("for-heads", "for-workers", *providers.values())
            ),
        }
        keeper = self.account.keeper
        for module in (keeper, cluster):
            vars(module).update(own)
        vars(keeper)["LIMITS"] = replace(keeper.LIMITS, pools=pools)

    def providers_of(self, job: Execution) -> dict[str, str]:
        """Capacity providers by pools, as the execution's own definition has them."""
        return next(each for at, each in reversed(self._deploys) if at <= job.began)

    # --- what EC2 has
    def _refusal(self, group: Group) -> str:
        is_short = self.world.now < self._short_until[group.provider]
        is_short |= group.there >= self._offers[group.provider]
        # EventBridge tells of it, as a rule; of each retry, which are too many to be played here.
        if is_short and self.world.now - self._refused_at[group.provider] > 120:
            self._refused_at[group.provider] = self.world.now
            is_told = not self.is_long and self.chance.random() < (0.8, 1)[self.is_exact]
            event = {"detail-type": "EC2 Instance Launch Unsuccessful"}
            if is_told:
                self.world.after(self.chance.uniform(1, 20), self.account.notify, event)
        return self._sentences[group.provider] if is_short else ""

    def shorten(self, provider: str, seconds: float, sentence: str = SHORT[0]) -> None:
        """EC2 has no host for a group for so long, if it is not for longer already."""
        until = self.world.now + seconds
        if until > self._short_until[provider]:
            self.account.refused_at = self.world.now
            self._short_until[provider], self._sentences[provider] = until, sentence

    def offer(self, provider: str, number: int) -> None:
        """EC2 has so many hosts for a group, those that are there among them."""
        self._offers[provider] = number
        self.account.refused_at = self.world.now

    def _fate(self, group: Group) -> str:
        planned = self._fates[group.provider]
        return planned.pop() if planned else ""

    # --- containers
    def pull(self, task: Record) -> None:
        self._check_fit(task)
        self._check_taken(task)
        task["pullStartedAt"] = stamp(self.world.now)
        seconds = self.chance.uniform(*self.model.times.starts)
        self.world.after(seconds, self.model.begin, task)

    def start(self, task: Record) -> None:
        task.pop("_placed_at", None)
        host = self.model.hosts[task["containerInstanceArn"]]
        if host["_fate"] == "bad":
            self.world.after(5, self.model.end, task, exits.BAD_HOST)
        elif keeper_of(task):
            pass
        elif task["_family"] == "head":
            head = self.heads[task["taskArn"]] = Head(self, task)
            head.process = self.world.spawn(head.run)
        else:
            task["_joins"] = self.world.now + self.chance.uniform(5, 40)

    def _check_taken(self, task: Record) -> None:
        """A host that was kept goes to its user's next job."""
        before = self.model.hosts[task["containerInstanceArn"]]["_tasks"][:-1]
        last = before[-1] if before else {}
        if not keeper_of(last) or "next job" not in last["stoppedReason"]:
            return
        job, own = self.account.job_of(task), self.account.executions[keeper_of(last)]
        if job is None:
            return
        self.world.happened["kept host taken by the next job"] += job.user == own.user
        # One that did not wait yet when the host was freed may be quicker.
        is_later = task["createdAt"].timestamp() > last["_told_at"] - self.model.times.shows - 10
        if job.user != own.user and not is_later:
            self.world.blame(f"{name_of(task)} takes a host that is kept for {own.user}")

    def _check_fit(self, task: Record) -> None:
        """Once the keeper was told that a host is bad, no task comes to it."""
        host, failed = self.model.hosts[task["containerInstanceArn"]], self.account.failed_at
        if host["_fate"] != "bad" or self.world.happened["fault: aws is in trouble"]:
            return
        for each in [each for each in host["_tasks"] if "stoppedAt" in each]:
            job, at = self.account.job_of(each), each["stoppedAt"].timestamp()
            head = self.heads.get(job.head["taskArn"]) if job and job.head else None
            # A head that has been there for a while has seen its workers.
            is_seen = head and head.is_alive and head.task["startedAt"].timestamp() < at - 120
            is_told = job and job.status == "RUNNING" and (each in job.heard or is_seen)
            if is_told and failed < at < self.world.now - 90:
                self.world.blame(f"{name_of(task)} comes to {host['ec2InstanceId']}, which is bad")

    def terminate(self, task: Record) -> None:
        if "_hangs_since" in task or "_is_stuck" in task:
            return  # it hears nothing, and is killed in the end, if it can be
        if head := self.heads.get(task["taskArn"]):
            head.is_stopped = True
            head.wake()
        elif self.chance.random() > 0.05:  # else it hears nothing, and is killed in the end
            self.world.after(self.chance.choice([1, 5, 30, 110]), self.model.end, task, 143)

    def kill(self, task: Record) -> None:
        if head := self.heads.get(task["taskArn"]):
            head.process.is_dead = True
            self.forsake(head)

    def ended(self, task: Record) -> None:
        if hear := task.pop("_hear", None):
            hear()
        for head in self.heads.values() if self.is_long else ():
            if head.job.name == task["startedBy"]:
                head.wake()

    def _renew(self, key: str) -> None:
        """Write what the head of a job would have reported last."""
        job, s3, now = (
            key.rpartition("/")[2].removesuffix(".life"),
            self.account.records,
            self.world.now,
        )
        heads = [each for each in self.heads.values() if each.job.name == job]
        if heads:
            head = heads[-1]
            # It reports again some time after S3 does.
            is_late = now < s3.up_at + times.HEAD_REPORTS_S
            if is_late and s3.down_at < head.began:
                return  # it could not report yet
            gone_at = self.account.gone.get(head.task["taskArn"], now)
            at = min(gone_at, s3.down_at if is_late else now - self.chance.uniform(0, 59))
            life = HeadLife(at=max(at, head.began), is_complete=head.job.goes_on)
            s3.objects[key] = life.to_json().encode()

    def forsake(self, head: "Head") -> None:
        """Workers end by themselves when their head is gone, but for those that hang."""
        self.account.gone.setdefault(head.task["taskArn"], self.world.now)
        for task in self.model.tasks.values():
            is_own = task["_family"] == "worker" and task["startedBy"] == head.job.name
            if is_own and self.chance.random() > 0.1:
                seconds = times.RAY_RECONNECT_S + self.chance.uniform(0, 30)
                self.world.after(seconds, self._end_alone, task)

    def _end_alone(self, task: Record) -> None:
        heads = [each for each in self.heads.values() if each.job.name == task["startedBy"]]
        is_stuck = "_is_stuck" in task and task["desiredStatus"] == "STOPPED"
        is_there = task["lastStatus"] == "RUNNING" and not is_stuck
        if is_there and not any(each.is_alive for each in heads):
            self.model.end(task, 1)

    # --- what happens
    def plan(self) -> None:
        """Two to five jobs, and at least three faults."""
        world, chance = self.world, self.chance
        world.after(chance.uniform(0, times.SWEEP_EVERY_S), self.account.sweep)
        # Of their own: without one, a life stays as it was.
        holds, pools = Random(f"holds {world.seed}"), Random(f"pools {world.seed}")
        levels = Random(f"priorities {world.seed}")
        keeps = Random(f"keeps {world.seed}")
        together = Random(f"together {world.seed}")
        market = Random(f"market {world.seed}")
        has_market = not self.is_long and market.random() < MARKET_SHARE
        submits: list[float] = []
        latest = chance.choice([9000, FAULTS_UNTIL_H * 3600])
        for number in range(chance.randint(2, 5)):
            name = f"r{number}-bado-kilo"  # as trainctl.aws.jobs.new_id makes them
            low = chance.randint(0, min(2, self.max_workers))
            high = chance.randint(low, self.max_workers)
            is_long = self.is_long and not number
            spec = JobSpec(
                run=f"r{number}",
                command=("x",),
                nodes=Range(low, high),
                recipe=chance.choice(["", "ddp"]),
                on=Placement.HEAD,
                max_seconds=4 * DAY_S if is_long else chance.choice([1500, 9000, 12000]),
                capacity_wait_s=3 * DAY_S if is_long else chance.choice([300, 1800, 7200]),
                hold_s=holds.choice([0, 0, 600, 1800]),
                notify="anna@example.com",
                submitter=self.users.choice(["anna", "bert"]),
                pools=pools.choice(POOLS[-2:] if has_market else POOLS),
                priority=levels.choice([*Priority]),
                keep_s=keeps.choice([0, 0, 1200, 3600]),
            )
            spec = replace(spec, user_id=spec.submitter)
            program = Program(
                seconds=self._days * DAY_S if is_long else chance.choice([60, 600, 3000]),
                code=0 if is_long else chance.choice([0, 0, 0, 1, 3, exits.KILLED, exits.BAD_HOST]),
            )
            at = (
                0
                if is_long
                else chance.choice([0, chance.uniform(0, 600), chance.uniform(0, latest)])
            )
            earlier = [each for each, then in enumerate(submits) if then < at - 60]
            if earlier and keeps.random() < 0.2:
                other = f"r{keeps.choice(earlier)}"
                goes_with = together.random() < 0.5
                spec = replace(spec, after=f"{other}-bado-kilo", with_run=other * goes_with)
            submits.append(at)
            self.programs[name] = program
            if len(spec.pools) > 1 and pools.random() < 0.5:  # EC2 is short where it starts
                first, seconds = PROVIDERS[spec.pools[0]], pools.choice([900, 5000])
                world.after(at, self.shorten, first, seconds)
            world.after(at, world.spawn, self.submit, name, spec)
        if has_market:
            for provider in [*FAMILIES][1:]:
                is_spot = provider == PROVIDERS["spot"]
                self._markets.append(Market(self, provider, market, is_spot=is_spot))
        self.account.on_state = self._ambush
        for _ in range(2 if self.is_long else chance.randint(3, 8)):
            fault = chance.choice(self._faults)
            if chance.random() < 0.4:  # while something short goes on
                self._ambushes.append((chance.choice(["CleanUp", "Head", "Pause", "Queue"]), fault))
            else:
                # Most come while there is a job.
                at = chance.choice(submits) + chance.expovariate(1 / 1200)
                world.after(at, self._befall, fault)
        if self._rare:
            at = chance.choice([0, chance.choice(submits)]) + chance.expovariate(1 / 1200)
            world.after(0 if self.is_long else at, self._befall, self._rare)
        world.after(self.calm_h * 3600, self._calm_down)

    def submit(self, job: str, spec: JobSpec) -> None:
        """As ``trainctl submit``; its user tries again."""
        while True:
            try:
                return self.jobs.start(job, spec)
            except ClientError:  # it was started, and has ended since
                return None
            except BotoCoreError:
                self.world.sleep(60)

    def stop(self, name: str) -> None:
        """As ``trainctl stop``."""
        trainctl: Any = SimpleNamespace(jobs=self.jobs, is_local=False)
        job = None
        try:
            job = self.jobs.find(name)
            self.account.executions[name].is_ending = True
            self.jobs.stop(job)
            follow.wait_until_gone(trainctl, name)
        except (CliError, ClientError, BotoCoreError) as error:
            self.world.tell(f"trainctl stop {name}: {error}")
            # Of which the sweep takes the host, later than the command waits.
            names = ("agent", "no attributes", "docker", "carried", "s3 does not answer")
            is_deaf = any(each in name for each in names for name in self.world.happened)
            if job and not self._has_trouble and not is_deaf:
                self.world.blame("trainctl stop fails")

    def _ambush(self, state: str) -> None:
        for each in [each for each in self._ambushes if each[0] == state]:
            self._ambushes.remove(each)
            self.world.after(self.chance.uniform(0, 4), self._befall, each[1])

    def _befall(self, fault: "Fault") -> None:
        world, name = self.world, fault.__name__.replace("_", " ")
        seen = {job.name: self.state_of(job) for job in self.account.executions.values()}
        if (hit := fault(self)) is not None:
            self.num_faults += 1
            world.happened[f"fault: {name}"] += 1
            states = [seen.get(job.name, "submitted") for job in hit] or ["no job"]
            self.pairs.update((name, state) for state in states)
            world.tell(f"fault: {name} ({', '.join(job.name for job in hit)})")
        elif world.now < BEGAN + FAULTS_UNTIL_H * 3600:  # there was nothing that it could hit
            world.after(self.chance.uniform(60, 1200), self._befall, fault)
        else:
            self._befall(self.chance.choice(self._faults))

    def _calm_down(self) -> None:
        for _, fault in self._ambushes:  # no job came to that state
            self._befall(fault)
        self._ambushes.clear()
        self.account.is_faulty = False
        self.account.calm_at = self.world.now
        self.account.is_broken, self.account.trouble = False, 0.01
        self.account.records.set_down(is_down=False)
        self.resume_launches()
        for each in self._markets:
            each.is_over = True
        self._offers = dict.fromkeys(self._offers, PLENTY)
        self._short_until = dict.fromkeys(self._short_until, 0.0)
        for planned in self._fates.values():
            planned.clear()

    def resume_launches(self) -> None:
        """As a person does, who has suspended them."""
        for group in self.model.groups.values():
            found = group.record.get("SuspendedProcesses", [])
            if any(each["SuspensionReason"].startswith("User") for each in found):
                del group.record["SuspendedProcesses"]
                self.model.fill(group)

    def any_host(self) -> Record | None:
        hosts = [host for host in self.model.hosts.values() if not host["_leaves"]]
        return self.chance.choice(hosts) if hosts else None

    def on(self, host: Record) -> list[Execution]:
        """Jobs with a task on a host."""
        jobs = [self.account.job_of(task) for task in self.model.on(host)]
        return [job for job in jobs if job]

    def running(self) -> list[Execution]:
        return [job for job in self.account.executions.values() if job.status == "RUNNING"]

    @property
    def is_over(self) -> bool:
        """Whether sweeps have had the time to end what the last job has left."""
        ends = [
            (job.ended or self.world.now) + (job.spec.keep_s if job.spec else 0)
            for job in self.account.executions.values()
        ]
        left = times.SLOW_HOST_JOINS_S if self.is_slow else times.HOST_JOINS_S
        last = max([*ends, self.account.due])
        return last < self.world.now - left - 2 * times.SWEEP_EVERY_S - self.account.slack_s

    @property
    def is_slow(self) -> bool:
        return self.account.instance_type != "g5.xlarge"

    def state_of(self, job: Execution) -> str:
        """Where a job is: in the state machine, and at its head."""
        if job.status != "RUNNING":
            return "over"
        if job.at != "Head" or job.head is None:
            return job.at
        head = self.heads.get(job.head["taskArn"])
        status = job.head["lastStatus"].lower()
        return f"Head {head.at if head and status == 'running' else status}"

    def story(self) -> str:
        """All that happened, with hours, minutes and seconds since the beginning."""
        lines = [*self.world.history]
        for task in self.model.tasks.values():
            name = name_of(task)
            if "startedAt" in task:
                where = f"i-{task['containerInstanceArn'][-6:]}"
                lines.append((task["startedAt"].timestamp(), f"{name} starts on {where}"))
            if "stoppedAt" in task:
                code = task["containers"][0].get("exitCode")
                how = task["stoppedReason"] if code is None else f"exit code {code}"
                lines.append((task["stoppedAt"].timestamp(), f"{name} has ended: {how}"))
        return "\n".join(
            f"{timedelta(seconds=int(at - BEGAN))} {what}"
            for at, what in sorted(lines, key=lambda line: line[0])
        )

    # --- what must hold in the end
    def check(self) -> None:
        world, model = self.world, self.model
        if len(self.account.executions) < 2 or self.num_faults < 3:
            world.blame("there is nothing to be seen in this life")
        for job in self.account.executions.values():
            self._check_job(job)
            self._check_goodput(job)
        for task in model.tasks.values():
            if task["lastStatus"] != "STOPPED":
                world.blame(f"{name_of(task)} is left: {task['lastStatus']}")
            drained = task["stoppedAt"].timestamp() - task.get("_drains_since", float("inf"))
            world.happened["host drained for two days below a task"] += drained >= 2 * DAY_S
        # At most, as ``trainctl.jobs.pricing`` has it; each start of a head may find no host there.
        most = sum(
            (1 + job.granted.high) * (job.ended - job.admitted_at + times.JOB_TAIL_S)
            + 2 * max(1, job.num_starts) * times.SURPLUS_HOST_S
            + (1 + job.granted.high) * kept_s(job)
            for job in self.account.executions.values()
            if job.admitted_at
        )
        if self.account.billed_s > most:
            world.blame(f"hosts cost {self.account.billed_s:.0f} s, and {most:.0f} s at most")
        for group in model.groups.values():
            if group.instances:
                world.blame(f"hosts are left: {', '.join(group.instances)}")
            if group.desired:
                world.blame(f"{group.name} asks for {group.desired}")

    def _check_job(self, job: Execution) -> None:
        world = self.world
        record = self.account.s3.objects.get(job.record)
        if job.status == "RUNNING":
            world.blame(f"{job.name} never ends")
            return
        if job.spec is None:
            if job.heads:
                world.blame(f"{job.name} has a head, and its order is not understood")
            return
        if record is None:
            world.blame(f"{job.name} has no record")
            return
        written = json.loads(record)
        is_lost = f"{written['status']}: {job.name}" in self.account.unanswered
        is_told = job.name in self.account.mailed or not job.spec.notify
        if not (is_told or is_lost):
            world.blame(f"nobody hears of the end of {job.name}")
        if job.is_redriven:  # its record is that of its first end (docs/jobs.md)
            return
        world.happened[f"job {written['status']}"] += 1
        if job.status == "ABORTED":
            head = job.head or {}
            # What came after its head had ended does not change how it ended.
            has_ended = "stoppedAt" in head and head["stoppedAt"].timestamp() < job.ended
            has_ended = has_ended or (not head and job.at == "CleanUp")  # AWS has started none
            is_late = has_ended or self.account.s3.modified[job.record].timestamp() < job.ended
            if job.error == STOP_ERROR and not is_late and written["reason"] != STOPPED_BY_USER:
                world.blame(f"{job.name} was stopped by its user: {written['reason']}")
            return
        result = JobStatus.SUCCEEDED if job.status == "SUCCEEDED" else job.error
        if result == "Lambda.Unknown":
            world.blame(f"{job.name} ends in {job.at} because the keeper has failed")
            return
        may_wait = job.nodes.low <= self.account.least_workers
        may_wait &= all({*job.spec.ladder} <= each.keys() for _, each in self._deploys)
        other = self.account.executions.get(job.spec.after)
        may_follow = not job.spec.after or (
            other and (not other.ended if job.spec.with_run else other.status == "SUCCEEDED")
        )
        world.happened["job failed as the one before it had"] += not may_follow
        if not may_follow and written["status"] == JobStatus.FAILED and not job.num_starts:
            return
        begins = (other.admitted_at if job.spec.with_run else other.ended) if other else 0
        is_late = job.spec.with_run and other and 0 < other.ended < job.admitted_at - 300
        if job.num_starts and other and (is_late or not 0 < begins < job.admitted_at):
            world.blame(f"{job.name} does not wait for {other.name}")
        if not job.num_starts and may_wait:
            world.blame(f"{job.name} ends before its turn: {written['reason']}")
        if written["status"] != result:
            world.blame(f"{job.name} is {result}, and its record says {written['status']}")
        tasks, own = self.model.tasks, (f"job:{job.name}", "head")
        heads = [each for each in tasks.values() if (each["group"], each["_family"]) == own]
        least = sum("startedAt" in each for each in heads)
        if job.hold in self.account.unanswered:
            # A clean-up that read the hold wrote the record, and its answer was lost; the next try
            # could not read it, and began another attempt.
            least = min(least, 1)
        reasons = [tasks[arn].get("stoppedReason") for _, arn in job.heads]
        # The last one may be over because of the deadline, and not for want of a host.
        most = job.num_starts - reasons[:-1].count(NO_HOST[1])
        attempts = written["attempts"]
        if attempts is not None and not least <= attempts <= most:
            world.blame(f"{job.name}: {attempts} attempts are not {least} to {most}")
        in_a_row, is_ladder = 0, len(job.spec.pools) > 1
        for head in job.heard:
            seconds = (head["stoppedAt"] - head["startedAt"]).total_seconds()
            in_a_row = 1 if seconds > times.LONG_RUN_S else in_a_row + 1
            code, why = head["containers"][0].get("exitCode"), head["stoppedReason"]
            was_killed = code == exits.KILLED
            if is_ladder and (code == exits.NO_CAPACITY or why.startswith("[no_capacity]")):
                in_a_row -= 1  # it had no hosts
            by_itself = head["stopCode"] == "EssentialContainerExited"
            is_last = job.heads[-1][0] < head["stoppedAt"].timestamp()
            if was_killed and by_itself and in_a_row >= job_outcome.MOST_IN_VAIN and not is_last:
                world.blame(f"{job.name} is started again although {name_of(head)} was killed")
        waited = job.ended - (job.admitted_at or job.ended)
        in_vain = is_in_vain(written["reason"])
        world.happened["job ended as waiting is in vain"] += in_vain
        is_early = waited + self.account.slack_s < job.patience_s and not job.is_old
        if result == JobStatus.NO_CAPACITY and is_early and not in_vain:
            world.blame(f"{job.name} ends for want of capacity after {waited:.0f} s")
        self._check_cause(job, written)

    def _check_goodput(self, job: Execution) -> None:
        """A job that has trained has a share of its paid time, and no other job has one."""
        own = [each for each in self.model.tasks.values() if each["group"] == f"job:{job.name}"]
        tasks: list[Any] = own
        kinds = {"head": JOB, "worker": WORKER}
        paid = pricing.paid_of(
            [Task.from_ecs(kinds[each["_family"]], each) for each in tasks], now=stamp(0)
        )
        assert paid is not None
        activity = self.recorders.get(job.name, Recorder()).activity
        found = goodput(paid, activity)
        has_stepped = any(each.stepped for each in activity.segments)
        if (found is not None) != has_stepped or not 0 <= (found or 0) <= 1:
            self.world.blame(f"{job.name} has trained, or not: {found}")
        self.world.happened["hosts paid for training"] += bool(found)

    @property
    def _has_trouble(self) -> bool:
        """Whether the keeper may have been kept from its work."""
        names = ("keeper killed", "fault: aws is in trouble", "fault: keeper is broken")
        return any(self.world.happened[name] for name in names)

    def _check_cause(self, job: Execution, written: Record) -> None:
        """What is said is what happened: the status is a function of the last head's end."""
        head = job.head
        if head is None or head["lastStatus"] != "STOPPED":
            return
        code, deadline = head["containers"][0].get("exitCode"), deadline_of(head, default=0)
        ended = head["stoppedAt"].timestamp()
        expected = {
            exits.OK: JobStatus.SUCCEEDED,
            1: JobStatus.FAILED,
            3: JobStatus.FAILED,
            exits.DEADLINE: JobStatus.DEADLINE,
            exits.NO_CAPACITY: JobStatus.NO_CAPACITY,
        }.get(code)
        if code != exits.KILLED and (own := self.own.get(head["taskArn"])) is not None:
            is_recipe = bool(JobSpec.from_json(job.order).recipe)
            if own in (exits.OK, 1, 3, exits.KILLED) or not is_recipe:
                expected = JobStatus.FAILED if own else JobStatus.SUCCEEDED
        ended_by_itself = head["stopCode"] == "EssentialContainerExited" and ended < deadline
        is_held = self.account.hold_of(job) is not None
        if (
            not is_held
            and ended > deadline + 1
            and code != exits.OK
            and written["status"] != JobStatus.DEADLINE
        ):
            self.world.blame(f"{job.name} goes on after its deadline, and is {written['status']}")
        if expected and ended_by_itself and written["status"] != expected:
            early = f"{deadline - ended:.0f} s before the deadline"
            said = written["status"]
            self.world.blame(f"{job.name}: exit code {code} {early} is told as {said}")
        if hold := self.account.hold_of(job):
            is_unread = job.hold in self.account.unanswered
            if is_unread and job.heads[-1][0] > hold.since:  # S3 did not answer its clean-up
                self.world.happened["job tried again because its hold could not be read"] += 1
                return
            if job.heads[-1][0] > hold.since:
                self.world.blame(f"{job.name} is tried again after its hosts were held")
            if written["status"] != JobStatus.FAILED or written["exit_code"] != hold.code:
                self.world.blame(f"{job.name} was held, and is told as {written}")
            return
        if code == exits.KILLED and written["status"] == JobStatus.FAILED:
            self.world.blame(f"{job.name} is not tried again after its head was killed")


def kept_s(job: Execution) -> float:
    """Seconds for which a job may keep a host at most."""
    keep_s = job.spec.keep_s if job.spec else 0
    return keep_s + times.KEEP_STARTS_S + 2 * times.SWEEP_EVERY_S if keep_s else 0


def definition_in(pool: str) -> str:
    """ARN of the task definition of workers in a pool."""
    family = "worker" if pool == DEFAULT_POOL else pool_hosts("S", pool)
    return f"arn:x:task-definition/{family}:3"


class Head:
    """The head of a job: the real provider and decisions, between them what stands for Ray."""

    def __init__(self, life: Life, task: Record) -> None:
        self.life, self.task, self.world = life, task, life.world
        job = life.account.job_of(task)
        assert job is not None
        self.job = job
        self.is_stopped = False
        self.began = self.world.now
        self.wake: Callable[[], None] = lambda: None
        self.at = "starts"
        self.process: Any = None
        self.spec = JobSpec.from_json(env_override(task, ENV_JOB_SPEC) or "")
        client: Any = life.account.client(f"head of {job.name}")
        self._client = client
        config: autoscaler.ProviderConfig = {
            "cluster": "c",
            "job": job.name,
            "tags": self.spec.tags(job.name),
            "head": task["taskArn"],
            "task_definition": definition_in(self.spec.ladder[0]),
            "capacity_provider": life.providers_of(job).get(self.spec.ladder[0], "gone"),
            "keeper": "keeper",
            "subnets": [],
            "security_groups": [],
            "environment": {},
            "first": f"{life.folder}/{task['taskArn'].rpartition('/')[2]}",
        }
        # One starts the first nodes while Ray starts, and Ray's own one takes them over.
        self.first, self.provider = (
            EcsNodeProvider(
                config, job.name, ecs=client, functions=client, clock=life.world.monotonic
            )
            for _ in range(2)
        )

    @property
    def is_alive(self) -> bool:
        return self.task["lastStatus"] == "RUNNING" and not self.process.is_dead

    def run(self) -> None:
        world, life = self.world, self.life
        with contextlib.suppress(ClientError, BotoCoreError, NodeLaunchException):
            self.first.start_first(self.spec.nodes.low)
        world.sleep(life.chance.uniform(5, 30))  # Ray starts
        deadline = deadline_of(self.task, default=0)
        decisions = Decisions(self.spec, deadline, world.now)
        patience = self.spec.capacity_wait_s if self.spec.recipe else float("inf")
        code: int | None = None
        program = life.programs[self.job.name]
        left, looked = program.seconds, world.now
        short_since: float | None = None
        recorder = Recorder(life.recorders.get(self.job.name, Recorder()).activity)
        life.recorders[self.job.name] = recorder
        trains, is_told, step = False, False, 0
        steady_since, was_at = short_since, ""
        while code is None:
            tick = life.chance.choice(TICKS_S)
            if life.is_long and steady_since and world.now - steady_since > 3600:
                world.wait(self._register, LONG_TICK_S)
                life.programs[self.job.name] = replace(program, seconds=max(60, left))
            else:
                world.sleep(tick)
            there = self._reconcile()
            found = decisions.decide(
                Observation(
                    now=world.now,
                    monotonic=world.now,
                    num_workers=there,
                    is_stopped=self.is_stopped,
                    is_alone=self._is_alone(),
                )
            )
            is_short = there < self.spec.nodes.low
            short_since = (short_since or world.now) if is_short else None
            self.at = "lacks nodes" if is_short else "trains"
            steady_since = None if self.at != was_at else steady_since or world.now
            was_at = self.at
            if not is_short:
                life.account.trained[self.job.name] = world.now
            # A recipe waits for nodes that it has lost, and a program goes on without them.
            if not is_short or (left < program.seconds and not self.spec.recipe):
                left -= world.now - looked
            looked = world.now
            # A program loses what it did in the last ten minutes before it lacked a node.
            if not is_short and not trains:
                step = 0
                recorder.begin(world.now, resumes=world.now - 600)
            elif not is_short:
                step += 1
                recorder.step(world.now, step)
            trains = not is_short
            is_told = found is not None
            is_program = not (self.spec.recipe or self.spec.on == Placement.NODES)
            self.job.goes_on = is_program and decisions.capacity_at is not None
            if found:
                code = found[0]
                world.tell(f"head of {self.job.name}: {found[1]}")
            elif world.now > deadline:
                world.blame(f"head of {self.job.name} goes on after its deadline")
            elif short_since and world.now - short_since > patience:
                world.blame(f"head of {self.job.name} waits for ever")
            elif self.spec.recipe and life.account.s3.is_down and life.chance.random() < 0.02:
                code = exits.STORAGE  # it cannot save
            elif left < 0:
                code, _ = decisions.exit_code(program.code)
                life.own[self.task["taskArn"]] = program.code
        if code == exits.KILLED:
            world.blame(f"head of {self.job.name} ends by itself as if it were killed")
        self.at = "saves"
        world.sleep(life.chance.uniform(1, 60))  # it saves
        if not (is_told or self.is_stopped):
            self._hold(decisions, code)
        if not self.spec.keep_s:
            self._release()
        life.model.end(self.task, code)
        life.forsake(self)

    def _is_alone(self) -> bool:
        """True once the job that it goes with has ended, as its head reads in the bucket."""
        end = runs.job_record(self.spec.with_run or "r", self.spec.after)
        is_alone = bool(self.spec.with_run) and end in self.life.account.s3.objects
        self.world.happened["job ended with another"] += is_alone
        return is_alone

    def _hold(self, decisions: Decisions, code: int) -> None:
        world, spec = self.world, self.spec
        hold = decisions.hold(code, world.now)
        if hold is None:
            return
        key = runs.job_hold(spec.run, self.job.name)
        try:
            self._client.put_object(Bucket=NAME, Key=key, Body=hold.to_json().encode())
        except (ClientError, BotoCoreError):
            return
        self.at = "holds"
        world.happened["hosts held"] += 1
        is_deaf = self.life.chance.random() < 0.2  # a head that does not end it
        world.happened["hosts held by a head that does not end that"] += is_deaf
        until = float("inf") if is_deaf else hold.until
        while world.now < until and not self.is_stopped:
            world.wait(self._register, min(HELD_TICK_S, until - world.now))
            # Ray's autoscaler still looks at its nodes; it asks for no others.
            with contextlib.suppress(ClientError, BotoCoreError):
                self._nodes()

    def _register(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def _nodes(self) -> list[str]:
        return self.provider.non_terminated_nodes(WORKERS)

    def _reconcile(self) -> int:
        """As Ray's autoscaler: what is missing is asked for. Returns how many have joined."""
        try:
            nodes = self._nodes()
            tasks = self.life.model.tasks
            # Ray ends a node that does not answer it (its autoscaler's reconciler).
            if dead := [each for each in nodes if "_is_unnoticed" in tasks[each]]:
                self.provider.terminate_nodes(dead)
                nodes = [each for each in nodes if each not in dead]
            if (missing := self.spec.nodes.high - len(nodes)) > 0:
                self.provider.create_node({}, TAGS, missing)
            elif missing < 0:
                self.provider.terminate_nodes(nodes[self.spec.nodes.high :])
        except (ClientError, BotoCoreError, NodeLaunchException) as error:
            self.world.tell(f"head of {self.job.name}: {error!r:.100}")
        own = [self.life.model.tasks[arn] for arn in self.provider._tasks]
        return sum(
            each["lastStatus"] == "RUNNING" and each.get("_joins", 1e12) <= self.world.now
            for each in own
        )

    def _release(self) -> None:
        try:
            self.provider.terminate_nodes(self._nodes())
        except (ClientError, BotoCoreError) as error:
            self.world.tell(f"head of {self.job.name}: {error!r:.100}")


# --- one life -------------------------------------------------------------------------------------
@contextlib.contextmanager
def _handed_in(
    world: World, account: Account, keeper: ModuleType, limits: Limits
) -> Iterator[None]:
    """Give the keeper, and what waits, this world's time and account."""
    client = account.client("keeper")
    own = {
        "boto3": SimpleNamespace(client=lambda *_, **__: client),
        "print": world.tell,
        "CLUSTER": "c",
        "BUCKET": NAME,
        "HEAD_FAMILY": "head",
        "STATE_MACHINE": MACHINE,
        "LIMITS": limits,
        "POOLS": limits.pools,
        "PLACES": {each: each for each in limits.pools},
        "STACK": "S",
        "GROUPS": {f"group-{each}": each for each in FAMILIES},
        "FAMILIES": ["head", "standing", "worker"],
    }
    with pytest.MonkeyPatch.context() as patch:
        for module in (keeper, cluster, kept, job_outcome):
            patch.setattr(module, "time", Clock(account))
        for module in (jobs, polling, follow):
            patch.setattr(module, "time", world)
        for module in (keeper, cluster, kept):
            for name, value in own.items():
                patch.setattr(module, name, value, raising=False)
        patch.setattr(keeper.notices, "boto3", own["boto3"])
        # A life asks very often.
        account.understood = functools.cache(keeper.spec_of)
        patch.setattr(keeper, "spec_of", account.spec_of)
        patch.setattr(keeper, "order_of", functools.cache(keeper.order_of.__wrapped__))
        high_after_s = Random(f"waits {world.seed}").choice([900, 3600, times.COUNTS_AS_HIGH_S])
        patch.setattr(times, "COUNTS_AS_HIGH_S", high_after_s)
        yield


def live(seed: int, **given: Any) -> Life:
    """The life of a seed; the rest is given to ``Life``."""
    life = Life(seed, **given)
    began = life.world.now
    with _handed_in(life.world, life.account, life.account.keeper, life.limits):
        life.plan()
        life.world.run(began + life.hours * 3600)
        latest = max(began + 2 * life.hours * 3600, life.account.due + 4 * 3600)
        while life.world.now < latest and not life.is_over:
            life.world.run(life.world.now + times.SWEEP_EVERY_S)
        life.check()
    return life


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """What has become of one job."""

    life: Life
    job: Execution
    alone_s: list[float]
    """Of hosts in pools that had too few of them: how long each was there."""


def story(seed: int, spec: JobSpec, offers: Mapping[str, int], taken: str, **given: Any) -> Story:
    """One job in an account without faults.

    Args:
        offers: pool -> how many hosts EC2 has there.
        taken: pool whose hosts EC2 takes when the job has trained for ten minutes; or none.
        given: to ``Life``.
    """
    life = Life(seed, faults=(), rare=(lambda _: None,), long={}, **given)
    life.account.is_faulty, life.is_exact = False, True
    life.limits = Limits(max_heads=1, max_workers=4, pools={"l4": 4, "spot": 4})
    for group in life.model.groups.values():
        group.record["MaxSize"] = 4
    for pool, number in offers.items():
        life.offer(PROVIDERS[pool], number)
    world, name = life.world, "r-bado-kilo"
    life.programs[name] = Program(seconds=1800, code=0)
    seen: dict[str, list[float]] = {}
    trains_at, job = 0.0, None
    with _handed_in(world, life.account, life.account.keeper, life.limits):
        world.after(60, life.account.sweep)
        world.spawn(life.submit, name, spec)
        while world.now < BEGAN + 5 * 3600:
            world.run(world.now + 5)
            short = [PROVIDERS[each] for each in offers if offers[each] < spec.nodes.low]
            for group in [life.model.groups[each] for each in short]:
                for instance, each in group.instances.items():
                    if "_ends" not in each:  # EC2 bills no instance that shuts down
                        seen.setdefault(instance, []).append(world.now)
            job = life.account.executions.get(name)
            if not trains_at and name in life.account.trained:
                trains_at = world.now
            if taken and trains_at and world.now - trains_at > 600:
                life.offer(PROVIDERS[taken], 0)
                group, taken = life.model.groups[PROVIDERS[taken]], ""
                for host in [*life.model.hosts.values()]:
                    if host["capacityProviderName"] == group.provider:
                        life.model.lose(host["containerInstanceArn"])
            if job and job.status != "RUNNING":
                break
    assert job is not None
    return Story(life=life, job=job, alone_s=[each[-1] - each[0] for each in seen.values()])
