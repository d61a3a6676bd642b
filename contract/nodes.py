"""Environment variables, ports and DNS names of a node."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Final, Self

from contract.errors import InputError
from contract.text import counted

JOB: Final = "job"  # what the container of a head runs that brings its own workers
HEAD: Final = "head"  # the two kinds of node: task definition, service, image repository, DNS name
WORKER: Final = "worker"
CONTAINER: Final = "ray"  # the one container of either task
DEFAULT_POOL: Final = "default"  # worker hosts of the deployment's own settings
METRICS_NAMESPACE: Final = "RayTraining"  # in CloudWatch: what the hosts and the runs report
GROUP_TAG: Final = "aws:autoscaling:groupName"  # EC2 Auto Scaling marks a group's instances by it

# Ray's ports on the head that others ask for by number.
GCS_PORT: Final = 6379
DASHBOARD_PORT: Final = 8265
AGENT_PORT: Final = 52365  # every node's agent; its health check is open to the node itself


# Variables that the task definitions pass to the entry point of a node.
ENV_NODE: Final = "TRAIN_NODE"  # head or worker; the entry point sets it for what it starts
ENV_HEAD_WAIT: Final = "TRAIN_HEAD_WAIT_S"  # seconds that a worker waits for its head
ENV_HEAD_ADDRESS: Final = "TRAIN_HEAD_ADDRESS"  # name or address that workers join
ENV_NUM_GPUS: Final = "TRAIN_NUM_GPUS"  # GPUs the host has, all given to the container
ENV_NUM_CPUS: Final = "TRAIN_NUM_CPUS"  # CPUs that Ray may count on here
ENV_TRAINS: Final = "TRAIN_ON_THIS_NODE"  # "1": training processes may run here
ENV_SPOT: Final = "TRAIN_SPOT"  # "1": hosts of workers may be taken away, with notice
ENV_SHARED: Final = "TRAIN_SHARED"  # folder of the file system that all hosts mount, if any
ENV_EFA: Final = "TRAIN_EFA"  # EFA interfaces of the host, which its container has; 0: none
ENV_STORAGE: Final = "TRAIN_STORAGE"  # s3://bucket, the default of --storage
ENV_JOB: Final = "TRAIN_JOB"  # id of the job, which all of its tasks were started by
ENV_RUN: Final = "TRAIN_RUN"  # name of the run, for the command of a job
ENV_RAY_STORAGE: Final = "TRAIN_RAY_STORAGE"  # where its Ray Train and Ray Tune save by default
ENV_RAY_NAMES: Final = "TRAIN_RAY_NAMES"  # folder in which their names are counted
ENV_JOB_SPEC: Final = "TRAIN_JOB_SPEC"  # its whole order, JSON: see contract.job.JobSpec
ENV_DEADLINE: Final = "TRAIN_DEADLINE"  # Unix time at which a job is ended
ENV_KEPT: Final = "TRAIN_KEPT_UNTIL"  # Unix time: the task only keeps its host until then
ENV_WORKER_TASK: Final = "TRAIN_WORKER_TASK"  # task definition of the nodes that a job starts
ENV_WORKER_PROVIDER: Final = "TRAIN_WORKER_PROVIDER"  # their capacity provider
ENV_POOLS: Final = "TRAIN_POOLS"  # JSON, pool -> variables in the place of the above, by name
ENV_KEEPER: Final = "TRAIN_KEEPER"  # function that ends hosts that a job no longer needs
ENV_WORKER_CPUS: Final = "TRAIN_WORKER_CPUS"  # what each of them has
ENV_WORKER_GPUS: Final = "TRAIN_WORKER_GPUS"  # the same; on every node
ENV_SUBNETS: Final = "TRAIN_SUBNETS"  # with commas
ENV_SECURITY_GROUPS: Final = "TRAIN_SECURITY_GROUPS"  # with commas
ENV_GIT_SHA: Final = "TRAIN_GIT_SHA"  # the commit an image was built from

ENV_SILENCE: Final = "TRAIN_SILENCE_S"  # SILENCE_S of another length, for tests
ENV_RESIZE: Final = "TRAIN_RESIZE_EVERY_S"  # between two looks for more hosts, for tests
ENV_S3_TIMEOUT: Final = "TRAIN_S3_TIMEOUT_S"  # S3_TIMEOUT_S of another length, for tests
ENV_CODE: Final = "TRAIN_CODE"  # s3:// address of the archive with a job's own code
ENV_CODE_SHA256: Final = "TRAIN_CODE_SHA256"  # of that archive

CONTAINER_USER: Final = 1000  # id of the user, and of the group, that both images run as
EFA_LINKS: Final = "/dev/efa"  # of a host: links to its EFA devices, by number
EFA_NODES: Final = f"{EFA_LINKS}/nodes"  # the same devices, by the kernel's names
# Places inside a container.
CACHE_DIR: Final = "/var/cache/train"  # a folder of the host, which its next tasks see too
SHARED_DIR: Final = "/mnt/shared"  # of the file system that all hosts mount; theirs too

ENV_LOG: Final = "TRAIN_LOG"  # a program's launcher writes to its node's log there
ENV_NOTICE: Final = "TRAIN_NOTICE"  # a file that appears, with a Unix time, when this node must end
ENV_HOST_CHECK: Final = "TRAIN_HOST_CHECK"  # a file: create it to have this node's host checked
ENV_ERRORS: Final = "TRAIN_ERRORS"  # a folder where a program's processes note why they fail
ENV_WATCHED: Final = "TRAIN_WATCHED"  # Ray's head, which wants signs of life of the program
ENV_WATCH: Final = "TRAIN_WATCH"  # a folder where a program's processes count their steps
ENV_OUTPUT: Final = "TRAIN_OUTPUT"  # a program's folder for what shall be kept
ENV_WITH_RUN: Final = "WITH_RUN"  # the run that a job goes with
ENV_COMMIT: Final = "GIT_COMMIT"  # commit of a program's code, with -dirty after changes
#: A program's variables that differ between the nodes of a start, or between two starts.
OF_EACH_NODE: Final = frozenset(
    ("MASTER_ADDR", "NODE_RANK", "RANK", "LOCAL_RANK", "PET_MASTER_ADDR", "PET_NODE_RANK")
)
MASTER_PORT: Final = 29500  # on node 0: what programs call MASTER_PORT; the first start's

# Before each line that a program prints on one of several nodes.
_LABEL = re.compile(r"\[node (\d+)\](?: |$)")


def pool_place(pool: str, zone: str) -> str:
    """Name of a pool in a zone, for ``pool_hosts`` and ``pool_provider``; without a zone: in the
    deployment's own.

    A pool that moves gets new names, so that an update creates new hosts beside the old ones, and
    ECS refuses to give up the old capacity provider while a task uses it.
    """
    return f"{pool}_{zone}" if zone else pool


def pool_hosts(stack: str, pool: str) -> str:
    """Name of a pool's Auto Scaling group, and of the family of its task definitions; ``*`` for
    all pools."""
    return f"{stack}-pool-{pool}"


def pool_provider(stack: str, pool: str) -> str:
    """Name of a pool's capacity provider, which may not begin with aws, ecs or fargate."""
    return f"cp-{pool_hosts(stack, pool)}"


