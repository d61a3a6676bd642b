"""The stages of the image build ask for the right packages: torch only where its build is chosen.

The script itself, in a folder of its own, with a Python that notes how it was called.
"""

import os
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from tests.conftest import ROOT

PIN = re.findall(r"^torch==\S+", (ROOT / "requirements" / "training.txt").read_text(), re.M)[0]
#: Has no torch; fails where it is asked for ``$FAILS``.
PYTHON = """\
#!/bin/sh
case "$*" in
    *"import torch"*) exit 1 ;;
    *sysconfig*) echo "$PACKAGES" ;;
    "-m pip"* | "-m uv"*)
        echo "$@" >>"$CALLS"
        for last; do :; done
        [ ! -f "$last" ] || cp "$last" "$CALLS.requirements"
        case "$*" in *"${FAILS:-nothing}"*) exit 1 ;; esac ;;
esac
"""


class Build:
    """One stage of an image's build."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs = folder / "bin"
        source = folder / "mnt" / "build"
        source.mkdir(parents=True)
        (source / "requirements.txt").symlink_to(ROOT / "requirements" / "training.txt")
        (source / "requirements.lock").symlink_to(ROOT / "requirements.lock")
        # Every path of the image is in this folder.
        script = (ROOT / "containers" / "install.sh").read_text()
        script = re.sub(r"(?<![\w/}])(?=/(opt|mnt|tmp|var)\b)", str(folder), script)
        (folder / "install.sh").write_text(script)
        self.packages = folder / "packages"
        for each in (self.packages, folder / "tmp", self._programs, folder / "opt/venv/bin"):
            each.mkdir(parents=True)
        for name in ("python3", "../opt/venv/bin/python"):
            (self._programs / name).write_text(PYTHON)
            (self._programs / name).chmod(0o755)
        for name in ("find", "touch"):  # they look through the whole file system
            (self._programs / name).symlink_to("/bin/true")

    def run(self, *stage: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", str(self._folder / "install.sh"), *stage],
            env={
                "PATH": f"{self._programs}{os.pathsep}{os.environ['PATH']}",
                "PACKAGES": str(self.packages),
                "CALLS": str(self._folder / "calls"),
                "TORCH_INDEX": "",
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def calls(self) -> list[str]:
        """What pip and uv were called with."""
        return (self._folder / "calls").read_text().splitlines()

    @property
    def requirements(self) -> str:
        """The last requirement file that pip was given."""
        return (self._folder / "calls.requirements").read_text()


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


def brought_by(requirement: str, seen: set[str]) -> set[str]:
    """Names of the packages that one brings along, extras left out."""
    name = re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")
    if name not in seen:
        seen.add(name)
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform
            needed = []
        for each in needed:
            if "extra" not in each.partition(";")[2]:
                brought_by(each, seen)
    return seen


def test_the_packages_that_both_images_share_bring_no_torch_along(build: Build) -> None:
    done = build.run("packages")
    assert done.returncode == 0, done.stderr
    pins = re.findall(r"^[\w-]+", build.requirements, re.MULTILINE)
    assert "transformers" in pins
    assert {name for name in pins if "torch" in brought_by(name, set())} == set()
    assert "torch" in brought_by("peft", set())


INDEX = "https://index.example"


@pytest.mark.parametrize(
    ("kind", "index", "options"),
    [
        ("cpu", "", " --torch-backend cpu"),  # PyTorch's own index of CPU builds
        ("cpu", INDEX, f" --index-url {INDEX}"),
        ("cuda", INDEX, f" --index-url {INDEX}"),
        ("cuda", "", ""),  # from the default index, with all else
    ],
)
def test_torch_alone_comes_from_the_index_of_its_build(
    build: Build, kind: str, index: str, options: str
) -> None:
    done = build.run("torch", kind, TORCH_INDEX=index)
    assert done.returncode == 0, done.stderr
    *torch, rest = build.calls
    assert [each.partition(" --no-deps")[2] for each in torch] == [f"{options} {PIN}"] * bool(
        options
    )
    assert rest.endswith("/requirements.txt")
    assert "index" not in rest
    assert "peft==" in build.requirements
    assert PIN in build.requirements


@pytest.mark.parametrize("index", ["", "https://index.example"])
def test_a_torch_that_cannot_be_installed_is_named_with_the_variable_of_make(
    build: Build, index: str
) -> None:
    done = build.run("torch", "cpu", TORCH_INDEX=index, FAILS=PIN)
    assert done.returncode == 1
    assert f"error: {PIN} cannot be installed from {index or 'PyTorch'}" in done.stderr
    assert "make images TORCH_INDEX=ADDRESS" in done.stderr
