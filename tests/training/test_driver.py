"""What a run's command needs lives on its own node, because every other node may be lost; and
without ``--workers`` a run takes all GPUs of its cluster."""

import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract import nodes
from contract.job import JobSpec
from contract.nodes import Range
from contract.runs import RunPaths
from training import launch, recipes
from training.lease import Lease
from training.recipes import command
from training.recipes.fsdp.settings import FsdpConfig
from training.record.events import Event, Start, Step
from training.runtime import driver, trainer
from training.runtime.forkserver import NONE, PRELOAD, ForkServer, hook_ray
from training.runtime.trainer import Submission


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


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray as in a job: a head that only coordinates, and a worker node with four processors."""
    import ray
    from ray.cluster_utils import Cluster

    server = ForkServer.start(modules=["training.runtime.trainer", recipes.by_name("fsdp").loop])
    with pytest.MonkeyPatch.context() as patch, hook_ray(server.name if server else NONE):
        patch.setenv(PRELOAD, "")
        patch.setenv("RAY_TRAIN_METRICS_ENABLED", "0")
        # Its hooks for the end of the process can only be made by the main thread.
        found = Cluster(
            initialize_head=True, shutdown_at_exit=False, head_node_args={"num_cpus": 0}
        )
        try:
            found.add_node(num_cpus=4)
            ray.init(address=found.address, log_to_driver=False)
            yield found
        finally:
            ray.shutdown()
            found.shutdown()
            if server is not None:
                server.close()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, of its data library
def test_a_sharded_run_grows_from_one_host_of_four_to_two_and_its_passes_do_not(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    # As with --nodes 1:2; steps until it has grown, however long that takes.
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n\n" * 400)
    words = ["fsdp", "--preset", "tiny", "--workers", "4:8", "--data", str(tmp_path / "text.txt")]
    words += ["--max-steps", "100000", "--seq-len", "16", "--microbatch", "2", "--report-every"]
    words += ["1", "--evaluate-every", "100000", "--checkpoint-every", "5", "--sample-tokens", "0"]
    words += ["--eval-sequences", "8", "--storage", str(tmp_path), "--run", "grows"]
    monkeypatch.setenv(nodes.ENV_WORKER_GPUS, "4")  # only whole hosts are a number of workers
    config, workers = launch.configured(command.parse(words))
    monkeypatch.setattr(trainer, "_RESIZE_EVERY_S", 1.0)
    monkeypatch.chdir(tmp_path)  # as a task of its own would
    submission = Submission(
        config=config,
        run_uri=RunPaths.of(config.storage, config.run).uri,
        fence=Lease.take(RunPaths.of(config.storage, config.run).uri).number,
        local=False,
        workers=workers,
        max_failures=0,
        environment={},
        folder=str(tmp_path),
    )
    events = trainer.start_events()
    prepared = trainer._prepare(submission, events)
    assert not isinstance(prepared, Exception), prepared
    submission = replace(submission, config=prepared)
    seen: list[Event] = []

    def watch() -> None:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            seen.extend(ray.get(events.take.remote()))
            starts = [each for each in seen if isinstance(each, Start)]
            steps = [each for each in seen if isinstance(each, Step)]
            if len(starts) == 1 and len(steps) >= 6 and len(cluster.list_all_nodes()) == 2:
                cluster.add_node(num_cpus=4)
            if len(starts) == 2 and steps[-1].step >= starts[1].step + 3:
                break
            time.sleep(0.2)
        events.request_stop.remote()

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    assert trainer._fit(submission, events) == ""
    watching.join()
    first, second = (each for each in seen if isinstance(each, Start))
    assert (first.world_size, second.world_size) == (4, 8)
    assert first.step == 0
    assert second.resumed
    assert second.step >= 5
    assert first.global_batch == second.global_batch == 16
    # Two passes of two sequences on four workers, and one of two on eight.
    assert isinstance(config, FsdpConfig)
    assert [replace(config, num_workers=num).num_microbatches for num in (4, 8)] == [2, 1]


@pytest.mark.slow
def test_the_events_do_not_go_with_another_node(cluster: Any) -> None:
    import ray
    from ray.util.state import list_actors

    # Left to itself, Ray would put some elsewhere.
    assert len(cluster.list_all_nodes()) > 1
    actors = [trainer.start_events() for _ in range(5)]
    assert ray.get([each.put.remote([{}]) for each in actors]) == [False] * 5
    places = [
        each.node_id
        for each in list_actors(filters=[("class_name", "=", "_Events"), ("state", "=", "ALIVE")])
    ]
    assert places == [ray.get_runtime_context().get_node_id()] * len(places)
    assert len(places) >= 5
