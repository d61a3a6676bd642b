"""The workflows break no rule of zizmor (syntax, pinned actions, rights, injection), and run what a
laptop runs. What only GitHub itself can show is in docs/limits.md."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # PyYAML, which Ray brings along

from contract.images import content_tag
from tests.conftest import ROOT
from tests.image_workflow import Outcome, run_workflow

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
#: What may run beside the right to assume the role: actions of GitHub, AWS and this repository,
ACTIONS = {"actions/checkout", "aws-actions/configure-aws-credentials", "$/.github/actions/cache"}
#: programs of the runner,
PROGRAMS = {"aws", "docker", "echo", "exit", "printf", "python3", "sha256sum", "sudo", "tee"}
#: of them, those that run nothing of what is in an image,
DOCKER = ("buildx create", "image inspect", "login", "logout")
#: and the script that builds and pushes, as long as it is told to run nothing either.
HARMLESS = ("--print-tag", "--no-try-out", "--no-build")


#: Where the next command of a script starts, and words that are none.
SEPARATORS = r"[|;&()\n]|\b(?:do|then|else|in)\b"
KEYWORDS = {"case", "done", "esac", "fi", "for", "if"}


def risks(job: dict[str, Any]) -> list[str]:
    """What could hand the rights of a job to other people's code."""
    found = []
    for step in job["steps"]:
        action = step.get("uses", "").partition("@")[0]
        if action and action not in ACTIONS:
            found.append(action)
        script = step.get("run", "").replace("\\\n", " ")
        for command in re.split(SEPARATORS, script):
            program, _, rest = command.strip().partition(" ")
            if program in KEYWORDS or not re.match(r"[a-z./]+[\w.-]*$", program):
                continue
            publishes = rest.startswith("-m containers.publish ")
            safe = program in PROGRAMS
            safe &= program != "docker" or rest.startswith(DOCKER)
            safe &= program != "python3" or (publishes and any(map(rest.count, HARMLESS)))
            if not safe:
                found.append(command)
    return found


def test_what_has_the_right_to_push_runs_no_package_and_nobody_elses_action() -> None:
    seen = []
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            may_push = job["permissions"].get("id-token") == "write"
            if "steps" not in job:
                continue
            used = [step.get("uses", "") for step in job["steps"]]
            assert any("configure-aws-credentials@" in each for each in used) == may_push
            if may_push:
                seen.append(name)
                assert risks(job) == []
                # Nothing is built once the role is assumed.
                (role,) = (number for number, each in enumerate(used) if "credentials@" in each)
                after = "".join(step.get("run", "") for step in job["steps"][role:])
                assert "buildx" not in after
                assert "--no-try-out" not in after
    assert seen == ["look", "push", "scan"]


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
    "buildx build") [ -z "$AWS_SESSION_TOKEN" ] ;;
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

    def __call__(self, head: Any, worker: Any, **more: Any) -> Outcome:
        for name, answer in (("head", head), ("worker", worker)):
            for file in (f"a/{name}.json", f"{name}.json"):
                (self.folder / file).write_text(json.dumps(answer))
        programs = {
            "aws": AWS.format(
                python=sys.executable, folder=str(self.folder), tag=content_tag(ROOT)
            ),
            "docker": DOCKER_COMMAND.format(folder=self.folder),
            "sudo": "#!/bin/sh\n",
        }
        variables = {
            "HEAD_REPOSITORY": "ecr.test/a/head",
            "WORKER_REPOSITORY": "ecr.test/a/worker",
            "TORCH_CPU_INDEX": "",
        }
        return run_workflow(self.folder, variables=variables, programs=programs, **more)

    def calls(self, *starts: str) -> list[str]:
        """What docker was asked, of these commands."""
        file = self.folder / "calls"
        return [line for line in file.read_text().splitlines() if line.startswith(starts)]


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def test_nothing_is_built_where_both_images_are_there(runner: Runner) -> None:
    outcome = runner(THERE, THERE)
    assert outcome.jobs == {"look": "success", "build": "skipped", "push": "skipped"}, outcome.said
    assert f"Both images have the tag {content_tag(ROOT)} already" in outcome.summary


@pytest.mark.parametrize("head", [THERE, MISSING])
def test_what_is_missing_is_built_tried_out_and_pushed(runner: Runner, head: Any) -> None:
    outcome = runner(head, MISSING)
    assert set(outcome.jobs.values()) == {"success"}, outcome.said
    tag = content_tag(ROOT)
    kinds = ["head", "worker"]
    builds = runner.calls("buildx build")
    assert [re.findall(r"--target (\w+)", each)[0] for each in builds] == kinds * 2
    # An image each: the cache of one would replace the other's.
    assert [
        re.findall(r"--cache-from=type=gha,scope=(\w+)", each)[0] for each in builds
    ] == kinds * 2
    assert [re.findall(r"--cache-to=type=gha,scope=(\w+)", each) for each in builds] == [
        ["head"],
        ["worker"],
        [],
        [],
    ]
    # What decides whether a step is found in the cache is the same.
    asked = [re.sub(r" --cache-\S+", "", each) for each in builds]
    assert asked[:2] == asked[2:]
    assert len(runner.calls("run --rm")) == 4, "two recipes in each image, once"
    missing = [kind for kind in kinds if kind == "worker" or head is MISSING]
    assert runner.calls("push") == [f"push ecr.test/a/{kind}:{tag}" for kind in missing]
    assert [kind for kind in kinds if "digest" in json.loads(outcome.summary)[kind]] == missing


def test_what_is_not_what_was_tried_out_is_not_pushed(runner: Runner) -> None:
    def change(job: str) -> None:
        if job == "build":
            (runner.folder / "content").write_text("other layers\n")

    outcome = runner(MISSING, MISSING, after_job=change)
    assert outcome.jobs == {"look": "success", "build": "success", "push": "failure"}
    assert "::error::The cache has not kept what was tried out" in outcome.said
    assert runner.calls("push", "login") == []


@pytest.mark.parametrize("answer", [DENIED, LOCKED])
@pytest.mark.parametrize("other", [THERE, MISSING])
def test_where_ecr_refuses_the_workflow_fails(runner: Runner, answer: Any, other: Any) -> None:
    outcome = runner(other, answer)
    assert outcome.jobs == {"look": "failure", "build": "skipped", "push": "skipped"}
    assert "AccessDeniedException" in outcome.said or "ECR answers KmsError" in outcome.said
    assert outcome.summary == ""
