"""Storage of runs: a folder or ``s3://bucket/prefix``, behind the same few operations.

fsspec does the work (torch brings it, s3fs adds S3), so that a recipe saves the same way under
Ray, under torchrun and on a box without pyarrow. Addresses are plain strings.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from contract import faults, runs
from contract.errors import AdvisedError, InputError
from contract.nodes import ENV_S3_TIMEOUT
from contract.runs import safe_join
from contract.text import byte_size
from contract.times import S3_QUICK_S, S3_TIMEOUT_S
from store import cache

#: A request that S3 refuses or does not answer is made so often, with pauses that grow to 20 s:
#: two minutes of refusals or seven of silence. ``AWS_MAX_ATTEMPTS`` has the last word.
_ATTEMPTS: Final = 10
#: By s3fs, around those of botocore, which do not know of an answer that breaks off.
_ROUNDS: Final = 2
#: Attempts that are refused at once, before a person is told of them.
_REPORT_AFTER: Final = 3
_reported: Final[set[str]] = set()
#: Shows a line. A process whose stderr nobody sees sets its own.
say: Callable[[str], object] = faults.say
_READ_BYTES: Final = 1 << 22
#: Name of a ``staged_folder``; ``mkdtemp`` appends eight characters.
_STAGING: Final = ".staging-"


class FullError(AdvisedError):
    """A disk is full. It may have room later, but starting again now would not help."""


class Written:
    """Bytes that this process has written to checkpoints: they grow while a save makes progress."""

    total = 0

    @classmethod
    def add(cls, num: int) -> None:
        cls.total += num


def is_s3(uri: str) -> bool:
    return uri.startswith("s3://")


def runs_root(storage: str) -> str:
    """Return the absolute address under which runs are kept.

    A bare bucket keeps them under ``runs/``, beside its data. Tilde and relative folders become
    absolute, because workers run in another folder than the command.

    Raises:
        InputError: The address is empty, of an unknown kind, or names no bucket.
    """
    if is_s3(storage):
        bucket, _, prefix = storage.removeprefix("s3://").partition("/")
        if not bucket:
            raise InputError(f"storage {storage!r} names no bucket: use s3://BUCKET/PREFIX")
        return f"s3://{bucket}/{prefix.strip('/') or runs.RUNS_PREFIX}"
    if not storage or "://" in storage:
        raise InputError(f"storage {storage!r} is not usable: give a folder or s3://BUCKET/PREFIX")
    try:
        return str(Path(storage).expanduser().absolute())
    except (RuntimeError, ValueError) as error:  # no such user; a character that no path has
        raise InputError(f"storage {storage!r} is not usable: {error}") from None


def join(uri: str, *names: str) -> str:
    return "/".join([uri.rstrip("/"), *names])


def filesystem(uri: str, *, quick: bool = False) -> Any:
    """The fsspec filesystem of ``uri``; S3 follows the AWS variables, ``AWS_ENDPOINT_URL`` too.

    Args:
        quick: S3 is asked once and for seconds, not again and again for minutes.
    """
    import fsspec

    if not is_s3(uri):
        return fsspec.filesystem("file", auto_mkdir=True)
    timeout_s = float(os.environ.get(ENV_S3_TIMEOUT, S3_TIMEOUT_S))
    attempts = int(os.environ.get("AWS_MAX_ATTEMPTS", _ATTEMPTS))
    if quick:
        timeout_s, attempts = min(timeout_s, S3_QUICK_S), 1
    found = fsspec.filesystem(
        "s3",
        use_listings_cache=False,
        config_kwargs={
            "connect_timeout": timeout_s,
            "read_timeout": timeout_s,
            "retries": {"mode": "adaptive", "total_max_attempts": attempts},
        },
    )
    found.retries = 1 if quick else _ROUNDS
    if not quick and found.session is None:
        from aiobotocore.session import AioSession

        found.session = AioSession()
        found.session.register("needs-retry.s3", _tell_of_failure)
    return found


def _tell_of_failure(*, attempts: int, caught_exception: Exception | None, **_: Any) -> None:
    """Say once of each kind of failure, when some seconds are lost, that S3 does not answer."""
    cause = type(caught_exception).__name__ if caught_exception else ""
    is_long = attempts >= _REPORT_AFTER or "Timeout" in cause
    if cause and is_long and cause not in _reported:
        _reported.add(cause)
        say(f"S3 does not answer yet ({caught_exception}): it is tried again for minutes")


def check_writable(root: str) -> None:
    """Make sure that runs can be written to ``root``, before anything expensive starts.

    Raises:
        InputError: It does not exist (a bucket), cannot be made or cannot be written.
        UnreachableError: S3 does not answer, or asks for fewer requests.
    """
    if is_s3(root):
        # Objects are written and removed, not listed: a role may lack s3:ListAllMyBuckets.
        probe = join(root, f".probe-{uuid.uuid4().hex}")
        try:
            fs = filesystem(root)
            fs.pipe_file(probe, b"")
            fs.rm_file(probe)
        except Exception as error:  # s3fs lets botocore's many exceptions through
            raise faults.explained(error, f"storage {root} cannot be written") from None
        return
    parent = Path(root).parent
    if not parent.exists():  # a disk that is not mounted, or a slip of the pen: do not make it
        raise InputError(
            f"storage {root} cannot be made: {parent} does not exist; make it first, or give "
            "--storage another folder"
        )
    try:
        Path(root).mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise InputError(
            f"storage {root} cannot be written ({error.strerror or error}): give --storage a "
            "folder that you may write, or s3://BUCKET/PREFIX"
        ) from None


@contextlib.contextmanager
def room(uri: str, size: int, *, num: int = 0) -> Iterator[None]:
    """Turn the error of a full disk, whichever library meets it, into a sentence for people.

    Args:
        uri: where checkpoints are written; on its way to S3 one is in a temporary folder.
        size: bytes of one.
        num: a disk must have room for so many now.

    Raises:
        FullError: the disk is full.
    """
    folder = Path(tempfile.gettempdir() if is_s3(uri) else uri)
    try:
        if num * size > bytes_free(folder) and not is_s3(uri):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield
    except Exception as error:
        states = {"full": faults.is_full, "read-only": faults.is_read_only}
        state = next((name for name, is_so in states.items() if is_so(error)), "")
        if not state:
            raise
        needed, free = byte_size(max(num, 1) * size), byte_size(bytes_free(folder))
        raise FullError(
            f"the disk of {folder} is {state}: checkpoints need {needed}, {free} are free (a quota "
            "may allow less); free some, or give a lower --checkpoints-to-keep, then the same "
            "command continues the run"
        ) from None


def bytes_free(folder: Path) -> int:
    """Free bytes of the disk of a folder, which may not be there yet."""
    place = next(each for each in (folder, *folder.parents) if each.exists())
    return shutil.disk_usage(place).free


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn errors of reading what a user gave into those that say whose mistake they are.

    Args:
        what: its address, as errors call it.

    Raises:
        InputError: there is none, or it may not be read.
        OSError: the disk is full.
        UnreachableError: it cannot be read, for another reason.
    """
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{what} does not exist, or these credentials may not read it") from None
    except Exception as error:  # s3fs lets botocore's many exceptions through
        if faults.is_full(error):
            raise
        raise faults.explained(error, f"{what} cannot be read") from None


