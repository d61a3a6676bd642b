"""Values of the hosts of one kind of node."""

from dataclasses import dataclass

from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_ecs as ecs

from contract.instance_types import InstanceType
from contract.nodes import pool_place


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Reserved capacity of EC2."""

    id: str
    is_block: bool
    """True for a capacity block for ML."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostKind:
    """Settings of the hosts of one kind of node."""

    node: str
    machine: InstanceType
    repository: ecr.Repository
    """Repository of the image that they run, and pull before their first task."""
    image_tag: str
    max_hosts: int
    max_step: int
    """Maximum number of hosts to start at once."""
    trains: bool
    """True if their GPUs train; these hosts are placed close to each other."""
    uses_efa: bool
    """True if they have EFA interfaces."""
    root_volume_gib: int
    """0: as the machine needs."""
    ami: str
    """Parameter of Systems Manager with the AMI; empty: ECS's newest."""
    spot: bool
    reservation: Reservation | None
    mount_source: str
    """File system that they mount, if any: ``host_setup``."""
    pool: str
    """Name of a pool next to the deployment's own hosts; its hosts are close to each other."""
    subnet: ec2.ISubnet | None
    """Another subnet than that of the cluster."""

    @property
    def zone(self) -> str:
        """Availability zone of another subnet."""
        return self.subnet.availability_zone if self.subnet else ""

    @property
    def name(self) -> str:
        # A pool that moves to another zone is other hosts, not the same ones elsewhere.
        return f"{self.pool}Pool{self.zone}" if self.pool else self.node.capitalize()

    @property
    def place(self) -> str:
        """Place of the pool, by ``nodes.pool_place``."""
        return pool_place(self.pool, self.zone)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGroup:
    """The hosts of one kind of node, and the capacity provider that starts them."""

    kind: HostKind
    group: autoscaling.AutoScalingGroup
    capacity_provider: ecs.CfnCapacityProvider

    @property
    def name(self) -> str:
        """Name of the Auto Scaling group."""
        return self.group.auto_scaling_group_name
