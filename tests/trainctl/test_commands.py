"""The command line without a cloud: helps, refuses bad input in one sentence, asks before it costs.

The fake stands at the edge of AWS: it answers the calls of boto3's clients from a small account in
memory. Everything else is the real command.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib import metadata
from typing import Any

import boto3
import pytest
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    ProfileNotFound,
    SSOTokenLoadError,
)

from contract import exits
from contract import outputs as stack_outputs
from contract.nodes import ClusterSize
from tests.conftest import ROOT
from trainctl import cluster
from trainctl.__main__ import main
from trainctl.aws import Shape, Task

SHAPE = {
    "preset": "ddp",
    "head_instance_type": "m5.xlarge",
    "head_trains": False,
    "worker_instance_type": "g5.xlarge",
    "max_workers": 4,
    "spot": False,
    "image_tag": "abc123",
}
OUTPUTS = {
    stack_outputs.CORE_STACK: {stack_outputs.BUCKET: "bucket"},
    stack_outputs.TRAINING_STACK: {
        stack_outputs.CLUSTER: "cluster",
        stack_outputs.HEAD_SERVICE: "head-service",
        stack_outputs.WORKER_SERVICE: "worker-service",
        stack_outputs.LOG_GROUP: "logs",
        stack_outputs.SHAPE: json.dumps(SHAPE),
    },
}


def refused(code: str, message: str, operation: str = "DescribeStacks") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)


@dataclass
class Account:
    """What the account holds, and what AWS does with it."""

    outputs: dict[str, dict[str, str]] = field(
        default_factory=lambda: json.loads(json.dumps(OUTPUTS))
    )
    stack_status: str = "CREATE_COMPLETE"
    wanted: dict[str, int] = field(default_factory=lambda: {"head-service": 0, "worker-service": 0})
    starts: bool = True
    """Whether tasks that are wanted run."""
    fault: dict[str, Any] | None = None
    """A task that ended."""
    rollout: str = "COMPLETED"
    log: list[str] = field(default_factory=list)
    fails_with: Exception | None = None
    region: str | None = "eu-west-1"
    calls: list[str] = field(default_factory=list)
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tasks that a list has named."""

    def tasks(self, service: str) -> list[dict[str, Any]]:
        node = service.partition("-")[0]
        number = self.wanted[service] if self.starts else 0
        return [
            {
                "taskArn": f"arn:aws:ecs:eu-west-1:1:task/cluster/{node}{i}",
                "lastStatus": "RUNNING",
                "startedAt": datetime.now(tz=UTC),
                "attachments": [
                    {"details": [{"name": "privateIPv4Address", "value": f"10.0.0.{i}"}]}
                ],
                "containers": [{"healthStatus": "HEALTHY", "runtimeId": f"{node}-{i}"}],
            }
            for i in range(number)
        ]


class Client:
    """Answers like a client of boto3."""

    def __init__(self, account: Account) -> None:
        self.account = account

    def get_caller_identity(self) -> dict[str, str]:
        if self.account.fails_with:
            raise self.account.fails_with
        return {"Account": "123456789012"}

    def describe_stacks(self, StackName: str) -> dict[str, Any]:  # noqa: N803
        if StackName not in self.account.outputs:
            raise refused("ValidationError", f"Stack with id {StackName} does not exist")
        outputs = self.account.outputs[StackName].items()
        listed = [{"OutputKey": key, "OutputValue": value} for key, value in outputs]
        return {"Stacks": [{"StackStatus": self.account.stack_status, "Outputs": listed}]}

    def describe_services(self, **_arguments: Any) -> dict[str, Any]:
        services = [
            {
                "serviceName": name,
                "desiredCount": count,
                "runningCount": len(self.account.tasks(name)),
                "deployments": [
                    {
                        "status": "PRIMARY",
                        "rolloutState": self.account.rollout,
                        "rolloutStateReason": "tasks failed to start.",
                    }
                ],
                "events": [],
            }
            for name, count in self.account.wanted.items()
        ]
        return {"services": services}

    def update_service(self, *, service: str, desiredCount: int, **_rest: Any) -> None:  # noqa: N803
        self.account.calls.append(f"{service}={desiredCount}")
        self.account.wanted[service] = desiredCount

    def get_paginator(self, _operation: str) -> "Client":
        return self

    def paginate(self, *, serviceName: str, desiredStatus: str, **_: Any) -> Iterator[Any]:  # noqa: N803
        tasks = self.account.tasks(serviceName) if desiredStatus == "RUNNING" else []
        if desiredStatus == "STOPPED" and self.account.fault and serviceName.startswith("worker"):
            tasks = [self.account.fault]
        self.account.listed |= {task["taskArn"]: task for task in tasks}
        yield {"taskArns": [task["taskArn"] for task in tasks]}

    def describe_tasks(self, *, tasks: list[str], **_rest: Any) -> dict[str, Any]:
        return {"tasks": [self.account.listed[task] for task in tasks]}

    def get_log_events(self, **_arguments: Any) -> dict[str, Any]:
        return {"events": [{"message": line} for line in self.account.log]}

    def execute_command(self, **_arguments: Any) -> Any:
        raise refused(
            "TargetNotConnectedException", "The agent is not connected.", "ExecuteCommand"
        )


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    found = Account()

    class Session:
        def __init__(self, profile_name: str | None, region_name: str | None) -> None:
            if profile_name == "unknown":
                raise ProfileNotFound(profile="unknown")
            self.region_name = region_name or found.region

        def client(self, _service: str, **_arguments: Any) -> Client:
            return Client(found)

    monkeypatch.setattr(boto3, "Session", Session)
    monkeypatch.setattr(cluster, "POLL_S", 0.0)
    monkeypatch.setattr("shutil.which", lambda _name, **_: None)
    return found


