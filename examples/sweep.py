"""Train with four learning rates, a job for each, and print which was best.

    python examples/sweep.py --nodes 1 -- --preset digits --epochs 3

What follows ``--`` are settings of the recipe. A deployment with one head host, the default, trains
one job after the other; one with ``-c max_heads=4 -c max_workers=4`` trains all four at a time.

A sweep that was interrupted is given again with the same name: it waits for what is still running,
resumes what is not complete, and takes the results of what is.
"""

import argparse
import sys
from collections.abc import Sequence

from trainctl import CliError, Job, UsageError, plan, submit

RATES = ("0.0005", "0.001", "0.002", "0.004")
# A job may have to wait until all others have ended, and waiting counts towards its deadline.
MAX_HOURS = 1.0 * len(RATES)
WAIT_MINUTES = 60.0 * (len(RATES) - 1)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return sweep(arguments)
    except CliError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            "\nThe jobs that were started keep running: give the same command again to wait for "
            "them, or stop them with trainctl stop",
            file=sys.stderr,
        )
        return 130


def sweep(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="sweep", help="the runs are called NAME-RATE")
    parser.add_argument("--nodes", default="1", help="worker nodes of each job")
    parser.add_argument("--max-usd", type=float, default=20.0, help="of all jobs together")
    parser.add_argument("settings", nargs="*", help="of the recipe")
    given = parser.parse_args(arguments)

    price = plan("ddp", *given.settings, nodes=given.nodes, max_hours=MAX_HOURS).usd_at_most
    if price is None or price * len(RATES) > given.max_usd:
        each = "a price that is not known" if price is None else f"up to {price:.2f} $"
        print(f"{len(RATES)} jobs cost {each} each, more than --max-usd", file=sys.stderr)
        return 2
    jobs: dict[str, Job] = {}
    for rate in RATES:
        jobs[rate] = start(
            f"{given.name}-{rate}", "ddp", *given.settings, "--lr", rate, nodes=given.nodes
        )
        print(f"{rate}: {jobs[rate].id}", flush=True)

    accuracy: dict[str, float] = {}
    for rate, job in jobs.items():
        outcome, result = job.wait(), job.result()
        reached = result.measures.get("accuracy") if result else None
        if reached is None:
            print(f"{rate}: {outcome.reason}; its log: trainctl logs {job.id}", flush=True)
            continue
        accuracy[rate] = reached
        print(f"{rate}: {reached:.4f} of the test images", flush=True)
    if not accuracy:
        return 1
    print(f"best: --lr {max(accuracy, key=lambda rate: accuracy[rate])}")
    return 0


def start(run: str, *words: str, nodes: str) -> Job:
    """Start a run's job; where it is running or complete already, the job that has done so."""
    try:
        return submit(*words, run=run, nodes=nodes, max_hours=MAX_HOURS, wait_minutes=WAIT_MINUTES)
    except UsageError as error:
        if "already complete" in str(error) or "being trained already" in str(error):
            return Job.find(run)
        raise


if __name__ == "__main__":
    sys.exit(main())
