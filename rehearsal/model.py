"""Tasks, hosts and groups of hosts as ECS, EC2 Auto Scaling and EC2 move them: pure rules.

No thread, no network and no clock of its own: time and what happens later are handed in, so that a
seed can play a month in a second. Records have the shape of the API's answers; fields that begin
with an underscore are the model's own. Each rule names its source, or the word "assumed".

Every state that AWS documents, and who has a rule for it (a test compares the names with botocore):

tasks (developer guide of ECS, "Amazon ECS task lifecycle")
    PROVISIONING  waits for a host, or for its network interface on one; the keeper stops a head
                  after the job's patience, and a task that has a host as one that does not start
    PENDING, ACTIVATING  its container is made; the keeper stops it after TASK_STARTS_S. The model
                  has PENDING only: ACTIVATING is short and for load balancers and service discovery
    RUNNING       UNHEALTHY in two sweeps: the keeper stops it
    DEACTIVATING, STOPPING, DEPROVISIONING  told to stop; longer than STOP_TIMEOUT_S: the keeper
                  ends its host. The model has RUNNING with the desired status STOPPED instead
    STOPPED, DELETED  over; ECS describes it for an hour
container instances (API reference of ECS, ContainerInstance)
    ACTIVE        takes tasks; without one it is released, disconnected it is lost, and its task
                  is after AGENT_LOST_S
    DRAINING      takes none; the keeper ends it once its tasks have ended
    REGISTERING, REGISTRATION_FAILED, DEREGISTERING  only with awsvpcTrunking, an account's setting;
                  one that stays so takes no task and is released as idle
instances of a group (user guide of EC2 Auto Scaling, "Instance lifecycle")
    Pending, InService  boots; the keeper ends one that has not joined after HOST_JOINS_S
    Terminating, Terminating:Wait, Terminating:Proceed, Terminated  ECS's draining waits, EC2 does
                  not: the keeper asks both
    Pending:Wait, Pending:Proceed, Terminating:Retained, Quarantined  of lifecycle hooks and
                  policies that no stack has; billed ones are ended as not joined or idle
    Detaching, Detached, EnteringStandby, Standby, ReplacingRootVolume, ReplacingRootVolume:Wait,
    ReplacingRootVolume:Proceed, RootVolumeReplaced  only by a person's call
    Warmed:Pending, Warmed:Pending:Wait, Warmed:Pending:Proceed, Warmed:Pending:Retained,
    Warmed:Terminating, Warmed:Terminating:Wait, Warmed:Terminating:Proceed,
    Warmed:Terminating:Retained, Warmed:Terminated, Warmed:Stopped, Warmed:Running,
    Warmed:Hibernated  of warm pools: there are none
    A group's launches may be suspended: by AWS, which the sweep resumes, or by a person; a group
    may replace an instance below a task, which then has its host for two days
executions and their machine (API reference of Step Functions)
    RUNNING       the job queues, runs or pauses; the teardown ends it
    SUCCEEDED, FAILED, TIMED_OUT, ABORTED  over: each has its record, from the clean-up or a sweep
    PENDING_REDRIVE  of children of a distributed map: there is none. If a person redrives a job,
                  its record stays (docs/jobs.md)
    ACTIVE, DELETING  no execution outlives its machine: the teardown waits for all
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Protocol

Record = dict[str, Any]

#: Of a task whose container has ended by itself (API reference of ECS, Task).
EXITED: Final = ("EssentialContainerExited", "Essential container in task exited")
#: Of a task that ECS has given up on (containers-roadmap 2381).
NO_HOST: Final = ("TaskFailedToStart", "EMPTY CAPACITY PROVIDER")
#: Of a task whose instance was terminated.
LOST: Final = ("TerminationNotice", "Host EC2 (instance {}) terminated.")
#: Of an instance that was terminated (API reference of EC2, StateReason).
SHUT_DOWN: Final = ("Client.UserInitiatedShutdown:", "User initiated shutdown")
#: Kind of a thing -> field of its state, and the states of a job that succeeds, in their order. Of
#: CloudFormation, which is not modelled, all that is no failure.
STATES: Final[Mapping[str, tuple[str, Sequence[str]]]] = {
    "task": ("lastStatus", ("PROVISIONING", "PENDING", "RUNNING", "STOPPED")),
    "host": ("status", ("ACTIVE", "DRAINING")),
    "machine": ("State.Name", ("running", "shutting-down", "terminated")),
    "execution": ("status", ("RUNNING", "SUCCEEDED")),
    "event": (
        "ResourceStatus",
        (
            *("CREATE_IN_PROGRESS", "CREATE_COMPLETE", "UPDATE_IN_PROGRESS", "UPDATE_COMPLETE"),
            *("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS", "DELETE_IN_PROGRESS", "DELETE_COMPLETE"),
            *("REVIEW_IN_PROGRESS", "DELETE_SKIPPED"),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Times:
    """How long things take, in seconds: at least, at most."""

    boots: tuple[float, float] = (60, 240)  # assumed
    places: float = 1  # assumed: until ECS looks for a host again
    starts: tuple[float, float] = (5, 90)  # assumed: pull and start of a container
    gives_up: tuple[float, float] = (600, 1800)  # on a task without a host: containers-roadmap 2381
    shows: float = 8  # assumed: until lists show a change; less than contract.times.CONSISTENT_S
    knows: float = 8  # assumed: until a task that was just started is described
    terminates: tuple[float, float] = (5, 300)  # assumed: EC2 shuts a host down
    scales: float = 60  # between two looks of managed scaling: its metric is one of a minute
    surplus: float = 900  # until it takes a host away that has no task: containers-roadmap 1220
    tries: tuple[float, float] = (20, 60)  # assumed: Auto Scaling tries again to start a host
    stops: float = 270  # between SIGTERM and SIGKILL: the agent's setting, contract.times
    suspends: float = 86_400  # Auto Scaling's guide: of launches that fail, "over 24 hours"
    drains: float = 172_800  # ECS's draining keeps a host whose tasks do not end: roadmap 2467


class Agent(Protocol):
    """Agent that runs the tasks of hosts."""

    def pull(self, task: Record) -> None:
        """Make a container; ``Model.begin`` is told when it is there."""

    def start(self, task: Record) -> None:
        """It runs; ``Model.end`` is told of its end."""

    def terminate(self, task: Record) -> None:
        """SIGTERM."""

    def kill(self, task: Record) -> None:
        """SIGKILL, or the host's end."""

    def ended(self, task: Record) -> None:
        """It is over."""


