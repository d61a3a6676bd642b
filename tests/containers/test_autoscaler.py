"""Worker nodes are tasks of ECS that Ray starts and stops by way of the provider.

That there are as many as are wanted in the end, whatever fails and in which order, is shown by
``tests/stacks/test_lives.py``, with the same provider.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.exceptions import ClientError
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
from tests.aws.account import Account, model_of
from tests.aws.calls import refused

HEAD = "arn:aws:ecs:us-east-1:0:task/c/head"
TAGS = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER, TAG_RAY_USER_NODE_TYPE: nodes.WORKER}
WORKERS = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER}
JOB = "job-1"


class SimulatedEcs(Account):
    """Tasks of a cluster, each on a separate host."""

    def __init__(self) -> None:
        self.now = 0.0
        idle: Any = SimpleNamespace(
            pull=lambda task: self.model.begin(task),
            start=bool,
            terminate=lambda task: self.model.end(task, exits.TERMINATED),
            kill=bool,
            ended=bool,
        )
        super().__init__(model_of({}, now=lambda: self.now, after=lambda *_: None, agent=idle))
        self.tasks, self.capacity = self.model.tasks, 100
        self.taken: list[int] = []
        """How many kept hosts were asked for, each time."""
        self.released: list[tuple[str, list[str]]] = []
        """How the keeper was called, and for which hosts."""

    def running(self) -> set[str]:
        return {arn for arn, task in self.tasks.items() if task["lastStatus"] != "STOPPED"}

    def end(self, arn: str, code: int | None = 1, reason: str = "") -> None:
        if code is None:
            self.tasks[arn]["containers"] = [{"reason": reason}]
        self.model.end(self.tasks[arn], code)

    def on_run_task(self, **request: Any) -> Any:
        room = min(request["count"], self.capacity - len(self.running()))
        answer = super().on_run_task(**request | {"count": room})
        for each in answer["tasks"]:
            task = self.tasks[each["taskArn"]]
            self.model.place(task, f"host/{each['taskArn'].rpartition('/')[2]}")
            task |= {"_known": self.now, "_shows": self.now}
        failure = {"reason": "RESOURCE:GPU", "detail": "no host has one"}
        return answer | {"failures": [failure] * (request["count"] - room)}

    def on_invoke(self, **arguments: Any) -> Any:
        assert arguments["FunctionName"] == "keeper"
        event = json.loads(arguments["Payload"])
        if event["Action"] == "take":
            assert event == {"Action": "take", "Job": JOB, "Count": event["Count"], "Pool": "l4"}
            self.taken.append(event["Count"])
            return
        assert event["Action"] == "release"
        self.released.append((arguments["InvocationType"], event["Hosts"]))


@pytest.fixture
def ecs() -> SimulatedEcs:
    return SimulatedEcs()


@pytest.fixture
def own(ecs: SimulatedEcs) -> EcsNodeProvider:
    return provider(ecs)


def provider(ecs: SimulatedEcs, **more: Any) -> EcsNodeProvider:
    values: autoscaler.ProviderConfig = {
        **more,  # type: ignore[typeddict-item]
        "cluster": "c",
        "job": JOB,
        "tags": {"job": JOB},
        "head": HEAD,
        "task_definition": "arn:aws:ecs:us-east-1:1:task-definition/S-pool-l4:1",
        "capacity_provider": "gpus",
        "keeper": "keeper",
        "subnets": ["subnet-1"],
        "security_groups": ["sg-1"],
        "environment": {nodes.ENV_HEAD_ADDRESS: "10.0.0.9"},
    }
    client: Any = ecs
    return EcsNodeProvider(values, "job", ecs=client, functions=client, clock=lambda: ecs.now)


def test_twenty_five_nodes_are_three_calls_and_a_head_that_comes_back_finds_them(
    ecs: SimulatedEcs,
) -> None:
    provider(ecs).create_node({}, TAGS, 25)
    assert [each["count"] for each in ecs.sent("run_task")] == [10, 10, 5]
    assert {*provider(ecs).non_terminated_nodes(WORKERS)} == ecs.running()


def test_ray_takes_over_what_its_head_has_started_before_ecs_shows_it(
    ecs: SimulatedEcs, tmp_path: Path
) -> None:
    first = str(tmp_path / "first")
    provider(ecs, first=first).start_first(2)
    of_ray = provider(ecs, first=first)
    for task in ecs.tasks.values():
        task["_shows"] = task["_known"] = 100.0
    assert {*of_ray.workers()} == {*of_ray.workers()} == ecs.running()
    ecs.now, ecs.capacity, again = 100, 3, str(tmp_path / "again")
    with pytest.raises(NodeLaunchException, match="1 of 2 tasks"):
        provider(ecs, first=again).start_first(4)  # of a head that comes back
    for task in ecs.tasks.values():
        task["_shows"] = task["_known"] = 200.0
    assert len(provider(ecs, first=again).workers()) == 1, "also where ECS has not placed all"


def test_what_cannot_be_placed_is_said_with_the_reason_and_the_rest_is_kept(
    ecs: SimulatedEcs, own: EcsNodeProvider
) -> None:
    ecs.capacity = 3
    with pytest.raises(
        NodeLaunchException, match=r"3 of 5 tasks: RESOURCE:GPU no host has one"
    ) as e:
        own.create_node({}, TAGS, 5)
    assert e.value.category == "RESOURCE:GPU"
    assert len(own.non_terminated_nodes(WORKERS)) == 3


def test_a_worker_without_ray_is_counted_and_the_next_one_waits_longer_each_time(
    ecs: SimulatedEcs, tmp_path: Path
) -> None:
    own, counted = provider(ecs, failed_starts=str(tmp_path / "failed")), tmp_path / "failed"
    for number, pause_s in ((1, 10), (2, 20), (3, 40), (1, 10)):
        own.create_node({}, TAGS, 1)
        (arn,) = ecs.running()
        ecs.end(arn, exits.RAY_FAILED)
        for _ in range(2):  # one that is seen twice counts once
            own.non_terminated_nodes(WORKERS)
        assert counted.read_text() == str(number)
        ecs.now += pause_s - 1
        with pytest.raises(NodeLaunchException, match="Ray did not start: 1 s"):
            own.create_node({}, TAGS, 1)
        ecs.now += 1 + (number == 3) * 1800
    ecs.now += 1800
    own.non_terminated_nodes(WORKERS)
    assert counted.read_text() == "0", "a loss hours later is another matter"
    own.create_node({}, TAGS, 12)
    for arn in ecs.running():
        ecs.end(arn, exits.RAY_FAILED)
    own.non_terminated_nodes(WORKERS)
    assert counted.read_text() == "1", "twelve at a time are one"


def test_a_task_that_ecs_never_shows_counts_for_a_minute_and_is_then_replaced(
    ecs: SimulatedEcs, own: EcsNodeProvider
) -> None:
    own.create_node({}, TAGS, 2)
    lost = sorted(ecs.running())[0]
    del ecs.tasks[lost]  # neither listed nor described from now on
    assert lost in own.non_terminated_nodes(WORKERS)
    assert not own.is_running(lost)
    ecs.now += 59
    assert lost in own.non_terminated_nodes(WORKERS)
    ecs.now += 2
    assert own.non_terminated_nodes(WORKERS) == sorted(ecs.running())
    assert own.is_running(*ecs.running())


def test_the_hosts_of_nodes_that_go_are_the_keepers_to_end(
    ecs: SimulatedEcs, own: EcsNodeProvider
) -> None:
    own.create_node({}, TAGS, 3)
    first, second, third = own.non_terminated_nodes(WORKERS)
    own.terminate_nodes([first, second])
    hosts = [f"host/{each.rpartition('/')[2]}" for each in (first, second)]
    assert ecs.released == [("Event", hosts)]
    assert ecs.taken == [3], "hosts that are kept for the user are freed first"
    assert ecs.running() == {third}


@pytest.mark.parametrize(
    "end",
    [
        {"code": exits.BAD_HOST},
        {"code": None, "reason": "CannotStartContainerError: nvidia-container-cli: NVML: x"},
    ],
    ids=["found by the node", "found by Docker"],
)
def test_a_host_with_a_bad_gpu_ends_before_another_task_can_come_to_it(
    ecs: SimulatedEcs, own: EcsNodeProvider, end: dict[str, Any]
) -> None:
    own.create_node({}, TAGS, 2)
    bad, crashed = own.non_terminated_nodes(WORKERS)
    ecs.end(bad, **end)
    ecs.end(crashed)
    for _ in range(2):
        assert own.non_terminated_nodes(WORKERS) == []
        # Once, and before Ray asks again; the other host is good for another task.
        assert ecs.released == [("RequestResponse", [f"host/{bad.rpartition('/')[2]}"])]


def test_a_node_that_ends_before_ray_has_seen_it_is_shown_once(
    ecs: SimulatedEcs, own: EcsNodeProvider
) -> None:
    own.create_node({}, TAGS, 2)
    bad, good = sorted(ecs.running())
    ecs.end(bad, exits.BAD_HOST)
    assert own.non_terminated_nodes(WORKERS) == [bad, good]
    assert not own.is_running(bad)
    own.terminate_nodes([bad])  # as a job does that ends or shrinks just then
    assert own.non_terminated_nodes(WORKERS) == [good]


def test_workers_take_a_shell_and_the_tags_of_their_job_and_of_their_costs() -> None:
    request = provider(SimulatedEcs())._request(TAGS, 1)
    assert {"key": JOB_TAG, "value": JOB} in request["tags"]
    assert request["enableExecuteCommand"] is True
    assert request["propagateTags"] == "TASK_DEFINITION"


def test_the_head_is_a_node_that_is_never_ended(own: EcsNodeProvider) -> None:
    assert own.non_terminated_nodes({TAG_RAY_NODE_KIND: NODE_KIND_HEAD}) == [HEAD]
    assert own.is_running(HEAD)
    own.terminate_nodes([HEAD])
    assert own.non_terminated_nodes({}) == [HEAD]


def test_a_head_that_ecs_has_told_to_stop_starts_no_nodes_beside_its_successors(
    ecs: SimulatedEcs, own: EcsNodeProvider
) -> None:
    """Behind a dead agent it does not hear of that, and goes on."""
    task = {"lastStatus": "RUNNING", "desiredStatus": "RUNNING", "startedBy": "Step Functions"}
    ecs.tasks[HEAD] = {"taskArn": HEAD, "_known": 0, "_shows": 0, **task}
    assert own.non_terminated_nodes({}) == [HEAD]
    own.create_node({}, TAGS, 1)
    ecs.tasks[HEAD]["desiredStatus"] = "STOPPED"
    assert len(own.non_terminated_nodes({})) == 2
    with pytest.raises(NodeLaunchException):
        own.create_node({}, TAGS, 1)
    assert len(ecs.sent("run_task")) == 1


def test_workers_learn_their_kind_and_where_the_head_is(ecs: SimulatedEcs) -> None:
    provider(ecs).create_node({}, TAGS, 1)
    (told,) = ecs.sent("run_task")[0]["overrides"]["containerOverrides"]
    variables = {each["name"]: each["value"] for each in told["environment"]}
    assert variables == {nodes.ENV_HEAD_ADDRESS: "10.0.0.9", "RAY_NODE_TYPE_NAME": "worker"}


def test_hosts_are_left_to_the_sweep_where_the_keeper_cannot_be_called(
    ecs: SimulatedEcs, own: EcsNodeProvider, capsys: pytest.CaptureFixture[str]
) -> None:
    ecs.fails["invoke"] = refused("AccessDeniedException")
    own.create_node({}, TAGS, 1)
    (node,) = own.non_terminated_nodes(WORKERS)
    own.terminate_nodes([node])
    assert not ecs.running()
    assert "left to the keeper's sweep" in capsys.readouterr().err


# --- the real client ------------------------------------------------------------------------------
class Aws:
    """ECS behind the real client: answers each request with the next of ``answers``, the last one
    for good."""

    def __init__(self, *answers: tuple[int, dict[str, Any]]) -> None:
        self._left = [*answers]
        self.requests: list[tuple[str, dict[str, Any]]] = []
        """Operation and parameters."""
        self.provider = provider(SimulatedEcs())
        self.provider._ecs = autoscaler.ecs_client()
        answer: Any = self._answer
        self.provider._ecs.meta.events.register("before-send.ecs", answer)

    def _answer(self, request: Any, **_: object) -> AWSResponse:
        operation = request.headers["X-Amz-Target"].decode().rpartition(".")[2]
        self.requests.append((operation, json.loads(request.body)))
        status, answer = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        raw = SimpleNamespace(stream=lambda: [json.dumps(answer).encode()])
        return AWSResponse(request.url, status, HTTPHeaders(), raw)

    @property
    def asked(self) -> list[str]:
        return [operation for operation, _ in self.requests]


THROTTLED = (400, {"__type": "ThrottlingException", "message": "Rate exceeded"})
BROKEN = (500, {"__type": "ServerException", "message": "try again"})


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What botocore would have slept."""
    slept: list[float] = []
    monkeypatch.setattr("botocore.endpoint.time.sleep", slept.append)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    return slept


