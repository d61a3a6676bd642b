"""Whatever happens to launches, tasks, ECS and the head, in whatever order: in the end there are
exactly as many worker tasks as are wanted, and none that nobody knows of.

ECS is simulated with what makes it hard: ten tasks a call, client tokens, lists that lag behind,
throttling, answers that get lost, and no capacity.
"""

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
from botocore.exceptions import ClientError, ReadTimeoutError
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    NODE_KIND_WORKER,
    TAG_RAY_NODE_KIND,
    TAG_RAY_USER_NODE_TYPE,
)

from containers.autoscaler import EcsNodeProvider
from contract import nodes

HEAD = "arn:aws:ecs:us-east-1:0:task/c/head"
TAGS = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER, TAG_RAY_USER_NODE_TYPE: nodes.WORKER}
WORKERS = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER}
JOB = "job-1"


def error(code: str, operation: str = "RunTask") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": code}}, operation)


class SimulatedEcs:
    """Tasks of a cluster; time passes with each call that a provider sleeps through."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tasks: dict[str, dict[str, Any]] = {}
        self.tokens: dict[str, list[str]] = {}
        self.capacity = 100
        self.throttles = 0
        self.lost_answers = 0
        self.lag_s = 0.0
        self.calls: list[int] = []
        self.ended_hosts: list[str] = []
        self.draining: set[str] = set()
        self._number = itertools.count(1)

    # --- what a test does ---
    def running(self) -> set[str]:
        return {arn for arn, task in self.tasks.items() if task["lastStatus"] != "STOPPED"}

    def end(self, arn: str) -> None:
        self.tasks[arn] |= {"lastStatus": "STOPPED", "desiredStatus": "STOPPED"}

    # --- what ECS does ---
    def _busy(self, operation: str) -> None:
        if self.throttles:
            self.throttles -= 1
            raise error("ThrottlingException", operation)

    def run_task(self, **arguments: Any) -> dict[str, Any]:
        self._busy("RunTask")
        assert 1 <= arguments["count"] <= 10
        assert len(arguments["startedBy"]) <= 36
        assert len(arguments["clientToken"]) <= 64
        self.calls.append(arguments["count"])
        token = arguments["clientToken"]
        if token not in self.tokens:
            room = min(arguments["count"], max(0, self.capacity - len(self.running())))
            arns = [f"arn:aws:ecs:us-east-1:0:task/c/{next(self._number)}" for _ in range(room)]
            for arn in arns:
                self.tasks[arn] = {
                    "taskArn": arn,
                    "lastStatus": "PROVISIONING",
                    "desiredStatus": "RUNNING",
                    "startedBy": arguments["startedBy"],
                    "tags": arguments["tags"],
                    "containerInstanceArn": f"host/{arn.rpartition('/')[2]}",
                    "visible_at": self.now + self.lag_s,
                    "environment": arguments["overrides"]["containerOverrides"][0]["environment"],
                }
            self.tokens[token] = arns
        if self.lost_answers:
            self.lost_answers -= 1
            raise ReadTimeoutError(endpoint_url="https://ecs")
        arns = self.tokens[token]
        missing = arguments["count"] - len(arns)
        return {
            "tasks": [dict(self.tasks[arn]) for arn in arns],
            "failures": [{"reason": "RESOURCE:GPU", "detail": "no host has one"}] * missing,
        }

    def list_tasks(self, **arguments: Any) -> dict[str, Any]:
        self._busy("ListTasks")
        found = sorted(
            arn
            for arn, task in self.tasks.items()
            if task["startedBy"] == arguments["startedBy"]
            and task["desiredStatus"] == arguments["desiredStatus"]
            and task["visible_at"] <= self.now
        )
        first = int(arguments.get("nextToken", 0))
        page: dict[str, Any] = {"taskArns": found[first : first + 3]}
        if len(found) > first + 3:
            page["nextToken"] = str(first + 3)
        return page

    def describe_tasks(self, **arguments: Any) -> dict[str, Any]:
        self._busy("DescribeTasks")
        assert 1 <= len(arguments["tasks"]) <= 100
        known = [
            self.tasks[arn]
            for arn in arguments["tasks"]
            if arn in self.tasks and self.tasks[arn]["visible_at"] <= self.now
        ]
        for task in known:
            if task["lastStatus"] == "PROVISIONING":
                task["lastStatus"] = "RUNNING"
        return {"tasks": [dict(task) for task in known], "failures": []}

    def stop_task(self, **arguments: Any) -> dict[str, Any]:
        self._busy("StopTask")
        if arguments["task"] not in self.tasks:
            raise error("InvalidParameterException", "StopTask")
        self.end(arguments["task"])
        return {}

    def describe_container_instances(self, **arguments: Any) -> dict[str, Any]:
        return {
            "containerInstances": [
                {"containerInstanceArn": arn, "ec2InstanceId": f"i-{arn.rpartition('/')[2]}"}
                for arn in arguments["containerInstances"]
            ]
        }

    def update_container_instances_state(self, **arguments: Any) -> dict[str, Any]:
        self.draining |= {*arguments["containerInstances"]}
        return {}

    def terminate_instance_in_auto_scaling_group(self, **arguments: Any) -> dict[str, Any]:
        assert arguments["ShouldDecrementDesiredCapacity"] is True
        self.ended_hosts.append(arguments["InstanceId"])
        return {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def provider(ecs: SimulatedEcs) -> EcsNodeProvider:
    values = {
        "cluster": "c",
        "job": JOB,
        "head": HEAD,
        "task_definition": "worker:1",
        "capacity_provider": "gpus",
        "subnets": ["subnet-1"],
        "security_groups": ["sg-1"],
        "environment": {nodes.ENV_HEAD_ADDRESS: "10.0.0.9"},
    }
    return EcsNodeProvider(
        values, "job", ecs=ecs, autoscaling=ecs, sleep=ecs.sleep, clock=lambda: ecs.now
    )


class Autoscaler(RuleBasedStateMachine):
    """Launches, failures, throttles, terminations and restarts of the head, in any order."""

    @initialize()
    def begin(self) -> None:
        self.ecs = SimulatedEcs()
        self.provider = provider(self.ecs)
        self.wanted = 0

    @rule(count=st.integers(0, 25))
    def want(self, count: int) -> None:
        self.wanted = count

    @rule()
    def update(self) -> None:
        """One round of Ray's autoscaler: look, then launch or terminate the difference."""
        try:
            there = self.provider.non_terminated_nodes(WORKERS)
            if len(there) < self.wanted:
                self.provider.create_node({}, TAGS, self.wanted - len(there))
            else:
                self.provider.terminate_nodes(there[self.wanted :])
        except (ClientError, ReadTimeoutError, NodeLaunchException):
            pass  # Ray notes it and looks again

    @rule(times=st.integers(1, 8))
    def throttle(self, times: int) -> None:
        self.ecs.throttles = times

    @rule(times=st.integers(1, 7))
    def lose_answers(self, times: int) -> None:
        self.ecs.lost_answers = times

    @rule(capacity=st.integers(0, 30))
    def change_capacity(self, capacity: int) -> None:
        self.ecs.capacity = capacity

    @rule(lag_s=st.floats(0, 20))
    def lag(self, lag_s: float) -> None:
        self.ecs.lag_s = lag_s

    @rule(number=st.integers(0, 100))
    def lose_a_task(self, number: int) -> None:
        if running := sorted(self.ecs.running()):
            self.ecs.end(running[number % len(running)])

    @rule()
    def restart_the_head(self) -> None:
        self.provider = provider(self.ecs)

    @rule(seconds=st.floats(0, 90))
    def wait(self, seconds: float) -> None:
        self.ecs.now += seconds

    @invariant()
    def no_call_starts_more_than_ecs_allows(self) -> None:
        if hasattr(self, "ecs"):
            assert all(count <= 10 for count in self.ecs.calls)

    def teardown(self) -> None:
        if not hasattr(self, "ecs"):
            return
        # The world calms down, and Ray looks a few more times.
        self.ecs.throttles = self.ecs.lost_answers = 0
        self.ecs.capacity, self.ecs.lag_s = 100, 0.0
        for _ in range(4):
            self.ecs.now += 61.0
            self.update()
        found = {*self.provider.non_terminated_nodes(WORKERS)}
        assert found == self.ecs.running()
        assert len(found) == self.wanted
        # And at the end of the job nothing of it is left.
        self.wanted = 0
        self.update()
        assert self.ecs.running() == set()


