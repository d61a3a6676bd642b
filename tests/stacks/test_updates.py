"""An update takes nothing away that a running host stands on, loses nothing that holds data, and
drops no export in use; or docs/operations.md says that the setting needs a destroy first.

Two templates are compared by the create-only properties of CloudFormation's own schemas, which
cfn-lint brings. A setting's other values are in ``CHANGES``; all pairs of them are `make night`.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from cfnlint.schema import PROVIDER_SCHEMA_MANAGER

from stacks.settings import Settings
from tests.stacks.conftest import Synth, Templates

#: What a running host, or a job on it, stands on; of some types only what hosts and tasks name.
STANDS_ON: Final = re.compile(
    "AWS::(EC2::(?!LaunchTemplate).*|ServiceDiscovery::.*|ECS::Cluster|FSx::FileSystem"
    "|StepFunctions::StateMachine|SecretsManager::Secret)"
)
IF_NAMED: Final = re.compile("AWS::(IAM::.*|Logs::LogGroup)")
NAMING: Final = re.compile("AWS::(EC2::LaunchTemplate|ECS::TaskDefinition|IAM::InstanceProfile)")
LOGS: Final = "AWS::Logs::LogGroup"
HOLDS: Final = re.compile(f"AWS::(S3::Bucket|ECR::Repository|FSx::FileSystem)|{LOGS}")
#: Settings of the deployment before each change.
BEFORE: Final = {"availability_zone": "us-west-2a"}
POOL: Final = {"worker_instance_type": "g5.12xlarge", "availability_zone": "us-west-2b"}
RESERVED: Final = "cr-0123456789abcdef0"
#: Setting -> its value after the change, and what else it needs before and after it.
CHANGES: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "availability_zone": ("us-west-2b", {}),
    "vpc_cidr": ("10.7.0.0/16", {}),
    "namespace": ("ray.local", {}),
    "vpc_id": ("vpc-0123456789abcdef0", {}),
    "subnet_id": (
        "subnet-0123456789abcdef1",
        {"vpc_id": "vpc-0123456789abcdef0", "subnet_id": "subnet-0123456789abcdef0"},
    ),
    "bucket": ("acme-training", {}),
    "data_buckets": ("acme-images", {}),
    "retain_bucket": ("false", {}),
    "tags": ("CostCenter=42", {}),
    "head_instance_type": ("m6i.4xlarge", {}),
    "worker_instance_type": ("g5.24xlarge", {}),
    "max_workers": ("5", {}),
    "max_heads": ("3", {}),
    "max_job_hours": ("12", {}),
    "max_jobs_per_user": ("2", {}),
    "spot": ("true", {}),
    "efa": ("on", {"worker_instance_type": "g6e.12xlarge", "efa": "off"}),
    "root_volume_gib": ("500", {}),
    "image_tag": ("0123abc", {}),
    "worker_ami": ("/ml/ami", {}),
    "capacity_reservation_id": (RESERVED, {"capacity_reservation_type": "on-demand"}),
    "capacity_reservation_type": ("on-demand", {}),
    "log_retention_days": ("60", {}),
    "container_insights": ("false", {}),
    "alarm_email": ("ops@example.org", {}),
    "monthly_budget_usd": ("100", {"log_retention_days": "60"}),
    "budget_refuses": ("true", {}),
    "github_repository": ("acme/train", {}),
    "github_branch": ("release", {"github_repository": "acme/train"}),
    "shared_storage": ("fsx", {}),
    "fsx_capacity_gib": ("2400", {"shared_storage": "fsx"}),
    "fsx_on_destroy": ("delete", {"shared_storage": "fsx"}),
    "fsx_deployment": ("persistent", {"shared_storage": "fsx", "fsx_capacity_gib": "2400"}),
    "fsx_mbps_per_tib": (
        "500",
        {"shared_storage": "fsx", "fsx_deployment": "persistent", "fsx_capacity_gib": "2400"},
    ),
    "pools": (json.dumps({"a": POOL}), {}),
}
#: A pool that moves, is renamed or is removed.
POOLS: Final = {
    "moved": {"a": POOL | {"availability_zone": "us-west-2c"}},
    "renamed": {"b": POOL},
    "removed": {},
}
#: Settings whose change needs a destroy first: docs/operations.md has them.
DESTROY_FIRST: Final = {
    *("availability_zone", "vpc_cidr", "namespace", "vpc_id", "bucket", "capacity_reservation_id"),
}


@functools.cache
def create_only(kind: str) -> tuple[tuple[str, ...], ...]:
    """Paths of the properties whose change replaces a resource of a type."""
    if kind.startswith("Custom::"):
        return ()
    schema = PROVIDER_SCHEMA_MANAGER.get_resource_schema("us-east-1", kind).schema
    paths = schema.get("createOnlyProperties", ())
    return tuple(tuple(path.removeprefix("/properties/").split("/")) for path in paths)


def value_at(properties: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        properties = properties.get(name) if isinstance(properties, dict) else None
    return properties


def losses(before: Templates, after: Templates) -> Iterator[str]:
    """What an update takes away from running hosts, from data, or from another stack."""
    imports = re.findall(r'"Fn::ImportValue": "[^"]*:(\w+)"', json.dumps(before.training))
    for name in sorted({*imports} & before.core["Outputs"].keys() - after.core["Outputs"].keys()):
        yield f"export {name} is in use"
    for stack in ("core", "training"):
        old, new = (getattr(each, stack)["Resources"] for each in (before, after))
        named = json.dumps([each for each in old.values() if NAMING.fullmatch(each["Type"])])
        gone = {name for name in old if name not in new or is_replaced(old[name], new[name])}
        # ECS refuses to give up a capacity provider that a task uses, and ends the update there.
        is_guarded = any(old[name]["Type"] == "AWS::ECS::CapacityProvider" for name in gone)
        for name in sorted(gone):
            policy = "UpdateReplacePolicy" if name in new else "DeletionPolicy"
            kind, kept = old[name]["Type"], old[name].get(policy) == "Retain"
            if HOLDS.fullmatch(kind) and not kept and (kind != LOGS or f'"{name}"' in named):
                yield f"{name} ({kind}) holds data"
            elif (
                not kept
                and not is_guarded
                and (
                    STANDS_ON.fullmatch(kind) or (IF_NAMED.fullmatch(kind) and f'"{name}"' in named)
                )
            ):
                yield f"{name} ({kind}) goes"


def is_replaced(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    before, after = old.get("Properties", {}), new.get("Properties", {})
    return old["Type"] != new["Type"] or any(
        value_at(before, path) != value_at(after, path) for path in create_only(old["Type"])
    )


def changed(synth: Synth, *names: str) -> list[str]:
    """Losses of an update that changes these settings."""
    needed = BEFORE | {k: v for name in names for k, v in CHANGES[name][1].items()}
    given = needed | {name: CHANGES[name][0] for name in names}
    if "vpc_id" in names:  # never without its subnet
        given["subnet_id"] = "subnet-0123456789abcdef0"
    return [*losses(synth(**needed), synth(**given))]


QUICK: Final = ("tags", "worker_instance_type", "image_tag", "pools", "spot", "bucket")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.night) for name in CHANGES],
)
def test_a_setting_changes_in_place_or_the_page_says_that_it_does_not(
    synth: Synth, name: str
) -> None:
    assert bool(changed(synth, name)) is (name in DESTROY_FIRST), changed(synth, name)


@pytest.mark.night
def test_two_settings_change_in_place_if_each_does(synth: Synth) -> None:
    safe = sorted(CHANGES.keys() - DESTROY_FIRST - {"pools", "efa", "capacity_reservation_type"})
    free = [name for name in safe if not CHANGES[name][1]]
    found = {pair: changed(synth, *pair) for pair in itertools.combinations(free[:10], 2)}
    assert {pair: each for pair, each in found.items() if each} == {}


@pytest.mark.parametrize("change", POOLS)
def test_a_pool_leaves_its_place_only_when_no_task_is_there(synth: Synth, change: str) -> None:
    before = synth(**BEFORE, pools=json.dumps({"a": POOL}))
    assert [*losses(before, synth(**BEFORE, pools=json.dumps(POOLS[change])))] == []


def test_what_goes_is_found(synth: Synth) -> None:
    """As each kind of loss would be, had a setting brought it about."""
    before, after = synth(**BEFORE), json.loads(json.dumps(synth(**BEFORE).training))
    group = next(n for n, r in after["Resources"].items() if r["Type"].endswith("SecurityGroup"))
    after["Resources"][group]["Properties"]["GroupDescription"] = "another"
    (found,) = losses(before, before._replace(training=after))
    assert group in found


def test_the_page_has_the_settings_that_need_a_destroy() -> None:
    page = Path("docs/operations.md").read_text()
    row = page.partition("## Change")[2].partition(": destroy first")[0].rpartition("*")[2]
    assert {*re.findall(r"`(\w+)`", row)} == DESTROY_FIRST | {"region"}
    assert CHANGES.keys() | {"region", "deployment", "preset"} <= {*Settings.__dataclass_fields__}
