"""``trainctl submit`` and ``trainctl plan``: refusals on the laptop, and the order that is sent.

``golden/submit``, ``golden/pools`` and others have what they print.
"""

import dataclasses
import json
import os
import re
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from contract import exits
from contract.instance_types import instance_type
from contract.job import MAX_JOB_ID, MAX_OVERRIDES, JobSpec, Placement
from tests.aws.calls import refused
from tests.trainctl.account import POOLS, Account
from tests.trainctl.conftest import Cli
from trainctl import output
from trainctl.__main__ import main
from trainctl.aws.jobs import new_id
from trainctl.jobs import code_folder
from trainctl.options import Where

SUBMIT = ["submit", "ddp", "--yes"]
FSDP = ["submit", "fsdp", "--yes"]
DATA = ["--data", "s3://bucket/data"]
HALF = {"recipe": "ddp", "run": "half", "lr": 1e-3, "epochs": 8, "global_batch": 512}


@pytest.mark.parametrize(
    ("hours", "kind", "starts"),
    [
        ("5", "capacity-block", True),  # and half an hour in which EC2 ends its hosts
        ("5.6", "capacity-block", False),
        ("5.6", "default", True),  # whose hosts run on
    ],
)
def test_no_job_starts_that_may_outlast_its_capacity_block(
    account: Account, cli: Cli, hours: str, kind: str, starts: bool
) -> None:
    account.shape["capacity_reservation_id"] = "cr-0123456789abcdef0"
    account.reservation = {"EndDate": account.now + timedelta(hours=6), "ReservationType": kind}
    job = [*SUBMIT, "--nodes", "1", "--max-hours", hours]
    if not starts:
        cli.refuses(*job)
        # Who may not look at it can start a job all the same.
        account.fails["describe_capacity_reservations"] = refused("UnauthorizedOperation")
    cli(*job)
    assert account.changes == ["start_execution"]


def test_a_job_with_several_pools_is_priced_by_the_first_and_at_most_by_the_dearest(
    account: Account, cli: Cli
) -> None:
    # One of a type that only the settings know, without a price.
    machine = dataclasses.asdict(instance_type("g6e.12xlarge"))
    account.shape["instance_types"] = {
        "q1.large": machine | {"name": "q1.large", "usd_per_hour": None}
    }
    few, unknown = {"max_workers": 3}, {"worker_instance_type": "q1.large"}
    account.shape["pools"] = POOLS | {"few": _L40S | few, "q1": _L40S | unknown}
    plan = ("plan", "ddp", "--max-hours", "10", "--nodes", "2", "--hold", "60", "--pool")
    found = cli.json(*plan, "default,l40s,default")
    assert (found["pools"], found["workers"]["high"]) == (["default", "l40s"], 8)
    assert found["prices"]["worker"]["type"] == "g5.12xlarge"
    assert found["usd_at_most"] == cli.json(*plan, "l40s")["usd_at_most"]
    # As many nodes as each of them has.
    assert cli.json("plan ddp --pool l40s,few")["nodes"] == {"low": 3, "high": 3}
    cli.refuses(*plan, "l40s,q1", "--max-cost", "9")


_L40S = POOLS["l40s"]


#: Of a deployment with four hosts of 4 A10G, and pools of others: options, and pools of the job.
BY_GPUS = (
    ("--gpus l4", "l4"),
    ("--gpus L40S:4,a10g", "l40s spot block default"),
    ("--gpus l40s --market spot,on-demand", "spot l40s"),
    ("--gpus l40s --market reserved", "block"),
    ("--market on-demand,reserved", "default"),
    ("--gpus a10g,l40s --nodes 6", "l40s spot block"),
    ("--gpus a10g,l4", "default"),
    ("--gpus h200,a10g:4,l40s:8,l40s:4 --market reserved,on-demand", "default block l40s"),
    ("--gpus a10g,", "default"),
)


