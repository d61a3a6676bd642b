"""A canary's file has nothing of the account, the replay names each difference from the model, and
an interrupted canary is cleaned up by the next one: with a fake account, in seconds."""

import json
import re
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract.errors import InputError
from rehearsal import canary
from rehearsal.answers import ALLOWED, IDS, Answers, read
from rehearsal.canary import Canary
from rehearsal.children import CommandError
from rehearsal.cycle import RehearsalError
from rehearsal.replay import differences, replay

ACCOUNT, SECRET, NAME = "123456789012", "hunter2-token", "alice"
ARN = f"arn:aws:ecs:us-east-1:{ACCOUNT}:task/{NAME}/0abc"


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=UTC)


# --- the file -------------------------------------------------------------------------------------
def test_the_file_has_nothing_that_is_not_allowed(tmp_path: Path) -> None:
    foreign = f"{NAME} {SECRET} ({ACCOUNT}), {ARN}"
    record = dict.fromkeys((*ALLOWED, *IDS.values(), "tags", "owner"), foreign)
    inner = {"containers": [{"reason": foreign, "name": NAME}], "State": {"Name": foreign}}
    answers = Answers(tmp_path / "answers", began=1000)
    for kind in IDS:
        answers.take(kind, {**record, **inner, "createdAt": moment(1012.34)}, at=1010)
    written = (tmp_path / "answers").read_text()
    assert not [each for each in (NAME, SECRET, ACCOUNT, "0abc", "arn") if each in written]
    rows = read(tmp_path / "answers")
    assert [row["kind"] for row in rows] == [*IDS]
    assert rows[0].keys() - ALLOWED.keys() == {"kind", "id", "at"}
    assert rows[0]["createdAt"] == 12.3


def test_a_reason_keeps_its_words_and_a_thing_its_number(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "answers", began=1000)
    answers.take("task", {"taskArn": ARN, "lastStatus": "RUNNING"}, at=1010)
    answers.take("task", {"taskArn": ARN, "lastStatus": "RUNNING"}, at=1020)
    reason = "Host EC2 (instance i-1) terminated."
    answers.take("task", {"taskArn": ARN, "stoppedReason": reason}, at=1030)
    first, second = read(tmp_path / "answers")
    assert (first["id"], first["at"], second["at"]) == (second["id"], 10, 30)
    assert re.fullmatch(r"Host EC2 \(instance #\d+ terminated\.", second["stoppedReason"])
    # After an interruption, numbers go on: one number is one thing.
    Answers(tmp_path / "answers", began=1000).take("task", {"taskArn": "new"}, at=1040)
    assert read(tmp_path / "answers")[-1]["id"] > second["id"]


# --- the replay -----------------------------------------------------------------------------------
CANARY = {"kind": "canary", "id": 0, "at": 0.0, "every": 10}


def task(at: float, state: str, desired: str = "RUNNING", **more: Any) -> dict[str, Any]:
    return {
        "kind": "task",
        "id": 1,
        "at": at,
        "lastStatus": state,
        "desiredStatus": desired,
        "createdAt": 0.0,
        **more,
    }


def over(code: str, reason: str, **more: Any) -> dict[str, Any]:
    return task(300, "STOPPED", "STOPPED", stopCode=code, stoppedReason=reason, **more)


def thing(kind: str, at: float, field: str, value: object, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "id": f"a {kind}", "at": at, field: value, **more}


