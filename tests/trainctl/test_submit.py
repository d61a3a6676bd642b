"""``trainctl submit`` and ``trainctl plan``: refusals on the laptop, and the order that is sent."""

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
from contract.job import MAX_JOB_ID, MAX_OVERRIDES, ORDER_VERSION, JobSpec, Placement
from contract.nodes import Range
from tests.aws.calls import refused
from tests.trainctl.account import POOLS, Account
from tests.trainctl.conftest import Cli
from trainctl import code_folder, job_plan, output
from trainctl.__main__ import main

SUBMIT = ["submit", "ddp", "--yes"]
FSDP = ["submit", "fsdp", "--yes"]
TOKEN = "hf_" + "QwErTyUiOpAsDfGhJkLzXcVbNmqWeRtYuI"
CODE = ["submit", "--code", "CODE", "--yes", "--"]
DATA = ["--data", "s3://bucket/data"]
REFUSED: list[tuple[list[str], str]] = [
    (["submit", "--yes"], "give a recipe (ddp, fsdp, imagenet, bandwidth), or --code DIR"),
    (["submit", "dpd", "--yes"], "unknown recipe 'dpd': did you mean ddp?"),
    # Settings, by the parser of training.launch.
    ([*SUBMIT, "--epoch", "3"], "unknown option --epoch: did you mean --epochs?"),
    ([*SUBMIT, "--epochs"], "--epochs needs a value"),
    ([*SUBMIT, "--epochs", "many"], "--epochs is 'many': it must be a whole number"),
    ([*SUBMIT, "--epochs", "0"], "--epochs is 0: it must be at least 1"),
    ([*SUBMIT, "--precision", "bogus"], "--precision is 'bogus': choose one of auto"),
    ([*SUBMIT, "--flip=maybe"], "--flip takes no value"),
    ([*SUBMIT, "--lr", "nan"], "--lr is nan: it must be a finite number"),
    ([*SUBMIT, "--lr", "-1"], "--lr is -1.0: it must be greater than 0"),
    ([*SUBMIT, "--preset", "tiny"], "unknown preset 'tiny'"),
    ([*SUBMIT, "--max-failures", "-1"], "--max-failures is -1: it must be at least 0"),
    ([*SUBMIT, "--local"], "--local is not an option of a job's recipe"),
    ([*SUBMIT, "--storage", "s3://other"], "--storage is not an option of a job's recipe"),
    ([*FSDP, *DATA], "preset finetune trains a model that is there: give --model"),
    # What no node could read.
    ([*SUBMIT, "--data", "s3://other/data"], "--data s3://other/data is in another bucket, and"),
    ([*SUBMIT, "--data", "s3://bucket2"], "jobs may read s3://bucket only"),
    ([*FSDP, *DATA, "--model", "s3://other/model"], "--model s3://other/model is in another buck"),
    ([*FSDP, *DATA, "--model", "./mine"], "--model ./mine is a path of this machine"),
    ([*FSDP, "--chat-template", "./own.jinja"], "--chat-template ./own.jinja is a path of this"),
    ([*SUBMIT, "--data", "/nowhere/data"], "--data /nowhere/data: s3://bucket has no such data"),
    ([*SUBMIT, "--data", "/mnt/shared/x"], "the hosts of this deployment share no file system"),
    ([*SUBMIT, "--data", "/tmp"], "is on this machine, where no node can read it: upload it with"),
    ([*SUBMIT, "--data", "dogs"], "s3://bucket has no such data set, and none is published"),
    ([*SUBMIT, "--data", "fashion_mnist"], "did you mean fashion-mnist?"),
    ([*SUBMIT, "--data", "tiny-shakespeare"], "which is text, and this recipe trains on images"),
    # What suits no number of workers that the job may have: 4 GPUs a node.
    ([*FSDP, "--nodes", "1:3", "--global-batch", "8"], "fewer sequences than 12 workers"),
    ([*SUBMIT, "--global-batch", "64", "--nodes", "4"], "too small for 16 workers"),
    # What the bucket has of the run.
    ([*SUBMIT, "--run", "done"], "is already complete; --overwrite deletes it and starts again"),
    ([*SUBMIT, "--run", "other"], "run 'other' was trained with recipe 'fsdp'"),
    ([*SUBMIT, "--run", "half", "--epochs", "9"], "--epochs: the run has 8, now 9"),
    # Help of a recipe is that of training.launch, whose other options a job does not have.
    ([*SUBMIT, "--", "--help"], "trainctl settings ddp shows the settings"),
    # The job.
    ([*SUBMIT, "--on", "nodes"], "--on nodes is for the command of --code"),
    ([*SUBMIT, "--run", "a/b"], "run name 'a/b' is not usable"),
    (
        [*SUBMIT, "--workers", "2"],
        "--workers is not an option of a job's recipe: the job sets it it",
    ),
    ([*SUBMIT, "--", "--workers=4"], "the job sets it itself; give --nodes"),
    (
        ["submit", "--workers", "1", "--yes", "ddp"],
        "no option --workers here: see --nodes",
    ),
    (["submit", "--code", "CODE", "--workers", "1:2", "--", "true"], "here: see --nodes"),
    (
        ["submit", "--code", "CODE", "--max-hour", "2", "--", "true"],
        "unknown option --max-hour: did you mean --max-hours?",
    ),
    ([*SUBMIT, "--nodes", "0"], "--nodes is 0: this deployment takes 1 to 4"),
    ([*SUBMIT, "--nodes", "5"], "-c max_workers=5"),
    ([*SUBMIT, "--nodes", "4:2"], "MIN must not be above MAX"),
    ([*SUBMIT, "--max-cost", "1"], "--max-cost is 1, and this job can cost up to $559"),
    (
        [*SUBMIT, "--max-cost", "0.01", "--nodes", "1"],
        "within 24 h 0 min: give a higher --max-cost",
    ),
    # Options of the command are guessed too, and those that the job sets itself are not.
    (["plan", "ddp", "--node", "2"], "unknown option --node: did you mean --nodes?"),
    ([*SUBMIT, "--folow"], "unknown option --folow: did you mean --follow?"),
    (["plan", "ddp", "--contxt", "a=b"], "unknown option --contxt: did you mean --context?"),
    (["plan", "--nod", "2", "ddp"], "unknown option --nod: did you mean --nodes?"),
    ([*SUBMIT, "--storag", "x"], "unknown option --storag: see trainctl submit --help"),
    ([*SUBMIT, "--max-cost", "20", "--max-hours", "3"], "give fewer --nodes, --max-hours 0."),
    ([*SUBMIT, "--grace", "90"], "--grace is for programs of your own (--code)"),
    ([*SUBMIT, "--hang-minutes", "5"], "--hang-minutes is for programs of your own (--code)"),
    ([*SUBMIT, "--keep-files", "a"], "--keep-files is for programs of your own (--code)"),
    *(
        ([*CODE[:-1], option, pattern, "--", "true"], f"{option} is {pattern!r}: give a pattern of")
        for option in ("--keep-files", "--skip-files")
        for pattern in ("", "/data", "../data", "a//b", "[ab", "a\\b")
    ),
    (
        [*CODE, "python", "mine.py", "--hf_token", TOKEN],
        "command's --hf_token looks like a sec",
    ),
    ([*CODE[:-1], "--not-secret", "x", "--", "true"], "--not-secret is 'x': no file, variable or"),
    ([*SUBMIT, "--spot"], "this deployment starts on-demand instances"),
    ([*SUBMIT, "--env", "1A=b"], "--env is '1A': it must be a name of letters"),
    ([*SUBMIT, "--env", "=1"], "--env is '=1': it must be NAME=VALUE"),
    ([*SUBMIT, "--secret", "=training/key"], "--secret is '=training/key': it must be NAME="),
    ([*SUBMIT, "--env", "NOT_SET_ANYWHERE"], "there is no such variable here"),
    ([*SUBMIT, "--env", "TRAIN_JOB=mine"], "--env TRAIN_JOB: names that begin with TRAIN_"),
    ([*SUBMIT, "--notify", "anna"], "notify is 'anna': it must be a mail address, or the name of"),
    ([*SUBMIT, "--notify", "https://hooks.example/x"], "or the name of a secret that begins with"),
    ([*SUBMIT, "--notify", "training/key"], "a secret that begins with training/notify/"),
    ([*SUBMIT, "--notify", "training/notify/x"], "there is no secret 'training/notify/x'"),
    ([*SUBMIT, "--secret", "KEY=mine"], "it must be NAME=training/SECRET"),
    ([*SUBMIT, "--secret", "KEY=training/none"], "there is no secret 'training/none'"),
    ([*SUBMIT, "--secret", "A=training/key", "--env", "A=b"], "both --env and --secret"),
    (
        [*SUBMIT, "--env", "WANDB_API_KEY=0123456789abcdef0123"],
        "--env WANDB_API_KEY looks like a secret (0123...), and variables are kept with the job "
        "for all who may look at it: aws secretsmanager create-secret --name training/wandb-api",
    ),
    ([*SUBMIT, "--env", f"A={TOKEN}"], "and then --secret A=training/a"),
    ([*SUBMIT, "--env", f"URL=http://me:{TOKEN}@host"], "looks like a secret"),
    ([*SUBMIT, "--report-to", "wandb"], "for a job: --secret WANDB_API_KEY=training/SECRET"),
    (["submit", "ddp"], "stdin is not a terminal: pass --yes to skip the prompt"),
    (["submit", "--code", "nowhere", "--yes", "--", "true"], "there is no such folder"),
    (["submit", "--code", "CODE/empty", "--yes", "--", "true"], "there is no file in it"),
    (["submit", "--code", "CODE", "--yes"], "give the command after -- "),
    (
        ["plan", "ddp", "--code", "CODE", "--", "true"],
        "ddp is a recipe, and --code is for your own",
    ),
    (["submit", "torchrun", "mine.py"], "name its folder: --code . -- torchrun mine.py"),
    (["plan", "mine.py"], "mine.py is no recipe: for your own code name its folder"),
    ([*CODE, "torchrun", "mien.py"], "mien.py, which the command runs, does not exist: did you m"),
    ([*CODE, "torchrun", "--nproc-per-node", "2", "mine2.py", "a.py"], "did you mean mine.py?"),
    ([*CODE, "python", "-u", "../mine.py", "--x"], "../mine.py, which the command runs, does not"),
    ([*CODE, "python3.12", "-m", "torch.distributed.run", "x/mine.py"], "did you mean mine.py?"),
    ([*CODE, "accelerate", "launch", "--num_processes=2", "mein.py"], "did you mean mine.py?"),
    ([*CODE, "deepspeed", "--no_ssh", "zzz.py", "mine.py"], "zzz.py, which the command runs, doe"),
    ([*CODE, "bash", "run.sh"], "run.sh, which the command runs, does not exist"),
    ([*CODE, "python", "__pycache__/old.py"], "is not among the files that are uploaded"),
    ([*CODE, "mien.py", "--lr", "1"], "mien.py, which the command runs, does not exist"),
    ([*CODE, "mine.py", "--lr", "1"], "mine.py is not a command: give python mine.py --lr 1"),
    ([*CODE, "./mine.py"], "./mine.py is not a command: give python ./mine.py"),
    ([*CODE, "run.sh"], "run.sh, which the command runs, does not exist"),
    *(
        ([*CODE, word], f"{word} has nothing to run: name the file that it runs")
        for word in ("bash", "torchrun", "python3", "accelerate")
    ),
    (
        ["submit", "--code", "CODE", "--yes", "--", "torchrun", "--standalone", "mine.py"],
        "--standalone keeps torchrun from finding the other nodes",
    ),
    (
        ["submit", "--code", "CODE", "--yes", "--", "sh", "-c", "torchrun --standalone mine.py"],
        "or give --nodes 1",
    ),
]
#: Of those, what is refused where neither a region nor credentials are set.
WITHOUT_AWS = (
    *("give a recipe (ddp", "unknown recipe 'dpd'", "unknown option --epoch", "'many': it must"),
    *("choose one of auto", "unknown preset 'tiny'", "--local is not an option", "give --model"),
    *("settings ddp shows", "--on nodes is for", "run name 'a/b'"),
    *(
        "the job sets it itself; give",
        "unknown option --max-hour",
        "MIN must not be above",
    ),
    *("--env is '1A'", "looks like a secret"),
    "for a job: --secret",
    *(
        "there is no such folder",
        "there is no file in it",
        "did you mean mine.py",
        "is not a command",
    ),
)
HALF = {"recipe": "ddp", "run": "half", "lr": 1e-3, "epochs": 8, "global_batch": 512}


