"""Places and names of the files of a run in a folder or bucket."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from contract.errors import InputError

# The record of a run: <storage>/<run>/...
CONFIG_FILE: Final = "config.json"
ENVIRONMENT_FILE: Final = "environment.json"
METRICS_FILE: Final = "metrics.jsonl"
EVALUATION_FILE: Final = "evaluation.json"
RESULT_FILE: Final = "result.json"
COMPILED_FILE: Final = "compiled.bin"  # what torch has compiled for it: its next start loads it
TRIALS_FILE: Final = "trials.json"  # of a tuning: its trials and what they have reached
PROGRESS_FILE: Final = "progress.json"
REPORT_FILE: Final = "report.html"
OVERWRITTEN_FILE: Final = "overwritten-by"  # the job that removed an earlier run of the name
OVERWRITES_FILE: Final = "overwrites"  # number of the lease that begins the run anew
STACKS_DIR: Final = "stacks"  # what hung workers were doing, a text file each time
MODEL_DIR: Final = "model"
PROCESSOR_FILE: Final = "preprocessor_config.json"  # of a model for pictures
CHECKPOINTS_DIR: Final = "checkpoints"
LEASES_DIR: Final = "leases"  # who trains it, and who did: a numbered file each
MANIFEST_FILE: Final = "manifest.json"  # of a checkpoint: lists its files; written last

#: All that a recipe writes to its run's folder, but the leases: folder there -> patterns of names.
#: ``--overwrite`` removes these and nothing else.
RECORD: Final[Mapping[str, tuple[str, ...]]] = {
    "": (
        CONFIG_FILE,
        ENVIRONMENT_FILE,
        METRICS_FILE,
        EVALUATION_FILE,
        RESULT_FILE,
        PROGRESS_FILE,
        REPORT_FILE,
        OVERWRITTEN_FILE,
        STACKS_DIR,
        *("tensorboard", "wandb"),
        "checkpoint_manager_snapshot.json",  # by Ray Train
    ),
    CHECKPOINTS_DIR: ("step-*", "damaged-step-*", "diverged-step-*", ".step-*.part"),
    MODEL_DIR: ("model.safetensors", CONFIG_FILE, PROCESSOR_FILE),
}

# Bare buckets keep their runs under this prefix, as local runs do under ./runs.
RUNS_PREFIX: Final = "runs"

JOBS_DIR: Final = "jobs"  # of a run: its jobs' code, and what their heads report

# Prefixes of objects that decide about hosts and outcomes. Who may write there is in
# ``stacks.rights`` and ``stacks.people``; below RUNS_PREFIX every job may.
ENDS_PREFIX: Final = "ends"  # how jobs ended: written by the keeper only
HEADS_PREFIX: Final = "heads"  # what the heads of jobs report: written by heads only
HOSTS_PREFIX: Final = "hosts"  # boot reports of hosts: written by hosts only
STOPS_PREFIX: Final = "stops"  # jobs that users call off: <user id>/, written by that user only

# Files of a user's own program.
OUTPUT_DIR: Final = "output"  # of a run: <run>/output/ has its nodes' files (contract.files)
RAY_DIR: Final = "ray"  # of a run: where Ray Train and Ray Tune save unless the program says so
#: At most this much of a node's folders is kept. Copied at 100 MB/s, it takes nine minutes.
OUTPUT_LIMIT_BYTES: Final = 50 * 2**30
#: And at most so many files: each costs a request, and a line of the list.
OUTPUT_LIMIT_FILES: Final = 100_000

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

#: ``--dtype`` of an export -> the name of the type in torch, which this package does not import.
EXPORT_DTYPES: Final[Mapping[str, str]] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
#: The type that the model came in.
DEFAULT_EXPORT_DTYPE: Final = "auto"
#: Tokens that ``training.generate`` adds to a prompt.
DEFAULT_NEW_TOKENS: Final = 60


def check_run_name(name: str) -> str:
    """Return ``name`` if it can be a folder, an object prefix and a tag value at once.

    Raises:
        InputError: It cannot.
    """
    if not _RUN_NAME.fullmatch(name):
        raise InputError(
            f"run name {name!r} is not usable: use 1 to 63 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit (no slash: it is no folder)"
        )
    return name


def job_record(run: str, job: str) -> str:
    """Key of the object in the bucket that says how a job ended, written by the keeper."""
    return f"{ENDS_PREFIX}/{run}/{job}.json"


def job_claim(run: str, job: str) -> str:
    """Key of the same, as earlier versions wrote it: every job may write there."""
    return f"{RUNS_PREFIX}/{run}/{JOBS_DIR}/{job}.json"


def job_report(run: str, job: str) -> str:
    """Key of the object in the bucket that says that the end of a job was reported."""
    return f"{ENDS_PREFIX}/{run}/{job}.reported"


def job_code(run: str, job: str) -> str:
    """Key of the object in the bucket that holds a job's own code, an archive."""
    return f"{RUNS_PREFIX}/{run}/{JOBS_DIR}/{job}.zip"


