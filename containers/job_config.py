"""What the head of a job is told, and what it tells Ray's autoscaler about the job's nodes."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from containers import demand, metadata
from containers.node import NodeConfig, count
from containers.program import code as user_code
from contract import times
from contract.errors import InputError
from contract.job import JobSpec, Placement
from contract.nodes import (
    ENV_DEADLINE,
    ENV_HEAD_ADDRESS,
    ENV_JOB,
    ENV_JOB_SPEC,
    ENV_RECIPE,
    ENV_SECURITY_GROUPS,
    ENV_SUBNETS,
    ENV_WORKER_CPUS,
    ENV_WORKER_GPUS,
    ENV_WORKER_PROVIDER,
    ENV_WORKER_TASK,
    HEAD,
    WORKER,
)

if TYPE_CHECKING:
    from containers.autoscaler import ProviderConfig  # which imports Ray


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """What the task's environment says: the job's order, and what its workers run on."""

    job: str
    """Id of the job."""
    spec: JobSpec
    deadline: float
    """Unix time."""
    worker_cpus: int
    worker_gpus: int
    worker_task: str
    worker_provider: str
    subnets: tuple[str, ...]
    security_groups: tuple[str, ...]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read the variables of ``contract.nodes``. Raises InputError when one is wrong."""
        needed = (ENV_JOB, ENV_JOB_SPEC, ENV_WORKER_TASK)
        if missing := [name for name in needed if not environment.get(name)]:
            raise InputError(
                f"{', '.join(missing)} is missing: the state machine of the jobs sets it, so the "
                "images and the stacks are of different versions; push new images and deploy"
            )
        spec = JobSpec.from_json(environment[ENV_JOB_SPEC])
        return cls(
            job=environment[ENV_JOB],
            spec=spec,
            deadline=count(environment, ENV_DEADLINE, int(time.time()) + spec.max_seconds),
            worker_cpus=count(environment, ENV_WORKER_CPUS, 1),
            worker_gpus=count(environment, ENV_WORKER_GPUS, 0),
            worker_task=environment[ENV_WORKER_TASK],
            worker_provider=environment.get(ENV_WORKER_PROVIDER, ""),
            subnets=_listed(environment.get(ENV_SUBNETS, "")),
            security_groups=_listed(environment.get(ENV_SECURITY_GROUPS, "")),
        )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(each for each in text.split(",") if each)


def for_ray(spec: JobSpec) -> dict[str, str]:
    """Variables of Ray on all nodes of a job.

    Where a program runs on its own, Linux ends what takes too much memory: the program. Ray would
    end the launcher, as if the node were lost.
    """
    return {"RAY_memory_monitor_refresh_ms": "0"} if spec.on == Placement.NODES else {}


def for_autoscaler() -> dict[str, str]:
    """Variables of Ray's autoscaler, v2.

    It takes any new node for the oldest request of its kind. Where one of two requests fails late,
    it waits for the other's node, which is there already, before it asks again.
    """
    return {
        "RAY_enable_autoscaler_v2": "1",
        "RAY_AUTOSCALER_RECONCILE_REQUEST_STATUS_TIMEOUT_S": str(times.NODE_ASKED_S),
    }


def worker_provider(
    config: JobConfig, *, recipe: str, task: metadata.OwnTask, address: str
) -> "ProviderConfig":
    """What ``containers.autoscaler`` needs to start workers.

    Args:
        recipe: the only one that is trained, or empty.
        task: the head's own.
        address: the head's.
    """
    return {
        "cluster": task.cluster,
        "head": task.arn,
        "job": config.job,
        "task_definition": config.worker_task,
        "capacity_provider": config.worker_provider,
        "subnets": [*config.subnets],
        "security_groups": [*config.security_groups],
        # An address, because names take time to spread, and no is remembered for minutes.
        "environment": {
            ENV_HEAD_ADDRESS: address,
            ENV_JOB: config.job,
            ENV_DEADLINE: f"{config.deadline:.0f}",
            **({ENV_RECIPE: recipe} if recipe else {}),
            **user_code.for_workers(config.spec),
            **for_ray(config.spec),
        },
    }


def autoscaling(
    config: JobConfig,
    head: NodeConfig,
    provider: "ProviderConfig",
    *,
    least: int | None = None,
    most: int | None = None,
) -> str:
    """The file that Ray's autoscaler reads, again and again: one kind of worker, and how many.

    It is JSON, which is YAML too.

    Args:
        least: worker nodes that are kept without work; as many as the job needs by default.
        most: worker nodes at a time; as many as the job may have by default.
    """
    most = config.spec.nodes.high if most is None else most
    if least is None:
        # A program on all nodes asks Ray for nothing, and takes whatever joins.
        on_nodes = config.spec.on == Placement.NODES
        least = config.spec.nodes.high if on_nodes else config.spec.nodes.low
    own_provider = {
        "type": "external",
        "module": "containers.autoscaler.EcsNodeProvider",
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "use_internal_ips": True,
        "worker_liveness_check": False,
        **provider,
    }
    worker = {"CPU": config.worker_cpus}
    if config.worker_gpus:
        worker["GPU"] = config.worker_gpus
    own = {"CPU": head.num_cpus}
    if head.num_gpus:
        own["GPU"] = head.num_gpus
    wanted = {
        "cluster_name": config.job,
        "max_workers": most,
        "upscaling_speed": 1000,  # all at once: a training that starts with a part waits anyway
        "idle_timeout_minutes": config.spec.idle_s / 60,
        "provider": own_provider,
        "head_node_type": HEAD,
        "available_node_types": {
            HEAD: {
                "resources": own,
                "node_config": {},
                "min_workers": 0,
                "max_workers": 0,
            },
            WORKER: {
                "resources": worker,
                "node_config": {},
                "min_workers": min(least, most),
                "max_workers": most,
            },
        },
        # What follows is for clusters that Ray sets up over SSH; it must be there.
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }
    return json.dumps(wanted, indent=1)


def capacity(config: JobConfig, head: NodeConfig) -> demand.Capacity:
    """All that a job can have at a time."""
    return demand.Capacity(
        head={"CPU": head.num_cpus, "GPU": head.num_gpus},
        worker={"CPU": config.worker_cpus, "GPU": config.worker_gpus},
        workers=config.spec.nodes.high,
    )
