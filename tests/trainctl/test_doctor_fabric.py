"""``trainctl doctor`` where hosts have EFA, or share a file system: planned, and deployed."""

import pytest

from contract import exits
from contract.instance_types import PERSISTENT, SCRATCH
from contract.outputs import SHARED, TRAINING_STACK
from tests.trainctl.account import Account
from tests.trainctl.conftest import Looked
from tests.trainctl.test_doctor import bad
from trainctl import checks

FILES = "fs-0123456789abcdef0"
WITH_FSX = ("-c", "preset=fsdp", "-c", "shared_storage=fsx")


@pytest.fixture
def shared(account: Account) -> Account:
    """Its deployment has a file system, which is linked with the bucket."""
    account.shape["shared"] = {"deployment": SCRATCH, "capacity_gib": 1200, "mbps_per_tib": 250}
    account.outputs[TRAINING_STACK][SHARED] = FILES
    account.file_systems = [
        {
            "FileSystemId": FILES,
            "Lifecycle": "AVAILABLE",
            "StorageCapacity": 1200,
            "SubnetIds": ["subnet-1"],
            "LustreConfiguration": {"DeploymentType": "SCRATCH_2"},
        }
    ]
    account.quota = 100_800.0
    return account


# --- EFA ------------------------------------------------------------------------------------------
def test_the_interfaces_of_the_launch_template_are_looked_for_in_the_zone(
    account: Account, looked: Looked
) -> None:
    account.shape |= {"worker_instance_type": "p4d.24xlarge", "efa": True}
    account.efa_interfaces = {"p4d.24xlarge": 4}
    what = "EFA of p4d.24xlarge"
    code, found = looked()
    assert (code, found[what]["state"]) == (0, "ok")
    assert found[what]["found"] == "4 of 4 interfaces, in us-east-1a"

    for offered, said in ((1, "with 1 EFA interfaces"), (0, "with no EFA interfaces")):
        account.efa_interfaces = {"p4d.24xlarge": offered}
        code, found = looked()
        assert (code, bad(found)) == (exits.FAILED, {what})
        assert said in found[what]["found"]
        assert "the hosts ask for 4" in found[what]["found"]
    account.zones["p4d.24xlarge"] = ["us-east-1b"]
    _, found = looked()
    assert found[what]["found"].startswith("p4d.24xlarge is not offered in us-east-1a")
    account.shape["efa"] = False
    _, found = looked()
    assert what not in found


def test_a_planned_deploy_is_asked_about_its_efa(account: Account, looked: Looked) -> None:
    account.outputs = {}
    given = ("-c", "worker_instance_type=p5.48xlarge", "-c", "efa=on")
    _, found = looked(*given)
    assert "and the hosts ask for 32" in found["EFA of p5.48xlarge"]["found"]


# --- the shared file system -----------------------------------------------------------------------
def test_a_file_system_that_works_is_well(shared: Account, looked: Looked) -> None:
    code, found = looked()
    assert (code, bad(found)) == (0, set())
    assert found["shared file system"]["found"] == f"{FILES} is AVAILABLE"
    # A larger one grows in place, which takes its time.
    shared.file_systems[0]["Lifecycle"] = "UPDATING"
    code, found = looked()
    assert (code, found["shared file system"]["state"]) == (0, "ok")


def test_what_is_wrong_with_it_is_told_in_the_words_of_fsx(shared: Account, looked: Looked) -> None:
    shared.file_systems[0] |= {"Lifecycle": "FAILED", "FailureDetails": {"Message": "a server"}}
    code, found = looked()
    assert (code, bad(found)) == (exits.FAILED, {"shared file system"})
    assert found["shared file system"]["found"] == f"{FILES} is FAILED: a server"
    assert found["shared file system"]["fix"] == (
        f"aws fsx describe-file-systems --file-system-ids {FILES} --region us-east-1"
    )


def test_a_file_system_that_is_nowhere(shared: Account, looked: Looked) -> None:
    shared.file_systems = []
    _, found = looked()
    assert f"{FILES} is not there any more" in found["shared file system"]["found"]
    assert found["shared file system"]["fix"] == (
        'make deploy ARGS="-c preset=ddp -c shared_storage=none"'
    )
    # Stacks that were deployed before there was such an output.
    del shared.outputs[TRAINING_STACK][SHARED]
    _, found = looked()
    assert f"have no output {SHARED}" in found["shared file system"]["found"]


@pytest.mark.parametrize(
    ("given", "used", "more", "code"),
    [
        ((), 1200, 1200, checks.LUSTRE[SCRATCH][1]),
        (("-c", "fsx_capacity_gib=2400"), 1200, 2400, checks.LUSTRE[SCRATCH][1]),
        (("-c", "fsx_deployment=persistent"), 0, 1200, checks.LUSTRE[PERSISTENT][1]),
    ],
)
def test_the_quota_of_storage_has_room_for_what_is_planned(
    shared: Account,
    looked: Looked,
    given: tuple[str, ...],
    used: int,
    more: int,
    code: str,
) -> None:
    """Beside a file system of another deployment."""
    shared.outputs = {}
    _, found = looked(*WITH_FSX, *given)
    assert found["quota FSx"]["state"] == "ok"
    assert f"takes {more} more" in found["quota FSx"]["found"]
    shared.default_quotas = {code: 1000.0}
    _, found = looked(*WITH_FSX, *given)
    assert found["quota FSx"]["state"] == "bad"
    asked = f"--service-code fsx --quota-code {code} --desired-value {used + more} "
    assert asked in found["quota FSx"]["fix"]


@pytest.mark.usefixtures("shared")
def test_a_change_takes_what_it_adds(looked: Looked) -> None:
    _, found = looked(*WITH_FSX, "-c", "fsx_capacity_gib=4800")
    assert "takes 3600 more" in found["quota FSx"]["found"]
    _, found = looked(*WITH_FSX)
    assert "quota FSx" not in found, "it is there"
