"""TrainingStack has the cluster, hosts, nodes, dashboard and alarms that it promises.

Every trap of real AWS that the code steps round has a test here, because no emulator shows it.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from containers import health
from containers.node import NodeConfig, ray_environment
from contract import nodes
from contract import outputs as stack_outputs
from contract.cluster_shape import ClusterShape
from contract.images import content_tag
from contract.instance_types import instance_type
from contract.outputs import REPOSITORIES
from stacks import settings as deployment
from stacks.cluster.host_setup import agent_config
from tests.conftest import ROOT
from tests.stacks.cloudwatch import (
    GPU_VALUES,
    HOSTS,
    Metric,
    Samples,
    dashboard,
    lines,
    training_hour,
)
from tests.stacks.conftest import (
    OPTIONS,
    OTHERS,
    PRESETS,
    Synth,
    Templates,
    context,
    text,
    variables,
)
from tests.stacks.test_teardown import needs


def hosts(templates: Templates, node: str) -> dict[str, Any]:
    """Launch template data of the hosts of one kind of node."""
    ((_, found),) = [
        item
        for item in templates.of_type("AWS::EC2::LaunchTemplate").items()
        if f"{node.capitalize()}Hosts" in item[0]
    ]
    data: dict[str, Any] = found["LaunchTemplateData"]
    return data


def named(templates: Templates, kind: str, node: str) -> dict[str, Any]:
    """Properties of the one resource of a type that belongs to one kind of node."""
    (found,) = [
        properties
        for name, properties in templates.of_type(kind).items()
        if node.capitalize() in name
    ]
    return found


def container(templates: Templates, node: str) -> dict[str, Any]:
    (only,) = named(templates, "AWS::ECS::TaskDefinition", node)["ContainerDefinitions"]
    found: dict[str, Any] = only
    return found


# --- the cluster and its hosts -------------------------------------------------------------------
def test_gpu_hosts_run_the_gpu_image_of_amazon_linux_2023_and_others_do_not(synth: Synth) -> None:
    templates = synth()

    def image(node: str) -> str:
        name = hosts(templates, node)["ImageId"]["Ref"]
        default: str = templates.training["Parameters"][name]["Default"]
        return default

    prefix = "/aws/service/ecs/optimized-ami/amazon-linux-2023"
    assert image("worker") == f"{prefix}/gpu/recommended/image_id"
    assert image("head") == f"{prefix}/recommended/image_id"


@pytest.mark.parametrize("preset", PRESETS)
def test_hosts_have_a_volume_that_fits_their_image(synth: Synth, preset: str) -> None:
    for node in (nodes.HEAD, nodes.WORKER):
        data = hosts(synth(preset=preset), node)
        volume = data["BlockDeviceMappings"][0]["Ebs"]
        size, throughput = (200, 600) if instance_type(data["InstanceType"]).num_gpus else (50, 250)
        assert volume["VolumeSize"] >= size
        # gp3 gives 0.25 MiB/s per IOPS.
        assert throughput <= volume["Throughput"] <= 0.25 * volume["Iops"]


def test_tasks_are_stopped_while_they_may_still_save_and_log(synth: Synth) -> None:
    templates = synth()
    (stop,) = (name for name in templates.training["Resources"] if "StopTasks" in name)
    needed = needs(templates.training["Resources"], stop)
    policies = {name for name in templates.of_type("AWS::IAM::Policy") if "Role" in name}
    for part in ("NodesHead", "NodesWorker", "NodesExecution", "JobsRole"):
        assert any(name.startswith(part) for name in needed & policies), part
    rules = {
        *templates.of_type("AWS::EC2::SecurityGroupIngress"),
        *templates.of_type("AWS::EC2::SecurityGroupEgress"),
    }
    assert rules
    assert rules <= needed
    assert {*templates.of_type("AWS::ECS::TaskDefinition")} <= needed


def test_a_job_starts_nodes_of_any_revision_of_this_stacks_families(synth: Synth) -> None:
    """A deploy retains those of running jobs (``test_templates``)."""
    templates = synth()
    definitions = templates.of_type("AWS::ECS::TaskDefinition").values()
    families = {f"{text(each['Family'])}:*" for each in definitions}
    allowed = [
        text(resource).rpartition("task-definition/")[2]
        for policy in templates.of_type("AWS::IAM::Policy").values()
        for statement in policy["PolicyDocument"]["Statement"]
        if statement.get("Sid") == "StartTasks"
        for resource in (
            statement["Resource"]
            if isinstance(statement["Resource"], list)
            else [statement["Resource"]]
        )
    ]
    assert len(allowed) == 4, "a job's head, its workers, and the keeper both"
    assert {*allowed} <= families


def test_a_job_pulls_its_image_though_an_update_uses_only_the_other(synth: Synth) -> None:
    found = [
        policy["PolicyDocument"]
        for preset in ("ddp", "fsdp")  # a head that trains has the workers' image
        for name, policy in synth(preset=preset).of_type("AWS::IAM::Policy").items()
        if name.startswith("NodesExecutionRole")
    ]
    assert found[0] == found[1]
    assert str(found[0]).count("Repository") >= 2


# --- nodes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset", PRESETS)
def test_a_task_takes_a_whole_host(synth: Synth, preset: str) -> None:
    templates = synth(preset=preset)
    for node in (nodes.HEAD, nodes.WORKER):
        machine = instance_type(hosts(templates, node)["InstanceType"])
        definition = named(templates, "AWS::ECS::TaskDefinition", node)
        assert definition["NetworkMode"] == "awsvpc"
        assert definition["RequiresCompatibilities"] == ["EC2"]
        runs = container(templates, node)
        assert runs["Cpu"] == machine.container_cpu
        assert runs["Memory"] == machine.container_memory_mib
        assert runs["LinuxParameters"]["SharedMemorySize"] == machine.shm_mib
        gpus = [{"Type": "GPU", "Value": str(machine.num_gpus)}] if machine.num_gpus else None
        assert runs.get("ResourceRequirements") == gpus


@pytest.mark.parametrize(
    ("settings", "head", "spot"),
    [({"preset": "fsdp"}, "head.training.internal", False), (OPTIONS, "head.ray.local", True)],
    ids=["fsdp", "options"],
)
def test_what_the_task_definition_sets_is_what_the_node_reads(
    synth: Synth, settings: dict[str, str], head: str, spot: bool
) -> None:
    for definition in synth(**settings).of_type("AWS::ECS::TaskDefinition").values():
        (container,) = definition["ContainerDefinitions"]
        (command,) = container["Command"]
        kind = nodes.HEAD if command == nodes.JOB else command
        token = {"RAY_AUTH_TOKEN": "0123456789abcdef0123"}
        container_variables = variables(container)
        config = NodeConfig.from_environment(kind, container_variables | token)
        assert config == NodeConfig(
            kind=kind, head=head, num_cpus=48, num_gpus=4, head_wait_s=600, spot=spot
        )
        assert container_variables["TRAIN_STORAGE"].startswith("s3://<")
        for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):  # boto3 reads only the second
            assert container_variables[name] == settings.get("region", "<AWS::Region>")
        # The health check of the task is a module of the same package.
        assert container["HealthCheck"]["Command"][1:] == ["python", "-P", "-m", health.__name__]
        # Ray watches only hosts that may be taken away.
        watched = ray_environment(config, "eth0")["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"]
        assert watched == str(int(spot))


def test_a_head_that_trains_runs_the_workers_image(synth: Synth) -> None:
    def image(templates: Templates, node: str, tag: str) -> str:
        runs = container(templates, node)
        assert text(runs["Image"]).endswith(f":{tag}")
        return "Worker" if "WorkerRepository" in text(runs["Image"]) else "Head"

    apart, trains, tag = synth(preset="ddp"), synth(**OPTIONS), content_tag(ROOT)
    assert (image(apart, "head", tag), image(apart, "worker", tag)) == ("Head", "Worker")
    assert {image(trains, node, "0123abc") for node in ("head", "worker")} == {"Worker"}


def test_shells_are_logged_where_their_tasks_may_write(synth: Synth) -> None:
    templates = synth()
    shells = templates.only("AWS::ECS::Cluster")["Configuration"]["ExecuteCommandConfiguration"]
    group = shells["LogConfiguration"]["CloudWatchLogGroupName"]["Ref"]
    assert templates.resources[group]["Type"] == "AWS::Logs::LogGroup"
    writers = {
        name.partition("RoleDefault")[0]
        for name, policy in templates.of_type("AWS::IAM::Policy").items()
        for each in policy["PolicyDocument"]["Statement"]
        if each.get("Resource") == {"Fn::GetAtt": [group, "Arn"]}
    }
    assert writers == {"NodesHead", "NodesWorker", "Jobs"}


# --- what watches them ---------------------------------------------------------------------------
def of_aws(templates: Templates) -> list[Metric]:
    """What Container Insights and EC2 Auto Scaling report, by AWS's lists of their metrics."""
    groups = [f"<{name}>" for name in templates.of_type("AWS::AutoScaling::AutoScalingGroup")]
    (cluster,) = templates.of_type("AWS::ECS::Cluster")
    families = ({"ClusterName": f"<{cluster}>", "TaskDefinitionFamily": each} for each in "ab")
    reported = {
        ("ECS/ContainerInsights", ("NetworkRxBytes", "NetworkTxBytes")): families,
        ("AWS/AutoScaling", ("GroupDesiredCapacity", "GroupInServiceInstances")): (
            {"AutoScalingGroupName": each} for each in groups
        ),
    }
    return [
        Metric(namespace=namespace, name=name, dimensions=own, samples={0: 1.0})
        for (namespace, names), dimensions in reported.items()
        for own in dimensions
        for name in names
    ]


