"""Each role of the templates may do what it needs, and nothing that others need.

``rehearsal.policies`` decides, which the local AWS asks for each call of a role.
"""

import ast
import functools
import json
from pathlib import Path
from typing import Any, Final

import aws_cdk as cdk
import botocore.session
import pytest
from botocore import xform_name

import app
from contract import runs
from contract.job import NOTIFY_SECRETS, SECRETS_PREFIX
from rehearsal.policies import Call, Statement, allows, parse
from tests.conftest import ROOT
from tests.stacks.conftest import Synth, Templates, context

ACCOUNT: Final = "111122223333"
PSEUDO: Final = {
    "AWS::Partition": "aws",
    "AWS::Region": "us-east-1",
    "AWS::AccountId": ACCOUNT,
    "AWS::URLSuffix": "amazonaws.com",
}
#: Settings under which every role is there.
ALL_ROLES: Final = {
    **{"github_repository": "acme/train", "retain_bucket": "false", "spot": "true"},
    "shared_storage": "fsx",
}


def arn(service: str, resource: str) -> str:
    return f"arn:aws:{service}:us-east-1:{ACCOUNT}:{resource}"


#: ARNs of the types that policies name, by logical id.
ARNS: Final = {
    "AWS::S3::Bucket": lambda name: f"arn:aws:s3:::{name}",
    "AWS::IAM::Role": lambda name: f"arn:aws:iam::{ACCOUNT}:role/{name}",
    "AWS::ECS::Cluster": lambda name: arn("ecs", f"cluster/{name}"),
    "AWS::ECR::Repository": lambda name: arn("ecr", f"repository/{name}"),
    "AWS::Logs::LogGroup": lambda name: arn("logs", f"log-group:{name}:*"),
    "AWS::Lambda::Function": lambda name: arn("lambda", f"function:{name}"),
    "AWS::Events::Rule": lambda name: arn("events", f"rule/{name}"),
    "AWS::SNS::Topic": lambda name: arn("sns", name),
    "AWS::SecretsManager::Secret": lambda name: arn("secretsmanager", f"secret:{name}-AbCdEf"),
}


class Deployed:
    """The policies of both templates, with made-up names in the place of references."""

    def __init__(self, templates: Templates) -> None:
        self.resources = templates.resources
        self.exports = {
            f"CoreStack:{name}": output["Value"]
            for name, output in templates.core["Outputs"].items()
        }
        self.roles: dict[str, list[Statement]] = {
            name: [] for name in templates.of_type("AWS::IAM::Role")
        }
        for policy in templates.of_type("AWS::IAM::Policy").values():
            found = parse(self.value(policy["PolicyDocument"]))
            for role in policy["Roles"]:
                self.roles[role["Ref"]] += found
        for name, role in templates.of_type("AWS::IAM::Role").items():
            for policy in role.get("Policies", []):
                self.roles[name] += parse(self.value(policy["PolicyDocument"]))
        self.bucket = parse(self.value(templates.only("AWS::S3::BucketPolicy")["PolicyDocument"]))

    def value(self, given: Any) -> Any:
        """A value of a template as it is once it is deployed."""
        match given:
            case {"Ref": name}:
                kind = self.resources.get(name, {}).get("Type", "")
                is_arn = kind == "AWS::SecretsManager::Secret"
                return PSEUDO.get(name) or (ARNS[kind](name) if is_arn else name)
            case {"Fn::GetAtt": [name, "Arn"]}:
                return ARNS[self.resources[name]["Type"]](name)
            case {"Fn::GetAtt": [name, attribute]}:
                return f"{name}-{attribute}"
            case {"Fn::ImportValue": name}:
                return self.value(self.exports[name])
            case {"Fn::Join": [separator, parts]}:
                return separator.join(self.value(part) for part in parts)
            case dict():
                return {key: self.value(each) for key, each in given.items()}
            case list():
                return [self.value(each) for each in given]
        return given

    def role(self, prefix: str) -> str:
        (name,) = [each for each in self.roles if each.startswith(prefix)]
        return name

    def id(self, prefix: str, kind: str) -> str:
        """Logical id of the one resource of a type whose name begins so."""
        (name,) = [
            name
            for name, resource in self.resources.items()
            if resource["Type"] == kind and name.startswith(prefix)
        ]
        return name

    @property
    def bucket_arn(self) -> str:
        return ARNS["AWS::S3::Bucket"](self.id("Bucket", "AWS::S3::Bucket"))

    def name_of(self, resource: str) -> str:
        """The name that a template gives a resource, else its logical id."""
        properties = self.resources[resource].get("Properties", {})
        names = ("Family", "StateMachineName", "FunctionName")
        found = next((properties[each] for each in names if each in properties), resource)
        return str(self.value(found))

    def may(self, role: str, action: str, resource: str, **keys: str) -> bool:
        """Whether a role may do that; keys have ``_`` for their colon."""
        call = Call(
            caller=ARNS["AWS::IAM::Role"](role),
            action=action,
            resource=resource,
            keys={"aws:SecureTransport": "true", "s3:TlsVersion": "1.3"}
            | {name.replace("_", ":"): value for name, value in keys.items()},
        )
        of_bucket = self.bucket if action.startswith("s3:") else ()
        return allows(call, identity=self.roles[role], resource=of_bucket)


