"""Job runner: the state machine, and the function that cleans up.

One execution is one job. However the head ends (its code fails, its host is lost, its deadline
comes, the execution is aborted), the function stops what is left, says why, and writes it down
(``keeper``). Nothing here runs, or costs, while there is no job.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aws_cdk import Duration, Stack
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_sns as sns
from aws_cdk import aws_stepfunctions as stepfunctions
from constructs import Construct

from contract import times
from contract.nodes import (
    ENV_KEEPER,
    ENV_POOLS,
    ENV_SECURITY_GROUPS,
    ENV_SUBNETS,
    ENV_WORKER_CPUS,
    ENV_WORKER_GPUS,
    ENV_WORKER_PROVIDER,
    ENV_WORKER_TASK,
    JOB,
)
from stacks import findings, rights
from stacks.cluster.host_group import HostGroup
from stacks.cluster.ray_nodes import RayNodes
from stacks.jobs.state_machine import HeadTask, job_states
from stacks.lambda_functions import lambda_function, staged

KEEPER: Final = Path(__file__).parent / "keeper"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPool:
    """Workers of one kind: the deployment's own, or others."""

    hosts: HostGroup
    task: ecs.TaskDefinition
    subnet_ids: Sequence[str]

    @property
    def variables(self) -> dict[str, str]:
        """Variables by which a job's head starts these workers."""
        machine = self.hosts.kind.machine
        return {
            ENV_WORKER_TASK: self.task.task_definition_arn,
            ENV_WORKER_PROVIDER: self.hosts.capacity_provider.ref,
            ENV_WORKER_CPUS: str(machine.vcpus),
            ENV_SUBNETS: ",".join(self.subnet_ids),
            ENV_WORKER_GPUS: str(machine.num_gpus),
        }


