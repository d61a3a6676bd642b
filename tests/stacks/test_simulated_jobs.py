"""Lives of jobs in virtual time: the synthesized state machine around the real keeper.

A few hundred orders, each from a seed, say when ECS gives up on a host for the head, when a host
is lost and when the command ends. Days pass in microseconds, which no deployment can show.
"""

import functools
import importlib
import json
import random
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from types import ModuleType
from typing import Any, Final

import pytest

from contract import job_outcome
from contract.job import DEFAULT_ATTEMPTS, DEFAULT_MAX_SECONDS, MAX_SECONDS, JobSpec, JobStatus
from contract.nodes import Range
from tests.clock import FakeClock
from tests.conftest import ROOT
from tests.stacks.conftest import Synth
from tests.stacks.test_job_keeper import Aws, definition

BEGAN: Final = 1_795_305_600.5
WAIT_S: Final = 1800
NUM_ORDERS: Final = 400


# --- JSONata --------------------------------------------------------------------------------------
@functools.cache
def compiled(expression: str) -> Any:
    """A JSONata expression; its evaluator is installed for the local AWS only."""
    (packages,) = (ROOT / ".venv-aws" / "lib").glob("python*/site-packages")
    sys.path.append(str(packages))
    try:
        jsonata = importlib.import_module("jsonata.jsonata").Jsonata
    finally:
        sys.path.remove(str(packages))
    return jsonata.jsonata(expression)


def evaluate(value: Any, variables: dict[str, Any], now: float) -> Any:
    """A value of the definition, with its expressions evaluated at a time."""
    if isinstance(value, dict):
        return {name: evaluate(each, variables, now) for name, each in value.items()}
    if not (isinstance(value, str) and value.startswith("{%")):
        return value
    text = value.removeprefix("{%").removesuffix("%}").replace("$millis()", "$virtual_ms")
    expression = compiled(text)
    frame = expression.create_frame()
    for name, each in {**variables, "virtual_ms": now * 1000}.items():
        frame.bind(name, each)
    return expression.evaluate({}, frame)


def started(order: dict[str, Any]) -> dict[str, Any]:
    """What an execution knows when it starts."""
    start = datetime.fromtimestamp(BEGAN, tz=UTC).isoformat(timespec="milliseconds")
    execution = {"Name": order.get("run", "r"), "StartTime": start.replace("+00:00", "Z")}
    return {"states": {"input": order, "context": {"Execution": execution}}}


# --- a life ---------------------------------------------------------------------------------------
NO_HOST: Final = {
    "StopCode": "TaskFailedToStart",
    "StoppedReason": "Capacity is unavailable at this time",
    "Containers": [{}],
}
LOST: Final = {
    "StopCode": "SpotInterruption",
    "StoppedReason": "Host EC2 (instance i-1) terminated.",
    "Containers": [{}],
}
DONE: Final = {
    "StopCode": "EssentialContainerExited",
    "StoppedReason": "Essential container in task exited",
    "Containers": [{"ExitCode": 0}],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """The ends of a job's heads, each after so many seconds, and what must come of it."""

    ends: list[tuple[float, dict[str, Any]]]
    status: JobStatus
    attempts: int

    @classmethod
    def from_seed(cls, seed: int) -> "Life":
        chance = random.Random(seed)
        num_lost = chance.randint(0, DEFAULT_ATTEMPTS)
        is_starved = chance.random() < 0.2

        def waits(most: int) -> list[tuple[float, dict[str, Any]]]:
            return [(chance.randint(60, 400), NO_HOST) for _ in range(most)]

        ends = []
        for _ in range(num_lost):
            # In all, less than the job waits for a host: each attempt has that time anew.
            ends += [*waits(chance.randint(0, 3)), (chance.randint(60, 20_000), LOST)]
        if num_lost == DEFAULT_ATTEMPTS:
            return cls(ends=ends, status=JobStatus.HOST_LOST, attempts=num_lost)
        if is_starved:
            ends += waits(WAIT_S // 60)
            return cls(ends=ends, status=JobStatus.NO_CAPACITY, attempts=num_lost)
        ends += [*waits(chance.randint(0, 3)), (chance.randint(60, 20_000), DONE)]
        return cls(ends=ends, status=JobStatus.SUCCEEDED, attempts=num_lost + 1)


def play(
    states: dict[str, Any], keeper: ModuleType, spec: JobSpec, life: Life, clock: FakeClock
) -> str:
    """Run the machine to its end, and return the name of its last state."""
    variables = started(json.loads(spec.to_json()))
    ends = iter(life.ends)
    at = "Begin"
    for _ in range(1000):
        state = states[at]
        match state["Type"]:
            case "Succeed" | "Fail":
                return at
            case "Pass":
                variables |= evaluate(state["Assign"], variables, clock.now)
                at = state["Next"]
            case "Wait":
                clock.sleep(evaluate(state["Seconds"], variables, clock.now))
                at = state["Next"]
            case "Choice":
                chosen = [
                    each["Next"]
                    for each in state["Choices"]
                    if evaluate(each["Condition"], variables, clock.now)
                ]
                at = [*chosen, state["Default"]][0]
            case "Task" if at == "Head":
                seconds, task = next(ends)
                clock.sleep(seconds)
                failed = {"Error": "States.TaskFailed", "Cause": json.dumps(task)}
                variables["ended"] = {"Task": task} if task is DONE else failed
                at = state["Next"]
            case "Task":
                event = evaluate(state["Arguments"]["Payload"], variables, clock.now)
                variables["outcome"] = keeper.handler(json.loads(json.dumps(event)), None)
                at = state["Next"]
            case kind:
                raise AssertionError(f"{at} is a state of a kind that is not played here: {kind}")
    raise AssertionError("the job does not end")


def test_every_life_of_a_job_ends_with_one_true_record(
    keeper: ModuleType, synth: Synth, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, aws, clock = definition(synth)["States"], Aws(), FakeClock()
    monkeypatch.setattr(keeper.boto3, "client", aws.client)
    monkeypatch.setattr(keeper, "time", clock)
    monkeypatch.setattr(job_outcome, "time", clock)
    lives = {f"r{seed}": Life.from_seed(seed) for seed in range(NUM_ORDERS)}
    assert {life.status for life in lives.values()} == {
        JobStatus.SUCCEEDED,
        JobStatus.HOST_LOST,
        JobStatus.NO_CAPACITY,
    }, "each end is among them"
    for run, life in lives.items():
        clock.now = BEGAN
        spec = JobSpec(
            run=run,
            command=("true",),
            nodes=Range(1, 1),
            max_seconds=MAX_SECONDS,
            capacity_wait_s=WAIT_S,
        )
        end = play(states, keeper, spec, life, clock)
        record = aws.objects[f"runs/{run}/jobs/{run}.json"]
        assert (record["status"], record["attempts"]) == (life.status, life.attempts), (run, life)
        assert end == ("Succeeded" if life.status == JobStatus.SUCCEEDED else "Failed")
    assert len(aws.objects) == NUM_ORDERS


# --- single states --------------------------------------------------------------------------------
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
