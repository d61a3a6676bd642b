"""Jobs that were submitted: the queue, how they end, and what AWS knows of their nodes.

``golden/jobs`` has what ``trainctl ls | show | stop`` print.
"""

import json
from datetime import datetime, timedelta
from typing import Any

import pytest

from contract import exits
from contract.job import JobStatus, overrides
from contract.nodes import ENV_KEPT, ENV_NODE
from contract.times import CONSISTENT_S
from tests.aws.calls import refused
from tests.trainctl.account import POOLS, Account
from tests.trainctl.conftest import Cli
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import UsageError
from trainctl.commands import shell
from trainctl.watch import follow
from training.record.goodput import Activity


def queue(account: Account, *orders: tuple[str, int | None]) -> None:
    """Jobs with their nodes, a minute apart, the newest listed first; and how many minutes ago the
    head of each was started, for an hour's training."""
    for number, (nodes, minutes) in reversed([*enumerate(orders)]):
        job = f"job-{number}"
        account.add(job, run=job, startDate=account.now - timedelta(minutes=50 - number))
        account.change_order(job, nodes=nodes)
        if minutes is not None:
            account.add_head(job, f"head-{number}")
            account.history[job][0]["timestamp"] = account.now - timedelta(minutes=minutes)


def places(account: Account) -> dict[str, tuple[int, str]]:
    """Jobs that are queued: their places, and the jobs they wait for."""
    found = Deployment.find(profile=None, region=None)
    queued = found.jobs.queue(found.shape.limits)
    for place in queued.values():  # none is later than the job it waits for
        assert place.until is None or place.until > account.now
    return {job: (place.number, place.after) for job, place in queued.items()}


@pytest.mark.parametrize(
    ("max_heads", "orders", "expected"),
    [
        (1, [("1", 5)], {}),
        (1, [("1", 5), ("1", None)], {"job-1": (1, "job-0")}),
        (1, [("1", 5), ("1", None), ("1", None)], {"job-1": (1, "job-0"), "job-2": (2, "job-1")}),
        # The first of two heads whose end leaves room: for a head, and for nodes.
        (2, [("1", 5), ("1", 9), ("1", None)], {"job-2": (1, "job-1")}),
        (3, [("3", 5), ("1", 9), ("2:4", None)], {"job-2": (1, "job-0")}),
        # What runs may grow; a head by itself needs no node.
        (3, [("1:4", 5), ("1", None), ("0", None)], {"job-1": (1, "job-0")}),
        # Admitted, and its head not asked for yet.
        (1, [("1", None), ("1", None)], {"job-1": (1, "job-0")}),
    ],
)
def test_a_queued_job_has_a_place_and_knows_the_job_to_wait_for(
    account: Account, max_heads: int, orders: Any, expected: dict[str, Any]
) -> None:
    account.shape["max_heads"] = max_heads
    queue(account, *orders)
    assert places(account) == expected


def test_each_waits_for_the_job_whose_end_makes_room_in_one_of_its_pools(account: Account) -> None:
    account.shape |= {"max_heads": 9, "pools": POOLS}
    queue(account, ("4", 9), ("2", 5), ("4", None), ("2", None), ("3", 7))
    for job, pool in ((1, "l4"), (2, "default"), (3, "l4"), (4, "l40s")):
        account.change_order(f"job-{job}", pools=[pool])
    assert places(account) == {"job-2": (1, "job-0"), "job-3": (2, "job-1")}
    # One of a higher priority is before those that wait, and not before those that have begun.
    account.change_order("job-3", pools=["default"], nodes="1", priority="high")
    assert places(account) == {"job-3": (1, "job-0"), "job-2": (2, "job-3")}


