"""``--code DIR``: the user's own code, looked at and packed."""

import os
import subprocess
import zipfile
from pathlib import Path
from typing import Final

from contract.errors import InputError
from contract.runs import check_relative
from trainctl.errors import UsageError

#: Of a code folder: more is data, and belongs into the bucket.
CODE_MIB: Final = 100
_SKIPPED: Final = {".git", ".venv", "venv", "node_modules", "__pycache__", ".ipynb_checkpoints"}


def files_of(folder: Path) -> list[Path]:
    """Files of a code folder that are uploaded: in a work tree of git, what git does not ignore."""
    listed = subprocess.run(
        ["git", "-C", str(folder), "ls-files", "-z", "-co", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        names = {name for name in os.fsdecode(listed.stdout).split("\0") if name}
        found = [folder / name for name in names]
    else:
        found = [*folder.rglob("*")]
    return sorted(
        path
        for path in found
        if path.is_file() and not _SKIPPED & {*path.relative_to(folder).parts}
    )


def look_at(folder: Path) -> str:
    """What would be uploaded, in words. Raises UsageError where that cannot be."""
    if not folder.is_dir():
        raise UsageError(f"--code {folder}: there is no such folder")
    files = files_of(folder)
    if not files:
        raise UsageError(f"--code {folder}: there is no file in it")
    for path in files:
        _check_name(str(path.relative_to(folder)), folder)
    size = sum(path.stat().st_size for path in files) / 2**20
    if size > CODE_MIB:
        largest = max(files, key=lambda path: path.stat().st_size)
        raise UsageError(
            f"--code {folder}: {size:.0f} MiB, and at most {CODE_MIB} are uploaded; the largest is "
            f"{largest.relative_to(folder)}. Put data into the bucket (aws s3 cp), or let git "
            "ignore it"
        )
    return f"{len(files)} files of {folder}, {max(size, 0.1):.1f} MiB"


def _check_name(name: str, folder: Path) -> None:
    """Refuse a file's name that the head would refuse, or that an archive cannot hold."""
    rename = "rename the file, or let git ignore it"
    try:
        check_relative(name, what=f"--code {folder}: the file name")
        name.encode()
    except InputError as error:
        raise UsageError(f"{error}; {rename}") from None
    except UnicodeEncodeError:
        raise UsageError(
            f"--code {folder}: the file name {name!r} is not UTF-8: {rename}"
        ) from None


def pack(folder: Path, archive: Path) -> None:
    """Write the files of a code folder into an archive."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as file:
        for path in files_of(folder):
            file.write(path, path.relative_to(folder))