@pytest.fixture
def runs(account: Account) -> None:
    """Three runs in the bucket: a complete one, one of another recipe, and one half done."""
    account.objects |= {
        "runs/done/config.json": json.dumps({**HALF, "run": "done"}).encode(),
        "runs/done/result.json": b'{"status": "succeeded"}',
        "runs/other/config.json": b'{"recipe": "fsdp"}',
        "runs/half/config.json": json.dumps(HALF).encode(),
    }


@pytest.mark.parametrize(
    "command",
    [
        ["submit", "ddp", "--nodes", "1", "--yes"],
        ["plan", "ddp", "--nodes", "1"],
        ["cluster", "up", "--nodes", "1", "--yes"],
    ],
)
@pytest.mark.usefixtures("runs")
def test_nothing_is_started_without_the_image_that_is_deployed(
    account: Account, cli: Cli, command: list[str]
) -> None:
    account.without_images = {"worker"}
    said = cli.refuses(*command, code=exits.FAILED)
    assert "worker has no image with the tag 'abc123', which is deployed" in said
    assert "(make images)" in said
    assert account.changes == []


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
    job = ["submit", "ddp", "--nodes", "1", "--yes", "--max-hours", hours]
    if starts:
        cli(*job)
    else:
        said = cli.refuses(*job)
        assert "its hosts half an hour before, and this job may take 5 h 36 min" in said
        assert "--max-hours 5.49 or less" in said
        # Who may not look at it can start a job all the same.
        account.fails["describe_capacity_reservations"] = refused("UnauthorizedOperation")
        cli(*job)
    assert account.changes == ["start_execution"]


