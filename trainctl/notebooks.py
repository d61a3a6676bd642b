"""The notebook of the standing cluster: start it on the head, find it again, stop it."""

import re
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Final

from contract import nodes
from trainctl.aws.errors import CliError
from trainctl.ray_jobs import RayJob, RayJobs

#: A tunnel and a log are asked, no service of AWS.
POLL_S: Final = 0.5
#: A first start installs some 60 packages, from an index that may be slow.
START_S: Final = 600.0
STOP_S: Final = 330.0
#: A head that has just started: its agent, which starts jobs, comes after its dashboard.
AGENT_S: Final = 60.0
_NO_AGENT: Final = "No available agent"  # so Ray puts it
#: Seconds that Ray waits for a stopped job, which saves its last files meanwhile.
_GRACE: Final = {"RAY_JOB_STOP_WAIT_TIME_S": "300"}


def running(jobs: RayJobs) -> RayJob | None:
    """The notebook's job; None where it does not run."""
    found = [job for job in jobs.all() if _number(job.id) and not job.is_over]
    return max(found, key=lambda job: _number(job.id), default=None)


def start(
    jobs: RayJobs,
    *,
    address: str,
    variables: Mapping[str, str],
    report: Callable[[str], None],
) -> bool:
    """Have the notebook run, and wait until its page answers.

    Args:
        address: of the head, on which the page is to answer.
        variables: for the installation of its packages, and for its kernels.
        report: called with what it does, in words.

    Returns:
        Whether it had to be started.

    Raises:
        CliError: it does not start; the message has the end of its log.
    """
    job = running(jobs)
    is_new = job is None
    if job is None:
        last = max((_number(each.id) for each in jobs.all()), default=0)
        name = f"{nodes.NOTEBOOK_JOB}{last + 1}"
        command = ["python", "-m", "containers.notebook", "--address", address]
        _submit(jobs, name, shlex.join(command), variables={**variables, **_GRACE})
    else:
        name = job.id
    _wait_until_ready(jobs, name, report)
    return is_new


def _submit(jobs: RayJobs, name: str, command: str, *, variables: Mapping[str, str]) -> None:
    deadline = time.monotonic() + AGENT_S
    while True:
        try:
            jobs.submit(name, command, variables=variables)
        except CliError as error:
            if _NO_AGENT not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)
        else:
            return


def _wait_until_ready(jobs: RayJobs, name: str, report: Callable[[str], None]) -> None:
    deadline = time.monotonic() + START_S
    report("starting JupyterLab on the head")
    while True:
        job, log = jobs.find(name), jobs.log(name)
        said = [line.removeprefix("node: ") for line in log.splitlines() if line[:6] == "node: "]
        if job.is_over:
            tail = "\n".join(f"  {line}" for line in log.strip().splitlines()[-12:])
            raise CliError(
                f"JupyterLab does not start on the head ({job.status}):\n{tail or job.message}"
            )
        if nodes.NOTEBOOK_READY in said:
            return
        if time.monotonic() > deadline:
            raise CliError(
                f"JupyterLab is not up after {START_S / 60:.0f} min: "
                f"{said[-1] if said else job.message}. It keeps starting: trainctl notebook waits "
                "again, trainctl notebook --stop ends it"
            )
        if said:
            report(f"JupyterLab on the head: {said[-1]}")
        time.sleep(POLL_S)


def stop(jobs: RayJobs) -> bool:
    """End the notebook and wait until its files are saved; return whether it ran.

    Raises:
        CliError: it has not ended in time.
    """
    job = running(jobs)
    if job is None:
        return False
    jobs.stop(job.id)
    deadline = time.monotonic() + STOP_S
    while not jobs.find(job.id).is_over:
        if time.monotonic() > deadline:
            raise CliError(
                f"JupyterLab has not ended within {STOP_S:.0f} s: trainctl cluster down ends it "
                "with its head"
            )
        time.sleep(POLL_S)
    return True


def _number(job: str) -> int:
    """Number of a notebook's job; 0 for other jobs."""
    match = re.fullmatch(rf"{re.escape(nodes.NOTEBOOK_JOB)}(\d{{1,9}})", job)
    return int(match[1]) if match else 0
