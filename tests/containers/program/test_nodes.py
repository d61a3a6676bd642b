"""A program starts on several nodes and again after a loss, with real Ray and torchrun.

``test_group`` has what else may happen, without Ray.
"""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import ray

from containers import demand, ray_watch
from containers.program.start import code
from contract import exits
from contract.nodes import ENV_WATCH, Range
from tests.containers.program.nodes_here import LocalNodes, local_nodes

pytestmark = [pytest.mark.slow, pytest.mark.long]

#: Ranks meet again and again until a file says that it is enough.
UNTIL_TOLD = """
    import os, sys, time
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {size} on node {os.environ['NODE_RANK']}")
    while not os.path.exists(sys.argv[1]):
        dist.barrier()
        time.sleep(0.1)
    dist.barrier()
    print(f"done as one of {size}", flush=True)
    os._exit(0)
"""
#: Asks for what two nodes of one CPU can never hold, and for what only has to queue.
ASKS = """
    import time
    import ray
    from ray.util import placement_group

    ray.init(log_to_driver=False)

    @ray.remote
    class OnGpu:
        pass

    @ray.remote
    def waits():
        time.sleep(1000)

    task = waits.options(num_cpus=4, label_selector={"region": "near"}).remote()
    actor = OnGpu.options(num_gpus=1).remote()
    workers = placement_group([{"CPU": 1}] * 5)
    queue = [waits.remote() for _ in range(20)]
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNodes]:
    with local_nodes(tmp_path_factory.mktemp("nodes"), 2) as running:
        yield running


def script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_ray_reports_what_a_program_asks_for_and_can_never_have(
    here: LocalNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"CPU": 0.0}, {"CPU": 1.0}, {"CPU": 1.0}]
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # client_of() changes it
    found: list[str] = []
    queued = 0
    example = Path(ray.__file__).parent / "train/examples/pytorch/torch_linear_example.py"
    programs = [
        subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, "RAY_ADDRESS": here.address, "HOME": str(tmp_path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for words in ([script(tmp_path, ASKS)], [str(example), "--use-gpu"])
    ]
    client = ray_watch.client_of(here.address)
    seen = demand.read(client)
    try:
        deadline = time.monotonic() + 240
        while (len(found) < 4 or not queued) and time.monotonic() < deadline:
            assert all(each.poll() is None for each in programs), "a program has ended"
            time.sleep(0.2)
            seen = demand.read(client)
            said = [demand.impossible(each, nodes) for each in seen.requests]
            found, queued = sorted(filter(None, said)), said.count(None)
    finally:
        for program in programs:
            program.kill()
            program.wait()
    assert queued, seen
    assert [each.partition(";")[0] for each in found] == [
        "asks for 1 CPU and 1 GPU on one node",
        "asks for 2 workers of 1 GPU each",
        "asks for 4 CPUs on one node",
        "asks for 5 workers of 1 CPU each",
    ]
    assert len(seen.idle_s) == len(here.nodes)


#: As in the posts, but for rank 1, which sleeps after some steps.
TRAINS = """
import time, ray, ray.train, ray.train.torch, torch
def asleep():
    time.sleep(600)
def train():
    model = ray.train.torch.prepare_model(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(9):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if step == 5 and ray.train.get_context().get_world_rank():
            asleep()
ray.init()
config = ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
ray.train.torch.TorchTrainer(train, scaling_config=config).fit()
"""


def test_a_deadlock_in_ray_train_names_the_rank_that_sleeps(
    here: LocalNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, _, port = here.address.partition(":")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # client_of() changes it
    shared = {"PYTHONPATH": str(code.STARTUP), ENV_WATCH: str(tmp_path)}
    of_ray = {"RAY_ADDRESS": here.address, **code.for_ray(shared, None)}
    words = (sys.executable, script(tmp_path, TRAINS))
    program = subprocess.Popen(words, env=os.environ | shared | of_ray)
    config = Mock(worker_gpus=0)
    config.spec = Mock(nodes=Range(0, 0), hang_s=10)
    beside = Mock(address=head, demand=demand.DemandWatch([{}]))
    watch = ray_watch.RayWatch(config, beside, time.monotonic())
    until, text = time.monotonic() + 200, ""
    with patch.multiple(ray_watch, WATCHED=tmp_path, GCS_PORT=port, _LOOK_S=5.0):
        while not text and time.monotonic() < until:
            time.sleep(0.5)
            text = watch.check(time.monotonic(), 0)
    program.kill()
    program.wait()
    assert text.endswith(f"; rank 1 on node {head} was in asleep (program.py:4)")


def test_what_is_lost_with_a_node_is_started_again_with_another_one(
    here: LocalNodes, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    run = here.start("torchrun", script(tmp_path, UNTIL_TOLD), str(end), capacity_wait_s=120)
    run.wait_for("of 2 on node", times=2)
    lost = [*here.nodes][-1]
    here.lose(lost)
    run.wait_for("waiting for 1 node")
    here.add()
    run.wait_for("of 2 on node", times=4)
    end.touch()
    assert run.wait() == exits.OK, run
    assert run.lines().count("done as one of 2") == 2
    assert not here.running_on(lost)
