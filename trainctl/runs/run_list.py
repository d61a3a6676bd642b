"""Runs in the deployment's bucket and their checkpoints, from their files there.

Jobs are remembered by AWS for 90 days; a run is in the bucket for as long as its files are.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, Final

from contract import runs
from contract.errors import InputError
from contract.job import Outcome
from store.bucket import Stored
from trainctl.aws.deployment_bucket import DeploymentBucket, json_object
from trainctl.aws.errors import UsageError
from training import recipes
from training.record.events import described
from training.record.result import SUCCEEDED, measures_of

#: Requests to S3 at a time.
_AT_ONCE: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint of a recipe."""

    step: int
    """Optimizer updates that it is after."""
    saved: datetime
    """When its newest file was written."""
    size: int
    """In bytes."""
    is_complete: bool
    """True if all of its files are there; only such a checkpoint is used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Summary of a run from its files in the bucket."""

    name: str
    recipe: str
    """By its settings, or else by the order of its last job; empty for a program of the user's
    own."""
    state: str
    """State of its last job, as ``trainctl ls`` has it; empty where that is not known."""
    reason: str
    """How its last job ended, in words; empty before that, and where there was none."""
    step: int | None
    """The last step that it is known to have reached: optimizer updates."""
    measure: str
    """Its main measure in words, such as ``accuracy 93.61%``; empty before the first evaluation."""
    updated: datetime
    """When its newest file was written."""
    size: int
    """Size of all its files, in bytes."""


def newest(
    bucket: DeploymentBucket, *, limit: int, unfinished: Mapping[str, tuple[str, str]]
) -> list[Run]:
    """The runs whose files changed last, newest first.

    Args:
        bucket: of the deployment.
        limit: how many.
        unfinished: runs of the jobs that have not ended, with their recipes and states.
    """
    _files, names = bucket.listed(f"{runs.RUNS_PREFIX}/")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        changed = pool.map(lambda name: _changed(bucket, name), names)
        there = [(when, name) for when, name in zip(changed, names, strict=True) if when]
        there.sort(reverse=True)
        found = pool.map(lambda pair: _run(bucket, pair[1], unfinished), there[:limit])
        return sorted(found, key=lambda run: run.updated, reverse=True)


def _changed(bucket: DeploymentBucket, name: str) -> datetime | None:
    """Last time that a run wrote a file; None where it has none but the leases of starts that were
    refused.

    A recipe writes into the run's folder itself all the time. Its checkpoints, which may be
    thousands of files, are not listed; all files are where a program has written none there.
    """
    prefix = f"{runs.RUNS_PREFIX}/{name}/"
    files = bucket.listed(prefix)[0] or bucket.stored(prefix)
    leases = f"{prefix}{runs.LEASES_DIR}/"
    return max((each.modified for each in files if not each.key.startswith(leases)), default=None)


def _run(bucket: DeploymentBucket, name: str, unfinished: Mapping[str, tuple[str, str]]) -> Run:
    prefix = f"{runs.RUNS_PREFIX}/{name}/"
    files = bucket.stored(prefix)
    config = json_object(bucket.get(f"{prefix}{runs.CONFIG_FILE}"))
    result = json_object(bucket.get(f"{prefix}{runs.RESULT_FILE}"))
    steps = [each.step for each in _checkpoints(bucket, prefix, files) if each.is_complete]
    progress = json_object(bucket.get(f"{prefix}{runs.PROGRESS_FILE}"))
    done = [progress.get("step"), result.get("steps")]
    record = _record(bucket, name, files)
    state, reason = str(result.get("status", "")), ""
    with contextlib.suppress(InputError):
        outcome = Outcome.from_json(json.dumps(record))
        state, reason = outcome.brief, outcome.reason
    recipe, state = unfinished.get(name, (str(record.get("recipe", "")), state))
    return Run(
        name=name,
        recipe=str(config.get("recipe") or recipe),
        state=state,
        reason="" if name in unfinished else reason,
        step=max([*steps, *(each for each in done if isinstance(each, int))], default=None),
        measure=next(iter(measures(result)), ""),
        updated=max(each.modified for each in files),
        size=sum(each.size for each in files),
    )