@pytest.mark.parametrize(("options", "pools"), BY_GPUS)
def test_gpus_and_markets_name_the_pools_that_have_them(
    account: Account, cli: Cli, options: str, pools: str
) -> None:
    block = {"capacity_reservation_id": "cr-0123456789abcdef0"}
    account.shape["pools"] = POOLS | {"spot": _L40S | {"spot": True}, "block": _L40S | block}
    account.reservation = {"ReservationType": "default"}
    assert cli.json("plan ddp", *options.split())["pools"] == pools.split()


@pytest.mark.parametrize(
    ("gpus", "pools", "nodes"),
    [
        ("l4:2", ["l4"], 2),
        ("l4:4", ["l4s"], 1),
        ("l4:12,l4:1", ["l4s"], 3),
        ("l40s:8,a10g:8,a10g", ["l40s", "default"], 2),
        ("l40s:4,l40s:8", ["l40s"], 1),
        ("a10g:8,l40s:4", ["default"], 2),
    ],
)
def test_without_nodes_the_gpus_are_those_of_the_job(
    account: Account, cli: Cli, gpus: str, pools: list[str], nodes: int
) -> None:
    large = {"worker_instance_type": "g6.12xlarge"}
    account.shape["pools"] = POOLS | {"l4": POOLS["l4"] | {"max_workers": 9}, "l4s": _L40S | large}
    plan = cli.json("plan ddp --gpus", gpus)
    assert (plan["pools"], plan["nodes"]["low"]) == (pools, nodes)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        *((f"--gpus {word}", ["TYPE:N"]) for word in ("4", "l40s:0", "l40s:-1", "l40s:x")),
        ("--gpus l40:4", ["did you mean l40s?"]),
        ("--gpus l40s:6", ["pool l40s is left out", "no multiple of the 4"]),
        ("--gpus l40s:8 --nodes 1", ["pool l40s is left out: 8 is not the 4"]),
        ("--pool l4 --nodes 99", ["pool l4 takes", "setting pools"]),
        ("--nodes 99", ["this deployment takes", "-c max_workers=99"]),
        ("--nodes 129", ["128 at most"]),
        ("--pool=", ["empty"]),
    ],
)
def test_hosts_that_are_not_there_are_refused_with_the_way_to_say_it(
    account: Account, cli: Cli, options: str, parts: list[str]
) -> None:
    account.shape["pools"] = dict(POOLS)
    error = cli.refuses("plan ddp", *options.split())
    assert [part for part in parts if part not in error] == []


