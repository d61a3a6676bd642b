"""What cannot be is refused, and changes nothing: mistakes, and accounts that are not usable.

``golden/`` has what is printed of the usual ones.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import (
    ConfigParseError,
    EndpointConnectionError,
    NoCredentialsError,
    SSOTokenLoadError,
)

from contract import exits
from contract import outputs as stack_outputs
from contract.job import ORDER_VERSION
from contract.outputs import TRAINING_STACK
from tests.aws.calls import refused
from tests.trainctl.account import OUTPUTS, Account
from tests.trainctl.conftest import Cli
from tests.trainctl.test_runs import checkpoint
from trainctl.aws.deployment import LOCAL_ACCOUNT

TOKEN = "hf_" + "QwErTyUiOpAsDfGhJkLzXcVbNmqWeRtYuI"
#: More than an order can have.
LONG = "x" * 9000
#: Words of a command that are not wrong by themselves.
USUAL = (
    *("", "ddp", "fsdp", "--yes", "true", "--data", "s3://bucket/data", "text", "--to"),
    *("up", "rm", "other", "new", "--spot", LONG),
)
IDENTITY = "get_caller_identity"
NO_SHAPE = json.dumps({"order": ORDER_VERSION, "preset": "x"})
#: Mistakes that are found before AWS is asked anything.
WITHOUT_AWS = (
    "submit --yes",
    "submit --code CODE --yes",
    "submit --code nowhere --yes -- true",
    "submit dpd --yes",
    "submit ddp --epochs --yes",
    "submit ddp --epochs 0 --yes",
    "submit ddp --precision bogus --yes",
    "submit ddp --flip=maybe --yes",
    "submit ddp --lr nan --yes",
    "submit ddp --max-failures -1 --yes",
    "submit ddp --storage s3://other --yes",
    "submit ddp --yes -- --help",
    "submit ddp --on nodes --yes",
    "submit ddp --run a/b --yes",
    "submit ddp --with r1 --env WITH_RUN=r2 --yes",
    "submit ddp --yes -- --workers=4",
    "submit --workers 1 --yes ddp",
    "submit --code CODE --workers 1:2 -- true",
    "submit --code CODE --max-hour 2 -- true",
    "submit ddp --nodes 4:2 --yes",
    # Python's own int() and float() take digits of other scripts, and underscores.
    "submit ddp --nodes ٢ --yes",
    "submit ddp --max-hours 1_0 --yes",
    "submit ddp --epochs ٢ --yes",
    "submit ddp --lr 1_0 --yes",
    # Options of the command are guessed too, and those that the job sets itself are not.
    "plan ddp --node 2",
    "plan ddp --contxt a=b",
    "plan --nod 2 ddp",
    "plan ddp -c preset=dpd --nodes 2",
    "submit ddp --storag x --yes",
    "submit ddp --env 1A=b --yes",
    "submit ddp --env =1 --yes",
    f"submit ddp --env URL=http://me:{TOKEN}@host --yes",
    "submit ddp --report-to wandb --yes",
    "submit --code CODE/empty --yes -- true",
    "submit --code CODE --yes -- torchrun --nproc-per-node 2 mine2.py a.py",
    "submit --code CODE --yes -- python -u ../mine.py --x",
    "submit --code CODE --yes -- python3.12 -m torch.distributed.run x/mine.py",
    "submit --code CODE --yes -- accelerate launch --num_processes=2 mein.py",
    "submit --code CODE --yes -- ./mine.py",
)
REFUSED = (
    *WITHOUT_AWS,
    "submit fsdp --data s3://bucket/data --yes",
    # What no node could read.
    "submit ddp --data s3://bucket2 --yes",
    "submit fsdp --data s3://bucket/data --model s3://other/model --yes",
    "submit fsdp --data s3://bucket/data --model ./mine --yes",
    "submit fsdp --chat-template ./own.jinja --yes",
    "submit ddp --data /nowhere/data --yes",
    "submit ddp --data /mnt/shared/x --yes",
    "submit ddp --data /tmp --yes",
    "submit ddp --data fashion_mnist --yes",
    # What suits no number of workers that the job may have: 4 GPUs a node.
    "submit ddp --global-batch 64 --nodes 4 --yes",
    "submit ddp --run other --yes",  # of another recipe
    "submit ddp --nodes 0 --yes",
    "submit ddp --max-cost 0.01 --nodes 1 --yes",
    "submit ddp --hang-minutes 5 --yes",
    "submit ddp --keep-files a --yes",
    *(
        f"submit --code CODE {option} {shlex.quote(pattern)} --yes -- true"
        for option in ("--keep-files", "--skip-files")
        for pattern in ("", "/data", "a//b", "[ab", "a\\b")
    ),
    "submit --code CODE --not-secret x --yes -- true",
    "submit ddp --secret =training/key --yes",
    "submit ddp --env NOT_SET_ANYWHERE --yes",
    "submit ddp --notify https://hooks.example/x --yes",
    "submit ddp --notify training/key --yes",
    "submit ddp --notify training/notify/x --yes",
    "submit ddp --secret KEY=mine --yes",
    "submit ddp",
    "plan ddp --code CODE -- true",
    "plan mine.py",
    "submit --code CODE --yes -- deepspeed --no_ssh zzz.py mine.py",
    "submit --code CODE --yes -- bash run.sh",
    "submit --code CODE --yes -- python __pycache__/old.py",
    "submit --code CODE --yes -- mien.py --lr 1",
    "submit --code CODE --yes -- run.sh",
    "submit --code CODE --yes -- torchrun",
    "submit --code CODE --yes -- python3",
    "submit --code CODE --yes -- accelerate",
    "submit --code CODE --yes -- 'python mine.py --lr 1'",
    "submit --code CODE --yes -- OMP_NUM_THREADS=4 torchrun mine.py",
    "submit --code CODE --yes -- sh -c 'deepspeed mine.py'",
    "plan ddp --gpus l4 --pool l4",
    "plan ddp --market on-demand,cheap",
    # Wrong words of other commands.
    "cluster up --timeout-minutes 0",
    "cluster up --nodes x",
    "cluster up --nodes 0",
    "cluster up -w 2",
    "cluster up",
    "submit ddp --max-hours nan",
    "submit ddp --max-cost 0",
    "submit ddp --max-cost inf",
    "submit ddp --grace 181",
    "settings pdd",
    "settings ddp --preset dolly",
    "doctor -c preset",
    "cost",
    "cost old --by user",
    "open --dashboard old",
    "open --dashboard --token",
    "open --token --port 8888",
    "report unknown",
    "report a/b",
    "report first -o CODE",
    "report first -o CODE/mine.py/x",
    "export none --to new",
    "export first --to CODE",
    "export first --to s3://b/x --dtype int8",
    "export ../r1 --to new",
    "export training --to new",
    "export other --to new",
    "generate none text --yes",
    "generate first text --yes",
    "generate training text --yes",
    "generate other ' ' --yes",
    f"generate other {LONG} --yes",
    "checkpoints nothing",
    "checkpoints runs/demo",
    "submit ddp --grace 90 --yes",
    "submit ddp --spot --yes",
    "submit ddp --wait-minutes inf",
    "data put none/such",
    "submit ddp --data half --yes",
    "download other --to new",
    "download ../x --to new",
    "data put fashion_mnist",
    "data put CODE --as 'my cats'",
    "data put CODE/empty",
    "data put CODE --as digits",
    "data put CODE --as python-help",
    *(
        f"{kind} rm {shlex.quote(name)} --yes"
        for kind in ("runs", "data")
        for name in ("", ".", "..", "a/more", "a/", "*")
    ),
    # Or another region's run would be removed than the one that was asked for.
    "runs --region eu-west-1 rm first",
    "plan -f none.toml",
)


@pytest.fixture(autouse=True)
def _runs(account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in the bucket, and no file here but code."""
    account.objects |= {
        "runs/other/config.json": b'{"recipe": "fsdp"}',
        "runs/training/config.json": b'{"recipe": "fsdp"}',
        "runs/broken/result.json": b"{}",
        "runs/first/config.json": b'{"recipe": "ddp"}',
        "data/half/a.txt": b"x",
        "runs/first/report.html": b"<html>",
    }
    checkpoint(account, "other", 10, hours_ago=1)
    checkpoint(account, "training", 10, hours_ago=1, lost="manifest.json")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("words", REFUSED)
