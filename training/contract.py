"""Names that the recipes, the command line and the stacks must agree on.

Standard library only: a laptop that submits jobs has neither torch nor Ray.
Renaming anything here breaks runs that are already in a bucket.
"""

import re
import time
from dataclasses import dataclass
from typing import Any, Final, Self

# What ``python -m training.launch`` returns to the shell.
EXIT_OK: Final = 0
EXIT_FAILED: Final = 1  # something broke that the user could not have typed differently
EXIT_BAD_INPUT: Final = 2  # a wrong option, bad data, a loss that is not a number
EXIT_INTERRUPTED: Final = 130  # Ctrl-C; the run resumes when its command is given again
EXIT_TERMINATED: Final = 143  # SIGTERM; the same

# What a node's container returns to ECS, beside the codes above.
EXIT_NO_HEAD: Final = 3  # the head did not answer in time, or was lost
EXIT_REFUSED: Final = 4  # the head does not accept this node's token
EXIT_BAD_HOST: Final = 5  # the host's GPUs are not what they should be

# What the head of a job returns beside what its command does.
EXIT_NO_CAPACITY: Final = 75  # the workers that it needs at least did not come in time
EXIT_DEADLINE: Final = 124  # it was ended at its deadline; timeout(1) has the same
EXIT_KILLED: Final = 137  # SIGKILL, by hand or for want of memory, as a shell says it

# The record of a run: <storage>/<run>/...
CONFIG_FILE: Final = "config.json"
ENVIRONMENT_FILE: Final = "environment.json"
METRICS_FILE: Final = "metrics.jsonl"
EVALUATION_FILE: Final = "evaluation.json"
RESULT_FILE: Final = "result.json"
REPORT_FILE: Final = "report.html"
PLOTS_DIR: Final = "plots"
MODEL_DIR: Final = "model"
CHECKPOINTS_DIR: Final = "checkpoints"

# Bare buckets keep their runs under this prefix, as local runs do under ./runs.
RUNS_PREFIX: Final = "runs"

# The deployment, as its stacks name it and the command line and the nodes look it up.
CORE_STACK: Final = "CoreStack"
TRAINING_STACK: Final = "TrainingStack"
JOB: Final = "job"  # what the container of a head runs that brings its own workers
HEAD: Final = "head"  # the two kinds of node: task definition, service, image repository, DNS name
WORKER: Final = "worker"
CONTAINER: Final = "ray"  # the one container of either task
METRICS_NAMESPACE: Final = "RayTraining"  # in CloudWatch: what the hosts and the runs report

# Ray's ports on the head that others ask for by number.
GCS_PORT: Final = 6379
DASHBOARD_PORT: Final = 8265
AGENT_PORT: Final = 52365  # every node's agent; its health check is open to the node itself

# Outputs of the stacks. The command line reads them; renaming one breaks it.
OUT_BUCKET: Final = "BucketName"
OUT_CLUSTER: Final = "ClusterName"
OUT_HEAD_SERVICE: Final = "HeadServiceName"
OUT_WORKER_SERVICE: Final = "WorkerServiceName"
OUT_HEAD_TASK: Final = "HeadTaskDefinition"
OUT_WORKER_TASK: Final = "WorkerTaskDefinition"
OUT_JOB_TASK: Final = "JobTaskDefinition"  # of a job's head
OUT_HEAD_REPOSITORY: Final = "HeadRepositoryUri"
OUT_WORKER_REPOSITORY: Final = "WorkerRepositoryUri"
OUT_LOG_GROUP: Final = "LogGroupName"
OUT_SUBNET: Final = "TrainingSubnetId"
OUT_SECURITY_GROUP: Final = "SecurityGroupId"
OUT_HEAD_PROVIDER: Final = "HeadCapacityProvider"
OUT_WORKER_PROVIDER: Final = "WorkerCapacityProvider"
OUT_JOBS: Final = "JobStateMachineArn"
OUT_KEEPER: Final = "JobKeeperName"
OUT_TASK_EVENTS: Final = "TaskEventsLogGroupName"
OUT_DASHBOARD: Final = "DashboardName"
OUT_PUSH_ROLE: Final = "ImagePushRoleArn"
OUT_SHAPE: Final = "ClusterShape"  # JSON: preset, instance types, counts, spot, image tag

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
ENV_COMMAND: Final = "TRAIN_COMMAND"  # what a job runs, a JSON list of words
ENV_DEADLINE: Final = "TRAIN_DEADLINE"  # Unix time at which a job is ended
ENV_CAPACITY_WAIT: Final = "TRAIN_CAPACITY_WAIT_S"  # how long a job waits for its least workers
ENV_MIN_WORKERS: Final = "TRAIN_MIN_WORKERS"
ENV_MAX_WORKERS: Final = "TRAIN_MAX_WORKERS"
ENV_IDLE: Final = "TRAIN_IDLE_S"  # a worker node that has had nothing to do for so long goes
ENV_WORKER_TASK: Final = "TRAIN_WORKER_TASK"  # task definition of the nodes that a job starts
ENV_WORKER_PROVIDER: Final = "TRAIN_WORKER_PROVIDER"  # their capacity provider
ENV_WORKER_CPUS: Final = "TRAIN_WORKER_CPUS"  # what each of them has
ENV_WORKER_GPUS: Final = "TRAIN_WORKER_GPUS"
ENV_SUBNETS: Final = "TRAIN_SUBNETS"  # with commas
ENV_SECURITY_GROUPS: Final = "TRAIN_SECURITY_GROUPS"  # with commas
ENV_GIT_SHA: Final = "TRAIN_GIT_SHA"  # the commit an image was built from

