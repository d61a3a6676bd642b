"""Jobs: a state machine runs a head task, the head its workers; a function tidies up after both.

    Head (ecs:runTask.sync) -> CleanUp (function) -> once more, or the end

One execution is one job. Whatever becomes of the head (its code fails, its host goes, its deadline
comes, somebody aborts the execution), the function stops what is left, says why, and writes it down
(``job_keeper``). Nothing here runs, or costs, while there is no job.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aws_cdk import ArnFormat, Duration, Stack
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_stepfunctions as stepfunctions
from constructs import Construct

from contract import jobs, runs
from contract.nodes import (
    CONTAINER,
    ENV_CAPACITY_WAIT,
    ENV_COMMAND,
    ENV_DEADLINE,
    ENV_IDLE,
    ENV_JOB,
    ENV_MAX_WORKERS,
    ENV_MIN_WORKERS,
    ENV_RUN,
    ENV_SECURITY_GROUPS,
    ENV_SUBNETS,
    ENV_WORKER_CPUS,
    ENV_WORKER_GPUS,
    ENV_WORKER_PROVIDER,
    ENV_WORKER_TASK,
    JOB,
)
from stacks.core_stack import CoreStack
from stacks.findings import accept, wildcard
from stacks.gpu_cluster import GpuCluster, HostGroup
from stacks.log_groups import log_group
from stacks.ray_nodes import RayNodes
from stacks.settings import Settings

KEEPER: Final = Path(__file__).parent / "job_keeper"
SWEEP_EVERY: Final = Duration.minutes(5)
#: Between a job's deadline, which its head keeps itself, and the end of a head that does not.
HEAD_GRACE_S: Final = 120


class JobRunner(Construct):
    """Task definition of a job's head, the state machine around it, and what tidies up."""

    task: ecs.TaskDefinition
    state_machine: stepfunctions.StateMachine
    keeper: lambda_.Function

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
        self._settings, self._core = settings, core
        self._cluster, self._nodes = cluster, nodes
        self.task = self._head_task()
        # Written out, because the function and the machine need each other.
        name = f"{Stack.of(self).stack_name}-jobs"
        arn = Stack.of(self).format_arn(
            service="states",
            resource="stateMachine",
            resource_name=name,
            arn_format=ArnFormat.COLON_RESOURCE_NAME,
        )
        self.keeper = self._keeper(arn)
        self.state_machine = self._state_machine(name)
        # On destroy, tasks are ended first: a machine is only gone when its executions are.
        cluster.teardown.stop_tasks.node.add_dependency(self.state_machine)
        self._watch(arn)

    # --- the head -------------------------------------------------------------------------------
    def _head_task(self) -> ecs.TaskDefinition:
        cluster, nodes, worker = self._cluster, self._nodes, self._cluster.worker
        role = nodes.task_role(
            self, "Role", what="Head of a job: its workers, its bucket, ECS Exec"
        )
        _allow(
            role,
            *_starting(cluster, nodes.worker.task),
            *_ending(cluster, [cluster.worker]),
            iam.PolicyStatement(
                sid="Secrets",
                actions=["secretsmanager:GetSecretValue"],
                resources=[_secrets(self)],
            ),
        )
        accept(
            role,
            {
                wildcard(self): "Listing tasks has no resource; it is limited to this cluster. "
                "Neither have the channels of ECS Exec.",
                wildcard(self, _secrets(self)): "The users' own secrets, by the prefix of names "
                "that are meant for jobs.",
                **_reasons(self, cluster, [cluster.worker]),
            },
        )
        return nodes.task(
            self,
            "Task",
            command=JOB,
            host=cluster.head,
            role=role,
            trains=self._settings.head_trains,
            environment={
                ENV_WORKER_TASK: nodes.worker.task.task_definition_arn,
                ENV_WORKER_PROVIDER: worker.capacity_provider.ref,
                ENV_WORKER_CPUS: str(worker.machine.vcpus),
                ENV_WORKER_GPUS: str(worker.machine.num_gpus),
                ENV_SUBNETS: ",".join(self._core.training_subnets.subnet_ids),
                ENV_SECURITY_GROUPS: cluster.security_group.security_group_id,
            },
        )

    # --- what tidies up -------------------------------------------------------------------------
    def _keeper(self, state_machine_arn: str) -> lambda_.Function:
        cluster, core = self._cluster, self._core
        groups = [cluster.head, cluster.worker]
        logs = log_group(self, "KeeperLogs", settings=self._settings)
        role = iam.Role(
            self,
            "KeeperRole",
            description="Ends what jobs leave behind, and writes down why they ended",
            assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"),
        )
        record = runs.job_record("*", "*")
        bucket = core.export_value(core.bucket.bucket_arn)
        executions = f"{state_machine_arn.replace(':stateMachine:', ':execution:')}:*"
        _allow(
            role,
            *_ending(cluster, groups),
            iam.PolicyStatement(
                sid="Records",
                actions=["s3:PutObject"],
                resources=[core.bucket.arn_for_objects(record)],
            ),
            iam.PolicyStatement(
                sid="Jobs", actions=["states:DescribeExecution"], resources=[executions]
            ),
        )
        logs.grant_write(role)
        accept(
            role,
            {
                wildcard(self): "Listing tasks has no resource; it is limited to this cluster.",
                wildcard(core, f"{bucket}/{record}"): "Runs and jobs are named by their users.",
                wildcard(self, executions): "Executions of the one state machine.",
                **_reasons(self, cluster, groups),
            },
        )
        return lambda_.Function(
            self,
            "Keeper",
            description="Ends what jobs leave behind, and writes down why they ended",
            runtime=lambda_.Runtime.PYTHON_3_14,
            handler="index.handler",
            code=lambda_.Code.from_asset(str(KEEPER), exclude=["__pycache__"]),
            timeout=Duration.minutes(5),
            memory_size=256,
            role=role,
            log_group=logs,
            environment={
                "CLUSTER": cluster.cluster.cluster_name,
                "BUCKET": core.bucket.bucket_name,
                "HEAD_FAMILY": self.task.family,
                "STATE_MACHINE": state_machine_arn,
            },
        )

    # --- the state machine ------------------------------------------------------------------------
    def _state_machine(self, name: str) -> stepfunctions.StateMachine:
        role = iam.Role(
            self,
            "ExecutionRole",
            description="Runs the heads of jobs, and what tidies up after them",
            assumed_by=iam.ServicePrincipal("states.amazonaws.com"),
        )
        cluster = self._cluster
        # Step Functions hears by this rule of its own that a task has ended.
        rule = Stack.of(self).format_arn(
            service="events", resource="rule", resource_name="StepFunctionsGetEventsForECSTaskRule"
        )
        _allow(
            role,
            *_starting(cluster, self.task),
            iam.PolicyStatement(
                sid="EndHead",
                actions=["ecs:DescribeTasks", "ecs:StopTask"],
                resources=[_in_cluster(cluster, "task")],
            ),
            iam.PolicyStatement(
                sid="HearOfTasks",
                actions=["events:DescribeRule", "events:PutRule", "events:PutTargets"],
                resources=[rule],
            ),
            iam.PolicyStatement(
                sid="CleanUp",
                actions=["lambda:InvokeFunction"],
                resources=[self.keeper.function_arn],
            ),
        )
        accept(
            role,
            {
                wildcard(self, _in_cluster(cluster, "task")): "Tasks have random names; they are "
                "this cluster's."
            },
        )
        machine = stepfunctions.StateMachine(
            self,
            "StateMachine",
            state_machine_name=name,
            definition_body=stepfunctions.DefinitionBody.from_string(
                Stack.of(self).to_json_string(self.definition())
            ),
            role=role.without_policy_updates(),
            comment="One execution is one job: a head task, and what tidies up after it",
        )
        machine.node.add_dependency(role)
        accept(
            machine,
            {
                "AwsSolutions-SF1": "An execution has four states and keeps its history for 90 "
                "days; how it ended is written into the bucket.",
                "AwsSolutions-SF2": "One task per execution: there is no path of calls to trace.",
            },
        )
        return machine

    def definition(self) -> dict[str, Any]:
        """The machine in Amazon States Language, with JSONata."""
        # Input: run, command, max_seconds, capacity_wait_s, idle_s, min_workers, max_workers,
        # attempts, environment (name -> value). trainctl.submit writes it.
        told: Mapping[str, str] = {
            ENV_JOB: "$job",
            ENV_RUN: "$spec.run",
            ENV_COMMAND: "$string($spec.command)",
            ENV_DEADLINE: "$string($deadline)",
            ENV_CAPACITY_WAIT: "$string($spec.capacity_wait_s)",
            ENV_IDLE: "$string($spec.idle_s)",
            ENV_MIN_WORKERS: "$string($spec.min_workers)",
            ENV_MAX_WORKERS: "$string($spec.max_workers)",
        }
        own = ", ".join(f"{{'Name': '{name}', 'Value': {value}}}" for name, value in told.items())
        given = "$each($spec.environment, function($v, $k) {{'Name': $k, 'Value': $v}})"
        cluster, subnets = self._cluster, self._core.training_subnets
        head = {
            "Cluster": cluster.cluster.cluster_arn,
            "TaskDefinition": self.task.task_definition_arn,
            "CapacityProviderStrategy": [
                {"CapacityProvider": cluster.head.capacity_provider.ref, "Weight": 1}
            ],
            "NetworkConfiguration": {
                "AwsvpcConfiguration": {
                    "Subnets": subnets.subnet_ids,
                    "SecurityGroups": [cluster.security_group.security_group_id],
                }
            },
            # startedBy is Step Functions' own; the group is how the head's job is known.
            "Group": f"{{% '{jobs.JOB_GROUP}' & $job %}}",
            "EnableExecuteCommand": True,
            "PropagateTags": "TASK_DEFINITION",
            "Overrides": {
                "ContainerOverrides": [
                    {
                        "Name": CONTAINER,
                        "Environment": f"{{% $append([{own}], {given}) %}}",
                    }
                ]
            },
        }
        return {
            "Comment": "A job: its head, and what tidies up after it",
            "QueryLanguage": "JSONata",
            "StartAt": "Begin",
            "States": {
                "Begin": {
                    "Type": "Pass",
                    "Assign": {
                        "job": "{% $states.context.Execution.Name %}",
                        "spec": "{% $states.input %}",
                        "attempt": 1,
                        "began": "{% $toMillis($states.context.Execution.StartTime) / 1000 %}",
                        "deadline": "{% $floor($toMillis($states.context.Execution.StartTime) "
                        "/ 1000) + $states.input.max_seconds %}",
                    },
                    "Next": "Head",
                },
                "Head": {
                    "Type": "Task",
                    "Resource": "arn:aws:states:::ecs:runTask.sync",
                    # The head keeps its deadline itself, so that its code can say goodbye.
                    "TimeoutSeconds": f"{{% $max([{HEAD_GRACE_S}, $ceil($deadline - "
                    f"$millis() / 1000) + {HEAD_GRACE_S}]) %}}",
                    "Arguments": head,
                    "Retry": [
                        {
                            "ErrorEquals": ["ECS.ServerException", "ECS.ThrottlingException"],
                            "IntervalSeconds": 5,
                            "MaxAttempts": 4,
                            "BackoffRate": 2,
                        }
                    ],
                    "Catch": [
                        {
                            "ErrorEquals": ["States.ALL"],
                            "Assign": {
                                "ended": {
                                    "Error": "{% $states.errorOutput.Error %}",
                                    "Cause": "{% $states.errorOutput.Cause %}",
                                }
                            },
                            "Next": "CleanUp",
                        }
                    ],
                    "Assign": {"ended": {"Task": "{% $states.result %}"}},
                    "Next": "CleanUp",
                },
                "CleanUp": {
                    "Type": "Task",
                    "Resource": "arn:aws:states:::lambda:invoke",
                    "Arguments": {
                        "FunctionName": self.keeper.function_arn,
                        "Payload": "{% $merge([$ended, {'Action': 'end', 'Job': $job, "
                        "'Spec': $spec, 'Attempt': $attempt, 'Began': $began, "
                        "'Deadline': $deadline}]) %}",
                    },
                    "Retry": [
                        {
                            "ErrorEquals": ["States.ALL"],
                            "IntervalSeconds": 3,
                            "MaxAttempts": 6,
                            "BackoffRate": 2,
                        }
                    ],
                    "Assign": {"outcome": "{% $states.result.Payload %}"},
                    "Output": "{% $states.result.Payload %}",
                    "Next": "Ended",
                },
                "Ended": {
                    "Type": "Choice",
                    "Choices": [
                        {"Condition": "{% $outcome.again %}", "Next": "Again"},
                        {
                            "Condition": "{% $outcome.status = 'succeeded' %}",
                            "Next": "Succeeded",
                        },
                    ],
                    "Default": "Failed",
                },
                "Again": {
                    "Type": "Pass",
                    "Assign": {"attempt": "{% $attempt + 1 %}"},
                    "Next": "Head",
                },
                "Succeeded": {"Type": "Succeed"},
                "Failed": {
                    "Type": "Fail",
                    "Error": "{% $outcome.status %}",
                    "Cause": "{% $string($outcome) %}",
                },
            },
        }

    def _watch(self, state_machine_arn: str) -> None:
        """The function runs for what the machine cannot do itself: its own end, and time."""
        target = targets.LambdaFunction(self.keeper, retry_attempts=3)
        events.Rule(
            self,
            "Aborted",
            description="Jobs that were aborted or timed out: their tasks are ended",
            event_pattern=events.EventPattern(
                source=["aws.states"],
                detail_type=["Step Functions Execution Status Change"],
                detail={
                    "stateMachineArn": [state_machine_arn],
                    "status": ["ABORTED", "TIMED_OUT"],
                },
            ),
            targets=[target],
        )
        events.Rule(
            self,
            "Sweep",
            description="Tasks of jobs that nobody looks after any more are ended",
            schedule=events.Schedule.rate(SWEEP_EVERY),
            targets=[target],
        )


