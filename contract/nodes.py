"""What a node is told, in variables, and the ports and names by which it is found."""

import re
from dataclasses import dataclass
from typing import Final, Self

JOB: Final = "job"  # what the container of a head runs that brings its own workers
HEAD: Final = "head"  # the two kinds of node: task definition, service, image repository, DNS name
WORKER: Final = "worker"
CONTAINER: Final = "ray"  # the one container of either task
METRICS_NAMESPACE: Final = "RayTraining"  # in CloudWatch: what the hosts and the runs report

# Ray's ports on the head that others ask for by number.
GCS_PORT: Final = 6379
DASHBOARD_PORT: Final = 8265
AGENT_PORT: Final = 52365  # every node's agent; its health check is open to the node itself


# What the task definitions tell the entry point of a node.
ENV_NODE: Final = "TRAIN_NODE"  # head or worker; the entry point sets it for what it starts
ENV_HEAD_WAIT: Final = "TRAIN_HEAD_WAIT_S"  # seconds that a worker waits for its head
ENV_HEAD_ADDRESS: Final = "TRAIN_HEAD_ADDRESS"  # name or address that workers join
ENV_NUM_GPUS: Final = "TRAIN_NUM_GPUS"  # GPUs the host has, all given to the container
ENV_NUM_CPUS: Final = "TRAIN_NUM_CPUS"  # CPUs that Ray may count on here
ENV_TRAINS: Final = "TRAIN_ON_THIS_NODE"  # "1": training processes may run here
ENV_SPOT: Final = "TRAIN_SPOT"  # "1": hosts of workers may be taken away, with notice
ENV_STORAGE: Final = "TRAIN_STORAGE"  # s3://bucket, the default of --storage
ENV_CLUSTER: Final = "TRAIN_CLUSTER"  # the ECS cluster
ENV_JOB: Final = "TRAIN_JOB"  # id of the job, which all of its tasks were started by
ENV_RUN: Final = "TRAIN_RUN"  # name of the run, for the command of a job
ENV_JOB_SPEC: Final = "TRAIN_JOB_SPEC"  # its whole order, JSON: see contract.job.JobSpec
ENV_DEADLINE: Final = "TRAIN_DEADLINE"  # Unix time at which a job is ended
ENV_WORKER_TASK: Final = "TRAIN_WORKER_TASK"  # task definition of the nodes that a job starts
ENV_WORKER_PROVIDER: Final = "TRAIN_WORKER_PROVIDER"  # their capacity provider
ENV_WORKER_CPUS: Final = "TRAIN_WORKER_CPUS"  # what each of them has
ENV_WORKER_GPUS: Final = "TRAIN_WORKER_GPUS"
ENV_SUBNETS: Final = "TRAIN_SUBNETS"  # with commas
ENV_SECURITY_GROUPS: Final = "TRAIN_SECURITY_GROUPS"  # with commas
ENV_GIT_SHA: Final = "TRAIN_GIT_SHA"  # the commit an image was built from

ENV_RECIPE: Final = "TRAIN_RECIPE"  # the only one that a job trains, if it trains one

# What the head says in its log whenever nodes join or leave; ``trainctl cluster`` reads it.
_CLUSTER = re.compile(r"cluster: (\d+) nodes, (\d+) CPUs, (\d+) GPUs$")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSize:
    """What Ray has to offer at a moment, head included."""

    num_nodes: int
    num_cpus: int
    num_gpus: int

    def line(self) -> str:
        """The line of the head's log."""
        return f"cluster: {self.num_nodes} nodes, {self.num_cpus} CPUs, {self.num_gpus} GPUs"

    @classmethod
    def from_line(cls, line: str) -> Self | None:
        """What a line of the head's log says, or None when it is about something else."""
        match = _CLUSTER.search(line.rstrip())
        if not match:
            return None
        nodes, cpus, gpus = map(int, match.groups())
        return cls(num_nodes=nodes, num_cpus=cpus, num_gpus=gpus)


def num_workers(num_nodes: int, *, node_gpus: int, head_gpus: int | None) -> int:
    """Training processes of a job: one per GPU, or one per node where there are none.

    Args:
        num_nodes: worker nodes.
        node_gpus: GPUs of each of them.
        head_gpus: GPUs of the head; None where it does not train.
    """
    on_head = 0 if head_gpus is None else max(1, head_gpus)
    return num_nodes * max(1, node_gpus) + on_head
