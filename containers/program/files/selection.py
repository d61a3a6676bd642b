"""Selection of a program's files: which of them are saved, and which first."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from containers.program.files.disk import FileState
from contract import files, runs
from contract.files import OUTPUT
from contract.text import duration, listed

#: Files that a thread of a logger writes even while the program hangs: TensorBoard's, W&B's,
#: MLflow's, Aim's and Comet's, and logs.
TRACKERS: Final = re.compile(
    r"tfevents|/(wandb|mlruns|mlflow\.db|\.aim|\.cometml-runs)(/|$)|/logs?/[^/]*$|"
    r"\.log(\.\d+)?$|/nohup\.out$"
)
#: A job whose newest file is older than this at its end has a warning.
_OLD_S: Final = 3600


def is_kept(name: str, keep: Sequence[str]) -> bool:
    """True if the user has said that a file must be saved, by its place or by a pattern."""
    return name.startswith(f"{OUTPUT}/") or files.matches(name, keep)


def above_limits(
    own: Mapping[str, FileState], *, keep: Sequence[str], limit_bytes: int
) -> set[str]:
    """Names of a node's files that are not saved: what the user keeps comes first, then the newest
    files."""
    size, num = limit_bytes, runs.OUTPUT_LIMIT_FILES
    left_out: set[str] = set()
    for name in sorted(own, key=lambda name: (not is_kept(name, keep), -own[name].modified_ns)):
        if own[name].size <= size and num:
            size, num = size - own[name].size, num - 1
        else:
            left_out.add(name)
    return left_out


def limits(own: Mapping[str, FileState], left_out: Collection[str], *, limit_bytes: int) -> str:
    """Warning that names files above the limits."""
    total = sum(seen.size for seen in own.values())
    return (
        f"{len(left_out):,} files are not saved: {listed(sorted(left_out))}. The folders "
        f"hold {total / 2**30:.1f} GiB in {len(own):,} files, and at most "
        f"{limit_bytes / 2**30:.0f} GiB in {runs.OUTPUT_LIMIT_FILES:,} files are "
        "kept: those in $TRAIN_OUTPUT and of --keep-files first, then the newest. Download "
        "data to $TRAINING_CACHE_DIR, or give --skip-files"
    )


def newest_work(changed: Mapping[str, int]) -> int:
    """Latest of some files' changes, without those of trackers and logs; 0: there is none."""
    return max((at for name, at in changed.items() if not TRACKERS.search(name)), default=0)


def shortfall(newest_ns: int, now: float) -> str:
    """Warning about the files of a job at its end; "" if nothing is missing.

    Args:
        newest_ns: the newest change of a saved file, Unix time; 0: none is saved.
        now: Unix time.
    """
    if not newest_ns:
        return "no file was saved: keep results in the working folder, in HOME or in $TRAIN_OUTPUT"
    age_s = now - newest_ns / 1e9
    return f"its newest file is from {duration(age_s)} before its end" if age_s > _OLD_S else ""
