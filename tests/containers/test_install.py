"""The stages of the image build ask for the right packages: torch only where its build is chosen.

The script itself, in a folder of its own, with a Python that notes how it was called.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.conftest import ROOT

LISTS = ROOT / "requirements"
TORCH, TORCHVISION = (
    re.findall(rf"^{name}==\S+", (LISTS / file).read_text(), re.MULTILINE)[0]
    for name, file in (("torch", "training.txt"), ("torchvision", "images.txt"))
)
#: Has those of torch and torchvision that are in ``$HAS``; fails where it is asked for ``$FAILS``.
PYTHON = """\
#!/bin/sh
case "$*" in
    *"import torch"*) case " $HAS " in *" ${2#import } "*) ;; *) exit 1 ;; esac ;;
    *sysconfig*) echo "$PACKAGES" ;;
    "-m pip"* | "-m uv"*)
        echo "$@" >>"$CALLS"
        for word; do [ ! -f "$word" ] || cp "$word" "$CALLS.requirements"; done
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
        (source / "requirements").symlink_to(LISTS)
        (source / "requirements.lock").symlink_to(ROOT / "requirements.lock")
        # Every path of the image is in this folder.
        script = (ROOT / "containers" / "install.sh").read_text()
        script = re.sub(r"(?<![\w/}])(?=/(opt|mnt|tmp|var|etc)\b)", str(folder), script)
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
                "HAS": "",
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
def test_torch_and_torchvision_come_from_the_index_of_their_build(
    build: Build, kind: str, index: str, options: str
) -> None:
    done = build.run("torch", kind, TORCH_INDEX=index)
    assert done.returncode == 0, done.stderr
    *torch, rest = build.calls
    pins = f"{TORCHVISION} {TORCH}"
    assert [each.partition(" --no-deps")[2] for each in torch] == [f"{options} {pins}"] * bool(
        options
    )
    assert rest.endswith(f"/training.txt {pins}")
    assert "index" not in rest
    assert "peft==" in build.requirements
    assert TORCH in build.requirements


@pytest.mark.parametrize("torchvision", ["", " torchvision"])
def test_a_base_images_torch_is_kept_and_a_missing_torchvision_is_named(
    build: Build, torchvision: str
) -> None:
    done = build.run("torch", "cuda", TORCH_INDEX=INDEX, HAS=f"torch{torchvision}")
    assert done.returncode == 0, done.stderr
    (call,) = build.calls
    assert call.endswith("/training.txt")
    assert ("the base image has no torchvision that fits" in done.stderr) == (not torchvision)


@pytest.mark.parametrize("index", ["", "https://index.example"])
def test_a_torch_that_cannot_be_installed_is_named_with_the_variable_of_make(
    build: Build, index: str
) -> None:
    done = build.run("torch", "cpu", TORCH_INDEX=index, FAILS=TORCH)
    assert done.returncode == 1
    assert f" {TORCH} cannot be installed from {index or 'PyTorch'}" in done.stderr
    assert "make images TORCH_INDEX=ADDRESS" in done.stderr


#: AWS's installer: notes its arguments, and leaves libfabric and, where it has one, the plug-in.
INSTALLER = """\
#!/bin/sh
echo "$@" >>"$CALLS"
mkdir -p "$IMAGE/opt/amazon/efa/bin" "$IMAGE/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu"
ln -s /bin/true "$IMAGE/opt/amazon/efa/bin/fi_info"
[ -z "$PLUGIN" ] || : >"$IMAGE/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/$PLUGIN"
"""


def add_efa(folder: Path, plugin: str) -> tuple[str, dict[str, str]]:
    """Lay what is downloaded in place; return its hash and the stand-ins' variables."""
    installer = folder / "aws-efa-installer"
    installer.mkdir()
    (installer / "efa_installer.sh").write_text(INSTALLER)
    (installer / "efa_installer.sh").chmod(0o755)
    archive = folder / "tmp" / "efa.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(installer, installer.name)
    (folder / "etc" / "ld.so.conf.d").mkdir(parents=True)
    for name in ("apt-get", "ldconfig"):
        (folder / "bin" / name).symlink_to("/bin/true")
    variables = {"IMAGE": str(folder), "PLUGIN": plugin}
    return hashlib.sha256(archive.read_bytes()).hexdigest(), variables


@pytest.mark.parametrize("plugin", ["libnccl-net.so", "libnccl-net-ofi.so"])
def test_nccl_finds_the_plugin_of_efa_under_the_name_that_it_loads(
    build: Build, tmp_path: Path, plugin: str
) -> None:
    hashed, variables = add_efa(tmp_path, plugin)
    done = build.run("efa", "1.50.0", hashed, **variables)
    assert done.returncode == 0, done.stderr
    # As AWS's page "Install the EFA software in a container" has them.
    assert build.calls == ["-y --skip-kmod --skip-limit-conf --no-verify"]
    (line,) = (tmp_path / "etc/ld.so.conf.d/000_nccl_plugin.conf").read_text().splitlines()
    assert (Path(line) / "libnccl-net.so").exists()


