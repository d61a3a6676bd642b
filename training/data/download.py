"""Download of a published data set's files: verified, and resumed where it broke off.

Standard library only, because laptops do it too (``trainctl data put``). Addresses whose content
is not known beforehand are fetched through ``training.data.sources``.
"""

import contextlib
import errno
import gzip
import hashlib
import http.client
import os
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from contract import faults
from contract.errors import AdvisedError, InputError
from contract.nodes import ENV_JOB
from contract.text import counted
from store import cache
from training.data.catalog import MIRROR_VARIABLE, DataSet

_CHUNK_BYTES: Final = 1 << 20
#: A server that sends nothing for so long is asked again, for the rest, which a person is told.
_TIMEOUT_S: Final = 10.0
#: Before anything is loaded, a connection must be made within so many seconds.
_WAY_S: Final = 1.5
#: Before each further attempt; one that has brought new bytes does not count.
_PAUSES_S: Final = (0.5, 2.0, 8.0)
#: Of connections on a machine without a network.
_NO_WAY: Final = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED)

T = TypeVar("T")

Report = Callable[[int, int], None]
"""Is called with the bytes fetched or read so far, and those there are."""


#: Shows a line about a download. A process whose stderr nobody sees sets its own.
say: Callable[[str], object] = faults.say


