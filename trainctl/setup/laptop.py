"""Doctor's check of the local machine: Node.js, for a deploy."""

import subprocess
from typing import Final

from trainctl.setup.checks import Finding, bad, ok

#: The oldest Node.js that works, and the oldest that is still supported.
OLDEST_NODE: Final = 20
SUPPORTED_NODE: Final = 22
_NODE_FROM: Final = "install Node.js 22 or 24 with npm (https://nodejs.org/en/download)"
_TIMEOUT_S: Final = 20


def node() -> Finding:
    version = _printed("node", "--version")
    if not version:
        return bad(f"not found: {_NODE_FROM}")
    major = version.removeprefix("v").partition(".")[0]
    if not major.isdecimal() or int(major) < OLDEST_NODE:
        return bad(f"{version} is too old: {_NODE_FROM}")
    past = "" if int(major) >= SUPPORTED_NODE else "; past its support, and it still works"
    return ok(f"{version}{past}")


def _printed(*command: str) -> str:
    """Output of a program; empty if it is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
