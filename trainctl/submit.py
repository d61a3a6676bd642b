"""``trainctl submit`` and ``trainctl plan``: a job that brings its own cluster.

What is wrong is said here, before anything starts. After that the laptop is not needed: the job is
an execution of a state machine, which ends what it started.
"""

import dataclasses
import difflib
import json
import os
import re
import secrets
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from contract import jobs, nodes, runs
from contract.jobs import worker_range
from contract.runs import check_run_name
from trainctl import follow, show
from trainctl.aws import Deployment, Shape
from trainctl.errors import UsageError
from trainctl.options import AsJson, Profile, Region, Yes
from trainctl.pricing import Price, dollars
from trainctl.settings import unknown_recipe
from training.recipes import config

DEFAULT_HOURS: Final = 24.0
MOST_HOURS: Final = 14 * 24.0
#: Of a code folder: more is data, and belongs into the bucket.
CODE_MIB: Final = 100
_SKIPPED: Final = {".git", ".venv", "venv", "node_modules", "__pycache__", ".ipynb_checkpoints"}
#: Options of ``training.launch`` that are no settings of a recipe and may be given here.
_LAUNCH_OPTIONS: Final = ("--data", "--preset", "--overwrite", "--max-failures", "--verbose")
#: What is the system's own; a job of somebody else's making would not be one that it understands.
_RESERVED: Final = ("TRAIN_", "RAY_", "AWS_", "ECS_")

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE [SETTINGS]",
        help=f"One of {', '.join(config.CONFIGS)}, and its settings, such as --epochs 3 (trainctl "
        "settings lists them). With --code: the command, after -- .",
        show_default=False,
    ),
]
Run = Annotated[
    str | None,
    typer.Option("--run", help="Name of the run; the same again resumes it.", show_default=False),
]
Workers = Annotated[
    str | None,
    typer.Option(
        "--workers",
        "-w",
        metavar="N|MIN:MAX",
        help="Worker nodes, each with all of its GPUs; or a range: as many as can be had.",
        show_default="as many as were deployed",
    ),
]
MaxHours = Annotated[
    float, typer.Option("--max-hours", help="The job is ended after this long, waiting included.")
]
Wait = Annotated[
    float,
    typer.Option(
        "--wait-minutes", help="How long to wait for the hosts; then it ends as no capacity."
    ),
]
Spot = Annotated[
    bool | None,
    typer.Option(
        "--spot/--on-demand",
        help="Insist on what the deployment's hosts are.",
        show_default="what was deployed",
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="NAME[=VALUE]", help="A variable for the code."),
]
Secret = Annotated[
    list[str] | None,
    typer.Option(
        "--secret",
        metavar="NAME=SECRET",
        help=f"A variable from Secrets Manager; names begin with {jobs.SECRETS_PREFIX}.",
    ),
]
Code = Annotated[
    Path | None,
    typer.Option(
        "--code",
        metavar="DIR",
        help="Your own code instead of a recipe; requirements.txt in it is installed.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a job would run, where, for how long and for how much."""

    run: str
    command: list[str]
    head: str
    head_trains: bool
    worker: str
    min_workers: int
    max_workers: int
    processes: str
    spot: bool
    max_hours: float
    wait_minutes: float
    image_tag: str
    usd_per_hour: float | None
    """With all workers, at list prices of us-east-1."""
    usd_at_most: float | None
    code: str
    variables: dict[str, str]
    secrets: dict[str, str]

    def text(self) -> str:
        workers = (
            f"{self.min_workers}"
            if self.min_workers == self.max_workers
            else (f"{self.min_workers} to {self.max_workers}")
        )
        head = f"{self.head}{', trains too' if self.head_trains else ''}"
        hosts = f"head on {head}; {workers} x {self.worker}{' (spot)' if self.spot else ''}"
        less = "; spot hosts usually cost less" if self.spot else ""
        rows = {
            "run": self.run,
            "command": " ".join(self.command),
            "code": self.code,
            "hosts": hosts,
            "processes": self.processes,
            "images": self.image_tag,
            "deadline": f"{self.max_hours:g} h after submission; waits up to "
            f"{self.wait_minutes:g} min for hosts",
            "price": f"{dollars(self.usd_per_hour)} an hour, NAT gateway included{less}",
            "at most": dollars(self.usd_at_most),
        }
        return "\n".join(f"{name:10}{value}" for name, value in rows.items() if value)

    def spec(self, code: str) -> dict[str, Any]:
        """Input of the state machine; ``code`` is the archive's address, or empty."""
        environment = {
            nodes.ENV_PASSED: json.dumps(self.variables) if self.variables else "",
            nodes.ENV_SECRETS: json.dumps(self.secrets) if self.secrets else "",
            nodes.ENV_CODE: code,
        }
        return {
            "run": self.run,
            "command": self.command,
            "max_seconds": round(self.max_hours * 3600),
            "capacity_wait_s": round(self.wait_minutes * 60),
            "idle_s": 60,
            "min_workers": self.min_workers,
            "max_workers": self.max_workers,
            "attempts": 3,
            "environment": {name: value for name, value in environment.items() if value},
        }


def submit(
    *,
    words: Words = None,
    run: Run = None,
    workers: Workers = None,
    max_hours: MaxHours = DEFAULT_HOURS,
    wait_minutes: Wait = 30,
    spot: Spot = None,
    env: Env = None,
    secret: Secret = None,
    code: Code = None,
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="Show its log; Ctrl-C leaves it running.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Start a job: a head, its workers, and their end.

    Says first what it costs. It goes on when this command ends. The exit code with --follow is the
    job's.

    Examples: trainctl submit ddp --workers 2 --epochs 10 --data s3://BUCKET/data;
    trainctl submit --code . --workers 1:4 -- python my_script.py --lr 0.1
    """
    deployment = Deployment.find(profile=profile, region=region)
    plan_ = plan_of(
        deployment,
        words or [],
        run=run,
        workers=workers,
        max_hours=max_hours,
        wait_minutes=wait_minutes,
        spot=spot,
        env=env or [],
        secret=secret or [],
        code=code,
    )
    show.say(plan_.text())
    show.confirm("Start it?", yes=yes)
    job = start(deployment, plan_, code)
    if as_json:
        show.print_json({"job": job, "run": plan_.run})
    else:
        show.print_text(job)
    if following:
        raise typer.Exit(follow.follow(deployment, job))
    show.say(
        f"Started.\n  its log      trainctl logs {job} --follow\n"
        f"  until it ends  trainctl wait {job}\n  end it       trainctl stop {job}"
    )


def plan(
    *,
    words: Words = None,
    run: Run = None,
    workers: Workers = None,
    max_hours: MaxHours = DEFAULT_HOURS,
    wait_minutes: Wait = 30,
    spot: Spot = None,
    env: Env = None,
    secret: Secret = None,
    code: Code = None,
    as_json: AsJson = False,
    profile: Profile = None,
    region: Region = None,
) -> None:
    """Say what a job would run, where, and the most that it can cost; start nothing."""
    deployment = Deployment.find(profile=profile, region=region)
    found = plan_of(
        deployment,
        words or [],
        run=run,
        workers=workers,
        max_hours=max_hours,
        wait_minutes=wait_minutes,
        spot=spot,
        env=env or [],
        secret=secret or [],
        code=code,
    )
    if as_json:
        show.print_json(asdict(found))
    else:
        show.print_text(found.text())


def start(deployment: Deployment, plan_: Plan, code: Path | None = None) -> str:
    """Upload the code and start the job; return its id."""
    for other in deployment.jobs(limit=50, running=True):
        if other.run == plan_.run:
            raise UsageError(
                f"run {plan_.run!r} is being trained already, by job {other.id}: two would "
                f"overwrite each other's checkpoints. trainctl stop {other.id} ends it; or choose "
                "another --run"
            )
    job = new_id(plan_.run)
    address = ""
    if code is not None:
        with tempfile.TemporaryDirectory(prefix="trainctl-") as folder:
            archive = Path(folder) / "code.zip"
            pack(code, archive)
            address = deployment.upload(archive, runs.job_code(plan_.run, job))
    spec = plan_.spec(address)
    size = len(json.dumps([spec["command"], spec["environment"]])) + 1200
    if size > jobs.OVERRIDES_MOST:
        raise UsageError(
            f"command and variables take {size} characters, ECS takes {jobs.OVERRIDES_MOST}: "
            "put what is long into a file of the code, or into the bucket"
        )
    deployment.start_job(job, spec)
    return job


def plan_of(
    deployment: Deployment,
    words: Sequence[str],
    *,
    run: str | None,
    workers: str | None,
    max_hours: float,
    wait_minutes: float,
    spot: bool | None,
    env: Sequence[str],
    secret: Sequence[str],
    code: Path | None,
) -> Plan:
    """Look at everything that was given. Raises UsageError or InputError where it cannot be."""
    shape = deployment.shape
    if not 0 < max_hours <= MOST_HOURS:
        raise UsageError(
            f"--max-hours is {max_hours:g}: it must be above 0 and at most {MOST_HOURS:g}; it is "
            "what limits the bill"
        )
    if wait_minutes <= 0:
        raise UsageError(f"--wait-minutes is {wait_minutes:g}: it must be above 0")
    if spot is not None and spot != shape.spot:
        is_, wanted = ("spot", "on-demand") if shape.spot else ("on-demand", "spot")
        raise UsageError(
            f"this deployment starts {is_} hosts; for {wanted} ones, deploy again: make deploy "
            f'ARGS="-c preset={shape.preset} -c spot={str(spot).lower()} ..."'
        )
    least, most = _workers(deployment, workers)
    recipe = words[0] if words and code is None else "code"
    name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}" if run is None else run
    check_run_name(name)
    per_host = max(1, shape.worker.num_gpus)
    on_head = max(1, shape.head.num_gpus) if shape.head_trains else 0
    processes = [count * per_host + on_head for count in (least, most)]
    given = f"{processes[0]}" if least == most else f"{processes[0]}:{processes[1]}"
    if code is not None:
        command = [*words]
        if not command:
            raise UsageError("give the command after -- : trainctl submit --code DIR -- python ...")
        described = _look_at_code(code)
    else:
        command = _recipe_command(words, run=name, processes=given)
        described = ""
    variables = dict(_variable(each) for each in env)
    from_secrets = dict(_secret(deployment, each) for each in secret)
    if both := variables.keys() & from_secrets.keys():
        raise UsageError(f"{', '.join(sorted(both))}: both --env and --secret give it")
    return _plan(
        shape,
        run=name,
        command=command,
        min_workers=least,
        max_workers=most,
        processes=given,
        max_hours=max_hours,
        wait_minutes=min(wait_minutes, max_hours * 60),
        code=described,
        variables=variables,
        secrets=from_secrets,
    )


def head_only(deployment: Deployment, *, run: str, command: list[str]) -> Plan:
    """A job for the head alone: what works on a run's files, and trains nothing."""
    return _plan(
        deployment.shape,
        run=check_run_name(run),
        command=command,
        min_workers=0,
        max_workers=0,
        processes="1",
        max_hours=2.0,
        wait_minutes=30.0,
        code="",
        variables={},
        secrets={},
    )


def _plan(shape: Shape, *, max_workers: int, max_hours: float, **own: Any) -> Plan:
    """A plan, with what follows from the deployment."""
    price = Price.of(shape).per_hour(max_workers)
    return Plan(
        **own,
        max_workers=max_workers,
        max_hours=max_hours,
        head=shape.head.name,
        head_trains=shape.head_trains,
        worker=shape.worker.name,
        spot=shape.spot,
        image_tag=shape.image_tag,
        usd_per_hour=price,
        usd_at_most=None if price is None else price * max_hours,
    )


def new_id(run: str) -> str:
    """An id for a job: when it was submitted, short enough for ECS's ``startedBy``."""
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", run)[:18]
    job = f"{stem}-{time.strftime('%y%m%d%H%M', time.gmtime())}-{secrets.token_hex(2)}"
    assert len(job) <= jobs.STARTED_BY_MOST
    return job


def _workers(deployment: Deployment, given: str | None) -> tuple[int, int]:
    shape = deployment.shape
    least, most = worker_range(given or str(shape.max_workers))
    floor = 0 if shape.head_trains else 1
    if not floor <= least <= most <= shape.max_workers:
        raise UsageError(
            f"--workers is {given}: this deployment takes {floor} to {shape.max_workers}. More "
            f'need another deploy: make deploy ARGS="-c max_workers={max(most, 1)} ..."'
        )
    return least, most


# --- a recipe -------------------------------------------------------------------------------------
def _recipe_command(words: Sequence[str], *, run: str, processes: str) -> list[str]:
    if not words:
        raise UsageError(
            f"give a recipe ({', '.join(config.CONFIGS)}), or --code DIR -- and a command"
        )
    recipe, *rest = words
    if recipe not in config.CONFIGS:
        raise unknown_recipe(recipe)
    _check_settings(recipe, rest)
    launch = ["python", "-m", "training.launch", recipe, "--run", run, "--workers", processes]
    return [*launch, *rest]


def _check_settings(recipe: str, words: Sequence[str]) -> None:
    """Refuse here what the node would refuse ten minutes later."""
    fields = {
        "--" + field.name.replace("_", "-"): field
        for field in dataclasses.fields(config.CONFIGS[recipe])
        if field.metadata["cli"]
    }
    switches = [f"--no-{name[2:]}" for name, field in fields.items() if field.type == "bool"]
    known = [*fields, *switches, *_LAUNCH_OPTIONS]
    waiting = [*words]
    while waiting:
        name, equals, value = waiting.pop(0).partition("=")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"trainctl settings {recipe}"
            raise UsageError(f"{recipe} has no option {name}: {hint}")
        field = fields.get(name)
        if (
            name in switches
            or (field and field.type == "bool")
            or name
            in (
                "--overwrite",
                "--verbose",
            )
        ):
            continue
        if not equals:
            if not waiting:
                raise UsageError(f"{name} needs a value")
            value = waiting.pop(0)
        if field is None:
            if name == "--preset" and value not in config.PRESETS[recipe]:
                raise UsageError(
                    f"{recipe} has no preset {value!r}: choose {', '.join(config.PRESETS[recipe])}"
                )
            continue
        kinds: dict[str, Any] = {"int": int, "float": float}
        try:
            kinds.get(str(field.type), str)(value)
        except ValueError:
            raise UsageError(f"{name} is {value!r}: it must be a number") from None


# --- variables and secrets ------------------------------------------------------------------------
def _variable(given: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    _check_name("--env", given, name)
    if not equals:
        if name not in os.environ:
            raise UsageError(f"--env {name}: there is no such variable here; give {name}=VALUE")
        value = os.environ[name]
    return name, value


def _secret(deployment: Deployment, given: str) -> tuple[str, str]:
    name, equals, secret = given.partition("=")
    _check_name("--secret", given, name)
    if not equals or not secret.startswith(jobs.SECRETS_PREFIX):
        raise UsageError(
            f"--secret is {given!r}: it must be NAME={jobs.SECRETS_PREFIX}SECRET; jobs may "
            "read no other secrets"
        )
    if not deployment.has_secret(secret):
        raise UsageError(
            f"there is no secret {secret!r}: aws secretsmanager create-secret --name {secret} "
            "--secret-string file://FILE"
        )
    return name, secret


def _check_name(option: str, given: str, name: str) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"{option} is {given!r}: it must be NAME=VALUE")
    if name.startswith(_RESERVED):
        raise UsageError(f"{option} {name}: names with {name.split('_')[0]}_ are the system's own")


# --- code -----------------------------------------------------------------------------------------
def files_of(folder: Path) -> list[Path]:
    """Files of a code folder that go along: in a work tree of git, what git does not ignore."""
    listed = subprocess.run(
        ["git", "-C", str(folder), "ls-files", "-z", "-co", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        names = {name for name in listed.stdout.decode().split("\0") if name}
        found = [folder / name for name in names]
    else:
        found = [*folder.rglob("*")]
    return sorted(
        path
        for path in found
        if path.is_file() and not _SKIPPED & {*path.relative_to(folder).parts}
    )


def _look_at_code(folder: Path) -> str:
    if not folder.is_dir():
        raise UsageError(f"--code {folder}: there is no such folder")
    files = files_of(folder)
    if not files:
        raise UsageError(f"--code {folder}: there is no file in it")
    size = sum(path.stat().st_size for path in files) / 2**20
    if size > CODE_MIB:
        largest = max(files, key=lambda path: path.stat().st_size)
        raise UsageError(
            f"--code {folder}: {size:.0f} MiB, and at most {CODE_MIB} are uploaded; the largest is "
            f"{largest.relative_to(folder)}. Put data into the bucket (aws s3 cp), or let git "
            "ignore it"
        )
    return f"{len(files)} files of {folder}, {max(size, 0.1):.1f} MiB"


def pack(folder: Path, archive: Path) -> None:
    """Write the files of a code folder into an archive."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as file:
        for path in files_of(folder):
            file.write(path, path.relative_to(folder))
