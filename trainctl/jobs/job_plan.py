"""A checked job with its hosts and its price, before it starts; and its start.

Everything that a laptop can find wrong is reported here, before anything starts. After the start
the laptop is not needed: the job is an execution of a state machine, which ends what it started.
"""

import dataclasses
import math
import re
import shlex
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from contract import runs
from contract.cluster_shape import ClusterShape
from contract.instance_types import Prices
from contract.job import (
    DEFAULT_MAX_SECONDS,
    LAUNCH,
    MAX_JOB_ID,
    JobSpec,
    Placement,
    Priority,
)
from contract.nodes import ENV_COMMIT, ENV_WITH_RUN, HEAD, OF_EACH_NODE, WORKER, Range
from contract.text import counted, dollars, duration, listed, utc
from trainctl import output
from trainctl.aws.clients import unless
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import UsageError
from trainctl.aws.jobs import QueuePlace, new_id
from trainctl.jobs import data_sets, programs, published_models, variables
from trainctl.jobs.code_folder import CodeFolder
from trainctl.jobs.job_file import OF_SUBMIT
from trainctl.jobs.job_options import JobOptions, On, check_nodes
from trainctl.jobs.job_request import JobRequest
from trainctl.jobs.node_images import check_images
from trainctl.jobs.pricing import NOT_INCLUDED, an_hour, machines, spent, usd_at_most
from training import recipes, trials
from training.command import Recorded, read_command
from training.plan import Expected
from training.plan import expected as expected_of
from training.settings import RunConfig

