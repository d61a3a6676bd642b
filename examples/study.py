"""Scaling study: the same training on more and more nodes, a job for each, with table and plot.

    python examples/study.py --nodes 1,2,4 -- imagenet --data imagenet-400 --max-steps 200
    python examples/study.py --nodes 1,2,4 --networks efa,tcp -- imagenet --data imagenet-400

A recipe and its settings follow ``--``. The jobs run one after the other, so that they do
not disturb each other. A study that was interrupted, or one of whose jobs failed, is given again
with the same name: it takes the results that are there and trains the rest.

The folder NAME gets ``study.json`` and, where Matplotlib is installed, ``study.png``. What the
columns mean, and what to do about a low efficiency, is in docs/scaling.md.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean

from trainctl import CliError, Job, UsageError, plan, submit
from training.record.events import Metrics, RankTimes, Step

# Network -> variables that make NCCL use it. Hosts that have EFA use it by themselves.
NETWORKS: dict[str, dict[str, str]] = {"": {}, "efa": {}, "tcp": {"NCCL_NET": "Socket"}}


@dataclass(frozen=True, kw_only=True)
class Point:
    """Figures of one job. Times are those of training, without evaluation and checkpoints."""

    network: str
    """``efa`` or ``tcp``; empty: what the deployment uses."""
    nodes: int
    workers: int
    step_s: float
    """Seconds of a step on the slowest worker, which all others wait for."""
    steps_per_epoch: float
    items_per_s: float
    """Images or tokens, of all workers together."""
    phases: dict[str, float]
    """Seconds of each part of a step (data, forward, ...), mean over the workers."""
    communication_s: float | None
    """Seconds in which collectives were at work in a step, most of them beside computing; None
    where the recipe does not measure it."""
    usd_per_hour: float | None
    """Price of all hosts, at list prices; None if unknown."""
    efficiency: float = 1.0
    """Time of all workers for an epoch with the fewest nodes, over the same here."""

    @property
    def epoch_s(self) -> float:
        return self.step_s * self.steps_per_epoch

    @property
    def usd_per_epoch(self) -> float | None:
        return None if self.usd_per_hour is None else self.usd_per_hour * self.epoch_s / 3600


def measured(job: Job, *, network: str, nodes: int) -> Point:
    """Read the record of a job that has ended.

    Raises:
        CliError: it has not trained as far as its first evaluation.
    """
    metrics = job.metrics()
    ranks = [each for each in metrics.of(RankTimes) if each.epoch > 0 and each.step > 0]
    if not ranks:
        raise CliError("it has no times of steps: does its recipe train?")

    # The first stretch has the slow first steps: compilation, caches that are still cold.
    settled = [each for each in ranks if each.step > ranks[0].step]
    times = settled or ranks
    by_rank: dict[int, list[float]] = {}
    for each in times:
        by_rank.setdefault(each.rank, []).append(each.step_time_s)
    slowest_s = step_s = max(map(fmean, by_rank.values()))
    if not settled:
        step_s = min(slowest_s, seconds_after_first_report(metrics) or slowest_s)
    items = sum((each.items_per_s or 0.0) * each.step_time_s for each in times)
    items_per_step = items * len(by_rank) / len(times)

    talking = [each.communication_s for each in times if each.communication_s is not None]
    prices = job.spec.prices if job.spec else None
    return Point(
        network=network,
        nodes=nodes,
        workers=len(by_rank),
        step_s=step_s,
        steps_per_epoch=ranks[-1].step / ranks[-1].epoch,
        items_per_s=items_per_step / step_s,
        phases={
            name: fmean(each.phases[name] for each in times) * step_s / slowest_s
            for name in times[0].phases
        },
        communication_s=fmean(talking) if talking else None,
        usd_per_hour=prices.usd_per_hour(nodes) if prices else None,
    )


def seconds_after_first_report(metrics: Metrics) -> float | None:
    """Seconds of a step in a run that was evaluated once, without the steps of its first report;
    None where there are fewer than three reports."""
    reports = sorted({each.time: each.step for each in metrics.of(Step)}.items())
    if len(reports) < 3:  # two are one stretch, which a moment's delay would decide
        return None
    (begin, first), *_, (end, last) = reports
    return (end - begin) / (last - first)


def with_efficiency(points: Sequence[Point]) -> list[Point]:
    """The points of one network, each compared with the one of the fewest nodes."""
    ordered = sorted(points, key=lambda each: each.nodes)
    worker_s = [each.workers * each.epoch_s for each in ordered]
    return [
        replace(each, efficiency=worker_s[0] / own)
        for each, own in zip(ordered, worker_s, strict=True)
    ]


def table(points: Sequence[Point]) -> str:
    heads = ("network", "nodes", "workers", "step", "items/s", "epoch", "efficiency", "$/epoch")
    rows = [(*heads, "data", "communication")]
    for each in points:
        usd, talking = each.usd_per_epoch, each.communication_s
        rows.append(
            (
                each.network or "default",
                str(each.nodes),
                str(each.workers),
                f"{each.step_s * 1e3:.1f} ms",
                f"{each.items_per_s:,.0f}",
                f"{each.epoch_s:.1f} s",
                f"{each.efficiency:.2f}",
                "not known" if usd is None else f"{usd:,.4f}",
                f"{each.phases.get('data', 0.0) / each.step_s:.0%}",
                "not measured" if talking is None else f"{talking / each.step_s:.0%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def draw(points: Sequence[Point], file: Path, *, title: str) -> None:
    """Plot the time of an epoch over the number of nodes, each network beside its ideal line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for network in dict.fromkeys(each.network for each in points):
        own = [each for each in points if each.network == network]
        nodes = [each.nodes for each in own]
        (line,) = axes.plot(
            nodes, [each.epoch_s for each in own], "o-", label=network or "measured"
        )
        ideal = [each.epoch_s * each.efficiency for each in own]
        axes.plot(nodes, ideal, "--", color=line.get_color(), linewidth=1, label="ideal")
    axes.set(title=title, xlabel="nodes", ylabel="seconds per epoch")
    axes.set_xticks(sorted({each.nodes for each in points}))
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(file, dpi=150)


