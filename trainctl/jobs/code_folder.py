"""``--code DIR``: checks and packing of the user's own code."""

import difflib
import hashlib
import os
import re
import shlex
import stat
import subprocess
import zipfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from contract import requirements
from contract.command import ASSIGNMENT, LONGEST_NAME, SimpleCommand, is_launcher
from contract.errors import InputError
from contract.runs import check_relative
from contract.text import counted, listed
from trainctl.aws.errors import UsageError
from trainctl.jobs import variables

#: Largest code folder: more is data, and belongs into the bucket.
CODE_MIB: Final = 100
#: Files of variables, which hold passwords; not the examples of them.
_VARIABLES: Final = re.compile(r"\.env(\.(?!example|sample|template|dist)[\w.-]+)?")
_SKIPPED: Final = {".git", ".venv", "venv", "node_modules", "__pycache__", ".ipynb_checkpoints"}
#: In each folder that ``trainctl download`` has made: it is left out of an upload.
DOWNLOADED: Final = ".trainctl-download"
#: Date of every file in an archive, the earliest that zip knows: equal files give equal hashes.
_DATE: Final = (1980, 1, 1, 0, 0, 0)


def files_of(folder: Path) -> list[Path]:
    """Files and links of a code folder that are uploaded, sorted.

    In a work tree of git, its submodules included: what git does not ignore. What ``trainctl
    download`` has fetched into the folder is left out.

    Raises:
        UsageError: git cannot list the files of its work tree.
    """
    names = _listed_by_git(folder)
    if names is not None:
        found = [folder / name for name in names]
        # A separate work tree inside this one: git lists its folder only.
        inner = [path for path in found if path.is_dir() and not path.is_symlink()]
        found += [file for path in inner for file in files_of(path)]
    else:
        found = [*folder.rglob("*")]
    downloaded = {path.parent for path in found if path.name == DOWNLOADED}
    return sorted(
        path
        for path in {*found}
        if (path.is_symlink() or path.is_file())
        and not _SKIPPED & {*path.relative_to(folder).parts}
        and not downloaded & {*path.parents}
    )


def ignored_of(folder: Path) -> list[str]:
    """Files and folders that git ignores, sorted, but for caches and environments."""
    names = _listed_by_git(folder, "-oi", "--directory") or ()
    return sorted(name for name in names if not _SKIPPED & {*name.split("/")})


def _listed_by_git(folder: Path, *options: str) -> set[str] | None:
    """Names of files, and of inner work trees; None where the folder is in no work tree of git.

    Args:
        options: which ones; by default those that git does not ignore.
    """
    try:
        listed = subprocess.run(
            [
                *("git", "-C", str(folder), "ls-files", "-z", "--exclude-standard"),
                *(options or ["-co"]),
            ],
            capture_output=True,
            check=False,
            env={**os.environ, "LC_ALL": "C"},  # its message is read below
        )
    except FileNotFoundError:  # git is not installed
        return None
    if listed.returncode == 0:
        return {name for name in os.fsdecode(listed.stdout).split("\0") if name}
    said = " ".join(os.fsdecode(listed.stderr).split())
    if "not a git repository (or any" in said:
        return None
    # Without git's list, ignored files would be uploaded too: they may hold passwords.
    raise UsageError(f"--code {folder}: git cannot list its files: {said}")


