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
from aws_cdk import aws_s3 as s3
from constructs import Construct

from contract import times
from contract.nodes import pool_hosts, pool_provider
from stacks import findings, rights
from stacks.cluster import efa
from stacks.cluster.host_group import HostGroup, HostKind, Reservation
from stacks.cluster.host_setup import host_setup
from stacks.log_groups import log_group


class GpuCluster(Construct):
    """Cluster, security group, host role, and the groups of hosts that are added."""

    cluster: ecs.Cluster
    shell_logs: logs.LogGroup
    """Input and output of shells of ECS Exec."""
    security_group: ec2.SecurityGroup

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        vpc: ec2.IVpc,
        subnets: ec2.SelectedSubnets,
        repositories: Sequence[ecr.Repository],
        bucket: s3.IBucket,
        metrics: str,
        has_placement: bool,
        has_insights: bool,
        has_sessions: bool,
    ) -> None:
        """Make a cluster without hosts.

        Args:
            subnets: of all hosts.
            repositories: of the images that hosts pull.
            bucket: of the hosts' boot reports.
            metrics: namespace of the hosts' metrics.
            has_placement: True if hosts that train start close to each other.
            has_insights: True if ECS reports its own metrics.
            has_sessions: True if Session Manager reaches hosts.
        """
        super().__init__(scope, id_)
        self._vpc, self._subnets, self._metrics, self._bucket = vpc, subnets, metrics, bucket
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
        self._role = iam.Role(
            self,
            "HostRole",
            description="GPU hosts: join the cluster, pull images, report metrics",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
        )
        rights.of_host(
            cluster=self.cluster,
            repositories=repositories,
            bucket=bucket,
            metrics=metrics,
            has_sessions=has_sessions,
        ).grant(self._role)
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

    def _launch_template(self, kind: HostKind) -> ec2.LaunchTemplate:
        machine = kind.machine
        placement = self._placement if kind.trains and not kind.pool else None
        if kind.pool and not kind.reservation:
            placement = _placement_group(self, f"{kind.name}Placement")
        disk = ec2.BlockDeviceVolume.ebs(
            kind.root_volume_gib or machine.root_volume_gib,
            encrypted=True,
            volume_type=ec2.EbsDeviceVolumeType.GP3,
            iops=machine.root_volume_iops,
            throughput=machine.root_volume_mibps,
            delete_on_termination=True,
        )
        template = ec2.LaunchTemplate(
            self,
            f"{kind.name}Hosts",
            instance_type=ec2.InstanceType(machine.name),
            machine_image=ec2.MachineImage.from_ssm_parameter(kind.ami)
            if kind.ami
            else ecs.EcsOptimizedImage.amazon_linux2023(
                ecs.AmiHardwareType.GPU if machine.num_gpus else ecs.AmiHardwareType.STANDARD
            ),
            role=self._role,
            security_group=self.security_group,
            user_data=host_setup(
                cluster_name=self.cluster.cluster_name,
                metrics=self._metrics,
                node=kind.node,
                image=kind.repository.repository_uri_for_tag(kind.image_tag),
                bucket=self._bucket.bucket_name,
                has_gpus=machine.num_gpus > 0,
                spot=kind.spot,
                efa=machine if kind.uses_efa else None,
                mount_source=kind.mount_source,
            ),
            block_devices=[ec2.BlockDevice(device_name="/dev/xvda", volume=disk)],
            ebs_optimized=True,
            detailed_monitoring=True,
            require_imdsv2=True,
            # Containers see the metadata service only where they must watch for a spot notice.
            http_put_response_hop_limit=2 if kind.spot else 1,
            instance_metadata_tags=False,
            placement_group=placement,
            spot_options=ec2.LaunchTemplateSpotOptions(
                request_type=ec2.SpotRequestType.ONE_TIME,
                interruption_behavior=ec2.SpotInstanceInterruption.TERMINATE,
            )
            if kind.spot
            else None,
        )
        if kind.uses_efa:
            efa.attach_interfaces(template, machine, group=self.security_group)
        if kind.reservation:
            _take_reservation(template, kind.reservation)
        return template

    def add_hosts(self, kind: HostKind) -> HostGroup:
        """Add launch template, group and capacity provider of the hosts of one kind of node."""
        stack, subnet = Stack.of(self).stack_name, kind.subnet
        is_slow = times.is_slow(kind.machine.name)
        warmup_s = times.SLOW_HOST_WARMUP_S if is_slow else times.HOST_WARMUP_S
        group = autoscaling.AutoScalingGroup(
            self,
            f"{kind.name}Group",
            vpc=self._vpc,
            auto_scaling_group_name=pool_hosts(stack, kind.place) if kind.pool else None,
            vpc_subnets=ec2.SubnetSelection(subnets=[subnet] if subnet else self._subnets.subnets),
            launch_template=self._launch_template(kind),
            # No desired capacity: a deploy must not touch the hosts that ECS has started.
            min_capacity=0,
            max_capacity=kind.max_hosts,
            # Or scale-in takes a host in use and leaves an idle one. Protected hosts do not hold up
            # `cdk destroy` (aws-cdk 18179): TerminateHosts force-deletes the groups.
            new_instances_protected_from_scale_in=True,
            group_metrics=[autoscaling.GroupMetrics.all()],
            default_instance_warmup=Duration.seconds(warmup_s),
        )
        findings.accept(group, findings.HOST_GROUP)
        provider = ecs.CfnCapacityProvider(
            self,
            f"{kind.name}Capacity",
            name=pool_provider(stack, kind.place) if kind.pool else None,
            auto_scaling_group_provider=ecs.CfnCapacityProvider.AutoScalingGroupProviderProperty(
                auto_scaling_group_arn=group.auto_scaling_group_name,
                managed_scaling=ecs.CfnCapacityProvider.ManagedScalingProperty(
                    status="ENABLED",
                    target_capacity=100,
                    minimum_scaling_step_size=1,
                    maximum_scaling_step_size=kind.max_step,
                    instance_warmup_period=warmup_s,
                ),
                # ECS lifts the protection of hosts without tasks, and only theirs.
                managed_termination_protection="ENABLED",
                managed_draining="ENABLED",
            ),
        )
        return HostGroup(
            kind=kind,
            group=group,
            capacity_provider=provider,
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