def test_a_job_beyond_its_users_limit_waits_for_its_own_and_is_passed_by(
    account: Account, cli: Cli
) -> None:
    account.shape |= {"max_heads": 2, "max_jobs_per_user": 1}
    queue(account, ("1", 5), ("1", None), ("1", 3), ("1", None))
    for job, user in enumerate(("anna", "anna", "bert", "carl")):
        account.change_order(f"job-{job}", submitter=user)
    assert places(account) == {"job-3": (1, "job-0"), "job-1": (2, "job-0")}
    queued = [job["queue"] and job["queue"]["number"] for job in cli.json("ls")]
    assert queued == [1, None, 2, None]


@pytest.mark.parametrize(
    ("user_id", "nodes", "kind", "waits"),
    [
        ("bert", "4", "worker", True),
        ("bert", "3", "worker", False),
        ("anna", "4", "worker", False),  # they are for this job
        ("bert", "0", "head", True),
    ],
)
def test_a_job_that_waits_for_hosts_of_others_names_them(
    account: Account, cli: Cli, user_id: str, nodes: str, kind: str, waits: bool
) -> None:
    account.shape |= {"max_heads": 1, "max_workers": 4}
    account.add("first", run="first", status="SUCCEEDED")
    account.change_order("first", user_id="anna", submitter="anna@example.com", keep_s=1200)
    until = account.now.timestamp() + 600
    values = {ENV_KEPT: str(until), ENV_NODE: kind}
    kept = {"group": "kept:first", "startedBy": "kept-1", "overrides": overrides(values)}
    account.add_worker("k", "RUNNING", job="first", **kept)
    account.add("next", run="next")
    account.change_order("next", nodes=nodes, user_id=user_id)
    words = "number 1, 1 host kept for anna@example.com by first until "
    assert (words in cli("show next").out) == waits
    assert places(account) == ({"next": (1, "first")} if waits else {})
    account.add_head("next", "h")  # it has begun: hosts of it may be on their way
    assert places(account) == {}


@pytest.mark.parametrize(
    ("status", "outcome", "code"),
    [
        ("SUCCEEDED", '{"status": "succeeded", "exit_code": 0}', 0),
        ("FAILED", '{"status": "failed", "exit_code": 3}', 3),
        ("FAILED", '{"status": "files_lost", "exit_code": 74}', 74),
        ("FAILED", '{"status": "no_capacity", "exit_code": 75}', 75),
        ("FAILED", '{"status": "deadline", "exit_code": null}', 124),
        ("FAILED", '{"status": "image_not_found"}', 1),
        ("FAILED", "States.Runtime", 1),
        ("ABORTED", "", 143),
        ("TIMED_OUT", "", 124),
    ],
)
def test_wait_exits_as_the_job_did(
    account: Account, cli: Cli, status: str, outcome: str, code: int
) -> None:
    account.add("job", status=status, output=outcome, cause=outcome)
    cli("wait job", code=code)


