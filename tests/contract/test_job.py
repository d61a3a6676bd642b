"""A job's order and its outcome survive the way through JSON, and what is wrong is refused at once.

The same object is built by the command line and by the head, so what these tests see refused never
reaches a host.
"""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from contract import job
from contract.errors import InputError
from contract.instance_types import Prices, instance_type
from contract.job import JobSpec, JobStatus, Outcome, Placement
from contract.nodes import ENV_JOB_SPEC, Range

#: One of them without a list price.
PRICES = Prices.of(
    region="us-east-1",
    head=instance_type("m5.large"),
    worker=instance_type("p5e.48xlarge"),
    spot=False,
)
SPEC = JobSpec(run="r1", command=("python", "mine.py"), nodes=Range(1, 4))


def values(spec: JobSpec) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(spec.to_json())
    return found


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, nodes=Range(0, 0)),
        replace(
            SPEC,
            command=("sh", "-c", "echo 'a \"b\"' \\ ü\n"),
            max_seconds=60,
            capacity_wait_s=0,
            idle_s=5,
            on=Placement.NODES,
            code="s3://bucket/runs/r1/jobs/j.zip",
            code_sha256="0123456789abcdef" * 4,
            variables={"A": "", "B": "{}"},
            secrets={"KEY": "training/key"},
            prices=PRICES,
        ),
        replace(SPEC, recipe="ddp"),
    ],
)
def test_an_order_survives_the_way_through_json(spec: JobSpec) -> None:
    assert JobSpec.from_json(spec.to_json()) == spec
    assert JobSpec.from_json(json.dumps(values(spec), indent=1)) == spec


def test_an_execution_is_named_after_its_job() -> None:
    machine = "arn:aws:states:eu-west-1:1:stateMachine:jobs"
    assert job.execution_arn(machine, "r1-7") == "arn:aws:states:eu-west-1:1:execution:jobs:r1-7"


def test_defaults_are_filled_in() -> None:
    given = '{"run": "r1", "command": ["python", "mine.py"], "nodes": "1:4"}'
    assert JobSpec.from_json(given) == SPEC
    assert (SPEC.on, SPEC.code_sha256) == (Placement.HEAD, "")
    assert (SPEC.max_seconds, SPEC.capacity_wait_s, SPEC.idle_s) == (86_400, 1800, 60)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ('{"run": "a/b"}', "'a/b'"),
        ('{"run": 3}', "run is 3"),
        ('{"command": []}', r"command is \[\]"),
        ('{"command": "ls"}', "command is 'ls'"),
        ('{"command": [""]}', r"command is \[\'\'\]"),
        ('{"nodes": "4:1"}', "nodes is 4:1"),
        ('{"nodes": "many"}', "nodes is many"),
        ('{"max_seconds": 0}', "max_seconds is 0: .* 1 to 1209600"),
        ('{"max_seconds": true}', "max_seconds is True"),
        ('{"idle_s": 0}', "idle_s is 0: .* 1 to"),
        ('{"code": "/tmp/x.zip"}', "code is '/tmp/x.zip'"),
        ('{"code": "s3://b/c.zip", "code_sha256": "ab"}', "code_sha256 is 'ab'"),
        (json.dumps({"code_sha256": "a" * 64}), "code_sha256 "),
        ('{"colour": 9}', " colour,"),
        ('{"notify": "<a@b.c>"}', "notify is '<a@b.c>'"),
        ('{"recipe": 3}', "recipe is 3"),
        ('{"recipe": "ddp", "code": "s3://b/c.zip"}', "recipe is 'ddp'"),
        ('{"on": "moon"}', "on is 'moon': .* head, nodes"),
        ('{"variables": {"A": 1}}', "variables is 1"),
        ('{"variables": ["A"]}', r"variables is \['A'\]"),
        ('{"variables": {"1A": ""}}', "variable is '1A'"),
        (
            '{"variables": {"RAY_ADDRESS": "x"}}',
            "variable RAY_ADDRESS",
        ),
        ('{"secrets": {"A": "other"}}', "secret of A is 'other': .* training/"),
        ('{"prices": {}}', "prices is {}"),
        (
            json.dumps({"prices": {**asdict(PRICES), "nat_usd_per_hour": "free"}}),
            "prices is {'region': .*'free'",
        ),
        (
            '{"variables": {"A": "x"}, "secrets": {"A": "training/x"}}',
            "A: ",
        ),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(changed: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        JobSpec.from_json(json.dumps(values(SPEC) | json.loads(changed)))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '"x"'])
