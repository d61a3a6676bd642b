"""Commands whose launcher would not find the other nodes, or asks for GPUs that are not there."""

from contextlib import nullcontext

import pytest

from contract.nodes import Range
from trainctl import launchers
from trainctl.aws.errors import UsageError

#: On two nodes with a GPU each: commands that can start, and that cannot.
START = (
    "python train.py --nproc-per-node 8",
    "python train.py --strategy deepspeed",
    "torchrun train.py --backend deepspeed",
    "deepspeed --no_ssh --hostfile hosts train.py",
    "torchrun --nnodes 2 train.py",
    "torchrun --nnodes $N train.py",
    "torchrun train.py --nnodes 1",
    "accelerate launch --machine_rank $RANK train.py",
    "torchrun --rdzv-endpoint $HEAD:29500 train.py",
    "N=1; N=2; torchrun --nnodes $N train.py",
)
FAIL = (
    "torchrun --nproc_per_node=2 train.py",
    "sh -c 'python prepare.py && deepspeed train.py'",
    "deepspeed train.py",
    "/opt/bin/deepspeed train.py",
    "torchrun --nnodes 1 train.py",
    "torchrun --nnodes=1:1 train.py",
    "accelerate launch --num_machines 4 train.py",
    "python -m torch.distributed.run --nnodes 3 train.py",
    "fabric run --num-nodes=1 train.py",
    "torchrun --node-rank 0 --nnodes 2 train.py",
    "torchrun --rdzv-endpoint=localhost:29500 train.py",
    "torchrun --master-addr 127.0.0.1 train.py",
    "accelerate launch --main_process_ip ::1 train.py",
    "MASTER_ADDR=localhost torchrun train.py",
    "python -m deepspeed.launcher.runner train.py",
    "NNODES=1; torchrun --nnodes $NNODES train.py",
    "export HOST='localhost'; torchrun --master_addr ${HOST} train.py",
    "X='torchrun --nnodes 1'; $X train.py",
    "bash -c 'torchrun --nnodes 1 train.py'",
)


@pytest.mark.parametrize(
    ("command", "num_nodes", "gpus", "starts"),
    [
        *((command, 2, 1, True) for command in START),
        *((command, 2, 1, False) for command in FAIL),
        ("torchrun train.py", 2, 4, True),
        ("torchrun --nproc-per-node 4 train.py", 2, 4, True),
        ("torchrun --nproc-per-node=gpu train.py", 2, 4, True),
        ("torchrun --nproc-per-node 8 train.py", 2, 0, True),
        ("torchrun --nproc-per-node 8 train.py", 1, 4, False),
        ("torchrun --standalone train.py", 1, 1, True),
        ("deepspeed train.py", 1, 1, True),
        ("OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 train.py", 2, 4, False),
        ("exit 1\ntorchrun --nproc-per-node 8 train.py", 2, 4, False),
        ("torchrun --rdzv_endpoint=localhost:0 train.py", 1, 1, True),
        ("accelerate launch --num_processes 8 train.py", 2, 4, True),
        ("accelerate launch --num_processes 9 train.py", 2, 4, False),
    ],
)
@pytest.mark.parametrize("is_shell", [False, True])
def test_a_launcher_that_cannot_start_the_command_on_its_nodes_is_refused(
    command: str, num_nodes: int, gpus: int, starts: bool, is_shell: bool
) -> None:
    text = f"sh run.sh\n#!/bin/sh\ncd src && {command}\n" if is_shell else command
    with nullcontext() if starts else pytest.raises(UsageError):
        launchers.check(text, nodes=Range(num_nodes, num_nodes), gpus=gpus)


def test_a_range_of_nodes_needs_one_of_the_launcher() -> None:
    launchers.check("torchrun --nnodes 1:4 train.py", nodes=Range(1, 2), gpus=1)
    with pytest.raises(UsageError, match="1 to 2"):
        launchers.check("torchrun --nnodes 2 train.py", nodes=Range(1, 2), gpus=1)
