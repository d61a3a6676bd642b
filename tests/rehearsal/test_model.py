"""The simulation and the local AWS do not disagree: the same calls have the same answers.

Random calls of ECS and Auto Scaling, of a client of the simulation and of one that asks the local
AWS. Everything takes no time, and both decide by the same seed which task comes to which host.
"""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest
from botocore.exceptions import ClientError

from rehearsal.local_aws import local_aws
from rehearsal.model import Group, Model, Record, Times
from tests.aws.account import stamp
from tests.conftest import ROOT
from tests.rehearsal.test_strict import client, make_group
from tests.simulation.account import Account
from tests.simulation.world import World

pytestmark = pytest.mark.slow

NUM: Final = 40
#: The most hosts of each capacity provider, whose group and task definition have its name.
SIZES: Final = {"heads": 2, "workers": 3}
NEVER: Final = 1e9
TIMES: Final = Times(
    boots=(0, 0),
    places=0,
    starts=(0, 0),
    gives_up=(NEVER, NEVER),
    shows=0,
    knows=0,
    terminates=(0, 0),
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

    def play(self, number: int) -> list[Any]:
        """One sequence, after which no host and no task is left."""
        chance, tasks, answers = Random(number), list[str](), list[Any]()
        for _ in range(chance.randint(3, 9)):
            what = chance.choice(("run", "run", "stop", "end", "drain", "terminate", "resize"))
            try:
                self._call(what, chance, tasks)
            except ClientError as error:
                answers.append((what, error.response["Error"]["Code"]))
            self._settle()
        answers.append(self._seen(chance, tasks))
        for task in tasks:
            self._ecs.stop_task(cluster="c", task=task, reason="the end")
        for name in SIZES:
            self._resize(name, 0)
        for instance in self._instances():
            self._terminate(instance, lowers=False)
        self._settle()
        return answers

    def _call(self, what: str, chance: Random, tasks: list[str]) -> None:
        task, provider = chance.choice([*tasks, ""]), chance.choice([*SIZES])
        match what:
            case "run":
                request = {
                    "cluster": "c",
                    "taskDefinition": provider,
                    "capacityProviderStrategy": [{"capacityProvider": provider}],
                    "count": chance.randint(1, 2),
                    "startedBy": chance.choice("ab"),
                    "group": f"job:{chance.choice('ab')}",
                    "overrides": {},
                    "clientToken": f"{len(tasks)} {chance.random()}",
                }
                first, again = self._started(request), self._started(request)
                assert first == again
                tasks += first
            case "stop" if task:
                self._ecs.stop_task(cluster="c", task=task, reason=f"reason {chance.random()}")
            case "end" if task:
                self._end(task, chance.choice([0, 1, 137]))
            case "drain" if hosts := self._hosts():
                self._ecs.update_container_instances_state(
                    cluster="c",
                    containerInstances=hosts[:1],
                    status=chance.choice(["DRAINING", "ACTIVE"]),
                )
            case "terminate":
                instance = chance.choice([*self._instances(), "i-none"])
                self._terminate(instance, lowers=chance.random() < 0.5)
            case "resize":
                self._resize(provider, chance.randint(0, SIZES[provider]))

    def _started(self, request: Record) -> list[str]:
        tasks = self._ecs.run_task(**request)["tasks"]
        self._settle()
        return [each["taskArn"] for each in tasks]

    def _terminate(self, instance: str, *, lowers: bool) -> None:
        self._groups.terminate_instance_in_auto_scaling_group(
            InstanceId=instance, ShouldDecrementDesiredCapacity=lowers
        )

    def _resize(self, name: str, number: int) -> None:
        self._groups.set_desired_capacity(AutoScalingGroupName=name, DesiredCapacity=number)

    def _seen(self, chance: Random, mine: list[str]) -> Any:
        """All there is, and one of the lists."""
        ecs, there = self._ecs, self._hosts()
        hosts = ecs.describe_container_instances(cluster="c", containerInstances=there or ["x"])
        tasks = ecs.describe_tasks(cluster="c", tasks=mine or ["x"])["tasks"]
        stopped = {"desiredStatus": "STOPPED", "family": "heads"}
        which = [stopped, {"startedBy": "a"}, *({"containerInstance": each} for each in there)]
        pages = ecs.get_paginator("list_tasks").paginate(cluster="c", **chance.choice(which))
        listed = {arn for page in pages for arn in page["taskArns"]} & {*mine}
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
            "listed": sorted(map(mine.index, listed)),
        }

    def _hosts(self) -> list[str]:
        pages = self._ecs.get_paginator("list_container_instances").paginate(cluster="c")
        return sorted(arn for page in pages for arn in page["containerInstanceArns"])

    def _described(self) -> Any:
        found = self._groups.describe_auto_scaling_groups(AutoScalingGroupNames=[*SIZES])
        return sorted(found["AutoScalingGroups"], key=lambda each: each["AutoScalingGroupName"])

    def _instances(self) -> list[str]:
        return sorted(
            each["InstanceId"] for group in self._described() for each in group["Instances"]
        )


def simulated(seed: int) -> list[Any]:
    """What the simulation answers, sequence by sequence."""
    world = World(seed)
    agent: Any = SimpleNamespace(
        pull=lambda task: model.begin(task),
        start=bool,
        terminate=lambda task: model.end(task, 143),
        kill=bool,
        ended=bool,
    )
    model: Model = Model(
        (),
        agent,
        now=world.time,
        after=world.after,
        random=Random(str(seed)),
        stamp=stamp,
        times=TIMES,
    )
    for name, most in SIZES.items():  # later, so that no timer looks at them
        record = {"AutoScalingGroupName": name, "DesiredCapacity": 0, "MaxSize": most}
        cluster = "arn:aws:ecs:us-east-1:1:cluster/c"
        model.groups[name] = Group(record=record, provider=name, cluster=cluster)
    families = dict(zip(SIZES, SIZES, strict=True))
    account = Account(world, model, states={}, keeper=ModuleType("none"), families=families)
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
    world.spawn(lambda: found.extend(map(player.play, range(NUM))))
    world.run(world.now + NEVER / 2)
    return found


def emulated(seed: int, folder: Path) -> list[Any]:
    """What the local AWS answers."""
    with local_aws(folder, delay_s=1e-9, seed=seed) as aws:
        ecs = client(aws, "ecs")
        ecs.create_cluster(clusterName="c", capacityProviders=[*SIZES])
        for name, most in SIZES.items():
            make_group(aws, name, most)
            container = {"name": "main", "image": "none", "memory": 512}
            ecs.register_task_definition(family=name, containerDefinitions=[container])

        def end(arn: str, code: int) -> None:
            ends = aws.log.parent / "ends.json"
            ends.write_text(json.dumps({arn: code}))
            ecs.list_container_instances(cluster="c")  # it looks there
            ends.unlink()

        player = Player(ecs, client(aws, "autoscaling"), end=end)
        return [player.play(number) for number in range(NUM)]


@pytest.mark.skipif(
    not (ROOT / ".venv-aws" / "bin" / "python").exists(),
    reason="no AWS emulator: `make venv-aws` installs it",
)
def test_the_simulation_and_the_local_aws_answer_the_same(tmp_path: Path) -> None:
    for number, (ours, theirs) in enumerate(zip(simulated(7), emulated(7, tmp_path), strict=True)):
        assert ours == theirs, f"sequence {number}"
