"""What a run's command needs lives on its own node, because every other node may be lost; and
without ``--workers`` a run takes all GPUs of its cluster."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from contract import nodes
from contract.job import JobSpec
from contract.ranges import Range
from training import launch
from training.recipes import command
from training.runtime import driver, trainer


@pytest.mark.parametrize(
    ("resources", "workers"),
    [({"CPU": 64.0, "GPU": 8.0}, 8), ({"CPU": 64.0}, 1), ({"GPU": 1.0}, 1)],
)
def test_a_run_takes_all_gpus_of_a_cluster(
    resources: dict[str, float], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(cluster_resources=lambda: resources))
    monkeypatch.delenv(nodes.ENV_JOB_SPEC, raising=False)
    assert driver.cluster_workers() == Range(workers, workers)


@pytest.mark.parametrize(
    ("gpus", "trains", "workers"),
    [("4", "0", Range(4, 12)), ("4", "1", Range(6, 14)), ("0", "0", Range(1, 3))],
)
def test_a_run_takes_all_gpus_of_the_nodes_that_its_job_may_have(
    gpus: str, trains: str, workers: Range, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They have not joined yet: Ray starts them when the run asks for workers.
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(cluster_resources=dict))
    spec = JobSpec(run="r", command=("python",), nodes=Range(1, 3))
    monkeypatch.setenv(nodes.ENV_JOB_SPEC, spec.to_json())
    monkeypatch.setenv(nodes.ENV_WORKER_GPUS, gpus)
    monkeypatch.setenv(nodes.ENV_TRAINS, trains)
    monkeypatch.setenv(nodes.ENV_NUM_GPUS, "2")
    assert driver.cluster_workers() == workers


def test_the_number_found_on_the_cluster_decides_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "join_cluster", lambda **_options: None)
    monkeypatch.setattr(driver, "cluster_workers", lambda: Range(8, 8))
    words = ["ddp", "--storage", str(tmp_path), "--run", "r"]
    config, workers = launch.configured(command.parse(words))
    assert (config.num_workers, workers) == (8, Range(8, 8))
    assert config.to_json()["global_batch"] == 8 * 32
    # A number that is given counts, and no cluster is asked for.
    monkeypatch.setattr(driver, "join_cluster", lambda **_options: pytest.fail("asked"))
    config, _ = launch.configured(command.parse([*words, "--workers", "2"]))
    assert config.num_workers == 2


@pytest.mark.slow
def test_the_events_do_not_go_with_another_node() -> None:
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.state import list_actors

    # As in a job: a head that only coordinates. Left to itself, Ray would put some elsewhere.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        actors = [trainer.start_events() for _ in range(5)]
        assert ray.get([each.put.remote([{}]) for each in actors]) == [False] * 5
        places = [each.node_id for each in list_actors(filters=[("class_name", "=", "_Events")])]
        assert places == [ray.get_runtime_context().get_node_id()] * 5
    finally:
        ray.shutdown()
        cluster.shutdown()
