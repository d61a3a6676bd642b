"""Preparation of a picture set from ImageNet as downloaded: a tree, tar shards or packed shards.

``python -m training.data.pictures`` runs it, on a laptop or a node. Each
shard is one piece of work; a preparation that was interrupted continues with the shards that are
missing, and ends with the same bytes. ``index.json`` comes last: without it there is no set.
Standard library only at load; the work itself needs Pillow.
"""

import hashlib
import io
import json
import multiprocessing
import os
import signal
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from contract.errors import InputError
from training.data.pictures import layout, workers
from training.data.pictures.destination import Destination
from training.data.pictures.index import (
    ENCODINGS,
    FORMAT,
    FORMS,
    INDEX_FILE,
    JPEG,
    PACKED,
    RAW,
    SPLITS,
    Entry,
    Index,
    StoredFile,
    fingerprint,
    table,
)
from training.data.pictures.layout import FoundPicture

#: Of a model that sees 224 pixels, ``ImagenetConfig.size_of`` wants as many.
DEFAULT_SIZE: Final = 400
SMALLEST: Final = 32
LARGEST: Final = 2048

_SHARD_BYTES: Final = 128 * 2**20
#: Of a packed JPEG, about.
_BYTES_PER_PIXEL: Final = 0.4
#: Of packed JPEGs: at this quality the loss is far below that of shrinking.
_QUALITY: Final = 92


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """Form, size and encoding of the set to prepare."""

    form: str = PACKED
    size: int = DEFAULT_SIZE
    """Maximum length of the shorter side of packed pictures, in pixels; larger ones are shrunk to
    it."""
    encoding: str = JPEG
    """Encoding of packed pictures. Raw pixels need no decoding and eight times the space."""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise InputError(f"--form is {self.form!r}: choose {', '.join(FORMS)}")
        if self.encoding not in ENCODINGS:
            raise InputError(f"--encoding is {self.encoding!r}: choose {', '.join(ENCODINGS)}")
        if not SMALLEST <= self.size <= LARGEST:
            raise InputError(f"--size is {self.size}: give {SMALLEST} to {LARGEST} pixels")
        if self.encoding == RAW and self.form != PACKED:
            raise InputError("--encoding raw is for --form packed: shards keep the files")

    @property
    def shrinks_to(self) -> int:
        """``size`` of packed pictures; 0 of shards, which keep the files as they are."""
        return self.size if self.form == PACKED else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Task of one process: write one shard."""

    name: str
    """Name of the shard without its suffix, such as ``train-00003``."""
    split: str
    wish: Wish
    pictures: tuple[tuple[int, FoundPicture], ...]
    """Label and place of each."""
    to: Destination
    state: str
    """Folder of what was done, at the destination."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkResult:
    """Result of a ``Work``: its lines of the split's table, and its shard."""

    lines: Sequence[str]
    damaged: Sequence[str]
    size: int
    sha256: str


def prepare(
    source: Path,
    to: Destination,
    wish: Wish,
    *,
    processes: int = 0,
    shard_bytes: int = _SHARD_BYTES,
) -> Index:
    """Make the set; nothing is done where it is there already.

    Args:
        processes: 0: one for each core.
        shard_bytes: of a shard, about.

    Raises:
        InputError: the source has none of the layouts, the destination holds another set, or
            one of both cannot be used.
    """
    content = to.read(INDEX_FILE)  # first: to look for pictures may take minutes
    say("looking for pictures")
    arranged = layout.find(source)
    found, label = arranged.pictures, arranged.labels
    for each in arranged.notes:
        say(each)
    works = list(_works(found, label, to, wish, shard_bytes))
    state = works[0].state
    if content is not None:
        there = Index.from_json(content, where=to.uri)
        if there.made_by != state:
            raise InputError(
                f"{to.uri} holds another set of pictures, or one with other settings: give --to "
                "another place, or remove that one"
            )
        return there
    begun, first = f"{state}/begun", f"{works[0].name}.tar"
    if to.read(begun) is None and to.read(first) is not None:
        raise InputError(f"{to.uri} holds {first} of something else: give --to another place")
    to.write(begun, b"")  # from now on, the shards here are this preparation's
    parts = _run(works, processes or os.cpu_count() or 1)
    index = _write_index(works, parts, tuple(label), to, wish)
    for name in [*(f"{state}/{work.name}.json" for work in works), begun]:
        to.remove(name)
    return index


def say(text: str) -> None:
    """Print a line for people, beside what programs read."""
    print(text, file=sys.stderr, flush=True)


def _works(
    found: dict[str, list[FoundPicture]],
    label: Mapping[str, int],
    to: Destination,
    wish: Wish,
    shard_bytes: int,
) -> Iterator[Work]:
    digest = hashlib.sha256(f"{FORMAT}{wish}{shard_bytes}".encode())
    for split in SPLITS:
        for each in found[split]:
            digest.update(f"{split}/{each.class_name}/{each.name} {each.size}\n".encode())
    state = f".prepare-{digest.hexdigest()[:12]}"
    for split in SPLITS:
        pictures = found[split]
        per_shard = _per_shard(pictures, wish, shard_bytes)
        for number, start in enumerate(range(0, len(pictures), per_shard)):
            some = pictures[start : start + per_shard]
            yield Work(
                name=f"{split}-{number:05d}",
                split=split,
                wish=wish,
                pictures=tuple((label[each.class_name], each) for each in some),
                to=to,
                state=state,
            )