#: Among how many running jobs one of the same run is looked for.
RUNNING_LOOKED_AT: Final = 50
#: A deadline that --max-cost may give a job: starting the hosts takes minutes.
_LEAST_S: Final = 900
#: Before its end EC2 begins to terminate the hosts of a capacity block (EC2's guide, "Monitor
#: Capacity Blocks using EventBridge").
_BLOCK_ENDS_S: Final = 1800
#: A step of any recipe is faster, on few hosts and without a GPU too.
_SLOWEST_STEP_S: Final = 120
#: Ratio of a deadline to the computed time of a training.
_MARGIN: Final = 3
#: Jobs whose maximum cost is above this, or unknown, start only if their user types y.
CONFIRM_ABOVE_USD: Final = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """Plan of a job: command, nodes, deadline and price."""

    spec: JobSpec
    """The order, without the address of the code, which is known once it is uploaded."""
    shape: ClusterShape
    """With the workers of its first pool."""
    workers: Range | None
    """Training processes, one per GPU or, without GPUs, per node; None where the head works by
    itself."""
    code: CodeFolder | None = None
    """Folder to upload; None for a recipe."""
    why_on: str = ""
    """Reason for the choice of nodes, in words; empty for recipes."""
    why_deadline: str = ""
    """Reason for a deadline shorter than usual, in words."""
    expected: Expected | None = None
    """Expected training time; None where that cannot be computed."""
    place: QueuePlace | None = None
    """In the queue, if it were submitted now; None: it would start at once."""
    tags: Sequence[str] = ()
    """Tags of the worker image in each pool."""
    warnings: Sequence[str] = ()
    """Probable mistakes in the command of ``--code``."""

    @property
    def prices(self) -> Prices:
        """Prices of its order."""
        assert self.spec.prices is not None
        return self.spec.prices

    @property
    def usd_per_hour(self) -> float | None:
        """US dollars, with all worker nodes, disks and the NAT gateway; None: not known."""
        return self.prices.usd_per_hour(self.spec.nodes.high)

    @property
    def usd_at_most(self) -> float | None:
        """US dollars until its last host is gone; None: not known."""
        spec = self.spec
        return usd_at_most(
            self.prices,
            self.shape,
            num_nodes=spec.nodes.high,
            max_seconds=spec.max_seconds,
            keep_s=spec.keep_s,
        )

    def usd_idle(self, seconds: int) -> float | None:
        """US dollars for all hosts for so long; None: not known."""
        hourly = self.prices.dearest.usd_per_hour(self.spec.nodes.high)
        return None if hourly is None else hourly * seconds / 3600

    @property
    def usd_expected(self) -> float | None:
        """US dollars for the training itself; None: not known, or it does not fit."""
        hourly = self.usd_per_hour
        if self.expected is None or hourly is None or not self.expected.fits:
            return None
        return hourly * self.expected.hours

    @property
    def is_expensive(self) -> bool:
        """True if its maximum cost is high or unknown: Enter must not start it."""
        usd = self.usd_at_most
        return usd is None or usd > CONFIRM_ABOVE_USD

    def text(self) -> str:
        spec, shape = self.spec, self.shape
        per = "GPU" if shape.worker.num_gpus else "node"
        wait = f"{spec.capacity_wait_s / 60:g} min of waiting for hosts included"
        rows = {
            "run": spec.run,
            "command": shlex.join(spec.command),
            "runs on": self.why_on,
            "code": self.code.words if self.code else "",
            "machines": machines(shape, spec.nodes),
            "pool": ", then ".join(spec.pools),
            "processes": f"{self.workers.words}, one per {per}" if self.workers else "",
            "images": shape.image_tag,
            "priority": "" if spec.priority == Priority.NORMAL else spec.priority,
            "queue": self.place.words if self.place else "",
            "notify": spec.notify,
            "deadline": f"at most {duration(spec.max_seconds).removesuffix(' 0 min')}, usually "
            f"sooner ({wait}){self.why_deadline}",
            "price": an_hour(self.prices, spec.nodes.high),
            "after": self._after(),
            "hold": self._hold(),
            "keep": self._keep(),
            "maximum": f"{dollars(self.usd_at_most)}, plus {NOT_INCLUDED}",
            "expected": self._expected() if spec.recipe else "",
        }
        lines = [f"{name:10}{value}" for name, value in rows.items() if value]
        # A command that is wrapped could not be copied.
        return "\n".join(line if line.startswith("command") else _fill(line) for line in lines)

    def _after(self) -> str:
        """Row of ``text``, of a job that waits for another."""
        after = self.spec.after
        if self.spec.with_run:
            return f"{after} has begun; this job ends with it"
        return f"{after} succeeds; if it does not, this job fails" if after else ""

    def _hold(self) -> str:
        """Row of ``text``, of a job whose hosts stay after a failure."""
        if not self.spec.hold_s:
            return ""
        return (
            f"after a failure its hosts stay for up to {duration(self.spec.hold_s)}, which costs "
            f"{dollars(self.usd_idle(self.spec.hold_s))} of the maximum; trainctl stop ends it"
        )

    def _keep(self) -> str:
        """Row of ``text``, of a job whose hosts stay for the next one."""
        if not self.spec.keep_s:
            return ""
        usd = self.usd_idle(self.spec.keep_s)
        return (
            f"after its end its hosts stay for up to {duration(self.spec.keep_s)} for your next "
            f"job, which costs {dollars(usd)} of the maximum; trainctl release ends it"
        )

    def _expected(self) -> str:
        """Row of ``text``; recipes have one."""
        found = self.expected
        if found is None:
            return (
                "not estimated: only recipe fsdp's speed is modeled, on GPUs, for models and data "
                "of known size"
            )
        if not found.fits:
            return "warning: does not fit these GPUs, by the arithmetic of training.plan"
        return (
            f"{duration(round(found.hours * 3600))} of steps, {found.tokens:,.0f} tokens, cost "
            f"{dollars(self.usd_expected)}, and {duration(round(found.passes_hours * 3600))} of "
            f"{found.passes:,} forward passes of evaluations and samples: computed, not "
            "measured, without start-up and checkpoints"
        )

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
            "pools": [*spec.pools],
            "priority": str(spec.priority),
            "notify": spec.notify,
            "max_hours": spec.max_seconds / 3600,
            "wait_minutes": spec.capacity_wait_s / 60,
            "image_tag": shape.image_tag,
            "queue": self.place and self.place.to_json(),
            "usd_per_hour": self.usd_per_hour,
            "usd_at_most": self.usd_at_most,
            "usd_hold": self.usd_idle(spec.hold_s),
            "keep_minutes": spec.keep_s / 60,
            "after": spec.after,
            "with": spec.with_run,
            "usd_expected": self.usd_expected,
            "prices": dataclasses.asdict(self.prices),
            "code": self.code.words if self.code else "",
            "variables": dict(spec.variables),
            "secrets": dict(spec.secrets),
        }


