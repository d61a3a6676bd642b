"""``make deploy`` checks an account before it makes the stacks there, and only then."""

import pytest

from contract import exits
from contract.outputs import CORE_STACK
from tests.trainctl.account import Account
from trainctl.aws import deployment
from trainctl.commands import first_deploy

pytestmark = pytest.mark.usefixtures("laptop_is_ready")


@pytest.mark.parametrize("there", [set[str](), {CORE_STACK}], ids=["no stack", "CoreStack"])
def test_a_first_deploy_stops_with_the_command_that_fixes_what_was_found(
    account: Account, capsys: pytest.CaptureFixture[str], there: set[str]
) -> None:
    account.outputs = {stack: account.outputs[stack] for stack in there}
    assert first_deploy.main([]) == exits.OK
    assert capsys.readouterr().err == ""

    account.bootstrap = None
    account.zones = {"g5.12xlarge": ["us-east-1c"]}
    # As the CDK takes them: what it alone knows is not this check's business.
    arguments = ["-c", "preset=fsdp", "--require-approval", "never", "--context=max_heads=2"]
    assert first_deploy.main([*arguments, "--profile", "work"]) == exits.FAILED
    said = capsys.readouterr().err
    assert "\n  npx cdk bootstrap aws://123456789012/us-east-1 --profile work\n" in said
    assert "-c preset=fsdp -c max_heads=2 -c availability_zone=us-east-1c" in said
    assert "make deploy SKIP_DOCTOR=1" in said


def test_a_deploy_that_failed_in_training_stack_is_checked_again(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    account.stack_status, account.bootstrap = "ROLLBACK_COMPLETE", None
    assert first_deploy.main([]) == exits.FAILED
    assert "npx cdk bootstrap" in capsys.readouterr().err


@pytest.mark.parametrize("status", ["CREATE_COMPLETE", "UPDATE_ROLLBACK_FAILED"])
def test_stacks_that_are_there_are_deployed_without_a_check(account: Account, status: str) -> None:
    account.stack_status, account.bootstrap, account.quota = status, None, 0.0
    assert first_deploy.main(["-c", "preset=fsdp"]) == exits.OK
    assert {name for name, _ in account.calls} == {"get_caller_identity", "describe_stacks"}


@pytest.mark.usefixtures("account", "in_us_west_2")
def test_stacks_in_the_region_of_cdk_json_are_found_whatever_the_profile_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def open_session(*, profile: str | None, region: str | None) -> object:
        asked.append(region)
        return deployment.open_session(profile=profile, region=region)

    monkeypatch.setattr("trainctl.commands.doctor.open_session", open_session)
    assert first_deploy.main([]) == exits.OK
    assert asked == ["us-west-2"]


def test_without_credentials_nothing_is_deployed(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    account.region = None
    assert first_deploy.main([]) == exits.FAILED
    assert "set AWS_REGION" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("preset", "error: -c preset: give a setting as name=value, such as -c preset=fsdp\n"),
        ("spot=maybe", "error: setting spot is 'maybe': it must be true or false (give -c spot=…"),
    ],
)
def test_a_wrong_setting_is_refused_before_the_account_is_looked_at(
    capsys: pytest.CaptureFixture[str], setting: str, said: str
) -> None:
    assert first_deploy.main(["-c", setting]) == exits.BAD_INPUT
    assert capsys.readouterr().err.startswith(said)