# --- rights ---------------------------------------------------------------------------------------
def _allow(role: iam.Role, *statements: iam.PolicyStatement) -> None:
    for statement in statements:
        role.add_to_policy(statement)


def _here(cluster: GpuCluster) -> dict[str, Any]:
    return {"ArnEquals": {"ecs:cluster": cluster.cluster.cluster_arn}}


def _starting(cluster: GpuCluster, task: ecs.TaskDefinition) -> list[iam.PolicyStatement]:
    """Starting tasks of one definition in the cluster."""
    return [
        iam.PolicyStatement(
            sid="StartTasks",
            actions=["ecs:RunTask"],
            resources=[task.task_definition_arn],
            conditions=_here(cluster),
        ),
        iam.PolicyStatement(
            sid="TagTasks",
            actions=["ecs:TagResource"],
            resources=[_in_cluster(cluster, "task")],
            conditions={"StringEquals": {"ecs:CreateAction": "RunTask"}},
        ),
        iam.PolicyStatement(
            sid="PassRoles",
            actions=["iam:PassRole"],
            resources=[role.role_arn for role in (task.task_role, task.execution_role) if role],
            conditions={"StringEquals": {"iam:PassedToService": "ecs-tasks.amazonaws.com"}},
        ),
    ]


def _ending(cluster: GpuCluster, groups: list[HostGroup]) -> list[iam.PolicyStatement]:
    """Finding and ending tasks of the cluster, and the hosts of some of its groups."""
    return [
        iam.PolicyStatement(
            sid="FindTasks", actions=["ecs:ListTasks"], resources=["*"], conditions=_here(cluster)
        ),
        iam.PolicyStatement(
            sid="EndTasks",
            actions=["ecs:DescribeTasks", "ecs:StopTask"],
            resources=[_in_cluster(cluster, "task")],
        ),
        iam.PolicyStatement(
            sid="DrainHosts",
            actions=["ecs:DescribeContainerInstances", "ecs:UpdateContainerInstancesState"],
            resources=[_in_cluster(cluster, "container-instance")],
        ),
        iam.PolicyStatement(
            sid="EndHosts",
            actions=["autoscaling:TerminateInstanceInAutoScalingGroup"],
            resources=[_group(cluster, each) for each in groups],
        ),
    ]


