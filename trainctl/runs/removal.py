"""Removal of a run or a data set from the bucket: what uses it, a question, and its files."""

import re
from datetime import UTC, datetime

from contract import runs, times
from contract.text import byte_size, counted, utc
from trainctl import output
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import UsageError

#: More jobs than this are never queued and running.
_MOST_JOBS = 1000


def users(deployment: Deployment, prefix: str) -> list[str]:
    """IDs of the queued and running jobs that belong to a run, or name a place below a prefix.

    A job whose order this version does not understand may do so too.

    Args:
        prefix: of a run or a data set, with a slash at its end.
    """
    named = re.compile(rf"/{re.escape(prefix[:-1])}(?![\w.-])")
    jobs = deployment.jobs.newest(limit=_MOST_JOBS, running=True)
    return [
        job.id
        for job in jobs
        if job.spec is None
        or named.search(
            " ".join([f"/runs/{job.run}", *job.spec.command, *job.spec.variables.values()])
        )
    ]


def remove(
    deployment: Deployment, what: str, prefix: str, *, index_key: str = "", yes: bool, as_json: bool
) -> None:
    """Remove all objects below a prefix, once a person has agreed.

    Args:
        what: names it, such as ``run 'mine'``.
        prefix: with a slash at its end: without one, ``a`` would remove ``ab`` too.
        index_key: key of an object that belongs to the others and is removed first.

    Raises:
        UsageError: there is nothing, or it is in use, or there is nobody to ask.
    """
    bucket = deployment.bucket
    found = [each for each in bucket.stored(index_key) if each.key == index_key] if index_key else []
    found += bucket.stored(prefix)
    if not found or prefix.count("/") > 2:  # a part of a data set is none
        group = prefix.partition("/")[0]
        raise UsageError(f"there is no {what} in {bucket.uri}: trainctl {group} ls lists them")
    if jobs := users(deployment, prefix):
        raise UsageError(
            f"{what} is in use by {', '.join(jobs)}: wait until that has ended, or end it with "
            f"trainctl stop {jobs[0]}"
        )
    # On a standing cluster or a laptop a run trains without a job; its lease is renewed.
    leases = [each.modified for each in found if f"/{runs.LEASES_DIR}/" in each.key]
    if leases and (datetime.now(tz=UTC) - max(leases)).total_seconds() < times.LEASE_S:
        raise UsageError(
            f"{what} is being trained, or was within the last {times.LEASE_S} s: stop it first"
        )
    size = sum(each.size for each in found)
    changed = max(each.modified for each in found)
    words = f"{what}: {counted(len(found), 'file')}, {byte_size(size)}, last changed {utc(changed)}"
    output.confirm(f"Remove {words}?", yes=yes, default=False)
    bucket.delete([each.key for each in found])
    if as_json:
        output.print_json({"removed": what, "files": len(found), "size": size})
    else:
        output.say(f"removed {words}")