# --- help -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "command",
    [
        *("", "cluster", "cluster up", "cluster status", "cluster down", "shell", "version"),
        *("local", "local up", "local status", "local env", "local down"),
    ],
)
def test_every_command_helps(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    captured = capsys.readouterr()
    assert "Usage:" in captured.out
    assert captured.err == ""


def test_the_help_names_the_exit_codes_and_where_training_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Exit codes: 0 done; 1 it failed" in shown
    assert "python -m training.launch ddp --local" in shown


@pytest.mark.parametrize("argument", ["--version", "version"])
def test_version_is_the_projects(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument]) == 0
    assert capsys.readouterr().out == f"trainctl {metadata.version('ecs-train')}\n"


def test_the_command_is_installed_under_its_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"trainctl": "trainctl.__main__:main"}
    (entry,) = metadata.entry_points(group="console_scripts", name="trainctl")
    assert entry.load() is main


def test_it_needs_neither_torch_nor_ray() -> None:
    script = (
        "import sys, trainctl.__main__; print([m for m in ('torch', 'ray') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"


# --- bad input and a bad account ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "change", "code", "message"),
    [
        (["begin"], {}, 2, "No such command 'begin'"),
        (["cluster", "up", "--workers", "x"], {}, 2, "should be a valid integer"),
        (["cluster", "up", "--workers", "0"], {}, 2, "takes 1 to 4"),
        (["cluster", "up", "--workers", "5"], {}, 2, "max_workers=5"),
        (["cluster", "up"], {}, 2, "nobody is there to be asked: give --yes"),
        (["cluster", "up", "--timeout-minutes", "0"], {}, 2, "0.1"),
        (["cluster", "status", "--profile", "unknown"], {}, 2, "aws configure list-profiles"),
        (["cluster", "status"], {"region": None}, 2, "give --region, or set AWS_REGION"),
        (["cluster", "status"], {"fails_with": NoCredentialsError()}, 1, "aws sso login"),
        (
            ["cluster", "status"],
            {"fails_with": SSOTokenLoadError(error_msg="x")},
            1,
            "login has expired",
        ),
        (
            ["cluster", "status"],
            {"fails_with": refused("ExpiredToken", "token expired")},
            1,
            "login has expired",
        ),
        (
            ["cluster", "status"],
            {"fails_with": refused("InvalidClientTokenId", "bad key")},
            1,
            "does not know these credentials",
        ),
        (
            ["cluster", "status"],
            {"fails_with": refused("AccessDenied", "no right to do this", "GetCallerIdentity")},
            1,
            "not allowed: GetCallerIdentity: no right to do this",
        ),
        (
            ["cluster", "status"],
            {"fails_with": EndpointConnectionError(endpoint_url="http://10.0.0.1")},
            1,
            "AWS does not answer",
        ),
        (
            ["cluster", "status"],
            {"fails_with": refused("Throttling", "slow down", "GetCallerIdentity")},
            1,
            "AWS refused GetCallerIdentity: slow down (Throttling)",
        ),
        (["cluster", "status"], {"outputs": {}}, 1, "CoreStack is not deployed in account 1234"),
        (
            ["cluster", "status"],
            {"outputs": {stack_outputs.CORE_STACK: {}}},
            1,
            "TrainingStack is not deployed",
        ),
        (
            ["cluster", "status"],
            {"stack_status": "UPDATE_IN_PROGRESS"},
            1,
            "is being changed (UPDATE_IN_PROGRESS)",
        ),
        (["cluster", "status"], {"stack_status": "DELETE_FAILED"}, 1, "is not usable"),
        (
            ["cluster", "up"],
            {"outputs": {stack_outputs.CORE_STACK: {}, stack_outputs.TRAINING_STACK: {}}},
            1,
            "have no output ClusterShape",
        ),
        (
            ["cluster", "up"],
            {
                "outputs": {
                    stack_outputs.CORE_STACK: {},
                    stack_outputs.TRAINING_STACK: {stack_outputs.SHAPE: '{"preset": "x"}'},
                }
            },
            1,
            "ClusterShape is not understood",
        ),
        (["shell"], {}, 1, "no head runs: trainctl cluster up"),
        (["shell", "--node", "boss"], {}, 2, "it must be head or worker"),
        (["shell", "--task", "77"], {}, 2, "0 tasks begin with '77'; there are: none"),
        (
            ["shell"],
            {"wanted": {"head-service": 1, "worker-service": 0}},
            1,
            "session-manager-plugin is not installed",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence_and_changes_nothing(
    argv: list[str],
    change: dict[str, Any],
    code: int,
    message: str,
    account: Account,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in change.items():
        setattr(account, name, value)
    assert main(argv) == code
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.replace("│", " ").split()), captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert account.calls == []


# --- up -------------------------------------------------------------------------------------------
def test_up_says_the_price_starts_both_services_and_tells_how_to_go_on(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    account.log = [
        "node: cluster: 1 nodes, 0 CPUs, 0 GPUs",
        "node: cluster: 3 nodes, 8 CPUs, 2 GPUs",
    ]
    assert main(["cluster", "up", "--workers", "2", "--yes"]) == 0
    assert account.calls == ["head-service=1", "worker-service=2"]
    captured = capsys.readouterr()
    # m5.xlarge 0.192, two g5.xlarge at 1.006, the NAT gateway and its address 0.05.
    assert "cost: $2.254 an hour" in captured.err
    assert "Up: 3 nodes, 8 CPUs, 2 GPUs" in captured.out
    for told in ("trainctl shell", "trainctl cluster down", "ecs:cluster_head0_head-0"):
        assert told in captured.out


def test_up_changes_only_what_differs(account: Account) -> None:
    account.wanted = {"head-service": 1, "worker-service": 1}
    assert main(["cluster", "up", "--workers", "3", "--yes", "--no-wait"]) == 0
    assert account.calls == ["worker-service=3"]


def ended(reason: str, *, exit_code: int | None, stop_code: str) -> dict[str, Any]:
    return {
        "taskArn": "arn:aws:ecs:eu-west-1:1:task/cluster/worker9",
        "lastStatus": "STOPPED",
        "stopCode": stop_code,
        "stoppedReason": reason,
        "containers": [{"exitCode": exit_code}],
    }


@pytest.mark.parametrize(
    ("fault", "rollout", "message"),
    [
        (
            ended("CannotPullContainerError: not found", exit_code=None, stop_code="TaskFailed"),
            "COMPLETED",
            "the image of the worker cannot be pulled: CannotPullContainerError: not found "
            "Is there one with the tag 'abc123'?",
        ),
        (
            ended("Essential container exited", exit_code=4, stop_code="EssentialContainerExited"),
            "COMPLETED",
            "worker worker9 ended (exit code 4): the head refuses its token",
        ),
        (
            ended("Essential container exited", exit_code=5, stop_code="EssentialContainerExited"),
            "COMPLETED",
            "(exit code 5): its host's GPUs are not sound",
        ),
        (None, "FAILED", "ECS gives up on the head: tasks failed to start."),
    ],
)
def test_up_ends_with_the_reason_when_a_node_cannot_come_up(
    fault: dict[str, Any] | None,
    rollout: str,
    message: str,
    account: Account,
    capsys: pytest.CaptureFixture[str],
) -> None:
    account.starts, account.rollout = False, rollout
    if fault:
        account.fault = fault | {"startedAt": datetime.now(tz=UTC) + timedelta(seconds=1)}
    assert main(["cluster", "up", "--yes"]) == exits.FAILED
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert "The cluster is left as it is: trainctl cluster down ends it" in said


def test_up_gives_up_after_its_time_and_says_what_is_lacking(
    account: Account, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    account.starts = False
    clock = iter(range(0, 100_000, 60))
    monkeypatch.setattr("trainctl.cluster.time.monotonic", lambda: float(next(clock)))
    assert main(["cluster", "up", "--yes"]) == exits.FAILED
    said = capsys.readouterr().err
    assert "not up after 30 min: waiting for 5 hosts (g5.xlarge, m5.xlarge)" in said


def test_ctrl_c_detaches_and_leaves_the_cluster_coming_up(
    account: Account, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainctl.cluster.time.sleep", interrupted)
    assert main(["cluster", "up", "--yes"]) == exits.INTERRUPTED
    assert account.wanted == {"head-service": 1, "worker-service": 4}
    assert "the cluster goes on coming up" in capsys.readouterr().err


EXPECTED = ClusterSize(num_nodes=2, num_cpus=4, num_gpus=1)


def task(**changed: Any) -> Task:
    base = Task.from_ecs("head", Account(wanted={"head-service": 1}).tasks("head-service")[0])
    import dataclasses

    return dataclasses.replace(base, **changed)


@pytest.mark.parametrize(
    ("tasks", "size", "words"),
    [
        ([], None, "waiting for 2 hosts"),
        ([task(status="PROVISIONING"), task()], None, "waiting for 1 hosts"),
        ([task(status="ACTIVATING"), task()], None, "1 of 2 nodes to pull their image"),
        ([task(), task()], None, "waiting for Ray on the head"),
        (
            [task(), task()],
            ClusterSize(num_nodes=1, num_cpus=0, num_gpus=0),
            "join Ray: 1 nodes, 0 CPUs, 0 GPUs of 2 nodes, 4 CPUs, 1 GPUs",
        ),
        ([task(), task(health="UNKNOWN")], EXPECTED, "waiting for the health checks"),
    ],
)
def test_what_is_lacking_is_said(tasks: list[Task], size: ClusterSize | None, words: str) -> None:
    shape = Shape.from_json(json.dumps(SHAPE))
    assert words in cluster.waiting_for(tasks, size, shape, EXPECTED)
    assert not cluster.is_up(tasks, size, EXPECTED)
    assert cluster.is_up([task(), task()], EXPECTED, EXPECTED)


def test_a_head_that_trains_counts_as_one_of_those_that_train() -> None:
    shape = Shape.from_json(
        json.dumps({**SHAPE, "head_trains": True, "head_instance_type": "g5.12xlarge"})
    )
    assert shape.size(1) == ClusterSize(num_nodes=2, num_cpus=48 + 4, num_gpus=4 + 1)


# --- status and down ------------------------------------------------------------------------------
def test_status_is_data_for_machines(account: Account, capsys: pytest.CaptureFixture[str]) -> None:
    account.wanted = {"head-service": 1, "worker-service": 1}
    account.log = ["node: cluster: 2 nodes, 4 CPUs, 1 GPUs"]
    assert main(["cluster", "status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["up"] is True
    assert found["wanted"] == found["running"] == {"head": 1, "worker": 1}
    assert found["ray"] == {"num_nodes": 2, "num_cpus": 4, "num_gpus": 1}
    assert [task["address"] for task in found["tasks"]] == ["10.0.0.0", "10.0.0.0"]
    assert found["usd_per_hour"] == pytest.approx(0.192 + 1.006 + 0.05)


def test_status_of_a_cluster_that_is_down_is_no_failure(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "status"]) == 0
    assert account.calls == []
    assert "is down" in capsys.readouterr().out


def test_down_stops_the_workers_before_their_head(account: Account) -> None:
    account.wanted = {"head-service": 1, "worker-service": 2}
    assert main(["cluster", "down", "--yes"]) == 0
    assert account.calls == ["worker-service=0", "head-service=0"]
