"""The policies for people: commands with the rights of each role, call by call.

``rehearsal.policies`` decides by the policies of the template; the account is a model.
"""

import ast
import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import boto3
import botocore.session
import pytest
from botocore import xform_name
from botocore.exceptions import ClientError

from contract import exits, runs
from contract.outputs import OPERATE, READ, SUBMIT
from rehearsal.policies import Call, Statement, allows, parse
from tests.aws.calls import Paged, refused
from tests.conftest import ROOT
from tests.stacks.conftest import Synth, synth
from tests.stacks.test_roles import Deployed, arn
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from trainctl.watch import follow

__all__ = ["synth"]  # a fixture

BERT: Final = "AROA123:bert@example.com"
#: Service in boto3 -> its name in actions.
SERVICES: Final = {
    **{"stepfunctions": "states", "service-quotas": "servicequotas"},
    **{each: each for each in ("autoscaling", "cloudformation", "ecr", "ec2", "ecs", "iam")},
    **{each: each for each in ("lambda", "logs", "s3", "secretsmanager", "sns", "ssm", "sts")},
}
#: Calls whose action has another name.
RENAMED: Final = {
    "s3:ListObjectsV2": "s3:ListBucket",
    "s3:HeadObject": "s3:GetObject",
    "s3:DownloadFile": "s3:GetObject",
    "s3:UploadFile": "s3:PutObject",
    "s3:DeleteObjects": "s3:DeleteObject",
    "lambda:Invoke": "lambda:InvokeFunction",
}
#: STS answers anyone; the others are made before a deploy, by who deploys.
NOT_GIVEN: Final = {
    *("sts:GetCallerIdentity", "ssm:GetParameter"),
    *("cloudformation:DescribeType", "cloudformation:GetTemplate"),
    *(f"ec2:Describe{each}" for each in ("Addresses", "AvailabilityZones", "Vpcs")),
}
BUCKET: Final = "arn:aws:s3:::Bucket"
#: Objects that the keeper believes, what heads report to it, and what runs write themselves: people
#: write none of them, and remove runs only.
BELIEVED: Final = (
    runs.job_record("r", "j"),
    runs.job_report("r", "j"),
    runs.job_hold("r", "j"),
    runs.job_life("r", "j"),
    runs.job_stop(BERT, "j"),
)
OF_JOBS: Final = (
    runs.job_reason("r", "j"),
    *(f"runs/r/jobs/j.{kind}" for kind in ("json", "hold", "activity", "zip.json")),
    *("runs/r/leases/00000001.json", "runs/r/x", "runs/r/checkpoints/x.zip", "x", "stops/x"),
)
REFUSED: Final = (
    *(("Put", each) for each in (*BELIEVED, *OF_JOBS)),
    *(("Delete", each) for each in (*BELIEVED, "x", "stops/x")),
)
#: Commands by the first role that may give them.
BY_ROLE: Final = {
    READ: (
        *(
            "ls",
            "show mine",
            "top mine",
            "logs mine",
            "cost mine",
            "runs",
            "plan ddp --secret K=training/key",
        ),
        *("wait ended", "data ls", "cluster status", "doctor"),
    ),
    SUBMIT: (
        *(
            "submit ddp --yes",
            "submit ddp --yes --notify anna@example.com",
            "submit --code {code} --yes -- python mine.py",
        ),
        *("stop mine --yes", "stop early --yes", "data put {code} --as mine", "runs rm old --yes"),
    ),
    OPERATE: ("stop theirs --yes", "stop waits --yes", "cluster down --yes --no-wait"),
}


@functools.cache
def actions(service: str) -> dict[str, str]:
    """Action of each call that a client has."""
    names = [*botocore.session.get_session().get_service_model(service).operation_names]
    names += ["UploadFile", "DownloadFile"] if service == "s3" else []
    called = {xform_name(each): f"{SERVICES[service]}:{each}" for each in names}
    return {name: RENAMED.get(action, action) for name, action in called.items()}


@pytest.fixture(scope="module")
def policies(synth: Synth) -> dict[str, list[Statement]]:
    templates, of_role = synth(), {}
    for output in (READ, SUBMIT, OPERATE):
        policy = templates.resources[templates.core["Outputs"][output]["Value"]["Ref"]]
        document = Deployed(templates).value(policy["Properties"]["PolicyDocument"])
        assert len(json.dumps(document, separators=(",", ":"))) < 6144, "the most that IAM takes"
        of_role[output] = parse(document)
    return of_role


def may(account: Account, policy: list[Statement], action: str, on: str, task: str = "") -> bool:
    tags = account.tasks.get(task, {}).get("tags", [])
    keys = {f"aws:ResourceTag/{each['key']}": each["value"] for each in tags}
    keys["sns:Protocol"] = "email"
    keys |= {"aws:userid": account.user_id, "ecs:cluster": arn("ecs", "cluster/TrainingStack-x")}
    return allows(Call(caller="anna", action=action, resource=on, keys=keys), identity=policy)


class Guarded(Paged):
    """A client of one service, for a person with a policy, on whatever resource."""

    def __init__(self, account: Account, service: str, policy: list[Statement]) -> None:
        self._account, self._actions = account, actions(service)
        self._policy = [replace(each, resources=["*"]) for each in policy]

    def __getattr__(self, name: str) -> Any:
        found, action = getattr(self._account, name), self._actions.get(name)
        if action in (None, "sts:GetCallerIdentity"):
            return found

        def call(*words: Any, **given: Any) -> Any:
            if not may(self._account, self._policy, str(action), "*", given.get("task", "")):
                raise refused("AccessDeniedException", str(action).partition(":")[2], str(action))
            return found(*words, **given)

        return call


