"""A user's program on the head: its folders, what comes back into them, and where Ray saves.

For programs that use Ray, of which the head runs one. Recipes need none of it: they save their
checkpoints and their record themselves.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from containers.program.code import RAY_VARIABLE, Prepared
from containers.program.files import Mirror, open_mirror
from containers.program.launch import LINES, STARTUP
from contract import runs
from contract.files import OUTPUT, WORK
from contract.job import JobSpec
from contract.nodes import ENV_OUTPUT, ENV_RAY_NAMES, ENV_RAY_STORAGE, ENV_RUN, ENV_STORAGE


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadProgram:
    """What the command on the head is started with."""

    folder: Path | None
    """Where it runs; None: where the node's own program does."""
    environment: dict[str, str]
    """Variables, beside those of the node."""
    mirror: Mirror | None
    """Its files; None where they are not kept."""


def prepare(
    spec: JobSpec,
    own: Prepared,
    place: Path,
    environment: Mapping[str, str],
    *,
    make_mirror: Callable[[dict[str, Path], str], Mirror] = open_mirror,
) -> HeadProgram:
    """Set up a job's command on the head; ``mirror.restore()`` is still to be called.

    Only a user's code has files that are kept: a recipe saves checkpoints itself.

    Args:
        spec: the job's order.
        own: its code, if any, which has been unpacked into a folder below ``place``.
        place: a folder of the job's own on this node.
        environment: of the node.
        make_mirror: of the folders and the address.
    """
    storage = environment.get(ENV_STORAGE, "")
    if not storage.startswith("s3://") or own.folder is None:
        return HeadProgram(folder=own.folder, environment=own.environment, mirror=None)
    folders = {WORK: own.folder, OUTPUT: place / OUTPUT}
    names = place / "names"
    for folder in (*folders.values(), names):
        folder.mkdir(exist_ok=True)
    given = {
        ENV_RUN: spec.run,
        ENV_RAY_STORAGE: f"{storage}/{runs.ray_prefix(spec.run)}".rstrip("/"),
    }
    runtime = json.loads(own.environment.get(RAY_VARIABLE, '{"runtime_env": {}}'))["runtime_env"]
    variables = dict(runtime.get("env_vars", {}))
    # Of the command and of what Ray starts for it alike, on every node at the same place.
    paths = [str(STARTUP), variables.get("PYTHONPATH", "")]
    given["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    runtime["env_vars"] = {**variables, **given}
    # What the program writes and what comes back is not sent to the other nodes with its code.
    code = place / "code"
    shutil.copytree(own.folder, code, symlinks=True)
    runtime["working_dir"] = str(code)
    return HeadProgram(
        folder=own.folder,
        environment={
            "PYTHONUNBUFFERED": LINES,
            **own.environment,
            **given,
            RAY_VARIABLE: json.dumps({"runtime_env": runtime}),
            # A program may name a runtime environment of its own; without this, Ray refuses both.
            "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
            # Every few seconds, a line for each trial that waits its turn would call it impossible.
            # What can never be had, the head reports.
            "RAY_SCHEDULER_EVENTS": "0",
            ENV_RAY_NAMES: str(names),
            ENV_OUTPUT: str(folders[OUTPUT]),
        },
        mirror=make_mirror(folders, f"{storage}/{runs.output_prefix(spec.run)}"),
    )
