"""The record of a run: every event becomes a line, a figure or a file in the run's folder.

One process keeps it: the command itself under Ray, rank 0 under torchrun. A folder on disk is
written line by line; in S3, where nothing can be appended to, files are written again after each
epoch and at the end.
"""

import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from contract import nodes, runs
from training import machine, storage
from training.recipes.settings import RunConfig
from training.record.events import Event

_HERE = Path(__file__).parent
_RATES = ("images_per_s", "tokens_per_s")


class Display(Protocol):
    """Shows events to a person as they come."""

    def show(self, event: Event) -> None: ...


class RunRecord:
    """Keeps ``<storage>/<run>/`` up to date from the events of rank 0."""

    def __init__(
        self, run_uri: str, config: RunConfig, environment: Mapping[str, Any], display: Display
    ) -> None:
        """Open a run's record, which may hold the lines of earlier attempts."""
        self.run_uri = run_uri
        self.error: str | None = None
        self.stopped_at: int | None = None
        self.result: dict[str, Any] = {}
        self._display = display
        self._config = config
        self._in_s3 = storage.is_s3(run_uri)
        self.folder = Path(tempfile.mkdtemp(prefix="record-")) if self._in_s3 else Path(run_uri)
        self._metrics = self.folder / runs.METRICS_FILE
        if self._in_s3:
            earlier = storage.read_bytes(storage.join(run_uri, runs.METRICS_FILE))
            if earlier:
                self._metrics.write_bytes(earlier)
        self._write_json(runs.CONFIG_FILE, config.to_json())
        self._write_json(runs.ENVIRONMENT_FILE, environment)
        self._start: Event = {}
        self._resumed_from: int | None = None
        # Of all attempts: a head that is lost after its workers does not forget them.
        self._preemptions = sum(
            len(line["nodes"]) for line in read_lines(self._metrics) if line["type"] == "preempted"
        )
        self._phases: list[Event] = []
        self._hosts: list[str] = []
        self._step = 0
        self._first_step_at: float | None = None
        self._evaluation: Event = {}
        self._rates: list[float] = []

    def handle(self, event: Event) -> None:
        """Take one event: write it down and show it."""
        match event["type"]:
            case "start":
                self._on_start(event)
            case "phase":
                self._phases.append(event)
                self._hosts = event.get("hosts", self._hosts)
            case "step":
                self._step = event["step"]
                if self._first_step_at is None:
                    self._first_step_at = event["time"]
                self._append(event)
            case "preempted":
                self._append(event)
                self._preemptions += len(event["nodes"])
            case "rank" | "sample" | "loaded":
                self._append(event)
            case "evaluation":
                self._append(event)
                self._evaluation = event
                self._rates += _rates_of(event)
                self.flush()
            case "stopped":
                self.stopped_at = event["step"]
            case "error":
                self.error = event["message"]
            case "finished":
                self._write_json(runs.EVALUATION_FILE, event["evaluation"])
                self._finish("succeeded", event)
        self._display.show(event)

    @property
    def is_complete(self) -> bool:
        return self.result.get("status") == "succeeded"

    @property
    def first_step_at(self) -> float | None:
        """Wall-clock time at which the first step of this attempt was done."""
        return self._first_step_at

    def close(self) -> Path | None:
        """Write the result and the report of what there is; return the report's path if local."""
        if not self.is_complete:
            status = "failed" if self.error is not None else "stopped"
            if self._start:
                self._finish(status, {**self._evaluation, "step": self._step})
        report = None
        if self._start:
            from training.record.report import write_report

            report = write_report(self.folder)
        if self._in_s3:
            self.flush()
            for path in sorted(self.folder.rglob("*")):
                if path.is_file():
                    name = path.relative_to(self.folder).as_posix()
                    storage.write_bytes(storage.join(self.run_uri, name), path.read_bytes())
            shutil.rmtree(self.folder, ignore_errors=True)
            return None
        return report

    def flush(self) -> None:
        """Bring S3 up to date; a folder on disk always is."""
        if self._in_s3 and self._metrics.exists():
            uri = storage.join(self.run_uri, runs.METRICS_FILE)
            storage.write_bytes(uri, self._metrics.read_bytes())

    def _on_start(self, event: Event) -> None:
        """Forget what an earlier attempt did after its last checkpoint: it is done again now."""
        kept = [
            line
            for line in read_lines(self._metrics)
            if line["type"] != "phase" and line.get("step", 0) <= event["step"]
        ]
        if event["resumed"]:
            kept.append(
                {
                    "type": "resume",
                    "step": event["step"],
                    "world_size": event["world_size"],
                    "checkpoint": runs.checkpoint_name(event["step"]),
                }
            )
        kept += self._phases
        self._phases = []
        text = "".join(json.dumps(line) + "\n" for line in kept)
        storage.write_bytes(str(self._metrics), text.encode())
        # A worker lost on the way starts again within this attempt: the first start counts.
        if not self._start and event["resumed"]:
            self._resumed_from = event["step"]
        self._start = event
        self._step = event["step"]
        evaluations = [line for line in kept if line["type"] == "evaluation"]
        self._evaluation = evaluations[-1] if evaluations else {}
        self._rates = [rate for line in evaluations for rate in _rates_of(line)]

    def _finish(self, status: str, final: Event) -> None:
        rate_name = f"{self._start['items']}_per_s"
        result = {
            "run": self._config.run,
            "recipe": self._config.recipe,
            "status": status,
            "accuracy": final.get("accuracy"),
            "loss": final.get("loss"),
            "perplexity": final.get("perplexity"),
            "seconds": final.get("seconds"),
            "steps": final["step"],
            rate_name: statistics.median(self._rates) if self._rates else None,
            "world_size": self._start["world_size"],
            "hosts": self._hosts,
            "resumed_from": self._resumed_from,
            "preempted": self._preemptions,
            "parameters": self._start["parameters"],
            "flops_per_s": self._evaluation.get("flops_per_s"),
            "mfu": self._evaluation.get("mfu"),
            "memory_bytes": self._evaluation.get("memory_bytes"),
            "device": self._start["device"],
            "precision": self._start["precision"],
            "error": self.error,
        }
        self.result = result
        self._write_json(runs.RESULT_FILE, result)

    def _append(self, event: Event) -> None:
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def _write_json(self, name: str, values: Mapping[str, Any]) -> None:
        content = (json.dumps(values, indent=1) + "\n").encode()
        storage.write_bytes(str(self.folder / name), content)
        if self._in_s3:
            storage.write_bytes(storage.join(self.run_uri, name), content)


def _rates_of(evaluation: Event) -> list[float]:
    """Items per second, where an evaluation has them: that before the first step has none."""
    return [evaluation[name] for name in _RATES if name in evaluation]


def read_lines(path: Path) -> list[Event]:
    """Read a metrics file; a last line that a kill tore in two is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def read_json(run_uri: str, name: str) -> dict[str, Any] | None:
    """Read a file of a run's record; None when it is not there or not readable."""
    content = storage.read_bytes(storage.join(run_uri, name))
    try:
        values = json.loads(content) if content else None
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def environment() -> dict[str, Any]:
    """Describe the machine and the versions that produced a run."""
    versions: dict[str, str | None] = {}
    for package in ("torch", "ray", "transformers", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        **versions,
        "platform": platform.platform(),
        "cpu": machine.cpu_name(),
        "cores": machine.num_cpus(),
        "gpus": machine.gpu_names(),
        "git_sha": os.environ.get(nodes.ENV_GIT_SHA)
        or machine.output("git", "-C", str(_HERE), "rev-parse", "HEAD")
        or None,
        "command": " ".join(["python -m training.launch", *sys.argv[1:]]),
        "started_at": datetime.now(tz=UTC).isoformat(timespec="seconds"),
    }