def _reasons(scope: Construct, cluster: GpuCluster, groups: list[HostGroup]) -> dict[str, str]:
    """Why the wildcards of ``_ending`` stand."""
    random = (_in_cluster(cluster, "task"), _in_cluster(cluster, "container-instance"))
    return {
        **{
            wildcard(scope, arn): "Tasks and hosts have random names; they are this cluster's."
            for arn in random
        },
        **{
            wildcard(scope, _group(cluster, each)): "A group's ARN holds a random id beside its "
            "name, which is given."
            for each in groups
        },
    }


def _in_cluster(cluster: GpuCluster, resource: str) -> str:
    return Stack.of(cluster).format_arn(
        service="ecs", resource=resource, resource_name=f"{cluster.cluster.cluster_name}/*"
    )


def _group(cluster: GpuCluster, host: HostGroup) -> str:
    return Stack.of(cluster).format_arn(
        service="autoscaling",
        resource="autoScalingGroup",
        resource_name=f"*:autoScalingGroupName/{host.group.auto_scaling_group_name}",
        arn_format=ArnFormat.COLON_RESOURCE_NAME,
    )


def _secrets(scope: Construct) -> str:
    return Stack.of(scope).format_arn(
        service="secretsmanager",
        resource="secret",
        resource_name=f"{jobs.SECRETS_PREFIX}*",
        arn_format=ArnFormat.COLON_RESOURCE_NAME,
    )
