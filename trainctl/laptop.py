"""Doctor's checks of the local machine: Node.js and CDK for a deploy, the plug-in for shells."""

import json
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Final

from trainctl.checks import Checks, Finding, bad, ok
from trainctl.plugin import PLUGIN

#: The oldest Node.js that works, and the oldest that is still supported.
OLDEST_NODE: Final = 20
SUPPORTED_NODE: Final = 22
_NODE_FROM: Final = "install Node.js 22 or 24 with npm (https://nodejs.org/en/download)"
_PLUGIN_PAGE: Final = (
    "https://docs.aws.amazon.com/systems-manager/latest/userguide/"
    "session-manager-working-with-install-plugin.html"
)
_TIMEOUT_S: Final = 20


def of_a_deploy(project: Path) -> Checks:
    """Programs that ``make deploy`` runs on: Node.js, and the CDK in the project's folder."""
    return {"Node.js": node, "CDK command line": partial(cdk, project)}


def node() -> Finding:
    version = _printed("node", "--version")
    if not version:
        return bad(f"not found: {_NODE_FROM}")
    major = version.removeprefix("v").partition(".")[0]
    if not major.isdecimal() or int(major) < OLDEST_NODE:
        return bad(f"{version} is too old: {_NODE_FROM}")
    past = "" if int(major) >= SUPPORTED_NODE else "; past its support, and it still works"
    return ok(f"{version}{past}")


def cdk(project: Path) -> Finding:
    """Compare the CDK command line with the one that the project pins."""
    wanted = _version(project / "package.json")
    found = _version(project / "node_modules" / "aws-cdk" / "package.json")
    if found and found == (wanted or found):
        return ok(found)
    said = f"{found} is installed, and {wanted} is pinned" if found else "not installed yet"
    return Finding("next", f"{said}; make deploy installs it", f"npm ci --prefix {project}")


def plugin() -> Finding:
    if found := shutil.which(PLUGIN):
        return ok(found)
    said = f"{PLUGIN} is not installed; trainctl shell, open and notebook need it"
    return Finding("next", said, _PLUGIN_PAGE)


def _printed(*command: str) -> str:
    """Output of a program; empty if it is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: Path) -> str:
    """Version of a Node.js package, or the one of the CDK that it pins; empty without."""
    try:
        found = json.loads(package.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    pinned = found.get("devDependencies", {}).get("aws-cdk")
    return str(found.get("version") or pinned or "")
