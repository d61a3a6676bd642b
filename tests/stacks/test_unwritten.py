"""Templates keep AWS's rules that no schema has, with every name at full length."""

import json
from typing import Any

import pytest

from contract.outputs import CORE_STACK, TRAINING_STACK
from contract.reserved import RESERVED
from rehearsal import unwritten
from tests.stacks.conftest import OPTIONS, PRESETS, Synth

#: The longest that a deployment may be called.
LONGEST = "m" * 30
MOST_POOLS = json.dumps(
    {
        f"a-pool-of-20-chars-{letter}": {"worker_instance_type": "g5.12xlarge"}
        for letter in "abcdefghijklmnopqr"
    }
)


@pytest.mark.parametrize(
    "settings",
    [
        *({"preset": name} for name in PRESETS),
        OPTIONS | {"efa": "on", "shared_storage": "fsx", "availability_zone": ""},
        {"availability_zone": "us-west-2a", "pools": MOST_POOLS},
    ],
    ids=[*PRESETS, "options", "pools"],
)
def test_the_templates_break_no_rule(synth: Synth, settings: dict[str, str]) -> None:
    made = synth(**settings, deployment=LONGEST)
    for name, template in ((CORE_STACK, made.core), (TRAINING_STACK, made.training)):
        assert [*unwritten.in_template(template, f"{LONGEST}-{name}")] == []


def planted(path: str, value: Any) -> Any:
    """Properties with a value at a path of the table."""
    first, _, rest = path.partition(".")
    inner = planted(rest, value) if rest else value
    if first == "*":
        return [inner]
    # The one text that has parts of its own.
    return {first: json.dumps(inner) if first == "DashboardBody" else inner}


def too_much(size: unwritten.Size) -> Any:
    """Properties with one more; of a text, its characters count as the elements of a list do."""
    one: Any = [{}] if size.path in ("SecurityGroupIngress", "Targets") else "x"
    return planted(size.path or "x", one * (size.most + 1))


SIZES = [(kind, size) for kind, sizes in unwritten.SIZES.items() for size in sizes]
ROWS: list[tuple[str, Any, str, str]] = [
    *((kind, too_much(size), "s", f"at most {size.most:,} ") for kind, size in SIZES),
    *(
        (kind, planted(size.path, text), "s", "other characters")
        for kind, size in SIZES
        for text in (("the team's", "a → b") if size.pattern else ())
    ),
    *(
        (kind, {name.property: "r" * (name.most + 1)}, "s", f" takes {name.most}")
        for kind, name in unwritten.NAMES.items()
    ),
    *((kind, {}, f"{name.upper()}ml", "a name") for kind in RESERVED for name in RESERVED[kind]),
    ("AWS::ECS::CapacityProvider", {"Name": "FARGATE-x"}, "s", "a name that"),
    ("AWS::S3::Bucket", {"BucketName": "mine--ol-s3"}, "s", "a name that"),
    ("AWS::SSM::Parameter", {"Name": "/AWS/x"}, "s", "a name that"),
    ("AWS::Logs::LogGroup", {"LogGroupName": "aws/x"}, "s", "a name that"),
    ("AWS::CloudWatch::Dashboard", {"DashboardName": "a.b"}, "s", "a name that"),
    ("AWS::SNS::Topic", {"Tags": [{}] * 51}, "s", "50 tags"),
]


@pytest.mark.parametrize(("kind", "properties", "stack", "part"), ROWS)
def test_what_a_service_refuses_is_named(
    kind: str, properties: dict[str, Any], stack: str, part: str
) -> None:
    resource = {"Type": kind, "Properties": properties}
    (found,) = unwritten.in_template({"Resources": {"It": resource}}, stack)
    assert part in found


def test_what_many_resources_have_together_is_named() -> None:
    half = {"Roles": ["r"], "PolicyDocument": "x" * 5200}
    policy = {"Type": "AWS::IAM::Policy", "Properties": half}
    logs = {"Type": "AWS::Logs::ResourcePolicy", "Properties": {"PolicyDocument": "x"}}
    for resource, number in ((policy, 2), (logs, 11)):
        few, many = (
            {"Resources": {f"r{each}": resource for each in range(count)}}
            for count in (number - 1, number)
        )
        assert [*unwritten.in_template(few, "s")] == []
        assert len([*unwritten.in_template(many, "s")]) == 1


def test_a_name_that_is_generated_is_cut_and_keeps_its_end() -> None:
    found = unwritten.name_of("AWS::Lambda::Function", "Logical", {}, "s" * 80)
    assert len(found) == 64
    assert found.endswith("s-0123456789AB")
