"""A canary's file has nothing of the account, the replay names each difference from the model, and
an interrupted canary is cleaned up by the next one: with a fake account, in seconds."""

import io
import json
import re
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from contract.errors import InputError
from rehearsal import canary
from rehearsal.answers import ALLOWED, IDS, Answers, read
from rehearsal.canary import Canary
from rehearsal.children import CommandError
from rehearsal.cycle import RehearsalError
from rehearsal.model import STATES
from rehearsal.replay import differences, replay
from tests.aws.account import Account, model_of
from tests.simulation.world import BEGAN, World


# --- the file -------------------------------------------------------------------------------------
def test_the_file_has_what_is_allowed_and_nothing_else(tmp_path: Path) -> None:
    foreign = "alice hunter2 (123456789012), arn:aws:ecs:us-east-1:123456789012:task/0abc"
    record = dict.fromkeys((*ALLOWED, *IDS.values(), "tags", "owner"), foreign)
    inner = {"containers": [{"reason": foreign, "name": foreign}], "State": {"Name": foreign}}
    file = tmp_path / "answers"
    answers = Answers(file, began=1000)
    for kind in IDS:
        answers.take(kind, {**record, **inner}, at=1010)
    assert re.findall("alice|hunter2|1234|0abc|arn", file.read_text()) == []
    assert [row["kind"] for row in read(file)] == [*IDS]
    assert {*read(file)[0]} - {*ALLOWED} == {"kind", "id", "at"}
    reason = {"taskArn": "t", "stoppedReason": "Host EC2 (instance i-1) terminated."}
    # Once, though it is seen twice; and after an interruption under another number.
    for _ in range(2):
        answers.take("task", reason, at=1012)
    Answers(file, began=1000).take("task", reason, at=1012)
    first, second = read(file)[len(IDS) :]
    assert re.fullmatch(r"Host EC2 \(instance #\d+ terminated\.", first["stoppedReason"])
    assert first["id"] < second["id"]


# --- the replay -----------------------------------------------------------------------------------
LOST = "Host EC2 (instance #9 terminated."
TASK = {"kind": "task", "id": 1, "at": 160, "createdAt": 0.0, "lastStatus": "PENDING"}
MACHINE = {"kind": "machine", "id": 9, "at": 60, "LaunchTime": 50.0, "State.Name": "running"}
#: The last row of each thing where all is as in the model.
LAST: dict[str, dict[str, Any]] = {
    "task": {
        **TASK,
        **{"at": 300, "lastStatus": "STOPPED", "startedAt": 195.0, "stoppedAt": 299.0},
        **{"stopCode": "TerminationNotice", "stoppedReason": LOST},
    },
    "machine": {**MACHINE, "at": 400, "State.Name": "terminated"},
    "host": {
        **{"kind": "host", "id": 4, "at": 160, "ec2InstanceId": 9},
        **{"status": "ACTIVE", "registeredAt": 155.0},
    },
    "execution": {"kind": "execution", "id": 5, "at": 500, "status": "SUCCEEDED"},
    "event": {"kind": "event", "id": 6, "at": 1, "ResourceStatus": "CREATE_COMPLETE"},
}
GOOD: list[dict[str, Any]] = [
    {"kind": "canary", "id": 0, "at": 0.0, "every": 10},
    {**TASK, "at": 5, "lastStatus": "PROVISIONING"},
    TASK,
    MACHINE,
    {**MACHINE, "at": 300, "State.Name": "shutting-down"},
    *LAST.values(),
]
#: What people have reported of AWS. cr, agent, tf: issues of aws/containers-roadmap,
#: aws/amazon-ecs-agent and hashicorp/terraform-provider-aws.
PLANTED = [
    ("task", "stoppedReason", "CannotPullContainerError: pull image manifest"),  # cr 2493
    ("task", "stoppedReason", "ResourceInitializationError: unable to"),  # aws/copilot-cli 3104
    ("task", "stoppedReason", "DockerTimeoutError: Could not transition to"),  # agent 682
    ("task", "stoppedReason", "CannotInspectContainerError: Could not"),  # agent 336
    ("task", "containers.0.reason", "OutOfMemoryError: Container killed"),  # agent 1187, 2467
    ("task", "stopCode", "SpotInterruption"),  # cr 1565
    ("task", "lastStatus", "DEACTIVATING"),  # cr 2171
    ("task", "lastStatus", "DEPROVISIONING"),  # cloudposse/terraform-aws-ecs-alb-service-task 182
    ("task", "startedAt", 900.0),  # cr 325: PENDING for long
    ("host", "status", "REGISTRATION_FAILED"),  # agent 2236
    ("host", "status", "REGISTERING"),  # agent 2010
    ("host", "registeredAt", 900.0),  # agent 688: its Docker was late
    (
        "machine",
        "StateReason.Message",
        "Client.InternalError: Client error",
    ),  # kubernetes/kops 11545
    ("event", "ResourceStatus", "DELETE_FAILED"),  # tf 46747: the endpoint of GuardDuty
    ("event", "ResourceStatus", "CREATE_FAILED"),  # aws/aws-cdk 29151: a reserved name
]
DURATIONS = {"startedAt": "starts: 740 s", "registeredAt": "boots: 850 s"}


def test_answers_as_in_the_model_have_no_difference() -> None:
    assert differences(GOOD) == []


