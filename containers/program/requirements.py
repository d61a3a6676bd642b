"""The packages that a user's code asks for: installed once on a host, found by all its jobs.

They lie beside those of the image and never over them: what the image has already is not taken
again. A list of requirements has a key, made of its content, the files that it names, this Python,
the image's packages and the settings of pip and uv, such as their index; what is installed under a
key never changes. An installation is made under another name and renamed when it is complete, with
a lock held, so that neither two at once nor one that was interrupted leave anything but whole ones.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from containers.host.machine import say
from containers.program.cache import USED, Cache, try_lock
from contract.errors import InputError
from contract.requirements import PYPROJECT, UV_LOCK, dependencies, file_of

_POLL_S: Final = 0.1
#: pip's cache of downloads, in the host's: the next list may share packages with this one.
_PIP: Final = "pip"
#: The cluster runs on the image's: another one could not join it.
_FIXED: Final = "ray"


class Stopped(Exception):  # noqa: N818 - no error: the node was told to end
    """What a node does before its program runs was broken off, because the node has to end."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A list of requirements, as pip takes it."""

    name: str
    """Of the file that it comes from."""
    text: str
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """Packages in the cache, kept there while ``lease`` is open."""

    folder: Path
    lease: IO[bytes]


def install(
    code: Path,
    cache: Cache,
    *,
    environment: Mapping[str, str] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Installed | None:
    """Install what the folder ``code`` asks for, unless the cache has it; None if that is nothing.

    Args:
        environment: more variables for pip, such as PIP_INDEX_URL.
        should_stop: asked several times a second.

    Raises:
        InputError: it cannot be installed; the message has the end of pip's output.
        Stopped: ``should_stop`` returned true.
    """
    name = file_of(code)
    if not name:
        return None
    wanted = _wanted(code, name, os.environ | (environment or {}))
    lease = cache.lock_file(wanted.key)
    try:
        _wait_for(lease, name, should_stop)
        folder = cache.packages(wanted.key)
        if folder.is_dir():
            say(f"{name}: installed on this host already")
        else:
            cache.trim()
            began = time.monotonic()
            say(f"installing {name}")
            _make(wanted, code, cache, environment=environment or {}, should_stop=should_stop)
            say(f"{name}: installed in {time.monotonic() - began:.0f} s")
        (folder / USED).touch()
        # Shared: other containers may use it too, and none may remove it.
        try_lock(lease, shared=True)
        _report_replaced(name, folder)
    except BaseException:
        lease.close()
        raise
    return Installed(folder=folder, lease=lease)


def site_packages(folder: Path) -> Path:
    """Where Python finds the packages of an installation."""
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))


def _wait_for(lease: IO[bytes], name: str, should_stop: Callable[[], bool]) -> None:
    if try_lock(lease):
        return
    # Another container installs it now, or uses it; the latter admits others.
    say(f"{name}: waiting for the container that installs it")
    while not try_lock(lease):
        if try_lock(lease, shared=True):
            return
        if should_stop():
            raise Stopped
        time.sleep(_POLL_S)


# --- what is wanted -------------------------------------------------------------------------------
def _wanted(code: Path, name: str, environment: Mapping[str, str]) -> _Wanted:
    if name == UV_LOCK:
        text = _exported(code)
    elif name == PYPROJECT:
        text = "".join(f"{each}\n" for each in dependencies(code))
    else:
        text = "".join(f"{line}\n" for line in _lines(code / name, code))
    content = hashlib.sha256()
    about = [sys.version, sysconfig.get_platform(), *(f"{k} {v}" for k, v in _in_image().items())]
    about += [
        f"{name}={value}"
        for name, value in sorted(environment.items())
        if name.startswith(("PIP_", "UV_")) and not name.endswith("_CACHE_DIR")
    ]
    for part in (name, text, *about):
        content.update(part.encode() + b"\0")
    for file in _named(text, code):
        content.update(f"{file.relative_to(code)}\0".encode() + file.read_bytes() + b"\0")
    return _Wanted(name=name, text=text, key=content.hexdigest()[:20])


def _lines(file: Path, code: Path, seen: frozenset[Path] = frozenset()) -> Iterator[str]:
    """Lines of a requirement file, and of those that it includes, as they stand."""
    if file in seen:
        return
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{os.path.relpath(file, code)} cannot be read: {reason}") from None
    for line in text.replace("\\\n", " ").splitlines():
        words = line.split("#")[0].replace("=", " ", 1).split()
        if len(words) == 2 and words[0] in ("-r", "--requirement"):
            yield from _lines(file.parent / words[1], code, seen | {file})
        elif len(words) == 2 and words[0] in ("-c", "--constraint"):
            yield f"-c {os.path.relpath(file.parent / words[1], code)}"
        else:
            # The code's folder goes with the job, and what is installed stays: a copy, not a link.
            yield re.sub(r"^\s*(-e|--editable)[ =]\s*", "", line)


def _named(text: str, code: Path) -> list[Path]:
    """Files of the code that a list of requirements names: a wheel, a folder, constraints."""
    found: set[Path] = set()
    for word in re.findall(r"[^\s=;@]+", re.sub(r"(?m)(^|\s)#.*$", "", text)):
        path = code / word.removeprefix("file:").partition("[")[0]
        if path.is_file():
            found.add(path)
        elif path.is_dir() and (word.startswith(".") or "/" in word):
            found |= {file for file in path.rglob("*") if file.is_file()}
    inside = code.resolve()
    return sorted(
        code / each.resolve().relative_to(inside)
        for each in found
        if each.resolve().is_relative_to(inside)
    )