MACHINE = {"kind": "machine", "id": 9, "LaunchTime": 50.0}
HOST = {"kind": "host", "id": 4, "ec2InstanceId": 9}
LOST = {"startedAt": 195.0, "stoppedAt": 299.0}
#: As AWS answers where all is as in the model.
GOOD = [
    CANARY,
    {**MACHINE, "at": 60, "State.Name": "running"},
    {**HOST, "at": 160, "status": "ACTIVE", "registeredAt": 155.0},
    task(5, "PROVISIONING"),
    task(160, "PENDING"),
    task(200, "RUNNING", startedAt=195.0),
    over("TerminationNotice", "Host EC2 (instance #9 terminated.", **LOST),
    {**MACHINE, "at": 300, "State.Name": "shutting-down"},
    {**MACHINE, "at": 400, "State.Name": "terminated"},
    thing("execution", 5, "status", "RUNNING"),
    thing("execution", 500, "status", "SUCCEEDED"),
    thing("event", 1, "ResourceStatus", "CREATE_COMPLETE"),
]
KEY = {"StateReason.Message": "Client.InternalError: Client error on launch"}
EXITED = ("EssentialContainerExited", "Essential container in task exited")
#: What people have reported of AWS, and a word of the difference. cr, agent, tf: issues of
#: aws/containers-roadmap, aws/amazon-ecs-agent and hashicorp/terraform-provider-aws.
PLANTED: list[tuple[Mapping[str, Any], str]] = [
    # cr 2493
    (over("TaskFailedToStart", "CannotPullContainerError: pull image manifest"), "CannotPull"),
    # aws/copilot-cli 3104
    (over("TaskFailedToStart", "ResourceInitializationError: unable to pull"), "ResourceInit"),
    # agent 682
    (over("TaskFailedToStart", "DockerTimeoutError: Could not transition to"), "DockerTimeout"),
    # agent 336
    (over(*EXITED, **{"containers.0.reason": "CannotInspectContainerError"}), "CannotInspect"),
    # agent 1187, 2467: with any exit code
    (over(*EXITED, **{"containers.0.reason": "OutOfMemoryError: Container"}), "OutOfMemory"),
    (task(290, "DEACTIVATING", "STOPPED"), "DEACTIVATING"),  # cr 2171
    (task(290, "DEPROVISIONING", "STOPPED"), "DEPROVISIONING"),  # cloudposse's module 182
    (over(*EXITED, startedAt=900.0), "starts: 740 s"),  # cr 325: PENDING for minutes
    (over("SpotInterruption", "Host EC2 (instance #9 terminated."), "SpotInterruption"),  # cr 1565
    (thing("host", 100, "status", "REGISTRATION_FAILED"), "REGISTRATION_FAILED"),  # agent 2236
    (thing("host", 100, "status", "REGISTERING"), "REGISTERING"),  # agent 2010
    # agent 688: its Docker was late
    ({**HOST, "at": 900, "status": "ACTIVE", "registeredAt": 900.0}, "boots: 850 s"),
    # kubernetes/kops 11545
    ({**MACHINE, "at": 70, "State.Name": "terminated", **KEY}, "Client error on launch"),
    # tf 46747: GuardDuty's endpoint
    (thing("event", 900, "ResourceStatus", "DELETE_FAILED"), "DELETE_FAILED"),
    # aws/aws-cdk 29151: a reserved name
    (thing("event", 20, "ResourceStatus", "CREATE_FAILED"), "CREATE_FAILED"),
    (thing("execution", 900, "status", "TIMED_OUT"), "TIMED_OUT"),  # Step Functions' API reference
]


def test_answers_as_in_the_model_have_no_difference() -> None:
    assert differences(GOOD) == []


@pytest.mark.parametrize(("planted", "named"), PLANTED, ids=[named for _, named in PLANTED])
def test_the_replay_names_what_people_have_reported(
    planted: Mapping[str, Any], named: str, tmp_path: Path
) -> None:
    rows = sorted([*GOOD, planted], key=lambda row: row["at"])
    file = tmp_path / "answers"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [each for each in replay(file) if named in each]


@pytest.mark.parametrize("content", ["", "text", '{"kind": "task"}', "[1]"])
def test_the_replay_refuses_another_file(content: str, tmp_path: Path) -> None:
    file = tmp_path / "answers"
    file.write_text(content)
    with pytest.raises(InputError, match="no file of a canary"):
        replay(file)