def exists(uri: str) -> bool:
    return bool(filesystem(uri).exists(uri))


def read_bytes(uri: str) -> bytes | None:
    """The content of a file, or None when there is none."""
    try:
        content = filesystem(uri).cat_file(uri)
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        return b""  # damaged: a folder in its place has no content
    return bytes(content)


def sha256(uri: str) -> str:
    """SHA-256 of a file, which need not fit into memory."""
    digest = hashlib.sha256()
    with filesystem(uri).open(uri, "rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_bytes(
    uri: str, content: bytes, *, quick: bool = False, check: Callable[[], None] | None = None
) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    Args:
        quick: see ``filesystem``.
        check: looks whether this process may still replace the file, and raises where it may not.
            One that stalls right after this look replaces nothing that was written meanwhile by a
            process with a later lease, which on disk calls ``remove_leftovers`` first.
    """
    if is_s3(uri):
        # S3 shows an object only once it is whole.
        fs = filesystem(uri, quick=quick)
        if check is None:
            fs.pipe_file(uri, content)
        else:
            _replace(fs, uri, content, check)
        return
    with whole_file(Path(uri), check=check) as part, part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # or a loss of power may leave an empty file under the name


def cached(name: str, content: Callable[[], bytes]) -> Path:
    """A file of the cache, which ``content`` gives where it is not there yet."""
    file = cache.cache_dir() / name
    if not file.exists():
        write_bytes(str(file), content())
    return file


def _replace(fs: Any, uri: str, content: bytes, check: Callable[[], None]) -> None:
    """Write an object that nobody has changed since before ``check``."""
    while True:
        condition: dict[str, Any] = {"mode": "create"}
        with contextlib.suppress(FileNotFoundError):
            # In one request, however large: s3fs has no condition for one in parts.
            condition = {"IfMatch": _head(fs, uri)["ETag"], "chunksize": 5 << 30}
        check()
        try:
            fs.pipe_file(uri, content, **condition)
            return
        except OSError as error:
            # Also where an earlier request of this process has taken effect late.
            if not _is_conflict(error):
                raise


def _is_conflict(error: OSError) -> bool:
    """Check if S3 has refused a write because of its condition."""
    # s3fs has a class of its own for one form of that alone.
    return error.__cause__ is not None and faults.is_taken(error.__cause__)


@contextlib.contextmanager
def whole_file(target: Path, *, check: Callable[[], None] | None = None) -> Iterator[Path]:
    """A new file to fill, beside ``target``, whose name it then has: a reader sees the old content
    or the new, never a part. Where filling it fails, or ``check``, the old one stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(0o644)  # mkstemp's 0600 would hide the record from a colleague
        if check is not None:
            check()
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def create_bytes(uri: str, content: bytes) -> bool:
    """Write a file that does not exist yet; return whether this call made it. Of several processes
    that try at the same time, one succeeds."""
    if is_s3(uri):
        try:
            filesystem(uri).pipe_file(uri, content, mode="create")
        except OSError as error:
            if _is_conflict(error):
                return False
            raise
        return True
    target = Path(uri)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Linked when it is whole, so that no reader finds it empty.
    part = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    part.write_bytes(content)
    try:
        os.link(part, target)
    except FileExistsError:
        return False
    except OSError:  # a disk without links: a reader may find a part for a moment
        try:
            with target.open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
    finally:
        part.unlink()
    return True


