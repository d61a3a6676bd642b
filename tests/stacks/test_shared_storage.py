"""The shared file system: what FSx, Lustre and ECS demand of it, and nothing of it by default.

No emulator mounts anything: each trap of real AWS is asserted on the template. What the function
does that runs before the file system is deleted is tested against an FSx of this file; what a host
does is in ``test_host_setup``, and a deployment's life in ``test_deploy``.
"""

import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from contract import nodes
from contract.outputs import SHAPE, SHARED
from stacks.storage.shared_file_system import HANDLER
from tests.clock import FakeClock
from tests.stacks import lambda_functions
from tests.stacks.conftest import OPTIONS, Synth, Templates, text, variables
from tests.stacks.test_teardown import needs
from tests.stacks.test_templates import PERSISTENT
from tests.stacks.test_training_stack import container, hosts

#: With EFA, whose rules are those of the same security group, and without.
P5 = {"worker_instance_type": "p5.48xlarge", "max_workers": "2"}
every_deployment = pytest.mark.parametrize("settings", [P5, {}], ids=["efa", "ddp"])
#: Lustre's ports, as AWS gives them: from, to.
PORTS = {(988, 988), (1018, 1023)}


def deployed(synth: Synth, **settings: str) -> Templates:
    return synth(shared_storage="fsx", **settings)


def resources(templates: Templates) -> dict[str, Any]:
    found: dict[str, Any] = templates.training["Resources"]
    return found


def named(templates: Templates, kind: str) -> str:
    """Logical id of the only resource of a type."""
    (name,) = templates.of_type(kind)
    return name


# --- without it -----------------------------------------------------------------------------------
@pytest.mark.parametrize("settings", [OPTIONS, {}], ids=["options", "ddp"])
def test_without_it_nothing_of_it_is_there(synth: Synth, settings: dict[str, str]) -> None:
    templates = synth(**settings)
    assert not [each for each in templates.resources.values() if "FSx" in each["Type"]]
    for part in ("lustre", nodes.SHARED_DIR, nodes.SHARED_ATTRIBUTE, nodes.ENV_SHARED, "ExportFil"):
        assert part not in json.dumps(templates.training), part


# --- the file system ------------------------------------------------------------------------------
@every_deployment
def test_lustres_ports_are_open_both_ways_before_fsx_looks_at_them(
    synth: Synth, settings: dict[str, str]
) -> None:
    templates = deployed(synth, **settings)
    (group,) = templates.only("AWS::FSx::FileSystem")["SecurityGroupIds"]
    files, inner = text(group), "<ClusterSecurityGroup0921994B.GroupId>"
    rules = [
        (name, kind, rule)
        for kind in ("Ingress", "Egress")
        for name, rule in templates.of_type(f"AWS::EC2::SecurityGroup{kind}").items()
    ]
    peers = {"Ingress": "SourceSecurityGroupId", "Egress": "DestinationSecurityGroupId"}
    for which in itertools.product(peers, (files, inner), (files, inner)):
        found = {
            (rule.get("FromPort"), rule.get("ToPort"))
            for _, kind, rule in rules
            if (kind, text(rule["GroupId"]), text(rule[peers[kind]])) == which
        }
        assert found == ({(None, None)} if which[1:] == (inner, inner) else PORTS), which
    # FSx makes no file system that its servers could not be reached in.
    own = {name for name, _, rule in rules if text(rule["GroupId"]) == files}
    assert own <= needs(resources(templates), named(templates, "AWS::FSx::FileSystem"))
    # The servers get nothing but Lustre, and from nowhere else.
    inline = resources(templates)[files.strip("<>").partition(".")[0]]["Properties"]
    assert "SecurityGroupIngress" not in inline


