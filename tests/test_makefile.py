"""The commands a newcomer types: `make` explains itself, and installing fails in plain words."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contract.outputs import CORE_STACK, TRAINING_STACK
from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")


def run(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    # Without what an outer make passes on, which names targets and flags of its own.
    inherited = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    return subprocess.run(
        command,
        cwd=cwd,
        env=inherited | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def fake_python(folder: Path, answer: str) -> str:
    """A program that answers, whatever it is asked, as a Python would describe itself."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho {answer}\n")
    path.chmod(0o755)
    return str(path)


def test_make_alone_lists_targets_and_variables() -> None:
    listing = run("make")
    assert listing.returncode == 0, listing.stderr
    for target in [
        "demo",
        "test",
        "night",
        "test-fast",
        "check",
        "bench",
        "fashion",
        "lock",
        "clean",
    ]:
        assert f"\n  make {target} " in listing.stdout
    for target in ["synth", "diff", "deploy", "images", "destroy", "clean"]:
        assert f"\n  make {target} " in listing.stdout
    for variable in ["WORKERS", "TORCH_INDEX", "PYTHON_BIN", "FASHION"]:
        assert f"\n  {variable} " in listing.stdout


def test_demo_passes_its_workers_on() -> None:
    plan = run("make", "--dry-run", "demo", "WORKERS=3")
    assert plan.returncode == 0, plan.stderr
    assert "-m training.launch ddp --local --workers 3 --preset digits" in plan.stdout


def plan(*arguments: str, **environment: str) -> str:
    """What make would run; CI, which is set on a build machine, counts only where it is given."""
    dry = run("make", "--dry-run", *arguments, cwd=ROOT, **({"CI": ""} | environment))
    assert dry.returncode == 0, dry.stderr
    return dry.stdout


@pytest.mark.parametrize(
    ("target", "command", "unasked"),
    [
        ("deploy", f"deploy {CORE_STACK} {TRAINING_STACK}", "--require-approval never"),
        ("destroy", f"destroy {TRAINING_STACK} {CORE_STACK}", "--force"),
    ],
)
def test_what_changes_an_account_asks_first_unless_told_otherwise(
    target: str, command: str, unasked: str
) -> None:
    arguments = ["ARGS=-c preset=fsdp -c max_workers=4"]
    asked = plan(target, *arguments)
    assert f"node_modules/.bin/cdk {command}" in asked
    assert "-c preset=fsdp -c max_workers=4" in asked
    assert unasked not in asked
    assert unasked in plan(target, *arguments, "YES=1")
    assert unasked in plan(target, *arguments, CI="true")


def test_a_deploy_checks_the_account_first_with_the_same_arguments_unless_told_otherwise() -> None:
    check = "-m trainctl.first_deploy -c preset=fsdp\n"
    planned = plan("deploy", "ARGS=-c preset=fsdp")
    assert check in planned
    assert planned.index(check) < planned.index("node_modules/.bin/cdk deploy")
    assert check not in plan("deploy", "ARGS=-c preset=fsdp", "SKIP_DOCTOR=1")


def marker_expressions(*arguments: str) -> list[str]:
    """What each pytest of a plan is to run."""
    return re.findall(r'pytest .*-m "(.*?)"', plan(*arguments))


def test_make_test_needs_no_docker_engine() -> None:
    assert marker_expressions("test") == ["not engine and not night and not long"]
    # What runs in containers is looked for in one folder only.
    named = {path for path in (ROOT / "tests").rglob("*.py") if "mark.engine" in path.read_text()}
    assert {path.parent for path in named} - {Path(__file__).parent} == {ROOT / "tests/rehearsal"}


def test_ci_and_the_night_together_run_every_test_once() -> None:
    lines = (ROOT / ".ci" / "run").read_text()
    stages = re.findall(r"(?m)^once \S+ make (.*)$", lines)
    assert stages == ["check", "test-slow", "test-engine", "rehearse"]
    # Together they are all there are: what runs in containers is slow, too.
    assert marker_expressions("check") == ["not slow and not night"]
    assert marker_expressions("test-slow") == ["slow and not engine and not night"]
    assert marker_expressions("test-engine") == ["engine and not night"]
    assert marker_expressions("night") == ["night and not engine", "engine and night"]


@pytest.mark.parametrize(
    ("first", "second", "code"), [("true", "true", 0), ("exit 3", "true", 3), ("true", "exit 4", 4)]
)
def test_two_commands_side_by_side_both_count(first: str, second: str, code: int) -> None:
    def said(word: str, end: str) -> str:
        return f"sh -c 'echo {word}; {end}'"

    done = run("sh", ".ci/beside", said("one", first), said("two", second))
    assert done.returncode == code, done.stderr
    # The second one is shown as it comes, and so before the first.
    lines = done.stdout.splitlines()
    assert [line for line in lines if line in ("one", "two")] == ["two", "one"]