@pytest.fixture
def theirs(account: Account) -> Account:
    """Jobs of two users, with a head and before they have one."""
    for job, user in (("mine", account.user_id), ("theirs", BERT)):
        account.add(job, run=job)
        account.add_head(job, f"{job}-head", tags=[{"key": "user-id", "value": user}])
    for job, user in (("early", account.user_id), ("waits", BERT)):
        account.add(job, run=job)
        account.change_order(job, user_id=user)
    account.add("ended", run="old", status="SUCCEEDED")
    account.objects["runs/old/jobs/ended.zip"] = b"{}"
    return account


@pytest.mark.usefixtures("laptop_is_ready")
@pytest.mark.parametrize("role", BY_ROLE)
@pytest.mark.parametrize("words", [words for of_role in BY_ROLE.values() for words in of_role])
def test_each_role_may_give_its_commands_and_those_of_the_role_before(
    theirs: Account,
    cli: Cli,
    code: Path,
    policies: dict[str, list[Statement]],
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    words: str,
) -> None:
    session = boto3.Session

    def guarded(**given: Any) -> Any:
        found: Any = session(**given)
        found.client = lambda service, **_: Guarded(theirs, service, policies[role])
        return found

    monkeypatch.setattr(boto3, "Session", guarded)
    theirs.wanted = dict.fromkeys(theirs.wanted, int(words.startswith("cluster")))
    given, roles = words.format(code=code).split(), [*BY_ROLE]
    if any(words in BY_ROLE[each] for each in roles[: roles.index(role) + 1]):
        cli(*given)
        is_marked = "stops/AROA123:anna@example.com/early" in theirs.objects
        assert is_marked == (words.startswith("stop early") and role == SUBMIT)
    else:
        cli.refuses(*given, code=exits.FAILED)
        assert theirs.changes == []


def test_a_stop_that_aws_throttles_calls_no_job_off() -> None:
    deployment, job = Mock(user_id=BERT), Mock()
    job.spec.user_id = BERT
    deployment.jobs.stop.side_effect = refused("ThrottlingException", "StopExecution")
    deployment.jobs.heads.return_value = []
    with pytest.raises(ClientError, match="Throttling"):
        follow.stop(deployment, job)
    assert not deployment.bucket.put.called


def test_operators_have_each_right_that_a_command_needs(
    policies: dict[str, list[Statement]],
) -> None:
    words = {
        word
        for file in [*(ROOT / "trainctl").rglob("*.py"), ROOT / "store" / "bucket.py"]
        for node in ast.walk(ast.parse(file.read_text()))
        for word in (getattr(node, "attr", None), getattr(node, "value", None))
        if isinstance(word, str)  # of a method, or a paginator's
    }
    # Of two services with a call of one name, the first one is ours.
    known = {name: action for each in reversed(SERVICES) for name, action in actions(each).items()}
    given = {action for statement in policies[OPERATE] for action in statement.actions}
    # Functions of this project, and one of Jinja.
    functions = {"ec2:ReleaseHosts", "ssm:ListCommands", "cloudformation:GetTemplate"}
    assert {known[word] for word in words & known.keys()} - given == NOT_GIVEN | functions


@pytest.mark.parametrize(
    ("action", "on", "is_allowed"),
    [
        ("ecs:ExecuteCommand", arn("ecs", "task/TrainingStack-x/mine-head"), True),
        ("ecs:ExecuteCommand", arn("ecs", "task/TrainingStack-x/theirs-head"), False),
        ("ecs:DescribeServices", arn("ecs", "service/TrainingStack-x/head"), True),
        ("ecs:DescribeTasks", arn("ecs", "task/other/t"), False),
        ("logs:GetLogEvents", arn("logs", "log-group:TrainingStack-x:log-stream:y"), True),
        *((f"s3:{kind}Object", f"{BUCKET}/{key}", False) for kind, key in REFUSED),
        ("s3:PutObject", f"{BUCKET}/{runs.job_code('r', 'j')}", True),
        ("s3:PutObject", f"{BUCKET}/data/mnist/train.gz", True),
        ("s3:PutObject", f"{BUCKET}/{runs.job_stop('AROA123:anna@example.com', 'j')}", True),
        ("s3:DeleteObject", f"{BUCKET}/{runs.job_code('r', 'j')}", True),
        ("s3:DeleteObject", f"{BUCKET}/runs/r/checkpoints/step-00000001/manifest.json", True),
        ("s3:DeleteObject", f"{BUCKET}/data/mnist.json", True),
        ("secretsmanager:GetSecretValue", arn("secretsmanager", "secret:training/key"), False),
        ("states:StartExecution", arn("states", "stateMachine:TrainingStack-jobs"), True),
        ("states:StartExecution", arn("states", "stateMachine:b-TrainingStack-jobs"), False),
    ],
)
def test_submitters_may_do_that_to_what_is_theirs(
    theirs: Account, policies: dict[str, list[Statement]], action: str, on: str, is_allowed: bool
) -> None:
    assert may(theirs, policies[SUBMIT], action, on, on.rpartition("/")[2]) is is_allowed
