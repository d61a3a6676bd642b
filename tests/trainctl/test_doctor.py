"""``trainctl doctor``: what it looks at, what it makes of the answers, how to fix it."""

import json
from typing import Any

import pytest

from contract import exits
from tests.trainctl.account import Account, refused
from trainctl.__main__ import main
from trainctl.commands import doctor


def checks(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, str]]]:
    code = main(["doctor", "--json"])
    return code, {each["what"]: each for each in json.loads(capsys.readouterr().out)}


def test_doctor_finds_nothing_where_all_is_well(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = checks(capsys)
    assert code == 0
    assert {each["state"] for each in found.values()} <= {"ok", "unknown"}
    assert "quota G, on demand" in found
    assert found["quota G, on demand"]["found"].endswith("takes 192")
    assert found["quota standard, on demand"]["found"].endswith("takes 4")
    assert {"image of GPU hosts", "image of CPU hosts"} <= found.keys()
    assert "role AWSServiceRoleForEC2Spot" not in found
    account.shape["spot"] = True
    _, found = checks(capsys)
    assert {"quota G, spot", "role AWSServiceRoleForEC2Spot"} <= found.keys()


@pytest.mark.parametrize(
    ("operation", "code", "what", "fix"),
    [
        ("describe_images", "ImageNotFoundException", "image of the worker", "make images"),
        ("get_parameter", "ParameterNotFound", "image of GPU hosts", "another region"),
        ("get_role", "NoSuchEntity", "role AWSServiceRoleForECS", "create-service-linked-role"),
    ],
)
def test_doctor_tells_how_to_fix_what_is_missing(
    account: Account,
    capsys: pytest.CaptureFixture[str],
    operation: str,
    code: str,
    what: str,
    fix: str,
) -> None:
    account.fails[operation] = refused(code)
    exit_code, found = checks(capsys)
    assert exit_code == exits.FAILED
    assert found[what]["state"] == "bad"
    assert fix in found[what]["fix"]
    account.fails[operation] = refused("AccessDenied")
    exit_code, found = checks(capsys)
    assert (exit_code, found[what]["state"]) == (0, "unknown"), "not knowing is no fault"


def test_doctor_reports_when_a_quota_is_too_small_or_a_zone_has_not_the_type(
    account: Account, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    account.quota = 8.0
    none: dict[str, Any] = {"InstanceTypeOfferings": []}
    monkeypatch.setattr(Account, "on_describe_instance_type_offerings", lambda *_, **__: none)
    code, found = checks(capsys)
    assert code == exits.FAILED
    quota = found["quota G, on demand"]
    assert quota["state"] == "bad"
    assert f"--quota-code {doctor.QUOTAS['g'][0]} --desired-value 192" in quota["fix"]
    assert found["quota standard, on demand"]["state"] == "ok"
    assert "not in eu-west-1a" in found["g5.12xlarge offered"]["found"]


def test_doctor_without_a_deployment_reports_that(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    account.outputs = {}
    code, found = checks(capsys)
    assert code == exits.FAILED
    assert "CoreStack is not deployed" in found["deployment"]["found"]
