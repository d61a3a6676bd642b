"""The rehearsal of the whole system: bring it up, train on it, check the results, take it away.

``make rehearse`` is this module. It drives ``trainctl`` as a user does, and fails when a run does
not show what it must show; ``rehearsal.cycle`` brings everything up and down.
"""

import json
import os
import sys
import time
from typing import Any, Final

from contract import runs
from rehearsal import commands
from rehearsal.cycle import NUM_WORKERS, Rehearsal, RehearsalError, take_away
from rehearsal.inventory import account_at
from rehearsal.local_aws import ROOT
from rehearsal.steps import Steps, interruptible, uninterrupted

RUN: Final = "rehearsal"
JOB_RUN: Final = "job"
RECIPE: Final = ("ddp", "--preset", "digits", "--workers", str(NUM_WORKERS), "--json")
#: Of a job that has ended, nothing may be left after this long.
GONE_WITHIN_S: Final = 30
#: How much a run in containers may differ from the same run in plain processes.
ACCURACY_TOLERANCE: Final = 0.02

Figures = dict[str, Any]


def rehearse() -> Figures:
    """Up, run, down; return the figures. After a failure or Ctrl-C, nothing of it is left."""
    rehearsal = Rehearsal.here()
    began = time.monotonic()
    steps = Steps(15)
    with interruptible():
        try:
            # What an earlier one has left, should it have been killed.
            with uninterrupted():
                rehearsal.down(steps)
            rehearsal.up(steps)
            figures = _standing_cluster(rehearsal, steps) | _job(rehearsal, steps)
            rehearsal.undeploy(steps)
        except BaseException:
            take_away(rehearsal, keep_logs=True)
            raise
        take_away(rehearsal)
    return {**figures, "seconds": round(time.monotonic() - began), "steps_s": steps.seconds}


def _standing_cluster(rehearsal: Rehearsal, steps: Steps) -> Figures:
    """Train on the standing cluster, which is up, and bring it down; return the figures.

    Raises:
        RehearsalError: the run is not what it must be.
    """
    with steps.step("ray status, inside the head"):
        # It shows the autoscaler's last report, which may be some seconds old.
        deadline = time.monotonic() + 20
        while (nodes := _nodes_of_ray(rehearsal)) != NUM_WORKERS + 1:
            if time.monotonic() > deadline:
                raise RehearsalError(f"ray status shows {nodes} nodes, not {NUM_WORKERS + 1}")
            time.sleep(1)
    with steps.step("train the DDP recipe on the two workers"):
        began = time.time()
        command = ("python", "-m", "training.launch", *RECIPE, "--run", RUN)
        result = json.loads(rehearsal.trainctl("shell", "--", *command))
    with steps.step("look at the run's record in the bucket"):
        _check_record(rehearsal, result)
        first_step_s = _first_step(rehearsal, RUN) - began
    with steps.step("bring down the standing cluster"):
        rehearsal.trainctl("cluster", "down", "--yes")
    with steps.step("train the same in plain processes, to compare"):
        local = _train_locally(rehearsal)
    if abs(local["accuracy"] - result["accuracy"]) > ACCURACY_TOLERANCE:
        raise RehearsalError(
            f"accuracy {result['accuracy']:.4f} in containers, {local['accuracy']:.4f} in "
            f"plain processes: they differ by more than {ACCURACY_TOLERANCE}"
        )
    return {
        "nodes": nodes,
        "hosts_of_the_ranks": result["hosts"],
        "accuracy": result["accuracy"],
        "accuracy_in_plain_processes": local["accuracy"],
        "submit_to_first_step_s": round(first_step_s, 1),
        "images_per_s": result.get("images_per_s"),
    }


def _job(rehearsal: Rehearsal, steps: Steps) -> Figures:
    """A job with nothing there before: it brings its own cluster and takes it away again."""
    with steps.step("trainctl submit: a job that brings its own head and workers"):
        began = time.time()
        options = ("--nodes", str(NUM_WORKERS), "--run", JOB_RUN, "--yes", "--follow")
        settings = ("--preset", "digits", "--epochs", "2", "--env", "OMP_NUM_THREADS=1")
        name, _log = rehearsal.trainctl("submit", "ddp", *options, *settings).split(maxsplit=1)
        first_step_s = _first_step(rehearsal, JOB_RUN) - began
    with steps.step("nothing of the job is left"):
        ended = time.monotonic()
        while rehearsal.engine.labelled("container", rehearsal.name):
            if time.monotonic() > ended + GONE_WITHIN_S:
                raise RehearsalError(f"{name} has left containers {GONE_WITHIN_S} s after it")
            time.sleep(1)
    found = json.loads(rehearsal.trainctl("show", name, "--json"))
    if found["status"] != "succeeded" or found["result"]["status"] != "succeeded":
        raise RehearsalError(f"the job ended as {found}")
    return {
        "job": found["status"],
        "job_submit_to_first_step_s": round(first_step_s, 1),
        "job_gone_after_s": round(time.monotonic() - ended, 1),
        "job_node_seconds": found["node_seconds"],
    }


def _nodes_of_ray(rehearsal: Rehearsal) -> int:
    shown = rehearsal.trainctl("shell", "--", "ray", "status")
    active = shown.partition("Active:")[2].partition("Pending:")[0]
    counts = [line.split()[0] for line in active.splitlines() if line.strip()]
    return sum(int(count) for count in counts if count.isdecimal())


def _check_record(rehearsal: Rehearsal, result: dict[str, Any]) -> None:
    """Look at the run's folder in the bucket."""
    if result["status"] != "succeeded" or len({*result["hosts"]}) != NUM_WORKERS:
        raise RehearsalError(f"the run ended as {result}")
    bucket, prefix = rehearsal.bucket(), runs.run_prefix(RUN)
    objects = account_at(rehearsal.state()["endpoint"]).items(
        "s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=prefix
    )
    keys = [each["Key"].removeprefix(prefix) for each in objects]
    wanted = (runs.METRICS_FILE, runs.RESULT_FILE, runs.REPORT_FILE)
    lacking = [name for name in wanted if name not in keys]
    if not any(key.startswith(f"{runs.CHECKPOINTS_DIR}/") for key in keys):
        lacking.append(runs.CHECKPOINTS_DIR)
    if lacking:
        raise RehearsalError(f"s3://{bucket}/{prefix} lacks {', '.join(lacking)}; it has {keys}")


def _first_step(rehearsal: Rehearsal, run: str) -> float:
    """Unix time at which a run's first step was done."""
    s3 = account_at(rehearsal.state()["endpoint"]).client("s3")
    key = runs.run_prefix(run) + runs.METRICS_FILE
    lines = s3.get_object(Bucket=rehearsal.bucket(), Key=key)["Body"].read().decode().splitlines()
    for event in map(json.loads, lines):
        if event["type"] == "step":
            return float(event["time"])
    raise RehearsalError(f"{key} has no step")


def _train_locally(rehearsal: Rehearsal) -> dict[str, Any]:
    place = rehearsal.folder / "runs"
    printed = commands.run(
        [
            *(sys.executable, "-m", "training.launch", *RECIPE, "--local"),
            *("--run", "local", "--storage", str(place), "--overwrite"),
        ],
        environment={**os.environ, "OMP_NUM_THREADS": "1"},
        folder=ROOT,
        log=rehearsal.log,
    )
    result: dict[str, Any] = json.loads(printed)
    return result
