"""The head of a job: a task that starts, and ends, worker tasks of its own.

It differs from the standing cluster's head in what it runs and in what it may do. Only this one can
start anything, and only tasks of the worker's definition, in this cluster.
"""

from aws_cdk import ArnFormat, Stack
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from constructs import Construct

from stacks.core_stack import CoreStack
from stacks.findings import accept, wildcard
from stacks.gpu_cluster import GpuCluster
from stacks.ray_nodes import RayNodes
from stacks.settings import Settings
from training import contract


class JobRunner(Construct):
    """Task definition and role of a job's head."""

    task: ecs.TaskDefinition

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        settings: Settings,
        core: CoreStack,
        cluster: GpuCluster,
        nodes: RayNodes,
    ) -> None:
        super().__init__(scope, id_)
        role = nodes.task_role(
            self, "Role", what="Head of a job: its workers, its bucket, ECS Exec"
        )
        worker = cluster.worker
        for statement in _statements(cluster, nodes):
            role.add_to_policy(statement)
        accept(
            role,
            {
                wildcard(self): "Listing tasks has no resource; it is limited to this cluster. "
                "Neither have the channels of ECS Exec.",
                **{
                    wildcard(self, arn): "Tasks and hosts have random names; they are this "
                    "cluster's."
                    for arn in (_in_cluster(cluster, "task"), _hosts(cluster))
                },
                wildcard(self, _group(cluster)): "A group's ARN holds a random id beside its name, "
                "which is given.",
            },
        )
        self.task = nodes.task(
            self,
            "Task",
            command=contract.JOB,
            host=cluster.head,
            role=role,
            trains=settings.head_trains,
            environment={
                contract.ENV_WORKER_TASK: nodes.worker.task.task_definition_arn,
                contract.ENV_WORKER_PROVIDER: worker.capacity_provider.ref,
                contract.ENV_WORKER_CPUS: str(worker.machine.vcpus),
                contract.ENV_WORKER_GPUS: str(worker.machine.num_gpus),
                contract.ENV_SUBNETS: ",".join(core.training_subnets.subnet_ids),
                contract.ENV_SECURITY_GROUPS: cluster.security_group.security_group_id,
            },
        )


def _statements(cluster: GpuCluster, nodes: RayNodes) -> list[iam.PolicyStatement]:
    here = {"ArnEquals": {"ecs:cluster": cluster.cluster.cluster_arn}}
    worker = nodes.worker.task
    return [
        iam.PolicyStatement(
            sid="StartWorkers",
            actions=["ecs:RunTask"],
            resources=[worker.task_definition_arn],
            conditions=here,
        ),
        iam.PolicyStatement(
            sid="TagWorkers",
            actions=["ecs:TagResource"],
            resources=[_in_cluster(cluster, "task")],
            conditions={"StringEquals": {"ecs:CreateAction": "RunTask"}},
        ),
        iam.PolicyStatement(
            sid="FindWorkers", actions=["ecs:ListTasks"], resources=["*"], conditions=here
        ),
        iam.PolicyStatement(
            sid="EndWorkers",
            actions=["ecs:DescribeTasks", "ecs:StopTask"],
            resources=[_in_cluster(cluster, "task")],
        ),
        iam.PolicyStatement(
            sid="DrainHosts",
            actions=["ecs:DescribeContainerInstances", "ecs:UpdateContainerInstancesState"],
            resources=[_hosts(cluster)],
        ),
        iam.PolicyStatement(
            sid="EndHosts",
            actions=["autoscaling:TerminateInstanceInAutoScalingGroup"],
            resources=[_group(cluster)],
        ),
        iam.PolicyStatement(
            sid="WorkersRoles",
            actions=["iam:PassRole"],
            resources=[role.role_arn for role in (worker.task_role, worker.execution_role) if role],
            conditions={"StringEquals": {"iam:PassedToService": "ecs-tasks.amazonaws.com"}},
        ),
    ]


def _in_cluster(cluster: GpuCluster, resource: str) -> str:
    return Stack.of(cluster).format_arn(
        service="ecs", resource=resource, resource_name=f"{cluster.cluster.cluster_name}/*"
    )


def _hosts(cluster: GpuCluster) -> str:
    return _in_cluster(cluster, "container-instance")


def _group(cluster: GpuCluster) -> str:
    return Stack.of(cluster).format_arn(
        service="autoscaling",
        resource="autoScalingGroup",
        resource_name=f"*:autoScalingGroupName/{cluster.worker.group.auto_scaling_group_name}",
        arn_format=ArnFormat.COLON_RESOURCE_NAME,
    )
