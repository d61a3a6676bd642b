"""The simulation and the local AWS do not disagree: the same calls have the same answers.

Random calls of ECS and Auto Scaling, of a client of the simulation and of one that asks the local
AWS. Everything takes no time, and both decide by the same seed which task comes to which host.
"""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, Final

import boto3
import pytest
from botocore.exceptions import ClientError

from rehearsal.local_aws import ACCOUNT, REGION, local_aws
from rehearsal.model import Group, Model, Record, Times
from tests.conftest import ROOT
from tests.simulation.account import Account, stamp
from tests.simulation.world import World

pytestmark = pytest.mark.slow

NUM: Final = 40
SIZES: Final = {"for-heads": 2, "for-workers": 3}
FAMILIES: Final = {"for-heads": "head", "for-workers": "worker"}
NEVER: Final = 1e9
TIMES: Final = Times(
    boots=(0, 0),
    places=0,
    starts=(0, 0),
    gives_up=(NEVER, NEVER),
    shows=0,
    knows=0,
    terminates=(0, 0),
    scales=NEVER,
    surplus=NEVER,
    stops=NEVER,
)
#: Of a task and a host, what both say.
TASK: Final = ("lastStatus", "desiredStatus", "stoppedReason", "startedBy", "group")
HOST: Final = ("ec2InstanceId", "status", "agentConnected", "capacityProviderName")
COUNTS: Final = ("runningTasksCount", "pendingTasksCount")


class Player:
    """Plays calls with one of the two and writes the answers down; tasks are numbers in these."""

    def __init__(self, ecs: Any, groups: Any, end: Callable[[str, int], object]) -> None:
        self._ecs, self._groups, self._end = ecs, groups, end
        self._tasks: list[str] = []
        self._hosts: list[str] = []
        self.settle: Callable[[], object] = bool

    def play(self, number: int) -> list[Any]:
        """One sequence, after which everything is gone."""
        chance, answers = Random(number), list[Any]()
        self._tasks = []
        calls = [self.run, self.stop, self.end, self.drain, self.terminate, self.resize, self.look]
        for _ in range(chance.randint(3, 9)):
            call = chance.choice([self.run, *calls])
            try:
                answers.append((call.__name__, call(chance)))
            except ClientError as error:
                answers.append((call.__name__, error.response["Error"]["Code"]))
            self.settle()
        answers.append(self.look(chance))
        for task in self._tasks:
            self._ecs.stop_task(cluster="c", task=task, reason="the end")
        for name in SIZES:
            self._groups.set_desired_capacity(
                AutoScalingGroupName=f"group-{name}", DesiredCapacity=0
            )
        self.settle()
        for group in self._described():
            for each in group["Instances"]:
                self._groups.terminate_instance_in_auto_scaling_group(
                    InstanceId=each["InstanceId"], ShouldDecrementDesiredCapacity=False
                )
        self.settle()
        return [*answers, self.look(chance)]

    def run(self, chance: Random) -> Any:
        provider = chance.choice([*SIZES])
        started = self._ecs.run_task(
            cluster="c",
            taskDefinition=FAMILIES[provider],
            capacityProviderStrategy=[{"capacityProvider": provider}],
            count=chance.randint(1, 2),
            startedBy=chance.choice("ab"),
            group=chance.choice(["job:a", "job:b"]),
            overrides={},
            clientToken=f"{len(self._tasks)} {chance.random()}",
        )["tasks"]
        self._tasks += [each["taskArn"] for each in started]
        return [self._task(each) for each in started]

    def stop(self, chance: Random) -> Any:
        if not self._tasks:
            return None
        task, reason = chance.choice(self._tasks), f"reason {chance.random()}"
        return self._task(self._ecs.stop_task(cluster="c", task=task, reason=reason)["task"])

    def end(self, chance: Random) -> Any:
        if self._tasks:
            self._end(chance.choice(self._tasks), chance.choice([0, 1, 137]))
        return None

    def drain(self, chance: Random) -> Any:
        status = chance.choice(["DRAINING", "ACTIVE"])
        if self._hosts:
            host = chance.choice(self._hosts)
            self._ecs.update_container_instances_state(
                cluster="c", containerInstances=[host], status=status
            )
        return status

    def terminate(self, chance: Random) -> Any:
        there = [each["InstanceId"] for group in self._described() for each in group["Instances"]]
        instance = chance.choice([*there, "i-none"])
        self._groups.terminate_instance_in_auto_scaling_group(
            InstanceId=instance, ShouldDecrementDesiredCapacity=chance.random() < 0.5
        )
        return instance

    def resize(self, chance: Random) -> Any:
        provider = chance.choice([*SIZES])
        name, number = f"group-{provider}", chance.randint(0, SIZES[provider])
        self._groups.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=number)
        return number

    def look(self, chance: Random) -> Any:
        """All there is, and one of the lists."""
        pages = self._ecs.get_paginator("list_container_instances").paginate(cluster="c")
        self._hosts = sorted(arn for page in pages for arn in page["containerInstanceArns"])
        hosts = self._ecs.describe_container_instances(
            cluster="c", containerInstances=self._hosts or ["none"]
        )["containerInstances"]
        tasks = self._ecs.describe_tasks(cluster="c", tasks=self._tasks or ["none"])["tasks"]
        which = chance.choice(
            [
                {"desiredStatus": "STOPPED", "family": "head"},
                {"startedBy": "a"},
                {"desiredStatus": "RUNNING", "family": "worker"},
                *({"containerInstance": each} for each in self._hosts[:1]),
            ]
        )
        pages = self._ecs.get_paginator("list_tasks").paginate(cluster="c", **which)
        listed = {arn for page in pages for arn in page["taskArns"]} & {*self._tasks}
        return {
            "groups": [
                (each["DesiredCapacity"], sorted(one["InstanceId"] for one in each["Instances"]))
                for each in self._described()
            ],
            "hosts": [[each[name] for name in (*HOST, *COUNTS)] for each in hosts],
            "tasks": [self._task(each) for each in tasks],
            "listed": sorted(map(self._tasks.index, listed)),
        }

    def _described(self) -> Any:
        names = [f"group-{name}" for name in SIZES]
        found = self._groups.describe_auto_scaling_groups(AutoScalingGroupNames=names)
        return sorted(found["AutoScalingGroups"], key=lambda each: each["AutoScalingGroupName"])

    def _task(self, task: Record) -> Any:
        return [
            self._tasks.index(task["taskArn"]) if task["taskArn"] in self._tasks else "new",
            *(task.get(name) or None for name in (*TASK, "stopCode")),
            task.get("containerInstanceArn", "").rpartition("/")[2],
            task["containers"][0].get("exitCode"),
            bool(task.get("startedAt")),
            bool(task.get("stoppedAt")),
        ]