def job_reason(run: str, job: str) -> str:
    """Key of the object in the bucket in which a head says why its job has ended so."""
    return f"{RUNS_PREFIX}/{run}/{JOBS_DIR}/{job}.reason"


def job_hold(run: str, job: str) -> str:
    """Key of the object in the bucket that says how long a job's hosts are held, and why."""
    return f"{HEADS_PREFIX}/{run}/{job}.hold"


def job_life(run: str, job: str) -> str:
    """Key of the object in the bucket that the head of a job renews while it runs."""
    return f"{HEADS_PREFIX}/{run}/{job}.life"


def passed(content: str) -> str:
    """Key of the object in the bucket by which a head notes that it had no objection to a job.

    Args:
        content: SHA-256 of what it has asked about.
    """
    return f"{HEADS_PREFIX}/passed/{content}"


def job_stop(user_id: str, job: str) -> str:
    """Key of the object in the bucket by which a user calls off a job that waits for its turn."""
    return f"{STOPS_PREFIX}/{user_id}/{job}"


def job_activity(job: str) -> str:
    """Name, in a run's folder, of the file with the activity of a job's program."""
    return f"{JOBS_DIR}/{job}.activity"


def checkpoint_name(step: int, lease: int = 0) -> str:
    """Name of the checkpoint after ``step`` optimizer updates.

    Args:
        lease: number of the lease that its writer holds; 0 without one. It is part of the name, so
            that a process that has lost the run never writes into a checkpoint of its successor.
            The first holder, the only one of most runs, has no number in its names.
    """
    return f"step-{step:08d}" + (f"-lease{lease}" if lease > 1 else "")


def checkpoint_key(name: str) -> tuple[int, int] | None:
    """Step and lease of a checkpoint's name, to sort by; None when ``name`` is not one."""
    match = re.fullmatch(r"step-(\d{8,18})(?:-lease(\d{1,18}))?", name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def check_relative(name: str, *, what: str = "name") -> str:
    """Return ``name`` if it names a file below a folder, whatever the folder is.

    Names come from a bucket's keys, an archive or a manifest, and who can write those must not
    choose where files are written here.

    Raises:
        InputError: it is empty or absolute, has an empty, ``.`` or ``..`` segment, a backslash or a
            character that is none of a file name in UTF-8.
    """
    segments = name.split("/")
    # Python reads bytes of a name that are not UTF-8 as halves of characters.
    refused = re.search(r"[\\\x00-\x1f\x7f\ud800-\udfff]", name)
    if refused or any(part in ("", ".", "..") for part in segments):
        raise InputError(
            f"{what} {name!r} is refused: it is not a relative path of a file (no leading slash, "
            "no empty, '.' or '..' segment, no backslash, no control character, all UTF-8)"
        )
    return name


def safe_join(folder: Path, name: str, *, what: str = "name") -> Path:
    """``folder / name``, for a name that comes from outside; slashes separate its segments.

    Raises:
        InputError: the result would lie outside ``folder``, also by a symbolic link.
    """
    target = folder / PurePosixPath(check_relative(name, what=what))
    if not target.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{what} {name!r} is refused: a link leads out of {folder}")
    return target


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Addresses of a run's files, for a folder on disk and for ``s3://bucket/prefix`` alike."""

    uri: str
    """Address of the run's folder, with no slash at its end."""

    @classmethod
    def of(cls, root: str, run: str) -> "RunPaths":
        """Addresses of a run by name below ``root``, the result of
        ``store.storage.runs_root``."""
        return cls(f"{root.rstrip('/')}/{check_run_name(run)}")

    def file(self, name: str) -> str:
        """One of the record's files, such as ``RESULT_FILE``."""
        return f"{self.uri}/{name}"

    @property
    def checkpoints(self) -> str:
        return self.file(CHECKPOINTS_DIR)

    def checkpoint(self, step: int, lease: int = 0) -> str:
        """The folder of a checkpoint, named as ``checkpoint_name`` does."""
        return f"{self.checkpoints}/{checkpoint_name(step, lease)}"

    @property
    def model(self) -> str:
        """The folder of the trained model."""
        return self.file(MODEL_DIR)


def run_prefix(run: str) -> str:
    """Prefix of a run's keys in the deployment's bucket, with a slash at its end."""
    return f"{RUNS_PREFIX}/{check_run_name(run)}/"


def output_prefix(run: str) -> str:
    """Prefix of the keys of what a run's program wrote on its nodes, with a slash at its end."""
    return f"{run_prefix(run)}{OUTPUT_DIR}/"


def ray_prefix(run: str) -> str:
    """Prefix of the keys of what Ray Train and Ray Tune saved for a run's program."""
    return f"{run_prefix(run)}{RAY_DIR}/"
