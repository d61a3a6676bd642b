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


@pytest.mark.parametrize(
    ("preset", "head", "trains", "worker", "num_workers"),
    [
        ("ddp", "m5.xlarge", False, "g5.xlarge", 2),
        ("fsdp", "g5.12xlarge", True, "g5.12xlarge", 1),
        ("cpu", "m5.large", False, "m5.large", 2),
    ],
)
def test_the_presets_are_the_reference_set_ups_and_one_without_gpus(
    preset: str, head: str, trains: bool, worker: str, num_workers: int
) -> None:
    settings = load(preset=preset)
    assert settings.head.name == head
    assert settings.head_trains is trains
    assert settings.worker.name == worker
    assert settings.max_workers == num_workers


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
    (
        *("large", "ddp", {}, {"worker_instance_type": "m6i.xlarge"}),
        "a type with GPUs in preset large, which has them",
    ),
    (
        *("many", "cpu", {}, {"worker_instance_type": "g5.xlarge"}),
        "a type without GPUs in preset many, which has none",
    ),
    ("my ddp", "ddp", {}, {}, "preset is 'my ddp': it must be letters, digits"),
    ("ddp", "ddp", {"max_worker": 3}, {}, "did you mean max_workers"),
    ("ddp", "ddp", {"head_instance_type": None}, {}, "setting head_instance_type is missing"),
    ("ddp", "ddp", {}, {"image_tag": None}, "setting image_tag is missing"),
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
    assert ("gets 100 of its " in off.without_efa) is uses_efa


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