def test_a_head_that_trains_needs_the_workers_image_only(account: Account) -> None:
    account.shape |= {"head_trains": True, "head_instance_type": "g5.12xlarge"}
    account.without_images = {"head"}
    assert main(["submit", "ddp", "--nodes", "1", "--yes"]) == 0
    assert account.changes == ["start_execution"]


def test_a_job_in_a_pool_has_the_hosts_the_price_and_the_image_of_the_pool(
    account: Account, cli: Cli
) -> None:
    account.shape["max_heads"] = 9
    account.shape["pools"] = POOLS
    submit = ["submit", "ddp", "--yes", "--pool"]
    said = cli(*submit, "l40s").err
    assert "8 workers (g6e.12xlarge)" in said
    assert "pool      l40s" in said
    assert "2 workers (g6.xlarge, spot)" in cli(*submit, "l4", "--spot", "--run", "other").err
    l40s, l4 = account.orders
    assert (l40s.pools, l40s.nodes, l4.pools, l4.nodes) == (
        *(("l40s",), Range(8, 8), ("l4",), Range(2, 2)),
    )
    assert l40s.command[-2:] == ("--workers", "32")
    account.shape["pools"] = {**POOLS, "disk": POOLS["l40s"] | {"root_volume_gib": 1000}}
    cli(*submit, "disk", "--run", "disk")
    prices = account.orders[-1].prices
    assert l40s.prices is not None
    assert prices is not None
    assert prices.head == l40s.prices.head, "the head is in no pool"
    assert prices.worker != l40s.prices.worker
    for given, words in (
        (["l4s"], "there is no pool l4s: did you mean l4"),
        (["l4", "--nodes", "3"], "takes 1 to 2 worker nodes"),
        (
            ["l40s", "--spot"],
            "--pool l40s starts on-demand instances; for spot ones, give --pool l4",
        ),
    ):
        assert words in cli.refuses(*submit, *given)
    asked = [each["imageIds"] for each in account.sent("describe_images")]
    assert {"imageTag": "mine"} in [each[0] for each in asked]