@pytest.mark.parametrize(
    ("without", "said"),
    [
        ("apt-get", "needs apt-get or dnf, which the base image lacks"),
        ("hash", "has another SHA-256 than EFA_SHA256"),
        ("plugin", "has no plugin for NCCL on this system"),
    ],
)
def test_an_image_that_cannot_have_efa_is_refused_in_one_line(
    build: Build, tmp_path: Path, without: str, said: str
) -> None:
    hashed, variables = add_efa(tmp_path, "" if without == "plugin" else "libnccl-net.so")
    if without == "apt-get":
        # Only what the script needs until then.
        variables["PATH"] = str(tmp_path / "bin")
        (tmp_path / "bin" / "apt-get").unlink()
        for name in ("sh", "ls", "touch"):
            (tmp_path / "bin" / name).unlink(missing_ok=True)
            (tmp_path / "bin" / name).symlink_to(f"/bin/{name}")
    done = build.run("efa", "1.50.0", "0" * 64 if without == "hash" else hashed, **variables)
    assert done.returncode == 1
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("error:")]
    assert said in line
    assert line.endswith(
        "or build without EFA: make images ARGS='--tag NAME --build-arg EFA_INSTALLER='"
    )


def test_what_a_base_image_has_of_efa_is_kept(build: Build, tmp_path: Path) -> None:
    hashed, variables = add_efa(tmp_path, "libnccl-net.so")
    fi_info = tmp_path / "bin" / "fi_info"
    fi_info.symlink_to("/bin/true")
    # libfabric without the plug-in is not enough.
    assert build.run("efa", "1.50.0", hashed, **variables).returncode == 0
    assert len(build.calls) == 1
    for installed in (False, True):
        if installed:  # elsewhere than AWS's installer puts it
            (tmp_path / "bin" / "ldconfig").unlink()
            (tmp_path / "bin" / "ldconfig").write_text("#!/bin/sh\necho 'libnccl-net.so (libc6)'\n")
            (tmp_path / "bin" / "ldconfig").chmod(0o755)
            shutil.rmtree(tmp_path / "opt" / "amazon")
        for version in ("1.50.0", ""):
            done = build.run("efa", version, hashed, **variables)
            assert "the base image's own" in done.stdout
    assert len(build.calls) == 1


#: ``dnf`` of Amazon Linux, and the shell's commands that the step needs there.
DNF = """#!/bin/sh
echo "$*" >>"$CALLS"
"""


@pytest.mark.parametrize("manager", ["apt-get", "dnf"])
def test_a_base_image_gets_what_it_lacks_from_its_own_packages(
    tmp_path: Path, manager: str
) -> None:
    bin_, local = tmp_path / "bin", tmp_path / "local"
    bin_.mkdir()
    local.mkdir()
    (bin_ / "python3").symlink_to(sys.executable)
    for name in ("rm", "chmod"):
        (bin_ / name).symlink_to(f"/bin/{name}")
    (bin_ / manager).write_text(DNF)
    (bin_ / manager).chmod(0o755)
    script = re.sub(r"/var/\S+", "", first_step()).replace("/usr/local/bin", str(local))
    variables = {"PATH": f"{bin_}:{local}", "CALLS": str(tmp_path / "calls")}
    done = subprocess.run(["/bin/sh", "-c", script], env=variables, check=False)
    assert done.returncode == 0
    calls = (tmp_path / "calls").read_text()
    packages = {
        "apt-get": "tini procps git gcc libc6-dev",
        "dnf": "procps-ng git-core gcc glibc-devel",
    }
    assert packages[manager] in calls
    if manager == "dnf":  # ECS's own init reaps there
        command = [str(local / "tini"), "-s", "--", "/bin/echo", "a b"]
        assert subprocess.check_output(command, text=True) == "a b\n"
    assert (local / "tini").exists() is (manager == "dnf")


def first_step() -> str:
    """The step of the Dockerfile that installs packages of the system."""
    lines = (ROOT / "containers" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    return next(line.removeprefix("RUN ") for line in lines if line.startswith("RUN "))


def test_a_base_image_without_packages_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "python3").symlink_to(sys.executable)
    done = subprocess.run(
        ["/bin/sh", "-c", first_step()],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the base image has neither apt-get, dnf nor all of tini")


def test_a_build_may_leave_efa_out(build: Build) -> None:
    assert build.run("efa", "", "").returncode == 0
