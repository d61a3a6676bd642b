"""Each state of the deployed machine that calls a service is one that the service would take."""

import json
import re
from typing import Any

import pytest

from contract.job import JOB_TAG
from rehearsal.models import state_faults
from tests.stacks.conftest import PRESETS, Synth, text


def definition(synth: Synth, preset: str) -> dict[str, Any]:
    """The machine's definition; what only a deployment knows is an expression in it."""
    machine = synth(preset=preset).only("AWS::StepFunctions::StateMachine")
    told = text(machine["DefinitionString"]).replace("<AWS::Partition>", "aws")
    found: dict[str, Any] = json.loads(re.sub(r"<[\w:.]+>", "{%%}", told))
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_the_calls_of_the_machine_are_calls_that_there_are(synth: Synth, preset: str) -> None:
    assert state_faults(definition(synth, preset)) == []


@pytest.mark.parametrize(
    ("path", "name", "fault"),
    [
        ((), "EnableExecuteCmd", "Head: EnableExecuteCmd: there is no such parameter"),
        (
            ("NetworkConfiguration", "AwsvpcConfiguration"),
            "subnets",
            "Head: NetworkConfiguration.AwsvpcConfiguration.subnets: there is no such parameter",
        ),
    ],
)
def test_a_parameter_that_is_misspelled_is_found(
    synth: Synth, path: tuple[str, ...], name: str, fault: str
) -> None:
    machine = definition(synth, PRESETS[0])
    part = machine["States"]["Head"]["Arguments"]
    for each in path:
        part = part[each]
    part[name] = True
    assert state_faults(machine) == [fault]


def test_a_head_has_its_job_as_a_tag(synth: Synth) -> None:
    head = definition(synth, PRESETS[0])["States"]["Head"]["Arguments"]
    assert head["Tags"] == [{"Key": JOB_TAG, "Value": "{% $job %}"}]


def test_what_ecs_calls_throttling_is_asked_again(synth: Synth) -> None:
    """ECS's own name for it, and the one that Step Functions has for all errors without a name."""
    (retry,) = definition(synth, PRESETS[0])["States"]["Head"]["Retry"]
    assert {"ECS.ServerException", "ECS.AmazonECSException"} <= {*retry["ErrorEquals"]}
