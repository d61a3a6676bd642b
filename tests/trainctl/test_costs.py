"""A job's cost, maximum and actual, follows from the hosts and prices of its order, and never
from a guess. ``golden/cost`` has how it is printed."""

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer

from contract import exits, times
from contract.cluster_shape import ClusterShape
from contract.job import overrides
from contract.nodes import ENV_KEPT, ENV_NODE
from contract.text import dollars
from tests.trainctl.account import PRICES, Account
from tests.trainctl.conftest import Cli
from trainctl.jobs import pricing
from trainctl.jobs.pricing import usd_at_most
from trainctl.options import Where

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


def test_a_job_on_the_shared_file_system_reads_it_by_its_path_and_its_cost_has_it(
    account: Account, cli: Cli
) -> None:
    account.shape["shared"] = SHARED
    cli("submit ddp --yes --data /mnt/shared/mnist")
    (spec,) = account.orders
    assert spec.command[-2:] == ("--data", "/mnt/shared/mnist")
    account.add("job", status="SUCCEEDED", output="{}", input=spec.to_json())
    account.task_events = [event("head", 360)]
    assert cli.json("cost job")["shared_usd"] == pytest.approx(0.460274 / 6, abs=1e-4)


@pytest.mark.parametrize("nodes", ["2", "1:2"])  # the most that it may have is what it can cost
def test_max_cost_shortens_the_deadline_to_the_longest_within_it(
    account: Account, cli: Cli, nodes: str
) -> None:
    cli("submit ddp --yes --nodes", nodes, "--max-cost", "60")
    (spec,) = account.orders
    shape = ClusterShape.from_json(json.dumps(account.shape))
    longest, longer = (
        usd_at_most(shape.prices("us-east-1"), shape, num_nodes=2, max_seconds=seconds)
        for seconds in (spec.max_seconds, spec.max_seconds + 1)
    )
    assert longest is not None
    assert longer is not None
    assert 59.9 < longest <= 60 < longer


@pytest.mark.parametrize(
    ("given", "asked_s"),
    [
        ("--max-hours 2 --wait-minutes 30", 1800),
        ("--max-hours 2 --wait-minutes 121", 7260),  # longer
        ("--max-hours 0.25", 1800),  # longer by default
        ("--nodes 2 --max-cost 60 --wait-minutes 600", 36_000),  # longer than --max-cost leaves
    ],
)
def test_a_job_never_waits_longer_for_hosts_than_it_may_last(
    account: Account, cli: Cli, given: str, asked_s: int
) -> None:
    cli("submit ddp --yes", *given.split())
    (spec,) = account.orders
    assert spec.capacity_wait_s == min(asked_s, spec.max_seconds)


def test_the_deployment_limits_the_hours_of_a_job(account: Account, cli: Cli) -> None:
    account.shape["max_job_hours"] = 8
    cli.refuses("submit ddp --yes --max-hours 9")
    assert cli.json("plan ddp")["max_hours"] == 8


@pytest.mark.parametrize(
    ("hours", "region", "starts"),
    [("2", "us-west-2", True), ("24", "us-east-1", False), ("2", "eu-west-1", False)],
)
def test_enter_starts_no_job_that_is_dear_or_whose_price_is_unknown(
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
    hours: str,
    region: str,
    starts: bool,
    cli: Cli,
) -> None:
    account.region = region
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda _question, *, default, err: default and err)
    cli("submit ddp --max-hours", hours)
    assert bool(account.changes) == starts


def test_in_a_region_without_known_prices_no_maximum_can_be_kept(
    account: Account, cli: Cli
) -> None:
    account.region = "eu-west-1"
    assert cli.json("plan ddp")["usd_at_most"] is None
    cli.refuses("submit ddp --yes --max-cost 60")


