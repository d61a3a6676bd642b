"""The picture of the architecture is that of the templates, and cannot fall behind unnoticed."""

import copy

import pytest

from docs import diagram
from tests.conftest import ROOT
from tests.stacks.conftest import Synth, Templates

PICTURE = ROOT / "docs" / "images" / "architecture.svg"


def drawn(templates: Templates) -> str:
    return diagram.draw(templates.core, templates.training)


def test_the_picture_in_the_documentation_is_that_of_the_templates(synth: Synth) -> None:
    assert PICTURE.read_text() == drawn(synth()), (
        "the stacks have changed: make synth && "
        "python docs/diagram.py cdk.out > docs/images/architecture.svg"
    )


def test_what_nobody_drew_ends_the_script(synth: Synth) -> None:
    core = copy.deepcopy(synth().core)
    core["Resources"]["New"] = {"Type": "AWS::FSx::FileSystem"}
    with pytest.raises(SystemExit, match="does not know AWS::FSx::FileSystem"):
        diagram.draw(core, synth().training)


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"preset": "fsdp"}, "0 to 1 x g5.12xlarge, on demand"),
        ({"preset": "cpu"}, "0 GPUs"),
        ({"spot": "true"}, "g5.xlarge, spot<"),
        ({"interface_endpoints": "true"}, "4 interface endpoints"),
        ({"github_repository": "a/b"}, "pushed by one GitHub branch"),
        ({"alarm_email": "ops@example.org"}, "sent by e-mail"),
        ({"vpc_cidr": "10.3.0.0/20"}, "VPC 10.3.0.0/20"),
    ],
)
def test_another_deployment_is_another_picture(
    synth: Synth, settings: dict[str, str], shown: str
) -> None:
    picture = drawn(synth(**settings))
    assert shown in picture
    assert picture != drawn(synth())


def test_every_reason_to_leave_something_out_is_needed(synth: Synth) -> None:
    everything = synth(
        interface_endpoints="true",
        retain_bucket="false",
        github_repository="a/b",
        alarm_email="ops@example.org",
    )
    kinds = {resource["Type"] for resource in everything.resources.values()}
    assert kinds == diagram.DRAWN | diagram.LEFT_OUT.keys()
