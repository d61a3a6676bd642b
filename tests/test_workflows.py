"""The workflows break no rule of zizmor (syntax, pinned actions, rights, injection), and run what a
laptop runs. What only GitHub itself can show is in docs/limits.md."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # PyYAML, which Ray brings along

from contract.images import content_tag
from tests.conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ZIZMOR = Path(sys.executable).parent / "zizmor"


def zizmor(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ZIZMOR, "--offline", "--persona", "pedantic", "--no-progress", *files],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_linter_finds_nothing() -> None:
    assert [path.name for path in WORKFLOWS] == [
        "check.yml",
        "images.yml",
        "night.yml",
        "scan.yml",
    ]
    run = zizmor(*WORKFLOWS, ROOT / ".github" / "dependabot.yml")
    assert run.returncode == 0, run.stdout + run.stderr


def jobs(path: Path) -> dict[str, str]:
    """The text of each job of a workflow."""
    body = path.read_text().partition("\njobs:\n")[2]
    parts = re.split(r"^  (\w+):\n", body, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_images_are_pushed_from_main_only_after_the_checks() -> None:
    check, images, *_ = WORKFLOWS
    assert "  push:\n    branches: [main]\n" in check.read_text()
    caller = jobs(check)["images"]
    assert "needs: check\n" in caller
    assert "if: github.event_name == 'push' &&" in caller
    # Nothing else starts it.
    assert re.findall(r"^on:\n((?:  .*\n)+)", images.read_text(), re.MULTILINE) == [
        "  workflow_call:\n"
    ]


# --- the images -----------------------------------------------------------------------------------
JOBS = ("look", "build", "push", "attest")
#: What the action of AWS leaves for the commands after it.
CREDENTIALS = {"AWS_SESSION_TOKEN": "of-the-role", "AWS_REGION": "us-east-1"}


@dataclass(kw_only=True)
class Outcome:
    """What a run of the workflow came to."""

    jobs: dict[str, str] = field(default_factory=dict)
    """``success``, ``failure`` or ``skipped``."""
    outputs: dict[str, str] = field(default_factory=dict)
    said: str = ""
    summary: str = ""


def run_workflow(
    folder: Path, programs: Mapping[str, str], after_job: Callable[[str], None]
) -> Outcome:
    """Run the commands of ``images.yml`` as GitHub does: job by job, by its ``needs`` and ``if``.
    Actions are left out, but for what the commands after them find.

    Args:
        programs: texts of those that take the place of the runner's.
        after_job: called with the name of each job that has run.
    """
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    summary, output = folder / "summary", folder / "output"
    machine = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "DOCKER_CONFIG": str(folder / "docker-config"),
        "GITHUB_STEP_SUMMARY": str(summary),
        "GITHUB_OUTPUT": str(output),
        "GITHUB_ACTOR": "anna",
        "GITHUB_REPOSITORY": "Acme/Train",
        "GITHUB_REPOSITORY_OWNER": "Acme",
    }
    workflow = yaml.safe_load(WORKFLOWS[1].read_text())
    assert workflow["defaults"] == {"run": {"shell": "bash"}}
    known = {f"vars.{kind.upper()}_REPOSITORY": f"ecr.test/a/{kind}" for kind in ("head", "worker")}
    known |= {"vars.TORCH_CPU_INDEX": "", "github.event.repository.visibility": "private"}
    known |= {"github.run_id": "7", "github.token": "t"}
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
            outcome.said += done.stdout
            if done.returncode:
                outcome.jobs[name] = "failure"
                break
            for line in output.read_text().splitlines():
                key, _, value = line.partition("=")
                known[f"steps.{step['id']}.outputs.{key}"] = value
        for key, value in job.get("outputs", {}).items():
            known[f"needs.{name}.outputs.{key}"] = filled(value, known, missing="")
            outcome.outputs[f"needs.{name}.outputs.{key}"] = known[f"needs.{name}.outputs.{key}"]
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


#: ``aws ecr``, with ECR's answers in files by repository. As the AWS CLI: a list as text is its
#: elements, an empty one nothing; exit code 254 where the service refuses, 253 without credentials.
AWS = """#!{python}
import json, os, pathlib, sys
import jmespath
if not os.environ.get("AWS_SESSION_TOKEN"):
    sys.exit(253)