# --- the hosts and their tasks --------------------------------------------------------------------
@every_deployment
def test_each_host_mounts_it_and_each_task_demands_that(
    synth: Synth, settings: dict[str, str]
) -> None:
    templates = deployed(synth, **settings)
    files = named(templates, "AWS::FSx::FileSystem")
    source = f"<{files}>.fsx.<AWS::Region>.<AWS::URLSuffix>@tcp:/<{files}.LustreMountName>"
    for node in ("head", "worker"):
        assert f" {source} {nodes.SHARED_DIR}" in text(hosts(templates, node)["UserData"])
    for definition in templates.of_type("AWS::ECS::TaskDefinition").values():
        assert definition["PlacementConstraints"] == [
            {"Type": "memberOf", "Expression": "attribute:training.shared == mounted"}
        ]
        volumes = {each["Name"]: each["Host"]["SourcePath"] for each in definition["Volumes"]}
        assert volumes["shared"] == nodes.SHARED_DIR
        (task,) = definition["ContainerDefinitions"]
        mounts = {each["SourceVolume"]: each for each in task["MountPoints"]}
        assert mounts["shared"]["ContainerPath"] == nodes.SHARED_DIR
        assert mounts["shared"]["ReadOnly"] is False
    assert variables(container(templates, "worker"))[nodes.ENV_SHARED] == nodes.SHARED_DIR


def test_the_command_line_learns_of_it(synth: Synth) -> None:
    outputs = deployed(synth).training["Outputs"]
    assert '"shared": {"deployment": "scratch"' in text(outputs[SHAPE]["Value"])
    files = named(deployed(synth), "AWS::FSx::FileSystem")
    assert text(outputs[SHARED]["Value"]) == f"<{files}>"


# --- its end --------------------------------------------------------------------------------------
def test_it_is_exported_when_no_host_is_left_and_before_anything_of_it_goes(synth: Synth) -> None:
    templates = deployed(synth)
    found = resources(templates)
    export = named(templates, "Custom::ExportFiles")
    link = named(templates, "AWS::FSx::DataRepositoryAssociation")
    files = named(templates, "AWS::FSx::FileSystem")
    hosts = needs(found, named(templates, "Custom::TerminateHosts"))
    assert export in hosts
    # Without the rules between them, hosts could not write what they still hold.
    rules = {
        name
        for name, each in found.items()
        if each["Type"].startswith("AWS::EC2::SecurityGroup") and "Lustre" in json.dumps(each)
    }
    assert len(rules) > 4
    assert rules <= hosts
    assert {link, files} <= needs(found, export)
    assert files in needs(found, link)
    # Its function has its rights and its log until then.
    own = {
        name
        for name, each in found.items()
        if "SharedStorageExport" in name
        and each["Type"] in ("AWS::IAM::Policy", "AWS::Logs::LogGroup")
    }
    assert len(own) == 2
    assert own <= needs(found, export)


def test_files_that_may_be_lost_are_not_exported(synth: Synth) -> None:
    templates = deployed(synth, **PERSISTENT)
    assert templates.of_type("AWS::FSx::FileSystem")
    assert not templates.of_type("Custom::ExportFiles")
    assert "fsx:" not in json.dumps(templates.training)


class Fsx:
    """One file system with its link, whose exports take some looks."""

    def __init__(self) -> None:
        self.events = ["NEW", "CHANGED"]
        self.is_linked = True
        self.updating = 0
        self.tasks: list[dict[str, Any]] = []
        self.looks = 2
        self.failed = 0
        self.ends = "SUCCEEDED"
        self.clock = FakeClock()
        self.answers: list[tuple[str, str | None, str]] = []

    def client(self, _service: str) -> Any:
        return SimpleNamespace(
            describe_data_repository_associations=self._links,
            update_data_repository_association=self._update,
            describe_data_repository_tasks=self._tasks,
            create_data_repository_task=self._create,
        )

    def _links(self, **_: Any) -> Any:
        self.updating = max(0, self.updating - 1)
        found = {
            "AssociationId": "dra-1",
            "Lifecycle": "UPDATING" if self.updating else "AVAILABLE",
            "S3": {
                "AutoImportPolicy": {"Events": ["NEW"]},
                "AutoExportPolicy": {"Events": self.events},
            },
        }
        return {"Associations": [found] if self.is_linked else []}

    def _update(self, **given: Any) -> None:
        assert given["AssociationId"] == "dra-1"
        assert given["S3"]["AutoImportPolicy"] == {"Events": ["NEW"]}
        self.events = given["S3"]["AutoExportPolicy"]["Events"]
        self.updating = 3

    def _create(self, **given: Any) -> Any:
        assert not self.events, "FSx refuses an export while it exports by itself"
        assert not self.updating, "and while it changes the link"
        assert given["Type"] == "EXPORT_TO_REPOSITORY"
        assert given["Report"]["Path"] == "s3://bucket/datasets/export-reports"
        task = {"TaskId": "task-1", "Lifecycle": "PENDING", "FileSystemId": given["FileSystemId"]}
        self.tasks.append(task)
        return {"DataRepositoryTask": task}

    def _tasks(self, **_: Any) -> Any:
        for task in self.tasks:
            self.looks -= 1
            task["Lifecycle"] = "EXECUTING" if self.looks > 0 else self.ends
            task["Status"] = {"FailedCount": self.failed}
        return {"DataRepositoryTasks": self.tasks}


