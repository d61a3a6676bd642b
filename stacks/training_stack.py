"""TrainingStack: what may be rebuilt every day: the GPU cluster, the Ray nodes, the dashboard.

Deploying it starts no host: everything that costs money per hour is at zero until a job or
``trainctl cluster up`` asks for it.
"""

from typing import Any

import aws_cdk as cdk
from constructs import Construct

from contract import outputs as stack_outputs
from stacks.cluster.gpu_cluster import GpuCluster
from stacks.cluster.ray_nodes import RayNodes
from stacks.core_stack import CoreStack
from stacks.dashboard.dashboard import Dashboard
from stacks.dashboard.task_events import TaskEvents
from stacks.jobs.infrastructure import JobRunner
from stacks.log_groups import retain_logs
from stacks.settings import Settings


class TrainingStack(cdk.Stack):
    """ECS cluster on GPU hosts, Ray's two kinds of node on it, and what watches them."""

    cluster: GpuCluster
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
        self.cluster = GpuCluster(self, "Cluster", settings=settings, core=core)
        self.nodes = RayNodes(self, "Nodes", settings=settings, core=core, cluster=self.cluster)
        self.jobs = JobRunner(
            self, "Jobs", settings=settings, core=core, cluster=self.cluster, nodes=self.nodes
        )
        events = TaskEvents(self, "TaskEvents", settings=settings, cluster=self.cluster.cluster)
        dashboard = Dashboard(
            self,
            "Dashboard",
            name="-".join(
                filter(None, [settings.deployment, f"training-{settings.preset}", self.region])
            ),
            settings=settings,
            cluster=self.cluster,
            jobs=self.jobs,
            failed_tasks=events.failed_tasks,
        )

        warnings = cdk.Annotations.of(self)
        if settings.without_efa:
            warnings.add_warning_v2("ecs-train:without-efa", settings.without_efa)

        outputs = {
            stack_outputs.CLUSTER: self.cluster.cluster.cluster_name,
            stack_outputs.WORKER_PROVIDER: self.cluster.worker.capacity_provider.ref,
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
            stack_outputs.SHAPE: settings.shape,
        }
        if self.cluster.storage:
            outputs[stack_outputs.SHARED] = self.cluster.storage.file_system_id
        for name, value in outputs.items():
            cdk.CfnOutput(self, name, value=value)
        retain_logs(self, days=settings.log_retention_days)