_fill: Final = partial(
    textwrap.fill,
    width=80,
    subsequent_indent=" " * 10,
    break_long_words=False,
    break_on_hyphens=False,
)


def plan_of(deployment: Deployment, request: JobRequest) -> JobPlan:
    """Plan a job that could be started now.

    Raises:
        InputError, UsageError: it does not suit the deployment, or could not be started now.
        CliError: there is no image to run.
    """
    plan = priced(deployment, request)
    warnings = [*plan.warnings, *check(deployment, plan)]
    place = deployment.jobs.queue(deployment.shape.limits, new=plan.spec).get("")
    return dataclasses.replace(plan, place=place, warnings=warnings)


def priced(deployment: Deployment, request: JobRequest) -> JobPlan:
    """Plan a job, of a deployment too that has not been made.

    Raises:
        InputError, UsageError: it does not suit the deployment.
    """
    options, program = request.options, request.program
    shapes, nodes, left_out = _hosts(deployment, request)
    workers = Range(*map(_first(shapes).gpus.num_workers, (nodes.low, nodes.high)))
    what = "code" if options.code else request.words[0]
    if program and program.entries:  # train.py: train-20260115-120000
        what = re.sub(r"\W+", "-", program.entries[0].stem, flags=re.ASCII).strip("-_")[:40] or what
    run = options.run or f"{what}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    if program is None:
        work = _recipe_work(deployment, request, run=run, workers=workers, shapes=shapes)
    else:
        work = _program_work(request, program, nodes=nodes, shapes=shapes)
    shape = _first(work.shapes)

    hosts = {name: each.prices(deployment.region).worker for name, each in work.shapes.items()}
    prices = dataclasses.replace(
        deployment.shape.prices(deployment.region),  # its head is in no pool
        worker=next(iter(hosts.values())),
        pools=hosts if len(hosts) > 1 else {},
    )
    sent, kept = _sent(request, work.on, nodes)
    names = (options.after, options.with_run)
    chain: Any = deployment.jobs.to_follow(*names) if any(names) else {}
    max_seconds, why_deadline = _deadline(options, prices, shape, nodes, work.training_s)
    spec = JobSpec(
        run=run,
        command=tuple(work.command),
        nodes=nodes,
        recipe="" if program or request.tuning else request.words[0],
        on=work.on,
        max_seconds=max_seconds,
        capacity_wait_s=min(round(options.wait_minutes * 60), max_seconds),
        grace_s=options.grace,
        hang_s=round(options.hang_minutes * 60),
        keep_files=tuple(options.keep_files or ()),
        skip_files=tuple(options.skip_files or ()),
        hold_s=round(options.hold * 60),
        keep_s=round(options.keep * 60),
        **chain,
        variables={**sent, **({ENV_WITH_RUN: chain["with_run"]} if options.with_run else {})},
        secrets=request.secrets,
        prices=prices,
        submitter=deployment.user,
        user_id=deployment.user_id,
        pools=(*work.shapes,) if options.names_pools else (),
        priority=options.priority,
        notify=options.notify or "",
    )
    plan = JobPlan(
        spec=spec,
        shape=shape,
        tags=[each.image_tag for each in work.shapes.values()],
        workers=workers,
        code=program.code if program else None,
        why_on=work.why_on,
        why_deadline=why_deadline,
        expected=work.expected,
        warnings=[*work.warnings, *kept, *left_out],
    )
    spec = dataclasses.replace(spec, planned_usd=plan.usd_expected)
    return dataclasses.replace(plan, spec=spec)


