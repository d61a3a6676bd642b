"""Commands whose launcher would not find the other nodes, or asks for GPUs that are not there."""

import pytest

from contract.nodes import Range
from trainctl import launchers
from trainctl.aws.errors import UsageError

#: On two nodes with a GPU each: what is said of a command; "" where it can start.
ON_TWO = {
    "python train.py --nproc-per-node 8": "",
    "torchrun --nproc_per_node=2 train.py": "is 2, and a node has 1 GPU: leave",
    "python train.py --strategy deepspeed": "",
    "torchrun train.py --backend deepspeed": "",
    "sh -c 'python prepare.py && deepspeed train.py'": "start the script with torchrun",
    "deepspeed --no_ssh --hostfile hosts train.py": "",
    "deepspeed train.py": "start the script with torchrun",
    "/opt/bin/deepspeed train.py": "would train on each by itself",
    "torchrun --nnodes 2 train.py": "",
    "torchrun --nnodes $N train.py": "",
    "torchrun train.py --nnodes 1": "",
    "torchrun --nnodes 1 train.py": "--nnodes is 1, and the job has 2 nodes: leave it",
    "torchrun --nnodes=1:1 train.py": "--nnodes is 1:1, and the job has 2 nodes",
    "accelerate launch --num_machines 4 train.py": "--num-machines is 4",
    "python -m torch.distributed.run --nnodes 3 train.py": "--nnodes is 3",
    "fabric run --num-nodes=1 train.py": "--num-nodes is 1",
    "torchrun --node-rank 0 --nnodes 2 train.py": "--node-rank is 0 on every node",
    "accelerate launch --machine_rank $RANK train.py": "",
    "torchrun --rdzv-endpoint=localhost:29500 train.py": "--rdzv-endpoint is localhost",
    "torchrun --master-addr 127.0.0.1 train.py": "at which each node finds only itself",
    "accelerate launch --main_process_ip ::1 train.py": "--main-process-ip is ::1",
    "MASTER_ADDR=localhost torchrun train.py": "MASTER_ADDR is localhost",
    "torchrun --rdzv-endpoint $HEAD:29500 train.py": "",
    "python -m deepspeed.launcher.runner train.py": "start the script with torchrun",
    "NNODES=1; torchrun --nnodes $NNODES train.py": "--nnodes is 1",
    "export HOST='localhost'; torchrun --master_addr ${HOST} train.py": "is localhost",
    "N=1; N=2; torchrun --nnodes $N train.py": "",
    "X='torchrun --nnodes 1'; $X train.py": "--nnodes is 1",
    "bash -c 'torchrun --nnodes 1 train.py'": "--nnodes is 1",
}


@pytest.mark.parametrize(
    ("command", "num_nodes", "gpus", "said"),
    [
        *((command, 2, 1, said) for command, said in ON_TWO.items()),
        ("torchrun train.py", 2, 4, ""),
        ("torchrun --nproc-per-node 4 train.py", 2, 4, ""),
        ("torchrun --nproc-per-node=gpu train.py", 2, 4, ""),
        ("torchrun --nproc-per-node 8 train.py", 2, 0, ""),
        ("torchrun --nproc-per-node 8 train.py", 1, 4, "is 8, and a node has 4 GPUs: leave it out"),
        ("torchrun --standalone train.py", 1, 1, ""),
        ("deepspeed train.py", 1, 1, ""),
        ("OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 train.py", 2, 4, "is 8, and a node has 4"),
        ("exit 1\ntorchrun --nproc-per-node 8 train.py", 2, 4, "is 8, and a node has 4"),
        ("torchrun --rdzv_endpoint=localhost:0 train.py", 1, 1, ""),
        ("accelerate launch --num_processes 8 train.py", 2, 4, ""),
        ("accelerate launch --num_processes 9 train.py", 2, 4, "is 9, and 2 nodes of 4 GPUs have"),
    ],
)
@pytest.mark.parametrize("is_shell", [False, True])
def test_a_launcher_that_cannot_start_the_command_on_its_nodes_is_refused(
    command: str, num_nodes: int, gpus: int, said: str, is_shell: bool
) -> None:
    text = f"sh run.sh\n#!/bin/sh\ncd src && {command}\n" if is_shell else command
    nodes = Range(num_nodes, num_nodes)
    if not said:
        launchers.check(text, nodes=nodes, gpus=gpus)
        return
    with pytest.raises(UsageError, match=said):
        launchers.check(text, nodes=nodes, gpus=gpus)


def test_a_range_of_nodes_needs_one_of_the_launcher() -> None:
    launchers.check("torchrun --nnodes 1:4 train.py", nodes=Range(1, 2), gpus=1)
    with pytest.raises(UsageError, match=r"--nnodes is 2, and the job has 1 to 2 nodes"):
        launchers.check("torchrun --nnodes 2 train.py", nodes=Range(1, 2), gpus=1)