def graphs(templates: Templates, config: Any) -> dict[str, dict[str, Samples]]:
    """Title of each graph -> what it draws of an hour in which two hosts train."""
    metrics = [*training_hour(config), *of_aws(templates)]
    drawn = {}
    for widget in dashboard(templates, HOSTS[0])["widgets"]:
        asked = [lines(each, metrics) for each in widget["properties"].get("metrics", [])]
        if widget["type"] == "metric":
            assert all(asked), f"{widget['properties']['title']}: a line of it finds nothing"
            drawn[widget["properties"]["title"]] = {
                label: samples for each in asked for label, samples in each.items()
            }
    return drawn


def test_dashboard_and_alarms_query_metrics_that_are_reported(
    synth: Synth,
) -> None:
    """A search finds nothing, and says nothing, where one dimension is missing or too many."""
    templates, config = (
        synth(**OPTIONS),
        agent_config(has_gpus=True, metrics=nodes.METRICS_NAMESPACE),
    )
    drawn = graphs(templates, config)
    # An hour of minutes, and what is drawn is what was measured.
    used = drawn["GPU memory by host, its fullest GPU"]
    assert [*used[f"used {HOSTS[0]}"]] == [*range(0, 3600, 60)]
    fullest = used[f"used {HOSTS[0]}"][1800], used[f"free {HOSTS[0]}"][1800]
    assert fullest == (GPU_VALUES["memory_used"][1], GPU_VALUES["memory_free"][1])
    busy = drawn[f"GPU utilization of {HOSTS[0]}"]
    assert busy["GPU 3"][0] == 0 < 90 < busy["GPU 3"][600] <= 100
    clock = drawn[f"GPU clock of {HOSTS[0]}"]
    assert clock["GPU 0"][600] == pytest.approx(GPU_VALUES["clocks_current_sm"][1], rel=0.05)
    measured = config["metrics"]["metrics_collected"]["nvidia_gpu"]["measurement"]  # type: ignore[index]
    assert {*measured} == GPU_VALUES.keys()


