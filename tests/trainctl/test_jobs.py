"""``trainctl ls | show | wait | logs | stop | cost | open``: jobs that were submitted."""

import json
import time
from datetime import timedelta
from typing import Any

import pytest

from contract import exits
from contract.job import Hold, JobStatus, Priority
from contract.text import utc
from contract.times import CONSISTENT_S
from tests.aws.calls import refused
from tests.trainctl.account import POOLS, Account
from tests.trainctl.conftest import Cli
from trainctl import follow
from trainctl.__main__ import main
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import UsageError
from trainctl.aws.tasks import Task
from trainctl.commands import shell
from training.record.goodput import Activity, Segment


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["show", "r1x"], 2, "there is no job and no run 'r1x': did you mean r1?"),
        (["wait", "nothing"], 2, "trainctl ls lists the jobs there are"),
        (["open", "done"], 1, "done has no running head"),
        (["settings", "pdd"], 2, "unknown recipe 'pdd': did you mean ddp?"),
        (["settings", "ddp", "--preset", "dolly"], 2, "unknown preset 'dolly'; ddp has ddp"),
    ],
)
def test_a_job_that_is_not_there_is_one_error(
    account: Account,
    cli: Cli,
    arguments: list[str],
    exit_code: int,
    words: str,
) -> None:
    account.add("done", run="r1", status="SUCCEEDED", output='{"status": "succeeded"}')
    account.add_head("done", "t1", lastStatus="STOPPED")
    said = cli(*arguments, code=exit_code)
    assert words in said.err
    assert len([line for line in said.err.splitlines() if line.startswith("error: ")]) == 1
    assert "Traceback" not in said.err
    assert said.out == ""
    assert account.changes == []


# --- the queue ------------------------------------------------------------------------------------
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


@pytest.mark.parametrize(
    ("max_heads", "orders", "expected"),
    [
        (1, [("1", 5)], {}),
        (1, [("1", 5), ("1", None)], {"job-1": (1, "job-0", 55)}),
        (
            1,
            [("1", 5), ("1", None), ("1", None)],
            {"job-1": (1, "job-0", 55), "job-2": (2, "job-1", None)},
        ),
        # The first of two heads whose end leaves room: for a head, and for nodes.
        (2, [("1", 5), ("1", 9), ("1", None)], {"job-2": (1, "job-1", 51)}),
        (3, [("3", 5), ("1", 9), ("2:4", None)], {"job-2": (1, "job-0", 55)}),
        # What runs may grow; a head by itself needs no node.
        (3, [("1:4", 5), ("1", None), ("0", None)], {"job-1": (1, "job-0", 55)}),
        # Admitted, and its head not asked for yet.
        (1, [("1", None), ("1", None)], {"job-1": (1, "job-0", None)}),
    ],
)
def test_a_queued_job_has_a_place_and_knows_the_job_to_wait_for(
    account: Account, max_heads: int, orders: Any, expected: dict[str, Any]
) -> None:
    account.shape["max_heads"] = max_heads
    queue(account, *orders)
    found = Deployment.find(profile=None, region=None)
    places = found.jobs.queue(found.shape.limits)
    shown = {
        job: (
            place.number,
            place.after,
            place.until and (place.until - account.now).total_seconds() / 60,
        )
        for job, place in places.items()
    }
    assert shown == expected


def test_each_waits_for_the_job_whose_end_makes_room_in_one_of_its_pools(
    account: Account, cli: Cli
) -> None:
    account.shape |= {"max_heads": 9, "pools": POOLS}
    queue(account, ("4", 9), ("2", 5), ("4", None), ("2", None), ("3", 7))
    pools = {"job-1": ["l4"], "job-2": ["default"], "job-3": ["l4"]}
    for job, own in pools.items():
        account.change_order(job, pools=own)
    account.change_order("job-4", pools=["l40s"])
    found = Deployment.find(profile=None, region=None)
    places = found.jobs.queue(found.shape.limits)
    shown = {job: (each.number, each.after) for job, each in places.items()}
    assert shown == {"job-2": (1, "job-0"), "job-3": (2, "job-1")}
    # One of a higher priority is before those that wait, and not before those that have begun.
    account.change_order("job-3", pools=["default"], nodes="1")
    account.change_order("job-3", priority="high")
    places = found.jobs.queue(found.shape.limits)
    shown = {job: (each.number, each.after) for job, each in places.items()}
    assert shown == {"job-3": (1, "job-0"), "job-2": (2, "job-3")}
    said = cli("submit", "ddp", "--nodes", "1", "--yes", "--priority", "high").err
    assert "priority  high\n" in said
    assert "number 2, after job-0, which ends by" in said
    assert account.orders[-1].priority is Priority.HIGH


