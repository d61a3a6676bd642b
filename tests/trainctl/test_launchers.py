"""Commands whose launcher would not find the other nodes, or asks for GPUs that are not there."""

import pytest

from contract.nodes import Range
from trainctl import launchers
from trainctl.aws.errors import UsageError


@pytest.mark.parametrize(
    ("command", "num_nodes", "gpus", "said"),
    [
        ("torchrun train.py", 2, 4, ""),
        ("torchrun --nproc-per-node 4 train.py", 2, 4, ""),
        ("torchrun --nproc-per-node=gpu train.py", 2, 4, ""),
        ("torchrun --nproc-per-node 8 train.py", 2, 0, ""),
        ("python train.py --nproc-per-node 8", 2, 1, ""),
        ("torchrun --nproc-per-node 8 train.py", 1, 4, "is 8, and a node has 4 GPUs: leave it out"),
        ("torchrun --nproc_per_node=2 train.py", 2, 1, "is 2, and a node has 1 GPU: leave"),
        ("torchrun --standalone train.py", 1, 1, ""),
        ("deepspeed train.py", 1, 1, ""),
        ("python train.py --strategy deepspeed", 2, 1, ""),
        ("torchrun train.py --backend deepspeed", 2, 1, ""),
        ("sh -c 'python prepare.py && deepspeed train.py'", 2, 1, "start the script with torchrun"),
        ("OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 train.py", 2, 4, "is 8, and a node has 4"),
        ("exit 1\ntorchrun --nproc-per-node 8 train.py", 2, 4, "is 8, and a node has 4"),
        ("deepspeed --no_ssh --hostfile hosts train.py", 2, 1, ""),
        ("deepspeed train.py", 2, 1, "start the script with torchrun"),
        ("/opt/bin/deepspeed train.py", 2, 1, "would train on each by itself"),
    ],
)
@pytest.mark.parametrize("is_shell", [False, True])
def test_a_launcher_that_cannot_start_the_command_on_its_nodes_is_refused(
    command: str, num_nodes: int, gpus: int, said: str, is_shell: bool
) -> None:
    words = ["sh", "-c", f"cd src && {command}"] if is_shell else command.split()
    nodes = Range(1, num_nodes)
    if not said:
        launchers.check(words, nodes=nodes, gpus=gpus)
        return
    with pytest.raises(UsageError, match=said):
        launchers.check(words, nodes=nodes, gpus=gpus)