def test_the_dashboard_lets_one_choose_a_host_and_asks_for_what_is_measured(synth: Synth) -> None:
    body = dashboard(synth(preset="fsdp"))
    assert "ContainerInsights" in json.dumps(body)
    assert "ContainerInsights" not in json.dumps(dashboard(synth(**OTHERS))), "it has no metrics"
    (variable,) = body["variables"]
    assert body["widgets"][2]["properties"]["title"].endswith(variable["pattern"])
    expression = f"SEARCH('{variable['search']}', 'Average', 60)"
    hour = training_hour(agent_config(has_gpus=True, metrics=nodes.METRICS_NAMESPACE))
    assert lines([{"label": "", "period": 60, "expression": expression}], hour)


def test_without_gpus_nothing_asks_for_them(synth: Synth) -> None:
    templates = synth(preset="cpu")
    body = dashboard(templates)
    assert "nvidia" not in json.dumps(body)
    assert not body.get("variables")
    assert "DashboardGpuIdle05AF16A4" not in templates.of_type("AWS::CloudWatch::Alarm")


#: A host, and whether one of its GPUs is meant.
IDLES = (HOSTS[1], True)


@pytest.mark.parametrize(
    ("idle_s", "gpus", "percent", "alarms"),
    [
        pytest.param(0, "0123", 0, False, id="busy, with pauses to save"),
        pytest.param(1500, "0123", 0, False, id="idle for less than the 30 minutes"),
        pytest.param(1800, "012", 0, False, id="one works"),
        pytest.param(1800, "0123", 6, False, id="slow"),
        pytest.param(1800, "0123", 4, True, id="idle"),
    ],
)
def test_a_host_whose_gpus_idle_raises_an_alarm(
    synth: Synth, idle_s: int, gpus: str, percent: float, alarms: bool
) -> None:
    alarm = synth().of_type("AWS::CloudWatch::Alarm")["DashboardGpuIdle05AF16A4"]
    (query,) = alarm["Metrics"]
    assert query["Expression"].startswith("SELECT"), "no alarm takes a search"
    # A host that boots has gaps, and must not hide another one that idles.
    assert query["Expression"].endswith(" GROUP BY InstanceId ORDER BY MAX() ASC")
    until = 3300  # the job's end
    looked_at = range(until - query["Period"] * alarm["EvaluationPeriods"], until)
    metrics = []
    for each in training_hour(agent_config(has_gpus=True, metrics=nodes.METRICS_NAMESPACE)):
        gpu = each.dimensions.get("index", "-")
        idles_at = (
            until - idle_s if (each.dimensions["InstanceId"], gpu in gpus) == IDLES else until
        )
        samples = {
            second: percent if second >= idles_at else value
            for second, value in each.samples.items()
            if second in looked_at
        }
        metrics.append(replace(each, samples=samples))
    options = {name.lower(): query[name] for name in ("Label", "Expression", "Period")}
    drawn = lines([options], metrics).values()
    assert {len(points) for points in drawn} == {alarm["EvaluationPeriods"]}
    assert alarm["ComparisonOperator"] == "LessThanThreshold"
    found = [max(points.values()) < alarm["Threshold"] for points in drawn]
    assert any(found) == alarms
    assert alarm["TreatMissingData"] == "notBreaching", "without hosts there is no value"