def test_a_job_beyond_its_users_limit_waits_for_its_own_and_is_passed_by(
    account: Account, cli: Cli
) -> None:
    account.shape |= {"max_heads": 2, "max_jobs_per_user": 1}
    queue(account, ("1", 5), ("1", None), ("1", 3), ("1", None))
    for job, user in (("job-0", "anna"), ("job-1", "anna"), ("job-2", "bert"), ("job-3", "carl")):
        account.change_order(job, submitter=user)
    assert [each.split()[1] for each in cli("ls").out.splitlines()[1:]] == [
        *("queued", "waiting", "user's", "waiting")
    ]
    said = cli.json("show", "job-1")["reason"]
    assert said == "queued: number 2, after job-0: max_jobs_per_user is 1"


def test_a_queued_job_is_shown_as_one_everywhere(account: Account, cli: Cli) -> None:
    queue(account, ("1", 5), ("1", None))
    until = account.now + timedelta(minutes=55)
    words = f"queued: number 1, after job-0, which ends by {utc(until)}, usually sooner"
    rows = cli("ls").out.splitlines()
    assert [" queued 1 " in row for row in rows] == [False, True, False]
    job, other = cli.json("ls")
    place = {"number": 1, "after": "job-0", "until": until.isoformat()}
    assert (job["status"], job["reason"], job["queue"]) == ("queued", words, place)
    assert (other["status"], other["queue"]) == ("running", None)

    shown = cli("show", "job-1").out
    assert f"state     {words}\n" in shown
    assert "deadline" not in shown, "it has none before it is admitted"
    assert cli.json("show", "job-1")["queue"] == place
    assert f"deadline  {utc(until)}\n" in cli("show", "job-0").out
    found = Deployment.find(profile=None, region=None)
    assert follow.waiting(found, found.jobs.find("job-1"), []).reason == words


def test_submit_says_the_place_before_it_asks(account: Account, cli: Cli) -> None:
    queue(account, ("1", 5), ("1", None))
    said = cli("submit", "ddp", "--nodes", "1", "--json", "--yes")
    assert "queue     number 2, after job-1\n" in said.err
    assert json.loads(said.out)["queue"] == {"number": 2, "after": "job-1", "until": None}


