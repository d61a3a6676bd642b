"""The one AWS of all tests: what clients of boto3 are answered of tasks, hosts, groups of hosts,
executions and objects. How tasks and hosts move is ``rehearsal.model``'s matter, objects are S3's.

A test makes what there is, says what fails, and sees which calls came. That ECS and Auto Scaling
answer so is compared with the local AWS in ``tests/rehearsal/test_model.py``.
"""

import functools
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from random import Random
from types import SimpleNamespace
from typing import Any, Final

from botocore.exceptions import ClientError

from rehearsal.model import Group, Model, Record, Times
from tests.aws.calls import Paged, refused
from tests.aws.s3 import S3

#: What ListTasks asks for, and what the model's tasks have that is the same.
_FILTERS: Final = {
    **{"containerInstance": "containerInstanceArn", "family": "_family"},
    "serviceName": "_service",
}
#: Entries of a page.
UNLIMITED: Final = 1_000_000
CLUSTER: Final = "arn:aws:ecs:us-east-1:1:cluster/c"
TASKS: Final = "arn:aws:ecs:us-east-1:1:task/c/"


@functools.lru_cache(1024)
def stamp(at: float) -> datetime:
    return datetime.fromtimestamp(at, tz=UTC)


class MissingError(ClientError):
    """Step Functions knows no such execution."""

    def __init__(self) -> None:
        super().__init__({"Error": {"Code": "ExecutionDoesNotExist"}}, "DescribeExecution")


def model_of(
    groups: Mapping[str, str], *, now: Callable[[], float], after: Callable[..., None], **more: Any
) -> Model:
    """A model whose lists show all at once.

    Args:
        groups: names of groups -> their capacity providers.
    """
    made = []
    for name, provider in groups.items():
        record = {"AutoScalingGroupName": name, "DesiredCapacity": 0, "MaxSize": 9}
        made.append(Group(record=record, provider=provider, cluster=CLUSTER))
    idle: Any = SimpleNamespace(pull=bool, start=bool, terminate=bool, kill=bool, ended=bool)
    given = {"agent": idle, "times": Times(shows=0, knows=0)} | more
    return Model(made, now=now, after=after, random=Random(0), stamp=stamp, **given)


def submitted(task: str, at: datetime) -> Record:
    """The event of an execution that has started a task."""
    details = {"resourceType": "ecs", "output": json.dumps({"Tasks": [{"TaskArn": task}]})}
    return {"type": "TaskSubmitted", "timestamp": at, "taskSubmittedEventDetails": details}


