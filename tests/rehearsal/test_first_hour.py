"""Every line of a shell block in README and docs/operations.md is run, checked, or listed here.

Those that deploy run in the order of reading, against the local AWS, as they stand there; what is
added to one is beside it. A line that is new on a page and not in a list fails a test.
"""

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from contract import exits
from rehearsal.cycle import Rehearsal
from tests.conftest import ROOT
from tests.trainctl import aws_command
from trainctl.__main__ import app
from training.recipes import command as recipe_command

PAGES = ("README.md", "docs/operations.md")

_ROLE = "aws iam create-service-linked-role --aws-service-name"
#: What runs here, in the order of reading, and what is added to it: the settings of the deployment
#: that the tests share, and yes where no one can be asked.
RUN = {
    f"{_ROLE} ecs.amazonaws.com": "",
    f"{_ROLE} autoscaling.amazonaws.com": "",
    f"{_ROLE} spot.amazonaws.com": "",
    "make help": "",
    "python -m training.plan fsdp --model databricks/dolly-v2-7b --workers 8": "",
    "make deploy": "VENV=: YES=1 ARGS='-c preset=cpu -c retain_bucket=false -c spot=true'",
    "make images": "VENV=:",
}
#: Trains too long for a test; recipe and settings are parsed.
TRAINS = {
    "python -m training.launch ddp --local --workers 2 --data fashion-mnist --run mine",
    "python -m training.launch fsdp --local --workers 2 --run tiny",
    "trainctl submit ddp --nodes 2 --run first --data fashion-mnist --follow",
    "trainctl shell -- python -m training.launch ddp --run first --data s3://BUCKET/data",
    "trainctl submit fsdp --model databricks/dolly-v2-3b "
    "--secret HF_TOKEN=training/hf-token --follow",
    "trainctl cluster down; trainctl submit ddp --nodes 2 --preset digits --follow",
}
_REHEARSED = "the rehearsal, which CI runs, gives the same command"
_PROGRAMS = "tests/rehearsal/test_programs.py submits programs, test_jobs.py downloads their files"
_OTHER_MACHINES = "the line above with other machines, of which the local AWS has none"
_JOBS = "tests/rehearsal/test_jobs.py gives the command, for its own runs"
ELSEWHERE = {
    "trainctl doctor": "tests/trainctl/test_doctor_fixes.py, on a local AWS of its own",
    "trainctl data put fashion-mnist": "tests/trainctl/test_data_sets.py, from a mirror",
    "trainctl ls": _JOBS,
    "trainctl show first": _JOBS,
    "trainctl logs first --follow": _JOBS,
    "trainctl stop first": _JOBS,
    "trainctl cost first": _JOBS,
    "trainctl report first": "tests/trainctl/test_open.py",
    'make diff ARGS="-c preset=fsdp"': "tests/test_makefile.py and tests/stacks/test_deploy.py",
    "make demo": "the command is in tests/test_makefile.py, the training in test_local_runs.py",
    "make rehearse": "CI runs it",
    "make test": "CI runs it",
    "source .venv/bin/activate": "the tests run with that Python",
    "python -m training.export RUN --to DIR": "tests/training/test_fsdp.py exports a run",
    "trainctl submit --code . --nodes 2 --run mine -- torchrun train.py": _PROGRAMS,
    "trainctl download mine": _PROGRAMS,
    'make deploy ARGS="-c preset=fsdp -c availability_zone=us-east-1b"': _OTHER_MACHINES,
    "npx cdk deploy CoreStack TrainingStack -c preset=cpu": "make deploy gives the same command",
    "make images TORCH_INDEX=ADDRESS": "only names an index; .ci/venv's tests do so",
    "trainctl cluster up --nodes 2": _REHEARSED,
    "trainctl shell -- ray status": _REHEARSED,
    "trainctl cluster status --json": "tests/rehearsal/test_in_containers.py",
    "trainctl cluster down": _REHEARSED,
    "trainctl notebook": "tests/rehearsal/test_in_containers.py opens it in a browser",
    "trainctl notebook --stop": "the same test stops it",
    "make destroy": "the rehearsal destroys at its end; here it would take other tests' stacks",
    'make destroy ARGS="-c retain_bucket=false"': "as make destroy",
    "trainctl local up": "the deployment of these tests is what it makes",
    'eval "$(trainctl local env)"': "tests/trainctl/test_local.py",
    "trainctl local down": "tests/rehearsal/test_taking_down.py",
    "make venv-aws": "CI installs with it",
    ".venv/bin/python -m rehearsal start": "tests/rehearsal/test_local_aws.py",
}