def fetch(
    data: DataSet,
    folder: Path,
    *,
    report: Report | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Path]:
    """Bring all files of a data set into ``folder``; those that are there are taken as they are.

    A file appears under its name once its content is verified. To be called within
    ``cache.locked``.

    Raises:
        InputError: a file cannot be fetched, or is not the published one, or the mirror is no
            address.
        AdvisedError: the server cannot be reached, or fails again and again.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def tell(before: int, size: int) -> None:
        if report is not None:
            report(min(before + size, data.num_bytes), data.num_bytes)

    done = 0
    for name, digest in data.files.items():
        target = folder / name
        if not target.exists():
            part = folder / f".{name}.part"
            url = f"{data.source}/{name}"
            if not url.startswith(("http://", "https://")):
                raise InputError(
                    f"{MIRROR_VARIABLE} is {os.environ.get(MIRROR_VARIABLE)!r}: set it to an "
                    "address that begins with http:// or https://; give files in a folder with "
                    "--data FOLDER"
                )
            try:
                download(url, part, tell=partial(tell, done), sleep=sleep)
            except ConnectionError as error:
                raise _not_reached(data, error) from None
            _verify(data, part, url, name, digest)
            part.replace(target)
        done += target.stat().st_size
    return [folder / name for name in data.files]


def _not_reached(data: DataSet, error: Exception) -> AdvisedError:
    return AdvisedError(
        f"{error} Try again later, which continues where it broke off, or put the "
        f"{counted(len(data.files), 'file')} of {data.name} into a folder and give --data FOLDER; "
        f"{MIRROR_VARIABLE} can name a mirror with a folder per data set"
    )


def check_way(data: DataSet) -> None:
    """Fail if files of a data set are missing here and its server's address accepts no connection.

    Takes two seconds at most, and PyTorch need not be loaded for it. A job and a machine behind a
    proxy find out when they fetch.

    Raises:
        AdvisedError: it does not.
    """
    address = urllib.parse.urlsplit(data.source)
    is_here = all((cache.cache_dir() / data.name / name).exists() for name in data.files)
    if is_here or os.environ.get(ENV_JOB) or address.scheme in urllib.request.getproxies():
        return
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), timeout=_WAY_S).close()
    except OSError as error:
        problem = ConnectionError(f"cannot reach {address.hostname} ({error}): no network?")
        raise _not_reached(data, problem) from None


def published(data: DataSet, *, report: Report | None = None) -> list[Path]:
    """The files of a data set in this machine's cache, fetched where they are not there yet.

    Raises:
        InputError: as ``fetch``; or the cache cannot be written.
    """
    folder = cache.cache_dir() / data.name
    with cache.locked(folder / ".lock"):
        return fetch(data, folder, report=report)


def download(
    url: str,
    part: Path,
    *,
    tell: Callable[[int], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
    resumes: bool = True,
) -> None:
    """Fetch ``url`` into ``part``.

    Where there is no network, a person is told at once; a job tries again, for names may be
    resolved a moment later.

    Args:
        resumes: behind what is there already: only for content that is verified afterwards.

    Raises:
        InputError: the server refuses it, or the disk is full.
        ConnectionError: the server cannot be reached, or breaks off again and again.
    """
    failures = 0
    while True:
        before = part.stat().st_size if resumes and part.exists() else 0
        try:
            _receive(url, part, before, tell)
        except urllib.error.HTTPError as error:
            if error.code == 416 and before:  # what is there is not the beginning of this file
                part.unlink()
                continue
            problem = f"{url} could not be fetched: the server answers {error.code} {error.reason}"
            if not faults.is_passing(error):
                raise InputError(f"{problem}; {MIRROR_VARIABLE} can name a mirror") from None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and faults.is_full(error):
                raise cache.not_writable(part.parent, error) from None
            reason = getattr(error, "reason", None) or error
            problem = f"{url} could not be fetched: {reason}"
            if isinstance(reason, socket.gaierror) or getattr(reason, "errno", 0) in _NO_WAY:
                host = urllib.parse.urlsplit(url).hostname
                problem = f"cannot reach {host} ({reason}): no network?"
                if not os.environ.get(ENV_JOB):
                    raise ConnectionError(problem) from None
        else:
            return
        if resumes and part.exists() and part.stat().st_size > before:
            failures = 0
        if failures == len(_PAUSES_S):
            raise ConnectionError(problem)
        pause = _PAUSES_S[failures]
        failures += 1
        say(f"{problem}; retrying in {pause:g} s ({failures} of {len(_PAUSES_S)})")
        sleep(pause)


def persistently(
    call: Callable[[], T], *, what: str, sleep: Callable[[float], None] = time.sleep
) -> T:
    """Call until it succeeds or fails with what does not pass, with pauses, some times.

    Where there is no network, a person is told at once, as by ``download``.
    """
    for number, pause in enumerate(_PAUSES_S, start=1):
        try:
            return call()
        except Exception as error:
            has_answered = any(map(faults.status_of, faults.chain(error)))
            if not faults.is_passing(error) or not (has_answered or os.environ.get(ENV_JOB)):
                raise
            retry = f"retrying in {pause:g} s ({number} of {len(_PAUSES_S)})"
            say(f"{what}: {faults.text(error)}; {retry}")
        sleep(pause)
    return call()


def _receive(url: str, part: Path, before: int, tell: Callable[[int], None]) -> None:
    """One request for what is missing.

    Raises:
        OSError, HTTPException: it broke off; what came is in ``part``.
    """
    # Bytes as they are: a .gz must not be decompressed on the way.
    headers = {"Accept-Encoding": "identity", "User-Agent": "ecs-train"}
    if before:
        headers["Range"] = f"bytes={before}-"
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        if before and response.status != http.HTTPStatus.PARTIAL_CONTENT:
            before = 0  # this server sends files only as a whole
        promised = response.headers.get("Content-Length")
        size = 0
        with part.open("ab" if before else "wb") as file:
            # Not all of a chunk: a slow server would keep it waiting.
            while chunk := response.read1(_CHUNK_BYTES):
                file.write(chunk)
                size += len(chunk)
                tell(before + size)
    if promised is not None and size != int(promised):
        raise ConnectionError(f"it broke off after {size:,} of {int(promised):,} bytes")


def _verify(data: DataSet, part: Path, url: str, name: str, digest: str) -> None:
    found = content_sha256(part, is_packed=name.endswith(".gz"))
    if found != digest:
        with contextlib.suppress(OSError):
            part.unlink()
        what = "is damaged" if found is None else f"has another content (SHA-256 {found})"
        raise InputError(
            f"{url} {what}: it is not the {name} of {data.name}, whose decompressed content has "
            f"SHA-256 {digest}; try again, or set {MIRROR_VARIABLE} to a mirror that has it"
        )


def content_sha256(file: Path, *, is_packed: bool) -> str | None:
    """SHA-256 of a file's content, decompressed if it is packed; None where that is impossible."""
    digest = hashlib.sha256()
    try:
        with gzip.open(file) if is_packed else file.open("rb") as content:
            while chunk := content.read(_CHUNK_BYTES):
                digest.update(chunk)
    except (OSError, EOFError, zlib.error):
        return None
    return digest.hexdigest()