if sys.argv[2] == "get-login-password":
    sys.exit(print("password"))
assert sys.argv[2] == "batch-get-image"
given = dict(zip(sys.argv[3::2], sys.argv[4::2]))
answer = json.loads(pathlib.Path({folder!r}, given["--repository-name"] + ".json").read_text())
if "Error" in answer:
    print("An error occurred (" + answer["Error"]["Code"] + ")", file=sys.stderr)
    sys.exit(254)
assert given["--image-ids"] == "imageTag={tag}"
print("\\t".join(jmespath.search(given["--query"], answer)))
"""
#: ``docker``: notes what it is asked; runs and builds nothing beside credentials.
DOCKER_COMMAND = """#!/bin/sh
echo "$*" >>{folder}/calls
case "$1 $2" in
    "build --file") [ -z "$AWS_SESSION_TOKEN" ] ;;
    "run --rm") [ -z "$AWS_SESSION_TOKEN" ] && echo '{{"steps": 2, "status": "succeeded"}}' ;;
    login*) cat >/dev/null ;;
    "image inspect")
        case "$*" in
            *RepoDigests*) echo '["ecr.test/a/head@sha256:1", "ecr.test/a/worker@sha256:1"]' ;;
            *) cat {folder}/content ;;
        esac ;;
    "manifest inspect") grep -q '"failures": \\[\\]' "{folder}/$(basename "${{3%:*}}").json" ;;
esac
"""
#: ``gh``: one version of each package; notes what is removed.
GH = """#!/bin/sh
case "$*" in
    "api repos/"*) echo Organization ;;
    *DELETE*) echo "DELETE $4" >>{folder}/calls ;;
    *) echo 5 ;;
esac
"""
#: As the reference of ECR's BatchGetImage has them.
THERE = {"images": [{"imageId": {"imageTag": "TAG"}, "repositoryName": "a/head"}], "failures": []}
MISSING = {
    "images": [],
    "failures": [
        {
            "imageId": {"imageTag": "TAG"},
            "failureCode": "ImageNotFound",
            "failureReason": "Requested image not found",
        }
    ],
}
LOCKED = {"images": [], "failures": [{**MISSING["failures"][0], "failureCode": "KmsError"}]}
DENIED = {"Error": {"Code": "AccessDeniedException"}}


class Runner:
    """Runs the workflow where ECR gives these answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "a").mkdir()
        (folder / "content").write_text("layers and settings\n")

    def __call__(
        self, head: Any, worker: Any, after_job: Callable[[str], None] = lambda _job: None
    ) -> Outcome:
        for name, answer in (("head", head), ("worker", worker)):
            for file in (f"a/{name}.json", f"{name}.json"):
                (self.folder / file).write_text(json.dumps(answer))
        programs = {
            "aws": AWS.format(
                python=sys.executable, folder=str(self.folder), tag=content_tag(ROOT)
            ),
            "docker": DOCKER_COMMAND.format(folder=self.folder),
            "gh": GH.format(folder=self.folder),
            "sudo": "#!/bin/sh\n",
        }
        return run_workflow(self.folder, programs, after_job)

    def calls(self, *starts: str) -> list[str]:
        """What docker was asked, of these commands."""
        file = self.folder / "calls"
        return [line for line in file.read_text().splitlines() if line.startswith(starts)]


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def test_nothing_is_built_where_both_images_are_there(runner: Runner) -> None:
    outcome = runner(THERE, THERE)
    assert outcome.jobs == dict.fromkeys(JOBS, "skipped") | {"look": "success"}, outcome.said
    assert f"Both images have the tag {content_tag(ROOT)} already" in outcome.summary


