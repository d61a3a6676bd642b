"""EC2's market in a life: how many hosts there are for each pool, from hour to hour."""

from typing import TYPE_CHECKING, Final

from rehearsal.model import Group

if TYPE_CHECKING:
    from random import Random

    from tests.simulation.lives import Life

#: Of zones, changes per hour between three levels: none, some and all hosts of a gang of four.
#: Computed from github.com/skypilot-org/spot-traces (221da1a), preemption/4-node/aws-08-03-2023:
#: four spot p3.2xlarge, looked at every five minutes for 13 to 18 days ("Can't Be Late", NSDI 24).
#: All four were there for 30, 71 and 79 % of the time, and some of them for 8, 4 and 5 %.
ZONES: Final = {
    "us-east-1f": ((0, 0.218, 0.016), (1.75, 0, 2.083), (0.022, 0.549, 0)),
    "us-east-2a": ((0, 0.131, 0), (0.889, 0, 2.222), (0, 0.118, 0)),
    "us-west-2c": ((0, 0.871, 0.247), (3.036, 0, 3.462), (0.039, 0.228, 0)),
}
SHARES: Final = {
    "us-east-1f": (0.62, 0.08, 0.30),
    "us-east-2a": (0.25, 0.04, 0.71),
    "us-west-2c": (0.16, 0.05, 0.79),
}
#: Spot hosts of a type and zone are taken within three minutes of each other, in 92 % of cases
#: (arXiv 2604.16457).
TAKEN_WITHIN_S: Final = 180.0
#: Hosts that are more than anybody asks for.
PLENTY: Final = 10**6


class Market:
    """Moves the number of hosts that EC2 has for a capacity provider.

    No figures are published of on-demand hosts: there may be as few, and none is taken (assumed).
    """

    def __init__(self, life: "Life", provider: str, chance: "Random", *, is_spot: bool) -> None:
        self._life, self._provider, self._chance = life, provider, chance
        self._is_spot = is_spot
        self._zone = chance.choice([*ZONES])
        (self._level,) = chance.choices(range(3), SHARES[self._zone])
        self.is_over = False
        self._set()
        self._wait()

    def _wait(self) -> None:
        rate = sum(ZONES[self._zone][self._level])
        self._life.world.after(self._chance.expovariate(rate / 3600), self._change)

    def _change(self) -> None:
        if self.is_over:
            return
        (self._level,) = self._chance.choices(range(3), ZONES[self._zone][self._level])
        self._set()
        self._wait()

    def _set(self) -> None:
        life = self._life
        most = (0, self._chance.randrange(life.max_workers), PLENTY)[self._level]
        life.offer(self._provider, most)
        group = life.model.groups[self._provider]
        staying = [each for each in group.instances.values() if not each["_leaves"]]
        for each in staying[most:] if self._is_spot else ():
            seconds = self._chance.uniform(0, TAKEN_WITHIN_S)
            life.world.after(seconds, self._take, group, each["InstanceId"])

    def _take(self, group: Group, instance: str) -> None:
        life = self._life
        for arn in [
            arn
            for arn, host in life.model.hosts.items()
            if host["ec2InstanceId"] == instance and not host["_leaves"]
        ]:
            life.world.happened["spot host taken by the market"] += 1
            life.model.lose(arn)
        if instance in group.instances:  # it boots, or is terminated already
            life.model.end_at_once(instance)
