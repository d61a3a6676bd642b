"""Permissions of each role, and why the rule checkers' findings about them are accepted.

One function per role, each built from a few sets of rights that roles share. A right that no
function here gives is one that nothing in the deployment has, except what CDK adds for its own
custom resources (``lambda_functions``) and for pulling images and reading the token.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from aws_cdk import Stack
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_sns as sns
from constructs import IConstruct

from contract import nodes, runs
from contract.job import JOB_TAG, NOTIFY_SECRETS, SECRETS_PREFIX, execution_arn
from stacks.findings import accept, wildcard


@dataclass(frozen=True, kw_only=True, slots=True)
class Rights:
    """Statements of a policy, and the reasons for the wildcards in them."""

    statements: tuple[iam.PolicyStatement, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    """ARN with a wildcard, or ``*`` -> why it stands."""

    def __add__(self, other: Self) -> "Rights":
        return Rights(
            statements=(*self.statements, *other.statements),
            reasons={**self.reasons, **other.reasons},
        )

    def grant(self, role: iam.Role) -> None:
        """Give them to a role, and accept what the checkers find."""
        for statement in self.statements:
            role.add_to_policy(statement)
        accept(role, {wildcard(role, arn): reason for arn, reason in self.reasons.items()})


def allow(
    sid: str,
    *actions: str,
    on: Sequence[str],
    where: Mapping[str, Any] | None = None,
    why: str = "",
) -> Rights:
    """A statement that allows actions on resources, under conditions.

    Args:
        why: the reason for the wildcards in ``on``, where no other statement gives it.
    """
    return Rights(
        statements=(
            iam.PolicyStatement(sid=sid, actions=[*actions], resources=[*on], conditions=where),
        ),
        reasons=dict.fromkeys(on, why) if why else {},
    )


def arn(scope: IConstruct, service: str, resource: str) -> str:
    """ARN of something in the stack's account and region."""
    stack = Stack.of(scope)
    return f"arn:{stack.partition}:{service}:{stack.region}:{stack.account}:{resource}"


def of_this_account(scope: IConstruct, service: str) -> iam.ServicePrincipal:
    """A service, where it acts for this account.

    Only for services that tell for whom they act: ECS tasks, Step Functions, flow logs and alarms.
    EC2 and Lambda do not when they assume a role, and take none that another account passes.
    """
    account = {"aws:SourceAccount": Stack.of(scope).account}
    return iam.ServicePrincipal(service, conditions={"StringEquals": account})


def _arn_as_imported(bucket: s3.IBucket) -> str:
    """ARN of CoreStack's bucket as the template of TrainingStack has it."""
    is_own = isinstance(bucket, s3.Bucket)
    return Stack.of(bucket).export_value(bucket.bucket_arn) if is_own else bucket.bucket_arn