@pytest.fixture(scope="module")
def deployed(synth: Synth) -> Deployed:
    return Deployed(synth(**ALL_ROLES))


# --- the roles ------------------------------------------------------------------------------------
#: Rights that another call asks for.
IMPLIED: Final = {"iam:PassRole", "ecs:TagResource"}
#: What a policy names beside resources of the deployment: the secrets for jobs, the stack itself,
#: and the rule by which Step Functions hears of tasks.
OUTSIDE: Final = (
    f":secret:{SECRETS_PREFIX}*",
    f":secret:{NOTIFY_SECRETS}*",
    "AWS::StackId",
    ":rule/StepFunctionsGetEventsForECSTaskRule",
    arn("fsx", "task/*"),  # exports have ids only
)


def test_every_resource_of_a_right_is_one_of_the_deployment(deployed: Deployed) -> None:
    own = {each for name in deployed.resources for each in (name, deployed.name_of(name))}
    for role, statements in deployed.roles.items():
        for statement in statements:
            if {*statement.actions} & {*IMPLIED, "ecs:RunTask"}:
                assert statement.conditions, f"{role}: {statement.actions}"
            for resource in {*statement.resources} - {"*"}:
                named = f"{resource} {statement.conditions}"  # a tag of the deployment's hosts, too
                assert resource.endswith(OUTSIDE) or any(each in named for each in own), role


