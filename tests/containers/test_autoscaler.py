"""Worker nodes are tasks of ECS that Ray starts and stops by way of the provider.

That there are as many as are wanted in the end, whatever fails and in which order, is shown by
``tests/stacks/test_lives.py``, with the same provider.
"""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    NoCredentialsError,
    ParamValidationError,
)
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    NODE_KIND_WORKER,
    TAG_RAY_NODE_KIND,
    TAG_RAY_USER_NODE_TYPE,
)

from containers import autoscaler
from containers.autoscaler import EcsNodeProvider
from contract import exits, nodes, times
from contract.job import JOB_TAG

HEAD = "arn:aws:ecs:us-east-1:0:task/c/head"
TAGS = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER, TAG_RAY_USER_NODE_TYPE: nodes.WORKER}
WORKERS = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER}
JOB = "job-1"


class SimulatedEcs:
    """Tasks of a cluster; its lists lag behind."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tasks: dict[str, dict[str, Any]] = {}
        self.capacity = 100
        self.lag_s = 0.0
        self.calls: list[int] = []
        self.released: list[tuple[str, list[str]]] = []
        """How the keeper was called, and for which hosts."""
        self._number = itertools.count(1)

    # --- what a test does ---
    def running(self) -> set[str]:
        return {arn for arn, task in self.tasks.items() if task["lastStatus"] != "STOPPED"}

    def end(self, arn: str, code: int | None = 1, reason: str = "") -> None:
        containers = [{"reason": reason} if code is None else {"exitCode": code}]
        ended = {"lastStatus": "STOPPED", "desiredStatus": "STOPPED", "containers": containers}
        self.tasks[arn] |= ended

    # --- what ECS does ---
    def run_task(self, **arguments: Any) -> dict[str, Any]:
        assert 1 <= arguments["count"] <= 10
        assert len(arguments["startedBy"]) <= 36
        assert len(arguments["clientToken"]) <= 64
        self.calls.append(arguments["count"])
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
        missing = arguments["count"] - len(arns)
        return {
            "tasks": [dict(self.tasks[arn]) for arn in arns],
            "failures": [{"reason": "RESOURCE:GPU", "detail": "no host has one"}] * missing,
        }

    def list_tasks(self, **arguments: Any) -> dict[str, Any]:
        assert arguments.keys() == {"cluster", "startedBy"}, "the only filter"
        found = [
            arn
            for arn, task in self.tasks.items()
            if task["startedBy"] == arguments["startedBy"]
            and task["desiredStatus"] == "RUNNING"
            and task["visible_at"] <= self.now
        ]
        return {"taskArns": found}

    def describe_tasks(self, **arguments: Any) -> dict[str, Any]:
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
        task = self.tasks[arguments["task"]]
        if task["lastStatus"] != "STOPPED":
            self.end(arguments["task"])
        return {"task": dict(task)}

    def invoke(self, **arguments: Any) -> dict[str, Any]:
        assert arguments["FunctionName"] == "keeper"
        event = json.loads(arguments["Payload"])
        assert event["Action"] == "release"
        self.released.append((arguments["InvocationType"], event["Hosts"]))
        return {}

    def get_paginator(self, operation: str) -> Any:
        return SimpleNamespace(paginate=lambda **given: iter([getattr(self, operation)(**given)]))


def provider(ecs: SimulatedEcs) -> EcsNodeProvider:
    values: autoscaler.ProviderConfig = {
        "cluster": "c",
        "job": JOB,
        "head": HEAD,
        "task_definition": "worker:1",
        "capacity_provider": "gpus",
        "keeper": "keeper",
        "subnets": ["subnet-1"],
        "security_groups": ["sg-1"],
        "environment": {nodes.ENV_HEAD_ADDRESS: "10.0.0.9"},
    }
    client: Any = ecs
    return EcsNodeProvider(values, "job", ecs=client, functions=client, clock=lambda: ecs.now)


def test_twenty_five_nodes_are_three_calls_and_a_head_that_comes_back_finds_them() -> None:
    ecs = SimulatedEcs()
    provider(ecs).create_node({}, TAGS, 25)
    assert ecs.calls == [10, 10, 5]
    assert {*provider(ecs).non_terminated_nodes(WORKERS)} == ecs.running()


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


def test_a_task_that_ecs_never_shows_counts_for_a_minute_and_is_then_replaced() -> None:
    ecs = SimulatedEcs()
    own = provider(ecs)
    own.create_node({}, TAGS, 2)
    lost = sorted(ecs.running())[0]
    del ecs.tasks[lost]  # neither listed nor described from now on
    assert lost in own.non_terminated_nodes(WORKERS)
    ecs.now += 59
    assert lost in own.non_terminated_nodes(WORKERS)
    ecs.now += 2
    assert own.non_terminated_nodes(WORKERS) == sorted(ecs.running())
    assert own.is_terminated(lost)


def test_the_hosts_of_nodes_that_go_are_the_keepers_to_end() -> None:
    ecs = SimulatedEcs()
    own = provider(ecs)
    own.create_node({}, TAGS, 3)
    first, second, third = own.non_terminated_nodes(WORKERS)
    own.terminate_nodes([first, second])
    hosts = [f"host/{each.rpartition('/')[2]}" for each in (first, second)]
    assert ecs.released == [("Event", hosts)]
    assert ecs.running() == {third}
    assert own.is_terminated(first)


@pytest.mark.parametrize(
    "end",
    [
        {"code": exits.BAD_HOST},
        {"code": None, "reason": "CannotStartContainerError: nvidia-container-cli: NVML: x"},
    ],
    ids=["found by the node", "found by Docker"],
)
def test_a_host_with_a_bad_gpu_ends_before_another_task_can_come_to_it(end: dict[str, Any]) -> None:
    ecs = SimulatedEcs()
    own = provider(ecs)
    own.create_node({}, TAGS, 2)
    bad, crashed = own.non_terminated_nodes(WORKERS)
    ecs.end(bad, **end)
    ecs.end(crashed)
    for _ in range(2):
        assert own.non_terminated_nodes(WORKERS) == []
        # Once, and before Ray asks again; the other host is good for another task.
        assert ecs.released == [("RequestResponse", [f"host/{bad.rpartition('/')[2]}"])]


def test_a_node_that_ends_before_ray_has_seen_it_is_shown_once() -> None:
    ecs = SimulatedEcs()
    own = provider(ecs)
    own.create_node({}, TAGS, 2)
    bad, good = sorted(ecs.running())
    ecs.end(bad, exits.BAD_HOST)
    assert own.non_terminated_nodes(WORKERS) == [bad, good]
    assert not own.is_running(bad)
    own.terminate_node(bad)  # as a job does that ends or shrinks just then
    assert own.non_terminated_nodes(WORKERS) == [good]
    assert own.is_terminated(bad)


def test_a_task_that_the_list_has_lost_still_counts_while_it_runs() -> None:
    ecs = SimulatedEcs()
    own = provider(ecs)
    own.create_node({}, TAGS, 1)
    (node,) = own.non_terminated_nodes(WORKERS)
    ecs.now += 1000
    ecs.tasks[node]["startedBy"] = "not listed"
    assert own.non_terminated_nodes(WORKERS) == [node]


def test_workers_take_a_shell_and_the_tags_of_their_job_and_of_their_costs() -> None:
    request = provider(SimulatedEcs())._request(TAGS, 1)
    assert {"key": JOB_TAG, "value": JOB} in request["tags"]
    assert request["enableExecuteCommand"] is True
    assert request["propagateTags"] == "TASK_DEFINITION"


def test_the_head_is_a_node_that_is_never_ended() -> None:
    ecs = SimulatedEcs()
    own = provider(ecs)
    assert own.non_terminated_nodes({TAG_RAY_NODE_KIND: NODE_KIND_HEAD}) == [HEAD]
    assert own.is_running(HEAD)
    own.terminate_nodes([HEAD])
    assert own.non_terminated_nodes({}) == [HEAD]


def test_a_head_that_ecs_has_told_to_stop_starts_no_nodes_beside_its_successors() -> None:
    """Behind a dead agent it does not hear of that, and goes on."""
    ecs = SimulatedEcs()
    own = provider(ecs)
    task = {"lastStatus": "RUNNING", "desiredStatus": "RUNNING", "startedBy": "Step Functions"}
    ecs.tasks[HEAD] = {"taskArn": HEAD, "visible_at": 0.0, **task}
    assert own.non_terminated_nodes({}) == [HEAD]
    own.create_node({}, TAGS, 1)
    ecs.tasks[HEAD]["desiredStatus"] = "STOPPED"
    assert len(own.non_terminated_nodes({})) == 2
    with pytest.raises(NodeLaunchException, match="told this head to stop"):
        own.create_node({}, TAGS, 1)
    assert ecs.calls == [1]


def test_workers_learn_their_kind_and_where_the_head_is() -> None:
    ecs = SimulatedEcs()
    provider(ecs).create_node({}, TAGS, 1)
    (task,) = ecs.tasks.values()
    variables = {each["name"]: each["value"] for each in task["environment"]}
    assert variables == {nodes.ENV_HEAD_ADDRESS: "10.0.0.9", "RAY_NODE_TYPE_NAME": "worker"}


# --- the real client ------------------------------------------------------------------------------
class Endpoint:
    """AWS on loopback: answers each request with the next of ``answers``, the last one for good."""

    def __init__(self, *answers: tuple[int, dict[str, Any]]) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        """Operation and parameters."""
        endpoint, left = self, [*answers]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                operation = self.headers["X-Amz-Target"].rpartition(".")[2]
                endpoint.requests.append((operation, body))
                status, answer = left.pop(0) if len(left) > 1 else left[0]
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


THROTTLED = (400, {"__type": "ThrottlingException", "message": "Rate exceeded"})
BROKEN = (500, {"__type": "ServerException", "message": "try again"})


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What botocore would have slept."""
    slept: list[float] = []
    monkeypatch.setattr("botocore.endpoint.time.sleep", slept.append)
    return slept


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