def test_hosts_that_a_job_by_gpus_has_no_use_for_are_left_out_or_refused(
    account: Account, code: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    account.shape["pools"] = POOLS | {"efa": _L40S | {"efa": True}}
    fsdp = ["plan", "fsdp", *DATA, "--model", "new:6.9b", "--recompute", "full", "--max-steps"]
    long = [*fsdp, "1000", "--nodes", "1"]
    found = cli.json(*long, "--gpus", "a10g,l40s")
    # Its training does not fit an A10G; nor does that lengthen the deadline.
    assert found["pools"] == ["l40s", "efa"]
    assert found["max_hours"] == cli.json(*long, "--pool", "l40s,efa")["max_hours"]
    account.shape["pools"] = dict(reversed(account.shape["pools"].items()))
    assert cli.json(*fsdp, "9", "--gpus", "l40s", "--nodes", "2")["pools"] == ["efa"]
    # One process has the GPUs of one node.
    cli.refuses("plan --gpus l4:2 --code", str(code), "--", "python", "mine.py")
    account.shape["pools"] = {"other": _L40S | {"worker_instance_type": "g5.12xlarge"}}
    cli.refuses(*long, "--gpus", "a10g")


def test_the_price_of_a_job_needs_neither_a_deployment_nor_an_account(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.region = None
    monkeypatch.delenv("AWS_REGION", raising=False)
    plan = ("plan", "ddp", "-c", "preset=ddp", "--nodes")
    found = cli.json(*plan, "2", "--data", "s3://mine/images", "--secret", "KEY=training/key")
    assert found["prices"]["worker"]["type"] == "g5.xlarge"
    assert found["usd_per_hour"] == pytest.approx(2.36, abs=0.005)
    cli.refuses(*plan, "3")
    cli.refuses(*plan, "2", "--data", "unknown")
    assert account.calls == []


@pytest.mark.parametrize(
    ("words", "hours"),
    [
        ("ddp", 24),
        ("ddp --epochs 1", 24),
        ("imagenet --max-steps 30", 2.5),
        ("fsdp --max-steps 30", 1.5),
        ("fsdp --model new:6.9b --max-steps 100000", 24),
        ("fsdp --max-steps 30 --wait-minutes 60", 2),
        ("fsdp --max-steps 30 --max-hours 3", 3),
    ],
)
@pytest.mark.usefixtures("account")
def test_the_deadline_is_shorter_where_few_steps_are_asked_for(
    cli: Cli, words: str, hours: float
) -> None:
    assert cli.json("plan", *words.split())["max_hours"] == pytest.approx(hours, abs=0.01)


@pytest.mark.parametrize("words", ["--help", "-h", "--help ddp", "ddp --epochs 3 --help"])
def test_help_is_that_of_the_command_before_and_after_a_recipe(
    account: Account, cli: Cli, words: str
) -> None:
    assert "[SETTINGS]" in cli("submit", *words.split()).out
    assert account.calls == []


def test_a_run_that_is_half_done_is_resumed_and_a_complete_one_starts_afresh(
    account: Account,
    cli: Cli,
) -> None:
    for run in ("half", "done"):
        account.objects[f"runs/{run}/config.json"] = json.dumps(HALF | {"run": run}).encode()
    account.objects["runs/done/result.json"] = b'{"status": "succeeded"}'
    cli("submit ddp --yes --run half")
    cli("submit ddp --yes --run done --overwrite")
    assert len(account.sent("start_execution")) == 2


def test_a_folder_that_is_too_large_is_not_uploaded(
    account: Account, code: Path, cli: Cli, monkeypatch: Any
) -> None:
    monkeypatch.setattr(code_folder, "CODE_MIB", 1)
    (code / "weights.bin").write_bytes(bytes(2 * 2**20))
    assert "weights.bin" in cli.refuses("submit --code", str(code), "--yes", "--", "true")
    assert not account.objects


@pytest.mark.parametrize("in_git", [False, True])
@pytest.mark.parametrize("name", ["a\\b.py", "two\nlines.py", os.fsdecode(b"\xe9.py")])
def test_a_file_name_that_the_head_would_refuse_is_refused_on_the_laptop(
    account: Account, code: Path, cli: Cli, name: str, in_git: bool
) -> None:
    if in_git:
        subprocess.run(["git", "init", "-q", str(code)], check=True)
    (code / name).write_text("")
    assert repr(name) in cli.refuses("submit --code", str(code), "--yes", "--", "true")
    assert account.changes == []


@pytest.mark.parametrize("settings", [["--run", "r1"], ["--env", f"A={'x' * 8000}"]])
def test_what_cannot_be_started_is_refused_before_the_question(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    monkeypatch.setattr(output, "confirm", lambda *_args, **_named: pytest.fail("it asks"))
    account.add("first", run="r1")
    for command in ("submit", "plan"):
        cli.refuses(command, "ddp", *settings)
    cli("plan ddp --run r2")


def test_the_standing_cluster_leaves_room_for_a_job_or_the_job_is_refused(
    account: Account, cli: Cli
) -> None:
    account.wanted = {"head-service": 1, "worker-service": 2}
    account.shape |= {"max_heads": 2, "max_workers": 3}
    cli("plan ddp --nodes 1")
    cli.refuses("plan ddp --nodes 2")


def test_a_job_that_began_while_the_question_waited_is_seen(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "confirm", lambda *_args, **_named: account.add("o", run="r1"))
    cli.refuses("submit ddp --run r1")
    assert account.changes == []


def test_the_size_of_an_order_counts_the_address_of_the_code(
    account: Account, code: Path, capsys: pytest.CaptureFixture[str], cli: Cli
) -> None:
    """The largest order that plan accepts is one that submit sends; one character more is not."""

    def given(length: int) -> list[str]:
        own = ["--code", str(code), "--run", "own", "--env", f"A={'x' * length}"]
        return [*own, "--", "true"]

    low, high = 0, MAX_OVERRIDES
    while high - low > 1:
        middle = (low + high) // 2
        fits = main(["plan", *given(middle)]) == exits.OK
        low, high = (middle, high) if fits else (low, middle)
    assert low > MAX_OVERRIDES // 2
    cli("submit --yes", *given(high), code=exits.BAD_INPUT)
    assert account.changes == []
    cli("submit --yes", *given(low))
    (sent,) = account.sent("start_execution")
    JobSpec.from_json(sent["input"]).check_size(sent["name"])  # as the head's order is counted
    capsys.readouterr()


def test_commands_that_are_printed_name_the_deployment_that_was_given(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.outputs = {f"lab-{name}": each for name, each in account.outputs.items()}

    def printed(**where: str) -> str:
        Where(deployment="lab", **where).find()
        return output.addressed("trainctl stop job ends it")

    assert printed(region="us-east-1") == (
        "trainctl stop --region us-east-1 --deployment lab job ends it"
    )
    # Where a variable names it, it does so for the next command too.
    monkeypatch.setenv("TRAIN_DEPLOYMENT", "lab")
    assert printed() == "trainctl stop job ends it"
    # A profile of the same name is named.
    assert printed(profile="lab") == "trainctl stop --profile lab job ends it"


@pytest.mark.parametrize(
    ("head_trains", "nodes", "batch", "workers"),
    [(False, "1:3", "24", "4:12"), (True, "0:2", "24", "4:12"), (False, "1:2", "8", "4:8")],
)
def test_a_batch_need_not_suit_numbers_of_workers_that_no_whole_host_makes(
    account: Account, head_trains: bool, nodes: str, batch: str, workers: str, cli: Cli
) -> None:
    account.shape |= {"head_trains": head_trains, "head_instance_type": "g5.12xlarge"}
    cli("submit fsdp --yes --nodes", nodes, "--global-batch", batch)
    (spec,) = account.orders
    assert spec.command[spec.command.index("--workers") + 1] == workers


@pytest.mark.parametrize(
    "run", ["r1", "a.b", "resnet-baseline-with-a-name-of-63-characters-" + "x" * 18]
)
def test_the_id_of_a_job_can_be_read_out_and_is_never_the_same_twice(run: str) -> None:
    syllables = "[bdfghjklmnprstvz][aiou]" * 2 + "[bdfghjklmnprstvz]"
    ids = {new_id(run) for _ in range(200)}
    assert len(ids) == 200
    for job in ids:
        assert re.fullmatch(rf"[A-Za-z0-9_-]*[A-Za-z0-9]-{syllables}-{syllables}", job), job
        assert len(job) <= MAX_JOB_ID
        assert job.startswith(run[:20].replace(".", "-"))


def test_only_a_recipe_takes_a_run_over(account: Account, code: Path, cli: Cli) -> None:
    account.add("first", run="r1")
    own = ["submit", "--code", str(code), "--run", "r1", "--yes", "--", "true", "--take-over"]
    cli(*own, code=exits.BAD_INPUT)
    assert account.changes == []
    cli("submit ddp --yes --run r1 --take-over")
    assert len(account.sent("start_execution")) == 1


@pytest.mark.parametrize(
    ("source", "words", "on"),
    [
        ("import torch", "python mine.py", Placement.NODES),
        ("import ray", "python mine.py", Placement.HEAD),
        ("", "python -m ray.train.examples.x", Placement.HEAD),
        ("import ray", "--on nodes -- python mine.py", Placement.NODES),
        ("import torch", "--on head -- python mine.py", Placement.HEAD),
    ],
)
def test_a_command_runs_on_the_head_if_it_uses_ray_and_else_on_all_nodes(
    account: Account, code: Path, cli: Cli, source: str, words: str, on: Placement
) -> None:
    (code / "mine.py").write_text(source)
    options, _, command = words.rpartition("-- ")
    cli("submit --code", str(code), *options.split(), "--yes", "--", *command.split())
    (spec,) = account.orders
    assert spec.on == on