def test_what_is_no_order_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="a job's order is not a JSON object"):
        JobSpec.from_json(text)


@pytest.mark.parametrize("name", ["run", "command", "nodes"])
def test_what_has_no_default_must_be_there(name: str) -> None:
    given = values(SPEC)
    del given[name]
    with pytest.raises(InputError, match=f"order has no {name}"):
        JobSpec.from_json(json.dumps(given))


def test_the_largest_order_that_ecs_accepts_passes_and_one_more_character_does_not() -> None:
    name = "j" * job.MAX_JOB_ID

    def sent(spec: JobSpec) -> int:
        """Characters of what RunTask is given, with all but ASCII escaped."""
        variables = job.head_variables(job=name, deadline="1800000000", spec=spec.to_json())
        override = {
            "containerOverrides": [
                {
                    "name": "ray",
                    "environment": [{"name": n, "value": v} for n, v in variables.items()],
                }
            ]
        }
        assert variables[ENV_JOB_SPEC] == spec.to_json()
        return len(json.dumps(override, separators=(",", ":")))

    # Quotes count more than once: they are escaped inside a text inside a text.
    quoted = replace(SPEC, variables={"A": '"' * 100})
    room = job.MAX_OVERRIDES - sent(quoted)
    largest = replace(quoted, command=(*quoted.command, "x" * (room - len(',\\"\\"'))))
    assert sent(largest) == job.MAX_OVERRIDES
    largest.check_size(name)
    with pytest.raises(InputError, match=r"of 8,193 characters, and ECS accepts 8,192"):
        replace(largest, command=(*largest.command[:-1], largest.command[-1] + "x")).check_size(
            name
        )


def test_letters_beyond_ascii_count_as_their_escapes() -> None:
    with pytest.raises(InputError, match="and ECS accepts"):
        replace(SPEC, command=("echo", "ü" * 2000)).check_size("j")
    replace(SPEC, command=("echo", "u" * 2000)).check_size("j")


# --- how it ended ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(status=JobStatus.RUNNING, reason="running"),
        Outcome(
            status=JobStatus.HOST_LOST,
            reason="failed: its host was lost",
            exit_code=137,
            again=True,
            attempts=2,
            began=1.5,
            ended=2.5,
            deadline=9.0,
        ),
    ],
)
def test_an_outcome_survives_the_way_through_json(outcome: Outcome) -> None:
    assert Outcome.from_json(outcome.to_json()) == outcome
    assert Outcome.from_json(job.record_json("j1", SPEC, outcome)) == outcome


def test_a_record_says_what_the_job_was_and_no_values_of_variables() -> None:
    outcome = Outcome(status=JobStatus.SUCCEEDED, reason="succeeded")
    spec = replace(SPEC, variables={"TOKEN": "hidden"}, prices=PRICES)
    found = json.loads(job.record_json("j1", spec, outcome))
    assert (found["job"], found["run"], found["nodes"]) == ("j1", "r1", "1:4")
    assert found["command"] == ["python", "mine.py"]
    assert found["prices"]["head"]["type"] == "m5.large"
    assert "hidden" not in json.dumps(found)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"status": 3}', '{"status": "evicted"}', "Lambda.Unknown"]
)
def test_what_is_no_outcome_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"is not a JSON object|status is |has no status"):
        Outcome.from_json(text)


# --- why a task was stopped -----------------------------------------------------------------------
@pytest.mark.parametrize("status", JobStatus)
def test_a_stop_reason_names_its_status(status: JobStatus) -> None:
    assert job.status_of_stop(job.stop_reason(status, "why")) == status


@pytest.mark.parametrize("text", ["", "no capacity", "[unheard] of", "x [deadline] y"])
def test_other_peoples_stop_reasons_name_none(text: str) -> None:
    assert job.status_of_stop(text) is None