@pytest.mark.parametrize("head", [THERE, MISSING])
def test_what_is_missing_is_built_tried_out_and_pushed(runner: Runner, head: Any) -> None:
    outcome = runner(head, MISSING)
    assert outcome.jobs == dict.fromkeys(JOBS, "success") | {"attest": "skipped"}, outcome.said
    tag = content_tag(ROOT)
    kinds = ["head", "worker"]
    builds = runner.calls("build ")
    assert [re.findall(r"--target (\w+)", each)[0] for each in builds] == kinds, "once"
    staged = [f"ghcr.io/acme/train/{kind}:run-7" for kind in kinds]
    assert runner.calls("push ghcr.io") == [f"push {each}" for each in staged]
    assert runner.calls("pull") == [f"pull {each}" for each in staged]
    assert runner.calls("DELETE") == [
        f"DELETE orgs/Acme/packages/container/train%2F{kind}/versions/5" for kind in kinds
    ]
    assert len(runner.calls("run --rm")) == 4, "two recipes in each image, once"
    missing = [kind for kind in kinds if kind == "worker" or head is MISSING]
    assert runner.calls("push ecr") == [f"push ecr.test/a/{kind}:{tag}" for kind in missing]
    assert [kind for kind in kinds if "digest" in json.loads(outcome.summary)[kind]] == missing
    # What was there already was not listed here: nothing is said of it.
    assert [kind for kind in kinds if outcome.outputs[f"needs.push.outputs.{kind}"]] == missing


def test_what_is_not_what_was_tried_out_is_not_pushed(runner: Runner) -> None:
    def change(job: str) -> None:
        if job == "build":
            (runner.folder / "content").write_text("other layers\n")

    outcome = runner(MISSING, MISSING, after_job=change)
    states = {"push": "failure", "attest": "skipped"}
    assert outcome.jobs == dict.fromkeys(JOBS, "success") | states
    assert "::error::What was staged is not what was tried out" in outcome.said
    assert runner.calls("push ecr", "login --username AWS") == []


@pytest.mark.parametrize("answer", [DENIED, LOCKED])
@pytest.mark.parametrize("other", [THERE, MISSING])
def test_where_ecr_refuses_the_workflow_fails(runner: Runner, answer: Any, other: Any) -> None:
    outcome = runner(other, answer)
    assert outcome.jobs == dict.fromkeys(JOBS, "skipped") | {"look": "failure"}
    assert "AccessDeniedException" in outcome.said or "ECR answers KmsError" in outcome.said
    assert outcome.summary == ""


#: ``aws ecr`` for the weekly scan: the status, then one after it, and critical findings.
SCAN = """#!/bin/sh
case "$*" in
    *start-image-scan*) exit 254 ;;
    *imageScanStatus.status*) sed -n 1p {folder}/statuses; sed -i '1{{$!d}}' {folder}/statuses ;;
    *CRITICAL*) echo {critical} ;;
esac
"""


@pytest.mark.parametrize(
    ("statuses", "critical", "passes"),
    [
        # Basic scanning ends; continuous enhanced scanning does not (aws/aws-sdk#288).
        ("IN_PROGRESS COMPLETE", "None", True),
        ("ACTIVE", "None", True),
        ("ACTIVE", "2", False),
        ("SCAN_ELIGIBILITY_EXPIRED", "None", False),
        ("UNSUPPORTED_IMAGE", "None", False),
    ],
)
def test_the_weekly_scan_takes_both_modes_of_ecr(
    tmp_path: Path, statuses: str, critical: str, passes: bool
) -> None:
    (tmp_path / "statuses").write_text("\n".join(statuses.split()) + "\n")
    programs = {"aws": SCAN.format(folder=tmp_path, critical=critical), "sleep": "#!/bin/sh\n"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    workflow = yaml.safe_load((ROOT / ".github/workflows/scan.yml").read_text())
    (step,) = (each for each in workflow["jobs"]["scan"]["steps"] if "run" in each)
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step["run"]],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "HEAD": "ecr.test/a/head",
            "WORKER": "ecr.test/a/worker",
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is passes, done.stdout + done.stderr
