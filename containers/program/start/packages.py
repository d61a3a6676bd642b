"""Environment of a job's own packages, into which uv installs those that its code asks for.

They lie beside those of the image and never over them: uv counts the image's packages as installed,
so what the image has in a suitable version is not fetched again. uv keeps what it has downloaded
and built in the host's cache, which later jobs of the host read; it is safe for several containers
at once.

A command that runs pip itself installs into the same environment. There it finds the image's
packages, and not the modules of this project.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from containers.host.machine import say
from containers.program.files.s3_files import PreparationStopped
from containers.program.start import host_cache
from containers.program.start.process import ProgramProcess
from contract.errors import InputError
from contract.requirements import PYPROJECT, UV_LOCK, file_of, python_of, scripts_of

_POLL_S: Final = 0.1
#: What uv prints is shown once it takes longer.
_QUIET_S: Final = 10.0
#: Variables of a user that say where packages come from: those of pip, which uv does not read, have
#: these names in uv.
PREFIXES: Final = ("PIP_", "UV_")
_OF_PIP: Final = {
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_CERT": "SSL_CERT_FILE",
}
_EXPORT: Final = (
    "export --quiet --frozen --offline --no-dev --no-emit-project --no-emit-workspace --no-hashes "
    "--no-editable --no-python-downloads"
)
_IMPORT: Final = (
    "import importlib.util as of; of.find_spec('torchvision') and __import__('torchvision')"
)
_VISION: Final = (
    "WARNING: this torchvision cannot be imported beside torch {torch}: {error}\n"
    "'operator torchvision::nms does not exist' means that it was built for another torch: list "
    "torchvision without a version or an index, or those that belong to this torch"
)


def install(
    code: Path,
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Make a new environment, and install what the folder ``code`` asks for; False: nothing.

    Args:
        folder: of the environment; what is there is replaced.
        environment: more variables for uv, such as UV_DEFAULT_INDEX, or pip's name for it.
        should_stop: asked several times a second.

    Raises:
        InputError: it cannot be installed; the message has the end of uv's output.
        Stopped: ``should_stop`` returned true.
    """
    _check_python(python_of(code), platform.python_version())
    name = file_of(code)
    venv.create(folder, with_pip=False, symlinks=True, clear=True)
    (site_packages(folder) / "image.pth").write_text("\n".join(_image_folders()))
    if not name:
        _take_programs(folder, code)
        return False
    began = time.monotonic()
    say(f"installing {name}")
    ray, torch = (_version(each, _image_folders()) for each in ("ray", "torch"))
    variables = _variables({**os.environ, **(environment or {})})
    _show_image(folder)
    with host_cache.installing(), tempfile.TemporaryDirectory(prefix="requirements-") as own:
        listed, fixed = name, Path(own, "fixed.txt")
        if name == UV_LOCK:
            listed = f"{own}/requirements.txt"
            export = [*_EXPORT.split(), "--python", sys.executable, "--output-file", listed]
            failed, said = _uv(export, code, variables, should_stop)
            if failed:
                raise InputError(f"{UV_LOCK} cannot be read:\n{_tail(said)}")
        command = ["pip", "install", "--python", str(folder / "bin" / "python"), "-r", listed]
        # As pip does: the best version of all indexes, and a copy of a folder of the code.
        command += ["--index-strategy", "unsafe-best-match", "--no-editable"]
        command += ["--link-mode", "copy", "-c", str(fixed)]
        torch, _, build = torch.partition("+")
        if variables.get("PIP_NO_INDEX", "0").lower() not in ("", "0", "false", "no", "off"):
            command.append("--no-index")
        elif re.fullmatch(r"cpu|cu\d+", build) and "UV_DEFAULT_INDEX" not in variables:
            # Packages built for torch, such as torchvision, come from its own index.
            variables = {"UV_TORCH_BACKEND": build, **variables}
        # The cluster runs on the image's Ray; its torch, if any, stays unless the list asks for
        # another, which then gets its own torchvision, if there is one: the image's would break
        # models of transformers.
        failed, said = 1, ""
        for kept, more in (
            (f"torch=={torch}\n" if torch else "", []),
            ("", ["torchvision"]),
            ("", []),
        ):
            fixed.write_text(f"{kept}ray=={ray}\n")
            failed, said = _uv([*command, *more], code, variables, should_stop)
            if not failed or (more or [f"torch=={torch}"])[0] not in said:
                break
        if not failed:
            _renew_broken([*command, *more], folder, code, variables, should_stop)
    if failed:
        if f"ray=={ray}" in said:
            said += (
                f"\nthe list asks for another Ray than {ray}, on which the cluster runs: leave ray "
                f"out of it, or allow {ray}"
            )
        raise InputError(f"{name} cannot be installed:\n{_tail(said)}")
    _check(folder, torch)
    _take_programs(folder, code)
    say(f"{name}: installed in {time.monotonic() - began:.0f} s")
    return True


