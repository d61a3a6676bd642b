"""Every line of a shell block in README, the tutorials and two pages is run, checked, or listed.

Those of the first hour are the scenario of `make rehearse`, which runs here once, on the deployment
of all tests in containers. A line that is new on a page and not in a list fails a test.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from contract import exits, runs
from contract.errors import InputError
from rehearsal.children import Steps
from rehearsal.cycle import Rehearsal
from rehearsal.inventory import account_at
from rehearsal.rehearse import (
    FIRST,
    FOLLOW,
    OWN,
    OWN_CODE,
    PROGRAM,
    STOP,
    SUBMIT,
    first_lines,
    run_lines,
)
from store.cache import CACHE_VARIABLE
from tests.conftest import ROOT, write_wheel
from tests.rehearsal.conftest import LAPTOP, served
from trainctl.__main__ import app
from trainctl.__main__ import main as trainctl
from training import command as recipe_command
from training import plan
from training.data import catalog, download

TUTORIALS = tuple(
    f"docs/tutorials/{name}.md" for name in ("first-hour", "your-script", "fine-tune", "team")
)
PAGES = ("README.md", *TUTORIALS, "docs/operations.md", "docs/from-the-posts.md")

#: Trains too long for a test; recipe and settings are parsed.
TRAINS = {
    "trainctl run ddp --workers 2 --data fashion-mnist --preset fast --run quick",
    "trainctl run ddp --workers 2 --data fashion-mnist --preset tuned --run mine",
    "trainctl run fsdp --workers 2 --run tiny",
    "trainctl submit ddp --nodes 2 --follow",
    "trainctl submit fsdp --nodes 2 --follow",
    "trainctl shell -- python -m training.launch ddp --run first --data s3://BUCKET/data",
    "trainctl submit fsdp --model databricks/dolly-v2-3b "
    "--secret HF_TOKEN=training/hf-token --follow",
    "trainctl submit ddp --nodes 2 --preset digits --follow",
    "trainctl plan fsdp --preset dolly --data tiny-shakespeare",
    "trainctl submit fsdp --preset dolly --data tiny-shakespeare --run dolly --follow",
    "trainctl submit imagenet --data s3://BUCKET/datasets/imagenet-400 --nodes 1:4 --run imagenet",
    "trainctl submit fsdp --model Qwen/Qwen3-4B --recompute full --data chats --run chats --follow",
    "trainctl submit fsdp --preset lora --model Qwen/Qwen3-8B --data chats --run adapters --follow",
}
#: Runs here, without an account; beside it, the pages have these figures.
PLANNED = {
    "python -m training.plan fsdp --model databricks/dolly-v2-7b --preset dolly --workers 8": [
        "15.1 of 19.8 GiB",
        "2,591 tokens/s",
    ],
    "trainctl plan ddp --nodes 2 --preset tuned --data fashion-mnist --max-hours 1 -c preset=ddp": [
        "$2.36 an hour",
        "$2.82",
    ],
    "trainctl plan fsdp --preset dolly --data tiny-shakespeare -c preset=fsdp": [
        "$11.49 an hour",
        "$20.59",
        "1 min 54 s of steps",
        "$0.36",
    ],
}
_DEPLOYED = "the deployment of these tests is made and destroyed by the same command of the CDK"
_CLUSTER = "tests/rehearsal/test_in_containers.py"
_PREPARED = "tests/trainctl/test_data_pictures.py"
_PROGRAMS = "tests/rehearsal/test_programs.py"
_SECOND_POST = "tests/rehearsal/test_second_post.py"
_JOB_FILE = "tests/trainctl/test_job_file.py submits the page's file"
_FSDP = "tests/stacks/test_deploy.py deploys and destroys this preset; the images have no CUDA here"
ELSEWHERE = {
    'make diff ARGS="-c preset=fsdp"': "tests/test_makefile.py and tests/stacks/test_deploy.py",
    "make synth": "tests/stacks synthesizes with all settings",
    "npx cdk bootstrap": _DEPLOYED,
    "make deploy": _DEPLOYED,
    "npx cdk destroy --all": _DEPLOYED,
    "npx cdk deploy CoreStack TrainingStack": _DEPLOYED,
    "npx cdk deploy CoreStack TrainingStack -c preset=fsdp": _DEPLOYED,
    "npm ci": "`.ci/node`, before these tests",
    "python3 -m venv .venv && source .venv/bin/activate": "tests/test_makefile.py makes another",
    "pip install -r requirements/laptop.txt -e .": "tests/test_packaging.py installs a wheel",
    "make test": "these tests are some of it",
    "make destroy": f"tests/test_makefile.py; {_DEPLOYED}",
    "make images": "tests/containers/test_publish.py; the deployment's are made by its functions",
    "make demo": "the command is in tests/test_makefile.py, the training in test_local_runs.py",
    "make rehearse": "its lines run here",
    "source .venv/bin/activate": "the shell of these tests; tests/test_makefile.py makes another",
    'make deploy ARGS="-c preset=fsdp -c availability_zone=us-east-1b"': _FSDP,
    "npx cdk deploy CoreStack TrainingStack -c preset=cpu": "make deploy gives the same command",
    "make images TORCH_INDEX=ADDRESS": "only names an index; .ci/venv's tests do so",
    "trainctl cluster up --nodes 2": _CLUSTER,
    "trainctl shell -- ray status": f"{_CLUSTER} gives other commands in its place",
    "trainctl cluster status --json": _CLUSTER,
    "trainctl cluster down": _CLUSTER,
    'make destroy ARGS="-c retain_bucket=false"': "as make destroy",
    "make local": "the deployment of these tests is what it makes",
    'eval "$(trainctl local env)"': "tests/trainctl/test_local.py",
    "trainctl local down": "tests/rehearsal/test_taking_down.py",
    'make deploy ARGS="-c preset=fsdp"': _FSDP,
    "trainctl submit --code examples/posts --nodes 2 --run post -- python ddp.py": _PROGRAMS,
    "trainctl export dolly --to dolly-shakespeare": _SECOND_POST,
    'trainctl generate dolly "To be, or"': _SECOND_POST,
    "python -m training.data.pictures ILSVRC --to s3://BUCKET/datasets/imagenet-400": _PREPARED,
    "cd examples/ddp": "the folder of the next line",
    "torchrun --nproc-per-node 2 train.py": "tests/examples/test_examples.py",
    "trainctl stop mine": f"{STOP} is the same for a program",
    'make deploy ARGS="-c spot=true -c max_workers=4"': _FSDP,
    "trainctl submit --code . --nodes 2:4 --spot --run mine -- torchrun train.py": _PROGRAMS,
    'make deploy ARGS="-c preset=team -c alarm_email=ml@example.com"': "tests/stacks/test_rules.py",
    "trainctl cost --by user": "tests/trainctl/golden/cost",
    "pipx install .": "tests/test_packaging.py installs a wheel",
    "trainctl plan -f job.toml": _JOB_FILE,
    "trainctl submit -f job.toml --yes": _JOB_FILE,
    "trainctl data put chats --as chats": "tests/trainctl/test_data_sets.py",
    "trainctl open --dashboard": "tests/trainctl/test_open.py",
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
    ran = [*FIRST, *OWN_CODE]
    known = [*ran, *TRAINS, *PLANNED, *ELSEWHERE]
    assert len(known) == len({*known})
    assert sorted({line for line in found if not of_aws(line)}) == sorted(known)
    shown = (ROOT / "docs" / "limits.md").read_text("utf-8").partition("## Commands on these")[2]
    assert [
        word
        for added in (*FIRST.values(), *OWN_CODE.values())
        for word in added.split()
        if word not in shown
    ] == []
    # In the order of reading; the doctor is the one after the images.
    order = [line for page in TUTORIALS for line in lines(page)]
    assert sorted(FIRST, key=order.index) == [*FIRST]
    assert sorted(OWN_CODE, key=order.index) == [*OWN_CODE]


@pytest.mark.parametrize("line", PLANNED)
def test_a_plan_prints_the_figures_beside_it(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)
    code = plan.main(words[3:]) if words[0] == "python" else trainctl(words[1:])
    assert code == exits.OK
    printed = capsys.readouterr().out
    assert "DOES NOT FIT" not in printed
    pages = [(ROOT / page).read_text("utf-8") for page in PAGES if line in lines(page)]
    assert pages
    for text in (printed, *pages):
        flowing = " ".join(text.split())
        assert [figure for figure in PLANNED[line] if figure not in flowing] == []


@pytest.mark.parametrize("line", sorted(TRAINS))
def test_lines_that_train_have_settings_that_exist(line: str) -> None:
    words = shlex.split(line.rpartition("; ")[2])
    recipes = ("ddp", "fsdp", "imagenet")
    begin = next(number for number, word in enumerate(words) if word in recipes)
    given = words[begin:]
    if "submit" in words:  # its own options stand among the recipe's
        submit = typer.main.get_command(app).commands["submit"]  # type: ignore[attr-defined]
        own = {name: each for each in submit.params for name in each.opts}
        for name in [word for word in given if word in own]:
            at = given.index(name)
            del given[at : at + (1 if own[name].is_flag else 2)]
    assert recipe_command.parse(given).recipe.name == words[begin]


def test_without_a_network_the_rehearsal_trains_on_digits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(*_: object, **__: object) -> None:
        raise InputError("no network")

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(download, "fetch", fetch)
    found = [*first_lines()]
    assert len(found) == len(FIRST) - 1
    (line,) = {*found} - {*FIRST}
    assert "fashion" not in "".join(found)
    assert " --preset digits " in line
    assert line.endswith(FOLLOW)
    assert "no network" in capsys.readouterr().err


# --- in order, on the local AWS -------------------------------------------------------------------
@pytest.fixture
def mirror(data_dir: Path) -> Iterator[str]:
    """Address of a mirror on loopback that has the real FashionMNIST."""
    if not (data_dir / "fashion-mnist").is_dir():
        pytest.skip("no real data: ../shared/data has no fashion-mnist")
    with served(data_dir) as address:
        yield address


@pytest.fixture(scope="module")
def seconds() -> Iterator[dict[str, float]]:
    """How long each line took; at the end, prints it for each page (``pytest -s`` shows it)."""
    found: dict[str, float] = {}
    yield found
    for page in PAGES:
        ran = [line for line in lines(page) if line in found]
        took = sum(found[line] for line in ran)
        print(f"{page}: {took:.0f} s, {len(ran)} of {len(lines(page))} lines")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("log_of_a_failure")
def test_the_first_hour_as_it_stands_on_the_page(
    deployment: Rehearsal, mirror: str, tmp_path: Path, seconds: dict[str, float]
) -> None:
    """From a deployment without data to a report, by the commands of the page and no other."""
    variables = {
        "AWS_SESSION_TOKEN": LAPTOP,
        catalog.MIRROR_VARIABLE: mirror,
        CACHE_VARIABLE: str(tmp_path / "cache"),
    }
    steps = Steps(len(FIRST))
    shown = run_lines(deployment, steps, FIRST, folder=tmp_path, variables=variables)
    seconds.update(steps.seconds)
    assert "All checks passed" in shown["trainctl doctor"]
    assert "4 files" in shown["trainctl data put fashion-mnist"]
    assert "maximum   $" in shown[SUBMIT], "what it may cost is printed before"
    assert "Ray runtime started" not in shown[SUBMIT]
    assert "first" in shown["trainctl ls"]
    assert "running" in shown["trainctl show first"]
    assert "stopped by user" in shown[STOP]
    assert "$" in shown["trainctl cost first"]
    assert "fashion-mnist" in shown["trainctl data ls"]
    assert "first" in shown["trainctl runs"]
    page = tmp_path / "first-report.html"
    assert page.name in shown["trainctl report first"]
    assert "fashion-mnist" in page.read_text("utf-8")


#: Beside Hugging Face's Trainer: a module, a package, a variable and a secret, on every rank.
BESIDE = """
import os, greeting, helper
print("found", greeting.WORDS, helper.NAME, os.environ["COLOR"], os.environ["API_KEY"], flush=True)
import trainer
trainer.main()
"""


@pytest.fixture
def secret(deployment: Rehearsal) -> Iterator[str]:
    """Value of the secret ``training/key``, which no stack makes or removes."""
    secrets = account_at(deployment.state()["endpoint"]).client("secretsmanager")
    secrets.create_secret(Name="training/key", SecretString="hidden")
    yield "hidden"
    secrets.delete_secret(SecretId="training/key", ForceDeleteWithoutRecovery=True)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("log_of_a_failure")
def test_a_program_of_ones_own_trains_on_two_nodes(
    deployment: Rehearsal, tmp_path: Path, seconds: dict[str, float], secret: str
) -> None:
    shutil.copy(PROGRAM / "train.py", tmp_path / "trainer.py")
    (tmp_path / "train.py").write_text(BESIDE)
    (tmp_path / "helper.py").write_text('NAME = "helped"\n')
    (tmp_path / "requirements.txt").write_text(f"./{write_wheel(tmp_path).name}\n")
    added = " --env COLOR=green --secret API_KEY=training/key --keep 5"
    kept = {"trainctl ls": "", "trainctl release": " --yes"}
    lines = {**OWN_CODE, OWN: OWN_CODE[OWN] + added, **kept}
    steps = Steps(len(lines))
    variables = {"AWS_SESSION_TOKEN": LAPTOP}
    shown = run_lines(deployment, steps, lines, folder=tmp_path, variables=variables)
    seconds.update(steps.seconds)
    log = shown[OWN]
    assert "requirements.txt: installed in" in log
    assert log.count(f"found installed helped green {secret}") == 2, log
    ranks = re.findall(r"^\[node (\d)\] rank (\d) of 2 starts at step 0$", log, re.MULTILINE)
    assert sorted(ranks) in ([("0", "0"), ("1", "1")], [("0", "1"), ("1", "0")]), log
    result = {"steps": 60, "world_size": 2}
    assert json.loads(re.findall(r"result (\{.*\})", log)[-1]).items() >= result.items()
    assert "succeeded" in shown["trainctl show mine"]
    assert " of 2 starts at step 0" in shown["trainctl logs mine --node 1"]
    assert "succeeded, keeps 3 hosts" in shown["trainctl ls"], "a container takes each of them"
    assert "3 hosts released" in shown["trainctl release"]
    (saved,) = (tmp_path / "mine").glob("node-*/work/result.json")
    assert json.loads(saved.read_text()).items() >= result.items()
    # A secret is in no record of the job.
    (job,) = {*re.findall(r"^mine-\w+-\w+$", log, re.MULTILINE)}
    key = runs.job_record("mine", job)
    s3 = account_at(deployment.state()["endpoint"]).client("s3")
    found = s3.get_object(Bucket=deployment.bucket(), Key=key)["Body"].read().decode()
    assert secret not in found
    assert json.loads(found)["attempts"] == 1
