"""Tasks, hosts and groups of the local AWS: ``rehearsal.model`` behind the calls of ECS and Auto
Scaling. Inside ``.venv-aws`` only.

Records of tasks and groups are the emulator's own; how they change is the model's matter. Unlike
on AWS, a host comes in no time, and a group keeps its hosts until they are terminated. Files in the
local AWS's folder set more:

    capacity.json  how many hosts EC2 has for a capacity provider, by its name; others: any number
    ends.json      exit codes of tasks, by ARN, that are to end by themselves
    bad_hosts.json how many of the next hosts of a capacity provider lack their GPU, by its name
"""

import heapq
import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

from contract.exits import TERMINATED
from rehearsal.ministack.internals import (
    autoscaling,
    concurrency,
    ec2,
    ecs,
    eventbridge,
    responses,
)
from rehearsal.model import EXITED, Group, Model, Record, Times

log = logging.getLogger("ecs-hosts")

#: Of all that happens to tasks, hosts and services: one lock cannot wait for another. Nothing that
#: holds it asks Docker or a Lambda function, which may ask ECS in turn.
LOCK: Final = threading.RLock()
POLL_S: Final = 0.1
#: How long ECS looks for a host: on AWS 10 to 30 minutes.
HOST_SEARCH_S: Final = 60
#: Between two events of a group that EC2 refuses hosts: on AWS about a minute.
REFUSED_EVERY_S: Final = 2
DELAY_S: Final = 1.0
FOREVER: Final = 1e9
AT_ONCE: Final = (0, 0)
#: What ListTasks asks for beside cluster, state and page, and what a task has that is the same.
FILTERS: Final = {
    "containerInstance": "containerInstanceArn",
    "family": "_family",
    "launchType": "launchType",
    "serviceName": "_service",
    "startedBy": "startedBy",
}


def times() -> Times:
    """How long things take here."""
    delay = float(os.environ.get("REHEARSAL_DELAY_S") or DELAY_S)
    return Times(
        boots=AT_ONCE,
        places=0,
        starts=AT_ONCE,
        gives_up=(HOST_SEARCH_S, HOST_SEARCH_S),
        shows=delay,
        knows=0,
        terminates=AT_ONCE,
        tries=(POLL_S, POLL_S),
        surplus=math.inf,
        stops=FOREVER,  # Docker sends SIGKILL itself
    )


def folder() -> Path:
    """Folder of the local AWS."""
    return Path(os.environ["REHEARSAL_FOLDER"])


def planned(name: str) -> Record:
    """Content of a JSON file in the folder; empty if it is missing or damaged."""
    try:
        found: Record = json.loads((folder() / name).read_text())
    except (OSError, ValueError):
        return {}
    return found


