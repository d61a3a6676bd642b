"""Jobs from the command line, without a cloud: what is refused, what is asked, what is sent.

The fake stands at the edge of AWS and answers boto3's calls from an account in memory. What comes
of what is sent is in ``tests/rehearsal/test_jobs.py``.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, NoCredentialsError

from contract import exits, jobs, nodes
from contract import outputs as stack_outputs
from tests.conftest import ROOT
from trainctl import doctor, follow, reference, submit
from trainctl.__main__ import main
from trainctl.aws import Deployment, EndedTask, Job

SHAPE = {
    "preset": "ddp",
    "head_instance_type": "m5.xlarge",
    "head_trains": False,
    "worker_instance_type": "g5.12xlarge",
    "max_workers": 4,
    "spot": False,
    "image_tag": "abc123",
}
MACHINE = "arn:aws:states:eu-west-1:1:stateMachine:jobs"
NOW = datetime.now(tz=UTC)


def refused(code: str, operation: str = "Operation") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": f"{code} happened"}}, operation)


class Account:
    """The account as boto3's clients show it; one object plays them all."""

    def __init__(self) -> None:
        self.shape = dict(SHAPE)
        self.stacks = [stack_outputs.CORE_STACK, stack_outputs.TRAINING_STACK]
        self.fails: dict[str, Exception] = {}
        """By the name of the operation."""
        self.executions: dict[str, dict[str, Any]] = {}
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.tasks: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, bytes] = {}
        self.secrets = {"training/key"}
        self.logs: dict[str, list[str]] = {}
        self.task_events: list[dict[str, Any]] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.quota = 1000.0
        self.exceptions = SimpleNamespace()

    def __getattr__(self, name: str) -> Any:
        """An operation: fails as told, is noted, and answers by its method ``on_…``."""
        if name.startswith(("on_", "_")):
            raise AttributeError(name)

        def call(*arguments: Any, **named: Any) -> Any:
            if name in self.fails:
                raise self.fails[name]
            self.calls.append((name, named))
            return getattr(self, f"on_{name}")(*arguments, **named)

        return call

    def sent(self, name: str) -> list[dict[str, Any]]:
        return [named for operation, named in self.calls if operation == name]

    def on_get_caller_identity(self) -> Any:
        return {"Account": "123456789012"}

    def on_describe_stacks(self, StackName: str) -> Any:  # noqa: N803
        if StackName not in self.stacks:
            raise ClientError(
                {"Error": {"Code": "ValidationError", "Message": "Stack does not exist"}}, "D"
            )
        outputs = {
            stack_outputs.BUCKET: "bucket",
            stack_outputs.CLUSTER: "cluster",
            stack_outputs.LOG_GROUP: "logs",
            stack_outputs.TASK_EVENTS: "events",
            stack_outputs.JOBS: MACHINE,
            stack_outputs.SUBNET: "subnet-1",
            stack_outputs.HEAD_REPOSITORY: "1.dkr.ecr/head",
            stack_outputs.WORKER_REPOSITORY: "1.dkr.ecr/worker",
            stack_outputs.SHAPE: json.dumps(self.shape),
        }
        listed = [{"OutputKey": key, "OutputValue": value} for key, value in outputs.items()]
        return {"Stacks": [{"StackStatus": "CREATE_COMPLETE", "Outputs": listed}]}

    def on_get_paginator(self, operation: str) -> Any:
        return SimpleNamespace(paginate=lambda **named: [getattr(self, operation)(**named)])

    # --- jobs
    def add(self, job: str, *, run: str = "r1", status: str = "RUNNING", **more: Any) -> None:
        spec = {"run": run, "max_workers": 2, "min_workers": 1, "max_seconds": 3600, "command": []}
        self.executions[job] = {
            "name": job,
            "executionArn": f"{MACHINE.replace(':stateMachine:', ':execution:')}:{job}",
            "status": status,
            "startDate": NOW - timedelta(minutes=10),
            "stopDate": None if status == "RUNNING" else NOW,
            "input": json.dumps(spec),
            **more,
        }
        self.history[job] = []

    def add_head(self, job: str, task: str, **more: Any) -> None:
        self.tasks[task] = {"taskArn": task, "lastStatus": "RUNNING", **more}
        output = json.dumps({"Tasks": [{"TaskArn": task}]})
        details = {"output": output}
        self.history[job].append({"type": "TaskSubmitted", "taskSubmittedEventDetails": details})

    def on_start_execution(self, *, name: str, input: str, **_: Any) -> Any:
        self.add(name)
        self.executions[name]["input"] = input
        return {}

    def on_list_executions(self, *, statusFilter: str = "", **_: Any) -> Any:  # noqa: N803
        found = [e for e in self.executions.values() if statusFilter in ("", e["status"])]
        return {"executions": found}

    def on_describe_execution(self, *, executionArn: str) -> Any:  # noqa: N803
        job = executionArn.rpartition(":")[2]
        if job not in self.executions:
            raise refused("ExecutionDoesNotExist")
        return self.executions[job]

    def on_get_execution_history(self, *, executionArn: str) -> Any:  # noqa: N803
        return {"events": self.history[executionArn.rpartition(":")[2]]}

    def on_stop_execution(self, *, executionArn: str, **_: Any) -> Any:  # noqa: N803
        job = executionArn.rpartition(":")[2]
        self.executions[job] |= {"status": "ABORTED", "stopDate": NOW}
        return {}

    def on_list_tasks(self, *, startedBy: str = "", desiredStatus: str, **_: Any) -> Any:  # noqa: N803
        return {
            "taskArns": [
                name
                for name, task in self.tasks.items()
                if task.get("startedBy") == startedBy
                and (task["lastStatus"] == "STOPPED") == (desiredStatus == "STOPPED")
            ]
        }

    def on_describe_tasks(self, *, tasks: list[str], **_: Any) -> Any:
        return {"tasks": [self.tasks[name] for name in tasks if name in self.tasks]}

    def on_stop_task(self, *, task: str, reason: str, **_: Any) -> Any:
        self.tasks[task] |= {"lastStatus": "STOPPED", "stoppedReason": reason}
        for execution in self.executions.values():
            outcome = {"status": "stopped", "reason": "stopped by user", "exit_code": 143}
            execution |= {"status": "FAILED", "stopDate": NOW, "cause": json.dumps(outcome)}
        return {}

    def on_get_log_events(self, *, logStreamName: str, nextToken: str = "", **_: Any) -> Any:  # noqa: N803
        if logStreamName not in self.logs:
            raise refused("ResourceNotFoundException")
        lines = [] if nextToken else self.logs[logStreamName]
        return {
            "events": [{"timestamp": 1_800_000_000_000, "message": line} for line in lines],
            "nextForwardToken": "end",
        }

    def on_filter_log_events(self, **_: Any) -> Any:
        return {"events": [{"message": json.dumps({"detail": e})} for e in self.task_events]}

    # --- bucket and secrets
    def on_get_object(self, *, Key: str, **_: Any) -> Any:  # noqa: N803
        if Key not in self.objects:
            raise refused("NoSuchKey")
        return {"Body": SimpleNamespace(read=lambda: self.objects[Key])}

    def on_upload_file(self, file: str, bucket: str, key: str) -> None:
        assert bucket == "bucket"
        self.objects[key] = Path(file).read_bytes()

    def on_list_objects_v2(self, *, Prefix: str, **_: Any) -> Any:  # noqa: N803
        return {"Contents": [{"Key": key} for key in self.objects if key.startswith(Prefix)]}

    def on_download_file(self, _bucket: str, key: str, target: str) -> None:
        Path(target).write_bytes(self.objects[key])

    def on_describe_secret(self, *, SecretId: str) -> Any:  # noqa: N803
        if SecretId not in self.secrets:
            raise refused("ResourceNotFoundException")
        return {}

    # --- what doctor asks
    def on_describe_images(self, **_: Any) -> Any:
        return {}

    def on_describe_subnets(self, **_: Any) -> Any:
        return {"Subnets": [{"AvailabilityZone": "eu-west-1a"}]}

    def on_describe_instance_type_offerings(self, **_: Any) -> Any:
        return {"InstanceTypeOfferings": [{}]}

    def on_get_parameter(self, **_: Any) -> Any:
        return {"Parameter": {"Value": "ami-1"}}

    def on_get_service_quota(self, **_: Any) -> Any:
        return {"Quota": {"Value": self.quota}}

    def on_get_role(self, **_: Any) -> Any:
        return {}


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    found = Account()
    session = SimpleNamespace(region_name="eu-west-1", client=lambda _service, **_options: found)
    monkeypatch.setattr(boto3, "Session", lambda **_: session)
    monkeypatch.setattr(follow, "POLL_S", 0)
    monkeypatch.setattr(follow, "LAST_LINES_S", 0)
    return found


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "__pycache__" / "old.pyc").write_text("")
    (folder / "mine.py").write_text("print(1)\n")
    (folder / "empty").mkdir()
    return folder


