"""Scaling study: the same training on more and more nodes, a job for each, with table and plot.

    python examples/study.py 1,2,4 imagenet --data imagenet-400 --max-steps 200

A recipe and its settings follow the numbers of worker nodes. The jobs run one after the other, so
that they do not disturb each other. The same command takes the results that are there. What to do
about a low efficiency is in docs/scaling.md.
"""

import sys
from collections.abc import Sequence
from statistics import fmean

from trainctl import Job, UsageError, submit
from training.record.events import RankTimes

#: US dollars that each of the jobs may cost.
MAX_COST = 50


def measured(job: Job) -> tuple[int, float]:
    """Workers of a job, and seconds of its epochs, without the slow steps of the first one."""
    times = [each for each in job.metrics().of(RankTimes) if each.epoch and each.step]
    settled = [each for each in times if each.step > times[0].step] or times
    ranks = {each.rank for each in settled}

    # All wait for the slowest worker.
    step_s = max(fmean(each.step_time_s for each in settled if each.rank == own) for own in ranks)
    return len(ranks), step_s * times[-1].step / times[-1].epoch


def main(arguments: Sequence[str]) -> int:
    numbers, *words = arguments
    nodes = [int(number) for number in numbers.split(",")]
    epochs, base_s = [], 0.0
    for number in nodes:
        name = f"study-{words[0]}-{number}"
        try:
            job = submit(*words, run=name, nodes=number, max_cost=MAX_COST)
        except UsageError as error:
            if "already" not in str(error):  # complete, or being trained
                raise
            job = Job.find(name)
        outcome = job.wait()
        if outcome.status != "succeeded":
            print(f"{job.id}: {outcome.reason}", file=sys.stderr)
            return 1
        workers, epoch_s = measured(job)
        base_s = base_s or workers * epoch_s
        efficiency = base_s / workers / epoch_s
        print(f"{number} nodes: epoch {epoch_s:.1f} s, efficiency {efficiency:.2f}", flush=True)
        epochs.append(epoch_s)

    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(
        title=words[0], xlabel="nodes", ylabel="seconds per epoch", xticks=nodes
    )
    axes.plot(nodes, epochs, "o-", label="measured")
    axes.plot(nodes, [epochs[0] * nodes[0] / each for each in nodes], "--", label="ideal")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(f"study-{words[0]}.png", dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