# A setting given with -c, and what the sentence must hold beside the setting's name.
BAD: list[tuple[Any, ...]] = [
    ({"colour": "red"}, "colour", "there are preset, deployment, region"),
    ({"wrokers": "3"}, "wrokers", "did you mean max_workers?"),
    ({"preset": "dpp"}, "preset", "'dpp'", "ddp, fsdp, cpu"),
    ({"presets": "ddp"}, "presets", "cdk.json"),
    ({"defaults": "1"}, "defaults", "cdk.json"),
    ({"max_workers": "0"}, "max_workers", "1 to 128"),
    *(
        ({"deployment": name}, "deployment", repr(name), "AWS reserves names that begin with")
        for name in (
            *("aws", "AWS-team", "awsome", "ecs-ml", "Ecs", "fargate-1", "FARGATE", "sg-lab"),
            *("SG-lab", "xn--lab", "sthree-lab", "amzn-s3-demo-lab"),
        )
    ),
    (
        {"availability_zone": "us-west-2a", "pools": json.dumps({f"p{n}": {} for n in range(19)})},
        "pools",
        "18 pools at most: ECS takes 20 capacity providers",
    ),
    ({"max_workers": "two"}, "max_workers", "'two'", "a whole number"),
    ({"spot": "yes"}, "spot", "'yes'", "true or false"),
    ({"worker_instance_type": "g5.huge"}, "worker_instance_type", "g5.huge", "g5.xlarge"),
    ({"worker_instance_type": "m5.xlarge"}, "worker_instance_type", "m5.xlarge", "GPUs"),
    ({"head_instance_type": "g5.xlarge"}, "head_instance_type", "without GPUs", "idle"),
    (
        {"preset": "cpu", "worker_instance_type": "g5.xlarge"},
        "worker_instance_type",
        "without GPUs",
    ),
    ({"preset": "cpu", "head_instance_type": "g5.xlarge"}, "head_instance_type", "without GPUs"),
    (
        {"preset": "fsdp", "head_instance_type": "m5.xlarge"},
        "head_instance_type",
        "NVIDIA A10G",
    ),
    (
        {"preset": "fsdp", "worker_instance_type": "g6.12xlarge"},
        "head_instance_type",
        "NVIDIA L4",
    ),
    (
        {
            "worker_instance_type": "p5e.48xlarge",
            "spot": "true",
            "capacity_reservation_id": "cr-0123456789abcdef0",
        },
        "spot",
        "false for p5e.48xlarge",
    ),
    ({"worker_instance_type": "p5e.48xlarge", "spot": "true"}, "spot", "reserved"),
    ({"worker_instance_type": "p5e.48xlarge"}, "capacity_reservation_id", "reserved"),
    ({"capacity_reservation_id": "cr-1"}, "capacity_reservation_id", "cr-1"),
    ({"capacity_reservation_id": "cr-0123456789abcdef0"}, "capacity_reservation_type", "no capac"),
    ({"instance_types": "g7"}, "setting instance_types: it is not a JSON object"),
    ({"instance_types": '{"g7.xlarge": 1}'}, "'g7.xlarge': its row is 1: it must be a table of vc"),
    ({"instance_types": '{"g7.xlarge": {"vcpu": 4}}'}, "no field vcpu: did you mean vcpus?"),
    ({"instance_types": '{"g7.xlarge": {"gpu": "L5"}}'}, "gpu 'L5' is not known: give its figures"),
    ({"instance_types": own(vcpus="4")}, "vcpus is '4': it must be a whole number"),
    ({"instance_types": own(num_gpus=0)}, "gpu and num_gpus go together"),
    ({"instance_types": own(sold=["cheap"])}, "sold must be some of on-demand, spot, capacity-bl"),
    ({"instance_types": own(name="g7")}, "instance type 'g7': name must be FAMILY.SIZE"),
    ({"root_volume_gib": "8"}, "root_volume_gib", "30 to 16384"),
    ({"vpc_cidr": "10.0.0.0"}, "vpc_cidr", "/16 to /24"),
    ({"vpc_cidr": "10.0.0.1/16"}, "vpc_cidr", "host bits"),
    ({"vpc_cidr": "10.0.0.0/8"}, "vpc_cidr", "/16 to /24"),
    ({"vpc_cidr": "8.8.0.0/16"}, "vpc_cidr", "private"),
    ({"vpc_cidr": "172.17.0.0/16"}, "vpc_cidr", "Docker"),
    ({"vpc_cidr": "ten"}, "vpc_cidr", "10.0.0.0/16"),
    ({"vpc_cidr": "10.0.0.0/24", "max_workers": "56"}, "vpc_cidr", "/22", "57 hosts"),
    ({"region": "europe"}, "region", "eu-west-1"),
    ({"availability_zone": "eu-west-1"}, "availability_zone", "eu-west-1a"),
    (
        {"availability_zone": "us-east-1a", "region": "eu-west-1"},
        "availability_zone",
        "a zone of the region in use, eu-west-1",
    ),
    ({"image_tag": "a b"}, "image_tag", "'a b'"),
    ({"base_image": "python:3.12"}, "base_image", "an image by digest"),
    ({"vpc_id": "vpc-1"}, "vpc_id", "the id of a VPC"),
    ({"vpc_id": VPC}, "subnet_id", "given with vpc_id"),
    ({"subnet_id": SUBNET}, "subnet_id", "empty without"),
    ({"vpc_id": VPC, "subnet_id": SUBNET}, "availability_zone", f"the zone of {SUBNET}"),
    ({"monthly_budget_usd": "9"}, "log_retention_days", "60 or more with monthly_budget_usd"),
    ({"bucket": "s3://mine"}, "bucket", "the name of a bucket"),
    ({"data_buckets": "a-1, b-2"}, "data_buckets", "separated by commas"),
    ({"worker_ami": "ami-0123456789abcdef0"}, "worker_ami", "the name of a parameter"),
    ({"tags": "CostCenter"}, "tags", "KEY=VALUE"),
    ({"tags": "aws:x=1"}, "tags", "KEY=VALUE"),
    ({"namespace": "Training!"}, "namespace", "DNS name"),
    ({"namespace": "a." * 124 + "b"}, "namespace", "at most 248 characters"),
    ({"log_retention_days": "31"}, "log_retention_days", "30, 60"),
    ({"alarm_email": "me"}, "alarm_email", "e-mail"),
    ({"github_repository": "https://github.com/a/b"}, "github_repository", "owner/name"),
    ({"github_repository": "a/*"}, "github_repository", "owner/name"),
    ({"github_repository": "acme/train.git"}, "github_repository", "owner/name"),
    ({"github_branch": "*"}, "github_branch", "without wildcards"),
    ({"github_oidc_provider_arn": "arn:aws:iam::1:role/x"}, "github_oidc_provider_arn", "ARN"),
    ({"efa": "yes"}, "setting efa is 'yes': it must be one of auto, on, off"),
    ({"efa": "on"}, "it must be auto or off: g5.xlarge has no EFA"),
    (
        {
            "preset": "fsdp",
            "head_instance_type": "g5.xlarge",
            "worker_instance_type": "g5.12xlarge",
            "efa": "on",
        },
        "a type with EFA, as g5.12xlarge is, while head_trains is true",
    ),
    ({"shared_storage": "efs"}, "setting shared_storage is 'efs': it must be one of none, fsx"),
    ({"pools": "l4"}, "pools", "tables by their names"),
    ({"pools": '{"default": {}}'}, "pool default", "no default"),
    ({"pools": '{"a": {"max_heads": 2}}'}, "pool a", "no setting max_heads"),
    ({"pools": '{"a": {"worker_instance_type": "m5.large"}}'}, "pool a", "a type with GPUs"),
    (
        {"pools": '{"a": {"worker_instance_type": "p5e.48xlarge"}}'},
        *("pool a", "capacity_reservation_id", "only sold as reserved capacity"),
    ),
    ({"preset": "fsdp", "pools": '{"a": {}}'}, "pool a", "head_trains", "false with pools"),
    ({"pools": '{"a": {"availability_zone": "us-east-1b"}}'}, "pool a", "the deployment's, ''"),
    (
        {
            "availability_zone": "us-east-1a",
            "pools": '{"a": {"availability_zone": "us-west-2a"}}',
        },
        *("pool a", "in the region of the deployment's, 'us-east-1a'"),
    ),
    (
        {
            "availability_zone": "us-east-1a",
            "vpc_cidr": "10.0.0.0/24",
            "pools": '{"a": {"availability_zone": "us-east-1b", "max_workers": 6}}',
        },
        *("vpc_cidr", "a larger network: us-east-1b has 10.0.0.32/28"),
    ),
    (
        {
            "availability_zone": "us-east-1a",
            "pools": '{"a": {"availability_zone": "us-east-1h"}}',
        },
        *("availability_zone", "one of the zones a to g"),
    ),
    (
        {
            "vpc_cidr": "10.0.0.0/24",
            "pools": '{"a": {"max_workers": 30}, "b": {"max_workers": 30}}',
        },
        *("vpc_cidr", "for up to 63 hosts"),
    ),
    (
        {
            **{"vpc_id": VPC, "subnet_id": SUBNET, "availability_zone": "us-east-1a"},
            "pools": '{"a": {"availability_zone": "us-east-1b"}}',
        },
        *("pool a", "subnet_id", "a subnet in us-east-1b"),
    ),
    ({"fsx_capacity_gib": "3600"}, "1200 or a multiple of 2400: FSx has no others"),
    ({"fsx_mbps_per_tib": "200"}, "it must be one of 125, 250, 500, 1000"),
]