def pool_of(definition: str) -> str:
    """The pool that a task's definition, an ARN, is of."""
    match = re.search(r"-pool-([a-z0-9-]+)(?:_[a-z0-9-]+)?:\d+$", definition)
    return match[1] if match else DEFAULT_POOL


def node_label(number: int) -> str:
    """Prefix of each line that a program prints on node ``number``."""
    return f"[node {number}]"


def labelled_node(line: str) -> int | None:
    """The node on which a program has printed a line of a log; None for a node's own lines."""
    match = _LABEL.match(line)
    return int(match[1]) if match else None


#: Attribute of container instances; it keeps tasks from hosts that could not mount the file system.
SHARED_ATTRIBUTE: Final = "training.shared"
SHARED_MOUNTED: Final = "mounted"


def is_shared(path: str) -> bool:
    """True if a path is on the file system that all hosts mount, where there is one."""
    return f"{path}/".startswith(f"{SHARED_DIR}/")


# The line that the head logs whenever nodes join or leave; ``trainctl cluster`` reads it.
_NUMBER = r"(\d[\d,]{0,10})"
_CLUSTER = re.compile(rf"cluster: {_NUMBER} nodes?, {_NUMBER} CPUs?, {_NUMBER} GPUs?$")


@dataclass(frozen=True, slots=True)
class Range:
    """Number of nodes or workers of a job or run: at least ``low``, at most ``high``."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise InputError(f"range {self.low}:{self.high}: it must be 0 <= MIN <= MAX")

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}:{self.high}"

    @property
    def words(self) -> str:
        """``2``, or ``1 to 4``."""
        return str(self).replace(":", " to ")

    @classmethod
    def parse(cls, text: str, *, option: str) -> Self:
        """``"4"`` as 4 to 4, and the elastic range ``"1:4"`` as 1 to 4.

        Args:
            option: name of the option that ``text`` was given to, for the error.

        Raises:
            InputError: it is neither, or MIN is above MAX.
        """
        match = re.fullmatch(r"([0-9]{1,4})(?::([0-9]{1,4}))?", text.strip())
        if not match:
            raise InputError(
                f"{option} is {text}: give a number, such as 2, or a range MIN:MAX, such as 1:4 "
                "(starts with 1 and grows to 4 when hosts become available)"
            )
        low = int(match[1])
        high = int(match[2]) if match[2] else low
        if low > high:
            raise InputError(f"{option} is {text}: in MIN:MAX, MIN must not be above MAX")
        return cls(low, high)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSize:
    """Size of a Ray cluster at a moment, head included."""

    num_nodes: int
    num_cpus: int
    num_gpus: int

    @property
    def words(self) -> str:
        """``3 nodes, 8 CPUs, 1 GPU``."""
        parts = ((self.num_nodes, "node"), (self.num_cpus, "CPU"), (self.num_gpus, "GPU"))
        return ", ".join(starmap(counted, parts))

    def line(self) -> str:
        """The line of the head's log."""
        return f"cluster: {self.words}"

    @classmethod
    def from_line(cls, line: str) -> Self | None:
        """Parse a line of the head's log; None when it is about something else."""
        match = _CLUSTER.search(line.rstrip())
        if not match:
            return None
        nodes, cpus, gpus = (int(each.replace(",", "")) for each in match.groups())
        return cls(num_nodes=nodes, num_cpus=cpus, num_gpus=gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """The GPUs of a cluster's hosts, which decide how many training processes it can have.

    Hosts join and leave as a whole, and with them all processes that they have.
    """

    per_node: int = 0
    """GPUs of each worker node."""
    on_head: int | None = None
    """GPUs of the head; None where it does not train."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read a head's variables; outside a cluster, hosts of one process each."""
        trains = environment.get(ENV_TRAINS, "1") == "1" and ENV_NUM_GPUS in environment
        return cls(
            per_node=int(environment.get(ENV_WORKER_GPUS, "0")),
            on_head=int(environment[ENV_NUM_GPUS]) if trains else None,
        )

    def num_workers(self, num_nodes: int) -> int:
        """Training processes on the head and ``num_nodes`` worker nodes: one per GPU, or one per
        node where there are none."""
        on_head = 0 if self.on_head is None else max(1, self.on_head)
        return num_nodes * max(1, self.per_node) + on_head

    def possible(self, workers: Range) -> list[int]:
        """The numbers of processes within a range that whole hosts can have, in order; the largest
        of them is the end of the range, because a run leaves idle what it has no use for.

        With four GPUs per node, 4:12 has 4, 8 and 12; 2:6 has 4 and 6.
        """
        first = -(-(workers.low - self.num_workers(0)) // max(1, self.per_node))
        found = self.num_workers(max(0, first))
        return [*range(found, workers.high, max(1, self.per_node)), workers.high]


#: Hosts of one process each, which can have any number of them.
ONE_EACH: Final = Gpus()
