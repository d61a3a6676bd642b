"""Runs of this machine, seen as the account's jobs are: a folder in place of the bucket.

Only what views ask for is here; nothing is started, stopped or priced.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from contract.job import JobSpec, JobStatus, Outcome
from contract.nodes import Range
from contract.runs import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    LEASES_DIR,
    RESULT_FILE,
    RUNS_PREFIX,
    RunPaths,
    run_prefix,
)
from contract.times import LEASE_S
from store.bucket import Stored
from trainctl.aws.deployment import Deployment
from trainctl.aws.deployment_bucket import DeploymentBucket, json_object
from trainctl.aws.errors import UsageError
from trainctl.aws.jobs import JobExecution, Jobs
from trainctl.aws.tasks import Task
from training.command import NEEDS_PACKAGES

#: In place of the result of a run that has left none.
_KILLED: Final[dict[str, object]] = {
    "status": "failed",
    "error": "ended without a result; the same command resumes it",
}


@contextmanager
def needs_packages() -> Iterator[None]:
    """Imports that fail on a laptop without torch. Raises UsageError."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(NEEDS_PACKAGES.format(error.name)) from None


class Folder(DeploymentBucket):
    """A folder of runs, read as the bucket that would hold them."""

    def __init__(self, folder: Path) -> None:
        self.uri, self._folder = str(folder), folder

    def run(self, run: str) -> RunPaths:
        return RunPaths.of(self.uri, run)

    def key(self, uri: str) -> str:
        return f"{RUNS_PREFIX}/{super().key(uri)}"

    def get(self, key: str) -> bytes | None:
        path = self._path(key)
        return path.read_bytes() if path.is_file() else None

    def download(self, key: str, file: Path) -> None:
        shutil.copyfile(self._path(key), file)

    def _path(self, key: str) -> Path:
        return self._folder / key.removeprefix(f"{RUNS_PREFIX}/")

    def _listed(self, prefix: str, **options: str) -> tuple[list[Stored], list[str]]:
        found, folders = [], []
        folder = self._path(prefix)
        for path in sorted(folder.glob("*") if options else folder.rglob("*")):
            if path.is_dir():
                folders.append(path.name)
            elif path.is_file():
                there = path.stat()
                key = f"{prefix}{path.relative_to(folder).as_posix()}"
                changed = datetime.fromtimestamp(there.st_mtime, tz=UTC)
                found.append(Stored(key=key, size=there.st_size, modified=changed))
        return found, folders


class Runs(Jobs):
    """The runs in a folder, each as the job that would train it; none has nodes."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def newest(self, *, limit: int, running: bool = False, **_: Any) -> list[JobExecution]:
        there = map(self._described, self._folder.listed(f"{RUNS_PREFIX}/")[1])
        found = [run for run in there if run and not (running and run.is_over)]
        return sorted(found, key=lambda run: run.began, reverse=True)[:limit]

    def newest_ids(self, **which: Any) -> list[str]:
        return [run.id for run in self.newest(**which)]

    def all_nodes(self, _job: JobExecution) -> list[Task]:
        return []

    def all_nodes_of(self, jobs: Sequence[JobExecution]) -> dict[str, list[Task]]:
        return {job.id: [] for job in jobs}

    def _described(self, job: str) -> JobExecution | None:
        """The run of a recipe with that name."""
        prefix = run_prefix(job)
        recipe = json_object(self._folder.get(prefix + CONFIG_FILE)).get("recipe")
        files = {each.key: each.modified for each in self._folder.listed(prefix)[0]}
        began = files.get(prefix + ENVIRONMENT_FILE)
        if not recipe or began is None:
            return None
        outcome = self._outcome(prefix)
        command = ("trainctl", "run", str(recipe), "--run", job)
        return JobExecution(
            id=job,
            outcome=outcome,
            began=began,
            ended=None if outcome.status == JobStatus.RUNNING else max(files.values()),
            spec=JobSpec(run=job, command=command, nodes=Range(1, 1), recipe=str(recipe)),
        )

    def _outcome(self, prefix: str) -> Outcome:
        for lease in self._folder.stored(f"{prefix}{LEASES_DIR}/")[-1:]:
            is_released = json_object(self._folder.get(lease.key)).get("released")
            if not is_released and time.time() - lease.modified.timestamp() < LEASE_S:
                return Outcome(status=JobStatus.RUNNING, reason="running")
        result = json_object(self._folder.get(prefix + RESULT_FILE)) or _KILLED
        status, error = str(result["status"]), result.get("error")
        reason = f"{status}: {error}" if error else status
        return Outcome(status=JobStatus(status), reason=reason)


class Here(Deployment):
    """This machine in place of a deployment."""

    is_here = True
    is_local = True
    logs: Any = None

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: of the runs.

        Raises:
            UsageError: there is none.
        """
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}: give the one that has your runs")
        self.account_id, self.region = "this machine", str(folder)
        self.bucket = Folder(folder)
        self.jobs = Runs(self.bucket)
