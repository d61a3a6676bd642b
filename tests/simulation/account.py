"""An AWS account for simulated jobs: what clients of boto3 call, Step Functions and Lambda.

Tasks and hosts are ``rehearsal.model``; executions run the synthesized state machine.
"""

import functools
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from botocore.exceptions import EndpointConnectionError, ReadTimeoutError
from botocore.paginate import PageIterator
from greenlet import getcurrent

from contract import runs, times
from contract.job import HEAD_STATE, Hold, JobSpec, Priority, overrides
from contract.job_outcome import is_in_vain, keeper_of, kept_until
from contract.nodes import DEFAULT_POOL, ENV_JOB_SPEC, Range
from rehearsal.model import Model, Record
from tests.aws import account as base
from tests.aws.account import TASKS, MissingError, stamp
from tests.aws.calls import refused
from tests.aws.s3 import S3, Effect
from tests.conftest import ROOT
from tests.simulation.world import EndedError, World

#: Seconds in which a sweep may decide by a list of tasks.
SWEEP_READS_S: Final = 10
MACHINE: Final = "arn:aws:states:us-east-1:1:stateMachine:jobs"
#: Share of calls that go wrong in any case.
UNTROUBLED: Final = 0.01
#: botocore tries a call so often in all.
ATTEMPTS: Final = 5
DAY_S: Final = 86_400
#: A job whose fault is over trains again within this time.
RECOVERS_S: Final = 5400
#: Two sweeps, the first of which may come just before the time that a head has to end a hold.
HELD_LATE_S: Final = times.HEAD_GRACE_S + 2 * times.SWEEP_EVERY_S + 60
#: What the state machine of some earlier commit does not tell the keeper.
NEW_IN_EVENTS: Final = ("Asked", "InARow")
#: Why RunTask places a task nowhere (developer guide of ECS, "API failure reasons").
UNPLACED: Final = ("Capacity is unavailable at this time.", "AGENT", "RESOURCE:GPU", "RESOURCE:ENI")
#: The reason with which Step Functions stops the task of an execution that is over.
MANAGED: Final = "The execution which was managing this resource was aborted"


#: What S3 answers, or boto3 instead of it, while it is down.
OUTAGES: Final = (
    refused("ServiceUnavailable", "GetObject"),
    EndpointConnectionError(endpoint_url="https://s3"),
    ReadTimeoutError(endpoint_url="https://s3"),
)


class Pages(list[Any]):
    """Pages of an answer, searched as botocore's are."""

    search = PageIterator.search


# --- JSONata --------------------------------------------------------------------------------------
@functools.cache
def compiled(value: str) -> Any:
    """A JSONata expression; its evaluator is installed for the local AWS only."""
    (packages,) = (ROOT / ".venv-aws" / "lib").glob("python*/site-packages")
    sys.path.append(str(packages))
    try:
        jsonata = importlib.import_module("jsonata.jsonata").Jsonata
    finally:
        sys.path.remove(str(packages))
    return jsonata.jsonata(value[2:-2].strip().replace("$millis()", "$virtual_ms"))


@functools.cache
def plain(value: str) -> tuple[tuple[str, ...], str | None] | None:
    """The path of an expression that only looks up a value, and the text that it is compared with.

    Most expressions are of this kind, and the evaluator is slow.
    """
    found = re.fullmatch(r"\{% \$(\w+(?:\.\w+)*)(?: = '(\w+)')? %\}", value)
    return (tuple(found[1].split(".")), found[2]) if found else None


def evaluate(value: Any, variables: Mapping[str, Any], now: float) -> Any:
    """A value of the definition, with its expressions evaluated at a time."""
    if isinstance(value, dict):
        return {name: evaluate(each, variables, now) for name, each in value.items()}
    if isinstance(value, list):
        return [evaluate(each, variables, now) for each in value]
    if not (isinstance(value, str) and value.startswith("{%")):
        return value
    if known := plain(value):
        path, other = known
        found: Any = variables
        for name in path:
            found = found[name]
        return found if other is None else found == other
    expression = compiled(value)
    frame = expression.create_frame()
    # Or the evaluator asks all frames for the first two at each step.
    unused = {"__evaluate_entry": None, "__evaluate_exit": None}
    frame.bindings |= {**unused, **variables, "virtual_ms": round(now * 1000)}
    return expression.evaluate({}, frame)


class StateError(Exception):
    """An error of a state, by its name."""

    def __init__(self, name: str, cause: str = "") -> None:
        super().__init__(name)
        self.name, self.cause = name, cause


# --- clients --------------------------------------------------------------------------------------
class Client:
    """A client of any service, as one process has it."""

    exceptions = base.Account.exceptions

    def __init__(self, account: "Account", who: str) -> None:
        self._account, self._who = account, who
        self.get_paginator = functools.cache(self._paginator)

    def __getattr__(self, name: str) -> Any:
        answer = getattr(self._account, f"on_{name}", None) or getattr(self._account.s3, name)
        vars(self)[name] = call = functools.partial(self._call, answer)
        return call

    def _call(self, effect: Callable[..., Any], **given: Any) -> Any:
        """A call takes some time, and may be throttled, fail before or after it took effect, or be
        the last of its process."""
        account = self._account
        world, chance = account.world, account.world.random
        for _ in range(ATTEMPTS):
            world.sleep(chance.uniform(0.01, 0.3))
            process: Any = getcurrent()
            process.calls_left -= 1
            fate = chance.random() if account.is_faulty else 1.0
            if fate < account.trouble / 2:
                world.sleep(chance.uniform(0.5, 10))
                continue  # throttled
            account.who = self._who
            result = effect(**given)
            if process.calls_left < 0:
                raise EndedError
            if fate < account.trouble:
                world.happened["answer lost"] += 1
                world.sleep(20)
                continue
            return result
        account.unanswered.add(given.get("Key") or given.get("Subject"))
        raise ReadTimeoutError(endpoint_url="https://aws")

    def _paginator(self, operation: str) -> Any:
        """All in one page: botocore's own paginators take too long."""
        call = getattr(self, operation)
        return SimpleNamespace(paginate=lambda **given: Pages([call(**given)]))

    def invoke(self, FunctionName: str, InvocationType: str, Payload: bytes) -> Any:  # noqa: N803
        assert FunctionName == "keeper"
        account, event = self._account, json.loads(Payload)
        if InvocationType == "Event":
            return self._call(lambda: account.notify(event))
        answer = account.answer(event, 20)  # seconds until boto3 asks again
        return self._call(lambda: answer)


