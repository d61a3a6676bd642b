"""EFA: network interfaces, devices and variables that follow from the instance type.

Without any of these parts NCCL uses TCP and says so only in its log: the workers of a recipe look
there before they train (``training.system.devices``).
"""

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecs as ecs

from contract import nodes
from contract.instance_types import InstanceType

#: Where NCCL writes over which network it sends; %h and %p are NCCL's.
NCCL_LOG = "/tmp/nccl-%h-%p.log"


def attach_interfaces(
    template: ec2.LaunchTemplate, machine: InstanceType, *, group: ec2.SecurityGroup
) -> None:
    """Start hosts with an EFA interface on each network card. The L2 construct has no property."""
    resource = template.node.default_child
    assert isinstance(resource, ec2.CfnLaunchTemplate)
    # EC2 takes the groups of a host or those of its interfaces, and not both.
    resource.add_property_deletion_override("LaunchTemplateData.SecurityGroupIds")
    first = "efa" if 0 in machine.efa_cards else "interface"
    resource.add_property_override(
        "LaunchTemplateData.NetworkInterfaces",
        [
            # ECS attaches each task's own interface to card 0, and a card of p5.48xlarge has room
            # for two: so the host's is a single one there, for IP and EFA together, or no task is
            # ever placed. The others are for EFA only, and need no address of the subnet.
            #
            # AssociatePublicIpAddress is left unset: EC2 rejects it with several interfaces. The
            # subnet is that of the group of hosts.
            {
                "NetworkCardIndex": card,
                "DeviceIndex": 1 if card else 0,
                "InterfaceType": "efa-only" if card else first,
                "Groups": [group.security_group_id],
                "DeleteOnTermination": True,
            }
            for card in sorted({0, *machine.efa_cards})
        ],
    )


def add_devices(linux: ecs.LinuxParameters, machine: InstanceType) -> None:
    """Allow a container the host's EFA devices. ECS does not start it where one is missing.

    Its host names them by their driver: p6-b200 has two more RDMA devices, and no one promises the
    order of numbers. libfabric finds a device by the kernel's own name for it, so ``EFA_NODES``
    is mounted as the container's ``/dev/infiniband``.
    """
    for number in range(machine.efa_interfaces):
        device = f"{nodes.EFA_LINKS}/{number}"
        linux.add_devices(
            ecs.Device(
                host_path=device,
                container_path=device,
                permissions=[ecs.DevicePermission.READ, ecs.DevicePermission.WRITE],
            )
        )


def variables(machine: InstanceType, *, uses_efa: bool) -> dict[str, str]:
    """Environment variables that select NCCL's and libfabric's transport."""
    found = {}
    if machine.copies_through_host:
        # Copies by the GPU's own engines: faster than by its processors where there is no NVLink.
        found["NCCL_SHM_USE_CUDA_MEMCPY"] = "1"
    if not uses_efa:
        return found
    found |= {
        nodes.ENV_EFA: str(machine.efa_interfaces),
        "FI_PROVIDER": "efa",
        # Read by training.system.devices, and by the recipe that measures bandwidth.
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": NCCL_LOG,
    }
    if machine.has_rdma:
        # On by itself only on newer types; libfabric ends a program that asks for it elsewhere.
        found["FI_EFA_USE_DEVICE_RDMA"] = "1"
    return found