@dataclass(kw_only=True, slots=True)
class Group:
    """An Auto Scaling group and its capacity provider."""

    record: Record
    """As Auto Scaling describes it."""
    provider: str
    cluster: str
    """ARN of the cluster that its hosts join."""
    instances: dict[str, Record] = field(default_factory=dict)
    """By id; those that are being terminated among them."""
    activities: list[Record] = field(default_factory=list)
    """As DescribeScalingActivities has them, the newest first."""
    surplus_since: float | None = None
    fails_since: float | None = None
    is_trying: bool = False

    @property
    def name(self) -> str:
        return str(self.record["AutoScalingGroupName"])

    @property
    def desired(self) -> int:
        return int(self.record["DesiredCapacity"])

    @desired.setter
    def desired(self, number: int) -> None:
        self.record["DesiredCapacity"] = number

    @property
    def there(self) -> int:
        """How many instances are not being terminated."""
        return sum(not each["_leaves"] for each in self.instances.values())


class Model:
    """An account's tasks and hosts."""

    def __init__(
        self,
        groups: Iterable[Group],
        agent: Agent,
        *,
        now: Callable[[], float],
        after: Callable[..., None],
        random: Random,
        stamp: Callable[[float], Any],
        times: Times | None = None,
        refusal: Callable[[Group], str] = lambda _: "",
        fate: Callable[[Group], str] = lambda _: "",
    ) -> None:
        """
        Args:
            after: ``after(seconds, call, *arguments)`` calls later.
            stamp: a time as records have it.
            refusal: EC2's sentence if it has no other host for a group now; "" if it has. Asked for
                each host: some of a gang may come.
            fate: of a new host: "" or "unjoined", which never joins the cluster; "lacks" what a
                task needs, so that none is placed there; "bad": tasks end on it; "hangs": its
                Docker does not answer, so that tasks stay PENDING, those that are stopped too
                (amazon-ecs-agent 306, 731, 3226).
        """
        self.groups: dict[str, Group] = {}
        self.tasks: dict[str, Record] = {}
        self.hosts: dict[str, Record] = {}
        """Hosts of the cluster, by ARN."""
        self.times = times or Times()
        self._agent, self._now, self._after, self._random = agent, now, after, random
        self._stamp, self._refusal, self._fate = stamp, refusal, fate
        self._waiting: dict[str, Record] = {}
        """Tasks without a host."""
        self._tokens: dict[str, list[str]] = {}
        self._number = 0
        self._is_placing = False
        for group in groups:
            self.add(group)

    def add(self, group: Group) -> None:
        """A group that a deploy makes."""
        self.groups[group.provider] = group
        self._after(self._random.uniform(0, self.times.scales), self._look, group)

    def _id(self) -> int:
        self._number += 1
        return self._number

    def _between(self, limits: tuple[float, float]) -> float:
        return self._random.uniform(*limits)

    # --- tasks
    def known(self, token: str) -> list[Record]:
        """Tasks of a client token that is known: RunTask starts nothing then (API reference)."""
        return [self.tasks[arn] for arn in self._tokens.get(token, ())]

    def run(self, started: Iterable[Record], token: str = "") -> None:
        """RunTask. Of a task, the request's own fields are there."""
        for task in started:
            arn = task["taskArn"]
            task |= {
                "lastStatus": "PROVISIONING",
                "desiredStatus": "RUNNING",
                "createdAt": self._stamp(self._now()),
            }
            self.tasks[arn] = self._waiting[arn] = task
            task["_known"] = self._now() + self._random.uniform(0, self.times.knows)
            self._changed(task)
            self._after(self._between(self.times.gives_up), self._give_up, task)
            if token:
                self._tokens.setdefault(token, []).append(arn)
        self._place_soon()

    def unable(self, arn: str) -> str:
        """Why StartTask fails on a host, in ECS's words; "" if it does not (developer guide, "API
        failure reasons")."""
        host = self.hosts.get(arn)
        if host is None or host["status"] != "ACTIVE":
            return "MISSING" if host is None else "INACTIVE"
        if not host["agentConnected"]:
            return "AGENT"
        return "RESOURCE:CPU" if self.on(host) else ""

    def start(self, task: Record, arn: str) -> None:
        """StartTask on a host that is able to."""
        self.run([task])
        self.hosts[arn]["_tasks"].append(task)
        self.place(task, arn)

    def _changed(self, task: Record) -> None:
        """ListTasks shows it after a while: answers are eventually consistent (API reference)."""
        task["_shows"] = self._now() + self._random.uniform(0, self.times.shows)

    def _give_up(self, task: Record) -> None:
        if task["lastStatus"] == "PROVISIONING":
            self.end(task, None, *NO_HOST)

    def listed(self, desired: str, **fields: str) -> list[str]:
        """ListTasks: ARNs of the tasks with these fields, as far as lists show them."""
        now, found = self._now(), []
        for task in self.tasks.values():
            is_stopped = task["desiredStatus"] == "STOPPED"
            if now < task["_shows"]:
                # A new task is in no list yet; one that was told to stop is where it was.
                if not is_stopped:
                    continue
                is_stopped = False
            if is_stopped is (desired == "STOPPED") and all(
                task.get(name) == value for name, value in fields.items()
            ):
                found.append(task["taskArn"])
        return found

    def seen(self, arns: Iterable[str]) -> list[Record]:
        """DescribeTasks: those of them that it knows by now."""
        now, tasks = self._now(), self.tasks
        return [tasks[arn] for arn in arns if arn in tasks and now >= tasks[arn]["_known"]]

    def stop(self, task: Record, reason: str, stop_code: str = "UserInitiated") -> None:
        """StopTask; the same again changes nothing."""
        if task["desiredStatus"] == "STOPPED":
            return
        task |= {"desiredStatus": "STOPPED", "stopCode": stop_code, "stoppedReason": reason}
        self._changed(task)
        if task["lastStatus"] == "PROVISIONING":
            self.end(task, None)
        elif task["lastStatus"] == "PENDING":
            if not self._is_hung(task):
                self._after(self._between(self.times.starts), self.end, task, None)
        elif self.hosts.get(task["containerInstanceArn"], {}).get("agentConnected", True):
            self._terminate(task)

    def _terminate(self, task: Record) -> None:
        self._agent.terminate(task)
        self._after(self.times.stops, self._kill, task)

    def _kill(self, task: Record) -> None:
        # Linux kills no process in uninterruptible sleep.
        if task["lastStatus"] == "RUNNING" and "_is_stuck" not in task:
            self._agent.kill(task)
            self.end(task, 137)

    def end(
        self, task: Record, code: int | None, stop_code: str = EXITED[0], reason: str = EXITED[1]
    ) -> None:
        """A task is over. Why it was told to stop stays its reason (API reference, Task)."""
        if task["lastStatus"] == "STOPPED":
            return
        host = self.hosts.get(task.get("containerInstanceArn", ""))
        if host and not host["agentConnected"] and not host["_leaves"]:
            host["_unreported"].append((task, code, stop_code, reason))
            return
        if task["desiredStatus"] == "RUNNING":
            task |= {"stopCode": stop_code, "stoppedReason": reason}
            self._changed(task)
        self._waiting.pop(task["taskArn"], None)
        task |= {"lastStatus": "STOPPED", "desiredStatus": "STOPPED"}
        task["stoppedAt"] = self._stamp(self._now())
        if code is not None:
            task["containers"] = [{**task["containers"][0], "exitCode": code}]
        self._agent.ended(task)
        if host and host["_leaves"] and not self.on(host):
            group = self.groups[host["capacityProviderName"]]
            self._shut_down(group, host["ec2InstanceId"])
        self._place_soon()

    # --- placement
    def on(self, host: Record) -> list[Record]:
        """Tasks on a host that have not stopped."""
        arn = host["containerInstanceArn"]
        return [task for task in host["_tasks"] if task["lastStatus"] != "STOPPED"] if arn else []

    def _place_soon(self) -> None:
        if not self._is_placing:
            self._is_placing = True
            self._after(self.times.places, self._place)

    def _place(self) -> None:
        """One task a host: each takes all of it. ECS documents no order of tasks that wait."""
        self._is_placing = False
        waiting = [*self._waiting.values()]
        self._random.shuffle(waiting)
        for task in waiting:
            free = [
                host
                for host in self.hosts.values()
                if host["capacityProviderName"] == task["capacityProviderName"]
                and host["status"] == "ACTIVE"
                and host["agentConnected"]
                and host["_fate"] != "lacks"
                and not self.on(host)
            ]
            if free:
                host = self._random.choice(free)
                host["_tasks"].append(task)
                self.place(task, host["containerInstanceArn"])

    def place(self, task: Record, arn: str) -> None:
        """Give a task a host."""
        task |= {"containerInstanceArn": arn, "lastStatus": "PENDING"}
        del self._waiting[task["taskArn"]]
        if self._is_hung(task):
            task["_placed_at"] = self._now()
        else:
            self._agent.pull(task)

    def _is_hung(self, task: Record) -> bool:
        """True if the Docker daemon of a task's host does not answer."""
        host = self.hosts.get(task["containerInstanceArn"])
        return host is not None and host["_fate"] == "hangs"

    def begin(self, task: Record) -> None:
        """The container of a task runs, unless the task was told to stop before."""
        if task["lastStatus"] == "PENDING" and task["desiredStatus"] == "RUNNING":
            task |= {"lastStatus": "RUNNING", "startedAt": self._stamp(self._now())}
            task["healthStatus"] = "HEALTHY"  # UNKNOWN until its first check
            self._agent.start(task)

    def waiting(self, group: Group) -> list[Record]:
        """Tasks that wait for a host of a group."""
        tasks = self._waiting.values()
        return [each for each in tasks if each["capacityProviderName"] == group.provider]

    # --- hosts
    def _look(self, group: Group) -> None:
        self._after(self.times.scales, self._look, group)
        self.scale(group)

    def scale(self, group: Group) -> None:
        """Managed scaling. From zero it asks for two hosts for one task (containers-roadmap 1716);
        a host is taken away only if it has no task for a quarter of an hour."""
        if not group.instances and not self._waiting:
            group.surplus_since = None
            return
        mine = [
            host for host in self.hosts.values() if host["capacityProviderName"] == group.provider
        ]
        waiting = len(self.waiting(group))
        # Assumed: one that is being terminated does not count.
        needed = sum(bool(self.on(host)) and not host["_leaves"] for host in mine) + waiting
        if waiting and not group.there:
            needed = max(needed, 2)
        idle = [host for host in mine if not self.on(host) and not host["_leaves"]]
        if needed > group.desired:
            group.desired = min(group.record["MaxSize"], needed)
            self.fill(group)
        if waiting or not idle:
            group.surplus_since = None
        elif group.surplus_since is None:
            group.surplus_since = self._now()
        elif self._now() - group.surplus_since >= self.times.surplus:
            group.surplus_since = None
            for host in idle:
                # A deploy may have lowered the group's maximum below the hosts that it has.
                self.terminate(host["ec2InstanceId"], lowers=group.there <= group.desired)

    def fill(self, group: Group) -> None:
        """Auto Scaling starts what is missing, again and again; after a day without success it may
        suspend that (administrative suspension, in its guide), until somebody resumes it."""
        missing = 0 if group.record.get("SuspendedProcesses") else group.desired - group.there
        is_asked, why, now = missing > 0, "", self._now()
        while missing > 0 and not (why := self._refusal(group)):
            instance = f"i-{self._id():06}"
            group.instances[instance] = {
                "InstanceId": instance,
                "LaunchTime": self._stamp(now),
                "Tags": [{"Key": "aws:autoscaling:groupName", "Value": group.name}],
                "_leaves": False,
                "_fate": self._fate(group),
            }
            if group.instances[instance]["_fate"] != "unjoined":
                self._after(self._between(self.times.boots), self._join, group, instance)
            missing -= 1
        if not why:
            group.fails_since = None if is_asked else group.fails_since
        elif now - (group.fails_since or now) > self.times.suspends:
            reason = "launches have failed"  # assumed: of a person's own it is "User suspended at"
            group.record["SuspendedProcesses"] = [
                {"ProcessName": "Launch", "SuspensionReason": reason}
            ]
            group.fails_since = None
        else:
            group.fails_since = group.fails_since or now
        if is_asked:
            failed = {"StatusCode": "Failed", "StatusMessage": why} if why else {}
            launch = {"Description": "Launching a new EC2 instance", "StatusCode": "Successful"}
            group.activities = [{**launch, "StartTime": self._stamp(now), **failed}]
        if missing > 0 and not group.is_trying:
            group.is_trying = True
            self._after(self._between(self.times.tries), self._try, group)

    def _try(self, group: Group) -> None:
        group.is_trying = False
        self.fill(group)

    def _join(self, group: Group, instance: str) -> None:
        if instance not in group.instances or group.instances[instance]["_leaves"]:
            return
        place = group.cluster.replace(":cluster/", ":container-instance/")
        arn = f"{place}/{instance[2:]}"
        self.hosts[arn] = {
            "containerInstanceArn": arn,
            "ec2InstanceId": instance,
            "capacityProviderName": group.provider,
            "status": "ACTIVE",
            "agentConnected": True,
            "registeredAt": self._stamp(self._now()),
            "attributes": [],
            "_fate": group.instances[instance]["_fate"],
            "_leaves": False,
            "_tasks": [],
            "_unreported": [],
        }
        self._place_soon()

    def connect(self, arn: str, *, is_connected: bool) -> None:
        """A disconnected agent reports and hears nothing, until it is connected again."""
        if (host := self.hosts.get(arn)) is None or host["agentConnected"] is is_connected:
            return
        host |= {"agentConnected": is_connected, "_away_since": self._now()}
        if is_connected:
            unreported, host["_unreported"] = host["_unreported"], []
            for each in unreported:
                self.end(*each)
            for task in self.on(host):
                if task["desiredStatus"] == "STOPPED":
                    self._terminate(task)
            self._place_soon()

    def described(self, arn: str) -> Record:
        """A host as DescribeContainerInstances has it."""
        host = self.hosts[arn]
        states = [task["lastStatus"] for task in self.on(host)]
        return host | {
            "runningTasksCount": states.count("RUNNING"),
            "pendingTasksCount": states.count("PENDING"),
        }

    def set_state(self, arn: str, status: str) -> None:
        """UpdateContainerInstancesState; assumed: nothing changes while a host is terminated."""
        if not self.hosts[arn]["_leaves"]:
            self.hosts[arn]["status"] = status
            self._place_soon()

    def terminate(self, instance: str, *, lowers: bool) -> None:
        """TerminateInstanceInAutoScalingGroup.

        Raises:
            StopIteration: there is no such instance.
            ValueError: the code of an error: ScalingActivityInProgress where it is being terminated
                (API reference of Auto Scaling), ValidationError where its group asks for none
                already, and cannot ask for less (assumed).
        """
        group = next(each for each in self.groups.values() if instance in each.instances)
        if group.instances[instance]["_leaves"]:
            raise ValueError("ScalingActivityInProgress")
        if lowers and not group.desired:
            raise ValueError("ValidationError")
        group.instances[instance]["_leaves"] = True
        group.desired -= lowers
        # Managed draining: tasks that no service keeps run on until they end (developer guide of
        # ECS). What does not end, or was never there, keeps the host (roadmap 2467 and 2685).
        self._after(self.times.drains, self.end_at_once, instance)
        if host := self._host_of(instance):
            host |= {"status": "DRAINING", "_leaves": True}
            if not self.on(host) and host["agentConnected"]:
                self._shut_down(group, instance)
        self.fill(group)

    def end_at_once(self, instance: str) -> None:
        """EC2's TerminateInstances, which waits for no draining."""
        group = next((each for each in self.groups.values() if instance in each.instances), None)
        if group is None:
            return
        group.instances[instance]["_leaves"] = True
        if host := self._host_of(instance):
            host["_leaves"] = True
            for task in self.on(host):
                self._lose(task, instance)
        self._shut_down(group, instance)
        self.fill(group)

    def _shut_down(self, group: Group, instance: str) -> None:
        """EC2 does not call an instance running any more."""
        if instance in group.instances:
            group.instances[instance]["_ends"] = True
        self._after(self._between(self.times.terminates), self._gone, group, instance)

    def _host_of(self, instance: str) -> Record | None:
        return next((h for h in self.hosts.values() if h["ec2InstanceId"] == instance), None)

    def lose(self, arn: str) -> None:
        """EC2 takes a host; its group starts another one."""
        host = self.hosts[arn]
        group = self.groups[host["capacityProviderName"]]
        host["_leaves"] = True
        for task in self.on(host):
            self._lose(task, host["ec2InstanceId"])
        self._gone(group, host["ec2InstanceId"])
        self.fill(group)

    def _lose(self, task: Record, instance: str) -> None:
        self._agent.kill(task)
        self.end(task, None, LOST[0], LOST[1].format(instance))

    def _gone(self, group: Group, instance: str) -> None:
        if host := self._host_of(instance):
            del self.hosts[host["containerInstanceArn"]]
        group.instances.pop(instance, None)
