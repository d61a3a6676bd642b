"""An AWS account in memory, which answers the calls of boto3's clients.

It stands at the edge of AWS: everything on this side of boto3 is the real command. One object plays
all clients. What AWS makes of what is sent is shown in ``tests/rehearsal``.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from contract import outputs as stack_outputs
from contract.instance_types import Prices, instance_type
from contract.job import ORDER_VERSION, JobSpec
from tests.aws import account as base
from tests.aws.account import model_of
from tests.aws.calls import refused
from tests.aws.s3 import S3
from tests.stacks.conftest import create_only

SHAPE = {
    "preset": "ddp",
    "head_instance_type": "m5.xlarge",
    "head_trains": False,
    "worker_instance_type": "g5.12xlarge",
    "max_workers": 4,
    "spot": False,
    "efa": False,
    "image_tag": "abc123",
    "max_heads": 1,
    "root_volume_gib": 0,
    "max_job_hours": 336,
    "log_retention_days": 30,
    "order": ORDER_VERSION,
}
#: Pools of a deployment that has some.
POOLS = {
    "l4": {
        **{"worker_instance_type": "g6.xlarge", "max_workers": 2, "spot": True, "efa": False},
        **{"image_tag": "mine", "root_volume_gib": 0, "availability_zone": "us-east-1c"},
    },
    "l40s": {
        **{"worker_instance_type": "g6e.12xlarge", "max_workers": 8, "spot": False, "efa": False},
        **{"image_tag": "abc123", "root_volume_gib": 0, "availability_zone": ""},
    },
}
#: Of the orders that are there: of another deployment than today's.
PRICES = Prices.of(
    region="us-east-1",
    head=instance_type("m5.large"),
    worker=instance_type("g5.xlarge"),
    spot=False,
)
MACHINE = "arn:aws:states:eu-west-1:1:stateMachine:jobs"
#: Of a task that ECS shows.
AT_ONCE = {"_known": 0, "_shows": 0}
#: The network of others that a deploy is told to use.
VPC, OTHERS = "vpc-0123456789abcdef0", "subnet-0123456789abcdef0"

OUTPUTS = {
    stack_outputs.CORE_STACK: {
        stack_outputs.BUCKET: "bucket",
        stack_outputs.SUBNET: "subnet-1",
        stack_outputs.NOTICES: "arn:topic",
        **{output: f"1.dkr.ecr/{node}" for node, output in stack_outputs.REPOSITORIES.items()},
    },
    stack_outputs.TRAINING_STACK: {
        stack_outputs.CLUSTER: "cluster",
        stack_outputs.HEAD_SERVICE: "head-service",
        stack_outputs.WORKER_SERVICE: "worker-service",
        stack_outputs.LOG_GROUP: "logs",
        stack_outputs.TASK_EVENTS: "events",
        stack_outputs.JOBS: MACHINE,
        stack_outputs.DASHBOARD: "training",
        stack_outputs.RAY_TOKEN: "arn:token",
        stack_outputs.WORKER_PROVIDER: "worker-hosts",
        stack_outputs.KEEPER: "keeper",
    },
}
#: Operations that start, end or write something.
CHANGES = {
    *("update_service", "start_execution", "stop_execution", "stop_task", "upload_file"),
    *("execute_command", "start_session", "put_object", "delete_objects"),
    *("invoke", "subscribe"),
}


class Account(base.Account):
    """What the account holds, and what AWS does with it."""

    meta = SimpleNamespace(endpoint_url="https://ssm.us-east-1.example")

    page = 1000

    def __init__(self) -> None:
        super().__init__(model_of({}, now=lambda: self.now.timestamp(), after=lambda *_: None))
        self.now = datetime.now(tz=UTC)
        """When the test began: jobs and lines are dated from here."""
        self.shape: dict[str, Any] = dict(SHAPE)
        self.outputs: dict[str, dict[str, str]] = {name: {**each} for name, each in OUTPUTS.items()}
        self.stack_status = "CREATE_COMPLETE"
        self.account_id = "123456789012"
        self.user_id = "AROA123:anna@example.com"
        self.region: str | None = "us-east-1"
        self.credentials: object = "keys"
        """None: the configuration has none."""
        self.logs: dict[str, list[str | tuple[float, str]]] = {}
        """By the name of the stream: lines, which are written a second after the other, or with the
        second at which they are."""
        # The standing cluster.
        self.wanted = {"head-service": 0, "worker-service": 0}
        self.starts = True
        """Whether tasks that are wanted run."""
        self.fault: dict[str, Any] | None = None
        """A task of the workers' service that ended."""
        self.rollout = "COMPLETED"
        self.instances: list[dict[str, Any]] = []
        self.container_instances: list[dict[str, Any]] = []
        self.function_error: dict[str, str] = {}
        # Jobs.
        self.tasks = self.model.tasks
        self.is_lost_before_a_stop = False
        """Whether a task's host goes just before the task is told to stop."""
        self.task_events: list[dict[str, Any]] = []
        self.s3 = S3(lambda: self.now.timestamp())
        self.objects, self.modified = self.s3.objects, self.s3.modified
        self.secrets = {"training/key", "training/notify/slack"}
        self.confirmed: set[str] = set()
        """Mail addresses."""
        # What doctor asks.
        self.templates: dict[str, dict[str, Any]] = {}
        """Of the stacks, by their names."""
        self.quota = 1000.0
        self.default_quotas: dict[str, float] = {}
        """Quotas that were never changed, by their codes."""
        self.without_images: set[str] = set()
        """Repositories."""
        self.zones: dict[str, list[str]] = {}
        """Where an instance type is offered, if not in all zones."""
        self.subnet_zone = "us-east-1a"
        self.routes: list[dict[str, str]] = []
        """Of the VPC's main table."""
        self.dns_off: tuple[str, ...] = ()
        """Attributes of the VPC that are off."""
        self.bootstrap: str | None = "30"
        self.num_vpcs = 1
        self.reservation: dict[str, Any] = {}
        """Of capacity, as EC2 describes it; what is not here is as the deployment wants it."""
        self.activities: list[dict[str, Any]] = []
        """Of all groups, the newest first."""

    @property
    def orders(self) -> list[JobSpec]:
        """Of the jobs that were started, in this order."""
        return [JobSpec.from_json(each["input"]) for each in self.sent("start_execution")]

    @property
    def changes(self) -> list[str]:
        """Operations that were called and change something."""
        return [operation for operation, _ in self.calls if operation in CHANGES]

    @property
    def counts(self) -> list[str]:
        """What the services were set to, in this order."""
        calls = self.sent("update_service")
        return [f"{each['service']}={each['desiredCount']}" for each in calls]

    def on_get_caller_identity(self) -> Any:
        role = "AWSReservedSSO_Training_0123456789abcdef"
        arn = f"arn:aws:sts::{self.account_id}:assumed-role/{role}/anna@example.com"
        return {"Account": self.account_id, "Arn": arn, "UserId": self.user_id}

    def on_describe_stacks(self, StackName: str) -> Any:  # noqa: N803
        if StackName not in self.outputs:
            said = f"Stack with id {StackName} does not exist"
            raise refused("ValidationError", "DescribeStacks", said)
        outputs = dict(self.outputs[StackName])
        if stack_outputs.CLUSTER in outputs:
            outputs[stack_outputs.SHAPE] = json.dumps(self.shape)
        listed = [{"OutputKey": key, "OutputValue": value} for key, value in outputs.items()]
        return {"Stacks": [{"StackStatus": self.stack_status, "Outputs": listed}]}

    def on_get_template(self, *, StackName: str) -> Any:  # noqa: N803
        if StackName not in self.templates:
            raise refused("ValidationError")
        return {"TemplateBody": self.templates[StackName]}

    def on_describe_type(self, *, TypeName: str, **_: Any) -> Any:  # noqa: N803
        return {"Schema": json.dumps({"createOnlyProperties": create_only(TypeName)})}

    def on_describe_scaling_activities(self, **_: Any) -> Any:
        return {"Activities": self.activities}

    # --- the standing cluster
    def service_tasks(self, service: str) -> list[dict[str, Any]]:
        node = service.partition("-")[0]
        return [
            {
                "taskArn": f"arn:aws:ecs:eu-west-1:1:task/cluster/{node}{i}",
                "lastStatus": "RUNNING",
                "startedAt": datetime.now(tz=UTC),
                "attachments": [
                    {"details": [{"name": "privateIPv4Address", "value": f"10.0.0.{i}"}]}
                ],
                "containers": [{"healthStatus": "HEALTHY", "runtimeId": f"{node}-{i}"}],
            }
            for i in range(self.wanted[service] if self.starts else 0)
        ]

    def on_describe_services(self, **_: Any) -> Any:
        services = [
            {
                "serviceName": name,
                "desiredCount": count,
                "runningCount": len(self.service_tasks(name)),
                "deployments": [
                    {
                        "status": "PRIMARY",
                        "rolloutState": self.rollout,
                        "rolloutStateReason": "tasks failed to start.",
                    }
                ],
                "events": [],
            }
            for name, count in self.wanted.items()
        ]
        return {"services": services}

    def on_update_service(self, *, service: str, desiredCount: int, **_: Any) -> None:  # noqa: N803
        self.wanted[service] = desiredCount

    def on_describe_instances(self, Filters: list[dict[str, Any]]) -> Any:  # noqa: N803
        assert Filters[0]["Values"] == ["TrainingStack-*"]
        return {"Reservations": [{"Instances": self.instances}]}

    def on_list_container_instances(self, **_: Any) -> Any:
        return {
            "containerInstanceArns": [each["ec2InstanceId"] for each in self.container_instances]
        }

    def on_describe_container_instances(self, containerInstances: list[str], **_: Any) -> Any:  # noqa: N803
        found = [
            each for each in self.container_instances if each["ec2InstanceId"] in containerInstances
        ]
        return {"containerInstances": found}

    def on_invoke(self, *, FunctionName: str, Payload: str) -> Any:  # noqa: N803
        assert (FunctionName, json.loads(Payload)) == ("keeper", {"Action": "release"})
        return {"Payload": io.BytesIO(b'{"released": ["h1", "h2"]}'), **self.function_error}

    def on_execute_command(self, **_: Any) -> Any:
        raise refused("TargetNotConnectedException", "ExecuteCommand", "The agent is away.")

    def on_start_session(self, **_: Any) -> Any:
        return {"SessionId": "s1", "StreamUrl": "wss://s1", "TokenValue": "of-the-session"}

    # --- jobs
    def add(self, job: str, *, run: str = "r1", status: str = "RUNNING", **more: Any) -> None:
        spec = {"run": run, "nodes": "1:2", "max_seconds": 3600, "command": ["true"]}
        spec["prices"] = asdict(PRICES)
        self.executions[job] = {
            "name": job,
            "executionArn": f"{MACHINE.replace(':stateMachine:', ':execution:')}:{job}",
            "status": status,
            "startDate": self.now - timedelta(minutes=10),
            "stopDate": None if status == "RUNNING" else self.now,
            "input": json.dumps(spec),
            **more,
        }
        self.history[job] = []

    def change_order(self, job: str, **changed: Any) -> None:
        given = json.loads(self.executions[job]["input"])
        self.executions[job]["input"] = json.dumps(given | changed)

    def add_worker(self, task: str, status: str, *, job: str = "job", **more: Any) -> None:
        own = {"taskArn": task, "lastStatus": status, "startedBy": job}
        self.tasks[task] = own | AT_ONCE | more

    def add_head(self, job: str, task: str, **more: Any) -> None:
        self.tasks[task] = {
            "taskArn": task,
            "lastStatus": "RUNNING",
            "group": f"job:{job}",
            **AT_ONCE,
            **more,
        }
        self.history[job].append(base.submitted(task, self.now))

    def on_start_execution(self, *, name: str, input: str, **_: Any) -> Any:
        self.add(name)
        self.executions[name]["input"] = input
        return {}

    def on_list_tasks(self, cluster: str, desiredStatus: str = "", **which: Any) -> Any:  # noqa: N803
        service, is_stopped = which.get("serviceName"), desiredStatus == "STOPPED"
        if service:
            tasks = [] if is_stopped else self.service_tasks(service)
            if is_stopped and self.fault and service.startswith("worker"):
                tasks = [self.fault]
            self.tasks |= {task["taskArn"]: task | AT_ONCE for task in tasks}
            return {"taskArns": [task["taskArn"] for task in tasks]}
        for task in self.tasks.values():  # a test says only what they are
            has_ended = task["lastStatus"] == "STOPPED"
            task["desiredStatus"] = "STOPPED" if has_ended else "RUNNING"
        return super().on_list_tasks(cluster, desiredStatus, **which)

    def on_stop_task(self, task: str, reason: str, **_: Any) -> Any:
        if self.is_lost_before_a_stop:
            lost = "Host EC2 (instance i-1) terminated."
            return {"task": self.tasks[task] | {"lastStatus": "STOPPED", "stoppedReason": lost}}
        self.tasks[task] |= {"lastStatus": "STOPPED", "stoppedReason": reason}
        for execution in self.executions.values():
            outcome = {"status": "stopped", "reason": "stopped by user", "exit_code": 143}
            execution |= {"status": "FAILED", "stopDate": self.now, "cause": json.dumps(outcome)}
        return {"task": self.tasks[task]}

    # --- logs
    def events_of(self, stream: str, *, since: int) -> list[dict[str, Any]]:
        if stream not in self.logs:
            raise refused("ResourceNotFoundException")
        began = (self.now - timedelta(minutes=10)).timestamp()
        found = []
        for number, line in enumerate(self.logs[stream]):
            second, message = (number, line) if isinstance(line, str) else line
            at = int((began + second) * 1000)
            if at >= since:
                event = {"timestamp": at, "message": message, "logStreamName": stream}
                found.append({**event, "eventId": f"{stream}-{number}"})
        return found

    def on_get_log_events(
        self,
        *,
        logStreamName: str,  # noqa: N803
        limit: int,
        startFromHead: bool,  # noqa: N803
        startTime: int = 0,  # noqa: N803
        **_: Any,
    ) -> Any:
        assert not startFromHead
        return {"events": self.events_of(logStreamName, since=startTime)[-limit:]}

    def on_filter_log_events(
        self,
        *,
        logGroupName: str,  # noqa: N803
        logStreamNames: Sequence[str] = (),  # noqa: N803
        startTime: int = 0,  # noqa: N803
        filterPattern: str = "",  # noqa: N803
    ) -> Any:
        if logGroupName == "events":
            return {
                "events": [
                    {"message": json.dumps({"detail": e}, default=str)} for e in self.task_events
                ]
            }
        found = [each for name in logStreamNames for each in self.events_of(name, since=startTime)]
        if filterPattern:
            assert filterPattern[0] == filterPattern[-1] == "%"
            found = [each for each in found if filterPattern[1:-1] in each["message"]]
        return {"events": sorted(found, key=lambda each: each["timestamp"])}

    # --- secrets
    def on_get_secret_value(self, *, SecretId: str) -> Any:  # noqa: N803
        assert SecretId == self.outputs[stack_outputs.TRAINING_STACK][stack_outputs.RAY_TOKEN]
        return {"SecretString": "the-token-of-ray"}

    def on_subscribe(self, *, Endpoint: str, **_: Any) -> Any:  # noqa: N803
        """Pending until the address has confirmed."""
        confirmed = Endpoint in self.confirmed
        return {"SubscriptionArn": "arn:one" if confirmed else "pending confirmation"}

    def on_describe_secret(self, *, SecretId: str) -> Any:  # noqa: N803
        if SecretId not in self.secrets:
            raise refused("ResourceNotFoundException")
        return {}

    # --- what doctor asks
    def on_describe_images(self, *, repositoryName: str, **_: Any) -> Any:  # noqa: N803
        if repositoryName in self.without_images:
            raise refused("ImageNotFoundException")
        return {"imageDetails": [{}]}

    def on_describe_subnets(self, **_: Any) -> Any:
        return {"Subnets": [{"AvailabilityZone": self.subnet_zone, "VpcId": VPC}]}

    def on_describe_capacity_reservations(self, *, CapacityReservationIds: list[str]) -> Any:  # noqa: N803
        (name,) = CapacityReservationIds
        found = {"CapacityReservationId": name, "InstanceType": "p5.48xlarge", "State": "active"}
        found |= {"AvailabilityZone": "us-east-1a", "ReservationType": "capacity-block"}
        return {"CapacityReservations": [{**found, "TotalInstanceCount": 4, **self.reservation}]}

    def on_describe_route_tables(self, *, Filters: Any) -> Any:  # noqa: N803
        # The subnet has no table of its own.
        if Filters[0]["Name"] == "association.subnet-id":
            return {"RouteTables": []}
        assert {"Name": "vpc-id", "Values": [VPC]} in Filters
        return {"RouteTables": [{"Routes": self.routes}]}

    def on_describe_vpc_attribute(self, *, VpcId: str, Attribute: str) -> Any:  # noqa: N803
        assert VpcId == VPC
        return {Attribute[0].upper() + Attribute[1:]: {"Value": Attribute not in self.dns_off}}

    def on_describe_availability_zones(self, **_: Any) -> Any:
        return {"AvailabilityZones": [{"ZoneName": f"us-east-1{letter}"} for letter in "bac"]}

    def on_describe_instance_type_offerings(self, *, Filters: Any, **_: Any) -> Any:  # noqa: N803
        (machine,) = Filters[0]["Values"]
        zones = self.zones.get(machine, ["us-east-1a", "us-east-1b", "us-east-1c"])
        return {"InstanceTypeOfferings": [{"Location": zone} for zone in zones]}

    def on_get_parameter(self, *, Name: str) -> Any:  # noqa: N803
        if Name.startswith("/cdk-bootstrap/"):
            if self.bootstrap is None:
                raise refused("ParameterNotFound")
            return {"Parameter": {"Value": self.bootstrap}}
        return {"Parameter": {"Value": "ami-1"}}

    def on_get_service_quota(self, *, QuotaCode: str, **_: Any) -> Any:  # noqa: N803
        if QuotaCode in self.default_quotas:
            raise refused("NoSuchResourceException")
        return {"Quota": {"Value": self.quota}}

    def on_get_aws_default_service_quota(self, *, QuotaCode: str, **_: Any) -> Any:  # noqa: N803
        return {"Quota": {"Value": self.default_quotas[QuotaCode]}}

    def on_describe_vpcs(self, **_: Any) -> Any:
        return {"Vpcs": [{}] * self.num_vpcs}

    def on_describe_addresses(self) -> Any:
        return {"Addresses": [{}]}

    def on_get_role(self, **_: Any) -> Any:
        return {}