def test_stopped_tasks_are_recorded_and_failed_ones_raise_an_alarm(synth: Synth) -> None:
    templates = synth()
    rule = templates.of_type("AWS::Events::Rule")["TaskEventsRule1E6E1754"]
    assert rule["EventPattern"]["detail"]["lastStatus"] == ["STOPPED"]
    # Without the ":*" of the attribute: events do not arrive with it.
    assert text(rule["Targets"][0]["Arn"]).endswith(":log-group:<TaskEventsLogs3035F93C>")
    policy = text(templates.only("AWS::Logs::ResourcePolicy")["PolicyDocument"])
    # A condition on the rule holds only where events are written (serverless-patterns 618).
    only = {"ArnEquals": {"aws:SourceArn": "<TaskEventsRule1E6E1754.Arn>"}}
    conditions = {each["Action"]: each.get("Condition") for each in json.loads(policy)["Statement"]}
    assert conditions == {"logs:CreateLogStream": None, "logs:PutLogEvents": only}
    (counted,) = templates.only("AWS::Logs::MetricFilter")["MetricTransformations"]
    alarm = templates.of_type("AWS::CloudWatch::Alarm")["DashboardTaskFailed77B5FD13"]
    metric = (counted["MetricNamespace"], counted["MetricName"])
    assert (alarm["Namespace"], alarm["MetricName"], alarm["Threshold"]) == (*metric, 1)


@pytest.mark.parametrize("settings", [OPTIONS, OTHERS], ids=["10 minutes", "180 minutes"])
def test_no_alarm_looks_back_further_than_cloudwatch_allows(
    synth: Synth, settings: dict[str, str]
) -> None:
    alarms = synth(**settings).of_type("AWS::CloudWatch::Alarm")
    assert len(alarms) == 5
    for name, alarm in alarms.items():
        queries = alarm.get("Metrics", [])
        period = queries[0]["Period"] if queries else alarm["Period"]
        # A query is limited to three hours, any other alarm to a day.
        most = 3 * 3600 if queries else 24 * 3600
        assert period * alarm["EvaluationPeriods"] <= most, name
        assert period % 60 == 0


def test_the_command_line_finds_what_it_reads(synth: Synth) -> None:
    templates = synth(**OPTIONS)
    outputs = {*templates.core["Outputs"], *templates.training["Outputs"]}
    values = [value for name, value in vars(stack_outputs).items() if name.isupper()]
    names = {each for each in values if isinstance(each, str)} | {*REPOSITORIES.values()}
    # There is a file system only where the settings ask for one (test_shared_storage).
    wanted = names - {stack_outputs.CORE_STACK, stack_outputs.TRAINING_STACK, stack_outputs.SHARED}
    assert len(wanted) > 15
    assert wanted <= outputs
    shape = templates.training["Outputs"][stack_outputs.SHAPE]["Value"]
    assert ClusterShape.from_json(shape) == deployment.load(context(**OPTIONS)).shape


def test_the_groups_of_hosts_have_names_by_which_trainctl_knows_them(synth: Synth) -> None:
    """CloudFormation names a group after its stack and its logical id."""
    groups = synth().of_type("AWS::AutoScaling::AutoScalingGroup")
    assert all("AutoScalingGroupName" not in each for each in groups.values())
    found = {name.removeprefix("Cluster").partition("Group")[0] for name in groups}
    assert found == {node.title() for node in (nodes.HEAD, nodes.WORKER)}