OUTCOMES = [
    ({"status": "SUCCEEDED", "output": '{"status": "succeeded", "exit_code": 0}'}, 0),
    ({"status": "FAILED", "cause": '{"status": "failed", "exit_code": 3}'}, 3),
    ({"status": "FAILED", "cause": '{"status": "files_lost", "exit_code": 74}'}, 74),
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


def test_what_a_job_of_several_nodes_waits_for_is_shown(account: Account) -> None:
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
    assert waits() == "waiting for 1 x g5.xlarge"
    account.tasks["w2"]["lastStatus"] = "RUNNING"
    assert waits() == "waiting for 1 of 2 workers to pull the image and start"
    account.tasks["w1"]["lastStatus"] = "RUNNING"
    assert waits() == ""
    account.tasks["w2"]["lastStatus"] = "STOPPED"
    assert waits() == "", "a job of 1 to 2 nodes that has not asked for another one"
    account.tasks["w1"]["lastStatus"] = "STOPPED"
    assert waits() == "", "released, since nothing has been asked for in its place"
    account.add_worker("w3", "PROVISIONING")
    assert waits() == "waiting for 1 x g5.xlarge"
    said = "We currently do not have sufficient g5.xlarge capacity."
    failed = {
        "Description": "Launching a new EC2 instance.  Status Reason: why",
        "StartTime": account.now + timedelta(minutes=1),
        "StatusCode": "Failed",
    }
    account.activities = [
        {**failed, "AutoScalingGroupName": f"{group}-x", "StatusMessage": words}
        for group, words in (
            ("another", "of another stack"),
            ("TrainingStack-ClusterHeadGroupASG1", "of the heads"),
            ("TrainingStack-ClusterWorkerGroupASG1", said),
        )
    ]
    account.tasks["w3"]["createdAt"] = account.tasks["head"]["createdAt"] = account.now
    assert waits() == f"waiting for 1 x g5.xlarge: {said}"
    account.tasks["head"]["lastStatus"] = "PROVISIONING"
    assert waits().endswith(", for the head: of the heads")
    account.fails["describe_scaling_activities"] = refused("AccessDenied", "Describe", "no")
    assert waits().endswith(", for the head"), "not everybody may ask"
    del account.fails["describe_scaling_activities"]
    account.calls.clear()
    for words, num_asked in ((["show", "job"], 1), (["ls"], 1)):  # a list shows no reasons
        assert main(words) == 0
        assert len(account.sent("describe_scaling_activities")) == num_asked, words


@pytest.mark.parametrize(
    "status", ["UPDATE_IN_PROGRESS", "UPDATE_ROLLBACK_FAILED", "DELETE_FAILED"]
)
def test_what_runs_can_be_seen_and_stopped_while_and_after_a_deploy_fails(
    account: Account, cli: Cli, status: str
) -> None:
    account.stack_status = status
    account.add("job")
    account.add_head("job", "head")
    account.logs = {"job/ray/head": ["one"]}
    for words in (["ls"], ["show", "job"], ["logs", "job"], ["cluster", "status"]):
        assert main(words) == 0
    assert f"({status})" in cli.refuses("submit", "ddp", "--yes", code=1)
    assert account.changes == []
    assert main(["stop", "job", "--yes"]) == 0
    assert account.changes == ["stop_task"]


def test_stop_ends_what_a_job_has_left_behind(account: Account, cli: Cli) -> None:
    account.add("job", status="ABORTED")
    account.add_head("job", "head", lastStatus="STOPPED")
    account.add_worker("w1", "RUNNING")
    assert main(["stop", "job", "--yes"]) == 0
    assert [each["task"] for each in account.sent("stop_task")] == ["w1"]
    assert "has ended already" in cli("stop", "job", "--yes").err
    assert account.changes == ["stop_task"]


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
    # The sweep has stopped its head, which hangs, and the machine would start another.
    account.add("hangs")
    said = "[host_lost] the node did not answer its health check on i-1"
    account.add_head("hangs", "hung", desiredStatus="STOPPED", stoppedReason=said)
    jobs = Deployment.find(profile=None, region=None).jobs
    jobs.stop(jobs.find("hangs"))
    assert len(account.sent("stop_execution")) == 2
    # Its host has gone just before: another head would take over.
    account.add("lost")
    account.add_head("lost", "gone")
    account.is_lost_before_a_stop = True
    jobs.stop(jobs.find("lost"))
    assert len(account.sent("stop_execution")) == 3


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--node", "1"], "w1", ""),
        (["--node", "0", "--", "nvidia-smi", "-L"], "w0", ""),
        (["--node", "worker"], "w0", ""),
        ([], "head", ""),
        (["--task", "w1"], "w1", ""),
        (["--node", "7"], 2, "node 7 is not running; its program was started on the nodes: 0, 1."),
        (["--node", "boss"], 2, "--node is 'boss': give head, worker, or a number as in the log"),
    ],
)
def test_a_shell_opens_on_the_node_that_the_log_names(
    account: Account,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    code: str | int,
    said: str,
) -> None:
    account.add("job")
    account.add_head("job", "head")
    for number in (0, 1):
        address = {"name": "privateIPv4Address", "value": f"10.0.0.{number}"}
        account.add_worker(f"w{number}", "RUNNING", attachments=[{"details": [address]}])
    activity = Activity(nodes=("10.0.0.0", "10.0.0.1"))
    account.objects["runs/r1/jobs/job.activity"] = json.dumps(activity.to_json()).encode()
    opened: list[tuple[str, list[str]]] = []

    def in_session(_: object, task: Task, words: list[str]) -> int:
        opened.append((task.id, words))
        return 0

    monkeypatch.setattr(shell, "_in_session", in_session)
    if isinstance(code, int):
        assert said in cli("shell", "job", *argv, code=code).err
        return
    cli("shell", "job", *argv)
    words = argv[argv.index("--") + 1 :] if "--" in argv else []
    assert opened == [(code, ["python", "-P", "-m", "containers.program.shell", *words])]


