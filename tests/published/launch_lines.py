"""Launch lines of other systems, as public repositories and pages have them, and what refuses them
on two nodes with a GPU each.

Each row: source; the command; the text of ``run.sh``, if the command is one; a part of the refusal;
and who refuses it: the laptop by its words, or the head by asking the launcher.
"""

from typing import Final, NamedTuple


class Line(NamedTuple):
    """A launch line."""

    source: str
    text: str
    refusal: str
    on_laptop: bool = True
    is_script: bool = False
    """True: the text is a shell script, and not the words of a command."""


_SKY: Final = "docs.skypilot.co, examples/training/distributed-pytorch"
_SAGEMAKER: Final = "docs.aws.amazon.com, SageMaker training toolkit, variables"
_BATCH: Final = "docs.aws.amazon.com/batch, mnp-env-vars"
LINES: Final = (
    Line(
        _SKY,
        "torchrun --nnodes=$SKYPILOT_NUM_NODES --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE "
        "--master_port=8008 --node_rank=${SKYPILOT_NODE_RANK} main.py",
        "here its name is NUM_NODES",
    ),
    Line(
        _SKY,
        'MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1)\n'
        "torchrun --nnodes=$SKYPILOT_NUM_NODES --master_port=8008 "
        "--node_rank=${SKYPILOT_NODE_RANK} main.py\n",
        "nothing sets .SKYPILOT_NUM_NODES",
        is_script=True,
    ),
    Line(
        "dstack 0.18.0, release notes",
        "torchrun --nproc_per_node=8 --node_rank=$DSTACK_NODE_RANK --nnodes=$DSTACK_NODES_NUM "
        "--master_addr=$DSTACK_MASTER_NODE_IP main.py",
        "here its name is NODE_RANK",
    ),
    Line(
        "dstackai/dstack#1409",
        "accelerate launch --num_machines=$DSTACK_NODES_NUM --machine_rank=$DSTACK_NODE_RANK "
        "--main_process_ip=$DSTACK_MASTER_NODE_IP main.py\n",
        "nothing sets .DSTACK_NODES_NUM",
        is_script=True,
    ),
    Line(_SAGEMAKER, "python main.py --model_dir $SM_MODEL_DIR", "TRAIN_OUTPUT"),
    Line(
        _SAGEMAKER,
        "NPROC_PER_NODE=$SM_NUM_GPUS\ntorchrun --nproc_per_node=$NPROC_PER_NODE main.py\n",
        "here its name is GPUS_PER_NODE",
        is_script=True,
    ),
    Line(
        "pytorch/torchtitan, run_8node.sh",
        "srun -p llm_s -n 8 -N 8 --ntasks-per-node=1 --gpus-per-task=8 torchrun "
        "--nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint 10.140.60.12:29500 ./main.py",
        "srun is neither in the images",
    ),
    Line(
        "codebyzeb/BabyLM, scripts/run_hpc_expt.sh",
        "srun torchrun --nnodes 1 --nproc_per_node 1 --rdzv_backend c10d main.py",
        "srun is neither in the images",
    ),
    Line(
        "Slurm: torchrun by the ranks of its tasks",
        "torchrun --nnodes=$SLURM_JOB_NUM_NODES --nproc_per_node=4 --node_rank=$SLURM_PROCID "
        "--rdzv_id=32 --rdzv_endpoint=10.0.0.1:12351 main.py\n",
        "nothing sets .SLURM_JOB_NUM_NODES",
        is_script=True,
    ),
    Line(
        _BATCH,
        "torchrun --nnodes=$AWS_BATCH_JOB_NUM_NODES "
        "--node_rank=$AWS_BATCH_JOB_NODE_INDEX main.py\n",
        "here its name is NUM_NODES",
        is_script=True,
    ),
    Line(
        "Kubernetes: jobs with an index",
        "export RANK=$JOB_COMPLETION_INDEX\n"
        "torchrun --nnodes=2 --node_rank=$JOB_COMPLETION_INDEX main.py\n",
        "here its name is NODE_RANK",
        is_script=True,
    ),
    Line(
        "pytorch/torchx, macros of its components",
        "torchrun --node_rank ${replica_id} main.py",
        "here its name is NODE_RANK",
    ),
    Line(
        "pidajay/tpu, mnasnet/train.sh",
        "mpirun -np 8 -hostfile hosts.txt -bind-to socket python main.py",
        "mpirun is neither in the images",
    ),
    Line(
        "tczhangzhi/pytorch-distributed, start.sh",
        "horovodrun -np 4 -H localhost:4 --verbose python main.py",
        "horovodrun is neither in the images",
    ),
    Line(
        "aws-samples/aws-do-eks, imagenet-efa.yaml",
        "torchrun --nnodes=2 --nproc_per_node=1 --rdzv_id=x --rdzv_backend=etcd "
        "--rdzv_endpoint=etcd-service:2379 main.py",
        "python-etcd",
        on_laptop=False,
    ),
    Line(
        "pytorch/elastic, README",
        "python -m torchelastic.distributed.launch --nnodes=2 --nproc_per_node=1 main.py",
        "torchelastic",
        on_laptop=False,
    ),
    Line(
        "ChenyuanHu/chinese_pretrain, v2/train_nnodes.sh",
        "export OMP_NUM_THREADS=10\ntorchrun --nnodes=2 --nproc_per_node=1 --node_rank=0 "
        "--master_addr=127.0.0.1 --master_port=29500 main.py\n",
        "--node-rank is 0",
        on_laptop=False,
        is_script=True,
    ),
    Line(
        "yukiman76/LLM, base/llmfs/train_ddp.sh",
        "export MASTER_ADDR='localhost'\nexport MASTER_PORT='29400'\ntorchrun --nnodes=2 "
        "--nproc_per_node=1 --rdzv_id=100 --rdzv_backend=c10d "
        "--rdzv_endpoint=$MASTER_ADDR:29400 main.py\n",
        "localhost:29400",
        on_laptop=False,
        is_script=True,
    ),
    Line(
        "hiyouga/LLaMA-Factory, examples/full_multi_gpu/multi_node.sh",
        "python -m torch.distributed.run --nproc_per_node $NPROC_PER_NODE --nnodes $NNODES "
        "--node_rank $RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT main.py\n",
        "nproc_per_node: expected one argument",
        on_laptop=False,
        is_script=True,
    ),
    Line(
        "tonyzhao-jt/LLM-PQ, tests/run_main.sh",
        "torchrun --nnodes=2 --nproc_per_node=4 --master_addr net-g14 --master_port 6666 "
        "--node_rank=0 main.py\n",
        "--node-rank is 0",
        on_laptop=False,
        is_script=True,
    ),
)
