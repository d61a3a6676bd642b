"""Synthesized templates of the app, in this process, one synth per combination of settings."""

import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import app  # before any test imports the CDK: it decides what is printed about an old Node.js
from contract.outputs import CORE_STACK, TRAINING_STACK
from stacks.jobs.infrastructure import KEEPER
from stacks.jobs.keeper import cluster
from tests.conftest import ROOT
from tests.stacks import lambda_functions

Template = dict[str, Any]


class Templates(NamedTuple):
    """Both templates of one synth, as JSON."""

    core: Template
    training: Template
    folder: str
    """Where the cloud assembly is, for ``cdk --app``."""
    warnings: tuple[str, ...]
    """Of TrainingStack, as the command line prints them."""

    @property
    def resources(self) -> dict[str, dict[str, Any]]:
        """All resources of both, by logical id."""
        return {**self.core["Resources"], **self.training["Resources"]}

    def of_type(self, kind: str) -> dict[str, dict[str, Any]]:
        """Properties of all resources of a type, by logical id."""
        return {
            name: resource.get("Properties", {})
            for name, resource in self.resources.items()
            if resource["Type"] == kind
        }

    def only(self, kind: str) -> dict[str, Any]:
        """Properties of the one resource of a type."""
        (properties,) = self.of_type(kind).values()
        return properties


Synth = Callable[..., Templates]


def context(**settings: str) -> dict[str, Any]:
    """CDK's context: cdk.json with ``settings`` as ``-c`` would add them."""
    given: dict[str, Any] = json.loads((ROOT / "cdk.json").read_text())["context"]
    return given | settings


#: As cdk.json names them.
PRESETS = tuple(context()["presets"])
#: Every setting that is off or has another value by default, as far as they go together. Half a
#: second for each synth: most tests of one setting read these templates.
#: What an organization has already, in the place of what the stacks would make.
EXISTING = {
    "preset": "ddp",
    "region": "eu-west-1",
    "availability_zone": "eu-west-1b",
    "vpc_id": "vpc-0123456789abcdef0",
    "subnet_id": "subnet-0123456789abcdef0",
    "bucket": "acme-training",
    "data_buckets": "acme-images,acme.text",
    "worker_ami": "/acme/ecs-gpu-ami",
    "tags": "CostCenter=42,Owner=ml team",
    "pools": json.dumps(
        {
            "other": {
                "availability_zone": "eu-west-1c",
                "subnet_id": "subnet-0123456789abcdef1",
            }
        }
    ),
}
OPTIONS = {
    "preset": "fsdp",
    "region": "us-west-2",
    "availability_zone": "us-west-2b",
    "vpc_cidr": "10.7.0.0/16",
    "namespace": "ray.local",
    "max_workers": "4",
    "spot": "true",
    "efa": "off",
    "root_volume_gib": "500",
    "image_tag": "0123abc",
    "retain_bucket": "false",
    "log_retention_days": "7",
    "alarm_email": "ops@example.org",
    "github_repository": "acme/train",
    "github_branch": "release",
}
#: Six pools: each market, another zone, a type with EFA.
POOLS = {
    "preset": "ddp",
    "availability_zone": "us-west-2a",
    "pools": json.dumps(
        {
            "a10g-spot": {"worker_instance_type": "g5.12xlarge", "spot": True, "max_workers": 4},
            "a10g": {"worker_instance_type": "g5.12xlarge", "max_workers": 4},
            "l40s-c": {
                "worker_instance_type": "g6e.24xlarge",
                "availability_zone": "us-west-2c",
                "root_volume_gib": 500,
            },
            "l4-c": {"worker_instance_type": "g6.xlarge", "availability_zone": "us-west-2c"},
            "block": {
                "worker_instance_type": "p5.48xlarge",
                "capacity_reservation_id": "cr-0123456789abcdef0",
            },
            "odcr": {
                "worker_instance_type": "p4d.24xlarge",
                "max_workers": 1,
                "capacity_reservation_id": "cr-0123456789abcdef1",
                "capacity_reservation_type": "on-demand",
                "image_tag": "mine",
            },
        }
    ),
}
#: Other values of some.
OTHERS = {
    "container_insights": "false",
    "session_manager": "true",
    "github_repository": "acme@12/train@345",
    "github_oidc_provider_arn": "arn:aws:iam::123456789012:oidc-provider/"
    "token.actions.githubusercontent.com",
}