# --- a canary, in a fake account ------------------------------------------------------------------
class FakeAccount:
    """An account with the canary's stacks at most; the calls are noted, and one may fail."""

    endpoint = ""

    def __init__(self) -> None:
        self.id, self.broken = ACCOUNT, ""
        self.stacks: set[str] = set()
        self.calls: list[str] = []

    def client(self, _: str) -> Any:
        return SimpleNamespace(get_caller_identity=lambda: {"Account": self.id})

    def items(self, *_: str, **__: str) -> list[Any]:
        return []

    def call(self, name: str) -> None:
        self.calls.append(name)
        if self.broken == name:
            raise CommandError(f"{name} is broken")

    def deploy(self, _: object) -> None:
        self.stacks |= {canary.CORE, canary.TRAINING}
        self.call("deploy")

    def destroy(self, _: object) -> None:
        self.call("destroy")
        self.stacks.clear()


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> FakeAccount:
    fake = FakeAccount()
    monkeypatch.setattr(canary, "AccountClients", lambda _: fake)
    monkeypatch.setattr(canary, "Cdk", lambda *_, **__: fake)
    monkeypatch.setattr(canary, "inventory", lambda _: {"stack": sorted(fake.stacks)})
    monkeypatch.setattr(canary, "push_images", lambda _: fake.call("push"))
    monkeypatch.setattr(canary, "run_lines", lambda *_, **__: fake.call("lines"))
    monkeypatch.setattr(canary.shutil, "which", lambda _: "docker")
    monkeypatch.setattr(Canary, "_stack", lambda _, name: name if name in fake.stacks else "")
    monkeypatch.setattr(Canary, "_check_resumed", lambda _: fake.call("resumed"))
    monkeypatch.setattr(Canary, "_look", lambda *_: None)
    return fake


def test_a_canary_flies_once_asked_and_leaves_nothing(
    account: FakeAccount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "no")
    with pytest.raises(RehearsalError, match="nothing was started"):
        Canary(tmp_path).run(is_sure=False)
    assert account.calls == []
    assert ACCOUNT in asked[0]
    Canary(tmp_path).run(is_sure=True)
    assert account.calls == ["deploy", "push", "lines", "resumed", "deploy", "destroy"]
    assert account.stacks == set()
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


@pytest.mark.parametrize("step", ["deploy", "push", "lines", "resumed"])
def test_after_a_failure_all_is_removed(account: FakeAccount, tmp_path: Path, step: str) -> None:
    account.broken = step
    with pytest.raises(CommandError, match=step):
        Canary(tmp_path).run(is_sure=True)
    assert account.calls[-1] == "destroy"
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


def test_the_next_canary_only_continues_the_clean_up(account: FakeAccount, tmp_path: Path) -> None:
    account.broken = "destroy"
    with pytest.raises(CommandError):
        Canary(tmp_path).run(is_sure=True)
    account.calls.clear()
    account.id = "210987654321"
    with pytest.raises(RehearsalError, match=ACCOUNT):
        Canary(tmp_path).run(is_sure=True)
    assert account.calls == []
    account.id, account.broken = ACCOUNT, ""
    Canary(tmp_path).run(is_sure=False)
    assert account.calls == ["destroy"]
    assert account.stacks == set()


def test_what_is_left_is_named_and_stays_in_mind(
    account: FakeAccount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([{}, {"VPC": ["vpc-1"]}, {}])
    monkeypatch.setattr(canary, "inventory", lambda _: next(found))
    with pytest.raises(RehearsalError, match="vpc-1"):
        Canary(tmp_path).run(is_sure=True)
    account.calls.clear()
    Canary(tmp_path).run(is_sure=True)
    assert account.calls == []  # no stack is there, and the check is made again
    assert not (tmp_path / "state.json").exists()


def test_after_two_hours_on_the_wall_clock_it_ends(
    account: FakeAccount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(*_: Any, **__: Any) -> None:
        now = time.time() + canary.MOST_S
        monkeypatch.setattr(canary, "time", SimpleNamespace(time=lambda: now))
        threading.Event().wait(30)

    monkeypatch.setattr(canary, "EVERY_S", 0.05)
    monkeypatch.setattr(canary, "run_lines", sleep)
    with pytest.raises(KeyboardInterrupt):
        Canary(tmp_path).run(is_sure=True)
    assert account.calls[-1] == "destroy"


def test_without_docker_or_beside_another_canary_it_starts_nothing(
    account: FakeAccount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary.shutil, "which", lambda _: None)
    with pytest.raises(RehearsalError, match="make images"):
        Canary(tmp_path).run(is_sure=True)
    account.stacks.add(canary.TRAINING)
    with pytest.raises(RehearsalError, match="another canary"):
        Canary(tmp_path).run(is_sure=True)
    assert account.calls == []