def _record(bucket: DeploymentBucket, name: str, files: Sequence[Stored]) -> dict[str, object]:
    """How the run's last job ended; empty where no job trained it."""
    # Those of a run of this name that was removed are older than all files.
    since = min(each.modified for each in files)
    ends = [each for each in bucket.stored(f"{runs.ENDS_PREFIX}/{name}/") if each.modified >= since]
    records = [each for each in ends if each.key.endswith(".json")]
    if not records:
        return {}
    return json_object(bucket.get(max(records, key=lambda each: each.modified).key))


def measures(result: Mapping[str, object]) -> list[str]:
    """The measures of a ``result.json`` in words, those that its recipe declares first."""
    # A run may be of a recipe that this version does not know.
    known = [recipe for recipe in recipes.ALL if recipe.name == result.get("recipe")]
    declared = [measure for recipe in known for measure in recipe.measures]
    found = measures_of(result)
    names = dict.fromkeys([*(each.name for each in declared), *found])
    return [described(name, declared).phrase(found[name]) for name in names if name in found]


def use(bucket: DeploymentBucket, run: str, result: Mapping[str, object]) -> list[str]:
    """Lines that use the model of a run by its ``result.json``; empty before it is complete."""
    known = [recipe for recipe in recipes.ALL if recipe.name == result.get("recipe")]
    if not known or result.get("status") != SUCCEEDED:
        return []
    settings = json_object(bucket.read_of_run(run, runs.CONFIG_FILE))
    return known[0].use(bucket.run(run).uri, settings)


def files_of(bucket: DeploymentBucket, run: str) -> list[Stored]:
    """All files of a run.

    Raises:
        InputError: no run can have that name.
        UsageError: there is no such run.
    """
    files = bucket.stored(runs.run_prefix(run))
    if not files:
        command = "runs ls" if "://" in bucket.uri else "ls"
        raise UsageError(f"there is no run {run!r} in {bucket.uri}: trainctl {command} lists them")
    return files


def checkpoints(bucket: DeploymentBucket, run: str) -> list[Checkpoint]:
    """The checkpoints of a recipe's run, newest first. Raises as ``files_of``."""
    return _checkpoints(bucket, runs.run_prefix(run), files_of(bucket, run))


def _checkpoints(
    bucket: DeploymentBucket, prefix: str, files: Sequence[Stored]
) -> list[Checkpoint]:
    folder = f"{prefix}{runs.CHECKPOINTS_DIR}/"
    # Two writers of one step have a folder each: one of them had lost the run.
    of_key: dict[tuple[int, int], dict[str, Stored]] = {}
    for each in files:
        name, _, file = each.key.removeprefix(folder).partition("/")
        key = runs.checkpoint_key(name) if each.key.startswith(folder) else None
        if key is not None and file:
            of_key.setdefault(key, {})[file] = each
    return [
        Checkpoint(
            step=step,
            saved=max(each.modified for each in parts.values()),
            size=sum(each.size for each in parts.values()),
            is_complete=_is_complete(bucket, parts),
        )
        for (step, _), parts in sorted(of_key.items(), key=lambda item: item[0], reverse=True)
    ]


def _is_complete(bucket: DeploymentBucket, parts: Mapping[str, Stored]) -> bool:
    """Check that a checkpoint has its manifest, which is written last, and every file in it.

    Contents are not compared: training does that before it uses one.
    """
    manifest = parts.get(runs.MANIFEST_FILE)
    if manifest is None:
        return False
    try:
        listed: dict[str, Any] = json.loads(bucket.get(manifest.key) or b"{}")["files"]
        sizes = {str(PurePosixPath(name)): each["bytes"] for name, each in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return all(name in parts and parts[name].size == size for name, size in sizes.items())
