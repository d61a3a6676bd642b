"""The local AWS starts, says what is missing, and leaves no process, however it ends."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import boto3
import pytest

from rehearsal.local_aws import ACCOUNT, REGION, LocalAws, LocalAwsError, is_healthy, local_aws
from tests.conftest import ROOT

pytestmark = pytest.mark.slow


def workers(aws: LocalAws) -> list[str]:
    """Command lines of the processes in the server's group, without the server."""
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,pgid=,stat=,args="], check=True, capture_output=True, text=True
    )
    rows = [line.split(None, 3) for line in listing.stdout.splitlines()]
    return [
        row[3]
        for row in rows
        if int(row[1]) == aws.pid and int(row[0]) != aws.pid and not row[2].startswith("Z")
    ]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_another_port_owner_is_named(aws: LocalAws, tmp_path: Path) -> None:
    port = int(aws.endpoint.rpartition(":")[2])
    with pytest.raises(LocalAwsError, match=f"cannot listen on 127.0.0.1:{port}: Address already"):
        local_aws(tmp_path, port=port).__enter__()


def test_missing_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalAwsError, match="run `make venv-aws`"):
        local_aws(tmp_path, python=tmp_path / "python").__enter__()


def test_another_version_of_the_emulator_is_refused(tmp_path: Path, aws: LocalAws) -> None:
    assert aws.pid  # there is an emulator, so what is refused here is its version
    python = tmp_path / "python"
    fake = tmp_path / "packages" / "ministack-9.9.9.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: ministack\nVersion: 9.9.9\n")
    own = ROOT / ".venv-aws" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{fake.parent}:$PYTHONPATH" exec "{own}" "$@"\n')
    python.chmod(0o755)
    with pytest.raises(LocalAwsError) as caught:
        local_aws(tmp_path / "aws", python=python).__enter__()
    message = str(caught.value)
    assert "ended with code 2" in message
    assert (
        "reaches into MiniStack 1.5.33, and this Python has 9.9.9: run `make venv-aws`" in message
    )


def test_stopping_leaves_no_process(aws: LocalAws, tmp_path: Path) -> None:
    with local_aws(tmp_path) as other:
        assert other.endpoint != aws.endpoint
        assert is_healthy(other.endpoint)
    assert not is_alive(other.pid)
    assert workers(other) == []


