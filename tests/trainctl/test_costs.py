"""A job's cost, maximum and actual, follows from the hosts and prices of its order, and never
from a guess."""

import dataclasses
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer

from contract import exits, times
from contract.cluster_shape import ClusterShape
from contract.instance_types import HostPrice, instance_type
from contract.job import JobSpec
from contract.text import dollars
from tests.trainctl.account import PRICES, Account
from tests.trainctl.conftest import Cli
from trainctl import pricing
from trainctl.__main__ import main
from trainctl.options import Where
from trainctl.pricing import usd_at_most
from training.record.goodput import Paid

SUBMIT = ["submit", "ddp", "--yes"]


def event(task: str, seconds: float, **more: Any) -> dict[str, Any]:
    began = datetime.now(tz=UTC) - timedelta(minutes=9)
    return {
        "taskArn": f"arn/{task}",
        "group": "job:job",
        "startedBy": "AWS Step Functions",
        "pullStartedAt": began.isoformat(),
        "stoppedAt": (began + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z"),
        **more,
    }


def test_each_worker_costs_what_hosts_of_its_pool_cost() -> None:
    """Of the default pool, where it was first, and of another one."""
    other = dataclasses.replace(PRICES.worker, usd_per_hour=7.0)
    prices = dataclasses.replace(PRICES, pools={"default": PRICES.worker, "l40s": other})
    hour = Paid(is_head=False, pulled=0, started=0, ended=3600)
    paid = [dataclasses.replace(hour, pool=each) for each in ("default", "l40s")]
    assert PRICES.worker.usd_per_hour
    assert pricing._usd(prices, paid) == PRICES.worker.usd_per_hour + 7
    assert prices.dearest.worker == other


# --- before it starts -----------------------------------------------------------------------------
def maximum(account: Account, *, nodes: int = 4, **shape: Any) -> tuple[float, float]:
    """US dollars of an hour, and those of a job of ten hours at most."""
    found = ClusterShape.from_json(json.dumps({**account.shape, **shape}))
    prices = found.prices("us-east-1")
    hourly = prices.usd_per_hour(nodes)
    usd = usd_at_most(prices, found, num_nodes=nodes, max_seconds=36000)
    assert hourly is not None
    assert usd is not None
    return hourly, usd


def test_the_maximum_covers_every_host_until_the_clean_up_is_over(account: Account) -> None:
    hourly, usd = maximum(account)
    head, worker = 0.192 + 9.8 / 730, 5.672 + 35 / 730
    assert hourly == pytest.approx(head + 4 * worker + 0.05)
    assert usd == pytest.approx((head + 4 * worker + 0.05) * (10 + 690 / 3600))
    assert times.JOB_TAIL_S == 690


@pytest.mark.parametrize(
    ("nodes", "heads", "surplus"),
    [
        (4, 1, ()),
        (3, 1, ("worker",)),
        (4, 2, ("head",)),
        (1, 4, ("head", "worker")),
        (0, 1, ()),
    ],
)
def test_a_group_that_is_not_full_may_start_one_host_too_many(
    account: Account, nodes: int, heads: int, surplus: tuple[str, ...]
) -> None:
    all_hosts, usd = maximum(account, nodes=nodes, max_heads=heads)
    hourly = {"head": 0.192 + 9.8 / 730, "worker": 5.672 + 35 / 730}
    expected = sum(hourly[each] for each in surplus) * times.SURPLUS_HOST_S / 3600
    without = all_hosts * (10 + times.JOB_TAIL_S / 3600)
    assert usd - without == pytest.approx(expected, rel=1e-3, abs=1e-9)


#: What a deployment with a shared file system adds to its shape.
SHARED = {"deployment": "scratch", "capacity_gib": 2400, "mbps_per_tib": 250}


@pytest.mark.parametrize(
    ("changed", "month"),
    [
        ({}, 2400 * 0.140),
        ({"capacity_gib": 1200, "deployment": "persistent"}, 1200 * 0.210),
    ],
)
def test_a_shared_file_system_costs_by_size_and_speed_and_is_part_of_each_price(
    account: Account, changed: dict[str, object], month: float
) -> None:
    (plain, _), (found, _) = maximum(account), maximum(account, shared=SHARED | changed)
    assert found - plain == pytest.approx(month / 730, abs=1e-5)


def test_a_job_on_the_shared_file_system_reads_it_by_its_path_and_its_price_has_it(
    account: Account, cli: Cli
) -> None:
    account.shape["shared"] = SHARED
    said = " ".join(cli(*SUBMIT, "--data", "/mnt/shared/mnist").err.split())
    (spec,) = account.orders
    assert spec.command[-2:] == ("--data", "/mnt/shared/mnist")
    assert "with disks and the NAT gateway and the shared file system" in said
    assert spec.prices is not None
    assert spec.prices.shared_usd_per_hour == pytest.approx(0.460274)
    assert JobSpec.from_json(spec.to_json()).prices == spec.prices
    account.add("job", status="SUCCEEDED", output="{}", input=spec.to_json())
    account.task_events = [event("head", 360)]
    assert cli.json("cost", "job")["shared_usd"] == pytest.approx(0.460274 / 6, abs=1e-4)


@pytest.mark.parametrize("nodes", ["2", "1:2"])  # the most that it may have is what it can cost
def test_max_cost_shortens_the_deadline_and_prints_it(
    account: Account, cli: Cli, nodes: str
) -> None:
    said = cli(*SUBMIT, "--nodes", nodes, "--max-cost", "60").err
    (spec,) = account.orders
    assert 4 * 3600 < spec.max_seconds < 5 * 3600
    until = r"deadline  at most 4 h \d+ min, .*included\), to stay within --max-cost 60\n"
    assert re.search(until, re.sub("\n  +", " ", said))
    found = re.search(r"maximum   \$([\d.]+)", said)
    assert found is not None
    assert 59.9 < float(found[1]) <= 60
    assert usd_with(account, spec.max_seconds) <= 60 < usd_with(account, spec.max_seconds + 1)


def usd_with(account: Account, seconds: int) -> float:
    """Maximum cost of a job on two nodes with this deadline."""
    shape = ClusterShape.from_json(json.dumps(account.shape))
    found = usd_at_most(shape.prices("us-east-1"), shape, num_nodes=2, max_seconds=seconds)
    assert found is not None
    return found


@pytest.mark.parametrize("limit", ["20", "60.5"])
def test_the_hours_that_a_refusal_names_are_accepted(
    account: Account, cli: Cli, limit: str
) -> None:
    words = [*SUBMIT, "--nodes", "2", "--max-cost", limit, "--max-hours"]
    found = re.search(r"--max-hours ([\d.]+), or", cli.refuses(*words, "24"))
    assert found is not None
    assert main([*words, found[1]]) == exits.OK
    assert account.changes == ["start_execution"]


def test_max_cost_leaves_a_deadline_alone_that_is_within_it(account: Account) -> None:
    assert main([*SUBMIT, "--nodes", "1", "--max-cost", "60", "--max-hours", "2"]) == exits.OK
    assert main([*SUBMIT, "--nodes", "1", "--max-cost", "1000", "--run", "r2"]) == exits.OK
    assert [each.max_seconds for each in account.orders] == [2 * 3600, 24 * 3600]


@pytest.mark.parametrize(
    ("given", "asked_s"),
    [
        (["--max-hours", "2", "--wait-minutes", "30"], 1800),
        (["--max-hours", "2", "--wait-minutes", "121"], 7260),
        (["--max-hours", "0.25"], 1800),
        (["--nodes", "2", "--max-cost", "60", "--wait-minutes", "600"], 36_000),
    ],
    ids=["shorter", "longer", "longer by default", "longer than --max-cost leaves"],
)
def test_a_job_never_waits_longer_for_hosts_than_it_may_last(
    account: Account, given: list[str], asked_s: int
) -> None:
    assert main([*SUBMIT, *given]) == exits.OK
    (spec,) = account.orders
    assert spec.capacity_wait_s == min(asked_s, spec.max_seconds)


def test_the_deployment_limits_the_hours_of_a_job(account: Account, cli: Cli) -> None:
    account.shape["max_job_hours"] = 8
    said = cli.refuses(*SUBMIT, "--max-hours", "9")
    assert "--max-hours is 9: this deployment allows at most 8 (max_job_hours)" in said
    assert "-c max_job_hours=9" in said
    assert account.changes == []
    assert main(SUBMIT) == exits.OK
    (spec,) = account.orders
    assert spec.max_seconds == 8 * 3600


@pytest.mark.parametrize(
    ("hours", "region", "starts"),
    [("2", "us-west-2", True), ("24", "us-east-1", False), ("2", "eu-west-1", False)],
)
def test_enter_starts_no_job_that_is_dear_or_whose_price_is_unknown(
    account: Account, monkeypatch: pytest.MonkeyPatch, hours: str, region: str, starts: bool
) -> None:
    account.region = region
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda _question, *, default, err: default and err)
    assert main(["submit", "ddp", "--max-hours", hours]) == exits.OK
    assert bool(account.changes) == starts