def _renew_broken(
    command: list[str],
    folder: Path,
    code: Path,
    variables: Mapping[str, str],
    should_stop: Callable[[], bool],
) -> None:
    """Install again what the new packages have broken, in versions that go with them: a package of
    the image, such as transformers, may require another version than the list has brought."""
    check = ["pip", "check", "--python", str(folder / "bin" / "python")]
    failed, said = _uv(check, code, variables, should_stop)
    broken = dict(re.findall(r"(?m)^The package `([\w.-]+)` (requires .*)", said))
    if failed and broken and _uv([*command, *broken], code, variables, should_stop)[0]:
        for name, lack in broken.items():
            say(f"WARNING: {name} {lack}")


def _check_python(wanted: str, version: str) -> None:
    with contextlib.suppress(InvalidSpecifier):  # uv has more to say about it
        if not SpecifierSet(wanted).contains(version):
            raise InputError(
                f"{PYPROJECT}: requires-python is {wanted!r}, and the nodes have Python {version}: "
                "allow it, or deploy images with another base_image"
            )


def site_packages(folder: Path) -> Path:
    """Folder in which Python finds the packages of an environment."""
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of uv: pip's settings by uv's names, and the host's cache."""
    of_pip = {uv: environment[pip] for pip, uv in _OF_PIP.items() if pip in environment}
    if "UV_FIND_LINKS" in of_pip:
        of_pip["UV_FIND_LINKS"] = ",".join(of_pip["UV_FIND_LINKS"].split())
    # Twice as often as by default, in about a minute: an installation that fails ends the job.
    of_pip["UV_HTTP_RETRIES"] = "6"
    return {**host_cache.variables(), **of_pip, **environment}


def _uv(
    words: list[str],
    code: Path,
    variables: Mapping[str, str],
    should_stop: Callable[[], bool],
) -> tuple[int, str]:
    """Run uv in the folder of the code; return its exit code and what it printed."""
    said: list[str] = []
    shown, began = 0, time.monotonic()
    command = (sys.executable, "-m", "uv", "--no-progress", *words)
    program = ProgramProcess(command, folder=code, environment=variables, emit=said.append)
    try:
        while program.poll() is None:
            if should_stop():
                raise PreparationStopped
            time.sleep(_POLL_S)
            if time.monotonic() - began > _QUIET_S:
                for line in said[shown:]:
                    say(line)
                    shown += 1
    finally:
        failed = program.end()
    for line in said[shown:] if shown else ():
        say(line)
    return failed, "\n".join(said)


# --- what the image has ---------------------------------------------------------------------------
def _image_folders() -> list[str]:
    return [each for each in sys.path if each.endswith("-packages")]


def _version(name: str, folders: list[str]) -> str:
    """Version of a package in some folders of a Python; "" for none."""
    found = importlib.metadata.distributions(name=name, path=folders)
    return next((each.version for each in found), "")


def _show_image(folder: Path) -> None:
    """Let uv count the image's packages as installed.

    uv looks only at the metadata in the environment itself. It gets a copy of each, which lists no
    file of the package: uv removes nothing of the image where it installs another version.
    """
    site = site_packages(folder)
    for each in importlib.metadata.distributions(path=_image_folders()):
        metadata = each.read_text("METADATA")
        name = re.sub(r"[-_.]+", "_", each.metadata["Name"] or "")
        there = site / f"{name}-{each.version}.dist-info"
        if metadata is None or there.exists():
            continue
        there.mkdir()
        files = {"METADATA": metadata, "INSTALLER": _IMAGE, "WHEEL": each.read_text("WHEEL") or ""}
        files["RECORD"] = "".join(f"{there.name}/{file},,\n" for file in (*files, "RECORD"))
        for file, text in files.items():
            (there / file).write_text(text, encoding="utf-8")


#: Marks a copy of metadata.
_IMAGE: Final = "image"


def _check(folder: Path, torch: str) -> None:
    """Remove the copies of metadata; warn of a torchvision that is made for another torch."""
    site = site_packages(folder)
    for each in site.glob("*.dist-info/INSTALLER"):
        if each.read_text() == _IMAGE:
            shutil.rmtree(each.parent)
    if any(_version(name, [str(site)]) for name in ("torch", "torchvision")):
        command = [str(folder / "bin" / "python"), "-c", _IMPORT]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            torch = _version("torch", [str(site)]) or torch
            say(_VISION.format(torch=torch, error=_tail(done.stderr, lines=1)))


def _take_programs(folder: Path, code: Path) -> None:
    """Run the image's programs, such as torchrun, by the environment's Python too, so that they
    find its packages also where a script sets PYTHONPATH anew; and those of the code's project."""
    for name, function in scripts_of(code).items():
        module, path = function.split(":")
        there = folder / "bin" / name
        if not there.exists():
            there.write_text(
                f"#!{folder}/bin/python\nimport sys, {module}\nsys.exit({module}.{path}())\n"
            )
            there.chmod(0o755)
    image = Path(sys.prefix, "bin")
    for program in image.iterdir():
        there = folder / "bin" / program.name
        # It may be a folder, or no script.
        with contextlib.suppress(OSError, UnicodeDecodeError), program.open() as file:
            first = file.readline()
            if first.startswith(f"#!{image}/") and not there.exists():
                there.write_text(first.replace(str(image), str(folder / "bin")) + file.read())
                there.chmod(0o755)


def _tail(text: str, *, lines: int = 8) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
