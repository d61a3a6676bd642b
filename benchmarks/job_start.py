"""How long a job in the rehearsal takes from its submission to its first step, and where it goes.

    python -m benchmarks.job_start [--runs 2] [--baseline DIR] [--json]

Needs a Docker Engine. Brings up the rehearsal of this checkout and that of an earlier commit (see
``benchmarks.baseline``) beside each other, without standing clusters, and submits jobs of two
workers to them in turn, one at a time, the digits on one thread per process. All nodes share this
machine's processors.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import baseline
from benchmarks.baseline import ROOT, BaselineError
from benchmarks.output import report, say

PHASES: Final = {
    "head_up": "state machine, and the head's container to its first line",
    "command": "Ray on the head, until the job's command is started",
    "ray_ready": "the command joins Ray and looks at the data",
    "nodes": "worker containers start and join (may come before the line above)",
    "workers_ready": "Ray Train's controller and the training processes",
    "model_ready": "data, model and checkpoint in the workers",
    "first_step": "wrapping in DDP and the first step",
}

# Runs inside either checkout, with what both have: a job for each line on standard input, a JSON
# object for each job; at the end of the input the deployment is taken away.
_JOBS: Final = """
import json, sys, time
from pathlib import Path
from rehearsal.cycle import Rehearsal, Steps
from rehearsal.inventory import account_at

def cpu_s():
    for name in ("cpuacct/docker/cpuacct.usage",):
        try:
            return int(Path("/sys/fs/cgroup", name).read_text()) / 1e9
        except OSError:
            return 0.0

rehearsal = Rehearsal.here()
rehearsal.down(Steps(1))
try:
    rehearsal.up(Steps(5), standing=False)
    account = account_at(rehearsal.state()["endpoint"])
    outputs = rehearsal.outputs("TrainingStack")
    bucket = rehearsal.outputs("CoreStack")["BucketName"]
    logs = account.client("logs")
    print("{}", flush=True)  # it is up
    for number, _ in enumerate(sys.stdin):
        began, before = time.time(), cpu_s()
        run = f"start-{number}"
        hosts = "--nodes" if Path("contract").is_dir() else "--workers"  # its earlier name
        rehearsal.trainctl("submit", "ddp", hosts, "2", "--run", run, "--yes", "--follow",
            "--preset", "digits", "--epochs", "1", "--env", "OMP_NUM_THREADS=1")
        key = f"runs/{run}/metrics.jsonl"
        body = account.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read().decode()
        lines = [json.loads(line) for line in body.splitlines()]
        found = {e["name"]: e["time"] for e in lines if e["type"] == "phase"}
        found["first_step"] = next(e["time"] for e in lines if e["type"] == "step")
        group = outputs["LogGroupName"]
        said = []
        for stream in logs.describe_log_streams(logGroupName=group)["logStreams"]:
            said += logs.get_log_events(logGroupName=group, logStreamName=stream["logStreamName"],
                startFromHead=True)["events"]
        said = sorted((e["timestamp"] / 1000, e["message"]) for e in said)
        for name, words in (("head_up", "head on"), ("command", "running python"),
                            ("nodes", "cluster: 3 nodes")):
            at = [when for when, line in said if when >= began and words in line]
            if at:
                found[name] = at[0]
        times = {name: at - began for name, at in found.items()}
        print(json.dumps({"times": times, "cpu_s_of_all": cpu_s() - before}), flush=True)
finally:
    rehearsal.down(Steps(1))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One job."""

    times: Mapping[str, float]
    """When each phase was over, in seconds after the submission."""
    cpu_s_of_all: float
    """CPU seconds of all containers."""


@contextmanager
def rehearsed(folder: Path) -> Iterator[Callable[[], Timed]]:
    """The rehearsal of a checkout, up; what it gives runs one job.

    Raises:
        SystemExit: the rehearsal of that checkout failed; the message names its log.
    """
    for name in (".venv", ".venv-aws", "node_modules"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    with subprocess.Popen(
        [sys.executable, "-c", _JOBS],
        cwd=folder,
        env=dict(baseline.environment(folder)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        orders, answers = process.stdin, process.stdout

        def answer() -> dict[str, Any]:
            for line in answers:
                if line.startswith("{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
            raise SystemExit(f"the rehearsal in {folder} failed; its log is in {folder}/.rehearsal")

        def job() -> Timed:
            orders.write("\n")
            orders.flush()
            return Timed(**answer())

        answer()
        try:
            yield job
        finally:  # the end of its input: it takes all away, which a Ctrl-C does not shorten
            orders.close()
            process.wait()


def first_step(found: Sequence[Timed]) -> float:
    """Seconds to the first step, the median over jobs."""
    return statistics.median(each.times["first_step"] for each in found)


def summary(found: Sequence[Timed]) -> dict[str, object]:
    """Medians over jobs. A code that does not report a phase lacks it."""
    phases = {
        name: {
            "at_s": round(statistics.median(each.times[name] for each in found), 1),
            "what": what,
        }
        for name, what in PHASES.items()
        if all(name in each.times for each in found)
    }
    return {
        "seconds_to_first_step": [round(each.times["first_step"], 1) for each in found],
        "cpu_seconds_of_whole_jobs": [round(each.cpu_s_of_all, 1) for each in found],
        "phases": phases,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.job_start", description=__doc__)
    parser.add_argument("--runs", type=int, default=2, help="jobs of each code (default: 2)")
    parser.add_argument("--baseline", metavar="DIR", help="checkout to compare with")
    parser.add_argument("--current-only", action="store_true", help="only this checkout")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "job_start", "ratio": 0.0}
    found: dict[str, list[Timed]] = {}
    try:
        with ExitStack() as stack:
            folders = {"now": ROOT}
            if not options.current_only:
                folders["baseline"] = stack.enter_context(baseline.checked_out(options.baseline))
            run = {}
            for name, folder in folders.items():
                say(f"{name}: bringing up the rehearsal in {folder}")
                run[name] = stack.enter_context(rehearsed(folder))
            for number in range(options.runs):
                for name, job in run.items():
                    say(f"{name}: job {number + 1} of {options.runs}")
                    found.setdefault(name, []).append(job())
    except BaselineError as error:
        raise SystemExit(f"error: {error}") from None
    result |= {name: summary(each) for name, each in found.items()}
    if "baseline" in found:
        result["ratio"] = first_step(found["baseline"]) / first_step(found["now"])
    report(result, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