def lines(page: str, *, until: str | None = None) -> list[str]:
    """The commands of a page's shell blocks, in order, without comments and alignment.

    Args:
        until: a heading; the page is read up to it.
    """
    text = (ROOT / page).read_text("utf-8").partition(until or "\0")[0]
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    joined = "".join(blocks).replace("\\\n", " ")
    bare = (re.sub(r"(^|\s)#.*", "", line) for line in joined.splitlines())
    return [" ".join(line.split()) for line in bare if line.strip()]


def of_aws(line: str) -> bool:
    """Whether a line is the AWS CLI's, which these tests do not have."""
    return line.startswith("aws ")


def test_every_line_of_a_shell_block_is_run_or_listed() -> None:
    found = [line for page in PAGES for line in lines(page)]
    assert len(found) > 30
    known = [*RUN, *TRAINS, *ELSEWHERE]
    assert len(known) == len({*known})
    checked = {line for line in found if of_aws(line)} - {*RUN}
    assert sorted({*found} - checked) == sorted(known)
    # They run in this order: README sends its readers to the preparations of the other page first.
    before = lines("docs/operations.md", until="\n## Deploy\n")
    assert before
    assert [line for line in dict.fromkeys([*before, *found]) if line in RUN] == [*RUN]


AWS_LINES = [line for page in PAGES for line in lines(page) if of_aws(line)]


@pytest.mark.parametrize("line", AWS_LINES)
def test_lines_of_the_aws_cli_name_operations_and_options_that_exist(line: str) -> None:
    assert aws_command.read(line).arguments


@pytest.mark.parametrize("line", sorted(TRAINS))
def test_lines_that_train_have_settings_that_exist(line: str) -> None:
    words = shlex.split(line.rpartition("; ")[2])
    begin = next(number for number, word in enumerate(words) if word in ("ddp", "fsdp"))
    given = words[begin:]
    if "submit" in words:  # its own options stand among the recipe's
        submit = typer.main.get_command(app).commands["submit"]  # type: ignore[attr-defined]
        own = {name: each for each in submit.params for name in each.opts}
        for name in [word for word in given if word in own]:
            at = given.index(name)
            del given[at : at + (1 if own[name].is_flag else 2)]
    assert recipe_command.parse(given).recipe.name == words[begin]


# --- in order, on the local AWS -------------------------------------------------------------------
AWS = """\
#!{python}
# Stands for the AWS CLI, in the same words.
import shlex, sys
import boto3
from tests.trainctl import aws_command
found = aws_command.read(shlex.join(["aws", *sys.argv[1:]]))
print(getattr(boto3.client(found.service), found.operation)(**found.arguments))
"""
DOCKER = """\
#!{python}
# Stands for docker where `make images` meets the local AWS: ECR's name leads nowhere here, so what
# the registry has is asked where the images were pushed.
import json, subprocess, sys, urllib.request
arguments = sys.argv[1:]
if arguments[0] in ("login", "logout"):
    sys.exit(0)
if arguments[:2] == ["manifest", "inspect"]:
    path, _, tag = arguments[2].partition("/")[2].rpartition(":")
    if not {store!r}:
        sys.exit(subprocess.call([{docker!r}, "image", "inspect", path + ":" + tag]))
    with urllib.request.urlopen("http://{store}/v2/" + path + "/tags/list") as answer:
        sys.exit(0 if tag in json.load(answer)["tags"] else 1)
sys.exit("docker: what is not pushed is not built here: " + " ".join(arguments))
"""


@pytest.fixture
def shell(deployment: Rehearsal, tmp_path: Path) -> dict[str, str]:
    """The variables of a shell in which `.venv` is active and AWS is the local one."""
    for name, script in {
        "trainctl": f'#!/bin/sh\nexec "{sys.executable}" -m trainctl "$@"\n',
        "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
        "aws": AWS.format(python=sys.executable),
        "docker": DOCKER.format(
            python=sys.executable,
            store=deployment.state()["registry"],
            docker=deployment.engine.client,
        ),
    }.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(script)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "home").mkdir()
    own = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path / "home"),  # the CDK remembers accounts there
        "DOCKER_HOST": deployment.engine.address,
        "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
    }
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "MAKE", "CI"))}
    return {**kept, **deployment.environment(), **own}


@pytest.mark.slow
@pytest.mark.engine
def test_deploy_and_images_as_they_stand_on_the_pages(shell: dict[str, str]) -> None:
    """Roles, stacks and images, in the order of reading and with no other step between."""
    shown: dict[str, str] = {}
    for line, more in RUN.items():
        done = subprocess.run(
            [*shlex.split(line), *shlex.split(more)],
            cwd=ROOT,
            env=shell,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )
        shown[line] = done.stdout
        assert done.returncode == exits.OK, f"{line}:\n{done.stdout}"
    # The tag that was deployed is the one that `make images` looks for.
    assert shown["make images"].count("is there already") == 2