# --- roles ----------------------------------------------------------------------------------------
def of_host(
    *,
    cluster: ecs.Cluster,
    repositories: Sequence[ecr.Repository],
    bucket: s3.IBucket,
    metrics: str,
    has_sessions: bool,
) -> Rights:
    """A host itself: join this cluster, pull the two images, report metrics and how it started; be
    reached by Session Manager."""
    reports = _arn_as_imported(bucket) + f"/{runs.HOSTS_PREFIX}/*"
    # "Add Session Manager permissions to an existing IAM role" (guide of Systems Manager).
    sessions = allow(
        "TakeSessions",
        "ssm:UpdateInstanceInformation",
        "ssmmessages:CreateControlChannel",
        "ssmmessages:CreateDataChannel",
        "ssmmessages:OpenControlChannel",
        "ssmmessages:OpenDataChannel",
        on=["*"],
    )
    return (
        allow(
            "ReportBoots",
            "s3:PutObject",
            on=[bucket.arn_for_objects(f"{runs.HOSTS_PREFIX}/*")],
        )
        + (sessions if has_sessions else Rights())
        + Rights(reasons={reports: "A host's own id is not known before it starts."})
        + allow(
            "JoinCluster",
            "ecs:DeregisterContainerInstance",
            "ecs:RegisterContainerInstance",
            "ecs:SubmitAttachmentStateChanges",
            "ecs:SubmitContainerStateChange",
            "ecs:SubmitTaskStateChange",
            on=[cluster.cluster_arn],
        )
        + allow(
            "TakeOrders",
            "ecs:Poll",
            "ecs:StartTelemetrySession",
            "ecs:UpdateContainerInstancesState",
            on=[in_cluster(cluster, "container-instance")],
            where=_only(cluster),
            why="A host's own id is not known before it joins; the condition limits the statement "
            "to this cluster.",
        )
        + allow("FindTheControlPlane", "ecs:DiscoverPollEndpoint", on=["*"])
        + allow(
            "PullImages",
            "ecr:BatchCheckLayerAvailability",
            "ecr:BatchGetImage",
            "ecr:GetDownloadUrlForLayer",
            on=[each.repository_arn for each in repositories],
        )
        + allow("LogInToPull", "ecr:GetAuthorizationToken", on=["*"])
        + allow(
            "ReportMetrics",
            "cloudwatch:PutMetricData",
            on=["*"],
            where={"StringEquals": {"cloudwatch:namespace": metrics}},
            why="Finding the control plane, logging in to ECR, reporting metrics and taking "
            "sessions have no resource; metrics are limited to one namespace.",
        )
    )


#: ECS itself, which pulls images and reads the token; CDK writes the statements.
OF_EXECUTION: Final = Rights(
    reasons={"*": "Logging in to ECR has no resource; pulls are limited to two images."}
)


def of_training_code(
    *,
    bucket: s3.IBucket,
    data: Sequence[s3.IBucket],
    shell_logs: logs.LogGroup,
    is_job_head: bool,
) -> Rights:
    """All code that trains: its bucket, what it reads from others, and a shell for its owner, which
    is logged. What decides about jobs is written by others, or by the heads of jobs only."""
    of_others = [
        runs.ENDS_PREFIX,
        runs.STOPS_PREFIX,
        runs.HOSTS_PREFIX,
        *([] if is_job_head else [runs.HEADS_PREFIX]),
    ]
    no_writing = iam.PolicyStatement(
        sid="NotOfOthers",
        effect=iam.Effect.DENY,
        actions=["s3:DeleteObject", "s3:PutObject"],
        resources=[bucket.arn_for_objects(f"{each}/*") for each in of_others],
    )
    objects = _arn_as_imported(bucket) + "/*"
    reading = Rights()
    if data:
        contents = [each.arn_for_objects("*") for each in data]
        reading = allow(
            "Data", "s3:GetBucketLocation", "s3:ListBucket", on=[each.bucket_arn for each in data]
        ) + allow("ReadData", "s3:GetObject", on=contents, why="The setting data_buckets names it.")
    return (
        reading
        + allow(
            "Bucket",
            "s3:GetBucketLocation",
            "s3:ListBucket",
            "s3:ListBucketMultipartUploads",
            on=[bucket.bucket_arn],
        )
        + allow(
            "Objects",
            "s3:AbortMultipartUpload",
            "s3:DeleteObject",
            "s3:GetObject",
            "s3:ListMultipartUploadParts",
            "s3:PutObject",
            on=[bucket.arn_for_objects("*")],
        )
        + Rights(statements=(no_writing,))
        # The agent that ECS Exec puts into the container; it also looks for its log group.
        + allow(
            "Shell",
            "logs:DescribeLogGroups",
            "ssmmessages:CreateControlChannel",
            "ssmmessages:CreateDataChannel",
            "ssmmessages:OpenControlChannel",
            "ssmmessages:OpenDataChannel",
            on=["*"],
            why="The channels of ECS Exec, and finding its logs, have no resource.",
        )
        + allow(
            "LogShell",
            "logs:CreateLogStream",
            "logs:DescribeLogStreams",
            "logs:PutLogEvents",
            on=[shell_logs.log_group_arn],
        )
        + Rights(
            reasons={objects: "Any object of the one bucket is data or a checkpoint of some run."}
        )
    )


