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
TASK: Final = ("lastStatus", "desiredStatus", "stoppedReason", "stopCode", "group")
HOST: Final = ("ec2InstanceId", "status", "runningTasksCount", "capacityProviderName")


class Player:
    """Plays calls with one of the two, and writes down the refusals and what there is then."""

    def __init__(
        self,
        ecs: Any,
        groups: Any,
        *,
        end: Callable[[str, int], object],
        settle: Callable[[], object] = bool,
    ) -> None:
        self._ecs, self._groups, self._end, self._settle = ecs, groups, end, settle
        self._tasks: list[str] = []

    def play(self, number: int) -> list[Any]:
        """One sequence, after which no host and no task is left."""
        chance, answers = Random(number), list[Any]()
        self._tasks = []
        calls = (self.run, self.run, self.stop, self.end, self.drain, self.terminate, self.resize)
        for _ in range(chance.randint(3, 9)):
            call = chance.choice(calls)
            try:
                call(chance)
            except ClientError as error:
                answers.append((call.__name__, error.response["Error"]["Code"]))
            self._settle()
        answers.append(self.seen(chance))
        for task in self._tasks:
            self._ecs.stop_task(cluster="c", task=task, reason="the end")
        for provider in SIZES:
            self.resize(chance, provider, 0)
        self._settle()
        for instance in self._instances():
            self.terminate(chance, instance, lowers=False)
        self._settle()
        return answers

    def run(self, chance: Random) -> None:
        provider = chance.choice([*SIZES])
        request = {
            "cluster": "c",
            "taskDefinition": FAMILIES[provider],
            "capacityProviderStrategy": [{"capacityProvider": provider}],
            "count": chance.randint(1, 2),
            "startedBy": chance.choice("ab"),
            "group": chance.choice(["job:a", "job:b"]),
            "overrides": {},
            "clientToken": f"{len(self._tasks)} {chance.random()}",
        }
        first, again = self._started(request), self._started(request)
        assert first == again
        self._tasks += first

    def _started(self, request: Record) -> list[str]:
        tasks = self._ecs.run_task(**request)["tasks"]
        self._settle()
        return [each["taskArn"] for each in tasks]

    def stop(self, chance: Random) -> None:
        for task in chance.sample(self._tasks, min(1, len(self._tasks))):
            self._ecs.stop_task(cluster="c", task=task, reason=f"reason {chance.random()}")

    def end(self, chance: Random) -> None:
        for task in chance.sample(self._tasks, min(1, len(self._tasks))):
            self._end(task, chance.choice([0, 1, 137]))

    def drain(self, chance: Random) -> None:
        status = chance.choice(["DRAINING", "ACTIVE"])
        for host in self._hosts()[:1]:
            self._ecs.update_container_instances_state(
                cluster="c", containerInstances=[host], status=status
            )

    def terminate(self, chance: Random, instance: str = "", *, lowers: bool | None = None) -> None:
        self._groups.terminate_instance_in_auto_scaling_group(
            InstanceId=instance or chance.choice([*self._instances(), "i-none"]),
            ShouldDecrementDesiredCapacity=chance.random() < 0.5 if lowers is None else lowers,
        )

    def resize(self, chance: Random, provider: str = "", number: int | None = None) -> None:
        provider = provider or chance.choice([*SIZES])
        number = chance.randint(0, SIZES[provider]) if number is None else number
        name = f"group-{provider}"
        self._groups.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=number)

    def seen(self, chance: Random) -> Any:
        """All there is, and one of the lists."""
        ecs, all_hosts = self._ecs, self._hosts()
        hosts = ecs.describe_container_instances(cluster="c", containerInstances=all_hosts or ["x"])
        tasks = ecs.describe_tasks(cluster="c", tasks=self._tasks or ["x"])["tasks"]
        stopped = {"desiredStatus": "STOPPED", "family": "head"}
        which = [stopped, {"startedBy": "a"}, *({"containerInstance": each} for each in all_hosts)]
        pages = ecs.get_paginator("list_tasks").paginate(cluster="c", **chance.choice(which))
        listed = {arn for page in pages for arn in page["taskArns"]} & {*self._tasks}
        return {
            "groups": [each["DesiredCapacity"] for each in self._described()],
            "instances": self._instances(),
            "hosts": [[each[name] for name in HOST] for each in hosts["containerInstances"]],
            "tasks": [
                [
                    *(task.get(name) or "" for name in TASK),
                    task.get("containerInstanceArn", "").rpartition("/")[2],
                    task["containers"][0].get("exitCode"),
                ]
                for task in tasks
            ],
            "listed": sorted(map(self._tasks.index, listed)),
        }

    def _hosts(self) -> list[str]:
        pages = self._ecs.get_paginator("list_container_instances").paginate(cluster="c")
        return sorted(arn for page in pages for arn in page["containerInstanceArns"])

    def _described(self) -> Any:
        names = [f"group-{name}" for name in SIZES]
        found = self._groups.describe_auto_scaling_groups(AutoScalingGroupNames=names)
        return sorted(found["AutoScalingGroups"], key=lambda each: each["AutoScalingGroupName"])

    def _instances(self) -> list[str]:
        return sorted(
            each["InstanceId"] for group in self._described() for each in group["Instances"]
        )


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

    player, found = Player(client, client, end=end, settle=settle), list[Any]()
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

        player = Player(ecs, groups, end=end)
        return [player.play(number) for number in range(NUM)]


@pytest.mark.skipif(
    not (ROOT / ".venv-aws" / "bin" / "python").exists(),
    reason="no AWS emulator: `make venv-aws` installs it",
)
def test_the_simulation_and_the_local_aws_answer_the_same(tmp_path: Path) -> None:
    for number, (ours, theirs) in enumerate(zip(simulated(7), emulated(7, tmp_path), strict=True)):
        assert ours == theirs, f"sequence {number}"
