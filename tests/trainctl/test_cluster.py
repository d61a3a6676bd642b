"""``trainctl cluster up | status | down``, and how many nodes they take."""

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from contract import exits
from contract.cluster_shape import ClusterShape
from contract.job_outcome import DISCONNECTED_SINCE
from contract.nodes import ClusterSize
from tests.aws.calls import refused
from tests.trainctl.account import SHAPE as JOB_SHAPE
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from trainctl.__main__ import main
from trainctl.aws.tasks import Task
from trainctl.commands import cluster as cluster_commands

SHAPE = {**JOB_SHAPE, "worker_instance_type": "g5.xlarge"}
HEAD_LOG = "head/ray/head0"


@pytest.fixture(autouse=True)
def small_hosts(account: Account) -> None:
    account.shape = dict(SHAPE)


# --- how many -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nodes", "x"], "--nodes is x: give a number"),
        (["--nodes", "0"], "--nodes is 0: this deployment takes 1 to 4 worker nodes"),
        (["--nodes", "5"], "max_workers=5"),
        (["--nodes", "1:2"], "a standing cluster has a fixed size"),
        (["--workers", "2"], "No such option: --workers"),
        (["-w", "2"], "No such option: -w"),
        ([], "stdin is not a terminal: pass --yes"),
    ],
)
def test_a_number_of_nodes_that_cannot_be_starts_nothing(
    argv: list[str], message: str, account: Account, cli: Cli
) -> None:
    assert message in cli.refuses("cluster", "up", *argv)
    assert account.changes == []


def test_without_stdin_nobody_is_asked(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert "pass --yes" in cli.refuses("cluster", "up")
    assert account.changes == []


# --- up -------------------------------------------------------------------------------------------
def test_up_prints_the_price_starts_both_services_and_tells_how_to_go_on(
    account: Account, cli: Cli
) -> None:
    account.logs[HEAD_LOG] = [
        "node: cluster: 1 node, 0 CPUs, 0 GPUs",
        "node: cluster: 3 nodes, 8 CPUs, 2 GPUs",
    ]
    where = "--region us-east-1"
    status = cli("cluster", "status", *where.split()).out
    assert f"Start it: trainctl cluster up {where}\n" in status
    captured = cli("cluster", "up", "--nodes", "2", "--yes", *where.split())
    assert account.counts == ["head-service=1", "worker-service=2"]
    # m5.xlarge 0.192, two g5.xlarge at 1.006, the NAT gateway and its address 0.05.
    assert "cost: $2.36 an hour" in captured.err
    assert "Up: 3 nodes, 8 CPUs, 2 GPUs" in captured.out
    for told in ("trainctl shell", "trainctl cluster down", "trainctl open"):
        assert f"{told} {where}\n" in captured.out


def test_up_changes_only_what_differs(account: Account) -> None:
    account.wanted = {"head-service": 1, "worker-service": 1}
    assert main(["cluster", "up", "--nodes", "3", "--yes", "--no-wait"]) == 0
    assert account.counts == ["worker-service=3"]


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
            ended("Essential container exited", exit_code=76, stop_code="EssentialContainerExited"),
            "COMPLETED",
            "(exit code 76): its host's GPUs or EFA devices are not healthy",
        ),
        (None, "FAILED", "ECS gives up on the head: tasks failed to start."),
    ],
)
def test_up_ends_with_the_reason_when_a_node_cannot_come_up(
    fault: dict[str, Any] | None,
    rollout: str,
    message: str,
    account: Account,
    cli: Cli,
) -> None:
    account.starts, account.rollout = False, rollout
    if fault:
        account.fault = fault | {"startedAt": datetime.now(tz=UTC) + timedelta(seconds=1)}
    said = " ".join(cli.refuses("cluster", "up", "--yes", code=exits.FAILED).split())
    assert message in said
    assert "The cluster is left as it is: trainctl cluster down ends it" in said