def test_a_job_with_several_pools_is_priced_by_the_first_and_at_most_by_the_dearest(
    account: Account, cli: Cli
) -> None:
    account.shape |= {"max_heads": 9, "pools": POOLS}
    submit = ["submit", "ddp", "--yes", "--nodes", "2", "--max-hours", "10", "--hold", "60"]
    submit.append("--pool")
    said = cli(*submit, "default,l40s,default").err
    assert "pool      default, then l40s" in said
    (spec,) = account.orders
    assert (spec.pools, spec.command[-2:]) == (("default", "l40s"), ("--workers", "8"))
    assert spec.prices is not None
    assert spec.prices.worker.type == "g5.12xlarge"
    alone = cli(*submit, "l40s", "--run", "dearest").err
    for row in (r"maximum .*", r"costs\s+(\S+)\s+of\s+the"):
        assert re.findall(row, alone) == re.findall(row, said) != []
    assert "as many GPUs on each node, by which its" in cli.refuses(*submit, "l4,l40s")
    account.shape["pools"] = POOLS | {"few": POOLS["l40s"] | {"max_workers": 3}}
    cli("submit", "ddp", "--yes", "--pool", "l40s,few", "--run", "few")
    assert account.orders[-1].nodes == Range(3, 3), "as many as each of them has"
    # One of a type that only the settings know, without a price.
    machine = dataclasses.asdict(instance_type("g6e.12xlarge"))
    account.shape["instance_types"] = {"q1.large": machine | {"name": "q1.large"}}
    account.shape["instance_types"]["q1.large"]["usd_per_hour"] = None
    account.shape["pools"] = POOLS | {"q1": POOLS["l40s"] | {"worker_instance_type": "q1.large"}}
    said = cli.refuses(*submit, "l40s,q1", "--max-cost", "9")
    assert "--max-cost 9 cannot be kept: q1.large has no list price; leave it out" in said


_L40S = POOLS["l40s"]
#: Of a deployment with four hosts of 4 A10G, and pools of others: options, pools of the job, and
#: what is said of those that are left out.
BY_GPUS: list[tuple[str, tuple[str, ...], str]] = [
    ("--gpus l4", ("l4",), ""),
    ("--gpus L40S:4,a10g", ("l40s", "spot", "block", "default"), ""),
    ("--gpus l40s --market spot,on-demand", ("spot", "l40s"), ""),
    ("--gpus l40s --market reserved", ("block",), ""),
    ("--market on-demand,reserved", ("default",), ""),
    (
        "--gpus a10g,l40s --nodes 6",
        ("l40s", "spot", "block"),
        "pool default is left out: it has 4 nodes at most",
    ),
    ("--gpus a10g,l4", ("default",), "pool l4 is left out: it has 1 GPU per node, not 4"),
    (
        "--gpus h200,a10g:4,l40s:8,l40s:4 --market reserved,on-demand",
        ("default", "block", "l40s"),
        "warning: no pool has 'h200' of --gpus\n",
    ),
    ("--gpus a10g,", ("default",), "no pool has '' of --gpus"),
]


@pytest.mark.parametrize(("options", "pools", "words"), BY_GPUS)
def test_gpus_and_markets_name_the_pools_that_have_them(
    account: Account, cli: Cli, options: str, pools: tuple[str, ...], words: str
) -> None:
    block = {"capacity_reservation_id": "cr-0123456789abcdef0"}
    account.shape["pools"] = POOLS | {"spot": _L40S | {"spot": True}, "block": _L40S | block}
    account.reservation = {"ReservationType": "default"}
    said = cli("submit", "ddp", "--yes", *options.split()).err
    (spec,) = account.orders
    assert spec.pools == pools
    assert words in said
    assert ("warning: " in said) is bool(words)