@pytest.fixture
def account() -> Fsx:
    return Fsx()


Answer = Callable[[str], tuple[str, str | None, str]]


@pytest.fixture
def ask(account: Fsx, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """What CloudFormation is answered to a request of a kind."""
    function = lambda_functions.answering(HANDLER, account, monkeypatch)

    def asked(kind: str) -> tuple[str, str | None, str]:
        event = {
            "RequestType": kind,
            "LogicalResourceId": "ExportFiles",
            "PhysicalResourceId": "fs-1",
            "StackId": "arn:aws:cloudformation:eu-west-1:000000000000:stack/TrainingStack/1",
            "ResourceProperties": {
                "FileSystem": "fs-1",
                "Reports": "s3://bucket/datasets/export-reports",
                "Exports": ["NEW", "CHANGED"],
            },
        }
        function.handler(event, lambda_functions.context(lambda: 900 - account.clock.now))
        return account.answers[-1]

    return asked


@pytest.mark.parametrize(
    ("kind", "is_linked", "exports"),
    [
        ("Create", True, []),
        ("Update", True, []),
        ("Delete", True, ["SUCCEEDED"]),
        ("Delete", False, []),  # it has nowhere to be exported to
    ],
)
def test_only_a_deletion_exports_and_waits_for_it(
    account: Fsx, ask: Answer, kind: str, is_linked: bool, exports: list[str]
) -> None:
    account.is_linked = is_linked
    assert ask(kind) == ("SUCCESS", None, "fs-1")
    assert [each["Lifecycle"] for each in account.tasks] == exports
    assert account.events == ([] if exports else ["NEW", "CHANGED"])


@pytest.mark.parametrize(("failed", "ends"), [(12, "SUCCEEDED"), (3, "FAILED"), (0, "CANCELED")])
def test_files_that_are_not_in_the_bucket_stop_it_and_go_on_being_exported(
    account: Fsx, ask: Answer, failed: int, ends: str
) -> None:
    account.failed, account.ends = failed, ends
    status, reason, _ = ask("Delete")
    assert status == "FAILED"
    for part in (f"{failed} files", "s3://bucket/datasets/export-reports", "TrainingStack"):
        assert part in (reason or "")
    assert len(reason or "") < 1024, "CloudFormation keeps no more"
    assert account.events == ["NEW", "CHANGED"]


@pytest.mark.parametrize(("failed", "status"), [(0, "SUCCESS"), (12, "FAILED")])
def test_an_export_that_takes_longer_than_lambda_may_goes_on_with_the_next_deletion(
    account: Fsx, ask: Answer, failed: int, status: str
) -> None:
    account.looks, account.failed = 1000, failed
    assert ask("Delete")[0] == "FAILED"
    assert account.events == []
    account.clock.now, account.looks = 0.0, 3
    assert ask("Delete")[0] == status
    assert len(account.tasks) == 1, "the same export"
    assert account.events == (["NEW", "CHANGED"] if failed else []), "files that are left follow"
