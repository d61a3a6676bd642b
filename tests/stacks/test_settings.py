"""A wrong setting is refused in one sentence: which setting, what was given, what is allowed."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

import app
from contract.cluster_shape import ClusterShape
from contract.errors import InputError
from stacks import settings as deployment
from stacks.settings import Settings
from tests.conftest import ROOT
from tests.stacks.conftest import EXISTING, POOLS, Synth, context

VPC, SUBNET = EXISTING["vpc_id"], EXISTING["subnet_id"]


def load(**settings: str) -> Settings:
    return deployment.load(context(**settings))


def test_what_is_given_beats_the_preset_and_the_preset_beats_the_defaults() -> None:
    file = context(preset="team")
    found = deployment.load(file)
    assert (file["defaults"]["max_heads"], found.max_heads, found.spot) == (1, 4, False)
    assert (found.max_workers, found.max_jobs_per_user, found.monthly_budget_usd) == (8, 2, 2000)
    # By -c, even the default's own value; or in cdk.json, beside the tables.
    for given in ({"max_heads": "1"}, {"max_heads": 1}):
        assert deployment.load(file | given).max_heads == 1
    with pytest.raises(InputError, match="did you mean max_heads"):
        deployment.load(file | {"defaults": file["defaults"] | {"max_head": 1}})


def test_a_cdk_json_without_a_table_of_defaults_deploys_what_it_did() -> None:
    """Until there was one, all of them were beside the presets."""
    earlier = context(preset="fsdp", max_heads="3")
    earlier = earlier.pop("defaults") | earlier
    assert deployment.load(earlier) == load(preset="fsdp", max_heads="3")


def own(*, name: str = "g7.2xlarge", **changed: Any) -> str:
    """Setting ``instance_types`` with a row that the table lacks."""
    row = {"vcpus": 8, "memory_mib": 65536, "network_gbps": 25, "gpu": "L4 22", "num_gpus": 1}
    return json.dumps({name: {**row, "usd_per_hour": 1.25, **changed}})


def test_a_type_that_the_table_lacks_is_a_row_of_the_settings() -> None:
    # As CDK hands it on from cdk.json: every number is a float.
    given = json.loads(own(), parse_int=float)
    found = deployment.load(context(worker_instance_type="g7.2xlarge") | {"instance_types": given})
    assert (found.worker.container_cpu, found.worker.usd_per_hour) == (8 * 1024 - 128, 1.25)
    # It is the deployment's: the command line need not know the settings.
    shape = ClusterShape.from_json(found.shape.to_json())
    assert shape.worker == found.worker
    assert shape.prices("us-east-1").worker.usd_per_hour is not None
    # A row comes before the table's own.
    faster = load(instance_types=own(name="g5.xlarge", gpu="A10G 22"))
    assert faster.worker.vcpus == 8
    with pytest.raises(
        InputError, match=r"'g7\.2xlarge' is not known.*give its row in the setting"
    ):
        load(worker_instance_type="g7.2xlarge")


#: Presets beside those of cdk.json: a name, what changes of which one, and where that is wrong, a
#: setting on the command line and words of the sentence. None: the setting is missing.
PRESETS: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    ("large", "ddp", {"worker_instance_type": "g6e.12xlarge", "max_workers": 8}, {}, ""),
    ("many", "cpu", {"max_workers": 16}, {}, ""),
    ("large", "ddp", {}, {"preset": "larger"}, "one of ddp, fsdp, cpu, team, large"),
    ("large", "ddp", {}, {"worker_instance_type": "m6i.xlarge"}, "preset large"),
    ("many", "cpu", {}, {"worker_instance_type": "g5.xlarge"}, "preset many"),
    ("my ddp", "ddp", {}, {}, "preset is 'my ddp': it must be letters, digits"),
    ("ddp", "ddp", {"max_worker": 3}, {}, "did you mean max_workers"),
    ("ddp", "ddp", {"head_instance_type": None}, {}, "setting head_instance_type is missing"),
    ("ddp", "ddp", {}, {"vpc_cidr": None}, "setting vpc_cidr is missing"),
    ("ddp", "ddp", {}, {"image_tag": 3}, "text"),
]


@pytest.mark.parametrize(("name", "of", "changed", "given", "message"), PRESETS)
def test_another_preset_is_one_more_entry_in_cdk_json(
    name: str, of: str, changed: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    def there(values: dict[str, Any]) -> dict[str, Any]:
        return {each: value for each, value in values.items() if value is not None}

    found = context(preset=name)
    presets = found["presets"] | {name: there(found["presets"][of] | changed)}
    missing = {each for each, value in given.items() if value is None}
    defaults = {each: found["defaults"][each] for each in {*found["defaults"]} - missing}
    found = there(found | {"presets": presets, "defaults": defaults} | given)
    if message:
        with pytest.raises(InputError, match=message):
            deployment.load(found)
    else:
        settings = deployment.load(found)
        assert (settings.preset, settings.max_workers) == (name, changed["max_workers"])


@pytest.mark.parametrize(
    "given", [{}, {"preset": "fsdp", "efa": "on"}, {"shared_storage": "fsx"}, POOLS], ids=str
)
def test_the_command_line_reads_the_shape_that_the_settings_have(given: dict[str, str]) -> None:
    shape = load(**given).shape
    assert ClusterShape.from_json(shape.to_json()) == shape


SINGLE: Final = {"worker_instance_type": "p4d.24xlarge", "head_instance_type": "p4d.24xlarge"}


@pytest.mark.parametrize(
    ("given", "uses_efa"),
    [
        ({"worker_instance_type": "p5.48xlarge"}, True),
        ({"worker_instance_type": "g6e.24xlarge", "max_workers": "3"}, True),
        (SINGLE | {"preset": "fsdp"}, True),  # one worker, and a head that trains
        ({"worker_instance_type": "p5.48xlarge", "max_workers": "1"}, False),
        ({"worker_instance_type": "p5.4xlarge", "max_workers": "8"}, False),
        ({"worker_instance_type": "g5.48xlarge", "max_workers": "8"}, False),
    ],
)
def test_several_nodes_that_need_efa_have_it_unless_it_is_switched_off(
    given: dict[str, str], uses_efa: bool
) -> None:
    """For one, or where one card has all the bandwidth, TCP is enough, and any image has that."""
    found, off = load(**given), load(**given, efa="off")
    assert (found.uses_efa, found.without_efa, off.uses_efa) == (uses_efa, "", False)
    assert bool(off.without_efa) is uses_efa


def test_cdks_own_context_is_no_setting() -> None:
    deployment.load(
        context()
        | {
            "@aws-cdk/core:some-flag": True,
            "aws:cdk:toolkit": "x",
            "availability-zones:account=1:region=eu-west-1": ["eu-west-1a"],
            "aws-cdk:enableDiffNoFail": True,
            "acknowledged-issue-numbers": [32775],
            "cli-telemetry": False,
        }
    )


#: One setting, as it is given with ``-c``.
BAD: Final = (
    *("colour=red", "wrokers=3", "preset=dpp", "presets=ddp", "defaults=1", "spot=yes"),
    *("max_workers=0", "max_workers=two", "root_volume_gib=8", "log_retention_days=31"),
    *(
        f"deployment={name}"
        for name in (
            *("aws", "AWS-team", "awsome", "ecs-ml", "Ecs", "fargate-1", "FARGATE", "sg-lab"),
            *("SG-lab", "xn--lab", "sthree-lab", "amzn-s3-demo-lab"),
            *("TrainingStack", "corestack-a"),
        )
    ),
    *("worker_instance_type=g5.huge", "worker_instance_type=m5.xlarge"),
    *("head_instance_type=g5.xlarge", "capacity_reservation_id=cr-1"),
    *(f"vpc_cidr={value}" for value in ("ten", "10.0.0.0", "10.0.0.1/16", "10.0.0.0/8")),
    *("vpc_cidr=8.8.0.0/16", "vpc_cidr=172.17.0.0/16"),
    *("region=europe", "availability_zone=eu-west-1", "image_tag=a b", "base_image=python:3.12"),
    *("vpc_id=vpc-1", f"subnet_id={SUBNET}", "bucket=s3://mine", "data_buckets=a-1, b-2"),
    *("worker_ami=ami-0123456789abcdef0", "tags=CostCenter", "tags=aws:x=1"),
    *("namespace=Training!", f"namespace={'a.' * 124}b", "alarm_email=me", "github_branch=*"),
    *("github_repository=https://github.com/a/b", "github_repository=a/*"),
    *("github_repository=acme/train.git", "github_oidc_provider_arn=arn:aws:iam::1:role/x"),
    *("efa=yes", "efa=on", "shared_storage=efs", "fsx_capacity_gib=3600", "fsx_mbps_per_tib=200"),
    *("pools=l4", "instance_types=g7", 'instance_types={"g7.xlarge": 1}'),
    *(
        f"instance_types={own(**wrong)}"
        for wrong in (
            {"vcpu": 4},
            {"gpu": "L5"},
            {"vcpus": "4"},
            {"num_gpus": 0},
            {"sold": ["cheap"]},
            {"name": "g7"},
        )
    ),
)


@pytest.mark.parametrize("given", BAD)
def test_a_bad_setting_is_named_in_one_line(given: str) -> None:
    name, _, value = given.partition("=")
    with pytest.raises(InputError, match=rf"^[^\n]*\b{name}\b[^\n]*$"):
        load(**{name: value})


RESERVED: Final = {"capacity_reservation_id": "cr-0123456789abcdef0"}
P5E: Final = {"worker_instance_type": "p5e.48xlarge"}
ZONE: Final = {"availability_zone": "us-east-1a"}


def pools(**tables: Any) -> dict[str, str]:
    return {"pools": json.dumps(tables)}


#: What the sentence names, and settings that do not go together.
TOGETHER: list[tuple[str, dict[str, str]]] = [
    ("worker_instance_type", {"preset": "cpu", "worker_instance_type": "g5.xlarge"}),
    ("head_instance_type", {"preset": "cpu", "head_instance_type": "g5.xlarge"}),
    ("NVIDIA A10G", {"preset": "fsdp", "head_instance_type": "m5.xlarge"}),
    ("NVIDIA L4", {"preset": "fsdp", "worker_instance_type": "g6.12xlarge"}),
    ("spot", P5E | RESERVED | {"spot": "true"}),
    ("spot", P5E | {"spot": "true"}),
    ("capacity_reservation_id", P5E),
    ("capacity_reservation_type", RESERVED),
    ("57 hosts", {"vpc_cidr": "10.0.0.0/24", "max_workers": "56"}),
    ("availability_zone", ZONE | {"region": "eu-west-1"}),
    ("subnet_id", {"vpc_id": VPC}),
    ("availability_zone", {"vpc_id": VPC, "subnet_id": SUBNET}),
    ("log_retention_days", {"monthly_budget_usd": "9"}),
    (
        "head_trains",
        {
            **{"preset": "fsdp", "efa": "on", "worker_instance_type": "g5.12xlarge"},
            "head_instance_type": "g5.xlarge",
        },
    ),
    ("18 pools", ZONE | pools(**{f"p{number}": {} for number in range(19)})),
    ("pool default", pools(default={})),
    ("max_heads", pools(a={"max_heads": 2})),
    ("pool a", pools(a={"worker_instance_type": "m5.large"})),
    ("pool a", pools(a=P5E)),
    ("head_trains", {"preset": "fsdp"} | pools(a={})),
    ("pool a", pools(a={"availability_zone": "us-east-1b"})),
    ("'us-east-1a'", ZONE | pools(a={"availability_zone": "us-west-2a"})),
    (
        "us-east-1b has 10.0.0.32/28",
        ZONE
        | {"vpc_cidr": "10.0.0.0/24"}
        | pools(a={"availability_zone": "us-east-1b", "max_workers": 6}),
    ),
    ("availability_zone", ZONE | pools(a={"availability_zone": "us-east-1h"})),
    ("63 hosts", {"vpc_cidr": "10.0.0.0/24"} | pools(a={"max_workers": 30}, b={"max_workers": 30})),
    (
        "us-east-1b",
        ZONE | {"vpc_id": VPC, "subnet_id": SUBNET} | pools(a={"availability_zone": "us-east-1b"}),
    ),
]


@pytest.mark.parametrize(("named", "given"), TOGETHER)
def test_settings_that_do_not_go_together_are_named(named: str, given: dict[str, str]) -> None:
    with pytest.raises(InputError, match=named):
        load(**given)


def test_a_zone_is_checked_against_the_region_of_the_profile_in_use() -> None:
    here = context(availability_zone="us-east-1a")
    assert deployment.load(here, region="us-east-1").region == ""  # stays open
    with pytest.raises(InputError, match="eu-west-1a"):
        deployment.load(here, region="eu-west-1")


def test_every_setting_is_in_cdk_json() -> None:
    given = context()
    names = {field.name for field in dataclasses.fields(Settings)}
    in_file = {name for name in given if not set(name) & set(":/@")}
    assert in_file == {"preset", "presets", "defaults"}, "what is beside them beats any preset"
    in_all = set.intersection(*(set(preset) for preset in given["presets"].values()))
    assert in_all | {*given["defaults"], "preset"} == names
    assert in_all & {*given["defaults"]} == set(), "a default of theirs would never count"


@pytest.mark.parametrize(("version", "is_old"), [("v20.20.2", True), ("v22.1.0", False)])
def test_a_node_past_its_support_is_named_in_one_line(
    version: str, is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node").write_text(f"#!/bin/sh\necho {version}\n")
    (tmp_path / "node").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    note = app.note_on_node()
    assert (version in note) is is_old
    assert len(note.splitlines()) == is_old


@pytest.mark.parametrize(("efa", "number"), [("off", 1), ("auto", 0)])
def test_a_warning_of_the_stack_names_the_bandwidth_that_is_lost(
    synth: Synth, efa: str, number: int
) -> None:
    found = synth(worker_instance_type="p5.48xlarge", max_workers="2", efa=efa).warnings
    assert ["3,200 Gb/s" in each for each in found] == [True] * number


def test_the_app_prints_the_sentence_alone_and_exits_with_2() -> None:
    run = subprocess.run(
        [sys.executable, "app.py"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "CDK_CONTEXT_JSON": json.dumps(context(spot="maybe"))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr == (
        "error: setting spot is 'maybe': it must be true or false "
        "(give -c spot=… or edit cdk.json)\n"
    )
