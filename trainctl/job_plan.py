"""A job before it starts: what was given, checked, with its hosts and its price; and its start.

Everything that a laptop can find wrong is reported here, before anything starts. After the start
the laptop is not needed: the job is an execution of a state machine, which ends what it started.
"""

import dataclasses
import re
import secrets as random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Final

from contract import runs
from contract.job import MAX_JOB_ID, JobSpec, Placement
from contract.nodes import Gpus
from contract.ranges import Range
from trainctl import code_folder, data_sets, published_models, variables
from trainctl.aws.deployment import Deployment
from trainctl.aws.files import Bucket
from trainctl.aws.shape import Shape
from trainctl.errors import UsageError
from trainctl.job_options import JobOptions, On
from trainctl.options import refuse_workers
from trainctl.pricing import Price, dollars
from training import recipes
from training.recipes.command import Recorded, read_command

#: Among how many running jobs one of the same run is looked for.
_RUNNING_LOOKED_AT: Final = 50
_CONSONANTS: Final = "bdfghjklmnprstvz"
_VOWELS: Final = "aiou"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """What a job would run, where, for how long and for how much."""

    spec: JobSpec
    """The order, without the address of the code, which is known once it is uploaded."""
    shape: Shape
    workers: Range | None
    """Training processes, one per GPU or, without GPUs, per node; None where the head works by
    itself."""
    code: str = ""
    """What would be uploaded, in words."""
    why_on: str = ""
    """Why the command runs where it does, in words; empty for recipes."""

    @property
    def usd_per_hour(self) -> float | None:
        """With all worker nodes, at list prices of us-east-1."""
        return Price.of(self.shape).per_hour(self.spec.nodes.high)

    @property
    def usd_at_most(self) -> float | None:
        """Until the deadline."""
        hourly = self.usd_per_hour
        return None if hourly is None else hourly * self.spec.max_seconds / 3600

    def text(self) -> str:
        spec, shape = self.spec, self.shape
        low, high = spec.nodes.low, spec.nodes.high
        count = f"{low}" if low == high else f"{low} to {high}"
        head = f"{shape.head.name}{', trains too' if shape.head_trains else ''}"
        hosts = f"head on {head}; {count} x {shape.worker.name}{' (spot)' if shape.spot else ''}"
        less = "; spot instances usually cost less" if shape.spot else ""
        per = "GPU" if shape.worker.num_gpus else "node"
        rows = {
            "run": spec.run,
            "command": " ".join(spec.command),
            "runs on": self.why_on,
            "code": self.code,
            "hosts": hosts,
            "workers": f"{self.workers}, one per {per}" if self.workers else "",
            "images": shape.image_tag,
            "deadline": f"{spec.max_seconds / 3600:g} h after submission; waits up to "
            f"{spec.capacity_wait_s / 60:g} min for hosts",
            "price": f"{dollars(self.usd_per_hour)} an hour, NAT gateway included{less}",
            "at most": dollars(self.usd_at_most),
        }
        return "\n".join(f"{name:10}{value}" for name, value in rows.items() if value)

    def values(self) -> dict[str, object]:
        """For ``--json``."""
        spec, shape = self.spec, self.shape
        return {
            "run": spec.run,
            "command": [*spec.command],
            "on": str(spec.on),
            "head": shape.head.name,
            "head_trains": shape.head_trains,
            "worker": shape.worker.name,
            "nodes": dataclasses.asdict(spec.nodes),
            "workers": dataclasses.asdict(self.workers) if self.workers else None,
            "spot": shape.spot,
            "max_hours": spec.max_seconds / 3600,
            "wait_minutes": spec.capacity_wait_s / 60,
            "image_tag": shape.image_tag,
            "usd_per_hour": self.usd_per_hour,
            "usd_at_most": self.usd_at_most,
            "code": self.code,
            "variables": dict(spec.variables),
            "secrets": dict(spec.secrets),
        }


def plan_of(deployment: Deployment, given: JobOptions) -> JobPlan:
    """Check everything that was given.

    Raises:
        InputError, UsageError: it is wrong, ``training.launch`` would refuse it, or the job could
            not be started now.
    """
    shape, words = deployment.shape, given.words or []
    given.check(shape)
    nodes = given.num_nodes(shape)
    workers = Range(shape.num_workers(nodes.low), shape.num_workers(nodes.high))
    what = words[0] if words and given.code is None else "code"
    run = (
        f"{what}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        if given.run is None
        else given.run
    )
    if given.code is None:
        # The recipe is checked before the name that begins with it: its error is the better one.
        command = _recipe_command(
            words,
            run=run,
            workers=workers,
            gpus=shape.gpus,
            bucket=deployment.bucket,
            is_new=given.run is None,
        )
        code, on, why = "", Placement.HEAD, ""
        if given.on == On.NODES:
            raise UsageError(
                "--on nodes is for the command of --code: a recipe runs on the head, and Ray "
                "brings its workers to all nodes; leave --on out"
            )
    else:
        runs.check_run_name(run)
        command = [*words]
        if not command:
            raise UsageError("give the command after -- : trainctl submit --code DIR -- python ...")
        code = code_folder.look_at(given.code)
        on, why = placement(given, command)
        if on == Placement.NODES and nodes.high > 1:
            _refuse_standalone(command)
    from_here = variables.variables(given.env or [])
    from_secrets = variables.secrets(given.secret or [], deployment.account)
    if both := from_here.keys() & from_secrets.keys():
        raise UsageError(f"{', '.join(sorted(both))}: both --env and --secret give it")
    max_seconds = round(given.max_hours * 3600)
    spec = JobSpec(
        run=run,
        command=tuple(command),
        nodes=nodes,
        on=on,
        max_seconds=max_seconds,
        capacity_wait_s=min(round(given.wait_minutes * 60), max_seconds),
        variables=from_here,
        secrets=from_secrets,
    )
    plan = JobPlan(spec=spec, shape=shape, workers=workers, code=code, why_on=why)
    check(deployment, plan)
    return plan