#: The deployment in each pool of a job, by name, in the order in which they are tried.
Shapes = Mapping[str, ClusterShape]


def _first(shapes: Shapes) -> ClusterShape:
    return next(iter(shapes.values()))


def _hosts(deployment: Deployment, request: JobRequest) -> tuple[Shapes, Range, list[str]]:
    """Pools of a job and its worker nodes; and why other pools are left out.

    Raises:
        InputError, UsageError: they do not suit the deployment, or each other.
    """
    options, least = request.options, deployment.shape.min_nodes
    is_alone = request.program is not None and request.program.is_alone
    usual = Range(least, least) if is_alone and options.on == On.AUTO else None
    shapes, wanted, left_out = options.ladder(deployment.shape, request.nodes or usual)
    most = min(each.max_workers for each in shapes.values())
    nodes = wanted or Range(most, most)
    for name, each in shapes.items():
        options.check_fit(each)
        check_nodes(each, nodes, pool=name)
    if len({each.gpus for each in shapes.values()}) > 1:
        has = ", ".join(f"{name} has {each.worker.num_gpus}" for name, each in shapes.items())
        raise UsageError(
            f"--pool {options.pool}: the pools of a job must have as many GPUs on each node, by "
            f"which its processes are counted, and {has}"
        )
    return shapes, nodes, left_out


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """Command of a job, where it runs, and the pools that it fits."""

    command: Sequence[str]
    shapes: Shapes
    """The pools that it fits."""
    on: Placement = Placement.HEAD
    why_on: str = ""
    warnings: Sequence[str] = ()
    expected: Expected | None = None
    training_s: int | None = None
    """Seconds in which it has certainly trained; None: not known."""


def _recipe_work(
    deployment: Deployment, request: JobRequest, *, run: str, workers: Range, shapes: Shapes
) -> _Work:
    """
    Raises:
        InputError, UsageError: settings are wrong, or it does not fit the pools that are named.
    """
    options, tuning = request.options, request.tuning
    tried = tuning.trials() if tuning else [{}]
    if tuning:  # each trains on one node
        tuning.runs(run)
        per_node = _first(shapes).worker.num_gpus or 1
        workers = Range(per_node, per_node)
    words, config = _recipe_words(
        request.words,
        trial=trials.options(tried[0]),
        run=run,
        workers=workers,
        deployment=deployment,
        shape=_first(shapes),
        is_new=options.run is None,
    )
    num_bytes = data_sets.text_bytes(config.data, deployment.bucket)
    found = {
        name: expected_of(config, each.worker, num_bytes=num_bytes, efa=each.efa)
        for name, each in shapes.items()
    }
    warnings = []
    lacking = [name for name, each in found.items() if each and not each.fits]
    if lacking and len(shapes) > 1:
        by_plan = f"the training does not fit the GPUs of {', '.join(lacking)}, by training.plan"
        if options.pool or len(lacking) == len(shapes):
            raise UsageError(f"{by_plan}: name others")
        warnings.append(f"left out: {by_plan}")
        found = {name: each for name, each in found.items() if name not in lacking}
    slowest = [_training_s(config, each) for each in found.values()]
    work = _Work(
        command=[
            *("python", "-m", LAUNCH, words[0]),
            *("--run", run, "--workers", f"{workers}"),
            *words[1:],
        ],
        shapes={name: shapes[name] for name in found},
        warnings=warnings,
        expected=next(iter(found.values())),
        training_s=max(filter(None, slowest), default=None),
    )
    if tuning is None:
        return work
    rounds = math.ceil(len(tried) / (request.nodes.high if request.nodes else 1))
    return dataclasses.replace(
        work,
        command=["python", "-m", trials.TUNE, "--run", run, *tuning.words(), *words],
        why_on=f"{counted(len(tried), 'trial')}, each on one node",
        expected=None,
        training_s=work.training_s and work.training_s * rounds,
    )