class Records(S3):
    """The bucket, as the keeper reaches it: each record is written once."""

    may_list = False
    down_at = up_at = 0.0
    """When it last stopped answering, and when it answered again."""
    renew: Callable[[str], None] = lambda _: None
    """Called before a head's report is read, which is written only then."""

    def __init__(self, world: World, unanswered: set[Any]) -> None:
        super().__init__(world.time)
        self._world, self._unanswered = world, unanswered

    def set_down(self, *, is_down: bool) -> None:
        self.is_down = is_down
        if is_down:
            self.down_at, self.trouble = self._world.now, self._world.random.choice(OUTAGES)
        else:
            self.up_at = self._world.now

    def request(self, operation: str, key: str, effect: Effect, content: bytes = b"") -> Any:
        if self.is_down:
            self._unanswered.add(key)
            raise self.trouble
        if key.endswith(".life"):
            self.renew(key)
        before = self.objects.get(key)
        answer = effect()
        if operation == "put_object":
            if before not in (None, content) and key not in self._unanswered:
                self._world.blame(f"{key} is written twice")
            self._world.tell(f"{key}: {json.loads(content).get('status', content.decode())}")
        return answer


# --- the account ----------------------------------------------------------------------------------
class Account(base.Account):
    """Its tasks and hosts, executions, bucket, and the function that cleans up."""

    page = base.UNLIMITED
    who = ""
    """Whose call is answered."""

    def __init__(
        self,
        world: World,
        model: Model,
        *,
        states: Record,
        keeper: ModuleType,
        families: dict[str, str],
    ) -> None:
        """``families``: of the task definitions, by the capacity provider of their hosts."""
        super().__init__(model)
        self.unanswered: set[Any] = set()
        """Keys of objects and subjects of mails of which a request has failed."""
        self.gone: dict[str, float] = {}
        """When the processes of heads have ended, by their tasks, which ECS may not notice."""
        self.mailed: set[str] = set()
        """Jobs whose end was reported."""
        self.world = world
        self.s3 = self.records = Records(world, self.unanswered)
        self.states, self.keeper, self.families = states, keeper, families
        self.executions: dict[str, Execution] = {}
        self._clients: dict[str, Client] = {}
        self.on_state: Callable[[str], None] = lambda _name: None
        """Called when a job comes to a state."""
        self.is_faulty, self.trouble = True, UNTROUBLED
        self.is_broken = False
        """The keeper fails at its first call."""
        self.skew_s = self.slack_s = 0.0
        """By how much the keeper's clock is ahead of AWS's; the most that it ever was off."""
        self.instance_type = "g5.xlarge"
        self.understood: Callable[[str | None], JobSpec | None] = lambda _: None
        self.least_workers = 0
        """That the deployment ever allowed."""
        self.outdated: set[str] = set()
        """Runs whose orders have a field that the deployed keeper does not know."""
        self.deployed_at = 0.0
        """When it was last deployed with other limits."""
        self.due = 0.0
        """When the last event comes."""
        self._was_left, self._num_skipped = True, 0
        self.skips = False
        """Whether this life lasts days."""
        self.failed_at = 0.0
        """When the keeper last failed, or was killed."""
        self.refused_at = 0.0
        """When EC2 last began to refuse hosts, or for another reason than before."""
        self.billed_s = 0.0
        """Of all instances, together, while the keeper did not fail."""
        self.trained: dict[str, float] = {}
        """When a job trained last."""
        self.calm_at = float("inf")
        """When the last fault is over."""

    def client(self, who: str, /, **_: Any) -> Client:
        if who not in self._clients:
            self._clients[who] = Client(self, who)
        return self._clients[who]

    # --- executions
    def on_start_execution(self, stateMachineArn: str, name: str, input: str) -> None:  # noqa: N803
        assert stateMachineArn == MACHINE
        self.start(name, input)

    def on_stop_execution(self, executionArn: str, **why: str) -> None:  # noqa: N803
        self.execution(executionArn).abort(**why)

    def on_describe_execution(self, executionArn: str) -> Record:  # noqa: N803
        return self.execution(executionArn).described()

    def on_list_executions(
        self,
        statusFilter: str = "",  # noqa: N803
        PaginationConfig: Any = None,  # noqa: N803
        **_: Any,
    ) -> Any:
        now, lag = self.world.now, self.model.times.shows
        found = [
            {
                "name": job.name,
                "executionArn": f"{MACHINE}:{job.name}",
                "status": job.status,
                "startDate": stamp(job.began),
                "stopDate": stamp(job.ended),
            }
            for job in self.executions.values()
            if statusFilter in ("", job.status) and now - max(job.began, job.ended) > lag
        ]
        most = PaginationConfig["MaxItems"] if PaginationConfig else len(found)
        self.world.happened["more than 100 executions listed"] += len(found) > 100
        return {"executions": found[::-1][:most]}

    def on_get_execution_history(self, executionArn: str, **_: Any) -> Any:  # noqa: N803
        # Eventually consistent, says the API reference.
        shown = self.world.now - self.model.times.shows / 2
        job = self.execution(executionArn)
        answer = {"Payload": {"nodes": str(job.granted), "pools": [*job.pools]}}
        details = {"name": HEAD_STATE, "input": json.dumps(answer)}
        entered = {"type": "TaskStateEntered", "stateEnteredEventDetails": details}
        begun = [entered] if 0 < job.admitted_at < shown else []
        heads = [base.submitted(arn, stamp(at)) for at, arn in job.heads if at < shown]
        return {"events": begun + heads}

    def execution(self, arn: str) -> "Execution":
        found = self.executions.get(arn.rpartition(":")[2])
        if found is None or self.world.now < found.shows_at:
            raise MissingError
        return found

    def on_run_task(self, **request: Any) -> Any:
        asked = request.get("count", 1)
        if request["capacityProviderStrategy"][0]["capacityProvider"] not in self.families:
            self.world.happened["RunTask refuses a capacity provider that is gone"] += 1
            raise refused("InvalidParameterException")
        # It may place some of them only, and says why (API reference, RunTask).
        is_short = self.is_faulty and self.world.random.random() < self.trouble
        number = self.world.random.randrange(asked) if is_short else asked
        self.world.happened["RunTask placed some"] += is_short
        started = self.run(request | {"count": number}) if number else []
        failures = [{"arn": "", "reason": self.world.random.choice(UNPLACED)}]
        return {
            "tasks": [task.copy() for task in started],
            "failures": failures * (asked - len(started)),
        }

    def on_start_task(self, containerInstances: list[str], **request: Any) -> Any:  # noqa: N803
        answer = super().on_start_task(containerInstances, **request)
        for each in answer["tasks"]:
            self.world.tell(f"{name_of(each)} keeps {each['containerInstanceArn'][-6:]}")
            self.world.happened["host kept"] += 1
        return answer

    def run(self, request: Record) -> list[Record]:
        before = len(self.model.tasks)
        started = super().run(request)
        if len(self.model.tasks) > before:
            for each in started:
                self.world.tell(f"{name_of(each)} is asked for")
            self._check_number(started[0])
        return started

    def _check_number(self, started: Record) -> None:
        """A job has no more workers than it asked for."""
        job = self.job_of(started)
        if job is None or started["_family"] != "worker":
            return
        alive = [
            task
            for task in self.model.tasks.values()
            if task["startedBy"] == started["startedBy"] and task["desiredStatus"] == "RUNNING"
        ]
        if len(alive) > job.granted.high:
            self.world.blame(f"{job.name} has {len(alive)} workers of {job.granted}")

    def spec_of(self, order: str | None) -> JobSpec | None:
        """A job's order, as the keeper that is deployed understands it."""
        spec = self.understood(order)
        if spec is None or order is None or spec.run not in self.outdated:
            return spec
        return self.understood(json.dumps(json.loads(order) | {"of_before": 1}))

    def start(self, name: str, order: str) -> None:
        """StartExecution: the same again starts nothing (API reference of Step Functions)."""
        if (known := self.executions.get(name)) is None:
            Execution(self, name, order)
        elif known.status != "RUNNING" or known.order != order:
            raise refused("ExecutionAlreadyExists")

    def _mark(self, new: list[Record], old: Record) -> None:
        if self.world.now < self.model.hosts.get(old["targetId"], {}).get("_refuses_until", 0):
            self.world.happened["attributes refused"] += 1
            raise refused("TargetNotFoundException")
        super()._mark(new, old)

    def on_describe_instances(self, Filters: Any) -> Any:  # noqa: N803
        for group in self.model.groups.values():
            for each in group.instances.values():
                each["InstanceType"] = self.instance_type
        return super().on_describe_instances(Filters)

    def on_publish(self, **message: str) -> Any:
        self.mailed.add(message["Subject"].partition(": ")[2])
        return super().on_publish()

    def job_of(self, task: Record) -> "Execution | None":
        return self.executions.get(task["group"].removeprefix("job:"))

    def on_stop_task(self, task: str, reason: str, **_: Any) -> Any:
        found = self.model.tasks[f"{TASKS}{task.rpartition('/')[2]}"]
        if found["desiredStatus"] != "STOPPED":
            self.world.tell(f"{self.who} stops {name_of(found)}: {reason}")
            self._check_may_end(found, self.who, reason)
            found["_told_at"] = self.world.now
        return super().on_stop_task(task, reason)

    def _check_may_end(self, task: Record, who: str, reason: str) -> None:
        """The keeper ends no task of a job that goes on."""
        job = self.job_of(task)
        # A host that comes later than the job wants to wait may come while it is being stopped.
        host_at = task["startedAt"].timestamp() if "startedAt" in task else self.world.now
        waited = host_at - task["createdAt"].timestamp() + self.slack_s
        is_starved = job and waited > job.patience_s
        is_well = not (is_starved or self._ails(task) or is_in_vain(reason))
        is_well &= not (job and self._lacks_hosts(job, reason))
        is_well &= not (job and self.is_held_too_long(job, -self.slack_s))
        # What waits for the hosts that a head lacks is stopped after it.
        is_well &= not (job and job.head and job.head["desiredStatus"] == "STOPPED")
        if who == "keeper" and job and job.is_healthy and is_well and not job.is_redriven:
            self.world.blame(f"{who} stops {name_of(task)}, whose job goes on: {reason}")

    def _lacks_hosts(self, job: "Execution", reason: str) -> bool:
        """A job may go to its next pool, as EC2 has refused hosts of the one that it is in."""
        if len(job.ladder) < 2 or not reason.startswith("[no_capacity]") or job.goes_on:
            return False
        own = [each for each in self.model.tasks.values() if each["startedBy"] == job.name]
        # A sweep lists tasks some seconds before it decides.
        waiting = [
            each
            for each in own
            if each["lastStatus"] == "PROVISIONING"
            or ("startedAt" in each and each["startedAt"] > stamp(self.world.now - SWEEP_READS_S))
        ]
        groups = [self.model.groups[each["capacityProviderName"]] for each in waiting]
        return any(
            group.activities and group.activities[0]["StatusCode"] == "Failed" for group in groups
        )

    def hold_of(self, job: "Execution") -> Hold | None:
        """For how long its hosts stay after its command has failed."""
        found = self.s3.objects.get(job.hold)
        return Hold.from_json(found.decode()) if found else None

    def is_held_too_long(self, job: "Execution", by_s: float = 0) -> bool:
        hold, head_at = self.hold_of(job), job.heads[-1][0] if job.heads else 0
        # One that could not be read is of the attempt before.
        return hold is not None and hold.since > head_at and self.world.now > hold.until + by_s

    def _ails(self, task: Record) -> bool:
        """It has not started, or has not answered, for so long that two sweeps can have seen it."""
        since = task.get("_hangs_since") or task.get("_placed_at") or self.world.now
        is_hung = "_hangs_since" in task and task["lastStatus"] == "RUNNING"
        least = times.SWEEP_EVERY_S // 2 if is_hung else times.TASK_STARTS_S
        least -= int(self.slack_s)
        has_run = task["lastStatus"] == "RUNNING" and not is_hung
        host = self.model.hosts.get(task.get("containerInstanceArn", ""), {})
        is_away = not host.get("agentConnected", True)
        # It may have been connected while the keeper did not look.
        now = self.world.now
        away_s = now - min(host.get("_seen_away", now), host["_away_since"]) if is_away else 0
        is_noticed = "_is_unnoticed" not in task
        is_ailing = is_noticed and not has_run and self.world.now - since > least
        if gone_at := self.gone.get(task["taskArn"]):
            # It could not report before, either, while S3 did not answer.
            silent_s = now - min(gone_at, self.records.down_at or gone_at) + self.slack_s
            is_ailing |= silent_s > times.HEAD_SILENT_S + times.SWEEP_EVERY_S // 2
        return is_ailing or away_s > times.AGENT_LOST_S - self.slack_s

    def on_describe_container_instances(self, containerInstances: list[str], **_: Any) -> Any:  # noqa: N803
        """Note since when the keeper has seen an agent disconnected, in all its looks."""
        hosts = [self.model.hosts.get(each) for each in containerInstances]
        for host in [each for each in hosts if each and self.who == "keeper"]:
            if host["agentConnected"]:
                host.pop("_seen_away", None)
            else:
                host.setdefault("_seen_away", host["_away_since"])
        return super().on_describe_container_instances(containerInstances)

    def on_update_container_instances_state(self, **given: Any) -> None:
        (arn,), status = given["containerInstances"], given["status"]
        who = self.who
        if (host := self.model.hosts.get(arn)) is None:
            return
        self.world.tell(f"{who} makes {host['ec2InstanceId']} {status}")
        if status == "ACTIVE" and host["_leaves"]:
            self.world.blame(f"{who} makes {host['ec2InstanceId']} active, which is terminated")
        process: Any = getcurrent()
        is_fit = host["status"] == "ACTIVE" and host["agentConnected"] and not host["_fate"]
        is_idle = all(
            "stoppedAt" in task and task["stoppedAt"].timestamp() < self.world.now - 60
            for task in host["_tasks"]
        )
        if is_fit and is_idle and process.what in ("sweep", "release"):
            for task in self.model.waiting(self.model.groups[host["capacityProviderName"]]):
                if task["createdAt"].timestamp() < process.began - 2 * self.model.times.shows:
                    self.world.blame(f"{who} takes a host for which {name_of(task)} waits")
        super().on_update_container_instances_state(**given)

    def on_terminate_instance_in_auto_scaling_group(self, **given: Any) -> None:
        instance, who = given["InstanceId"], self.who
        hosts = [h for h in self.model.hosts.values() if h["ec2InstanceId"] == instance]
        for host in hosts:
            if not host["_leaves"]:
                self._check_idle(host)
        for task in [task for host in hosts for task in self.model.on(host)]:
            job = self.job_of(task)
            if task["desiredStatus"] == "RUNNING" and job and job.status == "RUNNING":
                self.world.blame(f"{who} terminates {instance} below {name_of(task)}")
        super().on_terminate_instance_in_auto_scaling_group(**given)
        self.world.tell(f"{who} terminates {instance}")

    def on_terminate_instances(self, InstanceIds: list[str]) -> None:  # noqa: N803
        """Nothing that shall run, or can still end in time, is cut off."""
        (instance,), who = InstanceIds, self.who
        process: Any = getcurrent()
        for host in [h for h in self.model.hosts.values() if h["ec2InstanceId"] == instance]:
            # An agent may have come back since the keeper saw it away.
            is_back = host["agentConnected"] and host.get("_away_since", 0.0) < process.began
            for task in self.model.on(host) if is_back else ():
                # Step Functions itself stops the head of one that was aborted.
                job = self.job_of(task)
                told = task.get("_told_at", job.ended if job and job.ended else self.world.now)
                is_late = self.world.now - told > times.STOP_TIMEOUT_S - self.slack_s
                if task["lastStatus"] == "RUNNING" and not is_late:
                    self.world.blame(f"{who} ends {instance} at once, below {name_of(task)}")
        super().on_terminate_instances(InstanceIds)

    def _check_idle(self, host: Record) -> None:
        """A sweep keeps the hosts of a job that is about to be tried again, if they can be used."""
        process: Any = getcurrent()
        ended = [task for task in host["_tasks"] if "stoppedAt" in task]
        is_used = len(ended) < len(host["_tasks"])  # by a task that the sweep has stopped
        is_sweep = getattr(process, "what", "") == "sweep"
        is_lost = host["_leaves"] or host["_fate"] or not host["agentConnected"]
        if not ended or is_used or is_lost or not is_sweep:
            return
        last = max(ended, key=lambda task: task["stoppedAt"])
        idle, job = self.world.now - last["stoppedAt"].timestamp(), self.job_of(last)
        # The sweep has ended its job, or has looked before it came: its calls may take minutes.
        came = last.get("startedAt", last["createdAt"]).timestamp()
        is_over = is_in_vain(last["stoppedReason"]) or came > process.began
        # It did not end in time, but while the lists that the sweep has still showed it.
        told = last.get("_told_at", last["stoppedAt"].timestamp())
        is_late = last["stoppedAt"].timestamp() - told > times.STOP_TIMEOUT_S
        if is_late or "_hangs_since" in last:
            shown_s = self.world.now - process.began + self.model.times.shows
            is_over = is_over or idle < shown_s
        is_early = idle + self.slack_s < times.IDLE_HOST_S
        is_over = is_over or (job is not None and self.is_held_too_long(job, -self.slack_s))
        # A job that has its record is tried no more, although its execution still cleans up.
        is_tried = job is not None and job.status == "RUNNING" and job.lacks_record
        if is_tried and is_early and not is_over:
            self.world.blame(f"a sweep ends {host['ec2InstanceId']} after {idle:.0f} s")

    def on_set_desired_capacity(self, AutoScalingGroupName: str, DesiredCapacity: int) -> None:  # noqa: N803
        name = AutoScalingGroupName
        for task in self.model.waiting(self.group(name)):
            waited = self.world.now - task["createdAt"].timestamp()
            if waited > times.KEEPER_TIMEOUT_S:  # it was there when the sweep began
                self.world.blame(f"{name} asks for fewer, and {name_of(task)} waits")
        super().on_set_desired_capacity(name, DesiredCapacity)

    def on_resume_processes(self, AutoScalingGroupName: str, **_: Any) -> None:  # noqa: N803
        name = AutoScalingGroupName
        if found := self.group(name).record.get("SuspendedProcesses"):
            self.world.happened["suspended group resumed"] += 1
            if found[0]["SuspensionReason"].startswith("User"):
                self.world.blame(f"{name} is resumed, which a person has suspended")
            is_day = self.model.times.suspends >= DAY_S
            self.world.happened["launches that have failed for a day resumed"] += is_day
        super().on_resume_processes(name)

    # --- Lambda
    def invoke(self, event: Record, hear: Callable[[Any, bool], None] = lambda *_: None) -> None:
        """Call the keeper in a process of its own; ``hear`` is told its answer, or the failure."""
        world, chance = self.world, self.world.random

        def call() -> None:
            answer, is_well = None, False
            try:
                # Each invocation has its own copy of what it is given.
                answer = self.keeper.handler(json.loads(json.dumps(event)), None)
                is_well = True
            except EndedError:
                world.tell(f"the keeper is killed ({process.what})")
                world.happened["keeper killed"] += 1
                self.failed_at = world.now
            except (KeyError, AttributeError, TypeError, IndexError) as error:
                world.blame(f"the keeper: {error!r}")
            except Exception as error:
                world.tell(f"the keeper fails: {error!r:.150}")
                self.failed_at = world.now
            world.after(0.1, hear, answer, is_well)

        process = world.spawn(call)
        process.what, process.began = str(event.get("Action", "after an abort")), world.now
        process.what += " of hosts" * ("Hosts" in event)
        if self.is_broken:
            process.calls_left = 0
        elif self.is_faulty and chance.random() < 0.05:
            process.calls_left = chance.randint(0, 40)
        world.after(times.KEEPER_TIMEOUT_S, setattr, process, "is_dead", True)

    def answer(self, event: Record, seconds: float) -> tuple[Any, bool]:
        """What the keeper answers the process that waits for it."""
        answers: list[tuple[Any, bool]] = []

        def register(wake: Callable[[], None]) -> None:
            def hear(answer: Any, is_well: bool) -> None:
                answers.append((answer, is_well))
                wake()

            self.invoke(event, hear)

        self.world.wait(register, seconds)
        return answers[0] if answers else (None, False)

    def notify(self, event: Record, retries: int = 2) -> None:
        """Call the keeper for an event: it is tried again, and may come twice."""

        def heard(_answer: Any, is_well: bool) -> None:
            if not is_well and retries:
                self.world.after(
                    self.world.random.uniform(60, 120), self.notify, event, retries - 1
                )

        self.invoke(event, heard)

    def sweep(self) -> None:
        """Every few minutes; where nothing is left and all records are written, once."""
        self.world.after(times.SWEEP_EVERY_S, self.sweep)
        model, closed = self.model, self.world.now - times.SWEEP_GRACE_S - times.SWEEP_EVERY_S
        is_left = (
            any(group.instances or group.desired for group in model.groups.values())
            or any("SuspendedProcesses" in group.record for group in model.groups.values())
            or any(task["lastStatus"] != "STOPPED" for task in model.tasks.values())
            or any(
                not 0 < job.ended < closed or job.lacks_record for job in self.executions.values()
            )
        )
        # Of days, most sweeps find all as the one before has left it: one in an hour is played.
        self._num_skipped = self._num_skipped + 1 if self.skips and self._is_steady() else 0
        if (is_left or self._was_left) and not self._num_skipped % 12:
            self.notify({"Action": "sweep"})
        self._was_left = is_left
        self._check_billed()
        self._check_refused()
        self._check_progress()
        number = sum(len(group.instances) for group in model.groups.values())
        if self.world.now - self.failed_at > times.SWEEP_EVERY_S:
            self.billed_s += number * times.SWEEP_EVERY_S
        for task in [each for each in model.tasks.values() if each["desiredStatus"] == "RUNNING"]:
            job = self.job_of(task)
            kept_s = self.world.now - max(kept_until(task), self.failed_at)
            # While AWS is in trouble a sweep takes as long as to the next.
            num_sweeps = 2 if self.trouble > UNTROUBLED else 1
            if keeper_of(task) and kept_s - self.slack_s > num_sweeps * times.SWEEP_EVERY_S + 60:
                self.world.blame(f"a sweep leaves {name_of(task)}, which keeps its host")
            since = max(job.ended if job else 0, task["createdAt"].timestamp(), self.failed_at)
            if job and job.ended and self.world.now - since > 2 * times.SWEEP_EVERY_S + 60:
                self.world.blame(f"two sweeps leave {name_of(task)}, whose job has ended")
            blind_at = self.world.now if self.s3.is_down else self.records.up_at
            seen_s = self.world.now - max(self.failed_at, blind_at)
            over_s = seen_s - 2 * times.SWEEP_EVERY_S - 60 - self.slack_s
            # Without its head a task waits for the clean-up, which Step Functions tries again.
            has_head = job is not None and any(
                each["_family"] == "head" and self.job_of(each) is job
                for each in model.tasks.values()
                if each["lastStatus"] == "RUNNING"
            )
            is_due = job is not None and over_s > 0 and has_head
            if job and is_due and self.is_held_too_long(job, HELD_LATE_S + self.slack_s):
                self.world.blame(f"two sweeps leave {name_of(task)}, which is held no more")

    def _is_steady(self) -> bool:
        """There is nothing that a sweep could do: every host has its task, or none is there."""
        model = self.model
        jobs = self.executions.values()
        if any(each.ended and each.lacks_record for each in jobs):
            return False
        if any(each.status == "RUNNING" and self.is_held_too_long(each) for each in jobs):
            return False
        return all(
            each["lastStatus"] == each["desiredStatus"] == "RUNNING"
            and "_hangs_since" not in each
            and (job := self.job_of(each)) is not None
            and job.status == "RUNNING"
            for each in model.tasks.values()
            if each["lastStatus"] not in ("STOPPED", "PROVISIONING")
        ) and all(
            len(group.instances)
            == sum(
                bool(model.on(host))
                for host in model.hosts.values()
                if host["capacityProviderName"] == group.provider and host["agentConnected"]
            )
            and "SuspendedProcesses" not in group.record
            and (
                not group.activities or not is_in_vain(group.activities[0].get("StatusMessage", ""))
            )
            for group in model.groups.values()
        )

    def _check_refused(self) -> None:
        """No head waits for long where AWS has said that it will start no host."""
        for group in self.model.groups.values():
            for each in group.record.get("SuspendedProcesses", []):
                seen = each.setdefault("_seen", self.world.now)
                if each["SuspensionReason"].startswith("User"):
                    continue
                if self.world.now - max(seen, self.failed_at) > 2 * times.SWEEP_EVERY_S + 60:
                    self.world.blame(f"launches of {group.name} stay suspended")
            said = group.activities[0].get("StatusMessage", "") if group.activities else ""
            # Where launches are suspended, AWS's last answer may be about an earlier head.
            asks = group.fails_since and not group.record.get("SuspendedProcesses")
            for task in self.model.waiting(group) if asks else ():
                since = max(
                    group.fails_since or 0,
                    task["createdAt"].timestamp(),
                    self.failed_at,
                    self.refused_at,
                )
                is_long = self.world.now - since > 2 * times.SWEEP_EVERY_S + 60
                if is_in_vain(said) and is_long and task["_family"] == "head":
                    self.world.blame(f"{name_of(task)} waits in vain: {said}")

    def _check_progress(self) -> None:
        """A job whose fault is over trains again."""
        for job in self.executions.values():
            # A deploy may have left fewer hosts than the job needs: its deadline ends it.
            fits = job.nodes.low <= self.least_workers
            if job.status == "RUNNING" and job.admitted_at and not job.is_redriven and fits:
                trained = self.trained.get(job.name, 0)
                late_s = self.world.now - max(job.admitted_at, self.calm_at, trained)
                if late_s > RECOVERS_S:
                    self.world.blame(f"{job.name} has not trained for {late_s:.0f} s")

    def _check_billed(self) -> None:
        """No state lasts: a host that does nothing for anybody is released in some sweeps."""
        now, sweeps = self.world.now, 3 * times.SWEEP_EVERY_S + 60
        for host in self.model.hosts.values():
            tasks, group = self.model.on(host), self.model.groups[host["capacityProviderName"]]
            waits = not tasks and self.model.waiting(group)
            starts = [each for each in tasks if each["lastStatus"] == "PENDING"]
            # One that keeps its host has nothing to do.
            hangs = [each for each in tasks if "_hangs_since" in each and not keeper_of(each)]
            limit = times.TASK_STARTS_S if starts else 0 if hangs else times.IDLE_HOST_S
            blind_at = 0.0
            if any("_is_unnoticed" in each for each in hangs):  # S3 shows it, where it answers
                limit, blind_at = (
                    times.HEAD_SILENT_S,
                    now if self.s3.is_down else self.records.up_at,
                )
            what = "starts" if starts else "hangs" if hangs else "idles"
            is_well = (tasks and not starts and not hangs) or waits or not host["agentConnected"]
            # The mark that the sweep needs; also of a hung head, which alone notices its workers.
            refuses = any(now < each.get("_refuses_until", 0) for each in self.model.hosts.values())
            # A task that came and went since the last look has used it.
            does = what, len(host["_tasks"])
            if is_well or refuses or host["_leaves"] or host.get("_does") != does:
                host["_since"] = now
            host["_does"] = does
            since = max(host["_since"], self.failed_at, blind_at)
            if now - since > limit + sweeps and not self.is_broken:
                self.world.blame(f"{host['ec2InstanceId']} {what} for {now - host['_since']:.0f} s")