def test_killed_parent_leaves_no_server(aws: LocalAws, tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from rehearsal.local_aws import local_aws
        with local_aws(Path(sys.argv[1])) as aws:
            print(aws.pid, aws.endpoint, flush=True)
            time.sleep(600)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        pid, endpoint = parent.stdout.readline().split()
        assert is_healthy(endpoint)
        parent.kill()
    deadline = time.monotonic() + 30
    while is_alive(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(int(pid))
    assert is_healthy(aws.endpoint)  # and only that one


def test_command_prints_what_to_export_and_ends_on_interrupt(aws: LocalAws) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "rehearsal", "start", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        variables = dict(
            command.stdout.readline().strip().removeprefix("export ").split("=", 1)
            for _name in aws.environment()
        )
        endpoint = variables["AWS_ENDPOINT_URL"]
        assert variables == aws.environment() | {"AWS_ENDPOINT_URL": endpoint}
        assert is_healthy(endpoint)
        messages = command.stderr.readline()
        command.send_signal(signal.SIGINT)
        try:
            command.communicate(timeout=30)
        finally:
            command.kill()  # or leaving the block would wait for ever
    assert f"answers at {endpoint}" in messages
    assert command.returncode == 0
    assert not is_healthy(endpoint)


# --- alarms on queries and metric math ------------------------------------------------------------
QUERY = {"Id": "q", "Expression": "SELECT MAX(a) FROM b GROUP BY c", "Period": 300}
ERRORS = {"Namespace": "AWS/Lambda", "MetricName": "Errors"}
RATE = [
    {"Id": "rate", "Expression": "errors / 60", "ReturnData": True},
    {
        "Id": "errors",
        "MetricStat": {"Metric": ERRORS, "Period": 60, "Stat": "Sum"},
        "ReturnData": False,
    },
]


class Stacks:
    """A stack of one alarm and one dashboard, until it is as wanted or refused."""

    def __init__(self, aws: LocalAws) -> None:
        session = boto3.Session(ACCOUNT, "test", region_name=REGION)
        self.stacks = session.client("cloudformation", endpoint_url=aws.endpoint)
        self.watch = session.client("cloudwatch", endpoint_url=aws.endpoint)

    def apply(self, alarm: dict[str, Any], *, dashboard: str, update: bool = False) -> str:
        """Its status in the end, and why it is no other."""
        common = {"EvaluationPeriods": 1, "Threshold": 1, "ComparisonOperator": "LessThanThreshold"}
        resources = {
            "Alarm": {"Type": "AWS::CloudWatch::Alarm", "Properties": common | alarm},
            "Board": {
                "Type": "AWS::CloudWatch::Dashboard",
                "Properties": {"DashboardName": dashboard, "DashboardBody": "{}"},
            },
        }
        apply = self.stacks.update_stack if update else self.stacks.create_stack
        apply(StackName="watch", TemplateBody=json.dumps({"Resources": resources}))
        status = self.wait()
        events = self.stacks.describe_stack_events(StackName="watch")["StackEvents"]
        return f"{status}: {' '.join(each.get('ResourceStatusReason', '') for each in events)}"

    def wait(self) -> str:
        status = "IN_PROGRESS"
        while status.endswith("IN_PROGRESS"):
            time.sleep(0.05)
            found = self.stacks.list_stacks()["StackSummaries"]
            (status, *_) = [each["StackStatus"] for each in found if each["StackName"] == "watch"]
        return status

    def delete(self) -> None:
        self.stacks.delete_stack(StackName="watch")
        assert self.wait() == "DELETE_COMPLETE"

    def alarms(self) -> list[Any]:
        found: list[Any] = self.watch.describe_alarms()["MetricAlarms"]
        return found

    def dashboards(self) -> list[str]:
        return [each["DashboardName"] for each in self.watch.list_dashboards()["DashboardEntries"]]


def test_an_alarm_on_a_query_is_made_changed_and_removed(aws: LocalAws) -> None:
    stacks = Stacks(aws)
    assert stacks.apply({"Metrics": [QUERY]}, dashboard="a").startswith("CREATE_COMPLETE")
    (made,) = stacks.alarms()
    assert made["Metrics"] == [QUERY]
    assert "MetricName" not in made
    stacks.watch.set_alarm_state(AlarmName=made["AlarmName"], StateValue="ALARM", StateReason="set")
    changed = stacks.apply({"Metrics": RATE}, dashboard="b", update=True)
    assert changed.startswith("UPDATE_COMPLETE")
    (now,) = stacks.alarms()
    assert (now["AlarmName"], now["Metrics"]) == (made["AlarmName"], RATE)
    assert now["StateValue"] == "ALARM", "an update keeps the state"
    assert stacks.dashboards() == ["b"], "another name is another dashboard, and the old one goes"
    stacks.delete()
    assert not stacks.alarms()
    assert not stacks.dashboards()


@pytest.mark.parametrize(
    ("alarm", "why"),
    [
        ({"Metrics": [QUERY], **ERRORS}, "MetricName is given beside Metrics"),
        ({"Metrics": [QUERY, QUERY]}, "not different ids"),
        ({"Metrics": [QUERY | {"Id": "Q"}]}, "not different ids that begin with a small letter: Q"),
        ({"Metrics": []}, "not exactly one member of Metrics has ReturnData"),
        ({"Metrics": [QUERY, {**QUERY, "Id": "r"}]}, "not exactly one member"),
        ({"Metrics": [QUERY | {"ReturnData": False}]}, "not exactly one member"),
        ({"Metrics": [{"Id": "q"}]}, "q needs either Expression or MetricStat"),
        ({"Metrics": [QUERY | {"Expression": "SEARCH('{a,b} c', 'Sum')"}]}, "q is a search"),
        ({"Metrics": [{**QUERY, "Period": 90}]}, "q has the Period 90"),
        ({"Metrics": [{"Id": "q", "Expression": QUERY["Expression"]}]}, "q is a query without"),
        ({"Metrics": [QUERY | {"Query": "x"}]}, 'Unknown parameter in Metrics[0]: "Query"'),
    ],
)
def test_an_alarm_that_cloudwatch_would_refuse_is_refused(
    aws: LocalAws, alarm: dict[str, Any], why: str
) -> None:
    stacks = Stacks(aws)
    assert why in stacks.apply(alarm, dashboard="refused")
    assert not stacks.alarms(), "rolled back"
    stacks.delete()
