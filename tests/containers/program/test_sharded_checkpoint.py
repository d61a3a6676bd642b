"""A sharded checkpoint of two nodes is loaded on new nodes, also on fewer.

PyTorch's DCP, as FSDP2 uses it, spreads even replicated tensors over the ranks, so each node needs
files that the other one wrote. The disks are real; the bucket is in memory.
"""

import os
from pathlib import Path

import pytest

from benchmarks import processes
from containers.program.bucket import Bucket
from containers.program.files import open_mirror
from containers.program.starts import begin
from contract.files import WORK
from tests import forks
from tests.containers.program.s3_in_memory import S3

pytestmark = [pytest.mark.slow, pytest.mark.long]

ADDRESS = "s3://bucket/runs/r/output"


def run_rank(folders: list[str], loads: bool) -> float:
    """A process of the program: it saves a checkpoint, or loads it and trains on."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo")
    os.chdir(folders[dist.get_rank()])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (len(folders),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    if loads:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        weights, state = get_state_dict(model, optimizer)
        load({"model": weights, "optimizer": state}, checkpoint_id="checkpoint")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    else:
        weights, state = get_state_dict(model, optimizer)
        save({"model": weights, "optimizer": state}, checkpoint_id="checkpoint")
    step()
    whole = [each for each in model.parameters() if isinstance(each, DTensor)]
    return sum(float(each.full_tensor().double().sum().item()) for each in whole)


def test_a_checkpoint_of_two_nodes_is_loaded_on_two_new_ones_and_then_on_one(
    tmp_path: Path,
) -> None:
    s3, totals = S3(), []
    for attempt, num in enumerate((2, 2, 1, 1)):
        start = begin(Bucket(ADDRESS, s3), range(num))
        folders = [tmp_path / f"{attempt}-{node}" / WORK for node in range(num)]
        mirrors = []
        for node, folder in enumerate(folders):
            folder.mkdir(parents=True)
            mirrors.append(open_mirror({WORK: folder}, ADDRESS, node=node, client=s3))
            mirrors[-1].restore(start)
        given = [str(folder) for folder in folders]
        totals += processes.run(num, run_rank, given, attempt > 0, method=forks.METHOD)
        for mirror in mirrors:
            assert mirror.save()
    assert totals == pytest.approx(totals[:1] * 6, abs=1e-6)
