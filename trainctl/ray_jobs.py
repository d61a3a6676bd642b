"""Ray jobs on the head of a cluster, through its dashboard.

Not the jobs of ``trainctl submit``, which bring a cluster: these are processes on a standing
cluster.
"""

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trainctl.aws.errors import CliError

#: Ray starts a process for each job before it answers.
_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RayJob:
    """One job as Ray knows it."""

    id: str
    status: str
    """``PENDING``, ``RUNNING``, ``STOPPED``, ``SUCCEEDED`` or ``FAILED``."""
    message: str
    """Ray's sentence about its state."""

    @property
    def is_over(self) -> bool:
        return self.status not in ("PENDING", "RUNNING")


class RayJobs:
    """The jobs of one cluster.

    All methods raise CliError where the dashboard's answer is not the expected one.
    """

    def __init__(self, *, host: str, port: int, token: str) -> None:
        """Args:
        host, port: of the dashboard, as seen from here.
        token: of the cluster.
        """
        self._host, self._port, self._token = host, port, token

    def all(self) -> list[RayJob]:
        """The jobs that were submitted to the cluster since it started."""
        found = self._ask("GET", "/api/jobs/")
        return [_job(each) for each in found] if isinstance(found, list) else []

    def find(self, job: str) -> RayJob:
        """One job as it is now."""
        return _job(self._ask("GET", f"/api/jobs/{job}"))

    def submit(self, job: str, command: str, *, variables: Mapping[str, str]) -> None:
        """Start a job on the head. Ray refuses a name that it has seen.

        Args:
            command: for a shell.
            variables: beside those of the node.
        """
        order = {
            "submission_id": job,
            "entrypoint": command,
            "runtime_env": {"env_vars": dict(variables)},
        }
        self._ask("POST", "/api/jobs/", order)

    def log(self, job: str) -> str:
        """Output of a job so far."""
        found = self._ask("GET", f"/api/jobs/{job}/logs")
        return str(found["logs"]) if isinstance(found, dict) and "logs" in found else ""

    def stop(self, job: str) -> None:
        """Tell a job to end; it may take a moment."""
        self._ask("POST", f"/api/jobs/{job}/stop")

    def _ask(self, method: str, path: str, body: object = None) -> object:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        content = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, body=content, headers=headers)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise CliError(
                f"Ray's dashboard on the head does not answer: {error!r}. "
                "trainctl cluster status shows its state"
            ) from None
        finally:
            connection.close()
        if answer.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            raise CliError(
                "the head refuses the deployment's token, which has changed since the cluster "
                "started: take the cluster down and up again"
            )
        if answer.status != http.client.OK:
            lines = text.strip().splitlines() or [answer.reason]
            raise CliError(f"Ray refuses {method} {path} ({answer.status}): {lines[-1]}")
        try:
            found: object = json.loads(text)
        except ValueError:
            raise CliError(f"Ray's dashboard answers {path} with no JSON: {text[:200]}") from None
        return found


def _job(values: object) -> RayJob:
    fields = values if isinstance(values, dict) else {}
    return RayJob(
        id=str(fields.get("submission_id") or ""),
        status=str(fields.get("status") or ""),
        message=str(fields.get("message") or ""),
    )
