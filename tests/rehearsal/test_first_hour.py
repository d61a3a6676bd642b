"""Every line of a shell block in README and docs/operations.md is run, checked, or listed here.

Those of the first hour run in the order of reading, on a local AWS that is empty before them and
after them, as they stand there; what is added to one is beside it. A line that is new on a page and
not in a list fails a test.
"""

import functools
import http.server
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import typer

from contract import exits
from contract.images import content_tag
from rehearsal import images, local_aws, processes, registry
from rehearsal.cycle import Rehearsal
from rehearsal.engine import EngineError
from rehearsal.inventory import difference, inventory
from rehearsal.local_aws import ACCOUNT, REGION, LocalAws
from rehearsal.steps import Steps
from tests.conftest import ROOT
from tests.trainctl import aws_command
from trainctl.__main__ import app
from training.data import catalog, download
from training.recipes import command as recipe_command

PAGES = ("README.md", "docs/operations.md")

_ROLE = "aws iam create-service-linked-role --aws-service-name"
#: The job is stopped long before its end: an epoch takes minutes here.
SUBMIT = "trainctl submit ddp --nodes 2 --run first --data fashion-mnist --follow"
LOGS = "trainctl logs first --follow"
STOP = "trainctl stop first"
#: Prints until the job has ended; the lines after it run meanwhile.
FOLLOWING = (SUBMIT, LOGS)
#: What runs here, in the order of reading, and what is added to it: settings of a deployment that
#: has no GPU and keeps nothing, yes where no one can be asked, and VENV=: because the tests run in
#: the environment that make would bring up to date.
RUN = {
    # Without the templates, which would be made once more.
    "npx cdk bootstrap": f"aws://{ACCOUNT}/{REGION} --app ''",
    f"{_ROLE} ecs.amazonaws.com": "",
    f"{_ROLE} autoscaling.amazonaws.com": "",
    f"{_ROLE} spot.amazonaws.com": "",
    "make help": "",
    "python -m training.plan fsdp --model databricks/dolly-v2-7b --workers 8": "",
    "trainctl doctor": "",
    "make deploy": "VENV=: YES=1 ARGS='-c preset=cpu -c retain_bucket=false -c spot=true'",
    "make images": "VENV=:",
    "trainctl data put fashion-mnist": "",
    SUBMIT: "--yes --env OMP_NUM_THREADS=1",
    "trainctl ls": "",
    "trainctl show first": "",
    LOGS: "",
    STOP: "--yes",
    "trainctl cost first": "",
    "trainctl report first": "",
    "npx cdk destroy --all": "--force",
}
#: Trains too long for a test; recipe and settings are parsed.
TRAINS = {
    "python -m training.launch ddp --local --workers 2 --data fashion-mnist --run mine",
    "python -m training.launch fsdp --local --workers 2 --run tiny",
    "trainctl shell -- python -m training.launch ddp --run first --data s3://BUCKET/data",
    "trainctl submit fsdp --model databricks/dolly-v2-3b "
    "--secret HF_TOKEN=training/hf-token --follow",
    "trainctl cluster down; trainctl submit ddp --nodes 2 --preset digits --follow",
}
_REHEARSED = "the rehearsal, which CI runs, gives the same command"
_PROGRAMS = "tests/rehearsal/test_programs.py submits programs, test_jobs.py downloads their files"
_OTHER_MACHINES = "the line above with other machines, of which the local AWS has none"
ELSEWHERE = {
    'make diff ARGS="-c preset=fsdp"': "tests/test_makefile.py and tests/stacks/test_deploy.py",
    "make synth": "tests/stacks synthesizes with all settings",
    "make demo": "the command is in tests/test_makefile.py, the training in test_local_runs.py",
    "make rehearse": "CI runs it",
    "make test": "CI runs it",
    "source .venv/bin/activate": "the shell of these tests; tests/test_makefile.py makes another",
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
    "make destroy": "tests/test_makefile.py; npx cdk destroy --all does the same, and runs",
    'make destroy ARGS="-c retain_bucket=false"': "as make destroy",
    "make local": "the deployment of these tests is what it makes",
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


def reading_order() -> list[str]:
    """The lines of ``RUN``, each as often as README has it."""
    # README sends its readers to the preparations of the other page first.
    before = dict.fromkeys(lines("docs/operations.md", until="\n## Deploy\n"))
    first_hour = [*before, *[line for line in lines("README.md") if line not in before]]
    later = [line for line in dict.fromkeys(lines("docs/operations.md")) if line not in first_hour]
    return [line for line in [*first_hour, *later] if line in RUN]


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
    assert [*dict.fromkeys(reading_order())] == [*RUN]
    assert reading_order().count("trainctl doctor") == 2


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


@pytest.fixture
def mirror(data_dir: Path) -> Iterator[str]:
    """Address of a mirror on loopback that has the real FashionMNIST."""
    if not (data_dir / "fashion-mnist").is_dir():
        pytest.skip("no real data: ../shared/data has no fashion-mnist")
    handler = functools.partial(QuietHandler, directory=str(data_dir))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and prints nothing."""

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Rehearsal]:
    """A rehearsal beside that of the other tests, with its own name: images, and nothing up."""
    try:
        found = Rehearsal.here()
    except EngineError as error:
        pytest.skip(f"no Docker Engine: {error}")
    found.name += "-hour"
    found.folder = tmp_path / "rehearsal"
    found.log = found.folder / "log"
    found.folder.mkdir()
    try:
        images.build(found.engine, found.docker(), image_tag=content_tag(ROOT), say=print)
        yield found
    finally:
        found.down(Steps(1))
        # What the stand-in has "pushed"; without a registry, another rehearsal has the same names.
        pushed = ("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", "corestack-*repository-*")
        if registry.program() and (names := found.engine(*pushed).split()):
            found.engine("image", "rm", "--no-prune", *names, check=False)


@pytest.fixture
def empty_aws(own: Rehearsal) -> LocalAws:
    """An account in which nothing was ever made; its ECS starts containers."""
    return local_aws.start_detached(
        own.folder / "aws",
        host=own.engine.make_network(own.name),
        port=0,
        containers=local_aws.Containers(
            name=own.name, engine=own.engine.address, network=own.name, registry=""
        ),
    )


def activated() -> dict[str, str]:
    """The variables of a shell in which the environment of these tests is active."""
    script = '. "$0/bin/activate" && exec "$1" -c "$2"'
    printed = "import json, os; print(json.dumps(dict(os.environ)))"
    command = ["sh", "-c", script, sys.prefix, sys.executable, printed]
    found: dict[str, str] = json.loads(subprocess.check_output(command, text=True))
    return found


def test_the_shell_of_the_first_hour_has_the_environment_that_is_active() -> None:
    path = activated()["PATH"]
    for name in ("python", "python3", "trainctl"):
        found = shutil.which(name, path=path)
        assert found is not None
        assert Path(found).parent.resolve() == Path(sys.prefix, "bin").resolve()


@pytest.fixture
def shell(own: Rehearsal, empty_aws: LocalAws, mirror: str, tmp_path: Path) -> dict[str, str]:
    """The variables of a shell in which `.venv` is active and AWS is the local one."""
    active = activated()
    for name, script in {
        "docker": f'#!/bin/sh\nexec "{sys.executable}" -m tests.rehearsal.docker_stand_in "$@"\n',
        "aws": AWS.format(python=sys.executable),
    }.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(script)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "home").mkdir()
    added = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{active['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path / "home"),  # the CDK remembers accounts there
        "BROWSER": "true",  # the program of that name: opens nothing
        "DOCKER_HOST": own.engine.address,
        "STAND_IN_DOCKER": own.engine.client,
        "npm_config_update_notifier": "false",  # it would ask npm's registry
        "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
        catalog.MIRROR_VARIABLE: mirror,
        download.CACHE_VARIABLE: str(tmp_path / "cache"),
        processes.NAME: own.name,
    }
    kept = {k: v for k, v in active.items() if not k.startswith(("AWS_", "MAKE", "CI"))}
    return {**kept, **empty_aws.environment(), **added}


class Followed:
    """A command that prints until its job has ended."""

    def __init__(self, words: list[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        """What it has printed so far, on both streams."""
        return self._log.read_text(errors="replace")

    def wait_for(self, word: str, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while word not in self.text():
            over = self._process.poll() is not None or time.monotonic() > deadline
            assert not over, f"{word!r} did not come:\n{self.text()}"
            time.sleep(0.2)

    def end(self, *, timeout_s: float) -> int:
        return self._process.wait(timeout=timeout_s)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_first_hour_as_it_stands_on_the_pages(
    own: Rehearsal, empty_aws: LocalAws, shell: dict[str, str], tmp_path: Path
) -> None:
    """From an empty account to a report and back, by the commands of the pages and no other."""
    shown: dict[str, str] = {}
    followed: dict[str, Followed] = {}
    before = inventory(empty_aws.endpoint)
    with ExitStack() as at_the_end:
        for line in reading_order():
            words = [*shlex.split(line), *shlex.split(RUN[line])]
            if line == "make deploy":  # what comes before it stays in an account
                before = inventory(empty_aws.endpoint)
            if line in FOLLOWING:
                follow = Followed(words, shell, tmp_path / f"log-{len(followed)}")
                followed[line] = at_the_end.enter_context(closing(follow))
                follow.wait_for("training: ", timeout_s=300)
                continue
            done = subprocess.run(
                words,
                cwd=tmp_path if words[0] == "trainctl" else ROOT,
                env=shell,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=240,
                check=False,
            )
            shown[line] = done.stdout
            said = "".join(f"\n--- {name}\n{each.text()}" for name, each in followed.items())
            assert done.returncode == exits.OK, f"{line}:\n{done.stdout}{said}"
            if line == STOP:
                ended = {name: each.end(timeout_s=60) for name, each in followed.items()}
                assert ended == dict.fromkeys(FOLLOWING, exits.TERMINATED), said
    # The tag that was deployed is the one that `make images` has pushed.
    assert shown["make images"].count("two steps of each recipe succeeded") == 2
    assert "All checks passed" in shown["trainctl doctor"]
    assert "4 files" in shown["trainctl data put fashion-mnist"]
    assert "first" in shown["trainctl ls"]
    assert "running" in shown["trainctl show first"]
    assert "stopped by user" in shown[STOP]
    assert "Ray runtime started" not in followed[SUBMIT].text()
    assert "$" in shown["trainctl cost first"]
    page = tmp_path / "first-report.html"
    assert page.name in shown["trainctl report first"]
    assert "fashion-mnist" in page.read_text("utf-8")
    assert not own.engine.labelled("container", own.name)
    assert difference(before, inventory(empty_aws.endpoint)) == {}