def of_job_head(
    scope: IConstruct,
    *,
    cluster: ecs.Cluster,
    worker: ecs.TaskDefinition,
    keeper_arn: str,
    pools: Collection[str],
) -> Rights:
    """The head of a job, beyond what all training code may: its workers, users' secrets, and to
    ask for its hosts' end."""
    secrets = arn(scope, "secretsmanager", f"secret:{SECRETS_PREFIX}*")
    return (
        starting_tasks(cluster, worker, families=pool_groups(scope, pools))
        + ending_tasks(cluster)
        + allow(
            "Secrets",
            "secretsmanager:GetSecretValue",
            on=[secrets],
            why="The users' own secrets, by the prefix of names that are meant for jobs.",
        )
        + allow("ReleaseHosts", "lambda:InvokeFunction", on=[keeper_arn])
        + Rights(
            reasons={
                "*": "Listing tasks has no resource; it is limited to this cluster. Neither have "
                "the channels of ECS Exec and finding its logs."
            }
        )
    )


def of_keeper(
    scope: IConstruct,
    *,
    cluster: ecs.Cluster,
    groups: Sequence[str],
    bucket: s3.IBucket,
    state_machine_arn: str,
    notices: sns.ITopic,
    tasks: Sequence[ecs.TaskDefinition],
    pools: Collection[str],
) -> Rights:
    """The function that cleans up after jobs: their tasks, hosts and records."""
    exported = _arn_as_imported(bucket)
    ends = f"{runs.ENDS_PREFIX}/*"
    others = [f"{each}/*" for each in (runs.HEADS_PREFIX, runs.STOPS_PREFIX)]
    read_keys = (ends, *others, runs.job_reason("*", "*"), runs.job_claim("*", "*"))
    return (
        ending_tasks(cluster)
        + releasing_hosts(scope, cluster, groups)
        + allow("Records", "s3:PutObject", on=[bucket.arn_for_objects(ends)])
        + allow(
            "RecordsAndReasons",
            "s3:GetObject",
            on=[bucket.arn_for_objects(each) for each in read_keys],
        )
        + Rights(
            reasons={
                f"{exported}/{key}": "Runs and jobs are named by their users." for key in read_keys
            }
        )
        + allow(
            "Jobs",
            "states:DescribeExecution",
            "states:GetExecutionHistory",
            on=[execution_arn(state_machine_arn, "*")],
            why=OF_ONE_MACHINE,
        )
        + allow("Mail", "sns:Publish", on=[notices.topic_arn])
        + allow(
            "Webhooks",
            "secretsmanager:GetSecretValue",
            on=[arn(scope, "secretsmanager", f"secret:{NOTIFY_SECRETS}*")],
            why="The users' webhooks, by the prefix of names that are meant for them.",
        )
        + starting_tasks(
            cluster, *tasks, families=pool_groups(scope, pools), action="ecs:StartTask"
        )
        + allow("FindHosts", "ecs:ListContainerInstances", on=[cluster.cluster_arn])
        + allow("FindServices", "ecs:ListServices", on=["*"], where=_only(cluster))
        + allow(
            "MarkDisconnectedHosts",
            "ecs:DeleteAttributes",
            "ecs:PutAttributes",
            on=[in_cluster(cluster, "container-instance")],
        )
        + allow(
            "FindGroups",
            "autoscaling:DescribeAutoScalingGroups",
            "autoscaling:DescribeScalingActivities",
            "ec2:DescribeInstances",
            on=["*"],
            why="Listing tasks and services, and describing groups and instances, have no "
            "resource; tasks and services are limited to this cluster.",
        )
    )


def of_admission(state_machine_arn: str) -> Rights:
    """The function that admits jobs: see those that run. The sweep sees by it those that ended."""
    return allow("ListJobs", "states:ListExecutions", on=[state_machine_arn])