def write(points: Sequence[Point], folder: Path) -> None:
    """Write the figures and the plot, and print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = [
        {**asdict(each), "epoch_s": each.epoch_s, "usd_per_epoch": each.usd_per_epoch}
        for each in points
    ]
    (folder / "study.json").write_text(json.dumps(figures, indent=1) + "\n")
    try:
        draw(points, folder / "study.png", title=f"{folder.name}: time per epoch")
    except ModuleNotFoundError:
        print("no plot: pip install matplotlib, and give the same command again", file=sys.stderr)
    print(table(points))


def numbers(text: str) -> list[int]:
    """``1,2,4`` as a sorted list."""
    return sorted({int(word) for word in text.split(",")})


def is_there(error: UsageError) -> bool:
    """True if a job was refused because its run is complete or being trained."""
    return "already complete" in str(error) or "being trained already" in str(error)


def study(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=numbers, default=[1, 2], help="worker nodes, as 1,2,4")
    parser.add_argument("--networks", default="", help="efa, tcp or efa,tcp: only for hosts of EFA")
    parser.add_argument("--name", default="", help="the runs are called NAME-[NETWORK-]NODES")
    parser.add_argument("--max-hours", type=float, default=2.0, help="deadline of each job")
    parser.add_argument("--max-usd", type=float, default=50.0, help="of all jobs together")
    parser.add_argument("words", nargs="+", help="recipe and its settings")
    given = parser.parse_args(arguments)
    name = given.name or f"study-{given.words[0]}"
    networks = given.networks.split(",")
    if unknown := set(networks) - NETWORKS.keys():
        parser.error(f"--networks has {', '.join(unknown)}: give efa, tcp or efa,tcp")

    def options(network: str, nodes: int) -> dict[str, object]:
        run = "-".join(filter(None, (name, network, str(nodes))))
        env = NETWORKS[network]
        return {"run": run, "nodes": nodes, "max_hours": given.max_hours, "env": env}

    # All jobs are checked, and their prices added up, before the first one starts.
    wanted = [(network, nodes) for network in networks for nodes in given.nodes]
    prices = []
    for network, nodes in wanted:
        try:
            planned = plan(*given.words, **options(network, nodes))
        except UsageError as error:
            if not is_there(error):
                raise
            continue
        if network == "efa" and not planned.shape.efa:
            raise UsageError("--networks efa: the hosts of this deployment have no EFA")
        prices.append(planned.usd_at_most)
    total = sum(filter(None, prices))
    if None in prices or total > given.max_usd:
        most = "an unknown sum" if None in prices else f"up to ${total:.2f}"
        raise UsageError(f"{len(wanted)} jobs cost {most}, more than --max-usd")

    # One job after the other
    found: dict[str, list[Point]] = {}
    failed = False
    for network, nodes in wanted:
        own = options(network, nodes)
        try:
            job = submit(*given.words, **own)
        except UsageError as error:
            if not is_there(error):
                raise
            job = Job.find(str(own["run"]))
        print(f"{job.run}: job {job.id}", file=sys.stderr, flush=True)
        outcome = job.wait()
        try:
            if outcome.status != "succeeded":
                raise CliError(outcome.reason)
            found.setdefault(network, []).append(measured(job, network=network, nodes=nodes))
        except CliError as error:  # the other jobs still show something
            print(f"{job.run}: {error}; its log: trainctl logs {job.id}", file=sys.stderr)
            failed = True

    if found:
        write([*chain.from_iterable(map(with_efficiency, found.values()))], Path(name))
    return int(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return study(arguments)
    except CliError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nThe job keeps running; the same command continues the study", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
