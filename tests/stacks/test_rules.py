"""The templates break no rule: of CloudFormation, of AWS Solutions, and in the audit of two more.

Every preset and one deployment with everything switched on. A checker that finds nothing may also
be one that does not look, so each is shown something broken as well. The tests marked ``audit``
are `make night`: NIST 800-53 R5 and checkov, of which some findings stand (``stacks.findings`` and
``.ci/checkov.yaml`` say why).
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from contract.outputs import CORE_STACK, TRAINING_STACK
from tests.conftest import ROOT
from tests.stacks.conftest import EXISTING, OPTIONS, POOLS, PRESETS, Synth, context, synthesized

Settings = dict[str, str]

STACKS = (CORE_STACK, TRAINING_STACK)

DEPLOYMENTS: dict[str, Settings] = {
    **{preset: {"preset": preset} for preset in PRESETS},
    # cfn-lint advises against a zone that is named, which a user may do.
    "taken": EXISTING,
    "pools": POOLS,
    "everything": OPTIONS | {"efa": "on", "shared_storage": "fsx", "availability_zone": ""},
}
every_deployment = pytest.mark.parametrize("deployment", DEPLOYMENTS)

CHECKOV = ROOT / ".venv-audit" / "bin" / "checkov"
CHECKOV_RULES = ROOT / ".ci" / "checkov.yaml"


class Checked(NamedTuple):
    """One synth under one set of rules."""

    folder: Path
    """Where the assembly is."""
    findings: list[str]
    """``rule: path of the construct``, for each that is not accepted."""
    accepted: dict[str, str]
    """Rule -> reason, of what the app accepts."""


def check(folder: Path, pack: str, settings: Settings | None) -> Checked:
    """Synthesize the app under a rule pack of cdk-nag.

    Args:
        folder: Where the assembly goes.
        pack: Name of the rule pack in ``cdk_nag``.
        settings: What ``-c`` would give; None for a stack that breaks rules instead of the app's.
    """
    import aws_cdk as cdk
    import cdk_nag
    from aws_cdk import aws_s3 as s3

    import app

    cloud = cdk.App(context=context(**(settings or {})), outdir=str(folder))
    cdk.Validations.of(cloud).add_plugins(getattr(cdk_nag, pack)())
    if settings is not None:
        app.build(cloud)
    else:
        s3.CfnBucket(cdk.Stack(cloud, "BrokenStack"), "Open", access_control="PublicRead")
    try:
        cloud.synth()
        raised = False
    except RuntimeError as error:
        if "validation-report.json" not in str(error):
            raise
        raised = True

    report = json.loads((folder / "validation-report.json").read_text())
    findings = [
        f"{violation['ruleName']}: {construct['constructPath']}"
        for plugin in report["pluginReports"]
        for violation in plugin["violations"]
        for construct in violation["violatingConstructs"]
    ]
    # Else a finding could be in the report without failing `cdk synth`, or the other way round.
    assert raised == bool(findings)
    return Checked(folder, sorted(findings), _accepted(folder))


def _accepted(folder: Path) -> dict[str, str]:
    accepted: dict[str, str] = {}
    for file in (folder / "manifest.json", *folder.glob("*.metadata.json")):
        _collect(json.loads(file.read_text()), accepted)
    return accepted


def _collect(value: Any, accepted: dict[str, str]) -> None:
    """Every acknowledgement in an assembly's metadata, wherever it is filed."""
    if isinstance(value, dict):
        if value.get("type") == "aws:cdk:acknowledged-rules":
            accepted.update(value["data"])
        for part in value.values():
            _collect(part, accepted)
    elif isinstance(value, list):
        for part in value:
            _collect(part, accepted)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rules-")


@functools.cache
def checked(pack: str, deployment: str) -> Checked:
    """A named deployment under a rule pack, once per test run."""
    folder = Path(_folder().name) / f"{pack}-{deployment}"
    return check(folder, pack, DEPLOYMENTS[deployment])


def templates(deployment: str) -> list[str]:
    folder = checked("AwsSolutionsChecks", deployment).folder
    return [str(folder / f"{stack}.template.json") for stack in STACKS]


# --- AWS Solutions -----------------------------------------------------------------------------
@every_deployment
def test_aws_solutions_finds_nothing(deployment: str) -> None:
    assert checked("AwsSolutionsChecks", deployment).findings == []