def _program_work(
    request: JobRequest, program: programs.Program, *, nodes: Range, shapes: Shapes
) -> _Work:
    """
    Raises:
        UsageError: its launcher cannot run on these nodes.
    """
    options, shape = request.options, _first(shapes)
    on, why = placement(options, program, nodes, shape)
    own = [*(each.name for each in dataclasses.fields(options)), *OF_SUBMIT]
    if on == Placement.NODES:
        program.check(nodes)
    known = {*request.variables, *request.secrets}
    warnings = program.foreign(known, has_own_base=bool(shape.base_image))
    warnings += program.code.warnings
    warnings += program.warnings([name.replace("_", "-") for name in own])
    if on == Placement.NODES and program.is_alone:
        name = program.entries[0].name
        if nodes.high > shape.min_nodes:
            warnings.append(
                f"{name} is one process that knows of no others, and each node runs the same; "
                f"give --nodes {shape.min_nodes}, or start it with torchrun"
            )
        else:
            why += f"; {name} is one process, so one node by default"
    return _Work(command=request.words, shapes=shapes, on=on, why_on=why, warnings=warnings)


def _sent(request: JobRequest, on: Placement, nodes: Range) -> tuple[Mapping[str, str], list[str]]:
    """Variables of a job's order, and warnings about those that each node sets."""
    commit = request.program.code.commit if request.program else ""
    found = {ENV_COMMIT: commit, **request.variables} if commit else request.variables
    own = sorted(OF_EACH_NODE & {*found}) if on == Placement.NODES and nodes.high > 1 else []
    if not own:
        return found, []
    warning = f"--env {listed(own)}: left out, because each of several nodes has a value of its own"
    return {name: value for name, value in found.items() if name not in own}, [warning]


def _training_s(config: RunConfig, expected: Expected | None) -> int | None:
    """Seconds in which a recipe has certainly trained; None: not known."""
    if expected:
        return round((expected.hours + expected.passes_hours) * 3600 * _MARGIN)
    steps = config.to_json().get("max_steps")
    return _SLOWEST_STEP_S * steps if isinstance(steps, int) and steps else None


def _deadline(
    options: JobOptions, prices: Prices, shape: ClusterShape, wanted: Range, training_s: int | None
) -> tuple[int, str]:
    """Seconds to the deadline, and why they are fewer than usual, in words.

    Raises:
        UsageError: the job can cost more than ``--max-cost``.
    """
    seconds, limit = options.max_seconds(shape, training_s=training_s), options.max_cost
    is_shorter = options.max_hours is None and training_s and seconds < DEFAULT_MAX_SECONDS
    why = "" if options.max_hours else "; --max-hours sets it"
    if is_shorter:
        why = ", by its number of steps (--max-hours gives more)"
    if limit is None:
        return seconds, why
    hourly = prices.dearest.usd_per_hour(wanted.high)
    keep_s = round(options.keep * 60)
    usd = usd_at_most(prices, shape, num_nodes=wanted.high, max_seconds=seconds, keep_s=keep_s)
    if hourly is None or usd is None:
        raise UsageError(
            f"--max-cost {limit:g} cannot be kept: {prices.why_unknown}; leave it out, and give "
            "--max-hours"
        )
    if usd <= limit:
        return seconds, why
    within = math.floor(seconds - (usd - limit) / hourly * 3600)
    if options.max_hours is not None or within < _LEAST_S:
        can = "fewer --nodes, " if wanted.high > max(1, shape.min_nodes) else ""
        if within >= _LEAST_S:
            can += f"--max-hours {math.floor(within / 36) / 100:.2f}, "  # rounded down
        raise UsageError(
            f"--max-cost is {limit:g}, and this job can cost up to {dollars(usd)} within "
            f"{duration(seconds)}: give {can}{'or ' if can else ''}a higher --max-cost"
        )
    return within, f", to stay within --max-cost {limit:g}"


