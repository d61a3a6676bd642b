"""Train with four learning rates at a time, a job for each, and print which was best.

    python examples/sweep.py --nodes 1 -- --preset digits --epochs 3

What follows ``--`` are settings of the recipe. A sweep that was interrupted is given again with the
same name: it resumes what is not complete, and takes the results of what is.
"""

import argparse
import sys
from collections.abc import Sequence

from trainctl import CliError, Job, plan, submit

RATES = ("0.0005", "0.001", "0.002", "0.004")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="sweep", help="the runs are called NAME-RATE")
    parser.add_argument("--nodes", default="1", help="worker nodes of each job")
    parser.add_argument("--max-usd", type=float, default=5.0, help="of all jobs together")
    parser.add_argument("settings", nargs="*", help="of the recipe")
    given = parser.parse_args(arguments)

    jobs: dict[str, Job] = {}
    try:
        price = plan("ddp", *given.settings, nodes=given.nodes, max_hours=1).usd_at_most
        if price is None or price * len(RATES) > given.max_usd:
            print(
                f"{len(RATES)} jobs may cost {price} $ each, more than --max-usd", file=sys.stderr
            )
            return 2
        for rate in RATES:
            run = f"{given.name}-{rate}"
            words = ("ddp", *given.settings, "--lr", rate)
            try:
                jobs[rate] = submit(*words, run=run, nodes=given.nodes, max_hours=1)
            except CliError as error:
                if "already complete" not in str(error):
                    raise
                jobs[rate] = Job.find(run)
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
    except CliError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if not accuracy:
        return 1
    print(f"best: --lr {max(accuracy, key=lambda rate: accuracy[rate])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