def test_what_a_job_of_several_nodes_waits_for_is_shown(account: Account, cli: Cli) -> None:
    """``test_follow`` has the states of a job of one node, from its submission on."""
    account.add("job")
    deployment = Deployment.find(profile=None, region=None)

    def waits() -> str:
        job = deployment.jobs.find("job")
        jobs = deployment.jobs
        return follow.waiting(deployment, job, [*jobs.heads(job), *jobs.workers(job)]).reason

    account.add_head("job", "head")
    account.add_worker("w1", "PENDING")
    account.add_worker("w2", "PROVISIONING")
    assert "1 x g5.xlarge" in waits()
    account.tasks["w2"]["lastStatus"] = "RUNNING"
    assert "1 of 2" in waits()
    account.tasks["w1"]["lastStatus"] = "RUNNING"
    assert waits() == ""
    account.tasks["w2"]["lastStatus"] = "STOPPED"
    assert waits() == "", "a job of 1 to 2 nodes that has not asked for another one"
    account.tasks["w1"]["lastStatus"] = "STOPPED"
    assert waits() == "", "released, since nothing has been asked for in its place"
    account.add_worker("w3", "PROVISIONING")
    began = {"StartTime": account.now + timedelta(minutes=1), "StatusCode": "Failed"}
    groups = ("another", "TrainingStack-ClusterHeadGroup", "TrainingStack-ClusterWorkerGroup")
    account.activities = [
        {
            **began,
            "Description": "Launching a new EC2 instance.",
            "AutoScalingGroupName": f"{group}ASG1-x",
        }
        | {"StatusMessage": f"why of {group}"}
        for group in groups
    ]
    account.tasks["w3"]["createdAt"] = account.tasks["head"]["createdAt"] = account.now
    assert waits().endswith(f"why of {groups[2]}")
    account.tasks["head"]["lastStatus"] = "PROVISIONING"
    assert waits().endswith(f"why of {groups[1]}")
    account.fails["describe_scaling_activities"] = refused("AccessDenied", "Describe", "no")
    assert "m5.large" in waits(), "not everybody may ask"
    del account.fails["describe_scaling_activities"]
    account.calls.clear()
    for words in (["show", "job"], ["ls"]):  # a list shows no reasons
        cli(*words)
        assert len(account.sent("describe_scaling_activities")) == 1, words


def test_an_execution_whose_head_cannot_be_stopped_is_ended(account: Account) -> None:
    # The sweep has stopped its head, which hangs, and the machine would start another.
    account.add("hangs")
    why = "[host_lost] the node did not answer its health check on i-1"
    account.add_head("hangs", "hung", desiredStatus="STOPPED", stoppedReason=why)
    jobs = Deployment.find(profile=None, region=None).jobs
    jobs.stop(jobs.find("hangs"))
    assert len(account.sent("stop_execution")) == 1
    # Its host has gone just before: another head would take over.
    account.add("lost")
    account.add_head("lost", "gone")
    account.is_lost_before_a_stop = True
    jobs.stop(jobs.find("lost"))
    assert len(account.sent("stop_execution")) == 2


@pytest.mark.parametrize(
    ("words", "task"),
    [
        ("--node 1", "w1"),
        ("--node 0 -- nvidia-smi -L", "w0"),
        ("--node worker", "w0"),
        ("", "head"),
        ("--task w1", "w1"),
        ("--node 7", ""),
        ("--node boss", ""),
    ],
)
def test_a_shell_opens_on_the_node_that_the_log_names(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch, words: str, task: str
) -> None:
    account.add("job")
    account.add_head("job", "head")
    for number in (0, 1):
        address = {"name": "privateIPv4Address", "value": f"10.0.0.{number}"}
        account.add_worker(f"w{number}", "RUNNING", attachments=[{"details": [address]}])
    activity = Activity(nodes=("10.0.0.0", "10.0.0.1"))
    account.objects["runs/r1/jobs/job.activity"] = json.dumps(activity.to_json()).encode()
    opened: list[Any] = []
    in_session = lambda _, task, words: opened.append((task.id, words))  # noqa: E731
    monkeypatch.setattr(shell, "_in_session", in_session)
    cli("shell job", *words.split(), code=exits.OK if task else exits.BAD_INPUT)
    command = words.partition("-- ")[2].split()
    started = ["python", "-P", "-m", "containers.program.start.shell", *command]
    assert opened == ([(task, started)] if task else [])
    opened.clear()
    # One of the standing cluster needs no job.
    account.wanted["head-service"] = 1
    cli("shell -- ray status")
    cli("shell")
    assert [words for _, words in opened] == [["ray", "status"], ["bash"]]


