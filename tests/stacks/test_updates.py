"""An update takes nothing away that a running host stands on, loses nothing that holds data, and
drops no export in use; or docs/operations.md says that the setting needs a destroy first.

Two templates are compared by the create-only properties of CloudFormation's own schemas, which
cfn-lint brings. A setting's other values are in ``CHANGES``; all pairs of them are `make night`.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Final

import pytest

from stacks import updates
from stacks.settings import Settings
from tests.stacks.conftest import Synth, Templates, create_only

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
    "session_manager": ("true", {}),
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


def losses(before: Templates, after: Templates) -> list[str]:
    return [*updates.losses(before[:2], after[:2], create_only)]


def changed(synth: Synth, *names: str) -> list[str]:
    """Losses of an update that changes these settings."""
    needed = BEFORE | {k: v for name in names for k, v in CHANGES[name][1].items()}
    given = needed | {name: CHANGES[name][0] for name in names}
    if "vpc_id" in names:  # never without its subnet
        given["subnet_id"] = "subnet-0123456789abcdef0"
    return losses(synth(**needed), synth(**given))


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
    assert losses(before, synth(**BEFORE, pools=json.dumps(POOLS[change]))) == []


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
