"""What is installed is what the lock says, and the lock says what the requirement files ask for."""

import ast
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from tests.conftest import ROOT

SOURCES = ["requirements.txt", "requirements-dev.txt", "containers/requirements.txt"]
REHEARSAL = "rehearsal/requirements.txt"
AUDIT = ".ci/audit-requirements.txt"
LOCK = "requirements.lock"

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
    return pins(ROOT / LOCK)


@pytest.mark.parametrize("source", SOURCES)
def test_requirements_are_exact_and_agree_with_the_lock(source: str) -> None:
    asked = pins(ROOT / source)
    assert asked
    assert asked == {name: locked().get(name) for name in asked}, "run `make lock`"


@pytest.mark.parametrize("source", [*SOURCES, REHEARSAL, AUDIT])
def test_requirements_say_why_each_package_is_there(source: str) -> None:
    text = (ROOT / source).read_text()
    if source in (REHEARSAL, AUDIT):  # below its first pin it lists what that one brings along
        text = text[: text.index("\n", text.index("=="))]
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.search(r"==\S+ +# \S", line)] == []


def test_a_pin_that_is_not_exact_is_found(tmp_path: Path) -> None:
    for line in ["torch>=2.13", "torch", "torch==2.13.0+cpu", "torch==2.*", "torch==1\ntorch==1"]:
        (tmp_path / "requirements.txt").write_text(line)
        with pytest.raises(AssertionError, match="torch"):
            pins(tmp_path / "requirements.txt")


def test_every_file_beside_the_code_is_shipped_with_it() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    shipped = {
        path
        for package, patterns in listed["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    # The images copy the whole folders; a wheel takes only what is listed.
    there = {
        path
        for folder in ("contract", "training")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc"}
    }
    assert there
    assert there == shipped


def test_a_laptop_needs_neither_torch_nor_ray() -> None:
    assert not {"torch", "ray", "transformers", "pyarrow"} & pins(ROOT / "requirements.txt").keys()


def test_the_lock_is_free_of_cuda() -> None:
    cuda = [name for name in locked() if re.match(r"(nvidia|cuda|cupy)-|triton$", name)]
    assert cuda == []


def test_the_emulators_packages_are_pinned_apart() -> None:
    emulator = pins(ROOT / REHEARSAL)
    assert {"ministack", "botocore", "hypercorn"} <= emulator.keys()
    assert "ministack" not in locked()


def test_the_audits_packages_are_pinned_apart() -> None:
    audit = pins(ROOT / AUDIT)
    assert next(iter(audit)) == "checkov"
    # It is the whole closure, so that two audits of one commit see the same rules.
    assert {"boto3", "pyyaml", "requests", "bc-python-hcl2"} <= audit.keys()
    assert "checkov" not in locked()


def test_what_is_installed_is_what_is_locked() -> None:
    # A torch with CUDA brings packages that it pins itself.
    of_torch = re.compile(r"(nvidia|cuda)-|triton$")
    lock = locked() | {"ecs-train": metadata.version("ecs-train")}
    installed = {
        canonical(found.metadata["Name"]): found.version.partition("+")[0]
        # The environment's own folder: Ray adds others to the path, with packages inside of it.
        for found in metadata.distributions(path=[sysconfig.get_path("purelib")])
    }
    strays = {
        f"{name} {version} (locked: {lock.get(name, 'not at all')})"
        for name, version in installed.items()
        if lock.get(name) != version and not of_torch.match(name)
    }
    assert strays == set()


def test_what_is_installed_fits_together() -> None:
    check = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout + check.stderr


def followed_by_mypy(module: str) -> bool:
    """Whether mypy reads a module: the most specific of the patterns that match it decides."""
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    how = {
        pattern: override["follow_imports"]
        for override in overrides
        if "follow_imports" in override
        for pattern in override["module"]
    }
    parts = module.split(".")
    parents = [".".join(parts[:end]) + ".*" for end in range(len(parts), 0, -1)]
    return next((how[each] for each in (module, *parents) if each in how), "normal") == "normal"


def test_mypy_reads_every_module_that_is_imported() -> None:
    """It takes what it does not read for Any, and says nothing."""
    assert not followed_by_mypy("aws_cdk.aws_quicksight")
    assert not followed_by_mypy("transformers.models.bert")
    packages = Path(sysconfig.get_path("purelib"))
    imported = set()
    for folder in ("stacks", "training", "trainctl", "containers", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {each.name for each in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported |= {f"{node.module}.{each.name}" for each in node.names}
    modules = {name for name in imported if packages.joinpath(*name.split(".")).is_dir()}
    assert "aws_cdk.aws_ecs" in modules
    assert sorted(name for name in modules if not followed_by_mypy(name)) == []
