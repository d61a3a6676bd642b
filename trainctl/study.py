"""A scaling study as jobs: the same training on more and more nodes, one job after the other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from contract.job import JobSpec, JobStatus
from contract.runs import check_run_name
from trainctl import api
from trainctl.errors import CliError, UsageError
from trainctl.job_plan import JobPlan
from training.recipes.command import RunCompleteError
from training.study.series import Point

#: Network -> variables that make NCCL use it. EFA is what hosts that have it use by themselves.
NETWORKS: Final[Mapping[str, Mapping[str, str]]] = {"efa": {}, "tcp": {"NCCL_NET": "Socket"}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One run of a study."""

    words: Sequence[str]
    """Recipe and settings."""
    run: str
    nodes: int
    network: str
    """What its hosts are told to use, of ``NETWORKS``; empty: nothing."""
    options: api.Options
    """Of its job."""

    def plan(self) -> JobPlan | None:
        """What would be started for it; None where nothing has to be."""
        if _found(self) is not None:
            return None
        try:
            return api.plan(*self.words, **self.options)
        except UsageError as error:
            if isinstance(error.__cause__, RunCompleteError):
                return None
            raise

    def job(self) -> api.Job:
        """Its job: one that is there already and runs or has succeeded, or a new one."""
        found = _found(self)
        if found is not None:
            return found
        return api.submit(*self.words, **self.options)


def networks(text: str, *, has_efa: bool) -> list[str]:
    """The values of ``--network``, each once; one empty one where none is given.

    Raises:
        UsageError: there is no such network, or this deployment has none.
    """
    found = list(dict.fromkeys(text.split(","))) if text else [""]
    if text and not {*found} <= NETWORKS.keys():
        raise UsageError(f"--network is {text!r}: give {' or '.join(NETWORKS)}, or both: efa,tcp")
    if "efa" in found and not has_efa:
        raise UsageError(
            "--network efa: the hosts of this deployment have no EFA; deploy again with a type "
            'that has it: make deploy ARGS="-c efa=on ..."'
        )
    return found


def wanted(
    words: Sequence[str],
    *,
    name: str,
    nodes: Sequence[int],
    networks: Sequence[str],
    options: api.Options,
) -> list[Wanted]:
    """The runs of a study, one network after the other; they are called NAME-NODES, or
    NAME-NETWORK-NODES.

    Args:
        options: those that all jobs of the study share.
    """
    found = []
    for network in networks:
        for each in nodes:
            run = check_run_name("-".join(filter(None, (name, network, str(each)))))
            own: api.Options = {**options, "run": run, "nodes": each}
            own["env"] = {**options.get("env", {}), **NETWORKS.get(network, {})}
            found.append(Wanted(words=words, run=run, nodes=each, network=network, options=own))
    return found


def _found(each: Wanted) -> api.Job | None:
    """The newest job of a run, unless it has failed and has to be submitted again."""
    options = each.options
    try:
        job = api.Job.find(each.run, profile=options.get("profile"), region=options.get("region"))
    except UsageError:
        return None
    if job.spec and _without_data(own := _words(job.spec)) != _without_data(each.words):
        raise UsageError(
            f"run {each.run} is of another study, of {' '.join(own)}: give this one a --name"
        )
    return job if job.status in (JobStatus.RUNNING, JobStatus.SUCCEEDED) else None


def _words(spec: JobSpec) -> list[str]:
    """Recipe and settings of a job, without what ``submit`` puts between them; of a program that
    is no recipe, its command."""
    words = [*spec.command]
    return [spec.recipe, *words[words.index("--workers") + 2 :]] if spec.recipe else words


def _without_data(words: Sequence[str]) -> list[str]:
    """A job has the address of its data in place of their name."""
    found = [each for each in words if not each.startswith("--data=")]
    if "--data" in found:
        place = found.index("--data")
        del found[place : place + 2]
    return found


def points(runs: Sequence[Wanted]) -> Iterator[tuple[Wanted, api.Job, Point | None]]:
    """Each run's job as soon as it is there, and then once more with what it has shown.

    Raises:
        CliError: a job has failed.
    """
    for each in runs:
        job = each.job()
        yield each, job, None
        outcome = job.wait()
        if outcome.status != JobStatus.SUCCEEDED:
            raise CliError(
                f"job {job.id} of {each.nodes} nodes: {outcome.reason}. Its log: trainctl logs "
                f"{job.id}; the same command continues the study"
            )
        prices = job.spec.prices if job.spec else None
        yield (
            each,
            job,
            Point.of(
                job.metrics(),
                run=each.run,
                nodes=each.nodes,
                usd_per_hour=prices.usd_per_hour(each.nodes) if prices else None,
            ),
        )
