"""The control plane lives: jobs in a simulated account, whatever AWS and the hosts do to them."""

import os
from collections import Counter
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import pytest

from containers import autoscaler
from contract.job import DEFAULT_MAX_SECONDS, MAX_SECONDS, JobStatus
from tests.simulation.account import evaluate
from tests.simulation.lives import FAULTS, live
from tests.simulation.world import BEGAN
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
    states, happened, pairs = definition(synth), Counter[str](), Counter[tuple[str, str]]()
    for seed in range(FIRST, FIRST + NUM):
        life = live(seed, states=states, keeper=keeper)
        happened += life.world.happened
        pairs += life.pairs
        assert life.world.wrong == [], f"seed {seed}:\n{life.story()}"
    for what, times in sorted(happened.items()):
        print(f"{times:9,} {what}")
    print("\nHow often a fault hit a job in a state:")
    faults, seen = sorted({fault for fault, _ in pairs}), sorted({state for _, state in pairs})
    for fault in faults:
        print(f"  {fault}: " + ", ".join(f"{each} {pairs[fault, each]:,}" for each in seen))
    never = [f"{fault} / {state}" for fault in faults for state in seen if not pairs[fault, state]]
    print(f"Pairs that never occurred: {', '.join(never) or 'none'}")
    if NUM >= 1000:
        names = {f"fault: {each.__name__.replace('_', ' ')}" for each in FAULTS}
        ends = {f"job {each}" for each in ("succeeded", "failed", "deadline", "no_capacity")}
        states_seen = {f"state {name}" for name in states["States"]}
        assert {*names, *ends, *states_seen} <= happened.keys()


# --- single states --------------------------------------------------------------------------------
def started(order: dict[str, Any]) -> dict[str, Any]:
    """What an execution knows when it starts."""
    start = datetime.fromtimestamp(BEGAN, tz=UTC).isoformat(timespec="milliseconds")
    execution = {"Name": order.get("run", "r"), "StartTime": start.replace("+00:00", "Z")}
    return {"states": {"input": order, "context": {"Execution": execution}}}


def test_a_job_that_waits_for_as_long_as_it_may_does_not_fill_its_history(synth: Synth) -> None:
    seconds = definition(synth)["States"]["Pause"]["Seconds"]

    def pauses(status: JobStatus) -> list[int]:
        found: list[int] = []
        while sum(found) < MAX_SECONDS:
            variables = {"asked": BEGAN, "outcome": {"status": status.value}}
            found.append(evaluate(seconds, variables, BEGAN + sum(found)))
            if not found[-1]:
                break
        return found

    found = pauses(JobStatus.NO_CAPACITY)
    assert found[:50] == [30] * 50, "a host that comes soon is not kept waiting"
    assert all(pause <= max(31, sum(found[:i]) / 59) for i, pause in enumerate(found))
    events = 20  # at most, from one request to the next
    assert len(found) * events < 25_000
    assert pauses(JobStatus.HOST_LOST) == [0]


def test_no_order_outlasts_the_hours_that_the_deployment_allows(synth: Synth) -> None:
    deadline = definition(synth)["States"]["Begin"]["Assign"]["deadline"]
    orders: list[dict[str, Any]] = [{"max_seconds": 60}, {"max_seconds": 10**9}, {}]
    began, limit = int(BEGAN), 336 * 3600
    assert [evaluate(deadline, started(order), BEGAN) for order in orders] == [
        began + 60,
        began + limit,
        began + DEFAULT_MAX_SECONDS,
    ]
