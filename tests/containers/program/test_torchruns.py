"""torchruns of two nodes, one pair after the other, meet at the store that all of them share, and
number the nodes as the job does."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from containers.program import launch, process, torchruns
from contract.nodes import Range

#: What torchrun does before it starts processes, on two nodes of one process, and when those have
#: ended; and on a third node that comes after that. The first pair fails.
NODES = """
import json, os, threading
from types import SimpleNamespace
import torch.distributed as dist
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ["PET_RDZV_ENDPOINT"] = f"127.0.0.1:{store.port}"

def torchrun(address, run_id=os.environ["PET_RDZV_ID"]):
    os.environ["TRAIN_PROGRAM_START"] = address
    return get_rendezvous_handler(RendezvousParameters(
        "c10d", os.environ["PET_RDZV_ENDPOINT"], run_id, 2, 2, local_addr=address))

def end(handler, state):
    agent = SimpleNamespace(
        _invoke_run=lambda role: api.RunResult(state=state), _shutdown=lambda **how: None,
        _record_metrics=lambda result: None, _record_worker_events=lambda result: None,
        _shutdown_timeout=1,
        _worker_group=SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler)),
    )
    assert api.SimpleElasticAgent.run(agent).state == state
    handler.shutdown()

def pair(*ids, state=api.WorkerState.SUCCEEDED):
    addresses = ("127.0.0.1", "127.0.0.2")
    handlers = [torchrun(address, *ids) for address in addresses]
    met, order = {}, {}
    def join(handler, address):
        info = handler.next_rendezvous()
        met[info.rank] = (info.world_size, info.bootstrap_store_info.master_port)
        order[info.rank] = address
    threads = [threading.Thread(target=join, args=each) for each in zip(handlers, addresses)]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    [end(handler, state) for handler in handlers]
    assert order == {0: "127.0.0.2", 1: "127.0.0.1"}, order  # as TRAIN_NODES says
    return [sorted(met), len(set(met.values())), handlers[0].get_run_id()]

pairs = [pair(state=api.WorkerState.FAILED), pair(), pair(), pair("own")]
late = []
for _ in pairs[:2]:
    try:
        torchrun("127.0.0.3")
    except SystemExit as end:
        late.append(end.code)
print(json.dumps([pairs, late]), flush=True)
"""


def test_each_torchrun_of_a_job_meets_its_own_kind(tmp_path: Path) -> None:
    script = tmp_path / "nodes.py"
    script.write_text(NODES)
    variables = {"PYTHONPATH": str(launch.STARTUP), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    variables |= {torchruns.ENDPOINT: "later", torchruns.ID: "run-0", torchruns.START: "later"}
    variables[torchruns.NODES] = "127.0.0.9,127.0.0.2,127.0.0.1"  # the first has been lost
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    met = [[[0, 1], 1, name] for name in ("run-0", "run-0.1", "run-0.2", "own")]
    assert json.loads(done.stdout) == [met, [1, 0]]
    said = [line for line in done.stderr.splitlines() if line.startswith("The other nodes")]
    how = ("with a failure", "already")
    assert said == [f"The other nodes have ended this torchrun {each}" for each in how]


def test_the_variables_are_those_that_the_launcher_sets() -> None:
    order = launch.Order(
        run="run", words=("torchrun",), variables={}, nodes=Range(2, 2), rendezvous="10.0.0.1"
    )
    place = launch.Place(
        number=0, rank=0, start=0, address="10.0.0.2", addresses=("10.0.0.2", "10.0.0.1"), gpus=0
    )
    found = launch.launcher_environment(order, place)
    assert {torchruns.ENDPOINT, torchruns.ID} <= found.keys()
    assert process.ENV_START == torchruns.START
    assert found[torchruns.NODES] == "10.0.0.2,10.0.0.1"


def test_the_module_that_is_changed_is_in_this_version_of_torch() -> None:
    assert all(importlib.util.find_spec(name) for name in torchruns.CHANGES)