def test_a_throttled_list_is_asked_for_six_times_at_most(waits: list[float]) -> None:
    aws = Aws(THROTTLED)
    with pytest.raises(ClientError, match="ThrottlingException"):
        aws.provider.non_terminated_nodes({})
    assert aws.asked == ["ListTasks"] * 6
    assert len(waits) == 5
    assert all(wait <= 2**number for number, wait in enumerate(waits)), "standard mode's bounds"


def test_a_launch_without_an_answer_is_given_up_before_ray_asks_again() -> None:
    config: Any = autoscaler._RETRIES
    attempts = config.retries["total_max_attempts"]
    waits = sum(min(2**each, 20) for each in range(attempts - 1))  # at most, as botocore has it
    assert attempts * config.read_timeout + waits < times.NODE_ASKED_S


def test_a_list_comes_in_pages_and_survives_one_fault() -> None:
    first = (200, {"taskArns": [f"{HEAD}1"], "nextToken": "2"})
    tasks = [{"taskArn": f"{HEAD}{number}", "lastStatus": "RUNNING"} for number in (1, 2)]
    aws = Aws(first, BROKEN, (200, {"taskArns": [f"{HEAD}2"]}), (200, {"tasks": tasks}))
    assert aws.provider.non_terminated_nodes({}) == [HEAD, f"{HEAD}1", f"{HEAD}2"]
    assert [body.get("nextToken") for _, body in aws.requests] == [None, "2", "2", None]


def test_a_repeated_launch_has_the_same_client_token() -> None:
    started = {"tasks": [{"taskArn": f"{HEAD}1"}], "failures": []}
    aws = Aws(BROKEN, THROTTLED, (200, started))
    aws.provider.create_node({}, TAGS, 1)
    tokens = {body["clientToken"] for _, body in aws.requests}
    assert (aws.asked, len(tokens)) == (["RunTask"] * 3, 1)
    aws.provider.create_node({}, TAGS, 1)
    assert aws.requests[-1][1]["clientToken"] not in tokens, "another launch is another task"


def test_what_can_never_succeed_is_tried_once(waits: list[float]) -> None:
    aws = Aws((400, {"__type": "ClusterNotFoundException", "message": "no such cluster"}))
    with pytest.raises(ClientError, match="ClusterNotFound"):
        aws.provider.non_terminated_nodes({})
    wrong: Any = 5
    with pytest.raises(NodeLaunchException, match="Invalid type"):
        aws.provider.create_node({}, {**TAGS, TAG_RAY_USER_NODE_TYPE: wrong}, 1)
    assert (len(aws.requests), waits) == (1, [])
