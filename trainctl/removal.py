"""Removal of a run or a data set from the bucket: what uses it, a question, and its files."""

import re
from datetime import UTC, datetime

from contract.runs import LEASES_DIR
from contract.text import byte_size, counted, utc
from contract.times import LEASE_S
from trainctl import output
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import UsageError
from trainctl.aws.files import Bucket, Stored, json_object

#: More jobs than this are never queued and running.
_MOST_JOBS = 1000


def users(deployment: Deployment, prefix: str) -> list[str]:
    """IDs of the queued and running jobs that belong to a run, or name a place below a prefix.

    A job whose order this version does not understand may do so too.

    Args:
        prefix: of a run or a data set, with a slash at its end.
    """
    place = prefix.rstrip("/")
    named = re.compile(rf"/{re.escape(place)}(?![\w.-])")
    found = []
    for job in deployment.jobs.newest(limit=_MOST_JOBS, running=True):
        words = [f"/runs/{job.run}"]
        if job.spec:
            words += [*job.spec.command, *job.spec.variables.values()]
        if job.spec is None or named.search(" ".join(words)):
            found.append(job.id)
    return found


def remove(
    deployment: Deployment,
    what: str,
    prefix: str,
    *,
    first: str = "",
    hint: str,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove all objects below a prefix, once a person has agreed.

    Args:
        what: names it, such as ``run 'mine'``.
        prefix: with a slash at its end: without one, ``a`` would remove ``ab`` too.
        first: key of an object beside them, which is removed first.
        hint: command that lists what there is.

    Raises:
        UsageError: there is nothing, or it is in use, or there is nobody to ask.
    """
    bucket = deployment.bucket
    found = [each for each in bucket.stored(first) if each.key == first] if first else []
    found += bucket.stored(prefix)
    if not found:
        raise UsageError(f"there is no {what} in {bucket.uri}: {hint} lists them")
    if jobs := users(deployment, prefix):
        raise UsageError(
            f"{what} is in use by {', '.join(jobs)}: wait until that has ended, or end it with "
            f"trainctl stop {jobs[0]}"
        )
    if _is_trained(bucket, prefix, found):
        raise UsageError(f"{what} is being trained, by no job: end that, and wait {LEASE_S:g} s")
    size = sum(each.size for each in found)
    changed = max(each.modified for each in found)
    words = f"{what}: {counted(len(found), 'file')}, {byte_size(size)}, last changed {utc(changed)}"
    output.confirm(f"Remove {words}?", yes=yes, default=False)
    bucket.remove([each.key for each in found])
    if as_json:
        output.print_json({"removed": what, "files": len(found), "size": size})
    else:
        output.say(f"removed {words}")


def _is_trained(bucket: Bucket, prefix: str, found: list[Stored]) -> bool:
    """True if a process that is no job's, such as one of the standing cluster, holds the run."""
    leases = [each for each in found if each.key.startswith(f"{prefix}{LEASES_DIR}/")]
    if not leases:
        return False
    newest = max(leases, key=lambda each: each.key)
    age = datetime.now(tz=UTC) - newest.modified
    return age.total_seconds() < LEASE_S and not json_object(bucket.read(newest.key)).get(
        "released"
    )
