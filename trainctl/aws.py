"""All that ``trainctl`` asks of AWS, and the only module that does.

A deployment is found by the outputs of its two stacks, so the command line needs no settings of
its own; at a local AWS it finds a local deployment the same way.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from contract import exits, nodes
from contract import outputs as stack_outputs
from contract.errors import InputError
from contract.instance_types import InstanceType, instance_type
from contract.jobs import JOB_GROUP
from contract.nodes import ClusterSize
from trainctl.errors import CliError, UsageError
from trainctl.show import parsed

#: No account of AWS has this number; the rehearsal's local AWS has.
LOCAL_ACCOUNT: Final = "000000000000"
NODES: Final = (nodes.HEAD, nodes.WORKER)
#: Among how many of the newest jobs a run is looked for by its name.
JOBS_LOOKED_AT: Final = 100
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


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedTask:
    """A task of a job that is over: what it was, and for how long."""

    id: str
    node: str
    seconds: float
    """From when its host began to fetch the image; before that there may have been no host."""

    @classmethod
    def from_event(cls, detail: Mapping[str, Any], job: "Job") -> Self:
        """From the event that ECS sends when a task stops."""
        times = [detail.get(name) for name in ("pullStartedAt", "startedAt")]
        began = next((_time(each) for each in times if each), None)
        ended = _time(detail.get("stoppedAt") or detail["updatedAt"])
        return cls(
            id=detail["taskArn"].rpartition("/")[2],
            node=nodes.WORKER if detail.get("startedBy") == job.id else nodes.HEAD,
            seconds=(ended - began).total_seconds() if began else 0.0,
        )


def _time(value: Any) -> datetime:
    return datetime.fromisoformat(str(value).replace("Z", "+00:00"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One submission of a run: an execution of the state machine."""

    id: str
    run: str
    status: str
    """``running``, ``succeeded``, ``failed``, ``stopped``, ``deadline``, ``no_capacity`` …"""
    reason: str
    """The same in words; while it runs, "running"."""
    exit_code: int | None
    """Of the user's code, where it was that which ended it."""
    began: datetime
    ended: datetime | None
    spec: Mapping[str, Any]
    """What was submitted: command, workers, limits."""

    @property
    def is_over(self) -> bool:
        return self.ended is not None

    @property
    def deadline(self) -> datetime:
        return self.began + timedelta(seconds=self.spec.get("max_seconds", 0))

    @property
    def shell_code(self) -> int:
        """What ``trainctl wait`` exits with."""
        if self.status == "succeeded":
            return exits.OK
        if self.exit_code:
            return self.exit_code
        codes = {
            "no_capacity": exits.NO_CAPACITY,
            "deadline": exits.DEADLINE,
            "stopped": exits.TERMINATED,
        }
        return codes.get(self.status, exits.FAILED)

    @classmethod
    def from_execution(cls, found: Mapping[str, Any]) -> Self:
        """What Step Functions describes."""
        spec = parsed(found.get("input"))
        status = found["status"]
        outcome: dict[str, Any]
        if status == "RUNNING":
            outcome = {"status": "running", "reason": "running"}
        elif status == "SUCCEEDED":
            outcome = parsed(found.get("output"))
        elif status == "FAILED":
            outcome = parsed(found.get("cause")) or {
                "status": "failed",
                "reason": f"failed: {found.get('error', '')} {found.get('cause', '')}".strip(),
            }
        elif status == "TIMED_OUT":
            outcome = {"status": "deadline", "reason": "deadline"}
        else:
            outcome = {"status": "stopped", "reason": "stopped by user"}
        return cls(
            id=found["name"],
            run=spec.get("run", ""),
            status=outcome.get("status", "succeeded"),
            reason=outcome.get("reason", "succeeded"),
            exit_code=outcome.get("exit_code"),
            began=found["startDate"],
            ended=found.get("stopDate"),
            spec=spec,
        )