def test_the_states_of_the_replay_are_those_that_the_model_comes_to() -> None:
    world, seen = World(0), defaultdict[str, list[str]](list)
    agent = Mock()
    model = model_of({"g": "p"}, now=world.time, after=world.after, agent=agent)
    agent.pull.side_effect = lambda task: world.after(5, model.begin, task)
    agent.start.side_effect = lambda task: world.after(900, model.end, task, 0)
    task = {"taskArn": "t", "capacityProviderName": "p", "containers": [{}]}
    model.run([task])
    for second in range(4000):
        world.run(BEGAN + second)
        machines = Account(model).on_describe_instances([])["Reservations"]
        found = {"task": [task], "host": [*model.hosts.values()]}
        found["machine"] = [
            {"State.Name": machine["State"]["Name"]}
            for each in machines
            for machine in each["Instances"]
        ]
        for kind, each in ((kind, each) for kind, many in found.items() for each in many):
            if (state := str(each[STATES[kind][0]])) not in seen[kind]:
                seen[kind].append(state)
        if second == 600:
            for instance in model.groups["p"].instances:
                model.terminate(instance, lowers=True)
    # Once it is terminated, EC2 shows an instance for an hour, and the model does not.
    seen["machine"].append("terminated")
    assert seen == {kind: [*STATES[kind][1]] for kind in seen}


@pytest.mark.parametrize(("kind", "field", "value"), PLANTED)
def test_the_replay_names_what_people_have_reported(
    kind: str, field: str, value: Any, tmp_path: Path
) -> None:
    rows = [row if row is not LAST[kind] else {**row, field: value} for row in GOOD]
    file = tmp_path / "answers"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (found,) = replay(file)
    assert DURATIONS.get(field, value) in found
    file.write_text("[]")
    with pytest.raises(InputError, match="no file of a canary"):
        replay(file)


# --- a canary, in a fake account ------------------------------------------------------------------
@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """An account, which is its command line of CDK, too; it has stacks once they are deployed."""
    fake = MagicMock()
    fake.client().get_caller_identity.return_value = {"Account": "123456789012"}
    fake.inventory.return_value = {}
    for name in ("push_images", "run_lines", "inventory"):
        monkeypatch.setattr(canary, name, getattr(fake, name))
    for name in ("AccountClients", "Cdk"):
        monkeypatch.setattr(canary, name, lambda *_, **__: fake)
    monkeypatch.setattr(Canary, "_check_resumed", fake.resumed)
    monkeypatch.setattr(Canary, "_look", fake.look)
    monkeypatch.setattr(Canary, "_stack", lambda _, name: fake.deploy.called and name)
    monkeypatch.setattr(canary, "shutil", fake)
    return fake


def called(account: MagicMock) -> list[str]:
    """Steps of a canary."""
    steps = ("deploy", "push_images", "run_lines", "resumed", "destroy")
    found = [name for name, *_ in account.method_calls if name in steps]
    account.reset_mock()
    return found


def test_a_canary_flies_once_asked(
    account: MagicMock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("no\n"))
    for _ in ("no", "end of file"):
        with pytest.raises(RehearsalError, match="nothing was started"):
            Canary(tmp_path).run(is_sure=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("account 1234") == 2
    account.which.return_value = None
    with pytest.raises(RehearsalError, match="make images"):
        Canary(tmp_path).run(is_sure=True)
    assert called(account) == []
    account.which.return_value = "docker"
    Canary(tmp_path).run(is_sure=True)
    assert called(account) == [
        *("deploy", "push_images", "run_lines", "resumed", "deploy", "destroy")
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


def test_a_canary_with_a_gpu_prints_what_was_planned_and_what_came(
    account: MagicMock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    account.run_lines.side_effect = lambda _canary, _steps, lines, **_: dict.fromkeys(lines, "it")
    Canary(tmp_path, has_gpu=True).run(is_sure=True)
    assert account.deploy.call_args.args[0]["preset"] == "ddp"
    assert account.destroy.call_args == account.deploy.call_args
    assert called(account) == ["deploy", "push_images", "run_lines", "destroy"]
    printed = capsys.readouterr().out
    assert [line for line in canary.FIGURES if f"{line}\nit\n" not in printed] == []


@pytest.mark.parametrize("step", ["deploy", "push_images", "run_lines", "resumed"])
def test_after_a_failure_the_next_canary_only_cleans_up(
    account: MagicMock, tmp_path: Path, step: str
) -> None:
    getattr(account, step).side_effect = CommandError("it failed")
    account.inventory.side_effect = [{}, {"VPC": ["vpc-1"]}]
    with pytest.raises(RehearsalError, match="vpc-1"):
        Canary(tmp_path).run(is_sure=True)
    assert called(account)[-2:] == [step, "destroy"]
    account.deploy.called = True
    account.client().get_caller_identity.return_value = {"Account": "another"}
    with pytest.raises(RehearsalError, match="of account 1234"):
        Canary(tmp_path).run(is_sure=True)
    account.client().get_caller_identity.return_value = {"Account": "123456789012"}
    account.inventory.side_effect = None
    Canary(tmp_path).run(is_sure=False)
    assert called(account) == ["destroy"]
    account.deploy.called = True
    with pytest.raises(RehearsalError, match="another canary"):
        Canary(tmp_path).run(is_sure=True)


def test_after_two_hours_on_the_wall_clock_it_ends(
    account: MagicMock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(*_: object, **__: object) -> None:
        monkeypatch.setattr(canary, "MOST_S", 0)
        threading.Event().wait(30)

    monkeypatch.setattr(canary, "EVERY_S", 0.05)
    account.run_lines.side_effect = sleep
    with pytest.raises(KeyboardInterrupt):
        Canary(tmp_path).run(is_sure=True)
    assert called(account) == ["deploy", "push_images", "run_lines", "destroy"]
