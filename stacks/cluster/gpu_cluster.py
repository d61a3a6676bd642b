"""The ECS cluster and its hosts: two groups of EC2 instances that start at zero.

One group holds heads, one holds workers, each behind a capacity provider that starts a host when
a task waits for one. How a host sets itself up is in ``host_setup``; how a stack with running
hosts goes away is in ``teardown``.
"""

from dataclasses import dataclass

from aws_cdk import Duration
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from constructs import Construct

from contract import nodes, times
from contract.instance_types import InstanceType
from stacks import findings, rights
from stacks.cluster import efa
from stacks.cluster.host_setup import host_setup
from stacks.core_stack import CoreStack
from stacks.log_groups import log_group
from stacks.settings import Settings
from stacks.storage.shared_file_system import SharedStorage
from stacks.teardown.custom_resources import Teardown


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGroup:
    """The hosts of one kind of node, and the capacity provider that starts them."""

    machine: InstanceType
    group: autoscaling.AutoScalingGroup
    capacity_provider: ecs.CfnCapacityProvider

    @property
    def name(self) -> str:
        """Of the group."""
        return self.group.auto_scaling_group_name


class GpuCluster(Construct):
    """Cluster, placement group, security group, host role, and the two groups of hosts."""

    cluster: ecs.Cluster
    shell_logs: logs.LogGroup
    """What was typed and printed in shells of ECS Exec."""
    security_group: ec2.SecurityGroup
    head: HostGroup
    worker: HostGroup
    storage: SharedStorage | None
    teardown: Teardown

    def __init__(self, scope: Construct, id_: str, *, settings: Settings, core: CoreStack) -> None:
        super().__init__(scope, id_)
        self.shell_logs = log_group(self, "ShellLogs")
        self.cluster = ecs.Cluster(
            self,
            "Cluster",
            vpc=core.vpc,
            container_insights_v2=ecs.ContainerInsights.ENABLED,
            execute_command_configuration=ecs.ExecuteCommandConfiguration(
                logging=ecs.ExecuteCommandLogging.OVERRIDE,
                log_configuration=ecs.ExecuteCommandLogConfiguration(
                    cloud_watch_log_group=self.shell_logs
                ),
            ),
        )
        self.security_group = self._security_group(core)
        self.storage = (
            SharedStorage(
                self, "SharedStorage", settings=settings, core=core, hosts=self.security_group
            )
            if settings.file_system
            else None
        )
        role = self._host_role(core, settings.metrics_namespace)
        # Hosts close together: gradients take the shortest way. Reserved capacity is where it is:
        # EC2 starts no host in a capacity block and a placement group at once (parallelcluster
        # 6311), and none of another reservation in a group that it was not made for.
        placement = (
            None
            if settings.capacity_reservation_id
            else ec2.PlacementGroup(self, "Placement", strategy=ec2.PlacementGroupStrategy.CLUSTER)
        )
        self.head = self._hosts(
            nodes.HEAD, settings, core, role, placement if settings.head_trains else None
        )
        self.worker = self._hosts(nodes.WORKER, settings, core, role, placement)
        providers = [each.capacity_provider for each in (self.head, self.worker)]
        associations = ecs.CfnClusterCapacityProviderAssociations(
            self,
            "CapacityProviders",
            cluster=self.cluster.cluster_name,
            capacity_providers=[each.ref for each in providers],
            # None by default: the caller of RunTask names the hosts' capacity provider.
            default_capacity_provider_strategy=[],
        )
        self.teardown = Teardown(
            self,
            "Teardown",
            settings=settings,
            cluster=self.cluster,
            groups=[self.head.group, self.worker.group],
            capacity_providers=providers,
            associations=associations,
        )
        if self.storage and self.storage.export:
            # Nothing writes any more when the last files are exported.
            self.teardown.hosts.node.add_dependency(self.storage.export)
            # Until then hosts may reach it: the rules between them are below this group.
            self.teardown.hosts.node.add_dependency(self.security_group)

    def _security_group(self, core: CoreStack) -> ec2.SecurityGroup:
        group = ec2.SecurityGroup(
            self,
            "SecurityGroup",
            vpc=core.vpc,
            description="Ray nodes: everything among themselves, HTTPS to the outside",
            # True would drop the rule to itself, which EFA needs beside any other (aws-cdk 38558).
            allow_all_outbound=False,
        )
        # Ray, NCCL and Gloo use random ports in both directions.
        group.add_ingress_rule(group, ec2.Port.all_traffic(), "Among the nodes")
        group.add_egress_rule(group, ec2.Port.all_traffic(), "Among the nodes")
        group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.HTTPS, "AWS and data by HTTPS")
        return group

    def _host_role(self, core: CoreStack, metrics: str) -> iam.Role:
        """What the host itself may do: join this cluster, pull the two images, report metrics."""
        role = iam.Role(
            self,
            "HostRole",
            description="GPU hosts: join the cluster, pull images, report metrics",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
        )
        repositories = [*core.repositories.values()]
        rights.of_host(cluster=self.cluster, repositories=repositories, metrics=metrics).grant(role)
        return role

    def _hosts(
        self,
        node: str,
        settings: Settings,
        core: CoreStack,
        role: iam.Role,
        placement: ec2.PlacementGroup | None,
    ) -> HostGroup:
        """Launch template, group and capacity provider of the hosts of one kind of node."""
        is_worker = node == nodes.WORKER
        machine = settings.worker if is_worker else settings.head
        spot = settings.spot and is_worker
        uses_efa = settings.uses_efa and (is_worker or settings.head_trains)
        name = node.capitalize()
        image = core.repositories[nodes.WORKER if settings.head_trains else node]
        template = ec2.LaunchTemplate(
            self,
            f"{name}Hosts",
            instance_type=ec2.InstanceType(machine.name),
            machine_image=ec2.MachineImage.from_ssm_parameter(settings.worker_ami)
            if settings.worker_ami and (is_worker or settings.head_trains)
            else ecs.EcsOptimizedImage.amazon_linux2023(
                ecs.AmiHardwareType.GPU if machine.num_gpus else ecs.AmiHardwareType.STANDARD
            ),
            role=role,
            security_group=self.security_group,
            user_data=host_setup(
                cluster_name=self.cluster.cluster_name,
                metrics=settings.metrics_namespace,
                node=node,
                image=image.repository_uri_for_tag(settings.image_tag),
                has_gpus=machine.num_gpus > 0,
                spot=spot,
                efa=machine if uses_efa else None,
                mount=self.storage.mount if self.storage else None,
            ),
            block_devices=[
                ec2.BlockDevice(
                    device_name="/dev/xvda",
                    volume=ec2.BlockDeviceVolume.ebs(
                        settings.root_volume_gib or machine.root_volume_gib,
                        encrypted=True,
                        volume_type=ec2.EbsDeviceVolumeType.GP3,
                        iops=machine.root_volume_iops,
                        throughput=machine.root_volume_mibps,
                        delete_on_termination=True,
                    ),
                )
            ],
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
        if is_worker and settings.capacity_reservation_id:
            _take_reservation(template, settings)

        is_slow = times.is_slow(machine.name)
        warmup_s = times.SLOW_HOST_WARMUP_S if is_slow else times.HOST_WARMUP_S
        group = autoscaling.AutoScalingGroup(
            self,
            f"{name}Group",
            vpc=core.vpc,
            vpc_subnets=ec2.SubnetSelection(subnets=core.training_subnets.subnets),
            launch_template=template,
            # No desired capacity: a deploy must not touch the hosts that ECS has started.
            min_capacity=0,
            max_capacity=settings.max_workers if is_worker else settings.max_heads,
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
            auto_scaling_group_provider=ecs.CfnCapacityProvider.AutoScalingGroupProviderProperty(
                auto_scaling_group_arn=group.auto_scaling_group_name,
                managed_scaling=ecs.CfnCapacityProvider.ManagedScalingProperty(
                    status="ENABLED",
                    target_capacity=100,
                    minimum_scaling_step_size=1,
                    maximum_scaling_step_size=settings.max_workers if is_worker else 1,
                    instance_warmup_period=warmup_s,
                ),
                # ECS lifts the protection of hosts without tasks, and only theirs.
                managed_termination_protection="ENABLED",
                managed_draining="ENABLED",
            ),
        )
        return HostGroup(machine=machine, group=group, capacity_provider=provider)


def _take_reservation(template: ec2.LaunchTemplate, settings: Settings) -> None:
    """Start hosts in reserved capacity: the L2 construct has no property for it."""
    resource = template.node.default_child
    assert isinstance(resource, ec2.CfnLaunchTemplate)
    if settings.capacity_reservation_type == "block":
        resource.add_property_override(
            "LaunchTemplateData.InstanceMarketOptions", {"MarketType": "capacity-block"}
        )
    resource.add_property_override(
        "LaunchTemplateData.CapacityReservationSpecification",
        {"CapacityReservationTarget": {"CapacityReservationId": settings.capacity_reservation_id}},
    )