@every_deployment
def test_what_is_accepted_has_a_reason(deployment: str) -> None:
    accepted = checked("AwsSolutionsChecks", deployment).accepted
    # Of our bucket, which has no log of its own.
    has_bucket = "bucket" not in DEPLOYMENTS[deployment]
    assert any("AwsSolutions-S1" in rule for rule in accepted) == has_bucket
    assert {rule: reason for rule, reason in accepted.items() if len(reason) < 30} == {}


@pytest.mark.parametrize(
    "pack", ["AwsSolutionsChecks", pytest.param("NIST80053R5Checks", marks=pytest.mark.night)]
)
def test_a_public_bucket_without_encryption_is_found(pack: str, tmp_path: Path) -> None:
    found = check(tmp_path, pack, None).findings
    assert any(line.endswith(": BrokenStack/Open") for line in found), found


# --- CloudFormation's own schemas --------------------------------------------------------------
def cfn_lint(files: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            Path(sys.executable).parent / "cfn-lint",
            "--config-file",
            ".ci/cfnlint.yaml",
            "--",
            *files,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_cloudformation_would_take_the_templates_of_every_deployment_and_no_other_property(
    tmp_path: Path,
) -> None:
    """One process for all of them, because it reads the schemas, and each template once: CoreStack
    is the same in the presets."""
    files = [Path(file) for deployment in DEPLOYMENTS for file in templates(deployment)]
    different = {file.read_text(): str(file) for file in files}
    template = json.loads(Path(templates("ddp")[0]).read_text())
    template["Resources"]["Vpc"]["Properties"]["CidrBlok"] = "10.0.0.0/16"
    broken = tmp_path / "broken.template.json"
    broken.write_text(json.dumps(template))
    lint = cfn_lint([*different.values(), str(broken)])
    finding, place = lint.stdout.split("\n")[:2]
    assert "'CidrBlok' was unexpected" in finding
    assert place.startswith(f"{broken}:")
    assert lint.stdout.strip() == f"{finding}\n{place}", "nothing else is found"
    assert lint.stderr == ""
    assert lint.returncode != 0


# --- accounts of all kinds ---------------------------------------------------------------------
RESERVED: Settings = {"capacity_reservation_id": "cr-0123456789abcdef0"}
IN_TWO = {"max_workers": "2"}
BOUNDARY: dict[str, Any] = {"@aws-cdk/core:permissionsBoundary": {"name": "Boundary"}}
ROW = {"vcpus": 4, "memory_mib": 32768, "network_gbps": 1.25, "usd_per_hour": 0.252}
#: Name -> settings. Those of CI come first; the others are tried at night.
#: Without a pool, whose zone is one of a region.
TAKEN = {name: value for name, value in EXISTING.items() if name != "pools"}
ACCOUNTS: dict[str, dict[str, Any]] = {
    "own type": {"head_instance_type": "r5.xlarge", "instance_types": {"r5.xlarge": ROW}},
    "sovereign, taken": TAKEN
    | {"region": "eusc-de-east-1", "availability_zone": "eusc-de-east-1a"},
    "GovCloud, EFA": {"region": "us-gov-west-1", "worker_instance_type": "p4d.24xlarge"},
    "named, shared files": {"deployment": "ml", "shared_storage": "fsx"},
    "boundary": BOUNDARY,
    **{
        name: {"worker_instance_type": name, **IN_TWO}
        for name in (
            *("g4dn.12xlarge", "g4dn.metal", "g5.48xlarge", "g6.xlarge", "g6e.48xlarge"),
            *("g7e.48xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5en.48xlarge"),
            *("p6-b200.48xlarge", "p6-b300.48xlarge"),
        )
    },
    "EFA off": {"worker_instance_type": "p5.48xlarge", "efa": "off"},
    "EFA on": {"worker_instance_type": "g5.8xlarge", "efa": "on"},
    "spot": {"spot": "true"},
    "block": RESERVED | {"worker_instance_type": "p5.48xlarge"},
    "block only": RESERVED | {"worker_instance_type": "p5e.48xlarge"},
    "reserved": RESERVED | {"capacity_reservation_type": "on-demand"},
    "taken, named": EXISTING | {"deployment": "ml"},
    "GovCloud": {"region": "us-gov-west-1"},
    "China, taken": TAKEN | {"region": "cn-north-1", "availability_zone": "cn-north-1a"},
    "shared files": {"shared_storage": "fsx", "preset": "fsdp"},
    "shared files, kept": {"shared_storage": "fsx", "fsx_deployment": "persistent"},
    "shared files, dropped": {"shared_storage": "fsx", "fsx_on_destroy": "delete"},
    "many": {"max_heads": "16", "max_workers": "128", "vpc_cidr": "10.0.0.0/20"},
    "cpu": {"preset": "cpu", "retain_bucket": "false"},
}
OF_CI = 6


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([*ACCOUNTS][:OF_CI], id="CI"),
        pytest.param([*ACCOUNTS][OF_CI:], id="night", marks=pytest.mark.night),
    ],
)
@pytest.mark.timeout(3600)
def test_cloudformation_would_take_the_templates_in_accounts_of_all_kinds(names: list[str]) -> None:
    different: dict[str, str] = {}
    for name in names:
        given = {"preset": "ddp", **ACCOUNTS[name]}
        found = synthesized.__wrapped__(tuple(given.items()))
        for stack in STACKS:
            file = Path(found.folder, f"{stack}.template.json")
            body = file.read_text()
            different[body] = str(file)
            resources = json.loads(body)["Resources"].values()
            assert (len(resources) < 250, len(body) < 500_000) == (True, True), name
            region = str(given.get("region", "us-east-1"))
            partition = {"us-gov": "aws-us-gov", "cn": "aws-cn", "eusc": "aws-eusc"}
            own = next((value for key, value in partition.items() if region.startswith(key)), "aws")
            assert {*re.findall(r"arn:(aws[a-z-]*):", body)} <= {own}, name
    lint = cfn_lint([*different.values()])
    # It knows the types of us-east-1, where no P5e is sold.
    said = [line for line in lint.stdout.splitlines() if re.match(r"[EWI]\d{4} ", line)]
    assert [line for line in said if not line.startswith("E3628 'p5e.48xlarge' is not")] == []
    assert (lint.stderr, lint.returncode) == ("", 2 if said else 0)


