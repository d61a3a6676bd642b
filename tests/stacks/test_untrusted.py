"""The clean-up function cleans up whatever the end of a job's head says (``tests/fuzzing.py``)."""

import json
from types import ModuleType

import pytest

from contract.job import Outcome
from tests.fuzzing import fuzz_text
from tests.heads import head
from tests.stacks.test_job_keeper import Aws, ended

FAILURES = {"Failures": [{"Arn": "a", "Reason": "RESOURCE:GPU"}], "Tasks": []}


@pytest.mark.parametrize(
    "cause",
    [
        head(3, reason="OutOfMemoryError: x", StoppedReason="y", ContainerInstanceArn="h1"),
        head(StopCode="TaskFailedToStart", reason="nvidia-container", ContainerInstanceArn="h1"),
        FAILURES,
        FAILURES["Failures"],
    ],
)
def test_causes_of_errors(
    keeper: ModuleType, monkeypatch: pytest.MonkeyPatch, cause: object
) -> None:
    event = ended({})

    def read(text: str) -> None:
        account = Aws()
        account.add("head", family="head", group="job:j1", host="h1")
        account.add("worker", startedBy="j1", group="job:j1", host="h2")
        monkeypatch.setattr(keeper.boto3, "client", account.client)
        answer = keeper.handler(event | {"Cause": text}, None)
        outcome = Outcome.from_json(json.dumps(answer))
        assert not account.running(), "its tasks are ended"
        if not outcome.again:
            assert {*account.terminated} >= {"i-h1", "i-h2"}
            record = account.objects["ends/r1/j1.json"]
            assert record["status"] == outcome.status

    fuzz_text(json.dumps(cause), read)