# --- what is refused ------------------------------------------------------------------------------
SUBMIT = ["submit", "ddp", "--yes"]
REFUSED: list[tuple[list[str], int, str]] = [
    (["submit", "--yes"], 2, "give a recipe (ddp, fsdp), or --code DIR"),
    (["submit", "dpd", "--yes"], 2, "there is no recipe 'dpd': did you mean ddp?"),
    ([*SUBMIT, "--epoch", "3"], 2, "ddp has no option --epoch: did you mean --epochs?"),
    ([*SUBMIT, "--epochs"], 2, "--epochs needs a value"),
    ([*SUBMIT, "--epochs", "many"], 2, "--epochs is 'many': it must be a number"),
    ([*SUBMIT, "--preset", "tiny"], 2, "ddp has no preset 'tiny'"),
    ([*SUBMIT, "--run", "a/b"], 2, "run name 'a/b' is not usable"),
    ([*SUBMIT, "--workers", "0"], 2, "--workers is 0: this deployment takes 1 to 4"),
    ([*SUBMIT, "--workers", "5"], 2, "-c max_workers=5"),
    ([*SUBMIT, "--workers", "4:2"], 2, "the first number is the smaller one"),
    ([*SUBMIT, "--workers", "two"], 2, "--workers is two: it must be at least 1"),
    ([*SUBMIT, "--max-hours", "0"], 2, "--max-hours is 0: it must be above 0"),
    ([*SUBMIT, "--max-hours", "1000"], 2, "at most 336"),
    ([*SUBMIT, "--wait-minutes", "-1"], 2, "--wait-minutes is -1: it must be above 0"),
    ([*SUBMIT, "--spot"], 2, "this deployment starts on-demand hosts"),
    ([*SUBMIT, "--env", "1A=b"], 2, "--env is '1A=b': it must be NAME=VALUE"),
    ([*SUBMIT, "--env", "NOT_SET_ANYWHERE"], 2, "there is no such variable here"),
    ([*SUBMIT, "--env", "TRAIN_JOB=mine"], 2, "names with TRAIN_ are the system's own"),
    ([*SUBMIT, "--secret", "KEY=mine"], 2, "it must be NAME=training/SECRET"),
    ([*SUBMIT, "--secret", "KEY=training/none"], 2, "there is no secret 'training/none'"),
    ([*SUBMIT, "--secret", "A=training/key", "--env", "A=b"], 2, "both --env and --secret"),
    ([*SUBMIT, "--env", f"A={'x' * 8000}"], 2, "ECS takes 8192"),
    (["submit", "ddp"], 2, "nobody is there to be asked: give --yes"),
    (["submit", "--code", "nowhere", "--yes", "--", "true"], 2, "there is no such folder"),
    (["submit", "--code", "CODE/empty", "--yes", "--", "true"], 2, "there is no file in it"),
    (["submit", "--code", "CODE", "--yes"], 2, "give the command after -- "),
    (["show", "r1x"], 2, "there is no job and no run 'r1x': did you mean r1?"),
    (["wait", "nothing"], 2, "trainctl ls shows what there is"),
    (["logs", "r1", "--rank", "7"], 2, "--rank is 7: r1 has ranks 0 to 1"),
    (["export", "none", "--to", "DIR"], 2, "there is no run 'none' in s3://bucket"),
    (["export", "r1", "--to", "CODE"], 2, "exists already: give a new folder"),
    (["export", "r1", "--to", "s3://b/x", "--dtype", "int8"], 2, "it must be fp32, bf16 or fp16"),
    (["generate", "r1", "--prompt", "Hi"], 2, "was trained with ddp, whose model is whole"),
    (["open", "done"], 1, "done has no head that runs"),
    (["settings", "pdd"], 2, "there is no recipe 'pdd': did you mean ddp?"),
]