TestAutoscaler = Autoscaler.TestCase
TestAutoscaler.settings = settings(
    max_examples=150,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_a_lost_answer_starts_no_task_twice() -> None:
    ecs = SimulatedEcs()
    ecs.lost_answers = 3
    provider(ecs).create_node({}, TAGS, 4)
    assert len(ecs.running()) == 4
    assert len(ecs.tokens) == 1


def test_twenty_five_nodes_are_three_calls() -> None:
    ecs = SimulatedEcs()
    provider(ecs).create_node({}, TAGS, 25)
    assert ecs.calls == [10, 10, 5]


def test_waits_double_while_ecs_is_busy_and_end() -> None:
    ecs = SimulatedEcs()
    ecs.throttles = 5
    provider(ecs).create_node({}, TAGS, 1)
    assert ecs.now == pytest.approx(0.5 + 1 + 2 + 4 + 8)
    ecs.throttles = 100
    with pytest.raises(NodeLaunchException, match="ThrottlingException"):
        provider(ecs).create_node({}, TAGS, 1)


def test_what_cannot_be_placed_is_said_with_the_reason_and_the_rest_is_kept() -> None:
    ecs = SimulatedEcs()
    ecs.capacity = 3
    own = provider(ecs)
    with pytest.raises(
        NodeLaunchException, match=r"3 of 5 tasks: RESOURCE:GPU no host has one"
    ) as e:
        own.create_node({}, TAGS, 5)
    assert e.value.category == "RESOURCE:GPU"
    assert len(own.non_terminated_nodes(WORKERS)) == 3


def test_a_task_that_the_list_does_not_show_yet_counts() -> None:
    ecs = SimulatedEcs()
    ecs.lag_s = 20
    own = provider(ecs)
    own.create_node({}, TAGS, 2)
    (first, second) = own.non_terminated_nodes(WORKERS)
    assert own.node_tags(first) == TAGS
    assert not own.is_running(second)
    ecs.now += 21
    own.non_terminated_nodes({})
    assert own.is_running(first)


def test_a_node_that_goes_takes_its_host_with_it() -> None:
    ecs = SimulatedEcs()
    own = provider(ecs)
    own.create_node({}, TAGS, 2)
    first, second = own.non_terminated_nodes(WORKERS)
    own.terminate_node(first)
    number = first.rpartition("/")[2]
    assert ecs.draining == {f"host/{number}"}
    assert ecs.ended_hosts == [f"i-{number}"]
    assert ecs.running() == {second}
    assert own.is_terminated(first)


def test_the_head_is_a_node_that_is_never_ended() -> None:
    ecs = SimulatedEcs()
    own = provider(ecs)
    assert own.non_terminated_nodes({TAG_RAY_NODE_KIND: NODE_KIND_HEAD}) == [HEAD]
    assert own.is_running(HEAD)
    own.terminate_nodes([HEAD])
    assert own.non_terminated_nodes({}) == [HEAD]


def test_workers_learn_their_kind_and_where_the_head_is() -> None:
    ecs = SimulatedEcs()
    provider(ecs).create_node({}, TAGS, 1)
    (task,) = ecs.tasks.values()
    variables = {each["name"]: each["value"] for each in task["environment"]}
    assert variables == {nodes.ENV_HEAD_ADDRESS: "10.0.0.9", "RAY_NODE_TYPE_NAME": "worker"}