#: Role, action and resource of a call that it must not make, although the resource is one of the
#: deployment. Names in braces are of the deployment; ``test_reach_and_rights`` has more.
NEEDLESS: Final[list[tuple[str, str, str]]] = [
    ("NodesWorkerRole", "logs:GetLogEvents", "{shell_logs}"),
    ("JobsRole", "autoscaling:TerminateInstanceInAutoScalingGroup", "{head_group}"),
    # The function that cleans up: it ends what is there, and writes records of jobs.
    ("JobsKeeperRole", "s3:PutObject", "{bucket}/runs/r/result.json"),
    ("JobsKeeperRole", "s3:GetObject", "{bucket}/runs/r/result.json"),
    ("JobsKeeperRole", "secretsmanager:GetSecretValue", "{secret}"),
    ("JobsKeeperRole", "s3:PutObject", "{bucket}/heads/r/j.hold"),
    ("ClusterHostRole", "s3:GetObject", "{bucket}/runs/r/result.json"),
    ("ClusterHostRole", "s3:PutObject", "{bucket}/runs/r/result.json"),
    ("ClusterHostRole", "ssm:UpdateInstanceInformation", "*"),
    ("NodesWorkerRole", "s3:PutObject", "{bucket}/hosts/i-1.json"),
    # What decides about jobs is written by the keeper, by heads of jobs, or by who calls one off.
    *(
        (role, f"s3:{action}Object", f"{{bucket}}/{prefix}/r/j.json")
        for role, prefixes in {
            "NodesHeadRole": (runs.ENDS_PREFIX, runs.HEADS_PREFIX, runs.STOPS_PREFIX),
            "NodesWorkerRole": (runs.ENDS_PREFIX, runs.HEADS_PREFIX, runs.STOPS_PREFIX),
            "JobsRole": (runs.ENDS_PREFIX, runs.STOPS_PREFIX),
        }.items()
        for prefix in prefixes
        for action in ("Put", "Delete")
    ),
    ("NodesExecutionRole", "ecr:PutImage", "{repository}"),
    ("CustomS3AutoDelete", "s3:GetObject", "{bucket}/runs/r/result.json"),
    ("ImagePushRole", "ecr:BatchDeleteImage", "{repository}"),
    # ECS itself reads the token of Ray, and no secret of a job.
    ("NodesExecutionRole", "secretsmanager:GetSecretValue", "{secret}"),
]


def test_session_manager_adds_its_own_rights_to_hosts_and_nothing_else(synth: Synth) -> None:
    before, after = synth(), synth(session_manager="true")
    changed = {name for name, each in after.resources.items() if each != before.resources[name]}
    (name,) = [each for each in changed if each.startswith("ClusterHostRoleDefaultPolicy")]
    old, new = (
        [
            each["Action"]
            for each in found.resources[name]["Properties"]["PolicyDocument"]["Statement"]
        ]
        for found in (before, after)
    )
    (added,) = [each for each in new if each not in old]
    session = {
        f"ssmmessages:{verb}{way}Channel"
        for verb in ("Create", "Open")
        for way in ("Control", "Data")
    }
    assert {*added} == {"ssm:UpdateInstanceInformation"} | session
    assert changed == {name}


@pytest.mark.parametrize(("role", "action", "resource"), NEEDLESS)
def test_a_call_that_a_role_does_not_need_is_refused(
    deployed: Deployed, role: str, action: str, resource: str
) -> None:
    logs = deployed.id("ClusterShellLogs", "AWS::Logs::LogGroup")
    hosts = deployed.id("ClusterHeadGroup", "AWS::AutoScaling::AutoScalingGroup")
    named = {
        "bucket": deployed.bucket_arn,
        "secret": arn("secretsmanager", f"secret:{SECRETS_PREFIX}key-AbCdEf"),
        "shell_logs": arn("logs", f"log-group:{logs}:log-stream:some"),
        "head_group": arn("autoscaling", f"autoScalingGroup:x:autoScalingGroupName/{hosts}"),
        "repository": arn("ecr", f"repository/{deployed.id('Worker', 'AWS::ECR::Repository')}"),
    }
    assert not deployed.may(deployed.role(role), action, resource.format_map(named))


_PARTS: Final = ("index", "cluster", "kept", "notices")
KEEPERS: Final = [f"stacks/jobs/keeper/{each}.py" for each in _PARTS]
#: Role -> what runs under it, of which each call of AWS needs a right.
CALLERS: Final = {
    "JobsKeeperRole": (*KEEPERS,),
    "ClusterTeardownRole": ("stacks/teardown/handler.py",),
    "JobsRole": ("containers/autoscaler.py", "containers/program/start/code.py"),
    "ClusterSharedStorageExportRole": ("stacks/storage/export_handler.py",),
}
#: Service in boto3 -> its name in actions.
SERVICES: Final = {
    "stepfunctions": "states",
    **{
        each: each
        for each in (
            "autoscaling",
            "cloudformation",
            "ec2",
            "ecs",
            "fsx",
            "lambda",
            "s3",
            "secretsmanager",
            "sns",
        )
    },
}
#: Calls whose action has another name.
RENAMED: Final = {"lambda:Invoke": "lambda:InvokeFunction"}