def placement(given: JobOptions, command: Sequence[str]) -> tuple[Placement, str]:
    """Where the command of ``--code`` runs, and why, in words."""
    assert given.code is not None
    if given.on == On.HEAD:
        return Placement.HEAD, "the head, as --on says"
    if given.on == On.NODES:
        return Placement.NODES, "every node, as --on says"
    of_ray = any(word == "ray" or word.startswith("ray.") for word in command[:3])
    file = "its command" if of_ray else code_folder.importer_of_ray(given.code)
    if file:
        return Placement.HEAD, f"the head, because {file} uses Ray (--on nodes: every node)"
    return Placement.NODES, "every node, because no file imports ray (--on head: the head only)"


def _refuse_standalone(command: Sequence[str]) -> None:
    """
    Raises:
        UsageError: torchrun would wait on each node for others that do not come.
    """
    if any(part == "--standalone" for word in command for part in word.split()):
        raise UsageError(
            "--standalone keeps torchrun from finding the other nodes: leave it out, and "
            "--nproc-per-node too, which is set to the GPUs of a node; or give --nodes 1"
        )


def check(deployment: Deployment, plan: JobPlan) -> None:
    """Fail if the job could not be started now; called before its user is asked.

    Raises:
        InputError: ECS would not accept its order.
        UsageError: its run is being trained.
    """
    spec, longest = plan.spec, "x" * MAX_JOB_ID
    if plan.code:
        address = _code_address(deployment, spec.run, longest)
        spec = dataclasses.replace(spec, code=address, code_sha256="0" * 64)
    spec.check_size(longest)
    _check_not_running(deployment, spec.run)


def _check_not_running(deployment: Deployment, run: str) -> None:
    for other in deployment.jobs.newest(limit=_RUNNING_LOOKED_AT, running=True):
        if other.run == run:
            raise UsageError(
                f"run {run!r} is being trained already, by job {other.id}: two would overwrite "
                f"each other's checkpoints. trainctl stop {other.id} ends it; or choose another "
                "--run"
            )


def _code_address(deployment: Deployment, run: str, job: str) -> str:
    return f"{deployment.bucket.uri}/{runs.job_code(run, job)}"


def _recipe_command(
    words: Sequence[str], *, run: str, workers: Range, gpus: Gpus, bucket: Bucket, is_new: bool
) -> list[str]:
    """The command that trains a recipe. ``is_new``: nothing can be recorded under this name."""
    if not words:
        raise UsageError(
            f"give a recipe ({', '.join(recipes.NAMES)}), or --code DIR -- and a command"
        )
    recipe = recipes.by_name(words[0])
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name == "--workers":  # after --, where it is no option of trainctl
            refuse_workers((value if equals else after) or "N")
    paths = bucket.run(run)
    recorded = None
    if not is_new:
        files = (paths.file(name) for name in (runs.CONFIG_FILE, runs.RESULT_FILE))
        recorded = Recorded.of(*(bucket.read(bucket.key(file)) for file in files))
    storage = paths.uri.rpartition("/")[0]
    words = data_sets.resolve(words, recipe, bucket)
    config = read_command(
        words, run=run, workers=workers, gpus=gpus, storage=storage, recorded=recorded
    )
    published_models.check_model(str(config.to_json().get("model", "")))
    launch = ["python", "-m", "training.launch", recipe.name, "--run", run]
    return [*launch, "--workers", str(workers), *words[1:]]


def head_only(shape: Shape, *, run: str, command: Sequence[str]) -> JobPlan:
    """A job of a head by itself, for commands that work on a run's files and train nothing."""
    spec = JobSpec(
        run=run, command=tuple(command), nodes=Range(0, 0), max_seconds=round(2.0 * 3600)
    )
    return JobPlan(spec=spec, shape=shape, workers=None)


def start(deployment: Deployment, plan: JobPlan, code: Path | None = None) -> str:
    """Upload the code and start the job, which ``check`` has passed; return its id.

    Raises:
        UsageError: its run has begun to be trained since.
    """
    run = plan.spec.run
    _check_not_running(deployment, run)  # again: the question may have waited for long
    job, spec = new_id(run), plan.spec
    if code is not None:
        with tempfile.TemporaryDirectory(prefix="trainctl-") as folder:
            archive = Path(folder) / "code.zip"
            sha256 = code_folder.pack(code, archive)
            deployment.bucket.upload(archive, runs.job_code(run, job))
        address = _code_address(deployment, run, job)
        spec = dataclasses.replace(spec, code=address, code_sha256=sha256)
    deployment.jobs.start(job, spec)
    return job


def new_id(run: str) -> str:
    """An id for a job that can be read out, such as ``first-lusab-gutih``: 32 random bits after the
    run's name, short enough for ECS's ``startedBy``."""
    words = "-".join(_syllables(random.randbits(16)) for _ in range(2))
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", run)[: MAX_JOB_ID - len(words) - 1].rstrip("-_")
    return f"{stem}-{words}"


def _syllables(number: int) -> str:
    """16 bits as five letters, consonants and vowels in turn (proquints, arXiv:0901.4016)."""
    letters = ""
    for shift, alphabet in ((12, _CONSONANTS), (10, _VOWELS), (6, _CONSONANTS), (4, _VOWELS)):
        letters += alphabet[number >> shift & len(alphabet) - 1]
    return letters + _CONSONANTS[number & 15]