def test_up_gives_up_after_its_time_and_says_what_is_lacking(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.starts = False
    clock = iter(range(0, 100_000, 60))
    monkeypatch.setattr("trainctl.commands.cluster.time.monotonic", lambda: float(next(clock)))
    said = cli.refuses("cluster", "up", "--yes", code=exits.FAILED)
    assert "not up after 30 min: waiting for 5 hosts (g5.xlarge, m5.xlarge)" in said


def test_ctrl_c_detaches_and_leaves_the_cluster_coming_up(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainctl.commands.cluster.time.sleep", interrupted)
    said = cli("cluster", "up", "--yes", code=exits.INTERRUPTED)
    assert account.wanted == {"head-service": 1, "worker-service": 4}
    assert "the cluster keeps coming up" in said.err


EXPECTED = ClusterSize(num_nodes=2, num_cpus=4, num_gpus=1)


def task(**changed: Any) -> Task:
    account = Account()
    account.wanted["head-service"] = 1
    found: Any = account.service_tasks("head-service")[0]
    base = Task.from_ecs("head", found)
    return dataclasses.replace(base, **changed)


@pytest.mark.parametrize(
    ("tasks", "size", "words"),
    [
        ([], None, "waiting for 2 hosts"),
        ([task(status="PROVISIONING"), task()], None, "waiting for 1 host"),
        ([task(status="ACTIVATING"), task()], None, "1 of 2 nodes to pull the image"),
        ([task(), task()], None, "waiting for Ray on the head"),
        (
            [task(), task()],
            ClusterSize(num_nodes=1, num_cpus=0, num_gpus=0),
            "join Ray: 1 node, 0 CPUs, 0 GPUs of 2 nodes, 4 CPUs, 1 GPU",
        ),
        ([task(), task(health="UNKNOWN")], EXPECTED, "waiting for the health checks"),
    ],
)
def test_what_is_lacking_is_said(tasks: list[Task], size: ClusterSize | None, words: str) -> None:
    shape = ClusterShape.from_json(json.dumps(SHAPE))
    assert words in cluster_commands.waiting_for(tasks, size, shape, EXPECTED)
    assert not cluster_commands.is_up(tasks, size, EXPECTED)
    assert cluster_commands.is_up([task(), task()], EXPECTED, EXPECTED)


# --- status and down ------------------------------------------------------------------------------
def test_status_is_data_for_machines(account: Account, cli: Cli) -> None:
    account.wanted = {"head-service": 1, "worker-service": 1}
    account.logs[HEAD_LOG] = ["node: cluster: 2 nodes, 4 CPUs, 1 GPU"]
    found = cli.json("cluster", "status")
    assert found["up"] is True
    assert found["wanted"] == found["running"] == {"head": 1, "worker": 1}
    assert found["ray"] == {"num_nodes": 2, "num_cpus": 4, "num_gpus": 1}
    assert [task["address"] for task in found["tasks"]] == ["10.0.0.0", "10.0.0.0"]
    assert found["usd_per_hour"] == pytest.approx(0.192 + 1.006 + 0.05 + 0.061, abs=1e-3)


def test_status_of_a_cluster_that_is_down_is_no_failure(account: Account, cli: Cli) -> None:
    said = cli("cluster", "status")
    assert account.counts == []
    assert "is down" in said.out


def test_hosts_that_are_billed_are_shown_whether_or_not_the_cluster_is_up(
    account: Account, cli: Cli
) -> None:
    account.hosts = {"i-0123456789abcdef0": "g5.xlarge", "i-1": "x9.large"}
    account.unregistered = {"i-absent": "g5.xlarge"}
    for up in (False, True):
        account.wanted = {"head-service": int(up), "worker-service": 0}
        printed = cli("cluster", "status").out
        assert "Hosts, those of jobs too:" in printed
        (known,) = [line for line in printed.splitlines() if "i-0123456789abcdef0" in line]
        assert known.split()[:4] == ["i-0123456789abcdef0", "g5.xlarge", "ACTIVE", "0"]
        assert "7 min" in known
        assert known.endswith("$1.05")
        (other,) = [line for line in printed.splitlines() if line.startswith("i-1 ")]
        assert other.endswith("unknown")
        (absent,) = [line for line in printed.splitlines() if line.startswith("i-absent")]
        assert absent.split()[1:5] == ["g5.xlarge", "UNREGISTERED", "0", "25"], "since its launch"
    hosts = cli.json("cluster", "status")["hosts"]
    assert [host["id"] for host in hosts] == ["i-absent", "i-0123456789abcdef0", "i-1"]


def test_a_host_whose_agent_is_disconnected_is_shown_as_such(account: Account, cli: Cli) -> None:
    account.hosts = dict.fromkeys(("i-here", "i-away", "i-new"), "g5.xlarge")
    since = (datetime.now(tz=UTC) - timedelta(minutes=12)).timestamp()
    account.disconnected = {
        "i-away": [{"name": DISCONNECTED_SINCE, "value": str(round(since))}],
        "i-new": [],  # no sweep has seen it yet
    }
    printed = cli("cluster", "status").out
    rows = {line.split()[0]: line for line in printed.splitlines() if line.startswith("i-")}
    assert "ACTIVE, agent disconnected 12 min" in rows["i-away"]
    assert "ACTIVE, agent disconnected  " in rows["i-new"]
    assert "disconnected" not in rows["i-here"]
    hosts = {each["id"]: each for each in cli.json("cluster", "status")["hosts"]}
    assert [hosts[name]["is_connected"] for name in rows] == [True, False, False]
    assert hosts["i-away"]["disconnected_since"]


def test_down_stops_the_workers_before_their_head_and_then_terminates_the_hosts(
    account: Account, cli: Cli
) -> None:
    account.wanted = {"head-service": 1, "worker-service": 2}
    said = cli("cluster", "down", "--yes")
    assert account.counts == ["worker-service=0", "head-service=0"]
    order = [name for name, _ in account.calls if name in ("update_service", "invoke")]
    assert order == ["update_service", "update_service", "invoke"]
    assert "Down. 2 empty hosts terminated" in said.err


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ({"invoke": refused("AccessDeniedException")}, "not allowed: Operation"),
        ({}, 'could not release the hosts: {"released"'),
    ],
)
def test_hosts_that_cannot_be_terminated_at_once_are_left_to_the_sweep(
    account: Account,
    cli: Cli,
    fails: dict[str, Exception],
    said: str,
) -> None:
    account.wanted = {"head-service": 1, "worker-service": 0}
    account.fails = fails
    account.function_error = {"FunctionError": "Unhandled"}
    printed = cli("cluster", "down", "--yes").err
    assert said in printed
    assert "Empty hosts terminate within about ten minutes" in printed