def placement(
    options: JobOptions, program: programs.Program, nodes: Range, shape: ClusterShape
) -> tuple[Placement, str]:
    """Nodes for the command of ``--code``, and the choice in words."""
    head = "once, on the head"
    each = f"each of the {nodes.words} worker nodes" if nodes.high > 1 else "the worker node"
    if shape.head_trains:
        each = f"the head and {each}" if nodes.high else "the head"
    if options.on == On.HEAD:
        return Placement.HEAD, f"{head}, by --on"
    if options.on == On.NODES:
        return Placement.NODES, f"{each}, by --on"
    if program.of_ray:
        return Placement.HEAD, f"{head}, because {program.of_ray} uses Ray (--on nodes: on {each})"
    return Placement.NODES, f"{each} (--on head: {head})"


def check(deployment: Deployment, plan: JobPlan) -> list[str]:
    """Fail if the job could not be started now; called before its user is asked. Returns warnings.

    Raises:
        InputError: ECS would not accept its order.
        UsageError: its run is being trained, a secret is missing, the standing cluster has the
            hosts, or the month's budget is spent.
        CliError: there is no image to run.
    """
    check_images(deployment, plan.tags)
    for pool in plan.spec.ladder if plan.spec.nodes.high else ():
        _check_reservation(deployment, plan.spec, pool)
    wanted = {*plan.spec.secrets.values(), plan.spec.webhook} - {""}
    variables.check_secrets(sorted(wanted), deployment.account)
    spec, longest = plan.spec, "x" * MAX_JOB_ID
    if plan.code:
        address = f"{deployment.bucket.uri}/{runs.job_code(spec.run, longest)}"
        spec = dataclasses.replace(spec, code=address, code_sha256="0" * 64)
    spec.check_size(longest)
    _check_not_running(deployment, spec)
    _check_standing_cluster(deployment, spec)
    return [*_check_budget(deployment, plan), *_check_room_together(deployment, spec)]


def _check_budget(deployment: Deployment, plan: JobPlan) -> list[str]:
    """Warn of what may exceed the month's budget; fail if no more is left and that refuses jobs."""
    shape, most = deployment.shape, plan.usd_at_most
    budget = shape.monthly_budget_usd
    if not budget:
        return []
    used, left = spent(deployment)
    said = f"this month's jobs have cost {dollars(used)} of a budget of {dollars(budget)}"
    said += f", jobs that run, wait or keep hosts can cost {dollars(left)} more" if left else ""
    if used + left >= budget and shape.budget_refuses:
        until = "they end" if used < budget else "next month (UTC)"
        raise UsageError(
            f"{said}: wait until {until}, or have monthly_budget_usd raised in cdk.json "
            "and deployed. trainctl cost --by user shows who has spent it"
        )
    exceeds = most is None or used + left + most > budget
    return [f"{said}, and this job can cost {dollars(most)}"] if exceeds else []


def _check_room_together(deployment: Deployment, spec: JobSpec) -> list[str]:
    """Warn of a job that can start only while another runs, and has no room beside it."""
    other = deployment.jobs.find(spec.after).spec if spec.with_run else None
    if other is None or deployment.shape.limits.place(spec, [other]):
        return []
    return [
        f"--with {spec.with_run}: the deployment has no room for this job beside {spec.after}, and "
        "it fails when that one ends: give fewer --nodes, or raise max_heads and max_workers in "
        "cdk.json, and deploy"
    ]


def _check_reservation(deployment: Deployment, spec: JobSpec, pool: str) -> None:
    """Fail if the capacity block of a pool ends before the job may; who may not look at it, may
    start one."""
    name = deployment.shape.in_pool(pool).capacity_reservation_id
    with unless("UnauthorizedOperation"):
        found = deployment.account.reservation(name) if name else None
        if not found or found["ReservationType"] != "capacity-block":
            return  # hosts of another one run on when it ends
        left = found["EndDate"].timestamp() - _BLOCK_ENDS_S - time.time()
        if left < spec.max_seconds:
            raise UsageError(
                f"the capacity block {name} ends at {utc(found['EndDate'])}, its hosts half an "
                f"hour before, and this job may take {duration(spec.max_seconds)}: give "
                f"--max-hours {max(0, math.floor(left / 36) / 100):.2f} or less"
            )


