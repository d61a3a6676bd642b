"""Permissions of people in a deployment: a managed policy for each of three roles.

Attach one to a role or a permission set. They are part of CoreStack, so that rebuilding
TrainingStack removes no permission, and they name its resources by prefix.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from aws_cdk import Stack
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3
from constructs import Construct

from contract import runs
from contract.job import SECRETS_PREFIX, USER_ID_TAG, execution_arn
from contract.outputs import OPERATE, READ, SUBMIT
from stacks import findings, rights

#: The id of whoever calls, which GetCallerIdentity tells too.
CALLER: Final = "${aws:userid}"
_WHY: Final = (
    "Wildcards end names of one deployment, whose TrainingStack comes later. Describing hosts, "
    "quotas and roles, and listing the cluster's tasks, has no resource of it."
)


class People(Construct):
    """The three policies."""

    policies: Mapping[str, iam.ManagedPolicy]
    """By the names of their outputs."""

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        core: str,
        training: str,
        bucket: s3.IBucket,
        repositories: Iterable[ecr.Repository],
        notices: str,
    ) -> None:
        """``core`` and ``training``: names of the stacks; ``notices``: ARN of a topic."""
        super().__init__(scope, id_)
        stack, arn = Stack.of(self), partial(rights.arn, self)
        cluster, tasks, services, hosts = (
            arn("ecs", f"{kind}/{training}-*")
            for kind in ("cluster", "task", "service", "container-instance")
        )
        machine = arn("states", f"stateMachine:{training}-jobs")
        jobs = execution_arn(machine, "*")
        secrets = arn("secretsmanager", f"secret:{SECRETS_PREFIX}*")

        # Look at jobs, runs and the deployment; plan and doctor too.
        read = [
            _allow(
                "cloudformation:DescribeStacks",
                on=[arn("cloudformation", f"stack/{name}/*") for name in (core, training)],
            ),
            _allow("states:ListExecutions", on=[machine]),
            _allow("states:DescribeExecution states:GetExecutionHistory", on=[jobs]),
            _allow("ecs:ListTasks", on=["*"], where={"ArnLike": {"ecs:cluster": cluster}}),
            _allow(
                """
                ecs:DescribeContainerInstances ecs:DescribeServices ecs:DescribeTasks
                ecs:ListContainerInstances
                """,
                on=[cluster, tasks, services, hosts],
            ),
            _allow(
                "logs:FilterLogEvents logs:GetLogEvents",
                on=[arn("logs", f"log-group:{training}-*")],
            ),
            _allow("s3:ListBucket", on=[bucket.bucket_arn]),
            _allow("s3:GetObject", on=[bucket.arn_for_objects("*")]),
            _allow("ecr:DescribeImages", on=[each.repository_arn for each in repositories]),
            _allow("secretsmanager:DescribeSecret", on=[secrets]),
            _allow(
                """
                autoscaling:DescribeScalingActivities
                ec2:DescribeCapacityReservations
                ec2:DescribeInstanceTypeOfferings ec2:DescribeInstances
                ec2:DescribeRouteTables ec2:DescribeSubnets ec2:DescribeVpcAttribute
                iam:GetRole servicequotas:GetAWSDefaultServiceQuota
                servicequotas:GetServiceQuota
                """,
                on=["*"],
            ),
        ]
        # Start jobs, and stop one's own: tasks have a tag with their submitter. No policy can tell
        # whose an execution is, but whose a folder is: the keeper looks there.
        own = {"StringEquals": {f"aws:ResourceTag/{USER_ID_TAG}": CALLER}}
        # What trainctl writes, and what it removes: whole runs and data sets.
        removed = (f"{runs.RUNS_PREFIX}/*", "data/*")
        written = (runs.job_code("*", "*"), "data/*", runs.job_stop(CALLER, "*"))
        submit = [
            *read,
            _allow("states:StartExecution", on=[machine]),
            _allow("ecs:ExecuteCommand ecs:StopTask", on=[tasks], where=own),
            _allow(
                "sns:Subscribe", on=[notices], where={"StringEquals": {"sns:Protocol": "email"}}
            ),
            _allow("ecs:ExecuteCommand", on=[cluster]),  # asked for beside the task
            _allow("s3:PutObject", on=[bucket.arn_for_objects(each) for each in written]),
            _allow("s3:DeleteObject", on=[bucket.arn_for_objects(each) for each in removed]),
        ]
        # Stop all jobs, start and stop the standing cluster, tunnels, secrets, teardown.
        made = {"aws:ResourceTag/aws:cloudformation:stack-name": training}
        operate = [
            *submit,
            _allow("states:StopExecution", on=[jobs]),
            _allow("ecs:ExecuteCommand ecs:StopTask", on=[tasks]),
            _allow("ecs:UpdateService", on=[services]),
            _allow("lambda:InvokeFunction", on=[arn("lambda", f"function:{training}-keeper")]),
            _allow(
                "ssm:StartSession",
                on=[tasks, f"arn:{stack.partition}:ssm:*::document/AWS-StartPortForwardingSession"],
            ),
            _allow(
                "secretsmanager:GetSecretValue",
                on=[arn("secretsmanager", "secret:*")],
                where={"StringEquals": made},
            ),
            _allow(
                """
                secretsmanager:CreateSecret secretsmanager:DeleteSecret
                secretsmanager:PutSecretValue
                """,
                on=[secrets],
            ),
            _allow(
                "cloudformation:DeleteStack",
                on=[arn("cloudformation", f"stack/{training}/*")],
            ),
        ]
        self.policies = {
            READ: self._policy("Read", training, read),
            SUBMIT: self._policy("Submit", training, submit),
            OPERATE: self._policy("Operate", training, operate),
        }

    def _policy(
        self, role: str, training: str, statements: list[iam.PolicyStatement]
    ) -> iam.ManagedPolicy:
        # A name is the whole account's, in all regions.
        name = f"{training}-{role}-{Stack.of(self).region}"
        policy = iam.ManagedPolicy(self, role, managed_policy_name=name, statements=statements)
        ends = [each for statement in statements for each in statement.resources if "*" in each]
        findings.accept(policy, {findings.wildcard(policy, each): _WHY for each in ends})
        return policy


def _allow(
    actions: str, on: Iterable[str], where: Mapping[str, Any] | None = None
) -> iam.PolicyStatement:
    return iam.PolicyStatement(actions=actions.split(), resources=[*on], conditions=where)