def age_s(uri: str) -> float:
    """Seconds since a file was written. In S3 by its own clock: no other one matters."""
    if not is_s3(uri):
        return time.time() - Path(uri).stat().st_mtime
    found = _head(filesystem(uri), uri)
    now = parsedate_to_datetime(found["ResponseMetadata"]["HTTPHeaders"]["date"])
    return float((now - found["LastModified"]).total_seconds())


def _head(fs: Any, uri: str) -> Any:
    """Metadata of an object in S3, from HeadObject."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return fs.call_s3("head_object", Bucket=bucket, Key=key)


def list_files(uri: str) -> list[str]:
    """Sorted names of the files directly below ``uri``; empty when there is none."""
    return _shown(sizes(uri))


def list_folders(uri: str) -> list[str]:
    """Sorted names of the folders directly below ``uri``; empty when there is none."""
    return _shown(_below(uri, folders=True))


def _shown(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("."))


def sizes(uri: str) -> dict[str, int]:
    """Bytes of each file directly below ``uri``, hidden ones too; empty when there is none."""
    return _below(uri, folders=False)


def _below(uri: str, *, folders: bool) -> dict[str, int]:
    try:
        entries = filesystem(uri).ls(uri, detail=True)
    except FileNotFoundError:
        return {}
    return {
        entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry["size"]
        for entry in entries
        if (entry["type"] == "directory") == folders
    }


def show_folder(hidden: str, uri: str, *, check: Callable[[], None]) -> None:
    """Give a hidden folder on disk its name, once all of it would survive a loss of power.

    Args:
        check: called right before that; what it raises prevents it.

    Raises:
        OSError: something has that name, among other reasons.
    """
    _sync_folder(Path(hidden))
    check()
    Path(hidden).rename(uri)
    sync(Path(uri).parent)


def _sync_folder(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, survive a loss of power."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        # Some file systems in user space cannot do that for folders.
        if path.is_file() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(opened)


def download(uri: str, path: Path) -> None:
    """Copy a file in S3 to this disk."""
    filesystem(uri).get_file(uri, str(path))


def fetch(url: str, target: Path, *, check: Callable[[Path], None] = lambda _: None) -> None:
    """Fetch a file in S3 to a place in the cache. To be called within ``cache.locked``.

    Args:
        check: called with what was fetched, before it has its name.

    Raises:
        InputError: it is missing, or the disk is full.
        UnreachableError: S3 does not answer.
        Exception: of ``check``.
    """
    # The same name each time: what a killed process has left takes up room once.
    part = target.with_name(f".{target.name}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with reading(url):
            download(url, part)
        check(part)
        part.replace(target)
    except OSError as error:
        if faults.is_full(error):
            raise cache.not_writable(target.parent, error) from None
        raise
    finally:
        part.unlink(missing_ok=True)


def upload(path: Path, uri: str) -> None:
    """Copy a local file to S3."""
    filesystem(uri).put_file(str(path), uri, callback=_counting())


def _counting() -> Any:
    """Callback for s3fs that adds the bytes of each uploaded part of a file to ``Written``."""
    import fsspec

    class CountingCallback(fsspec.Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            Written.add(inc)

    return CountingCallback()


@contextlib.contextmanager
def staged_folder(uri: str, *, last: str | None = None) -> Iterator[Path]:
    """A new local folder to fill, whose files are then published at ``uri``. Files of the same
    names are replaced there; everything else stays: a user may have put it there. Where filling it
    fails, nothing is published.

    A new folder on disk appears by a rename. S3 has none: there the file called ``last`` is
    uploaded after all others, and a reader that misses it knows that the rest is incomplete.
    """
    parent = None if is_s3(uri) else Path(uri).parent
    if parent:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=_STAGING, dir=parent))
    folder.chmod(0o755)
    try:
        yield folder
        if parent:
            _move(folder, Path(uri))
            return
        upload_folder(folder, uri, last=last)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def upload_folder(folder: Path, uri: str, *, last: str | None = None) -> None:
    """Copy the files of a local folder to S3, and the one called ``last`` after all others."""
    files = (path for path in folder.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: (path.name == last, path)):
        upload(path, join(uri, path.relative_to(folder).as_posix()))


def _move(folder: Path, target: Path) -> None:
    _sync_folder(folder)
    try:
        folder.rename(target)
    except OSError:  # it is there
        if not target.is_dir():
            raise
        for path in folder.iterdir():
            path.replace(target / path.name)


def fetch_folder(uri: str, into: Path) -> Path:
    """Return a local folder with the content of ``uri``: itself if on disk, else a copy.

    Raises:
        InputError: a key would lead out of ``into``; nothing is fetched from there on.
    """
    if not is_s3(uri):
        return Path(uri)
    for name in find(uri):
        target = safe_join(into, name, what="key")
        target.parent.mkdir(parents=True, exist_ok=True)
        download(join(uri, name), target)
    return into


def find(uri: str) -> dict[str, int]:
    """Bytes of all files below an address in S3, by their names there.

    Of a file, its own: by the key with the bucket.
    """
    found = filesystem(uri).find(uri, detail=True)
    start = uri.removeprefix("s3://").rstrip("/") + "/"
    return {
        key.removeprefix(start): int(each["size"])
        for key, each in found.items()
        if not key.endswith("/")  # the mark of a folder that the console makes
    }


def rename_folder(uri: str, target: str) -> None:
    """Move a folder within a storage; where there is one at ``target``, a number is added to it."""
    wanted, number = target, 1
    while _is_taken(target):
        number += 1
        target = f"{wanted}-{number}"
    if not is_s3(uri):
        Path(uri).rename(target)
        return
    # File by file: s3fs's own recursive move also asks for the folder's name, which is no object.
    for name in find(uri):
        filesystem(uri).cp_file(join(uri, name), join(target, name))
    remove_folder(uri)


def _is_taken(uri: str) -> bool:
    above, _, name = uri.rpartition("/")
    return name in list_folders(above)


def remove_file(uri: str) -> None:
    """Remove a file; nothing happens when there is none."""
    fs = filesystem(uri)
    if fs.exists(uri):
        fs.rm_file(uri)


def remove_folder(uri: str) -> None:
    """Remove a folder and all below it; nothing happens when there is none."""
    if is_s3(uri):
        fs = filesystem(uri)
        if fs.exists(uri):
            fs.rm(uri, recursive=True)
        return
    shutil.rmtree(uri, ignore_errors=True)


def remove_run(uri: str, *, before: int = 0) -> None:
    """Remove what a run has written to its folder, but its leases; what others put there stays.

    Args:
        before: checkpoints of this lease and of later ones stay; 0: none does.
    """
    for folder, patterns in runs.RECORD.items():
        place = join(uri, folder) if folder else uri
        files, folders = sizes(place), _below(place, folders=True)
        for name in [*files, *folders]:
            key = runs.checkpoint_key(name)
            is_later = bool(before and key and key[1] >= before)
            if not is_later and any(fnmatchcase(name, pattern) for pattern in patterns):
                remove = remove_file if name in files else remove_folder
                remove(join(place, name))
        if folder and not is_s3(uri):
            with contextlib.suppress(OSError):  # not there, or a user's files are in it
                Path(place).rmdir()
    remove_leftovers(uri)


def remove_leftovers(uri: str, *names: str) -> None:
    """Remove what ``staged_folder``, and ``whole_file`` for these names, made in a folder on disk
    and did not give its name: by a process that was killed, or that stalls right before that."""
    if is_s3(uri):
        return
    for path in Path(uri).glob(f"{_STAGING}????????"):
        shutil.rmtree(path, ignore_errors=True)
    for name in names:
        for path in Path(uri).glob(f".{name}.????????"):
            path.unlink(missing_ok=True)