@pytest.mark.parametrize(
    ("gpus", "pools", "nodes", "words"),
    [
        ("l4:2", ["l4"], 2, ""),
        ("l4:4", ["l4s"], 1, "pool l4 is left out: it has 1 GPU per node, not 4"),
        ("l4:12,l4:1", ["l4s"], 3, "pool l4 is left out: it has 1 GPU per node, not 4"),
        ("l40s:8,a10g:8,a10g", ["l40s", "default"], 2, ""),
        ("l40s:4,l40s:8", ["l40s"], 1, ""),
        ("a10g:8,l40s:4", ["default"], 2, "l40s is left out: 1 node of it would have these GPUs"),
    ],
)
def test_without_nodes_the_gpus_are_those_of_the_job(
    account: Account, cli: Cli, gpus: str, pools: list[str], nodes: int, words: str
) -> None:
    large = {"worker_instance_type": "g6.12xlarge"}
    account.shape["pools"] = POOLS | {"l4": POOLS["l4"] | {"max_workers": 9}, "l4s": _L40S | large}
    said = cli("plan", "ddp", "--gpus", gpus, "--json")
    plan = json.loads(said.out)
    assert (plan["pools"], plan["nodes"]["low"]) == (pools, nodes)
    assert words in said.err
    assert ("warning" in said.err) is bool(words)


def test_one_process_has_the_gpus_on_one_node(account: Account, code: Path, cli: Cli) -> None:
    account.shape["pools"] = POOLS
    words = ("--gpus", "l4:2", "--code", str(code), "--", "python", "mine.py")
    assert "no pool fits" in cli.refuses("plan", *words)


def test_hosts_that_a_job_by_gpus_has_no_use_for_are_left_out_or_refused(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    account.shape["pools"] = POOLS | {"efa": _L40S | {"efa": True}}
    fsdp = ["plan", "fsdp", *DATA, "--model", "new:6.9b", "--max-steps", "9", "--recompute", "full"]
    found = cli(*fsdp, "--gpus", "a10g,l40s", "--nodes", "1")
    assert "left out: the training does not fit the GPUs of default, by training.plan" in found.err
    assert "pool      l40s, then efa" in found.out
    assert "expected  warning" not in found.out
    # Nor do they lengthen the deadline.
    long = [*fsdp, "--nodes", "1", "--max-steps", "1000"]
    by_gpus, by_pool = (
        cli.json(*long, *words)["max_hours"]
        for words in (("--gpus", "a10g,l40s"), ("--pool", "l40s,efa"))
    )
    assert by_gpus == by_pool
    account.shape["pools"] = dict(reversed(account.shape["pools"].items()))
    found = cli(*fsdp, "--gpus", "l40s", "--nodes", "2")
    assert "pool l40s is left out: it has no EFA" in found.err
    for options, words in (
        (
            ["--gpus", "h100"],
            "--gpus h100, --market any: no pool fits, of default (4 x NVIDIA A10G",
        ),
        (["--gpus", ","], "--gpus ,, --market any: no pool fits, of default"),
        (["--gpus", "l4", "--nodes", "3"], "pool l4 is left out: it has 2 nodes at most"),
        (
            ["--market", "on-demand,cheap"],
            "--market is on-demand,cheap: give one or more of spot, on-demand, reserved",
        ),
        (["--gpus", "l4", "--pool", "l4"], "--pool is l4: give it, or --gpus and --market"),
    ):
        assert words in cli.refuses("submit", "ddp", "--yes", *options)
    account.shape["pools"] = {"other": POOLS["l40s"] | {"worker_instance_type": "g5.12xlarge"}}
    said = cli.refuses(*fsdp, "--gpus", "a10g", "--nodes", "1")
    assert "the training does not fit the GPUs of default, other, by training.plan: name" in said


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
@pytest.mark.usefixtures("runs")
def test_a_mistake_is_one_error_on_the_laptop_and_nothing_is_started(
    account: Account,
    code: Path,
    cli: Cli,
    arguments: list[str],
    words: str,
) -> None:
    given = [word.replace("CODE", str(code)) for word in arguments]
    said = cli(*given, code=exits.BAD_INPUT)
    assert words in said.err
    assert len([line for line in said.err.splitlines() if line.startswith("error: ")]) == 1
    assert "Traceback" not in said.err
    assert said.out == ""
    assert account.changes == []


@pytest.mark.parametrize("words", WITHOUT_AWS)
def test_what_needs_no_deployment_is_checked_before_aws_is_asked(
    account: Account, code: Path, cli: Cli, words: str
) -> None:
    account.region = None
    (arguments, *_) = [each for each, said in REFUSED if words in said]
    assert words in cli.refuses(*[word.replace("CODE", str(code)) for word in arguments])
    assert account.calls == []


def test_the_price_of_a_job_needs_neither_a_deployment_nor_an_account(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.region = None
    monkeypatch.delenv("AWS_REGION", raising=False)
    asked = ["--data", "s3://mine/images", "--secret", "KEY=training/key"]
    said = cli("plan", "ddp", "-c", "preset=ddp", "--nodes", "2", *asked).out
    assert "1 head (m5.xlarge) + 2 workers (g5.xlarge)" in said
    assert "price     $2.36 an hour" in said
    assert main(["plan", "ddp", "-c", "preset=ddp", "--nodes", "3"]) == exits.BAD_INPUT
    assert "setting preset is 'dpd'" in cli.refuses("plan", "ddp", "-c", "preset=dpd")
    assert main(["plan", "ddp", "-c", "preset=ddp", "--data", "unknown"]) == exits.BAD_INPUT
    assert account.calls == []


@pytest.mark.parametrize(
    ("words", "hours"),
    [
        (["ddp"], 24),
        (["ddp", "--epochs", "1"], 24),
        (["imagenet", "--max-steps", "30"], 2.5),
        (["fsdp", "--max-steps", "30"], 1.5),
        (["fsdp", "--model", "new:6.9b", "--max-steps", "100000"], 24),
        (["fsdp", "--max-steps", "30", "--wait-minutes", "60"], 2),
        (["fsdp", "--max-steps", "30", "--max-hours", "3"], 3),
    ],
)
@pytest.mark.usefixtures("account")
def test_the_deadline_is_shorter_where_few_steps_are_asked_for(
    cli: Cli, words: list[str], hours: float
) -> None:
    assert cli.json("plan", *words)["max_hours"] == pytest.approx(hours, abs=0.01)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], ["--help", "ddp"], ["ddp", "--epochs", "3", "--help"]]
)
def test_help_is_that_of_the_command_before_and_after_a_recipe(
    account: Account, cli: Cli, arguments: list[str]
) -> None:
    assert "RECIPE [SETTINGS]" in cli("submit", *arguments).out
    assert account.calls == []


