"""The control plane survives whatever AWS and the hosts do to jobs in a simulated account."""

import os
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from containers import autoscaler
from contract.job import DEFAULT_MAX_SECONDS, MAX_SECONDS, JobStatus
from contract.nodes import Range
from contract.times import CONSISTENT_S
from tests.simulation.account import UNPLACED, evaluate
from tests.simulation.faults import FAULTS, LONG, RARE
from tests.simulation.lives import live, story
from tests.simulation.world import BEGAN
from tests.stacks.conftest import Synth
from tests.stacks.test_job_keeper import SPEC
from tests.stacks.test_state_machine import definition

#: By ``make simulate``: how many lives, and from which seed on.
NUM = int(os.environ.get("LIVES", "250"))
FIRST = int(os.environ.get("FIRST_LIFE", "0"))
#: Lives that went wrong. S3 was down until two hours after many jobs had been aborted; the keeper
#: wrote the record of an aborted job, and could not report it in any of its tries; ends of other
#: jobs took away the mark of a silent head; each new symptom began its count anew; the report of a
#: head was older than an outage.
KEPT = (1595, 7032, 403882, 500788, 602995)
#: That a rare fault brings about, if what it needs is there.
STATES = (
    "attributes refused",
    "host drained for two days below a task",
    "job waited for its turn for a day",
    "launches that have failed for a day resumed",
    "more than 100 executions listed",
    "RunTask placed some",
    *(f"RunTask refuses a head: {reason}" for reason in UNPLACED),
    "suspended group resumed",
)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(FIRST, FIRST + NUM), id="few"),
        pytest.param(
            range(NUM, 5000), id="many", marks=[pytest.mark.night, pytest.mark.timeout(3600)]
        ),
    ],
)
def test_no_job_task_host_or_record_is_lost_whatever_happens(
    keeper: ModuleType, synth: Synth, monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    """A life that goes wrong is printed; ``FIRST_LIFE=SEED LIVES=1`` plays it alone."""
    monkeypatch.setattr(autoscaler, "_say", lambda _: None)
    states, happened, pairs = definition(synth), Counter[str](), Counter[tuple[str, str]]()
    lives, wrong = Counter[str](), list[int]()
    for seed in [*(KEPT if len(seeds) >= 250 else ()), *seeds]:
        life = live(seed, states=states, keeper=keeper, faults=FAULTS, rare=RARE, long=LONG)
        happened += life.world.happened
        lives.update(what for what, number in life.world.happened.items() if number)
        pairs += life.pairs
        if life.world.wrong:
            wrong.append(seed)
            print(f"seed {seed}:\n{life.story()}")
    for what, times in sorted(happened.items()):
        print(f"{times:9,} in {lives[what]:6,} lives: {what}")
    print("\nHow often a fault hit a job in a state:")
    for (fault, state), number in sorted(pairs.items()):
        print(f"{number:9,}: {fault} / {state}")
    assert wrong == []
    if len(seeds) >= 250:
        names = {f"fault: {each.__name__.replace('_', ' ')}" for each in FAULTS}
        ends = {f"job {each}" for each in ("succeeded", "failed", "deadline", "no_capacity")}
        states_seen = {f"state {name}" for name in states["States"]}
        held = {"hosts held", "hosts held by a head that does not end that"}
        held |= {"host kept", "kept host taken by the next job", "job followed another"}
        held |= {"job ended with another"}
        held |= {"job went to its next pool", "hosts paid for training"}
        held |= {"spot host taken by the market", "job overtook one of a lower priority"}
        assert {*names, *ends, *states_seen, *held} <= {*happened} - {
            each for each, number in happened.items() if not number
        }
    if len(seeds) >= 30_000:
        rare = {f"fault: {each.__name__.replace('_', ' ')}" for each in RARE}
        assert {each: lives[each] for each in {*rare, *STATES} if lives[each] < 300} == {}


# --- stories of pools -----------------------------------------------------------------------------
#: Pools of a job, how many hosts EC2 has in each, and in which its hosts are taken after a while;
#: and the pools that it tries.
STORIES: list[tuple[dict[str, int], str, list[str]]] = [
    # None, half of a gang, and enough.
    ({"l4": 0, "default": 2, "spot": 4}, "", ["l4", "default", "spot"]),
    # A spot gang that is reclaimed goes on where it is on demand.
    ({"spot": 4, "default": 4}, "spot", ["spot", "default"]),
]


@pytest.mark.parametrize(("offers", "taken", "tried"), STORIES)
@pytest.mark.parametrize("seed", range(5))
def test_a_gang_runs_where_ec2_has_all_of_its_hosts(
    keeper: ModuleType,
    synth: Synth,
    monkeypatch: pytest.MonkeyPatch,
    offers: dict[str, int],
    taken: str,
    tried: list[str],
    seed: int,
) -> None:
    monkeypatch.setattr(autoscaler, "_say", lambda _: None)
    spec = replace(SPEC, nodes=Range(4, 4), recipe="ddp", pools=(*offers,), max_seconds=18_000)
    found = story(seed, spec, offers, taken, states=definition(synth), keeper=keeper)
    assert (found.life.world.wrong, found.job.status) == ([], "SUCCEEDED"), found.life.story()
    assert found.job.tried == tried, found.life.story()
    # EC2 bills a minute at least.
    assert all(seconds <= 30 for seconds in found.alone_s), found.life.story()
    assert bool(found.alone_s) is not bool(taken)


# --- single states --------------------------------------------------------------------------------
def started(order: dict[str, Any]) -> dict[str, Any]:
    """What an execution knows when it starts."""
    start = datetime.fromtimestamp(BEGAN, tz=UTC).isoformat(timespec="milliseconds")
    execution = {"Name": "j", "StartTime": start.replace("+00:00", "Z"), "Input": order}
    return {"states": {"input": order, "context": {"Execution": execution}}}


def test_a_job_that_waits_for_as_long_as_it_may_does_not_fill_its_history(
    keeper: ModuleType, synth: Synth, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = definition(synth)["States"]

    def pauses(status: JobStatus) -> list[int]:
        found: list[int] = []
        known = {"asked": BEGAN, "deadline": BEGAN + MAX_SECONDS}
        while sum(found) < MAX_SECONDS:
            outcome = {"status": status.value, "in_a_row": len(found) + 1, "reason": "why"}
            variables, now = known | {"outcome": outcome}, BEGAN + sum(found)
            told = evaluate(states["Again"]["Output"], variables, now)
            found.append(evaluate(states["Pause"]["Seconds"], variables, now))
            assert told == {"reason": "why", "until": now + found[-1]}
            # A job's patience begins when it asks for a host, and again after another loss.
            asked = evaluate(states["Again"]["Assign"]["asked"], variables, now)
            assert asked == (BEGAN if status is JobStatus.NO_CAPACITY else now)
        assert sum(found) == MAX_SECONDS, "the next head notices that the deadline has come"
        events = 20  # at most, from one request to the next
        assert len(found) * events < 25_000
        return found

    found = pauses(JobStatus.NO_CAPACITY)
    assert found[:50] == [30] * 50, "a host that comes soon is not kept waiting"
    assert all(pause <= max(31, sum(found[:i]) / 59) for i, pause in enumerate(found))
    assert pauses(JobStatus.HOST_LOST)[:4] == [0, 30, 60, 90]

    (caught,) = states["Admit"]["Catch"]  # or a keeper that fails once ends a job that waits
    assert (caught["ErrorEquals"], caught["Next"]) == (["States.ALL"], "Queue")
    queue = [states["Begin"]["Assign"]["pause"]]
    monkeypatch.setattr(keeper, "admitted", lambda *_: None)
    monkeypatch.setattr(keeper, "write_record", lambda _job, _spec, outcome: outcome)
    monkeypatch.setattr(keeper, "time", SimpleNamespace(time=lambda: BEGAN + sum(queue)))
    event = {"Action": "admit", "Job": "j", "Spec": SPEC.to_json(), "Began": BEGAN}
    while (answer := keeper.handler(event, None))["status"] == JobStatus.QUEUED:
        queue.append(answer["pause"])
    assert queue[:20] == [CONSISTENT_S] * 20, "no look is sooner: the list has all that began"
    assert all(pause <= max(CONSISTENT_S, sum(queue[:i]) / 19) for i, pause in enumerate(queue))
    assert sum(queue) >= MAX_SECONDS, "the longest job is over then"
    # Events at most, from one look and one request to the next.
    assert len(queue) * 9 + len(found) * 20 < 25_000


def test_ecs_takes_the_token_of_an_execution_with_the_longest_name(synth: Synth) -> None:
    states, known = definition(synth)["States"], started({})
    known["states"]["context"]["Execution"]["Name"] = "j" * 80
    known |= evaluate(states["Begin"]["Assign"], known, BEGAN)
    tokens = {known["token"], evaluate(states["Again"]["Assign"]["token"], known, BEGAN)}
    assert [len(each) for each in tokens] == [64, 64]


def test_no_order_outlasts_the_hours_that_the_deployment_allows(synth: Synth) -> None:
    """From its admission on, which is two hours after it began here."""
    states = definition(synth)["States"]
    (admitted,) = [each for each in states["Admitted"]["Choices"] if each["Next"] == "Head"]
    orders: list[dict[str, Any]] = [{"max_seconds": 60}, {"max_seconds": 10**9}, {}]
    now, limit = int(BEGAN) + 7200, 336 * 3600
    found = []
    for order in orders:
        known = started(order)
        known |= evaluate(states["Begin"]["Assign"], known, BEGAN) | {"outcome": {"nodes": "1"}}
        assigned = evaluate(admitted["Assign"], known, now + 0.4)
        assert assigned["asked"] == now + 0.4
        found.append(assigned["deadline"])
    assert found == [now + 60, now + limit, now + DEFAULT_MAX_SECONDS]