def test_a_job_as_json_has_its_order_and_its_result(account: Account, cli: Cli) -> None:
    account.add("job", status="SUCCEEDED", output='{"status": "succeeded", "exit_code": 0}')
    account.objects["runs/r1/result.json"] = b'{"recipe": "ddp", "accuracy": 0.9}'
    account.objects["runs/r1/jobs/job.activity"] = b"damaged"
    account.add("by-hand", input="not an order")
    assert [job["id"] for job in cli.json("ls")] == ["by-hand", "job"]
    cli("show by-hand")
    account.calls.clear()
    found = cli.json("show r1")
    assert len(account.sent("get_execution_history")) == 1, "its nodes are asked for once"
    assert (found["exit_code"], found["goodput"]) == (0, None)
    assert (found["spec"]["nodes"], found["result"]["accuracy"]) == ("1:2", 0.9)
    assert cli.json("wait r1")["status"] == "succeeded"


def test_a_job_shows_how_its_hosts_have_started(account: Account, cli: Cli) -> None:
    account.add("job")
    account.add_worker("w1", "RUNNING", containerInstanceArn="i-1")
    account.container_instances = [{"ec2InstanceId": "i-1"}, {"ec2InstanceId": "i-2"}]
    for host in ("i-1", "i-2"):
        boot = {"id": host, "ami": "ami-0", "gpus": "8 A100", "efa": 4, "steps": {"cache": 1}}
        account.objects[f"hosts/{host}.json"] = json.dumps(boot).encode()
    assert [each["id"] for each in cli.json("show job")["hosts"]] == ["i-1"]
    assert "id i-1, ami ami-0, gpus 8 A100, efa 4, cache 1 s\n" in cli("show job").out
    account.container_instances = []
    assert cli.json("show job")["hosts"] == []


def test_the_start_of_a_retry_counts_what_was_lost_apart(account: Account, cli: Cli) -> None:
    account.add("job")
    began: datetime = account.executions["job"]["startDate"]

    def at(second: int) -> datetime:
        return began + timedelta(seconds=second)

    account.add_head("job", "lost", createdAt=at(5), lastStatus="STOPPED")
    retry = {"createdAt": at(65), "pullStartedAt": at(95), "startedAt": at(100)}
    account.add_head("job", "retry", **retry)
    parts = {"queue": 5, "lost attempts": 60, "host": 30, "image": 5}
    assert cli.json("show job")["start"] == parts


@pytest.mark.parametrize(
    "content", [b'{"step": 1', b"{}", b'{"job": "earlier", "step": 1, "total_steps": 2}']
)
def test_progress_that_is_damaged_or_of_an_earlier_job_is_not_shown(
    account: Account, cli: Cli, content: bytes
) -> None:
    account.add("job")
    account.objects["runs/r1/progress.json"] = content
    assert cli.json("show job")["progress"] is None
    assert "50%" not in cli("ls").out


def test_what_the_console_stopped_does_not_count_as_a_users_stop(account: Account) -> None:
    account.add("job", status="ABORTED", error="Maintenance", cause="window")
    job = Deployment.find(profile=None, region=None).jobs.find("job")
    assert job.status is JobStatus.STOPPED
    assert job.reason.endswith("Maintenance: window")


def test_a_job_that_has_just_been_submitted_is_waited_for_and_a_run_is_not(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    new = "bert-lusab-gutih"

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            account.add(new)

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: sum(slept))
    jobs = Deployment.find(profile=None, region=None).jobs
    with monkeypatch.context() as patch:  # Step Functions lists it, and does not describe it yet
        patch.setattr(account, "on_list_executions", lambda **_: {"executions": [{"name": new}]})
        assert jobs.newest(limit=9) == []
    assert jobs.find(new).id == new
    assert len(slept) == 3
    del slept[:]
    # One like an id, and one that is none.
    for run in ("bert-tadan-fidor", "mnist-first-train"):
        account.add(f"{run}-1", run=run)
        assert jobs.find(run).run == run
        with pytest.raises(UsageError):
            jobs.find("mnist-first-trial")
    assert slept == []
    with pytest.raises(UsageError):
        jobs.find("bert-tadan-fidob")
    assert CONSISTENT_S <= sum(slept) < CONSISTENT_S + 1