@pytest.mark.parametrize(("arguments", "exit_code", "words"), REFUSED)
def test_a_mistake_is_one_sentence_and_nothing_is_started(
    account: Account,
    code: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    exit_code: int,
    words: str,
) -> None:
    account.add("done", run="r1", status="SUCCEEDED", output='{"status": "succeeded"}')
    account.add_head("done", "t1", lastStatus="STOPPED")
    ready = {"type": "phase", "name": "workers_ready", "hosts": ["10.0.0.1", "10.0.0.2"]}
    account.objects["runs/r1/metrics.jsonl"] = json.dumps(ready).encode()
    account.objects["runs/r1/config.json"] = b'{"recipe": "ddp"}'
    assert main([word.replace("CODE", str(code)) for word in arguments]) == exit_code
    said = capsys.readouterr()
    assert words in said.err
    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in said.err
    assert not account.sent("start_execution")
    assert said.out == ""


@pytest.mark.parametrize(
    ("operation", "error", "words"),
    [
        ("get_caller_identity", refused("ExpiredToken"), "the AWS login has expired"),
        ("get_caller_identity", NoCredentialsError(), "no AWS credentials were found"),
        ("start_execution", refused("AccessDeniedException"), "not allowed: Operation"),
        ("upload_file", refused("AccessDenied"), "not allowed"),
        ("list_executions", refused("StateMachineDoesNotExist"), "AWS refused Operation"),
    ],
)
def test_what_aws_refuses_is_said_in_a_users_words(
    account: Account,
    code: Path,
    capsys: pytest.CaptureFixture[str],
    operation: str,
    error: Exception,
    words: str,
) -> None:
    account.fails[operation] = error
    assert main(["submit", "--code", str(code), "--yes", "--", "true"]) == exits.FAILED
    assert words in capsys.readouterr().err


