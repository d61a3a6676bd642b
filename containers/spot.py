"""Spot notices: polls the instance metadata and has Ray drain the node.

ECS drains only the tasks of services when a host is taken away; a job's workers are not among them.
So every worker asks its instance itself. Ray then starts nothing more on this node, tells the
training, which saves, and counts the loss as no failure.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from containers.host import machine
from contract import nodes, times

#: Set by a rehearsal, as the SDKs of AWS read it.
ENDPOINT: Final = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
_DEFAULT_ENDPOINT: Final = "http://169.254.169.254"
_TOKEN_LASTS_S: Final = 21_600
_TIMEOUT_S: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """Notice that this host will be taken away."""

    action: str
    """``terminate``, ``stop`` or ``hibernate``."""
    at: float
    """When, as Unix time in seconds."""

    def seconds(self) -> int:
        """Seconds left."""
        return max(0, round(self.at - time.time()))


class Instance:
    """The metadata of the instance below this container, version 2."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._place = parts.netloc or parts.path
        self._token = ""
        self._token_until = 0.0

    def notice(self) -> Notice | None:
        """The notice, if there is one.

        Raises:
            OSError: no answer, as where there is no instance.
        """
        if time.monotonic() > self._token_until:
            lasts = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_LASTS_S)}
            status, body = machine.ask(
                self._place, "/latest/api/token", method="PUT", headers=lasts, timeout_s=_TIMEOUT_S
            )
            if status != HTTPStatus.OK:
                raise OSError(f"no token: HTTP {status}")
            self._token = body
            self._token_until = time.monotonic() + _TOKEN_LASTS_S / 2
        status, body = machine.ask(
            self._place,
            "/latest/meta-data/spot/instance-action",
            headers={"X-aws-ec2-metadata-token": self._token},
            timeout_s=_TIMEOUT_S,
        )
        if status == HTTPStatus.UNAUTHORIZED:
            self._token_until = 0.0
        if status != HTTPStatus.OK:
            return None
        return parse(body, now=time.time())


def parse(body: str, *, now: float) -> Notice:
    """``{"action": "terminate", "time": "2026-11-21T09:30:00Z"}`` at Unix time ``now``."""
    try:
        found = json.loads(body)
        at = datetime.fromisoformat(found["time"].replace("Z", "+00:00")).timestamp()
        return Notice(action=str(found["action"]), at=at)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Notice(action="terminate", at=now + times.SPOT_NOTICE_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """Tells Ray that this node goes.

    Ray's own command for that is hidden, and may change: this is the one place that uses it.
    """

    head: str
    address: str
    """Address of this node."""
    environment: Mapping[str, str]
    say: Callable[[str], None]

    def __call__(self, notice: Notice) -> bool:
        """Return whether Ray has taken note."""
        script = (
            "import sys, ray\n"
            "ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')\n"
            "print(next(n['NodeID'] for n in ray.nodes() if n['Alive'] and "
            "n['NodeManagerAddress'] == sys.argv[2]))\n"
        )
        gcs = f"{self.head}:{nodes.GCS_PORT}"
        found = self._run([sys.executable, "-c", script, gcs, self.address])
        if found is None:
            return False
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
        command += ["--address", gcs, "--node-id", found.split()[-1]]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        command += ["--reason-message", f"spot: {notice.action}"]
        # Computed late, because finding the node took seconds. Ray ends the node before its host:
        # to Ray Train, a node that ends as announced is no failure, and one that ends earlier is.
        left = max(1, notice.seconds() - times.SPOT_MARGIN_S)
        command += ["--deadline-remaining-seconds", str(left)]
        return self._run(command) is not None

    def _run(self, command: list[str]) -> str | None:
        try:
            done = subprocess.run(
                command,
                env=dict(self.environment),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except subprocess.TimeoutExpired:
            self.say("Ray does not answer about draining this node")
            return None
        if done.returncode:
            self.say(f"Ray does not drain this node: {done.stderr.strip()[-500:]}")
            return None
        return done.stdout


def watch(
    drain: Callable[[Notice], bool],
    say: Callable[[str], None],
    ended: threading.Event,
    *,
    endpoint: str | None = None,
    poll_s: float = times.SPOT_POLL_S,
) -> None:
    """Ask until there is a notice or ``ended`` is set; runs in a separate thread."""
    instance = Instance(endpoint or os.environ.get(ENDPOINT) or _DEFAULT_ENDPOINT)
    misses = 0
    while not ended.wait(poll_s):
        try:
            notice = instance.notice()
            misses = 0
        except OSError as error:
            # Late or throttled when a container starts: giving up would hide every later notice.
            misses += 1
            if misses == 3:
                say(
                    f"the instance metadata service does not answer ({error}): until it does, "
                    "this host may be reclaimed without notice"
                )
            continue
        if notice:
            say(f"this host will {notice.action} in {notice.seconds()} s")
            if drain(notice):
                return
