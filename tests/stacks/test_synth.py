"""Every setting can be changed, alone and with the others, and the templates show it. What is
checked is validated, and validation changes nothing in what is deployed."""

import itertools
from pathlib import Path

import pytest

from rehearsal.cdk import Cdk
from rehearsal.processes import CommandError
from tests.stacks.conftest import PRESETS, Synth, context, text

OVERRIDES = {
    "max_workers": "4",
    "spot": "true",
    "vpc_cidr": "192.168.0.0/20",
    "availability_zone": "us-west-2b",
    "retain_bucket": "false",
    "interface_endpoints": "true",
    "image_tag": "0123abc",
    "alarm_email": "ops@example.org",
    "github_repository": "acme/train",
    "expire_after_days": "90",
    "log_retention_days": "365",
    "region": "us-west-2",
}


@pytest.mark.parametrize(
    ("name", "preset"),
    [*zip(OVERRIDES, itertools.cycle(PRESETS), strict=False)],
)
def test_one_override_changes_the_templates(synth: Synth, name: str, preset: str) -> None:
    plain, changed = synth(preset=preset), synth(preset=preset, **{name: OVERRIDES[name]})
    assert plain.resources != changed.resources


@pytest.mark.parametrize("preset", PRESETS)
def test_all_overrides_together(synth: Synth, preset: str) -> None:
    templates = synth(preset=preset, **OVERRIDES)
    assert templates.only("AWS::EC2::VPC")["CidrBlock"] == "192.168.0.0/20"
    groups = templates.of_type("AWS::AutoScaling::AutoScalingGroup")
    assert sorted(group["MaxSize"] for group in groups.values()) == ["1", "4"]
    zones = {
        text(each["AvailabilityZone"]) for each in templates.of_type("AWS::EC2::Subnet").values()
    }
    assert zones == {"us-west-2b"}
    for definition in templates.of_type("AWS::ECS::TaskDefinition").values():
        assert text(definition["ContainerDefinitions"][0]["Image"]).endswith(":0123abc")
    assert templates.core["Resources"]["Bucket"]["DeletionPolicy"] == "Delete"
    assert "AWS::SNS::Topic" in {each["Type"] for each in templates.resources.values()}
    assert len(templates.of_type("AWS::EC2::VPCEndpoint")) == 5


def test_templates_are_the_same_each_time(synth: Synth) -> None:
    import aws_cdk as cdk

    import app
    from contract.outputs import TRAINING_STACK

    again = app.build(cdk.App(context=context())).synth().get_stack_by_name(TRAINING_STACK)
    assert again.template == synth().training


# --- validation ---------------------------------------------------------------------------------
def test_what_tests_synthesize_is_validated() -> None:
    import aws_cdk as cdk
    from aws_cdk import aws_s3 as s3

    cloud = cdk.App(context=context())
    bucket = s3.CfnBucket(cdk.Stack(cloud, "BrokenStack"), "Bucket")
    bucket.add_property_override("NoSuchProperty", 1)
    with pytest.raises(RuntimeError, match="NoSuchProperty"):
        cloud.synth()


def test_a_deploys_templates_are_those_that_are_validated_to_the_byte(tmp_path: Path) -> None:
    import aws_cdk as cdk

    import app

    for name, validates in {"validated": True, "deployed": False}.items():
        cloud = cdk.App(
            context=context(),
            outdir=str(tmp_path / name),
            builtin_cloud_formation_validation=validates,
        )
        app.build(cloud).synth()
    validated = sorted((tmp_path / "validated").glob("*.template.json"))
    assert [path.name for path in validated] == [
        "CoreStack.template.json",
        "TrainingStack.template.json",
    ]
    for path in validated:
        assert path.read_bytes() == (tmp_path / "deployed" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("command", "validation"),
    [("synth", ""), ("deploy", "false"), ("diff", "false"), ("destroy --force", "false")],
)
def test_the_command_line_validates_a_synth_and_no_deploy(
    tmp_path: Path, command: str, validation: str
) -> None:
    """Validating takes more than half of a synth's time, and `make check` has done it."""
    probe = f'printf %s "$CDK_VALIDATION" > {tmp_path}/seen; exit 1'
    with pytest.raises(CommandError):
        Cdk(tmp_path, {})(*command.split(), "AnyStack", "--app", probe)
    assert (tmp_path / "seen").read_text() == validation
