"""Every setting can be changed, alone and with the others, and the templates show it."""

import itertools

import pytest

from stacks.settings import PRESETS
from tests.stacks.conftest import Synth, text

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
    assert sorted(group["MaxSize"] for group in groups.values()) == ["2", "4"]
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
    from tests.stacks.conftest import context
    from training.contract import TRAINING_STACK

    again = app.build(cdk.App(context=context())).synth().get_stack_by_name(TRAINING_STACK)
    assert again.template == synth().training