class Programs:
    """They end as soon as they are told."""

    model: Model

    def pull(self, task: Record) -> None:
        self.model.begin(task)

    def start(self, task: Record) -> None:
        """It runs until it is told."""

    def terminate(self, task: Record) -> None:
        self.model.end(task, 143)

    def kill(self, task: Record) -> None:
        """It is over."""

    def ended(self, task: Record) -> None:
        """It is over."""


def simulated(seed: int) -> list[Any]:
    """What the simulation answers, sequence by sequence."""
    world, programs = World(seed), Programs()
    groups = [
        Group(
            record={
                "AutoScalingGroupName": f"group-{provider}",
                "DesiredCapacity": 0,
                "MaxSize": most,
            },
            provider=provider,
            cluster="arn:aws:ecs:us-east-1:1:cluster/c",
        )
        for provider, most in SIZES.items()
    ]
    model = programs.model = Model(
        (),
        programs,
        now=world.time,
        after=world.after,
        random=Random(str(seed)),
        stamp=stamp,
        times=TIMES,
    )
    model.groups |= {each.provider: each for each in groups}  # here no timer looks at them
    account = Account(world, model, states={}, keeper=ModuleType("none"), families=FAMILIES)
    account.is_faulty = False
    client = account.client("test")

    def end(arn: str, code: int) -> None:
        if model.tasks[arn]["lastStatus"] == "RUNNING":
            model.end(model.tasks[arn], code)

    def settle() -> None:
        for _ in range(2):
            for group in model.groups.values():
                model.scale(group)
                model.fill(group)
            world.sleep(0.001)

    player, found = Player(client, client, end), list[Any]()
    player.settle = settle
    world.spawn(lambda: found.extend(player.play(number) for number in range(NUM)))
    world.run(world.now + NEVER / 2)
    return found


def emulated(seed: int, folder: Path) -> list[Any]:
    """What the local AWS answers."""
    with local_aws(folder, patience_s=NEVER, delay_s=1e-9, seed=seed) as aws:
        connect: Any = boto3.client
        key = {"aws_access_key_id": ACCOUNT, "aws_secret_access_key": "test"}
        ecs, groups = (
            connect(each, endpoint_url=aws.endpoint, region_name=REGION, **key)
            for each in ("ecs", "autoscaling")
        )
        for provider, most in SIZES.items():
            name = f"group-{provider}"
            sizes = {"MinSize": 0, "MaxSize": most, "AvailabilityZones": [f"{REGION}a"]}
            groups.create_auto_scaling_group(AutoScalingGroupName=name, **sizes)
            which = {"AutoScalingGroupNames": [name]}
            (group,) = groups.describe_auto_scaling_groups(**which)["AutoScalingGroups"]
            of_group = {"autoScalingGroupArn": group["AutoScalingGroupARN"]}
            ecs.create_capacity_provider(name=provider, autoScalingGroupProvider=of_group)
            ecs.register_task_definition(
                family=FAMILIES[provider],
                containerDefinitions=[{"name": "main", "image": "none", "memory": 512}],
            )
        ecs.create_cluster(clusterName="c", capacityProviders=[*SIZES])

        def end(arn: str, code: int) -> None:
            ends = aws.log.parent / "ends.json"
            ends.write_text(json.dumps({arn: code}))
            ecs.list_container_instances(cluster="c")  # it looks there
            ends.unlink()

        player = Player(ecs, groups, end)
        return [player.play(number) for number in range(NUM)]


@pytest.mark.skipif(
    not (ROOT / ".venv-aws" / "bin" / "python").exists(),
    reason="no AWS emulator: `make venv-aws` installs it",
)
def test_the_simulation_and_the_local_aws_answer_the_same(tmp_path: Path) -> None:
    for number, (ours, theirs) in enumerate(zip(simulated(7), emulated(7, tmp_path), strict=True)):
        assert ours == theirs, f"sequence {number}"