@pytest.fixture
def provider_at(
    monkeypatch: pytest.MonkeyPatch, waits: list[float], credentials: None
) -> Iterator[Callable[[Endpoint], EcsNodeProvider]]:
    """Make a provider with clients of its own for an endpoint."""
    del waits, credentials
    endpoints = []

    def make(endpoint: Endpoint) -> EcsNodeProvider:
        import boto3

        endpoints.append(endpoint)
        port = endpoint.server.server_address[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
        own = provider(SimulatedEcs())
        own._ecs = autoscaler.ecs_client()
        return own

    yield make
    for endpoint in endpoints:
        endpoint.server.shutdown()
        endpoint.server.server_close()


MakeProvider = Callable[[Endpoint], EcsNodeProvider]


def test_a_throttled_list_is_asked_for_six_times_at_most(
    provider_at: MakeProvider, waits: list[float]
) -> None:
    aws = Endpoint(THROTTLED)
    with pytest.raises(ClientError, match="ThrottlingException"):
        provider_at(aws).non_terminated_nodes({})
    assert [operation for operation, _ in aws.requests] == ["ListTasks"] * 6
    assert len(waits) == 5
    assert all(wait <= 2**number for number, wait in enumerate(waits)), "standard mode's bounds"


def test_a_launch_without_an_answer_is_given_up_before_ray_asks_again() -> None:
    config: Any = autoscaler._RETRIES
    attempts = config.retries["total_max_attempts"]
    waits = sum(min(2**each, 20) for each in range(attempts - 1))  # at most, as botocore has it
    assert attempts * config.read_timeout + waits < times.NODE_ASKED_S


def test_a_list_comes_in_pages_and_survives_one_fault(provider_at: MakeProvider) -> None:
    first = (200, {"taskArns": [f"{HEAD}1"], "nextToken": "2"})
    tasks = [{"taskArn": f"{HEAD}{number}", "lastStatus": "RUNNING"} for number in (1, 2)]
    aws = Endpoint(first, BROKEN, (200, {"taskArns": [f"{HEAD}2"]}), (200, {"tasks": tasks}))
    assert provider_at(aws).non_terminated_nodes({}) == [HEAD, f"{HEAD}1", f"{HEAD}2"]
    assert [body.get("nextToken") for _, body in aws.requests] == [None, "2", "2", None]


def test_a_repeated_launch_has_the_same_client_token(provider_at: MakeProvider) -> None:
    started = {"tasks": [{"taskArn": f"{HEAD}1"}], "failures": []}
    aws = Endpoint(BROKEN, THROTTLED, (200, started))
    own = provider_at(aws)
    own.create_node({}, TAGS, 1)
    tokens = {body["clientToken"] for _, body in aws.requests}
    assert ([operation for operation, _ in aws.requests], len(tokens)) == (["RunTask"] * 3, 1)
    own.create_node({}, TAGS, 1)
    assert aws.requests[-1][1]["clientToken"] not in tokens, "another launch is another task"


def test_what_can_never_succeed_is_tried_once(
    provider_at: MakeProvider, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    aws = Endpoint((400, {"__type": "ClusterNotFoundException", "message": "no such cluster"}))
    own = provider_at(aws)
    with pytest.raises(ClientError, match="ClusterNotFound"):
        own.non_terminated_nodes({})
    assert len(aws.requests) == 1
    wrong: Any = 5
    with pytest.raises(ParamValidationError):
        own._described([wrong])
    with pytest.raises(NodeLaunchException, match="Invalid type"):
        own.create_node({}, {**TAGS, TAG_RAY_USER_NODE_TYPE: wrong}, 1)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    own = provider_at(aws)
    with pytest.raises(NoCredentialsError):
        own.non_terminated_nodes({})
    assert (len(aws.requests), waits) == (1, [])


def test_hosts_are_left_to_the_sweep_where_the_keeper_cannot_be_called(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ecs = SimulatedEcs()

    def refuse(**_: Any) -> None:
        raise ClientError({"Error": {"Code": "AccessDeniedException"}}, "Invoke")

    monkeypatch.setattr(ecs, "invoke", refuse)
    own = provider(ecs)
    own.create_node({}, TAGS, 1)
    (node,) = own.non_terminated_nodes(WORKERS)
    own.terminate_node(node)
    assert not ecs.running()
    assert "left to the keeper's sweep" in capsys.readouterr().err
