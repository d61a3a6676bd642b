"""TrainingStack: what may be rebuilt every day: the GPU cluster, the Ray nodes, the dashboard.

Deploying it starts no host: everything that costs money per hour is at zero until a job or
``trainctl cluster up`` asks for it.
"""

from collections.abc import Sequence
from typing import Any

import aws_cdk as cdk
from aws_cdk import Duration
from aws_cdk import aws_ec2 as ec2
from constructs import Construct, IConstruct

from contract import outputs as stack_outputs
from contract.nodes import HEAD, WORKER
from stacks.cluster.gpu_cluster import GpuCluster
from stacks.cluster.host_group import HostGroup, HostKind, Reservation
from stacks.cluster.ray_nodes import RayNodes
from stacks.core_stack import CoreStack
from stacks.dashboard.dashboard import Dashboard
from stacks.dashboard.task_events import TaskEvents
from stacks.jobs.infrastructure import JobRunner, WorkerPool
from stacks.log_groups import retain_logs
from stacks.network import vpc as network
from stacks.settings import Settings
from stacks.storage.shared_file_system import SharedFileSystem
from stacks.teardown.custom_resources import Teardown


class TrainingStack(cdk.Stack):
    """ECS cluster on GPU hosts, Ray's two kinds of node on it, and what watches them."""

    cluster: GpuCluster
    files: SharedFileSystem | None
    heads: HostGroup
    workers: HostGroup
    pools: dict[str, WorkerPool]
    teardown: Teardown
    nodes: RayNodes
    jobs: JobRunner

    def __init__(
        self, scope: Construct, id_: str, *, settings: Settings, core: CoreStack, **kwargs: Any
    ) -> None:
        super().__init__(
            scope,
            id_,
            description="Distributed training: ECS cluster, Ray nodes and dashboard",
            **kwargs,
        )
        subnet_ids = core.training_subnets.subnet_ids
        self.cluster = GpuCluster(
            self,
            "Cluster",
            vpc=core.vpc,
            subnets=core.training_subnets,
            repositories=[*core.repositories.values()],
            bucket=core.bucket,
            metrics=settings.metrics_namespace,
            # Reserved capacity is where it is: EC2 starts no host in a capacity block and a
            # placement group at once (parallelcluster 6311), and none of another reservation in a
            # group that it was not made for.
            has_placement=not settings.capacity_reservation_id,
            has_insights=settings.container_insights,
            has_sessions=settings.session_manager,
        )
        cluster, security_group = self.cluster.cluster, self.cluster.security_group
        self.files = (
            SharedFileSystem(
                self.cluster,
                "SharedStorage",
                file_system=settings.file_system,
                vpc=core.vpc,
                subnet_id=subnet_ids[0],
                bucket=core.bucket,
                hosts=security_group,
                exports=settings.fsx_on_destroy == "export",
            )
            if settings.file_system
            else None
        )
        self.heads = self._hosts(HEAD, settings, core)
        self.workers = self._hosts(WORKER, settings, core)
        subnets, routes = self._subnets_of_pools(settings, core)
        pools = {
            name: self._hosts(WORKER, each, core, pool=name, subnet=subnets.get(name))
            for name, each in settings.in_pools.items()
        }
        for each in pools.values():
            each.group.node.add_dependency(*routes)
        groups = [self.heads, self.workers]
        self.teardown = Teardown(
            self.cluster,
            "Teardown",
            cluster=cluster,
            groups={each.name: each.capacity_provider for each in groups},
            pools={each.kind.place: (each.name, each.capacity_provider) for each in pools.values()},
            associations=self.cluster.associate([*groups, *pools.values()]),
            shared_storage=settings.shared_storage,
        )
        self.nodes = RayNodes(
            self,
            "Nodes",
            cluster_name=cluster.cluster_name,
            heads=self.heads,
            workers=self.workers,
            namespace=core.namespace,
            subnet_ids=subnet_ids,
            security_group_id=security_group.security_group_id,
            repositories=core.repositories,
            family_prefix=settings.deployment,
            bucket=core.bucket,
            data_buckets=[name for name in settings.data_buckets.split(",") if name],
            shell_logs=self.cluster.shell_logs,
        )
        self.pools = {
            name: WorkerPool(
                hosts=hosts,
                task=self.nodes.pool_task(name, hosts),
                subnet_ids=[subnets[name].subnet_id] if name in subnets else subnet_ids,
            )
            for name, hosts in pools.items()
        }
        self.jobs = JobRunner(
            self,
            "Jobs",
            nodes=self.nodes,
            cluster=cluster,
            heads=self.heads,
            workers=self.workers,
            pools=self.pools,
            subnet_ids=subnet_ids,
            security_group_id=security_group.security_group_id,
            bucket=core.bucket,
            notices=core.notices,
            max_jobs_per_user=settings.max_jobs_per_user,
            max_seconds=settings.max_job_hours * 3600,
        )
        events = TaskEvents(
            self,
            "TaskEvents",
            cluster_arn=cluster.cluster_arn,
            metrics=settings.metrics_namespace,
            policy_name=f"{settings.deployment}-TaskEvents" if settings.deployment else None,
        )
        names = [settings.deployment, f"training-{settings.preset}", self.region]
        dashboard = Dashboard(
            self,
            "Dashboard",
            name="-".join(filter(None, names)),
            namespace=settings.metrics_namespace,
            has_gpus=settings.worker.num_gpus > 0,
            has_insights=settings.container_insights,
            cluster_name=cluster.cluster_name,
            groups={
                HEAD: self.heads.name,
                WORKER: self.workers.name,
                **{f"{name} {WORKER}": each.name for name, each in pools.items()},
            },
            failed_tasks=events.failed_tasks,
            failed_jobs=self.jobs.state_machine.metric_failed(period=Duration.minutes(5)),
            keeper_errors=self.jobs.keeper.metric_errors(period=Duration.minutes(5)),
            sweep_rule=self.jobs.sweep.rule_name,
            alarm_email=settings.alarm_email,
        )
        self._order_deletion(routes)

        in_groups = (settings, *settings.in_pools.values())
        for warning in filter(None, dict.fromkeys(each.without_efa for each in in_groups)):
            cdk.Annotations.of(self).add_warning_v2("ecs-train:without-efa", warning)

        outputs = {
            stack_outputs.CLUSTER: cluster.cluster_name,
            stack_outputs.WORKER_PROVIDER: self.workers.capacity_provider.ref,
            stack_outputs.HEAD_TASK: self.nodes.head.task.task_definition_arn,
            stack_outputs.WORKER_TASK: self.nodes.worker.task.task_definition_arn,
            stack_outputs.JOBS: self.jobs.state_machine.state_machine_arn,
            stack_outputs.KEEPER: self.jobs.keeper.function_name,
            stack_outputs.HEAD_SERVICE: self.nodes.head.service.attr_name,
            stack_outputs.WORKER_SERVICE: self.nodes.worker.service.attr_name,
            stack_outputs.LOG_GROUP: self.nodes.log_group.log_group_name,
            stack_outputs.TASK_EVENTS: events.log_group.log_group_name,
            stack_outputs.DASHBOARD: dashboard.dashboard.dashboard_name,
            stack_outputs.RAY_TOKEN: self.nodes.token.secret_arn,
            stack_outputs.SHAPE: settings.shape.to_json(),
        }
        if self.files:
            outputs[stack_outputs.SHARED] = self.files.file_system_id
        for name, value in outputs.items():
            cdk.CfnOutput(self, name, value=value)
        retain_logs(self, days=settings.log_retention_days)

    def _subnets_of_pools(
        self, settings: Settings, core: CoreStack
    ) -> tuple[dict[str, ec2.ISubnet], list[IConstruct]]:
        """Subnets of the pools that have others, by the pools' names, and their routes."""
        found: dict[tuple[str, str], ec2.ISubnet] = {}
        routes: list[IConstruct] = []
        for pool in settings.in_pools.values():
            zone, subnet = where = pool.availability_zone, pool.subnet_id
            if where == (settings.availability_zone, settings.subnet_id) or where in found:
                continue
            if subnet:
                found[where] = network.existing_subnet(self, subnet, subnet_id=subnet, zone=zone)
            else:
                found[where], route = network.add_subnet(
                    self, core.vpc, zone=zone, cidr=settings.pool_cidr(zone)
                )
                routes.append(route)
        return {
            name: found[where]
            for name, pool in settings.in_pools.items()
            if (where := (pool.availability_zone, pool.subnet_id)) in found
        }, routes

    def _hosts(
        self,
        node: str,
        settings: Settings,
        core: CoreStack,
        *,
        pool: str = "",
        subnet: ec2.ISubnet | None = None,
    ) -> HostGroup:
        """The hosts of one kind of node, or of a pool of workers."""
        is_worker = node == WORKER
        trains = is_worker or settings.head_trains
        # A head that trains is a worker too, so it runs the worker's image.
        repository = core.repositories[WORKER if trains else node]
        reservation = Reservation(
            id=settings.capacity_reservation_id,
            is_block=settings.capacity_reservation_type == "block",
        )
        kind = HostKind(
            node=node,
            machine=settings.worker if is_worker else settings.head,
            repository=repository,
            image_tag=settings.image_tag,
            max_hosts=settings.max_workers if is_worker else settings.max_heads,
            max_step=settings.max_workers if is_worker else 1,
            trains=trains,
            uses_efa=settings.uses_efa and trains,
            root_volume_gib=settings.root_volume_gib,
            ami=settings.worker_ami if trains else "",
            spot=settings.spot and is_worker,
            reservation=reservation if is_worker and reservation.id else None,
            mount_source=self.files.mount_source if self.files else "",
            pool=pool,
            subnet=subnet,
        )
        return self.cluster.add_hosts(kind)

    def _order_deletion(self, routes: Sequence[IConstruct]) -> None:
        """Wire ``cdk destroy``, in the order of ``stacks.teardown``."""
        teardown, nodes, jobs = self.teardown, self.nodes, self.jobs
        security_group = self.cluster.security_group
        tasks = [("", each) for each in (nodes.head.task, nodes.worker.task, jobs.task)]
        of_pools = [(each.hosts.kind.place, each.task) for each in self.pools.values()]
        for pool, task in (*tasks, *of_pools):
            teardown.stops(task, dependencies=[security_group, *routes], pool=pool)
        # Executions and tasks are ended first: a machine is only deleted after them.
        teardown.stops_jobs(
            machine_arn=jobs.state_machine_arn,
            keeper_arn=jobs.keeper_arn,
            dependencies=(jobs.state_machine, jobs.keeper),
        )
        # Cloud Map deletes no name of a task that is still stopping, though its service is gone
        # (terraform-provider-aws 4853).
        teardown.stop_tasks.node.add_dependency(nodes.name)
        # Deleted before tasks are ended: a capacity provider cannot go while a service names it
        # (aws-cdk 15366), a service would replace the tasks, and a queued job would be admitted.
        for resource in (nodes.head.service, nodes.worker.service, jobs.admission):
            resource.node.add_dependency(teardown.stop_tasks)
        if self.files and self.files.export:
            # Nothing writes when the last files are exported.
            teardown.hosts.node.add_dependency(self.files.export)
            # Until then hosts may reach it: the rules between them are below this group.
            teardown.hosts.node.add_dependency(security_group)