class Deployment:
    """The two stacks in one account and region."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.region: str = session.region_name
        self._clients: dict[str, Any] = {}
        # Before anything else: it tells bad credentials from stacks that are not there.
        self.account: str = self.client("sts").get_caller_identity()["Account"]
        self._core = self._outputs(stack_outputs.CORE_STACK)
        self._training = self._outputs(stack_outputs.TRAINING_STACK)

    @classmethod
    def find(cls, *, profile: str | None, region: str | None) -> Self:
        """The deployment of a profile and region, as the AWS CLI takes them.

        Raises:
            CliError: the stacks are not there, or not ready.
            botocore's errors, which ``trainctl.errors`` explains.
        """
        import boto3

        session = boto3.Session(profile_name=profile, region_name=region)
        if not session.region_name:
            raise CliError("no region is set: give --region, or set AWS_REGION", exit_code=2)
        return cls(session)

    def client(self, service: str) -> Any:
        from botocore.config import Config

        if service not in self._clients:
            config = Config(
                retries={"mode": "standard", "max_attempts": 6}, connect_timeout=10, read_timeout=30
            )
            self._clients[service] = self._session.client(service, config=config)
        return self._clients[service]

    def _outputs(self, stack: str) -> dict[str, str]:
        from botocore.exceptions import ClientError

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
            return Shape.from_json(self.output(stack_outputs.SHAPE))
        except (KeyError, ValueError, InputError) as error:
            raise CliError(
                f"the output {stack_outputs.SHAPE} is not understood ({error}): another version of "
                "this project has deployed the stacks; make deploy brings them up to date"
            ) from None

    @property
    def cluster(self) -> str:
        return self.output(stack_outputs.CLUSTER)

    def _service_name(self, node: str) -> str:
        outputs = {
            nodes.HEAD: stack_outputs.HEAD_SERVICE,
            nodes.WORKER: stack_outputs.WORKER_SERVICE,
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
        desired = "STOPPED" if stopped else "RUNNING"
        found = []
        for node in NODES:
            arns = self._listed(desired, serviceName=self._service_name(node))
            found += self._described(node, arns)
        return sorted(found, key=lambda task: (task.node, task.id))

    def _listed(self, desired: str, **which: str) -> list[str]:
        pages = (
            self.client("ecs")
            .get_paginator("list_tasks")
            .paginate(cluster=self.cluster, desiredStatus=desired, **which)
        )
        return [arn for page in pages for arn in page["taskArns"]]

    def ray_size(self, head: Task) -> ClusterSize | None:
        """What the head says in its log that Ray has; None while it has said nothing."""
        events = self._log(head, limit=_LOG_LINES, startFromHead=False)["events"]
        sizes = (ClusterSize.from_line(each["message"]) for each in reversed(events))
        return next((size for size in sizes if size), None)

    def last_lines(self, task: Task, number: int = 5) -> list[str]:
        """The end of a node's log; empty when it has none."""
        events = self._log(task, limit=number, startFromHead=False)["events"]
        return [each["message"].rstrip() for each in events]

    def log(self, task: Task, token: str | None) -> tuple[list[tuple[datetime, str]], str | None]:
        """A node's log from its beginning, or from where ``token`` of the last call left off."""
        given = {"nextToken": token} if token else {}
        page = self._log(task, startFromHead=True, **given)
        lines = [
            (datetime.fromtimestamp(each["timestamp"] / 1000, tz=UTC), each["message"].rstrip())
            for each in page["events"]
        ]
        return lines, page.get("nextForwardToken", token)

    def _log(self, task: Task, **arguments: Any) -> dict[str, Any]:
        from botocore.exceptions import ClientError

        try:
            found: dict[str, Any] = self.client("logs").get_log_events(
                logGroupName=self.output(stack_outputs.LOG_GROUP),
                logStreamName=f"{task.node}/{nodes.CONTAINER}/{task.id}",
                **arguments,
            )
        except ClientError as error:
            if error.response["Error"]["Code"] == "ResourceNotFoundException":
                return {"events": []}  # the container has not written its first line yet
            raise
        return found

    # --- jobs ---------------------------------------------------------------------------------
    @property
    def bucket(self) -> str:
        return self.output(stack_outputs.BUCKET)

    def _execution(self, job: str) -> str:
        machine = self.output(stack_outputs.JOBS)
        return f"{machine.replace(':stateMachine:', ':execution:')}:{job}"

    def start_job(self, job: str, spec: Mapping[str, Any]) -> None:
        """Start an execution. Giving the same job and spec again starts nothing more."""
        self.client("stepfunctions").start_execution(
            stateMachineArn=self.output(stack_outputs.JOBS), name=job, input=json.dumps(spec)
        )

    def jobs(self, *, limit: int, running: bool = False) -> list[Job]:
        """The newest jobs, newest first."""
        states = self.client("stepfunctions")
        arguments: dict[str, Any] = {"stateMachineArn": self.output(stack_outputs.JOBS)}
        if running:
            arguments["statusFilter"] = "RUNNING"
        pages = states.get_paginator("list_executions").paginate(
            **arguments, PaginationConfig={"MaxItems": limit}
        )
        found = [each for page in pages for each in page["executions"]]
        # What was submitted is not in the list.
        jobs = [
            Job.from_execution(states.describe_execution(executionArn=each["executionArn"]))
            for each in found
        ]
        return sorted(jobs, key=lambda job: job.began, reverse=True)

    def job(self, name: str) -> Job:
        """The job with this id, or the newest one of the run with this name.

        Raises:
            UsageError: there is neither.
        """
        from botocore.exceptions import ClientError

        try:
            return Job.from_execution(
                self.client("stepfunctions").describe_execution(executionArn=self._execution(name))
            )
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("ExecutionDoesNotExist", "InvalidArn"):
                raise
        newest = self.jobs(limit=JOBS_LOOKED_AT)
        for job in newest:
            if job.run == name:
                return job
        there = sorted({job.run for job in newest if job.run})
        close = difflib.get_close_matches(name, there, n=1)
        hint = f"did you mean {close[0]}?" if close else "trainctl ls shows what there is"
        raise UsageError(f"there is no job and no run {name!r}: {hint}")

    def heads(self, job: Job) -> list[Task]:
        """The head tasks of a job, one for each attempt, the newest last."""
        pages = (
            self.client("stepfunctions")
            .get_paginator("get_execution_history")
            .paginate(executionArn=self._execution(job.id))
        )
        arns = []
        for page in pages:
            for event in page["events"]:
                if event["type"] == "TaskSubmitted":
                    output = parsed(event["taskSubmittedEventDetails"].get("output"))
                    arns += [task["TaskArn"] for task in output.get("Tasks", [])]
        return self._described(nodes.JOB, arns)

    def workers(self, job: Job) -> list[Task]:
        """The worker tasks of a job that have not ended for more than an hour."""
        arns = self._listed("RUNNING", startedBy=job.id) + self._listed("STOPPED", startedBy=job.id)
        return self._described(nodes.WORKER, [*dict.fromkeys(arns)])

    def _described(self, node: str, arns: Sequence[str]) -> list[Task]:
        """Tasks in the order given; of those that ECS has forgotten, the id alone."""
        ecs = self.client("ecs")
        found: dict[str, Mapping[str, Any]] = {}
        for first in range(0, len(arns), 100):  # as many as one call takes
            page = ecs.describe_tasks(cluster=self.cluster, tasks=[*arns[first : first + 100]])
            found |= {each["taskArn"]: each for each in page["tasks"]}
        return [
            Task.from_ecs(node, found.get(arn, {"taskArn": arn, "lastStatus": "STOPPED"}))
            for arn in arns
        ]

    def alive(self, job: Job) -> list[Task]:
        """The tasks of a job that have not ended yet, heads first."""
        tasks = [*self.heads(job), *self.workers(job)]
        return [task for task in tasks if task.status != "STOPPED"]

    def stop_job(self, job: Job, reason: str) -> None:
        """End a job: its head is told to, or, before there is one, its execution."""
        heads = [head for head in self.heads(job) if head.status != "STOPPED"]
        if not heads:
            self.client("stepfunctions").stop_execution(
                executionArn=self._execution(job.id), error="stopped", cause=reason
            )
        for head in heads:
            self.client("ecs").stop_task(cluster=self.cluster, task=head.id, reason=reason)

    def ended_tasks(self, job: Job) -> list[EndedTask]:
        """All tasks of a job that ended, from the log that outlives ECS's memory of them."""
        pages = (
            self.client("logs")
            .get_paginator("filter_log_events")
            .paginate(
                logGroupName=self.output(stack_outputs.TASK_EVENTS),
                startTime=int(job.began.timestamp() * 1000),
                filterPattern=f'{{ $.detail.group = "{JOB_GROUP}{job.id}" }}',
            )
        )
        found = {}
        for page in pages:
            for event in page["events"]:
                detail = parsed(event["message"]).get("detail", {})
                if detail.get("group") == f"{JOB_GROUP}{job.id}":
                    task = EndedTask.from_event(detail, job)
                    found[task.id] = task
        return [*found.values()]

    # --- the bucket ---------------------------------------------------------------------------
    def read(self, key: str) -> bytes | None:
        """An object of the bucket; None when it is not there."""
        from botocore.exceptions import ClientError

        try:
            answer = self.client("s3").get_object(Bucket=self.bucket, Key=key)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
                return None
            raise
        body: bytes = answer["Body"].read()
        return body

    def upload(self, file: Path, key: str) -> str:
        """Put a file into the bucket; return its address."""
        self.client("s3").upload_file(str(file), self.bucket, key)
        return f"s3://{self.bucket}/{key}"

    def download_folder(self, prefix: str, folder: Path) -> int:
        """Fetch all objects below ``prefix``; return how many there were."""
        s3 = self.client("s3")
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        keys = [each["Key"] for page in pages for each in page.get("Contents", [])]
        for key in keys:
            target = folder / key.removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(self.bucket, key, str(target))
        return len(keys)

    def has_secret(self, name: str) -> bool:
        from botocore.exceptions import ClientError

        try:
            self.client("secretsmanager").describe_secret(SecretId=name)
        except ClientError as error:
            if error.response["Error"]["Code"] == "ResourceNotFoundException":
                return False
            raise
        return True

    def open_shell(self, task: Task, command: str) -> dict[str, Any]:
        """A session of ECS Exec in a node's container, for the session manager's plug-in."""
        session: dict[str, Any] = self.client("ecs").execute_command(
            cluster=self.cluster,
            task=task.id,
            container=nodes.CONTAINER,
            command=command,
            interactive=True,
        )["session"]
        return session

    def start_session(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """A session of Systems Manager, for its plug-in."""
        session: dict[str, Any] = self.client("ssm").start_session(**arguments)
        return {key: session[key] for key in ("SessionId", "StreamUrl", "TokenValue")}

    def shell_target(self, task: Task) -> str:
        """What Systems Manager calls a node's container."""
        return f"ecs:{self.cluster}_{task.id}_{task.runtime_id}"