def node_project(folder: Path, *, node: str | None, npm: str | None) -> dict[str, str]:
    """A project in ``folder``, and a PATH on which Node and npm are these scripts, or lacking."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "node", folder / ".ci" / "node")
    (folder / "package-lock.json").write_text("{}")
    programs = folder / "bin"
    programs.mkdir()
    for name in ["sh", "dirname", "cmp", "cp", "date", "mkdir", "rm"]:
        (programs / name).symlink_to(shutil.which(name) or name)
    for name, script in {"node": node, "npm": npm}.items():
        if script is not None:
            (programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (programs / name).chmod(0o755)
    return {"PATH": str(programs)}


@pytest.mark.parametrize(
    ("node", "npm", "message"),
    [
        (None, None, "no Node.js found"),
        ("echo v18.19.0", "exit 0", "Node.js v18.19.0 is too old: install Node.js 22 or 24"),
        ("echo v20.1.0", None, "no npm found beside Node.js v20.1.0"),
        ("echo v20.1.0", "exit 1", "npm could not install"),
    ],
)
def test_a_node_that_will_not_do_is_named_with_the_remedy(
    node: str | None, npm: str | None, message: str, tmp_path: Path
) -> None:
    attempt = run("sh", ".ci/node", cwd=tmp_path, **node_project(tmp_path, node=node, npm=npm))
    assert attempt.returncode == 1
    assert f"error: {message}" in attempt.stderr
    assert not (tmp_path / "node_modules" / ".installed-lock.json").exists()


def test_node_modules_are_made_once_and_again_with_another_lock(tmp_path: Path) -> None:
    environment = node_project(
        tmp_path,
        node="echo v22.0.0",
        npm='echo "$*" >> calls; rm -rf node_modules; mkdir node_modules',
    )

    def make() -> str:
        done = run("sh", ".ci/node", cwd=tmp_path, **environment)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert make().startswith("node_modules: packages of package-lock.json ... ")
    assert make() == ""
    (tmp_path / "package-lock.json").write_text('{"lockfileVersion": 3}')
    assert make() != ""
    call = "ci --no-audit --no-fund --loglevel=error"
    assert (tmp_path / "calls").read_text().splitlines() == [call, call]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("unsupported usable 3.10.13 /bin/p", "Python 3.11, 3.12 or 3.13 is needed"),
        ("unsupported usable 3.14.0 /bin/p", "is Python 3.14.0"),
        ("supported novenv 3.12.1 /bin/p", "apt-get install python3-venv"),
    ],
)
def test_a_python_that_will_not_do_is_named_with_the_remedy(
    answer: str, message: str, tmp_path: Path
) -> None:
    environment = tmp_path / ".venv"
    python = fake_python(tmp_path, answer)
    attempt = run("sh", ".ci/venv", str(environment), PYTHON_BIN=python)
    assert attempt.returncode == 1
    assert message in attempt.stderr
    assert python in attempt.stderr
    assert not environment.exists()


def test_a_python_that_does_not_exist_is_named(tmp_path: Path) -> None:
    attempt = run("sh", ".ci/venv", str(tmp_path / ".venv"), PYTHON_BIN="/no/such/python")
    assert attempt.returncode == 1
    assert "no Python found (tried /no/such/python)" in attempt.stderr


def test_an_environment_stays_where_it_is_active_and_where_python_has_another_path(
    tmp_path: Path,
) -> None:
    project = tmp_path / "project"
    shutil.copytree(ROOT / ".ci", project / ".ci")
    (tmp_path / "link").symlink_to(project)
    base = Path(sys.base_prefix, "bin", "python3")
    other = tmp_path / "python3"
    other.symlink_to(base.resolve())
    # Installing pip would take most of the test's time.
    without_pip = tmp_path / "without-pip"
    version = ".".join(map(str, sys.version_info[:3]))
    without_pip.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec echo supported usable {version} "$0"\n'
        f'exec "{base}" "$@" --without-pip\n'
    )
    without_pip.chmod(0o755)

    def make(before: str = "", **environment: str) -> str:
        script = f"{before} sh .ci/venv .venv"
        done = run("sh", "-c", script, cwd=project, **({"PYTHON_BIN": ""} | environment))
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "(new)" in make(PYTHON_BIN=str(without_pip))
    installed = project / ".venv" / "installed"
    installed.touch()
    activate = ". .venv/bin/activate &&"
    assert make(activate) == ""
    assert make(activate, PYTHON_BIN="python3") == ""
    assert make(PYTHON_BIN=str(other)) == ""
    assert make(f"cd {tmp_path / 'link'} &&") == ""
    assert installed.exists()


@pytest.mark.slow
def test_an_environment_is_made_once_and_again_after_an_interruption(tmp_path: Path) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "requirements.txt").write_text("# nothing\n")
    command = ["sh", ".ci/venv", ".venv", "-r", "requirements.txt"]

    def make(*, activate: bool = False) -> str:
        before = ". .venv/bin/activate &&" if activate else ""
        done = run(
            *("sh", "-c", f"{before} {shlex.join(command)}"),
            cwd=tmp_path,
            PYTHON_BIN="python3" if activate else sys.executable,
            TORCH_INDEX="",
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "(new)" in make()
    began = time.monotonic()
    assert make() == ""
    assert time.monotonic() - began < 10

    # Left by a user who pressed Ctrl-C: the marker, and packages in pieces.
    (tmp_path / ".venv" / "incomplete").touch()
    (tmp_path / ".venv" / "pieces").touch()
    # Also where python3 is the environment's own, which is removed.
    assert "was interrupted" in make(activate=True)
    assert not (tmp_path / ".venv" / "pieces").exists()
    assert make() == ""

    # A failed installation shows the end of its log, and is done over the next time.
    (tmp_path / "requirements.txt").write_text("./no-such-package\n")
    failed = run(*command, cwd=tmp_path, PYTHON_BIN=sys.executable, TORCH_INDEX="")
    assert failed.returncode == 1
    assert "no-such-package" in failed.stderr
    assert ".venv/install.log" in failed.stderr
    (tmp_path / "requirements.txt").write_text("# nothing\n")
    assert "was interrupted" in make()
