"""Runs the commands of ``images.yml`` as GitHub does: job by job, by its ``needs`` and ``if``.

Actions are left out, but for what the commands after them find: the one of AWS leaves credentials.
"""

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]  # PyYAML, which Ray brings along

from tests.conftest import ROOT

WORKFLOW: Final = ROOT / ".github" / "workflows" / "images.yml"
CREDENTIALS: Final = {"AWS_SESSION_TOKEN": "of-the-role", "AWS_REGION": "us-east-1"}


@dataclass(kw_only=True)
class Outcome:
    """What a run of the workflow came to."""

    jobs: dict[str, str] = field(default_factory=dict)
    """``success``, ``failure`` or ``skipped``."""
    steps: list[str] = field(default_factory=list)
    """Names of those with commands that were run."""
    said: str = ""
    summary: str = ""


def run_workflow(
    folder: Path,
    *,
    variables: Mapping[str, str],
    programs: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
    after_job: Callable[[str], None] = lambda _job: None,
) -> Outcome:
    """
    Args:
        folder: an empty one.
        variables: of the repository.
        programs: texts of those that take the place of the runner's.
        after_job: called with the name of each job that has run.
    """
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    summary, output = folder / "summary", folder / "output"
    machine = {
        **os.environ,
        **(environment or {}),
        "PATH": f"{folder}:{os.environ['PATH']}",
        "DOCKER_CONFIG": str(folder / "docker-config"),
        "GITHUB_STEP_SUMMARY": str(summary),
        "GITHUB_OUTPUT": str(output),
    }
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow["defaults"] == {"run": {"shell": "bash"}}
    known = {f"vars.{name}": value for name, value in variables.items()}
    outcome = Outcome()
    for name, job in workflow["jobs"].items():
        needed = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
        if any(outcome.jobs[each] != "success" for each in needed) or not holds(job, known):
            outcome.jobs[name] = "skipped"
            continue
        outcome.jobs[name] = "success"
        own = dict(machine)
        for step in job["steps"]:
            if step.get("uses", "").startswith("aws-actions/configure-aws-credentials@"):
                own |= CREDENTIALS
            if "run" not in step:
                continue
            output.write_text("")
            given = {**workflow["env"], **job.get("env", {}), **step.get("env", {})}
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=ROOT,
                env=own | {key: filled(value, known) for key, value in given.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            outcome.steps.append(step["name"])
            outcome.said += done.stdout
            if done.returncode:
                outcome.jobs[name] = "failure"
                break
            for line in output.read_text().splitlines():
                key, _, value = line.partition("=")
                known[f"steps.{step['id']}.outputs.{key}"] = value
        for key, value in job.get("outputs", {}).items():
            known[f"needs.{name}.outputs.{key}"] = filled(value, known, missing="")
        after_job(name)
    outcome.summary = summary.read_text() if summary.exists() else ""
    return outcome


def holds(job: Mapping[str, Any], known: Mapping[str, str]) -> bool:
    """The condition of a job."""
    if "if" not in job:
        return True
    found = re.fullmatch(r"(\S+) == '(\w+)'", job["if"])
    assert found, job["if"]
    return known[found[1]] == found[2]


def filled(value: str, known: Mapping[str, str], *, missing: str | None = None) -> str:
    """A value of the workflow, with what GitHub puts in the place of its expressions."""

    def of(found: re.Match[str]) -> str:
        return known[found[1]] if missing is None else known.get(found[1], missing)

    return re.sub(r"\$\{\{ (\S+) \}\}", of, value)
