"""Try settings of a recipe, several at a time on the nodes of a job: ``python -m training.tune``.

Each trial is a run with a name of its own, trained on one node as ``--local`` trains it; a trial
that has lost its node resumes on another. The same command again takes the results that are there.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

from contract import exits, faults, nodes
from contract.runs import TRIALS_FILE, RunPaths
from contract.text import counted
from store import storage
from training.recipes import by_name
from training.record.events import Step
from training.record.reader import read_metrics
from training.runtime import ray_cluster
from training.trials import (
    TUNE,
    Trial,
    Tuning,
    best_of,
    by_value,
    is_hopeless,
    options,
    value_at,
)

#: Between two looks at what the trials have reached.
_LOOK_S: Final = 10.0
#: Between two lines about them.
_SAY_S: Final = 60.0


def train(words: Sequence[str]) -> int:
    """Train on this node; return the exit code. A task of Ray; cancelled, the training saves."""
    with Path(os.environ.get(nodes.ENV_LOG, os.devnull)).open("a") as log:
        command = [sys.executable, "-m", "training.launch", *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()


class Study:
    """The trials of one job, on the Ray cluster whose head this is."""

    def __init__(self, name: str, words: Sequence[str], tuning: Tuning, root: str) -> None:
        """
        Args:
            name: of the tuning: of the folder of its table, and first part of its runs.
            words: recipe and settings that all trials have.
            root: address of the folder of all runs.
        """
        self._paths, self._words, self._root = RunPaths.of(root, name), words, root
        self._tuning, self.measure = tuning, tuning.measure(by_name(words[0]))
        self.trials = [Trial(run=run, settings=each) for run, each in tuning.runs(name).items()]
        self._said, self._said_at = "", 0.0

    def run(self) -> int:
        """Train all; return the exit code."""
        import ray

        gpus = int(os.environ.get(nodes.ENV_WORKER_GPUS) or 0)
        whole: Any = {"num_gpus": gpus, "num_cpus": 0}
        if not gpus:
            whole = {"num_cpus": int(os.environ.get(nodes.ENV_WORKER_CPUS) or 1)}
        task = ray.remote(train).options(max_retries=-1, **whole)
        left: dict[Any, Trial] = {}
        for trial in self.trials:
            own = [*self._words, *options(trial.settings)]
            own += ["--local", "--run", trial.run, "--storage", self._root]
            left[task.remote(own)] = trial
        while left:
            done, _ = ray.wait([*left], timeout=_LOOK_S)
            for each in done:
                self._end(left.pop(each), each)
            for each, trial in left.items():
                self._look(trial)
                if self._is_hopeless(trial):
                    trial.status = "stopped"
                    ray.cancel(each)
            self._write()
            self._say(left.values())
        return exits.OK if any(each.status == "succeeded" for each in self.trials) else exits.FAILED

    def _end(self, trial: Trial, task: Any) -> None:
        import ray

        try:
            code = ray.get(task)
        except Exception as error:  # cancelled, or Ray has given up
            code = type(error).__name__
        self._look(trial)
        if trial.status != "stopped":
            trial.status = "failed" if code else "succeeded"
        best = best_of(trial.reached, self.measure)
        said = "no evaluation" if best is None else self.measure.phrase(best)
        print(f"{' '.join(options(trial.settings))}: {trial.status}, {said}", flush=True)

    def _look(self, trial: Trial) -> None:
        """Read what a trial has reached."""
        found = read_metrics(RunPaths.of(self._root, trial.run).uri)
        values = [value_at(each, self.measure) for each in found.evaluations]
        trial.reached = [each for each in values if each is not None]
        trial.step = max((each.step for each in found.of(Step)), default=0)
        if found.lines and trial.status == "waiting":
            trial.status = "running"

    def _say(self, left: Collection[Trial]) -> None:
        """Print how far the trials are, which is also this job's sign of life."""
        running = [f"{each.run} at step {each.step}" for each in left if each.status == "running"]
        num_ended = len(self.trials) - len(left)
        text = "; ".join([f"{num_ended} of {len(self.trials)} trials have ended", *running])
        if text != self._said and time.monotonic() - self._said_at > _SAY_S:
            self._said, self._said_at = text, time.monotonic()
            print(text, flush=True)

    def _is_hopeless(self, trial: Trial) -> bool:
        if not self._tuning.stops_hopeless or trial.status != "running":
            return False
        others = [each.reached for each in self.trials if each is not trial]
        return is_hopeless(trial.reached, others, self.measure)

    def _rows(self) -> list[dict[str, object]]:
        return [each.to_json(self.measure) for each in self.trials]

    def _write(self) -> None:
        name, is_higher = self.measure.name, self.measure.higher_is_better
        values = {"metric": name, "higher_is_better": is_higher, "trials": self._rows()}
        text = json.dumps(values, indent=1)
        storage.write_bytes(self._paths.file(TRIALS_FILE), text.encode())

    def table(self) -> list[str]:
        """Lines of the results, the best first."""
        rows = by_value(self._rows(), self.measure)
        return [" ".join(f"{key}={value}" for key, value in row.items()) for row in rows]


@faults.command()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {TUNE}", description=__doc__)
    parser.add_argument("--run", required=True, help="first part of the runs' names")
    parser.add_argument("--vary", action="append", default=[], metavar="NAME=V,V")
    parser.add_argument("--trials", default="", metavar="N[:SEED]")
    parser.add_argument("--metric", default="")
    parser.add_argument("--stop-hopeless", action="store_true")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="recipe and its settings")
    parsed = parser.parse_args(arguments)
    tuning = Tuning.of(
        parsed.vary, trials=parsed.trials, metric=parsed.metric, hopeless=parsed.stop_hopeless
    )
    study = Study(
        parsed.run,
        parsed.words,
        tuning,
        storage.runs_root(os.environ.get(nodes.ENV_STORAGE) or "runs"),
    )
    ray_cluster.join_cluster(verbose=False)
    began = time.monotonic()
    print(f"{counted(len(study.trials), 'trial')}, compared by {study.measure.name}", flush=True)
    code = study.run()
    lasted = time.monotonic() - began
    print("\n".join([f"{study.measure.title} after {lasted:.0f} s:", *study.table()]), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