def test_in_a_region_without_known_prices_nothing_has_a_price(account: Account, cli: Cli) -> None:
    account.region = "eu-west-1"
    said = " ".join(cli("plan", "ddp").out.split())
    assert (
        "price unknown: list prices are known for us-east-1 and us-west-2 only, not for "
        "eu-west-1 (AWS's price pages have those of g5.12xlarge and m5.xlarge) maximum unknown"
        in said
    )
    assert "$" not in said
    assert "--max-cost 60 cannot be kept: list prices are known for" in cli.refuses(
        *SUBMIT, "--max-cost", "60"
    )
    assert account.changes == []


SMALLER = ("--recompute", "full")


@pytest.mark.parametrize(
    ("settings", "is_known"),
    [
        (["--model", "new:6.9b", "--max-steps", "100", *SMALLER], True),
        (["--model", "databricks/dolly-v2-7b@main", "--max-steps", "100", *SMALLER], True),
        (["--model", "new:160m", "--data", "tiny-shakespeare"], True),
        (["--model", "new:160m", "--data", "s3://bucket/data/corpus/"], False),
        (["--model", "own/model", "--max-steps", "100"], False),
        (["--model", "new:6.9b", "--max-steps", "100"], False),  # it does not fit
    ],
)
def test_the_expected_cost_is_computed_where_model_and_text_are_known(
    account: Account,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    is_known: bool,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = [] if "--data" in settings else ["--data", "s3://bucket/data"]
    found = cli.json("plan", "fsdp", *data, *settings)
    assert (found["usd_expected"] is not None) == is_known
    if is_known:
        assert 0 < found["usd_expected"] < found["usd_at_most"]
    said = " ".join(cli("plan", "fsdp", *data, *settings).out.split())
    has_words = re.search(r"expected \S+( min \S+)? \w+ of steps, [\d,]+ tokens, cost \$\d", said)
    assert (has_words is not None) == is_known
    assert is_known or re.search("expected (not estimated|warning: does not fit)", said)
    if is_known:
        cli("submit", "fsdp", "--yes", *data, *settings)
        assert account.orders[0].planned_usd == found["usd_expected"]


# --- after it -------------------------------------------------------------------------------------
def test_cost_adds_up_what_ran_for_how_long_with_the_hosts_of_the_order(
    account: Account, cli: Cli
) -> None:
    account.add("job", status="SUCCEEDED", output="{}")
    account.task_events = [
        event("head", 360),
        event("w1", 180, startedBy="job"),
        event("w2", 180, startedBy="job"),
        event("other", 999, group="job:other"),
        event("never", 0, pullStartedAt=None, startedBy="job"),
    ]
    found = cli.json("cost", "job")
    assert found["node_seconds"] == {"head": 360, "worker": 360}
    head, worker = 0.096 + 9.8 / 730, 1.006 + 35 / 730
    assert found["usd"] == pytest.approx(0.1 * head + 0.1 * worker, abs=1e-6)
    assert found["nat_usd"] == pytest.approx(0.05 / 6)
    account.change_order("job", planned_usd=0.1)
    assert (
        cli("cost", "job").out.splitlines()[-1].startswith("$0.12 (planned: $0.10 for its steps)")
    )
    # Another deployment and another region change nothing: the order has them.
    account.shape["worker_instance_type"], account.region = "p5.48xlarge", "eu-west-1"
    assert cli.json("cost", "job")["usd"] == found["usd"]


def test_the_hours_of_each_pool_have_its_own_price(account: Account, cli: Cli) -> None:
    account.add("job", status="SUCCEEDED", output="{}")
    other = dataclasses.asdict(
        dataclasses.replace(PRICES.worker, type="g6e.xlarge", usd_per_hour=7)
    )
    pools = {"default": dataclasses.asdict(PRICES.worker), "l40s": other}
    account.change_order("job", prices={**dataclasses.asdict(PRICES), "pools": pools})
    family = "arn:aws:ecs:us-east-1:1:task-definition/TrainingStack-pool-l40s:1"
    account.task_events = [
        event("head", 3600),
        event("w1", 3600, startedBy="job"),
        event("w2", 7200, startedBy="job", taskDefinitionArn=family),
    ]
    found = cli.json("cost", "job")
    assert found["node_seconds"] == {
        "head": 3600,
        "worker in default": 3600,
        "worker in l40s": 7200,
    }
    assert found["usd_per_hour"]["worker in l40s"] == 7
    usd = sum(found["usd_per_hour"][each] * s / 3600 for each, s in found["node_seconds"].items())
    assert found["usd"] == pytest.approx(usd)
    assert re.search(r"worker in l40s +g6e.xlarge .* 2.000 +\$7.00", cli("cost", "job").out)


def month(account: Account) -> None:
    """Three jobs of this month, of two users, and one of 70 days ago, whose events have expired."""
    for number, (job, user) in enumerate(
        (("old", "anna"), ("one", "anna"), ("two", "bert"), ("three", "anna"))
    ):
        began = account.now - timedelta(days=0 if number else 70)
        account.add(job, run=job, status="FAILED", startDate=began)
        account.change_order(job, submitter=f"{user}@example.com")
        node = f"{job}-w"
        gone = event(node, 3600 * number, group=f"job:{job}", startedBy=job)
        account.task_events.append(gone)


def test_costs_are_added_up_by_user_run_and_month_as_ls_shows_them(
    account: Account, cli: Cli
) -> None:
    month(account)
    an_hour = 1.006 + 35 / 730
    anna, bert = cli.json("cost", "--by", "user")
    assert anna == {"user": "anna@example.com", "jobs": 3, "usd": anna["usd"], "unknown": 1}
    assert (anna["usd"], bert["usd"]) == pytest.approx((4 * an_hour, 2 * an_hour))
    shown = sum(each["usd"] or 0 for each in cli.json("ls"))
    assert shown == pytest.approx(anna["usd"] + bert["usd"])
    assert [each["run"] for each in cli.json("cost", "--by", "run")] == [
        "three",
        "two",
        "one",
        "old",
    ]
    now, before = cli.json("cost", "--by", "month")
    assert (now["month"], now["jobs"], before["jobs"]) == (f"{account.now:%Y-%m}", 3, 1)
    assert "bert@example.com  1     $2.1" in cli("cost", "--by", "user").out
    for number in range(100):  # of a month, not only the newest ones
        account.add(f"more{number}", run="more", status="SUCCEEDED", output="{}")
    assert sum(each["jobs"] for each in cli.json("cost", "--by", "user")) == 104
    for words in ([], ["one", "--by", "user"]):
        assert "give a job, or --by user, run or month" in cli.refuses("cost", *words)


def test_a_budget_of_the_month_warns_and_refuses_if_asked(account: Account, cli: Cli) -> None:
    month(account)
    given = ("submit", "ddp", "--yes", "--max-hours", "1", "--run")
    account.shape["monthly_budget_usd"] = 30
    said = cli(*given, "a").err
    assert "warning: $6.32 of this month's budget of $30.00 are spent, and this job can" in said
    # It waits now, and holds its maximum.
    most = re.findall(r"and this job can cost (\$[\d.]+)", said)[0]
    held = f"of $30.00 are spent, jobs that run or wait can cost {most} more"
    assert held in cli(*given, "b").err
    account.shape["monthly_budget_usd"] = 500
    assert "budget" not in cli("plan", "ddp", "--max-hours", "1").err
    account.shape |= {"monthly_budget_usd": 30, "budget_refuses": True}
    said = cli.refuses(*given, "c")
    assert "$6.32 of this month's budget of $30.00 are spent, jobs that run or wait can" in said
    assert "more: wait until they end" in said
    account.shape["monthly_budget_usd"] = 6
    assert "more: wait until next month (UTC)" in cli.refuses(*given, "c")
    assert len(account.sent("start_execution")) == 2


def test_a_job_of_last_month_that_still_runs_holds_its_rest_of_a_budget(account: Account) -> None:
    account.shape["log_retention_days"] = 60  # on the last days of a month, too
    began = account.now.replace(day=1) - timedelta(days=2)
    account.add("job", startDate=began)
    account.task_events = [event("w", 3600, startedBy="job")]
    deployment = Where().find()
    used, left = pricing.spent(deployment)
    (job,) = deployment.jobs.newest(limit=9)
    assert job.spec
    most = usd_at_most(
        PRICES, deployment.shape, num_nodes=job.spec.nodes.high, max_seconds=job.spec.max_seconds
    )
    assert most
    assert (used, left) == pytest.approx((0, most - 1.006 - 35 / 730))


def test_nodes_that_run_or_whose_event_is_on_its_way_count(account: Account, cli: Cli) -> None:
    account.add("job", status="SUCCEEDED", output="{}")
    pulled = account.now - timedelta(seconds=600)
    account.add_head(
        "job",
        "head",
        lastStatus="STOPPED",
        pullStartedAt=pulled,
        stoppedAt=pulled + timedelta(seconds=360),
    )
    # It waits for a host: there is nothing to pay.
    account.add_worker("w1", "PROVISIONING", createdAt=account.now - timedelta(seconds=300))
    assert cli.json("cost", "job")["node_seconds"] == {"head": 360, "worker": 0}
    account.task_events = [event("head", 360)]  # it has come, and ECS still knows the task
    assert cli.json("cost", "job")["node_seconds"] == {"head": 360, "worker": 0}


def unknown(account: Account, name: str) -> None:
    """Make the cost of the job unknown in one of several ways."""
    if name == "of this job are missing":  # all of them, as if it had had no node
        return
    if name == "are missing":
        account.add_head("job", "forgotten")
        del account.tasks["forgotten"]
    elif name == "have expired":
        account.task_events = [event("head", 360)]
        account.executions["job"]["startDate"] = account.now - timedelta(days=31)
    elif name == "has no prices":
        account.task_events = [event("head", 360)]
        account.change_order("job", prices=None)
    else:
        account.task_events = [event("head", 360), event("w1", 180, startedBy="job")]
        reserved = HostPrice.of(instance_type("p5e.48xlarge"), region="us-east-1")
        prices = {**dataclasses.asdict(PRICES), "worker": dataclasses.asdict(reserved)}
        account.change_order("job", prices=prices)


@pytest.mark.parametrize(
    "why",
    [
        "of this job are missing",
        "are missing",
        "have expired",
        "has no prices",
        "p5e.48xlarge has no list price",
    ],
)
def test_a_cost_that_is_not_known_is_unknown_and_never_zero(
    account: Account, cli: Cli, why: str
) -> None:
    account.add("job", status="SUCCEEDED", output="{}")
    unknown(account, why)
    found = cli.json("cost", "job")
    assert found["usd"] is None
    assert why in found["why_unknown"]
    for command in ("cost", "show", "wait"):
        said = cli(command, "job").out
        assert "unknown" in said
        assert "$0.000" not in said


def test_a_job_that_never_had_a_node_has_cost_nothing(account: Account, cli: Cli) -> None:
    account.add("job", status="FAILED", cause='{"status": "no_capacity", "exit_code": 75}')
    assert cli.json("cost", "job")["usd"] == 0
    assert "$0 at us-east-1's list prices" in cli("cost", "job").out


# --- the parts ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("usd", "words"),
    [
        *((None, "unknown"), (0.0, "$0"), (0.0091, "$0.009"), (0.046, "$0.05")),
        *((0.378, "$0.38"), (0.5, "$0.50"), (1.0, "$1.00"), (1234.5, "$1,234.50")),
    ],
)
def test_dollars_have_as_many_digits_as_matter(usd: float | None, words: str) -> None:
    assert dollars(usd) == words


def test_ctrl_c_at_a_question_is_told_by_the_exit_code(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> bool:
        raise typer.Abort  # what click makes of Ctrl-C

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", interrupted)
    assert main(["submit", "ddp"]) == exits.INTERRUPTED
    assert account.changes == []


def test_the_example_of_the_docs_is_what_the_program_prints(account: Account, cli: Cli) -> None:
    account.shape |= {"worker_instance_type": "g5.xlarge", "max_workers": 2}
    said = cli("plan", "ddp", "--nodes", "2", "--max-hours", "4").out
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text("utf-8")
    example = page.partition("<!-- example")[2].partition("```\n")[2].partition("```")[0]
    assert max(map(len, said.splitlines())) <= 80
    assert "price  " in example
    assert example in said
    assert f"deadline + {times.JOB_TAIL_S} s" in page
    assert f"x  {times.SURPLUS_HOST_S} s" in page
