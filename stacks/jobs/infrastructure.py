"""Job runner: the state machine, and the function that cleans up.

One execution is one job. However the head ends (its code fails, its host is lost, its deadline
comes, the execution is aborted), the function stops what is left, says why, and writes it down
(``keeper``). Nothing here runs, or costs, while there is no job.
"""

from pathlib import Path
from typing import Final

from aws_cdk import Duration, Stack
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_stepfunctions as stepfunctions
from constructs import Construct

from contract import times
from contract.nodes import (
    ENV_KEEPER,
    ENV_SECURITY_GROUPS,
    ENV_SUBNETS,
    ENV_WORKER_CPUS,
    ENV_WORKER_PROVIDER,
    ENV_WORKER_TASK,
    JOB,
)
from stacks import findings, rights
from stacks.cluster.gpu_cluster import GpuCluster
from stacks.cluster.ray_nodes import RayNodes
from stacks.core_stack import CoreStack
from stacks.jobs.state_machine import job_states
from stacks.lambda_functions import lambda_function, staged
from stacks.settings import Settings

KEEPER: Final = Path(__file__).parent / "keeper"


class JobRunner(Construct):
    """Task definition of a job's head, the state machine around it, and what cleans up."""

    task: ecs.TaskDefinition
    state_machine: stepfunctions.StateMachine
    keeper: lambda_.Function
    sweep: events.Rule
    """What calls the keeper every few minutes."""

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
        # Written out, because heads, the function and the machine need each other.
        self._keeper_name = f"{Stack.of(self).stack_name}-keeper"
        self._keeper_arn = rights.arn(self, "lambda", f"function:{self._keeper_name}")
        self.task = self._head_task()
        name = f"{Stack.of(self).stack_name}-jobs"
        arn = rights.arn(self, "states", f"stateMachine:{name}")
        self.keeper = self._keeper(arn)
        self.state_machine = self._state_machine(name)
        # On destroy, executions and tasks are ended first: a machine is only gone when they are.
        cluster.teardown.stops_jobs(
            machine_arn=arn, keeper_arn=self._keeper_arn, beside=(self.state_machine, self.keeper)
        )
        self.sweep = self._watch(arn)
        # On destroy it goes before tasks are ended: no queued job is admitted any more.
        assert self.keeper.role
        statements = [*rights.of_admission(arn).statements]
        listing = iam.Policy(self, "Admission", roles=[self.keeper.role], statements=statements)
        listing.node.add_dependency(cluster.teardown.stop_tasks)

    def _head_task(self) -> ecs.TaskDefinition:
        cluster, nodes, worker = self._cluster, self._nodes, self._cluster.worker
        role = nodes.task_role(
            self, "Role", what="Head of a job: its workers, its bucket, ECS Exec"
        )
        rights.of_job_head(
            self, cluster=cluster.cluster, worker=nodes.worker.task, keeper_arn=self._keeper_arn
        ).grant(role)
        return nodes.task(
            self,
            "Task",
            command=JOB,
            host=cluster.head,
            role=role,
            trains=self._settings.head_trains,
            environment={
                ENV_KEEPER: self._keeper_name,
                ENV_WORKER_TASK: nodes.worker.task.task_definition_arn,
                ENV_WORKER_PROVIDER: worker.capacity_provider.ref,
                ENV_WORKER_CPUS: str(worker.machine.vcpus),
                ENV_SUBNETS: ",".join(self._core.training_subnets.subnet_ids),
                ENV_SECURITY_GROUPS: cluster.security_group.security_group_id,
            },
        )

    def _keeper(self, state_machine_arn: str) -> lambda_.Function:
        """The function that cleans up."""
        cluster, core = self._cluster, self._core
        with staged(KEEPER / "index.py") as code:
            return lambda_function(
                self,
                "Keeper",
                function_name=self._keeper_name,
                what="Admits jobs, ends what they leave behind, and writes down why they ended",
                rights=rights.of_keeper(
                    self,
                    cluster=cluster.cluster,
                    groups=[cluster.head.name, cluster.worker.name],
                    bucket=core.bucket,
                    state_machine_arn=state_machine_arn,
                ),
                code=lambda_.Code.from_asset(code),
                timeout=Duration.seconds(times.KEEPER_TIMEOUT_S),
                environment={
                    "CLUSTER": cluster.cluster.cluster_name,
                    "BUCKET": core.bucket.bucket_name,
                    "HEAD_FAMILY": self.task.family,
                    "MAX_HEADS": str(self._settings.max_heads),
                    "MAX_WORKERS": str(self._settings.max_workers),
                    "STATE_MACHINE": state_machine_arn,
                    "GROUPS": " ".join(
                        f"{each.name}={each.capacity_provider.ref}"
                        for each in (cluster.head, cluster.worker)
                    ),
                    "FAMILIES": " ".join(
                        each.family
                        for each in (self.task, self._nodes.head.task, self._nodes.worker.task)
                    ),
                },
            )

    def _state_machine(self, name: str) -> stepfunctions.StateMachine:
        role = iam.Role(
            self,
            "ExecutionRole",
            description="Runs the heads of jobs, and what admits them and cleans up after them",
            assumed_by=rights.of_this_account(self, "states.amazonaws.com"),
        )
        rights.of_state_machine(
            self,
            cluster=self._cluster.cluster,
            head=self.task,
            keeper_arn=self.keeper.function_arn,
        ).grant(role)
        states = job_states(
            self,
            core=self._core,
            cluster=self._cluster,
            task=self.task,
            keeper=self.keeper,
            max_seconds=self._settings.max_job_hours * 3600,
        )
        machine = stepfunctions.StateMachine(
            self,
            "StateMachine",
            state_machine_name=name,
            definition_body=stepfunctions.DefinitionBody.from_chainable(states),
            query_language=stepfunctions.QueryLanguage.JSONATA,
            # CDK would add wider rights of its own for the states.
            role=role.without_policy_updates(),
            comment="One execution is one job: a head task, and what cleans up after it",
        )
        machine.node.add_dependency(role)
        findings.accept(machine, findings.STATE_MACHINE)
        return machine

    def _watch(self, state_machine_arn: str) -> events.Rule:
        """Start the function for what the machine cannot do itself: its own end, and time."""
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
        return events.Rule(
            self,
            "Sweep",
            description="Ends tasks of jobs whose execution has ended, and hosts without tasks",
            schedule=events.Schedule.rate(Duration.seconds(times.SWEEP_EVERY_S)),
            targets=[target],
        )