def _check_standing_cluster(deployment: Deployment, spec: JobSpec) -> None:
    """Fail if the standing cluster, which is not in the queue, has the hosts that a job needs."""
    services = deployment.cluster.services()
    workers = services[WORKER].wanted
    standing = dataclasses.replace(spec, nodes=Range(workers, workers), pools=())
    if services[HEAD].wanted and not deployment.shape.limits.place(spec, [standing]):
        raise UsageError(
            "the standing cluster is up, and the deployment has no room for this job beside it: "
            "trainctl cluster down ends it; or raise max_heads and max_workers in cdk.json, and "
            "deploy"
        )


def _check_not_running(deployment: Deployment, spec: JobSpec) -> None:
    run = spec.run
    if spec.recipe and "--take-over" in spec.command:
        return
    for other in deployment.jobs.newest(limit=RUNNING_LOOKED_AT, running=True):
        if other.run == run:
            raise UsageError(
                f"run {run!r} is being trained already, by job {other.id}: two would overwrite "
                f"each other's checkpoints. trainctl stop {other.id} ends it"
                f"{'; or choose another --run' if spec.nodes.high else ''}"
            )


def _recipe_words(
    words: Sequence[str],
    *,
    trial: Sequence[str],
    run: str,
    workers: Range,
    deployment: Deployment,
    shape: ClusterShape,
    is_new: bool,
) -> tuple[list[str], RunConfig]:
    """The words of a recipe, with the addresses of its data, and its settings.

    Args:
        trial: more words, of the first trial.
        is_new: nothing can be recorded under this name.
    """
    bucket, recipe = deployment.bucket, recipes.by_name(words[0])
    paths = bucket.run(run)
    recorded = None
    if not is_new:
        recorded = Recorded.of(
            *(bucket.read_of_run(run, name) for name in (runs.CONFIG_FILE, runs.RESULT_FILE))
        )
    storage = paths.uri.rpartition("/")[0]
    words = data_sets.resolve(words, recipe, bucket)
    config = read_command(
        [*words, *trial],
        run=run,
        workers=workers,
        gpus=shape.gpus,
        storage=storage,
        recorded=recorded,
    )
    data_sets.check_places(config, bucket, has_shared=shape.shared is not None)
    data_sets.check_contents(config, recipe, bucket)
    published_models.check_model(str(config.to_json().get("model", "")))
    return words, config


def ask(plan: JobPlan, *, yes: bool) -> None:
    """Show a plan, and end the command unless its user wants it."""
    output.say("\n".join([plan.text(), *(f"warning: {each}" for each in plan.warnings)]))
    output.confirm("Start it?", yes=yes, default=not plan.is_expensive)


def start(deployment: Deployment, plan: JobPlan) -> str:
    """Upload the code and start the job, which ``check`` has passed; return its id.

    Raises:
        UsageError: its run has begun to be trained since.
    """
    run, spec = plan.spec.run, plan.spec
    _check_not_running(deployment, spec)  # again: the question may have waited for long
    job = new_id(run)
    if spec.notify and not spec.webhook and not deployment.subscribe(spec.notify):
        output.say(
            f"{spec.notify} gets no mail until the link in AWS's confirmation mail is followed"
        )
    if plan.code:
        with tempfile.TemporaryDirectory(prefix="trainctl-") as folder:
            archive = Path(folder) / "code.zip"
            sha256 = plan.code.pack(archive)
            address = deployment.bucket.upload(archive, runs.job_code(run, job))
        spec = dataclasses.replace(spec, code=address, code_sha256=sha256)
    deployment.jobs.start(job, spec)
    return job