def test_a_shell_of_the_standing_cluster_needs_no_job(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.wanted = {"head-service": 1, "worker-service": 0}
    opened: list[list[str]] = []

    def in_session(_: object, _task: Task, words: list[str]) -> int:
        opened.append(words)
        return 0

    monkeypatch.setattr(shell, "_in_session", in_session)
    cli("shell", "--", "ray", "status")
    cli("shell")
    assert opened == [["ray", "status"], ["bash"]]


# --- share of training, and hosts that stay -------------------------------------------------------
def test_the_share_of_paid_time_that_was_training_is_shown(account: Account, cli: Cli) -> None:
    began, second = account.now - timedelta(minutes=10), timedelta(seconds=1)
    account.add("job", status="SUCCEEDED", output='{"status": "succeeded", "exit_code": 0}')
    times: dict[str, Any] = {"pullStartedAt": began, "startedAt": began + 100 * second}
    stopped = {"lastStatus": "STOPPED", "stoppedAt": began + 500 * second}
    account.add_head("job", "head", **times, **stopped)
    times["startedAt"] += 100 * second
    account.add_worker("w1", "STOPPED", **times, stoppedAt=stopped["stoppedAt"])
    at = began.timestamp()
    trained = Segment(began=at + 250, stepped=at + 300, last=at + 400, step=9)
    activity = Activity(segments=(trained,))
    account.objects["runs/r1/jobs/job.activity"] = json.dumps(activity.to_json()).encode()
    assert cli.json("show", "job")["goodput"] == pytest.approx(0.2)
    assert "training  20.00% of 0.28 paid host hours" in cli("show", "job").out
    account.objects["runs/r1/jobs/job.activity"] = b"damaged"
    assert cli.json("show", "job")["goodput"] is None
    assert "training  " not in cli("show", "job").out


def test_hosts_that_are_held_are_shown_with_the_time_that_is_left(
    account: Account, cli: Cli
) -> None:
    account.add("job")
    account.change_order("job", hold_s=1800)
    account.add_head("job", "head", startedAt=account.now - timedelta(minutes=5))
    now = time.time()
    hold = Hold(code=3, since=now - 60, until=now + 750)
    account.objects["heads/r1/job.hold"] = hold.to_json().encode()
    said = "its command has failed, exit code 3; its hosts are released in 12 min "
    assert said in cli("show", "job").out
    assert "held, 12 min" in cli("ls").out
    account.change_order("job", hold_s=0)
    assert "held" not in cli("ls").out


# --- lists ----------------------------------------------------------------------------------------
def test_a_job_is_shown_with_its_order_its_nodes_and_its_result(account: Account, cli: Cli) -> None:
    account.add("job", status="SUCCEEDED", output='{"status": "succeeded", "exit_code": 0}')
    account.add_head("job", "head", lastStatus="STOPPED", containers=[{"reason": "OOM"}])
    account.add_worker("w1", "STOPPED")
    result = {"recipe": "ddp", "status": "succeeded", "measures": ["accuracy"], "accuracy": 0.9}
    account.objects["runs/r1/result.json"] = json.dumps(result).encode()
    shown = cli("show", "r1").out
    assert len(account.sent("get_execution_history")) == 1, "its nodes are asked for once"
    for words in (
        "nodes     1 to 2; 1 started",
        "command   true",
        "s3://bucket/runs/r1/",
        "accuracy 90.00%",
        "OOM",
    ):
        assert words in shown
    found = cli.json("show", "r1")
    assert (found["run"], found["status"], found["exit_code"]) == ("r1", "succeeded", 0)
    assert found["spec"]["nodes"] == "1:2"
    assert found["result"]["accuracy"] == 0.9
    assert cli.json("wait", "r1")["status"] == "succeeded"


def test_how_far_a_running_job_is_stands_in_show_and_ls(account: Account, cli: Cli) -> None:
    account.add("job")
    reached = {"time": 1.0, "job": "job", "step": 1200, "total_steps": 20000, "loss": 2.31}
    reached |= {"tokens_per_s": 2540.0, "left_s": 7500.0, "usd": 3.2}
    account.objects["runs/r1/progress.json"] = json.dumps(reached).encode()
    said = cli("show", "job")
    line = "step 1,200/20,000, loss 2.3100, 2,540 tokens/s, 2 h 5 min left, about $3.20 so far"
    assert f"progress  {line}\n" in said.out
    assert cli.json("show", "job")["progress"]["step"] == 1200
    assert "waiting  1:2    6%    10 min" in cli("ls").out


@pytest.mark.parametrize(
    "content", [b'{"step": 1', b"{}", b'{"job": "earlier", "step": 1, "total_steps": 2}']
)
def test_progress_that_is_damaged_or_of_an_earlier_job_is_not_shown(
    account: Account, cli: Cli, content: bytes
) -> None:
    account.add("job")
    account.objects["runs/r1/progress.json"] = content
    for command in (["show", "job"], ["ls"]):
        said = cli(*command).out
        assert "waiting" in said
        assert "step 1" not in said
        assert "50%" not in said


@pytest.mark.parametrize(
    ("result", "line"),
    [
        (
            {"recipe": "fsdp", "measures": ["perplexity"], "perplexity": 54.612}
            | {"loss": 4.12345678, "steps": 1200},
            "succeeded: perplexity 54.61, loss 4.123, steps 1,200",
        ),
        (
            {"recipe": "of a later version", "measures": ["mean_error", "gap"], "mean_error": 0.25}
            | {"gap": None, "accuracy": 0.9, "steps": 40},
            "succeeded: mean error 0.25, steps 40",
        ),
    ],
)
def test_a_job_is_shown_with_the_measures_of_its_recipe(
    account: Account, cli: Cli, result: dict[str, object], line: str
) -> None:
    account.add("job", status="SUCCEEDED", output='{"status": "succeeded", "exit_code": 0}')
    content = json.dumps({"status": "succeeded", **result})
    account.objects["runs/r1/result.json"] = content.encode()
    assert f"result    {line}\n" in cli("show", "r1").out


def test_a_job_whose_order_cannot_be_read_is_listed(account: Account, cli: Cli) -> None:
    account.add("by-hand", input="not an order")
    (found,) = cli.json("ls")
    assert (found["id"], found["run"], found["spec"]) == ("by-hand", "", None)
    for command in ("show", "cost"):
        assert main([command, "by-hand"]) == exits.OK


def test_what_the_console_stopped_does_not_count_as_a_users_stop(account: Account) -> None:
    account.add("job", status="ABORTED", error="Maintenance", cause="window")
    job = Deployment.find(profile=None, region=None).jobs.find("job")
    assert job.status is JobStatus.STOPPED
    assert job.reason == "its execution was aborted: Maintenance: window"


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


def test_what_tells_nothing_of_a_node_that_has_done_its_work_is_not_shown(
    account: Account, cli: Cli
) -> None:
    """Reasons as ECS words them."""
    account.add("job", status="SUCCEEDED", output='{"status": "succeeded", "reason": "succeeded"}')
    began = account.executions["job"]["startDate"]
    reasons = {
        "head": ("Essential container exited", 0, ""),
        "w1": ("Ray's autoscaler: not needed any more", 0, ""),
        "w2": ("Host EC2 (instance i-1) terminated.", 0, "Host EC2 (instance i-1) terminated."),
        "w3": ("Essential container exited", 1, "Essential container exited"),
    }
    for name, (reason, exit_code, _) in reasons.items():
        more: dict[str, Any] = {
            "stoppedReason": reason,
            "containers": [{"exitCode": exit_code}],
            "startedAt": began + timedelta(seconds=80),
        }
        if name == "head":
            account.add_head("job", name, **{**more, "lastStatus": "STOPPED"})
        else:
            account.add_worker(name, "STOPPED", **more)
    account.change_order("job", command=["python", "train.py", "--name", "two words"])
    shown = cli("show", "job").out
    rows = {line.split()[1]: line for line in shown.splitlines() if " STOPPED" in line}
    assert {name: line.split("STOPPED")[1].strip() for name, line in rows.items()} == {
        name: said for name, (_, _, said) in reasons.items()
    }
    assert "lasted    10 min 0 s, 1 min 20 s of it before its head ran\n" in shown
    assert "command   python train.py --name 'two words'\n" in shown


def test_a_running_program_is_shown_with_its_steps_and_the_last_line_of_its_log(
    account: Account, cli: Cli
) -> None:
    account.add("job")
    account.add_head("job", "head")
    account.logs["job/ray/head"] = ["epoch 1", "epoch 2: loss 0.5"]
    assert "progress  epoch 2: loss 0.5\n" in cli("show", "job").out
    reached = {"time": 1.0, "job": "job", "step": 1200, "step_s": 0.52}
    account.objects["runs/r1/progress.json"] = json.dumps(reached).encode()
    said = cli("show", "job").out
    assert "progress  1,200 steps, 0.52 s/step, epoch 2: loss 0.5\n" in said
    assert "1,200 steps" in cli("ls").out
