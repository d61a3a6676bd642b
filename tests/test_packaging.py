"""The environment has what the lock lists, and the lock what the requirement files ask for."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import grimp
import pytest

from contract import exits
from tests.conftest import ROOT, copy_project

LAPTOP, NODE = "requirements/laptop.txt", "requirements/training.txt"
SOURCES = [LAPTOP, NODE, "requirements/dev.txt"]
REHEARSAL = "rehearsal/requirements.txt"
AUDIT = ".ci/audit-requirements.txt"
LOCK = "requirements.lock"
COMPILE = "containers/requirements-compile.txt"
#: Packages of this project.
OURS = {
    "app",
    "contract",
    "store",
    "training",
    "containers",
    "stacks",
    "rehearsal",
    "trainctl",
    "examples",
}

_PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[[a-z0-9,-]+\])?==(?P<version>[A-Za-z0-9.]+)")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    """Canonical name -> version; any line that is not ``name==version`` is an error."""
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        requirement = line.partition("#")[0].strip()
        if not requirement:
            continue
        match = _PIN.fullmatch(requirement)
        assert match, f"{path.name}:{number}: {requirement!r} is not an exact pin"
        name = canonical(match["name"])
        assert name not in found, f"{path.name}:{number}: {name} is there twice"
        found[name] = match["version"]
    return found


def locked() -> dict[str, str]:
    """Canonical name -> version."""
    return dict(re.findall(r"(?m)^([a-z0-9-]+)==([^\s;]+)", (ROOT / LOCK).read_text()))


@pytest.mark.parametrize("source", SOURCES)
def test_requirements_are_exact_and_agree_with_the_lock(source: str) -> None:
    asked = pins(ROOT / source)
    assert asked
    assert asked == {name: locked().get(name) for name in asked}, "run `make lock`"


@pytest.mark.parametrize(
    ("packages", "files"),
    [
        (["contract", "store", "training", "containers"], [NODE, COMPILE]),
        (["contract", "trainctl", "stacks"], [LAPTOP]),
        (["rehearsal"], [LAPTOP, REHEARSAL]),
        (["benchmarks", "tests"], [*SOURCES, COMPILE]),
    ],
)
def test_what_is_imported_is_asked_for_by_name(packages: list[str], files: list[str]) -> None:
    graph = grimp.build_graph(
        *packages,
        include_external_packages=True,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )
    imported = {name for name in graph.modules if graph.is_module_squashed(name)}
    # Lambda puts cfnresponse beside code in a template; a benchmark goes without the others.
    provided = {"cfnresponse", "liger_kernel", "torchvision"}
    imported -= {*sys.stdlib_module_names, *OURS, *provided}
    found = metadata.packages_distributions()
    # What is not installed here goes by its own name.
    needed = {name: {canonical(each) for each in found.get(name, [name])} for name in imported}
    declared = {name for file in files for name in pins(ROOT / file)}
    assert needed
    assert {name for name, any_of in needed.items() if not any_of & declared} == set()


def test_the_command_line_takes_the_versions_that_a_checkout_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = pins(ROOT / LAPTOP)
    for_deploying = {name: pinned.pop(name) for name in ("aws-cdk-lib", "constructs")}
    assert all(for_deploying.values())
    # From the version that the tests run with; the next one that may break things is not taken.
    ranges = {name: f"{name}>={version},<" for name, version in pinned.items()}
    assert len(project["dependencies"]) == len(ranges)
    for name, each in ranges.items():
        assert [asked for asked in project["dependencies"] if asked.startswith(each)], name


# --- the wheel ------------------------------------------------------------------------------------
class Installed(NamedTuple):
    """The command line as `pipx install` gives it: the wheel in an environment of its own."""

    wheel: Path
    bin: Path
    home: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A program of the environment, with no account and nothing of the checkout in reach."""
        return subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.home,
            env={
                "PATH": os.defpath,
                "HOME": str(self.home),
                "AWS_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    # Built from a copy, because a build writes beside the sources.
    copy_project(folder / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, "wheel", *options, str(folder / "source")], check=True)
    (wheel,) = folder.glob("*.whl")
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    # The lock, so that the test sees today what it sees next year.
    options = ["--quiet", "--python", str(environment), "--constraint", str(ROOT / LOCK)]
    uv = ["sh", str(ROOT / ".ci" / "uv"), "pip", "install"]
    subprocess.run([*uv, *options, wheel], check=True)
    (folder / "home").mkdir()
    return Installed(wheel, environment / "bin", folder / "home")


@pytest.mark.slow
def test_the_wheel_has_the_command_line_and_the_files_beside_it(installed: Installed) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    packages = ("contract", "store", "training", "trainctl")
    there = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".md")
    }
    assert len(there) > 100
    assert there - names == set()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {*packages}


@pytest.mark.slow
def test_the_installed_command_line_works_without_a_checkout(installed: Installed) -> None:
    helped = installed.run("trainctl", "--help")
    assert helped.returncode == 0, helped.stderr
    assert "submit" in helped.stdout
    # Recipes, presets and estimates come with it.
    settings = installed.run("trainctl", "settings", "fsdp")
    assert settings.returncode == 0, settings.stderr
    assert "--epochs" in settings.stdout
    estimate = ("fsdp", "--model", "databricks/dolly-v2-7b", "--workers", "8")
    planned = installed.run("python", "-m", "training.plan", *estimate)
    assert planned.returncode == 0, planned.stderr
    assert "memory per GPU" in planned.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "exit_code", "words"),
    [
        (["trainctl", "ls"], exits.BAD_INPUT, "No AWS account is set up here"),
        (["trainctl", "local", "up"], exits.FAILED, "in a checkout"),
        (
            ["python", "-m", "training.launch", "ddp"],
            exits.BAD_INPUT,
            "run make venv in a checkout",
        ),
    ],
    ids=["without credentials", "without the rehearsal", "without torch"],
)
def test_what_the_installed_command_line_lacks_is_one_sentence(
    installed: Installed, command: list[str], exit_code: int, words: str
) -> None:
    run = installed.run(*command)
    assert run.returncode == exit_code, run.stderr
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