def of_state_machine(
    scope: IConstruct, *, cluster: ecs.Cluster, head: ecs.TaskDefinition, keeper_arn: str
) -> Rights:
    """The state machine: a head task, and the function that cleans up after it."""
    # Step Functions learns by this rule of its own that a task has ended.
    rule = arn(scope, "events", "rule/StepFunctionsGetEventsForECSTaskRule")
    return (
        starting_tasks(cluster, head)
        + allow(
            "HearOfTasks",
            "events:DescribeRule",
            "events:PutRule",
            "events:PutTargets",
            on=[rule],
        )
        + allow("CleanUp", "lambda:InvokeFunction", on=[keeper_arn])
        + ending_known_tasks(cluster)
    )


def of_teardown(scope: IConstruct, *, cluster: ecs.Cluster, groups: Sequence[str]) -> Rights:
    """The function that ends tasks and hosts when the stack is deleted."""
    return (
        ending_tasks(cluster)
        + allow(
            "EmptyCluster",
            "ecs:DeregisterContainerInstance",
            "ecs:ListContainerInstances",
            on=[cluster.cluster_arn],
        )
        + allow(
            "ForgetRevisions",
            "ecs:DeregisterTaskDefinition",
            "ecs:ListTaskDefinitions",
            on=["*"],
        )
        + allow(
            "FindHosts",
            "autoscaling:DescribeAutoScalingGroups",
            "ec2:DescribeInstances",
            on=["*"],
            why="Listing and deregistering have no resource, or one that is not known before; "
            "what may be ended is limited to this cluster and to the stack's groups.",
        )
        + allow("SeeRollbacks", "cloudformation:DescribeStacks", on=[Stack.of(scope).stack_id])
        + ending_hosts(scope, groups, "autoscaling:DeleteAutoScalingGroup")
    )


def of_ending_jobs(*, machine_arn: str, keeper_arn: str) -> Rights:
    """The same function: end the jobs, and have the keeper record that."""
    return (
        allow("FindJobs", "states:ListExecutions", on=[machine_arn])
        + allow(
            "EndJobs",
            "states:DescribeExecution",
            "states:StopExecution",
            on=[execution_arn(machine_arn, "*")],
            why=OF_ONE_MACHINE,
        )
        + allow("RecordJobs", "lambda:InvokeFunction", on=[keeper_arn])
    )


def of_image_push(repositories: Sequence[ecr.Repository]) -> Rights:
    """The workflow that pushes images."""
    return allow(
        "Push",
        "ecr:BatchCheckLayerAvailability",
        "ecr:BatchGetImage",
        "ecr:CompleteLayerUpload",
        "ecr:DescribeImageScanFindings",
        "ecr:DescribeImages",
        "ecr:GetDownloadUrlForLayer",
        "ecr:InitiateLayerUpload",
        "ecr:PutImage",
        "ecr:StartImageScan",
        "ecr:UploadLayerPart",
        on=[each.repository_arn for each in repositories],
    ) + allow(
        "Login",
        "ecr:GetAuthorizationToken",
        on=["*"],
        why="ecr:GetAuthorizationToken has no resource; what the token may do is limited by the "
        "statement on the two repositories.",
    )


# --- what roles share -----------------------------------------------------------------------------
OF_ONE_MACHINE: Final = "Executions of the one state machine."


def pool_groups(scope: IConstruct, pools: Collection[str]) -> list[str]:
    """The name, as a pattern, of the groups of all pools, and of the families of their tasks: IAM
    takes 10,240 characters of a role's policies."""
    return [nodes.pool_hosts(Stack.of(scope).stack_name, "*")] if pools else []