@pytest.mark.parametrize(
    ("settings", "is_known"),
    [
        ("--model new:6.9b --max-steps 100 --recompute full", True),
        ("--model databricks/dolly-v2-7b@main --max-steps 100 --recompute full", True),
        ("--model new:160m --data tiny-shakespeare", True),
        ("--model new:160m --data s3://bucket/data/corpus/", False),
        ("--model own/model --max-steps 100", False),
        ("--model new:6.9b --max-steps 100", False),  # it does not fit
    ],
)
def test_the_expected_cost_is_computed_where_model_and_text_are_known(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch, settings: str, is_known: bool
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["fsdp", "--data", "s3://bucket/data", *settings.split()]  # the last one counts
    found = cli.json("plan", *words)
    cli("submit --yes", *words)
    assert account.orders[0].planned_usd == found["usd_expected"]
    assert (found["usd_expected"] is not None) == is_known
    assert not is_known or 0 < found["usd_expected"] < found["usd_at_most"]


def test_the_hours_of_each_pool_have_its_own_price(account: Account, cli: Cli) -> None:
    account.add("job", status="SUCCEEDED", output="{}")
    worker = dataclasses.asdict(PRICES.worker)
    other = worker | {"type": "g6e.xlarge", "usd_per_hour": 7}
    pools = {"default": worker, "l40s": other}
    account.change_order("job", prices={**dataclasses.asdict(PRICES), "pools": pools})
    family = "arn:aws:ecs:us-east-1:1:task-definition/TrainingStack-pool-l40s:1"
    account.task_events = [
        event("head", 3600),
        event("w1", 3600, startedBy="job"),
        event("w2", 7200, startedBy="job", taskDefinitionArn=family),
    ]
    found = cli.json("cost job")
    seconds = {"head": 3600, "worker in default": 3600, "worker in l40s": 7200}
    assert found["node_seconds"] == seconds
    assert found["usd_per_hour"]["worker in l40s"] == 7
    usd = sum(found["usd_per_hour"][each] * s / 3600 for each, s in seconds.items())
    assert found["usd"] == pytest.approx(usd)
    assert "g6e.xlarge" in cli("cost job").out


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


def test_hosts_that_are_kept_hold_the_rest_of_their_time_of_a_budget(account: Account) -> None:
    account.add("job", status="SUCCEEDED", output="{}")
    now = account.now.timestamp()
    values = {ENV_KEPT: str(now + 1200), ENV_NODE: "worker"}
    kept: dict[str, Any] = {"startedBy": "kept-1", "overrides": overrides(values)}
    account.add_worker("k", "RUNNING", job="job", group="kept:job", **kept)
    _, left = pricing.spent(Where().find())
    assert left == pytest.approx(1.006 / 3600 * (1200 + times.SWEEP_EVERY_S), rel=0.1)


def test_nodes_that_run_or_whose_event_is_on_its_way_count(account: Account, cli: Cli) -> None:
    account.add("job", status="SUCCEEDED", output="{}")
    pulled = account.now - timedelta(seconds=600)
    times = {"pullStartedAt": pulled, "stoppedAt": pulled + timedelta(seconds=360)}
    account.add_head("job", "head", lastStatus="STOPPED", **times)
    # It waits for a host: there is nothing to pay.
    account.add_worker("w1", "PROVISIONING", createdAt=account.now - timedelta(seconds=300))
    for events in ([], [event("head", 360)]):  # it has come, and ECS still knows the task
        account.task_events = events
        assert cli.json("cost job")["node_seconds"] == {"head": 360, "worker": 0}


@pytest.mark.parametrize("why", ["all missing", "missing", "no prices", "no list price"])
def test_a_cost_that_is_not_known_is_unknown_and_never_zero(
    account: Account, cli: Cli, why: str
) -> None:
    account.add("job", status="SUCCEEDED", output="{}")
    if why == "missing":
        account.add_head("job", "forgotten")
        del account.tasks["forgotten"]
    elif why != "all missing":  # as if it had had no node
        account.task_events = [event("head", 360), event("w1", 180, startedBy="job")]
        worker = {**dataclasses.asdict(PRICES.worker), "usd_per_hour": None}
        prices = {**dataclasses.asdict(PRICES), "worker": worker}
        account.change_order("job", prices=None if why == "no prices" else prices)
    found = cli.json("cost job")
    assert (found["usd"], bool(found["why_unknown"])) == (None, True)
    for command in ("cost", "show", "wait"):
        assert "$0.000" not in cli(command, "job").out


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
    account: Account, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    def interrupted(*_: object, **__: object) -> bool:
        raise typer.Abort  # what click makes of Ctrl-C

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", interrupted)
    cli("submit ddp", code=exits.INTERRUPTED)
    assert account.changes == []


def test_the_example_of_the_docs_is_what_the_program_prints() -> None:
    plan = (Path(__file__).parent / "golden/submit/stdout").read_text()
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text("utf-8")
    example = page.partition("<!-- example")[2].partition("```\n")[2].partition("```")[0]
    assert len(example.splitlines()) == 3
    assert example in plan
    assert f"deadline + {times.JOB_TAIL_S} s" in page
    assert f"x  {times.SURPLUS_HOST_S} s" in page