class JobRunner(Construct):
    """Task definition of a job's head, the state machine around it, and what cleans up."""

    task: ecs.TaskDefinition
    state_machine: stepfunctions.StateMachine
    state_machine_arn: str
    """Written out, as the keeper's: heads, the function and the machine need each other."""
    keeper: lambda_.Function
    keeper_arn: str
    sweep: events.Rule
    """Rule that invokes the keeper every few minutes."""
    admission: iam.Policy
    """The keeper's right by which jobs start."""

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        nodes: RayNodes,
        cluster: ecs.Cluster,
        heads: HostGroup,
        workers: HostGroup,
        pools: Mapping[str, WorkerPool],
        subnet_ids: Sequence[str],
        security_group_id: str,
        bucket: s3.IBucket,
        notices: sns.ITopic,
        max_jobs_per_user: int,
        max_seconds: int,
    ) -> None:
        """Make the runner.

        Args:
            nodes: makes the task of a job's head, and has that of its workers.
            pools: more workers, by name.
            max_seconds: longest time to the deadline of a job.
        """
        super().__init__(scope, id_)
        stack_name = Stack.of(self).stack_name
        keeper_name, machine_name = f"{stack_name}-keeper", f"{stack_name}-jobs"
        self.keeper_arn = rights.arn(self, "lambda", f"function:{keeper_name}")
        self.state_machine_arn = rights.arn(self, "states", f"stateMachine:{machine_name}")

        role = nodes.task_role(
            self,
            "Role",
            what="Head of a job: its workers, its bucket, ECS Exec",
            is_job_head=True,
        )
        rights.of_job_head(
            self,
            cluster=cluster,
            worker=nodes.worker.task,
            keeper_arn=self.keeper_arn,
            pools=pools,
        ).grant(role)
        own = WorkerPool(hosts=workers, task=nodes.worker.task, subnet_ids=subnet_ids)
        variables = {name: pool.variables for name, pool in pools.items()}
        of_pools = {ENV_POOLS: Stack.of(self).to_json_string(variables)} if pools else {}
        self.task = nodes.task(
            self,
            "Task",
            command=JOB,
            hosts=heads,
            role=role,
            environment={
                ENV_KEEPER: keeper_name,
                **own.variables,
                **of_pools,
                ENV_SECURITY_GROUPS: security_group_id,
            },
        )

        tasks = [self.task, nodes.head.task, nodes.worker.task]
        families = [each.family for each in tasks]  # the keeper knows those of pools
        most = {name: pool.hosts.kind.max_hosts for name, pool in pools.items()}
        places = [f"{name}={pool.hosts.kind.place}" for name, pool in pools.items()]
        keeper_pools = {
            "STACK": stack_name,
            "POOLS": json.dumps(most),
            "PLACES": " ".join(places),
        }
        providers = {each.name: each.capacity_provider.ref for each in (heads, workers)}
        with staged(KEEPER / "index.py") as code:
            self.keeper = lambda_function(
                self,
                "Keeper",
                function_name=keeper_name,
                what="Admits jobs, ends what they leave behind, and writes down why they ended",
                rights=rights.of_keeper(
                    self,
                    cluster=cluster,
                    groups=[*providers, *rights.pool_groups(self, pools)],
                    bucket=bucket,
                    state_machine_arn=self.state_machine_arn,
                    notices=notices,
                    tasks=[self.task, nodes.worker.task],
                    pools=pools,
                ),
                code=lambda_.Code.from_asset(code),
                timeout=Duration.seconds(times.KEEPER_TIMEOUT_S),
                environment={
                    "CLUSTER": cluster.cluster_name,
                    "BUCKET": bucket.bucket_name,
                    "HEAD_FAMILY": self.task.family,
                    "MAX_HEADS": str(heads.kind.max_hosts),
                    "MAX_WORKERS": str(workers.kind.max_hosts),
                    "MAX_JOBS_PER_USER": str(max_jobs_per_user),
                    "STATE_MACHINE": self.state_machine_arn,
                    "TOPIC": notices.topic_arn,
                    "GROUPS": " ".join(f"{name}={ref}" for name, ref in providers.items()),
                    "FAMILIES": " ".join(families),
                    "SECURITY_GROUP": security_group_id,
                    **(keeper_pools if pools else {}),
                },
            )

        states = job_states(
            self,
            head=HeadTask(
                cluster_arn=cluster.cluster_arn,
                definition_arn=self.task.task_definition_arn,
                capacity_provider=heads.capacity_provider.ref,
                subnet_ids=subnet_ids,
                security_group_id=security_group_id,
            ),
            keeper=self.keeper,
            max_seconds=max_seconds,
        )
        self.state_machine = self._state_machine(machine_name, states, cluster)
        self.sweep = self._watch(stack_name if pools else "")
        assert self.keeper.role
        statements = [*rights.of_admission(self.state_machine_arn).statements]
        self.admission = iam.Policy(
            self, "Admission", roles=[self.keeper.role], statements=statements
        )

    def _state_machine(
        self, name: str, states: stepfunctions.IChainable, cluster: ecs.Cluster
    ) -> stepfunctions.StateMachine:
        role = iam.Role(
            self,
            "ExecutionRole",
            description="Runs the heads of jobs, and what admits them and cleans up after them",
            assumed_by=rights.of_this_account(self, "states.amazonaws.com"),
        )
        rights.of_state_machine(
            self, cluster=cluster, head=self.task, keeper_arn=self.keeper.function_arn
        ).grant(role)
        machine = stepfunctions.StateMachine(
            self,
            "StateMachine",
            state_machine_name=name,
            definition_body=stepfunctions.DefinitionBody.from_chainable(states),
            query_language=stepfunctions.QueryLanguage.JSONATA,
            # CDK would add its own, wider rights for the states.
            role=role.without_policy_updates(),
            comment="One execution is one job: a head task, and what cleans up after it",
        )
        machine.node.add_dependency(role)
        findings.accept(machine, findings.STATE_MACHINE)
        return machine

    def _watch(self, groups: str) -> events.Rule:
        """Start the function for what the machine cannot do itself: its own end, and time.

        Args:
            groups: beginning of the names of groups whose failed launches are of interest; empty:
                none are.
        """
        target = targets.LambdaFunction(self.keeper, retry_attempts=3)
        if groups:
            events.Rule(
                self,
                "Refused",
                description="EC2 has refused a host: the job that waits for it takes another pool",
                event_pattern=events.EventPattern(
                    source=["aws.autoscaling"],
                    detail_type=["EC2 Instance Launch Unsuccessful"],
                    detail={"AutoScalingGroupName": [{"prefix": f"{groups}-"}]},
                ),
                targets=[target],
            )
        events.Rule(
            self,
            "Aborted",
            description="Jobs that were aborted or timed out: their tasks are ended",
            event_pattern=events.EventPattern(
                source=["aws.states"],
                detail_type=["Step Functions Execution Status Change"],
                detail={
                    "stateMachineArn": [self.state_machine_arn],
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