ENV_RECIPE: Final = "TRAIN_RECIPE"  # the only one that a job trains, if it trains one

ENV_RUN: Final = "TRAIN_RUN"  # the run that a job belongs to
ENV_CODE: Final = "TRAIN_CODE"  # s3:// address of the user's own code, an archive
ENV_SECRETS: Final = "TRAIN_SECRETS"  # JSON: variable -> name of the secret it is read from
ENV_PASSED: Final = "TRAIN_PASSED"  # JSON: the user's own variables

# Jobs: what submits, runs and watches them must agree on.
JOB_GROUP: Final = "job:"  # before a job's id: the group of its ECS tasks
JOBS_DIR: Final = "jobs"  # of a run: <run>/jobs/<job>.json says how each job ended
SECRETS_PREFIX: Final = "training/"  # only secrets with such names can be given to a job
STARTED_BY_MOST: Final = 36  # characters of startedBy, and so of a job's id
OVERRIDES_MOST: Final = 8192  # characters that ECS takes of what a task is started with

# What the head says in its log whenever nodes join or leave; ``trainctl cluster`` reads it.
_CLUSTER = re.compile(r"cluster: (\d+) nodes, (\d+) CPUs, (\d+) GPUs$")

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


# What a worker tells whoever keeps the record: {"type": "step" | "evaluation" | ..., ...}.
Event = dict[str, Any]


def phase(name: str) -> Event:
    """An event that says how far the start of a run has come; ``benchmarks.startup`` reads it."""
    return {"type": "phase", "name": name, "time": time.time()}


class InputError(ValueError):
    """Something the user gave is wrong; the message says what, and what to do about it.

    The command line prints the message alone and exits with ``EXIT_BAD_INPUT``. Every other
    exception is a fault of the program or the machine and keeps its traceback.
    """


def check_run_name(name: str) -> str:
    """Return ``name`` if it can be a folder, an object prefix and a tag value at once.

    Raises:
        InputError: It cannot.
    """
    if not _RUN_NAME.fullmatch(name):
        raise InputError(
            f"run name {name!r} is not usable: use 1 to 63 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit (no slash: --storage says where runs are kept)"
        )
    return name


def worker_range(text: str) -> tuple[int, int]:
    """``"4"`` as (4, 4), and the elastic range ``"1:4"`` as (1, 4).

    Raises:
        InputError: it is neither, or the second number is below the first.
    """
    match = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", text.strip())
    if not match:
        raise InputError(
            f"--workers is {text}: it must be at least 1, or a range such as 1:4 (as many as can "
            "be had, one at least)"
        )
    least = int(match[1])
    most = int(match[2]) if match[2] else least
    if not least <= most:
        raise InputError(f"--workers is {text!r}: the first number is the smaller one")
    return least, most


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


def job_record(run: str, job: str) -> str:
    """Key of the object in the bucket that says how a job ended."""
    return f"{RUNS_PREFIX}/{run}/{JOBS_DIR}/{job}.json"


def job_code(run: str, job: str) -> str:
    """Key of the object in the bucket that holds a job's own code, an archive."""
    return f"{RUNS_PREFIX}/{run}/{JOBS_DIR}/{job}.zip"


def checkpoint_name(step: int) -> str:
    """Name of the checkpoint after ``step`` optimizer updates; sorts by step."""
    return f"step-{step:08d}"


def checkpoint_step(name: str) -> int | None:
    """Step of a checkpoint's name, or None when ``name`` is not one."""
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match[1]) if match else None