class Account(Paged):
    """All clients of an account."""

    exceptions = SimpleNamespace(ClientError=ClientError, ExecutionDoesNotExist=MissingError)
    page = 3
    """Entries of a page of a list: AWS may return fewer than it is asked for."""
    families: dict[str, str] = {}  # noqa: RUF012
    """Of task definitions, by the capacity providers of their hosts; others' have their names."""

    def __init__(self, model: Model) -> None:
        self.model, self.s3 = model, S3()
        self.fails: dict[str, Any] = {}
        """By the name of an operation: an error, or a function that returns one, or None, for the
        arguments of a call."""
        self.calls: list[tuple[str, Record]] = []
        self.executions: dict[str, Any] = {}
        """By their names, the newest last, as DescribeExecution has them."""
        self.history: dict[str, list[Record]] = {}

    def client(self, _service: str, /, **_: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        """An operation: fails as told, is noted, and answers by its method ``on_…``."""
        if name.startswith(("on_", "_")):
            raise AttributeError(name)

        def call(*given: Any, **named: Any) -> Any:
            fault = self.fails.get(name)
            if fault := fault if isinstance(fault, Exception) or not fault else fault(**named):
                raise fault
            self.calls.append((name, named))
            return (getattr(self, f"on_{name}", None) or getattr(self.s3, name))(*given, **named)

        return call

    def sent(self, name: str) -> list[Record]:
        """What an operation was called with, each time."""
        return [named for operation, named in self.calls if operation == name]

    def _page(
        self,
        key: str,
        found: list[Any],
        nextToken: str = "0",  # noqa: N803
        maxResults: int = UNLIMITED,  # noqa: N803
        **_: Any,
    ) -> Any:
        at = int(nextToken)
        end = at + min(self.page, maxResults)
        if end >= len(found):
            return {key: found[at:]}
        return {key: found[at:end], "nextToken": str(end)}

    # --- tasks
    def on_list_tasks(
        self,
        cluster: str,
        desiredStatus: str = "",  # noqa: N803
        *,
        nextToken: str = "0",  # noqa: N803
        maxResults: int = UNLIMITED,  # noqa: N803
        **which: Any,
    ) -> Any:
        del cluster
        is_alone = len(which) == 1 and not desiredStatus
        assert "startedBy" not in which or is_alone, "it must be the only filter"
        fields = {_FILTERS.get(name, name): value for name, value in which.items()}
        found = self.model.listed(desiredStatus or "RUNNING", **fields)
        return self._page("taskArns", found, nextToken, maxResults)

    def on_describe_tasks(self, tasks: list[str], **_: Any) -> Any:
        assert len(tasks) in range(1, 101)
        return {"tasks": [each.copy() for each in self.model.seen(tasks)]}

    def on_run_task(self, **request: Any) -> Any:
        return {"tasks": [each.copy() for each in self.run(request)], "failures": []}

    def run(self, request: Record) -> list[Record]:
        """Start tasks, or find those of the same token (RunTask)."""
        asked, token = request.get("count", 1), request.get("clientToken", "")
        assert asked in range(1, 11)
        assert len(token) <= 64
        assert len(request["startedBy"]) <= 128
        if known := self.model.known(token):
            return known
        provider = request["capacityProviderStrategy"][0]["capacityProvider"]
        family, num = self.families.get(provider, provider), len(self.model.tasks)
        definition = provider.removeprefix("cp-") if "-pool-" in provider else family
        started: list[Record] = [
            {name: request[name] for name in ("startedBy", "group", "overrides")}
            | {
                "taskArn": f"{TASKS}{number:06}",
                "containers": [{"name": "ray"}],
                "attachments": [],
                "tags": request.get("tags", []),
                "capacityProviderName": provider,
                "taskDefinitionArn": f"arn:x:task-definition/{definition}:3",
                "_family": family,
            }
            for number in range(num, num + asked)
        ]
        self.model.run(started, token)
        return started

    def on_start_task(self, containerInstances: list[str], **request: Any) -> Any:  # noqa: N803
        (host,) = containerInstances
        assert len(request["startedBy"]) <= 36
        if why := self.model.unable(host):
            return {"tasks": [], "failures": [{"arn": host, "reason": why}]}
        task: Record = {name: request[name] for name in ("startedBy", "group", "overrides")} | {
            "taskArn": f"{TASKS}{len(self.model.tasks):06}",
            "containers": [{"name": "ray"}],
            "attachments": [],
            "tags": request.get("tags", []),
            "taskDefinitionArn": request["taskDefinition"],
            "_family": self.model.hosts[host]["_tasks"][-1]["_family"],
        }
        self.model.start(task, host)
        return {"tasks": [task.copy()], "failures": []}

    def on_stop_task(self, task: str, reason: str, **_: Any) -> Any:
        """A task is named by its ARN or by its id."""
        for arn in (task, f"{TASKS}{task}"):
            if found := self.model.tasks.get(arn):
                self.model.stop(found, reason)
                return {"task": found.copy()}
        raise refused("InvalidParameterException")

    def on_list_services(self, **_: Any) -> Any:
        names = {each.get("_service") for each in self.model.tasks.values()} - {None}
        return {"serviceArns": [f"arn:service/cluster/{each}" for each in names]}

    # --- hosts
    def on_list_container_instances(self, **page: Any) -> Any:
        return self._page("containerInstanceArns", [*self.model.hosts], **page)

    def on_describe_container_instances(self, containerInstances: list[str], **_: Any) -> Any:  # noqa: N803
        found = [each for each in containerInstances if each in self.model.hosts]
        return {"containerInstances": [self.model.described(each) for each in found]}

    def on_update_container_instances_state(self, **given: Any) -> Any:
        """Of a host that has gone, it answers a failure and no error."""
        for each in {*given["containerInstances"]} & self.model.hosts.keys():
            self.model.set_state(each, given["status"])

    def on_deregister_container_instance(self, **given: Any) -> Any:
        host = self.model.hosts.pop(given["containerInstance"])
        assert given["force"] or not self.model.on(host)

    def on_put_attributes(self, attributes: list[Record], **_: Any) -> Any:
        self._mark(attributes, attributes[0])

    def on_delete_attributes(self, attributes: list[Record], **_: Any) -> Any:
        self._mark([], attributes[0])

    def _mark(self, new: list[Record], old: Record) -> None:
        if (host := self.model.hosts.get(old["targetId"])) is None:
            raise refused("TargetNotFoundException")
        kept = [each for each in host["attributes"] if each["name"] != old["name"]]
        host["attributes"] = new + kept

    def on_terminate_instance_in_auto_scaling_group(self, **given: Any) -> Any:
        lowers = given["ShouldDecrementDesiredCapacity"]
        try:
            self.model.terminate(given["InstanceId"], lowers=lowers)
        except StopIteration:
            raise refused("ValidationError") from None
        except ValueError as error:
            raise refused(str(error)) from None

    def on_terminate_instances(self, InstanceIds: list[str]) -> Any:  # noqa: N803
        for each in InstanceIds:
            self.model.end_at_once(each)

    # --- groups
    def group(self, name: str) -> Group:
        (found,) = [each for each in self.model.groups.values() if each.name == name]
        return found

    def on_describe_auto_scaling_groups(self, **which: Any) -> Any:
        states = ("InService", "Terminating:Wait")
        return {
            "AutoScalingGroups": [
                group.record
                | {
                    "Instances": [
                        each | {"LifecycleState": states[each["_leaves"]]}
                        for each in group.instances.values()
                    ]
                }
                for group in map(self.group, which["AutoScalingGroupNames"])
            ]
        }

    def on_describe_scaling_activities(self, **which: str) -> Any:
        return {"Activities": self.group(which["AutoScalingGroupName"]).activities}

    def on_resume_processes(self, AutoScalingGroupName: str, **_: Any) -> Any:  # noqa: N803
        group = self.group(AutoScalingGroupName)
        if group.record.pop("SuspendedProcesses", None):
            self.model.fill(group)

    def on_set_desired_capacity(self, AutoScalingGroupName: str, DesiredCapacity: int) -> Any:  # noqa: N803
        self.group(AutoScalingGroupName).desired = DesiredCapacity

    def on_delete_auto_scaling_group(self, AutoScalingGroupName: str, ForceDelete: bool) -> Any:  # noqa: N803
        """With its hosts."""
        group = self.group(AutoScalingGroupName)
        assert ForceDelete or not group.instances
        group.desired = 0
        for each in [*group.instances]:
            self.model.end_at_once(each)

    def on_describe_instances(self, Filters: Any) -> Any:  # noqa: N803
        """Those that all filters let pass."""
        found = []
        for group in self.model.groups.values():
            for each in group.instances.values():
                state = "shutting-down" if "_ends" in each else "running"
                has = {
                    "instance-id": each["InstanceId"],
                    "instance-state-name": state,
                    "tag:aws:autoscaling:groupName": group.name,
                }
                if all(has[one["Name"]] in one["Values"] for one in Filters):
                    found.append(each | {"State": {"Name": state}})
        return {"Reservations": [{"Instances": [each]} for each in found]}

    def on_create_tags(self, Resources: list[str], Tags: list[Record]) -> Any:  # noqa: N803
        """A tag takes the place of another one of its key."""
        instances = {
            k: v for group in self.model.groups.values() for k, v in group.instances.items()
        }
        for name in Resources:
            new = {each["Key"]: each["Value"] for each in [*instances[name]["Tags"], *Tags]}
            instances[name]["Tags"] = [{"Key": key, "Value": value} for key, value in new.items()]

    # --- messages
    def on_publish(self, **_: Any) -> Any:
        return {"MessageId": "1"}

    # --- executions
    def on_list_executions(self, statusFilter: str = "", **page: Any) -> Any:  # noqa: N803
        """The newest first."""
        found = [each for each in self.executions.values() if statusFilter in ("", each["status"])]
        return self._page("executions", found[::-1], **page)

    def on_describe_execution(self, executionArn: str) -> Any:  # noqa: N803
        if (name := executionArn.rpartition(":")[2]) not in self.executions:
            raise MissingError
        return self.executions[name]

    def on_get_execution_history(self, executionArn: str, **page: Any) -> Any:  # noqa: N803
        return self._page("events", self.history[executionArn.rpartition(":")[2]], **page)

    def on_stop_execution(self, executionArn: str, **why: str) -> Any:  # noqa: N803
        stopped = {"status": "ABORTED", "stopDate": stamp(self.model._now())}
        self.on_describe_execution(executionArn).update(stopped, **why)
        return stopped
