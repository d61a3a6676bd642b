"""Values of the hosts of one kind of node."""

from dataclasses import dataclass

from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ecs as ecs

from contract.instance_types import InstanceType


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGroup:
    """The hosts of one kind of node, and the capacity provider that starts them."""

    machine: InstanceType
    spot: bool
    uses_efa: bool
    image_tag: str
    group: autoscaling.AutoScalingGroup
    capacity_provider: ecs.CfnCapacityProvider
    place: str = ""
    """Of a pool: ``nodes.pool_place``."""

    @property
    def name(self) -> str:
        """Name of the Auto Scaling group."""
        return self.group.auto_scaling_group_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Reserved capacity of EC2."""

    id: str
    is_block: bool
    """Whether it is a capacity block for ML."""
