"""The ECS cluster and its hosts: groups of EC2 instances that start at zero.

A group for each kind of node, behind a capacity provider that starts a host when a task waits for
one. How a host sets itself up is in ``host_setup``; how a stack with running hosts goes away is in
``stacks.teardown``.
"""

from collections.abc import Sequence

from aws_cdk import Duration, Stack
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from constructs import Construct

from contract import times
from contract.instance_types import InstanceType
from contract.nodes import pool_hosts, pool_place, pool_provider
from stacks import findings, rights
from stacks.cluster import efa
from stacks.cluster.host_group import HostGroup, Reservation
from stacks.cluster.host_setup import host_setup
from stacks.log_groups import log_group


class GpuCluster(Construct):
    """Cluster, security group, host role, and the groups of hosts that are added."""

    cluster: ecs.Cluster
    shell_logs: logs.LogGroup
    """What was typed and printed in shells of ECS Exec."""
    security_group: ec2.SecurityGroup

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        vpc: ec2.IVpc,
        subnets: ec2.SelectedSubnets,
        repositories: Sequence[ecr.Repository],
        metrics: str,
        has_placement: bool,
        has_insights: bool,
    ) -> None:
        """Make a cluster without hosts.

        Args:
            subnets: of all hosts.
            repositories: of the images that hosts pull.
            metrics: namespace of what hosts report.
            has_placement: whether hosts that train start close to each other.
            has_insights: whether ECS reports metrics of its own.
        """
        super().__init__(scope, id_)
        self._vpc, self._subnets, self._metrics = vpc, subnets, metrics
        self.shell_logs = log_group(self, "ShellLogs")
        self.cluster = ecs.Cluster(
            self,
            "Cluster",
            vpc=vpc,
            # Not "enhanced", which is billed for each container too.
            container_insights_v2=ecs.ContainerInsights.ENABLED
            if has_insights
            else ecs.ContainerInsights.DISABLED,
            execute_command_configuration=ecs.ExecuteCommandConfiguration(
                logging=ecs.ExecuteCommandLogging.OVERRIDE,
                log_configuration=ecs.ExecuteCommandLogConfiguration(
                    cloud_watch_log_group=self.shell_logs
                ),
            ),
        )
        self.security_group = self._security_group()
        # What the host itself may do: join this cluster, pull the two images, report metrics.
        self._role = iam.Role(
            self,
            "HostRole",
            description="GPU hosts: join the cluster, pull images, report metrics",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
        )
        rights.of_host(cluster=self.cluster, repositories=repositories, metrics=metrics).grant(
            self._role
        )
        # Hosts close together: gradients take the shortest way.
        self._placement = _placement_group(self, "Placement") if has_placement else None

    def _security_group(self) -> ec2.SecurityGroup:
        group = ec2.SecurityGroup(
            self,
            "SecurityGroup",
            vpc=self._vpc,
            description="Ray nodes: everything among themselves, HTTPS to the outside",
            # True would drop the rule to itself, which EFA needs beside any other (aws-cdk 38558).
            allow_all_outbound=False,
        )
        # Ray, NCCL and Gloo use random ports in both directions.
        group.add_ingress_rule(group, ec2.Port.all_traffic(), "Among the nodes")
        group.add_egress_rule(group, ec2.Port.all_traffic(), "Among the nodes")
        group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.HTTPS, "AWS and data by HTTPS")
        return group

    def add_hosts(
        self,
        node: str,
        *,
        machine: InstanceType,
        repository: ecr.Repository,
        image_tag: str,
        max_hosts: int,
        max_step: int,
        trains: bool,
        uses_efa: bool,
        root_volume_gib: int = 0,
        ami: str = "",
        spot: bool = False,
        reservation: Reservation | None = None,
        mount_source: str = "",
        pool: str = "",
        subnet: ec2.ISubnet | None = None,
    ) -> HostGroup:
        """Launch template, group and capacity provider of the hosts of one kind of node.

        Args:
            repository: of the image that they pull before their first task.
            max_step: most hosts to start at once.
            trains: whether their GPUs train; these hosts are placed close to each other.
            uses_efa: whether they have EFA interfaces.
            root_volume_gib: 0: as the machine needs.
            ami: parameter of Systems Manager with the AMI; empty: ECS's newest.
            mount_source: file system that they mount, if any: ``host_setup``.
            pool: its name, of hosts beside the deployment's own; they are close to each other.
            subnet: another than that of the cluster.
        """
        stack, zone = Stack.of(self).stack_name, subnet.availability_zone if subnet else ""
        # A pool that moves to another zone is other hosts, not the same ones elsewhere.
        name = f"{pool}Pool{zone}" if pool else node.capitalize()
        place = pool_place(pool, zone)
        placement = self._placement if trains else None
        if pool:
            placement = None if reservation else _placement_group(self, f"{name}Placement")
        disk = ec2.BlockDeviceVolume.ebs(
            root_volume_gib or machine.root_volume_gib,
            encrypted=True,
            volume_type=ec2.EbsDeviceVolumeType.GP3,
            iops=machine.root_volume_iops,
            throughput=machine.root_volume_mibps,
            delete_on_termination=True,
        )
        template = ec2.LaunchTemplate(
            self,
            f"{name}Hosts",
            instance_type=ec2.InstanceType(machine.name),
            machine_image=ec2.MachineImage.from_ssm_parameter(ami)
            if ami
            else ecs.EcsOptimizedImage.amazon_linux2023(
                ecs.AmiHardwareType.GPU if machine.num_gpus else ecs.AmiHardwareType.STANDARD
            ),
            role=self._role,
            security_group=self.security_group,
            user_data=host_setup(
                cluster_name=self.cluster.cluster_name,
                metrics=self._metrics,
                node=node,
                image=repository.repository_uri_for_tag(image_tag),
                has_gpus=machine.num_gpus > 0,
                spot=spot,
                efa=machine if uses_efa else None,
                mount_source=mount_source,
            ),
            block_devices=[ec2.BlockDevice(device_name="/dev/xvda", volume=disk)],
            ebs_optimized=True,
            detailed_monitoring=True,
            require_imdsv2=True,
            # Containers see the metadata service only where they must watch for a spot notice.
            http_put_response_hop_limit=2 if spot else 1,
            instance_metadata_tags=False,
            placement_group=placement,
            spot_options=ec2.LaunchTemplateSpotOptions(
                request_type=ec2.SpotRequestType.ONE_TIME,
                interruption_behavior=ec2.SpotInstanceInterruption.TERMINATE,
            )
            if spot
            else None,
        )
        if uses_efa:
            efa.attach_interfaces(template, machine, group=self.security_group)
        if reservation:
            _take_reservation(template, reservation)

        warmup_s = times.SLOW_HOST_WARMUP_S if times.is_slow(machine.name) else times.HOST_WARMUP_S
        group = autoscaling.AutoScalingGroup(
            self,
            f"{name}Group",
            vpc=self._vpc,
            auto_scaling_group_name=pool_hosts(stack, place) if pool else None,
            vpc_subnets=ec2.SubnetSelection(subnets=[subnet] if subnet else self._subnets.subnets),
            launch_template=template,
            # No desired capacity: a deploy must not touch the hosts that ECS has started.
            min_capacity=0,
            max_capacity=max_hosts,
            # Or scale-in takes a host in use and leaves an idle one. Protected hosts do not hold up
            # `cdk destroy` (aws-cdk 18179): TerminateHosts force-deletes the groups.
            new_instances_protected_from_scale_in=True,
            group_metrics=[autoscaling.GroupMetrics.all()],
            default_instance_warmup=Duration.seconds(warmup_s),
        )
        findings.accept(group, findings.HOST_GROUP)
        provider = ecs.CfnCapacityProvider(
            self,
            f"{name}Capacity",
            name=pool_provider(stack, place) if pool else None,
            auto_scaling_group_provider=ecs.CfnCapacityProvider.AutoScalingGroupProviderProperty(
                auto_scaling_group_arn=group.auto_scaling_group_name,
                managed_scaling=ecs.CfnCapacityProvider.ManagedScalingProperty(
                    status="ENABLED",
                    target_capacity=100,
                    minimum_scaling_step_size=1,
                    maximum_scaling_step_size=max_step,
                    instance_warmup_period=warmup_s,
                ),
                # ECS lifts the protection of hosts without tasks, and only theirs.
                managed_termination_protection="ENABLED",
                managed_draining="ENABLED",
            ),
        )
        return HostGroup(
            machine=machine,
            spot=spot,
            uses_efa=uses_efa,
            image_tag=image_tag,
            group=group,
            capacity_provider=provider,
            place=place,
        )

    def associate(self, groups: Sequence[HostGroup]) -> ecs.CfnClusterCapacityProviderAssociations:
        """Let tasks of the cluster name the capacity providers of these groups."""
        return ecs.CfnClusterCapacityProviderAssociations(
            self,
            "CapacityProviders",
            cluster=self.cluster.cluster_name,
            capacity_providers=[each.capacity_provider.ref for each in groups],
            # None by default: the caller of RunTask names the hosts' capacity provider.
            default_capacity_provider_strategy=[],
        )


def _placement_group(scope: Construct, id_: str) -> ec2.PlacementGroup:
    return ec2.PlacementGroup(scope, id_, strategy=ec2.PlacementGroupStrategy.CLUSTER)


def _take_reservation(template: ec2.LaunchTemplate, reservation: Reservation) -> None:
    """Start hosts in reserved capacity: the L2 construct has no property for it."""
    resource = template.node.default_child
    assert isinstance(resource, ec2.CfnLaunchTemplate)
    if reservation.is_block:
        resource.add_property_override(
            "LaunchTemplateData.InstanceMarketOptions", {"MarketType": "capacity-block"}
        )
    resource.add_property_override(
        "LaunchTemplateData.CapacityReservationSpecification",
        {"CapacityReservationTarget": {"CapacityReservationId": reservation.id}},
    )