def test_without_a_stack_it_says_which_is_missing(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    account.stacks = [stack_outputs.CORE_STACK]
    assert main(["ls"]) == exits.FAILED
    assert "TrainingStack is not deployed in account 123456789012" in capsys.readouterr().err


def test_a_folder_that_is_too_large_names_its_largest_file(
    account: Account, code: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(submit, "CODE_MIB", 1)
    (code / "weights.bin").write_bytes(bytes(2 * 2**20))
    assert main(["submit", "--code", str(code), "--yes", "--", "true"]) == 2
    said = capsys.readouterr().err
    assert "2 MiB, and at most 1 are uploaded; the largest is weights.bin" in said
    assert not account.objects


def test_a_run_is_not_trained_by_two_jobs_at_once(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    account.add("first", run="r1")
    assert main([*SUBMIT, "--run", "r1"]) == exits.BAD_INPUT
    assert "run 'r1' is being trained already, by job first" in capsys.readouterr().err
    assert main([*SUBMIT, "--run", "r2"]) == exits.OK


# --- what is sent ---------------------------------------------------------------------------------
def test_a_recipe_becomes_a_command_for_all_gpus_of_its_hosts(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--run", "r1", "--workers", "1:3", "--max-hours", "2", "--epochs=5"]
    assert main([*SUBMIT, *arguments, "--env", "A=b", "--secret", "K=training/key"]) == 0
    (sent,) = account.sent("start_execution")
    spec = json.loads(sent["input"])
    launch = ["python", "-m", "training.launch", "ddp", "--run", "r1"]
    assert spec["command"] == [*launch, "--workers", "4:12", "--epochs=5"]
    assert (spec["min_workers"], spec["max_workers"], spec["max_seconds"]) == (1, 3, 7200)
    assert spec["environment"] == {
        nodes.ENV_PASSED: '{"A": "b"}',
        nodes.ENV_SECRETS: '{"K": "training/key"}',
    }
    assert len(sent["name"]) <= jobs.STARTED_BY_MOST
    said = capsys.readouterr()
    assert said.out.strip() == sent["name"]
    # 0.192 + 3 x 5.672 + NAT, for two hours: what it can cost is said before it starts.
    assert "price     $17.26 an hour" in said.err
    assert "at most   $34.52" in said.err


def test_a_head_that_trains_counts(account: Account) -> None:
    account.shape |= {"head_trains": True, "head_instance_type": "g5.12xlarge"}
    assert main([*SUBMIT, "--workers", "0"]) == 0
    assert main([*SUBMIT, "--workers", "1", "--run", "r2"]) == 0
    commands = [json.loads(sent["input"])["command"] for sent in account.sent("start_execution")]
    assert [command[command.index("--workers") + 1] for command in commands] == ["4", "8"]


def test_own_code_is_uploaded_without_what_is_no_code(account: Account, code: Path) -> None:
    words = ["python", "mine.py", "--run", "x", "-f"]
    assert main(["submit", "--code", str(code), "--run", "own", "--yes", "--", *words]) == 0
    (sent,) = account.sent("start_execution")
    spec = json.loads(sent["input"])
    assert spec["command"] == words
    (key,) = account.objects
    assert spec["environment"] == {nodes.ENV_CODE: f"s3://bucket/{key}"}
    assert key == f"runs/own/jobs/{sent['name']}.zip"
    assert [each.name for each in submit.files_of(code)] == ["mine.py"]


def test_plan_starts_nothing_and_speaks_json(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "ddp", "--workers", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["min_workers"], found["max_workers"], found["processes"]) == (2, 2, "8")
    assert found["usd_at_most"] == pytest.approx(24 * found["usd_per_hour"])
    assert not account.sent("start_execution")


def ends_at_once(account: Account, monkeypatch: pytest.MonkeyPatch, **ending: Any) -> None:
    """Every job that is started has ended when somebody looks."""

    def start(own: Account, *, name: str, input: str, **_: Any) -> Any:
        own.add(name)
        own.executions[name] |= {"input": input, "stopDate": NOW, **ending}
        place = json.loads(input)["command"][json.loads(input)["command"].index("--to") + 1]
        own.objects[place.removeprefix("s3://bucket/") + "/sub/model"] = b"weights"
        return {}

    monkeypatch.setattr(Account, "on_start_execution", start)
    account.objects["runs/r1/config.json"] = b'{"recipe": "fsdp"}'


def test_an_export_is_made_by_a_head_alone_and_fetched(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    ends_at_once(account, monkeypatch, status="SUCCEEDED", output='{"status": "succeeded"}')
    place = tmp_path / "model"
    assert main(["export", "r1", "--to", str(place), "--dtype", "bf16", "--yes"]) == 0
    (sent,) = account.sent("start_execution")
    spec = json.loads(sent["input"])
    assert spec["command"][:4] == ["python", "-m", "training.export", "r1"]
    assert spec["command"][-2:] == ["--dtype", "bf16"]
    assert (spec["min_workers"], spec["max_workers"]) == (0, 0)
    assert (place / "sub" / "model").read_bytes() == b"weights"
    assert capsys.readouterr().out.splitlines()[-1] == str(place)
    assert main(["export", "r1", "--to", "s3://other/place", "--yes"]) == 0
    assert not account.sent("download_file")[1:], "what is to stay in S3 is not fetched"


def test_an_export_that_fails_leaves_no_folder(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    cause = '{"status": "failed", "reason": "failed: user code exit 2", "exit_code": 2}'
    ends_at_once(account, monkeypatch, status="FAILED", cause=cause)
    assert main(["export", "r1", "--to", str(tmp_path / "model"), "--yes"]) == 2
    assert "did not succeed" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


# --- watching -------------------------------------------------------------------------------------
OUTCOMES = [
    ({"status": "SUCCEEDED", "output": '{"status": "succeeded", "exit_code": 0}'}, 0),
    ({"status": "FAILED", "cause": '{"status": "failed", "exit_code": 3}'}, 3),
    ({"status": "FAILED", "cause": '{"status": "no_capacity", "exit_code": 75}'}, 75),
    ({"status": "FAILED", "cause": '{"status": "deadline", "exit_code": null}'}, 124),
    ({"status": "FAILED", "cause": '{"status": "image_not_found"}'}, 1),
    ({"status": "FAILED", "cause": "States.Runtime"}, 1),
    ({"status": "ABORTED"}, 143),
    ({"status": "TIMED_OUT"}, 124),
]


@pytest.mark.parametrize(("execution", "exit_code"), OUTCOMES)
def test_wait_exits_as_the_job_did(
    account: Account, execution: dict[str, Any], exit_code: int
) -> None:
    account.add("job", **execution)
    assert main(["wait", "job"]) == exit_code


def test_what_a_job_waits_for_is_said(account: Account) -> None:
    account.add("job")
    deployment = Deployment.find(profile=None, region=None)

    def waits() -> str:
        job = deployment.job("job")
        return follow.waiting(deployment, job, deployment.heads(job))

    assert waits() == "waiting for the head to be started"
    account.add_head("job", "head", lastStatus="PROVISIONING")
    assert waits() == "waiting for 1 x m5.xlarge, for the head"
    account.tasks["head"]["lastStatus"] = "RUNNING"
    account.tasks["w1"] = {"taskArn": "w1", "lastStatus": "PENDING", "startedBy": "job"}
    account.tasks["w2"] = {"taskArn": "w2", "lastStatus": "PROVISIONING", "startedBy": "job"}
    assert waits() == "waiting for 1 x g5.12xlarge"
    account.tasks["w2"]["lastStatus"] = "RUNNING"
    assert waits() == "waiting for 1 of 2 workers to pull their image and start"
    account.tasks["w1"]["lastStatus"] = "RUNNING"
    assert waits() == ""


def test_follow_shows_each_line_once_and_how_it_ended(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    account.add(
        "job", status="FAILED", cause='{"status": "failed", "reason": "why", "exit_code": 5}'
    )
    account.add_head("job", "first", lastStatus="STOPPED")
    account.add_head("job", "second", lastStatus="STOPPED")
    account.logs = {"job/ray/first": ["one"], "job/ray/second": ["two", "three"]}
    assert main(["logs", "job", "--follow"]) == 5
    said = capsys.readouterr()
    assert said.out.splitlines() == ["one", "two", "three"]
    assert "another one takes over" in said.err
    assert "job: why, after 10 min" in said.err


def test_stop_tells_the_head_or_ends_an_execution_that_has_none(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    account.add("early")
    assert main(["stop", "early", "--yes"]) == 0
    assert len(account.sent("stop_execution")) == 1
    account.add("late")
    account.add_head("late", "head")
    assert main(["stop", "late", "--yes"]) == 0
    (stopped,) = account.sent("stop_task")
    assert stopped["reason"] == "stopped by user"
    assert len(account.sent("stop_execution")) == 1
    assert "Resume it" in capsys.readouterr().err


def event(task: str, seconds: float, **more: Any) -> dict[str, Any]:
    began = NOW - timedelta(minutes=9)
    return {
        "taskArn": f"arn/{task}",
        "group": "job:job",
        "startedBy": "AWS Step Functions",
        "pullStartedAt": began.isoformat(),
        "stoppedAt": (began + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z"),
        **more,
    }


def test_cost_adds_up_what_ran_for_how_long(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    account.add("job", status="SUCCEEDED", output="{}")
    account.task_events = [
        event("head", 360),
        event("w1", 180, startedBy="job"),
        event("w2", 180, startedBy="job"),
        event("other", 999, group="job:other"),
        event("never", 0, pullStartedAt=None, startedBy="job"),
    ]
    assert main(["cost", "job", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["node_seconds"] == {"head": 360, "worker": 360}
    assert found["usd"] == pytest.approx(0.1 * 0.192 + 0.1 * 5.672)
    job = Job.from_execution(account.executions["job"])
    assert EndedTask.from_event(event("x", 5, pullStartedAt=None), job).seconds == 0


# --- doctor ---------------------------------------------------------------------------------------
def checks(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, str]]]:
    code = main(["doctor", "--json"])
    return code, {each["what"]: each for each in json.loads(capsys.readouterr().out)}


def test_doctor_finds_nothing_where_all_is_well(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = checks(capsys)
    assert code == 0
    assert {each["state"] for each in found.values()} <= {"ok", "unknown"}
    assert "quota G, on demand" in found
    assert found["quota G, on demand"]["found"].endswith("takes 192")
    assert found["quota standard, on demand"]["found"].endswith("takes 4")
    assert {"image of GPU hosts", "image of CPU hosts"} <= found.keys()
    assert "role AWSServiceRoleForEC2Spot" not in found
    account.shape["spot"] = True
    _, found = checks(capsys)
    assert {"quota G, spot", "role AWSServiceRoleForEC2Spot"} <= found.keys()


@pytest.mark.parametrize(
    ("operation", "code", "what", "mend"),
    [
        ("describe_images", "ImageNotFoundException", "image of the worker", "containers.publish"),
        ("get_parameter", "ParameterNotFound", "image of GPU hosts", "another region"),
        ("get_role", "NoSuchEntity", "role AWSServiceRoleForECS", "create-service-linked-role"),
    ],
)
def test_doctor_names_what_mends_what_is_missing(
    account: Account,
    capsys: pytest.CaptureFixture[str],
    operation: str,
    code: str,
    what: str,
    mend: str,
) -> None:
    account.fails[operation] = refused(code)
    exit_code, found = checks(capsys)
    assert exit_code == exits.FAILED
    assert found[what]["state"] == "bad"
    assert mend in found[what]["mend"]
    account.fails[operation] = refused("AccessDenied")
    exit_code, found = checks(capsys)
    assert (exit_code, found[what]["state"]) == (0, "unknown"), "not knowing is no fault"


def test_doctor_says_when_a_quota_is_too_small_or_a_zone_has_not_the_type(
    account: Account, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    account.quota = 8.0
    none: dict[str, Any] = {"InstanceTypeOfferings": []}
    monkeypatch.setattr(Account, "on_describe_instance_type_offerings", lambda *_, **__: none)
    code, found = checks(capsys)
    assert code == exits.FAILED
    quota = found["quota G, on demand"]
    assert quota["state"] == "bad"
    assert f"--quota-code {doctor.QUOTAS['g'][0]} --desired-value 192" in quota["mend"]
    assert found["quota standard, on demand"]["state"] == "ok"
    assert "not in eu-west-1a" in found["g5.12xlarge offered"]["found"]


def test_doctor_without_a_deployment_says_what_find_says(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    account.stacks = []
    code, found = checks(capsys)
    assert code == exits.FAILED
    assert "CoreStack is not deployed" in found["deployment"]["found"]


# --- the page of commands -------------------------------------------------------------------------
def test_the_page_of_commands_is_that_of_the_commands() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == reference.page(), (
        "the commands have changed: python -m trainctl.reference > docs/cli.md"
    )


def all_commands() -> Iterator[list[str]]:
    import typer

    from trainctl.__main__ import app

    for words, _ in reference.walk(typer.main.get_command(app), ()):
        yield words.split()


@pytest.mark.parametrize("words", [[], *all_commands()], ids=" ".join)
def test_every_command_has_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0
    said = capsys.readouterr()
    assert "Usage: trainctl" in said.out
    assert said.err == ""


def test_a_laptop_loads_neither_torch_nor_ray() -> None:
    script = (
        "import sys, trainctl.__main__; print([m for m in ('torch', 'ray') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
