"""The state of the deployed machine that starts a head: ECS would take its request."""

import json
import re
from typing import Any

import pytest

from contract.job import MAX_SECONDS, JobSpec, head_variables, overrides
from rehearsal.models import faults, request_shape
from tests.simulation.account import evaluate
from tests.stacks.conftest import PRESETS, Synth, text


def definition(synth: Synth, **settings: str) -> dict[str, Any]:
    """References in it are in angle brackets."""
    machine = synth(**settings).only("AWS::StepFunctions::StateMachine")
    found: dict[str, Any] = json.loads(text(machine["DefinitionString"]))
    return found


def as_requested(arguments: Any) -> Any:
    """Arguments of a state as the request has them, with a text in place of each expression."""
    match arguments:
        case dict():
            assert all(name[0].isupper() for name in arguments), "as Step Functions writes them"
            return {
                name[:1].lower() + name[1:]: as_requested(each) for name, each in arguments.items()
            }
        case list():
            return [as_requested(each) for each in arguments]
        case str():
            return re.sub(r"\{%.*%\}", "x", arguments)
    return arguments


@pytest.mark.parametrize("preset", PRESETS)
def test_ecs_takes_the_request_that_starts_a_head(synth: Synth, preset: str) -> None:
    head = definition(synth, preset=preset)["States"]["Head"]
    assert head["Resource"] == "arn:<AWS::Partition>:states:::ecs:runTask.sync"
    assert faults(request_shape("ecs", "RunTask"), as_requested(head["Arguments"])) == []


def test_a_head_has_the_tags_of_its_job_as_workers_have(synth: Synth) -> None:
    head = definition(synth)["States"]["Head"]["Arguments"]
    for user in ({}, {"submitter": "anna@example.com", "user_id": "AROA1:anna@example.com"}):
        order = {"run": "r1", "nodes": "1", "command": ["true"], **user}
        known = {"job": "j", "states": {"context": {"Execution": {"Input": order}}}}
        tags = {each["Key"]: evaluate(each["Value"], known, 0) for each in head["Tags"]}
        assert tags == JobSpec.from_json(json.dumps(order)).tags("j")


def test_a_clean_up_that_fails_goes_on_for_as_long_as_the_longest_job(synth: Synth) -> None:
    """And no history is full before (25,000 events; three of each try)."""
    (retry,) = definition(synth)["States"]["CleanUp"]["Retry"]
    assert retry["ErrorEquals"] == ["States.ALL"]
    tries = range(retry["MaxAttempts"])
    pauses = [retry["IntervalSeconds"] * min(2**each, 10**6) for each in tries]
    assert sum(min(each, retry["MaxDelaySeconds"]) for each in pauses) >= MAX_SECONDS
    assert (pauses[0], retry["BackoffRate"], 3 * len(pauses) < 5000) == (3, 2, True)


def test_what_ecs_calls_throttling_is_asked_again(synth: Synth) -> None:
    """ECS's own name for it, and the one that Step Functions has for all errors without a name."""
    (retry,) = definition(synth)["States"]["Head"]["Retry"]
    assert {"ECS.ServerException", "ECS.AmazonECSException"} <= {*retry["ErrorEquals"]}


def test_the_head_is_told_what_it_reads_and_what_its_size_is_checked_by(synth: Synth) -> None:
    told = definition(synth)["States"]["Head"]["Arguments"]["Overrides"]
    expected = overrides(
        head_variables(job="{% $job %}", deadline="{% $string($deadline) %}", spec="{% $order %}")
    )

    def renamed(value: Any) -> Any:
        """As Step Functions writes ECS's names."""
        if isinstance(value, dict):
            return {name[:1].upper() + name[1:]: renamed(each) for name, each in value.items()}
        return [renamed(each) for each in value] if isinstance(value, list) else value

    assert told == renamed(expected)
