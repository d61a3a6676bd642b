"""An earlier commit of this project, checked out beside the current one, to be measured against.

Both run in the same virtual environment. The project is installed there as a line in a .pth file
that names the current checkout, so a command of the earlier commit needs the earlier folder as its
working directory and as its ``PYTHONPATH``, which come before such lines.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
# The last commit before anything was done about the time that a start takes.
COMMIT: Final = "82f91c529ab9841cfe3931979ba89d495e75e967"


# Python runs a module of this name at its start. It writes down which files of a package
# ``training`` the process opens.
SITECUSTOMIZE: Final = """
import os, sys

def note(event, arguments):
    if event != "open" or not isinstance(arguments[0], str):
        return
    path = arguments[0]
    if "/training/" in path and path.endswith((".py", ".pyc")) and "site-packages" not in path:
        file = os.open(os.environ["OPENED_FILES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{os.getpid()} {path}\\n".encode())
        os.close(file)

sys.addaudithook(note)
"""


class BaselineError(Exception):
    """There is no baseline to measure against; the message says how to get one."""


@contextmanager
def checked_out(given: str | None) -> Iterator[Path]:
    """The baseline's folder: ``given``, or a git worktree of COMMIT that is removed afterwards.

    Raises:
        BaselineError: ``given`` is not a checkout of this project, or COMMIT is not in this clone.
    """
    if given is not None:
        folder = Path(given).expanduser().resolve()
        if not (folder / "training" / "launch.py").is_file():
            raise BaselineError(
                f"--baseline is {given}, which has no training/launch.py: give the root of a "
                "checkout of this project"
            )
        yield folder
        return
    if _git("cat-file", "-e", f"{COMMIT}^{{commit}}").returncode:
        raise BaselineError(
            f"commit {COMMIT[:7]} is not in {ROOT}: `git fetch --unshallow` gets it if this is a "
            f"shallow clone, `git fetch origin {COMMIT}` gets only it; or give --baseline the "
            "folder of a checkout"
        )
    with tempfile.TemporaryDirectory(prefix="baseline-") as scratch:
        folder = Path(scratch) / "checkout"
        try:
            added = _git("worktree", "add", "--detach", str(folder), COMMIT)
            if added.returncode:
                raise BaselineError(f"git worktree add failed: {added.stderr.strip()}")
            yield folder
        finally:
            _git("worktree", "remove", "--force", str(folder))


def commit_of(folder: Path) -> str | None:
    """Commit that a checkout is at; None where git does not know."""
    found = _git("-C", str(folder), "rev-parse", "HEAD")
    return found.stdout.strip() or None


def environment(folder: Path, **changes: str) -> Mapping[str, str]:
    """Environment in which Python imports this project's packages from ``folder``."""
    return {**os.environ, "PYTHONPATH": str(folder), **changes}


def compile_sources(folder: Path) -> None:
    """Write the bytecode of a checkout, as Python does at a first start.

    Where PYTHONDONTWRITEBYTECODE is set, each process of each start would otherwise compile the
    sources again, and only in the checkout that has never been used.
    """
    packages = sorted(str(file.parent) for file in folder.glob("*/__init__.py"))
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", *packages],
        cwd=folder,
        check=False,  # a file that does not compile fails when it is imported
    )


def imported_from(opened: str) -> tuple[set[str], int]:
    """Checkouts that the opened files lie in, and how many processes have opened any."""
    pairs = [line.split(" ", 1) for line in opened.splitlines()]
    roots = {path.partition("/training/")[0] for _, path in pairs}
    return roots, len({pid for pid, _ in pairs})


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,  # a Ctrl-C while it removes the worktree must not stop that
    )