def starting_tasks(
    cluster: ecs.Cluster,
    *tasks: ecs.TaskDefinition,
    families: Sequence[str] = (),
    action: str = "ecs:RunTask",
) -> Rights:
    """Starting tasks of some definitions in the cluster, and of more families with the same
    roles."""
    roles = [
        role.role_arn for task in tasks for role in (task.task_role, task.execution_role) if role
    ]
    return (
        # All revisions: a job that runs while the stack is updated keeps its own.
        allow(
            "StartTasks",
            action,
            on=[
                arn(cluster, "ecs", f"task-definition/{family}:*")
                for family in (*(task.family for task in tasks), *families)
            ],
            where=_only(cluster),
            why="Revisions have numbers, and pools names; they are of this stack, and only its "
            "roles can be passed to them.",
        )
        + allow(
            "TagTasks",
            "ecs:TagResource",
            on=[in_cluster(cluster, "task")],
            where={"StringEquals": {"ecs:CreateAction": action.removeprefix("ecs:")}},
        )
        + allow(
            "PassRoles",
            "iam:PassRole",
            on=[*dict.fromkeys(roles)],
            where={"StringEquals": {"iam:PassedToService": "ecs-tasks.amazonaws.com"}},
        )
    )


def ending_tasks(cluster: ecs.Cluster) -> Rights:
    """Finding and ending the tasks of the cluster."""
    finding = allow(
        "FindTasks",
        "ecs:ListTasks",
        on=["*"],
        where=_only(cluster),
        why="Listing tasks has no resource; it is limited to this cluster.",
    )
    return finding + ending_known_tasks(cluster)


def ending_known_tasks(cluster: ecs.Cluster) -> Rights:
    """Ending tasks of the cluster whose ARNs are known."""
    return allow(
        "EndTasks",
        "ecs:DescribeTasks",
        "ecs:StopTask",
        on=[in_cluster(cluster, "task")],
        why="Tasks have random names; they are this cluster's.",
    )


def releasing_hosts(scope: IConstruct, cluster: ecs.Cluster, groups: Sequence[str]) -> Rights:
    """Draining hosts of the cluster; tagging those of some of its groups with their job, and
    terminating them."""
    drain = allow(
        "DrainHosts",
        "ecs:DescribeContainerInstances",
        "ecs:UpdateContainerInstancesState",
        on=[in_cluster(cluster, "container-instance")],
        why="Hosts have random names; they are this cluster's.",
    )
    instances = [arn(scope, "ec2", "instance/*")]
    own = {
        "StringLike" if "*" in "".join(groups) else "StringEquals": {
            f"aws:ResourceTag/{nodes.GROUP_TAG}": [*groups]
        }
    }
    end = allow(
        "EndHostsAtOnce",
        "ec2:TerminateInstances",
        on=instances,
        where=own,
        why="Instances of the stack's groups, by Auto Scaling's tag.",
    )
    only = {"ForAllValues:StringEquals": {"aws:TagKeys": [JOB_TAG]}}
    tag = allow("TagHosts", "ec2:CreateTags", on=instances, where=own | only)
    groups_end = ending_hosts(
        scope,
        groups,
        "autoscaling:ResumeProcesses",
        "autoscaling:SetDesiredCapacity",
        "autoscaling:TerminateInstanceInAutoScalingGroup",
    )
    return drain + end + tag + groups_end


def ending_hosts(scope: IConstruct, groups: Sequence[str], *actions: str) -> Rights:
    """Actions on groups of hosts, by their names."""
    place = "autoScalingGroup:*:autoScalingGroupName"
    return allow(
        "EndHosts",
        *actions,
        on=[arn(scope, "autoscaling", f"{place}/{name}") for name in groups],
        why="A group's ARN holds a random id beside its name, which is given; those of pools begin "
        "with the stack's.",
    )


def in_cluster(cluster: ecs.Cluster, resource: str) -> str:
    """ARN of all tasks or container instances of the cluster."""
    return arn(cluster, "ecs", f"{resource}/{cluster.cluster_name}/*")


def _only(cluster: ecs.Cluster) -> dict[str, Any]:
    return {"ArnEquals": {"ecs:cluster": cluster.cluster_arn}}