def _exported(code: Path) -> str:
    """What ``uv.lock`` locks, as a list of requirements; nothing is resolved or fetched."""
    program = shutil.which(
        "uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if program is None:
        raise InputError(f"{UV_LOCK} cannot be read: this image has no uv; add a requirements.txt")
    options = ["--frozen", "--no-dev", "--no-emit-project", "--no-emit-workspace", "--no-hashes"]
    options += ["--no-header", "--no-annotate", "--no-editable", "--no-python-downloads"]
    done = subprocess.run(
        [program, "export", *options, "--python", sys.executable, "--offline", "--quiet"],
        cwd=code,
        env=os.environ | {"UV_NO_CACHE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InputError(f"{UV_LOCK} cannot be read:\n{_tail(done.stderr)}")
    return done.stdout


# --- what the image has ---------------------------------------------------------------------------
def _versions(folders: list[str]) -> dict[str, str]:
    """Canonical name -> version of the packages in some folders of a Python."""
    return {
        re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(): each.version
        for each in importlib.metadata.distributions(path=folders)
        if each.metadata["Name"]
    }


def _image_folders() -> list[str]:
    return [each for each in sys.path if each.endswith("-packages")]


def _in_image() -> dict[str, str]:
    return dict(sorted(_versions(_image_folders()).items()))


def _report_replaced(name: str, folder: Path) -> None:
    """Say what programs get in another version than the image's."""
    replaced = json.loads((folder / "replaced.json").read_text())
    if replaced:
        listed = ", ".join(f"{each} {new} (image: {old})" for each, (old, new) in replaced.items())
        say(f"WARNING: {name} replaces packages of the image: {listed}")
    if "torch" in replaced:
        say("WARNING: the image's torch is tested with the driver of the hosts, this one is not")


# --- the installation -----------------------------------------------------------------------------
def _make(
    wanted: _Wanted,
    code: Path,
    cache: Cache,
    *,
    environment: Mapping[str, str],
    should_stop: Callable[[], bool],
) -> None:
    draft = cache.draft(wanted.key)
    try:
        venv.create(draft, with_pip=False, symlinks=True)
        python = draft / "bin" / "python"
        site = site_packages(draft)
        # pip then counts what the image has as installed.
        image = site / "image.pth"
        image.write_text("\n".join(_image_folders()))
        _pip(wanted, code, cache, python, environment=environment, should_stop=should_stop)
        image.unlink()
        had = _in_image()
        new = _versions([str(site)])
        replaced = {
            each: (had[each], new[each])
            for each in sorted(had.keys() & new.keys())
            if had[each] != new[each]
        }
        (draft / "replaced.json").write_text(json.dumps(replaced))
        _leave_packages_only(draft)
        cache.finish(wanted.key, draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _pip(
    wanted: _Wanted,
    code: Path,
    cache: Cache,
    python: Path,
    *,
    environment: Mapping[str, str],
    should_stop: Callable[[], bool],
) -> None:
    with tempfile.TemporaryDirectory(prefix="requirements-") as folder:
        listed, fixed, output = (Path(folder, each) for each in ("list.txt", "fixed.txt", "output"))
        listed.write_text(_with_absolute_constraints(wanted.text, code), encoding="utf-8")
        ray = _in_image().get(_FIXED)
        fixed.write_text(f"{_FIXED}=={ray}\n" if ray else "")
        command = [sys.executable, "-m", "pip", "--python", str(python), "install"]
        command += [
            "--progress-bar=off",
            "--disable-pip-version-check",
            "-r",
            str(listed),
            "-c",
            str(fixed),
        ]
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=code,
                env={"PIP_CACHE_DIR": str(cache.root / _PIP), **os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                while process.poll() is None:
                    if should_stop():
                        raise Stopped
                    time.sleep(_POLL_S)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        text = output.read_text(errors="replace").replace(str(listed), wanted.name)
    if process.returncode:
        if ray and f"(constraint) {_FIXED}=={ray}" in text:
            raise InputError(
                f"{wanted.name} asks for another Ray than {ray}, on which the cluster runs: leave "
                f"ray out of it, or allow {ray}"
            )
        raise InputError(f"{wanted.name} cannot be installed:\n{_tail(text)}")


def _with_absolute_constraints(text: str, code: Path) -> str:
    """pip looks for constraints beside the list, which lies elsewhere."""
    return re.sub(r"(?m)^-c (.+)$", lambda found: f"-c {code / found[1]}", text)


def _leave_packages_only(folder: Path) -> None:
    """Make an installation of a virtual environment: programs run with the image's Python."""
    old = os.fsencode(folder / "bin" / "python")
    for path in (folder / "bin").iterdir():
        if path.name.lower().startswith(("python", "activate")):
            path.unlink()
        elif path.is_file() and (content := path.read_bytes()).startswith(b"#!"):
            path.write_bytes(content.replace(old, os.fsencode(sys.executable), 1))
    (folder / "pyvenv.cfg").unlink()


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-8:])