def test_a_mistake_is_an_error_on_the_laptop_and_nothing_is_started(
    account: Account, code: Path, cli: Cli, words: str
) -> None:
    given = shlex.split(words.replace("CODE", str(code)))
    said = cli(*given, code=exits.BAD_INPUT)
    assert said.out == ""
    # It names what is wrong.
    own = [part for word in given[1:] for part in re.split("[ =]", word) if part not in USUAL]
    assert not own or any(word in said.err for word in own)
    assert account.changes == []
    assert words not in WITHOUT_AWS or account.calls == []


NO_IMAGE = {"without_images": {"worker"}}
UNREADABLE = {"outputs": {**OUTPUTS, TRAINING_STACK: {stack_outputs.SHAPE: NO_SHAPE}}}


@pytest.mark.parametrize(
    ("words", "change", "code"),
    [
        ("report training", {}, 1),
        ("report broken", {}, 1),
        ("open --dashboard", {"account_id": LOCAL_ACCOUNT}, 1),
        ("ls", {"region": None, "credentials": None}, 2),
        ("ls", {"fails": {IDENTITY: NoCredentialsError()}}, 2),
        ("ls", {"fails": {IDENTITY: SSOTokenLoadError(error_msg="x")}}, 1),
        ("ls", {"fails": {IDENTITY: ConfigParseError(path="/home/me/.aws/config")}}, 2),
        ("ls", {"fails": {IDENTITY: ValueError("Invalid endpoint: here")}}, 2),
        ("ls", {"fails": {IDENTITY: refused("InvalidClientTokenId")}}, 1),
        ("ls", {"fails": {IDENTITY: PermissionError(13, "denied", "key")}}, 1),
        ("ls", {"fails": {IDENTITY: EndpointConnectionError(endpoint_url="http://x")}}, 79),
        ("plan ddp", {"stack_status": "DELETE_FAILED"}, 1),
        ("cluster up", UNREADABLE, 1),
        ("plan ddp --nodes 1", NO_IMAGE, 1),
        ("cluster up --nodes 1 --yes", NO_IMAGE, 1),
        ("shell", {}, 1),
        ("shell", {"wanted": {"head-service": 1, "worker-service": 0}}, 1),  # no plugin
        ("open", {}, 1),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    words: str, change: dict[str, Any], code: int, account: Account, cli: Cli
) -> None:
    for name, value in change.items():
        setattr(account, name, value)
    said = cli(*words.split(), code=code)
    assert "Traceback" not in said.err
    assert said.out == ""
    assert account.changes == []