@functools.cache
def synthesized(settings: tuple[tuple[str, str], ...]) -> Templates:
    """The templates of these settings, sorted."""
    import aws_cdk as cdk

    # CDK's own checks take longer than all the rest; test_rules and test_deploy have them.
    unchecked = cdk.App(context=context(**dict(settings)), builtin_cloud_formation_validation=False)
    cloud = app.build(unchecked).synth()
    training = cloud.get_stack_artifact(TRAINING_STACK)
    metadata = Path(cloud.directory, f"{TRAINING_STACK}.metadata.json")
    return Templates(
        core=cloud.get_stack_artifact(CORE_STACK).template,
        training=training.template,
        folder=cloud.directory,
        # From the file: two packages bring the module that `training.messages` needs, and only one
        # of them has its types.
        warnings=tuple(
            entry["data"]
            for entries in json.loads(metadata.read_text()).values()
            for entry in entries
            if entry["type"] == "aws:cdk:warning"
        ),
    )


@pytest.fixture(scope="session")
def synth() -> Synth:
    """``synth(preset="fsdp", spot="true")`` -> the templates; not to be modified."""
    default = context()["preset"]
    return lambda **settings: synthesized(tuple(sorted({"preset": default, **settings}.items())))


@functools.cache
def create_only(kind: str) -> tuple[str, ...]:
    """Create-only properties of a type, as CloudFormation's DescribeType has them."""
    if kind.startswith("Custom::"):
        return ()
    from cfnlint.schema import PROVIDER_SCHEMA_MANAGER

    schema = PROVIDER_SCHEMA_MANAGER.get_resource_schema("us-east-1", kind).schema
    return tuple(schema.get("createOnlyProperties", ()))


def text(value: Any) -> str:
    """A template's value as text: references in angle brackets, so that parts can be looked for."""
    match value:
        case {"Ref": name}:
            return f"<{name}>"
        case {"Fn::GetAtt": [name, attribute]}:
            return f"<{name}.{attribute}>"
        case {"Fn::ImportValue": name}:
            return f"<{name}>"
        case {"Fn::Join": [separator, parts]}:
            return str(separator).join(text(part) for part in parts)
        case {"Fn::Base64": inner}:
            return text(inner)
        case {"Fn::Sub": inner}:
            return str(inner)
        case dict() | list():
            return json.dumps(value)
    return str(value)


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Environment variables of a container definition."""
    return {each["Name"]: text(each["Value"]) for each in container["Environment"]}


def statements(policy: dict[str, Any]) -> list[dict[str, Any]]:
    """Statements of a policy document, with actions and resources as lists of text."""
    found = []
    for statement in policy["Statement"]:
        one = dict(statement)
        for key in ("Action", "Resource"):
            value = one.get(key, [])
            one[key] = [text(each) for each in (value if isinstance(value, list) else [value])]
        found.append(one)
    return found


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the function that cleans up after jobs, as Lambda loads it."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("CLUSTER", "cluster")
    monkeypatch.setenv("BUCKET", "bucket")
    monkeypatch.setenv("GROUPS", "heads=for-heads workers=for-workers")
    monkeypatch.setenv("STACK", "S")
    monkeypatch.setenv("POOLS", '{"l4": 2}')
    monkeypatch.setenv("PLACES", "l4=l4")
    monkeypatch.setenv("FAMILIES", "head worker")
    monkeypatch.setenv("HEAD_FAMILY", "head")
    monkeypatch.setenv("STATE_MACHINE", "arn:aws:states:us-east-1:1:stateMachine:jobs")
    importlib.reload(cluster)  # reads the variables too, and another test may have imported it
    return lambda_functions.load(KEEPER / "index.py")
