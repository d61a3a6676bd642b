"""``trainctl cluster``: what ``golden/cluster`` does not show."""

import dataclasses
import json
from typing import Any

import pytest

from contract import exits
from contract.cluster_shape import ClusterShape
from contract.nodes import ClusterSize
from tests.trainctl.account import SHAPE as JOB_SHAPE
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from trainctl.aws.tasks import Task
from trainctl.commands import cluster as cluster_commands

SHAPE = {**JOB_SHAPE, "worker_instance_type": "g5.xlarge"}


@pytest.fixture(autouse=True)
def small_hosts(account: Account) -> None:
    account.shape = dict(SHAPE)


def test_without_stdin_nobody_is_asked(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    cli.refuses("cluster up")
    assert account.changes == []


def test_ctrl_c_detaches_and_leaves_the_cluster_coming_up(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainctl.commands.cluster.time.sleep", interrupted)
    cli("cluster up --yes", code=exits.INTERRUPTED)
    assert account.wanted == {"head-service": 1, "worker-service": 4}


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
        ([], None, "2 hosts"),
        ([task(status="PROVISIONING"), task()], None, "1 host"),
        ([task(status="ACTIVATING"), task()], None, "1 of 2 nodes"),
        ([task(), task()], None, ""),
        ([task(), task()], ClusterSize(num_nodes=1, num_cpus=0, num_gpus=0), "1 node, 0 CPUs"),
        ([task(), task(health="UNKNOWN")], EXPECTED, ""),
    ],
)
def test_a_cluster_is_up_with_all_nodes_healthy_and_in_ray(
    tasks: list[Task], size: ClusterSize | None, words: str
) -> None:
    shape = ClusterShape.from_json(json.dumps(SHAPE))
    assert words in cluster_commands.waiting_for(tasks, size, shape, EXPECTED)
    assert not cluster_commands.is_up(tasks, size, EXPECTED)
    assert cluster_commands.is_up([task(), task()], EXPECTED, EXPECTED)


def test_status_is_data_for_machines(account: Account, cli: Cli) -> None:
    account.wanted = {"head-service": 1, "worker-service": 1}
    account.logs["head/ray/head0"] = ["node: cluster: 2 nodes, 4 CPUs, 1 GPU"]
    found = cli.json("cluster status")
    assert (found["up"], found["wanted"]) == (True, {"head": 1, "worker": 1})
    assert found["ray"] == {"num_nodes": 2, "num_cpus": 4, "num_gpus": 1}
    assert found["usd_per_hour"] == pytest.approx(0.192 + 1.006 + 0.05 + 0.061, abs=1e-3)


def test_hosts_that_cannot_be_terminated_at_once_are_left_to_the_sweep(
    account: Account, cli: Cli
) -> None:
    account.wanted = {"head-service": 1, "worker-service": 0}
    account.function_error = {"FunctionError": "Unhandled"}
    assert '{"released"' in cli("cluster down --yes").err
