"""On every instance type the task fits the host and gets all its GPUs, without a size typed twice.

One stack per dozen types: RayNodes is the real construct, its cluster a stand-in, because a cluster
for each of the types would take a minute.
"""

import functools
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import aws_cdk as cdk
import pytest
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_logs as logs
from constructs import Construct

from contract.instance_types import INSTANCE_TYPES, InstanceType
from stacks import settings as deployment
from stacks.core_stack import CoreStack
from stacks.gpu_cluster import GpuCluster
from stacks.ray_nodes import RayNodes
from tests.stacks.conftest import context


class Nodes(cdk.Stack):
    """Task definitions for a few types of host, each as head and as worker."""

    def __init__(self, scope: Construct, id_: str, *, core: CoreStack, types: Any) -> None:
        super().__init__(scope, id_)
        cluster = ecs.Cluster(self, "Cluster", vpc=core.vpc)
        group = ec2.SecurityGroup(self, "Group", vpc=core.vpc)
        shells = logs.LogGroup(self, "ShellLogs")
        settings = deployment.load(context())
        for number, machine in enumerate(types):
            scope = Construct(self, f"Type{number}")
            provider = SimpleNamespace(ref="provider")
            host = SimpleNamespace(machine=machine, capacity_provider=provider)
            stand_in = SimpleNamespace(
                cluster=cluster,
                security_group=group,
                head=host,
                worker=host,
                storage=None,
                shell_logs=shells,
                teardown=SimpleNamespace(stop_tasks=cluster, stops=lambda *_, **__: None),
            )
            RayNodes(
                scope, "Nodes", settings=settings, core=core, cluster=cast(GpuCluster, stand_in)
            )


@functools.cache
def tasks() -> dict[str, list[dict[str, Any]]]:
    """Instance type -> the containers of head and worker on it."""
    app = cdk.App(context=context(), builtin_cloud_formation_validation=False)
    core = CoreStack(app, "CoreStack", settings=deployment.load(context()))
    machines = iter(INSTANCE_TYPES.values())
    groups = [*iter(lambda: [*islice(machines, 12)], [])]
    for number, types in enumerate(groups):
        Nodes(app, f"Nodes{number}", core=core, types=types)
    cloud = app.synth()
    found: dict[str, list[dict[str, Any]]] = {}
    for number, types in enumerate(groups):
        resources = cloud.get_stack_by_name(f"Nodes{number}").template["Resources"]
        for index, machine in enumerate(types):
            found[machine.name] = [
                resource["Properties"]["ContainerDefinitions"][0]
                for name, resource in resources.items()
                if resource["Type"] == "AWS::ECS::TaskDefinition"
                and name.startswith(f"Type{index}Nodes")
            ]
    return found


@pytest.mark.parametrize("machine", INSTANCE_TYPES.values(), ids=INSTANCE_TYPES)
def test_the_task_fits_the_host_and_takes_its_gpus(machine: InstanceType) -> None:
    containers = tasks()[machine.name]
    assert len(containers) == 2
    for container in containers:
        assert 0 < container["Cpu"] <= machine.vcpus * 1024 - 128
        # Linux and the firmware keep up to 7 percent; the agents need half a GiB.
        assert container["Memory"] <= 0.94 * machine.memory_mib - 384
        assert container["Memory"] >= 0.75 * machine.memory_mib, "a host is for its task"
        assert container["LinuxParameters"]["SharedMemorySize"] <= container["Memory"] / 2
        gpus = [
            int(each["Value"])
            for each in container.get("ResourceRequirements", [])
            if each["Type"] == "GPU"
        ]
        assert sum(gpus) == machine.num_gpus
        # Two tasks never share a host: the second finds neither memory nor, mostly, CPUs.
        assert 2 * container["Memory"] > machine.memory_mib