@dataclass(frozen=True, slots=True)
class CodeFolder:
    """A folder of the user's own code, read once: what is checked is what is uploaded."""

    path: Path
    files: Sequence[Path]
    """As ``files_of`` lists them."""
    packages: str
    """Name of its list of packages; "": it has none."""
    dangling: Sequence[Path] = ()
    """Links that lead nowhere here either, which are left out."""

    @classmethod
    def of(cls, folder: Path, not_secret: Collection[str] = ()) -> Self:
        """Read a folder.

        Args:
            not_secret: paths in the folder of files that look like secrets and are none.

        Raises:
            UsageError: it cannot be uploaded.
        """
        if not folder.is_dir():
            raise UsageError(f"--code {folder}: there is no such folder")
        everything = files_of(folder)
        files = [path for path in everything if path.exists()]
        if not files:
            raise UsageError(f"--code {folder}: there is no file in it")
        for path in files:
            try:
                check_relative(
                    str(path.relative_to(folder)), what=f"--code {folder}: the file name"
                )
            except InputError as error:
                raise UsageError(f"{error}; rename the file, or let git ignore it") from None
        _check_links(files, folder)
        if held := [path for path in files if _VARIABLES.fullmatch(path.name)]:
            raise UsageError(
                f"--code {folder}: {held[0].relative_to(folder)} would be uploaded into the "
                "bucket, which all jobs can read. Let git ignore it, and pass its secrets with "
                "--secret, all else with --env"
            )
        variables.refuse_secret_files(folder, files, not_secret)
        try:
            packages = requirements.file_of(folder)
        except InputError as error:
            raise UsageError(f"--code {folder}: {error}") from None
        if packages and folder / packages not in files:
            raise UsageError(
                f"--code {folder}: {packages} is ignored by git, so the nodes would not install it"
            )
        dangling = [path for path in everything if not path.exists()]
        found = cls(folder, files, packages, dangling)
        if found.mib > CODE_MIB:
            largest = max(files, key=lambda path: path.lstat().st_size)
            raise UsageError(
                f"--code {folder}: {found.mib:.0f} MiB, and at most {CODE_MIB} are uploaded; the "
                f"largest is {largest.relative_to(folder)}. Put data into the bucket (trainctl "
                "data put), or let git ignore it"
            )
        return found

    @property
    def mib(self) -> float:
        """Size of all files."""
        return sum(path.lstat().st_size for path in self.files) / 2**20

    @property
    def commit(self) -> str:
        """Commit of its work tree, with ``-dirty`` after changes; "" where there is none."""
        command = ["describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
        try:
            done = subprocess.run(
                ["git", "-C", str(self.path), *command], capture_output=True, check=False
            )
        except FileNotFoundError:  # git is not installed
            return ""
        return "" if done.returncode else done.stdout.decode().strip()

    @property
    def warnings(self) -> list[str]:
        """Files that a program may miss on a node, in words."""
        pointers = [path for path in self.files if _is_pointer(path)]
        found = {
            "links that lead nowhere, left out": self.dangling,
            "pointers of Git LFS in the place of files, so git lfs pull first": pointers,
        }
        return [
            f"{listed([str(path.relative_to(self.path)) for path in paths])}: {what}"
            for what, paths in found.items()
            if paths
        ]

    @property
    def words(self) -> str:
        """Summary of the upload, as a phrase."""
        installed = f"packages of {self.packages}" if self.packages else "no list of packages"
        if not self.packages and (unread := requirements.unread(self.path)):
            verb = "is" if len(unread) == 1 else "are"
            installed += f" that is read: {listed(unread)} {verb} not"
        left = ignored_of(self.path)
        without = f" (git ignores {listed(left)})" if left else ""
        num_files = f"{counted(len(self.files), 'file')} of {self.path}{without}"
        return f"{num_files}, {max(self.mib, 0.1):.1f} MiB, {installed}"

    def check_command(self, words: Sequence[str]) -> None:
        """Refuse a command whose file is not uploaded, before hosts start and find it missing.

        Only what is certain is refused: ``python -m``, a shell's ``-c``, absolute paths and
        programs that are not known here pass.

        Raises:
            UsageError: the file is not in the folder, or is given as a command and is none.
        """
        first, program = words[0], SimpleCommand.of(words).program
        if len(words) == 1 and is_launcher(first):
            raise UsageError(f"{first} has nothing to run: name the file that it runs")
        if (
            len(words) == 1
            and len(first.split()) > 1
            and not (self.path / first[:LONGEST_NAME]).exists()
        ):
            raise UsageError(f"{first!r} is one word: leave its quotes out")
        if ASSIGNMENT.fullmatch(first):
            raise UsageError(f"{first} is for a shell: give --env {first}")
        if program.endswith(".ipynb"):
            script = f"jupyter nbconvert --to script {program}"
            raise UsageError(f"{program} is a notebook, which no command runs as it is: {script}")
        if (
            not 0 < len(program) <= LONGEST_NAME
            or program.startswith("-m ")
            or os.path.isabs(program)
        ):
            return
        path = self.path / os.path.normpath(program)
        if path.resolve() not in {each.resolve() for each in self.files}:
            why = "is not among the files that are uploaded"
            if not path.exists():
                names = [str(each.relative_to(self.path)) for each in self.files]
                close = difflib.get_close_matches(program, names, n=1)
                why = "does not exist" + (f": did you mean {close[0]}?" if close else "")
            raise UsageError(f"--code {self.path}: {program}, which the command runs, {why}")
        if program == first and not ("/" in first and os.access(path, os.X_OK)):
            shell = "python" if first.endswith(".py") else "bash"
            raise UsageError(f"{first} is not a command: give {shell} {shlex.join(words)}")

    def pack(self, archive: Path) -> str:
        """Write the files into an archive; return its SHA-256 in hexadecimal.

        It keeps which files are executable, and links. The same files make the same archive.
        """
        with zipfile.ZipFile(archive, "w") as file:
            for path in self.files:
                name = path.relative_to(self.path).as_posix()
                entry = zipfile.ZipInfo(name, date_time=_DATE)
                entry.create_system = 3  # Unix: what the attributes mean
                entry.compress_type = zipfile.ZIP_DEFLATED
                if path.is_symlink():
                    # To where it leads in the end, and never by an absolute path.
                    target = os.path.relpath(path.resolve(), path.parent.resolve())
                    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
                    file.writestr(entry, target)
                else:
                    is_executable = bool(path.stat().st_mode & stat.S_IXUSR)
                    entry.external_attr = (stat.S_IFREG | (0o755 if is_executable else 0o644)) << 16
                    file.writestr(entry, path.read_bytes())
        with archive.open("rb") as packed:
            return hashlib.file_digest(packed, "sha256").hexdigest()


def _is_pointer(path: Path) -> bool:
    """True for what git has of a file whose content Git LFS has."""
    if not path.is_file() or path.stat().st_size > 1024:  # their specification's limit
        return False
    return path.read_bytes().startswith(b"version https://git-lfs.github.com/spec/")


def _check_links(files: list[Path], folder: Path) -> None:
    """Refuse links that would lead nowhere on a node."""
    there = {path.resolve() for path in files if not path.is_symlink()}
    there |= {parent for path in there for parent in path.parents}
    for path in files:
        # Not Path.resolve, which fails where a link leads in a circle.
        target = Path(os.path.realpath(path))
        if path.is_symlink() and target not in there - {*folder.resolve().parents}:
            raise UsageError(
                f"--code {folder}: {path.relative_to(folder)} is a link to {path.readlink()}, "
                "which is not among the files that are uploaded. Put data into the bucket "
                "(aws s3 cp); copy code into the folder, or let git ignore the link"
            )
