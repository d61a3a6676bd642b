"""The CloudWatch dashboard of the GPU hosts, and the alarms.

Every graph is a search or a query, never a list of instances: hosts come and go with each job, and
the dashboard is right for any number of them without another deploy. Hosts are compared first, a
line each; below are the GPUs of one host, which is chosen at the top of the page.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_iam as iam
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from constructs import Construct

from contract import times
from stacks import rights

# The dimensions under which the CloudWatch agent reports a GPU.
GPU_DIMENSIONS: Final = ("InstanceId", "arch", "index", "name")
UTILIZATION: Final = "nvidia_smi_utilization_gpu"
MEMORY_USED: Final = "nvidia_smi_memory_used"
#: The console puts the id of the chosen host in its place, in titles and searches.
CHOSEN_HOST: Final = "the-chosen-host"
#: Graphs of the chosen host's GPUs: metric -> title, unit and upper limit.
GPU_GRAPHS: Final[Mapping[str, tuple[str, str, float | None]]] = {
    UTILIZATION: ("utilization", "%", 100),
    MEMORY_USED: ("memory used", "MiB", None),
    "nvidia_smi_power_draw": ("power", "W", None),
    "nvidia_smi_temperature_gpu": ("temperature", "°C", None),
    "nvidia_smi_clocks_current_sm": ("clock", "MHz", None),
}

NOT_BREACHING: Final = cloudwatch.TreatMissingData.NOT_BREACHING
#: Minutes that a GPU host may idle before the alarm.
IDLE_MINUTES: Final = 30
IDLE_PERCENT: Final = 5
SWEEP_MISSING_S: Final = 1800
WIDTH, HEIGHT = 12, 7


class Dashboard(Construct):
    """Graphs by host and by GPU; alarms on idle GPUs, on what failed, and on a missing clean-up."""

    dashboard: cloudwatch.Dashboard
    alarms: list[cloudwatch.AlarmBase]

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        name: str,
        namespace: str,
        has_gpus: bool,
        has_insights: bool,
        cluster_name: str,
        groups: Mapping[str, str],
        failed_tasks: cloudwatch.IMetric,
        failed_jobs: cloudwatch.IMetric,
        keeper_errors: cloudwatch.IMetric,
        sweep_rule: str,
        alarm_email: str,
    ) -> None:
        """Make the graphs and the alarms.

        Args:
            name: of the dashboard, unique in the account: a dashboard belongs to no region.
            namespace: of what hosts report.
            groups: kind of node -> name of the Auto Scaling group of its hosts.
            sweep_rule: name of the rule that calls the keeper every few minutes.
            alarm_email: address that alarms are sent to; empty: none.
        """
        super().__init__(scope, id_)
        self.alarms = [
            self._alarm(
                "TaskFailed",
                "A Ray node did not start, failed, or lost its spot host. Why is in the log group "
                "of the task events.",
                failed_tasks,
            ),
            self._alarm(
                "JobFailed",
                "A job did not succeed. `trainctl ls` shows which, and `trainctl show` why.",
                failed_jobs,
            ),
            self._alarm(
                "KeeperFailed",
                "The function that cleans up after jobs fails, so tasks and hosts may stay. Why is "
                "in its log group.",
                keeper_errors,
                # One of a few repeated calls may fail, as when AWS throttles.
                periods=3,
                datapoints_to_alarm=2,
            ),
            self._sweep_alarm(sweep_rule),
        ]
        if has_gpus:
            self.alarms.append(self._idle_gpu_alarm(namespace))
        if alarm_email:
            self._send_alarms_to(alarm_email)

        self.dashboard = cloudwatch.Dashboard(
            self,
            "Dashboard",
            dashboard_name=name,
            default_interval=Duration.hours(1),
            variables=[_chosen_host(namespace)] if has_gpus else [],
        )
        memory = _search(f"{namespace},InstanceId", "mem_used_percent", "${PROP('Dim.InstanceId')}")
        # They wrap: two in each row.
        self.dashboard.add_widgets(
            *(_gpu_graphs(namespace) if has_gpus else ()),
            _graph("Host memory used", "%", memory, top=100),
            *([_network_graph(cluster_name)] if has_insights else ()),
            _hosts_graph(groups),
            cloudwatch.AlarmStatusWidget(
                title="Alarms", alarms=self.alarms, width=WIDTH, height=HEIGHT
            ),
        )

    def _alarm(
        self,
        id_: str,
        description: str,
        metric: cloudwatch.IMetric,
        *,
        below: float | None = None,
        periods: int = 1,
        treat_missing_data: cloudwatch.TreatMissingData = NOT_BREACHING,
        datapoints_to_alarm: int | None = None,
    ) -> cloudwatch.Alarm:
        """An alarm on a metric that is 1 or more, or below a value."""
        operators = cloudwatch.ComparisonOperator
        return cloudwatch.Alarm(
            self,
            id_,
            alarm_description=description,
            metric=metric,
            comparison_operator=operators.GREATER_THAN_OR_EQUAL_TO_THRESHOLD
            if below is None
            else operators.LESS_THAN_THRESHOLD,
            threshold=1 if below is None else below,
            evaluation_periods=periods,
            datapoints_to_alarm=datapoints_to_alarm,
            treat_missing_data=treat_missing_data,
        )

    def _sweep_alarm(self, rule: str) -> cloudwatch.Alarm:
        return self._alarm(
            "SweepMissing",
            "Nothing has looked for hosts without a task for half an hour: is the rule of the "
            "sweep disabled? Right after a deploy this is no fault.",
            # Of the rule: the function is also called by each job that ends.
            cloudwatch.Metric(
                namespace="AWS/Events",
                metric_name="Invocations",
                dimensions_map={"RuleName": rule},
                statistic="Sum",
                period=Duration.seconds(times.SWEEP_EVERY_S),
            ),
            below=1,
            periods=SWEEP_MISSING_S // times.SWEEP_EVERY_S,
            # A rule that calls nothing reports nothing.
            treat_missing_data=cloudwatch.TreatMissingData.BREACHING,
        )

    def _idle_gpu_alarm(self, namespace: str) -> cloudwatch.Alarm:
        # An alarm takes no search; a query it does. A busy GPU dips to zero while it saves or
        # evaluates, so a host counts by its busiest moment in five minutes. Each host is a series
        # of its own (CloudWatch's guide, "Create a CloudWatch alarm based on a Metrics Insights
        # query", which wants the order), so that one that boots hides no idle one. Without hosts
        # there is no value, and no alarm.
        return self._alarm(
            "GpuIdle",
            f"All GPUs of a host have been idle for {IDLE_MINUTES} minutes, and it is billed. "
            "`trainctl ls` lists the jobs, `trainctl stop JOB` ends one; `trainctl cluster down` "
            "ends a standing cluster.",
            _by_host(
                namespace, "MAX", UTILIZATION, "GPU host", order=" ORDER BY MAX() ASC", minutes=5
            ),
            below=IDLE_PERCENT,
            periods=IDLE_MINUTES // 5,
        )

    def _send_alarms_to(self, address: str) -> None:
        topic = sns.Topic(self, "Alarms", display_name="Training cluster", enforce_ssl=True)
        topic.apply_removal_policy(RemovalPolicy.DESTROY)
        topic.add_subscription(subscriptions.EmailSubscription(address))
        topic.add_to_resource_policy(
            iam.PolicyStatement(
                sid="FromAlarms",
                principals=[rights.of_this_account(self, "cloudwatch.amazonaws.com")],
                actions=["sns:Publish"],
                resources=[topic.topic_arn],
            )
        )
        for alarm in self.alarms:
            alarm.add_alarm_action(actions.SnsAction(topic))


def _graph(
    title: str, unit: str, *left: cloudwatch.IMetric, top: float | None = None
) -> cloudwatch.GraphWidget:
    return cloudwatch.GraphWidget(
        title=title,
        left=[*left],
        left_y_axis=cloudwatch.YAxisProps(label=unit, min=0, max=top, show_units=False),
        legend_position=cloudwatch.LegendPosition.RIGHT,
        width=WIDTH,
        height=HEIGHT,
    )


def _gpu_graphs(namespace: str) -> Iterator[cloudwatch.GraphWidget]:
    average = _by_host(namespace, "AVG", UTILIZATION, "average")
    yield _graph("GPU utilization by host, average of its GPUs", "%", average, top=100)
    yield _graph(
        "GPU memory by host, its fullest GPU",
        "MiB",
        _by_host(namespace, "MAX", MEMORY_USED, "used"),
        _by_host(namespace, "MIN", "nvidia_smi_memory_free", "free"),
    )
    schema = ",".join((namespace, *GPU_DIMENSIONS))
    for metric, (title, unit, top) in GPU_GRAPHS.items():
        which = f'InstanceId="{CHOSEN_HOST}" '
        gpus = _search(schema, metric, "GPU ${PROP('Dim.index')}", which=which)
        yield _graph(f"GPU {title} of {CHOSEN_HOST}", unit, gpus, top=top)


def _chosen_host(namespace: str) -> cloudwatch.DashboardVariable:
    return cloudwatch.DashboardVariable(
        id="host",
        label="Host",
        type=cloudwatch.VariableType.PATTERN,
        value=CHOSEN_HOST,
        input_type=cloudwatch.VariableInputType.SELECT,
        values=cloudwatch.Values.from_search_components(
            namespace=namespace,
            dimensions=[*GPU_DIMENSIONS],
            metric_name=UTILIZATION,
            populate_from="InstanceId",
        ),
        default_value=cloudwatch.DefaultValue.FIRST,
    )


def _network_graph(cluster_name: str) -> cloudwatch.GraphWidget:
    # By task: the hosts' own interfaces do not carry what awsvpc tasks send.
    return _graph(
        "Network by kind of node, average",
        "bytes/s",
        *(
            _search(
                "ECS/ContainerInsights,ClusterName,TaskDefinitionFamily",
                metric,
                f"{direction} ${{PROP('Dim.TaskDefinitionFamily')}}",
                which=f'ClusterName="{cluster_name}" ',
            )
            for metric, direction in (("NetworkTxBytes", "sent"), ("NetworkRxBytes", "received"))
        ),
    )


def _hosts_graph(groups: Mapping[str, str]) -> cloudwatch.GraphWidget:
    """Graph of the hosts that are running (and billed) and the hosts that are wanted."""
    return _graph(
        "Hosts",
        "hosts",
        *(
            cloudwatch.Metric(
                namespace="AWS/AutoScaling",
                metric_name=metric,
                dimensions_map={"AutoScalingGroupName": group},
                label=f"{node}s {label}",
                statistic="Maximum",
                period=Duration.minutes(1),
            )
            for node, group in groups.items()
            for metric, label in (
                ("GroupDesiredCapacity", "wanted"),
                ("GroupInServiceInstances", "running"),
            )
        ),
    )


def _search(schema: str, metric: str, label: str, *, which: str = "") -> cloudwatch.MathExpression:
    """A line for each series of a metric under ``schema``: a namespace and dimensions."""
    return cloudwatch.MathExpression(
        expression=f"SEARCH('{{{schema}}} {which}MetricName=\"{metric}\"', 'Average', 60)",
        using_metrics={},
        label=label,
        period=Duration.minutes(1),
    )


def _by_host(
    namespace: str, function: str, metric: str, label: str, *, order: str = "", minutes: int = 1
) -> cloudwatch.MathExpression:
    """A line for each host: ``function`` of its GPUs, named by ``label`` and the host's id."""
    # Quoted: some of the names are words of the query language.
    dimensions = ", ".join(f'"{name}"' for name in GPU_DIMENSIONS)
    return cloudwatch.MathExpression(
        expression=f'SELECT {function}({metric}) FROM SCHEMA("{namespace}", '
        f"{dimensions}) GROUP BY InstanceId{order}",
        using_metrics={},
        label=label,
        period=Duration.minutes(minutes),
    )
