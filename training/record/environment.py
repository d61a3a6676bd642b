"""The machine and the versions that produced a run: ``environment.json``."""

import os
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

from contract import nodes
from training.system import machine

_HERE: Final = Path(__file__).parent


def environment() -> dict[str, object]:
    """Describe the machine that this process runs on, its packages and its command."""
    versions: dict[str, str | None] = {}
    for package in ("torch", "ray", "transformers", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        **versions,
        "platform": platform.platform(),
        "cpu": machine.cpu_name(),
        "cores": machine.num_cpus(),
        "gpus": machine.gpu_names(),
        "git_sha": os.environ.get(nodes.ENV_GIT_SHA)
        or machine.output("git", "-C", str(_HERE), "rev-parse", "HEAD")
        or None,
        "command": " ".join(["python -m training.launch", *sys.argv[1:]]),
        "started_at": datetime.now(tz=UTC).isoformat(timespec="seconds"),
    }