@functools.cache
def actions() -> dict[str, str]:
    """Action of each call that a client of boto3 has."""
    session = botocore.session.get_session()
    return {
        xform_name(each): RENAMED.get(f"{prefix}:{each}", f"{prefix}:{each}")
        for service, prefix in SERVICES.items()
        for each in session.get_service_model(service).operation_names
    }


@pytest.mark.parametrize("role", CALLERS)
def test_a_role_may_make_each_call_of_what_runs_under_it(deployed: Deployed, role: str) -> None:
    words = {
        word
        for file in CALLERS[role]
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        for word in (getattr(node, "attr", None), getattr(node, "value", None))
        if isinstance(word, str)  # of a method, or a paginator's
    }
    called = {actions()[word] for word in words & actions().keys()}
    assert len(called) > 3
    training = {
        action for own in deployed.roles[deployed.role("NodesWorkerRole")] for action in own.actions
    }
    given = {each for own in deployed.roles[deployed.role(role)] for each in own.actions}
    assert called - given == set()
    # Nothing else but what a call implies, and the rights of all training code.
    implied = {*IMPLIED, *(training if role == "JobsRole" else ())}
    assert {each for each in given - called if not each.startswith("logs:")} <= implied


#: Action and role -> keys of the bucket.
NEEDED: Final = {
    ("Put", "JobsKeeperRole"): (runs.job_record, runs.job_report),
    ("Get", "JobsKeeperRole"): (
        *(runs.job_record, runs.job_report, runs.job_hold, runs.job_life),
        *(runs.job_reason, runs.job_stop, runs.job_claim),
    ),
    ("Put", "JobsRole"): (runs.job_hold, runs.job_life, runs.job_reason),
    ("Delete", "NodesWorkerRole"): (runs.job_code,),
}


@pytest.mark.parametrize(("action", "role"), NEEDED)
def test_who_reports_and_decides_may_do_so(deployed: Deployed, action: str, role: str) -> None:
    for key in NEEDED[action, role]:
        on = f"{deployed.bucket_arn}/{key('r', 'j')}"
        assert deployed.may(deployed.role(role), f"s3:{action}Object", on)


def test_the_bucket_refuses_requests_without_tls_whoever_asks(deployed: Deployed) -> None:
    worker, item = deployed.role("NodesWorkerRole"), f"{deployed.bucket_arn}/runs/r/x"
    assert deployed.may(worker, "s3:GetObject", item)
    assert not deployed.may(worker, "s3:GetObject", item, aws_SecureTransport="false")
    assert not deployed.may(worker, "s3:GetObject", item, s3_TlsVersion="1.1")


def test_the_function_that_empties_the_bucket_is_let_in_by_the_bucket(deployed: Deployed) -> None:
    role, bucket = deployed.role("CustomS3AutoDelete"), deployed.bucket_arn
    assert deployed.may(role, "s3:DeleteObject", f"{bucket}/runs/r/x")
    assert not deployed.may(role, "s3:DeleteObject", "arn:aws:s3:::other/x")


def test_a_permissions_boundary_is_on_every_role(tmp_path: Path) -> None:
    boundary: Any = {"@aws-cdk/core:permissionsBoundary": {"name": "acme"}}
    unchecked = cdk.App(
        context=context() | boundary,
        outdir=str(tmp_path),
        builtin_cloud_formation_validation=False,
    )
    app.build(unchecked).synth()
    roles = [
        each["Properties"]
        for template in tmp_path.glob("*.template.json")
        for each in json.loads(template.read_text())["Resources"].values()
        if each["Type"] == "AWS::IAM::Role"
    ]
    assert len(roles) == 10
    assert all("policy/acme" in str(each["PermissionsBoundary"]) for each in roles)