@pytest.mark.usefixtures("runs")
def test_a_run_that_is_half_done_is_resumed_and_a_complete_one_starts_afresh(
    account: Account,
) -> None:
    assert main([*SUBMIT, "--run", "half"]) == exits.OK
    assert main([*SUBMIT, "--run", "done", "--overwrite"]) == exits.OK
    assert len(account.sent("start_execution")) == 2


def test_a_folder_that_is_too_large_names_its_largest_file(
    account: Account, code: Path, cli: Cli, monkeypatch: Any
) -> None:
    monkeypatch.setattr(code_folder, "CODE_MIB", 1)
    (code / "weights.bin").write_bytes(bytes(2 * 2**20))
    said = cli.refuses("submit", "--code", str(code), "--yes", "--", "true")
    assert "2 MiB, and at most 1 are uploaded; the largest is weights.bin" in said
    assert not account.objects


@pytest.mark.parametrize("in_git", [False, True])
@pytest.mark.parametrize("name", ["a\\b.py", "two\nlines.py", os.fsdecode(b"\xe9.py")])
def test_a_file_name_that_the_head_would_refuse_is_refused_on_the_laptop(
    account: Account,
    code: Path,
    cli: Cli,
    name: str,
    in_git: bool,
) -> None:
    if in_git:
        subprocess.run(["git", "init", "-q", str(code)], check=True)
    (code / name).write_text("")
    said = cli.refuses("submit", "--code", str(code), "--yes", "--", "true")
    assert f"error: --code {code}: the file name {name!r} is" in said
    assert "rename the file, or let git ignore it" in said
    assert account.changes == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--run", "r1"], "'r1' is being trained already, by job first"),
        (["--env", f"A={'x' * 8000}"], "ECS accepts 8,192"),
    ],
)
def test_what_cannot_be_started_is_refused_before_the_question(
    account: Account,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(output, "confirm", lambda *_args, **_named: pytest.fail("it asks"))
    account.add("first", run="r1")
    said = cli("submit", "ddp", *settings, code=exits.BAD_INPUT)
    assert words in said.err
    assert "price" not in said.err
    assert words in cli.refuses("plan", "ddp", *settings)
    assert main(["plan", "ddp", "--run", "r2"]) == exits.OK


def test_the_standing_cluster_leaves_room_for_a_job_or_the_job_is_refused(
    account: Account, cli: Cli
) -> None:
    account.wanted = {"head-service": 1, "worker-service": 2}
    said = cli.refuses("submit", "ddp", "--yes")
    assert "standing cluster is up" in said
    assert "trainctl cluster down" in said
    assert account.changes == []
    account.shape |= {"max_heads": 2, "max_workers": 3}
    assert main(["plan", "ddp", "--nodes", "1"]) == exits.OK
    assert main(["plan", "ddp", "--nodes", "2"]) == exits.BAD_INPUT


def test_a_job_that_began_while_the_question_waited_is_seen(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "confirm", lambda *_args, **_named: account.add("o", run="r1"))
    assert "run 'r1' is being trained already, by job o" in cli.refuses(
        "submit", "ddp", "--run", "r1"
    )
    assert account.changes == []


def test_the_size_of_an_order_counts_the_address_of_the_code(
    account: Account, code: Path, capsys: pytest.CaptureFixture[str]
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
    assert main(["submit", "--yes", *given(high)]) == exits.BAD_INPUT
    assert account.changes == []
    assert main(["submit", "--yes", *given(low)]) == exits.OK
    (sent,) = account.sent("start_execution")
    JobSpec.from_json(sent["input"]).check_size(sent["name"])  # as the head's order is counted
    capsys.readouterr()


@pytest.mark.parametrize("order", [None, ORDER_VERSION + 1])
def test_stacks_that_take_other_orders_start_no_job(
    account: Account, cli: Cli, order: int | None
) -> None:
    """Their state machine would drop what it does not know, and so run another job."""
    account.shape["order"] = order
    said = cli.refuses(*SUBMIT, code=exits.FAILED)
    assert f"take job orders of version {order}, and this trainctl writes version" in said
    assert "another version of this project has deployed the stacks; make deploy" in said
    assert account.changes == []


# --- what is sent ---------------------------------------------------------------------------------
def test_a_recipe_becomes_a_command_for_all_gpus_of_its_hosts(account: Account, cli: Cli) -> None:
    arguments = ["--run", "r1", "--nodes", "1:3", "--max-hours", "2", "--report-to=wandb"]
    said = cli(*SUBMIT, *arguments, "--env", "A=b", "--secret", "WANDB_API_KEY=training/key")
    (spec,) = account.orders
    launch = ["python", "-m", "training.launch", "ddp", "--run", "r1"]
    assert spec.command == (*launch, "--workers", "4:12", "--report-to=wandb")
    assert (spec.recipe, spec.on) == ("ddp", Placement.HEAD)
    assert (spec.nodes, spec.max_seconds) == (Range(1, 3), 7200)
    assert (spec.variables, spec.secrets) == ({"A": "b"}, {"WANDB_API_KEY": "training/key"})
    (job,) = account.executions
    assert len(job) <= MAX_JOB_ID
    assert said.out.strip() == job


def test_commands_that_are_printed_name_the_deployment_that_was_given(
    account: Account, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.outputs = {f"lab-{name}": each for name, each in account.outputs.items()}
    where = ("--deployment", "lab", "--region", "us-east-1")
    for command in ("ls", "runs"):
        printed = cli(command, *where).out
        assert "trainctl submit --region us-east-1 --deployment lab ddp" in printed
    said = cli(*SUBMIT, "--run", "a", *where)
    job = said.out.strip()
    assert f"trainctl logs --region us-east-1 --deployment lab {job} --follow" in said.err
    assert f"trainctl stop --region us-east-1 --deployment lab {job}" in said.err
    refused = cli.refuses(*SUBMIT, "--run", "a", *where)
    assert f"trainctl stop --region us-east-1 --deployment lab {job} ends it" in refused
    # Where a variable names it, it does so for the next command too.
    monkeypatch.setenv("TRAIN_DEPLOYMENT", "lab")
    assert f"trainctl stop {job} ends it" in cli.refuses(*SUBMIT, "--run", "a")
    # A profile of the same name is named.
    again = cli.refuses(*SUBMIT, "--run", "a", "--profile", "lab")
    assert f"trainctl stop --profile lab {job} ends it" in again


def test_who_is_to_get_mail_confirms_once_and_a_webhook_is_named_only(
    account: Account, cli: Cli
) -> None:
    link = "anna@example.com gets no mail before the link in the one of AWS is followed"
    assert link in cli(*SUBMIT, "--run", "a", "--notify", "anna@example.com").err
    (asked,) = account.sent("subscribe")
    assert asked["Attributes"] == {"FilterPolicy": '{"to": ["anna@example.com"]}'}, "not others'"
    account.confirmed = {"anna@example.com"}
    assert link not in cli(*SUBMIT, "--run", "b", "--notify", "anna@example.com").err
    cli(*SUBMIT, "--run", "c", "--notify", "training/notify/slack")
    assert len(account.sent("subscribe")) == 2
    planned = ("plan", "ddp", "--notify", "anna@example.com")
    assert "notify    anna@example.com\n" in cli(*planned).out
    assert cli.json(*planned)["notify"] == "anna@example.com"
    assert len(account.sent("subscribe")) == 2, "a plan changes nothing"
    told = ["anna@example.com", "anna@example.com", "training/notify/slack"]
    assert [spec.notify for spec in account.orders] == told
    assert not account.sent("get_secret_value")


@pytest.mark.parametrize(
    ("head_trains", "nodes", "batch", "workers"),
    [(False, "1:3", "24", "4:12"), (True, "0:2", "24", "4:12"), (False, "1:2", "8", "4:8")],
)
def test_a_batch_need_not_suit_numbers_of_workers_that_no_whole_host_makes(
    account: Account, head_trains: bool, nodes: str, batch: str, workers: str
) -> None:
    account.shape |= {"head_trains": head_trains, "head_instance_type": "g5.12xlarge"}
    assert main([*FSDP, "--nodes", nodes, "--global-batch", batch]) == exits.OK
    (spec,) = account.orders
    assert spec.command[spec.command.index("--workers") + 1] == workers


@pytest.mark.parametrize(
    "run", ["r1", "a.b", "resnet-baseline-with-a-name-of-63-characters-" + "x" * 18]
)
def test_the_id_of_a_job_can_be_read_out_and_is_never_the_same_twice(run: str) -> None:
    syllables = "[bdfghjklmnprstvz][aiou]" * 2 + "[bdfghjklmnprstvz]"
    ids = {job_plan.new_id(run) for _ in range(200)}
    assert len(ids) == 200
    for job in ids:
        assert re.fullmatch(rf"[A-Za-z0-9_-]*[A-Za-z0-9]-{syllables}-{syllables}", job), job
        assert len(job) <= MAX_JOB_ID
        assert job.startswith(run[:20].replace(".", "-"))


@pytest.mark.parametrize(
    "words", [("torchrun", "mine.py"), ("python", "-m", "training.launch", "ddp")], ids=" ".join
)
def test_a_program_of_ones_own_code_is_no_recipe_whatever_it_is_called(
    account: Account, code: Path, words: tuple[str, ...]
) -> None:
    assert main(["submit", "--code", str(code), "--yes", "--", *words]) == 0
    (spec,) = account.orders
    assert (spec.command, spec.recipe) == (words, "")


def test_only_a_recipe_takes_a_run_over(account: Account, code: Path) -> None:
    account.add("first", run="r1")
    own = ["submit", "--code", str(code), "--run", "r1", "--yes", "--", "true", "--take-over"]
    assert main(own) == exits.BAD_INPUT
    assert account.changes == []
    assert main([*SUBMIT, "--run", "r1", "--take-over"]) == exits.OK
    assert len(account.sent("start_execution")) == 1


def test_own_code_is_uploaded_without_what_is_no_code_and_its_command_is_left_alone(
    account: Account, code: Path
) -> None:
    words = ["python", "mine.py", "--run", "x", "-f", "--workers", "8", "-w", "2", "--nodes", "3"]
    given = ["--code", str(code), "--run", "own", "--nodes", "2", "--yes"]
    assert main(["submit", *given, "--", *words]) == 0
    (spec,) = account.orders
    assert ([*spec.command], spec.nodes) == (words, Range(2, 2))
    (key,) = account.objects
    assert spec.code == f"s3://bucket/{key}"
    (job,) = account.executions
    assert key == f"runs/own/jobs/{job}.zip"
    assert [each.name for each in code_folder.files_of(code)] == ["mine.py"]


def test_plan_starts_nothing_and_speaks_json(account: Account, cli: Cli) -> None:
    found = cli.json("plan", "ddp", "--nodes", "2")
    assert (found["nodes"], found["workers"]) == ({"low": 2, "high": 2}, {"low": 8, "high": 8})
    assert found["usd_at_most"] > 24 * found["usd_per_hour"]
    assert found["prices"]["worker"]["type"] == "g5.12xlarge"
    assert not account.sent("start_execution")


@pytest.mark.parametrize(
    ("source", "words", "option", "on"),
    [
        ("import torch", "python mine.py", "auto", Placement.NODES),
        ("import ray", "python mine.py", "auto", Placement.HEAD),
        ("if True:\n    from ray.train import report", "python mine.py", "auto", Placement.HEAD),
        ("import os, sys, ray, numpy", "python mine.py", "auto", Placement.HEAD),
        ("x = 1; import ray.tune as tune", "python mine.py", "auto", Placement.HEAD),
        ("print 'old'\nimport os, ray", "python mine.py", "auto", Placement.HEAD),
        ('"""\nimport ray\n"""', "python mine.py", "auto", Placement.NODES),
        ("from .ray import x", "python mine.py", "auto", Placement.NODES),
        ("import rayleigh", "torchrun mine.py", "auto", Placement.NODES),
        ("# import ray", "torchrun mine.py", "auto", Placement.NODES),
        ("", "python -m ray.train.examples.x", "auto", Placement.HEAD),
        ("import ray", "python mine.py", "nodes", Placement.NODES),
        ("import torch", "python mine.py", "head", Placement.HEAD),
    ],
)
def test_a_command_runs_on_the_head_if_it_uses_ray_and_else_on_all_nodes(
    account: Account,
    code: Path,
    cli: Cli,
    source: str,
    words: str,
    option: str,
    on: Placement,
) -> None:
    (code / "mine.py").write_text(source)
    given = ["submit", "--code", str(code), "--on", option, "--yes", "--", *words.split()]
    said = cli(*given)
    (spec,) = account.orders
    assert spec.on == on
    # A program of one process, which knows of no others, gets one node.
    each = "the worker node" if spec.nodes.high == 1 else "each of the 4 worker nodes"
    where = each if on == Placement.NODES else "once, on the head"
    assert (spec.nodes.high == 1) == (where == "the worker node")
    assert f"runs on   {where}" in said.err


@pytest.mark.parametrize(
    ("nodes", "head_trains", "nodes_said", "machines"),
    [
        ("1", False, "the worker node", "1 head (m5.xlarge) + 1 worker (g5.xlarge, spot)"),
        (
            *("1:3", False, "each of the 1 to 3 worker nodes"),
            "1 head (m5.xlarge) + 1 to 3 workers (g5.xlarge, spot)",
        ),
        (
            *("2", True, "the head and each of the 2 worker nodes"),
            "1 head (g5.xlarge, trains too) + 2 workers (g5.xlarge, spot)",
        ),
        ("0", True, "the head", "1 head (g5.xlarge, trains too)"),
    ],
)
def test_a_plan_names_its_machines_and_where_its_command_runs(
    account: Account,
    code: Path,
    cli: Cli,
    nodes: str,
    head_trains: bool,
    nodes_said: str,
    machines: str,
) -> None:
    account.shape |= {"head_trains": head_trains, "spot": True, "worker_instance_type": "g5.xlarge"}
    if head_trains:
        account.shape["head_instance_type"] = "g5.xlarge"
    words = ["plan", "--code", str(code), "--nodes", nodes, "--", "torchrun", "mine.py"]
    said = cli(*words).out
    assert f"runs on   {nodes_said} (--on head: once, on the head)\n" in said
    assert f"machines  {machines}\n" in said
    assert "deadline  at most 24 h, usually sooner (30 min of waiting for hosts included)\n" in said
    assert "expected" not in said, "a program's speed is not known"
