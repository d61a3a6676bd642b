"""Options that ``submit`` and ``plan`` share."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, product
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Final

import typer

from contract.cluster_shape import MARKETS, MOST_WORKERS, ClusterShape
from contract.instance_types import InstanceType
from contract.job import (
    DEFAULT_CAPACITY_WAIT_S,
    DEFAULT_HANG_S,
    DEFAULT_MAX_SECONDS,
    MAX_HOLD_S,
    MAX_KEEP_S,
    MAX_SECONDS,
    NOTIFY_SECRETS,
    SECRETS_PREFIX,
    Priority,
)
from contract.nodes import DEFAULT_POOL, Range
from contract.text import counted, did_you_mean
from contract.times import COUNTS_AS_HIGH_S, DEFAULT_GRACE_S, MAX_GRACE_S
from trainctl.aws.errors import UsageError
from training import recipes

MAX_HOURS: Final = MAX_SECONDS / 3600
#: Part of a deadline: hosts and images start, data comes, evaluations and checkpoints are made.
START_S: Final = 3600
#: Number of worker nodes that the GPUs of a job do not decide.
_ANY: Final = -1
#: A value of ``--gpus``.
_GPUS: Final = re.compile(r"[a-z][a-z0-9-]*(:[1-9][0-9]{0,3})?")
#: The deployment in each pool of a job, its worker nodes, and why pools are left out.
Ladder = tuple[dict[str, ClusterShape], Range | None, list[str]]


class On(StrEnum):
    """Values of ``--on``."""

    HEAD = "head"
    NODES = "nodes"
    AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Options that the user of ``submit`` or ``plan`` has given, a field each."""

    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE [SETTINGS]",
            help=f"One of {', '.join(recipes.NAMES)}, and its settings, such as --epochs 3 "
            "(trainctl settings lists them). With --code: the command, after -- .",
        ),
    ] = None
    run: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the run; the same again resumes it.",
        ),
    ] = None
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            "-n",
            metavar="N|MIN:MAX",
            help="Worker nodes, each with all of its GPUs; or a range: starts with MIN and grows "
            "to MAX when hosts become available.",
            show_default="as many as were deployed",
        ),
    ] = None
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="Pool of hosts for the worker nodes, of the deployment's setting pools; or "
            "several: where AWS has no hosts for one, the next is tried. default: its own hosts.",
            show_default="default",
        ),
    ] = None
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE[:N][,...]",
            help="GPUs of each worker node, such as a10g:4, or without --nodes of all together, "
            "instead of --pool: the pools that have them, the deployment's own hosts among them, "
            "in the order of these types.",
        ),
    ] = None
    market: Annotated[
        str | None,
        typer.Option(
            metavar="MARKET[,...]",
            help=f"Of these pools those of a market, in this order: {', '.join(MARKETS)}. Without "
            "--gpus: of those with the GPUs of the deployment's own hosts.",
            show_default="any",
        ),
    ] = None
    priority: Annotated[
        Priority,
        typer.Option(
            help="Place in the queue, before the order of submission; after "
            f"{COUNTS_AS_HIGH_S // 3600} hours it is high.",
        ),
    ] = Priority.NORMAL
    on: Annotated[
        On,
        typer.Option(
            help="Where the command of --code runs: once on the head, with Ray beside it; or on "
            "all nodes, as torchrun and other launchers need. auto: the head for programs that "
            "import ray, else the nodes.",
        ),
    ] = On.AUTO
    max_hours: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=MAX_HOURS,
            metavar="HOURS",
            help="Deadline after the admission, waiting for hosts included.",
            show_default=f"enough for the steps where their number is given, else "
            f"{DEFAULT_MAX_SECONDS / 3600:g}; what --max-cost and the deployment allow",
        ),
    ] = None
    max_cost: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1_000_000,
            metavar="DOLLARS",
            help="Refuse a job whose maximum cost is above this; without --max-hours, give it the "
            "longest deadline that stays within it.",
        ),
    ] = None
    wait_minutes: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=MAX_SECONDS / 60,
            metavar="MINUTES",
            help="How long to wait for hosts; then it ends as no capacity.",
        ),
    ] = DEFAULT_CAPACITY_WAIT_S / 60
    grace: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_GRACE_S,
            metavar="SECONDS",
            help="Time that the command of --code has to save when it is told to end (SIGTERM): "
            "at a stop, and before the deadline.",
        ),
    ] = DEFAULT_GRACE_S
    hang_minutes: Annotated[
        float,
        typer.Option(
            min=0,
            max=MAX_SECONDS / 60,
            metavar="MINUTES",
            help="End a command of --code that gives no sign of life for so long. 0: never.",
        ),
    ] = DEFAULT_HANG_S / 60
    keep_files: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Files or folders of a command of --code that must be saved, such as '*.pt'.",
        ),
    ] = None
    skip_files: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Those that are not saved, such as data.",
        ),
    ] = None
    hold: Annotated[
        float,
        typer.Option(
            min=0,
            max=MAX_HOLD_S / 60,
            metavar="MINUTES",
            help="Keep the hosts of a job that has failed for so long, until its deadline at most: "
            "trainctl shell JOB opens a shell there, trainctl stop JOB ends it.",
        ),
    ] = 0
    keep: Annotated[
        float,
        typer.Option(
            min=0,
            max=MAX_KEEP_S / 60,
            metavar="MINUTES",
            help="Keep the hosts, billed, for so long after the command has ended: your next job "
            "starts there. trainctl release ends it.",
        ),
    ] = 0
    after: Annotated[
        str | None,
        typer.Option(
            metavar="JOB",
            help="Start when this job has succeeded; if it does not, this one fails.",
        ),
    ] = None
    with_run: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="RUN",
            help="Start once the job of this run has, with its name in WITH_RUN, and end with it: "
            "an evaluation of its checkpoints.",
        ),
    ] = None
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=V1,V2",
            help="Values of a recipe's setting to try, a run each, on one node each and as many at "
            "a time as there are --nodes. Several: all their combinations.",
        ),
    ] = None
    trials: Annotated[
        str,
        typer.Option(metavar="N[:SEED]", help="Of these combinations so many, at random."),
    ] = ""
    metric: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What trials are compared by.",
            show_default="the recipe's first measure",
        ),
    ] = ""
    stop_hopeless: Annotated[
        bool,
        typer.Option(
            "--stop-hopeless",
            help="End a trial whose best evaluation is worse than the median of the others by "
            "then.",
        ),
    ] = False
    spot: Annotated[
        bool | None,
        typer.Option(
            "--spot/--on-demand",
            help="Fail unless the deployment uses spot (or on-demand) instances.",
            show_default="what was deployed",
        ),
    ] = None
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            "-e",
            metavar="NAME[=VALUE]",
            help="A variable for the code.",
        ),
    ] = None
    secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SECRET",
            help=f"A variable from Secrets Manager; names begin with {SECRETS_PREFIX}.",
        ),
    ] = None
    not_secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A file, variable or option that was refused as a secret.",
        ),
    ] = None
    notify: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE",
            help="Report its end: to a mail address, which has to confirm once, or to the webhook "
            f"whose address this secret holds; names begin with {NOTIFY_SECRETS}.",
        ),
    ] = None
    code: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Your own code instead of a recipe, with its requirements.",
        ),
    ] = None
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="A job file, TOML: each option is a key, settings are in a table. What is given "
            "here wins.",
        ),
    ] = None
    """Its values are those of the other fields already (``help.RecipeCommand``)."""

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the pools, in order; empty: none is given."""
        return tuple(dict.fromkeys(self.pool.split(","))) if self.pool else ()

    @property
    def names_pools(self) -> bool:
        """True if the user has chosen the hosts."""
        return bool(self.pool or self.gpus or self.market)

    def ladder(self, shape: ClusterShape, nodes: Range | None) -> Ladder:
        """The deployment in each pool of the job, by name, in the order in which they are tried;
        its worker nodes; and why others that have the GPUs are left out, or none has them.

        Args:
            nodes: worker nodes that are asked for; None: as many as have the GPUs together, or as
                there are.

        Raises:
            InputError, UsageError: there is no such pool, or none that fits.
        """
        if "" in (self.pool, self.gpus, self.market):
            raise UsageError("--pool, --gpus and --market: an empty value names no hosts")
        if self.pool and (self.gpus or self.market):
            raise UsageError(f"--pool is {self.pool}: give it, or --gpus and --market")
        if self.pool or not self.names_pools:
            names = self.pools or (DEFAULT_POOL,)
            return {name: shape.in_pool(name) for name in names}, nodes, []
        return self._by_gpus(shape, nodes)

    def _by_gpus(self, shape: ClusterShape, nodes: Range | None) -> Ladder:
        """``ladder``, of the pools that have ``gpus`` and are of ``market``."""
        kinds, markets = self._kinds_and_markets()
        # Where a type's hosts have more GPUs or fewer: those of which the job needs the fewest.
        offers = [
            sorted(_offers(shape, kind, each_has=nodes is not None), key=itemgetter(1))
            for kind in kinds
        ]

        there = shape.in_pools
        found: dict[str, ClusterShape] = {}
        why: dict[str, str] = {}
        for of_kind, market in product(offers, markets):
            for name, number in of_kind:
                each, own = there[name], nodes if number == _ANY else Range(number, number)
                if name in found or each.market not in market:
                    continue
                first = next(iter(found.values()), each)
                why[name] = _misfit(each, first, own=own, nodes=nodes)
                if not why[name]:
                    found[name], nodes = each, own

        left_out = [f"pool {name} is left out: {reason}" for name, reason in why.items() if reason]
        for kind, of_kind in zip(kinds, offers, strict=True):
            names = {name for name, _ in of_kind}
            left_out += _not_offered(there, kind, names, each_has=nodes is not None)
        if not found:
            has = ", ".join(f"{name} ({each.words})" for name, each in there.items())
            asked = f"--gpus {self.gpus or 'of the default'}, --market {self.market or 'any'}"
            raise UsageError("; ".join([f"{asked}: no pool fits, of {has}", *left_out]))
        return found, nodes, left_out

    def _kinds_and_markets(self) -> tuple[list[str | None], list[list[str]]]:
        """Types of GPUs, and markets, in the order in which they are tried; None: the deployment's
        own type."""
        markets = [[each] for each in self.market.split(",")] if self.market else [[*MARKETS]]
        if {*chain(*markets)} - {*MARKETS}:
            raise UsageError(f"--market is {self.market}: give one or more of {', '.join(MARKETS)}")
        if not self.gpus:
            return [None], markets
        kinds = self.gpus.lower().split(",")
        if wrong := [each for each in kinds if each and not _GPUS.fullmatch(each)]:
            raise UsageError(f"--gpus is {wrong[0]!r}: give TYPE or TYPE:N, such as a10g:4")
        return [*kinds], markets

    def check_fit(self, shape: ClusterShape) -> None:
        """
        Raises:
            UsageError: an option has a value that no job of this deployment can have.
        """
        if self.max_hours is not None and self.max_hours > shape.max_job_hours:
            raise UsageError(
                f"--max-hours is {self.max_hours:g}: this deployment allows at most "
                f"{shape.max_job_hours} (max_job_hours); give less, or deploy again: make deploy "
                f'ARGS="-c preset={shape.preset} -c max_job_hours={math.ceil(self.max_hours)} ..."'
            )
        if self.spot is not None and self.spot != shape.spot:
            has, wanted = ("spot", "on-demand") if shape.spot else ("on-demand", "spot")
            others = [name for name, each in shape.pools.items() if each.spot == self.spot]
            what = f"--pool {self.pool}" if self.pool else "this deployment"
            instead = f"give --pool {others[0]}, or " if others else ""
            raise UsageError(
                f"{what} starts {has} instances; for {wanted} ones, {instead}deploy again: make "
                f'deploy ARGS="-c preset={shape.preset} -c spot={str(self.spot).lower()} ..."'
            )

    def max_seconds(self, shape: ClusterShape, *, training_s: int | None) -> int:
        """Deadline after the admission, before ``max_cost`` shortens it.

        Args:
            training_s: seconds in which the training is over; None: not known.
        """
        if self.max_hours is not None:
            return round(self.max_hours * 3600)
        enough = DEFAULT_MAX_SECONDS
        if training_s is not None:
            enough = min(enough, START_S + round(self.wait_minutes * 60) + training_s)
        return min(enough, shape.max_job_hours * 3600)


def _misfit(
    shape: ClusterShape, first: ClusterShape, *, own: Range | None, nodes: Range | None
) -> str:
    """Reason why a pool cannot be one of a job's; empty if it can.

    Args:
        first: the job's first pool.
        own: worker nodes of this pool that have the GPUs; None: any number of them.
        nodes: those of the job; None: not decided yet.
    """
    most = own.high if own else 0
    if most > shape.max_workers:
        return f"it has {counted(shape.max_workers, 'node')} at most"
    if shape.gpus != first.gpus:
        return f"it has {counted(shape.gpus.per_node, 'GPU')} per node, not {first.gpus.per_node}"
    if nodes and own != nodes:
        return f"{counted(most, 'node')} of it would have these GPUs, not {nodes}"
    return "it has no EFA" if first.efa and not shape.efa and most != 1 else ""


def _offers(
    shape: ClusterShape, wanted: str | None, *, each_has: bool
) -> Iterator[tuple[str, int]]:
    """Pools with GPUs such as ``a10g:4``, and the worker nodes that have them together.

    ``_ANY`` stands for any number of nodes.

    Args:
        wanted: None: as the deployment's own hosts have.
        each_has: each node has so many, not all together.
    """
    kind, _, count = (wanted or "").partition(":")
    for name, there in shape.in_pools.items():
        gpu, number = there.worker.gpu, there.worker.num_gpus
        if wanted is None:
            has_it = (gpu, number) == (shape.worker.gpu, shape.worker.num_gpus)
        else:
            has_it = kind in _kinds(there.worker)
        if has_it and (each_has or not count.isdecimal()):
            if count in ("", str(number)):
                yield name, _ANY
        elif has_it:
            nodes, more = divmod(int(count) - there.gpus.num_workers(0), number)
            if nodes >= there.min_nodes and not more:
                yield name, nodes


def _kinds(machine: InstanceType) -> list[str]:
    """Words for its GPUs: "NVIDIA A100-SXM4-80GB" is an a100, and an L40S is no l4."""
    return re.split("[ -]", machine.gpu.name.lower()) if machine.gpu else []


def _not_offered(
    there: Mapping[str, ClusterShape],
    wanted: str | None,
    offered: Collection[str],
    *,
    each_has: bool,
) -> Iterator[str]:
    """Reasons why pools with GPUs such as ``a10g:6`` are not offered, or none has them.

    Args:
        each_has: as for ``_offers``.
    """
    kind, _, count = (wanted or "").partition(":")
    numbers = {
        name: each.worker.num_gpus for name, each in there.items() if kind in _kinds(each.worker)
    }
    relation = "not" if each_has else "no multiple of"
    for name, number in numbers.items():
        if name not in offered:
            yield f"pool {name} is left out: {count} is {relation} the {number} of a node"
    if kind and not numbers:
        known = [known for each in there.values() for known in _kinds(each.worker)]
        yield f"no pool has {kind!r}: {did_you_mean(kind, known, otherwise='they have others')}"


def check_nodes(shape: ClusterShape, wanted: Range, *, pool: str = DEFAULT_POOL) -> Range:
    """Return ``wanted`` if a deployment can start so many worker nodes.

    Args:
        pool: of these nodes.

    Raises:
        UsageError: it cannot.
    """
    if not shape.min_nodes <= wanted.low <= wanted.high <= shape.max_workers:
        what, more = "this deployment", f'make deploy ARGS="-c max_workers={wanted.high} ..."'
        if pool != DEFAULT_POOL:
            what, more = f"pool {pool}", f"max_workers of {pool} in its setting pools"
        if wanted.high > MOST_WORKERS:
            more = f"which takes {MOST_WORKERS} at most"
        advice = f". More need another deploy: {more}" if wanted.high > shape.max_workers else ""
        raise UsageError(
            f"--nodes is {wanted}: {what} takes {shape.min_nodes} to {shape.max_workers} worker "
            f"nodes{advice}"
        )
    return wanted
