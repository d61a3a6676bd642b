"""The control plane lives: jobs in a simulated account, whatever AWS and the hosts do to them."""

import os
from collections import Counter
from types import ModuleType

import pytest

from containers import autoscaler
from tests.simulation.lives import FAULTS, live
from tests.stacks.conftest import Synth
from tests.stacks.test_job_keeper import definition

#: By ``make simulate``: how many lives, and from which seed on.
NUM = int(os.environ.get("LIVES", "1000"))
FIRST = int(os.environ.get("FIRST_LIFE", "0"))


def test_no_job_task_host_or_record_is_lost_whatever_happens(
    keeper: ModuleType, synth: Synth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first life that goes wrong is printed; ``FIRST_LIFE=SEED LIVES=1`` plays it alone."""
    monkeypatch.setattr(autoscaler, "_say", lambda _: None)
    states, happened = definition(synth), Counter[str]()
    for seed in range(FIRST, FIRST + NUM):
        life = live(seed, states=states, keeper=keeper)
        happened += life.world.happened
        assert life.world.wrong == [], f"seed {seed}:\n{life.world.story()}"
    for what, times in sorted(happened.items()):
        print(f"{times:9,} {what}")
    if NUM >= 1000:
        names = {f"fault: {each.__name__.replace('_', ' ')}" for each in FAULTS}
        ends = {f"job {each}" for each in ("succeeded", "failed", "deadline", "no_capacity")}
        states_seen = {f"state {name}" for name in states["States"]}
        assert {*names, *ends, *states_seen} <= happened.keys()