def moment(at: float) -> str:
    """A time as the emulator's records have it."""
    return datetime.fromtimestamp(at, tz=UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def spawn(name: str, call: Callable[..., object], *arguments: Any) -> None:
    """Do something in a thread of its own, in the account and region of this one."""
    account, region = responses.get_account_id(), responses.get_region()

    def run() -> None:
        with responses.request_scope(account, region):
            call(*arguments)

    concurrency.spawn_background(run, thread_name=name)


def publish(source: str, kind: str, resource: str, detail: Record) -> None:
    """An event that a service sends to EventBridge."""
    text = json.dumps(detail, default=str)
    entry = {"Source": source, "DetailType": kind, "Resources": [resource], "Detail": text}
    # A rule may call a function, which may ask ECS.
    spawn("event", partial(eventbridge._put_events, {"Entries": [entry]}, allow_aws_source=True))


class Records:
    """Agent of hosts on which tasks are only records."""

    hosts: "Hosts"

    def pull(self, task: Record) -> None:
        self.hosts.begin(task)

    def start(self, task: Record) -> None:
        self._tell(task)

    def terminate(self, task: Record) -> None:
        self.hosts.end(task, TERMINATED)

    def kill(self, task: Record) -> None:
        """A record needs nothing."""

    def ended(self, task: Record) -> None:
        self._tell(task)
        if task["stopCode"] in ("EssentialContainerExited", "TaskFailedToStart"):
            ecs._record_service_task_failure(task)

    def _tell(self, task: Record) -> None:
        """Have the records of the cluster, its services and containers follow a task's."""
        for container in task["containers"]:
            container["lastStatus"] = task["lastStatus"]
        cluster = ecs._cluster_name_from_arn(task["clusterArn"])
        ecs._recount_cluster(cluster)
        ecs._refresh_service_state(cluster, task.get("group", ""))


def record_instance(group: Group, instance: Record) -> None:
    """Have EC2 describe an instance."""
    addresses = ("PrivateDnsName", "PrivateIpAddress", "PublicDnsName", "PublicIpAddress")
    names = ("ImageId", "InstanceType", "SubnetId", "VpcId", "RootDeviceName")
    name = instance["InstanceId"]
    ec2._instances[name] = {
        **dict.fromkeys((*addresses, *names), ""),
        "InstanceId": name,
        "State": {"Code": 16, "Name": "running"},
        "LaunchTime": instance["LaunchTime"],
        "Placement": {
            "AvailabilityZone": group.record["AvailabilityZones"][0],
            "Tenancy": "default",
        },
        "Architecture": "x86_64",
        "RootDeviceType": "ebs",
        "Virtualization": "hvm",
        "Hypervisor": "xen",
        "Monitoring": {"State": "disabled"},
        "AmiLaunchIndex": 0,
    }
    ec2._tags[name] = instance["Tags"]


def fate(group: Group) -> str:
    """Fate of the next host of a group: "bad" as often as ``bad_hosts.json`` asks for, else ""."""
    plan = planned("bad_hosts.json")
    if plan.get(group.provider, 0) < 1:
        return ""
    left = plan | {group.provider: plan[group.provider] - 1}
    (folder() / "bad_hosts.json").write_text(json.dumps(left))
    return "bad"


def refuse(kind: str, message: str, status: int = 400) -> Any:
    """An error of ECS, as it answers."""
    body = json.dumps({"__type": kind, "message": message}).encode()
    return status, {"Content-Type": "application/x-amz-json-1.1", "x-amzn-errortype": kind}, body


class Hosts(Model):
    """The model, with the emulator's clock and records."""

    def __init__(self, agent: Records) -> None:
        self._due: list[tuple[float, int, Callable[..., object], Any]] = []
        self._order = itertools.count()
        self._shown: set[str] = set()
        self._refused: dict[str, float] = {}
        super().__init__(
            (),
            agent,
            now=time.time,
            after=self._later,
            random=Random(os.environ.get("REHEARSAL_SEED", "")),
            stamp=moment,
            times=times(),
            refusal=self._refuse,
            fate=fate,
        )
        self.tasks, self._run_task = ecs._tasks, ecs._run_task
        self._put_providers = ecs._put_cluster_capacity_providers
        agent.hosts = self

    def _refuse(self, group: Group) -> str:
        if group.there < planned("capacity.json").get(group.provider, math.inf):
            return ""
        why = "We currently do not have sufficient capacity. Launching EC2 instance failed."
        if time.time() - self._refused.get(group.name, 0) > REFUSED_EVERY_S:
            self._refused[group.name] = time.time()
            said = {"AutoScalingGroupName": group.name, "StatusMessage": why}
            arn = group.record["AutoScalingGroupARN"]
            publish("aws.autoscaling", "EC2 Instance Launch Unsuccessful", arn, said)
        return why

    def _later(self, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        heapq.heappush(self._due, (time.time() + seconds, next(self._order), call, arguments))

    def settle(self) -> None:
        """Do all that is due by now. Needs the lock, as everything here does."""
        self._find_groups()
        for arn, code in planned("ends.json").items():
            if (task := self.tasks.get(arn)) and task["lastStatus"] == "RUNNING":
                self.end(task, code)
        for group in self.groups.values():
            self.scale(group)
            self.fill(group)
        while self._due and self._due[0][0] <= time.time():
            *_, call, arguments = heapq.heappop(self._due)
            call(*arguments)
        self._show()

    def _find_groups(self) -> None:
        """Those of the clusters' capacity providers. A group that was deleted has no hosts."""
        for cluster in ecs._clusters.values():
            for name in cluster["capacityProviders"]:
                provider = (ecs._capacity_providers.get(name) or {}).get("autoScalingGroupProvider")
                arn = (provider or {}).get("autoScalingGroupArn", "")
                record = autoscaling._asgs.get(arn.rpartition("/")[2])
                if record and name not in self.groups:
                    where = cluster["clusterArn"]
                    self.groups[name] = Group(record=record, provider=name, cluster=where)
        for name, group in [*self.groups.items()]:
            if group.name not in autoscaling._asgs:
                group.record |= {"DesiredCapacity": 0, "MaxSize": 0}
                for instance, each in [*group.instances.items()]:
                    if not each["_leaves"]:
                        self.end_at_once(instance)
                if not group.instances:
                    del self.groups[name]

    def _show(self) -> None:
        """Have Auto Scaling and EC2 describe the instances."""
        there: set[str] = set()
        for group in self.groups.values():
            group.record["Instances"] = [
                {
                    "InstanceId": instance,
                    "LifecycleState": "Terminating" if each["_leaves"] else "InService",
                    "HealthStatus": "Healthy",
                    "AvailabilityZone": group.record["AvailabilityZones"][0],
                    "ProtectedFromScaleIn": group.record["NewInstancesProtectedFromScaleIn"],
                }
                for instance, each in group.instances.items()
            ]
            for instance in group.instances.keys() - self._shown:
                record_instance(group, group.instances[instance])
            there |= group.instances.keys()
        for gone in self._shown - there:
            ec2._instances.pop(gone, None)  # its tags are known for an hour
        self._shown = there

    # --- calls --------------------------------------------------------------------------------
    def run_task(self, request: Record) -> Any:
        definition = ecs._task_defs.get(ecs._resolve_td_key(request.get("taskDefinition", "")))
        if definition and definition["status"] == "INACTIVE":
            return refuse("ClientException", "TaskDefinition is inactive")
        token = request.get("clientToken", "")
        started = self.known(token)
        if not started:
            status, headers, body = self._run_task(request)
            if status >= 400:
                return status, headers, body
            started = [ecs._tasks[each["taskArn"]] for each in json.loads(body)["tasks"]]
            family = request["taskDefinition"].rpartition("/")[2].partition(":")[0]
            own = {task["taskArn"]: task.pop("containerInstanceArn") for task in started}
            for task in started:
                task |= {
                    "startedAt": None,
                    "_family": family,
                    "_service": task["group"].partition("service:")[2],
                }
            self.run(started, token)
            for task in started:
                if not task["capacityProviderName"]:  # on a host that is in no group
                    self.place(task, own[task["taskArn"]])
        return ecs.json_response({"tasks": ecs._sanitize(started), "failures": []})

    def start_task(self, request: Record) -> Any:
        """On hosts that are named, in no capacity provider."""
        (host,) = request["containerInstances"]
        if why := self.unable(host):
            failures = [{"arn": host, "reason": why}]
            return ecs.json_response({"tasks": [], "failures": failures})
        status, headers, body = self._run_task({**request, "launchType": "EC2"})
        if status >= 400:
            return status, headers, body
        (task,) = [ecs._tasks[each["taskArn"]] for each in json.loads(body)["tasks"]]
        family = request["taskDefinition"].rpartition("/")[2].partition(":")[0]
        task |= {"startedAt": None, "_family": family, "_service": ""}
        self.start(task, host)
        return ecs.json_response({"tasks": ecs._sanitize([task]), "failures": []})

    def put_providers(self, request: Record) -> Any:
        """Those of a cluster; one that tasks use stays (API reference)."""
        cluster = ecs._clusters.get(ecs._resolve_cluster_name(request.get("cluster", "")), {})
        used = {
            task["capacityProviderName"]
            for task in self.tasks.values()
            if task["clusterArn"] == cluster.get("clusterArn") and task["lastStatus"] != "STOPPED"
        }
        if used & {*cluster.get("capacityProviders", ())} - {*request["capacityProviders"]}:
            return refuse("ResourceInUseException", "The capacity provider is in use by tasks.")
        return self._put_providers(request)

    def stop_task(self, request: Record, stop_code: str = "UserInitiated") -> Any:
        cluster = ecs._resolve_cluster_name(request.get("cluster", ""))
        task = ecs._resolve_task(request.get("task", ""), cluster)
        if not task:
            return refuse("InvalidParameterException", "The referenced task was not found.")
        self.stop(task, request.get("reason", "Task stopped by user"), stop_code)
        return ecs.json_response({"task": ecs._sanitize(task)})

    def list_tasks(self, request: Record) -> Any:
        which = {FILTERS[each]: request[each] for each in FILTERS if request.get(each)}
        is_alone = len(which) == 1 and "desiredStatus" not in request
        if "startedBy" in which and not is_alone:
            return refuse("InvalidParameterException", "startedBy excludes all other filters")
        name = ecs._resolve_cluster_name(request.get("cluster", ""))
        if name not in ecs._clusters:
            return refuse("ClusterNotFoundException", "Cluster not found.")
        which["clusterArn"] = ecs._clusters[name]["clusterArn"]
        found = self.listed(request.get("desiredStatus", "RUNNING"), **which)
        first = int(request.get("nextToken", 0))
        last = first + request.get("maxResults", 100)
        more = {"nextToken": str(last)} if found[last:] else {}
        return ecs.json_response({"taskArns": found[first:last], **more})

    def list_hosts(self, request: Record) -> Any:
        cluster = ecs._resolve_cluster_name(request.get("cluster", ""))
        found = [each for each in self.hosts if each.split("/")[-2] == cluster]
        return ecs.json_response({"containerInstanceArns": found})

    def describe_hosts(self, request: Record) -> Any:
        found = [each for each in request["containerInstances"] if each in self.hosts]
        shown = [ecs._sanitize(self.described(each)) for each in found]
        return ecs.json_response({"containerInstances": shown})

    def update_state(self, request: Record) -> Any:
        for each in {*request["containerInstances"]} & self.hosts.keys():
            self.set_state(each, request["status"])
        return self.describe_hosts(request)

    def describe_activities(self, parameters: Record) -> Any:
        """The newest launch of a group."""
        name = autoscaling._p(parameters, "AutoScalingGroupName")
        found = {group.name: group.activities for group in self.groups.values()}.get(name, [])
        shown = ""
        for each in found:
            fields = (f"<{key}>{value}</{key}>" for key, value in each.items())
            shown += f"<member>{''.join(fields)}</member>"
        what = "DescribeScalingActivities"
        result = f"<{what}Result><Activities>{shown}</Activities></{what}Result>"
        return autoscaling._xml(200, f"{what}Response", result)

    def end_instance(self, parameters: Record) -> Any:
        instance = autoscaling._p(parameters, "InstanceId")
        lowers = autoscaling._p(parameters, "ShouldDecrementDesiredCapacity") == "true"
        try:
            self.terminate(instance, lowers=lowers)
        except StopIteration:
            return autoscaling._error("ValidationError", f"Instance Id not found - {instance}")
        except ValueError as error:
            return autoscaling._error(str(error), f"{instance} cannot be terminated so")
        name = "TerminateInstanceInAutoScalingGroup"
        return autoscaling._xml(200, f"{name}Response", f"<{name}Result/>")

    def end_instances(self, parameters: Record) -> Any:
        """One that has gone already is known for an hour."""
        for instance in ec2._parse_member_list(parameters, "InstanceId"):
            self.end_at_once(instance)
        return ec2._xml(200, "TerminateInstancesResponse", "<instancesSet/>")

    def mark_stopped(
        self, _arn: str, task: Record, reason: str, stop_code: str, exit_code: int | None = None
    ) -> bool:
        with LOCK:
            is_new = bool(task["lastStatus"] != "STOPPED")
            # The emulator's own words for it are others than AWS's.
            why = EXITED if stop_code == EXITED[0] else (stop_code, reason)
            self.end(task, exit_code, *why)
            return is_new

    def door(self, answer: Callable[[Record], Any]) -> Callable[[Record], Any]:
        """A call, before and after which all has happened that is due."""

        def call(request: Record) -> Any:
            with LOCK:
                self.settle()
                found = answer(request)
                self.settle()
                return found

        return call


def install(agent: Records) -> None:
    """Give the emulator these tasks and hosts."""
    ecs.resource_lock = lambda *_: LOCK
    hosts = Hosts(agent)
    door = hosts.door
    ecs._run_task = door(hosts.run_task)
    ecs._stop_task = door(partial(hosts.stop_task, stop_code="ServiceSchedulerInitiated"))
    ecs._mark_task_stopped = hosts.mark_stopped
    ecs._put_cluster_capacity_providers = door(hosts.put_providers)
    ecs._ACTION_MAP |= {
        "RunTask": ecs._run_task,
        "StartTask": door(hosts.start_task),
        "StopTask": door(hosts.stop_task),
        "PutClusterCapacityProviders": ecs._put_cluster_capacity_providers,
        "ListTasks": door(hosts.list_tasks),
        "ListContainerInstances": door(hosts.list_hosts),
        "DescribeContainerInstances": door(hosts.describe_hosts),
        "UpdateContainerInstancesState": door(hosts.update_state),
    }
    ec2._ACTION_MAP["TerminateInstances"] = door(hosts.end_instances)
    matches = ec2._matches_filters

    def matches_ids(instance: Record, filters: Record) -> bool:
        """The emulator's own takes no notice of this filter: each instance would pass."""
        name = instance["InstanceId"]
        return name in filters.get("instance-id", [name]) and matches(instance, filters)

    ec2._matches_filters = matches_ids
    autoscaling._reconcile_instances = lambda _group: None
    autoscaling._ACTION_MAP |= {
        "DescribeAutoScalingGroups": door(autoscaling._describe_asgs),
        "DescribeScalingActivities": door(hosts.describe_activities),
        "SetDesiredCapacity": door(autoscaling._set_desired_capacity),
        "TerminateInstanceInAutoScalingGroup": door(hosts.end_instance),
    }

    def follow() -> None:
        settle = door(bool)
        while True:
            time.sleep(POLL_S)
            try:
                settle({})
            except Exception:  # logged; the next look tries again
                log.exception("hosts")

    spawn("ecs-hosts", follow)
