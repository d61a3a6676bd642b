"""All that ``trainctl`` asks of AWS, and the only module that does.

A deployment is found by the outputs of its two stacks, so the command line needs no settings of
its own; at a local AWS it finds a local deployment the same way.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final, Self

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from trainctl.errors import CliError
from training import contract
from training.contract import ClusterSize, InputError
from training.instance_types import InstanceType, instance_type

#: No account of AWS has this number; the rehearsal's local AWS has.
LOCAL_ACCOUNT: Final = "000000000000"
NODES: Final = (contract.HEAD, contract.WORKER)
#: Lines of the head's newest log that may stand between two of the cluster's sizes.
_LOG_LINES: Final = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What the deployment was set up for; output ``ClusterShape``."""

    preset: str
    head: InstanceType
    worker: InstanceType
    head_trains: bool
    max_workers: int
    spot: bool
    image_tag: str

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(
            preset=values["preset"],
            head=instance_type(values["head_instance_type"]),
            worker=instance_type(values["worker_instance_type"]),
            head_trains=values["head_trains"],
            max_workers=values["max_workers"],
            spot=values["spot"],
            image_tag=values["image_tag"],
        )

    def size(self, num_workers: int) -> ClusterSize:
        """What Ray has to offer once a head and ``num_workers`` workers have joined."""
        heads = 1 if self.head_trains else 0
        return ClusterSize(
            num_nodes=num_workers + 1,
            num_cpus=self.worker.vcpus * num_workers + self.head.vcpus * heads,
            # A head's GPUs are Ray's, whether or not it trains.
            num_gpus=self.worker.num_gpus * num_workers + self.head.num_gpus,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One node: an ECS task of one of the two services."""

    node: str
    id: str
    status: str
    """``PROVISIONING`` (waits for a host), ``PENDING``, ``ACTIVATING`` (pulls), ``RUNNING`` …"""
    health: str
    """``HEALTHY``, ``UNHEALTHY`` or ``UNKNOWN``, as the container's own check says."""
    address: str
    runtime_id: str
    """Id of the container on its host."""
    host: str
    """ARN of the host as ECS knows it; "" while there is none."""
    since: datetime | None
    stop_code: str
    stopped_reason: str
    exit_code: int | None

    @classmethod
    def from_ecs(cls, node: str, task: Mapping[str, Any]) -> Self:
        container: Mapping[str, Any] = next(iter(task.get("containers", [])), {})
        details = [
            detail
            for attachment in task.get("attachments", [])
            for detail in attachment.get("details", [])
        ]
        addresses = [each["value"] for each in details if each["name"] == "privateIPv4Address"]
        return cls(
            node=node,
            id=task["taskArn"].rpartition("/")[2],
            status=task.get("lastStatus", ""),
            health=container.get("healthStatus") or task.get("healthStatus", "UNKNOWN"),
            address=addresses[0] if addresses else "",
            runtime_id=container.get("runtimeId", ""),
            host=task.get("containerInstanceArn", ""),
            since=task.get("startedAt") or task.get("createdAt"),
            stop_code=task.get("stopCode", ""),
            stopped_reason=container.get("reason") or task.get("stoppedReason", ""),
            exit_code=container.get("exitCode"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """One of the standing cluster's two services."""

    node: str
    wanted: int
    running: int
    rollout: str
    """``COMPLETED``, ``IN_PROGRESS`` or ``FAILED``."""
    rollout_reason: str
    events: tuple[tuple[datetime, str], ...]
    """Newest first."""


class Deployment:
    """The two stacks in one account and region."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.region: str = session.region_name
        self._clients: dict[str, Any] = {}
        # Before anything else: it tells bad credentials from stacks that are not there.
        self.account: str = self.client("sts").get_caller_identity()["Account"]
        self._core = self._outputs(contract.CORE_STACK)
        self._training = self._outputs(contract.TRAINING_STACK)

    @classmethod
    def find(cls, *, profile: str | None, region: str | None) -> Self:
        """The deployment of a profile and region, as the AWS CLI takes them.

        Raises:
            CliError: the stacks are not there, or not ready.
            botocore's errors, which ``trainctl.errors`` explains.
        """
        session = boto3.Session(profile_name=profile, region_name=region)
        if not session.region_name:
            raise CliError("no region is set: give --region, or set AWS_REGION", exit_code=2)
        return cls(session)

    def client(self, service: str) -> Any:
        if service not in self._clients:
            config = Config(
                retries={"mode": "standard", "max_attempts": 6}, connect_timeout=10, read_timeout=30
            )
            self._clients[service] = self._session.client(service, config=config)
        return self._clients[service]

    def _outputs(self, stack: str) -> dict[str, str]:
        try:
            (found,) = self.client("cloudformation").describe_stacks(StackName=stack)["Stacks"]
        except ClientError as error:
            if "does not exist" not in str(error):
                raise
            raise CliError(
                f"{stack} is not deployed in account {self.account}, region {self.region}: deploy "
                "it (make deploy), or name another --profile or --region"
            ) from None
        status = found["StackStatus"]
        if status.endswith("IN_PROGRESS") and "CLEANUP" not in status:
            raise CliError(f"{stack} is being changed ({status}): wait until that has ended")
        if status.endswith("FAILED") or status == "ROLLBACK_COMPLETE":
            raise CliError(
                f"{stack} is not usable ({status}): look at its events (aws cloudformation "
                f"describe-stack-events --stack-name {stack}), then make deploy"
            )
        return {each["OutputKey"]: each["OutputValue"] for each in found.get("Outputs", [])}

    def output(self, name: str) -> str:
        """An output of either stack. Raises CliError: another version deployed them."""
        found = self._training.get(name) or self._core.get(name)
        if found is None:
            raise CliError(
                f"the deployed stacks have no output {name}: another version of this project has "
                "deployed them; make deploy brings them up to date"
            )
        return found

    @property
    def is_local(self) -> bool:
        """Whether this is a rehearsal on this machine."""
        return self.account == LOCAL_ACCOUNT

    @cached_property
    def shape(self) -> Shape:
        try:
            return Shape.from_json(self.output(contract.OUT_SHAPE))
        except (KeyError, ValueError, InputError) as error:
            raise CliError(
                f"the output {contract.OUT_SHAPE} is not understood ({error}): another version of "
                "this project has deployed the stacks; make deploy brings them up to date"
            ) from None

    @property
    def cluster(self) -> str:
        return self.output(contract.OUT_CLUSTER)

    def _service_name(self, node: str) -> str:
        outputs = {
            contract.HEAD: contract.OUT_HEAD_SERVICE,
            contract.WORKER: contract.OUT_WORKER_SERVICE,
        }
        return self.output(outputs[node])

    # --- the standing cluster ---------------------------------------------------------------
    def services(self) -> dict[str, Service]:
        """Both services by node."""
        names = {self._service_name(node): node for node in NODES}
        found = self.client("ecs").describe_services(cluster=self.cluster, services=[*names])
        services = {}
        for each in found["services"]:
            node = names[each["serviceName"]]
            primary: Mapping[str, Any] = next(
                (one for one in each.get("deployments", []) if one["status"] == "PRIMARY"), {}
            )
            services[node] = Service(
                node=node,
                wanted=each["desiredCount"],
                running=each["runningCount"],
                rollout=primary.get("rolloutState", ""),
                rollout_reason=primary.get("rolloutStateReason", ""),
                events=tuple((one["createdAt"], one["message"]) for one in each.get("events", [])),
            )
        if missing := {*NODES} - {*services}:
            raise CliError(
                f"the cluster has no service for {' and '.join(sorted(missing))}: make deploy "
                "restores it"
            )
        return services

    def set_wanted(self, node: str, count: int) -> None:
        """How many tasks a service shall keep."""
        self.client("ecs").update_service(
            cluster=self.cluster, service=self._service_name(node), desiredCount=count
        )

    def tasks(self, *, stopped: bool = False) -> list[Task]:
        """The nodes there are, the head first; or those that ended within the last hour."""
        return sorted(
            self._tasks("STOPPED" if stopped else "RUNNING"), key=lambda task: (task.node, task.id)
        )

    def _tasks(self, desired: str) -> Iterator[Task]:
        ecs = self.client("ecs")
        for node in NODES:
            pages = ecs.get_paginator("list_tasks").paginate(
                cluster=self.cluster, serviceName=self._service_name(node), desiredStatus=desired
            )
            arns = [arn for page in pages for arn in page["taskArns"]]
            for first in range(0, len(arns), 100):  # as many as one call takes
                found = ecs.describe_tasks(cluster=self.cluster, tasks=arns[first : first + 100])
                yield from (Task.from_ecs(node, each) for each in found["tasks"])

    def ray_size(self, head: Task) -> ClusterSize | None:
        """What the head says in its log that Ray has; None while it has said nothing."""
        try:
            events = self.client("logs").get_log_events(
                logGroupName=self.output(contract.OUT_LOG_GROUP),
                logStreamName=f"{contract.HEAD}/{contract.CONTAINER}/{head.id}",
                limit=_LOG_LINES,
                startFromHead=False,
            )["events"]
        except ClientError as error:
            if error.response["Error"]["Code"] == "ResourceNotFoundException":
                return None  # the container has not written its first line yet
            raise
        sizes = (ClusterSize.from_line(each["message"]) for each in reversed(events))
        return next((size for size in sizes if size), None)

    def last_lines(self, task: Task, number: int = 5) -> list[str]:
        """The end of a node's log; empty when it has none."""
        try:
            events = self.client("logs").get_log_events(
                logGroupName=self.output(contract.OUT_LOG_GROUP),
                logStreamName=f"{task.node}/{contract.CONTAINER}/{task.id}",
                limit=number,
                startFromHead=False,
            )["events"]
        except ClientError:
            return []
        return [each["message"].rstrip() for each in events]

    def open_shell(self, task: Task, command: str) -> dict[str, Any]:
        """A session of ECS Exec in a node's container, for the session manager's plug-in."""
        session: dict[str, Any] = self.client("ecs").execute_command(
            cluster=self.cluster,
            task=task.id,
            container=contract.CONTAINER,
            command=command,
            interactive=True,
        )["session"]
        return session

    def shell_target(self, task: Task) -> str:
        """What Systems Manager calls a node's container."""
        return f"ecs:{self.cluster}_{task.id}_{task.runtime_id}"