def _per_shard(pictures: Sequence[FoundPicture], wish: Wish, shard_bytes: int) -> int:
    if wish.form == PACKED:
        pixels = wish.size * wish.size * 4 / 3  # of a picture of 4 to 3
        each = pixels * (3 if wish.encoding == RAW else _BYTES_PER_PIXEL)
    else:
        each = sum(one.size for one in pictures) / len(pictures)
    return max(1, int(shard_bytes / max(each, 1)))


def _run(works: Sequence[Work], processes: int) -> dict[str, WorkResult]:
    """The parts by their names; prints how far it is, ten times."""
    done, tenths, total = 0, 0, sum(len(each.pictures) for each in works)
    parts: dict[str, WorkResult] = {}
    say(f"packing {total:,} pictures")
    executor = ProcessPoolExecutor(
        min(processes, len(works)),
        # A fork would inherit the caller's threads.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=workers.begin,
    )
    with executor:
        try:
            futures = _submitted(executor, works)
            for future in as_completed(futures):
                work = futures[future]
                parts[work.name] = future.result()
                done += len(work.pictures)
                if 10 * done // total > tenths:
                    tenths = 10 * done // total
                    say(f"packing: {tenths}0%")
        except (OSError, InputError, BrokenProcessPool) as error:
            killed = isinstance(error, BrokenProcessPool)
            raise InputError(
                f"the preparation broke off: {str(error).rstrip('.')}. Give the command again, it "
                f"continues{'; with fewer --processes if memory is short' if killed else ''}"
            ) from None
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
    return parts


def _submitted(
    executor: ProcessPoolExecutor, works: Sequence[Work]
) -> dict[Future[WorkResult], Work]:
    """Start the processes, with Ctrl-C blocked: it is for their parent, also while they start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {executor.submit(_make, each): each for each in works}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write_index(
    works: Sequence[Work],
    parts: dict[str, WorkResult],
    classes: tuple[str, ...],
    to: Destination,
    wish: Wish,
) -> Index:
    lines: dict[str, list[str]] = {split: [] for split in SPLITS}
    files: dict[str, StoredFile] = {}
    for work in works:
        part = parts[work.name]
        lines[work.split] += part.lines
        files[f"{work.name}.tar"] = StoredFile(size=part.size, sha256=part.sha256)
    for split in SPLITS:
        content = "".join(f"{line}\n" for line in lines[split]).encode()
        to.write(table(split), content)
        digest = hashlib.sha256(content).hexdigest()
        files[table(split)] = StoredFile(size=len(content), sha256=digest)
    index = Index(
        form=wish.form,
        classes=classes,
        counts={split: len(lines[split]) for split in SPLITS},
        fingerprint=fingerprint({split: map(Entry.from_line, lines[split]) for split in SPLITS}),
        files=files,
        size=wish.shrinks_to,
        encoding=wish.encoding,
        damaged=tuple(each for work in works for each in parts[work.name].damaged),
        made_by=works[0].state,
    )
    to.write(INDEX_FILE, index.to_json().encode())
    return index


# --- in each process ------------------------------------------------------------------------------
def _make(work: Work) -> WorkResult:
    """Read, check and shrink the pictures of one piece and write them, unless that was done before.

    The same pictures give the same bytes each time.

    Raises:
        OSError: the source fails.
        InputError: the destination fails.
    """
    note = f"{work.state}/{work.name}.json"
    if (before := work.to.read(note)) is not None:
        return WorkResult(**json.loads(before))
    damaged: list[str] = []
    lines: list[str] = []
    shard = io.BytesIO()
    for entry, content in _pictures(work, damaged):
        shard.write(_header(entry.name, len(content)))
        lines.append(replace(entry, offset=shard.tell()).to_line())
        shard.write(content)
        shard.write(bytes(-len(content) % tarfile.BLOCKSIZE))
    shard.write(bytes(2 * tarfile.BLOCKSIZE))
    content = shard.getvalue()
    work.to.write(f"{work.name}.tar", content)
    part = WorkResult(
        lines=lines,
        damaged=damaged,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    work.to.write(note, json.dumps(asdict(part)).encode())
    return part


def _pictures(work: Work, damaged: list[str]) -> Iterator[tuple[Entry, bytes]]:
    """The bytes to store of each picture that is whole; the others are added to ``damaged``."""
    from training.data.pictures.picture import DamagedPictureError, fitted

    for label, found in work.pictures:
        name = f"{found.class_name}/{found.name}"
        try:
            content = layout.read(found)
            # Decoded as a whole in each form: what is damaged is found here, not while training.
            image = fitted(content, size=work.wish.shrinks_to)
        except DamagedPictureError as error:
            damaged.append(f"{work.split}/{name}: {error}")
            continue
        if work.wish.form == PACKED:
            if work.wish.encoding == RAW:
                content = image.tobytes()
            else:
                file = io.BytesIO()
                image.save(file, "JPEG", quality=_QUALITY)
                content = file.getvalue()
        entry = Entry(
            label=label,
            name=name,
            file=f"{work.name}.tar",
            size=len(content),
            height=image.height,
            width=image.width,
        )
        yield entry, content


def _header(name: str, size: int) -> bytes:
    """Header of a member of a tar archive. It has neither owner nor time, so that equal members
    have equal headers."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8")
