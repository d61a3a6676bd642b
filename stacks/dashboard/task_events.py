"""Log of stopped tasks: ECS forgets their reasons after an hour.

The failed ones are counted, for the alarm.
"""

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_events as events
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from constructs import Construct

from stacks.log_groups import log_group
from stacks.rights import arn

FAILED_TASKS = "failed_tasks"

# Not what a user stopped, and not a head that ended well.
FAILED = (
    '{ ($.detail.stopCode = "TaskFailedToStart") || ($.detail.stopCode = "SpotInterruption") '
    '|| ($.detail.stopCode = "TerminationNotice") || (($.detail.stopCode = '
    '"EssentialContainerExited") && ($.detail.containers[0].exitCode != 0)) }'
)


class TaskEvents(Construct):
    """Every stopped task of the cluster as a line in a log group, and a count of the failed."""

    log_group: logs.LogGroup
    failed_tasks: cloudwatch.Metric

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        cluster_arn: str,
        metrics: str,
        policy_name: str | None = None,
    ) -> None:
        """Log the stopped tasks of a cluster.

        Args:
            metrics: namespace of the count.
            policy_name: of the resource policy; None: from the ids of constructs, which are the
                same in each deployment.
        """
        super().__init__(scope, id_)
        self.log_group = log_group(self, "Logs")
        # With the ``:*`` of CloudFormation's attribute no event arrives.
        target = arn(self, "logs", f"log-group:{self.log_group.log_group_name}")
        rule = events.CfnRule(
            self,
            "Rule",
            description="Stopped tasks of the training cluster",
            event_pattern={
                "source": ["aws.ecs"],
                "detail-type": ["ECS Task State Change"],
                "detail": {"clusterArn": [cluster_arn], "lastStatus": ["STOPPED"]},
            },
            # The L2 target brings a function along, only to write the policy below.
            targets=[events.CfnRule.TargetProperty(arn=target, id="Logs")],
        )
        # Two statements: EventBridge names its rule where it writes, not where it makes a stream.
        for sid, action, conditions in (
            ("MakeStreams", "logs:CreateLogStream", None),
            ("WriteEvents", "logs:PutLogEvents", {"ArnEquals": {"aws:SourceArn": rule.attr_arn}}),
        ):
            self.log_group.add_to_resource_policy(
                iam.PolicyStatement(
                    sid=sid,
                    principals=[
                        iam.ServicePrincipal("events.amazonaws.com"),
                        iam.ServicePrincipal("delivery.logs.amazonaws.com"),
                    ],
                    actions=[action],
                    resources=[self.log_group.log_group_arn],
                    conditions=conditions,
                )
            )
        if policy_name:
            policy = self.log_group.node.find_child("Policy").node.default_child
            assert isinstance(policy, logs.CfnResourcePolicy)
            policy.policy_name = policy_name
        failed = logs.MetricFilter(
            self,
            "Failed",
            log_group=self.log_group,
            filter_pattern=logs.FilterPattern.literal(FAILED),
            metric_namespace=metrics,
            metric_name=FAILED_TASKS,
            metric_value="1",
            default_value=0,
        )
        self.failed_tasks = failed.metric(statistic="Sum", period=Duration.minutes(1))
