"""The policies for people: commands with the rights of each role, call by call.

``rehearsal.policies`` decides by the policies of the template; the account is a model.
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import boto3
import botocore.session
import pytest
from botocore import xform_name

from contract import exits
from contract.outputs import OPERATE, READ, SUBMIT
from rehearsal.policies import Call, Statement, allows, parse
from tests.aws.calls import Paged, refused
from tests.conftest import ROOT
from tests.stacks.conftest import Synth, synth
from tests.stacks.test_roles import Deployed, arn
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli

__all__ = ["synth"]  # a fixture

#: The name as CloudFormation makes it.
CLUSTER: Final = "TrainingStack-Cluster-1A2B"
#: Service in boto3 -> its name in actions.
SERVICES: Final = {
    **{"stepfunctions": "states", "service-quotas": "servicequotas"},
    **{each: each for each in ("autoscaling", "cloudformation", "ecr", "ec2", "ecs", "iam")},
    **{each: each for each in ("lambda", "logs", "s3", "secretsmanager", "ssm", "sts")},
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
    "sts:GetCallerIdentity",
    "ssm:GetParameter",
    *(f"ec2:Describe{each}" for each in ("Addresses", "AvailabilityZones", "Vpcs")),
}


def actions(service: str) -> dict[str, str]:
    """Action of each call that a client has."""
    names = [*botocore.session.get_session().get_service_model(service).operation_names]
    names += ["UploadFile", "DownloadFile"] if service == "s3" else []
    called = {xform_name(each): f"{SERVICES[service]}:{each}" for each in names}
    return {name: RENAMED.get(action, action) for name, action in called.items()}


@pytest.fixture(scope="module")
def policies(synth: Synth) -> dict[str, list[Statement]]:
    templates = synth()
    # What begins with the stack's name, because the template gives it no other.
    training = templates.training["Resources"].values()
    for kind, name in (("ECS::Cluster", "ClusterName"), ("Logs::LogGroup", "LogGroupName")):
        found = [each.get("Properties", {}) for each in training if each["Type"] == f"AWS::{kind}"]
        assert found
        assert not any(name in each for each in found)
    machine = templates.only("AWS::StepFunctions::StateMachine")["StateMachineName"]
    assert machine == "TrainingStack-jobs"
    of_role = {}
    for output in (READ, SUBMIT, OPERATE):
        policy = templates.resources[templates.core["Outputs"][output]["Value"]["Ref"]]
        document = Deployed(templates).value(policy["Properties"]["PolicyDocument"])
        assert len(json.dumps(document, separators=(",", ":"))) < 6144, "the most that IAM takes"
        of_role[output] = parse(document)
    return of_role


class Guarded(Paged):
    """A client of one service, for a person with a policy."""

    def __init__(self, account: Account, service: str, policy: list[Statement]) -> None:
        self._account, self._service, self._policy = account, service, policy
        self._actions = actions(service)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._account, name)
        action = self._actions.get(name)
        if action is None or action == "sts:GetCallerIdentity":
            return found

        def call(*words: Any, **given: Any) -> Any:
            for resource in self._resources(name, words, given):
                if not allows(self._asked(action, resource), identity=self._policy):
                    code = "AccessDenied" if self._service == "s3" else "AccessDeniedException"
                    raise refused(code, action.partition(":")[2], f"{action} on {resource}")
            return found(*words, **given)

        return call

    def _asked(self, action: str, resource: str) -> Call:
        task = self._account.tasks.get(resource.rpartition("/")[2], {})
        tags = {each["key"]: each["value"] for each in task.get("tags", [])}
        if resource == arn("secretsmanager", "secret:arn:token"):
            tags["aws:cloudformation:stack-name"] = "TrainingStack"
        keys = {
            "aws:userid": self._account.user_id,
            "ecs:cluster": arn("ecs", f"cluster/{CLUSTER}"),
        }
        keys |= {f"aws:ResourceTag/{key}": value for key, value in tags.items()}
        return Call(caller="anna", action=action, resource=resource, keys=keys)

    def _resources(self, name: str, words: Any, given: dict[str, Any]) -> Iterator[str]:
        """ARNs of what a call is about, by the tables of the Service Authorization Reference."""
        match self._service, given:
            case "stepfunctions", {"executionArn": execution}:
                job = execution.rpartition(":")[2]
                yield arn("states", f"execution:TrainingStack-jobs:{job}")
            case "stepfunctions", _:
                yield arn("states", "stateMachine:TrainingStack-jobs")
            case "ecs", _ if name != "list_tasks":
                kinds = {"containerInstances": "container-instance"}
                kinds |= {"task": "task", "tasks": "task", "service": "service"}
                named = [
                    arn("ecs", f"{kinds.get(key, 'service')}/{CLUSTER}/{each}")
                    for key in (*kinds, "services")
                    for each in (
                        [given[key]] if isinstance(given.get(key), str) else given.get(key, [])
                    )
                ]
                yield from named
                if not named or name == "execute_command":
                    yield arn("ecs", f"cluster/{CLUSTER}")
            case "logs", {"logGroupName": group}:
                yield arn("logs", f"log-group:TrainingStack-{group}-1A2B:log-stream:")
            case "s3", {"Delete": wanted}:
                yield from (f"arn:aws:s3:::Bucket/{each['Key']}" for each in wanted["Objects"])
            case "s3", _:
                at = {"upload_file": 2, "download_file": 1}.get(name)
                key = given.get("Key") if at is None else words[at]
                yield "arn:aws:s3:::Bucket" + (f"/{key}" if key else "")
            case "cloudformation", {"StackName": stack}:
                yield arn("cloudformation", f"stack/{stack}/1-2-3")
            case "lambda", _:
                yield arn("lambda", "function:TrainingStack-keeper")
            case "secretsmanager", {"SecretId": secret}:
                yield arn("secretsmanager", f"secret:{secret}")
            case "ecr", {"repositoryName": repository}:
                yield arn("ecr", f"repository/{repository.capitalize()}Repository")
            case "ssm", _:
                yield arn("ecs", f"task/{CLUSTER}/head")
                yield "arn:aws:ssm:us-east-1::document/AWS-StartPortForwardingSession"
            case _:
                yield "*"


#: Commands by who may give them.
BY_ROLE: Final = {
    READ: (
        *("ls", "show mine", "logs mine", "cost mine", "runs", "plan ddp --secret K=training/key"),
        *("wait ended", "data ls", "cluster status", "doctor"),
    ),
    SUBMIT: (
        *("submit ddp --yes", "submit --code {code} --yes -- python mine.py"),
        *("stop mine --yes", "stop early --yes", "data put {code} --as mine", "runs rm old --yes"),
    ),
    OPERATE: (
        *("stop theirs --yes", "stop waits --yes"),
        "cluster down --yes --no-wait",
    ),
}


@pytest.mark.parametrize("role", BY_ROLE)
@pytest.mark.parametrize("words", [words for of_role in BY_ROLE.values() for words in of_role])
def test_each_role_may_give_its_commands_and_those_of_the_role_before(
    account: Account,
    cli: Cli,
    code: Path,
    policies: dict[str, list[Statement]],
    monkeypatch: pytest.MonkeyPatch,
    laptop_is_ready: None,
    role: str,
    words: str,
) -> None:
    del laptop_is_ready
    session = boto3.Session

    def guarded(**given: Any) -> Any:
        found = session(**given)
        found.client = lambda service, **_: Guarded(account, service, policies[role])
        return found

    monkeypatch.setattr(boto3, "Session", guarded)
    account.add("ended", run="old", status="SUCCEEDED")
    account.wanted = dict.fromkeys(account.wanted, 1 if words.startswith("cluster") else 0)
    account.objects["runs/old/jobs/ended.json"] = b"{}"
    for job, user, has_head in (
        ("mine", account.user_id, True),
        ("theirs", "AROA123:bert@example.com", True),
        ("early", account.user_id, False),
        ("waits", "AROA123:bert@example.com", False),
    ):
        account.add(job, run=job)
        account.change_order(job, user_id=user)
        if has_head:
            tags = [{"key": "user-id", "value": user}]
            account.add_head(job, f"{job}-head", tags=tags)
    order = [READ, SUBMIT, OPERATE]
    needed = next(each for each in order if words in BY_ROLE[each])
    given = words.format(code=code).split()
    if order.index(role) < order.index(needed):
        assert "not allowed: " in cli.refuses(*given, code=exits.FAILED)
        assert account.changes == []
    else:
        cli(*given)


def test_operators_have_each_right_that_a_command_needs(
    policies: dict[str, list[Statement]],
) -> None:
    files = [*(ROOT / "trainctl").rglob("*.py"), ROOT / "store" / "bucket.py"]
    words = {
        word
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        for word in (getattr(node, "attr", None), getattr(node, "value", None))
        if isinstance(word, str)  # of a method, or a paginator's
    }
    # Of two services with an operation of one name, the first is the one that is called.
    known = {name: action for each in reversed(SERVICES) for name, action in actions(each).items()}
    called = {known[word] for word in words & known.keys()}
    assert len(called) > 30
    given = {action for statement in policies[OPERATE] for action in statement.actions}
    own = {"ec2:ReleaseHosts", "ssm:ListCommands"}  # functions of this project
    assert called - given == NOT_GIVEN | own


@pytest.mark.parametrize(
    ("action", "resource", "is_allowed"),
    [
        ("ecs:ExecuteCommand", "mine", True),
        ("ecs:ExecuteCommand", "theirs", False),
        ("s3:PutObject", "arn:aws:s3:::Bucket/stops/AROA123:anna@example.com/job", True),
        ("s3:PutObject", "arn:aws:s3:::Bucket/stops/AROA123:bert@example.com/job", False),
        ("secretsmanager:GetSecretValue", arn("secretsmanager", "secret:training/key"), False),
        ("states:StartExecution", arn("states", "stateMachine:b-TrainingStack-jobs"), False),
    ],
)
def test_submitters_may_do_to_their_own_jobs_what_they_may_not_to_others(
    account: Account,
    policies: dict[str, list[Statement]],
    action: str,
    resource: str,
    is_allowed: bool,
) -> None:
    account.add("job")
    for whose, user in (("mine", account.user_id), ("theirs", "AROA123:bert@example.com")):
        account.add_head("job", whose, tags=[{"key": "user-id", "value": user}])
    client = Guarded(account, "ecs", policies[SUBMIT])
    on = resource if ":" in resource else arn("ecs", f"task/{CLUSTER}/{resource}")
    assert allows(client._asked(action, on), identity=policies[SUBMIT]) is is_allowed
