"""Proves the way over Ray Train: what a run's command needs lives on its own node, because every
other node may be lost; workers lost while they start are replaced; without ``--workers`` a run
takes all GPUs of its cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract import nodes
from contract.job import JobSpec
from contract.nodes import Range
from tests.conftest import ROOT
from tests.training.test_data import write_images
from training import command, launch
from training.record import reader
from training.record.events import Phase, Resume, Step
from training.runtime import ray_cluster, trainer


@pytest.mark.parametrize(
    ("resources", "job", "workers"),
    [
        ({"CPU": 64.0, "GPU": 8.0}, None, Range(8, 8)),
        ({"CPU": 64.0}, None, Range(1, 1)),
        # Nodes of a job have not joined yet: Ray starts them when the run asks for workers.
        ({}, ("4", "0"), Range(4, 12)),
        ({}, ("4", "1"), Range(6, 14)),
        ({}, ("0", "0"), Range(1, 3)),
    ],
)
def test_a_run_takes_all_gpus_of_a_cluster_or_of_the_nodes_that_its_job_may_have(
    resources: dict[str, float],
    job: tuple[str, str] | None,
    workers: Range,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(cluster_resources=lambda: resources))
    if job:
        spec = JobSpec(run="r", command=("python",), nodes=Range(1, 3)).to_json()
        names = (nodes.ENV_WORKER_GPUS, nodes.ENV_TRAINS, nodes.ENV_JOB_SPEC, nodes.ENV_NUM_GPUS)
        for name, value in zip(names, (*job, spec, "2"), strict=True):
            monkeypatch.setenv(name, value)
    assert ray_cluster.cluster_workers() == workers


def test_the_number_found_on_the_cluster_decides_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "join_cluster", lambda **_options: None)
    monkeypatch.setattr(ray_cluster, "cluster_workers", lambda: Range(8, 8))
    words = ["ddp", "--storage", str(tmp_path), "--run", "r"]
    config, workers = launch.configured(command.parse(words))
    assert (config.num_workers, workers) == (8, Range(8, 8))
    assert config.to_json()["global_batch"] == 8 * 32
    # A number that is given counts, and no cluster is asked for.
    monkeypatch.setattr(ray_cluster, "join_cluster", lambda **_options: pytest.fail("asked"))
    config, _ = launch.configured(command.parse([*words, "--workers", "2"]))
    assert config.num_workers == 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray as in a job: a head that only coordinates, and a worker node with two processors."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_METRICS_ENABLED", "0")
        # As on a node (containers.node): processes that are slow to start are waited for, and none
        # is started in advance.
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")
        patch.setenv("RAY_worker_register_timeout_seconds", "600")
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        patch.setenv("RAY_worker_niceness", "0")  # as on a node, or other tests starve its workers
        # Its hooks for the end of the process can only be made by the main thread.
        found = Cluster(
            initialize_head=True,
            shutdown_at_exit=False,
            # A dozen processes that nobody looks at.
            head_node_args={"num_cpus": 0, "include_dashboard": False, "dashboard_port": None},
        )
        try:
            found.add_node(num_cpus=2)
            ray.init(address=found.address, log_to_driver=False)
            yield found
        finally:
            ray.shutdown()
            found.shutdown()


@pytest.mark.long
@pytest.mark.slow
def test_a_run_of_the_command_gets_over_lost_workers_stops_and_resumes(
    cluster: Any, tmp_path: Path
) -> None:
    """Ray Train by itself waits ten minutes for what the workers that are left hold, or ends."""
    data = write_images(tmp_path / "data", num_train=320)
    words = ["ddp", "--workers", "2", "--data", str(data), "--storage", str(tmp_path), "--run", "r"]
    words += ["--batch-per-worker", "16", "--epochs", "2", "--report-every", "1"]
    metrics = tmp_path / "r" / "metrics.jsonl"

    def start(moment: str) -> "subprocess.Popen[str]":
        lost = tmp_path / moment
        return subprocess.Popen(
            [sys.executable, "-m", "training.launch", *words],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "RAY_ADDRESS": cluster.address,
                "RAY_TRAIN_CALLBACKS": "tests.training.lost_at_start.LosesAWorker",
                "LOSE_A_WORKER": moment,
                "LOST_A_WORKER": str(lost),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with start("before they know each other") as first:
        while not reader.read_metrics(str(metrics.parent)).of(Step):
            assert first.poll() is None, first.communicate()
            time.sleep(0.1)
        first.send_signal(signal.SIGINT)
        _, said = first.communicate()
    assert first.returncode == 130, said
    assert (tmp_path / "before they know each other").exists()
    assert "stopped at step" in said
    with start("before they are told to train") as second:
        _, said = second.communicate()
    assert second.returncode == 0, said
    assert (tmp_path / "before they are told to train").exists()
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert (result["status"], result["steps"], result["world_size"]) == ("succeeded", 20, 2)
    events = reader.read_metrics(str(metrics.parent)).events
    assert [each.step for each in events if isinstance(each, Step)] == [*range(1, 21)]
    assert [each.step for each in events if isinstance(each, Resume)] == [result["resumed_from"]]
    phases = [each.name for each in events if isinstance(each, Phase)]
    assert phases[:2] == ["ray_ready", "workers_ready"]


@pytest.mark.long
@pytest.mark.slow
def test_the_events_do_not_go_with_another_node(cluster: Any) -> None:
    import ray

    # Left to itself, Ray would put some elsewhere.
    assert len(cluster.list_all_nodes()) > 1
    actors = [trainer.start_events() for _ in range(5)]
    assert ray.get([each.put.remote([{}]) for each in actors]) == [False] * 5

    def node(*_: object) -> Any:
        return ray.get_runtime_context().get_node_id()

    assert ray.get([each.__ray_call__.remote(node) for each in actors]) == [node()] * 5