def name_of(task: Record) -> str:
    """A task in words."""
    return f"{task['_family']} {task['taskArn'][-3:]} of {task['group'].removeprefix('job:')}"


class Execution:
    """A job: one run of the state machine."""

    def __init__(self, account: Account, name: str, order: str) -> None:
        world = account.world
        self.account, self.name, self.order = account, name, order
        self.status, self.error, self.cause = "RUNNING", "", ""
        self.began, self.ended = world.now, 0.0
        self.num_starts = 0
        """How often it came to the state that asks for a head."""
        self.heads: list[tuple[float, str]] = []
        """When they were submitted, and their ARNs."""
        self.heard: list[Record] = []
        """Heads that ran, and of whose end it has heard."""
        self.spec = spec = account.spec_of(order)
        self.patience_s = spec.capacity_wait_s if spec else 0
        self.nodes = spec.nodes if spec else Range(0, 0)
        self.record = runs.job_record(spec.run, name) if spec else ""
        self.hold = runs.job_hold(spec.run, name) if spec else ""
        self.is_old = self.is_redriven = False
        """The definition that it began with is of an earlier deployment; a person has redriven
        it."""
        self.event_s = 0.0
        """How long the event of its end takes at least."""
        self.granted = Range(0, 0)
        """Worker nodes that it was admitted with."""
        self.pools: tuple[str, ...] = ()
        """Pools that it was admitted to."""
        self.tried: list[str] = []
        """Pools in which its heads started workers, in turn."""
        self.shows_at = world.now + world.random.uniform(0, account.model.times.shows)
        self.head: Record | None = None
        self.at = ""
        """Name of its state."""
        self.admitted_at = 0.0
        """When its head was asked for first."""
        self.is_ending = False
        """Its last head has ended, or it was told to end."""
        self.goes_on = False
        """Its head runs a program that has had all of its nodes."""
        self.variables: Record = {}
        account.executions[name] = self
        world.tell(f"{name} is submitted: {order}")
        self._process = world.spawn(self._run)

    @property
    def user(self) -> str:
        return self.spec.submitter if self.spec else ""

    @property
    def level(self) -> int:
        """Of its priority; 0 is the highest."""
        return [*Priority].index(self.spec.priority) if self.spec else 1

    @property
    def high_in_s(self) -> float:
        """In how many seconds it counts as one of high priority."""
        since = self.account.world.now + self.account.skew_s - self.began
        return times.COUNTS_AS_HIGH_S - since

    def rank(self) -> tuple[int, float, str]:
        """By which jobs have their turns."""
        return (self.level if self.high_in_s > 0 else 0, self.began, self.name)

    def follows_until(self, moment: float) -> bool:
        """Whether it waited for another job at some time after a moment, and has not begun."""
        other = self.account.executions.get(self.spec.after) if self.spec else None
        if other and self.spec and self.spec.with_run and other.admitted_at:
            return other.admitted_at > moment and not self.admitted_at
        is_before = other is not None and (other.status == "RUNNING" or other.ended > moment)
        return is_before and not self.admitted_at

    @property
    def is_healthy(self) -> bool:
        """It goes on, for all that anybody can know."""
        late = self.account.world.now > self.variables.get("deadline", float("inf"))
        return self.status == "RUNNING" and not self.is_ending and not late

    @property
    def ladder(self) -> tuple[str, ...]:
        """Pools of its order."""
        return self.spec.ladder if self.spec else (DEFAULT_POOL,)

    @property
    def lacks_record(self) -> bool:
        return self.spec is not None and self.record not in self.account.s3.objects

    def described(self) -> Record:
        found: Record = {"name": self.name, "status": "RUNNING", "input": self.order}
        found["startDate"] = stamp(self.began)
        lag = self.account.model.times.shows
        if self.status != "RUNNING" and self.account.world.now - self.ended > lag / 2:
            found |= {"status": self.status, "error": self.error, "cause": self.cause}
            found["stopDate"] = stamp(self.ended)
        return found

    def _finish(self, status: str) -> None:
        self.status, self.ended, self.is_ending = status, self.account.world.now, True
        self.account.world.tell(f"{self.name}: {status} {self.error}")
        self.account.world.happened[f"execution {status}"] += 1

    def abort(self, error: str = "", cause: str = "") -> None:
        """StopExecution."""
        if self.status != "RUNNING":
            return
        world = self.account.world
        self.error, self.cause = error, cause
        self._finish("ABORTED")
        self._process.is_dead = True
        if self.head and self.head["lastStatus"] != "STOPPED":
            stop = functools.partial(self.account.model.stop, self.head, MANAGED)
            world.after(world.random.uniform(0, 5), stop)
        self._notify()

    def redrive(self) -> None:
        """RedriveExecution: from the state that did not end well, with all that it knew."""
        self.is_redriven, self.is_ending = True, False
        self.status, self.error, self.cause, self.ended = "RUNNING", "", "", 0.0
        self._process = self.account.world.spawn(self._run, self.at)

    def _notify(self) -> None:
        world = self.account.world
        event = {
            "detail-type": "Step Functions Execution Status Change",
            "detail": {
                "name": self.name,
                "status": self.status,
                "input": self.order,
                "startDate": self.began * 1000,
                "stopDate": self.ended * 1000,
            },
        }
        # EventBridge delivers at least once, and tries for 24 hours (its user guide).
        late = world.random.uniform(600, 3 * 3600)
        first = late if world.random.random() < 0.05 else world.random.uniform(0.5, 20)
        world.after(max(first, self.event_s), self.account.notify, event)
        self.account.due = max(self.account.due, world.now + self.event_s)
        if world.random.random() < 0.2:
            world.after(world.random.choice([late, late / 100]), self.account.notify, event)

    # --- states
    def _run(self, at: str = "") -> None:
        try:
            self._play(at)
        except RuntimeError as error:  # of an expression, which no state catches
            if self.spec:
                self.account.world.blame(f"{self.name}: {error!r}")
            self.error = f"States.QueryEvaluationError: {error}"
            self._finish("FAILED")
            self._notify()

    def _play(self, at: str) -> None:
        world, states = self.account.world, self.account.states["States"]
        start = stamp(self.began).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        order = json.loads(self.order)
        context = {"Execution": {"Name": self.name, "StartTime": start, "Input": order}}
        variables = self.variables
        at = at or self.account.states["StartAt"]
        while True:
            state, self.at = states[at], at
            world.happened[f"state {at}"] += 1
            self.account.on_state(at)
            self.num_starts += at == "Head"
            if state["Type"] in ("Task", "Wait") and at not in ("Queue", "Admit"):
                world.tell(f"{self.name}: {at}")
            variables["states"] = {"context": context}
            if at == self.account.states["StartAt"]:  # others have what came before as their input
                variables["states"]["input"] = order
            match state["Type"]:
                case "Succeed":
                    self._finish("SUCCEEDED")
                    return
                case "Fail":
                    self.error = evaluate(state["Error"], variables, world.now)
                    self._finish("FAILED")
                    return
                case "Choice":
                    fits = (
                        each
                        for each in state["Choices"]
                        if evaluate(each["Condition"], variables, world.now)
                    )
                    state = next(fits, {"Next": state["Default"]})
                case "Wait":
                    world.sleep(evaluate(state["Seconds"], variables, world.now))
                case "Task":
                    came = world.now
                    try:
                        variables["states"]["result"] = self._task(state)
                        self._check_left(at, came - self.account.model.times.shows)
                    except StateError as error:
                        caught = [each for each in state.get("Catch", []) if catches(each, error)]
                        if not caught:
                            self.error = error.name
                            self._finish("FAILED")
                            return
                        output = {"Error": error.name, "Cause": error.cause}
                        variables["states"]["errorOutput"] = output
                        state = caught[0]
                case kind:
                    assert kind == "Pass", kind
            variables |= evaluate(state.get("Assign", {}), variables, world.now)
            at = state["Next"]

    def _task(self, state: Record) -> Any:
        """The result of a state, which is tried again as the definition says."""
        world, tries = self.account.world, dict[int, int]()
        while True:
            arguments = evaluate(state["Arguments"], self.variables, world.now)
            try:
                if state["Resource"].endswith("ecs:runTask.sync"):
                    seconds = evaluate(state["TimeoutSeconds"], self.variables, world.now)
                    return self._run_and_wait(arguments, seconds)
                return self._invoke(arguments["Payload"])
            except StateError as error:
                for index, each in enumerate(state.get("Retry", [])):
                    if catches(each, error) and tries.get(index, 0) < each["MaxAttempts"]:
                        pause = each["IntervalSeconds"] * each["BackoffRate"] ** tries.get(index, 0)
                        pause = min(pause, each.get("MaxDelaySeconds", pause))
                        tries[index] = tries.get(index, 0) + 1
                        world.sleep(pause)
                        break
                else:
                    raise

    def _invoke(self, payload: Record) -> Any:
        if self.is_old:  # an earlier definition did not send all
            payload = {name: each for name, each in payload.items() if name not in NEW_IN_EVENTS}
        answer, is_well = self.account.answer(payload, 10 * times.KEEPER_TIMEOUT_S)
        if not is_well:
            raise StateError("Lambda.Unknown", "it failed")
        return {"Payload": answer}

    def _run_and_wait(self, arguments: Record, seconds: float) -> Any:
        world, account = self.account.world, self.account
        chance, self.head = world.random, None
        (container,) = arguments["Overrides"]["ContainerOverrides"]
        variables = {each["Name"]: each["Value"] for each in container["Environment"]}
        self.is_ending = True
        self._check_turn(JobSpec.from_json(variables[ENV_JOB_SPEC]))
        fate = chance.random() if account.is_faulty else 1.0
        if fate < account.trouble:
            raise StateError("ECS.AmazonECSException", "Rate exceeded")
        is_known = bool(account.model.known(arguments.get("ClientToken", "")))
        if fate < 1.5 * account.trouble and not is_known:
            reason = chance.choice(UNPLACED)
            world.happened[f"RunTask refuses a head: {reason}"] += 1
            failures = [{"Arn": "", "Reason": reason}]
            raise StateError("AmazonECS.Unknown", json.dumps({"Failures": failures, "Tasks": []}))
        self.is_ending = self.goes_on = False
        (task,) = account.run(
            {
                # Its name in the synthesized definition is not known before the deployment.
                "capacityProviderStrategy": [{"capacityProvider": "for-heads"}],
                "startedBy": "AWS Step Functions",
                "group": arguments["Group"],
                "overrides": overrides(variables),
                "clientToken": arguments.get("ClientToken", ""),
            }
        )
        self._check_alone()
        if fate < 2 * account.trouble:
            world.happened["start of a head hidden"] += 1
            self.is_ending = True
            raise StateError("ECS.ServerException", "it has started all the same")
        self.head = task
        self.heads.append((world.now, task["taskArn"]))
        has_ended = task["lastStatus"] == "STOPPED" or world.wait(
            functools.partial(task.__setitem__, "_hear"), seconds
        )
        self.is_ending = True
        if not has_ended:
            world.happened["head timed out"] += 1
            if world.now < self.variables["deadline"] + times.HEAD_GRACE_S - 1:
                world.blame(f"the head of {self.name} has no time to save at its deadline")
            task.setdefault("_told_at", world.now)
            account.model.stop(task, MANAGED.replace("aborted", "timed out"))
            raise StateError("States.Timeout")
        (container,) = task["containers"]
        code = container.get("exitCode")
        started = {}
        if "startedAt" in task:
            self.heard.append(task)
            started = {"StartedAt": round(task["startedAt"].timestamp() * 1000)}
        described = started | {
            "Containers": [{"Name": "ray"} | ({} if code is None else {"ExitCode": code})],
            "StopCode": task["stopCode"],
            "StoppedReason": task["stoppedReason"],
            "StoppedAt": round(task["stoppedAt"].timestamp() * 1000),
        }
        if host := task.get("containerInstanceArn"):
            described["ContainerInstanceArn"] = host
        if code != 0 or task["stopCode"] == "TaskFailedToStart":
            raise StateError("States.TaskFailed", json.dumps(described))
        return described

    def _check_left(self, state: str, before: float) -> None:
        """After a clean-up no worker that lists showed is left to be swept."""
        for task in self.account.model.tasks.values() if state == "CleanUp" else ():
            is_own = (task["startedBy"], task["desiredStatus"]) == (self.name, "RUNNING")
            if is_own and task["createdAt"].timestamp() < before:
                self.account.world.blame(f"the clean-up of {self.name} leaves {name_of(task)}")

    def _check_turn(self, order: JobSpec) -> None:
        """A job starts beside what others were granted, and beside all that earlier ones that wait
        may have, so that it delays none of them."""
        granted, pool = order.nodes, order.ladder[0]
        if self.tried and self.tried[-1] != pool:
            self.account.world.happened["job went to its next pool"] += 1
        self.tried.append(pool)
        if self.admitted_at or self.is_redriven:
            return
        self.pools = order.ladder
        world, jobs = self.account.world, self.account.executions.values()
        self.admitted_at, self.granted = world.now, granted
        # The keeper has looked a while ago, when one that is before it now may not have been.
        late = world.now - 120 - self.account.slack_s
        world.happened["job followed another"] += bool(self.spec and self.spec.after)
        running = [
            each
            for each in jobs
            if each.status == "RUNNING" and each is not self and not each.follows_until(late)
        ]
        limits = self.account.keeper.LIMITS
        named = {each.name: each for each in sorted([*running, self], key=Execution.rank)}
        began = [each for each in running if each.admitted_at]
        # Of a user's jobs, those that have begun count first.
        begun_first = sorted(named, key=lambda name: named[name] not in began)
        turns = limits.in_turn(begun_first, lambda name: named[name].user)
        ranked = [*named.values()]
        before = ranked[: ranked.index(self)]
        is_unsure = any(abs(each.high_in_s) < world.now - late for each in ranked)
        earlier = [
            each
            for each in before
            if each.name in turns
            and not (each.admitted_at or is_unsure)
            and each.began < max(late, self.began)
        ]
        waiting = [each for each in running if not each.admitted_at]
        is_before = [each.began < self.began for each in waiting if each not in before]
        world.happened["job overtook one of a lower priority"] += any(is_before)
        is_high = [each.high_in_s < 0 and each.level for each in before if each in waiting]
        world.happened["job started beside one that counts as high"] += any(is_high)
        world.happened["job passed another by"] += any(each.name not in turns for each in before)
        world.happened["job queued" if world.now - self.began > 60 else "job did not queue"] += 1
        world.happened["job started beside others"] += bool(earlier or began)
        world.happened["job started with fewer nodes"] += granted != self.nodes
        world.happened["job waited for its turn for a day"] += world.now - self.began > DAY_S
        # What was admitted before a deploy may have more than there is now, or is not understood.
        is_deployed = self.began < self.account.deployed_at
        if is_deployed or any(each.is_redriven for each in running):
            return
        is_known = all(each.began < max(late, self.began) for each in before)
        own = [each for each in began if each.user == self.user]
        is_beyond = len(own) >= (limits.max_jobs_per_user or len(named))
        if is_beyond or (self.name not in turns and is_known and not is_unsure):
            world.blame(f"{self.name} starts beside {limits.max_jobs_per_user} of its user")
        if len(earlier) + len(began) >= limits.max_heads:
            world.blame(f"{self.name} gets a head beside {len(earlier)} + {len(began)} others")
        # A list may lack one that was submitted after it, and has begun a moment ago.
        known = [
            each for each in began if each.admitted_at < late or each.began < max(late, self.began)
        ]
        for pool in order.ladder:
            taken = sum(each.nodes.high for each in earlier if pool in each.ladder)
            taken += sum(each.granted.high for each in known if pool in each.pools)
            left = max(0, limits.workers[pool] - taken)
            most = max(0, min(self.nodes.high, left))
            if not self.nodes.low == granted.low <= granted.high <= most:
                world.blame(f"{self.name} gets {granted} of {self.nodes} in {pool}, {left} left")

    def _check_alone(self) -> None:
        tasks = self.account.model.tasks.values()
        group = f"job:{self.name}"
        heads = [each for each in tasks if each["_family"] == "head" and each["group"] == group]
        if sum(each["desiredStatus"] == "RUNNING" for each in heads) > 1:
            self.account.world.blame(f"{self.name} gets a second head")


def catches(rule: Record, error: StateError) -> bool:
    """Whether a retrier or catcher is for an error."""
    named = rule["ErrorEquals"]
    return error.name in named or "States.ALL" in named