def test_a_deploys_templates_are_those_that_are_validated_to_the_byte(synth: Synth) -> None:
    """And each synth of the same settings has the same templates."""
    deployed = Path(synth(preset="ddp").folder)
    for file in map(Path, templates("ddp")):
        assert file.read_bytes() == (deployed / file.name).read_bytes()


# --- the audit ---------------------------------------------------------------------------------
@pytest.mark.night
@every_deployment
def test_nist_800_53_finds_nothing_beyond_what_is_accepted(deployment: str) -> None:
    assert checked("NIST80053R5Checks", deployment).findings == []


@pytest.mark.night
def test_what_the_audit_accepts_has_a_reason() -> None:
    from stacks.findings import AUDIT

    assert {rule: reason for rule, reason in AUDIT.items() if len(reason) < 30} == {}


def checkov(
    arguments: Sequence[str], files: Sequence[str], *, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    if not CHECKOV.exists():
        pytest.skip("no .venv-audit: `make night` makes it")
    return subprocess.run(
        [CHECKOV, *arguments, "--file", *files],
        cwd=cwd,
        # It would ask the package index for a newer one, and look for settings at home.
        env=os.environ | {"CKV_SKIP_PACKAGE_UPDATE_CHECK": "true", "HOME": str(cwd)},
        capture_output=True,
        text=True,
        check=False,
    )


def failed_checks(output: str) -> set[tuple[str, str]]:
    """(rule, resource) of each finding in checkov's JSON."""
    report = json.loads(output)
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["passed"] > 0
    return {(found["check_id"], found["resource"]) for found in report["results"]["failed_checks"]}


@pytest.mark.night
def test_checkov_finds_nothing_beyond_what_is_accepted() -> None:
    files = [file for deployment in DEPLOYMENTS for file in templates(deployment)]
    scan = checkov(["--config-file", str(CHECKOV_RULES)], files)
    assert scan.returncode == 0, scan.stdout + scan.stderr
    assert re.search(r"Passed checks: [1-9]\d*, Failed checks: 0, Skipped", scan.stdout)


@pytest.mark.night
def test_checkov_would_say_what_the_accepted_findings_say(tmp_path: Path) -> None:
    """Without its settings it finds those, and no accepted finding is one of the past."""
    accepted = set(re.findall(r"(?m)^  - (CKV\w+) # .{12,}$", CHECKOV_RULES.read_text()))
    assert len(accepted) == CHECKOV_RULES.read_text().count("- CKV")  # each has its reason
    options = ["--framework", "cloudformation", "--skip-download", "--output", "json"]
    scan = checkov(options, templates("everything"), cwd=tmp_path)
    assert scan.returncode == 1, scan.stderr
    assert {rule for rule, _ in failed_checks(scan.stdout)} == accepted