@pytest.mark.parametrize(
    ("given", "expected"),
    [(bad[0], bad[1:]) for bad in BAD],
    ids=["-".join(f"{name}={value[:20]}" for name, value in bad[0].items()) for bad in BAD],
)
def test_a_bad_setting_gives_a_clear_error(
    given: dict[str, str], expected: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as caught:
        load(**given)
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in expected if part not in message] == []


def test_a_zone_is_checked_against_the_region_of_the_profile_in_use() -> None:
    here = context(availability_zone="us-east-1a")
    assert deployment.load(here, region="us-east-1").region == ""  # stays open
    with pytest.raises(InputError, match="a zone of the region in use, eu-west-1, such as"):
        deployment.load(here, region="eu-west-1")


def test_every_setting_is_in_cdk_json() -> None:
    given = context()
    names = {field.name for field in dataclasses.fields(Settings)}
    in_file = {name for name in given if not set(name) & set(":/@")}
    assert in_file == {"preset", "presets", "defaults"}, "what is beside them beats any preset"
    in_all = set.intersection(*(set(preset) for preset in given["presets"].values()))
    assert in_all | {*given["defaults"], "preset"} == names
    assert in_all & {*given["defaults"]} == set(), "a default of theirs would never count"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("v20.20.2", "note: Node.js v20.20.2 is past its support; it still works, but install 22"),
        ("v22.1.0", ""),
        ("v24.0.0", ""),
    ],
)
def test_one_line_says_that_node_is_past_its_support(
    version: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node").write_text(f"#!/bin/sh\necho {version}\n")
    (tmp_path / "node").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    note = app.note_on_node()
    assert note.startswith(said)
    assert bool(note) == bool(said)
    assert "\n" not in note


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"efa": "off"},
            "each p5.48xlarge gets 100 of its 3,200 Gb/s (32 EFA interfaces have all)",
        ),
        ({"shared_storage": "fsx"}, ""),
    ],
)
def test_what_synth_prints_about_efa_is_a_warning_of_the_stack(
    synth: Synth, given: dict[str, str], said: str
) -> None:
    found = synth(worker_instance_type="p5.48xlarge", max_workers="2", **given).warnings
    assert len(found) == bool(said), found
    assert said in "".join(found)


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
